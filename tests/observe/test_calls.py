"""The calls of a rank are read as they were made, also when there were more than are kept, and while they are written."""

from __future__ import annotations

from pathlib import Path

import pytest

from shoal.observe.calls import RECORDS, SIZE_BYTES, CallFile, Group, read_calls

WORLD = Group("0", "", (0, 1))
SHARD = Group("7", "shard", (1, 5, 6))


def test_calls_are_read_with_their_groups_and_numbers(tmp_path: Path) -> None:
    file = CallFile(tmp_path / "1.calls")
    file.add(WORLD, "barrier", "a.py:1 in f")
    file.add(SHARD, "all_reduce sum float32 (4,)", "b.py:2 in g")
    file.add(WORLD, "broadcast root 0 int64 (2, 3)", "c.py:3 in h")
    found = read_calls(tmp_path / "1.calls")
    assert found is not None
    assert found.groups == {"0": WORLD, "7": SHARD}
    assert found.counts == {"0": 2, "7": 1}
    assert [(call.group, call.number, call.text, call.line) for call in found.calls] == [
        ("0", 1, "barrier", "a.py:1 in f"),
        ("7", 1, "all_reduce sum float32 (4,)", "b.py:2 in g"),
        ("0", 2, "broadcast root 0 int64 (2, 3)", "c.py:3 in h"),
    ]


def test_the_newest_calls_are_kept_and_all_are_counted() -> None:
    file = CallFile(None)
    for number in range(RECORDS + 10):
        file.add(WORLD, f"all_reduce sum float32 ({number},)", "")
    found = file.read()
    assert found.counts == {"0": RECORDS + 10}
    assert [call.number for call in found.calls] == list(range(11, RECORDS + 11))


def test_the_sum_tells_of_any_call_before() -> None:
    sums = []
    for first in ("barrier", "all_reduce sum float32 (4,)"):
        file = CallFile(None)
        file.add(WORLD, first, "")
        file.add(SHARD, "barrier", "")
        sums.append([file.add(group, "all_gather float32 (2,)", "").sum for group in (WORLD, SHARD)])
    assert sums[0][0] != sums[1][0]
    assert sums[0][1] == sums[1][1]


def test_a_record_that_is_half_written_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "0.calls"
    file = CallFile(path)
    for _ in range(3):
        file.add(WORLD, "barrier", "")
    raw = bytearray(path.read_bytes())
    at = SIZE_BYTES // 2
    at = raw.index((2).to_bytes(8, "little") + (0).to_bytes(2, "little") + (2).to_bytes(8, "little"), 65536)
    raw[at : at + 8] = (1026).to_bytes(8, "little")  # begun, and not ended
    path.write_bytes(raw)
    found = read_calls(path)
    assert found is not None
    assert [call.number for call in found.calls] == [1, 3]


def test_what_is_no_file_of_calls_is_none(tmp_path: Path) -> None:
    assert read_calls(tmp_path / "none") is None
    (tmp_path / "other").write_text("hello")
    assert read_calls(tmp_path / "other") is None


@pytest.mark.parametrize("ranks", [(0,), (3, 7), (0, 8, 16), (1, 2, 4), tuple(range(4096))])
def test_ranks_of_a_group_fit(ranks: tuple[int, ...]) -> None:
    file = CallFile(None)
    file.add(Group("g", "", ranks), "barrier", "")
    assert file.read().groups["g"].ranks == ranks
