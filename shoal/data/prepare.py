"""Text to token shards: survey the source, make the tokenizer, encode on all cores, write it whole."""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import re
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from shoal.data.format import (
    FORMAT,
    INDEX_FILE,
    TOKENIZER_FILE,
    VERSION,
    PreparedIndex,
    SplitInfo,
    file_sha256,
    read_index,
    token_dtype,
    write_index,
)
from shoal.data.text import HF, documents, source_fingerprint, source_kind, source_name
from shoal.data.tokenizer import (
    TokenizerInfo,
    bytes_tokenizer,
    hugging_face_tokenizer,
    load_encoder,
    train_bpe,
)
from shoal.data.writer import SplitWriter, folder_lock, whole_folder
from shoal.job import Data

Progress = Callable[[str, int, int | None], None]
"""Called with (stage, done, total or None while unknown); stages are "survey", "tokenizer", "encode"."""

# Beyond 64 M characters more text hardly changes a vocabulary; 12 M take 4 s to train on with 2 cores.
BPE_CHARACTERS = 1 << 26
BPE_PIECE_CHARACTERS = 1 << 14
CHUNK_CHARACTERS = 1 << 19
# A worker process takes about 0.5 s to start, as long as one core needs for 2 M characters.
CHARACTERS_WORTH_WORKERS = 1 << 22
SURVEY_REPORT_DOCUMENTS = 500
HASH_RANGE = 1 << 64


class Survey(NamedTuple):
    """What the first reading of a source found; lowest and highest are the ordinals of the extreme hashes."""

    documents: int
    characters: int
    lowest: int
    highest: int
    skipped: Counter[str]


class Encoded(NamedTuple):
    """A chunk of documents: tokens (sum of lengths,), lengths and hashes (documents,)."""

    tokens: npt.NDArray[Any]
    lengths: npt.NDArray[np.int64]
    hashes: list[int]


def prepare(
    data: Data,
    seed: int,
    folder: Path,
    *,
    workers: int | None = None,
    progress: Progress | None = None,
    shard_tokens: int = 1 << 27,
    deadline_s: float = 3600.0,
) -> PreparedIndex:
    """Make token shards of `data.source` in `folder`; if they are there already, only check them.

    The result depends on the data settings, the seed and the texts, not on `workers` (default: one a core).
    Processes that prepare one folder at once wait for the first, at most `deadline_s` seconds, and use its
    result. A folder appears when it is complete; what a killed process left is cleared by the next.

    Raises:
        ValueError: a source that is missing, empty, broken or needs no preparing; a folder that holds
            something else, or tokens made from other settings. Each says what to do.
        TimeoutError: another process is still preparing the folder.

    Example:
        >>> data = Data(source="notes", tokenizer="bytes")
        >>> prepare(data, 0, Path("cache") / prepared_key(data)).vocab
        257
    """
    key = prepared_key(data, seed)
    if (ready := _ready(folder, key)) is not None:
        return ready
    with folder_lock(folder, deadline_s):
        if (ready := _ready(folder, key)) is not None:
            return ready
        with whole_folder(folder) as aside:
            _write(data, seed, key, aside, workers, progress or _silent, shard_tokens)
    return read_index(folder)


def prepared_key(data: Data, seed: int = 0) -> str:
    """A name for what `prepare` would make, for a cache: `<cache>/<key>`.

    It changes with the settings that matter (not with seq_len), the seed (which picks the held-out
    documents), the Python version for "stdlib", and the path, size or time of change of a source file.

    Raises:
        ValueError: the source is missing, or is not text.
    """
    kind = source_kind(data.source)
    if not kind.is_text:
        raise ValueError(
            f"data.source {data.source!r} is {kind.value}, which is read as it is; do not prepare it"
        )
    settings = {
        "version": VERSION,
        "source": source_fingerprint(data),
        "text_key": data.text_key,
        "tokenizer": [data.tokenizer, *_tokenizer_state(data)],
        "eval_fraction": data.eval_fraction,
        "seed": seed,
    }
    digest = hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()
    name = re.sub(r"[^A-Za-z0-9]+", "-", source_name(data.source)).strip("-")[-24:]
    return f"{name}-{digest[:16]}"


