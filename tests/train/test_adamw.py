"""The kernel of AdamW updates as torch does, and everything else is left to torch."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from shoal.job import Optimizer
from shoal.parallel.places import Ready
from shoal.train.adamw import ALIGNED, BLOCK, Tables, blocks_of, takes
from shoal.train.fused import make, update

CPU = torch.device("cpu")
on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="a GPU")
SHAPES = ((7,), (BLOCK,), (BLOCK + 1,), (3, 5000), (1,), (64, 4096))


@pytest.mark.parametrize("sizes", [[1], [4, 4], [5, 0, 2], [0, 9]])
def test_each_element_belongs_to_one_program(sizes: list[int]) -> None:
    found = blocks_of(sizes, 4, CPU)
    seen = []
    for program, part in enumerate(found.owners.tolist()):
        first = (program - int(found.begins[part])) * 4
        seen += [(part, at) for at in range(first, min(first + 4, int(found.sizes[part])))]
    assert seen == [(part, at) for part, size in enumerate(sizes) for at in range(size)]


def row(size: int, offset: int = 0) -> tuple[Tensor, ...]:
    return (*(torch.zeros(size + offset)[offset:] for _ in range(4)), torch.zeros(()))


def test_tables_are_made_anew_when_something_moved_and_else_kept() -> None:
    tables, rows = Tables(), [row(8), row(5000)]
    first = tables.of(0, rows)
    assert first.addresses.tolist() == [[*(tensor.data_ptr() for tensor in each), 0, 0] for each in rows]
    assert tables.of(0, rows) is first and first.aligned
    place = torch.zeros(5000, dtype=torch.bfloat16)
    placed = tables.of(0, rows, [None, place])
    assert placed.addresses[:, 5].tolist() == [0, place.data_ptr()]
    assert (first.kind, placed.kind) == (None, torch.bfloat16)
    assert not tables.of(0, rows, [None, place[1:]]).aligned
    assert tables.of(1, rows) is not first  # of another group
    moved = tables.of(0, [rows[0], row(5000)])
    assert moved.addresses.tolist() != first.addresses.tolist()
    assert moved.blocks is first.blocks  # of the same sizes
    assert tables.of(0, [row(9)]).blocks.sizes.tolist() == [9]


def test_parts_that_do_not_begin_at_16_bytes_are_read_otherwise() -> None:
    assert row(8, offset=1)[0].data_ptr() % ALIGNED
    assert not Tables().of(0, [row(8), row(8, offset=1)]).aligned


def optimizer_of(name: str, parts: dict[str, nn.Parameter]) -> torch.optim.Optimizer:
    settings = Optimizer.model_validate(
        {"name": name, "lr": 0.01, "weight_decay": 0.1, "schedule": "constant"}
    )
    return make(settings, parts, parts)


@pytest.mark.parametrize("name", ["adamw", "sgd"])
def test_what_is_not_on_a_gpu_is_left_to_torch(name: str) -> None:
    part = nn.Parameter(torch.ones(4, 4))
    part.grad = torch.ones(4, 4)
    made = optimizer_of(name, {"part": part})
    assert not takes(made)
    place = torch.zeros(16, dtype=torch.bfloat16)
    ready: Ready[Tensor] = Ready({part: place}, {part: (largest := torch.zeros(()))})
    update(made, 0.01, torch.tensor(1.0), torch.tensor(0.0), Tables(), ready)
    assert float(part.detach().max()) < 1
    assert torch.equal(place, part.detach().view(-1).bfloat16())
    assert largest == part.detach().abs().max()


def parts_of(offset: int) -> dict[str, nn.Parameter]:
    generator = torch.Generator("cuda").manual_seed(0)
    made = {}
    for number, shape in enumerate(SHAPES):
        size = torch.Size(shape).numel()
        flat = torch.randn(size + offset, device="cuda", generator=generator)
        made[str(number)] = nn.Parameter(flat[offset:].view(shape))
    return made


@on_gpu
@pytest.mark.parametrize("offset", [0, 1])  # 1: not aligned
@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float16])
def test_updates_are_those_of_torch(kind: torch.dtype, offset: int) -> None:
    """Roundings add up over the steps; those of fp32 are 6e-8 of a number."""
    ours, theirs = parts_of(offset), parts_of(offset)
    made, right, tables = optimizer_of("adamw", ours), optimizer_of("adamw", theirs), Tables()
    places: dict[Tensor, Tensor] = {part: part.detach().view(-1).to(kind) for part in ours.values()}
    largest: dict[Tensor, Tensor] = {part: torch.zeros((), device="cuda") for part in ours.values()}
    generator = torch.Generator("cuda").manual_seed(1)
    for step in range(8):
        skip = torch.tensor(float(step == 3), device="cuda")
        divide_by = torch.tensor(3.0 + step, device="cuda")
        for name, part in ours.items():
            part.grad = torch.randn(part.shape, device="cuda", generator=generator)
            theirs[name].grad = part.grad.clone()
        if step == 5:  # of a parameter that was not used
            ours["2"].grad = theirs["2"].grad = None
        if offset == 0:
            assert takes(made)
        before = {name: part.detach().clone() for name, part in ours.items()}
        update(made, 0.01, divide_by, skip, tables, Ready(places, largest))
        update(right, 0.01, divide_by, skip)
        assert all(torch.equal(part, before[name]) for name, part in ours.items()) == (step == 3)
        assert all(torch.equal(places[p], p.detach().view(-1).to(kind)) for p in ours.values())
        assert all(largest[p] == p.detach().abs().max() for p in ours.values() if p.grad is not None)
    for name, part in ours.items():
        torch.testing.assert_close(part, theirs[name], rtol=2e-6, atol=2e-7)
        for kind, value in made.state[part].items():
            torch.testing.assert_close(value, right.state[theirs[name]][kind], rtol=2e-6, atol=2e-7)


@on_gpu
def test_other_types_and_layouts_are_left_to_torch() -> None:
    for part in (
        nn.Parameter(torch.ones(4, 4, device="cuda", dtype=torch.float64)),
        nn.Parameter(torch.ones(4, 8, device="cuda").t()),
    ):
        part.grad = torch.ones_like(part)
        assert not takes(optimizer_of("adamw", {"part": part}))
