"""Where text comes from: standard library, files, folders, Hugging Face datasets; document by document."""

from __future__ import annotations

import difflib
import enum
import gzip
import hashlib
import importlib
import json
import platform
import re
import sysconfig
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, Any, cast

from shoal.data.format import is_prepared
from shoal.job import Data
from shoal.quiet import quiet_libraries

STDLIB_LEFT_OUT = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
OBJECT_SPEC = re.compile(r"(.*\.py|[A-Za-z_]\w*(\.\w+)*):[A-Za-z_]\w*(\.\w+)*")
HF = "hf:"
PROBE_BYTES = 1 << 16


class SourceKind(enum.Enum):
    """What `data.source` names."""

    STDLIB = "the running Python's standard library"
    FILES = "files and folders of text"
    HUGGING_FACE = "a Hugging Face dataset"
    PREPARED = "a prepared folder of token shards"
    SYNTHETIC = "synthetic tokens"
    USER = "a dataset of the user's own"

    @property
    def is_text(self) -> bool:
        """Whether it has to be prepared (made into token shards) before it can be read."""
        return self in (SourceKind.STDLIB, SourceKind.FILES, SourceKind.HUGGING_FACE)


def source_kind(source: str | list[str]) -> SourceKind:
    """What a source names. A path that exists is never taken for an import path.

    Example:
        >>> source_kind("my_package.data:images")
        <SourceKind.USER: "a dataset of the user's own">
    """
    if isinstance(source, list):
        return source_kind(source[0]) if len(source) == 1 else SourceKind.FILES
    if source in ("stdlib", "synthetic"):
        return SourceKind[source.upper()]
    if source.startswith(HF):
        return SourceKind.HUGGING_FACE
    if OBJECT_SPEC.fullmatch(source) and not Path(source).exists():
        return SourceKind.USER
    return SourceKind.PREPARED if is_prepared(Path(source)) else SourceKind.FILES


def source_name(source: str | list[str]) -> str:
    """The source in one line."""
    return source if isinstance(source, str) else ", ".join(source)


def documents(data: Data, skipped: Counter[str]) -> Iterator[str]:
    """The texts of a source, in a fixed order, none empty; what is left out is counted in `skipped`.

    A file is a document; a line of a .jsonl file is one, and a row of a Hugging Face dataset. Files that are
    not UTF-8 count as "undecodable", texts without a character as "empty".

    Raises:
        ValueError: a path that does not exist, a broken .jsonl line or .gz file, no such text field.
    """
    if source_kind(data.source) is SourceKind.HUGGING_FACE:
        found = _hugging_face(data)
    else:
        found = (text for path in text_files(data.source) for text in _read(path, data.text_key))
    for text in found:
        if text is None:
            skipped["undecodable"] += 1
        elif not text:
            skipped["empty"] += 1
        else:
            yield text


def text_files(source: str | list[str]) -> list[Path]:
    """The files of a source, folders walked in sorted order.

    Hidden names and prepared folders are left out.

    Raises:
        ValueError: a path that does not exist; names the nearest that does.
    """
    if source == "stdlib":
        root = Path(sysconfig.get_path("stdlib"))
        return [path for path in _walk(root, STDLIB_LEFT_OUT) if path.suffix == ".py"]
    found: dict[Path, None] = {}
    for name in [source] if isinstance(source, str) else source:
        path = Path(name).expanduser()
        if not path.exists():
            raise ValueError(_missing(path))
        found.update(dict.fromkeys(_walk(path, {"__pycache__"}) if path.is_dir() else [path]))
    return list(found)


