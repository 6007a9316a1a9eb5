"""`Plan`: how to spread a job over ranks. It never changes the numbers.

A plan is a product of mesh axes. Rank order is row-major over `AXES`, so that the last axes, which talk most,
stay inside a node. Frozen, validated data that imports neither torch nor the rest of shoal.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from itertools import groupby
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

AXES = ("pipeline", "replicate", "shard", "context", "tensor")
"""Mesh axes in rank order, the slowest link first. `expert` re-uses ranks of shard, context and tensor: see `sharing`."""


Kept = Literal["attention", "communication", "matmul", "every_second_matmul"]
"""Results of operators that selective recompute can keep."""

KEPT: tuple[Kept, ...] = ("attention", "communication", "matmul")

AttentionKernel = Literal["flash4", "cudnn"]

Offloaded = Literal["parameters", "optimizer", "activations"]
"""What can be in host memory while the device does not need it."""

MOST_RECORDED = 16
"""micro-batches of a step that is recorded: a graph grows with them, and steps of more are launched as ever"""

V_SHAPED = ("zbv", "dualpipev")
"""schedules that put the first and the last stage on one rank"""
STAGES = {"gpipe": 1, "1f1b": 1, "zbv": 2, "dualpipev": 2}
"""stages of a rank that a schedule has, where it has a number of its own"""


class Plan(BaseModel):
    """Mesh degrees and how memory is traded for time.

    ZeRO stages over the `shard` axis, as `fully_shard` does them:

    | zero | kept in parts                      | gradients reduced                        |
    | ---- | ---------------------------------- | ---------------------------------------- |
    | 1    | optimizer state                    | once a step, after the last micro-batch  |
    | 2    | + gradients                        | after every micro-batch                  |
    | 3    | + parameters outside their use     | after every micro-batch                  |

    Source: Rajbhandari et al., "ZeRO", SC 2020.

    Example:
        >>> Plan(replicate=2, shard=4, zero=2).world_size
        8
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    replicate: int = Field(1, ge=1, description="copies of the model; gradients are all-reduced between them")
    shard: int = Field(1, ge=1, description="ranks over which one copy is cut (ZeRO)")
    zero: Literal[0, 1, 2, 3] | None = Field(
        None, description="ZeRO stage over the shard axis; left out: 3, and 1 with a pipeline"
    )
    tensor: int = Field(1, ge=1, description="ranks that share each matrix multiplication")
    pipeline: int = Field(1, ge=1, description="ranks that hold consecutive blocks")
    context: int = Field(1, ge=1, description="ranks that share each sequence")
    expert: int = Field(
        1,
        ge=1,
        description="ranks that share the experts of a mixture-of-experts model: some of shard x context x tensor, which it must "
        "divide",
    )
    context_by: Literal["ring", "all_to_all"] = Field(
        "ring",
        description="how ranks of the context axis attend: keys and values go round, or heads are exchanged",
    )
    schedule: Literal[
        "gpipe", "1f1b", "interleaved_1f1b", "looped_bfs", "interleaved_zero_bubble", "zbv", "dualpipev"
    ] = Field(
        "1f1b", description="the order in which a pipeline's stages run micro-batches forward and backward"
    )
    virtual_stages: int | None = Field(
        None, ge=1, description="stages a pipeline rank; left out: 1, and 2 for schedules that need more"
    )
    micro_batch: int | None = Field(
        None, ge=1, description="samples a rank takes at a time; left out: its whole part of the global batch"
    )
    shares: tuple[int, ...] = Field(
        (),
        strict=False,  # TOML has lists
        description="for each rank of replicate x shard how many times micro_batch it takes at a time, where some devices are "
        'faster: [3, 3, 1, 1], or "3x2,1x2"; left out: one',
    )
    recompute: Literal["none", "full", "selective"] = Field(
        "none",
        description="full: keep only each block's input and run the block again in backward; selective: keep recompute_keep, too",
    )
    recompute_keep: tuple[Kept, ...] = Field(
        KEPT,
        strict=False,  # TOML has lists
        description="results that selective recompute keeps; communication: of reductions and all-to-all",
    )
    recompute_every: int = Field(1, ge=1, description="recompute in every n-th block, the others keep all")
    compile: bool | Literal["model"] | None = Field(
        None,
        description='torch.compile each block, or with "model" the whole as one graph, which needs a plan of copies alone; left '
        "out: blocks, on GPUs, where the schedule allows it; copies of a small Llama that is not recorded as one graph",
    )
    cuda_graphs: bool | None = Field(
        None,
        description="record the forward and backward of a step on GPUs of one host, and launch it as one CUDA graph later; "
        "left out: for a Llama below 2 billion parameters under a plan that cuts over all of them",
    )
    attention: AttentionKernel | None = Field(
        None,
        description="the kernel of attention on Hopper and Blackwell GPUs: flash4 is flash-attention 4 (pip install "
        "'shoal[flash]'), cudnn what cuDNN has; left out: flash4 where it is installed",
    )
    copy_engines: bool | None = Field(
        None,
        description="gather sharded parameters and send their gradients by copy engines of NVIDIA GPUs, not by kernels of NCCL; "
        "left out: where all ranks that cut the model are on one host and read each other's memory at 100 GB/s (NVLink)",
    )
    offload: tuple[Offloaded, ...] = Field(
        (),
        strict=False,  # TOML has lists
        description="kept in host memory while not in use: parameters (masters and gradients), optimizer (its moments), "
        "activations (what blocks keep for backward)",
    )

    @field_validator("offload", "recompute_keep", mode="before")
    @classmethod
    def _as_words(cls, value: Any) -> Any:
        """A word, or words with commas between them, stand for a list: `plan.offload=optimizer,activations`."""
        if not isinstance(value, str):
            return value
        if value.strip() in ("", "none"):
            return ()
        return tuple(word.strip() for word in value.split(","))

    @field_validator("shares", mode="before")
    @classmethod
    def _as_numbers(cls, value: Any) -> Any:
        """Numbers with commas between them stand for a list, and 3x8 for eight threes: `plan.shares=3x8,1x8`."""
        if not isinstance(value, str):
            return (value,) if isinstance(value, int) else value
        found: list[int] = []
        for word in [] if value.strip() in ("", "none") else value.split(","):
            match = re.fullmatch(r"\s*([1-9]\d{0,5})(?:x([1-9]\d{0,5}))?\s*", word)
            if match is None:
                raise ValueError(f"{word.strip()!r} is not a share; say such as 3, or 3x8 for eight threes")
            found += [int(match[1])] * int(match[2] or 1)
        return tuple(found)

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.says_degrees:
            self._check_idle()
        self._check_shares()
        if self.zero == 0 and self.cut > 1:
            axis = "shard" if self.shard > 1 else "context"
            raise ValueError(
                f"zero = 0 cuts nothing, but {axis} = {getattr(self, axis)}; use zero = 1, 2 or 3, or leave it out"
            )
        if self.sharing % self.expert:
            works = [degree for degree in range(1, self.sharing + 1) if self.sharing % degree == 0]
            raise ValueError(
                f"expert = {self.expert} re-uses the ranks of shard x context x tensor = {self.sharing} and must divide it; use "
                f"one of {works[:16]}, or other degrees"
            )
        if self.pipeline > 1 and self.zero == 2:
            raise ValueError(
                "zero = 2 sends gradients after every micro-batch, and a pipeline adds up those of all micro-batches first; use "
                "zero = 1 or 3, or leave it out"
            )
        if self.pipeline > 1 and self.zero == 3 and self.splits_backward:
            raise ValueError(
                f"zero = 3 frees parameters between uses, and schedule = {self.schedule!r} computes their gradients later; use "
                "zero = 1, leave it out, or use schedule 1f1b, interleaved_1f1b, gpipe or looped_bfs"
            )
        if (
            self.virtual_stages is not None
            and self.schedule in STAGES
            and self.virtual_stages != STAGES[self.schedule]
        ):
            raise ValueError(
                f"schedule = {self.schedule!r} has {STAGES[self.schedule]} stages a rank, but virtual_stages = "
                f"{self.virtual_stages}; leave it out, or use interleaved_1f1b, looped_bfs or interleaved_zero_bubble"
            )
        self._check_recompute()
        self._check_offload()
        if self.compile and self.pipeline > 1 and self.splits_backward:
            raise ValueError(
                f"schedule = {self.schedule!r} computes gradients of activations and of parameters at different times, and a "
                "compiled block computes them in one; use compile = false, or leave it out"
            )
        if self.compile and self._keeps_outside_graphs:
            raise ValueError(
                'recompute = "selective" tells operators apart inside of one graph, and what expert ranks and a ring of context '
                'ranks exchange cuts graphs; use compile = false, recompute = "full", or context_by = "all_to_all"'
            )
        self._check_recorded()
        if self.compile == "model" and not self.only_copies:
            raise ValueError(
                'compile = "model" makes one graph of a whole model, and this plan cuts it, so that something has to happen '
                "between its blocks; use compile = true, or a plan with replicate alone"
            )
        return self

    def _check_idle(self) -> None:
        """Refuse what is said of an axis that is not there: it would be as if nothing had been said."""
        if self.pipeline == 1 and self.schedule != "1f1b":
            raise ValueError(
                f"schedule = {self.schedule!r} is the order of a pipeline's stages, and pipeline = 1; leave it out, or use "
                "pipeline = 2 or more"
            )
        if self.pipeline == 1 and (self.virtual_stages or 1) > 1:
            raise ValueError(
                f"virtual_stages = {self.virtual_stages} is of a pipeline's ranks, and pipeline = 1; leave it out, or use "
                "pipeline = 2 or more"
            )
        if self.context == 1 and self.context_by != "ring":
            raise ValueError(
                f"context_by = {self.context_by!r} is how ranks that share a sequence attend, and context = 1; leave it out, or "
                "use context = 2 or more"
            )
        if self.copy_engines and self.cut == 1:
            raise ValueError(
                "copy_engines = true is how ranks send parts of a model that is cut, and shard x context = 1; leave it out, or "
                "use shard = 2 or more"
            )
        # on one device there is nothing to cut for anybody, and a job may be tried there as it is
        if self.zero and self.world_size > 1 and self.cut == 1 and "parameters" not in self.offload:
            instead = (
                f"shard = {self.replicate} in place of replicate"
                if self.replicate > 1
                else "shard = 2 or more"
            )
            raise ValueError(
                f"zero = {self.zero} cuts over shard x context = 1 ranks, which is not at all; leave it out, or use {instead}"
            )

    def _check_shares(self) -> None:
        if not self.shares:
            return
        if not self.says_degrees:
            raise ValueError(
                "shares are of the ranks of replicate x shard, of which nothing is said: say them, too"
            )
        if len(self.shares) != self.data_degree or min(self.shares) < 1:
            raise ValueError(
                f"shares = {list(self.shares)} must be one whole number from 1 on for each of the {self.data_degree} ranks of "
                "replicate x shard"
            )

    def _check_offload(self) -> None:
        if twice := {word for word in self.offload if self.offload.count(word) > 1}:
            raise ValueError(f"offload names {', '.join(sorted(twice))} twice; once is enough")
        if self.compile == "model" and {"parameters", "activations"} & set(self.offload):
            raise ValueError(
                'compile = "model" makes one graph of a whole model, and parameters and activations in host memory move between '
                'its blocks; use compile = true, or offload = ["optimizer"] alone'
            )

    def _check_recorded(self) -> None:
        if not self.cuda_graphs:
            return
        reasons = {
            "a pipeline's stages are run by its schedule": self.pipeline > 1,
            "numbers of tokens of each expert are read by the host": self.expert > 1,
            "DistributedDataParallel counts its own steps (shard, with zero = 1 or 2, can be recorded)": self.replicate
            > 1
            and self.only_copies,
            "what is in host memory comes by the host's order": bool(self.offload),
            "blocks that run again look at random numbers": self.recompute != "none",
        }
        for why, applies in reasons.items():
            if applies:
                raise ValueError(f"cuda_graphs records what a device does alone, and {why}; leave it out")

    def _check_recompute(self) -> None:
        if self.recompute != "selective" and self.recompute_keep != KEPT:
            raise ValueError(
                f'recompute_keep is what recompute = "selective" keeps, but recompute = "{self.recompute}"; leave it out'
            )
        if self.recompute == "none" and self.recompute_every > 1:
            raise ValueError(
                f'recompute_every = {self.recompute_every} but recompute = "none"; leave it out, or use recompute = "full"'
            )
        if len(set(self.recompute_keep)) < len(self.recompute_keep):
            raise ValueError(f"recompute_keep = {list(self.recompute_keep)} names a kind twice")
        if {"matmul", "every_second_matmul"} <= set(self.recompute_keep):
            raise ValueError('recompute_keep names "matmul" and "every_second_matmul"; use one of them')

    @property
    def says_degrees(self) -> bool:
        """Whether any degree was given; if none was, degrees are chosen for the machine and the rest is kept."""
        return bool(self.model_fields_set & {*AXES, "expert"})

    @property
    def zero_stage(self) -> int:
        """The ZeRO stage in force: 0 with nothing to shard; 3 unless said otherwise, and with a pipeline 1.

        Parameters that are in host memory are brought and freed by the same stages, whether they are cut or not.
        """
        if self.cut == 1 and "parameters" not in self.offload:
            return 0
        return self.zero if self.zero is not None else 1 if self.pipeline > 1 else 3

    @property
    def cut(self) -> int:
        """Ranks over which parameters are cut by ZeRO: ranks that share a sequence keep parts of the parameters, too."""
        return self.shard * self.context

    @property
    def sharing(self) -> int:
        """Ranks with different tokens over which one copy of the experts is cut: `expert` of them by expert, the rest by ZeRO."""
        return self.cut * self.tensor

    @property
    def splits_backward(self) -> bool:
        """Whether the schedule computes gradients of activations first and those of parameters later."""
        return self.schedule in ("interleaved_zero_bubble", "zbv", "dualpipev")

    def compiles(self, device: str) -> Literal["blocks", "model"] | None:
        """What is compiled on a kind of device ("cuda", "cpu")."""
        if self.compile is None:
            split = self.pipeline > 1 and self.splits_backward
            return "blocks" if device == "cuda" and not split and not self._keeps_outside_graphs else None
        return "model" if self.compile == "model" else "blocks" if self.compile else None

    @property
    def _keeps_outside_graphs(self) -> bool:
        rings = self.context > 1 and self.context_by == "ring"
        return self.recompute == "selective" and (self.expert > 1 or rings)

    @property
    def stages(self) -> int:
        """Stages of the pipeline."""
        return self.pipeline * self.stages_per_rank if self.pipeline > 1 else 1

    @property
    def stages_per_rank(self) -> int:
        """Stages of a pipeline that each of its ranks has."""
        return self.virtual_stages or (1 if self.schedule in ("gpipe", "1f1b") else 2)

    @property
    def only_copies(self) -> bool:
        """Whether every rank holds the whole model on its device."""
        return self.world_size == self.replicate and "parameters" not in self.offload

    @property
    def world_size(self) -> int:
        """Ranks that the plan needs."""
        return math.prod(getattr(self, axis) for axis in AXES)

    @property
    def data_degree(self) -> int:
        """Ranks (or groups of ranks) that read different samples."""
        return self.replicate * self.shard

    def coordinates(self, rank: int) -> dict[str, int]:
        """The place of a rank on each mesh axis."""
        place: dict[str, int] = {}
        for axis in reversed(AXES):
            rank, place[axis] = divmod(rank, getattr(self, axis))
        return place

    def data_rank(self, rank: int) -> int:
        """Which part of the global batch a rank reads, in `range(data_degree)`."""
        place = self.coordinates(rank)
        return place["replicate"] * self.shard + place["shard"]

    @property
    def all_shares(self) -> int:
        """Micro-batches that ranks with different samples take at a time."""
        return sum(self.shares) or self.data_degree

    def share(self, data_rank: int) -> tuple[int, int]:
        """(micro-batches that those before it take at a time, those that one of `range(data_degree)` takes).

        Example:
            >>> Plan(replicate=4, shares=(3, 3, 1, 1)).share(2)
            (6, 1)
        """
        return (sum(self.shares[:data_rank]), self.shares[data_rank]) if self.shares else (data_rank, 1)

    def micro_batches(self, global_batch: int) -> tuple[int, int]:
        """(micro-batches a rank runs in a step, samples in each, where its share is one)."""
        local = global_batch // self.all_shares
        micro = local if self.micro_batch is None else self.micro_batch
        return local // micro, micro

    def describe(self) -> str:
        """One phrase: `replicate 2 x shard 4 (ZeRO-3), micro-batch 8`."""
        parts = [
            f"{axis} {getattr(self, axis)}" for axis in AXES if getattr(self, axis) > 1 and axis != "shard"
        ]
        if self.shard > 1:
            parts.append(f"shard {self.shard} (ZeRO-{self.zero_stage})")
        text = " x ".join(parts) or "one device"
        if self.context > 1:
            text += f", {self.context_by}" + (f" (ZeRO-{self.zero_stage})" if self.shard == 1 else "")
        if self.expert > 1:
            text += f", experts over {self.expert}"
        if self.pipeline > 1:
            text += f", {self.schedule} of {self.stages} stages"
        if self.micro_batch is not None:
            text += f", micro-batch {self.micro_batch}"
        if self.shares:
            text += f", shares {runs_text(self.shares)}"
        if self.recompute != "none":
            text += f", recompute {self.recompute}"
            if self.recompute == "selective":
                text += f" (keep {', '.join(self.recompute_keep) or 'nothing'})"
            if self.recompute_every > 1:
                text += f" in every {ordinal(self.recompute_every)} block"
        if self.offload:
            text += f", {' and '.join(self.offload)} in host memory"
        text += ", compiled as a whole" if self.compile == "model" else ", compiled" if self.compile else ""
        return text + (", CUDA graphs" if self.cuda_graphs else "")


