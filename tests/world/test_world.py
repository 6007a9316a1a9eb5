"""A world forms over any store and launcher, or every rank says within seconds why not."""

from __future__ import annotations

import os
import socket
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import shoal.world as world_module
from shoal.cluster import GIB
from shoal.plan import Plan
from shoal.world import (
    DeadlineError,
    PlaceError,
    World,
    WorldError,
    choose_backends,
    choose_device,
    detect_cluster,
    join_world,
    known_device,
)
from shoal.world.environments import Place
from tests.ranks import run_ranks


def _sum(world: World, scale: float) -> float:
    value = torch.tensor([scale * (world.rank + 1)])
    dist.all_reduce(value)
    return value.item()


def test_ranks_talk() -> None:
    assert run_ranks(4, _sum, 1.0) == [10.0] * 4


def _mesh(world: World) -> tuple[Any, ...]:
    plan = Plan(replicate=2, tensor=2)
    mesh = world.mesh(plan)
    assert mesh is world.mesh(plan.model_copy(update={"micro_batch": 4}))
    value = torch.tensor([world.rank])
    dist.all_reduce(value, group=mesh["tensor"].get_group())
    return mesh.mesh_dim_names, mesh["replicate"].get_local_rank(), value.item()


def test_a_mesh_has_the_plans_axes_in_rank_order() -> None:
    names = ("replicate", "shard", "tensor")
    assert run_ranks(4, _mesh) == [(names, 0, 1), (names, 0, 1), (names, 1, 5), (names, 1, 5)]


def _wrong_plan(world: World) -> str:
    with pytest.raises(ValueError) as caught:
        world.mesh(Plan(shard=3))
    return str(caught.value)


def test_a_plan_for_other_ranks_is_refused_with_one_that_fits() -> None:
    message = "the plan needs 3 ranks (shard 3 (ZeRO-3)), but 2 take part: use plan.shard=2, or start 3 ranks"
    assert run_ranks(2, _wrong_plan) == [message] * 2


def _agree(world: World, name: str, texts: list[str]) -> str:
    try:
        world.agree(name, texts[world.rank])
    except WorldError as error:
        return str(error)
    return "agreed"


def test_ranks_with_the_same_job_agree() -> None:
    assert run_ranks(3, _agree, "job", ["lr = 1"] * 3) == ["agreed"] * 3


def test_every_rank_hears_which_rank_differs_and_how() -> None:
    job = "[optimizer]\nlr = 0.0003\n"
    other = "[optimizer]\nlr = 0.001\n"
    begin = time.monotonic()
    heard = run_ranks(3, _agree, "job", [job, other, job])
    assert heard == ["rank 1 differs from rank 0 in the job: optimizer.lr = 0.001 against 0.0003"] * 3
    assert time.monotonic() - begin < 10


def test_texts_that_are_not_toml_differ_by_line() -> None:
    heard = run_ranks(2, _agree, "tokenizer", ["a b\nc d", "a b\nx y"])
    assert heard == ["rank 1 differs from rank 0 in the tokenizer: line 2 is 'x y' against 'c d'"] * 2


def _tell(world: World) -> list[str]:
    first = world.broadcast_text("from 0" if world.rank == 0 else None)
    world.barrier("between")
    return [first, world.broadcast_text("from 1" if world.rank == 1 else None, src=1)]


def test_a_text_reaches_all_ranks() -> None:
    assert run_ranks(3, _tell) == [["from 0", "from 1"]] * 3


def _absent(rank: int, size: int, folder: Path) -> str:
    with join_world(
        init_method=f"file://{folder}/store", rank=rank, size=size, device="cpu", deadline_s=1.0
    ) as here:
        if rank == 1:
            time.sleep(2)
            return "absent"
        with pytest.raises(DeadlineError) as caught:
            here.barrier("save")
        return str(caught.value)


