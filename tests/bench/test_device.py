"""`shoal bench device`: from the command line to a profile; what samples, turns and curves are; what is refused."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from typer.testing import CliRunner, Result

from shoal.bench import device_kernels
from shoal.bench.device import (
    CPU_SECONDS,
    GPU_SECONDS,
    over_ranks,
    profile_of,
    ranks_of,
    require_file,
    rising,
)
from shoal.bench.device_collectives import KINDS, group_sizes
from shoal.bench.device_kernels import FLOAT8, dtypes_of, product_s
from shoal.bench.device_rank import Bench
from shoal.bench.device_show import describe_profile
from shoal.bench.device_sizes import ON_CPU, ON_GPU
from shoal.bench.stopwatch import LEAST_SAMPLES, Part, Stopwatch, coarse_first, take_turns, visit
from shoal.cli import app
from shoal.cluster import Cluster
from shoal.launch.local import Outcome
from shoal.parallel.peers import Peers
from shoal.planner.profile import Beside, Curve, Profile, read_profile
from shoal.world import World, join_world
from tests.parallel.shared_memory import shared_peers
from tests.ranks import run_ranks

CPU = torch.device("cpu")
SMALL = ON_CPU._replace(copies=[2**12, 2**20], large=64, gathered=2**12)


def shoal(*words: str) -> Result:
    return CliRunner().invoke(app, ["bench", "device", *words], prog_name="shoal")


def watch() -> Stopwatch:
    return Stopwatch(CPU, float)


def assert_rises(curve: Curve) -> None:
    sizes, seconds = zip(*curve, strict=True)
    assert list(sizes) == sorted(set(sizes))
    assert list(seconds) == sorted(seconds)
    assert seconds[0] > 0


def test_the_command_writes_a_profile_of_two_ranks_that_reads_back(tmp_path: Path) -> None:
    file = tmp_path / "deep" / "cpu.json"
    result = shoal("--ranks", "2", "--seconds", "1", "--out", str(file), "--json")
    assert result.exit_code == 0, result.stderr
    profile = read_profile(file)
    assert profile == Profile.model_validate_json(result.stdout)
    assert (profile.device, profile.devices) == ("cpu", 2)
    assert torch.__version__.partition("+")[0] in profile.about
    assert re.search(r"in \d+ s on 2 ranks", profile.about)
    assert {matmul.dtype for matmul in profile.matmuls} == {"float32", "bfloat16"}
    assert {f"{kind}/2" for kind in KINDS} == set(profile.collectives)
    assert min(profile.host.model_dump().values()) > 0
    assert profile.beside == Beside()  # CPU ranks don't measure it
    for curve in (profile.moves, *profile.collectives.values()):
        assert_rises(curve)


def test_a_rank_that_fails_is_told_as_the_launcher_tells_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    report = "rank 1 failed in step 0, phase attention: out of memory"
    monkeypatch.setattr("shoal.bench.device.launch", lambda *_, **__: Outcome("failed", 0, report))
    result = shoal("--out", str(tmp_path / "cpu.json"))
    assert (result.exit_code, result.stderr) == (1, f"shoal: {report}\n")
    assert not (tmp_path / "cpu.json").exists()


def answer(slower: float) -> dict[str, Any]:
    """A rank's, all times longer by a factor."""
    curve = [[2**12, 1e-4 * slower], [2**20, 3e-4 * slower]]
    return {
        "matmuls": [["bfloat16", 64, 64, 32, 1e-5 * slower]],
        "attention": [["bfloat16", 1, 2, 1, 16, 8, 1e-5 * slower, 2e-5 * slower]],
        "moves": curve,
        "host_copies": [],
        "collectives": {"send/3": curve},
        "host": dict.fromkeys(("operator_s", "kernel_s", "graph_s", "collective_s"), 1e-5 * slower),
        "beside": {"computing": 1.2, "collectives": 1.5},
        "took_s": 7.6,
        "about": {"device": "some CPU", "versions": {"torch": "2.13.0", "cuda": None}},
    }


def test_of_all_ranks_the_median_counts_and_of_collectives_the_slowest() -> None:
    profile = profile_of("cpu", [answer(1.0), answer(2.0), answer(5.0)])
    assert profile.matmuls[0] == ("bfloat16", 64, 64, 32, 2e-5)
    assert profile.attention[0][-2:] == (2e-5, 4e-5)
    assert profile.host.kernel_s == 2e-5
    assert profile.moves == ((2**12, 2e-4), (2**20, 6e-4))
    assert profile.collectives == {"send/3": ((2**12, 5e-4), (2**20, pytest.approx(15e-4)))}
    assert profile.beside.collectives == 1.5
    assert profile.about == "measured by `shoal bench device` in 8 s on 3 ranks: torch 2.13.0"


