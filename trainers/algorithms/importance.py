"""Importance-sampling correction: the policy that sampled (μ) against the policy before the update (π_old).

The two differ by staleness and by the numerics of sampler and trainer. Invariants: coefficients carry no gradient; the
difference is measured also where it is not corrected; a row is gated as a whole or token by token, never by the
micro-batch it is in. Sources: truncated importance sampling (Yao et al. 2025, "Your efficient RL framework secretly
brings you off-policy RL training"), IcePop (Ling team 2025, arXiv:2510.18855), sequence masking (Liu et al. 2025, "When
speed kills stability").
"""

from typing import Literal

import torch
from torch import Tensor

from .losses import log_ratio
from .metrics import Metrics, mean_of

__all__ = ["importance_coefficients", "mismatch"]


def importance_coefficients(
    old_logp: Tensor,
    behaviour_logp: Tensor,
    rows: Tensor,
    *,
    level: Literal["off", "token", "seq", "geo"],
    mode: Literal["mask", "clip", "trunc"] = "mask",
    low: float = 0.5,
    high: float = 2.0,
) -> tuple[Tensor, Metrics]:
    """The factor on each token's loss, w_t = π_old/μ gated by a band on u.

    u is w_t at level token, exp(Σ log w) of the row at seq and exp(mean log w) at geo. mask: w if low <= u <= high
    else 0; clip: w clamped to the band; trunc: min(w, high); the last two for level token only. Off: 1.

    Args:
        old_logp: [T] log π_old of the sampled tokens.
        behaviour_logp: [T] log μ, as the sampler gave it.
        rows: [T] long, the same number for the trainable tokens of one row.
        level: what u is.
        mode: what happens outside the band.
        low: lower end of the band.
        high: upper end of the band.

    Returns:
        [T] float32 without gradient, and is/filtered (share of the gated units, tokens or rows, outside of the band)
        together with the metrics of `mismatch`.

    Raises:
        ValueError: a level or a mode that is not there, or a mode that the level cannot have.
    """
    metrics = mismatch(old_logp, behaviour_logp)
    log_w = log_ratio(old_logp.detach(), behaviour_logp.detach())
    if level == "off":
        return torch.ones_like(log_w), metrics
    if mode not in {"token": ("mask", "clip", "trunc"), "seq": ("mask",), "geo": ("mask",)}.get(level, ()):
        raise ValueError(f"level {level!r}, mode {mode!r}: write token with mask, clip or trunc; seq or geo with mask")
    w = unit = log_w.exp()
    index = None
    if level != "token":
        ids, index = rows.unique(return_inverse=True)
        total = log_w.new_zeros(len(ids)).index_add(0, index, log_w)
        length = log_w.new_zeros(len(ids)).index_add(0, index, torch.ones_like(log_w))
        unit = (total if level == "seq" else total / length).clamp(-30.0, 30.0).exp()
    outside = unit > high if mode == "trunc" else (unit < low) | (unit > high)
    metrics["is/filtered"] = mean_of(outside)
    if mode == "mask":
        return w.masked_fill(outside if index is None else outside[index], 0), metrics
    return w.clamp(low if mode == "clip" else None, high), metrics


def mismatch(old_logp: Tensor, behaviour_logp: Tensor) -> Metrics:
    """How far trainer and sampler are apart on sampled tokens: mean |Δ|, share of equal bits, and KL(μ‖π_old).

    The KL is estimated by the mean of log μ - log π_old over tokens that μ sampled.
    """
    difference = log_ratio(behaviour_logp.detach(), old_logp.detach())
    return {
        "mismatch/abs_diff_mean": mean_of(difference.abs()),
        "mismatch/bitwise_fraction": mean_of(behaviour_logp == old_logp),
        "mismatch/kl": mean_of(difference),
    }
