"""A profile is read back as it was written, says what is wrong in a file, and curves are read between their points."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from shoal.planner.profile import (
    Attention,
    Host,
    Matmul,
    Profile,
    interpolate,
    read_profile,
)

HOST = Host(operator_s=1e-5, kernel_s=5e-6, graph_s=1e-4, collective_s=3e-5)
CURVE = ((1e3, 1e-6), (1e6, 1e-5), (1e9, 1e-3))


def profile() -> Profile:
    return Profile(
        device="h100",
        name="NVIDIA H100 80GB HBM3",
        about="made up",
        devices=2,
        matmuls=(Matmul("bfloat16", 1024, 4096, 4096, 6e-5),),
        attention=(Attention("bfloat16", 1, 32, 8, 4096, 128, 3e-4, 9e-4),),
        moves=CURVE,
        collectives={"all_gather/2": CURVE},
        host=HOST,
    )


def changed(**keys: Any) -> str:
    return json.dumps(profile().model_dump(mode="json") | keys)


def test_a_profile_is_read_back_as_it_was_written(tmp_path: Path) -> None:
    (tmp_path / "h100.json").write_text(profile().model_dump_json())
    read = read_profile(tmp_path / "h100.json")
    assert read == profile()
    assert read.matmuls[0].seconds == 6e-5
    assert (read.beside.computing, read.host_copies) == (1.0, ())  # where nothing was measured


@pytest.mark.parametrize(
    ("text", "where"),
    [
        ("{", "the file"),
        (changed(host={**HOST.model_dump(), "operator_s": 0}), "host.operator_s"),
        (changed(beside={"computing": 0.5}), "beside.computing"),
        (changed(devices=0), "devices"),
        (changed(speed=3), "speed"),
        (changed(moves=[[1, "fast"]]), "moves.0.1"),
        (changed(matmuls=[["bfloat16", 1, 2, 3]]), "matmuls.0"),
    ],
)
def test_an_error_names_the_file_the_key_and_what_is_expected(text: str, where: str, tmp_path: Path) -> None:
    path = tmp_path / "p.json"
    path.write_text(text)
    with pytest.raises(ValueError) as caught:
        read_profile(path)
    message = str(caught.value)
    assert message.startswith(f"profile {path}: {where}")
    assert "expected a file that `shoal bench device` wrote" in message


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"none\.json cannot be read: No such file"):
        read_profile(tmp_path / "none.json")


def test_a_curve_is_met_at_its_points_and_lies_between_them() -> None:
    assert [interpolate(CURVE, size) for size, _ in CURVE] == pytest.approx([s for _, s in CURVE])
    between = [interpolate(CURVE, size) for size in (1e3, 1e4, 1e5, 1e6, 1e7, 1e8, 1e9)]
    assert between == sorted(between)
    # halfway between two sizes by their logarithms is halfway between their times
    assert interpolate(CURVE, 1e3 * 1e3**0.5) == pytest.approx(1e-6 * 10**0.5)


def test_beyond_a_curve_a_small_size_costs_the_least_and_a_large_one_in_proportion() -> None:
    assert interpolate(CURVE, 1) == 1e-6
    assert interpolate(CURVE, 4e9) == pytest.approx(4e-3)
