"""The product's initial weights in a peer's model, so that all rows start from equal ones."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from benchmarks.peers.mapping import Find, Whole
from benchmarks.peers.measure import Peer
from shoal.models.llama import Llama
from shoal.parallel.initialise import part_slices, seed_of


def whole_of(peer: Peer) -> Whole:
    """The product's initial values, by name; a head that is tied in the product is its embedding."""
    dims, seed = peer.setting.dims, peer.setting.job.train.seed
    with torch.device("meta"):
        product = Llama(dims)
    shapes = {name: parameter.shape for name, parameter in product.named_parameters()}

    def whole(name: str) -> Tensor:
        name = "embedding.weight" if dims.tied and name == "head.weight" else name
        tensor = torch.empty(shapes[name], dtype=torch.float32, device="cpu")
        product.init_parameter(name, tensor, torch.Generator().manual_seed(seed_of(seed, name)))
        return tensor

    return whole


@torch.no_grad()
def fill(model: nn.Module, peer: Peer, find: Find) -> None:
    """Set every parameter of a model; of a DTensor this rank's part."""
    whole = whole_of(peer)
    named = list(model.named_parameters())  # a tied weight comes once

    def value(item: tuple[str, nn.Parameter]) -> Tensor:
        tensor = find(item[0], whole)
        return tensor[part_slices(item[1])] if isinstance(item[1], DTensor) else tensor

    with ThreadPoolExecutor(max_workers=8) as pool:
        for (_, parameter), tensor in zip(named, pool.map(value, named), strict=True):
            local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
            local.copy_(tensor)
