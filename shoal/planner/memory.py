"""Memory of a simulated rank: its peak by what it is for, where in the step that is, and what the allocator makes of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from enum import StrEnum
from typing import NamedTuple

from shoal.cluster import GIB, Cluster
from shoal.plan import AXES, Plan
from shoal.planner.allocator import CachingAllocator
from shoal.planner.launch import Moment
from shoal.planner.trace import Storage, Trace


class Category(StrEnum):
    """What memory is for."""

    PARAMETERS = "parameters"
    """masters and buffers: this rank's part"""
    GATHERED = "gathered"
    """parameters of all ranks, while they are used"""
    GRADIENTS = "gradients"
    OPTIMIZER = "optimizer"
    ACTIVATIONS = "activations"
    """what forward keeps for backward, also when it is run again"""
    TEMPORARIES = "temporaries"
    COMMUNICATION = "communication"
    """buffers that collectives read and write"""
    WORKSPACE = "workspace"
    """what kernels take for themselves"""


def category_of(storage: Storage) -> Category:
    """What a storage was for, as its whole life shows."""
    if storage.kind is not None:
        return Category(storage.kind)
    began, ended = storage.began.phase, storage.ended.phase if storage.ended else "forward"
    if began == "recompute" or (began == "forward" and ended != "forward"):
        return Category.ACTIVATIONS
    return Category.COMMUNICATION if storage.travels else Category.TEMPORARIES


class Tensor(NamedTuple):
    """A tensor that is there at the peak."""

    category: Category
    nbytes: int
    shape: tuple[int, ...]
    dtype: str
    made_by: str
    """the operator"""
    name: str
    """of the parameter, or of the block in which it was made"""


class Peak(NamedTuple):
    """The moment at which most memory is allocated."""

    allocated_bytes: int
    moment: Moment
    by_category: dict[Category, int]
    """bytes, as the allocator rounds them; they add up to `allocated_bytes`"""
    largest: list[Tensor]
    last: Tensor
    """with which the peak was reached"""


class Memory(NamedTuple):
    """Of one rank."""

    peak: Peak
    reserved_bytes: int
    """of the caching allocator, which keeps what it once had; on a CPU the peak"""
    outside_bytes: int
    """beside the allocator: the device's context, libraries, and buffers of communicators"""
    host_bytes: int
    """peak of tensors in host memory, for ranks of GPUs, as torch locks them"""
    phases: dict[str, int]
    """the peak of allocated bytes in each phase of a step"""

    @property
    def device_bytes(self) -> int:
        """What the device's own tools show."""
        return self.reserved_bytes + self.outside_bytes


LARGEST = 8  # tensors that are named
OF_GRAPH = 1 << 20  # what makes a stream's number that of a graph's own pools
# seen beside the allocator: 2.0 GiB with an idle communicator to 4.3 GiB with several (4 H100s, torch 2.11)
CONTEXT_BYTES, COMMUNICATOR_BYTES, MOST_OUTSIDE_BYTES = int(2.0 * GIB), int(0.75 * GIB), int(4.3 * GIB)


def memory_of(trace: Trace, plan: Plan, device: str, *, expandable: bool = False) -> Memory:
    """Replay what a rank allocated.

    Args:
        device: "cuda", through the caching allocator, or "cpu", where bytes are counted as they are.
        expandable: with segments that grow.
    """
    held = _Held(trace, device, expandable, as_graph=bool(plan.cuda_graphs))
    phases: Counter[str] = Counter()
    most, at = 0, 0
    for index, event in trace.memory():
        moment = trace.moments[index]
        held.apply(event, moment)
        if held.allocated > phases[moment.phase]:
            phases[moment.phase] = held.allocated
        if held.allocated > most:
            most, at = held.allocated, index
    return Memory(
        _peak_at(trace, held, at),
        held.reserved,
        _outside(plan) if device == "cuda" else 0,
        _host_peak(trace) if device == "cuda" else 0,
        dict(phases),
    )


