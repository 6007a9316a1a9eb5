"""Clocks of a step: what runs at once, what waits for what, and what a pipeline's bubble comes to, against what one can count."""

from __future__ import annotations

import pytest

from shoal.cluster import Cluster
from shoal.plan import Plan
from shoal.planner.cost import Costs
from shoal.planner.launch import Dims, Launch, Moment
from shoal.planner.profile import Beside, Host, Matmul, Profile
from shoal.planner.replay import Part, StuckError, replay
from shoal.planner.simulate import simulate
from shoal.planner.trace import Trace
from tests.planner.real import deep, work

HOST = Host(operator_s=1e-6, kernel_s=1e-7, graph_s=1e-6, collective_s=1e-6)
# an element-wise kernel takes 1 ns a byte, a collective 2
PROFILE = Profile(
    device="h100",
    name="made up",
    about="",
    devices=2,
    moves=((1e3, 1e-6), (1e9, 1.0)),
    collectives={f"{kind}/2": ((1e3, 2e-6), (1e9, 2.0)) for kind in ("all_gather", "all_reduce", "send")},
    matmuls=(Matmul("bfloat16", 4096, 4096, 4096, 1e-3),),
    host=HOST,
)
NOW = Moment(1, "forward", "blocks.0")


def costs(profile: Profile = PROFILE, on: str = "2 h100") -> Costs:
    return Costs(Cluster.parse(on), profile)


def kernel(nbytes: float, stream: int = 0, moment: Moment = NOW) -> Launch:
    return Launch("move", stream, "aten.add", moment, nbytes=int(nbytes))


def gather(nbytes: float, stream: int = 1) -> Launch:
    return Launch("collective", stream, "all_gather", NOW, nbytes=int(nbytes), ranks=(0, 1))


def then(stream: int, on: Launch) -> list[Launch]:
    """What makes a stream wait for a launch of another one."""
    record = Launch("record", on.stream, "", NOW)
    return [record, Launch("wait", stream, "", NOW, on=record)]


def trace(*launches: Launch) -> Trace:
    return Trace(events=list(launches), moments=[launch.moment for launch in launches])


def parts(*launches: Launch, profile: Profile = PROFILE) -> dict[Part, float]:
    return replay({0: trace(*launches)}, costs(profile)).ranks[0].parts


def test_kernels_of_a_stream_follow_each_other() -> None:
    found = replay({0: trace(kernel(1e6), kernel(2e6))}, costs())
    assert found.seconds == pytest.approx(3e-3, rel=1e-2)
    assert found.ranks[0].parts[Part.MOVES] == pytest.approx(3e-3, rel=1e-6)


def test_parts_add_up_to_the_step() -> None:
    sent = gather(2e6)
    launches = [sent, kernel(1e6), *then(0, sent), kernel(1e6, moment=Moment(1, "update", ""))]
    found = replay({0: trace(*launches)}, costs())
    assert sum(found.ranks[0].parts.values()) == pytest.approx(found.seconds, rel=1e-9)
    assert found.ranks[0].parts[Part.UPDATE] == pytest.approx(1e-3, rel=1e-6)


def test_a_collective_beside_enough_computing_is_hidden() -> None:
    sent = gather(1e6)
    assert parts(sent, kernel(5e6), *then(0, sent), kernel(1e6))[Part.EXPOSED] == 0


def test_what_is_not_hidden_is_exposed() -> None:
    sent = gather(2e6)  # 4 ms, beside 1 ms of computing
    assert parts(sent, kernel(1e6), *then(0, sent), kernel(1e6))[Part.EXPOSED] == pytest.approx(
        3e-3, rel=1e-2
    )


def test_collectives_share_a_link() -> None:
    found = replay({0: trace(gather(1e6, 1), gather(1e6, 2))}, costs())
    assert found.seconds == pytest.approx(4e-3, rel=1e-2)


def test_short_kernels_wait_for_the_host() -> None:
    slow = PROFILE.model_copy(update={"host": HOST.model_copy(update={"operator_s": 1e-3})})
    found = parts(*[kernel(1e5) for _ in range(10)], profile=slow)
    assert found[Part.HOST] == pytest.approx(10e-3 - 9 * 1e-4, rel=1e-2)


def test_compiled_kernels_cost_the_host_less() -> None:
    slow = PROFILE.model_copy(update={"host": HOST.model_copy(update={"operator_s": 1e-3, "kernel_s": 1e-5})})
    launches = [kernel(1e5) for _ in range(10)]
    for launch in launches:
        launch.compiled = True
    assert parts(*launches, profile=slow)[Part.HOST] < 1e-4


def test_work_at_once_is_slower_by_what_the_profile_says() -> None:
    beside = PROFILE.model_copy(update={"beside": Beside(computing=1.5, collectives=1.0)})
    found = parts(gather(10e6), kernel(2e6), profile=beside)
    assert found[Part.MOVES] == pytest.approx(3e-3, rel=1e-2)


