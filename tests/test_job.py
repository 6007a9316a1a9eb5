"""`Job` is frozen, strict data whose parts fit each other."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from shoal.job import Job, Model, Optimizer, Section, Train

TABLES: dict[str, type[Section]] = {name: type(table) for name, table in Job()}


def job(**tables: dict[str, Any]) -> Job:
    return Job.model_validate(tables)


def mistake(**tables: dict[str, Any]) -> str:
    """The one message of an impossible job."""
    with pytest.raises(ValidationError) as caught:
        job(**tables)
    (error,) = caught.value.errors()
    return f"{'.'.join(str(part) for part in error['loc'])}: {error['msg']}"


def test_a_job_cannot_be_changed() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        job().train.steps = 5  # pyrefly: ignore[read-only]


def test_equal_jobs_are_equal_however_they_were_written() -> None:
    assert job(train={"steps": 7}) == Job(train=Train(steps=7)) != Job()


@pytest.mark.parametrize("table", TABLES)
def test_an_unknown_key_is_refused_in_every_table(table: str) -> None:
    assert mistake(**{table: {"colour": 1}}).startswith(f"{table}.colour:")


@pytest.mark.parametrize("table", TABLES)
def test_every_key_says_what_it_means(table: str) -> None:
    for name, field in TABLES[table].model_fields.items():
        assert len(field.description or "") > 10, f"{table}.{name}"


@pytest.mark.parametrize("value", [True, 1.0, "1", None])
def test_only_a_whole_number_counts_as_one(value: object) -> None:
    assert mistake(train={"steps": value}).startswith("train.steps:")


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1e-3, 0.0])
def test_a_rate_is_finite_and_above_zero(value: float) -> None:
    assert mistake(optimizer={"lr": value}).startswith("optimizer.lr:")


@pytest.mark.parametrize("betas", [[0.9, 1.0], [-0.1, 0.9]])
def test_decay_rates_are_at_least_0_and_below_1(betas: list[float]) -> None:
    assert mistake(optimizer={"betas": betas}).startswith("optimizer.betas.")


def test_decay_rates_may_be_a_list_as_toml_has_no_tuples() -> None:
    assert job(optimizer={"betas": [0.8, 0.9]}).optimizer.betas == (0.8, 0.9)


@pytest.mark.parametrize(
    ("optimizer", "steps", "fits"),
    [
        ({"warmup": 10}, 10, True),
        ({"warmup": 11}, 10, True),  # a short trial of a long job
        ({"schedule": "wsd", "warmup": 4, "decay": 6}, 10, True),
        ({"schedule": "wsd", "warmup": 4, "decay": 7}, 10, False),
        ({"schedule": "cosine", "warmup": 4, "decay": 7}, 10, True),  # decay is wsd's alone
        ({"schedule": "wsd"}, 10, False),
        ({"nesterov": True, "momentum": 0.0}, 10, False),
        ({"nesterov": True, "momentum": 0.5}, 10, True),
    ],
)
def test_a_schedule_fits_into_the_steps(optimizer: dict[str, Any], steps: int, fits: bool) -> None:
    if fits:
        job(optimizer=optimizer, train={"steps": steps})
    else:
        text = mistake(optimizer=optimizer, train={"steps": steps})
        assert "warmup" in text or "decay" in text or "momentum" in text


def test_a_schedule_that_is_too_long_names_both_keys_and_values() -> None:
    text = mistake(optimizer={"schedule": "wsd", "decay": 200}, train={"steps": 100})
    assert "optimizer.decay = 200" in text
    assert "train.steps = 100" in text


def test_an_unknown_family_names_those_there_are() -> None:
    text = mistake(model={"family": "lama"})
    assert "'lama'" in text and "llama" in text and "package.module:build" in text


def test_dimensions_of_our_families_are_refused_for_a_model_of_ones_own() -> None:
    assert "layers = 3" in mistake(model={"family": "mine:build", "layers": 3})
    assert Model(family="mine:build", options={"layers": 3}).options == {"layers": 3}


def test_defaults_are_themselves_valid() -> None:
    assert Job.model_validate(Job().model_dump()) == Job()
    assert Optimizer.model_validate(Optimizer().model_dump()) == Optimizer()
