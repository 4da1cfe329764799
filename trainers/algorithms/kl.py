"""KL divergence from a reference: estimators, their loss, and a coefficient that follows a target.

Invariants: values and gradients are finite whatever the log-probabilities; nothing is exponentiated before it is
clamped. Source of the estimators: Schulman 2020, "Approximating KL divergence".
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from torch import Tensor

from .losses import aggregate, log_ratio
from .metrics import Metrics, mean_of

if TYPE_CHECKING:
    from ..config_algorithm import KlConfig

__all__ = ["AdaptiveKl", "Kind", "Reference", "kl_estimate", "kl_loss"]

Kind = Literal["k1", "k2", "k3"]
Reference = Literal["model", "rollout"]

CAP = 10.0
"""k2 and k3 of a token are at most this; beyond it they have no gradient."""


def kl_estimate(logp: Tensor, ref_logp: Tensor, kind: Kind, ref: Reference = "model") -> Tensor:
    """An estimate of the KL at each sampled token, [T], from x = log π - log π_ref (NaN as 0, clamped to ±30).

    k1 = x, without bias; k2 = x²/2, whose gradient is without bias; k3 = e^-x - 1 + x, neither negative nor biased.
    Against the policy that sampled, k3 estimates KL(μ‖π) and is e^x - 1 - x: who sampled must be the one in front.

    Args:
        logp: [T] log π of the sampled tokens.
        ref_logp: [T] log π_ref, or log μ for `ref` "rollout".
        kind: estimator.
        ref: a reference model, or the policy that sampled.

    Returns:
        [T] in float32, or float64 if that came in.
    """
    x = log_ratio(logp, ref_logp)
    if kind == "k1":
        return x
    if kind == "k2":
        return (x.square() / 2).clamp(max=CAP)
    if kind == "k3":
        x = -x if ref == "rollout" else x
        return ((-x).expm1() + x).clamp(max=CAP)
    raise ValueError(f"kl.kind: got {kind!r}; write one of {Kind.__args__}")


def kl_loss(
    logp: Tensor, ref_logp: Tensor, weights: Tensor, kind: Kind, ref: Reference = "model"
) -> tuple[Tensor, Metrics]:
    """Σ_t w_t·kl_t, to be multiplied by the coefficient, and policy/kl_ref, the mean over tokens.

    As a loss, k1 has a gradient whose expectation under π is 0: it is log π's. k2 and k3 pull towards the reference.
    """
    terms = kl_estimate(logp, ref_logp, kind, ref)
    return aggregate(terms, weights), {"policy/kl_ref": mean_of(terms)}


@dataclass
class AdaptiveKl:
    """A KL coefficient that follows a target, or stays as it is without one (Ziegler et al. 2019, arXiv:1909.08593).

    coefficient: β, the state that a checkpoint holds. horizon: rollouts over which it changes by up to a fifth.
    """

    coefficient: float
    target: float | None = None
    horizon: int = 10_000

    @classmethod
    def of(cls, options: "KlConfig", state: Mapping[str, Any]) -> "AdaptiveKl":
        """By the options, going on from a checkpoint's `state`, or an empty one, if there is a target."""
        steered = options.target is not None and state.get("kl_coefficient")
        return cls(steered or options.coefficient, options.target, options.horizon)

    def update(self, kl: float, rollouts: int) -> float:
        """β *= 1 + clip(kl/target - 1, ±0.2)·min(n/horizon, 1) after n rollouts with this mean KL; the new β.

        A KL that is not finite changes nothing.
        """
        if self.target is not None and abs(kl) < float("inf"):
            error = min(max(kl / self.target - 1, -0.2), 0.2)
            self.coefficient *= 1 + error * min(rollouts / self.horizon, 1)
        return self.coefficient

    def step(self, metrics: Mapping[str, float], rollouts: int) -> dict[str, float]:
        """`update` by a step's policy/kl_ref, if it has one; policy/kl_coefficient as it was in the step."""
        if "policy/kl_ref" not in metrics:
            return {}
        used = self.coefficient
        self.update(metrics["policy/kl_ref"], rollouts)
        return {"policy/kl_coefficient": used}
