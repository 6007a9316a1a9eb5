"""`Profile`: what kernels, collectives and launches take on one kind of device: measured by `shoal bench device`, or scaled from
measurements of another device by the vendors' rates.

A file of it is JSON. Those that come with shoal are in `planner/profiles/`, one for each kind of device that was measured.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import NamedTuple

from pydantic import BaseModel, ConfigDict, Field, ValidationError

Curve = tuple[tuple[float, float], ...]
"""(bytes, seconds), by size"""


class Matmul(NamedTuple):
    """A product of an m x k and a k x n matrix."""

    dtype: str
    """of the inputs, as torch names it: "bfloat16", "float32", "float8_e4m3fn" """
    m: int
    n: int
    k: int
    seconds: float


class Attention(NamedTuple):
    """Causal attention of queries of (batch, heads, length, width), by the kernel that training takes."""

    dtype: str
    batch: int
    heads: int
    kv_heads: int
    length: int
    width: int
    forward_s: float
    backward_s: float


class Host(BaseModel):
    """Seconds of the process that launches: a device waits for it where kernels are short."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    operator_s: float = Field(
        gt=0, description="an operator that is called from Python, with its gradient's bookkeeping"
    )
    kernel_s: float = Field(gt=0, description="a kernel that compiled code launches")
    graph_s: float = Field(gt=0, description="a call of compiled code: its guards and wrappers")
    collective_s: float = Field(gt=0, description="a collective")


class Beside(BaseModel):
    """By how much work takes longer while computing and communication go on at once: 1.0 is not at all."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    computing: float = Field(1.0, ge=1, description="kernels beside a collective")
    collectives: float = Field(1.0, ge=1, description="collectives beside kernels")


class Profile(BaseModel):
    """Of one kind of device, in nodes of some number."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    device: str = Field(description="kind, as in `shoal.cluster.DEVICES`")
    name: str = Field(description="of the device, as its driver says it")
    about: str = Field(description="how and with which versions it was measured, for people")
    devices: int = Field(ge=1, description="of the node on which it was measured")
    matmuls: tuple[Matmul, ...] = ()
    attention: tuple[Attention, ...] = ()
    moves: Curve = Field(description="an element-wise kernel: bytes that it reads and writes, seconds")
    collectives: dict[str, Curve] = Field(
        description='by "kind/ranks of one node", such as "all_gather/4"; bytes of the whole tensor (for all_to_all and '
        "send: of what one rank sends), seconds. Kinds: all_gather, reduce_scatter, all_reduce, all_to_all, broadcast, send, "
        "and, where devices read each other's memory, an all_gather by copy engines: peers through a room, shared in place"
    )
    hot: float = Field(
        1.0,
        ge=1,
        description="by how much products take longer on a device that has computed for seconds than as measured here: 1.0 where "
        "they were measured on a hot one",
    )
    host_copies: Curve = Field((), description="from pinned host memory to the device: bytes, seconds")
    host: Host
    beside: Beside = Beside()


def read_profile(path: Path) -> Profile:
    """Raises ValueError, naming the file and what is wrong in it."""
    try:
        return Profile.model_validate_json(path.read_text())
    except OSError as error:
        raise ValueError(f"profile {path} cannot be read: {error.strerror}") from error
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "the file"
        raise ValueError(
            f"profile {path}: {where}: {first['msg']}; expected a file that `shoal bench device` wrote"
        ) from error


def shipped_profiles() -> dict[str, Profile]:
    """By kind of device: those that come with shoal."""
    folder = resources.files("shoal.planner").joinpath("profiles")
    found = [
        Profile.model_validate_json(file.read_text())
        for file in folder.iterdir()
        if file.name.endswith(".json")
    ]
    return {profile.device: profile for profile in found}


def interpolate(curve: Sequence[tuple[float, float]], size: float) -> float:
    """Seconds for a size, between the points of a curve in proportion of their logarithms; beyond its end in proportion to size.

    Example:
        >>> interpolate(((1e6, 1e-5), (4e6, 4e-5)), 2e6)
        2e-05
    """
    sizes = [point[0] for point in curve]
    if size <= sizes[0]:
        return curve[0][1]
    if size >= sizes[-1]:
        return curve[-1][1] * size / sizes[-1]
    at = bisect_right(sizes, size)
    (low, fast), (high, slow) = curve[at - 1], curve[at]
    share = math.log(size / low) / math.log(high / low)
    return math.exp(math.log(fast) * (1 - share) + math.log(slow) * share)
