"""`Cluster` reads the line that it writes, and knows the published rates of devices."""

from __future__ import annotations

import pytest

from shoal.cluster import DEVICES, GIB, Cluster


@pytest.mark.parametrize("kind", DEVICES)
@pytest.mark.parametrize(
    ("nodes", "per_node", "host_gib"), [(1, 1, None), (1, 8, 1000), (4, 8, 23.4), (1024, 2, None)]
)
def test_a_cluster_is_its_line(kind: str, nodes: int, per_node: int, host_gib: float | None) -> None:
    cluster = Cluster(nodes=nodes, devices_per_node=per_node, device=DEVICES[kind], host_gib=host_gib)
    assert Cluster.parse(cluster.describe()) == cluster
    assert cluster.num_devices == nodes * per_node


@pytest.mark.parametrize("text", ["4x8 h100", "4 x 8 H100", "  4x8   h100 "])
def test_spaces_and_case_do_not_matter(text: str) -> None:
    assert Cluster.parse(text).describe() == "4x8 h100"


@pytest.mark.parametrize(
    "text",
    [
        "",
        "h100",
        "8",
        "8 h1000",
        "0 h100",
        "0x8 h100",
        "4x h100",
        "-1 cpu",
        "8 h100 x",
        "8 h100 with GiB",
        "8 h100 1 GiB",
        "8 h100 with 0 GiB",
    ],
)
def test_what_is_not_understood_is_named_with_the_forms_and_kinds_that_are(text: str) -> None:
    with pytest.raises(ValueError, match="is not understood") as caught:
        Cluster.parse(text)
    message = str(caught.value)
    assert repr(text) in message
    assert "'4x8 h100'" in message
    assert all(kind in message for kind in DEVICES)


def test_rates_are_those_of_nvidias_h100_sxm_datasheet() -> None:
    h100 = DEVICES["h100"]
    assert (h100.memory_bytes, h100.flops, h100.bandwidth_bytes_s) == (80 * GIB, 989e12, 3.35e12)
    assert h100.link_bytes_s == 900e9 / 2  # NVLink 4's 900 GB/s count both ways


def test_every_gpu_has_all_rates_and_a_cpu_none() -> None:
    for kind, device in DEVICES.items():
        rates = (device.memory_bytes, device.flops, device.bandwidth_bytes_s, device.link_bytes_s)
        assert all(rate is None for rate in rates) if kind == "cpu" else all(rate for rate in rates)
