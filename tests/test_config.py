"""A job file and words become settings, and every mistake is one clear error that says what would work."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from shoal.config import ConfigError, Settings, apply_overrides, json_schema, keys, load, parse
from shoal.plan import Plan

EXAMPLES = sorted((Path(__file__).parents[1] / "examples").glob("*.toml"))


def settings(*words: str, **tables: Any) -> Settings:
    return parse(apply_overrides(tables, words), where="job.toml")


def mistake(*words: str, **tables: Any) -> str:
    """The message for a table with one mistake: one line, from the place where the mistake is."""
    with pytest.raises(ConfigError) as caught:
        settings(*words, **tables)
    text = str(caught.value)
    assert "\n" not in text
    return text.removeprefix("job.toml: ")


# What is read


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_every_example_comes_back_from_its_toml(path: Path) -> None:
    read = load(path)
    assert Settings.from_toml(read.to_toml()) == read


@pytest.mark.parametrize(
    "tables",
    [
        {},
        {"plan": {"replicate": 2, "shard": 4, "zero": 1, "compile": False, "micro_batch": 2}},
        {"model": {"family": "a.b:c", "options": {"deep": {"list": [1, 2.5, "x"]}, "on": True}}},
        {"data": {"source": ["a b.txt", 'quo"te', "back\\slash", "Gruß", "new\nline"]}},
        {"optimizer": {"name": "sgd", "betas": [0.1, 0.2], "lr": 1e-30, "nesterov": True}},
        {"model": {"tied": False, "rope_theta": 5e5}, "run": {"threads": 3, "data": "d"}, "cluster": "2 cpu"},
    ],
)
def test_toml_written_is_toml_read(tables: dict[str, Any]) -> None:
    once = settings(**tables)
    again = Settings.from_toml(once.to_toml())
    assert again == once
    assert again.job == once.job


def test_a_plan_without_degrees_still_has_none_after_a_round_trip() -> None:
    said = settings("plan.micro_batch=2", "plan.recompute=full")
    again = Settings.from_toml(said.to_toml()).plan
    assert again == said.plan
    assert again is not None and not again.says_degrees


@given(st.floats(min_value=0, exclude_min=True, allow_infinity=False), st.integers(0, 2**62))
@hypothesis_settings(max_examples=60, deadline=None, derandomize=True)
def test_numbers_survive_exactly(rate: float, seed: int) -> None:
    once = settings(optimizer={"lr": rate}, train={"seed": seed})
    again = Settings.from_toml(once.to_toml())
    assert (again.optimizer.lr, again.train.seed) == (rate, seed)


@pytest.mark.parametrize(
    ("word", "value"),
    [
        ("train.steps=50", 50),
        ("train.steps=1_000", 1000),
        ("optimizer.lr=3e-4", 3e-4),
        ("optimizer.lr=1", 1.0),
        ("optimizer.betas=[0.8, 0.9]", (0.8, 0.9)),
        ("data.shuffle=false", False),
        ("run.dir=/data/r1", "/data/r1"),
        ("run.dir=../a.b/c-1", "../a.b/c-1"),
        ("run.dir=a=b", "a=b"),
        ("run.dir='12'", "12"),
        ('run.dir="a # b"', "a # b"),
        ("run.dir=runs/a#1", "runs/a#1"),
        ("data.source=examples/digits.py:datasets", "examples/digits.py:datasets"),
        ('data.source=["a.txt", "b"]', ["a.txt", "b"]),
        ("model.options.width=8", {"width": 8}),
        ("model.options={width = 8}", {"width": 8}),
        ("cluster=4x8 h100", "4x8 h100"),
        ("plan.compile=true", True),
        (" train.steps = 7 ", 7),
    ],
)
def test_a_word_is_toml_or_else_plain_text(word: str, value: object) -> None:
    found: Any = settings(word)
    for part in word.partition("=")[0].strip().removesuffix(".width").split("."):
        found = getattr(found, part)
    assert found == value
    assert type(found) is type(value)


def test_a_word_sets_its_own_key_alone() -> None:
    tables = {"train": {"steps": 5, "seed": 1}, "optimizer": {"lr": 0.5}}
    changed = settings("train.steps=6", **tables)
    assert (changed.train.steps, changed.train.seed, changed.optimizer.lr) == (6, 1, 0.5)
    assert tables["train"] == {"steps": 5, "seed": 1}, "the given table is left as it was"


def test_a_value_cannot_smuggle_in_another_key() -> None:
    assert apply_overrides({}, ["run.dir=1\nother = 2"]) == {"run": {"dir": "1\nother = 2"}}


def test_the_last_word_wins() -> None:
    assert settings("train.steps=5", "train.steps=6").train.steps == 6


@pytest.mark.parametrize(
    ("tables", "words", "plan"),
    [
        ({}, ["plan=auto"], None),
        ({"plan": "auto"}, [], None),
        ({"plan": {"shard": 4}}, ["plan=auto"], None),
        ({"plan": "auto"}, ["plan.shard=2"], Plan(shard=2)),
        ({"plan": {"shard": 4}}, ["plan.micro_batch=2"], Plan(shard=4, micro_batch=2)),
        ({"plan": {"shard": 4}}, ["plan=auto", "plan.micro_batch=2"], Plan(micro_batch=2)),
    ],
)
def test_auto_leaves_the_plan_to_be_chosen(
    tables: dict[str, Any], words: list[str], plan: Plan | None
) -> None:
    assert settings(*words, **tables).plan == plan


# What is refused


@pytest.mark.parametrize(
    ("word", "nearest"),
    [
        ("train.stepz=3", "train.steps"),
        ("trian.steps=3", "train"),
        ("optimizer.learning_rate=3", "lr"),
        ("optimizer.weight_decy=0.1", "optimizer.weight_decay"),
        ("train.lr=3", "optimizer.lr"),
        ("optimizer.seed=3", "train.seed"),
        ("steps=3", "train.steps"),
        ("plan.shards=2", "plan.shard"),
        ("plan.steps=2", "train.steps"),
        ("clutser=8 h100", "cluster"),
        ("run.keep=3", "checkpoint.keep"),
        ("checkpoint.quux=3", "every, last, keep"),
        ("quux=3", "model, data, train"),
    ],
)
def test_an_unknown_key_is_named_with_the_nearest_or_all(word: str, nearest: str) -> None:
    text = mistake(word)
    key, table = word.partition("=")[0], word.partition(".")[0]
    assert text.startswith((f"unknown key '{key}'", f"unknown key '{table}'"))
    assert nearest in text


@pytest.mark.parametrize(
    ("word", "shown", "works"),
    [
        ("train.steps=many", 'train.steps = "many"', "a whole number"),
        ("train.steps=1.5", "train.steps = 1.5", "a whole number"),
        ("train.steps=true", "train.steps = true", "a whole number"),
        ("train.steps=1e3", "train.steps = 1000.0", "a whole number"),
        ("optimizer.lr=fast", 'optimizer.lr = "fast"', "a number"),
        ("data.shuffle=1", "data.shuffle = 1", "true or false"),
        ("run.dir=12", "run.dir = 12", "text, in quotes"),
        ("run.dir=2024-01-01", "run.dir = 2024-01-01", "text, in quotes"),
        ("cluster=8", "cluster = 8", "text, in quotes"),
        ("data.source=3", "data.source = 3", "text, in quotes or expected a list"),
        ("data.source=[3]", "data.source = [3]", "text, in quotes"),
        ("optimizer.betas=0.9", "optimizer.betas = 0.9", "a list"),
        ("optimizer.betas=[0.9]", "optimizer.betas = [0.9]", "too few"),
        ("optimizer.betas=[0.9, 0.9, 0.9]", "optimizer.betas = [0.9, 0.9, 0.9]", "too many"),
        ("train=3", "train = 3", "a table"),
        ("plan=3", "plan = 3", 'a table or the word "auto"'),
        ("plan=atuo", 'plan = "atuo"', 'a table or the word "auto"'),
        ("train.steps.more=3", 'train.steps = {"more": 3}', "a whole number"),
        ("model.options=3", "model.options = 3", "a table"),
    ],
)
def test_a_wrong_type_names_key_value_and_type(word: str, shown: str, works: str) -> None:
    text = mistake(word)
    assert text.startswith(f"{shown}: ")
    assert works in text


@pytest.mark.parametrize(
    ("word", "shown", "works"),
    [
        ("train.steps=0", "train.steps = 0", "greater than or equal to 1"),
        ("train.seed=-1", "train.seed = -1", "greater than or equal to 0"),
        ("optimizer.lr=0", "optimizer.lr = 0", "greater than 0"),
        ("optimizer.lr=inf", "optimizer.lr = Infinity", "finite"),
        ("optimizer.min_lr=1.5", "optimizer.min_lr = 1.5", "less than or equal to 1"),
        ("optimizer.betas=[0.9, 1.0]", "optimizer.betas = [0.9, 1.0]", "less than 1"),
        ("data.eval_fraction=1", "data.eval_fraction = 1", "less than 1"),
        ("data.vocab=256", "data.vocab = 256", "greater than or equal to 257"),
        ("plan.tensor=0", "plan.tensor = 0", "greater than or equal to 1"),
        ("plan.zero=5", "plan.zero = 5", "0, 1, 2 or 3"),
        ("train.precision=bf8", 'train.precision = "bf8"', "'float8_rowwise' or 'float8_gather'"),
        ("optimizer.name=adam", 'optimizer.name = "adam"', "'adamw' or 'sgd'"),
        ("run.dir=", 'run.dir = ""', "at least 1 character"),
    ],
)
def test_a_value_out_of_range_names_key_value_and_range(word: str, shown: str, works: str) -> None:
    text = mistake(word)
    assert text.startswith(f"{shown}: ")
    assert works in text


@pytest.mark.parametrize(
    ("words", "names"),
    [
        (["optimizer.schedule=wsd", "optimizer.decay=200"], ["optimizer.decay = 200", "train.steps = 100"]),
        (["optimizer.schedule=wsd"], ["optimizer", "decay"]),
        (["plan.zero=0", "plan.shard=2"], ["plan", "zero = 0", "shard = 2", "1, 2 or 3"]),
        (["model.family=lama"], ["model", "'lama'", "llama"]),
    ],
)
def test_values_that_do_not_go_together_name_both(words: list[str], names: list[str]) -> None:
    text = mistake(*words)
    assert all(name in text for name in names)


@pytest.mark.parametrize(
    ("word", "told"),
    [
        (
            "train.steps=0",
            "the word train.steps=0: must be greater than or equal to 1; FILE has train.steps = 5",
        ),
        ("train.seed=x", "the word train.seed=x: expected a whole number"),
        ("run.dir=12", """the word run.dir=12: expected text, in quotes, such as run.dir='"12"'"""),
        ("train.seed.x=3", 'FILE with train.seed.x=3: train.seed = {"x": 3}: expected a whole number'),
        ("train.stepz=3", "the word train.stepz=3: unknown key 'train.stepz'; did you mean 'train.steps'?"),
        ("plan.zero=0", "FILE with plan.zero=0: plan: zero = 0 cuts nothing, but shard = 2"),
        ("optimizer.schedule=wsd", "FILE with optimizer.schedule=wsd: optimizer: "),
        ("plan=3", 'the word plan=3: expected a table or the word "auto"; FILE has plan = {"shard": 2}'),
    ],
)
def test_a_mistake_of_a_word_names_the_word_and_what_it_replaces(
    word: str, told: str, tmp_path: Path
) -> None:
    path = tmp_path / "job.toml"
    path.write_text("train.steps = 5\nplan.shard = 2\n")
    with pytest.raises(ConfigError) as caught:
        load(path, [word, "data.seq_len=64"])  # a word that is right is not named
    assert str(caught.value).startswith(told.replace("FILE", str(path)))
    assert "seq_len" not in str(caught.value)


def test_mistakes_of_a_file_and_of_words_are_told_apart(tmp_path: Path) -> None:
    path = tmp_path / "job.toml"
    path.write_text("train.steps = 0\n")
    with pytest.raises(ConfigError) as caught:
        load(path, ["train.seed=-1"])
    assert str(caught.value).splitlines() == [
        f"{path}: train.steps = 0: must be greater than or equal to 1",
        "  the word train.seed=-1: must be greater than or equal to 0",
    ]


def test_every_mistake_of_a_file_is_told_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        settings("train.stpes=6", "optimizer.lr=x", "plan.shard=0")
    lines = str(caught.value).splitlines()
    assert len(lines) == 3
    assert all(any(key in line for line in lines) for key in ("train.stpes", "optimizer.lr", "plan.shard"))


@pytest.mark.parametrize("word", ["train.steps", "=3", "", "train..steps=3", ".=3", "train.=3"])
def test_a_word_that_is_no_override_is_named_with_an_example(word: str) -> None:
    text = mistake(word)
    assert text.startswith(repr(word))
    assert "plan.shard=4" in text


def test_a_key_under_a_value_of_the_file_is_refused() -> None:
    assert "train.steps.x=3" in mistake("train.steps.x=3", train={"steps": 3})


def test_broken_toml_names_file_and_line(tmp_path: Path) -> None:
    path = tmp_path / "job.toml"
    path.write_text("[train]\nsteps = 3\nseed = = 1\n")
    with pytest.raises(ConfigError, match=rf"{re.escape(str(path))}: not TOML: .*line 3"):
        load(path)


def test_a_missing_file_names_the_nearest(tmp_path: Path) -> None:
    (tmp_path / "quickstart.toml").write_text("")
    with pytest.raises(
        ConfigError, match=r"no job file '.*quikstart\.toml'; did you mean '.*quickstart\.toml'"
    ):
        load(tmp_path / "quikstart.toml")
    with pytest.raises(ConfigError, match=r"no job file '.*zzz'$"):
        load(tmp_path / "zzz")


def test_a_file_that_is_not_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "job.toml").write_bytes(b"# \xe9\n")
    for path in (tmp_path / "job.toml", tmp_path):
        with pytest.raises(ConfigError, match="cannot be read"):
            load(path)


def test_the_message_says_in_which_file(tmp_path: Path) -> None:
    path = tmp_path / "job.toml"
    path.write_text("[train]\nsteps = 0\n")
    with pytest.raises(ConfigError, match=rf"^{re.escape(str(path))}: train\.steps = 0"):
        load(path)


# The schema


def violations(value: Any, schema: dict[str, Any], root: dict[str, Any], where: str = "") -> list[str]:
    """What a value breaks in a JSON Schema: the part of the standard that ours uses."""
    if "$ref" in schema:
        return violations(value, root["$defs"][schema["$ref"].rsplit("/", 1)[-1]], root, where)
    if "anyOf" in schema:
        each = [violations(value, option, root, where) for option in schema["anyOf"]]
        return [] if [] in each else [problem for problems in each for problem in problems]
    found = []
    kinds: dict[str, tuple[type, ...]] = {
        "object": (dict,),
        "array": (list,),
        "string": (str,),
        "integer": (int,),
        "number": (int, float),
        "boolean": (bool,),
        "null": (type(None),),
    }
    kind = schema.get("type")
    if kind and (not isinstance(value, kinds[kind]) or (isinstance(value, bool) and kind != "boolean")):
        return [f"{where}: not {kind}"]
    if "enum" in schema and value not in schema["enum"]:
        found.append(f"{where}: not one of {schema['enum']}")
    if "const" in schema and value != schema["const"]:
        found.append(f"{where}: not {schema['const']}")
    if isinstance(value, int | float):
        found += [f"{where}: range"] if value < schema.get("minimum", value) else []
        found += [f"{where}: range"] if value > schema.get("maximum", value) else []
        found += [f"{where}: range"] if value <= schema.get("exclusiveMinimum", value - 1) else []
        found += [f"{where}: range"] if value >= schema.get("exclusiveMaximum", value + 1) else []
    if isinstance(value, dict):
        known = schema.get("properties", {})
        for key, inner in value.items():
            if key in known:
                found += violations(inner, known[key], root, f"{where}.{key}".lstrip("."))
            elif schema.get("additionalProperties") is False:
                found.append(f"{where}.{key}: unknown".lstrip("."))
    return found


def check_schema(text: str) -> list[str]:
    schema = json_schema()
    return violations(tomllib.loads(text), schema, schema)


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_the_schema_accepts_the_examples(path: Path) -> None:
    assert check_schema(path.read_text()) == []
    assert check_schema(load(path).with_plan(Plan(shard=2)).to_toml()) == []


@pytest.mark.parametrize(
    ("text", "where"),
    [
        ("[train]\nstepz = 3", "train.stepz"),
        ("[train]\nsteps = 0", "train.steps"),
        ('[train]\nsteps = "3"', "train.steps"),
        ('[optimizer]\nname = "adam"', "optimizer.name"),
        ("[optimizer]\nlr = 0", "optimizer.lr"),
        ('plan = "atuo"', "plan"),
        ("[plan]\nshard = 0", "plan.shard"),
        ("colour = 3", "colour"),
    ],
)
def test_the_schema_rejects_what_the_parser_rejects(text: str, where: str) -> None:
    with pytest.raises(ConfigError):
        parse(tomllib.loads(text), where="job.toml")
    problems = check_schema(text)
    assert problems
    assert all(problem.startswith(where) for problem in problems if "not auto" not in problem)


def test_the_schema_takes_a_chosen_plan() -> None:
    assert check_schema('plan = "auto"') == []


def test_the_schema_says_what_every_key_means() -> None:
    schema = json_schema()
    tables = {name for name, inner in keys().items() if name and inner}
    for table in tables:
        kind = schema["$defs"][
            {"checkpoint": "CheckpointPolicy", "run": "RunPolicy"}.get(table, table.capitalize())
        ]
        assert set(kind["properties"]) == set(keys()[table])
        for key, described in kind["properties"].items():
            assert described.get("description"), f"{table}.{key}"


def test_degrees_that_are_said_take_the_place_of_a_runs_own(tmp_path: Path) -> None:
    """Of the rest of its plan what does not follow from them is kept."""
    (tmp_path / "job.toml").write_text(
        '[plan]\nreplicate = 2\nmicro_batch = 4\nrecompute = "full"\nzero = 0\n'
    )
    assert load(tmp_path, ["plan.shard=2"]).plan == Plan(shard=2, micro_batch=4, recompute="full")
    assert load(tmp_path, ["plan.micro_batch=2"]).plan == Plan(
        replicate=2, micro_batch=2, recompute="full", zero=0
    )
    assert load(tmp_path / "job.toml", ["plan.shard=2", "plan.zero=1"]).plan == Plan(
        replicate=2, shard=2, zero=1, micro_batch=4, recompute="full"
    )
