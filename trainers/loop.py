"""The training loop: pool → batch → advantages → actor → weights to the engine.

Written against `RolloutEngine` and `Actor`, wherever they run. Invariants: a step's metrics line is on disk before its
checkpoint is; a checkpoint holds the state after whole steps only; on-policy, nothing is in flight when the weights
change; whatever ends the run early, the newest state is saved or the reason why not is said.
"""

import asyncio
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from molt_gym.errors import RunFailed
from molt_gym.tokens import Trajectory

from .actor.actor import Actor
from .batch import usable, windows
from .checkpoint import load_state, newest_checkpoint, save_checkpoint
from .config import Config
from .progress import Progress
from .rollout.engine import RolloutEngine
from .rollout.pool import Batch, Pool
from .run_dir import RunDir
from .session import Sampler
from .step_metrics import engine_metrics, rollout_metrics, sampled_tokens


@dataclass
class Loop:
    """One run's parts, and `step`, the number of whole steps behind it."""

    config: Config
    sampler: Sampler
    actor: Actor
    pool: Pool
    run_dir: RunDir
    progress: Progress
    step: int = 0
    best: float | None = None
    exhausted: bool = False
    _warned: bool = False
    whole: bool = True
    """Whether weights, step and metrics file agree, so that they can be saved."""

    @property
    def engine(self) -> RolloutEngine:
        """What samples."""
        return self.sampler.engine

    def restore(self) -> bool:
        """Go on from the newest whole checkpoint of the run folder; without one, forget what the run had begun."""
        path = newest_checkpoint(self.run_dir.checkpoints_path)
        if path is None:
            self.run_dir.cut_metrics(-1)
            self.progress.message(f"no whole checkpoint in {self.run_dir.checkpoints_path}; starting again")
            return False
        state = load_state(path)
        self.actor.load(path / "actor")
        self.pool.load_state(state["pool"])
        self.step, self.best = state["step"], state["best"]
        self.run_dir.cut_metrics(self.step)
        return True

    async def run(self) -> Path:
        """All steps that are left, with evaluations and checkpoints; returns the last one.

        Raises:
            RunFailed: too many rollouts failed, or there was nothing to train on.
            asyncio.CancelledError: interrupted, after the state was saved.
        """
        try:
            await self._send_weights()
            await self._evaluate_if_due()
            while self.step < self.config.steps and not self.exhausted:
                await self._next_step()
                await self._evaluate_if_due()
                every = self.config.checkpoint.every
                if every and self.step % every == 0 and self.step < self.config.steps:
                    self.progress.message(f"step {self.step} {self._try_save()}")
        except BaseException as error:
            await self.pool.close()
            interrupted = isinstance(error, asyncio.CancelledError)
            if interrupted or self.step:
                self.progress.message(f"{'interrupted' if interrupted else 'failed'} after step {self.step}, "
                                      f"{self._try_save()}; go on with --resume {self.run_dir.path}")
            raise
        return self._save()

    async def _next_step(self) -> None:
        started = time.perf_counter()
        busy = self.engine.busy_seconds
        batch = await self.pool.next_batch(self.step + 1)
        times = {"time/rollout": time.perf_counter() - started}
        self._check_failures(batch)
        self.exhausted = batch.exhausted
        if not batch.groups:
            if not self.step:
                raise RunFailed(f"{self.config.env} has no task to train on")
            return
        # A cancelled update would leave weights that belong to no step.
        learning = asyncio.ensure_future(self._learn(batch, times, started, busy))
        try:
            await asyncio.shield(learning)
        except asyncio.CancelledError:
            await learning
            raise

    async def _learn(self, batch: Batch, times: dict[str, float], started: float, busy: float) -> None:
        dropped = Counter(batch.dropped)
        groups = usable(batch.groups, self.config, self.engine.version, dropped)
        batch.dropped = dropped
        metrics = {"step": self.step + 1, **rollout_metrics(batch, groups, self.engine.version)}
        self.whole = False
        if groups:
            rows, more = windows(groups, self.config)
            metrics |= more | await asyncio.to_thread(self.actor.train, rows)
        self.step += 1
        sent = time.perf_counter()
        await self._send_weights()
        self.pool.confirm(batch)
        times["time/weights"] = time.perf_counter() - sent
        times["time/generate"] = self.engine.busy_seconds - busy
        times["time/step"] = time.perf_counter() - started
        metrics |= times | engine_metrics(self.engine)
        metrics |= _rates(metrics, batch.played, groups)
        self.run_dir.write_rollouts(self.step, batch.played)
        self.run_dir.append_metrics(metrics)
        self.whole = True
        self.progress.step(metrics)
        self._warn_of_unused_tools(metrics)

    def _warn_of_unused_tools(self, metrics: Mapping[str, float]) -> None:
        offered, malformed = metrics.get("rollout/tools_offered", 0), metrics.get("rollout/malformed_calls", 0)
        if offered and not metrics["rollout/tool_calls_mean"] and not self._warned:
            self._warned = True
            self.progress.message(f"step {self.step}: tools were offered in {offered:g} turns and never called "
                                  f"({malformed:g} malformed calls); does the model know them, and its chat template?")

    async def _send_weights(self) -> None:
        await self.engine.pause()
        try:
            await self.engine.update_weights(self.actor.weights(), self.step)
        finally:
            await self.engine.resume()
        await self.sampler.check_parity(self.actor)

    def _check_failures(self, batch: Batch) -> None:
        failures = Counter(t.failure.reason for t in batch.played if t.failure is not None)
        share = failures.total() / max(1, len(batch.played))
        if failures and (share > self.config.rollout.max_failure_rate or share == 1):
            first = next(t.failure for t in batch.played if t.failure is not None)
            counts = ", ".join(f"{reason} {count}" for reason, count in failures.most_common())
            raise RunFailed(f"{failures.total()} of {len(batch.played)} rollouts of step {self.step + 1} failed "
                            f"({counts}), more than rollout.max_failure_rate = {self.config.rollout.max_failure_rate} "
                            f"allows; the first: {first.message}")

    async def _evaluate_if_due(self) -> None:
        options = self.config.eval
        if self.exhausted or self.step >= self.config.steps:
            due, when = options.after, "after"
        elif self.step:
            due, when = options.every and self.step % options.every == 0, f"step {self.step}"
        else:
            due, when = options.before, "before"
        # A run that was resumed at this step may have done so before.
        if due and not any(line["step"] == self.step and "eval/when" in line for line in self.run_dir.read_metrics()):
            self.run_dir.append_metrics({"step": self.step, "eval/when": when, **await self._score(when)})

    async def _score(self, when: str) -> dict[str, float]:
        started = time.perf_counter()
        result = await self.sampler.evaluate()
        self.progress.evaluation(result.env, when, result.metrics())
        score = result.pass_at.get(1, result.reward_mean)
        self.best = score if self.best is None else max(self.best, score)
        return {f"eval/{result.env}/{name}": value for name, value in result.metrics().items()} | {
            "time/eval": time.perf_counter() - started}

    def _save(self) -> Path:
        state = {"pool": self.pool.state(), "best": self.best}
        return save_checkpoint(self.run_dir.checkpoints_path, self.step, self.actor, state, self.config.checkpoint.keep)

    def _try_save(self) -> str:
        """Where the state was saved, or why not."""
        if not self.whole:
            return "not saved, as it was in the middle of a step"
        try:
            return f"saved as {self._save()}"
        except OSError as error:
            return f"not saved ({error}); older checkpoints are as they were"


def _rates(
    metrics: dict[str, float], played: Sequence[Trajectory], groups: Sequence[Sequence[Trajectory]]
) -> dict[str, float]:
    """Tokens a second, and how far the step is from generation and training alone."""
    trained = sum(row.stats.tokens for group in groups for trajectory in group for row in trajectory.rows)
    alone = metrics["time/generate"] + metrics.get("time/train", 0.0) + metrics.get("time/logprobs", 0.0)
    rates = {"perf/rollout_tokens_per_s": sampled_tokens(played) / metrics["time/rollout"]}
    if alone:
        rates["perf/step_over_parts"] = metrics["time/step"] / alone
    if metrics.get("time/train"):
        rates["perf/train_tokens_per_s"] = trained / metrics["time/train"]
    return rates
