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

from .losses import by_row, log_ratio, wide
from .metrics import Metrics, mean_of

__all__ = ["Gate", "Level", "Mode", "importance_coefficients", "mismatch", "score_centering"]

Level = Literal["off", "token", "seq", "geo"]
Mode = Literal["mask", "clip", "trunc"]
Gate = Literal["ratio", "binary_kl", "tv"]

MODES = {("token", "ratio"): ("mask", "clip", "trunc"), ("seq", "ratio"): ("mask",), ("geo", "ratio"): ("mask",),
         ("token", "binary_kl"): ("mask",), ("seq", "binary_kl"): ("mask",), ("token", "tv"): ("mask",),
         ("seq", "tv"): ("mask",)}
MARGIN = 1e-6
"""Probabilities of the binary KL, and those of all tokens outside of the top k, are this far from 0 and 1."""


def importance_coefficients(
    old_logp: Tensor,
    behaviour_logp: Tensor,
    rows: Tensor,
    *,
    level: Level,
    mode: Mode = "mask",
    gate: Gate = "ratio",
    low: float = 0.5,
    high: float = 2.0,
) -> tuple[Tensor, Metrics]:
    """The factor on each token's loss, w_t = π_old/μ gated by a band on u.

    With gate ratio, u is w_t at level token, exp(Σ log w) of the row at seq and exp(mean log w) at geo. mask: w if
    low <= u <= high else 0; clip: w clamped to the band; trunc: min(w, high); the last two for level token only. With
    gate binary_kl or tv, u is p·ln(p/q) + (1-p)·ln((1-p)/(1-q)) or |p - q| of p = μ and q = π_old, at level seq their
    mean over the row, and w is masked where u > high. Off: 1.

    Args:
        old_logp: [T] log π_old of the sampled tokens.
        behaviour_logp: [T] log μ, as the sampler gave it.
        rows: [T] long, the same number for the trainable tokens of one row.
        level: what is gated.
        mode: what happens outside the band.
        gate: what u measures.
        low: lower end of the band, for gate ratio.
        high: upper end of the band.

    Returns:
        [T] without gradient, and is/filtered (share of the gated units, tokens or rows, outside of the band) together
        with the metrics of `mismatch`.

    Raises:
        ValueError: a level, mode or gate that is not there, or that cannot go together.
    """
    metrics = mismatch(old_logp, behaviour_logp)
    log_w = log_ratio(old_logp.detach(), behaviour_logp.detach())
    if level == "off":
        return torch.ones_like(log_w), metrics
    if mode not in MODES.get((level, gate), ()):
        raise ValueError(f"level {level!r}, mode {mode!r}, gate {gate!r}: write token with mask, clip or trunc; seq or "
                         "geo with mask; gate binary_kl or tv for token or seq with mask")
    w = log_w.exp()
    unit, index = w, None
    if level != "token":
        total, length, index = by_row(_distance(old_logp, behaviour_logp, gate, log_w), rows)
        unit = total if (level, gate) == ("seq", "ratio") else total / length
        unit = unit.clamp(-30.0, 30.0).exp() if gate == "ratio" else unit
    elif gate != "ratio":
        unit = _distance(old_logp, behaviour_logp, gate, log_w)
    outside = (unit > high) if mode == "trunc" or gate != "ratio" else (unit < low) | (unit > high)
    metrics["is/filtered"] = mean_of(outside)
    if mode == "mask":
        return w.masked_fill(outside if index is None else outside[index], 0), metrics
    return w.clamp(low if mode == "clip" else None, high), metrics


def _distance(old_logp: Tensor, behaviour_logp: Tensor, gate: Gate, log_w: Tensor) -> Tensor:
    """What a gate measures at each token: log w, the binary KL(μ‖π_old) or the distance of the two probabilities."""
    if gate == "ratio":
        return log_w
    p, q = (wide(logp.detach()).exp().nan_to_num(0.0) for logp in (behaviour_logp, old_logp))
    if gate == "tv":
        return (p - q).abs()
    p, q = p.clamp(MARGIN, 1 - MARGIN), q.clamp(MARGIN, 1 - MARGIN)
    return p * (p / q).log() + (1 - p) * ((1 - p) / (1 - q)).log()


def score_centering(
    top_logp: Tensor,
    top_behaviour: Tensor,
    advantages: Tensor,
    *,
    level: Literal["off", "token"],
    mode: Mode = "mask",
    low: float = 0.5,
    high: float = 2.0,
) -> Tensor:
    """A·Σ_{top k} sg[q·f(p/q) - α·p]·log p: with it, a constant A has no expected gradient under the corrected loss.

    p = π, q = μ, f the correction of level token (1 if off) and α = ρ·f(1/ρ) with ρ = (1 - Σq)/(1 - Σp), which stands
    for all tokens outside of the top k. Right for the first update of a batch.

    Args:
        top_logp: [T, K] log π of K different tokens that could have come at each position, with gradient.
        top_behaviour: [T, K] log μ of the same; -inf where there are fewer.
        advantages: [T].
        level: of the importance correction, as are `mode`, `low` and `high`.
        mode: what happens outside the band.
        low: lower end of the band.
        high: upper end of the band.

    Returns:
        [T], to be added to the policy's token losses under the same weights.
    """
    def factor(ratio: Tensor) -> Tensor:
        if level == "off":
            return torch.ones_like(ratio)
        if mode == "mask":
            return ratio.masked_fill((ratio < low) | (ratio > high), 0)
        return ratio.clamp(low if mode == "clip" else None, high)

    there = top_behaviour.isfinite() & top_logp.isfinite()
    logp = wide(top_logp).masked_fill(~there, 0)
    p, q = logp.detach().exp() * there, wide(top_behaviour).exp() * there
    rest = (1 - q.sum(-1)).clamp(min=MARGIN) / (1 - p.sum(-1)).clamp(min=MARGIN)
    alpha = rest * factor(1 / rest)
    ratio = log_ratio(logp.detach(), wide(top_behaviour).masked_fill(~there, 0)).exp()
    return advantages * ((q * factor(ratio) - alpha[:, None] * p) * logp).sum(-1)


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
