"""Saves that ranks do not wait for: the same files, written by who outlives the ranks; what goes wrong fails the save alone."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from shoal.checkpoint.folder import list_checkpoints
from shoal.checkpoint.parts import side_by_side, write_parts
from shoal.checkpoint.plain import whole_tensors
from shoal.checkpoint.store import model_state, save
from shoal.config import Settings
from shoal.launch.local import Outcome
from shoal.launch.worker import StopFlag
from shoal.observe.host import Memory
from shoal.observe.status import RankStatus
from shoal.resilience.handover import HandOver, SaveStuckError, hand_over
from shoal.resilience.saver import SAVES, Saver, Ways, saver
from shoal.run import CheckpointPolicy, Run, read_json_lines
from shoal.train.loop import train
from shoal.world import World, join_world
from tests.checkpoint.test_reshard import Case, set_up
from tests.checkpoint.test_store import AWKWARD
from tests.ranks import run_all, run_ranks
from tests.resilience.test_goes_on import STEPS, Ran, ran, settings
from tests.train.toy import global_batch, part_of

CASES = [
    Case("dense", "replicate 2"),
    Case("dense", "zero 1"),
    Case("dense", "zero 3"),
    Case("dense", "tensor"),
    Case("dense", "pipeline"),
    Case("moe", "expert"),
]


@contextmanager
def saver_of(
    folder: Path, ranks: int, deadline_s: float = 30.0, hurry: Callable[[], bool] = lambda: False
) -> Generator[Saver]:
    run = Run(folder)
    run.create()
    with saver(
        run, CheckpointPolicy(every=1), ranks, deadline_s=deadline_s, hurry=hurry, say=lambda text: None
    ) as made:
        assert made is not None
        yield made


def events(folder: Path, kind: str) -> list[dict[str, Any]]:
    return [event for event in read_json_lines(folder / "events.jsonl") if event["event"] == kind]


def save_both(world: World, case: Case, ways: tuple[Ways, ...], folder: Path) -> None:
    """After each of two steps; the second is saved by the plan that was made for the first."""
    step, hand_over = set_up(world, case), HandOver(ways[world.rank], world)
    for done in (1, 2):
        step(part_of(global_batch(done - 1), done - 1, case.plan, world.rank))
        hand_over.wait()
        assert hand_over.take(
            done, model_state(step.model) | step.state(), {"job": {}}, time.monotonic(), keep=2
        )
        save(folder, done, model_state(step.model) | step.state(), {"job": {}}, world, keep=2)
    hand_over.wait()


def contents(folder: Path) -> list[tuple[bytes, dict[str, Any], list[bytes]]]:
    """Of each checkpoint: the index, the tensors in the manifest, and data files without the headers, which name the save."""
    return [
        (
            (found.path / "index.json").read_bytes(),
            found.manifest["tensors"],
            [path.read_bytes()[64:] for path in sorted(found.path.glob("*.bin"))],
        )
        for found in list_checkpoints(folder)[0]
    ]


def test_the_launcher_writes_the_files_that_the_ranks_would_have_written(tmp_path: Path) -> None:
    with ExitStack() as stack:
        arguments = {}
        for case in CASES:
            folder = tmp_path / f"{case.model} {case.name}"
            made = stack.enter_context(saver_of(folder, 2))
            arguments[case.name] = (case, made.ways, folder / "by the ranks")
        outcomes = run_all(2, save_both, arguments)
        for case, _, folder in arguments.values():
            outcomes[case.name].get()
            by_ranks, by_launcher = contents(folder), contents(folder.parent / "checkpoints")
            assert len(by_ranks) == 2 and by_ranks == by_launcher
            assert by_ranks[0] != by_ranks[1]


def test_tensors_of_every_kind_come_back_to_the_bit(tmp_path: Path) -> None:
    with (
        saver_of(tmp_path, 1) as made,
        patch("shoal.resilience.saver.cores", return_value=16.0),  # several threads write the file
        join_world(rank=0, size=1, device="cpu") as world,
    ):
        assert HandOver(made.ways[0], world).take(1, AWKWARD, {"note": "mine"}, time.monotonic(), keep=2)
    (found,) = list_checkpoints(tmp_path / "checkpoints")[0]
    assert found.manifest["note"] == "mine" and found.manifest["torch"] == torch.__version__
    loaded = dict(whole_tensors(found))
    assert loaded.keys() == AWKWARD.keys()
    for name, tensor in AWKWARD.items():
        same = loaded[name].contiguous().view(-1).view(torch.uint8)
        assert torch.equal(same, tensor.contiguous().view(-1).view(torch.uint8)), name


@contextmanager
def slow_disk(seconds: float, step: int | None = None) -> Generator[None]:
    """Files of a step, or of any, take so long."""

    def slowly(folder: Path, origin: Any, parts: Any, threads: int = 1) -> Any:
        if step is None or origin.step == step:
            time.sleep(seconds)
        return write_parts(folder, origin, parts, threads)

    with patch("shoal.resilience.saver.write_parts", slowly):
        yield


@contextmanager
def full_disk(step: int) -> Generator[None]:
    """Files of a step do not fit."""

    def full(folder: Path, origin: Any, parts: Any, threads: int = 1) -> Any:
        if origin.step == step:
            raise OSError(28, "No space left on device")
        return write_parts(folder, origin, parts, threads)

    with patch("shoal.resilience.saver.write_parts", full):
        yield


POLICY: dict[str, Any] = {"checkpoint": {"memory_every": 0, "every": 2, "keep": 4}}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Ran:
    from shoal.launch.ranks import Ranks
    from tests.launch.warm import start

    policy = {"checkpoint": {"memory_every": 0, "every": 2, "keep": 4, "asynchronous": False}}
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Ranks, "start", start)
        return ran(tmp_path_factory.mktemp("undisturbed"), **policy)


def assert_same(found: Ran, undisturbed: Ran, saved: list[int]) -> None:
    assert found.outcome == Outcome("ok", STEPS)
    assert found.numbers == undisturbed.numbers
    kept = list_checkpoints(found.folder / "checkpoints")[0]
    assert [checkpoint.step for checkpoint in kept] == saved
    ours, theirs = (
        dict(whole_tensors(list_checkpoints(r.folder / "checkpoints")[0][-1])) for r in (found, undisturbed)
    )
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in ours.items())


@pytest.mark.usefixtures("warm_nursery")
def test_a_save_in_flight_becomes_a_checkpoint_when_ranks_are_killed_and_the_run_goes_on_from_it(
    undisturbed: Ran, tmp_path: Path
) -> None:
    files, threads = set(Path("/proc/self/fd").iterdir()), threading.active_count()
    with slow_disk(1.0, step=4):
        found = ran(tmp_path, "kill rank=1 step=4 phase=data", **POLICY)
    assert_same(found, undisturbed, [2, 4, 6])
    assert found.of("start") == [0, 4]
    assert found.of("save") == [2, 4, 6]
    kinds = [event["event"] for event in found.events]
    assert (
        kinds.index("fault") < [n for n, kind in enumerate(kinds) if kind == "save"][1]
    )  # it was not there yet
    assert set(Path("/proc/self/fd").iterdir()) <= files and threading.active_count() == threads


@pytest.mark.usefixtures("warm_nursery")
def test_what_only_some_ranks_handed_over_is_no_checkpoint(undisturbed: Ran, tmp_path: Path) -> None:
    found = ran(tmp_path, "kill rank=1 step=4 phase=save", **POLICY)
    assert_same(found, undisturbed, [2, 4, 6])
    assert found.of("start") == [0, 2]


@pytest.mark.usefixtures("warm_nursery")
def test_ranks_wait_for_a_slow_disk_and_say_so_and_everything_is_saved(
    undisturbed: Ran, tmp_path: Path
) -> None:
    with slow_disk(0.7):
        found = ran(tmp_path, **POLICY)
    assert_same(found, undisturbed, [2, 4, 6])
    assert found.of("save waited") == [4]
    (waited_s,) = found.of("save waited", "seconds")
    first, second, last = (event for event in found.events if event["event"] == "save")
    assert second["stall_s"] > waited_s > 0.2
    assert first["seconds"] > 0.7 > first["stall_s"]
    assert last["stall_s"] == last["seconds"]  # the last one is waited for
    assert found.events[-1]["event"] == "end"


@pytest.mark.usefixtures("warm_nursery")
def test_a_full_disk_fails_the_save_and_not_the_run(undisturbed: Ran, tmp_path: Path) -> None:
    with full_disk(step=2):
        found = ran(tmp_path, **POLICY)
    assert_same(found, undisturbed, [4, 6])
    (reason,) = found.of("save failed", "reason")
    assert "No space left on device" in reason and "it needs " in reason and " were free" in reason


def state(number: float) -> dict[str, Tensor]:
    return {"model.weight": torch.full((6, 20), float(number))}


@pytest.mark.parametrize(("deadline_s", "hurry"), [(0.3, False), (60.0, True)], ids=["deadline", "signal"])
def test_a_save_that_hangs_is_given_up_and_never_becomes_a_checkpoint(
    deadline_s: float, hurry: bool, tmp_path: Path
) -> None:
    hangs, goes_on = threading.Event(), threading.Event()

    def hang(*words: Any) -> Any:
        if not hangs.is_set():
            hangs.set()
            assert goes_on.wait(20)
        return write_parts(*words)

    with (
        patch("shoal.resilience.saver.write_parts", hang),
        saver_of(tmp_path, 1, deadline_s, lambda: hurry and not goes_on.is_set()) as made,
        join_world(rank=0, size=1, device="cpu", deadline_s=0.3) as world,
    ):
        hand_over = HandOver(made.ways[0], world)
        assert hand_over.take(1, state(1), {}, time.monotonic(), keep=2)
        assert hangs.wait(20)
        with pytest.raises(SaveStuckError, match=r"nothing has been written for 0\.3 s"):
            hand_over.wait()
        made.settle()  # those ranks are gone
        again = HandOver(made.ways[0], world)
        assert again.take(1, state(7), {}, time.monotonic(), keep=2)  # fills the same memory
        goes_on.set()
        again.wait()
    (found,) = list_checkpoints(tmp_path / "checkpoints")[0]
    assert dict(whole_tensors(found))["model.weight"].unique().tolist() == [7.0]
    assert [event["step"] for event in events(tmp_path, "save failed")] == [1]
    assert "given up" in events(tmp_path, "save failed")[0]["reason"]
    assert len(events(tmp_path, "save")) == 1


def test_what_saves_are_handed_over_in_is_made_before_the_first(tmp_path: Path) -> None:
    with saver_of(tmp_path, 1) as made, join_world(rank=0, size=1, device="cpu") as world:
        hand_over = HandOver(made.ways[0], world)
        hand_over.get_ready(state(1))
        assert hand_over._making is not None
        there = hand_over._making.wait()
        assert Path(made.ways[0].memory).stat().st_blocks * 512 >= there.handed_at[0]
        assert hand_over.take(1, state(1), {}, time.monotonic(), keep=2)
        assert hand_over._copies is there
        hand_over.wait()
    (found,) = list_checkpoints(tmp_path / "checkpoints")[0]
    assert dict(whole_tensors(found))["model.weight"].unique().tolist() == [1.0]


def test_memory_that_cannot_be_made_is_told_by_the_first_save(tmp_path: Path) -> None:
    with saver_of(tmp_path, 1) as made, join_world(rank=0, size=1, device="cpu") as world:
        hand_over = HandOver(made.ways[0], world)
        with patch("shoal.resilience.copies._reserve", side_effect=OSError(28, "No space left on device")):
            hand_over.get_ready(state(1))
            assert hand_over._making is not None
            with pytest.raises(OSError, match="No space left"):
                hand_over._making.wait()
        assert not hand_over.problem
        assert not hand_over.take(1, state(1), {}, time.monotonic(), keep=2)
        assert "rank 0 cannot have the memory to hand over in: [Errno 28] No space left" in hand_over.problem


def test_a_state_that_is_another_by_the_first_save_is_planned_again(tmp_path: Path) -> None:
    with saver_of(tmp_path, 1) as made, join_world(rank=0, size=1, device="cpu") as world:
        hand_over = HandOver(made.ways[0], world)
        hand_over.get_ready(state(1))
        later = state(1) | {"buffer.made by the first forward": torch.arange(5)}
        assert hand_over.take(1, later, {}, time.monotonic(), keep=2)
        hand_over.wait()
    (found,) = list_checkpoints(tmp_path / "checkpoints")[0]
    assert dict(whole_tensors(found))["buffer.made by the first forward"].tolist() == [0, 1, 2, 3, 4]


def test_any_error_of_the_making_is_told_by_the_first_save(tmp_path: Path) -> None:
    with saver_of(tmp_path, 1) as made, join_world(rank=0, size=1, device="cpu") as world:
        hand_over = HandOver(made.ways[0], world)
        with patch("shoal.resilience.copies.opened", side_effect=RuntimeError("no such device")):
            assert not hand_over.take(1, state(1), {}, time.monotonic(), keep=2)
        assert "to hand over in: RuntimeError: no such device" in hand_over.problem


def test_what_nobody_waits_for_any_more_is_not_made_to_the_end(tmp_path: Path) -> None:
    pieces: list[int] = []

    def reserve(path: str, nbytes: int, pause: Callable[[float], None]) -> None:
        for piece in range(1000):
            pieces.append(piece)
            pause(10.0)

    with saver_of(tmp_path, 1) as made, join_world(rank=0, size=1, device="cpu") as world:
        hand_over = HandOver(made.ways[0], world)
        with patch("shoal.resilience.copies._reserve", reserve):
            hand_over.get_ready(state(1))
            began = time.monotonic()
            hand_over.close()
        assert time.monotonic() - began < 5
    assert len(pieces) < 1000


def test_who_waits_ends_the_pauses(tmp_path: Path) -> None:
    with saver_of(tmp_path, 1) as made, join_world(rank=0, size=1, device="cpu") as world:
        hand_over = HandOver(made.ways[0], world)
        with patch("shoal.resilience.copies._reserve", lambda path, nbytes, pause: pause(60.0)):
            hand_over.get_ready(state(1))
            assert hand_over._making is not None
            began = time.monotonic()
            hand_over._making.wait()
        assert time.monotonic() - began < 20


def test_where_there_is_no_room_for_a_copy_ranks_are_told_to_write_themselves(tmp_path: Path) -> None:
    with saver_of(tmp_path, 1) as made, join_world(rank=0, size=1, device="cpu") as world:
        hand_over = HandOver(made.ways[0], world)
        with patch("shoal.resilience.handover.memory", return_value=Memory(900, 1000)):
            assert not hand_over.take(1, state(1), {}, time.monotonic(), keep=2)
        assert "544 bytes of host memory, and 100 of 1,000 are free" in hand_over.problem
        assert not hand_over.take(2, state(2), {}, time.monotonic(), keep=2)
        assert hand_over.wait() == 0.0


@pytest.mark.parametrize("policy", [{"every": 0}, {"every": 5, "asynchronous": False}])
def test_no_memory_is_held_for_runs_that_do_not_save_as_they_go(
    policy: dict[str, Any], tmp_path: Path
) -> None:
    files = set(Path("/proc/self/fd").iterdir())
    checkpoints = CheckpointPolicy.model_validate(policy)
    with saver(
        Run(tmp_path), checkpoints, 2, deadline_s=1.0, hurry=lambda: False, say=lambda text: None
    ) as made:
        assert made is None
        assert set(Path("/proc/self/fd").iterdir()) <= files


def test_a_rank_reads_its_ways_as_the_launcher_wrote_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shoal.resilience.handover._to_rank_0", pytest.fail)
    policy = CheckpointPolicy(every=1)
    with saver_of(tmp_path, 1) as made, join_world(rank=0, size=1, device="cpu") as world:
        monkeypatch.setenv(SAVES, json.dumps(made.ways[0]))
        with hand_over(policy, Run(tmp_path), world) as found:
            assert found is not None and found.take(1, state(1), {}, time.monotonic(), keep=2)
            found.wait()
    assert [checkpoint.step for checkpoint in list_checkpoints(tmp_path / "checkpoints")[0]] == [1]


def train_with_a_full_disk(world: World, found: Settings) -> None:
    with full_disk(step=2):
        train(found, world, RankStatus(None, world.rank), StopFlag())


def test_under_another_launcher_a_thread_of_rank_0_writes(undisturbed: Ran, tmp_path: Path) -> None:
    files = set(Path("/proc/self/fd").iterdir())
    Run(tmp_path).create()
    run_ranks(2, train_with_a_full_disk, settings(tmp_path, **POLICY))
    found = Ran(Outcome("ok", STEPS), tmp_path)
    assert_same(found, undisturbed, [4, 6])
    assert found.of("save failed") == [2]
    during, last = (event for event in found.events if event["event"] == "save")
    assert during["stall_s"] < during["seconds"] and last["stall_s"] == last["seconds"]
    assert set(Path("/proc/self/fd").iterdir()) <= files


def test_paths_that_lead_to_another_process_are_not_followed(tmp_path: Path) -> None:
    with saver_of(tmp_path, 1) as made, join_world(rank=0, size=1, device="cpu") as world:
        other = made.ways[0]._replace(name="shoal-save-of-another")
        hand = HandOver(other, world)
        assert not hand.take(1, state(1), {}, time.monotonic(), keep=2)
        assert "it is of another process" in hand.problem


def test_a_thread_that_never_returns_does_not_keep_a_process() -> None:
    program = (
        "import threading\n"
        "from shoal.checkpoint.parts import side_by_side\n"
        "inside = threading.Event()\n"
        "def hang(item): inside.set(); threading.Event().wait()\n"
        "threading.Thread(target=side_by_side, args=(hang, [1, 2], 2), daemon=True).start()\n"
        "inside.wait()\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=20)


def test_work_side_by_side_comes_in_order_and_its_first_error_is_raised() -> None:
    assert side_by_side(lambda item: 2 * item, list(range(20)), 3) == list(range(0, 40, 2))
    with pytest.raises(ZeroDivisionError):
        side_by_side(lambda item: 1 / item, [1.0, 0.0, 2.0], 2)
