"""Policy losses and their aggregation.

Layout: flat tensors over the trainable tokens [T] of some rows, without padding. Invariant: the loss of an optimizer
window is Σ_t w_t·l_t with weights computed once for the whole window (`token_weights`), so losses and gradients of
micro-batches and ranks are summed, never averaged, and do not depend on the cut.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from .metrics import Metrics, mean_of

__all__ = ["LOSSES", "Loss", "LossOptions", "TokenLoss", "log_ratio", "loss", "policy_loss", "token_weights"]

Aggregation = Literal["token_mean", "rollout_mean_token_mean", "group_mean_token_mean", "rollout_mean_token_sum"]


@dataclass(frozen=True)
class LossOptions:
    """The ratio is clipped to [1 - clip_low, 1 + clip_high]; `dual_clip` > 1 bounds it where the advantage is < 0."""

    clip_low: float = 0.2
    clip_high: float = 0.2
    dual_clip: float | None = None


class TokenLoss(NamedTuple):
    """Loss of each token [T], and whether its ratio was clipped [T]."""

    loss: Tensor
    clipped: Tensor


class Loss(Protocol):
    """Token losses from log π [T], log π_old [T], advantages [T] and the row of each token [T] (long)."""

    def __call__(  # noqa: D102
        self, logp: Tensor, old_logp: Tensor, advantages: Tensor, rows: Tensor, options: LossOptions
    ) -> TokenLoss: ...


LOSSES: dict[str, Loss] = {}
"""Losses by the name that `algorithm.loss` takes."""


def loss(name: str) -> Callable[[Loss], Loss]:
    """Register a function as the loss `name`."""

    def register(function: Loss) -> Loss:
        LOSSES[name] = function
        return function

    return register


def log_ratio(logp: Tensor, other: Tensor) -> Tensor:
    """`logp` - `other` in float32, NaN as 0 and clamped to ±30, so that its exponential and gradient are finite."""
    return (logp.float() - other.float()).nan_to_num(0.0, 30.0, -30.0).clamp(-30.0, 30.0)


@loss("ppo")
def ppo(logp: Tensor, old_logp: Tensor, advantages: Tensor, rows: Tensor, options: LossOptions) -> TokenLoss:
    """-min(ρA, clip(ρ)·A) with ρ = π/π_old (Schulman et al. 2017, arXiv:1707.06347).

    With `dual_clip` c, the minimum is raised to c·A where A < 0 (Ye et al. 2019, arXiv:1912.09729).
    """
    ratio = log_ratio(logp, old_logp).exp()
    plain = ratio * advantages
    clipped = ratio.clamp(1 - options.clip_low, 1 + options.clip_high) * advantages
    objective = torch.minimum(plain, clipped)
    if options.dual_clip is not None:
        objective = torch.where(advantages < 0, torch.maximum(objective, options.dual_clip * advantages), objective)
    return TokenLoss(-objective, clipped < plain)


@loss("reinforce")
def reinforce(logp: Tensor, old_logp: Tensor, advantages: Tensor, rows: Tensor, options: LossOptions) -> TokenLoss:
    """-A·log π, right for one update a batch (Williams 1992)."""
    return TokenLoss(-advantages * logp.float(), torch.zeros_like(advantages, dtype=torch.bool))


def policy_loss(
    name: str,
    logp: Tensor,
    old_logp: Tensor,
    advantages: Tensor,
    weights: Tensor,
    rows: Tensor,
    *,
    coefficients: Tensor | None = None,
    options: LossOptions = LossOptions(),
) -> tuple[Tensor, Metrics]:
    """The share of these tokens in the loss of the optimizer window: Σ_t w_t·c_t·l_t.

    Args:
        name: loss, a key of `LOSSES`.
        logp: [T] log π of the sampled tokens, with gradient.
        old_logp: [T] log π_old, before the first update of the batch.
        advantages: [T], of each token's rollout.
        weights: [T], of each token's rollout, from `token_weights` over the whole window.
        rows: [T] long, any number that is the same for the tokens of one row; a row is never split.
        coefficients: [T] importance coefficients, if any.
        options: clipping.

    Returns:
        The scalar to call backward on, and policy/clip_fraction, policy/kl_old (mean of log π_old - log π),
        policy/nan_logprobs (share of tokens whose ratio was NaN and taken as 1).
    """
    token_loss, clipped = LOSSES[name](logp, old_logp, advantages, rows, options)
    if coefficients is not None:
        token_loss = token_loss * coefficients
    metrics = {
        "policy/clip_fraction": mean_of(clipped),
        "policy/kl_old": mean_of(-log_ratio(logp, old_logp)),
        "policy/nan_logprobs": mean_of((logp - old_logp).isnan()),
    }
    return (weights * token_loss).sum(), metrics


def token_weights(aggregation: Aggregation, tokens: Tensor, groups: Tensor, divisor: int | None = None) -> Tensor:
    """The weight that each trainable token of a rollout has in the loss of its optimizer window.

    With n_r trainable tokens in rollout r, N in the window, n_g in group g, R rollouts and G groups that have any:
    token_mean 1/N; rollout_mean_token_mean 1/(R·n_r); group_mean_token_mean 1/(G·n_g); rollout_mean_token_sum 1/(R·D)
    with `divisor` D, else 1. Branches of a rollout share its weight.

    Args:
        aggregation: one of the four.
        tokens: [R], trainable tokens of each rollout of the window, over all its rows and on all ranks.
        groups: [R] integers, the group of each rollout.
        divisor: D.

    Returns:
        [R] float32; 0 for rollouts without trainable tokens.
    """
    tokens = tokens.double()
    trained = tokens > 0
    rollouts = trained.sum()
    if aggregation == "token_mean":
        total = tokens.sum().expand_as(tokens)
    elif aggregation == "rollout_mean_token_mean":
        total = rollouts * tokens
    elif aggregation == "group_mean_token_mean":
        ids, index = groups.unique(return_inverse=True)
        per_group = tokens.new_zeros(len(ids)).index_add(0, index, tokens)
        total = (per_group > 0).sum() * per_group[index]
    elif aggregation == "rollout_mean_token_sum":
        total = (rollouts * (divisor or 1)).expand_as(tokens)
    else:
        raise ValueError(f"aggregation: got {aggregation!r}; write one of {Aggregation.__args__}")
    return torch.where(trained, 1 / total.double().clamp(min=1), 0).float()