_IDLE_WITHOUT = {"schedule": "pipeline", "virtual_stages": "pipeline", "context_by": "context"}


def effective(keys: dict[str, Any]) -> dict[str, Any]:
    """A plan's keys but for those that have no effect with its degrees, as what is kept from another plan may have none.

    Example:
        >>> effective({"shard": 8, "zero": 2, "schedule": "zbv"})
        {'shard': 8, 'zero': 2}
    """
    cuts = keys.get("shard", 1) * keys.get("context", 1) > 1 or "parameters" in keys.get("offload", ())
    return {
        key: value
        for key, value in keys.items()
        if (key not in _IDLE_WITHOUT or keys.get(_IDLE_WITHOUT[key], 1) > 1) and (key != "zero" or cuts)
    }


def runs_text(numbers: Sequence[int]) -> str:
    """Numbers with equal ones in a row together.

    Example:
        >>> runs_text([3, 3, 1, 2])
        '3x2,1,2'
    """
    runs = [(number, len(list(same))) for number, same in groupby(numbers)]
    return ",".join(f"{number}x{times}" if times > 1 else str(number) for number, times in runs)


def ordinal(number: int) -> str:
    """2nd, 3rd, 11th."""
    ending = "th" if number % 100 in (11, 12, 13) else {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number}{ending}"