class _Held:
    """What is allocated while events are replayed.

    Args:
        as_graph: the second step's forward and backward are recorded as a CUDA graph, as `shoal.train.recorded` does it later:
            its memory is of pools of its own, also the workspaces of its stream, and what is free by then is given back.
    """

    def __init__(self, trace: Trace, device: str, expandable: bool, *, as_graph: bool = False) -> None:
        self._trace, self._device, self._as_graph = trace, device, as_graph and device == "cuda"
        self.twins: dict[int, int] = {}
        """bytes of the workspaces that a recording has beside those of before"""
        self._allocator = CachingAllocator(expandable) if device == "cuda" else None
        self.sizes = [0] * len(trace.storages)
        """what each storage takes, or took; 0 for those elsewhere"""
        self.allocated = 0
        self._most = self._most_reserved = 0
        self._begun = False

    @property
    def reserved(self) -> int:
        return max(self._allocator.reserved, self._most_reserved) if self._allocator else self._most

    def _begin_graph(self) -> None:
        if self._allocator is None:
            return
        self._most_reserved = self._allocator.reserved
        self._allocator.give_back()
        for number, storage in enumerate(self._trace.storages):
            if storage.kind == Category.WORKSPACE and self.sizes[number] and storage.ended is None:
                self._allocator.allocate(("twin", number), storage.nbytes, storage.stream + OF_GRAPH)
                self.twins[number] = self._allocator.size_of(("twin", number))
        self.allocated += sum(self.twins.values())

    def apply(self, event: int, moment: Moment) -> None:
        in_graph = self._as_graph and moment.step > 0 and moment.phase in ("forward", "backward")
        if in_graph and not self._begun:
            self._begun = True
            self._begin_graph()
        number = event if event >= 0 else ~event
        storage = self._trace.storages[number]
        if storage.device != self._device:
            return
        if event < 0:
            if self._allocator is not None:
                self._allocator.free(number)
            self.allocated -= self.sizes[number]
            return
        size = storage.nbytes
        if self._allocator is not None:
            self._allocator.allocate(number, size, storage.stream + OF_GRAPH * in_graph)
            size = self._allocator.size_of(number)
        self.sizes[number] = size
        self.allocated += size
        self._most = max(self._most, self.allocated)


def _peak_at(trace: Trace, held: _Held, at: int) -> Peak:
    sizes = held.sizes
    live: set[int] = set()
    last = 0
    for _, event in trace.memory(at + 1):
        live.add(event) if event >= 0 else live.discard(~event)
        last = event
    by_category: Counter[Category] = Counter()
    for number in live:
        by_category[category_of(trace.storages[number])] += sizes[number]
    if trace.moments[at].step > 0:
        by_category[Category.WORKSPACE] += sum(held.twins.values())
    largest = sorted(live, key=lambda number: (-sizes[number], number))[:LARGEST]
    return Peak(
        sum(by_category.values()),
        trace.moments[at],
        {category: by_category[category] for category in Category if by_category[category]},
        [_tensor(trace.storages[number]) for number in largest if sizes[number]],
        _tensor(trace.storages[last]),
    )


def _tensor(storage: Storage) -> Tensor:
    return Tensor(
        category_of(storage),
        storage.nbytes,
        storage.shape,
        storage.dtype,
        storage.operator,
        storage.name or storage.began.unit,
    )


def most_of(trace: Trace, device: str, category: Category) -> int:
    """The most bytes that one category has at a time."""
    held = most = 0
    of_it = [each.device == device and category_of(each) is category for each in trace.storages]
    for _, event in trace.memory():
        number = event if event >= 0 else ~event
        if of_it[number]:
            held += trace.storages[number].nbytes if event >= 0 else -trace.storages[number].nbytes
            most = max(most, held)
    return most


def _host_peak(trace: Trace) -> int:
    held = most = 0
    if all(storage.device != "cpu" for storage in trace.storages):
        return 0
    for _, event in trace.memory():
        storage = trace.storages[event if event >= 0 else ~event]
        if storage.device == "cpu":
            held += _locked(storage) if event >= 0 else -_locked(storage)
            most = max(most, held)
    return most


def _locked(storage: Storage) -> int:
    """Host memory of a tensor of a GPU's rank: torch locks powers of two, and an optimizer's state is locked as it is."""
    if category_of(storage) is Category.OPTIMIZER or not storage.nbytes:
        return storage.nbytes
    return 1 << (storage.nbytes - 1).bit_length()


def _outside(plan: Plan) -> int:
    """Context and libraries, and a communicator for each axis along which ranks talk."""
    axes = sum(getattr(plan, axis) > 1 for axis in (*AXES, "expert"))
    return min(MOST_OUTSIDE_BYTES, CONTEXT_BYTES + COMMUNICATOR_BYTES * axes)


