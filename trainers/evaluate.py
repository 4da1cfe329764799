"""Evaluation: held-out tasks, each tried k times with frozen weights.

Invariants: the tasks depend on the env and the seed alone; a failed rollout is counted by reason and is no score of 0;
pass@k is the unbiased estimator over the attempts that ended.
"""

import inspect
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import comb
from statistics import fmean
from typing import Any

from gymnasium.envs.registration import EnvSpec

from molt_gym.errors import RunFailed
from molt_gym.registry import creators
from molt_gym.tokens import Trajectory

from .rollout.pool import Plan, Pool, TaskStream
from .rollout.runner import Runner
from .step_metrics import passes, sampled_tokens

HELD_OUT = {"split": "test"}
"""What an env with a `split` argument is made with for evaluation."""


@dataclass(frozen=True)
class EvalResult:
    """Scores over `episodes` tasks with `k` attempts each.

    pass_at: pass@1 and pass@k; an attempt passes with a reward of at least 1. reward_mean: of all that ended.
    length_mean: sampled tokens of an attempt. truncated: share of them. failures: counts by reason.
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

    def metrics(self) -> dict[str, float]:
        """Values by their short names, as the metrics file has them under eval/<env>/."""
        return {f"pass_at_{k}": value for k, value in self.pass_at.items()} | {
            "reward_mean": self.reward_mean, "length_mean": self.length_mean, "truncated": self.truncated,
            "episodes": self.episodes}


async def evaluate(runner: Runner, tasks: TaskStream, episodes: int, k: int, *, chunk: int, seed: int) -> EvalResult:
    """Play `episodes` tasks (or as many as there are), `k` times each, at most `chunk` rollouts at a time.

    Raises:
        RunFailed: not one rollout ended.
    """
    groups: list[list[Trajectory]] = []
    while len(groups) < episodes:
        size = min(episodes - len(groups), max(1, chunk // k))
        pool = Pool(runner, tasks, Plan(size, k), seed=seed)
        pool.load_state({"cursor": len(groups), "pending": []})
        try:
            batch = await pool.next_batch(0)
        finally:
            await pool.close()
        groups += batch.groups
        if batch.exhausted:
            break
    return summarize(runner.env_id, groups, k)


def summarize(env: str, groups: Sequence[Sequence[Trajectory]], k: int) -> EvalResult:
    """The scores of groups of attempts, a group a task."""
    everything = [trajectory for group in groups for trajectory in group]
    ended = [trajectory for trajectory in everything if trajectory.failure is None]
    failures = Counter(trajectory.failure.reason for trajectory in everything if trajectory.failure is not None)
    if not ended:
        raise RunFailed(f"evaluation of {env}: no rollout ended; failures by reason: {dict(failures)}")
    pass_at = {}
    for size in sorted({1, k}):
        chances = [pass_at_k(len(scores), sum(scores), size) for group in groups
                   if len(scores := [passes(t) for t in group if t.failure is None]) >= size]
        if chances:
            pass_at[size] = fmean(chances)
    return EvalResult(
        env, len(groups), k, pass_at,
        reward_mean=fmean(trajectory.reward for trajectory in ended),
        length_mean=sampled_tokens(ended) / len(ended),
        truncated=fmean(trajectory.truncated or trajectory.length_limited for trajectory in ended),
        failures=dict(failures), trajectories=everything)


def pass_at_k(n: int, c: int, k: int) -> float:
    """1 - C(n-c, k)/C(n, k): the chance that k of n attempts, c of them passing, hold one that passes (Chen 2021)."""
    return 1 - comb(n - c, k) / comb(n, k)


def held_out_kwargs(spec: EnvSpec) -> dict[str, Any]:
    """`split="test"` where the env's constructor, or its agent's, takes `split`, else nothing."""
    _, made_by = creators(spec)
    return dict(HELD_OUT) if callable(made_by) and "split" in inspect.signature(made_by).parameters else {}


