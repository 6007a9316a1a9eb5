"""The page of a picture is one file that needs nothing else, and text in it stays text."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from shoal.cluster import Cluster
from shoal.planner.page import page_of
from shoal.planner.picture import Choice, option_of
from shoal.planner.strategies import STRATEGIES, plan_of
from tests.planner.made import made_prediction, made_settings

BAD = "</script><script>alert(1)</script><img src=x onerror=alert(1)>\"'&amp;<!--"
ASSETS = Path(__file__).parents[2] / "shoal" / "planner" / "picture_page"


def made_picture(name: str = "blocks.0.w", *, timed: bool = False) -> dict[str, Any]:
    settings, cluster = made_settings(), Cluster.parse("8 h100")
    options = []
    for strategy in STRATEGIES[1:5]:
        plan = plan_of(strategy, settings, cluster, 1)
        prediction = made_prediction(settings, plan, cluster, name=name)
        option = option_of(Choice(strategy.key, cluster, plan), prediction, settings)
        options.append(option if timed else option | {"step": None, "timeline": []})
    options.append(option_of(Choice("one", cluster, None), f"8 devices, {name}", settings))
    if timed:
        event = {"rank": 0, "lane": "compute", "name": name, "phase": "forward", "micro_batch": 0}
        options[0]["timeline"] = [event | {"begin_s": 0.0, "end_s": 0.5}]
        options[0]["step"] = {
            "seconds": 1.25,
            "low_s": 1.0,
            "high_s": 1.5,
            "units_per_s": 1e4,
            "unit": "tokens",
        }
        options[0]["step"] |= {
            "mfu": 0.4,
            "bound_by": "compute",
            "parts": {},
            "exposed_s": 0.1,
            "idle_s": 0.0,
        }
    return {
        "format": 1,
        "model": f"model {name}",
        "work": "16 samples",
        "cluster": "8 h100",
        "device": {"kind": "h100", "memory_bytes": cluster.device.memory_bytes},
        "said": False,
        "strategies": [{"key": each.key, "name": each.name, "says": each.says} for each in STRATEGIES],
        "devices": [8],
        "categories": [{"key": "parameters", "says": ""}, {"key": "activations", "says": ""}],
        "options": options,
    }


class Page(HTMLParser):
    """Elements with their attributes, and the text of the kinds of elements."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[tuple[str, str]] = []
        self.feed(html)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.texts.append((self.elements[-1][0] if self.elements else "", data))

    @property
    def data(self) -> dict[str, Any]:
        """What the page's script reads."""
        (text,) = [
            text
            for place, (tag, text) in enumerate(self.texts)
            if tag == "script" and text.startswith('{"format"')
        ]
        return json.loads(text)


def test_the_page_needs_nothing_else() -> None:
    html = page_of(made_picture())
    assert not re.search(r"(https?:)?//[a-z]", re.sub(r"^\s*// .*$", "", html, flags=re.MULTILINE))
    assert not re.search(r"@import|url\(|<link|<iframe|\bfetch\(|XMLHttpRequest|\bimport\b", html)
    assert all("src" not in attrs and "href" not in attrs for _, attrs in Page(html).elements)


def test_its_policy_lets_its_own_script_run_alone() -> None:
    html = page_of(made_picture())
    script = html.rpartition("<script>")[2].partition("</script>")[0]
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'" in html


@pytest.mark.parametrize("timed", [False, True])
def test_the_data_round_trips(timed: bool) -> None:
    picture = made_picture(timed=timed)
    assert Page(page_of(picture)).data == picture


def test_a_name_cannot_leave_its_place() -> None:
    picture = made_picture(BAD)
    page = Page(page_of(picture))
    assert sum(tag == "script" for tag, _ in page.elements) == 2
    assert not any(tag == "img" for tag, _ in page.elements)
    assert page.data == picture
    assert any(BAD in text for tag, text in page.texts if tag == "h1")


def test_every_choice_is_in_the_tables_as_text() -> None:
    picture = made_picture(timed=True)
    words = " ".join(text for tag, text in Page(page_of(picture)).texts if tag not in ("script", "style"))
    for option in picture["options"]:
        assert (option["words"] or option["reason"]) in words
    assert "125.0" in words and "does not fit" in words and "1.25 s" in words
    assert "a step" not in " ".join(
        text for tag, text in Page(page_of(made_picture())).texts if tag == "th"
    ), "no column of times that are not there"


def test_what_the_script_looks_for_is_on_the_page() -> None:
    ids = {attrs["id"] for _, attrs in Page(page_of(made_picture())).elements if attrs.get("id")}
    script = "".join(path.read_text() for path in ASSETS.glob("*.js"))
    assert set(re.findall(r"byId\('(\w+)'\)", script)) <= ids
    assert "innerHTML" not in script, "names are text"


def test_the_styles_have_a_color_for_every_category_in_light_and_dark() -> None:
    from shoal.planner.memory import Category

    style = (ASSETS / "page.css").read_text()
    for category in Category:
        assert len(re.findall(rf"--{category}: #", style)) == 2, category


@pytest.mark.skipif(shutil.which("node") is None, reason="node reads the script's syntax")
def test_the_script_is_javascript(tmp_path: Path) -> None:
    script = page_of(made_picture()).rpartition("<script>")[2].partition("</script>")[0]
    (tmp_path / "page.js").write_text(script)
    ran = subprocess.run(["node", "--check", str(tmp_path / "page.js")], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
