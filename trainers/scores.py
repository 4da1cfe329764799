"""Scores of attempts at tasks: pass@k, pass^k and mean rewards, each with a confidence interval.

Invariants: the task is the unit, however many attempts were made at it; an attempt that failed is counted by reason and
is no score of 0; intervals are functions of the scores alone.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from math import comb, sqrt
from statistics import fmean, mean
from typing import Any, Self

import numpy as np

from molt_gym.errors import RunFailed
from molt_gym.tokens import Trajectory

from .game_metrics import result_rates
from .step_metrics import passes, sampled_tokens

_Z = 1.959964  # the normal quantile of 95 %
_RESAMPLES = 2000


@dataclass(frozen=True)
class TaskScore:
    """What became of the attempts at task `index`, the `position`-th of its evaluation.

    rewards, passed, lengths (sampled tokens, or an endpoint's count) and truncated are of the attempts that ended;
    failures: counts by reason.
    """

    position: int
    index: int
    rewards: list[float]
    passed: list[bool]
    lengths: list[int]
    truncated: list[bool]
    failures: dict[str, int]

    @classmethod
    def of(cls, group: Sequence[Trajectory]) -> Self:
        """Of the attempts at one task, one or more."""
        ended = [trajectory for trajectory in group if trajectory.failure is None]
        failures = Counter(trajectory.failure.reason for trajectory in group if trajectory.failure is not None)
        return cls(group[0].group, group[0].index, [t.reward for t in ended], [passes(t) for t in ended],
                   [sampled_tokens([t]) or t.reply_tokens for t in ended],
                   [bool(t.truncated or t.length_limited) for t in ended], dict(failures))

    @classmethod
    def from_row(cls, row: Mapping[str, Any]) -> Self:
        """What `row` gave."""
        return cls(**{name: row[name] for name in cls.__dataclass_fields__})

    def row(self) -> dict[str, Any]:
        """For a table: what it holds, and the counts and means that are read first."""
        ended = len(self.rewards)
        means = {"reward_mean": mean(self.rewards), "length_mean": fmean(self.lengths)} if ended else {}
        return {"position": self.position, "index": self.index, "attempts": ended + sum(self.failures.values()),
                "passes": sum(self.passed), **means} | asdict(self)


@dataclass(frozen=True)
class EvalResult:
    """Scores over `episodes` tasks with `k` attempts each.

    pass_at: pass@k by k, that one of k attempts passes, by a reward (or score) of at least 1. pass_hat: pass^k by k,
    that all of k do. reward_mean: of all that ended. length_mean: sampled tokens of an attempt. truncated: share of
    them. failures: counts by reason. tasks: in their order. trajectories: those that were played now.
    """

    env: str
    episodes: int
    k: int
    pass_at: dict[int, float]
    reward_mean: float
    length_mean: float
    truncated: float
    failures: dict[str, int] = field(default_factory=dict)
    trajectories: list[Trajectory] = field(default_factory=list, repr=False)
    pass_hat: dict[int, float] = field(default_factory=dict)
    tasks: list[TaskScore] = field(default_factory=list, repr=False)

    @property
    def mean_at(self) -> dict[int, float]:
        """mean@k for the attempts that were made: the mean over tasks of their mean reward."""
        means = per_task_means(self.tasks)
        return {self.k: mean(means)} if means else {}

    @cached_property
    def intervals(self) -> dict[str, tuple[float, float]]:
        """The 95 % confidence intervals of pass_at_k, pass_hat_k and mean_at_k; see `interval`."""
        values = {f"pass_at_{k}": chances(self.tasks, k, pass_at_k) for k in self.pass_at}
        values |= {f"pass_hat_{k}": chances(self.tasks, k, pass_hat_k) for k in self.pass_hat}
        values[f"mean_at_{self.k}"] = per_task_means(self.tasks)
        return {name: found for name, over in values.items() if (found := interval(over)) is not None}

    def metrics(self) -> dict[str, float]:
        """Values by their short names, as the metrics file has them under eval/<env>/; of games win, draw, loss too."""
        return {f"pass_at_{k}": value for k, value in self.pass_at.items()} | {
            f"pass_hat_{k}": value for k, value in self.pass_hat.items()} | {
            f"mean_at_{k}": value for k, value in self.mean_at.items()} | {
            "reward_mean": self.reward_mean, "length_mean": self.length_mean, "truncated": self.truncated,
            "episodes": self.episodes} | result_rates(self.trajectories)


def summary(
    env: str, tasks: Sequence[TaskScore], k: int, sizes: Iterable[int] = (), trajectories: Sequence[Trajectory] = ()
) -> EvalResult:
    """The scores of tasks with k attempts each, as pass@ and pass^ of 1, of k and of the sizes between that are named.

    Raises:
        RunFailed: not one attempt ended.
    """
    failures: Counter[str] = Counter()
    for task in tasks:
        failures.update(task.failures)
    rewards = [reward for task in tasks for reward in task.rewards]
    if not rewards:
        first = next((f"; the first: {t.failure.message}" for t in trajectories if t.failure and t.failure.message), "")
        raise RunFailed(f"evaluation of {env}: no rollout ended; failures by reason: {dict(failures)}{first}")
    over = {size: (chances(tasks, size, pass_at_k), chances(tasks, size, pass_hat_k)) for size in {1, k, *sizes}}
    found = {size: (fmean(one), fmean(every)) for size, (one, every) in sorted(over.items()) if one}
    return EvalResult(
        env, len(tasks), k, {size: one for size, (one, _) in found.items()}, mean(rewards),
        length_mean=fmean(length for task in tasks for length in task.lengths),
        truncated=fmean(cut for task in tasks for cut in task.truncated),
        failures=dict(failures), trajectories=list(trajectories), tasks=list(tasks),
        pass_hat={size: every for size, (_, every) in found.items() if size > 1})


def pass_at_k(n: int, c: int, k: int) -> float:
    """1 - C(n-c, k)/C(n, k): the chance that k of n attempts, c of them passing, hold one that passes (Chen 2021).

    Raises:
        ValueError: not 1 <= k <= n and 0 <= c <= n: fewer attempts than k do not tell.
    """
    return 1 - _share(n, n - c, k)


def pass_hat_k(n: int, c: int, k: int) -> float:
    """C(c, k)/C(n, k), pass^k: the chance that k of n attempts, c of them passing, all pass (Yao 2024).

    Raises:
        ValueError: as `pass_at_k`.
    """
    return _share(n, c, k)


def _share(n: int, some: int, k: int) -> float:
    """Of the draws of k from n, the share that holds only those `some`."""
    if not (1 <= k <= n and 0 <= some <= n):
        raise ValueError(f"k: {k} of {n} attempts; write k from 1 to n, and no more passes than n")
    return comb(some, k) / comb(n, k)


def chances(tasks: Iterable[TaskScore], k: int, of: Any) -> list[float]:
    """`of(n, c, k)` for each task of whose attempts at least k ended."""
    return [of(len(task.passed), sum(task.passed), k) for task in tasks if len(task.passed) >= k]


def per_task_means(tasks: Iterable[TaskScore]) -> list[float]:
    """The mean reward of each task of whose attempts one ended."""
    return [mean(task.rewards) for task in tasks if task.rewards]


def interval(values: Sequence[float]) -> tuple[float, float] | None:
    """A 95 % confidence interval of the mean over tasks; None where there are too few different values to tell.

    Wilson's score interval if each value is 0 or 1, which also holds where all tasks pass or none; otherwise the
    percentiles of the means of 2000 bootstrap resamples of the tasks, drawn with a fixed seed.
    """
    n = len(values)
    if n and all(value in (0, 1) for value in values):
        rate, spread = fmean(values), _Z * _Z / n
        half = _Z * sqrt(rate * (1 - rate) / n + spread / (4 * n))
        low, high = ((rate + spread / 2 + side * half) / (1 + spread) for side in (-1, 1))
        return max(low, 0.0), min(high, 1.0)
    if n < 2 or min(values) == max(values):
        return None
    array, generator = np.asarray(values, dtype=np.float64), np.random.default_rng(0)
    means = [array[generator.integers(n, size=n)].mean() for _ in range(_RESAMPLES)]
    low, high = np.percentile(means, [2.5, 97.5])
    return float(low), float(high)
