"""How far judges, or repeated judgements of one, agree."""

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from statistics import fmean, stdev
from typing import Literal

__all__ = ["krippendorff_alpha", "standard_error"]


def standard_error(values: Sequence[float]) -> float:
    """s / √n of the mean of n values, s with n - 1 in its denominator; NaN for fewer than two."""
    return stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.nan


def krippendorff_alpha(
    units: Iterable[Sequence[float | str]], level: Literal["interval", "nominal"] = "interval"
) -> float:
    """Krippendorff's α: 1 - observed / expected disagreement; 1 is agreement, 0 what chance gives.

    With d(S) = Σ δ²(a, b) over the ordered pairs of a set of values, n values in units u of m_u each,
    α = 1 - (n - 1) Σ_u d(u) / (m_u - 1) / d(all). δ² is (a - b)², or at level "nominal" whether a and b differ.
    Source: K. Krippendorff, "Computing Krippendorff's Alpha-Reliability", 2011.

    Args:
        units: of each thing that was judged, its judgements, however many; single ones do not count.

    Returns:
        NaN where all values are the same, or there are none.
    """
    compared = [list(unit) for unit in units if len(unit) > 1]
    values = [value for unit in compared for value in unit]
    if len(set(values)) < 2:
        return math.nan
    if level == "interval":
        # Differences do not depend on it, and what is squared stays small.
        middle = fmean(values)
        compared = [[value - middle for value in unit] for unit in compared]
        values = [value for unit in compared for value in unit]
    spread = _pairs_of_interval if level == "interval" else _pairs_of_nominal
    observed = math.fsum(spread(unit) / (len(unit) - 1) for unit in compared)
    return 1 - (len(values) - 1) * observed / spread(values)


def _pairs_of_interval(values: Sequence[float]) -> float:
    return 2 * (len(values) * math.fsum(value * value for value in values) - math.fsum(values) ** 2)


def _pairs_of_nominal(values: Sequence[float | str]) -> float:
    return len(values) ** 2 - sum(count * count for count in Counter(values).values())
