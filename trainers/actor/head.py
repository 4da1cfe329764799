"""Log-probabilities and entropy from hidden states, without ever holding tokens times vocabulary.

Logits are computed for a chunk of positions at a time, and where there are several chunks, again in the backward pass.
Invariant: what is made of logits is made in float32 at least.
"""

from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .fused import fused

CHUNK = 2048
"""Positions whose logits exist at the same time."""


class Targets(Protocol):
    """What is asked of S positions: N tokens, of which several may follow the same position.

    targets, source_of: [N] ids, and the positions in [0, S) that they follow. by_source: [N] their order by position.
    edges: where in that order each chunk of `CHUNK` positions begins, and N.
    """

    targets: Tensor
    source_of: Tensor
    by_source: Tensor
    edges: list[int]


def chunk_edges(sources: Tensor, count: int) -> list[int]:
    """`Targets.edges` of [N] positions in ascending order, in [0, count)."""
    return torch.searchsorted(sources, torch.arange(0, count + CHUNK, CHUNK)).tolist()


def score(
    hidden: Tensor, head: torch.nn.Module, asked: Targets, *, temperature: float = 1.0, entropy: bool = False,
    exact: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """[N] log-probabilities in float32, and [N] entropy of the distributions that they are of, both differentiable.

    Args:
        hidden: [S, H].
        head: the output embedding, with `weight` [V, H] and perhaps `bias` [V].
        asked: the tokens.
        temperature: that logits are divided by.
        entropy: whether it is wanted.
        exact: logits in float32, not rounded to the precision of `hidden`.
    """
    weight, bias = head.weight, getattr(head, "bias", None)
    if bias is not None:
        hidden, weight = torch.cat([hidden, torch.ones_like(hidden[:, :1])], 1), torch.cat([weight, bias[:, None]], 1)
    logprobs, entropies = _Score.apply(hidden, weight, asked, temperature, entropy, exact)
    return logprobs, entropies[asked.source_of] if entropy else None


class _Score(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, asked: Targets, temperature: float, entropy: bool, exact: bool
    ) -> tuple[Tensor, Tensor]:
        lse = hidden.new_empty(len(hidden), dtype=torch.promote_types(hidden.dtype, torch.float32))
        entropies, logprobs = torch.zeros_like(lse), lse.new_empty(len(asked.targets))
        summary = fused(_summary, hidden.device)
        for rows, tokens, local in _chunks(asked, len(hidden)):
            logits = _logits(hidden[rows], weight, exact)
            lse[rows], of_rows = summary(logits, temperature, entropy)
            if entropy:
                entropies[rows] = of_rows
            logprobs[tokens] = logits[local, asked.targets[tokens]].to(lse.dtype) / temperature - lse[rows][local]
        ctx.save_for_backward(hidden, weight, lse, entropies)
        # What is a single chunk is not computed again.
        ctx.logits = logits if len(asked.edges) == 2 else None
        ctx.asked, ctx.temperature, ctx.exact = asked, temperature, exact
        ctx.set_materialize_grads(False)
        return logprobs, entropies

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, of_logprobs: Tensor | None, of_entropies: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, lse, entropies = ctx.saved_tensors
        of_hidden = torch.empty_like(hidden)
        of_weight = torch.zeros_like(weight, dtype=lse.dtype) if ctx.needs_input_grad[1] else None
        slope_of = fused(_slope, hidden.device)
        for rows, tokens, local in _chunks(ctx.asked, len(hidden)):
            factor = torch.zeros_like(lse[rows])
            if of_logprobs is not None:
                factor.index_add_(0, local, of_logprobs[tokens])
            spread = None if of_entropies is None else of_entropies[rows]
            logits = _logits(hidden[rows], weight, ctx.exact) if ctx.logits is None else ctx.logits
            slope = slope_of(logits, ctx.temperature, lse[rows], entropies[rows], factor, spread)
            if of_logprobs is not None:
                slope.index_put_((local, ctx.asked.targets[tokens]), of_logprobs[tokens] / ctx.temperature,
                                 accumulate=True)
            slope = slope.to(hidden.dtype)
            of_hidden[rows] = slope @ weight
            if of_weight is not None:
                of_weight += slope.T @ hidden[rows]
        return of_hidden, None if of_weight is None else of_weight.to(weight.dtype), None, None, None, None


def _chunks(asked: Targets, count: int) -> list[tuple[slice, Tensor, Tensor]]:
    """Positions, the tokens that follow them, and which of the positions each follows."""
    found = []
    for number, (first, last) in enumerate(zip(asked.edges, asked.edges[1:], strict=False)):
        start, tokens = number * CHUNK, asked.by_source[first:last]
        found.append((slice(start, min(start + CHUNK, count)), tokens, asked.source_of[tokens] - start))
    return found


def _logits(hidden: Tensor, weight: Tensor, exact: bool) -> Tensor:
    dtype = torch.promote_types(hidden.dtype, torch.float32)
    if not exact or hidden.dtype == dtype:
        return hidden @ weight.T
    if hidden.device.type == "cuda":
        return torch.mm(hidden, weight.T, out_dtype=dtype)
    return hidden.to(dtype) @ weight.T.to(dtype)


def _scaled(logits: Tensor, temperature: float) -> Tensor:
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return logits if temperature == 1 else logits / temperature


def _summary(logits: Tensor, temperature: float, entropy: bool) -> tuple[Tensor, Tensor | None]:
    scaled = _scaled(logits, temperature)
    lse = scaled.logsumexp(-1)
    return lse, lse - ((scaled - lse[:, None]).exp() * scaled).sum(-1) if entropy else None


def _slope(
    logits: Tensor, temperature: float, lse: Tensor, entropies: Tensor, factor: Tensor, spread: Tensor | None
) -> Tensor:
    """Of what was made of logits, but for the term of the targets."""
    logs = _scaled(logits, temperature) - lse[:, None]
    factor = factor[:, None] if spread is None else factor[:, None] + spread[:, None] * (logs + entropies[:, None])
    return logs.exp() * (factor / -temperature)