@pytest.mark.parametrize(("peers", "gather_ms", "kernel_ms"), [(True, 10.0, 2.0), (False, 30.0, 3.0)])
def test_copy_engines_and_what_computes_do_not_slow_each_other(
    peers: bool, gather_ms: float, kernel_ms: float
) -> None:
    """Where it was measured how long they take; else they are taken to go as NCCL's kernels."""
    curves = {"peers/2": ((1e3, 1e-6), (1e9, 1.0))} if peers else {"all_gather/2": ((1e3, 1e-6), (1e9, 1.0))}
    beside = Beside(computing=1.5, collectives=3.0)
    profile = PROFILE.model_copy(update={"beside": beside, "collectives": curves})
    by_copies = Launch("collective", 1, "peer_gather", NOW, nbytes=int(10e6), ranks=(0, 1))
    before = kernel(1e6)  # so that the gather begins while something computes
    found = replay({0: trace(before, by_copies, kernel(2e6), *then(0, by_copies))}, costs(profile))
    assert found.ranks[0].communication_s == pytest.approx(gather_ms / 1e3, rel=1e-2)
    assert found.ranks[0].parts[Part.MOVES] == pytest.approx((1.0 + kernel_ms) / 1e3, rel=0.02)


def test_the_first_step_does_not_count() -> None:
    first = kernel(9e6, moment=Moment(0, "forward", ""))
    assert replay({0: trace(first, kernel(1e6))}, costs()).seconds == pytest.approx(1e-3, rel=1e-2)


def test_a_message_waits_for_its_sender() -> None:
    sent = Launch("send", "send 1", "send", NOW, nbytes=10**6, ranks=(1,))
    got = Launch("receive", "receive 0", "receive", NOW, nbytes=10**6, ranks=(0,))
    first = kernel(3e6)
    ready = Launch("record", 0, "", NOW)
    sender = trace(first, ready, Launch("wait", "send 1", "", NOW, on=ready), sent)
    receiver = trace(got, Launch("wait", 0, "", NOW, on=got), kernel(1e6))
    found = replay({0: sender, 1: receiver}, costs())
    assert found.seconds == pytest.approx(3e-3 + 2e-3 + 1e-3, rel=1e-2)
    assert found.ranks[1].parts[Part.BUBBLE] == pytest.approx(5e-3, rel=1e-2)


def test_messages_that_nobody_sends_are_told() -> None:
    got = [Launch("receive", "receive", "receive", NOW, nbytes=8, ranks=(other,)) for other in (0, 1)]
    traces = {rank: trace(got[1 - rank], Launch("wait", 0, "", NOW, on=got[1 - rank])) for rank in (0, 1)}
    with pytest.raises(StuckError, match=r"\[0, 1\]"):
        replay(traces, costs())


@pytest.mark.parametrize(("schedule", "micro"), [("gpipe", 4), ("1f1b", 4)])
def test_a_pipelines_bubble_is_what_its_schedule_has(schedule: str, micro: int) -> None:
    """(p - 1) / (m + p - 1) of the step for p stages that take equally long and m micro-batches; the ends of a model are more."""
    plan = Plan.model_validate(
        {"pipeline": 2, "micro_batch": 8 // micro, "schedule": schedule, "compile": False}
    )
    cluster = Cluster.parse("2 h100")
    # products alone cost anything here, so that stages with as many blocks differ by the last one's head alone
    even = PROFILE.model_copy(
        update={
            "moves": ((1e3, 1e-12), (1e9, 1e-6)),
            "collectives": {"send/2": ((1e3, 1e-12), (1e9, 1e-6))},
            "host": Host(operator_s=1e-12, kernel_s=1e-12, graph_s=1e-12, collective_s=1e-12),
        }
    )
    traces = {rank: simulate(work(deep), plan, cluster, rank) for rank in (0, 1)}
    found = replay(traces, Costs(cluster, even))
    shares = [rank.parts[Part.BUBBLE] / found.seconds for rank in found.ranks]
    assert min(shares) == pytest.approx(1 / (micro + 1), abs=0.12)


def test_a_product_takes_its_measured_time() -> None:
    launch = Launch(
        "matmul", 0, "aten.mm", NOW, flops=2 * 4096**3, dtype="bfloat16", dims=Dims(4096, 4096, 4096)
    )
    assert parts(launch)[Part.MATMUL] == pytest.approx(1e-3, rel=1e-6)


def test_on_a_cpu_operators_are_called_by_what_computes() -> None:
    cpu = PROFILE.model_copy(update={"device": "cpu", "host": HOST.model_copy(update={"operator_s": 1e-3})})
    found = replay({0: trace(kernel(1e6), kernel(1e6))}, costs(cpu, "2 cpu"))
    assert found.seconds == pytest.approx(2 * (1e-3 + 1e-3), rel=1e-2)
    assert found.ranks[0].parts[Part.HOST] == 0


def test_a_recorded_step_does_not_wait_for_the_host_but_its_update_does() -> None:
    short = [
        kernel(1e3) for _ in range(5)
    ]  # of 1 microsecond each, which the host takes as well, and one ahead
    update = [kernel(10, moment=Moment(1, "update", "")) for _ in range(5)]
    launched = replay({0: trace(*short, *update)}, costs()).ranks[0].parts
    recorded = replay({0: trace(*short, *update)}, costs(), as_graph=True).ranks[0].parts
    assert launched[Part.HOST] == pytest.approx(recorded[Part.HOST] + 1e-6, rel=0.2)
    alone = replay({0: trace(*short)}, costs(), as_graph=True)
    assert alone.ranks[0].parts[Part.HOST] == 0
    assert alone.seconds == pytest.approx(sum(costs().seconds(each) for each in short))
