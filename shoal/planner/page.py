"""`page_of`: a picture's data as one page that any browser shows without a network."""

from __future__ import annotations

import json
from collections.abc import Iterator
from html import escape
from importlib.resources import files
from string import Template
from typing import Any

from shoal.cluster import GIB
from shoal.observe.page import folded, page, table

SCRIPTS = ("plots.js", "timeline.js", "controls.js")


def page_of(picture: dict[str, Any]) -> str:
    """The page of what `make_picture` returns."""
    title = f"{picture['model']} on {picture['cluster']}: what each device holds"
    body = Template(_asset("page.html")).substitute(
        title=escape(title), work=escape(picture["work"]), table=_table(picture), data=_embedded(picture)
    )
    script = f"'use strict';\n(() => {{\n{''.join(map(_asset, SCRIPTS))}}})();\n"
    return page(title, body, style=_asset("page.css"), script=script)


def _asset(name: str) -> str:
    return files("shoal.planner").joinpath("picture_page", name).read_text(encoding="utf-8")


def _embedded(picture: dict[str, Any]) -> str:
    """JSON in which nothing can end, or begin, an element."""
    text = json.dumps(picture, allow_nan=False, separators=(",", ":"))
    for mark in "<>&":
        text = text.replace(mark, f"\\u{ord(mark):04x}")
    return text


def _table(picture: dict[str, Any]) -> str:
    """Every choice as text; those that can't be are folded, with their reasons."""
    names = {each["key"]: escape(each["name"]) for each in picture["strategies"]}
    can = [option for option in picture["options"] if option["reason"] is None]
    cannot = [option for option in picture["options"] if option["reason"] is not None]
    timed = any(option["step"] for option in can)
    columns = ["strategy", "devices", "GiB a device", "verdict", *(["a step"] if timed else []), "words"]
    rows = [[names[option["strategy"]], *_cells(option, timed)] for option in can]
    reasons = [
        (names[option["strategy"]], str(option["devices"]), escape(option["reason"])) for option in cannot
    ]
    why = table(("strategy", "devices", "why not"), reasons, "what can't be", "choices") if cannot else ""
    what = table(columns, rows, "choices", "choices") if can else "<p>There is none.</p>"
    return what + folded(f"{len(cannot)} that can't be, and why", why)


def _cells(option: dict[str, Any], timed: bool) -> Iterator[str]:
    yield str(option["devices"])
    sizes = sorted({f"{rank['device_bytes'] / GIB:.1f}" for rank in option["ranks"]}, key=float)
    yield sizes[0] if len(sizes) == 1 else f"{sizes[0]} to {sizes[-1]}"
    yield escape(option["fit"]) if option["ranks"][0]["margin_bytes"] is not None else "memory not known"
    if timed:
        yield f"{option['step']['seconds']:.3g} s" if option["step"] else ""
    yield f'<code>{escape(option["words"])}</code> <span>--on "{escape(option["cluster"])}"</span>'
