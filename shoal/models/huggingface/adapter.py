"""`HuggingFace`: a transformers model as Shoal calls models, under the names that its parameters have there.

[Note: stages] Under a pipeline each stage runs the model's own code from end to end, with stand-ins for the blocks. The first
stage stops it at the first block, whose input it is; every stage notes what the blocks are given beside it; the last stage lets
the stand-in for the last block answer with what the real blocks made. So scaled embeddings, rotary tables of several kinds and
capped logits are what transformers makes them, and none is named here.
"""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from shoal.layout import Layout
from shoal.models.huggingface.attention import NAME, plain
from shoal.models.huggingface.experts import by_rows
from shoal.models.huggingface.layout import Structure, layout_for
from shoal.models.huggingface.weights import Part, StoredWeights, is_adapter, plain_name
from shoal.models.llama import document_mask
from shoal.plan import Plan
from shoal.tensors import cast_floats
from shoal.words import fewer_stages


class HuggingFace(nn.Module):
    """A causal language model: `model(tokens, positions=None, documents=None)` gives logits (B, T, V).

    Its modules are those of the transformers model, which is kept beside them as `inner` and runs them.
    """

    cast_unit_inputs = False
    inner: Any
    config: Any

    def __init__(self, inner: nn.Module, stored: StoredWeights | None) -> None:
        super().__init__()
        own = [
            name for name, _ in (*inner.named_parameters(recurse=False), *inner.named_buffers(recurse=False))
        ]
        if own:
            raise ValueError(
                f"{type(inner).__name__} holds {own[0]} outside of its modules, which has no place here"
            )
        self.__dict__["inner"] = inner  # not a child: names would begin with it
        for name, child in inner.named_children():
            self.add_module(name, child)
        inner_config: Any = inner.config
        self.config = inner_config
        self.structure = Structure.of(inner)
        self.uses_every_parameter = all(
            parameter.dim() <= 2 for parameter in self.parameters()
        )  # experts may idle
        self._stored = stored
        self._vectors = _first_values(inner)
        self._sequence_parts = 1
        self._is_ours = inner_config._attn_implementation == NAME
        self._takes_positions = "position_ids" in inspect.signature(inner.forward).parameters
        for module in self.structure.attention.values():
            module.attend = plain  # pyrefly: ignore[bad-argument-type] - context parallelism puts its own there
        for index, block in enumerate(self.structure.blocks):
            block.forward = _given_side(block.forward, index)
        if stored is not None:
            stored.fit(inner)
            _read_buffers(inner, stored)

    @property
    def weights_from(self) -> Path | None:
        """The folder whose weights it begins with; None: with new ones."""
        return self._stored.folder if self._stored is not None else None

    def train(self, mode: bool = True) -> HuggingFace:
        self.__dict__["inner"].training = mode
        return super().train(mode)

    def forward(
        self, tokens: Tensor, positions: Tensor | None = None, documents: Tensor | None = None
    ) -> Tensor:
        """Logits (B, T, V) of the next token.

        Args:
            tokens: (B, T) ids.
            positions: (B, T) or (T,), left out: 0 to T-1.
            documents: (B, T) ids; attention stays inside a document. Left out: one document.

        Raises:
            ValueError: the model cannot keep documents apart, or takes no positions.
        """
        return self.inner(input_ids=tokens, **self._others(tokens, positions, documents)).logits

    def _others(self, tokens: Tensor, positions: Tensor | None, documents: Tensor | None) -> dict[str, Any]:
        """What transformers' forward is given beside tokens."""
        length = tokens.shape[1]
        if length % self._sequence_parts:
            raise ValueError(
                f"plan.tensor = {self._sequence_parts} cuts sequences too, and does not divide a rank's {length} tokens; use a "
                f"data.seq_len that is a multiple of it"
            )
        name = type(self.inner).__name__
        if documents is not None and not self._is_ours:
            raise ValueError(
                f"data.isolate_documents = true, but {name} has layers whose attention takes no mask of documents; set it "
                "to false"
            )
        self._choose_experts()
        given: dict[str, Any] = {"use_cache": False}
        if self._takes_positions:
            if positions is None:
                positions = torch.arange(length, device=tokens.device)
            given["position_ids"] = positions.expand(len(tokens), -1)
        elif positions is not None:
            raise ValueError(f"{name} takes no positions, so it sees whole sequences only: plan.context = 1")
        if documents is not None:
            given["attention_mask"] = document_mask(documents)
        return given

    def _choose_experts(self) -> None:
        """torch's grouped multiplication of experts has no fp64: there they are run one by one."""
        if (
            getattr(self.config, "_experts_implementation", None)
            and next(self.parameters()).dtype == torch.float64
        ):
            self.config._experts_implementation = "eager"

    def layout(self, plan: Plan) -> Layout:
        """How this model can be cut, and what it does not allow."""
        found = layout_for(self.inner, self.structure, plan, ours=self._is_ours)
        self._sequence_parts = plan.tensor if found.sequence_dim is not None else 1
        for path in found.experts if plan.expert > 1 else ():
            by_rows(self.inner.get_submodule(path), plan.expert)
        return found

    def check_sizes(self, plan: Plan, length: int) -> None:
        """Refuse a plan whose degrees do not fit the sizes of this model, of which `layout` was asked, or `length` tokens.

        Raises:
            ValueError: naming the axis and the reason.
        """
        blocks, heads = len(self.structure.blocks), self.config.num_attention_heads // plan.tensor
        if plan.stages > blocks:
            raise ValueError(
                f"plan.pipeline = {plan.pipeline} makes {plan.stages} stages (plan.schedule = {plan.schedule!r}) for {blocks} "
                f"blocks; {fewer_stages(plan, blocks)}"
            )
        chunks = 2 if plan.context_by == "ring" and plan.context > 1 else 1
        pieces = math.lcm(plan.context * chunks, plan.context * self._sequence_parts)
        if length % pieces:
            raise ValueError(
                f"plan.context = {plan.context} and plan.tensor = {plan.tensor} need a data.seq_len that is a multiple of "
                f"{pieces}, and it is {length}; {-(-length // pieces) * pieces} would do"
            )
        if plan.context > 1 and plan.context_by == "all_to_all" and heads % plan.context:
            raise ValueError(
                f"plan.context = {plan.context} by all_to_all does not divide a rank's {heads} heads; use "
                "plan.context_by=ring"
            )

    def begin(
        self, tokens: Tensor, positions: Tensor | None = None, documents: Tensor | None = None
    ) -> Tensor:
        """What comes before the blocks: (B, T, D)."""
        others = self._others(tokens, positions, documents)
        with self._blocks_replaced(lambda index, x, given: _stop(x)):
            return _stopped_with(lambda: self.inner(input_ids=tokens, **others))

    def side_inputs(
        self, tokens: Tensor, positions: Tensor | None = None, documents: Tensor | None = None
    ) -> tuple[list[dict[str, Any]]]:
        """What each block gets beside the residual stream, by its place."""
        sides: list[dict[str, Any]] = []

        def note(index: int, x: Tensor, given: dict[str, Any]) -> Tensor:
            sides.append(given)
            return x if index < len(self.structure.blocks) - 1 else _stop(x)

        nothing = torch.zeros((), device=tokens.device).expand(*tokens.shape, self.config.hidden_size)
        others = self._others(tokens, positions, documents)
        with self._blocks_replaced(note):
            _stopped_with(lambda: self.inner(inputs_embeds=nothing, **others))
        return (sides,)

    def end(self, x: Tensor) -> Tensor:
        """What comes after the blocks: logits (B, T, V)."""
        with self._blocks_replaced(lambda index, _, given: x):
            return self.inner(inputs_embeds=x, use_cache=False).logits

    @contextmanager
    def _blocks_replaced(self, run: Callable[[int, Tensor, dict[str, Any]], Tensor]) -> Iterator[None]:
        """While it lasts, `run(index, x, given)` stands for every block."""
        owner, _, leaf = str(self.structure.container).rpartition(".")
        holder = self.inner.get_submodule(owner)
        held = holder._modules[leaf]
        holder._modules[leaf] = nn.ModuleList(
            _StandIn(attributes, index, run) for index, attributes in enumerate(self.structure.attributes)
        )
        try:
            yield
        finally:
            holder._modules[leaf] = held

    def init_parameter(self, name: str, tensor: Tensor, generator: torch.Generator) -> None:
        """Set one whole parameter's initial value in place: normal with the configuration's `initializer_range`; norms as
        transformers sets them, biases zero, adapters as peft does.
        """
        if ".lora_A." in name:
            bound = 1 / math.sqrt(tensor.shape[1])
            tensor.uniform_(-bound, bound, generator=generator)
        elif ".lora_B." in name or (tensor.dim() < 2 and name not in self._vectors):
            tensor.zero_()
        elif tensor.dim() < 2:
            tensor.copy_(self._vectors[name])
        else:
            tensor.normal_(0.0, getattr(self.config, "initializer_range", 0.02), generator=generator)

    def read_part(self, name: str, part: Part, shape: torch.Size) -> Tensor | None:
        """A part of a parameter from the files; None for one that is not in them."""
        if self._stored is None or is_adapter(name):
            return None
        return self._stored.read(plain_name(name), part, shape)