def test_a_profile_is_told_in_lines_and_a_table() -> None:
    text = describe_profile(profile_of("cpu", [answer(1.0)]))
    assert "matmul   bfloat16: up to 26.2 GFLOP/s (64 x 64 x 32), half of 1 shapes above 26.2" in text
    assert "moves    3.5 GB/s (1 MiB), 100.0 us for 4 KiB" in text
    assert "computing takes 1.20 times as long beside a collective" in text
    assert re.search(r"\| send/3 +\| +0.173 \| +0.300 \| +3.50 \|", text)


def test_what_only_gpus_are_asked_for_is_found_as_a_profile_has_it() -> None:
    with join_world(device="cpu") as world:
        bench = Bench(world, SMALL, watch())
        for part in (bench.copies, bench.beside):
            part(lambda: 0.1)
    assert [size for size, _ in bench.found["host_copies"]] == SMALL.copies
    beside = Beside.model_validate(bench.found["beside"])
    assert min(beside.computing, beside.collectives) >= 1.0, "they never speed each other up"


def copied(world: World, folder: Path, there: bool) -> dict[str, list[Any]]:
    """Curves of copy engines on groups of two of four ranks, of which one group may have none."""

    def find(group: dist.ProcessGroup, *_: Any, **__: Any) -> Peers | None:
        return shared_peers(folder, group, 1 << 20, []) if there or world.rank < 2 else None

    def agree(number: float) -> float:
        most = torch.tensor(number, dtype=torch.float64)
        dist.all_reduce(most, op=dist.ReduceOp.MAX)
        return most.item()

    bench = Bench(world, SMALL._replace(collectives=[2**12, 2**16]), Stopwatch(CPU, agree))
    with patch("shoal.bench.device_rank.find_peers", find):
        bench.peers(2, lambda: agree(0.2))
    return bench.found["collectives"]


def test_copy_engines_are_measured_where_all_groups_have_them(tmp_path: Path) -> None:
    for found in run_ranks(4, copied, tmp_path, True):
        assert list(found) == ["peers/2", "shared/2"]
        assert all([size for size, _ in curve] == [2**12, 2**16] for curve in found.values())
        assert all(seconds > 0 for curve in found.values() for _, seconds in curve)
    assert run_ranks(4, copied, tmp_path, False) == [{}] * 4


def test_gpus_are_heated_first_and_measured_in_all_that_they_have(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    node = SimpleNamespace(size=4, device=torch.device("cuda", 0))
    names = [part.name for part in Bench(cast(World, node), ON_GPU, watch()).parts()]
    assert (names[0], names[-1]) == ("heating", "host")
    assert {f"{dtype} products" for dtype in ON_GPU.products} < set(names)
    assert {f"{kind} on {ranks} ranks" for kind in KINDS for ranks in (2, 4)} < set(names)
    assert {"copy engines on 2 ranks", "copy engines on 4 ranks"} < set(names)
    assert names.index("products without a pause") > names.index("bfloat16 products")
    assert names.index("connecting") < names.index("all_gather on 2 ranks")
    assert {
        "attention",
        "element-wise kernels",
        "copies from the host",
        "computing beside collectives",
    } < set(names)
    alone = SimpleNamespace(size=1, device=node.device)
    assert not [part for part in Bench(cast(World, alone), ON_GPU, watch()).parts() if "ranks" in part.name]


class Paused:
    """A stopwatch of a device that computes faster after pauses."""

    device = torch.device("cpu")

    def __init__(self, slower: float) -> None:
        self._slower = slower

    def median(self, call: Callable[[], object], left_s: float) -> float:
        return 2.0

    def sustained(self, calls: list[Any], seconds: float) -> float:
        return self._slower * 2.0 * len(calls)


def test_by_how_much_products_take_longer_without_a_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_kernels, "SUSTAINED", (8, 8, 8))
    assert device_kernels.hot(cast(Stopwatch, Paused(1.08)), 1.0) == pytest.approx(1.08)
    assert device_kernels.hot(cast(Stopwatch, Paused(0.97)), 1.0) == 1.0


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu_products_are_timed_without_a_pause() -> None:
    stopwatch = Stopwatch(torch.device("cuda", 0), lambda number: number)
    assert device_kernels.hot(stopwatch, 1.0) < 1.5


def test_a_time_is_the_median_of_samples() -> None:
    pauses = iter([0.0, 0.004, 0.0, 0.004, 0.0, 0.03, 0.0, 0.006])  # each sample's first call is not counted
    assert 0.006 <= watch().median(lambda: time.sleep(next(pauses)), left_s=0.0) < 0.03
    assert next(pauses, None) is None, f"one sample tells how long a call is, and {LEAST_SAMPLES} are counted"


