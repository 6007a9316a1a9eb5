"""Runs as their files tell them, and the page of a report as it is parsed."""

from __future__ import annotations

import json
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

from shoal.checkpoint.folder import commit, start
from shoal.config import parse
from shoal.observe.report import write_report
from shoal.run import Run, append_json

VOID = {"meta", "br"}
JOB = {
    "model": {"preset": "1m"},
    "data": {"source": "stdlib"},
    "train": {"steps": 8},
    "plan": {"replicate": 2},
    "run": {"data": "prepared"},
}


class Page(HTMLParser):
    """A parsed page: its elements with their attributes, and the text inside each kind of element."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.html = html
        self.open: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[tuple[str, str]] = []
        self.feed(html)
        self.close()
        assert self.open == [], "every element is closed"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and data.strip():
            self.texts.append((self.open[-1], data))

    def text(self, tag: str) -> list[str]:
        return [text for inside, text in self.texts if inside == tag]

    def all(self, tag: str, kind: str = "") -> list[dict[str, str | None]]:
        """Attributes of elements; of those with a class, if it is given."""
        found = [attrs for name, attrs in self.elements if name == tag]
        return [attrs for attrs in found if not kind or kind in (attrs.get("class") or "").split()]

    @property
    def headline(self) -> str:
        (line,) = self.text("h1")
        return line

    @property
    def words(self) -> str:
        return " ".join(text for tag, text in self.texts if tag not in ("style", "script"))


def new_run(path: Path, **job: Any) -> Run:
    run = Run(path)
    run.create()
    tables = {key: {**JOB.get(key, {}), **job.get(key, {})} for key in {*JOB, *job}}
    run.job_file.write_text(parse(tables, where="test").to_toml(), encoding="utf-8")
    return run


def add_steps(run: Run, first: int, last: int, **changes: Any) -> None:
    lines = []
    for step in range(first, last + 1):
        record = {"step": step, "loss": 6.0 - step / (last + 1), "grad_norm": 1.5, "lr": 1e-3, "tokens": 100}
        record |= {"seconds": 0.5, "tokens_per_s": 200.0, "mfu": None, "memory": 2**30, **changes}
        lines.append(json.dumps(record) + "\n")
    with run.metrics_file.open("a", encoding="utf-8") as file:
        file.writelines(lines)


def finished_run(path: Path, **job: Any) -> Run:
    run = new_run(path, **job)
    run.event("start", step=0, world_size=2, plan="replicate 2")
    add_steps(run, 1, 8)
    append_json(run.metrics_file, {"step": 8, "eval_loss": 5.25, "eval_weight": 64, "seconds": 0.1})
    for rank in (0, 1):
        append_json(run.ranks / f"{rank}.jsonl", {"step": 8, "seconds": 0.5, "memory": (rank + 1) * 2**30})
    run.event("end", step=8)
    return run


def add_checkpoint(run: Run, step: int) -> None:
    aside = start(run.checkpoints, step)
    (aside / "data").write_bytes(bytes(2**20))
    commit(aside, {"step": step, "written": 1.7e9})


def report_of(run: Run) -> Page:
    return Page(write_report(run).read_text(encoding="utf-8"))


def shapes(page: Page) -> list[str]:
    """All places in pictures, as text."""
    geometry = ("x", "y", "x1", "x2", "y1", "y2", "cx", "cy", "width", "height", "points", "data-values")
    return [str(attrs[name]) for _, attrs in page.elements for name in geometry if attrs.get(name)]
