"""A launch ends well, gracefully, or with a report whose first line names the rank that failed first."""

from __future__ import annotations

import contextlib
import functools
import io
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple, TextIO, cast

import pytest

from shoal.config import Settings, parse
from shoal.launch.local import Outcome, launch
from shoal.launch.ranks import Ranks
from shoal.launch.worker import Tee
from shoal.observe.status import read_status
from shoal.run import read_json_lines
from tests.launch import targets
from tests.launch.warm import start

LOOP = f"{targets.__name__}:loop"
HELLO = f"{targets.__name__}:hello"


def settings(folder: Path, deadline_s: float = 30.0, steps: int = 5, **options: Any) -> Settings:
    return parse(
        {
            "run": {"dir": str(folder), "deadline_s": deadline_s},
            "train": {"steps": steps},
            "model": {"options": options},
        },
        where="test",
    )


def ranks_are_gone(folder: Path, within_s: float = 5.0) -> bool:
    """Whether no process that wrote a status in a run still exists."""
    statuses = [read_status(path) for path in (folder / "ranks").glob("*.status")]
    assert statuses, "no rank ever started"
    return wait_until(lambda: not any(status and exists(status.pid) for status in statuses), within_s)


def exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def wait_until(condition: Callable[[], bool], within_s: float) -> bool:
    end = time.monotonic() + within_s
    while time.monotonic() < end:
        if condition():
            return True
        time.sleep(0.05)
    return condition()


class Failed(NamedTuple):
    """A launch of which rank 1 did what it should not, and what its terminal showed."""

    outcome: Outcome
    took_s: float
    folder: Path
    shown: str


@pytest.fixture(scope="module")
def failed(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], Failed]:
    """Launches with a fault in a phase, each made once."""

    @functools.cache
    def launched(fault: str, phase: str) -> Failed:
        folder, shown = tmp_path_factory.mktemp(f"{fault}-{phase}"), io.StringIO()
        deadline_s = 3.0 if fault in ("stuck", "deaf") else 60.0
        begin = time.monotonic()
        with contextlib.redirect_stderr(shown), pytest.MonkeyPatch.context() as patch:
            patch.setattr(Ranks, "start", start)
            outcome = launch(
                settings(folder, deadline_s, fault=fault, phase=phase), 2, device="cpu", target=LOOP
            )
        return Failed(outcome, time.monotonic() - begin, folder, shown.getvalue())

    return launched


CAUSES = {
    "raise": "rank 1 failed in step 3, phase {}: ValueError: bad sample at index 1234",
    "kill": "rank 1 was killed by SIGKILL in step 3, phase {}",
    "return": "rank 1 finished after step 3 while rank 0 was in step 3, phase {}",
    "stuck": "rank 1 is stuck",
}


@pytest.mark.parametrize(
    ("fault", "phase"),
    # a rank that is stuck is waited for, and its phase is a word that it wrote down before: one is enough
    [*product(("raise", "kill", "return"), targets.PHASES), ("stuck", "step")],
)
def test_the_first_line_names_rank_1_and_the_cause(
    fault: str, phase: str, failed: Callable[[str, str], Failed]
) -> None:
    outcome, took_s, folder, shown = failed(fault, phase)
    assert outcome.state == "failed"
    assert outcome.report.splitlines()[0].startswith(CAUSES[fault].format(phase))
    assert took_s < 30
    assert (folder / "ranks" / "failure.txt").read_text() == outcome.report + "\n"
    assert outcome.report in shown
    assert ranks_are_gone(folder)


def test_a_rank_that_failed_and_cannot_leave_ends_the_run_soon(
    failed: Callable[[str, str], Failed],
) -> None:
    outcome, took_s, *_ = failed("linger", "step")
    assert outcome.report.startswith(CAUSES["raise"].format("step"))
    assert took_s < 30


def test_a_rank_whose_error_finds_no_room_on_the_disk_is_told_with_it(
    failed: Callable[[str, str], Failed],
) -> None:
    outcome, _, folder, _ = failed("full", "step")
    assert not (folder / "ranks" / "1.error.json").exists()
    assert outcome.report.startswith(CAUSES["raise"].format("step"))
    assert f"targets.py:{line_of('raise ValueError')} in raise_error: raise ValueError(" in outcome.report


def test_no_line_is_told_of_a_rank_that_did_not_answer_when_it_was_asked(
    failed: Callable[[str, str], Failed],
) -> None:
    outcome, _, folder, shown = failed("deaf", "step")
    earlier = f"targets.py:{line_of('os.kill(os.getpid(), signal.SIGUSR1)')} in read_forever_and_be_deaf"
    assert "read_forever_and_be_deaf" in (folder / "ranks" / "1.stack").read_text()
    (alert,) = (line for line in shown.splitlines() if line.startswith("no rank has moved for"))
    assert "rank 1 is in step 3, phase step; rank 1 did not come to all_reduce" in alert
    assert outcome.report.startswith("rank 1 is stuck")
    assert "  it did not say where it is\n" in outcome.report
    assert earlier not in outcome.report and earlier not in alert


