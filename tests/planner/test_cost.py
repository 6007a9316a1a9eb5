"""Times of launches: measured ones are given back, those between follow, other devices are scaled by their datasheets."""

from __future__ import annotations

import pytest

from shoal.cluster import DEVICES, Cluster
from shoal.planner.cost import BOTH_WAYS, Costs, costs_of
from shoal.planner.launch import GROUPED, Dims, Heads, Launch, Moment
from shoal.planner.profile import shipped_profiles

NOW = Moment(1, "forward", "")
H100 = shipped_profiles()["h100"]


def costs(on: str) -> Costs:
    return Costs(Cluster.parse(on), H100)


def product(m: int, n: int, k: int, dtype: str = "bfloat16") -> Launch:
    dims = Dims(m, n, k)
    return Launch("matmul", 0, "aten.mm", NOW, flops=2 * m * n * k, dtype=dtype, dims=dims)


def moved(nbytes: int) -> Launch:
    return Launch("move", 0, "aten.add", NOW, nbytes=nbytes)


def attention(length: int, *, backward: bool = False) -> Launch:
    heads = Heads(1, 32, 8, length, length, 128, causal=True, backward=backward)
    flops = (5 if backward else 2) * 32 * length**2 * 128
    return Launch("attention", 0, "aten.attention", NOW, flops=flops, dtype="bfloat16", dims=heads)


@pytest.mark.parametrize("measured", H100.matmuls[::7], ids=str)
def test_a_measured_product_takes_what_was_measured(measured: object) -> None:
    dtype, m, n, k, seconds = measured  # pyrefly: ignore[not-iterable]
    assert costs("8 h100").seconds(product(m, n, k, dtype)) == pytest.approx(seconds * H100.hot, rel=0.03)


def test_a_product_between_two_measured_ones_takes_a_time_between_theirs() -> None:
    small, middle, large = (costs("8 h100").seconds(product(size, 4096, 4096)) for size in (2048, 3072, 4096))
    assert small < middle < large


def test_no_product_is_faster_than_the_device() -> None:
    for m, n, k in ((8192, 8192, 8192), (256, 256, 256), (16, 128256, 4096), (1, 1, 1), (10**6, 64, 64)):
        launch = product(m, n, k)
        assert costs("8 h100").seconds(launch) >= launch.flops / (DEVICES["h100"].flops or 0)


def test_attention_takes_what_was_measured_and_grows_with_the_square() -> None:
    once, twice = (costs("8 h100").seconds(attention(length)) for length in (8192, 16384))
    assert once == pytest.approx(H100.attention[0].forward_s, rel=0.01) and twice == pytest.approx(
        4 * once, rel=0.01
    )
    assert costs("8 h100").seconds(attention(8192, backward=True)) == pytest.approx(
        H100.attention[0].backward_s, rel=0.01
    )


def test_attention_is_of_kernels_as_wide_more_than_of_those_as_long() -> None:
    heads = Heads(1, 32, 8, 8192, 8192, 64, causal=True, backward=False)
    flops = 2 * 32 * 8192**2 * 64
    seconds = Costs(Cluster.parse("1 h200"), shipped_profiles()["h200"]).seconds(
        Launch("attention", 0, "aten.attention", NOW, flops=flops, dtype="bfloat16", dims=heads)
    )
    assert seconds == pytest.approx(
        2.75e-3 / 4, rel=0.1
    )  # benchmarks/results/profiles_1xh200.json, of four layers


def test_another_device_is_scaled_by_its_datasheet() -> None:
    a100, h100 = costs("8 a100"), costs("8 h100")
    rates = [(DEVICES[kind].flops or 0, DEVICES[kind].bandwidth_bytes_s or 0) for kind in ("h100", "a100")]
    assert a100.seconds(product(8192, 8192, 8192)) == pytest.approx(
        h100.seconds(product(8192, 8192, 8192)) * rates[0][0] / rates[1][0]
    )
    assert a100.seconds(moved(2**30)) == pytest.approx(
        h100.seconds(moved(2**30)) * rates[0][1] / rates[1][1], rel=0.01
    )
    assert not a100.own and a100.sureness.high > h100.sureness.high


