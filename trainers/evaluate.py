"""Evaluation: held-out tasks, each tried k times with frozen weights.

Invariants: the tasks depend on the env and the seed alone; a failed rollout is counted by reason and is no score of 0;
pass@k is the unbiased estimator over the attempts that ended; in a run, the weights do not change before it is over.
"""

import asyncio
import inspect
import threading
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from statistics import mean
from typing import Any

from gymnasium.envs.registration import EnvSpec

from molt_gym.registry import creators
from molt_gym.tokens import Trajectory

from .checkpoint import mark_best
from .config import Config
from .eval_log import EvalLog
from .progress import Progress
from .rollout.pool import Plan, Pool, TaskStream
from .rollout.runner import Runner
from .run_dir import RunDir
from .scores import EvalResult, TaskScore, pass_at_k, summary

__all__ = ["EvalResult", "Evaluations", "evaluate", "held_out_kwargs", "pass_at_k"]

HELD_OUT = {"split": "test"}
"""What an env with a `split` argument is made with for evaluation."""


async def evaluate(
    runner: Runner, tasks: TaskStream, episodes: int, k: int, *, chunk: int, seed: int, log: EvalLog | None = None,
    sizes: Iterable[int] = (), rolling: bool = False,
) -> EvalResult:
    """Play `episodes` tasks (or as many as there are), `k` times each, at most `chunk` rollouts at a time.

    Args:
        log: of tasks that are over, which are not played again, and those that will be.
        sizes: of pass@ and pass^, besides 1 and k; at most k.
        rolling: play a task as soon as another is over, and not when `chunk` rollouts are; the order is then not fixed.

    Raises:
        RunFailed: not one rollout ended.
    """
    groups: dict[int, list[Trajectory]] = {}
    scores = {place: score for place, score in (log.tasks if log else {}).items() if place < episodes}

    def ended(group: list[Trajectory]) -> None:
        groups[group[0].group], scores[group[0].group] = group, TaskScore.of(group)
        if log is not None:
            log.add(scores[group[0].group])

    missing, size = [place for place in range(episodes) if place not in scores], max(1, chunk // k)
    at_once = len(missing) if rolling else size
    for first in range(0, len(missing), max(1, at_once)):
        places = missing[first : first + at_once]
        plan = Plan(len(places), k, max_staleness=int(rolling), capacity=size)
        pool = Pool(runner, _First(tasks, episodes), plan, seed=seed, ended=ended)
        pool.load_state({"cursor": episodes, "pending": places})
        try:
            batch = await pool.next_batch(0)
        finally:
            await pool.close()
        if batch.exhausted:
            break
    played = [trajectory for _, group in sorted(groups.items()) for trajectory in group]
    return summary(runner.env_id, [score for _, score in sorted(scores.items())], k, sizes, played)


class _First(TaskStream):
    """The first tasks of a stream."""

    def __init__(self, tasks: TaskStream, count: int) -> None:
        self._tasks, self._count = tasks, count

    def __getitem__(self, position: int) -> int:
        if position >= self._count:
            raise IndexError(position)
        return self._tasks[position]


def held_out_kwargs(spec: EnvSpec) -> dict[str, Any]:
    """`split="test"` where the env's constructor, or its agent's, takes `split`, else nothing."""
    _, made_by = creators(spec)
    return dict(HELD_OUT) if callable(made_by) and "split" in inspect.signature(made_by).parameters else {}


class Evaluations:
    """Those of a run, one at a time: when they are due, what became of them, and which checkpoint is the best so far.

    Args:
        evaluate: plays with the weights in use, `alone` or while others do; a result an env.
    """

    def __init__(
        self, config: Config, evaluate: Callable[..., Awaitable[Sequence[EvalResult]]], run_dir: RunDir,
        progress: Progress,
    ) -> None:
        self._config, self._evaluate, self._run_dir, self._progress = config, evaluate, run_dir, progress
        self._running: asyncio.Task[None] | None = None
        self._marking = threading.Lock()
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
        """See `checkpoint.mark_best`; in any thread."""
        try:
            with self._marking:
                mark_best(self._run_dir.checkpoints_path, self._scores())
        except OSError as error:
            self._progress.message(f"the best checkpoint is not marked: {error}")

    async def _run(self, step: int, when: str) -> None:
        started = time.perf_counter()
        results = await self._evaluate(alone=not (self.concurrent or self._config.rollout.max_staleness))
        values: dict[str, float] = {}
        for result in results:
            self._progress.evaluation(result.env, when, result.metrics())
            values |= {f"eval/{result.env}/{name}": value for name, value in result.metrics().items()}
        self._run_dir.append_metrics({"step": step, "eval/when": when, **values,
                                      "time/eval": time.perf_counter() - started})
        self.mark_best()

    def _scores(self) -> dict[int, tuple[float, float]]:
        """By step, what tells which weights are better: pass@1, then the reward, each the mean over the envs."""
        return {line["step"]: _score(line) for line in self._run_dir.read_metrics() if "eval/when" in line}


def _score(line: Mapping[str, Any]) -> tuple[float, float]:
    envs = [name.removesuffix("reward_mean") for name in line if name.startswith("eval/") and
            name.endswith("/reward_mean")]
    rewards = [line[env + "reward_mean"] for env in envs]
    return mean(line.get(env + "pass_at_1", reward) for env, reward in zip(envs, rewards, strict=True)), mean(rewards)
