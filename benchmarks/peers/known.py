"""The peers that `shoal bench step --against` can run: a file each. Standard library alone, since the command reads it."""

from __future__ import annotations

from typing import NamedTuple

RECOMPUTE = ("auto", "none", "full")
RESHARD = ("default", "never")
"""whether FSDP frees parameters after forward, or keeps them gathered for backward"""
EXPANDABLE = {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}


class Known(NamedTuple):
    """How a peer is run."""

    module: str
    setting: str
    packages: tuple[str, ...] = ()
    """that must be importable"""
    env: dict[str, str] = {}  # noqa: RUF012 - never changed
    """variables that the peer's own documentation or launcher sets"""
    needs_gpu: bool = False
    options: dict[str, tuple[str, ...]] = {}  # noqa: RUF012 - never changed
    """what can be said behind its name, the first value where it is not"""


PEERS = {
    "fsdp2": Known("benchmarks.peers.torch_fsdp2", "by hand: FSDP2, compiled blocks, our model"),
    "ddp": Known("benchmarks.peers.torch_ddp", "DDP, eager, autocast", ("transformers",)),
    "torchtitan": Known(
        "benchmarks.peers.torchtitan_fsdp2",
        "torchtitan's Llama, FSDP2, compiled, its own optimizer and loss",
        ("torchtitan", "torchdata", "datasets", "tyro"),
        EXPANDABLE,
        options={
            "recompute": ("auto", "none", "selective", "full"),
            "reshard": RESHARD,
            "float8": ("false", "true"),
        },
    ),
    "accelerate": Known(
        "benchmarks.peers.accelerate_fsdp2",
        "Accelerate FSDP2, compiled layers",
        ("transformers", "accelerate"),
        EXPANDABLE,
        needs_gpu=True,  # Accelerate refuses FSDP on a CPU
        options={"recompute": RECOMPUTE, "reshard": RESHARD},
    ),
    "deepspeed": Known(
        "benchmarks.peers.deepspeed_zero",
        "DeepSpeed ZeRO, large buckets",
        ("transformers", "deepspeed"),
        {**EXPANDABLE, "DS_SKIP_CUDA_CHECK": "1"},
        options={"stage": ("auto", "1", "2", "3"), "recompute": RECOMPUTE},
    ),
    "megatron": Known(
        "benchmarks.peers.megatron_core",
        "Megatron-Core without Transformer Engine, distributed optimizer",
        ("megatron.core",),
        {
            **EXPANDABLE,
            "CUDA_DEVICE_MAX_CONNECTIONS": "1",
        },  # so that its collectives overlap as they are launched
        needs_gpu=True,
        options={"tensor": ("auto", "1", "2", "4", "8"), "recompute": RECOMPUTE},
    ),
}
