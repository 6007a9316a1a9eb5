"""A list of rows as a Markdown table."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Record = dict[str, Any]

COLUMNS: dict[str, Callable[[Record], str]] = {
    "row": lambda row: row["name"],
    "setting": lambda row: row["setting"],
    "step ms": lambda row: number(row.get("step_s"), 1, 1000),
    "tokens/s/GPU": lambda row: number(row.get("tokens_per_s_per_gpu"), 0),
    "MFU %": lambda row: number(row.get("mfu"), 1, 100),
    "allocated GiB": lambda row: number(row.get("allocated_gib"), 1),
    "reserved GiB": lambda row: number(row.get("reserved_gib"), 1),
    "in use GiB": lambda row: number((row.get("gpu") or {}).get("memory_gib"), 1),
    "loss, first": lambda row: number(first(row.get("losses")), 3),
    "loss, last": lambda row: number(last(row.get("losses")), 3),
    "SM MHz": lambda row: number((row.get("gpu") or {}).get("clock_mhz"), 0),
    "W": lambda row: number((row.get("gpu") or {}).get("power_w"), 0),
}
WORDS = ("row", "setting")


def number(value: float | None, digits: int, factor: float = 1.0) -> str:
    """A number with thousands apart, or a dash."""
    return "-" if value is None else f"{value * factor:,.{digits}f}"


def first(values: list[float] | None) -> float | None:
    return values[0] if values else None


def last(values: list[float] | None) -> float | None:
    return values[-1] if values else None


def markdown_table(header: list[str], lines: list[list[str]]) -> str:
    """A Markdown table whose columns line up; columns outside `WORDS` are set to the right."""
    cells = [header, *([cell.replace("|", "\\|") for cell in line] for line in lines)]
    widths = [max(len(line[column]) for line in cells) for column in range(len(header))]
    right = [name not in WORDS for name in header]

    def joined(line: list[str]) -> str:
        padded = (
            cell.rjust(width) if to_right else cell.ljust(width)
            for cell, width, to_right in zip(line, widths, right, strict=True)
        )
        return f"| {' | '.join(padded)} |"

    rule = (
        f"{'-' * (width + 1)}:" if to_right else "-" * (width + 2)
        for width, to_right in zip(widths, right, strict=True)
    )
    return "\n".join([joined(header), f"|{'|'.join(rule)}|", *(joined(line) for line in cells[1:])])


def rows_table(rows: list[Record]) -> str:
    """The rows, and below the table the first line of each error."""
    table = markdown_table(list(COLUMNS), [[cell(row) for cell in COLUMNS.values()] for row in rows])
    errors = [f"- **{row['name']}**: {headline(row['error'])}" for row in rows if row.get("error")]
    return "\n\n".join([table, *(["\n".join(errors)] if errors else [])])


def headline(error: str) -> str:
    """The first line of an error."""
    return (error.strip().splitlines() or ["no message"])[0]