class _StandIn(nn.Module):
    """Stands for a block, with the attributes by which models tell blocks apart (such as the kind of its attention)."""

    def __init__(self, attributes: dict[str, Any], index: int, run: Callable[..., Tensor]) -> None:
        super().__init__()
        self.__dict__.update(attributes)
        self._index, self._run = index, run

    def forward(self, x: Tensor, **given: Any) -> Tensor:
        return self._run(self._index, x, given)


class _StoppedError(Exception):
    """Ends a forward early, with what it had come to."""

    def __init__(self, x: Tensor) -> None:
        super().__init__("stopped at a block")
        self.x = x


def _stop(x: Tensor) -> Tensor:
    raise _StoppedError(x)


def _stopped_with(run: Callable[[], Any]) -> Tensor:
    try:
        run()
    except _StoppedError as stopped:
        return stopped.x
    raise RuntimeError("the model's forward did not come to its blocks")


def _given_side(forward: Callable[..., Any], index: int) -> Callable[..., Any]:
    """A block's forward that also takes what `side_inputs` gives all blocks, of which it uses its own."""

    @wraps(forward)
    def run(x: Tensor, *args: Any, **kwargs: Any) -> Any:
        if not args or not isinstance(args[0], list):
            return forward(x, *args, **kwargs)
        # rotary tables are made before the residual stream's type is known
        output = forward(x, **cast_floats(args[0][index], x.dtype))
        return output[0] if isinstance(output, tuple) else output

    return run


