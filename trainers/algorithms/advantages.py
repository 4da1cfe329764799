"""Advantage estimators: from one reward a rollout to one advantage a rollout, or one a sampled token.

Invariants: the unit is the rollout, so neither its branches nor its length weigh in a baseline; tokens that were not
sampled are not there, so they neither discount nor carry value or KL; the sampled tokens of a rollout are one sequence
in the order in which they were sampled, so it does not matter how they are cut into rows; whether rewards are equal is
decided before anything is divided by their deviation; finite input gives finite advantages for every group size.
Formulas are computed in float64.
"""

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from molt_gym.errors import ConfigError

from .registry import ESTIMATORS, register_estimator

__all__ = ["EstimatorOptions", "TokenBatch", "TokenEstimate", "discounted_sums", "estimate_advantages",
           "estimate_token_advantages", "token_rewards", "whiten"]

TOLERANCE = 1e-6
"""Values are equal if their standard deviation is under TOLERANCE * max(1, |mean|)."""
EPSILON = 1e-8
"""Added to a standard deviation, and the floor of a variance; equal rewards never get as far."""


@dataclass(frozen=True)
class TokenBatch:
    """R rollouts with N sampled tokens; what a per-token estimator is made of.

    rewards: [R], shaped and clipped. groups: [R] integers; rollouts of one task share one. rollouts: [N] long, the
    index in `rewards` of each token's rollout; the tokens of one rollout are in the order of sampling, whatever the
    rows that they are stored in. kl: [N] estimate of log π_old/π_ref, or log π_old/π_teacher. values: [N] of the
    critic, before the token.
    """

    rewards: Tensor
    groups: Tensor
    rollouts: Tensor
    kl: Tensor | None = None
    values: Tensor | None = None


@dataclass(frozen=True)
class EstimatorOptions:
    """gamma: discount a sampled token. lam: λ of GAE. kl_coefficient: β, of a KL penalty in the reward."""

    gamma: float = 1.0
    lam: float = 0.95
    kl_coefficient: float = 0.0


class TokenEstimate(NamedTuple):
    """advantages: [N] float64. returns: [N] float64, what the critic learns; None without one."""

    advantages: Tensor
    returns: Tensor | None


def estimate_advantages(name: str, rewards: Tensor, groups: Tensor, tokens: Tensor) -> Tensor:
    """The advantage of each of R rollouts, for an estimator that has one a rollout.

    Args:
        name: estimator; `function(rewards, groups, tokens) -> [R]`, called with float64 rewards and tokens.
        rewards: [R], one reward a rollout, shaped and clipped.
        groups: [R] integers; rollouts of one task share one.
        tokens: [R], sampled tokens that train; the weights of whitening, which is over tokens.

    Returns:
        [R] float64.

    Raises:
        ValueError: a reward is not finite, the shapes differ, or the estimator is unknown or works on tokens.
        ConfigError: what it returned is not a finite number for each rollout.
    """
    if not rewards.shape == groups.shape == tokens.shape or rewards.dim() != 1:
        raise ValueError(f"rewards, groups and tokens have shapes {tuple(rewards.shape)}, {tuple(groups.shape)} and "
                         f"{tuple(tokens.shape)}; give each one entry a rollout")
    traits = ESTIMATORS.traits(name)
    if traits.per_token:
        raise ValueError(f"algorithm.estimator: {name!r} works on tokens; call estimate_token_advantages")
    rewards, tokens = _finite("rewards", rewards), tokens.double()
    values = _checked(name, ESTIMATORS.function(name)(rewards, groups, tokens), rewards)
    return whiten(values, tokens) if traits.whitens else values