def test_what_is_left_out_for_want_of_time_is_what_lies_between() -> None:
    left = iter([9.0, 9.0, 9.0, -1.0])
    found = visit([10, 20, 30, 40, 50], lambda item, share_s: (item, share_s), lambda: next(left))
    assert found == [(10, (10, 9 / 5)), (30, (30, 9 / 3)), (50, (50, 9 / 4))]
    assert visit([10, 20], lambda item, _: item, lambda: -1.0) == [(10, 10)], "the first in any case"


@pytest.mark.parametrize("count", [0, 1, 2, 3, 7, 16])
def test_the_coarse_order_has_every_number_once(count: int) -> None:
    assert sorted(coarse_first(count)) == list(range(count))


def test_parts_share_the_time_by_their_weights_and_what_one_takes_too_much_is_theirs() -> None:
    told: list[tuple[str, float]] = []
    slow = Part("slow", 1, lambda left_s: time.sleep(0.3))
    quick = [Part(name, 1, lambda left_s: None) for name in ("a", "b")]
    take_turns([slow, *quick], 0.6, float, lambda name, share_s: told.append((name, share_s)))
    names, shares = zip(*told, strict=True)
    assert names == ("slow", "a", "b")
    assert shares[0] == pytest.approx(0.2, abs=0.01)
    assert shares[1] <= 0.15
    assert shares[1] < shares[2] <= 0.3  # a left its own to b


def test_less_never_takes_longer_than_more() -> None:
    assert rising([[1, 0.1], [2, 0.9], [4, 0.4], [8, 0.8]]) == ((1, 0.1), (2, 0.4), (4, 0.4), (8, 0.8))
    assert rising([]) == ()


def test_times_of_ranks_are_combined_and_shapes_are_kept() -> None:
    answers = [{"m": [["bfloat16", 8, 0.1]]}, {"m": [["bfloat16", 8, 0.4]]}]
    assert over_ranks(answers, max) == {"m": [["bfloat16", 8, 0.4]]}


def test_groups_are_powers_of_two_and_all() -> None:
    assert [group_sizes(ranks) for ranks in (1, 2, 4, 6, 8)] == [[], [2], [2, 4], [2, 6], [2, 4, 8]]


def test_float8_is_left_to_devices_that_have_it() -> None:
    assert dtypes_of(CPU, list(ON_GPU.products)) == ["bfloat16", "float32"]
    assert product_s(watch(), FLOAT8, 32, 32, 32, 0.0) > 0  # what it would call


def test_what_is_measured_on_gpus_is_by_rising_cost() -> None:
    for sizes in (ON_GPU, ON_CPU):
        for shapes in sizes.products.values():
            assert [m * n * k for m, n, k in shapes] == sorted(m * n * k for m, n, k in shapes)
        costs = [s.batch * s.heads * s.length**2 * s.width for s in sizes.attention]
        assert costs == sorted(costs)
    assert any(n == 128256 for _, n, _ in ON_GPU.products["bfloat16"])


def test_more_ranks_than_gpus_and_files_that_cannot_be_are_refused(tmp_path: Path) -> None:
    node = Cluster.parse("2 h100")
    assert [ranks_of(node, said) for said in (None, 1, 2)] == [2, 1, 2]
    assert ranks_of(Cluster.parse("2 cpu"), 3) == 3
    with pytest.raises(ValueError, match=r"--ranks 4, but this machine is 2 h100: .* give at most 2"):
        ranks_of(node, 4)
    with pytest.raises(ValueError, match=r"is a folder; give the file to write"):
        require_file(tmp_path)
    (tmp_path / "file").write_text("")
    result = shoal("--out", str(tmp_path / "file" / "cpu.json"))
    assert result.exit_code == 2
    assert "cannot be made" in result.stderr
    assert shoal("--seconds", "0").exit_code == shoal("--ranks", "0").exit_code == 2


def test_the_page_says_what_is_measured_and_for_how_long() -> None:
    page = (Path(__file__).parents[2] / "docs" / "bench.md").read_text()
    assert f"({GPU_SECONDS:.0f}, on CPUs {CPU_SECONDS:.0f})" in page
    assert f"left out: {GPU_SECONDS:.0f}, on CPUs {CPU_SECONDS:.0f}." in " ".join(
        shoal("--help").output.split()
    )
    assert all(kind in page for kind in KINDS)
    assert all(option in page for option in ("--ranks N", "--seconds S", "--out FILE"))
