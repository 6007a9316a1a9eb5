"""Writes the folders beside it: checkpoints of DeepSpeed itself, on CPUs, and a hash of each tensor that its optimizer had.

Run once with DeepSpeed 0.19.8 installed, which no test needs: DS_ACCELERATOR=cpu python tests/checkpoint/deepspeed/write.py
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import tempfile
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as mp
from torch import Tensor, nn

from shoal.config import parse
from shoal.models.build import builder

HERE = Path(__file__).parent
VOCAB, STEPS = 257, 4
MODEL = {"dim": 4, "layers": 2, "heads": 2, "kv_heads": 1, "ffn": 5, "tied": True}
BF16 = {"bf16": {"enabled": True}}
STAGE3 = {"stage": 3, "sub_group_size": 200, "stage3_param_persistence_threshold": 0}
CASES: dict[str, tuple[int, dict[str, Any]]] = {  # ranks, and DeepSpeed's settings
    "stage1-fp16": (
        2,
        {"zero_optimization": {"stage": 1}, "fp16": {"enabled": True, "initial_scale_power": 10}},
    ),
    # with gradients in fp32 stage 1 has another optimizer, which writes other files
    "stage1-bf16": (
        2,
        {"zero_optimization": {"stage": 1}, "data_types": {"grad_accum_dtype": "fp32"}, **BF16},
    ),
    "stage2-bf16": (2, {"zero_optimization": {"stage": 2, "round_robin_gradients": True}, **BF16}),
    "stage2-sgd": (2, {"zero_optimization": {"stage": 2}}),
    "stage3-bf16": (3, {"zero_optimization": STAGE3, **BF16}),
    "stage3-frozen": (2, {"zero_optimization": STAGE3, **BF16}),
}


def main() -> None:
    for name, (ranks, _) in CASES.items():
        with tempfile.TemporaryDirectory() as out:
            mp.spawn(write, (ranks, name, out), ranks)
            shutil.rmtree(HERE / name, ignore_errors=True)
            shutil.copytree(out, HERE / name, ignore=shutil.ignore_patterns("*.py"))


def write(rank: int, ranks: int, name: str, out: str) -> None:
    place = {
        "RANK": rank,
        "LOCAL_RANK": rank,
        "WORLD_SIZE": ranks,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": 29571,
    }
    os.environ.update({key: str(value) for key, value in place.items()})
    torch.set_num_threads(1)
    deepspeed: Any = import_module("deepspeed")
    # it takes fp16 to be too slow on CPUs without instructions for it
    deepspeed.accelerator.get_accelerator().is_fp16_supported = lambda: True
    model = toy(frozen=name == "stage3-frozen")
    settings = {
        "train_micro_batch_size_per_gpu": 2,
        "zero_allow_untested_optimizer": True,
        **CASES[name][1],
    }
    optimizer = optimizer_of(model, sgd=name == "stage2-sgd")
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=settings)
    for step in range(STEPS):
        torch.manual_seed(100 + step * ranks + rank)
        tokens = torch.randint(0, VOCAB, (2, 9))
        logits = engine(tokens[:, :-1]).float()
        engine.backward(nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()))
        engine.step()
    # a command line of the writer's, as many save it along: an object that is no tensor's
    engine.save_checkpoint(out, client_state={"args": argparse.Namespace(lr=1e-2)})
    hashes = {key: digest(tensor) for key, tensor in held_by(engine, CASES[name][1], out).items()}
    if rank == 0:
        (Path(out) / "hashes.json").write_text(json.dumps(hashes, indent=1) + "\n")


def toy(*, frozen: bool) -> nn.Module:
    data = {"source": "synthetic", "vocab": VOCAB, "seq_len": 16, "eval_fraction": 0.0}
    model = builder(parse({"model": MODEL, "data": data}, "toy").job.model, VOCAB)()
    torch.manual_seed(0)
    for parameter in model.parameters():
        nn.init.normal_(parameter, 1.0 if parameter.dim() == 1 else 0.0, 0.2)
    if frozen:
        model.get_submodule("blocks.0").requires_grad_(requires_grad=False)
    return model


def optimizer_of(model: nn.Module, *, sgd: bool) -> torch.optim.Optimizer:
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups: list[dict[str, Any]] = [
        {"params": [parameter for parameter in trained if parameter.dim() > 1], "weight_decay": 0.1},
        {"params": [parameter for parameter in trained if parameter.dim() == 1], "weight_decay": 0.0},
    ]
    return torch.optim.SGD(groups, lr=1e-2, momentum=0.9) if sgd else torch.optim.AdamW(groups, lr=1e-2)


def held_by(engine: Any, settings: dict[str, Any], out: str) -> dict[str, Tensor]:
    """Whole weights and state, as DeepSpeed gathers them: from the optimizer, or where it cannot, from what it saved."""
    utils: Any = import_module("deepspeed.utils")
    held: dict[str, Tensor] = {}
    if not settings["zero_optimization"].get("round_robin_gradients"):  # its functions mix parameters up then
        if (
            settings["zero_optimization"]["stage"] < 3
        ):  # they were linked before torch's optimizer had any state
            engine.optimizer._hp_optimizer_states_linked = False
            engine.optimizer._lazy_init_hp_params_optimizer_state()
        sgd = isinstance(engine.optimizer.optimizer, torch.optim.SGD)
        for name, parameter in engine.module.named_parameters():
            if parameter.requires_grad:
                held[name] = utils.safe_get_full_fp32_param(parameter)
                for kind in ("momentum_buffer",) if sgd else ("exp_avg", "exp_avg_sq"):
                    held[f"optimizer.{name}.{kind}"] = utils.safe_get_full_optimizer_state(parameter, kind)
    if "data_types" not in settings:  # its script refuses what that optimizer writes
        script: Any = import_module("deepspeed.utils.zero_to_fp32")
        saved = script.get_fp32_state_dict_from_zero_checkpoint(out)
        assert all(torch.equal(held[name], saved[name]) for name in held if name in saved)
        held |= saved
    return held


def digest(tensor: Tensor) -> str:
    return hashlib.sha256(tensor.detach().float().contiguous().numpy().tobytes()).hexdigest()[:16]


if __name__ == "__main__":
    main()
