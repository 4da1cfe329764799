"""Evaluation: held-out tasks, each tried k times with frozen weights.

Invariants: the tasks depend on the env and the seed alone; a failed rollout is counted by reason and is no score of 0;
pass@k is the unbiased estimator over the attempts that ended; in a run, the weights do not change before it is over.
"""

import asyncio
import inspect
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import comb
from statistics import fmean
from typing import Any

from gymnasium.envs.registration import EnvSpec

from molt_gym.errors import RunFailed
from molt_gym.registry import creators
from molt_gym.tokens import Trajectory

from .checkpoint import mark_best
from .config import Config
from .progress import Progress
from .rollout.pool import Plan, Pool, TaskStream
from .rollout.runner import Runner
from .run_dir import RunDir
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


class Evaluations:
    """Those of a run, one at a time: when they are due, what became of them, and which checkpoint is the best so far.

    Args:
        evaluate: plays with the weights in use, `alone` or while others do.
    """

    def __init__(
        self, config: Config, evaluate: Callable[..., Awaitable[EvalResult]], run_dir: RunDir, progress: Progress
    ) -> None:
        self._config, self._evaluate, self._run_dir, self._progress = config, evaluate, run_dir, progress
        self._running: asyncio.Task[None] | None = None
        rollout = config.rollout
        # Plain transformers play in waves, which others would join. Memory that was handed over cannot be played with.
        self.concurrent = rollout.engine == "vllm" and config.eval.concurrent and not rollout.release_memory
        """Whether training goes on meanwhile, up to the next change of the weights."""

    def due(self, step: int, *, last: bool) -> str | None:
        """What the evaluation after `step` is called, if there is to be one and has not been."""
        options = self._config.eval
        if last:
            due, when = options.after, "after"
        elif step:
            due, when = options.every and step % options.every == 0, f"step {step}"
        else:
            due, when = options.before, "before"
        # A run that was resumed at this step may have done so before.
        return when if due and step not in self._scores() else None

    def begin(self, step: int, when: str) -> None:
        """Start one; `finish` waits for its end."""
        self._running = asyncio.create_task(self._run(step, when))

    async def finish(self) -> None:
        """Wait for the one that runs, if one does.

        Raises:
            RunFailed: not one of its rollouts ended.
            asyncio.CancelledError: it was cancelled.
        """
        if (running := self._running) is not None:
            await asyncio.wait([running])
            if self._running is running:
                self._running = None
                running.result()

    async def cancel(self) -> None:
        """End the one that runs without a result."""
        if self._running is not None:
            self._running.cancel()
            await asyncio.gather(self._running, return_exceptions=True)

    def give_up(self, why: str) -> None:
        """End the one that runs, for good; `finish` returns."""
        if self._running is not None:
            self._running.cancel()
            self._running = None
            self._progress.message(f"an evaluation was given up: {why}")

    def mark_best(self) -> None:
        """See `checkpoint.mark_best`."""
        try:
            mark_best(self._run_dir.checkpoints_path, self._scores())
        except OSError as error:
            self._progress.message(f"the best checkpoint is not marked: {error}")

    async def _run(self, step: int, when: str) -> None:
        started = time.perf_counter()
        result = await self._evaluate(alone=not (self.concurrent or self._config.rollout.max_staleness))
        self._progress.evaluation(result.env, when, result.metrics())
        values = {f"eval/{result.env}/{name}": value for name, value in result.metrics().items()}
        self._run_dir.append_metrics({"step": step, "eval/when": when, **values,
                                      "time/eval": time.perf_counter() - started})
        self.mark_best()

    def _scores(self) -> dict[int, tuple[float, float]]:
        """By step, what tells which weights are better: pass@1, then the reward."""
        return {line["step"]: _score(self._config.env, line)
                for line in self._run_dir.read_metrics() if "eval/when" in line}


def _score(env: str, line: Mapping[str, Any]) -> tuple[float, float]:
    reward = line[f"eval/{env}/reward_mean"]
    return line.get(f"eval/{env}/pass_at_1", reward), reward
