"""What a piece of a step's work is for: one table, read from top to bottom; the first rule that fits decides.

A rule looks at the name of the work (a kernel of a GPU, an operator of a CPU) and at the operators, annotations and phases of
the step in which the host launched it. Names are those of torch 2.11 to 2.13, NCCL, cuBLAS, cuDNN, FlashAttention, Triton.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import NamedTuple

from shoal.bench.trace import Work

MATMUL = "matmul"
ATTENTION = "attention"
ELEMENTWISE = "elementwise, norms"
LOSS = "loss"
OPTIMIZER = "optimizer"
CLIPPING = "clipping, norm of gradients"
SHARDING = "copies of sharding"
OTHER = "other"
COMMUNICATION = "communication"
CATEGORIES = (MATMUL, ATTENTION, ELEMENTWISE, LOSS, OPTIMIZER, CLIPPING, SHARDING, OTHER, COMMUNICATION)

NEVER = r"(?!)"


class Rule(NamedTuple):
    """Fits where `name` is found in the work's name, or `under` in a name that it was launched under."""

    category: str
    name: str = NEVER
    under: str = NEVER


RULES = (
    Rule(COMMUNICATION, name=r"nccl|^gloo:|^mpi:|^c10d::|c10d_functional|nvshmem|multimem|symm_mem"),
    # what fully_shard and DistributedDataParallel move between parameters, gradients and their buffers
    Rule(
        SHARDING,
        name=r"chunk_cat|split_with_sizes_copy|^fsdp::|reducer::|^_narrow$|^shoal::narrowed|^_sum_rows$",
        under=r"^FSDP::|^fsdp::|reducer::|copy_bucket",
    ),
    Rule(
        OPTIMIZER,
        name=r"fused_?(adam|sgd)|multi_tensor.*(adam|sgd)|^_adamw$",
        under=r"^Optimizer\.step|_fused_(adam|sgd)",
    ),
    Rule(
        LOSS,
        name=r"cross_entropy|nll_?loss|log_?softmax|logsumexp|softmax_online",
        under=r"cross_entropy|nll_?loss|log_?softmax|logsumexp",
    ),
    # between backward and update, Step adds up squares and works out the scale; others clip by these operators
    Rule(
        CLIPPING,
        name=r"lpnorm|norm_two|_foreach_norm|vector_norm",
        under=r"^shoal\.(reduce|update)|clip_grad|_foreach_norm|vector_norm",
    ),
    Rule(MATMUL, name=r"^triton_(mm|tem|bmm|flash_attn_mm)"),
    Rule(ATTENTION, name=r"flex_attention"),
    # a fused kernel is named after all that is in it, also after what it only prepares
    Rule(ELEMENTWISE, name=r"^triton_|^graph_\d+_|^_transpose$"),
    Rule(
        ATTENTION,
        name=r"flash|fmha|sdpa|attention",
        under=r"scaled_dot_product|ScaledDotProduct|flash_attn|(flash|efficient|cudnn|flex)_attention",
    ),
    Rule(
        MATMUL,
        name=r"gemm|cutlass|nvjet|xmma|cublas|splitk|gemv",
        under=r"^aten::_?(mm|addmm|bmm|baddbmm|addbmm|scaled_mm|grouped_mm|scaled_grouped_mm|mv|dot)(_?|\.out)$",
    ),
    Rule(MATMUL, name=r"^aten::_?(mm|addmm|bmm|baddbmm|scaled_mm|grouped_mm|linear|matmul|mv|dot)$"),
    Rule(OTHER, name=r"mem(cpy|set)|index|sort|scatter|gather|embedding|random", under=r"embedding"),
    Rule(ELEMENTWISE, name=r"elementwise|vectorized|reduce|norm|silu|gelu|softmax|Cat|copy|foreach|fill"),
    Rule(ELEMENTWISE, name=r"^aten::|Backward\d*$|^autograd::|AccumulateGrad|Compiled"),
)
_NAMES = [re.compile(rule.name, re.IGNORECASE) for rule in RULES]
_UNDERS = [re.compile(rule.under) for rule in RULES]


def category_of(work: Work) -> str:
    """The category of a piece of work.

    Example:
        >>> category_of(Work("ncclDevKernel_AllGather_RING_LL", 0, 1, (), 0))
        'communication'
    """
    first = min(_first_by_name(work.name), *map(_first_by_under, set(work.under)), len(RULES))
    return RULES[first].category if first < len(RULES) else OTHER


@lru_cache(maxsize=65536)  # a step has tens of thousands of pieces of work, and few names
def _first_by_name(name: str) -> int:
    return next((at for at, pattern in enumerate(_NAMES) if pattern.search(name)), len(RULES))


@lru_cache(maxsize=65536)
def _first_by_under(outer: str) -> int:
    return next((at for at, pattern in enumerate(_UNDERS) if pattern.search(outer)), len(RULES))
