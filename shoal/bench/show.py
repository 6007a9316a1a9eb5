"""Records of a bench as text: a few lines, and tables in Markdown, which reads well on a terminal too."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

from shoal.bench.figures import Record


def number(value: float | None, digits: int, factor: float = 1.0) -> str:
    """A number with thousands apart, or a dash.

    Example:
        >>> number(1234.56, 1), number(None, 1)
        ('1,234.6', '-')
    """
    return "-" if value is None else f"{value * factor:,.{digits}f}"


def markdown_table(header: Sequence[str], lines: Sequence[Sequence[str]], words: int = 1) -> str:
    """A Markdown table whose columns line up; all but the first `words` columns are set to the right."""
    cells = [list(header), *([cell.replace("|", "\\|") for cell in line] for line in lines)]
    widths = [max(len(line[column]) for line in cells) for column in range(len(header))]

    def joined(line: Sequence[str]) -> str:
        padded = (
            cell.ljust(width) if at < words else cell.rjust(width)
            for at, (cell, width) in enumerate(zip(line, widths, strict=True))
        )
        return f"| {' | '.join(padded)} |"

    rule = ("-" * (w + 2) if at < words else "-" * (w + 1) + ":" for at, w in enumerate(widths))
    return "\n".join([joined(cells[0]), f"|{'|'.join(rule)}|", *(joined(line) for line in cells[1:])])


def describe(record: Record) -> str:
    """A bench of a step, without its profile."""
    machine, steps = record["machine"], len(record["seconds"])
    low, high = (number(value, 1, 1000) for value in record["step_s_quartiles"])
    device = machine["device"] if record["device"] == "cuda" else "CPU rank"
    lines = [
        f"model    {record['parameters']:,} parameters, {record['job']['train']['precision']}; torch "
        f"{machine['versions']['torch']}",
        f"plan     {record['plan']}; {record['ranks']} x {device}, {record['backend']}",
        f"step     {number(record['step_s'], 1, 1000)} ms (half of {steps} steps: {low} to {high}; "
        f"after {record['warmup']} of warm-up)",
        f"speed    {number(record['per_s_per_device'], 0)} {record['unit']}/s/device"
        + (f", MFU {number(record['mfu'], 1, 100)} %" if record["mfu"] is not None else ""),
        f"memory   {number(record['allocated_gib'], 2)} GiB"
        + (f", reserved {number(record['reserved_gib'], 2)}" if record["reserved_gib"] is not None else ""),
        f"data     waited for {number(record['data_wait_s'], 2, 1000)} ms a step",
        f"loss     {record['losses'][0]:.4f} -> {record['losses'][-1]:.4f} after {len(record['losses'])} steps",
    ]
    gpu = record["gpu"]
    if gpu and "clock_mhz" in gpu:
        lines.append(
            f"gpus     {number(gpu['clock_mhz'], 0)} MHz, {number(gpu['power_w'], 0)} W, "
            f"{number(gpu['temperature_c'], 0)} C while the steps ran"
        )
    return "\n".join(lines)


def profile_tables(profile: Record) -> str:
    """What a step is made of, and its longest kernels."""
    lines = [
        [
            line["name"],
            number(line["median"], 1),
            number(line["most"], 1),
            str(line["most_on"]),
            number(line["share"], 1, 100),
        ]
        for line in profile["lines"]
    ]
    made_of = markdown_table(["what", "median ms", "most ms", "on rank", "% of step"], lines)
    longest = [
        [shortened(kernel["name"]), kernel["category"], str(kernel["count"]), number(kernel["ms"], 2)]
        for kernel in profile["longest"]
    ]
    return f"{made_of}\n\n{markdown_table(['longest, rank 0', 'is', 'times', 'ms'], longest, words=2)}"


def against_table(records: Sequence[Record]) -> str:
    """Rows of the product and its peers, losses at steps that all of them took; below, why some have no figures."""
    counts = [len(record["losses"]) for record in records if "step_s" in record]
    last = min(counts, default=0)
    header = ["row", "setting", "step ms", "per s/device", "MFU %", "allocated GiB", "reserved GiB"]
    header += ["loss 1", f"loss {last // 2}", f"loss {last}", "SM MHz", "W"]
    table = markdown_table(header, [_cells(record, last) for record in records], words=2)
    problems = [f"- **{r['name']}**: {headline(r['error'])}" for r in records if "error" in r]
    return "\n\n".join([table, *(["\n".join(problems)] if problems else [])])


def _cells(record: Record, last: int) -> list[str]:
    losses, gpu = record.get("losses") or [], record.get("gpu") or {}
    at = [losses[step - 1] if 0 < step <= len(losses) else None for step in (1, last // 2, last)]
    return [
        record["name"],
        record["setting"],
        number(record.get("step_s"), 1, 1000),
        number(record.get("per_s_per_device"), 0),
        number(record.get("mfu"), 1, 100),
        number(record.get("allocated_gib"), 1),
        number(record.get("reserved_gib"), 1),
        *(number(loss, 4) for loss in at),
        number(gpu.get("clock_mhz"), 0),
        number(gpu.get("power_w"), 0),
    ]


def headline(error: str) -> str:
    """The first line of an error that says something."""
    return next(islice((line for line in error.splitlines() if line.strip()), 1), "no message")


def shortened(name: str, width: int = 60) -> str:
    """A kernel's name without what all C++ templates say, cut to `width`."""
    name = name.replace("void ", "").replace("at::native::", "").replace("(anonymous namespace)::", "")
    return name if len(name) <= width else name[: width - 1] + "~"