def test_a_stuck_rank_is_shown_with_its_stack_and_warned_of_first(
    failed: Callable[[str, str], Failed],
) -> None:
    outcome, _, _, shown = failed("stuck", "step")
    assert f"targets.py:{line_of('time.sleep(1000)')} in read_forever" in outcome.report
    where = f"targets.py:{line_of('time.sleep(1000)')} in read_forever"
    call = "all_reduce(sum) of float32 (1,), call 7 of the group of ranks 0, 1"
    waits = f"rank 0 waits there, at {targets.__file__}:{line_of('dist.all_reduce')} in loop"
    (alert,) = (line for line in shown.splitlines() if line.startswith("no rank has moved for"))
    assert "rank 1 is in step 3, phase step, at " in alert
    assert f"{where}; rank 1 did not come to {call}; {waits}; all are stopped after 3 s" in alert
    assert f"  rank 1 did not come to {call}; {waits}\n" in outcome.report


def line_of(text: str) -> int:
    lines = Path(targets.__file__).read_text().splitlines()
    return next(number for number, line in enumerate(lines, start=1) if text in line)


def test_a_report_shows_the_line_of_user_code(failed: Callable[[str, str], Failed]) -> None:
    outcome = failed("raise", "eval").outcome
    assert f"targets.py:{line_of('raise ValueError')} in raise_error: raise ValueError(" in outcome.report
    assert "rank 0 lost its peers in step 3, phase eval" in outcome.report


@pytest.mark.usefixtures("warm_nursery")
def test_a_target_that_cannot_be_imported_is_reported(tmp_path: Path) -> None:
    outcome = launch(settings(tmp_path), 2, device="cpu", target="no.such.module:train")
    assert outcome.state == "failed"
    assert "ModuleNotFoundError: No module named 'no'" in outcome.report


