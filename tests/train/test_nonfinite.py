"""A skipped step is taken again to say why: data, model or hardware, where and in which module; training goes on bit for bit."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, Literal, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from shoal.config import parse
from shoal.data.cut import MicroBatch, StepBatch
from shoal.models.moe import Moe
from shoal.observe.report import write_report
from shoal.observe.status import RankStatus
from shoal.parallel.apply import parallelize
from shoal.parallel.replicate import core
from shoal.plan import Plan
from shoal.run import Run, read_json_lines
from shoal.train.loop import train
from shoal.train.nonfinite import Cause, Place, Seen, find_cause, judge
from shoal.train.objective import NextToken, Supervised
from shoal.train.optimizer import SGD, AdamW
from shoal.train.result import StepResult
from shoal.train.step import Step
from shoal.train.watch import Sight, all_finite, visible
from shoal.world import World
from tests.ranks import run_all, run_ranks
from tests.train.moe_toy import DIMS
from tests.train.toy import BATCH, global_batch, part_of, whole_weights

MARK = 51  # a token that stands in one sample alone
SAMPLE, BAD_STEP, STEPS = 13, 1, 4
How = Literal["forward", "backward", "once"]


class Marking(NextToken):
    """Knows whether the micro-batch that runs has the marked sample."""

    bad = False

    def forward(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        self.bad = bool((batch["tokens"] == MARK).any())
        return super().forward(model, batch)


class Ran(NamedTuple):
    numbers: list[tuple[float, ...]]
    causes: list[Cause]
    tensors: dict[str, Tensor]
    drawn: float
    """the next random number"""


def spoil(module: nn.Module, objective: Marking, how: How) -> None:
    """Have a module's output, or its gradient, not be finite for the marked sample: each time or once."""
    times = 0

    def hook(_: nn.Module, args: Any, output: Tensor) -> Tensor:
        nonlocal times
        if not objective.bad or (how == "once" and times):
            return output
        times += 1
        if how == "backward":
            output = output.clone()
            output.register_hook(lambda gradient: gradient * math.nan)
            return output
        return output * math.inf

    module.register_forward_hook(hook)


def trained(world: World, plan: Plan, how: How, explain: Literal["no", "after", "late"]) -> Ran:
    """Some steps of which one is skipped; its cause is found after it, or `late`, inside of the next one as on a GPU."""
    model = parallelize(lambda: Moe(DIMS), plan, world, seed=3)
    objective = Marking()
    there = dict(core(model).named_modules())
    if (module := there.get("blocks.1.feed_forward")) is not None and (how != "once" or world.rank == 1):
        spoil(module, objective, how)
    step = Step(model, objective, AdamW(lr=1e-2), plan, world)
    causes: list[Cause] = []
    unread: list[StepResult] = []

    def read() -> None:
        while unread:
            result = unread.pop()
            if result.skipped and explain != "no":
                causes.append(
                    find_cause(step, result, lambda micro: range(micro.first, micro.first + micro.samples))
                )

    numbers = []
    for index in range(STEPS):
        data = global_batch(index)
        if index == BAD_STEP:
            data["tokens"][SAMPLE, 0] = MARK
        result = step(part_of(data, index, plan, world.rank), before_update=read)
        unread.append(result)
        if explain == "after":
            read()
        numbers.append(tuple(result.numbers))
    buffers = {name: buffer.clone() for name, buffer in core(model).named_buffers()}
    return Ran(numbers, causes, whole_weights(model) | buffers, torch.rand(()).item())


PLANS = {
    "copies": Plan(replicate=2, micro_batch=4),
    "ZeRO-3": Plan(shard=2, micro_batch=4, recompute="full"),
    "ZeRO-2": Plan(shard=2, zero=2, micro_batch=4),
    "tensor": Plan(tensor=2, micro_batch=4),
    "pipeline": Plan(pipeline=2, micro_batch=4, recompute="full"),
    "experts": Plan(shard=2, expert=2, micro_batch=4),
}
WAYS: tuple[Literal["no", "after", "late"], ...] = ("no", "after", "late")


@pytest.fixture(scope="module")
def outcomes() -> dict[tuple[str, str], Any]:
    cases: dict[tuple[str, str], list[Any]] = {
        (name, explain): [plan, "forward", explain] for name, plan in PLANS.items() for explain in WAYS
    }
    for how in ("backward", "once"):
        cases |= {(f"{how}, {name}", "after"): [PLANS[name], how, "after"] for name in ("copies", "pipeline")}
    return run_all(2, trained, cases)


