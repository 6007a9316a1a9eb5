"""Datasets of the user's own: found, told apart, each sample with randomness of its own."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from torch.utils.data import TensorDataset, default_collate

from shoal.data.user import (
    collate_of,
    is_dataset,
    is_iterable,
    open_user_datasets,
)
from shoal.randomness import random_state_kept, seed_random
from tests.data.sources import Numbers, Pairs, Stream

HERE = "tests.data.sources"


def test_a_function_a_class_an_object_or_a_pair_will_do() -> None:
    assert len(open_user_datasets(f"{HERE}:numbers", {}).train) == 10
    assert len(open_user_datasets(f"{HERE}:Numbers", {"n": 4}).train) == 4
    assert open_user_datasets(f"{HERE}:three", {}).eval is None
    pair = open_user_datasets(f"{HERE}:train_and_eval", {"n": 5})
    assert (len(pair.train), isinstance(pair.eval, Stream)) == (5, True)


@pytest.mark.parametrize(
    ("spec", "options", "message"),
    [
        ("no_such_package.data:set", {}, "no module 'no_such_package'"),
        (f"{HERE}:missing", {}, "has no 'missing'; it has .*Numbers"),
        (f"{HERE}:numbers", {"size": 3}, "does not take data.options"),
        (f"{HERE}:three", {"n": 3}, "data.options \\['n'\\] are for a function"),
        (f"{HERE}:nothing", {}, "gave NoneType as its train dataset; expected a torch Dataset"),
    ],
)
def test_what_is_no_dataset_is_refused_with_the_reason(
    spec: str, options: dict[str, int], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        open_user_datasets(spec, options)


def test_map_style_and_iterable_datasets_are_told_apart() -> None:
    map_style = [Numbers(3), [1, 2], TensorDataset(torch.zeros(3))]
    assert all(is_dataset(thing) and not is_iterable(thing) for thing in map_style)
    assert all(is_dataset(thing) and is_iterable(thing) for thing in (Stream(3), {1, 2}))
    assert not any(is_dataset(thing) for thing in (None, "text", Numbers, (n for n in range(3)), 5))


def test_a_datasets_own_collate_function_is_used() -> None:
    assert collate_of(Pairs(3))([1, 2]) == [("sample", 1), ("sample", 2)]
    assert collate_of(Numbers(3)) is default_collate


def drawn() -> tuple[float, float, float]:
    return random.random(), float(np.random.rand()), float(torch.rand(()))


def test_a_name_seeds_all_three_generators() -> None:
    seed_random("a")
    first = drawn()
    seed_random("b")
    assert all(one != other for one, other in zip(drawn(), first, strict=True))
    seed_random("a")
    assert drawn() == first


def test_the_callers_random_numbers_are_kept() -> None:
    seed_random("a")
    expected = drawn()
    seed_random("a")
    with random_state_kept():
        seed_random("b")
        drawn()
    assert drawn() == expected
