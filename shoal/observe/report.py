"""`write_report`: a run as one page, report.html, that any browser shows without a network."""

from __future__ import annotations

import shlex
import statistics
from collections.abc import Sequence
from datetime import UTC, datetime
from html import escape
from pathlib import Path
from typing import Any

import tomli_w

from shoal.cluster import GIB
from shoal.observe.brief import ended
from shoal.observe.charts import Chart, Point, Series, bar_chart, line_chart, short, smooth
from shoal.observe.page import folded, page, section, table, text_block
from shoal.observe.story import (
    Record,
    StepRow,
    Story,
    is_run,
    is_step,
    number,
    read_story,
    read_toml,
    value_of,
)
from shoal.run import Run, write_whole

NAME = "report.html"
FIRST_EVENTS, LAST_EVENTS = 20, 80  # of more, those between are counted
NUM_ROWS = 20
YEAR_3000 = 32_503_680_000

DETAILS = {
    "start": "world size {world_size}, {plan}",
    "save": "{path}, {seconds} s",
    "step skipped": "loss {loss}, gradient norm {grad_norm}",
    "save waited": "{seconds} s, for the one before",
    "save failed": "{reason}",
    "checkpoint refused": "{path}: {reason}",
    "alert": "rank {rank}: {message}",
    "fault": "rank {rank}: {message}",
    "bad sample": "rank {rank}: sample {index}: {error}",
    "loader restarted": "rank {rank}: loader process {pid} {reason}",
    "rewind": "loss {loss}, {score} deviations up: back to step {to}, without the data of {skipped} steps from {skipped_from} on",
    "micro-batch halved": "rank {rank} was out of memory: micro-batches of {after} in place of {before} samples; {memory}",
    "restart": "restart {number}, after step {step}",
    "given up": "after step {step}: {reason}",
}


def write_report(run: Run) -> Path:
    """Write report.html into a run directory, of a run that goes on or has ended in any way.

    Raises:
        ValueError: the directory is no run's.

    Example:
        >>> write_report(Run(Path("runs/a")))
        PosixPath('runs/a/report.html')
    """
    if not is_run(run):
        raise ValueError(
            f"{str(run.path)!r} is no run directory: it has no job.toml, metrics.jsonl or events.jsonl"
        )
    text = render(read_story(run))
    path = run.path / NAME
    write_whole(path, text.encode("utf-8", "replace").decode())  # half a surrogate pair cannot be written
    return path


def render(story: Story) -> str:
    """The page of a story, as HTML."""
    name = story.run.path.resolve().name
    failure = story.texts.get("ranks/failure.txt", "") if story.ending.state == "failed" else ""
    parts = [
        _head(story),
        _tiles(story),
        f'<div class="charts">{_charts(story)}</div>',
        section("What went wrong", text_block(failure[:20_000], "failure")) if failure else "",
        section("What happened", _events(story)),
        section("Checkpoints", _checkpoints(story), _commands(story)),
        section("Numbers", _numbers(story)),
        section("Settings", *_settings(story)),
        section("Left out of this page", _list(story.notes)),
    ]
    return page(f"{name}: {story.ending.state}", "\n".join(part for part in parts if part))


def headline(story: Story) -> str:
    """What was trained, on what, and how it ended, in a sentence."""
    model = value_of(story.job, "model", "family") or "a model"
    preset = value_of(story.job, "model", "preset")
    source = value_of(story.job, "data", "source")
    data = ", ".join(map(str, source)) if isinstance(source, list) else source
    what = f"{model} {preset}" if preset else str(model)
    return f"{what}{f' on {data}' if data else ''}, {_machine(story)}: {ended(story)}."


def _machine(story: Story) -> str:
    """On how many of which devices."""
    cluster = read_toml(story.texts.get("cluster.toml", ""), "cluster.toml", [])
    kind = value_of(cluster, "device", "kind")
    said = value_of(story.job, "cluster")
    if not kind and isinstance(said, str) and said != "auto":
        kind = said.split()[-1] if said.split() else None
    size = story.start.get("world_size") or len(story.memory) or "unknown"
    return f"{size} {f'{kind} ' if kind else ''}rank{'' if size == 1 else 's'}"


def _head(story: Story) -> str:
    state, message = story.ending
    written = datetime.now(tz=UTC).timestamp()
    lines = [
        f'<p class="state {state}">{state}</p>',
        f"<h1>{escape(headline(story))}</h1>",
        f'<p class="where">{escape(str(story.run.path.resolve()))}, written {_time(written)}</p>',
    ]
    if message:
        lines.append(text_block(message, "why it failed"))
    return f"<header>\n{''.join(lines)}\n</header>"


def _tiles(story: Story) -> str:
    """The few numbers to know first."""
    rows, unit = story.steps, story.unit
    tiles = [
        _loss_tile(rows),
        _eval_tile(story.evals),
        _speed_tile(rows, unit),
        _amount_tile(rows, unit),
        _memory_tile(story.memory),
        _skipped_tile(rows),
        _bad_tile(story.events),
    ]
    shown = (
        f'<div><dt>{name}</dt><dd class="value">{value}</dd><dd class="also">{also}</dd></div>'
        for name, value, also in filter(None, tiles)
    )
    return f'<dl class="tiles">{"".join(shown)}</dl>' if any(tiles) else ""


