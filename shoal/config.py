"""Files and key=value words into `Settings`: everything `shoal train` needs, checked before any process starts.

Every mistake is reported as one `ConfigError` that names the key, the value and what would work.
"""

from __future__ import annotations

import difflib
import json
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import tomli_w
from pydantic import BaseModel, Field, ValidationError

from shoal.job import Data, Job, Model, Optimizer, Section, Train
from shoal.plan import AXES, Plan
from shoal.run import CheckpointPolicy, RunPolicy


class ConfigError(ValueError):
    """A job file or override that cannot be used; the message says what, where and what would work."""


class Settings(Section):
    """A job file: the job's four tables, and how and where to run it."""

    model: Model = Model()
    data: Data = Data()
    train: Train = Train()
    optimizer: Optimizer = Optimizer()
    plan: Plan | None = Field(None, description="left out, or the word auto: chosen for the machine")
    cluster: str = Field(
        "auto", description='"auto": this machine; or such as "2 cpu", "8 h100", "4x8 h100 with 1000 GiB"'
    )
    checkpoint: CheckpointPolicy = CheckpointPolicy()
    run: RunPolicy = RunPolicy()

    @property
    def job(self) -> Job:
        """The part that decides the numbers."""
        return Job(model=self.model, data=self.data, train=self.train, optimizer=self.optimizer)

    def with_plan(self, plan: Plan) -> Settings:
        return self.model_copy(update={"plan": plan})

    def to_toml(self) -> str:
        """The settings as a job file, complete but for values that are left to be chosen."""
        table = self.model_dump(exclude_none=True)
        if (
            self.plan is not None and not self.plan.says_degrees
        ):  # degrees that are written would count as said
            table["plan"] = {
                key: table["plan"][key] for key in self.plan.model_fields_set & set(table["plan"])
            }
        return tomli_w.dumps(table)

    @classmethod
    def from_toml(cls, text: str) -> Settings:
        return parse(tomllib.loads(text), where="job")


OF_DEGREES = (
    *AXES,
    *("expert", "zero", "schedule", "virtual_stages", "context_by", "shares", "compile", "cuda_graphs"),
)
"""keys of a plan that were said or chosen for its degrees"""


def load(path: str | Path, overrides: Iterable[str] = ()) -> Settings:
    """Read a job file and apply `key=value` words to it.

    A run directory stands for the job file in it, to go on there: `run.dir` is that directory, wherever it was moved, and
    `run.resume` is true. If a word says a degree of its plan, the others are not kept.

    Raises:
        ConfigError: no such file, broken TOML, unknown key, wrong type, impossible value.
    """
    path = Path(path)
    folder = path if path.is_dir() else None
    path = path / "job.toml" if folder else path
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"no job file {str(path)!r}{_nearest_file(path)}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"job file {str(path)!r} cannot be read: {error}") from error
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path}: not TOML: {error}") from error
    if folder:
        table["run"] = {**table.get("run", {}), "dir": str(folder), "resume": True}
    words = tuple(overrides)
    if folder and isinstance(table.get("plan"), dict) and any(map(_is_degree, words)):
        table["plan"] = {key: value for key, value in table["plan"].items() if key not in OF_DEGREES}
    return parse(apply_overrides(table, words), where=str(path), words=words, before=table)


def _is_degree(word: str) -> bool:
    section, _, key = word.partition("=")[0].strip().partition(".")
    return section == "plan" and key in (*AXES, "expert")


def apply_overrides(table: dict[str, Any], words: Iterable[str]) -> dict[str, Any]:
    """A copy of `table` with each `section.key=value` set; values are TOML, bare words are strings.

    Example:
        >>> apply_overrides({}, ["plan.shard=4", "run.dir=/data/r1"])
        {'plan': {'shard': 4}, 'run': {'dir': '/data/r1'}}
    """
    table = {key: dict(value) if isinstance(value, dict) else value for key, value in table.items()}
    for word in words:
        key, equals, text = word.partition("=")
        path = key.strip().split(".")
        if not equals or not all(path):
            raise ConfigError(f"{word!r} is not an override: expected key=value, such as plan.shard=4")
        _set(table, path, _value(text), word)
    return table


