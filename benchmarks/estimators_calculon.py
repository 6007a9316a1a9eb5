"""Calculon's model of memory and time, asked about the runs of `estimators.py`; it is imported from a checkout of it.

It models GPT blocks of two matrices with as many keys as queries, in 16 bits. A Llama is told to it with 1.5 times its hidden
width, which are as many operations. It has no fused attention: its recompute of attention alone, without scores, is nearest.
Sharding of gradients and parameters, context and expert parallel, compilers and vocabularies are not in it.

Source: Isaev et al., "Calculon: a methodology and tool for high-level codesign of systems and large language models", SC 2023.
"""

from __future__ import annotations

import importlib
import json
import logging
import sys
from pathlib import Path
from typing import Any

from shoal.models.presets import LlamaDims
from shoal.plan import Plan

SYSTEM = "systems/h100_80g_nvl8.json"
RECOMPUTES = {"none": "attn_only", "full": "full"}


class Calculon:
    """A checkout of Calculon (github.com/calculon-ai/calculon), which needs pandas."""

    def __init__(self, folder: Path) -> None:
        sys.path.insert(0, str(folder))
        self._llm: Any = importlib.import_module("calculon.llm.llm").Llm
        self._system: Any = importlib.import_module("calculon.system").System
        self._h100: dict[str, Any] = json.loads((folder / SYSTEM).read_text())

    def ask(
        self, dims: LlamaDims, plan: Plan, length: int, micro_batch: int, micro_batches: int
    ) -> tuple[float, float] | None:
        """Bytes of one device of its H100, and seconds of a step; None for a plan that it does not know."""
        known = plan.context == 1 and plan.expert == 1 and not plan.offload and plan.zero_stage <= 1
        if not known or plan.recompute not in RECOMPUTES or plan.schedule not in ("1f1b", "interleaved_1f1b"):
            return None
        model = self._llm(self._llm.Application(_application(dims, length)), logging.getLogger("calculon"))
        system = self._system(self._machine(plan.world_size))
        model.compile(system, self._llm.Execution.from_json(_execution(plan, micro_batch, micro_batches)))
        model.run(system)
        return float(model.get_mem_tier1_cap_req()), float(model.get_total_time())

    def _machine(self, devices: int) -> dict[str, Any]:
        """One node of so many; without a limit of memory, which is what is asked."""
        near, far = self._h100["networks"]
        networks = [near | {"size": devices, "must_be_filled": False}, far]
        return self._h100 | {"networks": networks, "mem1": self._h100["mem1"] | {"GiB": 1 << 20}}


def _application(dims: LlamaDims, length: int) -> dict[str, Any]:
    return {
        "name": "llama",
        "hidden": dims.dim,
        "feedforward": dims.ffn * 3 // 2,
        "seq_size": length,
        "attn_heads": dims.heads,
        "attn_size": dims.head_dim,
        "num_blocks": dims.layers,
    }


def _execution(plan: Plan, micro_batch: int, micro_batches: int) -> dict[str, Any]:
    interleaved = plan.stages_per_rank if plan.pipeline > 1 else 1
    return {
        "num_procs": plan.world_size,
        "tensor_par": plan.tensor,
        "pipeline_par": plan.pipeline,
        "data_par": plan.data_degree,
        "tensor_par_net": 0,
        "pipeline_par_net": 0,
        "data_par_net": 0,
        "batch_size": plan.data_degree * micro_batch * micro_batches,
        "microbatch_size": micro_batch,
        "datatype": "float16",
        "fused_activation": True,
        "attention_type": "multihead",
        "activation_recompute": RECOMPUTES[plan.recompute],
        "pipeline_interleaving": interleaved,
        "optimizer_sharding": plan.zero_stage == 1 and plan.data_degree > 1,
        "tensor_par_comm_type": "rs_ag" if plan.tensor > 1 else "ar",
        "tensor_par_overlap": "none",
        "seq_par_ag_redo": False,
        "data_par_overlap": plan.data_degree > 1,
        "weight_offload": False,
        "activations_offload": False,
        "optimizer_offload": False,
        "training": True,
    }
