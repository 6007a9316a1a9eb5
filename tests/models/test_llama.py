"""`Llama` computes what a slow and obvious implementation does."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from shoal.models.llama import Llama
from shoal.models.presets import LlamaDims

DIMS = LlamaDims(
    dim=24, layers=2, heads=6, kv_heads=2, ffn=40, vocab=31, tied=False, rope_theta=100.0, norm_eps=1e-3
)
LENGTH = 13


def llama(dims: LlamaDims = DIMS) -> Llama:
    """A model in fp64 whose weights are all random, norms included."""
    torch.manual_seed(0)
    model = Llama(dims).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.0, 0.3)
    return model


def tokens(samples: int = 2, length: int = LENGTH) -> Tensor:
    return torch.randint(0, DIMS.vocab, (samples, length), generator=torch.Generator().manual_seed(1))


def slow_logits(model: Llama, ids: list[int]) -> Tensor:
    """Logits of one document, token by token, head by head, from the weights by name."""
    dims, weights = model.dims, dict(model.named_parameters(remove_duplicate=False))
    width, group = dims.dim // dims.heads, dims.heads // dims.kv_heads

    def norm(x: Tensor, name: str) -> Tensor:
        return x / math.sqrt(float((x * x).mean()) + dims.norm_eps) * weights[name]

    def turned(vector: Tensor, position: int) -> Tensor:
        pairs = torch.complex(vector[: width // 2], vector[width // 2 :])
        angles = [position / dims.rope_theta ** (2 * pair / width) for pair in range(width // 2)]
        turns = torch.tensor([complex(math.cos(a), math.sin(a)) for a in angles], dtype=torch.complex128)
        return torch.cat(((pairs * turns).real, (pairs * turns).imag))

    stream = [weights["embedding.weight"][token] for token in ids]
    for layer in range(dims.layers):
        at = f"blocks.{layer}."
        seen = [norm(x, f"{at}attention_norm.weight") for x in stream]
        query, key, value = (
            [(weights[f"{at}attention.{name}.weight"] @ x).split(width) for x in seen]
            for name in ("query", "key", "value")
        )
        for now in range(len(ids)):
            mixed = []
            for head in range(dims.heads):
                mine = turned(query[now][head], now)
                scores = [
                    float(mine @ turned(key[past][head // group], past)) / math.sqrt(width)
                    for past in range(now + 1)
                ]
                shares = [math.exp(score - max(scores)) for score in scores]
                values = torch.stack([value[past][head // group] for past in range(now + 1)])
                mixed.append(torch.tensor(shares, dtype=values.dtype) @ values / sum(shares))
            stream[now] = stream[now] + weights[f"{at}attention.output.weight"] @ torch.cat(mixed)
        for now, x in enumerate(stream):
            y = norm(x, f"{at}feed_forward_norm.weight")
            gate = weights[f"{at}feed_forward.gate.weight"] @ y
            up = weights[f"{at}feed_forward.up.weight"] @ y
            stream[now] = x + weights[f"{at}feed_forward.down.weight"] @ (gate / (1 + torch.exp(-gate)) * up)
    return torch.stack([weights["head.weight"] @ norm(x, "norm.weight") for x in stream])


# The rotary table is fp32 in every precision; given these angles, all else agrees to fp64's rounding. Positions below 13
# and a base of 100 leave an error of 13 x 2^-24 in an angle.
ROTARY_ERROR = 13 * 2**-24


@torch.no_grad()
@pytest.mark.parametrize("kv_heads", [1, 2, 6])
@pytest.mark.parametrize("tied", [True, False])
def test_logits_are_those_of_the_slow_model(
    kv_heads: int, tied: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shoal.models.llama.rotary_table", exact_rotary_table)
    model = llama(DIMS._replace(kv_heads=kv_heads, tied=tied))
    batch = tokens()
    expected = torch.stack([slow_logits(model, row) for row in batch.tolist()])
    torch.testing.assert_close(model(batch), expected, rtol=0, atol=1e-10)


def exact_rotary_table(positions: Tensor, head_dim: int, theta: float) -> Tensor:
    """cos and sin of every angle by Python's own floats, in the shape (2, [B,] T, 1, E/2)."""
    angles = [
        [position / theta ** (2 * pair / head_dim) for pair in range(head_dim // 2)]
        for position in positions.flatten().tolist()
    ]
    table = torch.tensor(angles, dtype=torch.float64).view(*positions.shape, 1, head_dim // 2)
    return torch.stack((table.cos(), table.sin()))


@torch.no_grad()
def test_the_fp32_rotary_table_costs_no_more_than_its_rounding() -> None:
    model, batch = llama(), tokens()
    expected = torch.stack([slow_logits(model, row) for row in batch.tolist()])
    found = model(batch)
    # a query and a key are turned in each of 2 layers
    assert (found - expected).abs().max() < 4 * ROTARY_ERROR * float(expected.abs().max())


@torch.no_grad()
def test_a_packed_row_gives_each_document_what_it_gets_alone() -> None:
    model = llama()
    lengths = [5, 1, 7]
    row = tokens(1, sum(lengths))
    documents = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))[None]
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    packed = model(row, positions, documents)
    alone = torch.cat([model(part) for part in row.split(lengths, dim=1)], dim=1)
    torch.testing.assert_close(packed, alone, rtol=0, atol=1e-12)
    assert (model(row) - alone).abs().max() > 1e-3, "without documents, a row is one text"


@torch.no_grad()
def test_no_token_sees_a_later_one() -> None:
    model, batch = llama(), tokens()
    changed = batch.clone()
    changed[:, 8:] = (changed[:, 8:] + 1) % DIMS.vocab
    before, after = model(batch), model(changed)
    assert torch.equal(before[:, :8], after[:, :8])
    assert not torch.isclose(before[:, 8:], after[:, 8:]).all(-1).any()


@torch.no_grad()
def test_only_the_distance_of_positions_counts() -> None:
    model, batch = llama(), tokens()
    shifted = model(batch, torch.arange(LENGTH) + 7)
    # fp32 angles of up to 20 radians
    torch.testing.assert_close(model(batch), shifted, rtol=0, atol=1e-4)


def test_a_tied_head_is_the_embedding() -> None:
    tied, own = llama(DIMS._replace(tied=True)), llama()
    assert tied.head.weight.data_ptr() == tied.embedding.weight.data_ptr()
    assert own.head.weight.data_ptr() != own.embedding.weight.data_ptr()
    tied(tokens()).sum().backward()
    assert tied.head.weight.grad is tied.embedding.weight.grad is not None


def test_every_parameter_takes_part() -> None:
    model = llama()
    model(tokens()).square().sum().backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None and parameter.grad.abs().sum() > 0, name


def test_initial_weights_have_the_stated_spread_and_depend_on_the_generator_alone() -> None:
    model = Llama(DIMS)
    for name, spread in (
        ("blocks.0.attention.query.weight", 0.02),
        ("blocks.1.attention.output.weight", 0.02 / math.sqrt(2 * DIMS.layers)),
        ("blocks.1.feed_forward.down.weight", 0.02 / math.sqrt(2 * DIMS.layers)),
    ):
        first, second = torch.empty(200, 200), torch.ones(200, 200)
        for tensor in (first, second):
            model.init_parameter(name, tensor, torch.Generator().manual_seed(3))
        assert torch.equal(first, second)
        # 40,000 draws: the sample's deviation is within 2% of the true one
        assert float(first.std()) == pytest.approx(spread, rel=0.02)
        assert abs(float(first.mean())) < 5 * spread / 200
    scale = torch.empty(24)
    model.init_parameter("norm.weight", scale, torch.Generator())
    assert torch.equal(scale, torch.ones(24))


@torch.no_grad()
def test_a_random_model_predicts_all_tokens_alike() -> None:
    dims = DIMS._replace(vocab=512, dim=64, heads=4)
    model = Llama(dims)
    for name, parameter in model.named_parameters():
        model.init_parameter(name, parameter, torch.Generator().manual_seed(len(name)))
    batch = torch.randint(0, 512, (4, 32), generator=torch.Generator().manual_seed(0))
    loss = torch.nn.functional.cross_entropy(model(batch).flatten(0, 1), batch.flatten())
    assert float(loss) == pytest.approx(math.log(512), rel=0.02)
