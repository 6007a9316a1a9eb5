"""The mixture-of-experts family: what its definition says, token by token; balance by the bias; sizes and mistakes by name."""

from __future__ import annotations

import pytest
import torch
from pydantic import ValidationError

from shoal.job import Model
from shoal.models.build import builder
from shoal.models.grouped import grouped_matmul, take_rows
from shoal.models.moe import MixtureOfExperts, Moe
from shoal.models.moe_presets import MOE_PRESET_NAMES, MoeDims, num_moe_parameters, resolve_moe
from shoal.models.presets import LlamaDims
from tests.models.naive_moe import naive_moe

BASE = LlamaDims(
    dim=8, layers=2, heads=2, kv_heads=1, ffn=6, vocab=20, tied=True, rope_theta=1e4, norm_eps=1e-5
)
DIMS = MoeDims(BASE, experts=5, top_k=2, expert_ffn=7, scoring="softmax", balance_rate=0.01)


def layer_of(dims: MoeDims, seed: int = 0) -> MixtureOfExperts:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        layer = MixtureOfExperts(dims).double()
        for parameter in layer.parameters():
            torch.nn.init.normal_(parameter, std=0.5)
        layer.router.bias.copy_(torch.randn(dims.experts) * 0.2)
    return layer


def tokens(seed: int = 1) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(3, 4, BASE.dim, dtype=torch.float64, generator=generator).requires_grad_()


@pytest.mark.parametrize(
    "dims",
    [
        DIMS,
        DIMS._replace(scoring="sigmoid", top_k=3),
        DIMS._replace(top_k=1, base=BASE._replace(ffn=0)),
        DIMS._replace(top_k=5),
    ],
    ids=["softmax", "sigmoid", "one expert a token and none shared", "every expert"],
)
def test_a_layer_is_its_definition_in_value_and_gradient(dims: MoeDims) -> None:
    layer, x = layer_of(dims), tokens()
    toward = torch.randn(x.shape, dtype=x.dtype, generator=torch.Generator().manual_seed(2))
    expected, counts = naive_moe(layer, x)
    wanted = torch.autograd.grad((expected * toward).sum(), [x, *layer.parameters()])
    output = layer(x)
    found = torch.autograd.grad((output * toward).sum(), [x, *layer.parameters()])
    torch.testing.assert_close(output, expected, rtol=1e-12, atol=1e-12)
    for gradient, right in zip(found, wanted, strict=True):
        torch.testing.assert_close(gradient, right, rtol=1e-12, atol=1e-12)
    assert layer.router.load.tolist() == counts


def test_the_bias_decides_who_is_taken_and_not_the_weights() -> None:
    layer, x = layer_of(DIMS), tokens().flatten(0, 1)
    with torch.no_grad():
        layer.router.bias.zero_()
        plain = layer.router(x)
        layer.router.bias.fill_(0.5)  # the same for all
        lifted = layer.router(x)
        layer.router.bias[3] = 100.0
        forced = layer.router(x)
    assert torch.equal(plain.expert, lifted.expert) and torch.equal(plain.weight, lifted.weight)
    assert bool((forced.expert == 3).any(-1).all())
    torch.testing.assert_close(forced.weight.sum(-1), torch.ones(len(x), dtype=torch.float64))


def test_the_bias_moves_by_its_rate_towards_the_mean_and_counts_begin_anew() -> None:
    router = layer_of(DIMS).router
    router.bias.zero_()
    router.load.copy_(torch.tensor([10, 4, 8, 8, 10]))  # a mean of 8
    router.rebalance(torch.tensor(False))
    assert router.bias.tolist() == [-0.01, 0.01, 0.0, 0.0, -0.01]
    assert router.load.tolist() == [0] * 5


def test_a_step_that_is_left_out_moves_no_bias_and_counts_begin_anew() -> None:
    router = layer_of(DIMS).router
    before = router.bias.clone()
    router.load.copy_(torch.tensor([10, 4, 8, 8, 10]))
    router.rebalance(torch.tensor(True))
    assert torch.equal(router.bias, before)
    assert router.load.tolist() == [0] * 5


@pytest.mark.parametrize("how", ["evaluation", "no gradients", "not counting"])
def test_tokens_count_in_training_alone(how: str) -> None:
    layer = layer_of(DIMS)
    layer.train(how != "evaluation")
    layer.router.counting = how != "not counting"
    with torch.set_grad_enabled(how != "no gradients"):
        layer(tokens())
    assert layer.router.load.tolist() == [0] * 5


