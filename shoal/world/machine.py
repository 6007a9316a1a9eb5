"""This machine as a cluster of one node."""

from __future__ import annotations

import itertools
import os
import re

import torch

from shoal.cluster import DEVICES, GIB, Cluster, Device
from shoal.observe import host


def detect_cluster() -> Cluster:
    """This machine as a cluster of one node: its GPUs, or two CPU ranks, since more do not make a CPU faster.

    Example:
        >>> detect_cluster().nodes
        1
    """
    there = host.memory()
    host_gib = None if there is None else round(there.total_bytes / GIB, 1)
    count = torch.cuda.device_count()
    if count == 0:
        ranks = min(2, len(os.sched_getaffinity(0)))
        return Cluster(devices_per_node=ranks, device=DEVICES["cpu"], host_gib=host_gib)
    properties = torch.cuda.get_device_properties(0)
    device = known_device(properties.name, properties.total_memory)
    return Cluster(devices_per_node=count, device=device, host_gib=host_gib)


def known_device(name: str, memory_bytes: int) -> Device:
    """The device of `shoal.cluster.DEVICES` that a GPU's name and memory fit, or one without rates.

    Variants with other rates (PCIe, NVL, laptops, Grace) are not taken for the named one.
    """
    words = re.findall(r"[a-z0-9]+", name.lower())
    pairs = {a + b for a, b in itertools.pairwise(words)} | set(words)
    for kind, known in DEVICES.items():
        named = kind.partition("-")[0] in pairs and not pairs & {"pcie", "nvl", "laptop"}
        if named and known.memory_bytes and abs(memory_bytes / known.memory_bytes - 1) < 0.15:
            return known.model_copy(update={"memory_bytes": memory_bytes})
    return Device(kind="-".join(words), type="cuda", memory_bytes=memory_bytes)