Tile = tuple[str, str, str]


def _loss_tile(rows: Sequence[StepRow]) -> Tile | None:
    losses = [row.loss for row in rows if row.loss is not None]
    if not losses:
        return None
    last = losses[-20:]
    mean = f"mean of the last {len(last)} steps; " if len(last) > 1 else ""
    return "training loss", f"{statistics.fmean(last):.4g}", f"{mean}{losses[0]:.4g} at first"


def _eval_tile(evals: Sequence[tuple[int, float | None]]) -> Tile | None:
    if not evals:
        return None
    step, loss = evals[-1]
    return "evaluation loss", "not finite" if loss is None else f"{loss:.4g}", f"after step {step:,}"


def _speed_tile(rows: Sequence[StepRow], unit: str) -> Tile | None:
    speeds = [row.units_per_s for row in rows if row.units_per_s is not None]
    if not speeds:
        return None
    use = [row.mfu for row in rows if row.mfu is not None]
    also = f"median of steps; mfu {statistics.median(use):.1%}" if use else "median of steps"
    return f"{unit} a second", f"{statistics.median(speeds):,.0f}", also


def _amount_tile(rows: Sequence[StepRow], unit: str) -> Tile | None:
    if not rows:
        return None
    seconds = sum(max(row.seconds or 0, 0) for row in rows)
    return f"{unit} seen", short(sum(row.units or 0 for row in rows)), f"in {_duration(seconds)} of steps"


def _memory_tile(memory: dict[int, int]) -> Tile | None:
    if not memory:
        return None
    most = max(memory, key=memory.__getitem__)
    return "most memory", f"{memory[most] / GIB:.2f} GiB", f"held by rank {most}"


def _skipped_tile(rows: Sequence[StepRow]) -> Tile | None:
    skipped = sum(row.skipped for row in rows)
    return ("updates skipped", f"{skipped:,}", "the gradient was not finite") if skipped else None


def _bad_tile(events: Sequence[Record]) -> Tile | None:
    bad = {
        (event.get("split"), str(event.get("index"))) for event in events if event["event"] == "bad sample"
    }
    return ("bad samples", f"{len(bad):,}", "could not be read; left out or replaced") if bad else None


def _duration(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.3g} s"
    whole = int(seconds)
    hours, minutes = whole // 3600, whole // 60 % 60
    return f"{hours:,} h {minutes} min" if hours else f"{minutes} min {whole % 60} s"


def _charts(story: Story) -> str:
    rows, unit = story.steps, story.unit
    loss, speed = _points(rows, "loss"), _points(rows, "units_per_s")
    evals = [(float(step), loss) for step, loss in story.evals if loss is not None]
    skipped = [(float(row.step), 0.0) for row in rows if row.skipped]
    series = [
        *_with_smooth("training", loss),
        Series("evaluation", "dots", evals, 2),
        Series("skipped", "crosses", skipped, 3),
    ]
    charts = [
        Chart("Loss", series, _resumed(story)),
        Chart("Gradient norm", _with_smooth("norm", _points(rows, "grad_norm"))),
        Chart("Learning rate", [Series("rate", "line", _points(rows, "lr"))], from_zero=True),
        Chart(f"{unit.capitalize()} a second", _with_smooth("speed", speed), from_zero=True),
    ]
    memory = {rank: held / GIB for rank, held in story.memory.items()}
    return "\n".join([*map(line_chart, charts), bar_chart("Most memory by rank", memory, "GiB")])


def _with_smooth(name: str, points: Sequence[Point]) -> list[Series]:
    smoothed = smooth(points)
    if not smoothed:
        return [Series(name, "line", points)]
    return [Series(name, "faint", points), Series("smoothed", "line", smoothed)]


def _points(rows: Sequence[StepRow], field: str) -> list[Point]:
    return [(float(row.step), value) for row in rows if (value := getattr(row, field)) is not None]


def _resumed(story: Story) -> list[float]:
    """Steps after which a start went on."""
    starts = [event.get("step") for event in story.events if event["event"] == "start"]
    return [float(step) for step in starts if is_step(step) and step]


def _events(story: Story) -> str:
    rows = _event_rows(story.events)
    if not rows:
        return ""
    if len(rows) > FIRST_EVENTS + LAST_EVENTS:
        between = len(rows) - FIRST_EVENTS - LAST_EVENTS
        more = ("", f"{between:,} more", "", "in events.jsonl")
        rows = [*rows[:FIRST_EVENTS], more, *rows[-LAST_EVENTS:]]
    zone = datetime.now().astimezone().tzname()
    return table((f"time ({zone})", "event", "step", "details"), rows, "events", "stack events")


