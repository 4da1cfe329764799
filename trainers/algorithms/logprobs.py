"""Log-probabilities of tokens under logits, as sampler and trainer compute them, each in the shape that it needs.

Invariant: the logits at position i score the token at i + 1, in float32, under the sampling temperature.
"""

import torch
from torch import Tensor

__all__ = ["entropy", "next_token_logprobs", "token_logprobs"]


def token_logprobs(logits: Tensor, tokens: Tensor, temperature: float = 1.0) -> Tensor:
    """log softmax(logits/temperature) at `tokens`.

    Args:
        logits: [..., V], those that predict `tokens` (already shifted).
        tokens: [...] long.
        temperature: of sampling, > 0.

    Returns:
        [...] float32.
    """
    scaled = logits.float() / temperature
    return scaled.gather(-1, tokens.unsqueeze(-1)).squeeze(-1) - scaled.logsumexp(-1)


def next_token_logprobs(logits: Tensor, ids: Tensor, temperature: float = 1.0) -> Tensor:
    """For logits [..., L, V] of ids [..., L]: the log-probability of each id but the first, [..., L - 1]."""
    return token_logprobs(logits[..., :-1, :], ids[..., 1:], temperature)


def entropy(logits: Tensor, temperature: float = 1.0) -> Tensor:
    """-Σ p·log p of softmax(logits/temperature), [...] for logits [..., V], in nats; a logit of -inf adds nothing."""
    logp = (logits.float() / temperature).log_softmax(-1)
    return -(logp.exp() * logp.clamp(min=torch.finfo(logp.dtype).min)).sum(-1)
