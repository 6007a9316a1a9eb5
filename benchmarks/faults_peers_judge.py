"""What a disturbed job left, judged: how long it stood still, what it did again, and whether it says who failed of what."""

from __future__ import annotations

import re
import statistics
from collections.abc import Sequence
from typing import Any, NamedTuple

CAUSES = {
    "kill": r"SIGKILL|signal 9\b|exitcode: -9\b",
    "stop": r"SIGSTOP|\bstuck\b|\bhangs?\b|\bhung\b|\bstopped\b|\bno rank has moved\b",
    "raise": r"on purpose|a fault of run\.faults",
    "agent": r"\bgone\b|\bdead\b|keep-?alive|SIGKILL|signal 9\b|exitcode: -9\b",
}
"""words of a line that tells of the cause, by the kind of fault"""
FAILS = r"error|exception|fail|exitcode|signal|killed|stuck|\bgone\b|\blost\b|timed out|no rank has moved|on purpose"
VICTIM = r"(closed|reset) by peer|timed out waiting|lost its peers|lost connection"
"""words of a rank that tells of another's end, which its own name in the line is not"""
RANK = r"(?:\b|_)ranks?\W{0,4}(\d+)"


class Row(NamedTuple):
    """A step that was done, as it was written down."""

    step: int
    time: float
    who: int = 0


def longest_wait_s(rows: Sequence[Row], struck_at: float, last: int) -> float | None:
    """The longest wait for a step that had not been done before, from the fault on; None: the last step was never done.

    Example:
        >>> longest_wait_s([Row(1, 1.0), Row(2, 2.0), Row(2, 7.0), Row(3, 8.0)], struck_at=2.5, last=3)
        5.5
    """
    longest, done, before = 0.0, 0, struck_at
    for row in sorted(rows, key=lambda row: row.time):
        if row.step <= done:
            continue
        done = row.step
        if row.time > struck_at:
            longest, before = max(longest, row.time - before), row.time
    return round(longest, 3) if done >= last else None


def done_at(rows: Sequence[Row], when: float) -> int:
    """Steps that were done by then."""
    return max((row.step for row in rows if row.time <= when), default=0)


def redone(rows: Sequence[Row]) -> int:
    """Steps that somebody did more than once."""
    return len(rows) - len({(row.step, row.who) for row in rows})


class Naming(NamedTuple):
    """Whether an output names who failed, and of what; and the line that does."""

    verdict: str
    """both; who (without the cause); cause (without who); another (rank or machine); nothing"""
    line: str = ""


def naming(output: str, kind: str, who: str) -> Naming:
    """How an output names who failed (a pattern) and the cause, by its lines that tell of any failure.

    Example:
        >>> naming("failed (exitcode: -9) local_rank: 1 (pid: 7)", "kill", rank_pattern(1)).verdict
        'both'
        >>> naming("[rank0]: RuntimeError: Connection closed by peer", "kill", rank_pattern(1)).verdict
        'another'
    """
    told = (line.strip() for line in output.splitlines() if "[INFO]" not in line)
    lines = [line for line in told if re.search(FAILS, line, re.IGNORECASE)]
    right = [line for line in lines if re.search(who, line) and not re.search(VICTIM, line, re.IGNORECASE)]
    other = [line for line in lines if line not in right and re.search(RANK, line)]
    caused = [line for line in lines if re.search(CAUSES[kind], line, re.IGNORECASE)]
    for verdict, found in (
        ("both", [line for line in right if line in caused]),
        ("who", right),
        ("cause", caused),
        ("another", other),
    ):
        if found:
            return Naming(verdict, found[0][:300])
    return Naming("nothing")


def without_paths(line: str) -> str:
    """A line that is kept, without the folders of the machine on which it was printed."""
    return re.sub(r"/(?:[^\s/]+/)+(?=(?:bin/python|torch/|shoal/|benchmarks/))", "", line)


def rank_pattern(rank: int) -> str:
    """What a line that names this rank has in it: "rank 1", "[rank1]", "local_rank: 1", "ranks 1"."""
    return RANK.replace(r"(\d+)", rf"{rank}\b")


def table(records: Sequence[dict[str, Any]]) -> str:
    """A row of Markdown for each system and fault, over its repetitions."""
    head = "| fault | system | next step after | steps again | who and cause | left behind | same weights |"
    lines = [head, "| --- | --- | --- | --- | --- | --- | --- |"]
    cells: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for record in records:
        cells.setdefault((record["fault"], record["system"]), []).append(record)
    for (fault, system), found in sorted(cells.items()):
        lines.append(f"| {' | '.join((fault, system, *_cell(found)))} |")
    return "\n".join(lines)


def _cell(found: list[dict[str, Any]]) -> list[str]:
    waits = sorted(record["next_step_s"] for record in found if record["next_step_s"] is not None)
    never = len(found) - len(waits)
    if found[0]["fault"] == "term":
        gone = sorted(record["gone_s"] for record in found if record["gone_s"] is not None)
        took = f"all ended in {_span(gone)}" if gone else "not all ended"
        said = "not asked"
    else:
        parts = [*([_span(waits)] if waits else []), *([f"never ({never} of {len(found)})"] if never else [])]
        took, said = " and ".join(parts), ", ".join(sorted({record["named"] for record in found}))
    again, left = (sorted({record[key] for record in found}) for key in ("redone", "left"))
    same = [record["same"] for record in found if record["same"] is not None]
    return [
        took,
        _between(again),
        said,
        _between(left),
        f"{sum(same)} of {len(same)}" if same else "not asked",
    ]


def _between(values: Sequence[int]) -> str:
    return f"{values[0]}" if values[0] == values[-1] else f"{values[0]} to {values[-1]}"


def _span(values: Sequence[float]) -> str:
    """A median, and the range where there are several.

    Example:
        >>> _span([1.0, 2.0, 4.0])
        '2.0 s (1.0 to 4.0)'
    """
    median = f"{statistics.median(values):.1f} s"
    return median if len(values) == 1 else f"{median} ({values[0]:.1f} to {values[-1]:.1f})"