def held_out(ordinal: int, digest: int, survey: Survey, fraction: float) -> bool:
    """Whether a document is for evaluation: by its own hash, so that neither order nor neighbours matter.

    Of two or more documents at least one is held out and at least one is not (if `fraction` is above 0).
    """
    if fraction == 0 or survey.documents < 2 or ordinal == survey.highest:
        return False
    return ordinal == survey.lowest or digest < fraction * HASH_RANGE


def document_hash(text: str, key: str) -> int:
    """64 bits of a text, other ones for each key."""
    digest = hashlib.blake2b(text.encode(), key=key.encode()[:64], digest_size=8).digest()
    return int.from_bytes(digest, "little")


def encode_chunk(tokenizer_file: str, info: TokenizerInfo, hash_key: str, texts: list[str]) -> Encoded:
    """Tokens of some documents, each followed by end of text. Runs in worker processes."""
    encode = load_encoder(tokenizer_file, info.description)
    end = np.array([info.end_of_text])
    found = [np.concatenate((tokens, end)) for tokens in encode(texts)]
    return Encoded(
        np.concatenate(found).astype(token_dtype(info.vocab)),
        np.array([len(tokens) for tokens in found]),
        [document_hash(text, hash_key) for text in texts],
    )


def _ready(folder: Path, key: str) -> PreparedIndex | None:
    if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
        return None
    if not (folder / INDEX_FILE).exists():
        raise ValueError(f"{folder} is in the way: it holds no prepared tokens. Choose another folder.")
    index = read_index(folder)
    if index.key != key:
        raise ValueError(
            f"{folder} was prepared from other settings or other files: source {index.source}, tokenizer "
            f"{index.tokenizer}, seed {index.seed}, eval_fraction {index.eval_fraction}, key {index.key}; "
            f"now the key is {key}. Delete the folder to prepare it again, or choose another."
        )
    return index


def _write(
    data: Data,
    seed: int,
    key: str,
    folder: Path,
    workers: int | None,
    progress: Progress,
    shard_tokens: int,
) -> None:
    survey = _survey(data, seed, progress)
    progress("tokenizer", 0, 1)
    info = _tokenizer(data, survey)
    tokenizer_file = folder / TOKENIZER_FILE
    tokenizer_file.write_text(info.json, encoding="utf-8")
    progress("tokenizer", 1, 1)
    splits = _encode(data, seed, survey, info, folder, workers, progress, shard_tokens)
    index = PreparedIndex(
        format=FORMAT,
        version=VERSION,
        key=key,
        dtype=token_dtype(info.vocab),
        vocab=info.vocab,
        end_of_text=info.end_of_text,
        tokenizer=info.description,
        tokenizer_sha256=file_sha256(tokenizer_file),
        source=source_name(data.source),
        seed=seed,
        eval_fraction=data.eval_fraction,
        skipped=dict(survey.skipped),
        splits=splits,
    )
    write_index(folder, index)


def _survey(data: Data, seed: int, progress: Progress) -> Survey:
    skipped: Counter[str] = Counter()
    count = characters = 0
    lowest, highest = (HASH_RANGE, 0), (-1, 0)
    for text in documents(data, skipped):
        mark = (document_hash(text, str(seed)), count)
        lowest, highest = min(lowest, mark), max(highest, mark)
        count, characters = count + 1, characters + len(text)
        if count % SURVEY_REPORT_DOCUMENTS == 0:
            progress("survey", count, None)
    if count == 0:
        raise ValueError(
            f"data.source {source_name(data.source)!r} holds no text: {skipped['undecodable']} files or rows "
            f"are not UTF-8 text, {skipped['empty']} are empty. Name files, or folders of files, that hold "
            "text."
        )
    progress("survey", count, count)
    return Survey(count, characters, lowest[1], highest[1], skipped)


def _tokenizer(data: Data, survey: Survey) -> TokenizerInfo:
    if data.tokenizer == "bytes":
        return bytes_tokenizer()
    if data.tokenizer == "bpe":
        return train_bpe(training_texts(data, min(1.0, BPE_CHARACTERS / survey.characters)), data.vocab)
    return hugging_face_tokenizer(_checked_tokenizer(data.tokenizer))


def training_texts(data: Data, fraction: float) -> Iterator[str]:
    """The texts of a source, or about `fraction` of their pieces, chosen by hash."""
    for text in documents(data, Counter()):
        if fraction == 1:
            yield text
            continue
        for start in range(0, len(text), BPE_PIECE_CHARACTERS):
            piece = text[start : start + BPE_PIECE_CHARACTERS]
            if document_hash(piece, "tokenizer") < fraction * HASH_RANGE:
                yield piece