def test_moving_the_bias_evens_out_the_experts() -> None:
    layer = layer_of(DIMS._replace(balance_rate=0.02), seed=3)
    layer.router.bias.copy_(torch.tensor([0.0, 0.0, 0.5, 0.0, 0.0]))
    x = torch.randn(1, 400, BASE.dim, dtype=torch.float64, generator=torch.Generator().manual_seed(4))
    spread = []
    for _ in range(60):
        layer(x)
        load = layer.router.load.double()
        spread.append(float(load.max() / load.mean()))
        layer.router.rebalance(torch.tensor(False))
    assert spread[0] > 1.5
    assert spread[-1] < 1.1


@pytest.mark.parametrize("counts", [[2, 0, 3], [0, 0, 5], [0, 0, 0]])
def test_groups_without_rows_have_gradient_zero(counts: list[int]) -> None:
    x = torch.randn(sum(counts), 4, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(3, 6, 4, dtype=torch.float64, requires_grad=True)
    output = grouped_matmul(x, weight, torch.tensor(counts))
    group = torch.arange(3).repeat_interleave(torch.tensor(counts))
    torch.testing.assert_close(output, torch.einsum("nk,nmk->nm", x, weight[group]))
    output.sum().backward()
    assert weight.grad is not None
    for index, count in enumerate(counts):
        assert bool(weight.grad[index].any()) == (count > 0)


@pytest.mark.parametrize("copies", [1, 3])
def test_rows_are_taken_as_an_index_takes_them(copies: int) -> None:
    x = torch.randn(4, 2, dtype=torch.float64, requires_grad=True)
    order = torch.randperm(4 * copies)
    assert torch.equal(take_rows(x, order, order.argsort(), copies), x.repeat_interleave(copies, 0)[order])
    assert torch.autograd.gradcheck(lambda x: take_rows(x, order, order.argsort(), copies), x)


@pytest.mark.parametrize("preset", MOE_PRESET_NAMES)
@pytest.mark.parametrize("shared", [None, 0, 2])
def test_num_parameters_counts_what_the_model_has(preset: str, shared: int | None) -> None:
    dims = resolve_moe(Model(family="moe", preset=preset, shared_experts=shared), vocab=4096)
    with torch.device("meta"):
        model = Moe(dims)
    assert sum(parameter.numel() for parameter in model.parameters()) == num_moe_parameters(dims)
    idle = dims.base.layers * (dims.experts - dims.top_k) * 3 * dims.base.dim * dims.expert_ffn
    assert num_moe_parameters(dims, active=True) == num_moe_parameters(dims) - idle


def test_mixtral_has_its_published_size() -> None:
    assert num_moe_parameters(resolve_moe(Model(family="moe", preset="8x7b"))) == 46_702_792_704


def test_a_family_is_built_with_the_keys_of_its_table() -> None:
    table = Model(family="moe", preset="4x1m", experts=6, top_k=3, expert_ffn=16, shared_experts=2, layers=1)
    with torch.device("meta"):
        model = builder(table, 300)()
    assert isinstance(model, Moe)
    layer = model.blocks[0].feed_forward
    assert isinstance(layer, MixtureOfExperts) and layer.shared is not None
    assert layer.experts.gate.shape == (6, 16, 128)
    assert layer.shared.gate.weight.shape == (32, 128)
    assert layer.router.top_k == 3


@pytest.mark.parametrize(
    ("table", "named"),
    [
        ({"preset": "5m"}, r"model\.preset = '5m' is unknown; presets: 4x1m, 8x5m"),
        ({"top_k": 9}, r"model\.top_k = 9 is more than model\.experts = 8; use 1 to 8"),
        ({"ffn": 64}, r"model\.ffn = 64 .* say model\.expert_ffn"),
        ({"heads": 3}, r"model\.heads = 3 does not divide model\.dim = 256"),
    ],
)
def test_impossible_dimensions_are_named_with_what_would_work(table: dict[str, object], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        resolve_moe(Model.model_validate({"family": "moe", **table}), vocab=512)


def test_keys_of_experts_are_refused_for_a_family_without_them() -> None:
    with pytest.raises(ValidationError, match=r"experts = 8 is for experts, and family 'llama' has none"):
        Model(experts=8)
