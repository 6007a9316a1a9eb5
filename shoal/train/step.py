"""`Step`: one optimizer step over one global batch. The only place where training happens.

[Note: one division] Micro-batches run backward on sums of losses, times a fixed power of two. Sums of losses, weights and squared
gradients then travel in one small all-reduce, and the gradients are divided once, inside the fused optimizer, by

    power of two x global weight / clip coefficient.

So a mean is over the whole global batch whatever the micro-batches, padding and ranks; clipping costs no pass over the
gradients; and a step whose norm is not finite is left out by all ranks alike, without waiting for the device.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from shoal.data.cut import MicroBatch, StepBatch
from shoal.job import Optimizer, Precision
from shoal.parallel.apply import accumulation
from shoal.parallel.balance import Balance
from shoal.parallel.direct import gather_ahead, gathered_first, stays
from shoal.parallel.host import Mail
from shoal.parallel.initialise import seed_of
from shoal.parallel.pipeline import Pipeline
from shoal.parallel.places import Places
from shoal.parallel.precision import types_of
from shoal.parallel.shard import sum_whole_gradients
from shoal.parallel.spread import spread_of
from shoal.plan import Plan
from shoal.simulated import is_simulated
from shoal.tensors import map_tensors, tensors_in
from shoal.train.kernels import attention_kernels
from shoal.train.objective import Objective, output_of
from shoal.train.optimizer import LocalOptimizer
from shoal.train.recorded import Brought, Pass, Recorded, Work, as_pass
from shoal.train.result import StepResult
from shoal.train.scale import LossScale
from shoal.train.schedule import learning_rate
from shoal.train.squares import Squares
from shoal.world import World


class Step:
    """One optimizer step: micro-batches, forward, backward, reduce, clip, update.

    Args:
        model: from `parallelize`, with the same plan, world and precision.
        optimizer: `shoal.AdamW(lr=...)`, `shoal.SGD(...)` or a job's optimizer table.
        total_steps: the length of the schedule; not needed for a constant one.
        usual_weight: about the weight of a global batch (its tokens); keeps sums in range, changes no number.
        scale: fp16's initial loss scale and the number of finite steps until it doubles.
        on_gradients: told every gradient, as a whole or a `DTensor`, and the number that it is to be divided by.
        on_phase: told ("forward", step), ("reduce", step) and ("update", step) as they begin.

    Raises:
        ValueError: a schedule that ends, without total_steps.

    Example:
        step = Step(model, NextToken(), AdamW(lr=3e-4), plan, world)
        for batch in batches(dataset, job, plan, world):
            print(step(batch).loss)
    """

    def __init__(
        self,
        model: nn.Module,
        objective: Objective,
        optimizer: Optimizer,
        plan: Plan,
        world: World,
        *,
        precision: Precision = "fp32",
        total_steps: int | None = None,
        usual_weight: float = 1.0,
        seed: int = 0,
        scale: tuple[float, int] = (65536.0, 2000),
        on_phase: Callable[[str, int], None] = lambda phase, step: None,
        on_gradients: Callable[[dict[str, Tensor], Tensor], None] | None = None,
    ) -> None:
        if total_steps is None and optimizer.schedule != "constant":
            raise ValueError(
                f"schedule = {optimizer.schedule!r} ends with the last step: give Step(..., total_steps=...)"
            )
        self.model, self.objective, self.plan, self.world = model, objective, plan, world
        self._spread = spread_of(model)
        self._first = gathered_first(model) if plan.world_size == plan.cut and not plan.offload else set()
        self.optimizer = LocalOptimizer(
            model, optimizer, offload=plan.offload, device=world.device, first=self._first
        )
        self._balance = Balance(model, self._spread.token_groups)
        self._total_steps, self._seed, self._on_phase = total_steps or 1, seed, on_phase
        self._sum_type = types_of(precision).master
        self._on_gradients = on_gradients
        self._loss_scale = LossScale(*scale, device=world.device) if precision == "fp16" else None
        # exact in binary, so that it costs no rounding
        self._factor = 2.0 ** -round(math.log2(max(usual_weight, 1.0)))
        self._averaged = plan.replicate if isinstance(model, DistributedDataParallel) else 1
        self._squares = Squares(self.optimizer.parameters, plan, world, self._spread, self._sum_type)
        self._places = Places(model, self.optimizer.parameters)
        self._bound, self._mail = False, Mail()
        self._recorded = self._recording() if plan.cuda_graphs else None
        self.on_micro_batch: Callable[[int], None] = lambda index: None
        """told the number of each micro-batch before its forward"""

    def __call__(
        self,
        batch: StepBatch,
        *,
        stop: bool = False,
        before_update: Callable[[], None] = lambda: None,
        ahead: bool = False,
    ) -> StepResult:
        """Train on this rank's part of a global batch. Collective.

        Args:
            stop: ask all ranks to stop after this step; `result.numbers.stop` is then true on all.
            before_update: called when all but the update is on its way to the device: the place to read numbers of the step
                before, which may have been skipped, while the weights are still those that it left.
            ahead: another step follows, and nothing writes weights until then: what it needs first is gathered already while
                the rest is updated.
        """
        self._on_phase("forward", batch.step)
        found = (self._recorded or self.forward_backward)(batch.micro_batches)
        self._on_phase("reduce", batch.step)
        sums = self._reduce(found, stop)
        before_update()
        self._on_phase("update", batch.step)
        lr = learning_rate(self.optimizer.settings, batch.step, self._total_steps)
        values = self._update(sums, lr, ahead)
        return StepResult(batch, lr, self._mail.send(values), found.losses)

    def forward_backward(self, micro_batches: Sequence[MicroBatch]) -> Pass:
        """Gradients of the factored sum of losses, into the parameters. Collective."""
        if not self.model.training:
            self.model.train()
        if self._spread.pipeline is not None:
            with attention_kernels(self.world.device, self.plan.attention):
                return self._pipelined(self._spread.pipeline, micro_batches)
        last = len(micro_batches) - 1
        shares = [
            self._compute(brought, index == last)
            for index, brought in enumerate(self._one_by_one(micro_batches))
        ]
        return as_pass(shares, self._squares.found_on_the_way())

    def _recording(self) -> Recorded | None:
        """On GPUs of one host; where ranks compare each call of a collective with the others, they make each.

        Raises:
            ValueError: the model has what cannot be recorded.
        """
        if self._balance.has_layers:
            raise ValueError(
                "plan.cuda_graphs: the host tells which tokens count for the balance of experts, and a recording would not hear "
                "of it; leave it out"
            )
        if self.world.device.type != "cuda" or is_simulated() or self.world.compares_calls:
            return None
        if self.world.size > 1 and not (self.world.has_cpu_backend and self.world.is_one_host()):
            return None
        squares, places = self._squares.found_on_the_way, self._places
        work = Work(
            self.forward_backward, self._one_by_one, self._compute, squares, self._prepare, places.done
        )
        return Recorded(work, self.optimizer.parameters.values(), self.world)

    def _prepare(self) -> None:
        self._places.prepare(ahead=self._gathers_ahead)

    def forget_recording(self) -> None:
        """Give up what is recorded of a step, and its memory; it is recorded again later. On all ranks alike."""
        if self._recorded is not None:
            self._recorded.forget()
            torch.cuda.empty_cache()

    @property
    def is_recorded(self) -> bool:
        """Whether forward and backward are, or will be, replayed by the device."""
        return self._recorded is not None

    @property
    def shared_bytes(self) -> int:
        """Memory of this rank's GPU that others read, of which torch's allocator does not know."""
        return self._places.nbytes

    @property
    def loss_scale(self) -> LossScale | None:
        """What losses are multiplied by in fp16."""
        return self._loss_scale

    def _one_by_one(self, micro_batches: Sequence[MicroBatch]) -> Iterator[Brought]:
        for index, micro in enumerate(micro_batches):
            self._begin(index, micro)
            yield self._bring(micro)

    def _begin(self, index: int, micro: MicroBatch) -> None:
        """Before the forward of a micro-batch: what the host has to do."""
        self.on_micro_batch(index)
        # dropout depends on the samples' place in the run, not on the rank that has them
        seed_device(self.world.device, seed_of(self._seed, "step", micro.first, *self._spread.coordinates))
        self._balance.count(micro.samples > 0)

    def _bring(self, micro: MicroBatch) -> Brought:
        data = self._spread.cut_inputs(to_device(micro.data, self.world.device))
        return Brought(data, 1.0 if micro.samples else 0.0)

    def _compute(self, brought: Brought, last: bool) -> Tensor:
        """What the device does for a micro-batch; as `as_pass` takes it."""
        data, counts = brought
        with (
            attention_kernels(self.world.device, self.plan.attention),
            accumulation(self.model, self.plan, last=last),
        ):
            output = output_of(self.objective, self.model, data)
            self._check_output(output)
            loss = self.objective.loss(output, data)
            self._backward(loss.sum * (self._factor * counts))
        total, told = loss.sum.detach().to(self._sum_type), counts * self._spread.counts
        return torch.stack((total, total * told, as_scalar(loss.weight, total) * told))

    def _pipelined(self, pipeline: Pipeline, micro_batches: Sequence[MicroBatch]) -> Pass:
        """The same by a pipeline's schedule, in which each rank runs its stages of every micro-batch."""
        brought = [self._bring(micro) for micro in micro_batches]
        sums = torch.zeros(len(micro_batches), 2, dtype=self._sum_type, device=self.world.device)

        def run(index: int, last: bool) -> Tensor:
            self._begin(index, micro_batches[index])
            data, counts = brought[index]
            output = output_of(self.objective, self.model, data)
            if not last:
                return output
            loss = self.objective.loss(output, data)
            told = counts * self._spread.counts
            sums[index] = torch.stack((loss.sum.detach() * told, as_scalar(loss.weight, sums) * told))
            return self._scaled(loss.sum * (self._factor * counts)).expand(1).clone()

        pipeline.step(run, len(micro_batches), train=True)
        total = sums.sum(0)
        return Pass(total[0], total[1], sums[:, 0])

    def _check_output(self, output: Any) -> None:
        """Gradients of a spread model are found through the tensors of its output, which torch must be able to see."""
        if self._bound or self.world.size == 1 or any(tensor.requires_grad for tensor in tensors_in(output)):
            return
        raise TypeError(
            f"the model's forward returned {type(output).__name__}, in which no tensor with a gradient can be seen, so "
            "gradients would not be summed over ranks; return a tensor, or a tuple, list, dict or dataclass of tensors"
        )

    def _backward(self, loss: Tensor) -> None:
        self._scaled(loss).backward()

    def _scaled(self, loss: Tensor) -> Tensor:
        return loss if self._loss_scale is None else loss.float() * self._loss_scale.value

    @torch.no_grad()
    def _reduce(self, found: Pass, stop: bool) -> Tensor:
        """(sum of losses, weight, sum of squared gradients, ranks that ask to stop) over all ranks, in one message."""
        if not self._bound:
            self.optimizer.rebind()
            self._bound = True
        if not self.plan.only_copies:
            sum_whole_gradients(self.optimizer.parameters.values(), self._spread.data_groups)
        gradients = self.optimizer.take_gradients()
        if self._spread.pipeline is not None:
            self._spread.pipeline.sum_tied_gradients(gradients)
        squares = self._squares(gradients, found.squares)
        sums = torch.stack((found.loss, found.weight, squares, torch.full_like(found.loss, float(stop))))
        if self.world.size > 1:
            dist.all_reduce(sums)
        self._balance.sum_loads()
        return sums

    @torch.no_grad()
    def _update(self, sums: Tensor, lr: float, ahead: bool) -> Tensor:
        """Apply the gradients, or leave the step out; returns the values of `Numbers`."""
        loss, weight, squares, stopping = sums.unbind()
        scale = self._loss_scale.value if self._loss_scale is not None else 1.0
        divisor = (weight * (self._factor * scale / self._averaged)).clamp(min=torch.finfo(weight.dtype).tiny)
        if self._on_gradients is not None:
            self._on_gradients(self.optimizer.gradients(), divisor)
        norm = squares.sqrt() / divisor
        skip = ~(norm.isfinite() & (weight > 0))
        gather = partial(gather_ahead, self.model) if ahead and self._gathers_ahead else None
        # all ranks have come to the sum over all, and so are through with what they gathered before
        ready = self._places.taken() if ahead and self.optimizer.fills_places else None
        self.optimizer.step(lr, divisor / self._clip(norm), skip, after_first=gather, ready=ready)
        self._balance.rebalance(skip)
        if self._loss_scale is not None:
            self._loss_scale.update(~norm.isfinite())
        return torch.stack((loss / weight, norm, weight, skip.to(norm.dtype), stopping))

    @property
    def _gathers_ahead(self) -> bool:
        """A recording can wait for nothing that was begun outside of it, but begin with what is always in the same memory."""
        return bool(self._first) and (self._recorded is None or stays(self.model))

    def _clip(self, norm: Tensor) -> Tensor:
        most = self.optimizer.settings.clip
        return (most / (norm + 1e-6)).clamp(max=1.0) if most > 0 else torch.ones_like(norm)

    def state(self) -> dict[str, Tensor]:
        """Everything beside the weights that the next step depends on, by name; tensors are updated in place."""
        scale = self._loss_scale.state() if self._loss_scale is not None else {}
        return {**{f"optimizer.{name}": value for name, value in self.optimizer.state().items()}, **scale}


def seed_device(device: torch.device, seed: int) -> None:
    """Seed what draws on a device.

    torch.manual_seed would, where CUDA is not in use, note a call for later with a stack trace: 1.5 ms a step, for ever kept.
    """
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        torch.cuda.manual_seed(seed)


def to_device(data: Any, device: torch.device) -> Any:
    """Every tensor of a batch on the device, without waiting for copies out of pinned memory."""
    return map_tensors(data, lambda tensor: tensor.to(device, non_blocking=True))


def as_scalar(weight: Tensor | float, like: Tensor) -> Tensor:
    """A weight as a scalar tensor beside `like`."""
    if isinstance(weight, Tensor):
        return weight.to(like)
    return torch.full((), weight, dtype=like.dtype, device=like.device)  # a copy would wait for the device
