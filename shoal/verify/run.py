"""`verify`: run a small copy of a job under plans and on one device, and compare."""

from __future__ import annotations

import json
import math
import re
import tempfile
from collections.abc import Callable, Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import torch

from shoal.check import check
from shoal.cluster import Cluster
from shoal.config import Settings
from shoal.data.text import HF
from shoal.frames import user_frame
from shoal.job import FAMILIES, NARROW
from shoal.launch.local import launch
from shoal.models.moe_presets import resolve_moe
from shoal.models.presets import resolve
from shoal.plan import Plan
from shoal.run import write_whole
from shoal.verify.compare import Comparison, compare, rounding, same_batches
from shoal.verify.record import TASKS, Record, is_recorded, read_record, record
from shoal.verify.shrink import STEPS, shrink, shrink_plan, small_length, small_moe_dims
from shoal.world import join_world

KEPT_KEYS = ("micro_batch", "recompute", "recompute_keep", "recompute_every", "offload")
TARGET = "shoal.verify.record:record_tasks"
SAME = 1e-9  # relative, of losses in fp64 whose sums are ordered otherwise


class Verdict(NamedTuple):
    """What came of one plan: a comparison, or why there is none."""

    plan: Plan
    """as it was run"""
    comparison: Comparison | None
    problem: str = ""
    refused: bool = False
    """the model's structure does not allow the plan, for the reason in `problem`"""
    sharper: Comparison | None = None
    """of a job in bf16, fp16 or float8: the same in fp32"""
    depends: str = ""
    """that numbers depend on how samples are cut into micro-batches, on one device already"""

    @property
    def same(self) -> bool:
        return self.comparison is not None and self.comparison.same


def verify(
    settings: Settings,
    plans: Sequence[Plan],
    told: Callable[[Verdict], None] = lambda verdict: None,
    *,
    steps: int = STEPS,
    sharp: bool = True,
) -> list[Verdict]:
    """Compare each plan of a job with one device: see `verify_each`."""
    return verify_each([(settings, plan) for plan in plans], told, steps=steps, sharp=sharp)


def verify_each(
    cases: Sequence[tuple[Settings, Plan]],
    told: Callable[[Verdict], None] = lambda verdict: None,
    *,
    steps: int = STEPS,
    sharp: bool = True,
) -> list[Verdict]:
    """Compare jobs under plans with one device each; plans of one size share a launch.

    [Note: sharp] In bf16, fp16 and float8 one device itself is so far from the exact numbers that a mistake can hide behind it: a
    job of that precision is compared in fp32 as well, and a difference there counts as one.

    Args:
        told: called with each verdict as it is known.
        sharp: see the note.

    Raises:
        ValueError: a plan that cannot be for its job.
    """
    small = [shrink(settings, shrink_plan(plan), steps) for settings, plan in cases]
    small = [(settings, _for_here(plan)) for settings, plan in small]
    for small_settings, plan in small:
        check(small_settings.job, plan, Cluster.parse(f"{plan.world_size} cpu"))
    verdicts: dict[int, Verdict] = {}
    references: dict[str, Record] = {}
    with tempfile.TemporaryDirectory(prefix="shoal-verify-") as folder:
        for size in sorted({plan.world_size for _, plan in small}):
            numbers = [number for number, (_, plan) in enumerate(small) if plan.world_size == size]
            own = [small[number][0].with_plan(small[number][1]) for number in numbers]
            tasks = [
                (task, number)
                for one, number in zip(own, numbers, strict=True)
                for task in _precisions(one, sharp)
            ]
            found = Path(folder) / str(size)
            _launch([task for task, _ in tasks], size, found)
            judged: dict[int, list[Verdict]] = {}
            for place, (task, number) in enumerate(tasks):
                judged.setdefault(number, []).append(_judge(task, found, place, references))
            for number in numbers:
                verdicts[number] = _joined(judged[number])
                told(verdicts[number])
    return [verdicts[number] for number in range(len(cases))]


