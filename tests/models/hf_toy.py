"""Tiny transformers models made here, trained by plain transformers and torch, and through `parallelize` and `Step`."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from shoal.job import Optimizer, Precision
from shoal.models.huggingface import builder_of
from shoal.parallel.apply import parallelize
from shoal.parallel.initialise import seed_of, weights_hash
from shoal.plan import Plan
from shoal.train.objective import NextToken
from shoal.train.schedule import learning_rate
from shoal.train.step import Step
from shoal.world import World
from tests.train.toy import BATCH, LENGTH, part_of, whole_weights

VOCAB, STEPS = 52, 3
OPTIMIZER = Optimizer(lr=1e-2, schedule="constant", clip=0.5, weight_decay=0.1)
_SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 24,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "intermediate_size": 40,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "initializer_range": 0.2,  # far from zero, so that attention is not all but uniform
}
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {"num_key_value_heads": 2, "tie_word_embeddings": True},
    "qwen3": {"num_key_value_heads": 2, "head_dim": 8},
    "mistral": {"num_key_value_heads": 2, "sliding_window": 5},
    "gemma": {"num_key_value_heads": 1, "head_dim": 8, "pad_token_id": 0},
    "gemma2": {"num_key_value_heads": 2, "head_dim": 8, "sliding_window": 5, "query_pre_attn_scalar": 10},
    "gemma3_text": {
        "num_key_value_heads": 2,
        "head_dim": 8,
        "sliding_window": 5,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    },
    "phi": {"hidden_size": 32},
    "phi3": {"num_key_value_heads": 2, "pad_token_id": 0},
    "gpt2": {"n_positions": 64, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
    "gpt_neox": {},
    "mixtral": {"num_key_value_heads": 2, "num_local_experts": 4},
    "qwen3_moe": {
        "num_key_value_heads": 2,
        "head_dim": 8,
        "num_experts": 4,
        "moe_intermediate_size": 16,
        "num_experts_per_tok": 2,
    },
}


class Record(NamedTuple):
    initial_hash: str
    losses: list[float]
    norms: list[float]
    weights: dict[str, Tensor]


class AllWide(TorchFunctionMode):
    """Lets a model in fp64 compute all of it in fp64.

    transformers computes norms, softmaxes and rotary tables in fp32 whatever the model's type: a difference of 1e-16 before a
    norm becomes one of 1e-7 behind it, and comparisons would see only that.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if args and isinstance(args[0], Tensor) and args[0].dtype == torch.float64:
            if func is Tensor.float:
                return args[0]
            if func is Tensor.to:
                args = tuple(torch.float64 if value is torch.float32 else value for value in args)
            if kwargs.get("dtype") is torch.float32:
                kwargs = kwargs | {"dtype": torch.float64}
        return func(*args, **kwargs)


class WideNextToken(NextToken):
    def forward(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        with AllWide():
            return super().forward(model, batch)


class NextTokenWhole(NextToken):
    """Asks for whole logits."""

    takes_parts = False


def config_of(kind: str, **changes: Any) -> Any:
    import transformers

    return transformers.AutoConfig.for_model(kind, **(_SIZES | CONFIGS[kind] | changes))


def folder_of(kind: str, **changes: Any) -> Path:
    """A folder with a config.json and nothing else."""
    folder = Path(tempfile.mkdtemp(prefix=f"{kind}-"))
    config_of(kind, **changes).save_pretrained(folder)
    return folder


def saved(kind: str, where: Path, shard: str = "5GB", **changes: Any) -> Path:
    """A folder with random weights, written by transformers."""
    import transformers

    torch.manual_seed(3)
    model = transformers.AutoModelForCausalLM.from_config(config_of(kind, **changes))
    model.save_pretrained(where, max_shard_size=shard)
    return where


def global_batch(step: int) -> dict[str, Tensor]:
    """Samples keep 0 to all of their labels."""
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(0, VOCAB, (BATCH, LENGTH + 1), generator=generator)
    labels = tokens[:, 1:].clone()
    kept = torch.randint(0, LENGTH + 1, (BATCH, 1), generator=generator)
    kept[step % BATCH] = 0
    labels[torch.arange(LENGTH)[None] >= kept] = -100
    return {"tokens": tokens[:, :-1], "labels": labels}


def with_documents(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """Two documents a sample, the second beginning at a place of its own."""
    starts = torch.arange(BATCH)[:, None] % (LENGTH - 1) + 1
    places = torch.arange(LENGTH)[None].expand(BATCH, -1)
    documents = (places >= starts).long()
    return batch | {"documents": documents, "positions": places - starts * documents}


def run_plan(
    world: World,
    plan: Plan,
    folder: Path,
    options: dict[str, Any] | None = None,
    documents: bool = False,
    precision: Precision = "fp64",
) -> Record:
    build = builder_of(str(folder), **(options or {}))
    model = parallelize(build, plan, world, precision=precision, seed=7)
    initial = weights_hash(model)
    step = Step(
        model, WideNextToken(), OPTIMIZER, plan, world, precision=precision, usual_weight=BATCH * LENGTH / 2
    )  # pyrefly: ignore
    results = []
    for index in range(STEPS):
        batch = with_documents(global_batch(index)) if documents else global_batch(index)
        results.append(step(part_of(batch, index, plan, world.rank)))
    return Record(initial, [r.loss for r in results], [r.grad_norm for r in results], whole_weights(model))


def plain_model(folder: Path, options: dict[str, Any] | None = None) -> nn.Module:
    """The model by transformers alone in fp64, with the weights that Shoal draws."""
    import transformers

    kind = transformers.AutoConfig.from_pretrained(folder)
    attention = "eager" if kind.model_type == "gemma2" else "sdpa"
    model = transformers.AutoModelForCausalLM.from_config(
        kind, attn_implementation=attention, dtype=torch.float32
    )
    drawn = builder_of(str(folder), **(options or {}))()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            whole = torch.empty(parameter.shape)
            drawn.init_parameter(name, whole, torch.Generator().manual_seed(seed_of(7, name)))
            parameter.copy_(whole)
    if hasattr(model.config, "_experts_implementation"):
        model.config._experts_implementation = "eager"  # the grouped one has no fp64
    return model.double()


def run_plainly(model: nn.Module, settings: Optimizer = OPTIMIZER) -> Record:
    """Whole batches, torch's own clipping and optimizer, transformers' own masks."""
    initial = weights_hash(model)
    model.train()
    trained = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trained if p.dim() >= 2], "weight_decay": settings.weight_decay},
        {"params": [p for p in trained if p.dim() < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, betas=settings.betas, eps=settings.eps, foreach=False)
    losses, norms = [], []
    for index in range(STEPS):
        batch = global_batch(index)
        with AllWide():
            logits = model(input_ids=batch["tokens"], use_cache=False).logits
        loss = F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())
        loss.backward()
        norms.append(nn.utils.clip_grad_norm_(trained, settings.clip).item())
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(settings, index, STEPS)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return Record(initial, losses, norms, whole_weights(model))