def _tokenizer_state(data: Data) -> list[Any]:
    if data.tokenizer in ("bytes", "bpe"):
        return [data.vocab] if data.tokenizer == "bpe" else []
    path = Path(_checked_tokenizer(data.tokenizer).removeprefix(HF)).expanduser()
    files = [path, path / "tokenizer.json", path / "tokenizer_config.json"]
    return [[file.stat().st_size, file.stat().st_mtime_ns] for file in files if file.is_file()]


def _checked_tokenizer(spec: str) -> str:
    if not spec.startswith(HF):
        raise ValueError(f'data.tokenizer is {spec!r}; expected "bytes", "bpe" or "hf:<path or name>"')
    return spec


def _encode(
    data: Data,
    seed: int,
    survey: Survey,
    info: TokenizerInfo,
    folder: Path,
    workers: int | None,
    progress: Progress,
    shard_tokens: int,
) -> dict[str, SplitInfo]:
    dtype = token_dtype(info.vocab)
    writers = {name: SplitWriter(folder, name, dtype, shard_tokens) for name in ("train", "eval")}
    encode = partial(encode_chunk, str(folder / TOKENIZER_FILE), info, str(seed))
    chunks = _chunks(documents(data, Counter()))
    done = 0
    for chunk in _in_order(encode, chunks, _worker_count(workers, survey)):
        texts = np.split(chunk.tokens, np.cumsum(chunk.lengths)[:-1])
        for tokens, digest in zip(texts, chunk.hashes, strict=True):
            split = "eval" if held_out(done, digest, survey, data.eval_fraction) else "train"
            writers[split].add(tokens)
            done += 1
        progress("encode", done, survey.documents)
    if done != survey.documents:
        raise ValueError(
            f"data.source {source_name(data.source)!r} changed while it was read: {survey.documents} "
            f"documents, then {done}. Prepare it again when nothing writes to it."
        )
    return {name: writer.close() for name, writer in writers.items()}


def _chunks(texts: Iterable[str]) -> Iterator[list[str]]:
    chunk: list[str] = []
    characters = 0
    for text in texts:
        chunk.append(text)
        characters += len(text)
        if characters >= CHUNK_CHARACTERS:
            yield chunk
            chunk, characters = [], 0
    if chunk:
        yield chunk


def _worker_count(workers: int | None, survey: Survey) -> int:
    if workers is not None and workers < 1:
        raise ValueError(f"workers is {workers}; expected at least 1")
    if workers is None:
        return len(os.sched_getaffinity(0)) if survey.characters >= CHARACTERS_WORTH_WORKERS else 1
    return workers


def _in_order(
    encode: Callable[[list[str]], Encoded], chunks: Iterable[list[str]], workers: int
) -> Iterator[Encoded]:
    """`map(encode, chunks)` over worker processes, reading at most two chunks a worker ahead."""
    if workers == 1:
        with _one_thread():
            yield from map(encode, chunks)
        return
    context = multiprocessing.get_context("spawn")
    pending: deque[Future[Encoded]] = deque()
    try:
        with _one_thread(), ProcessPoolExecutor(workers, context) as pool:
            for chunk in chunks:
                pending.append(pool.submit(encode, chunk))
                if len(pending) > 2 * workers:
                    yield pending.popleft().result()
            while pending:
                yield pending.popleft().result()
    except BrokenProcessPool as error:
        raise RuntimeError(
            "A worker process ended while it encoded text: it was killed (out of memory?), or the calling "
            "script "
            'starts work when it is imported (put it under `if __name__ == "__main__":`). workers=1 needs '
            "none."
        ) from error


@contextmanager
def _one_thread() -> Generator[None]:
    """Rust threads off, here and in processes started meanwhile: each worker has a core of its own."""
    before = os.environ.get("TOKENIZERS_PARALLELISM")
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    try:
        yield
    finally:
        del os.environ["TOKENIZERS_PARALLELISM"]
        if before is not None:
            os.environ["TOKENIZERS_PARALLELISM"] = before


def _silent(stage: str, done: int, total: int | None) -> None:
    """The progress of a caller who wants none."""
