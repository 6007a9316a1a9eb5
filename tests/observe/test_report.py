"""A report tells what a run's files tell, whatever state they are in, in a page that needs nothing else."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from shoal.cli import app
from shoal.config import Settings
from shoal.observe.report import write_report
from shoal.observe.status import RankStatus
from shoal.run import Run, append_json
from tests.observe.page import add_checkpoint, add_steps, finished_run, new_run, report_of, shapes


def test_a_finished_run_is_told_in_a_sentence_numbers_charts_and_tables(tmp_path: Path) -> None:
    run = finished_run(tmp_path / "r")
    page = report_of(run)
    assert page.headline == "llama 1m on stdlib, 2 ranks: finished after step 8 of 8."
    assert page.text("title")[0] == "r: finished"
    titles = ["Loss", "Gradient norm", "Learning rate", "Tokens a second", "Most memory by rank, GiB"]
    assert page.text("b") == titles
    for told in ("5.25", "2.00 GiB", "200", "800", "in 4 s of steps", "held by rank 1"):
        assert told in page.text("dd")
    assert len(page.all("polyline")) == 4
    assert len(page.all("circle", "c2")) == 1
    assert len(page.all("rect")) == 2


def test_samples_are_told_as_samples(tmp_path: Path) -> None:
    run = new_run(tmp_path)
    append_json(
        run.metrics_file, {"step": 1, "loss": 1.0, "samples": 32, "seconds": 1.0, "samples_per_s": 32.0}
    )
    assert "Samples a second" in report_of(run).text("b")


def test_the_page_is_one_file_that_asks_for_nothing_and_runs_only_its_own_script(tmp_path: Path) -> None:
    page = report_of(finished_run(tmp_path))
    assert not [attrs for _, attrs in page.elements if {"src", "href", "srcset", "style"} & set(attrs)]
    assert not [name for _, attrs in page.elements for name in attrs if name.startswith("on")]
    assert not re.search(r"https?://|@import|url\(", page.html)
    (script,) = page.text("script")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = str(page.all("meta")[1]["content"])
    assert policy.startswith("default-src 'none';") and f"script-src 'sha256-{digest}'" in policy


def test_the_page_follows_the_readers_colors_and_width_and_its_boxes_take_the_keyboard(
    tmp_path: Path,
) -> None:
    page = report_of(finished_run(tmp_path))
    (style,) = page.text("style")
    assert "prefers-color-scheme: dark" in style and "max-width: 720px" in style
    assert "width=device-width" in str(page.all("meta")[2]["content"])
    for box in [*page.all("pre"), *page.all("div", "wide")]:
        assert box["tabindex"] == "0" and box["aria-label"]
    for picture in page.all("svg"):
        assert picture.get("aria-label") or picture.get("viewbox"), "named, or a layer of one that is"


def test_events_are_a_table_with_local_times_and_skipped_steps_in_a_row_share_one(tmp_path: Path) -> None:
    run = new_run(tmp_path)
    run.event("start", step=0, world_size=2, plan="replicate 2")
    for step in (3, 4, 5):
        run.event("step skipped", step=step, loss="nan", grad_norm="inf")
    run.event("save", step=6, path="a/b", seconds=0.25)
    run.event("checkpoint refused", path="a/c", reason="no COMMIT")
    run.event("something new", step=7, color="red")
    run.event("stop", step=7)
    page = report_of(run)
    cells = page.text("td")
    for told in (
        "3 to 5",
        "3 steps in a row",
        "a/b, 0.25 s",
        "a/c: no COMMIT",
        "color red",
        "world size 2, replicate 2",
    ):
        assert told in cells
    assert page.headline.endswith("stopped after step 7 of 8, as a signal asked.")
    shown = page.text("time")[1]
    assert abs(time.mktime(time.strptime(shown, "%Y-%m-%d %H:%M:%S")) - time.time()) < 60


def test_of_very_many_events_those_between_are_counted(tmp_path: Path) -> None:
    run = new_run(tmp_path)
    for step in range(1, 1001):
        run.event("save", step=step, path="p", seconds=0.1)
    page = report_of(run)
    assert "900 more" in page.text("td")
    assert len(page.text("time")) == 101


def die_as(run: Run, step: int, act: str) -> None:
    """Leave the status of a process that is gone."""
    code = (
        "import sys; from pathlib import Path; from shoal.observe.status import RankStatus; "
        f"s = RankStatus(Path(sys.argv[1]), 0); s.enter('forward', {step}); {act}"
    )
    subprocess.run([sys.executable, "-c", code, str(run.ranks / "0.status")], check=True)


def test_a_run_that_goes_on_is_told_from_one_that_was_killed(tmp_path: Path) -> None:
    going, killed = new_run(tmp_path / "going"), new_run(tmp_path / "killed")
    for run in (going, killed):
        run.event("start", step=0, world_size=1, plan="one device")
        add_steps(run, 1, 3)
    status = RankStatus(going.ranks / "0.status", 0)
    status.enter("forward", 3)
    die_as(killed, 3, "pass")
    assert report_of(going).headline.endswith("1 rank: still going, at step 3 of 8.")
    assert report_of(killed).headline.endswith("gone without a word at step 3 of 8, killed most likely.")


def test_a_failure_is_told_with_its_cause(tmp_path: Path) -> None:
    run = new_run(tmp_path)
    run.event("start", step=0, world_size=4, plan="replicate 4")
    add_steps(run, 1, 3)
    run.event("fault", rank=2, message="ValueError: no <luck>")
    (run.ranks / "failure.txt").write_text("rank 2 failed first\n  line & line\n")
    page = report_of(run)
    assert page.headline.endswith("4 ranks: failed after step 3 of 8.")
    assert page.text("pre")[0] == "rank 2: ValueError: no <luck>"
    assert "rank 2 failed first\n  line & line\n" in page.text("pre")


def test_without_a_launcher_the_cause_is_the_error_of_the_rank_that_failed_by_itself(tmp_path: Path) -> None:
    run = new_run(tmp_path)
    run.event("start", step=0, world_size=2, plan="replicate 2")
    die_as(run, 1, "s.fail()")
    lost = {"rank": 0, "type": "RuntimeError", "message": "peer gone", "secondary": True}
    cause = {"rank": 1, "type": "KeyError", "message": "'x'", "secondary": False}
    for error in (lost, cause):
        (run.ranks / f"{error['rank']}.error.json").write_text(json.dumps(error))
    assert report_of(run).text("pre")[0] == "rank 1: KeyError: 'x'"


def test_a_run_that_was_resumed_has_the_step_marked_and_is_told_by_its_last_end(tmp_path: Path) -> None:
    run = finished_run(tmp_path, train={"steps": 12})
    run.event("start", step=8, world_size=1, plan="one device")
    add_steps(run, 9, 12)
    run.event("end", step=12)
    page = report_of(run)
    assert len(page.all("line", "mark")) == 1
    assert "resumed" in page.text("span")
    assert page.headline == "llama 1m on stdlib, 1 rank: finished after step 12 of 12."
    assert len(page.all("rect")) == 1, "ranks of the earlier, larger world do not count"


def test_steps_that_are_not_finite_are_marked_and_leave_no_hole_in_the_page(tmp_path: Path) -> None:
    run = new_run(tmp_path)
    add_steps(run, 1, 3)
    add_steps(run, 4, 5, loss=None, grad_norm=None, skipped=True)
    add_steps(run, 6, 8)
    append_json(run.metrics_file, {"step": 8, "eval_loss": None, "eval_weight": 1, "seconds": 0.1})
    page = report_of(run)
    assert len(page.all("line", "cross")) == 2
    assert "updates skipped" in page.text("dt") and "not finite" in page.text("dd")
    assert not re.search(r"\b(nan|inf|None)\b", " ".join(shapes(page)))


@pytest.mark.parametrize(
    "value", ["NaN", "-Infinity", "1e400", "1e200", "1" + 400 * "0", "true", '"x"', "{}"]
)
def test_what_is_no_number_to_draw_is_left_out(value: str, tmp_path: Path) -> None:
    run = new_run(tmp_path)
    add_steps(run, 1, 3)
    with run.metrics_file.open("a") as file:
        file.write(
            f'{{"step": 4, "loss": {value}, "grad_norm": {value}, "lr": {value}, "tokens_per_s": {value}}}\n'
        )
    paths = report_of(run).all("polyline")
    assert [len(str(path["points"]).split()) for path in paths] == [3, 3, 3, 3]


def test_a_run_without_one_finite_loss_says_so(tmp_path: Path) -> None:
    run = new_run(tmp_path)
    add_steps(run, 1, 4, loss=None, grad_norm=None, skipped=True)
    assert report_of(run).text("p").count("no finite values") == 2


def test_one_step_is_a_dot(tmp_path: Path) -> None:
    run = new_run(tmp_path)
    add_steps(run, 1, 1)
    page = report_of(run)
    assert len(page.all("circle")) == 4 and not page.all("polyline")


def test_a_run_that_has_only_begun_is_a_page(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.event("start", step=0, world_size=2, plan="replicate 2")
    assert (
        report_of(run).headline
        == "a model, 2 ranks: gone without a word at the first step, killed most likely."
    )


@pytest.mark.parametrize("name", ["metrics.jsonl", "events.jsonl"])
def test_a_file_may_be_cut_anywhere(name: str, tmp_path: Path) -> None:
    run = finished_run(tmp_path)
    whole = (tmp_path / name).read_bytes()
    for size in range(0, len(whole), 7):
        (tmp_path / name).write_bytes(whole[:size])
        page = report_of(run)
        partial = size > 0 and not whole[:size].endswith((b"\n", b"}"))
        assert (f"{name}: 1 line cut short" in page.words) == partial


def test_what_cannot_be_used_is_named_on_the_page(tmp_path: Path) -> None:
    run = finished_run(tmp_path)
    with run.metrics_file.open("ab") as file:
        file.write(b'[1]\n\xff\xfe\n"x"\n' + b"[" * 100_000 + b"\n")
    run.job_file.write_text("[model\n")
    (run.ranks / "2.status").write_bytes(b"something else")
    (run.path / "plan.toml").mkdir()
    with run.events_file.open("w") as file:
        file.write("{}\n")
    words = report_of(run).words
    assert "metrics.jsonl: 4 lines cut short or not a JSON object" in words
    assert "job.toml is not TOML" in words
    assert "2.status is not a rank's status file" in words
    assert "plan.toml cannot be read" in words


def test_text_from_files_is_text_on_the_page(tmp_path: Path) -> None:
    bad = "</pre></script><script>alert(1)</script><img src=x onerror=alert(1)>\"'&"
    run = new_run(tmp_path / "<b>&amp;", data={"source": bad})
    run.event("start", step=0, world_size=bad, plan=bad)
    run.event(bad, step=bad, **{bad: bad})
    run.event("fault", rank=bad, message=bad)
    (run.ranks / "failure.txt").write_text(bad)
    page = report_of(run)
    assert len(page.all("script")) == 1 and not page.all("img") and page.text("b").count("&amp;") == 0
    assert bad in page.text("td") and bad in page.headline


def test_half_a_surrogate_pair_is_written_as_a_question_mark(tmp_path: Path) -> None:
    run = new_run(tmp_path)
    run.event("\ud800 odd")
    assert "? odd" in report_of(run).text("td")


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**320), 10**320)
    | st.integers(-3, 9)
    | st.floats()
    | st.text(st.characters(), max_size=5),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=3,
)
FIELDS = ("loss", "grad_norm", "lr", "tokens", "seconds", "tokens_per_s", "mfu", "skipped", "eval_loss")
STEPS = st.fixed_dictionaries({"step": st.integers(0, 9) | JSON}, optional=dict.fromkeys(FIELDS, JSON))
EVENTS = st.sampled_from(["start", "save", "step skipped", "stop", "end", "fault", "alert"]) | JSON


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    lines=st.lists(STEPS | JSON, max_size=12),
    events=st.lists(
        st.fixed_dictionaries(
            {"event": EVENTS}, optional=dict.fromkeys(("time", "step", "world_size", "plan"), JSON)
        ),
        max_size=5,
    ),
    job=st.dictionaries(
        st.sampled_from(["model", "data", "train", "run", "plan"]), st.integers() | st.text(max_size=3)
    ),
)
def test_any_json_makes_a_page(
    lines: list[Any], events: list[Any], job: dict[str, Any], tmp_path: Path
) -> None:
    import tomli_w

    run = Run(tmp_path)
    run.metrics_file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    run.events_file.write_text("".join(json.dumps(event) + "\n" for event in events))
    run.job_file.write_text(tomli_w.dumps(job), encoding="utf-8")
    page = report_of(run)
    assert not re.search(r"\b(nan|inf)\b", " ".join(shapes(page)))


def test_a_checkpoint_is_told_with_the_commands_that_use_it(tmp_path: Path) -> None:
    run = finished_run(tmp_path / "a run")
    add_checkpoint(run, 8)
    (run.checkpoints / "step-00000009.tmp").mkdir()
    odd = run.checkpoints / "step-00000007"
    odd.mkdir()
    (odd / "COMMIT").touch()
    (odd / "manifest.json").write_text("[]")
    page = report_of(run)
    assert str(run.checkpoints / "step-00000008") in page.text("code")
    assert "1.00 MiB" in page.text("td")
    assert "a save that did not finish" in page.words and "step-00000007" in page.words
    commands = page.text("pre")[0]
    assert f"shoal train '{run.path}' train.steps=16" in commands
    assert f"shoal sample '{run.path}' \"def \"" in commands


def test_a_run_that_was_stopped_tells_how_to_go_on(tmp_path: Path) -> None:
    run = new_run(tmp_path)
    run.event("stop", step=4)
    add_checkpoint(run, 4)
    assert f"# go on\nshoal train {run.path}" in report_of(run).text("pre")[0]


def test_job_plan_and_cluster_are_there_as_toml(tmp_path: Path) -> None:
    run = finished_run(tmp_path)
    page = report_of(run)
    assert page.text("summary") == ["8 of 8 steps", "Job", "Plan"]
    job, plan = page.text("pre")[-2:]
    assert Settings.from_toml(job).train.steps == 8
    assert "replicate = 2" in plan
    (run.path / "plan.toml").write_text("shard = 2\n")
    (run.path / "cluster.toml").write_text('nodes = 1\ndevices_per_node = 2\n[device]\nkind = "h100"\n')
    page = report_of(run)
    assert page.text("summary")[-2:] == ["Plan", "Cluster"]
    assert page.text("pre")[-2] == "shard = 2\n"
    assert "2 h100 ranks" in page.headline


def test_ten_times_the_steps_of_eight_ranks_take_about_ten_times_as_long_and_few_points(
    tmp_path: Path,
) -> None:
    def seconds(steps: int) -> float:
        run = new_run(tmp_path / str(steps))
        add_steps(run, 1, steps)
        line = '{"step": 1, "seconds": 0.5, "memory": 1073741824}\n'
        for rank in range(8):
            (run.ranks / f"{rank}.jsonl").write_text(line * steps)
        took = []
        for _ in range(4):  # the best of a few: other processes may have the cores
            begin = time.process_time()
            write_report(run)
            took.append(time.process_time() - begin)
        return min(took)

    few = seconds(1_000)
    assert seconds(10_000) < 40 * few  # by the square it were 100 times
    run = Run(tmp_path / "10000")
    assert (run.path / "report.html").stat().st_size < 300_000
    for path in report_of(run).all("polyline"):
        assert len(str(path["points"]).split()) <= 602


def test_the_command_writes_the_page_and_prints_where(tmp_path: Path) -> None:
    run = finished_run(tmp_path)
    ran = CliRunner().invoke(app, ["report", str(run.path)])
    assert (ran.exit_code, ran.stdout) == (0, f"{run.path}/report.html\n")
    ran = CliRunner().invoke(app, ["report", str(run.path), "--json"])
    assert json.loads(ran.stdout) == {"report": f"{run.path}/report.html"}


def test_what_is_no_run_directory_ends_in_one_line_and_code_2(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "none"):
        ran = CliRunner().invoke(app, ["report", str(path)])
        assert ran.exit_code == 2
        (line,) = ran.stderr.splitlines()
        assert line.startswith("shoal: ") and str(path) in line and "no run directory" in line
        assert not (path / "report.html").exists()


def test_a_report_needs_no_torch() -> None:
    code = "import sys, shoal.observe.report; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], env=os.environ).returncode == 0
