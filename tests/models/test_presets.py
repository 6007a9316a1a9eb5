"""Dimensions by name: published sizes, and every mistake named with what would work."""

from __future__ import annotations

import pytest
import torch

from shoal.job import Model
from shoal.models.llama import Llama
from shoal.models.presets import PRESET_NAMES, num_parameters, resolve

PUBLISHED = {  # model cards: meta-llama/Llama-3.2-1B, 3.2-3B, 3.1-8B, 3.1-70B, 3.1-405B
    "1b": 1_235_814_400,
    "3b": 3_212_749_824,
    "8b": 8_030_261_248,
    "70b": 70_553_706_496,
    "405b": 405_853_388_800,
}


@pytest.mark.parametrize("preset", PRESET_NAMES)
@pytest.mark.parametrize("tied", [None, True, False])
def test_num_parameters_counts_what_the_model_has(preset: str, tied: bool | None) -> None:
    dims = resolve(Model(preset=preset, tied=tied), vocab=4096)
    with torch.device("meta"):
        model = Llama(dims)
    assert sum(parameter.numel() for parameter in model.parameters()) == num_parameters(dims)


@pytest.mark.parametrize("preset", PUBLISHED)
def test_published_models_have_their_published_size(preset: str) -> None:
    assert num_parameters(resolve(Model(preset=preset))) == PUBLISHED[preset]


@pytest.mark.parametrize("preset", PRESET_NAMES)
def test_a_name_tells_the_size_within_a_third(preset: str) -> None:
    size = float(preset[:-1]) * {"m": 1e6, "b": 1e9}[preset[-1]]
    assert num_parameters(resolve(Model(preset=preset), vocab=4096)) == pytest.approx(size, rel=0.34)


def test_a_key_of_ones_own_goes_before_the_preset_and_the_rest_stays() -> None:
    preset, own = resolve(Model(preset="5m"), 512), resolve(Model(preset="5m", layers=2, norm_eps=1e-6), 512)
    assert own == preset._replace(layers=2, norm_eps=1e-6)


@pytest.mark.parametrize("dim", [64, 128, 320, 4096])
def test_a_width_alone_is_enough(dim: int) -> None:
    dims = resolve(Model(dim=dim), vocab=512)
    assert dims.dim == dim
    assert dims.head_dim == 64
    assert dims.ffn % 32 == 0
    assert 8 / 3 <= dims.ffn / dim < 8 / 3 + 32 / dim


def test_the_vocabulary_is_the_tables_or_the_presets_or_the_tokenizers() -> None:
    assert resolve(Model(preset="1m"), 500).vocab == 500
    assert resolve(Model(preset="1b"), 500).vocab == 128_256
    assert resolve(Model(preset="1b", vocab=600), 500).vocab == 600


@pytest.mark.parametrize(
    ("table", "named"),
    [
        ({"preset": "6m"}, r"model\.preset = '6m' is unknown; presets: 1m, 2m, 5m"),
        (
            {"dim": 96, "heads": 5},
            r"model\.heads = 5 does not divide model\.dim = 96; such as \[3, 4, 6\] do",
        ),
        ({"dim": 6, "heads": 2}, r"model\.dim / model\.heads = 3 must be even"),
        (
            {"heads": 4, "kv_heads": 3},
            r"model\.kv_heads = 3 does not divide model\.heads = 4; \[1, 2, 4\] do",
        ),
        ({"vocab": 100}, r"model\.vocab = 100 is smaller than the tokenizer's 512; leave model\.vocab out"),
    ],
)
def test_impossible_dimensions_are_named_with_what_would_work(table: dict[str, object], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        resolve(Model.model_validate(table), vocab=512)
