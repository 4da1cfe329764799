"""Shaping of rewards, per rollout and before the baseline, and the filter on groups.

Invariants: shaping never pays for a reply that was cut; the filter judges a group by scores of whole rollouts.
"""

from collections.abc import Sequence
from statistics import fmean

import torch
from torch import Tensor

__all__ = ["overlong_penalty", "scale_truncated", "trains"]

ROUNDING = 1e-9
"""Scores that differ by less are equal."""


def overlong_penalty(lengths: Tensor, max_length: int, buffer: int, penalty: float = 1.0) -> Tensor:
    """What a long reply loses: F·clamp(len - (max_len - B), 0, B)/B (DAPO; Yu et al. 2025, arXiv:2503.14476).

    Args:
        lengths: [R] sampled tokens.
        max_length: where the ramp ends.
        buffer: B, tokens before the end at which it starts; 0 is off.
        penalty: F, the loss at the end.

    Returns:
        [R] float64, from 0 to F.
    """
    over = (lengths.double() - (max_length - buffer)).clamp(0, buffer)
    return penalty * over / buffer if buffer else torch.zeros_like(over)


def scale_truncated(rewards: Tensor, truncated: Tensor, coefficient: float) -> Tensor:
    """Rewards [R]; where truncated [R], positive ones are multiplied by `coefficient`, or all replaced by it if < 0."""
    changed = rewards.clamp(max=0) + rewards.clamp(min=0) * coefficient
    return torch.where(truncated.bool(), changed if coefficient >= 0 else coefficient, rewards)


def trains(scores: Sequence[float], low: float, high: float) -> bool:
    """Whether a group of rollouts with these scores teaches anything: low < mean < high (DAPO's dynamic sampling).

    Up to rounding: scores that are sums of parts may miss a bound by a little.
    """
    return len(scores) > 0 and low + ROUNDING < fmean(scores) < high - ROUNDING