def estimate_token_advantages(
    name: str, batch: TokenBatch, options: EstimatorOptions = EstimatorOptions()
) -> TokenEstimate:
    """The advantage of each of N sampled tokens, for every estimator.

    Args:
        name: estimator; one that works on tokens is `function(batch, options) -> [N]`, called with float64 tensors and
            the tokens of each rollout side by side.
        batch: all of the step, on all ranks: whitening is over its tokens.
        options: discount, λ and KL coefficient.

    Raises:
        ValueError: a number is not finite, shapes differ, or what the estimator needs is not there.
        ConfigError: what it returned is not a finite number for each token.
    """
    traits = ESTIMATORS.traits(name)
    if not traits.per_token:
        tokens = batch.rollouts.bincount(minlength=len(batch.rewards))
        advantages = estimate_advantages(name, batch.rewards, batch.groups, tokens)
        return TokenEstimate(advantages[batch.rollouts], None)
    if batch.kl is None and (traits.needs_teacher or options.kl_coefficient and traits.kl_in_reward):
        raise ValueError(f"kl: missing, though the KL coefficient of {name!r} is {options.kl_coefficient}")
    if batch.values is None and traits.needs_critic:
        raise ValueError(f"values: missing; {name!r} needs those of a critic")
    order = batch.rollouts.argsort(stable=True)
    tokens = {}
    for field, given in (("kl", batch.kl), ("values", batch.values)):
        if given is not None and given.shape != order.shape:
            raise ValueError(f"{field}: shape {tuple(given.shape)}; give one entry for each of {len(order)} tokens")
        tokens[field] = None if given is None else _finite(field, given)[order]
    ordered = replace(batch, rewards=_finite("rewards", batch.rewards), rollouts=batch.rollouts[order], **tokens)
    place = order.argsort()
    advantages = _checked(name, ESTIMATORS.function(name)(ordered, options), ordered.rollouts)[place]
    returns = advantages + batch.values.double() if traits.needs_critic else None
    return TokenEstimate(whiten(advantages) if traits.whitens else advantages, returns)


def _finite(name: str, values: Tensor) -> Tensor:
    bad = (~values.isfinite()).nonzero().flatten()
    if len(bad):
        raise ValueError(f"{name}[{bad[0]}]: {values[bad[0]].item()} is not finite; leave the rollout out of the batch")
    return values.double()


def _checked(name: str, found: Tensor, like: Tensor) -> Tensor:
    """What an estimator gave, which may be a user's: a finite number for each rollout or token of `like`."""
    if not isinstance(found, Tensor) or found.shape != like.shape:
        what = f"a tensor {list(found.shape)}" if isinstance(found, Tensor) else type(found).__name__
        raise ConfigError(f"algorithm.estimator: {name!r} returned {what}; return a tensor {list(like.shape)}")
    if not found.isfinite().all():
        raise ConfigError(f"algorithm.estimator: {name!r} returned numbers that are not finite; return finite ones, "
                          "also for groups of one and of equal rewards")
    return found.double()


def whiten(values: Tensor, weights: Tensor | None = None) -> Tensor:
    """(x - mean) / sqrt(max(variance, 1e-8)), population variance, weighted; 0 if all are equal up to rounding."""
    weights = torch.ones_like(values) if weights is None else weights
    share = weights / weights.sum().clamp(min=1)
    mean = (share * values).sum()
    variance = (share * (values - mean).square()).sum()
    if variance.sqrt() < TOLERANCE * mean.abs().clamp(min=1):
        return torch.zeros_like(values)
    return (values - mean) / variance.clamp(min=EPSILON).sqrt()


class _Groups(NamedTuple):
    size: Tensor
    centred: Tensor
    std: Tensor


def _by_group(rewards: Tensor, groups: Tensor) -> _Groups:
    """For each rollout: its group's size n, r - mean(group), and the group's std with n - 1; 0 if all are equal."""
    ids, index = groups.unique(return_inverse=True)
    zeros = rewards.new_zeros(len(ids))
    size = zeros.index_add(0, index, torch.ones_like(rewards))
    mean = zeros.index_add(0, index, rewards) / size
    centred = rewards - mean[index]
    std = (zeros.index_add(0, index, centred.square()) / (size - 1).clamp(min=1)).sqrt()
    equal = std < TOLERANCE * mean.abs().clamp(min=1)
    return _Groups(size[index], centred.masked_fill(equal[index], 0), std[index])


@register_estimator("dr_grpo")
def dr_grpo(rewards: Tensor, groups: Tensor, tokens: Tensor) -> Tensor:
    """r - mean(group): GRPO without the division by the deviation (Liu et al. 2025, arXiv:2503.20783)."""
    return _by_group(rewards, groups).centred


