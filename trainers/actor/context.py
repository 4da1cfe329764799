"""Context parallelism after DeepSpeed-Ulysses (arXiv:2309.14509): ranks of a group share the tokens of a sequence.

Each rank holds an equal stretch of every sequence. Attention alone needs all of it: there, heads are exchanged for
tokens, so each rank sees the whole sequence for some of the heads. Invariants: a rank computes of its tokens what one
rank would; results are gathered before a loss is made of them, and each rank's gradients are those of its own tokens.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from .head import chunk_edges

if TYPE_CHECKING:
    from .packing import MicroBatch


@dataclass(frozen=True)
class Context:
    """This rank's place among the `size` ranks of `group`."""

    group: dist.ProcessGroup
    rank: int
    size: int

    def own(self, whole: Tensor) -> Tensor:
        """This rank's stretch of the last dimension, which must be a multiple of `size`."""
        return whole.chunk(self.size, -1)[self.rank]

    def to_heads(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """[1, H, T / size, D], twice [1, G, T / size, D] -> all T tokens of H / size and at least G / size heads."""
        if (copies := self.size // key.shape[1]) > 1:
            # Fewer of them than ranks: each goes to several.
            key, value = (tensor.repeat_interleave(copies, 1) for tensor in (key, value))
        query, key, value = (_Exchange.apply(tensor, self.group, 1, 2) for tensor in (query, key, value))
        return query, key, value

    def to_tokens(self, out: Tensor) -> Tensor:
        """[1, H / size, T, D] -> [1, H, T / size, D]."""
        return _Exchange.apply(out, self.group, 2, 1)


@dataclass(frozen=True)
class Share:
    """This rank's stretch of a micro-batch, and the trainable tokens that follow a position in it.

    input_ids, position_ids: [..., T / size]. sources, source_of, by_source, edges, targets: as in the micro-batch, of n
    tokens. mine: [n] their places among the N of the micro-batch. experts: [T / size, layers, top_k], if there are any.
    """

    context: Context
    input_ids: Tensor
    position_ids: Tensor
    sources: Tensor
    source_of: Tensor
    by_source: Tensor
    edges: list[int]
    targets: Tensor
    mine: Tensor
    count: int
    experts: Tensor | None

    @classmethod
    def of(cls, batch: "MicroBatch", context: Context) -> "Share":
        """Of a micro-batch whose length is a multiple of `context.size`."""
        length = batch.input_ids.shape[-1] // context.size
        start = context.rank * length
        own = (batch.sources >= start) & (batch.sources < start + length)
        sources, mine = batch.sources[own] - start, own[batch.source_of].nonzero().flatten()
        source_of = batch.source_of[mine] - (batch.sources < start).sum()
        by_source = source_of.argsort(stable=True)
        edges = chunk_edges(source_of[by_source].cpu(), len(sources))
        return cls(context, context.own(batch.input_ids), context.own(batch.position_ids), sources, source_of,
                   by_source, edges, batch.targets[mine], mine, len(batch.targets),
                   None if batch.experts is None else batch.experts[start : start + length])

    def together(self, part: Tensor) -> Tensor:
        """[n] values of this rank's tokens -> [N] of all ranks'."""
        return _Sum.apply(part.new_zeros(self.count).index_copy(0, self.mine, part), self.context.group)


class _Exchange(torch.autograd.Function):
    """Scatter one dimension over the ranks and gather another from them."""

    @staticmethod
    def forward(ctx: Any, whole: Tensor, group: dist.ProcessGroup, scattered: int, gathered: int) -> Tensor:
        ctx.group, ctx.dimensions = group, (gathered, scattered)
        parts = torch.stack(whole.chunk(dist.get_world_size(group), scattered))
        received = torch.empty_like(parts)
        dist.all_to_all_single(received, parts, group=group)
        return torch.cat(received.unbind(), gathered)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        return _Exchange.forward(_Unused(), gradient, ctx.group, *ctx.dimensions), None, None, None


class _Sum(torch.autograd.Function):
    """The sum over the ranks, of which each goes on alike: its gradient is that of every summand."""

    @staticmethod
    def forward(_ctx: Any, part: Tensor, group: dist.ProcessGroup) -> Tensor:
        total = part.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    @once_differentiable
    def backward(_ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


class _Unused:
    """A context that nobody reads."""
