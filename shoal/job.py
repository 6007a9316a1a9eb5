"""`Job`: what to train. Everything here decides the numbers; nothing here says where they are computed.

Frozen, validated data that imports neither torch nor the rest of shoal. Written to and read from TOML by
`shoal.config`. Two runs of one `Job` under two plans give the same losses, up to the rounding of a sum taken
in another order.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

Precision = Literal["fp32", "bf16", "fp16", "fp64", "float8", "float8_rowwise", "float8_gather"]
FLOAT8 = ("float8", "float8_rowwise", "float8_gather")
NARROW = ("bf16", "fp16", *FLOAT8)
"""precisions whose activations have 2 bytes"""
OnError = Literal["raise", "skip", "substitute"]
Beta = Annotated[float, Field(ge=0, lt=1)]
FAMILIES = ("llama", "moe")
EXPERT_KEYS = ("experts", "top_k", "shared_experts", "expert_ffn", "scoring", "balance_rate")


class Section(BaseModel):
    """A table of the job file: frozen, typed strictly, no unknown keys."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, validate_default=True, allow_inf_nan=False
    )


class Model(Section):
    """Which model: a family of ours with its dimensions, or the user's own by import path."""

    family: str = Field(
        "llama", description='"llama", "moe", "hf:<path or id>" (transformers), or "package.module:build"'
    )
    preset: str | None = Field(
        None, description='named dimensions of a family: "1m", "5m", ... "405b", or "8x5m", ... "8x7b"'
    )
    dim: int | None = Field(None, ge=1, description="width of the residual stream")
    layers: int | None = Field(None, ge=1, description="number of blocks")
    heads: int | None = Field(None, ge=1, description="query heads")
    kv_heads: int | None = Field(None, ge=1, description="key/value heads (grouped-query attention)")
    ffn: int | None = Field(None, ge=1, description="hidden width of the feed-forward part (llama)")
    vocab: int | None = Field(None, ge=2, description="vocabulary size; left out: the tokenizer's")
    tied: bool | None = Field(None, description="output head shares the embedding's weights")
    rope_theta: float | None = Field(None, gt=0, description="base of the rotary position frequencies")
    norm_eps: float | None = Field(None, gt=0, description="epsilon of RMSNorm")
    experts: int | None = Field(None, ge=1, description="experts of each block (moe)")
    top_k: int | None = Field(None, ge=1, description="experts that each token goes to (moe)")
    shared_experts: int | None = Field(
        None, ge=0, description="experts that every token goes to, beside (moe)"
    )
    expert_ffn: int | None = Field(None, ge=1, description="hidden width of one expert (moe)")
    scoring: Literal["softmax", "sigmoid"] | None = Field(
        None, description="from a router's logits to the weights of experts (moe)"
    )
    balance_rate: float | None = Field(
        None,
        ge=0,
        description="how far an expert's bias moves a step, towards equal use; left out: 0.001; 0: not (moe)",
    )
    options: dict[str, Any] = Field(
        default_factory=dict, description="keyword arguments of your own build(), or of hf:"
    )

    @model_validator(mode="after")
    def _check(self) -> Self:
        own = ":" in self.family
        if not own and self.family not in FAMILIES:
            raise ValueError(
                f"family = {self.family!r} is unknown; families: {', '.join(FAMILIES)}; a model of your own is "
                '"package.module:build" or "file.py:build"'
            )
        dimensions = self.model_fields_set - {"family", "options"}
        given = [
            name for name in type(self).model_fields if name in dimensions and getattr(self, name) is not None
        ]
        if own and given:
            raise ValueError(
                f"{given[0]} = {getattr(self, given[0])!r} is for families of ours; give family = {self.family!r} what it "
                "needs in [model.options]"
            )
        of_experts = [name for name in given if name in EXPERT_KEYS]
        if self.family == "llama" and of_experts:
            raise ValueError(
                f"{of_experts[0]} = {getattr(self, of_experts[0])!r} is for experts, and family 'llama' has none; use family = "
                "'moe', or leave it out"
            )
        return self


class Data(Section):
    """What the model reads."""

    source: str | list[str] = Field(
        "stdlib",
        description='"stdlib", files or folders of text, a prepared folder, "synthetic", "hf:<name>", '
        'or "package.module:dataset"',
    )
    seq_len: int = Field(256, ge=1, description="tokens a sample, for text")
    tokenizer: str = Field(
        "bpe",
        description='"bpe" (trained on the source), "bytes", or "hf:<path or name>"; left out: that of a model whose weights are '
        "read, else bpe",
    )
    vocab: int = Field(4096, ge=257, description="vocabulary size of a BPE tokenizer that is trained")
    text_key: str = Field(
        "text", description="the field that holds the text in .jsonl files and Hugging Face sets"
    )
    split: str = Field("train", description="the split of a Hugging Face dataset")
    eval_fraction: float = Field(
        0.01, ge=0, lt=1, description="part of the documents held out for evaluation"
    )
    isolate_documents: bool = Field(
        False, description="attention does not cross from one document to the next"
    )
    shuffle: bool = Field(True, description="a new order of samples each epoch")
    workers: int | None = Field(
        None,
        ge=0,
        description="loader processes a rank, for datasets of your own; left out: up to 4 on GPUs, none on CPUs",
    )
    on_error: OnError = Field(
        "raise",
        description="a sample of your own dataset that cannot be read ends the run, is left out of its global batch (skip), or "
        "another one is read in its place (substitute)",
    )
    most_bad: float | None = Field(
        None,
        gt=0,
        le=1,
        description="part of the samples read that may be bad, for on_error; more end the run; left out: 0.01",
    )
    deadline_s: float | None = Field(
        None,
        gt=0,
        description="seconds that a loader process may take for a sample before it counts as hung and is replaced; left out: "
        "60, or a quarter of run.deadline_s if that is less",
    )
    sharded: bool = Field(False, description="your iterable dataset already gives each rank its own part")
    options: dict[str, Any] = Field(
        default_factory=dict, description="keyword arguments of your own dataset()"
    )

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.most_bad is not None and self.on_error == "raise":
            raise ValueError(
                f'most_bad = {self.most_bad:g} is for on_error = "skip" or "substitute"; with "raise" the first bad sample ends '
                "the run"
            )
        if self.deadline_s is not None and self.workers == 0:
            raise ValueError(
                f"deadline_s = {self.deadline_s:g} is for loader processes, and workers = 0 has none: in the training process "
                "nothing can interrupt a read"
            )
        return self