def _set(table: dict[str, Any], path: list[str], value: Any, word: str) -> None:
    *parents, last = path
    for parent in parents:
        inner = table.setdefault(parent, {})
        if inner == "auto":
            inner = table[parent] = {}
        if not isinstance(inner, dict):
            raise ConfigError(f"{word!r}: {parent} is a value, not a table")
        table[parent] = inner = dict(inner)
        table = inner
    table[last] = value


def _value(text: str) -> Any:
    try:
        read = tomllib.loads(f"value = {text}")
    except tomllib.TOMLDecodeError:
        return text
    return read["value"] if len(read) == 1 else text


def parse(
    table: dict[str, Any], where: str, *, words: Sequence[str] = (), before: Mapping[str, Any] | None = None
) -> Settings:
    """Check a table and make it `Settings`.

    Args:
        where: the file that it is from.
        words: those that were applied to it, and what it was `before`: mistakes name the word that makes them.

    Raises:
        ConfigError: listing every mistake, each with its key, its value and the nearest right key.
    """
    if table.get("plan") == "auto":
        table = {key: value for key, value in table.items() if key != "plan"}
    try:
        settings = Settings.model_validate(table)
        _ = settings.job  # checks across its tables
    except ValidationError as error:
        mistakes = _explain_all(error, table)
        told = [_with_origin(mistake, where, words, before or {}) for mistake in mistakes]
        if {origin for origin, _ in told} == {where}:
            raise ConfigError(f"{where}: " + "\n  ".join(text for _, text in told)) from None
        raise ConfigError("\n  ".join(f"{origin}: {text}" for origin, text in told)) from None
    return _with_own_tokenizer(settings)


def _with_own_tokenizer(settings: Settings) -> Settings:
    """With the tokenizer of a model whose weights are read, unless another is said: they know its tokens alone."""
    model, data = settings.model, settings.data
    begins = model.family.startswith("hf:") and model.options.get("weights") is not False
    if not begins or "tokenizer" in data.model_fields_set or data.source == "synthetic":
        return settings
    folder = Path(model.family.removeprefix("hf:")).expanduser()
    if folder.is_dir() and not ((folder / "tokenizer.json").is_file() and any(folder.glob("*.safetensors"))):
        return settings
    return settings.model_copy(update={"data": data.model_copy(update={"tokenizer": model.family})})


_EXPECTED = {
    "model_type": "expected a table",
    "dict_type": "expected a table",
    "string_type": "expected text, in quotes",
    "list_type": "expected a list",
    "tuple_type": "expected a list",
    "missing": "too few values",
    "too_long": "too many values",
    "int_type": "expected a whole number",
    "int_from_float": "expected a whole number",
    "float_type": "expected a number",
    "bool_type": "expected true or false",
}


class _Mistake(NamedTuple):
    """What is wrong with the value of a key, or with values together that are under it."""

    key: str
    text: str
    shown: str = ""
    """the value, where it is that of one key alone"""


def _explain_all(error: ValidationError, table: dict[str, Any]) -> list[_Mistake]:
    """One for each key that is wrong."""
    found: list[_Mistake] = []
    wrong: dict[str, list[str]] = {}
    for item in error.errors():
        key = ".".join(str(part) for part in item["loc"])
        message = item["msg"].removeprefix("Value error, ")
        if item["type"] == "extra_forbidden":
            found.append(_Mistake(key, f"unknown key {key!r}{_nearest_key(item['loc'])}"))
        elif item["type"] == "value_error":
            found.append(_Mistake(key, f"{key}: {message}" if key else message))
        else:
            expected = _EXPECTED.get(
                item["type"], message.replace("Input should", "must").replace("String should", "must")
            )
            # of a list, or of a value that may be one, the whole is shown
            wrong.setdefault(".".join(str(part) for part in item["loc"][:2]), []).append(expected)
    for key, expected in wrong.items():
        either = " or ".join(dict.fromkeys([*expected, *(['the word "auto"'] if key == "plan" else [])]))
        found.append(_Mistake(key, either, _shown(table, key.split("."))))
    return found