def _event_rows(events: Sequence[Record]) -> list[tuple[str, str, str, str]]:
    """A row an event; skipped steps that follow each other share one."""
    rows: list[tuple[str, str, str, str]] = []
    begin = 0
    while begin < len(events):
        event, end = events[begin], begin + 1
        while (
            event["event"] == "step skipped" and end < len(events) and events[end]["event"] == "step skipped"
        ):
            end += 1
        details, step = escape(_details(event)), _step_of(event)
        if end - begin > 1:
            step, details = (
                f"{step} to {_step_of(events[end - 1])}",
                f"{end - begin:,} steps in a row{escape(_cause(event))}",
            )
        rows.append((_time(event.get("time")), escape(event["event"]), step, details))
        begin = end
    return rows


def _step_of(event: Record) -> str:
    step = event.get("step")
    return f"{step:,}" if is_step(step) else escape(_plain(step))


def _details(event: Record) -> str:
    """What an event says beside its time and step, in words if it is a known one."""
    more = {key: _plain(value) for key, value in event.items() if key not in ("time", "event", "step")}
    try:
        return DETAILS[event["event"]].format_map(more) + _cause(event)
    except KeyError:  # another event, or one without its usual values
        return ", ".join(f"{key} {value}" for key, value in more.items())


def _cause(event: Record) -> str:
    """Why a step was skipped, where that was looked for."""
    found = event["event"] == "step skipped" and "message" in event
    return f"; {_plain(event['message'])}" if found else ""


def _plain(value: Any) -> str:
    return "" if value is None else str(value)


def _time(value: Any) -> str:
    """Seconds since 1970 as HTML that says the local time."""
    seconds = number(value)
    if seconds is None or not 0 <= seconds < YEAR_3000:
        return ""
    moment = datetime.fromtimestamp(seconds, tz=UTC)
    return f'<time datetime="{moment:%Y-%m-%dT%H:%M:%SZ}">{moment.astimezone():%Y-%m-%d %H:%M:%S}</time>'


def _checkpoints(story: Story) -> str:
    rows = [
        (
            escape(f"{found.step:,}"),
            _size(found.manifest["files"]),
            _time(found.manifest.get("written")),
            f"<code>{escape(str(found.path.resolve()))}</code>",
        )
        for found in story.checkpoints
    ]
    rows += [
        (
            "",
            "",
            "",
            f"<code>{escape(str(entry.path.resolve()))}</code> is no checkpoint: {escape(entry.reason)}",
        )
        for entry in story.refused
    ]
    if not rows:
        return "<p>There is none.</p>"
    return table(("step", "size", "written", "folder"), rows, "checkpoints", "stack checkpoints")


def _size(files: dict[str, int]) -> str:
    size = sum(files.values())
    return f"{size / GIB:.2f} GiB" if size >= GIB / 10 else f"{size / 2**20:.2f} MiB"


def _commands(story: Story) -> str:
    """How to go on from here."""
    folder = shlex.quote(str(story.run.path.resolve()))
    total, lines = value_of(story.job, "train", "steps"), []
    if story.ending.state == "finished" and is_step(total) and story.checkpoints:
        lines += ["# train longer", f"shoal train {folder} train.steps={2 * total}"]
    elif story.ending.state in ("stopped", "failed", "gone") and story.job:
        again = "go on" if story.checkpoints else "train again, from the start"
        lines += [f"# {again}", f"shoal train {folder}"]
    if story.checkpoints and value_of(story.job, "run", "data"):
        lines += ["# sample", f'shoal sample {folder} "def "']
    return text_block("\n".join(lines), "commands") if lines else ""


def _numbers(story: Story) -> str:
    """Steps at equal distances as a table: what the charts show, without sight of them."""
    rows = story.steps
    if not rows:
        return ""
    places = sorted({round(index * (len(rows) - 1) / (NUM_ROWS - 1)) for index in range(NUM_ROWS)})
    evals = dict(story.evals)
    cells = [
        (
            f"{row.step:,}",
            _cell(row.loss),
            _cell(evals.get(row.step)),
            _cell(row.grad_norm),
            _cell(row.lr),
            _cell(row.units_per_s),
        )
        for row in (rows[place] for place in places)
    ]
    columns = ("step", "loss", "evaluation", "gradient norm", "learning rate", f"{story.unit} a second")
    return folded(f"{len(cells)} of {len(rows):,} steps", table(columns, cells, "numbers", "numbers"))


def _cell(value: float | None) -> str:
    return "" if value is None else short(value)


def _settings(story: Story) -> list[str]:
    texts = dict(story.texts)
    plan = value_of(story.job, "plan")
    if "plan.toml" not in texts and isinstance(plan, dict):
        texts["plan.toml"] = tomli_w.dumps(plan)
    said = (("Job", "job.toml"), ("Plan", "plan.toml"), ("Cluster", "cluster.toml"))
    return [folded(name, text_block(texts[file], file)) for name, file in said if file in texts]


def _list(items: Sequence[str]) -> str:
    return f"<ul>{''.join(f'<li>{escape(item)}</li>' for item in items)}</ul>" if items else ""