@pytest.mark.parametrize("name", PLANS)
def test_training_goes_on_bit_for_bit_as_if_nobody_had_looked(name: str, outcomes: dict[Any, Any]) -> None:
    plain, *others = (outcomes[name, explain].get() for explain in WAYS)
    for rank in range(2):
        assert [bool(numbers[3]) for numbers in plain[rank].numbers] == [i == BAD_STEP for i in range(STEPS)]
        for other in others:
            assert len(other[rank].causes) == 1
            assert other[rank].numbers[:BAD_STEP] == plain[rank].numbers[:BAD_STEP]
            assert other[rank].numbers[BAD_STEP + 1 :] == plain[rank].numbers[BAD_STEP + 1 :]
            assert other[rank].drawn == plain[rank].drawn
            for key, tensor in plain[rank].tensors.items():
                assert tensor.equal(other[rank].tensors[key]), key


@pytest.mark.parametrize("explain", ["after", "late"])
@pytest.mark.parametrize("name", PLANS)
def test_the_rank_the_samples_and_the_first_bad_module_are_named_on_all_ranks_alike(
    name: str, explain: str, outcomes: dict[Any, Any]
) -> None:
    first, second = (ran.causes[0] for ran in outcomes[name, explain].get())
    assert first == second
    assert first.kind == "data or model"
    assert first.module == "blocks.1.feed_forward"
    plan, at = PLANS[name], BAD_STEP * BATCH + SAMPLE // 4 * 4
    assert first.place is not None
    assert first.place.samples == [at, at + 1, at + 2, at + 3]
    assert first.place.micro_batch == (SAMPLE // 4) % (BATCH // plan.data_degree // 4)
    if plan.data_degree > 1 or plan.pipeline > 1:
        assert first.place.rank == 1
    assert f"samples {at}, {at + 1}, {at + 2}, {at + 3}" in first.message


@pytest.mark.parametrize("name", ["copies", "pipeline"])
def test_what_goes_wrong_in_backward_alone_is_found_there(name: str, outcomes: dict[Any, Any]) -> None:
    cause = outcomes[f"backward, {name}", "after"].get()[0].causes[0]
    assert cause.kind == "data or model"
    assert cause.module == "blocks.1.feed_forward"
    assert "the first gradient that is not finite" in cause.message
    assert cause.place.rank == 1


@pytest.mark.parametrize("name", ["copies", "pipeline"])
def test_a_rank_that_computes_something_else_the_second_time_is_named(
    name: str, outcomes: dict[Any, Any]
) -> None:
    cause = outcomes[f"once, {name}", "after"].get()[0].causes[0]
    assert cause.kind == "hardware"
    assert "rank 1 gave another loss for the same micro-batch" in cause.message
    assert cause.place.rank == 1


def mse(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()


class Net(nn.Module):
    """With running statistics and dropout."""

    def __init__(self, norm: type[nn.Module] = nn.BatchNorm1d) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 4), norm(4), nn.Dropout(0.5), nn.Linear(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


def odd(
    world: World, *, x: float = 1.0, weight: float = 0.0, factor: float = 1.0, precision: Any = "fp32"
) -> Any:
    """A skipped step of a net, of which one number is odd; what is found, and whether buffers stayed."""
    norm = nn.LayerNorm if precision == "fp16" else nn.BatchNorm1d  # which takes no fp16 on a CPU
    model = parallelize(lambda: Net(norm), Plan(), world, precision=precision, seed=1)
    scaled = Supervised(lambda output, target: mse(output, target) * factor)
    step = Step(model, scaled, SGD(lr=0.1), Plan(), world, precision=precision)
    data = torch.arange(16.0).view(4, 4)
    data[2, 1] *= x
    if weight:
        with torch.no_grad():
            model.get_parameter("layers.3.weight")[1, 1] = weight
    result = step(StepBatch(0, (MicroBatch((data, data), 0, 4),)))
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    cause = find_cause(step, result, lambda micro: [7, 8, 9])
    # running statistics of what is not finite are not, too
    same = all(buffer.nan_to_num().equal(before[name].nan_to_num()) for name, buffer in model.named_buffers())
    return result.skipped, same, cause


@pytest.mark.parametrize(
    ("odd_number", "kind", "said"),
    [
        ({"x": math.nan}, "data", "in micro-batch 0 (samples 7, 8, 9) the data is not finite"),
        ({"weight": math.inf}, "model", "on rank 0 parameter layers.3.weight is not finite"),
        ({"factor": math.nan}, "data or model", "the loss is not finite, and the outputs of all modules"),
        ({"factor": 1e25}, "data or model", "gradients are finite, and their norm is too large"),
        ({"factor": 10.0, "precision": "fp16"}, "loss scale", "the loss scale is now 32768"),
    ],
    ids=["data", "weight", "loss", "norm", "fp16"],
)
def test_each_cause_has_its_words(odd_number: dict[str, Any], kind: str, said: str) -> None:
    ((skipped, same, cause),) = run_ranks(1, odd_kwargs, odd_number)
    assert skipped
    assert same
    assert cause.kind == kind
    assert said in cause.message


def odd_kwargs(world: World, numbers: dict[str, Any]) -> Any:
    return odd(world, **numbers)


def test_a_stage_that_was_given_something_bad_is_not_the_one_that_made_it() -> None:
    def seen(rank: int, *, inherited: bool) -> Seen:
        sight = Sight(0, f"blocks.{rank}", "is bad", backward=False, inherited=inherited)
        return Seen(None, None, None, sight, None, None, False, [Place(rank, 0, [5])])

    cause = judge([seen(0, inherited=True), seen(1, inherited=False)])
    assert cause.module == "blocks.1"
    assert cause.record() | {"message": ""} == {
        "cause": "data or model",
        "message": "",
        "rank": 1,
        "micro_batch": 0,
        "samples": [5],
        "module": "blocks.1",
    }


def test_modules_inside_of_graphs_are_not_watched() -> None:
    model = nn.Sequential(nn.Sequential(nn.Linear(2, 2)), nn.Linear(2, 2))
    model[0].forward = model[0].forward  # as compiled blocks have it
    assert [name for name, _ in visible(model, None)] == ["", "0", "0.0", "1"]
    assert [name for name, _ in visible(model, "blocks")] == ["", "0", "1"]
    assert [name for name, _ in visible(model, "model")] == [""]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_one_element_is_enough(bad: float, dtype: torch.dtype) -> None:
    tensor = torch.full((3, 5), torch.finfo(dtype).max, dtype=dtype)
    assert bool(all_finite([tensor, torch.zeros(2, dtype=torch.long)]))
    tensor[2, 3] = bad
    assert not bool(all_finite([torch.zeros(3), tensor]))
    assert all_finite([torch.zeros(2, dtype=torch.long), torch.zeros(0)]) is None


MINE = """
import math, torch

def build():
    return torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh(), torch.nn.Linear(4, 4))

def dataset():
    x = torch.randn(24, 4, generator=torch.Generator().manual_seed(0))
    x[17, 2] = math.nan
    return torch.utils.data.TensorDataset(x, x.nan_to_num())

loss = torch.nn.functional.mse_loss
"""


def run_mine(world: World, folder: Path) -> None:
    mine = f"{folder}/mine.py"
    run = {"dir": str(folder / f"run{world.size}"), "log_every": 100}
    table = {
        "model": {"family": f"{mine}:build"},
        "data": {"source": f"{mine}:dataset"},
        "train": {"steps": 3, "global_batch": 8, "objective": f"{mine}:loss"},
        "plan": {"shard": world.size, "micro_batch": 2},
        "run": run,
    }
    if world.is_main:
        Run(Path(run["dir"])).create()
    world.barrier("folder")
    train(parse(table, "test"), world, RankStatus(None, world.rank), Never())


class Never:
    requested = False


def test_a_run_says_which_sample_of_the_dataset_it_was_and_goes_on(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(MINE)
    run_ranks(2, run_mine, tmp_path)
    run = Run(tmp_path / "run2")
    (event,) = [event for event in read_json_lines(run.events_file) if event["event"] == "step skipped"]
    assert event["cause"] == "data"
    assert 17 in event["samples"]
    assert len(event["samples"]) == 2
    assert event["message"] in write_report(run).read_text()
    lines = list(read_json_lines(run.metrics_file))
    assert [line["step"] for line in lines if line.get("skipped")] == [event["step"]]
    assert len(lines) == 3