@register_estimator("grpo")
def grpo(rewards: Tensor, groups: Tensor, tokens: Tensor) -> Tensor:
    """(r - mean(group)) / (std(group) + 1e-8) with the unbiased std, n - 1 (Shao et al. 2024, arXiv:2402.03300).

    At most (n - 1)/√n in size; 0 for a group of one.
    """
    group = _by_group(rewards, groups)
    return group.centred / (group.std + EPSILON)


@register_estimator("rloo")
def rloo(rewards: Tensor, groups: Tensor, tokens: Tensor) -> Tensor:
    """r - mean of the others of the group (Ahmadian et al. 2024, arXiv:2402.14740).

    Equal to (r - mean(group))·n/(n - 1); 0 for a group of one, which the configuration refuses.
    """
    group = _by_group(rewards, groups)
    return group.centred * group.size / (group.size - 1).clamp(min=1)


@register_estimator("reinforce_baseline")
def reinforce_baseline(rewards: Tensor, groups: Tensor, tokens: Tensor) -> Tensor:
    """r - mean(group), whitened over the tokens of the batch (REINFORCE++-baseline; Hu et al. 2025, arXiv:2501.03262).

    A group of equal rewards is therefore only 0 if the batch's token mean is.
    """
    return _by_group(rewards, groups).centred


@register_estimator("flash_reinforce")
def flash_reinforce(rewards: Tensor, groups: Tensor, tokens: Tensor) -> Tensor:
    """r - mean(all rollouts of the batch), each counted once: REINFORCE with a batch baseline (Williams 1992)."""
    return _by_group(rewards, torch.zeros_like(groups)).centred


def token_rewards(batch: TokenBatch, options: EstimatorOptions) -> Tensor:
    """x [N]: -β·kl of each token, plus the rollout's reward on its last one; tokens of a rollout side by side."""
    x = torch.zeros(len(batch.rollouts), dtype=batch.rewards.dtype, device=batch.rewards.device)
    last = torch.ones_like(x, dtype=torch.bool)
    last[:-1] = batch.rollouts[1:] != batch.rollouts[:-1]
    x = x.masked_scatter(last, batch.rewards[batch.rollouts[last]])
    return x if batch.kl is None else x - options.kl_coefficient * batch.kl


def discounted_sums(values: Tensor, rollouts: Tensor, discount: float) -> Tensor:
    """y_t = x_t + d·y_{t+1} within each rollout, [N]; its tokens side by side.

    By doubling: sums over 2^k tokens are made of two over 2^(k-1), so there are log2(longest rollout) passes.
    """
    longest = int(rollouts.bincount().max()) if len(rollouts) else 0
    step = 1
    while step < longest:
        later = torch.where(rollouts[step:] == rollouts[:-step], values[step:], 0)
        values = torch.cat([values[:-step] + discount**step * later, values[-step:]])
        step *= 2
    return values


@register_estimator("reinforce")
def reinforce(batch: TokenBatch, options: EstimatorOptions) -> Tensor:
    """G_t = x_t + γ·G_{t+1} with x of `token_rewards`, whitened (REINFORCE++; Hu et al. 2025, arXiv:2501.03262)."""
    return discounted_sums(token_rewards(batch, options), batch.rollouts, options.gamma)


@register_estimator("gae")
def gae(batch: TokenBatch, options: EstimatorOptions) -> Tensor:
    """A_t = δ_t + γλ·A_{t+1}, δ_t = x_t + γ·V_{t+1} - V_t, V after the last token 0.

    Whitened; the returns A + V are not. Source: Schulman et al. 2015, arXiv:1506.02438.
    """
    later = torch.zeros_like(batch.values)
    later[:-1] = torch.where(batch.rollouts[1:] == batch.rollouts[:-1], batch.values[1:], 0)
    delta = token_rewards(batch, options) + options.gamma * later - batch.values
    return discounted_sums(delta, batch.rollouts, options.gamma * options.lam)


@register_estimator("on_policy_distill")
def on_policy_distill(batch: TokenBatch, options: EstimatorOptions) -> Tensor:
    """-β·(log π_old - log π_teacher): the reverse KL to a teacher on the student's samples.

    Rewards are ignored; `batch.kl` is the difference, by k1. Source: Agarwal et al. 2023, arXiv:2306.13649.
    """
    return -options.kl_coefficient * batch.kl
