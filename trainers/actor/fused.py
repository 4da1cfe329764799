"""Functions of tensors, compiled where that makes a difference."""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch


def fused(function: Callable[..., Any], device: torch.device) -> Callable[..., Any]:
    """A function of tensors as a few kernels of a GPU; elsewhere as it is."""
    return _compiled(function) if device.type == "cuda" else function


@cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    # Without fullgraph, a few recompilations would silently end it: flex attention would become a product of all
    # tokens with all.
    return torch.compile(function, fullgraph=True)
