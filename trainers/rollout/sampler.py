"""From logits to one token a row, and its log-probability under the distribution that it was drawn from."""

from collections.abc import Sequence

import numpy as np
import torch

from molt_gym.tokens import Sampling
from molt_gym.tokens.generation import TOP


def sample(
    logits: torch.Tensor, samplings: Sequence[Sampling], uniforms: Sequence[float]
) -> tuple[list[int], list[float], list[np.ndarray | None]]:
    """Draw by inverting the cumulative distribution, one uniform number a row, whatever else is in the batch.

    Args:
        logits: [B, V].
        samplings: B of them; temperature 0 takes the likeliest token, its log-probability being that at temperature 1.
        uniforms: B numbers in [0, 1).

    Returns:
        B token ids and B log-probabilities, under temperature and truncation, and for rows with `top_logprobs` so many
        of the likeliest ids with theirs, of dtype TOP.
    """
    temperatures = torch.tensor([s.temperature or 1.0 for s in samplings], device=logits.device)
    scaled = logits.float() / temperatures[:, None]
    # The trainer's formula (`actor.head`), so that equal logits give equal bits.
    logprobs = scaled - scaled.logsumexp(dim=-1, keepdim=True)
    if any(s.top_k or s.top_p < 1 for s in samplings):
        logprobs = torch.stack([_truncated(row, s) for row, s in zip(logprobs, samplings, strict=True)])
    # In float32 the cumulative sum of 50,000 small numbers is off by more than many of them.
    cumulative = logprobs.exp().cumsum(dim=-1, dtype=torch.float64)
    targets = torch.tensor(uniforms, dtype=torch.float64, device=logits.device)[:, None] * cumulative[:, -1:]
    drawn = torch.searchsorted(cumulative, targets, right=True).squeeze(1)
    greedy = torch.tensor([s.temperature == 0 for s in samplings], device=logits.device)
    ids = torch.where(greedy, logprobs.argmax(dim=-1), drawn.clamp_max(logits.shape[-1] - 1))
    return ids.tolist(), logprobs.gather(1, ids[:, None]).squeeze(1).tolist(), _likeliest(logprobs, samplings)


def _likeliest(logprobs: torch.Tensor, samplings: Sequence[Sampling]) -> list[np.ndarray | None]:
    most = min(max(s.top_logprobs for s in samplings), logprobs.shape[-1])
    if not most:
        return [None] * len(samplings)
    values, ids = logprobs.topk(most)
    found = np.empty(ids.shape, TOP)
    found["id"], found["logprob"] = ids.cpu().numpy(), values.cpu().numpy()
    return [row[: s.top_logprobs] if s.top_logprobs else None for row, s in zip(found, samplings, strict=True)]


def _truncated(logprobs: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """Renormalised over the top k tokens and the smallest set of them whose mass reaches top p; [V] -> [V]."""
    values, order = logprobs.sort(descending=True)
    keep = torch.ones_like(values, dtype=torch.bool)
    if sampling.top_k:
        keep[sampling.top_k :] = False
    kept = torch.log_softmax(values.masked_fill(~keep, -torch.inf), dim=-1)
    mass_before = kept.exp().cumsum(dim=-1) - kept.exp()
    kept = kept.masked_fill(mass_before >= sampling.top_p, -torch.inf)
    return torch.empty_like(logprobs).scatter_(0, order, torch.log_softmax(kept, dim=-1))