@torch.no_grad()
def _first_values(inner: Any) -> dict[str, Tensor]:
    """What transformers sets parameters without a matrix to, by name: norms, which begin at one in most models and at zero in
    others.
    """
    found: dict[str, Tensor] = {}
    for path, module in inner.named_modules():
        own = dict(module.named_parameters(recurse=False))
        if (
            not own
            or any(parameter.dim() > 1 for parameter in own.values())
            or any(True for _ in module.children())
        ):
            continue
        real = copy.copy(
            module
        )  # with tensors of its own: those of a simulated world cannot be copied with their module
        real._parameters = {
            name: nn.Parameter(
                torch.full(p.shape, 0.0 if name == "bias" else 1.0, dtype=p.dtype, device="cpu")
            )
            for name, p in own.items()
        }
        real._buffers = {
            name: torch.empty(buffer.shape, dtype=buffer.dtype, device="cpu")
            for name, buffer in module.named_buffers(recurse=False)
        }
        with torch.random.fork_rng(devices=[]):
            inner._init_weights(real)
        found |= {f"{path}.{name}": p.detach() for name, p in real.named_parameters(recurse=False)}
    return found


@torch.no_grad()
def _read_buffers(inner: nn.Module, stored: StoredWeights) -> None:
    """Buffers that belong to the weights, such as a router's correction."""
    kept = set(inner.state_dict())
    for name, buffer in inner.named_buffers():
        if name in kept and name in stored:
            whole = tuple(slice(0, size) for size in buffer.shape)
            buffer.copy_(stored.read(name, whole, buffer.shape))
