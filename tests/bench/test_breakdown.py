"""A step is broken down right: on a trace of a GPU made by hand, and on one that the profiler wrote."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.profiler import profile, record_function

from shoal.bench.breakdown import EXPOSED, GAPS, STEP, Breakdown, break_down, covered, over_ranks
from shoal.bench.categories import (
    ATTENTION,
    CLIPPING,
    COMMUNICATION,
    ELEMENTWISE,
    LOSS,
    MATMUL,
    OPTIMIZER,
    OTHER,
    RULES,
    SHARDING,
    category_of,
)
from shoal.bench.trace import Work, read_trace, trace_of

MAIN, BACKWARD = 1, 2  # threads


def host(name: str, start: float, end: float, cat: str = "cpu_op", tid: int = MAIN) -> dict[str, Any]:
    """An operator or annotation; times in ms."""
    return {
        "ph": "X",
        "cat": cat,
        "name": name,
        "pid": 9,
        "tid": tid,
        "ts": start * 1e3,
        "dur": (end - start) * 1e3,
    }


def mark(name: str, start: float, end: float) -> dict[str, Any]:
    return host(name, start, end, "user_annotation")


def kernel(
    name: str, start: float, end: float, launched: float, number: int, *, stream: int = 7, tid: int = MAIN
) -> list[dict[str, Any]]:
    """A kernel and its launch."""
    launch = host("cudaLaunchKernel", launched, launched + 0.01, "cuda_runtime", tid)
    ran = host(name, start, end, "kernel", stream)
    for event in (launch, ran):
        event["args"] = {"correlation": number}
    return [launch, ran]


def a_gpus_step() -> list[dict[str, Any]]:
    """The end of one step, and one of 100 ms after it on two streams, launched far ahead by two threads."""
    return [
        mark(STEP, 0, 4),
        *kernel("nvjet_tst_128x256", 0, 10, launched=1, number=1),
        mark(STEP, 4, 40),
        mark("shoal.forward", 4.5, 20),
        host("FSDP::all_gather (blocks.0)", 4.6, 5, "user_annotation"),
        *kernel("ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage)", 8, 20, 4.8, 2, stream=9),
        host("aten::linear", 5, 6),
        host("aten::mm", 5.2, 5.8),
        *kernel("sm90_xmma_gemm_bf16bf16", 20, 50, 5.5, 3),
        host("aten::cross_entropy_loss", 6, 7),
        *kernel("void at::native::elementwise_kernel", 50, 55, 6.5, 4),
        host("MmBackward0", 10, 12, tid=BACKWARD),
        host("aten::mm", 10.5, 11.5, tid=BACKWARD),
        *kernel("an_unheard_of_kernel", 60, 80, 11, 5, tid=BACKWARD),
        *kernel("ncclDevKernel_ReduceScatter_Sum_f32_RING_LL", 70, 90, 12.5, 6, stream=9, tid=BACKWARD),
        mark("shoal.reduce", 20, 30),
        *kernel("void at::native::lpnorm_cleanup", 90, 92, 25, 7),
        mark("shoal.update", 30, 39),
        mark("Optimizer.step#AdamW.step", 31, 38),
        *kernel("void at::native::multi_tensor_apply_kernel<FusedAdamMathFunctor>", 95, 110, 32, 8),
    ]


def test_a_gpus_step_is_cut_at_the_work_of_the_step_before() -> None:
    found = break_down(trace_of(a_gpus_step()))
    assert found.step_ms == pytest.approx(100)  # from 10, when the last step's kernel ended, to 110
    expected = {
        COMMUNICATION: 10 + 20,  # the first 2 ms of the all-gather belong to the time of the step before
        MATMUL: 30 + 20,  # the unknown kernel by the operator that launched it, on the thread of backward
        LOSS: 5,
        CLIPPING: 2,
        OPTIMIZER: 15,
    }
    assert {name: ms for name, ms in found.by_category.items() if ms} == pytest.approx(expected)


def test_exposed_communication_and_gaps_are_what_nothing_hides() -> None:
    found = break_down(trace_of(a_gpus_step()))
    assert found.exposed_ms == pytest.approx(10 + 10)  # before the first matmul; after the last of backward
    assert found.gaps_ms == pytest.approx(5 + 3)  # 55 to 60 and 92 to 95
    assert found.computing_ms + found.exposed_ms + found.gaps_ms == pytest.approx(found.step_ms)


def test_the_longest_kernels_come_first_and_are_added_up_by_name() -> None:
    events = [*a_gpus_step(), *kernel("sm90_xmma_gemm_bf16bf16", 56, 60, 5.6, 9)]
    longest = break_down(trace_of(events)).longest
    assert (longest[0].name, longest[0].category, longest[0].count) == ("sm90_xmma_gemm_bf16bf16", MATMUL, 2)
    assert longest[0].ms == pytest.approx(34)
    assert [one.ms for one in longest] == sorted((one.ms for one in longest), reverse=True)


@pytest.mark.parametrize(
    ("name", "under", "category"),
    [
        ("ncclDevKernel_AllGather_RING_LL", ("FSDP::all_gather",), COMMUNICATION),
        ("gloo:all_reduce", (), COMMUNICATION),
        ("void at::native::chunk_cat_cuda_kernel<float, BFloat16>", (), SHARDING),
        ("void at::native::split_with_sizes_copy_out_contiguous_no_cast_kernel", (), SHARDING),
        (
            "Memcpy DtoD (Device -> Device)",
            ("FSDP::all_gather (blocks.1)", "fsdp::all_gather_copy_in"),
            SHARDING,
        ),
        ("void at::native::FusedAdamMathFunctor", (), OPTIMIZER),
        ("void at::native::vectorized_elementwise_kernel", ("Optimizer.step#AdamW.step",), OPTIMIZER),
        ("triton_red_fused__log_softmax_nll_loss_forward_0", ("Torch-Compiled Region: 1/0",), LOSS),
        ("void at::native::reduce_kernel", ("shoal.reduce", "aten::add"), CLIPPING),
        ("void at::native::lpnorm", ("aten::_foreach_norm",), CLIPPING),
        ("triton_poi_fused__to_copy_add_mul_silu_3", ("CompiledFunction",), ELEMENTWISE),
        ("triton_poi_fused__scaled_dot_product_cudnn_attention_cat_1", ("CompiledFunction",), ELEMENTWISE),
        ("triton_tem_fused_mm_4", (), MATMUL),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16", (), ATTENTION),
        ("void pytorch_flash::flash_fwd_kernel", (), ATTENTION),
        ("void dot_do_o", ("aten::_scaled_dot_product_cudnn_attention_backward",), ATTENTION),
        ("nvjet_hsh_256x128_64x4_1x2_h_bz_coopA_NTN", (), MATMUL),
        ("sm90_xmma_gemm_bf16f32_f32f32_tn_n_tilesize128x128", ("aten::addmm",), MATMUL),
        ("cutlass3x_sm90_tensorop_gemm_e4m3", ("aten::_scaled_mm",), MATMUL),
        ("void at::native::indexSelectLargeIndex", ("aten::embedding",), OTHER),
        ("Memcpy HtoD (Pinned -> Device)", ("aten::copy_",), OTHER),
        ("aten::silu", (), ELEMENTWISE),
        ("MulBackward0", (), ELEMENTWISE),
        ("who knows", (), OTHER),
    ],
)
def test_work_is_told_by_its_name_and_by_what_launched_it(
    name: str, under: tuple[str, ...], category: str
) -> None:
    assert category_of(Work(name, 0, 1, under, 0)) == category


def test_every_category_but_communications_rest_has_a_rule() -> None:
    assert {rule.category for rule in RULES} == {
        MATMUL, ATTENTION, ELEMENTWISE, LOSS, OPTIMIZER, CLIPPING, SHARDING, OTHER, COMMUNICATION
    }  # fmt: skip


def test_a_real_trace_of_a_cpu_gives_each_operator_its_own_time(tmp_path: Path) -> None:
    weight = torch.nn.Linear(256, 256)
    optimizer = torch.optim.AdamW(weight.parameters(), fused=True)
    with profile() as profiler:
        for _ in range(2):
            with record_function(STEP):
                loss = weight(torch.ones(512, 256)).square().mean()
                loss.backward()
                optimizer.step()
    path = tmp_path / "trace.json.gz"
    profiler.export_chrome_trace(str(path))
    trace = read_trace(path)
    found = break_down(trace)
    assert all(found.by_category[name] > 0 for name in (MATMUL, ELEMENTWISE, OPTIMIZER))
    assert found.by_category[ATTENTION] == found.by_category[COMMUNICATION] == found.exposed_ms == 0
    assert found.computing_ms + found.gaps_ms == pytest.approx(found.step_ms)
    # one thread: no time is counted twice
    assert sum(found.by_category.values()) == pytest.approx(found.computing_ms)
    assert found.step_ms <= trace.marks[-1].end - trace.marks[0].start


def test_nested_operators_share_their_time_out() -> None:
    events = [mark(STEP, 0, 10), host("aten::linear", 1, 9), host("aten::mm", 2, 5), host("aten::t", 5, 6)]
    work = trace_of(events).work
    assert [(w.name, w.start, w.end) for w in work] == [
        ("aten::linear", 1, 2), ("aten::mm", 2, 5), ("aten::t", 5, 6), ("aten::linear", 6, 9)
    ]  # fmt: skip
    assert work[1].under == (STEP, "aten::linear")


def test_a_trace_without_a_marked_step_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no annotation 'shoal\.step'"):
        break_down(trace_of([host("aten::mm", 0, 1)]))
    with pytest.raises(ValueError, match="no work in its last step"):
        break_down(trace_of([mark(STEP, 0, 1)]))
    path = tmp_path / "no.json.gz"
    path.write_bytes(gzip.compress(json.dumps([1]).encode()))
    with pytest.raises(ValueError, match="is no Chrome trace"):
        read_trace(path)


def test_intervals_that_touch_or_hold_each_other_are_covered_once() -> None:
    assert covered([]) == 0
    assert covered([(3, 4), (0, 10), (10, 11), (20, 21)]) == 12


def test_the_table_over_ranks_has_the_median_and_the_slowest_rank() -> None:
    ranks = [
        Breakdown(100.0, dict.fromkeys({MATMUL, *(r.category for r in RULES)}, 1.0), 90.0, exposed, 2.0, [])
        for exposed in (4.0, 9.0, 5.0)
    ]
    lines = {line.name: line for line in over_ranks(ranks)}
    assert lines[EXPOSED][1:] == (5.0, 9.0, 1, 0.05)
    assert lines[GAPS].share == 0.02
    assert lines["step"].median == 100.0
