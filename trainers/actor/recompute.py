"""Activation checkpointing: what the backward pass computes again instead of keeping it.

A layer runs again with the arguments that it had, so what sees what, and which experts are replayed, must be arguments
of it or of what it calls.
"""

from functools import partial
from typing import Any, Literal

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

Mode = Literal["none", "selective", "full"]
_KEPT = {
    getattr(torch.ops.aten, name).default
    for name in ("mm", "addmm", "bmm", "_grouped_mm", "_scaled_dot_product_flash_attention",
                 "_scaled_dot_product_efficient_attention", "_scaled_dot_product_cudnn_attention",
                 "_scaled_dot_product_flash_attention_for_cpu")
    if hasattr(torch.ops.aten, name)
} | {torch.ops.higher_order.flex_attention}


def recompute(layer: nn.Module, mode: Mode) -> None:
    """Keep nothing of a layer but its input ("full"), or the results of matrix products and attention ("selective").

    Call it before the layer is sharded.
    """
    if mode == "none":
        return
    contexts = {"context_fn": partial(create_selective_checkpoint_contexts, _policy)} if mode == "selective" else {}
    # Nothing in a layer is random; and a wrapper around it would change the names of its parameters.
    layer.forward = partial(checkpoint, layer.forward, use_reentrant=False, preserve_rng_state=False, **contexts)


def _policy(_context: Any, operator: Any, *_: Any, **__: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operator in _KEPT else CheckpointPolicy.PREFER_RECOMPUTE
