"""The training loop: pool → batch → advantages → actor → weights to the engine.

Written against `RolloutEngine` and `Actor`, wherever they run. Invariants: a step's metrics line is on disk before its
checkpoint is; a checkpoint holds the state after whole steps only, and is written while the run goes on; what is
evaluated is saved; on-policy, nothing is in flight when the weights change; an actor that was lost is replaced by one
that goes on from the newest checkpoint, as if the run had been resumed; whatever ends the run early, the newest state
is saved or the reason why not is said.
"""

import asyncio
import gc
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from molt_gym.errors import RunFailed

from .actor.actor import Actor, ActorLost
from .algorithms.kl import AdaptiveKl
from .batch import usable, windows
from .checkpoint import Checkpoints, load_state, restore_generators
from .config import Config
from .evaluate import Evaluations
from .failures import check_failures, check_idle, fail_lost_rows
from .handover import Handover, made_to_stay
from .league import League
from .progress import Progress
from .rollout.engine import RolloutEngine
from .rollout.env_calls import carried
from .rollout.pool import Batch, Pool
from .run_dir import RunDir
from .session import Sampler
from .step_metrics import fault_metrics, rates, rollout_metrics, unused_tools
from .teacher import TeacherEngine
from .waiting import attended, finished
from .watchdog import Watchdog

T = TypeVar("T")