def test_a_barrier_names_the_ranks_that_did_not_come() -> None:
    heard = run_ranks(3, _absent, join=False)
    assert heard[0].startswith("rank 0 waited 1 s at 'save' for rank 1 of 3")


def _elsewhere(world: World) -> str:
    with pytest.raises(WorldError) as caught:
        world.barrier("save" if world.rank != 1 else "eval")
    return str(caught.value)


def test_ranks_that_wait_in_different_places_are_told() -> None:
    heard = run_ranks(3, _elsewhere)
    assert len(set(heard)) == 1
    assert "ranks 0, 2 at 'save'; rank 1 at 'eval'" in heard[0]


def _join(rank: int, size: int, folder: Path, changes: dict[int, dict[str, Any]]) -> tuple[str, float]:
    """Join with arguments that differ by rank; how that failed, and after how many seconds."""
    arguments: dict[str, Any] = {
        "init_method": f"file://{folder}/store",
        "rank": rank,
        "size": size,
        "device": "cpu",
        "deadline_s": 20.0,
        "connect_s": 2.0,
        **changes.get(rank, {}),
    }
    begin = time.monotonic()
    try:
        with join_world(**arguments) as here:
            here.barrier("all are here")
    except (WorldError, ValueError) as error:
        return str(error), time.monotonic() - begin
    return "joined", time.monotonic() - begin


def _failures(n: int, changes: dict[int, dict[str, Any]]) -> list[str]:
    heard = run_ranks(n, _join, changes, join=False, timeout=30)
    assert all(seconds < 5 for _, seconds in heard), heard
    return [text for text, _ in heard]


def test_two_processes_of_one_rank_are_found() -> None:
    heard = _failures(3, {2: {"rank": 1}})
    assert all("two processes are rank 1" in text for text in heard), heard


def test_a_missing_gpu_on_one_rank_is_told_to_all() -> None:
    heard = _failures(2, {1: {"device": "cuda"}})
    assert heard[0] == heard[1]
    assert "rank 1 on" in heard[0] and "device = 'cuda', but torch sees no GPU" in heard[0]


@pytest.mark.parametrize("backend", ["mpi", "ucc", "nccl", "carrier-pigeon"])
def test_a_backend_that_is_not_there_is_told_with_those_that_are(backend: str) -> None:
    heard = _failures(2, {0: {"backend": backend}, 1: {"backend": backend}})
    assert "available: auto, gloo" in heard[0] or "moves GPU tensors only" in heard[0]


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def test_ranks_meet_over_tcp() -> None:
    both = {"init_method": f"tcp://127.0.0.1:{_free_port()}"}
    assert _failures(2, {0: both, 1: both}) == ["joined", "joined"]


def test_a_host_that_does_not_resolve_is_named() -> None:
    nowhere = {"init_method": "tcp://no-such-host.invalid:29500"}
    (heard,) = _failures(1, {0: {**nowhere, "rank": 1, "size": 2}})
    assert "the host 'no-such-host.invalid' does not resolve" in heard


def test_a_port_that_nobody_listens_on_is_named() -> None:
    port = _free_port()
    (heard,) = _failures(1, {0: {"init_method": f"tcp://127.0.0.1:{port}", "rank": 1, "size": 2}})
    assert f"nobody answers on 127.0.0.1:{port}" in heard


def test_a_port_that_is_taken_is_named_on_rank_0_and_on_the_others() -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        both = {"init_method": f"tcp://127.0.0.1:{other.getsockname()[1]}"}
        heard = _failures(2, {0: both, 1: both})
    assert "is taken" in heard[0]
    assert "it is not rank 0's store" in heard[1]


@pytest.mark.parametrize("url", ["http://a", "tcp://host", "tcp://h:1?rank=0", "tcp://h:notaport"])
def test_an_init_method_that_cannot_be_is_refused(url: str) -> None:
    with pytest.raises(ValueError):
        join_world(init_method=url, rank=1, size=2, device="cpu")