class Fit(StrEnum):
    """Whether a plan fits a device."""

    FITS = "fits"
    TIGHT = "tight"
    """it fits, with less to spare than such a prediction may be off"""
    NOT = "does not fit"


class Verdict(NamedTuple):
    """Whether ranks fit, and what to do about it."""

    fit: Fit
    margin_bytes: int | None
    """what is left of the device's memory; None where that is not known"""
    advice: list[str]
    """what to change, the most useful first"""


TIGHT = (
    0.05  # of the device: reserved memory is off by up to 3%, and memory beside the allocator by about 1 GiB
)


def judge(memory: Memory, plan: Plan, cluster: Cluster, *, expandable: bool = False) -> Verdict:
    """Whether a rank's memory fits its device, and what to change if it does not, or hardly."""
    total = cluster.device.memory_bytes
    if total is None and cluster.host_gib is not None:  # ranks on CPUs share the host's
        total = int(cluster.host_gib * GIB / min(cluster.devices_per_node, plan.world_size))
    if total is None:
        return Verdict(Fit.FITS, None, [])
    margin = total - memory.device_bytes
    fit = Fit.TIGHT if margin < TIGHT * total else Fit.FITS
    fit = Fit.NOT if margin < 0 else fit
    advice = [] if fit is Fit.FITS else list(_advice(memory, plan, total, expandable))
    if cluster.device.type == "cpu":
        advice = [each for each in advice if each not in OF_GPUS]
    return Verdict(fit, margin, advice)


def _advice(memory: Memory, plan: Plan, total: int, expandable: bool) -> Iterator[str]:
    by = Counter(memory.peak.by_category)
    states = by[Category.PARAMETERS] + by[Category.GRADIENTS] + by[Category.OPTIMIZER]
    activations = by[Category.ACTIVATIONS] + by[Category.TEMPORARIES]
    wasted = memory.reserved_bytes - memory.peak.allocated_bytes
    needed = memory.device_bytes - int(total * (1 - TIGHT))
    of_activations = list(_less_activations(plan))
    of_states = list(_less_states(plan))
    yield from (of_states + of_activations if states > activations else of_activations + of_states)
    if wasted >= min(needed, GIB) and not expandable:
        yield (
            f"PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True (the allocator keeps {wasted / GIB:.1f} GiB that are not in use)"
        )


OFFLOAD_ACTIVATIONS, OFFLOAD_OPTIMIZER = "plan.offload=activations", "plan.offload=optimizer"
MORE_DEVICES = "more devices"
OF_GPUS = (OFFLOAD_ACTIVATIONS, OFFLOAD_OPTIMIZER, MORE_DEVICES)
"""advice that helps nothing where ranks share the memory of the host"""


def _with_tensor(plan: Plan) -> str:
    """Words that give half of an axis to tensor."""
    for axis in ("shard", "replicate", "context", "pipeline"):
        degree = getattr(plan, axis)
        if degree % 2 == 0:
            return f"plan.tensor=2 plan.{axis}={degree // 2}"
    return "plan.tensor=2 on twice as many devices"


def _less_activations(plan: Plan) -> Iterator[str]:
    if plan.micro_batch is None or plan.micro_batch > 1:
        yield "a smaller plan.micro_batch"
    if plan.recompute != "full":
        yield (
            "plan.recompute=full"
            if plan.recompute == "selective"
            else "plan.recompute=selective or plan.recompute=full"
        )
    if "activations" not in plan.offload:
        yield OFFLOAD_ACTIVATIONS
    if plan.tensor == 1 and plan.world_size > 1:
        yield _with_tensor(plan)


def _less_states(plan: Plan) -> Iterator[str]:
    if plan.shard == 1 and plan.context == 1 and plan.replicate > 1:
        yield f"plan.replicate=1 plan.shard={plan.replicate}, to cut parameters, gradients and the optimizer"
    elif plan.shard == 1 and plan.context == 1:
        yield f"{MORE_DEVICES} and plan.shard over them, to cut parameters, gradients and the optimizer"
    elif plan.zero_stage < 3:
        yield "plan.zero=3"
    elif plan.replicate > 1:
        yield "plan.shard over the ranks that are copies now (plan.replicate)"
    else:
        yield MORE_DEVICES
    if "optimizer" not in plan.offload:
        yield OFFLOAD_OPTIMIZER