def _precisions(task: Settings, sharp: bool) -> list[Settings]:
    """The task in its own precision, and in fp32 where that is sharper and wanted."""
    if task.train.precision not in NARROW or not sharp:
        return [task]
    return [task, task.model_copy(update={"train": task.train.model_copy(update={"precision": "fp32"})})]


def _joined(verdicts: list[Verdict]) -> Verdict:
    """One verdict of a plan's precisions: its own, with the first difference of any."""
    own = verdicts[0]
    for verdict in verdicts:
        if verdict.comparison is None:
            return verdict
    if len(verdicts) == 1 or own.comparison is None or verdicts[1].comparison is None:
        return own
    sharper = verdicts[1].comparison
    first = own.comparison.first or sharper.first
    return own._replace(comparison=own.comparison._replace(first=first), sharper=sharper)


def _launch(tasks: list[Settings], size: int, folder: Path) -> None:
    """Record all tasks on `size` ranks. One that fails ends its ranks: the rest are launched again."""
    folder.mkdir(parents=True)
    write_whole(folder / TASKS, json.dumps([task.to_toml() for task in tasks]))
    policy = tasks[0].run.model_copy(update={"dir": str(folder), "resume": False, "data": None})
    settings = tasks[0].model_copy(update={"run": policy})
    while True:
        outcome = launch(settings, size, device=_device(size), target=TARGET, quiet=True)
        left = [place for place in range(len(tasks)) if not is_recorded(folder, place)]
        if outcome.state != "failed" or not left:
            return
        # logs of ranks go with the folder
        report = re.sub(r"^logs, statuses.*\n?", "", outcome.report, flags=re.MULTILINE)
        write_whole(folder / f"{left[0]}.failed", report)
        if len(left) == 1:
            return


def _judge(task: Settings, folder: Path, place: int, references: dict[str, Record]) -> Verdict:
    plan = task.plan
    assert plan is not None, "tasks are made with plans"
    refusal = folder / f"{place}.refused"
    if refusal.exists():
        return Verdict(plan, None, refusal.read_text(), refused=True)
    failure = folder / f"{place}.failed"
    if failure.exists():
        return Verdict(plan, None, failure.read_text())
    if not is_recorded(folder, place):
        return Verdict(plan, None, "it was stopped before this plan")
    try:
        exact, one = (_reference(task, precision, references) for precision in ("fp64", task.train.precision))
        depends = _dependence(task, exact, references)
    except Exception as error:  # the model's and the loss's own, whatever it is
        what = f"{type(error).__name__}: {error}, at {user_frame(error)}"
        return Verdict(
            plan,
            None,
            "one device cannot compute it in fp64, by which rounding is told from mistakes; a tensor that is made in forward, or "
            f"held by the loss, must take the type of its input: {what}",
        )
    found, allowed = read_record(folder, place), rounding(task, plan)
    buffers, jumps = same_batches(plan), task.train.precision in NARROW and _experts_of(task) > 1
    return Verdict(plan, compare(exact, one, found, allowed, buffers=buffers, jumps=jumps), depends=depends)


def _dependence(task: Settings, exact: Record, known: dict[str, Record]) -> str:
    """What one device computes otherwise from other micro-batches, in words; empty for what is known to compute the same."""
    plan, job = task.plan, task.job
    own = job.model.family not in FAMILIES or job.train.objective is not None
    if plan is None or not own:
        return ""
    size = plan.micro_batches(job.train.global_batch)[1]
    other = 1 if size > 1 else 2
    changed = _reference(task.with_plan(Plan(micro_batch=other)), "fp64", known)
    if abs(changed.losses[0] - exact.losses[0]) <= SAME * abs(exact.losses[0]):
        return ""
    return (
        f"numbers depend on plan.micro_batch, on one device already: the first loss is {exact.losses[0]:.6g} with micro-batches "
        f"of {size} and {changed.losses[0]:.6g} of {other}. Dropout, batch norm and losses that are means with weights of their "
        "own do so: keep plan.micro_batch where plans are to agree"
    )


