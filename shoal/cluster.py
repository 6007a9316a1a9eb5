"""`Cluster`: on what a job runs. Nodes, devices, memory, rates and links.

Said in a line (`8 h100`, `4x8 h100` for 4 nodes of 8, `2 cpu`, `8 h100 with 1000 GiB` of host memory a node) or detected by
`shoal.world.detect_cluster`. Frozen data that imports neither torch nor the rest of shoal.
"""

from __future__ import annotations

import re
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

GIB = 1024**3


class Device(BaseModel):
    """One kind of device; rates are the vendor's dense peaks, which no real program reaches."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: str
    type: Literal["cuda", "cpu"]
    memory_bytes: int | None = Field(
        None, description="device memory; unknown for CPU ranks, which share the host's"
    )
    flops: float | None = Field(None, description="peak dense bf16 operations a second; unknown for CPUs")
    bandwidth_bytes_s: float | None = Field(None, description="peak memory bandwidth, bytes/s")
    link_bytes_s: float | None = Field(
        None, description="bandwidth to a device of the same node, bytes/s, one way"
    )
    network_bytes_s: float | None = Field(
        None, description="bandwidth to another node for each device, bytes/s, one way"
    )


def _gpu(
    kind: str, gib: float, tflops: float, tb_s: float, link_gb_s: float, network_gbit_s: float
) -> Device:
    return Device(
        kind=kind,
        type="cuda",
        memory_bytes=int(gib * GIB),
        flops=tflops * 1e12,
        bandwidth_bytes_s=tb_s * 1e12,
        link_bytes_s=link_gb_s * 1e9,
        network_bytes_s=network_gbit_s / 8 * 1e9,
    )


DEVICES: dict[str, Device] = {
    device.kind: device
    for device in (
        # vendors' datasheets: memory GiB, dense bf16 TFLOP/s, TB/s, GB/s one way to a neighbour, Gbit/s to other nodes (as in the
        # vendors' own nodes of 8; workstation cards: as usual)
        _gpu("a100", 80, 312, 2.04, 300, 200),
        _gpu("a100-40", 40, 312, 1.56, 300, 200),
        _gpu("h100", 80, 989, 3.35, 450, 400),
        _gpu("h200", 141, 989, 4.8, 450, 400),
        _gpu("b200", 180, 2250, 8.0, 900, 400),
        _gpu("l40s", 48, 362, 0.86, 32, 100),
        _gpu("rtx4090", 24, 165, 1.01, 32, 25),
        _gpu("mi300x", 192, 1307, 5.3, 64, 400),
        Device(kind="cpu", type="cpu"),
    )
}


class Cluster(BaseModel):
    """Nodes of equal devices.

    Example:
        >>> Cluster.parse("4x8 h100").num_devices
        32
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    nodes: int = Field(1, ge=1)
    devices_per_node: int = Field(1, ge=1)
    device: Device = DEVICES["cpu"]
    host_gib: float | None = Field(None, gt=0, description="host memory of a node, GiB; left out: not known")

    @property
    def num_devices(self) -> int:
        return self.nodes * self.devices_per_node

    @classmethod
    def parse(cls, text: str) -> Cluster:
        """Read `[nodes x] devices kind [with N GiB]`.

        Raises:
            ValueError: naming the text and the forms and kinds that are known.
        """
        match = re.fullmatch(
            r"\s*(?:(\d+)\s*x\s*)?(\d+)\s+([\w-]+)(?:\s+with\s+(\d+(?:\.\d+)?)\s*gib)?\s*", text.lower()
        )
        host_gib = float(match[4]) if match and match[4] else None
        if not match or match[3] not in DEVICES or 0 in (int(match[2]), int(match[1] or 1), host_gib):
            if "+" in text:
                raise ValueError(
                    f"cluster = {text!r} has several kinds of devices, which only `shoal plan --on` is asked about; to train "
                    "on them, leave cluster out and start a rank on each, with the plan.shares that it told"
                )
            raise ValueError(
                f"cluster = {text!r} is not understood: expected 'devices kind' or 'nodes x devices kind', such as "
                f"'8 h100' or '4x8 h100', and where it matters ' with 1000 GiB' of host memory a node; kinds: "
                f"{', '.join(DEVICES)}"
            )
        return cls(
            nodes=int(match[1] or 1),
            devices_per_node=int(match[2]),
            device=DEVICES[match[3]],
            host_gib=host_gib,
        )

    def describe(self) -> str:
        """The line that `parse` reads."""
        nodes = f"{self.nodes}x" if self.nodes > 1 else ""
        host = f" with {self.host_gib:.10g} GiB" if self.host_gib else ""
        return f"{nodes}{self.devices_per_node} {self.device.kind}{host}"
