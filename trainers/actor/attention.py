"""Attention over packed sequences, for any transformers model whose layers ask the attention interface.

Invariant: token q sees token k if and only if k <= q < ends[k]. Rows side by side, and tries in depth-first order, are
both that. What sees what is an argument of the forward pass, so layers that are recomputed in the backward pass see
what they saw.
"""

from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention
from transformers import AttentionInterface

from molt_gym.errors import ConfigError

from ..architecture import check_attention
from .fused import fused

if TYPE_CHECKING:
    from .context import Context

ATTENTION = "molt_gym_packed"
"""Name of this attention among those of transformers; the model must be called with `visible`."""
BLOCK = 128
"""Tokens of a block of the sparse mask."""
_NARROWEST = 16
"""Heads that are narrower are padded for flex attention."""
_DENSE = 256
"""Neighbours that see nothing of each other are still computed together up to so many tokens."""


class Visible:
    """What sees what in one packed sequence: `ends` [T], on the device of the model.

    No dataclass, as FSDP makes each layer a new one of those, for which all would be worked out again.
    """

    def __init__(self, ends: Tensor) -> None:
        self.ends = ends
        # Layers that are compiled cannot work it out.
        _ = self.blocks if ends.device.type == "cuda" else None

    @staticmethod
    def multiple(device: torch.device) -> int:
        """What the length of a sequence has to be a multiple of there."""
        return BLOCK if device.type == "cuda" else 1

    @cached_property
    def stretches(self) -> list[tuple[int, int, Tensor | None]]:
        """Parts (start, stop, [stop - start]² bool) that see nothing of each other; no mask where all is causal."""
        ends = self.ends.cpu()
        size = len(ends)
        free = ends.cummax(0).values[:-1] <= torch.arange(1, size)
        cuts = [0, *(free.nonzero().flatten() + 1).tolist(), size]
        kept = [0]
        for cut, following in zip(cuts[1:-1], cuts[2:], strict=True):
            if following - kept[-1] > _DENSE:
                kept.append(cut)
        found = []
        for start, stop in zip(kept, [*kept[1:], size], strict=True):
            places = torch.arange(start, stop)
            mask = (places <= places[:, None]) & (places[:, None] < ends[start:stop])
            causal = bool((ends[start:stop] == stop).all())
            found.append((start, stop, None if causal else mask.to(self.ends.device)))
        return found

    @cached_property
    def blocks(self) -> BlockMask:
        """For flex attention; the length must be a multiple of `BLOCK`."""
        ends, size = self.ends, len(self.ends)
        parts = ends.view(-1, BLOCK)
        number = torch.arange(len(parts), device=ends.device)
        below = number <= number[:, None]
        seen = below & (parts.amax(1) > number[:, None] * BLOCK)
        whole = (number < number[:, None]) & (parts.amin(1) >= (number[:, None] + 1) * BLOCK)

        def listed(chosen: Tensor) -> tuple[Tensor, Tensor]:
            order = (~chosen).to(torch.int32).argsort(dim=-1, stable=True)
            return chosen.sum(-1, dtype=torch.int32)[None, None], order.to(torch.int32)[None, None]

        def sees(_batch: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            return (key <= query) & (query < ends[key])

        return BlockMask.from_kv_blocks(*listed(seen & ~whole), *listed(whole), BLOCK_SIZE=BLOCK, mask_mod=sees,
                                        seq_lengths=(size, size))


def attend(
    layer: torch.nn.Module | None, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None = None, *,
    visible: Visible | None = None, context: "Context | None" = None, scaling: float | None = None, **asked: Any,
) -> tuple[Tensor, None]:
    """Grouped-query attention: query [1, H, T, D], key and value [1, G, T, D] -> [1, T, H, D].

    context: the ranks that have the other tokens of the sequence, which `visible` is of as a whole.

    Raises:
        ConfigError: the layer asks for another attention.
    """
    check_attention(layer, {**asked, "attention_mask": attention_mask})
    if visible is None:
        raise ConfigError(f"model: {type(layer).__name__} is not handed what is packed; choose another model")
    if context is not None:
        query, key, value = context.to_heads(query, key, value)
    run = sparse if query.device.type == "cuda" else dense
    out = run(query, key, value, visible, scaling)
    return (out if context is None else context.to_tokens(out)).transpose(1, 2).contiguous(), None


@torch.compiler.disable
def dense(query: Tensor, key: Tensor, value: Tensor, visible: Visible, scaling: float | None) -> Tensor:
    """By torch's own attention, each stretch for itself; [1, H, T, D]."""
    return torch.cat([
        F.scaled_dot_product_attention(
            query[:, :, start:stop], key[:, :, start:stop], value[:, :, start:stop], attn_mask=mask,
            is_causal=mask is None, scale=scaling, enable_gqa=query.shape[1] != key.shape[1])
        for start, stop, mask in visible.stretches], 2)


def sparse(query: Tensor, key: Tensor, value: Tensor, visible: Visible, scaling: float | None) -> Tensor:
    """By flex attention, which computes only blocks in which something is seen; [1, H, T, D]."""
    heads, groups = query.shape[1], key.shape[1]
    if heads & (heads - 1):
        # The kernels take heads of a group together only where their number is a power of two.
        key, value = (tensor.repeat_interleave(heads // groups, 1) for tensor in (key, value))
    width, kept = query.shape[-1], value.shape[-1]
    if min(width, kept) < _NARROWEST:
        query, key, value = (F.pad(part, (0, max(0, _NARROWEST - part.shape[-1]))) for part in (query, key, value))
    run = flex_attention if torch.compiler.is_compiling() else fused(flex_attention, query.device)
    out = run(query, key, value, block_mask=visible.blocks, scale=scaling or width**-0.5,
              enable_gqa=heads != key.shape[1])
    return out[..., :kept]


AttentionInterface.register(ATTENTION, attend)
