"""Tokenizers: bytes, a byte-level BPE trained on the source, or one from Hugging Face; all saved alike."""

from __future__ import annotations

import json
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from shoal.data.text import HF, import_extra

END_OF_TEXT = "<|endoftext|>"
KNOWN_ENDS = (END_OF_TEXT, "<|end_of_text|>", "</s>", "<eos>", "<|im_end|>", "[SEP]")
TEXT_SUFFIX = ".json"


class TokenizerInfo(NamedTuple):
    """A tokenizer: its `tokenizer.json`, its vocabulary size, the id that ends a document, its name."""

    json: str
    vocab: int
    end_of_text: int
    description: str


class Encoder(Protocol):
    """Texts to token ids, one int64 array a text, without an end-of-text token."""

    def __call__(self, texts: list[str]) -> list[npt.NDArray[np.int64]]: ...


def bytes_tokenizer() -> TokenizerInfo:
    """Token id = byte value, 0..255, and 256 for end of text."""
    vocab = {char: byte for byte, char in enumerate(byte_characters())}
    tokenizer = _byte_level(models.BPE(vocab=vocab, merges=[]))
    tokenizer.add_special_tokens([END_OF_TEXT])
    return TokenizerInfo(tokenizer.to_str(), 257, 256, "bytes")


def train_bpe(texts: Iterable[str], vocab: int) -> TokenizerInfo:
    """Train a byte-level BPE of at most `vocab` tokens, END_OF_TEXT (id 0) included.

    The same texts give the same tokenizer. Little text gives fewer tokens: `vocab` of the result is exact.
    """
    tokenizer = _byte_level(models.BPE())
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return TokenizerInfo(tokenizer.to_str(), tokenizer.get_vocab_size(), 0, "bpe")


def hugging_face_tokenizer(spec: str) -> TokenizerInfo:
    """The tokenizer of "hf:<path or name>": a tokenizer.json, a folder that holds one, or a name on the hub.

    Only a name, or a folder without a tokenizer.json, needs the transformers library.

    Raises:
        ValueError: transformers is missing, the tokenizer has no fast form, or no token that ends a text.
    """
    name = spec.removeprefix(HF)
    path = Path(name).expanduser()
    file = path / "tokenizer.json" if path.is_dir() else path
    if file.suffix == TEXT_SUFFIX and file.is_file():
        tokenizer = Tokenizer.from_file(str(file))
        end = _configured_end(file.parent / "tokenizer_config.json") or _known_end(tokenizer)
    else:
        tokenizer, end = _from_transformers(name)
    end_id = None if end is None else tokenizer.token_to_id(end)
    if end_id is None:
        raise ValueError(
            f"data.tokenizer {spec!r} has no end-of-text token: set eos_token in its tokenizer_config.json, "
            f"or name one of {', '.join(KNOWN_ENDS)} in it. Documents are told apart by it."
        )
    vocab = max(tokenizer.get_vocab(with_added_tokens=True).values()) + 1
    return TokenizerInfo(tokenizer.to_str(), vocab, end_id, spec)


@lru_cache(maxsize=1)
def load_encoder(file: str, description: str) -> Encoder:
    """The encoder of a saved tokenizer.json. Special tokens that occur in a text are read as plain text."""
    if description == "bytes":
        return _encode_bytes
    tokenizer = Tokenizer.from_file(file)
    tokenizer.encode_special_tokens = True
    tokenizer.no_truncation()
    tokenizer.no_padding()

    def encode(texts: list[str]) -> list[npt.NDArray[np.int64]]:
        found = tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        return [np.array(encoding.ids, dtype=np.int64) for encoding in found]

    return encode


def byte_characters() -> list[str]:
    """The printable character by which byte-level tokenizers write each byte, by byte value.

    Source: `bytes_to_unicode` of GPT-2's encoder.py.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(256, 512))
    return [chr(byte if byte in printable else next(others)) for byte in range(256)]


def _byte_level(model: models.Model) -> Tokenizer:
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _encode_bytes(texts: list[str]) -> list[npt.NDArray[np.int64]]:
    return [np.frombuffer(text.encode(), dtype=np.uint8).astype(np.int64) for text in texts]


def _configured_end(path: Path) -> str | None:
    if not path.is_file():
        return None
    end: Any = json.loads(path.read_text(encoding="utf-8")).get("eos_token")
    return end.get("content") if isinstance(end, dict) else end


def _known_end(tokenizer: Tokenizer) -> str | None:
    return next((end for end in KNOWN_ENDS if tokenizer.token_to_id(end) is not None), None)


def _from_transformers(name: str) -> tuple[Tokenizer, str | None]:
    library = import_extra("transformers", f"data.tokenizer 'hf:{name}' (no tokenizer.json here)")
    found = library.AutoTokenizer.from_pretrained(name)
    if not found.is_fast:
        raise ValueError(f"data.tokenizer 'hf:{name}' has no fast form (tokenizer.json); choose another")
    return found.backend_tokenizer, found.eos_token
