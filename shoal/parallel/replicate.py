"""The replicate axis: copies of the whole model whose gradients are all-reduced by torch's DistributedDataParallel."""

from __future__ import annotations

import inspect
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from shoal.plan import Plan


def apply_replicate(
    model: nn.Module, plan: Plan, mesh: DeviceMesh, *, may_skip_parameters: bool
) -> nn.Module:
    """Wrap a whole model so that its gradients are the sums over the replicate axis.

    DistributedDataParallel averages; `Step` multiplies back. Buffers are not sent in forward; `synchronise_buffers` makes
    them equal before they are evaluated or saved.

    Args:
        may_skip_parameters: a forward may leave parameters unused, perhaps others on each rank.

    [Note: buckets that stay] After the first backward DistributedDataParallel puts gradients into other buckets, in the order in
    which they came. From three ranks on a sum depends on its place in a bucket, so a run that goes on would have other bits in
    its first step than one that nothing disturbed. It leaves them as they are where parameters may be unused, which on a CPU
    costs next to nothing. On GPUs the faster buckets are worth more than the last bit.
    """
    if plan.replicate == 1:
        return model
    keeps_buckets = plan.replicate > 2 and mesh.device_type == "cpu"
    return DistributedDataParallel(
        model,
        process_group=mesh["replicate"].get_group(),
        gradient_as_bucket_view=True,
        find_unused_parameters=may_skip_parameters or keeps_buckets,
        **_no_buffer_broadcast(),
    )


def core(model: nn.Module) -> nn.Module:
    """The module under a data-parallel wrapper, whose parameter names are the model's own."""
    return model.module if isinstance(model, DistributedDataParallel) else model


def _no_buffer_broadcast() -> dict[str, Any]:
    """torch 2.13 renamed `broadcast_buffers` to `forward_sync_buffers` and warns of the old name."""
    names = inspect.signature(DistributedDataParallel.__init__).parameters
    return {"forward_sync_buffers" if "forward_sync_buffers" in names else "broadcast_buffers": False}