@dataclass
class Loop:
    """One run's parts, and `step`, the number of whole steps behind it. `start` it, `run` it, `close` it."""

    config: Config
    sampler: Sampler
    make_actor: Callable[[], Actor]
    """Called in a thread."""
    pool: Pool
    run_dir: RunDir
    progress: Progress
    teacher: TeacherEngine | None = None
    """If it has an engine of its own."""
    about: Mapping[str, Any] = field(default_factory=dict)
    """See `Checkpoints`."""
    league: League | None = None
    """If a game is played against it."""
    step: int = 0
    exhausted: bool = False
    actor: Actor | None = None
    losses: list[str] = field(default_factory=list)
    """Why each actor that was lost was."""
    whole: bool = True
    """Whether weights, step and metrics file agree, so that they can be saved."""
    _held: float = 0.0
    """Seconds for which the last save held up the loop, until they are told."""
    _idle: int = 0
    """Steps in a row in which nothing was learnt: all was dropped, or no gradient was finite."""
    _stopping: bool = False
    _warned: bool = False

    def __post_init__(self) -> None:
        self.kl = AdaptiveKl.of(self.config.algorithm.kl, {})
        self.handover = Handover(self.sampler, self.config.rollout.release_memory)
        self.evaluations = Evaluations(self.config, self.sampler.evaluate, self.run_dir, self.progress)
        checkpoint, say = self.config.checkpoint, self.progress.message
        self.checkpoints = Checkpoints(
            self.run_dir.checkpoints_path, checkpoint.keep, asynchronous=checkpoint.asynchronous, say=say,
            mark=lambda: self.evaluations.mark_best(), about=self.about)
        self.watchdog = Watchdog(self.config.failures.watchdog, self.sampler.pending, self.progress.message)

    @property
    def engine(self) -> RolloutEngine:
        """What samples."""
        return self.sampler.engine

    async def start(self, *, resume: bool) -> bool:
        """Make the actor; whether it goes on from the newest whole checkpoint, without which the run begins anew."""
        await self.handover.to_actor(None)
        await self._to_the_end(asyncio.to_thread(self._make_actor))
        if not resume:
            return False
        with self.watchdog.doing("loading a checkpoint"):
            path = await self._to_the_end(asyncio.to_thread(self.checkpoints.newest))
            state = load_state(path) if path else {"step": 0, "pool": {"cursor": 0, "pending": []}}
            if path:
                await self._to_the_end(asyncio.to_thread(self.actor.load, path / "actor"))
        self.pool.load_state(state["pool"])
        self.kl = AdaptiveKl.of(self.config.algorithm.kl, state)
        restore_generators(state)
        self.step, self.exhausted = state["step"], False
        for name, now in self.about.items():
            if (before := state.get(name, now)) != now:
                self.progress.message(f"the run goes on with other {name} than before: {now} in place of {before}")
        self.run_dir.cut_metrics(self.step if path else -1)
        if not path:
            self.progress.message(f"no whole checkpoint in {self.run_dir.checkpoints_path}; starting again")
        self.evaluations.mark_best()
        self.whole = True
        return path is not None

    async def run(self, finish: Callable[[Path], None]) -> Path:
        """All steps that are left, with evaluations and checkpoints, then `finish` with the last one; returns that.

        Raises:
            RunFailed: too many rollouts failed, actors were lost too often, or there was nothing to train on.
            asyncio.CancelledError: interrupted, after the state was saved.
        """
        watching = asyncio.create_task(self.watchdog.watch())
        try:
            while True:
                try:
                    if self.losses:
                        await self._replace_actor()
                    return await self._run(finish)
                except ActorLost as error:
                    self.losses.append(str(error))
                    self.whole = False
                    # Before anything waits for what it was writing.
                    await self._end_actor()
        except BaseException as error:
            await self._to_the_end(self._end_early(interrupted=isinstance(error, asyncio.CancelledError)))
            raise
        finally:
            watching.cancel()

    async def _end_early(self, *, interrupted: bool) -> None:
        await self._stop()
        if interrupted or self.step:
            self.progress.message(f"{'interrupted' if interrupted else 'failed'} after step {self.step}, "
                                  f"{await self._try_save()}; go on with --resume {self.run_dir.path}")

    async def close(self) -> None:
        """End the actor and what is in flight."""
        await self._stop()
        await asyncio.to_thread(self.checkpoints.settle)
        await self._end_actor()
        gc.unfreeze()

    async def _run(self, finish: Callable[[Path], None]) -> Path:
        await self._send_weights()
        await self._between_steps()
        while not self._over:
            await self._next_step()
            await self._between_steps()
        await self._served(self.evaluations.finish())
        path = await self._save()
        with self.watchdog.doing("exporting the model"):
            await self._to_the_end(asyncio.to_thread(finish, path))
        return path

    @property
    def _over(self) -> bool:
        return self.exhausted or self.step >= self.config.steps

    async def _between_steps(self) -> None:
        """Save and evaluate if it is time for that."""
        when, every = self.evaluations.due(self.step, last=self._over), self.config.checkpoint.every
        if self._over or (self.step and (when or (every and self.step % every == 0))):
            await self._begin_save()
        if when:
            self.evaluations.begin(self.step, when)
            if not self.evaluations.concurrent:
                with self.watchdog.doing(f"evaluating step {self.step}"):
                    await self._served(self.evaluations.finish())

    async def _next_step(self) -> None:
        if self.league is not None:
            with self.watchdog.doing("a checkpoint joining the league"):
                await self._to_the_end(asyncio.to_thread(lambda: self.league.update(self.checkpoints.last())))
        started, busy = time.perf_counter(), self.engine.busy_seconds
        with self.watchdog.doing(f"rollouts of step {self.step + 1}"):
            batch = await self._served(self.pool.next_batch(self.step + 1))
            times = {"time/rollout": time.perf_counter() - started}
            await self._to_the_end(asyncio.to_thread(fail_lost_rows, batch.groups, self.actor))
        try:
            check_failures(batch.played, self.config, self.step + 1)
        except RunFailed as error:
            with suppress(OSError):
                path = await asyncio.to_thread(self.run_dir.write_rollouts, self.step + 1, batch.played)
                raise RunFailed(f"{error}\nall of them, with tracebacks: {path}") from None
            raise
        self.exhausted = batch.exhausted
        if batch.groups:
            # A cancelled update would leave weights that belong to no step.
            await self._to_the_end(self._learn(batch, times, started, busy))
        elif not self.step:
            raise RunFailed(f"{self.config.env} has no task to train on")

    async def _learn(self, batch: Batch, times: dict[str, float], started: float, busy: float) -> None:
        dropped = Counter(batch.dropped)
        groups = usable(batch.groups, self.config, self.engine.version, dropped)
        batch.dropped = dropped
        metrics = {"step": self.step + 1, **rollout_metrics(batch, groups, self.engine.version)}
        self.whole = False
        if groups:
            rows, more = windows(groups, self.config)
            if self.teacher is not None:
                with self.watchdog.doing(f"the teacher's log-probabilities of step {self.step + 1}"):
                    metrics |= await self.teacher.score([row for window in rows for row in window])
            with self.watchdog.doing(f"training step {self.step + 1}"):
                await self.handover.to_actor(self.actor)
                metrics |= more | await asyncio.to_thread(carried, self.actor.train, rows, self.kl.coefficient)
            metrics |= self.kl.step(metrics, sum(map(len, groups)))
        with self.watchdog.doing("the evaluation that runs, before the weights change"):
            await self._served(self.evaluations.finish(), self._give_up_evaluation)
        self.step += 1
        sent = time.perf_counter()
        await self._send_weights()
        self.pool.confirm(batch)
        now = time.perf_counter()
        times |= {"time/weights": now - sent, "time/step": now - started,
                  "time/generate": self.engine.busy_seconds - busy}
        if self._held:
            times["time/checkpoint"], self._held = self._held, 0.0
        metrics |= times | fault_metrics(self.sampler.take_faults())
        metrics |= rates(metrics, batch.played)
        if self.losses:
            metrics["actor/restarts"] = len(self.losses)
        # Records may have to come from other nodes.
        await asyncio.to_thread(self.run_dir.write_rollouts, self.step, batch.played)
        self.run_dir.append_metrics(metrics)
        self.whole = True
        self.progress.step(metrics)
        if not self._warned and (warning := unused_tools(metrics)):
            self._warned = True
            self.progress.message(warning)
        skipped = metrics.get("optim/skipped_nonfinite") == 1
        self._idle = self._idle + 1 if skipped or not groups else 0
        check_idle(self._idle, {**dropped, "gradients not finite": int(skipped)}, self.config)

    async def _send_weights(self) -> None:
        # Ranks that gather weights for nobody would be out of step with each other.
        await self._to_the_end(self._update_engine())

    async def _update_engine(self) -> None:
        if self._stopping:
            return
        with self.watchdog.doing(f"sending the weights of step {self.step}"):
            try:
                await self.handover.to_engines(self.actor, self.step)
            except Exception as error:
                # A signal to all processes ends engines too. The step can be saved without them.
                if isinstance(error, ActorLost) or not self._stopping:
                    raise

    async def _give_up_evaluation(self) -> None:
        if self.engine.members:
            await asyncio.sleep(1)
        else:
            self.evaluations.give_up("the engines that had its weights have ended")

    async def _served(self, work: Coroutine[Any, Any, T], serve: Callable[[], Awaitable[None]] | None = None) -> T:
        """What becomes of `work`, while engines that were started again get the weights, for which they ask.

        serve: called instead, where these weights are gone.
        """
        return await attended(work, getattr(self.engine, "wants_weights", None), serve or self._send_weights)

    async def _to_the_end(self, work: Coroutine[Any, Any, T]) -> T:
        """What becomes of `work`; if this is cancelled, `work` is done all the same, and then this is cancelled."""
        return await finished(work, self._interrupted, self.progress.message)

    async def _interrupted(self) -> None:
        if not self._stopping:
            self.progress.message("ending; what is under way is finished first")
        self._stopping = True
        # A step that waits for it is given up: the one that is evaluated was saved.
        await self.evaluations.cancel()

    async def _stop(self) -> None:
        await self.evaluations.cancel()
        await self.pool.close()

    async def _end_actor(self) -> None:
        actor, self.actor = self.actor, None
        if actor is not None:
            await asyncio.to_thread(actor.close)

    def _make_actor(self) -> None:
        # One that was lost must not hold its memory while another takes as much.
        self.actor = None
        self.actor = made_to_stay(self.make_actor)

    async def _replace_actor(self) -> None:
        most, causes = self.config.failures.actor_restarts, "\n".join(dict.fromkeys(self.losses))
        if len(self.losses) > most:
            raise RunFailed(f"the actor was lost {len(self.losses)} times, more than failures.actor_restarts = {most} "
                            f"allows:\n{causes}")
        self.progress.message(f"{self.losses[-1]}\nthe actor starts again ({len(self.losses)} of {most} times)")
        with self.watchdog.doing("another actor starting"):
            await self.close()
            self.evaluations = Evaluations(self.config, self.sampler.evaluate, self.run_dir, self.progress)
            await self.start(resume=True)
        self.progress.message(f"going on from step {self.step}")

    async def _begin_save(self) -> None:
        """Copy the state, which is written while the run goes on; what becomes of it is told by `checkpoints`."""
        if self.checkpoints.step == self.step:
            return
        started, state = time.perf_counter(), {"pool": self.pool.state(), "kl_coefficient": self.kl.coefficient}
        with self.watchdog.doing(f"saving step {self.step}"), suppress(OSError):
            await self._to_the_end(asyncio.to_thread(self.checkpoints.begin, self.step, self.actor, state))
        self._held = time.perf_counter() - started

    async def _save(self) -> Path:
        await self._begin_save()
        with self.watchdog.doing(f"saving step {self.step}"):
            return await self._to_the_end(asyncio.to_thread(self.checkpoints.finish))

    async def _try_save(self) -> str:
        """Where the state was saved, or why not."""
        if not self.whole:
            return "not saved, as it was in the middle of a step"
        try:
            return f"saved as {await self._save()}"
        except Exception as error:  # noqa: BLE001  it must not take the place of what ended the run
            return f"not saved ({error}); older checkpoints are as they were"