def test_collectives_inside_of_a_node_are_as_measured() -> None:
    size, seconds = H100.collectives["all_gather/4"][-2]
    assert costs("4 h100").collective("all_gather", size, (0, 1, 2, 3)) == pytest.approx(seconds)


def test_what_goes_by_copy_engines_takes_their_time_where_it_is_known() -> None:
    size, h200, four = 2**28, shipped_profiles()["h200"], (0, 1, 2, 3)
    found = Costs(Cluster.parse("4 h200"), h200)
    curve = dict(h200.collectives["peers/2"])
    measured = min(curve, key=lambda known: abs(known - size))
    assert found.collective("peer_gather", measured, (0, 1)) == pytest.approx(curve[measured])
    assert found.collective("peer_exchange", measured, (0, 1)) == pytest.approx(curve[measured])
    # of four, each reads three quarters of the whole, and of two a half
    assert found.collective("peer_gather", measured / 1.5, four) == pytest.approx(curve[measured])
    unknown = costs("4 h100")
    for kind, other in (("peer_gather", "all_gather"), ("peer_exchange", "all_to_all")):
        assert unknown.collective(kind, size, four) == unknown.collective(other, size, four)


def test_more_ranks_than_were_measured_follow_the_links() -> None:
    four, eight = (costs("8 h100").collective("all_gather", 2**30, tuple(range(n))) for n in (4, 8))
    assert four < eight < 1.5 * four


def test_between_nodes_the_network_counts_and_all_cards_of_a_node_are_used() -> None:
    here = costs("2x8 h100")
    inside = here.collective("all_reduce", 2**30, tuple(range(8)))
    between = here.collective("all_reduce", 2**30, tuple(range(16)))
    pairs = here.collective("all_reduce", 2**30, (0, 8))
    assert inside < between < pairs
    assert pairs >= 2**30 / 50e9  # 400 Gbit/s


def test_many_nodes_take_longer_by_their_latency() -> None:
    few, many = (
        Costs(Cluster.parse(f"{nodes}x8 h100"), H100).collective("all_gather", 2**24, tuple(range(8 * nodes)))
        for nodes in (2, 128)
    )
    assert many > few + 100e-6


def test_one_rank_has_nothing_to_send() -> None:
    assert costs("8 h100").collective("all_reduce", 2**30, (3,)) == 0


@pytest.mark.parametrize("kind", DEVICES)
def test_every_device_has_a_profile_or_one_to_scale_from(kind: str) -> None:
    found = costs_of(Cluster.parse(f"8 {kind}"))
    assert DEVICES[found.profile.device].type == DEVICES[kind].type
    assert found.own == (found.profile.device == kind)
    assert found.seconds(product(4096, 4096, 4096)) > 0


def test_a_profile_of_another_cpu_is_hardly_sure_and_one_of_this_machine_is() -> None:
    shipped = costs_of(Cluster.parse("2 cpu"))
    own = costs_of(Cluster.parse("2 cpu"), shipped.profile)
    assert shipped.sureness.high > 1 > own.sureness.high and "bench device" in shipped.sureness.why


def test_a_message_to_another_node_goes_over_the_network() -> None:
    here = costs("2x8 h100")
    inside, between = (here.collective("receive", 2**28, (0, other)) for other in (1, 8))
    assert between > 2**28 / 50e9 > inside


def test_a_profile_of_an_unknown_device_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="'tpu'"):
        costs_of(Cluster.parse("8 h100"), H100.model_copy(update={"device": "tpu"}))


def test_copies_from_the_host_are_slower_beside_copies_to_it() -> None:
    def copy(phase: str) -> Launch:
        return Launch("transfer", 0, "aten.copy_", Moment(1, phase, ""), nbytes=1 << 26)

    h200 = Costs(Cluster.parse("2 h200"), shipped_profiles()["h200"])
    assert h200.seconds(copy("update")) == pytest.approx(BOTH_WAYS * h200.seconds(copy("forward")))


def test_a_product_of_groups_takes_longer_than_one_of_as_many_rows() -> None:
    one, groups = product(8192, 4096, 4096), product(8192, 4096, 4096)
    groups.times = GROUPED
    assert costs("8 h100").seconds(groups) == pytest.approx(GROUPED * costs("8 h100").seconds(one))