def _with_origin(
    mistake: _Mistake, where: str, words: Sequence[str], before: Mapping[str, Any]
) -> tuple[str, str]:
    """Where a mistake comes from, the file or words, and what is told of it."""
    key, text = mistake.key, mistake.text
    makers = [word.strip() for word in words if _concerns(word, key)]
    whole = f"{key} = {mistake.shown}: {text}" if mistake.shown else text
    if not makers:
        return where, whole
    last = makers[-1]
    if last.partition("=")[0].strip() != key:
        return f"{where} with {' '.join(makers)}", whole
    if "text, in quotes" in text:  # a shell takes away the first pair
        text += f""", such as {key}='"{last.partition("=")[2]}"'"""
    if (earlier := _earlier(before, key.split("."))) is not None:
        text += f"; {where} has {key} = {earlier}"
    return f"the word {last}", text


def _concerns(word: str, key: str) -> bool:
    """Whether a word sets a key, something under it, or the table that it is in."""
    said = word.partition("=")[0].strip()
    return not key or f"{said}.".startswith(f"{key}.") or key.startswith(f"{said}.")


def _earlier(table: Mapping[str, Any], path: list[str]) -> str | None:
    """The value that a word replaced, if there was one."""
    try:
        return _shown(table, path)
    except (KeyError, TypeError):
        return None


def _shown(table: Any, path: list[str]) -> str:
    """A value of a table, much as TOML writes it."""
    for part in path:
        table = table[part]
    return (
        json.dumps(table, default=str)
        if isinstance(table, str | bool | int | float | list | dict)
        else str(table)
    )


def keys() -> dict[str, list[str]]:
    """The keys of each table of a job file, and those outside tables under ''."""
    found: dict[str, list[str]] = {"": []}
    for name, field in Settings.model_fields.items():
        section = _section(field.annotation)
        if section is None:
            found[""].append(name)
        else:
            found[name] = list(section.model_fields)
    return found


def _section(annotation: Any) -> type[BaseModel] | None:
    for candidate in (annotation, *getattr(annotation, "__args__", ())):
        if isinstance(candidate, type) and issubclass(candidate, BaseModel):
            return candidate
    return None


def _nearest_key(loc: tuple[Any, ...]) -> str:
    *parents, last = (str(part) for part in loc)
    known = keys()
    everywhere = [f"{table}.{key}" if table else key for table, names in known.items() for key in names]
    table = ".".join(parents)
    near = difflib.get_close_matches(
        last, known.get(table, list(known)) if parents else [*known, *known[""]], 1, 0.6
    )
    if near:
        return f"; did you mean {'.'.join([*parents, near[0]])!r}?"
    elsewhere = [full for full in everywhere if full.rsplit(".", 1)[-1] == last]
    if elsewhere:
        return f"; did you mean {elsewhere[0]!r}?"
    options = known.get(table) if parents else [name for name in [*known, *known[""]] if name]
    return f"; known here: {', '.join(options)}" if options else ""


def _nearest_file(path: Path) -> str:
    beside = [other.name for other in path.parent.glob("*.toml")] if path.parent.is_dir() else []
    near = difflib.get_close_matches(path.name, [name for name in beside if name != "pyproject.toml"], 1, 0.5)
    return f"; did you mean {str(path.parent / near[0])!r}?" if near else ""


def json_schema() -> dict[str, Any]:
    """JSON Schema of a job file, for editors that complete and check TOML."""
    schema = Settings.model_json_schema()
    schema["title"] = "Shoal job file"
    schema["properties"]["plan"] = {"anyOf": [{"const": "auto"}, {"$ref": "#/$defs/Plan"}]}
    return schema