def test_rank_0_keeps_the_terminal_and_all_ranks_have_logs(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert launch(settings(tmp_path), 2, device="cpu", target=HELLO) == Outcome("ok", 5)
    shown = capfd.readouterr().out
    assert "hello from rank 0 of 2" in shown
    assert "hello from rank 1 of 2" not in shown
    for rank in (0, 1):
        assert (tmp_path / "ranks" / f"{rank}.log").read_text() == f"hello from rank {rank} of 2\n"
    files = [f"{rank}.{kind}" for rank in (0, 1) for kind in ("calls", "log", "status")]
    assert sorted(path.name for path in (tmp_path / "ranks").iterdir()) == files


def test_what_a_rank_left_to_the_end_of_its_process_is_done(tmp_path: Path) -> None:
    target = f"{targets.__name__}:part"
    assert launch(settings(tmp_path), 2, device="cpu", target=target) == Outcome("ok", 5)
    left = {path.name for kind in ("thread", "atexit") for path in tmp_path.glob(f"{kind}-*")}
    assert left == {"thread-0", "thread-1", "atexit-0", "atexit-1"}


@pytest.mark.usefixtures("warm_nursery")
def test_a_rank_that_has_done_its_work_and_does_not_end_fails_nothing(tmp_path: Path) -> None:
    target = f"{targets.__name__}:linger"
    assert launch(settings(tmp_path, 2.0), 2, device="cpu", target=target) == Outcome("ok", 5)
    (alert,) = [event for event in read_json_lines(tmp_path / "events.jsonl") if event["event"] == "alert"]
    assert (
        alert["message"] == "ranks 0, 1 finished and did not end within 2 s: killed"
    )  # 0 keeps the store for 1
    assert ranks_are_gone(tmp_path)


@pytest.mark.usefixtures("warm_nursery")
def test_two_launches_at_once_do_not_meet(tmp_path: Path) -> None:
    outcomes: dict[str, Outcome] = {}

    def start(name: str) -> None:
        outcomes[name] = launch(settings(tmp_path / name), 2, device="cpu", target=LOOP)

    threads = [threading.Thread(target=start, args=(name,)) for name in ("a", "b")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert outcomes == {"a": Outcome("ok", 5), "b": Outcome("ok", 5)}


def start_launcher(folder: Path) -> subprocess.Popen[str]:
    """A launcher in a process of its own, once its ranks have done a few steps of a long job."""
    code = (
        "import signal, sys\nfrom shoal.config import Settings\nfrom shoal.launch.local import launch\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # a shell's background jobs ignore it
        f"outcome = launch(Settings.from_toml(sys.argv[1]), 2, device='cpu', target={LOOP!r})\n"
        "print(outcome.state, outcome.step)"
    )
    toml = settings(folder, steps=100_000, pause=0.01).to_toml()
    process = subprocess.Popen([sys.executable, "-c", code, toml], stdout=subprocess.PIPE, text=True)
    files = [folder / "ranks" / f"{rank}.status" for rank in (0, 1)]
    assert wait_until(lambda: all((status := read_status(file)) and status.step > 2 for file in files), 30)
    return process


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_lets_the_ranks_finish_their_step(number: signal.Signals, tmp_path: Path) -> None:
    process = start_launcher(tmp_path)
    process.send_signal(number)
    out, _ = process.communicate(timeout=20)
    saved = {(tmp_path / f"saved-{rank}").read_text() for rank in (0, 1)}
    assert len(saved) == 1
    assert out.split() == ["interrupted", saved.pop()]
    assert ranks_are_gone(tmp_path)


def test_no_rank_outlives_a_launcher_that_is_killed(tmp_path: Path) -> None:
    process = start_launcher(tmp_path)
    process.kill()
    process.communicate()
    assert ranks_are_gone(tmp_path)


def test_a_rank_that_gets_the_signal_itself_stops_all_of_them(tmp_path: Path) -> None:
    process = start_launcher(tmp_path)
    status = read_status(tmp_path / "ranks" / "1.status")
    assert status is not None
    os.kill(status.pid, signal.SIGTERM)
    out, _ = process.communicate(timeout=20)
    assert out.startswith("interrupted")


def test_a_signal_ends_a_rank_that_has_nothing_to_save(tmp_path: Path) -> None:
    """As torchrun's agent sends it to ranks that still wait for others."""
    job = tmp_path / "job.toml"
    job.write_text(settings(tmp_path / "run").to_toml())
    alone = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    process = subprocess.Popen([sys.executable, "-m", "shoal", str(job)], env={**os.environ, **alone})
    assert wait_until((tmp_path / "run" / "ranks" / "0.status").exists, 30)
    time.sleep(0.3)
    process.terminate()
    assert process.wait(timeout=5) == 128 + signal.SIGTERM


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def test_torchrun_ranks_say_who_failed_and_whose_victims_they_are(tmp_path: Path) -> None:
    code = (
        "import os, sys\nfrom shoal.config import Settings\nfrom shoal.launch.worker import run_worker\n"
        f"sys.exit(run_worker(Settings.from_toml(os.environ['JOB']), device='cpu', target={LOOP!r}))\n"
    )
    script = tmp_path / "work.py"
    script.write_text(code)
    job = settings(tmp_path / "run", fault="raise", phase="step").to_toml()
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone", str(script)],
        capture_output=True,
        text=True,
        timeout=100,
        env={**os.environ, "JOB": job, "PYTHONPATH": str(Path.cwd()), "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 1
    own = CAUSES["raise"].format("step")
    assert f"\n{own}" in f"\n{done.stderr}", done.stderr
    assert f"rank 0 was stopped, in step 3, phase step, because {own}" in done.stderr


@pytest.mark.usefixtures("warm_nursery")
def test_a_rank_that_reads_finds_an_end_and_not_what_the_launcher_says_next(tmp_path: Path) -> None:
    target = f"{targets.__name__}:{targets.ask.__name__}"
    assert launch(settings(tmp_path), 2, device="cpu", target=target, quiet=True).state == "ok"


def test_a_second_signal_ends_a_run_without_blaming_a_rank(tmp_path: Path) -> None:
    process = start_launcher(tmp_path)
    statuses = [read_status(tmp_path / "ranks" / f"{rank}.status") for rank in (0, 1)]
    for status in statuses:  # so that they do not do what the first one asks
        assert status is not None
        os.kill(status.pid, signal.SIGSTOP)
    process.send_signal(signal.SIGINT)
    time.sleep(0.5)
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=20)
    assert out.startswith("interrupted")
    events = list(read_json_lines(tmp_path / "events.jsonl"))
    assert [event["event"] for event in events if event["event"] in ("fault", "given up", "killed")] == [
        "killed"
    ]
    assert "by a second SIGINT" in events[-1]["reason"]
    assert ranks_are_gone(tmp_path)


def test_a_terminal_that_has_gone_ends_no_rank(tmp_path: Path) -> None:
    def gone(*_: str) -> int:
        raise BrokenPipeError

    terminal = io.StringIO()
    terminal.write = gone
    with (tmp_path / "log").open("w") as log:
        print("a line", file=cast(TextIO, Tee(terminal, log)))
    assert (tmp_path / "log").read_text() == "a line\n"