def _reference(task: Settings, precision: str, known: dict[str, Record]) -> Record:
    """The same job on one device, run here once."""
    plan = task.plan
    alone = Plan(micro_batch=plan.micro_batch if plan else None, compile=False)
    train = task.train.model_copy(update={"precision": precision})
    settings = task.model_copy(update={"train": train, "plan": alone})
    key = settings.to_toml()
    if key not in known:
        with join_world(device=_device(1), rank=0, size=1) as world:
            known[key] = record(settings, world)
    return known[key]


def _for_here(plan: Plan) -> Plan:
    """On a CPU nothing is recorded, and nothing is to be claimed of it."""
    return plan if _device(plan.world_size) == "auto" else plan.model_copy(update={"cuda_graphs": None})


def _device(ranks: int) -> str:
    return "auto" if torch.cuda.device_count() >= ranks else "cpu"


def every_plan(ranks: int, *, tied: bool, experts: int = 1, like: Plan | None = None) -> Iterator[Plan]:
    """Every way to spread over `ranks` ranks: all degrees, ZeRO stages, ways to attend, and pipeline schedules.

    Args:
        tied: the model's ends share a parameter, which the V-shaped schedules do not take.
        experts: of a mixture-of-experts model.
        like: micro-batch, recompute and offload are as here.
    """
    kept = {key: getattr(like, key) for key in KEPT_KEYS} if like else {}
    divisors = [degree for degree in range(1, ranks + 1) if ranks % degree == 0]
    for pipeline, replicate, shard, context, tensor in product(divisors, repeat=5):
        if pipeline * replicate * shard * context * tensor != ranks:
            continue
        degrees = {
            "pipeline": pipeline,
            "replicate": replicate,
            "shard": shard,
            "context": context,
            "tensor": tensor,
        }
        sharing = [degree for degree in divisors if math.gcd(shard * context * tensor, experts) % degree == 0]
        choices = _choices(shard * context > 1, context > 1, pipeline > 1, tied)
        for more, expert in product(choices, sharing):
            yield Plan.model_validate({**kept, **degrees, **more, "expert": expert})


def _experts_of(task: Settings) -> int:
    """Experts of a model among which a router chooses; 1 where none does, or it is not known."""
    if task.model.family == "moe":
        return resolve_moe(task.model, task.data.vocab).experts
    if task.model.family.startswith(HF):
        from shoal.verify.huggingface import num_experts

        return num_experts(task.model.family, task.model.options)
    return 1


def ends_and_experts(settings: Settings) -> dict[str, Any]:
    """What `every_plan` asks of the small copy of a job."""
    if settings.model.family == "moe":
        dims = small_moe_dims(resolve_moe(settings.model, settings.data.vocab), Plan())
        return {"tied": dims.base.tied, "experts": dims.experts}
    if settings.model.family.startswith(HF):
        from shoal.verify.huggingface import is_tied, num_experts, small_options

        family = settings.model.family
        options = small_options(family, settings.model.options, Plan(), small_length(Plan()))
        return {"tied": is_tied(family, options), "experts": num_experts(family, options)}
    return {"tied": settings.model.family == "llama" and resolve(settings.model, settings.data.vocab).tied}


def _choices(cuts: bool, context: bool, pipeline: bool, tied: bool) -> Iterator[dict[str, object]]:
    zeros = ((1,) if pipeline else (1, 2, 3)) if cuts else (None,)
    ways = ("ring", "all_to_all") if context else ("ring",)
    loops = ("1f1b", "gpipe", "interleaved_1f1b", "looped_bfs", "interleaved_zero_bubble")
    schedules = (loops if tied else (*loops, "zbv", "dualpipev")) if pipeline else ("1f1b",)
    for zero, way, schedule in product(zeros, ways, schedules):
        yield {"zero": zero, "context_by": way, "schedule": schedule}
