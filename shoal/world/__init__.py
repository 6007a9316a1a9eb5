"""`World`: who takes part. Rank, device, backend, mesh, and what ranks settle without a collective.

`join_world()` is the same line for one process, torchrun, Slurm, MPI, Kubernetes and `shoal train`.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from types import TracebackType
from typing import Self

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from shoal.observe.calls import CallFile
from shoal.plan import AXES, Plan
from shoal.simulated import is_simulated
from shoal.world.environments import Place, PlaceError, detect
from shoal.world.machine import detect_cluster, known_device
from shoal.world.meeting import DeadlineError, Meeting, WorldError
from shoal.world.rendezvous import Waits, open_store

__all__ = [
    "DeadlineError",
    "PlaceError",
    "World",
    "WorldError",
    "detect_cluster",
    "join_world",
    "known_device",
]

FAREWELL_S = 10.0  # rank 0 holds the store, and waits so long for ranks that still read it


@dataclass(eq=False)
class World:
    """The ranks that train together, seen from one of them. Made by `join_world()`; close it, or use a `with`."""

    rank: int
    size: int
    local_rank: int
    local_size: int
    device: torch.device
    backend: str
    deadline: timedelta
    _meeting: Meeting = field(repr=False)
    calls: CallFile | None = field(default=None, repr=False)
    """where collectives of this rank are noted, if they are"""
    compares_calls: bool = field(default=False, repr=False)
    """ranks tell each other what they are about to call"""
    _meshes: dict[tuple[tuple[str, int], ...], DeviceMesh] = field(default_factory=dict, repr=False)
    _open: bool = field(default=True, repr=False)
    _at_close: list[Callable[[], None]] = field(default_factory=list, repr=False)

    @property
    def has_cpu_backend(self) -> bool:
        """Whether ranks can send each other tensors in host memory."""
        return "gloo" in self.backend or "mpi" in self.backend

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0, the one that speaks."""
        return self.rank == 0

    def mesh(self, plan: Plan) -> DeviceMesh:
        """The mesh of a plan: the axes of `AXES` with a degree above 1, and always replicate and shard.

        The same mesh is given for the same degrees. Its groups keep this world's deadline.

        Raises:
            ValueError: the plan needs another number of ranks; the message says which degrees would work.

        Example:
            >>> with join_world(device="cpu") as here:
            ...     here.mesh(Plan()).mesh_dim_names
            ('replicate', 'shard')
        """
        if plan.world_size != self.size:
            raise ValueError(_wrong_size(plan, self.size))
        return self._mesh({axis: getattr(plan, axis) for axis in AXES})

    def parameter_mesh(self, plan: Plan) -> DeviceMesh:
        """As `mesh`, with shard and context as one axis, "shard": over both, parameters are cut and gradients summed."""
        joined = plan.model_copy(update={"shard": plan.cut, "context": 1})
        return self.mesh(joined)

    def expert_mesh(self, plan: Plan) -> DeviceMesh:
        """The ranks of a plan as experts see them: pipeline if above 1, replicate, shard, and always expert, the fastest.

        Ranks of shard, context and tensor have different tokens; `expert` neighbours among them share the experts, and over the
        others, here "shard", each expert's parameters are cut and its gradients summed.
        """
        shard = plan.sharing // plan.expert
        degrees = {
            "pipeline": plan.pipeline,
            "replicate": plan.replicate,
            "shard": shard,
            "expert": plan.expert,
        }
        return self._mesh(degrees)

    def _mesh(self, degrees: dict[str, int]) -> DeviceMesh:
        kept = {axis: n for axis, n in degrees.items() if axis in ("replicate", "shard", "expert") or n > 1}
        key = tuple(kept.items())
        if key not in self._meshes:
            self._meshes[key] = self._make_mesh(kept)
            self._meeting.meet("mesh")  # as for "join": all groups are connected before anyone goes on
        return self._meshes[key]

    def _make_mesh(self, degrees: dict[str, int]) -> DeviceMesh:
        mesh = init_device_mesh(self.device.type, tuple(degrees.values()), mesh_dim_names=tuple(degrees))
        for axis in degrees:
            mesh.get_group(axis).set_timeout(self.deadline)  # else 30 minutes (Gloo), 10 (NCCL)
        return mesh

    def is_one_host(self, group: dist.ProcessGroup | None = None) -> bool:
        """Whether all ranks of a group (default: all) run on one host, as all of them see it. Collective over the group."""
        hosts = {rank // self.local_size for rank in dist.get_process_group_ranks(group)}
        in_order = self.rank % self.local_size == self.local_rank
        agreed = torch.tensor(float(in_order and len(hosts) == 1), device=self.device)
        dist.all_reduce(agreed, op=dist.ReduceOp.MIN, group=group)
        return len(hosts) == 1 if is_simulated() else bool(agreed.item())

    def store(self, name: str) -> dist.Store:
        """Keys of `name` in the store that all ranks share."""
        return dist.PrefixStore(name, self._meeting.store)

    def barrier(self, what: str, problem: str = "", *, deadline_s: float | None = None) -> None:
        """Wait for every rank to come to `what`; a `problem` that any rank brings is raised on all.

        Raises:
            DeadlineError: naming the ranks that did not come within the deadline (default: the world's).
            WorldError: some rank's problem, or ranks came to barriers of different names.
        """
        self._meeting.meet(what, problem, deadline_s)

    def agree(self, name: str, text: str) -> None:
        """Make sure that every rank has the same text: its job, its plan.

        Raises:
            WorldError: on every rank, naming those that differ and how: `rank 1 differs from rank 0 in the
            job:
                optimizer.lr = 0.001 against 0.0003`.
        """
        self._meeting.agree(name, text)

    def broadcast_text(self, text: str | None, src: int = 0) -> str:
        """The text that rank `src` gave, on every rank."""
        return self._meeting.tell(text, src)

    def at_close(self, do: Callable[[], None]) -> None:
        """Have something done when this world is left, before its groups end."""
        self._at_close.append(do)

    def close(self, wait: bool = True) -> None:
        """Leave the world; a second call does nothing. `wait=False` after a failure: others may not come."""
        if not self._open:
            return
        self._open = False
        for do in self._at_close:
            with suppress(RuntimeError):  # of a device that has failed
                do()
        self._at_close.clear()
        self._meshes.clear()
        if dist.is_initialized():
            dist.destroy_process_group()
        if self.size > 1:
            with suppress(dist.DistError):  # the store may have gone first
                self._meeting.leave(FAREWELL_S if wait else 0)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self.close(wait=error is None)


def join_world(
    *,
    backend: str = "auto",
    init_method: str = "env://",
    deadline_s: float = 600.0,
    connect_s: float = 30.0,
    device: str = "auto",
    rank: int | None = None,
    size: int | None = None,
    local_rank: int | None = None,
    store: dist.Store | None = None,
) -> World:
    """Join the world that this process was started for, or be a world of one.

    Who this process is comes from its launcher's variables (see `shoal.world.environments`), or from `rank`
    and `size`. `deadline_s` is the longest wait for another rank anywhere, `connect_s` the longest wait for
    rank 0 to listen. All ranks succeed or all raise.

    Raises:
        PlaceError: the launcher's variables are incomplete or impossible.
        ValueError: an argument that cannot be used.
        WorldError: no such host, port taken, no such device or backend on some rank, two ranks with one
        number. DeadlineError: some ranks did not come; the message names them.

    Example:
        >>> with join_world(device="cpu") as here:
        ...     (here.rank, here.size, here.backend)
        (0, 1, 'gloo')
    """
    if dist.is_initialized():
        raise WorldError("this process is in a process group already; close that World before making another")
    if deadline_s <= 0 or connect_s <= 0:
        raise ValueError(f"deadline_s = {deadline_s} and connect_s = {connect_s} must be above 0")
    place = _place(rank, size, local_rank)
    waits = Waits(deadline_s, connect_s)
    shared = store if store is not None else open_store(place, init_method, waits)
    shared = dist.PrefixStore(f"shoal/{place.generation}", shared)
    meeting = Meeting(shared, place.rank, place.size, deadline_s)
    _find_rank_0(shared, place, waits)
    local, local_size = _local_place(place, shared)
    chosen, backends, problem = _choose(device, backend, local, place)
    if problem := problem or _claim(shared, place, chosen, init_method):
        meeting.refuse(problem)
    meeting.meet("start")
    if local_size is None:
        local_size = shared.add(_host_key(), 0)
    deadline = timedelta(seconds=deadline_s)
    _init_process_group(backends, shared, place, chosen, deadline)
    meeting.meet("join")  # else a rank that leaves at once breaks the connections that others still make
    return World(place.rank, place.size, local, local_size, chosen, backends, deadline, meeting)


def _place(rank: int | None, size: int | None, local_rank: int | None) -> Place:
    if rank is None and size is None:
        place = detect(os.environ)
        return place if local_rank is None else place._replace(local_rank=local_rank)
    if rank is None or size is None:
        raise ValueError(f"rank = {rank} and size = {size}: give both, or neither to ask the environment")
    if not 0 <= rank < size:
        raise ValueError(f"rank = {rank} is outside the world of size = {size}: expected 0 to {size - 1}")
    return Place("arguments", rank, size, local_rank=local_rank)


def _find_rank_0(store: dist.Store, place: Place, waits: Waits) -> None:
    """Make sure that the store is this world's: another job's store would answer on its port as well."""
    if place.rank == 0:
        store.set("rank 0", socket.gethostname())
        return
    end = time.monotonic() + (waits.deadline_s if place.agent_store else waits.first_s)
    while not store.check(["rank 0"]):
        if time.monotonic() > end:
            raise DeadlineError(
                f"rank {place.rank} of {place.size} reached the store, but rank 0 did not come to it within "
                f"{waits.first_s:g} s; check that rank 0 started, and that no other job uses the same "
                "address and port"
            )
        time.sleep(0.02)


def _host_key() -> str:
    return f"host/{socket.gethostname()}"


def _local_place(place: Place, store: dist.Store) -> tuple[int, int | None]:
    """Local rank and size; where the launcher does not say, in the order in which ranks of a host come."""
    if place.local_rank is not None and place.local_size is not None:
        return place.local_rank, place.local_size
    order = store.add(_host_key(), 1) - 1
    return (order if place.local_rank is None else place.local_rank), None


def _choose(device: str, backend: str, local: int, place: Place) -> tuple[torch.device, str, str]:
    """Device, backends, and what is wrong with them: told to all ranks, not raised here alone."""
    here = f"rank {place.rank} on {socket.gethostname()}: "
    try:
        chosen = choose_device(device, local, place)
        return chosen, choose_backends(backend, chosen), ""
    except ValueError as error:
        return torch.device("cpu"), "gloo", here + str(error)


def choose_device(device: str, local_rank: int, place: Place) -> torch.device:
    """The device of a rank: its own GPU if there are any, else the CPU.

    Raises:
        ValueError: no GPU, or fewer than ranks on this node.
    """
    if device not in ("auto", "cpu", "cuda"):
        raise ValueError(f"device = {device!r} is not known: expected auto, cpu or cuda")
    count = torch.cuda.device_count() if device != "cpu" else 0
    if count == 0:
        if device == "cuda":
            why = (
                "this torch is built without CUDA" if torch.version.cuda is None else "the driver shows none"
            )
            raise ValueError(
                f"device = 'cuda', but torch sees no GPU here ({why}); use device = 'cpu' or run doctor"
            )
        return torch.device("cpu")
    if local_rank < count:
        return torch.device("cuda", local_rank)
    if count == 1 and place.source not in ("RANK and WORLD_SIZE", "arguments"):
        return torch.device("cuda", 0)  # Slurm and MPI may show each task its own GPU only
    raise ValueError(
        f"LOCAL_RANK = {local_rank}, but torch sees {count} GPUs here: start at most {count} ranks on this "
        "node "
        "(check CUDA_VISIBLE_DEVICES)"
    )


def choose_backends(backend: str, device: torch.device) -> str:
    """The backend string for torch: NCCL for GPU tensors, Gloo for CPU tensors, unless said otherwise.

    Raises:
        ValueError: a backend that this torch does not have, or that cannot serve the device.
    """
    if backend == "auto":
        return "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    built = {"gloo": dist.is_gloo_available(), "nccl": dist.is_nccl_available()}
    names = [part.rpartition(":")[2] for part in backend.split(",")]
    devices = [part.rpartition(":")[0] for part in backend.split(",")]
    missing = [name for name in names if not built.get(name)]
    usable = ", ".join(name for name, is_built in built.items() if is_built)
    if missing:
        why = (
            "PyTorch's wheels are built without it"
            if missing[0] in ("mpi", "ucc", "nccl")
            else "it is not known"
        )
        raise ValueError(
            f"backend = {backend!r}: {missing[0]!r} cannot be used, {why}; available: auto, {usable}"
        )
    if len(names) > 1 and sorted(devices) != ["cpu", "cuda"]:
        raise ValueError(f"backend = {backend!r} is not understood: expected such as 'cpu:gloo,cuda:nccl'")
    if names == ["nccl"] and device.type == "cpu":
        raise ValueError(
            f"backend = {backend!r} moves GPU tensors only, and this rank is on the CPU; use gloo"
        )
    return backend


def _claim(store: dist.Store, place: Place, device: torch.device, init_method: str) -> str:
    """Take this rank's number and GPU; what is wrong if another process has them."""
    here = f"{socket.gethostname()}, process {os.getpid()}"
    if store.add(f"claim/{place.rank}", 1) > 1:
        left = f", or {init_method} is left from an earlier run" if init_method.startswith("file") else ""
        return (
            f"two processes are rank {place.rank} (one of them: {here}){left}; give each process its own RANK"
        )
    if device.type == "cuda":
        gpu = getattr(torch.cuda.get_device_properties(device), "uuid", f"{_host_key()}/{device.index}")
        if store.add(f"claim/{gpu}", 1) > 1:
            return (
                f"rank {place.rank} ({here}) has a GPU that another rank has too: {device}; check LOCAL_RANK"
            )
    return ""


def _init_process_group(
    backends: str, store: dist.Store, place: Place, device: torch.device, deadline: timedelta
) -> None:
    on_gpu = device.type == "cuda"
    if on_gpu:
        torch.cuda.set_device(device)
        # memory of expandable segments is not what NCCL takes it for when it registers what a CUDA graph sends
        # (pytorch/pytorch#158029): ranks hang
        os.environ.setdefault("NCCL_GRAPH_REGISTER", "0")
    dist.init_process_group(
        backends,
        store=dist.PrefixStore("group", store),
        rank=place.rank,
        world_size=place.size,
        timeout=deadline,
        # a group that is bound to a device is split for a mesh, which torch 2.11 cannot do with Gloo's
        device_id=device if "nccl" in backends and on_gpu else None,
    )


def _wrong_size(plan: Plan, size: int) -> str:
    fits = []
    for axis in AXES:
        others = plan.world_size // getattr(plan, axis)
        if size % others == 0:
            fits.append(f"plan.{axis}={size // others}")
    advice = f"use {' or '.join(fits)}, or " if fits else ""
    return (
        f"the plan needs {plan.world_size} ranks ({plan.describe()}), but {size} take part: "
        f"{advice}start {plan.world_size} ranks"
    )
