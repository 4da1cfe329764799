"""Policy losses, the value loss, and their aggregation.

Layout: flat tensors over the trainable tokens [T] of some rows, without padding. Invariant: the loss of an optimizer
window is Σ_t w_t·l_t with weights computed once for the whole window (`token_weights`), so losses and gradients of
micro-batches and ranks are summed, never averaged, and do not depend on the cut. Policy, KL, entropy and value terms
take the same weights. Computed in float32, or in float64 if that is what comes in.
"""

from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from molt_gym.errors import ConfigError

from .metrics import Metrics, mean_of
from .registry import LOSSES, register_loss

__all__ = ["Aggregation", "LossOptions", "TokenLoss", "aggregate", "by_row", "log_ratio", "policy_loss",
           "token_weights", "value_loss"]

Aggregation = Literal["token_mean", "rollout_mean_token_mean", "group_mean_token_mean", "rollout_mean_token_sum"]


@dataclass(frozen=True)
class LossOptions:
    """Options of the losses.

    The ratio is clipped to [1 - clip_low, 1 + clip_high]; `dual_clip` > 1 bounds it where the advantage is < 0;
    `ceiling` >= 1 is the most that cispo weighs a token.
    """

    clip_low: float = 0.2
    clip_high: float = 0.2
    dual_clip: float | None = None
    ceiling: float = 5.0


class TokenLoss(NamedTuple):
    """Loss of each token [T], and whether its ratio was clipped [T]."""

    loss: Tensor
    clipped: Tensor


def wide(values: Tensor) -> Tensor:
    """In float32 at least."""
    return values.to(torch.promote_types(values.dtype, torch.float32))


def log_ratio(logp: Tensor, other: Tensor) -> Tensor:
    """`logp` - `other`, NaN as 0 and clamped to ±30, so that its exponential and gradient are finite."""
    return (wide(logp) - wide(other)).nan_to_num(0.0, 30.0, -30.0).clamp(-30.0, 30.0)


