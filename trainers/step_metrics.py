"""The rollout half of a step's metrics line."""

from collections import Counter
from collections.abc import Mapping, Sequence
from statistics import fmean, mean, pstdev

from molt_gym.rewards import SUMMED
from molt_gym.tokens import Trajectory

from .batch import sampled_tokens
from .game_metrics import game_metrics
from .rollout.pool import Batch

PASS_REWARD = 1.0 - 1e-9
"""A rollout passes if its reward reaches this: 1, of which a sum of parts such as 0.7 + 0.1 + 0.1 + 0.1 falls short."""


def passes(trajectory: Trajectory) -> bool:
    """Whether the rollout solved its task: by the score in its info if there is one, else by its reward."""
    if trajectory.reward is None:
        return False
    score = trajectory.info.get("score")
    return (score if isinstance(score, int | float) else trajectory.reward) >= PASS_REWARD


def unused_tools(metrics: Mapping[str, float]) -> str | None:
    """What to tell if tools were offered in a step, and none was called."""
    offered = metrics.get("rollout/tools_offered", 0)
    if not offered or metrics["rollout/tool_calls_mean"]:
        return None
    return (f"step {metrics['step']}: tools were offered in {offered:g} turns and never called "
            f"({metrics['rollout/malformed_calls']:g} malformed calls); does the model know them, and its chat "
            "template?")


def fault_metrics(faults: Mapping[str, int]) -> dict[str, float]:
    """What it took to go on when engines and runners ended."""
    return {f"rollout/{name}": count for name, count in faults.items()}


def rollout_metrics(batch: Batch, trained: Sequence[Sequence[Trajectory]], version: int) -> dict[str, float]:
    """Rewards, lengths, and what was lost by reason, over rollouts, each counted once; staleness of what is trained."""
    ended = [trajectory for trajectory in batch.played if trajectory.failure is None]
    metrics: dict[str, float] = {"rollout/count": len(batch.played), "rollout/dispatched_groups": batch.dispatched}
    failed = Counter(trajectory.failure.reason for trajectory in batch.played if trajectory.failure is not None)
    for fate, counts in (("failed", failed), ("retried", batch.retried), ("dropped", batch.dropped)):
        metrics |= {f"rollout/{fate}/{reason}": count for reason, count in sorted(counts.items())}
    metrics |= _by_env(batch, ended) | game_metrics(ended) | _by_part(ended)
    if not ended:
        return metrics
    rewards = [trajectory.reward for trajectory in ended]
    rows = [stats for group in trained for t in group for row in t.rows if (stats := row.stats).sampled]
    sampled = sum(row.sampled for row in rows)
    return metrics | {
        # The sum of finite rewards may be infinite, their mean is not.
        "reward/mean": mean(rewards),
        "reward/std": pstdev(rewards),
        "pass/at_1": fmean(map(passes, ended)),
        "rollout/length_mean": sampled_tokens(ended) / len(ended),
        "rollout/turns_mean": fmean(trajectory.turns for trajectory in ended),
        "rollout/truncated": fmean(trajectory.truncated or trajectory.length_limited for trajectory in ended),
        "rollout/tool_calls_mean": fmean(trajectory.tool_calls for trajectory in ended),
        "rollout/malformed_calls": sum(trajectory.malformed_calls for trajectory in ended),
        "rollout/tools_offered": sum(trajectory.tools_offered for trajectory in ended),
        "rollout/fork_rate": sum(trajectory.forks for trajectory in ended) / max(1, sum(t.turns for t in ended)),
        "staleness/mean": version - sum(row.versions for row in rows) / sampled if sampled else 0.0,
        "staleness/max": max((version - row.oldest for row in rows), default=0),
    }


def _by_env(batch: Batch, ended: Sequence[Trajectory]) -> dict[str, float]:
    """Of each env, the reward; of one in a mixture also the pass rate, how many rollouts, and its weight."""
    metrics: dict[str, float] = {}
    for env in dict.fromkeys([*batch.weights, *(trajectory.env for trajectory in ended)]):
        own = [trajectory for trajectory in ended if trajectory.env == env]
        if own:
            metrics[f"reward/{env}"] = mean(trajectory.reward for trajectory in own)
        if batch.weights:
            metrics |= {f"pass/{env}": fmean(map(passes, own))} if own else {}
            metrics |= {f"rollout/count/{env}": sum(trajectory.env == env for trajectory in batch.played),
                        f"mixture/{env}": batch.weights[env]}
    return metrics


def _by_part(ended: Sequence[Trajectory]) -> dict[str, float]:
    """Of each part of the reward the mean over the rollouts that have it; of what judges took the sum."""
    values: dict[str, list[float]] = {}
    for trajectory in ended:
        for name, value in trajectory.info.items():
            if name.startswith(SUMMED) and isinstance(value, int | float):
                values.setdefault(name, []).append(value)
    return {name: (mean if name.startswith("reward/") else sum)(found) for name, found in values.items()}


def rates(metrics: dict[str, float], played: Sequence[Trajectory]) -> dict[str, float]:
    """Sampled tokens a second, and how far the step is from generation and training alone.

    The seconds are those of waiting for rollouts, or those in which engines were at work if they were more, as they are
    where rollouts are played ahead.
    """
    alone = metrics["time/generate"] + metrics.get("time/train", 0.0) + metrics.get("time/logprobs", 0.0)
    seconds = max(metrics["time/rollout"], metrics["time/generate"])
    found = {"perf/rollout_tokens_per_s": sampled_tokens(played) / seconds}
    if alone:
        found["perf/step_over_parts"] = metrics["time/step"] / alone
    return found