class Train(Section):
    """How long, how much at a time, how precisely."""

    steps: int = Field(100, ge=1, description="optimizer steps")
    global_batch: int = Field(
        32, ge=1, description="samples an optimizer step, over all ranks and micro-batches"
    )
    precision: Precision = Field(
        "fp32",
        description="compute type; master weights and gradient sums are fp32 (fp64 with fp64). float8: the linears of blocks "
        "multiply in 8 bits, with one scale a tensor (or a row), and the rest is bf16; float8_gather: what plan.shard cuts of "
        "them is gathered in 8 bits, too",
    )
    seed: int = Field(0, ge=0, description="weights, data order and dropout derive from it")
    objective: str | None = Field(
        None, description='"package.module:loss" of your own; left out: next-token cross-entropy'
    )
    eval_every: int = Field(0, ge=0, description="steps between evaluations; 0: only at the end")
    eval_samples: int | None = Field(None, ge=1, description="at most so many held-out samples an evaluation")
    loss_scale: float = Field(65536.0, gt=0, description="initial loss scale, fp16 only")
    loss_scale_growth: int = Field(2000, ge=1, description="finite steps until the fp16 loss scale doubles")
    spike: float = Field(
        0.0,
        ge=0,
        description="standard deviations above the losses before it, as their medians tell, from which a step's loss is a spike: "
        "the run goes back to before it and skips its data; 0: never",
    )
    spike_window: int = Field(100, ge=4, description="losses before a step that a spike is told from")
    spike_rewind: int = Field(20, ge=0, description="steps before a spike whose data is skipped with it")

    @model_validator(mode="after")
    def _check(self) -> Self:
        defaults = type(self).model_fields
        for key in ("spike_window", "spike_rewind"):
            if self.spike == 0 and getattr(self, key) != defaults[key].default:
                raise ValueError(
                    f"{key} = {getattr(self, key)} is for spikes, and spike = 0 sees none; use spike = 10.0, or leave it out"
                )
        return self


class Optimizer(Section):
    """The update rule and its schedule, in optimizer steps."""

    name: Literal["adamw", "sgd"] = Field("adamw", description="the update rule")
    lr: float = Field(3e-4, gt=0, description="peak learning rate")
    betas: tuple[Beta, Beta] = Field((0.9, 0.95), strict=False, description="AdamW's decay rates")
    eps: float = Field(1e-8, gt=0, description="AdamW's epsilon")
    weight_decay: float = Field(
        0.1, ge=0, description="decoupled decay (AdamW) or L2 (SGD), on parameters of two or more dims"
    )
    momentum: float = Field(0.9, ge=0, lt=1, description="SGD's momentum")
    nesterov: bool = Field(False, description="SGD with Nesterov's momentum")
    schedule: Literal["constant", "linear", "cosine", "wsd"] = Field(
        "cosine", description="course of the learning rate after warm-up; wsd: constant, then a linear decay"
    )
    warmup: int = Field(0, ge=0, description="steps of linear warm-up")
    decay: int = Field(0, ge=0, description="steps of the final decay, for wsd")
    min_lr: float = Field(0.1, ge=0, le=1, description="where the schedule ends, as a fraction of lr")
    clip: float = Field(1.0, ge=0, description="largest global gradient norm; 0: no clipping")

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.schedule == "wsd" and self.decay == 0:
            raise ValueError('schedule = "wsd" needs decay: the number of final steps over which lr falls')
        if self.nesterov and self.momentum == 0:
            raise ValueError("nesterov = true needs momentum above 0")
        return self


class Job(Section):
    """What to train: model, data, objective, optimizer, schedule, batch, steps, precision, seed.

    Example:
        >>> Job(model=Model(preset="1m"), train=Train(steps=10)).optimizer.lr
        0.0003
    """

    model: Model = Model()
    data: Data = Data()
    train: Train = Train()
    optimizer: Optimizer = Optimizer()

    @model_validator(mode="after")
    def _check(self) -> Self:
        steps, optimizer = self.train.steps, self.optimizer
        if optimizer.schedule == "wsd" and optimizer.warmup + optimizer.decay > steps:
            raise ValueError(
                f"optimizer.warmup = {optimizer.warmup} and optimizer.decay = {optimizer.decay} are together more than "
                f"train.steps = {steps}"
            )
        return self