def test_one_process_is_a_world_and_can_be_again(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    for _ in range(2):
        with join_world(device="cpu") as here:
            assert (here.rank, here.size, here.is_main, here.backend) == (0, 1, True, "gloo")
            here.barrier("alone")
            here.agree("job", "a")
            assert here.broadcast_text("x") == "x"
            assert _sum(here, 2.0) == 2.0
            with pytest.raises(WorldError, match="in a process group already"):
                join_world(device="cpu")
        here.close()
        assert not dist.is_initialized()


def test_half_set_variables_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with pytest.raises(PlaceError, match="WORLD_SIZE"):
        join_world()


def _by_environment(rank: int, size: int, folder: Path, port: int) -> tuple[int, int, int]:
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(size), MASTER_ADDR="localhost", MASTER_PORT=str(port))
    with join_world(device="cpu") as here:
        here.barrier("here")
        return here.rank, here.local_rank, here.local_size


def test_local_ranks_are_found_where_the_launcher_does_not_say() -> None:
    heard = run_ranks(3, _by_environment, _free_port(), join=False)
    assert [rank for rank, _, _ in heard] == [0, 1, 2]
    assert sorted(local for _, local, _ in heard) == [0, 1, 2]
    assert {size for _, _, size in heard} == {3}


def test_a_local_rank_beyond_the_gpus_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    place = Place("RANK and WORLD_SIZE", 1, 2, 1, 2)
    with pytest.raises(ValueError, match="LOCAL_RANK = 1, but torch sees 1 GPUs"):
        choose_device("auto", 1, place)
    assert choose_device("auto", 1, place._replace(source="Slurm")) == torch.device("cuda", 0)


def test_gpus_get_a_backend_for_each_kind_of_tensor() -> None:
    assert choose_backends("auto", torch.device("cuda", 0)) == "cpu:gloo,cuda:nccl"
    assert choose_backends("auto", torch.device("cpu")) == "gloo"


@pytest.mark.parametrize(
    ("name", "gib", "kind"),
    [
        ("NVIDIA H100 80GB HBM3", 79.2, "h100"),
        ("NVIDIA H200", 139.8, "h200"),
        ("NVIDIA A100-SXM4-80GB", 79.2, "a100"),
        ("NVIDIA A100-SXM4-40GB", 39.4, "a100-40"),
        ("NVIDIA GeForce RTX 4090", 23.6, "rtx4090"),
        ("NVIDIA H100 PCIe", 79.2, "nvidia-h100-pcie"),
        ("NVIDIA GH200 480GB", 94.5, "nvidia-gh200-480gb"),
        ("Tesla T4", 14.6, "tesla-t4"),
    ],
)
def test_gpus_are_known_by_name_and_memory(name: str, gib: float, kind: str) -> None:
    device = known_device(name, int(gib * GIB))
    assert (device.kind, device.memory_bytes) == (kind, int(gib * GIB))
    assert (device.flops is None) == kind.startswith(("nvidia", "tesla"))


def test_this_machine_is_a_cluster() -> None:
    assert detect_cluster().num_devices >= 1


def test_nccl_does_not_register_what_recordings_send(monkeypatch: pytest.MonkeyPatch) -> None:
    """Unless somebody asks for it: with expandable segments ranks would hang."""
    monkeypatch.setattr(torch.cuda, "set_device", lambda _: None)
    monkeypatch.setattr(world_module.dist, "init_process_group", lambda *_, **__: None)
    place, second = Place("test", 0, 1), timedelta(seconds=1)
    for said, expected in ((None, "0"), ("1", "1")):
        monkeypatch.delenv("NCCL_GRAPH_REGISTER", raising=False)
        if said:
            monkeypatch.setenv("NCCL_GRAPH_REGISTER", said)
        store = world_module.dist.HashStore()
        world_module._init_process_group("nccl", store, place, torch.device("cuda", 0), second)
        assert os.environ["NCCL_GRAPH_REGISTER"] == expected
