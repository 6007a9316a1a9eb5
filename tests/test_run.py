"""A run directory's files appear whole, and lines of several writers do not mix."""

from __future__ import annotations

import json
import multiprocessing
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from shoal.config import parse
from shoal.run import Run, append_json, read_json_lines, write_whole


def test_a_new_run_has_its_folders_and_nothing_else(tmp_path: Path) -> None:
    run = Run(tmp_path / "deep" / "run")
    run.create()
    run.create()  # a run that goes on
    assert sorted(path.name for path in run.path.iterdir()) == ["checkpoints", "ranks"]
    assert (run.ranks, run.checkpoints) == (run.path / "ranks", run.path / "checkpoints")


def test_a_directory_that_cannot_be_is_named_with_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(
        ValueError, match=r"run\.dir = '.*/file/run' cannot be written: .*choose another run\.dir"
    ):
        Run(tmp_path / "file" / "run").create()


def test_a_file_that_is_rewritten_is_the_new_one_and_leaves_nothing_beside_it(tmp_path: Path) -> None:
    path = tmp_path / "job.toml"
    write_whole(path, "old, and longer")
    write_whole(path, "Grüße\n")
    assert path.read_text(encoding="utf-8") == "Grüße\n"
    assert list(tmp_path.iterdir()) == [path]


def test_a_write_that_fails_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "job.toml"
    write_whole(path, "old")
    with pytest.raises(UnicodeEncodeError):
        write_whole(path, "half \ud800")  # a lone surrogate has no UTF-8
    assert path.read_text() == "old"


def _reread(path: Path, seen: multiprocessing.Queue) -> None:
    texts = set()
    while (text := path.read_text()) != "end":
        texts.add(text)
    seen.put(texts)


def test_a_reader_sees_the_old_file_or_the_new_one_and_nothing_between(tmp_path: Path) -> None:
    path, whole = tmp_path / "status", {letter * 200_000 for letter in "ab"}
    context = multiprocessing.get_context("fork")
    seen = context.Queue()
    write_whole(path, "a" * 200_000)
    reader = context.Process(target=_reread, args=(path, seen))
    reader.start()
    for _ in range(30):
        for text in whole:
            write_whole(path, text)
    write_whole(path, "end")
    assert seen.get(timeout=20) <= whole
    reader.join(10)


def _append_many(path: Path, writer: int) -> None:
    for number in range(200):
        append_json(path, {"writer": writer, "number": number, "text": "x" * 500})


def test_lines_of_several_processes_do_not_mix(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    context = multiprocessing.get_context("fork")
    writers = [context.Process(target=_append_many, args=(path, writer)) for writer in range(3)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join(30)
    records = [json.loads(line) for line in path.read_text().splitlines()]
    for writer in range(3):
        numbers = [record["number"] for record in records if record["writer"] == writer]
        assert numbers == list(range(200))


def test_a_number_that_json_does_not_have_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError):
        append_json(tmp_path / "metrics.jsonl", {"loss": float("nan")})
    assert list(read_json_lines(tmp_path / "metrics.jsonl")) == []


def test_a_line_cut_short_is_left_out_and_the_others_are_read(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    append_json(path, {"step": 1})
    with path.open("a") as file:
        file.write('{"step": 2, "lo')
    assert list(read_json_lines(path)) == [{"step": 1}]
    append_json(path, {"step": 3})  # goes on in the broken line
    append_json(path, {"step": 4})
    assert list(read_json_lines(path)) == [{"step": 1}, {"step": 4}]


def test_no_file_has_no_lines(tmp_path: Path) -> None:
    assert list(read_json_lines(tmp_path / "none.jsonl")) == []


def test_events_tell_what_and_when(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.event("start", step=0)
    run.event("save", step=5, path="a")
    first, second = read_json_lines(run.events_file)
    assert (first["event"], second["event"], second["step"], second["path"]) == ("start", "save", 5, "a")
    assert 1.6e9 < first["time"] <= second["time"]


def test_a_full_disk_loses_a_line_and_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = Run(tmp_path)
    run.events_file.symlink_to("/dev/full")
    run.event("start", step=0)
    assert "No space left" in capsys.readouterr().err


def test_a_directory_is_held_by_one_run_at_a_time(tmp_path: Path) -> None:
    run = Run(tmp_path / "a b")
    run.create()
    with (
        run.locked(),
        pytest.raises(ValueError, match="in use by another run"),
        Run(tmp_path / "a b").locked(),
    ):
        pass
    with run.locked():
        pass


def test_setting_aside_keeps_everything_and_numbers_the_folders(tmp_path: Path) -> None:
    run = Run(tmp_path / "run")
    run.create()
    assert run.set_aside() is None
    for number in (1, 2):
        run.event("start", number=number)
        run.job_file.write_text("x")
        (run.checkpoints / "step-00000001").mkdir()
        assert run.set_aside() == run.path / f"earlier-{number}"
        assert not run.events_file.exists() and not any(run.checkpoints.iterdir())
        kept = run.path / f"earlier-{number}"
        assert {path.name for path in kept.iterdir()} == {"events.jsonl", "job.toml", "checkpoints"}


def test_ranks_may_create_one_run_directory_at_once(tmp_path: Path) -> None:
    run = Run(tmp_path / "run")
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda _: run.create(), range(400)))
    assert sorted(path.name for path in run.path.iterdir()) == ["checkpoints", "ranks"]


def test_one_checkpoint_is_too_few_to_keep_and_the_message_says_why() -> None:
    with pytest.raises(ValueError, match=r"checkpoint\.keep: 1 is too few: if the newest turns out damaged"):
        parse({"checkpoint": {"keep": 1}}, "job.toml")
