"""Whether this is a simulated world, in which tensors have shapes and types, and no values.

The planner runs the training step on fake tensors. What asks a tensor for a value says here what it takes instead.
"""

from __future__ import annotations

import torch


def is_simulated() -> bool:
    """Whether tensors that are made here and now have no values (torch's fake mode is on in this thread).

    Example:
        >>> is_simulated()
        False
    """
    key = torch._C._TorchDispatchModeKey.FAKE  # torch has no public way to ask
    return torch._C._get_dispatch_mode(key) is not None
