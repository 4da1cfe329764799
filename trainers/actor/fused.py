"""Functions of tensors, compiled where that makes a difference."""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch

_RECOMPILATIONS = 64
"""Kinds of arguments that a function is compiled for: with gradients and without, models of several shapes."""


def fused(function: Callable[..., Any], device: torch.device) -> Callable[..., Any]:
    """A function of tensors as a few kernels of a GPU; elsewhere as it is."""
    return _whole(function) if device.type == "cuda" else function


def compiled(function: Callable[..., Any], *, whole: bool = False) -> Callable[..., Any]:
    """A function that is compiled when it is called; whole: or fails, if a part of it cannot be."""
    torch._dynamo.config.recompile_limit = _RECOMPILATIONS
    return torch.compile(function, fullgraph=whole)


@cache
def _whole(function: Callable[..., Any]) -> Callable[..., Any]:
    # What is not compiled is not slower by a little: flex attention would be a product of all tokens with all.
    return compiled(function, whole=True)
