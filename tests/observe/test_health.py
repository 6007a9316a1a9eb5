"""GPU health: what is wrong is told once, what is no reason is not, and a GPU that failed is named and left out."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from shoal.observe import health
from shoal.observe.doctor import gpu_findings
from shoal.observe.health import HealthWatch, Note, changes, conditions, visible_gpus
from shoal.observe.nvml import Nvml, Reading
from shoal.run import Run, read_json_lines
from tests.launch.machines import until
from tests.observe.nvml import FakeNvml, Gpu

FINE = Reading(0, 60, 1980, 1980, 99, 0, 0)


def test_a_gpu_that_is_well_or_idle_or_tells_nothing_gives_no_alert() -> None:
    assert conditions(FINE) == {}
    assert conditions(FINE._replace(clock_mhz=345, busy=0, slowed_by=0x1)) == {}
    assert conditions(FINE._replace(slowed_by=0x4, clock_mhz=1500)) == {}  # a power cap is usual at full load
    untold = Nvml(FakeNvml([Gpu(clock=None, ecc=None, remapped=None)])).read(0)
    assert untold.uncorrected is None
    assert conditions(untold) == {}
    assert changes(untold, FINE._replace(uncorrected=7)) == []  # nobody knows when they were


@pytest.mark.parametrize(
    ("gpu", "what", "said"),
    [
        (Gpu(temperature=92, reasons=0x40, clock=900), "heat", "too hot: 92 C, 900 of 1980 MHz"),
        (Gpu(reasons=0x20), "heat", "look at its cooling"),
        (Gpu(reasons=0x88, clock=600), "brake", "slowed down by its hardware: 600 of 1980 MHz"),
        (Gpu(clock=800, reasons=0x4), "slow", "far below its clock by its power cap: 800 of 1980 MHz"),
        (Gpu(remapped=(0, 1, 1, 0)), "remap", "reset it when nothing runs"),
        (Gpu(remapped=(0, 9, 0, 1)), "remap failed", "have it replaced"),
        (Gpu(lost=True), "gone", "does not answer any more"),
    ],
)
def test_each_condition_is_told_with_its_numbers_when_it_comes(gpu: Gpu, what: str, said: str) -> None:
    now = Nvml(FakeNvml([gpu])).read(0)
    (note,) = changes(FINE, now)
    assert note.what == what
    assert said in note.message
    assert note.leave == (what in ("remap failed", "gone"))
    assert changes(now, now) == []
    assert [first.leave for first in changes(None, now)] == [False]  # it was so before the run


def test_only_new_memory_errors_speak_against_a_gpu() -> None:
    old = FINE._replace(uncorrected=2)
    assert changes(None, old) == []
    (note,) = changes(old, FINE._replace(uncorrected=5))
    assert note.leave
    assert "had 3 memory errors that ECC could not correct" in note.message


class Watched:
    """A watch whose looks a test asks for."""

    def __init__(self, gpus: list[Gpu], used: list[int], *, tells_xids: bool = True) -> None:
        self.library = FakeNvml(gpus, tells_xids=tells_xids)
        self.told: list[Note] = []
        self.ranks: list[int] = []
        self.watch = HealthWatch(Nvml(self.library), used, self._tell, every_s=3600.0)
        self.watch.leaving()  # the first look is over

    def _tell(self, rank: int, note: Note) -> None:
        self.ranks.append(rank)
        self.told.append(note)


@pytest.fixture
def watched() -> Callable[..., Watched]:
    return Watched


def test_a_gpu_off_the_bus_is_named_with_what_is_left_and_those_of_others_do_not_count(
    watched: Callable[..., Watched],
) -> None:
    gpus = [Gpu() for _ in range(4)]
    here = watched(gpus, [1, 2, 3])
    gpus[0].xids, gpus[2].xids = [79], [45, 79]
    assert here.watch.leaving() == [
        "GPU 2 had Xid 79: it has fallen off the bus; leave it out: CUDA_VISIBLE_DEVICES=1,3, with plan=auto"
    ]
    assert [(note.gpu, note.what) for note in here.told] == [(2, "xid 79")]
    assert here.ranks == [1]
    here.watch.close()
    assert here.library.open == 0


def test_what_the_first_look_sees_is_an_alert_although_the_watch_is_still_being_built(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpus = [Gpu(), Gpu()]
    gpus[1].xids = [79]
    monkeypatch.setattr(health, "open_nvml", lambda: Nvml(FakeNvml(gpus)))
    start = threading.Thread.start

    def start_and_let_it_go_first(thread: threading.Thread) -> None:
        start(thread)
        time.sleep(0.2)

    monkeypatch.setattr(threading.Thread, "start", start_and_let_it_go_first)
    run = Run(tmp_path / "run")
    run.create()
    with health.health_watched(run, 2, device="auto", environment={}, first_rank=4):
        pass
    (alert,) = read_json_lines(run.events_file)
    assert (alert["rank"], alert["gpu"]) == (5, 1)


def test_errors_of_the_program_are_told_and_are_no_reason(watched: Callable[..., Watched]) -> None:
    gpus = [Gpu()]
    here = watched(gpus, [0])
    gpus[0].xids = [31, 777]
    assert here.watch.leaving() == []
    assert [note.message for note in here.told] == [
        "had Xid 31: a page fault, usually the program's",
        "had Xid 777, see NVIDIA's list of Xids",
    ]
    here.watch.close()


def test_what_comes_and_goes_is_told_once_in_a_while(watched: Callable[..., Watched]) -> None:
    gpus = [Gpu()]
    here = watched(gpus, [0])
    for reasons in (0x40, 0, 0x40, 0, 0x40):
        gpus[0].reasons = reasons
        here.watch.look()
    assert [note.what for note in here.told] == ["heat"]
    here.watch.close()


def test_without_events_other_signs_are_still_seen(watched: Callable[..., Watched]) -> None:
    gpus = [Gpu()]
    here = watched(gpus, [0], tells_xids=False)
    gpus[0].ecc = 1
    (said,) = here.watch.leaving()
    assert said.endswith("; use another machine")
    here.watch.close()


@pytest.mark.parametrize(
    ("visible", "gpus"),
    [(None, [0, 1, 2]), ("", []), ("2,0", [2, 0]), ("0,7,1", [0]), ("GPU-0002,0", [2, 0]), ("MIG-1", [])],
)
def test_gpus_are_counted_as_cuda_does(visible: str | None, gpus: list[int]) -> None:
    assert visible_gpus(Nvml(FakeNvml([Gpu() for _ in range(3)])), visible) == gpus


def test_alerts_are_events_of_the_rank_whose_gpu_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = FakeNvml([Gpu(), Gpu(), Gpu(temperature=91, reasons=0x40)])
    monkeypatch.setattr(health, "open_nvml", lambda: Nvml(library))
    run = Run(tmp_path)
    run.create()
    with health.health_watched(run, 2, device="cpu", environment={}) as watch:
        assert watch is None
    with health.health_watched(run, 2, device="auto", environment={"CUDA_VISIBLE_DEVICES": "1,2,0"}) as watch:
        assert watch is not None
        assert watch.leaving() == []
        # a busy machine may not come to look before it is asked to end
        until(run.events_file.exists, "an alert")
    (event,) = read_json_lines(run.events_file)
    assert (event["event"], event["rank"], event["gpu"]) == ("alert", 1, 2)
    assert event["message"].startswith("GPU 2 is slowed down since it is too hot: 91 C")
    assert library.registered == [1, 2]


def test_the_doctor_tells_of_each_gpu() -> None:
    library = Nvml(FakeNvml([Gpu(), Gpu(ecc=3), Gpu(lost=True)]))
    well, errors, lost = gpu_findings([library.read(gpu) for gpu in range(3)])
    assert (well.verdict, well.value) == ("ok", "60 C, 1980 of 1980 MHz, uncorrected memory errors: 0")
    assert errors.verdict == "note"
    assert (lost.verdict, lost.value) == ("problem", "lost")
