"""A step's operations are those that its matrix multiplications take, and MFU is their rate over the peak."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import IterableDataset, TensorDataset

from shoal.data.batches import Datasets, open_dataset
from shoal.job import Data, Job, Model, Train
from shoal.models.build import builder
from shoal.models.llama import Llama
from shoal.models.moe_presets import MoeDims
from shoal.models.presets import LlamaDims
from shoal.train.flops import counted_flops, llama_flops_per_token, moe_flops_per_token
from shoal.train.objective import NextToken, Supervised
from shoal.train.rates import Rates, rates

PEAK = 1e12


def matrix_flops(dims: LlamaDims, length: int) -> float:
    """Multiply-adds x 2 of one token's forward, product by product."""
    width = dims.dim // dims.heads
    attention = dims.dim * width * (2 * dims.heads + 2 * dims.kv_heads)
    scores = 2 * length * dims.heads * width  # query x key, weights x value
    return 2 * (dims.layers * (attention + scores + 3 * dims.dim * dims.ffn) + dims.dim * dims.vocab)


@pytest.mark.parametrize("tied", [True, False])
def test_operations_of_llama_are_three_forwards_of_its_products(tied: bool) -> None:
    dims = LlamaDims(
        dim=512, layers=4, heads=8, kv_heads=2, ffn=1376, vocab=4096, tied=tied, rope_theta=1e4, norm_eps=1e-5
    )
    # norms are counted as weights by the usual formula and are no products: 4 x 2 x 512 of 16 M
    assert llama_flops_per_token(dims, 256) == pytest.approx(3 * matrix_flops(dims, 256), rel=1e-3)


def test_operations_of_experts_are_those_that_a_token_goes_to() -> None:
    base = LlamaDims(
        dim=512, layers=4, heads=8, kv_heads=2, ffn=300, vocab=4096, tied=True, rope_theta=1e4, norm_eps=1e-5
    )
    dims = MoeDims(base, experts=16, top_k=3, expert_ffn=500, scoring="softmax", balance_rate=0.0)
    busy = base._replace(ffn=300 + 3 * 500)  # as wide as the shared experts and those of a token together
    router = 4 * 2 * 512 * 16
    assert moe_flops_per_token(dims, 256) == pytest.approx(3 * (matrix_flops(busy, 256) + router), rel=1e-3)


def test_a_model_that_is_not_ours_is_counted_by_running_it_on_the_meta_device() -> None:
    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(20, 30), nn.ReLU(), nn.Linear(30, 5))

    batch = (torch.zeros(4, 20), torch.zeros(4, dtype=torch.long))
    forward = 2 * 4 * (20 * 30 + 30 * 5)
    assert counted_flops(build, Supervised(F.cross_entropy), batch) == 3 * forward


def test_counting_agrees_with_the_formula_of_llama() -> None:
    dims = LlamaDims(
        dim=64, layers=2, heads=4, kv_heads=4, ffn=192, vocab=300, tied=False, rope_theta=1e4, norm_eps=1e-5
    )
    batch = {"tokens": torch.zeros(2, 16, dtype=torch.long)}
    counted = counted_flops(lambda: Llama(dims), NextToken(), batch)
    assert counted == pytest.approx(llama_flops_per_token(dims, 16) * 32, rel=0.01)


def test_a_model_that_does_not_run_on_the_meta_device_has_no_count() -> None:
    class Data_(nn.Module):  # noqa: N801
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * x.sum().item()

    assert counted_flops(Data_, Supervised(F.mse_loss), (torch.zeros(2), torch.zeros(2))) is None


def text_rates(device_flops: float | None, devices: int = 2) -> Rates:
    job = Job(
        model=Model(preset="1m"),
        data=Data(source="synthetic", vocab=300, seq_len=32),
        train=Train(global_batch=8),
    )
    datasets = open_dataset(job.data, 0, None)
    return rates(job, builder(job.model, datasets.vocab), NextToken(), datasets, device_flops, devices)


def test_text_is_told_in_tokens_of_the_global_batch() -> None:
    found = text_rates(PEAK)
    assert (found.unit, found.usual_weight, found.peak_flops) == ("tokens", 256.0, 2 * PEAK)
    assert found.flops_per_step
    assert found.mfu(0.5) == pytest.approx(found.flops_per_step / 0.5 / (2 * PEAK))


def test_a_model_of_another_family_is_counted_on_a_sample_of_the_text(tmp_path: Path) -> None:
    config = {"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    config |= {
        "num_key_value_heads": 4,
        "intermediate_size": 192,
        "vocab_size": 300,
        "tie_word_embeddings": False,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    dims = LlamaDims(
        dim=64, layers=2, heads=4, kv_heads=4, ffn=192, vocab=300, tied=False, rope_theta=1e4, norm_eps=1e-5
    )
    job = Job(
        model=Model(family=f"hf:{tmp_path}"),
        data=Data(source="synthetic", vocab=300, seq_len=32),
        train=Train(global_batch=8),
    )
    datasets = open_dataset(job.data, 0, None)
    found = rates(job, builder(job.model, datasets.vocab), NextToken(), datasets, PEAK, 1)
    assert found.flops_per_step == pytest.approx(llama_flops_per_token(dims, 32) * 8 * 32, rel=0.02)


def test_mfu_is_left_out_where_the_peak_is_not_known_or_no_time_passed() -> None:
    assert text_rates(None).mfu(1.0) is None
    assert text_rates(PEAK).mfu(0.0) is None


class Stream(IterableDataset):
    def __iter__(self) -> Any:
        return iter([(torch.zeros(20), 0)])


@pytest.mark.parametrize("stream", [True, False])
def test_a_dataset_of_ones_own_is_told_in_samples_and_a_stream_is_not_read(stream: bool) -> None:
    train = Stream() if stream else TensorDataset(torch.zeros(9, 20), torch.zeros(9, dtype=torch.long))
    job = Job(model=Model(family="torch.nn:Linear"), train=Train(global_batch=6))
    datasets = Datasets(train, None, None, None)
    found = rates(job, lambda: nn.Linear(20, 3), Supervised(F.cross_entropy), datasets, PEAK, 1)
    assert (found.unit, found.usual_weight) == ("samples", 6.0)
    assert found.flops_per_step == (None if stream else 3 * 6 * 2 * 20 * 3)
