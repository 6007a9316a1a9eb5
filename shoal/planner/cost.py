"""How long each launch takes on a device, from a profile of it, or of another device by their datasheets."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

from shoal.cluster import DEVICES, Cluster, Device
from shoal.planner.launch import Dims, Heads, Launch
from shoal.planner.profile import Attention, Curve, Host, Profile, interpolate, shipped_profiles

T = TypeVar("T")
SHORTEST_S = 2.5e-6  # a kernel of a GPU
MULTIPROCESSORS = 132  # of an H100, and about so many elsewhere
TILES = ((128, 256, 1.0), (128, 128, 0.9), (64, 128, 0.75), (64, 64, 0.5))
"""rows and columns of a product that a multiprocessor computes at a time, and the part of its rate that it reaches so"""
SPLITS = (1, 2, 4)
"""parts into which the inner dim can be cut, to have more tiles; their sums are added up by another pass"""
ADDING_S = 3e-6
REACHED = 0.75  # of a device's peak, by the largest products
BOTH_WAYS = 1.45  # by how much copies from the host and to it take longer beside each other, as in updates of state there
LATENCY_S = 5e-6  # of a hop between nodes
HOST_LINK_BYTES_S = 50e9  # PCIe 5 of 16 lanes, where a profile does not say
HALF_SIZE = 256  # inner dim at which a product reaches half of its rate
BY_COPIES = {
    "peer_gather": ("peers", "all_gather"), "peer_exchange": ("peers", "all_to_all"), "peer_share": ("shared", "all_gather"),
}  # fmt: skip
"""what goes by copy engines, of which curve that is, and how it would be sent without them"""
ELEMENT = {"float32": 2.0, "float64": 32.0, "float8_e4m3fn": 0.5, "float8_e5m2": 0.5}
"""by how much products take longer than those of 16 bits; fp32 as TF32"""
RING = {"all_reduce": 2.0, "broadcast": 1.0, "send": 1.0, "receive": 1.0}
"""how often a tensor of n parts goes over a link, in (n - 1) / n; the others 1; messages whole"""


class Sureness(NamedTuple):
    """How far a prediction may be off, as shares of it."""

    low: float
    high: float
    why: str


class Costs:
    """Seconds of launches on one cluster.

    Args:
        profile: of the cluster's kind of device; of another one, rates are scaled by what vendors tell of both.
        shipped: it came with shoal, and was not measured on this cluster.
    """

    def __init__(self, cluster: Cluster, profile: Profile, *, shipped: bool = False) -> None:
        if profile.device not in DEVICES:
            raise ValueError(
                f"the profile is of {profile.device!r}, which is no kind of device that is known: {', '.join(DEVICES)}"
            )
        device, measured = cluster.device, DEVICES[profile.device]
        self.profile, self._cluster = profile, cluster
        self.host: Host = profile.host
        self.own = device.kind == profile.device
        self._shipped = shipped
        self._products: dict[tuple[Any, ...], float] = {}
        names = [name.partition("/") for name in profile.collectives]
        self._engines = {
            kind: [int(ranks) for each, _, ranks in names if each == kind] for kind in ("peers", "shared")
        }
        """numbers of ranks among which copy engines were measured, by the way that was measured"""
        self._nodes: dict[tuple[int, ...], int] = {}
        self._faster = _ratio(device.flops, measured.flops)
        self._wider = _ratio(device.bandwidth_bytes_s, measured.bandwidth_bytes_s)
        self._linked = _ratio(device.link_bytes_s, measured.link_bytes_s)
        self._peak = (measured.flops or _flops_of(profile)) * REACHED

    @property
    def sureness(self) -> Sureness:
        """How sure predictions are."""
        several = self._cluster.nodes > 1
        if self._shipped and not self.on_gpu:
            return Sureness(
                0.7, 3.0, f"measured on {self.profile.name}, not on yours: `shoal bench device` measures them"
            )
        if self.own and not several:
            return Sureness(0.10, 0.15, f"kernels measured on {self.profile.name}")
        if self.own:
            return Sureness(
                0.15, 0.30, f"kernels measured on {self.profile.name}, links between nodes by their datasheet"
            )
        return Sureness(0.25, 0.35, f"scaled from {self.profile.name} by datasheets")

    def seconds(self, launch: Launch) -> float:
        """Of a launch that nothing else disturbs."""
        if launch.kind == "matmul":
            key = launch.dtype, launch.dims, launch.flops
            if key not in self._products:  # a model has few, many times
                self._products[key] = self._matmul(launch)
            return self._products[key] * launch.times
        if launch.kind == "attention":
            return self._attention(launch)
        if launch.kind == "move":
            return self._move(launch.nbytes, follows=launch.follows) * launch.times
        if launch.kind == "transfer":
            both_ways = BOTH_WAYS if launch.moment.phase == "update" and self.on_gpu else 1.0
            return self.host_copy(launch.nbytes) * both_ways
        if launch.kind == "collective":
            return self.collective(launch.operator, launch.nbytes, launch.ranks)
        return 0.0

    def moving(self, nbytes: float) -> float:
        """Of kernels that read and write so many bytes."""
        return self._move(nbytes)

    def _move(self, nbytes: float, *, follows: bool = False) -> float:
        seconds = interpolate(self.profile.moves, nbytes / self._wider)
        largest = self.profile.moves[-1]
        rate = largest[1] / largest[0] / self._wider
        return (
            nbytes * rate if follows else max(min(seconds, SHORTEST_S + nbytes * rate * 1.5), nbytes * rate)
        )

    def _matmul(self, launch: Launch) -> float:
        factor = ELEMENT.get(launch.dtype, 1.0)
        dims = launch.dims
        if not isinstance(dims, Dims):
            return max(launch.flops * factor / self._peak / self._faster, self._move(launch.nbytes))
        known = [one for one in self.profile.matmuls if one.dtype == launch.dtype]
        if not known:
            known = list(self.profile.matmuls)
        else:
            factor = 1.0
        ideal = self._ideal(dims)
        near = _weighted(
            [(_distance((dims.m * dims.batch, dims.n, dims.k), (one.m, one.n, one.k)), one) for one in known],
            lambda one: one.seconds / self._ideal(Dims(one.m, one.n, one.k)),
        )
        return max(
            ideal * near * factor * self.profile.hot / self._faster,
            self._move(launch.nbytes, follows=True),
            SHORTEST_S,
        )

    def _ideal(self, dims: Dims) -> float:
        """Of a product in which whole tiles, spread over multiprocessors in waves, and a short inner dim cost.

        With it, and what was measured nearby, products of an H100 that were left out of the table came to within 8 % (median).
        """
        operations = 2 * dims.batch * dims.m * dims.n * dims.k
        found = []
        for rows, columns, rate in TILES:
            for split in SPLITS:
                tiles = dims.batch * math.ceil(dims.m / rows) * math.ceil(dims.n / columns) * split
                used = tiles / (math.ceil(tiles / MULTIPROCESSORS) * MULTIPROCESSORS)
                inner = dims.k / split
                reached = self._peak * rate * used * inner / (inner + HALF_SIZE)
                found.append(operations / reached + (ADDING_S if split > 1 else 0.0))
        return max(min(found), SHORTEST_S)

    def _attention(self, launch: Launch) -> float:
        heads = launch.dims
        if not isinstance(heads, Heads) or not self.profile.attention:
            return max(
                launch.flops / (self._peak * 0.6) / self._faster,
                self._move(launch.nbytes, follows=True),
                SHORTEST_S,
            )
        near = _weighted(  # kernels are of one width, and differ by it more than by lengths
            [
                (_distance((heads.length, heads.width**2), (one.length, one.width**2)), one)
                for one in self.profile.attention
            ],
            lambda one: _attention_rate(one, backward=heads.backward),
        )
        seconds = launch.flops / near / self._faster
        return max(seconds, self._move(launch.nbytes, follows=True), SHORTEST_S)

    def collective(self, kind: str, nbytes: float, ranks: tuple[int, ...]) -> float:
        """Of a collective among ranks (of a message: between two), from when the last of them comes.

        Args:
            nbytes: of the whole tensor.
        """
        kind = "send" if kind == "receive" else kind
        if len(ranks) < 2:
            return 0.0
        if self.by_copies(kind):
            return self._copying(kind, nbytes, len(ranks))
        kind = BY_COPIES[kind][1] if kind in BY_COPIES else kind
        nodes, count = self._nodes_of(ranks), len(ranks)
        if nodes > 1:
            return self._between_nodes(kind, nbytes, count, nodes)
        return self._inside(kind, nbytes, count)

    def by_copies(self, kind: str) -> bool:
        """Whether it goes by copy engines, for how long is known: multiprocessors compute beside them as fast as alone."""
        return kind in BY_COPIES and any(self._engines.values())

    @property
    def on_gpu(self) -> bool:
        """Whether kernels run on a device of their own; else the host runs them."""
        return self._cluster.device.type == "cuda"

    def between_nodes(self, ranks: tuple[int, ...]) -> bool:
        """Whether ranks are on several nodes."""
        return self._nodes_of(ranks) > 1

    def _nodes_of(self, ranks: tuple[int, ...]) -> int:
        if ranks not in self._nodes:  # thousands of ranks, many times
            self._nodes[ranks] = len({rank // self._cluster.devices_per_node for rank in ranks})
        return self._nodes[ranks]

    def _copying(self, kind: str, nbytes: float, count: int) -> float:
        """By copy engines: each reads all that its rank has not, over a link of its own, among however many ranks."""
        way = BY_COPIES[kind][0]
        if not self._engines[way]:  # the other one was measured
            way = next(other for other, counts in self._engines.items() if counts)
        measured = min(self._engines[way], key=lambda known: abs(known - count))
        alike = nbytes * (1 - 1 / count) / (1 - 1 / measured)
        return self._inside(way, alike, measured)

    def _inside(self, kind: str, nbytes: float, count: int) -> float:
        curve = self._curve(kind, count)
        if curve is not None:
            floor = curve[0][1]
            return max(floor, interpolate(curve, nbytes) / self._linked)
        bus = self._bus(kind)
        return LATENCY_S * 2 + _on_wire(kind, nbytes, count) / bus

    def _curve(self, kind: str, count: int) -> Curve | None:
        return self.profile.collectives.get(f"{kind}/{count}")

    def _bus(self, kind: str) -> float:
        """Bytes a second over a link inside of a node, as the largest measured collective of this kind, or any, had it."""
        found = []
        for name, curve in self.profile.collectives.items():
            other, _, ranks = name.partition("/")
            size, seconds = curve[-1]
            found.append((other == kind, int(ranks), _on_wire(other, size, int(ranks)) / seconds))
        if found:
            return max(found)[2] * self._linked
        link = self._cluster.device.link_bytes_s
        return link * 0.75 if link else 1e9

    def _between_nodes(self, kind: str, nbytes: float, count: int, nodes: int) -> float:
        """Over the network, whose cards each device of a node has one of; rings go round, trees for all-reduce."""
        network = self._cluster.device.network_bytes_s or 1e9
        per_node = max(1, count // nodes)
        link = min(self._bus(kind), per_node * network * 0.85)
        hops = 2 * math.ceil(math.log2(nodes)) if kind == "all_reduce" else nodes - 1
        return LATENCY_S * (2 + hops) + _on_wire(kind, nbytes, count) / link

    def host_copy(self, nbytes: float) -> float:
        """Between the device and pinned host memory."""
        return (
            interpolate(self.profile.host_copies, nbytes)
            if self.profile.host_copies
            else nbytes / HOST_LINK_BYTES_S
        )


def costs_of(cluster: Cluster, profile: Profile | None = None) -> Costs:
    """By a profile that is given, that comes with shoal for this device, or else for a device most like it."""
    if profile is not None:
        return Costs(cluster, profile)
    shipped = shipped_profiles()
    if cluster.device.kind in shipped:
        return Costs(cluster, shipped[cluster.device.kind], shipped=True)
    same = [one for one in shipped.values() if DEVICES[one.device].type == cluster.device.type]
    nearest = min(same, key=lambda one: _unlike(cluster.device, DEVICES[one.device]))
    return Costs(cluster, nearest, shipped=True)


def _unlike(one: Device, other: Device) -> float:
    return abs(math.log(_ratio(one.flops, other.flops)))


def _ratio(one: float | None, other: float | None) -> float:
    return one / other if one and other else 1.0


def _flops_of(profile: Profile) -> float:
    """What the fastest product reached, for devices whose vendors tell no peak."""
    return max((2 * one.m * one.n * one.k / one.seconds for one in profile.matmuls), default=1e11) / REACHED


def _on_wire(kind: str, nbytes: float, count: int) -> float:
    """Bytes that each rank sends over its link."""
    if kind in ("send", "receive", "broadcast"):
        return nbytes
    return nbytes * RING.get(kind, 1.0) * (count - 1) / count


def _distance(one: Sequence[float], other: Sequence[float]) -> float:
    return sum(math.log2(max(a, 1) / max(b, 1)) ** 2 for a, b in zip(one, other, strict=True))


def _weighted(near: list[tuple[float, T]], value: Callable[[T], float]) -> float:
    """A mean of what was measured, the nearest counting most."""
    weights = [(1 / (distance + 0.01) ** 2, value(one)) for distance, one in near]
    return sum(weight * each for weight, each in weights) / sum(weight for weight, _ in weights)


def _attention_rate(one: Attention, *, backward: bool) -> float:
    """Operations a second of causal attention."""
    products, seconds = (5, one.backward_s) if backward else (2, one.forward_s)
    return products * one.batch * one.heads * one.length**2 * one.width / seconds