def source_fingerprint(data: Data) -> str:
    """A short name for the present content of a source: of each file path, size and time of last change.

    For "stdlib", the Python version and each file's name and size. For Hugging Face, name, split and options.
    """
    if source_kind(data.source) is SourceKind.HUGGING_FACE:
        lines: Iterable[str] = [
            source_name(data.source),
            data.split,
            json.dumps(data.options, sort_keys=True, default=str),
        ]
    elif data.source == "stdlib":
        root = Path(sysconfig.get_path("stdlib"))
        files = text_files(data.source)
        lines = [
            platform.python_version(),
            *(f"{path.relative_to(root)} {path.stat().st_size}" for path in files),
        ]
    else:
        lines = (_file_line(path) for path in text_files(data.source))
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def import_extra(module: str, needed_by: str, extra: str = "hf") -> Any:
    """A library of one of Shoal's extras.

    Raises:
        ValueError: it is not installed; names the command that installs it.
    """
    quiet_libraries()
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ValueError(f"{needed_by} needs the {module} library: pip install 'shoal[{extra}]'") from error


def _file_line(path: Path) -> str:
    stat = path.stat()
    return f"{path.resolve()} {stat.st_size} {stat.st_mtime_ns}"


def _walk(folder: Path, left_out: set[str]) -> Iterator[Path]:
    for path in sorted(folder.iterdir(), key=lambda path: path.name):
        if path.name.startswith(".") or path.name in left_out or _encloses(path, folder):
            continue
        if path.is_dir() and not is_prepared(path):
            yield from _walk(path, left_out)
        elif path.is_file():
            yield path


def _encloses(path: Path, folder: Path) -> bool:
    """Whether a path is a symbolic link to a folder that it is in."""
    return path.is_symlink() and folder.resolve().is_relative_to(path.resolve())


def _missing(path: Path) -> str:
    parent = next(folder for folder in path.absolute().parents if folder.exists())
    wanted = path.absolute().relative_to(parent).parts[0]
    names = [entry.name for entry in parent.iterdir()] if parent.is_dir() else []
    nearest = [parent / name for name in difflib.get_close_matches(wanted, names, n=1)] or [parent]
    return (
        f"data.source: {path} does not exist; the nearest that does is {nearest[0]}. A source is a file, a "
        "folder, "
        '"stdlib", "synthetic", "hf:<name>" or "package.module:dataset".'
    )


def _open(path: Path) -> IO[bytes]:
    return cast("IO[bytes]", gzip.open(path)) if path.suffix == ".gz" else path.open("rb")


def _read(path: Path, text_key: str) -> Iterator[str | None]:
    """The documents of a file, None for one that is not text."""
    lines = Path(path.stem if path.suffix == ".gz" else path.name).suffix == ".jsonl"
    try:
        with _open(path) as file:
            if lines:
                for number, line in enumerate(file, start=1):
                    if line.strip():
                        yield _json_text(line, text_key, f"{path}, line {number}")
            else:
                start = file.read(PROBE_BYTES)
                yield None if b"\0" in start else _decode(start + file.read())
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise ValueError(
            f"{path} is a broken or truncated .gz file ({error}). Replace or remove it."
        ) from error


def _decode(raw: bytes) -> str | None:
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError:
        return None


def _json_text(line: bytes, text_key: str, where: str) -> str | None:
    text = _decode(line)
    if text is None:
        return None
    try:
        row = json.loads(text)
    except ValueError as error:
        raise ValueError(
            f"{where} is not JSON ({error}). Each line of a .jsonl file is one JSON object."
        ) from None
    return _field(row, text_key, where)


def _field(row: Any, text_key: str, where: str) -> str | None:
    """The text of a row; None if it holds half a surrogate pair, which no encoding can write."""
    if not isinstance(row, dict) or not isinstance(row.get(text_key), str):
        names = ", ".join(map(repr, row)) if isinstance(row, dict) else f"a {type(row).__name__}"
        raise ValueError(f"{where} has no text in field {text_key!r}; it has {names}. Set data.text_key.")
    text = row[text_key]
    return None if any("\ud800" <= char <= "\udfff" for char in text) else text


def _hugging_face(data: Data) -> Iterator[str | None]:
    library = import_extra("datasets", f"data.source {source_name(data.source)!r}")
    name = source_name(data.source).removeprefix(HF)
    for number, row in enumerate(library.load_dataset(name, split=data.split, **data.options)):
        yield _field(row, data.text_key, f"row {number} of {name} ({data.split})")