def by_row(values: Tensor, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Sum [K] and length [K] of each of the K rows that `values` [T] are of, and which of them each token is in [T]."""
    ids, index = rows.unique(return_inverse=True)
    zeros = values.new_zeros(len(ids))
    return zeros.index_add(0, index, values), zeros.index_add(0, index, torch.ones_like(values)), index


def _clipped(ratio: Tensor, advantages: Tensor, options: LossOptions) -> tuple[Tensor, Tensor]:
    """min(ρA, clip(ρ)·A) and where the second is less."""
    plain = ratio * advantages
    clipped = ratio.clamp(1 - options.clip_low, 1 + options.clip_high) * advantages
    return torch.minimum(plain, clipped), clipped < plain


# A loss takes log π [T], log π_old [T], advantages [T], the row of each token [T] (long), and options.


@register_loss("ppo")
def ppo(logp: Tensor, old_logp: Tensor, advantages: Tensor, rows: Tensor, options: LossOptions) -> TokenLoss:
    """-min(ρA, clip(ρ)·A) with ρ = π/π_old (Schulman et al. 2017, arXiv:1707.06347).

    With `dual_clip` c, the minimum is raised to c·A where A < 0 (Ye et al. 2019, arXiv:1912.09729).
    """
    objective, clipped = _clipped(log_ratio(logp, old_logp).exp(), advantages, options)
    if options.dual_clip is not None:
        objective = torch.where(advantages < 0, torch.maximum(objective, options.dual_clip * advantages), objective)
    return TokenLoss(-objective, clipped)


@register_loss("gspo")
def gspo(logp: Tensor, old_logp: Tensor, advantages: Tensor, rows: Tensor, options: LossOptions) -> TokenLoss:
    """-min(sA, clip(s)·A) with s = exp(mean_t log π/π_old) of the row (Zheng et al. 2025, arXiv:2507.18071).

    The gradient goes through each token by log s_t = sg[log s] + log π_t - sg[log π_t] (their GSPO-token).
    """
    total, length, index = by_row(log_ratio(logp.detach(), old_logp), rows)
    ratio = ((total / length)[index] + log_ratio(logp, logp.detach())).exp()
    objective, clipped = _clipped(ratio, advantages, options)
    return TokenLoss(-objective, clipped)


@register_loss("cispo")
def cispo(logp: Tensor, old_logp: Tensor, advantages: Tensor, rows: Tensor, options: LossOptions) -> TokenLoss:
    """-sg[min(ρ, ceiling)]·A·log π: a clipped token keeps its gradient (MiniMax 2025, arXiv:2506.13585)."""
    ratio = log_ratio(logp.detach(), old_logp).exp()
    return TokenLoss(-ratio.clamp(max=options.ceiling) * advantages * _known(logp), ratio > options.ceiling)


@register_loss("reinforce")
def reinforce(logp: Tensor, old_logp: Tensor, advantages: Tensor, rows: Tensor, options: LossOptions) -> TokenLoss:
    """-A·log π, right for one update a batch (Williams 1992)."""
    return TokenLoss(-advantages * _known(logp), torch.zeros_like(advantages, dtype=torch.bool))


def _known(logp: Tensor) -> Tensor:
    """log π, without value and gradient where it is not finite."""
    return wide(logp).nan_to_num(0.0, 0.0, 0.0)


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
        name: loss, as `algorithm.loss` names it.
        logp: [T] log π of the sampled tokens, with gradient.
        old_logp: [T] log π_old, before the first update of the batch.
        advantages: [T], of each token.
        weights: [T], of each token's rollout, from `token_weights` over the whole window.
        rows: [T] long, any number that is the same for the tokens of one row; a row is never split.
        coefficients: [T] importance coefficients, if any.
        options: clipping.

    Returns:
        The scalar to call backward on, and policy/clip_fraction, policy/kl_old (mean of log π_old - log π),
        policy/nan_logprobs (share of tokens whose ratio was NaN and taken as 1).

    Raises:
        ValueError: the loss is unknown.
        ConfigError: what it returned is not a loss and a mark for each token.
    """
    found = LOSSES.function(name)(logp, old_logp, advantages, rows, options)
    if not isinstance(found, tuple) or [getattr(part, "shape", None) for part in found] != [logp.shape] * 2:
        raise ConfigError(f"algorithm.loss: {name!r} must return two tensors {list(logp.shape)}, the loss of a token "
                          "and whether it was clipped, for each")
    token_loss, clipped = found
    if coefficients is not None:
        token_loss = token_loss * coefficients
    metrics = {
        "policy/clip_fraction": mean_of(clipped),
        "policy/kl_old": mean_of(-log_ratio(logp, old_logp)),
        "policy/nan_logprobs": mean_of((logp - old_logp).isnan()),
    }
    return aggregate(token_loss, weights), metrics


def value_loss(
    values: Tensor, old_values: Tensor, returns: Tensor, weights: Tensor, clip: float | None = 0.2
) -> tuple[Tensor, Metrics]:
    """½·max((V - R)², (V_old + clamp(V - V_old, ±clip) - R)²), summed with weights; for each of [T] tokens.

    As in PPO's reference code, the larger error counts, so clipping slows the critic and never rewards it.

    Returns:
        The scalar to call backward on, and value/clip_fraction (V further than `clip` from V_old), value/mean,
        value/error (mean of |V - R|).
    """
    values, old_values, returns = wide(values), wide(old_values), wide(returns)
    change, squares = values - old_values, (values - returns).square()
    metrics = {"value/mean": mean_of(values), "value/error": mean_of((values - returns).abs())}
    if clip is not None:
        squares = torch.maximum(squares, (old_values + change.clamp(-clip, clip) - returns).square())
        metrics["value/clip_fraction"] = mean_of(change.abs() > clip)
    return aggregate(squares / 2, weights), metrics


def aggregate(terms: Tensor, weights: Tensor) -> Tensor:
    """Σ_t w_t·x_t of terms [T] of any kind: policy, KL, entropy, value. A token of weight 0 adds nothing, even NaN."""
    return (weights * terms.masked_fill(weights == 0, 0)).sum()


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
        [R] float64; 0 for rollouts without trainable tokens.
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
    return torch.where(trained, 1 / total.double().clamp(min=1), 0)
