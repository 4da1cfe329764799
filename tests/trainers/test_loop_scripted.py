"""The loop around scripted parts: what happens at the same time, what waits for what, and what an end leaves."""

import asyncio
import gc
import io
import json
import os
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from concurrent.futures import Future
from contextlib import nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from molt_gym.errors import RunFailed
from molt_gym.threads import call_in_thread
from molt_gym.tokens import Failure, Row, RowRef, Trajectory
from molt_gym.trainers.actor.actor import ActorLost
from molt_gym.trainers.checkpoint import load_state, newest_checkpoint
from molt_gym.trainers.config import load_config
from molt_gym.trainers.evaluate import EvalResult
from molt_gym.trainers.loop import Loop
from molt_gym.trainers.progress import Progress
from molt_gym.trainers.rollout.pool import Plan, Pool, TaskStream
from molt_gym.trainers.run_dir import RunDir

WAIT = 120.0
ENV = "Any-v0"


class Parts:
    """Engine, sampler, runner and actors in one, with a log of what they did; a test replaces what it wants to see."""

    busy_seconds = 0.0

    def __init__(self, run_dir: RunDir, **options: Any) -> None:
        settings = {"rollout.engine": "vllm", "rollout.group_size": 2, "rollout.groups_per_step": 1, "steps": 3,
                    "eval.before": False, "eval.after": False, "checkpoint.keep": 1}
        self.config = load_config(ENV, overrides=settings | options)
        self.log: list[str] = []
        self.out = io.StringIO()
        self.run_dir, self.engine, self.version, self.retried = run_dir, self, 0, {}
        self.wants_weights, self.members = asyncio.Event(), [self]
        self.scores, self.lost = iter([0.0] * 100), None
        rollout = self.config.rollout
        plan = Plan(rollout.groups_per_step, rollout.group_size, rollout.max_staleness)
        self.pool = Pool(self, TaskStream(100, 0), plan, seed=0)
        self.loop = self.new_loop()

    def new_loop(self) -> Loop:
        return Loop(self.config, self, lambda: Actor(self), self.pool, self.run_dir, Progress(self.out))

    async def run(self, *, resume: bool = False) -> Path:
        await self.loop.start(resume=resume)
        try:
            return await self.loop.run(lambda actor: None)
        finally:
            await self.loop.close()

    # The runner

    async def play(self, ticket: Any) -> Trajectory:
        row = Row([1, 2], [0, 1], [0.0, -1.0], [-1, self.version])
        return Trajectory(ENV, ticket.index, ticket.group, ticket.rollout, rows=[row], reward=float(ticket.rollout))

    # The sampler and its engine

    def pending(self) -> list[tuple[str, float]]:
        return []

    def take_faults(self) -> dict[str, int]:
        return {}

    async def check_parity(self, actor: "Actor", expected: list[float] | None = None) -> None:
        pass

    async def evaluate(self, *, alone: bool) -> list[EvalResult]:
        score = next(self.scores)
        self.log.append(f"evaluated {self.version}")
        return [EvalResult(ENV, 1, 1, {1: score}, score, 1.0, 0.0)]

    async def parity_of(self, actor: "Actor") -> list[float]:
        return []

    async def release(self) -> None:
        self.log.append("released")

    async def pause(self) -> None:
        pass

    async def resume(self) -> None:
        pass

    async def update_weights(self, weights: Any, version: int) -> None:
        self.log.append(f"weights {version}")
        self.version = version
        self.wants_weights.clear()

    # The actor's work

    def train(self) -> None:
        self.log.append("trained")

    def save(self, folder: Path) -> None:
        self.log.append("saved")

    def write(self, updates: str) -> None:
        pass

    # What is left

    @property
    def lines(self) -> list[tuple[int, str | None]]:
        return [(line["step"], line.get("eval/when")) for line in self.run_dir.read_metrics()]

    @property
    def saved(self) -> list[str]:
        return sorted(path.name for path in self.run_dir.checkpoints_path.glob("step-*"))


class Actor:
    """Counts its updates and keeps them in checkpoints."""

    def __init__(self, parts: Parts) -> None:
        self.parts, self.updates = parts, 0
        parts.log.append("actor")

    def train(self, windows: Any, kl: float | None = None) -> dict[str, float]:
        self.parts.train()
        self.updates += 1
        return {"updates": self.updates}

    def weights(self) -> list:
        return []

    def begin_save(self, folder: Path) -> Future[None]:
        self.parts.save(folder)
        return call_in_thread(partial(self._write, folder, str(self.updates)))

    def _write(self, folder: Path, updates: str) -> None:
        self.parts.write(updates)
        folder.mkdir()
        (folder / "updates").write_text(updates)

    def check(self) -> None:
        if (error := self.parts.lost) is not None:
            self.parts.lost = None
            raise error

    def load(self, folder: Path) -> None:
        self.updates = int((folder / "updates").read_text())

    def onload(self) -> None:
        pass

    def offload(self) -> None:
        pass

    def close(self) -> None:
        self.parts.log.append("closed")


@pytest.fixture
async def parts_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Callable[..., Parts]]:
    # It takes seconds where all tests' modules are loaded.
    monkeypatch.setattr(gc, "collect", lambda: 0)
    with RunDir(tmp_path / "run") as run_dir:
        yield lambda **options: Parts(run_dir, **options)


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(WAIT):
        while not condition():
            await asyncio.sleep(0.002)


async def ended(task: asyncio.Task) -> None:
    with suppress(asyncio.CancelledError):
        await asyncio.wait_for(task, WAIT)


class Held:
    """An evaluation that goes on until the test lets it end."""

    def __init__(self, parts: Parts, of: int) -> None:
        self.go, self.running, self._original, self._of = asyncio.Event(), asyncio.Event(), parts.evaluate, of
        self._parts = parts
        parts.evaluate = self

    async def __call__(self, *, alone: bool) -> list[EvalResult]:
        if self._parts.version == self._of:
            self.running.set()
            await self.go.wait()
        return await self._original(alone=alone)


# Nothing to learn from

@pytest.mark.parametrize(("steps", "empty", "stops"), [
    (3, range(3), 3), (20, range(2, 20), 10), (20, [step for step in range(20) if step % 8], None)])
async def test_steps_in_a_row_in_which_all_rollouts_are_dropped_stop_the_run(
    parts_of, steps: int, empty: Sequence[int], stops: int | None
) -> None:
    parts = parts_of(steps=steps, **{"rollout.incomplete_group": "drop", "rollout.max_failure_rate": 1.0})
    play = parts.play

    async def fail_one(ticket: Any) -> Trajectory:
        trajectory = await play(ticket)
        if ticket.step - 1 in empty and ticket.rollout:
            trajectory.reward, trajectory.failure = None, Failure("judge", "is away", "")
        return trajectory

    parts.play, finished = fail_one, []
    await parts.loop.start(resume=False)
    try:
        with nullcontext() if stops is None else pytest.raises(RunFailed, match="last: incomplete_group 1"):
            await asyncio.wait_for(parts.loop.run(finished.append), WAIT)
    finally:
        await parts.loop.close()
    assert (parts.lines[-1][0], len(finished)) == ((steps, 1) if stops is None else (stops, 0))
    assert parts.saved == [f"step-{stops or steps:06}"]


async def test_so_do_steps_in_a_row_whose_gradients_are_all_not_finite(parts_of, monkeypatch) -> None:
    parts = parts_of(steps=9)
    monkeypatch.setattr(Actor, "train", lambda *_: {"optim/skipped_nonfinite": 1.0})
    with pytest.raises(RunFailed, match="learnt in 8 steps in a row .* gradients not finite 1.*lower actor.lr"):
        await asyncio.wait_for(parts.run(), WAIT)
    assert parts.saved == ["step-000008"]


# Evaluation beside training

async def test_the_next_step_is_trained_while_an_evaluation_runs_and_the_weights_wait_for_its_end(parts_of) -> None:
    parts = parts_of(**{"eval.every": 2})
    held = Held(parts, of=2)
    parts.loop = parts.new_loop()
    run = asyncio.create_task(parts.run())
    await until(lambda: parts.log.count("trained") == 3)
    await asyncio.sleep(0.1)
    assert held.running.is_set() and parts.version == 2 and parts.saved == ["step-000002"]
    held.go.set()
    await asyncio.wait_for(run, WAIT)
    assert parts.log[-5:] == ["trained", "evaluated 2", "weights 3", "saved", "closed"]
    assert parts.lines == [(1, None), (2, None), (2, "step 2"), (3, None)]


@pytest.mark.parametrize("option", [{"eval.concurrent": False}, {"rollout.engine": "transformers"},
                                    {"rollout.release_memory": True}])
async def test_an_evaluation_that_must_be_alone_is(parts_of, option) -> None:
    parts = parts_of(**{"eval.every": 2, **option})
    Held(parts, of=2).go.set()
    parts.loop = parts.new_loop()
    await asyncio.wait_for(parts.run(), WAIT)
    log = [entry for entry in parts.log if entry != "released"]
    evaluated = log.index("evaluated 2")
    assert log[evaluated - 1: evaluated + 2] == ["saved", "evaluated 2", "trained"]


async def test_an_evaluation_that_fails_ends_the_run_which_evaluates_again_when_it_is_resumed(parts_of) -> None:
    parts = parts_of(**{"eval.every": 2})

    async def fail(*, alone: bool) -> list[EvalResult]:
        raise RunFailed("no rollout ended")

    original, parts.evaluate = parts.evaluate, fail
    parts.loop = parts.new_loop()
    with pytest.raises(RunFailed, match="no rollout ended"):
        await asyncio.wait_for(parts.run(), WAIT)
    assert parts.saved == ["step-000002"]
    parts.evaluate = original
    parts.loop = parts.new_loop()
    await asyncio.wait_for(parts.run(resume=True), WAIT)
    assert parts.lines == [(1, None), (2, None), (2, "step 2"), (3, None)]


async def test_the_end_of_the_run_waits_for_the_last_evaluation(parts_of) -> None:
    parts = parts_of(**{"eval.after": True})
    held = Held(parts, of=3)
    parts.loop = parts.new_loop()
    run = asyncio.create_task(parts.run())
    await asyncio.wait_for(held.running.wait(), WAIT)
    await until(lambda: parts.saved == ["step-000003"])
    held.go.set()
    await asyncio.wait_for(run, WAIT)
    assert parts.lines[-1] == (3, "after")


async def test_an_interrupt_gives_up_the_evaluation_and_the_step_that_waits_for_it_and_both_are_done_again(
    parts_of,
) -> None:
    parts = parts_of(**{"eval.every": 2})
    held = Held(parts, of=2)
    parts.loop = parts.new_loop()
    run = asyncio.create_task(parts.run())
    await until(lambda: parts.log.count("trained") == 3)
    run.cancel()
    await ended(run)
    assert parts.saved == ["step-000002"] and parts.lines == [(1, None), (2, None)]
    held.go.set()
    parts.loop = parts.new_loop()
    await asyncio.wait_for(parts.run(resume=True), WAIT)
    assert parts.lines == [(1, None), (2, None), (2, "step 2"), (3, None)]
    assert [line.get("updates") for line in parts.run_dir.read_metrics()] == [1, 2, None, 3]
    groups = [json.loads(text)["group"] for step in (1, 2, 3) for text in
              (parts.run_dir.rollouts_path / f"step-{step:06d}.jsonl").read_text().splitlines()]
    assert groups == [0, 0, 1, 1, 2, 2]


@pytest.mark.parametrize("left", [0, 1])
async def test_an_evaluation_is_given_up_if_no_engine_is_left_that_has_its_weights(parts_of, left: int) -> None:
    parts = parts_of(**{"eval.every": 2})
    held = Held(parts, of=2)
    parts.loop = parts.new_loop()
    run = asyncio.create_task(parts.run())
    await until(lambda: parts.log.count("trained") == 3)
    parts.members = [parts] * left
    parts.wants_weights.set()
    if left:
        await asyncio.sleep(0.1)
        assert not run.done()
        held.go.set()
    await asyncio.wait_for(run, WAIT)
    assert parts.lines == [(1, None), (2, None), *[(2, "step 2")] * left, (3, None)]
    assert ("given up" in parts.out.getvalue()) != bool(left)


# The best checkpoint

async def test_the_best_checkpoint_stays_and_is_found_by_its_link(parts_of) -> None:
    parts = parts_of(steps=6, **{"eval.every": 1, "eval.before": True, "eval.after": True})
    parts.scores = iter([0.9, 0.2, 0.8, 0.1, 0.8, 0.3, 0.4])
    await asyncio.wait_for(parts.run(), WAIT)
    best = parts.run_dir.checkpoints_path / "best"
    assert (os.readlink(best), parts.saved) == ("step-000004", ["step-000004", "step-000006"])
    assert load_state(best)["step"] == 4 and (best / "actor" / "updates").read_text() == "4"


async def test_a_resumed_run_still_knows_the_best(parts_of) -> None:
    parts = parts_of(steps=3, **{"eval.every": 1, "eval.after": True})
    parts.scores = iter([0.9, 0.2, 0.1, 0.3, 0.4])
    await asyncio.wait_for(parts.run(), WAIT)
    parts.config = load_config(ENV, preset=parts.config.model_dump(exclude_none=True), overrides={"steps": 5})
    parts.loop = parts.new_loop()
    await asyncio.wait_for(parts.run(resume=True), WAIT)
    assert parts.saved == ["step-000001", "step-000005"]
    assert os.readlink(parts.run_dir.checkpoints_path / "best") == "step-000001"


# Actors that are lost

async def test_an_actor_that_is_lost_is_replaced_by_one_that_goes_on_from_the_newest_checkpoint(parts_of) -> None:
    parts, losses = parts_of(steps=5, **{"checkpoint.every": 2}), iter([0, 0, 0, 1, 0, 1, *[0] * 9])

    def train() -> None:
        if next(losses):
            raise ActorLost("rank 1 died")

    parts.train = train
    await asyncio.wait_for(parts.run(), WAIT)
    lines = parts.run_dir.read_metrics()
    assert [(line["step"], line["updates"], line.get("actor/restarts", 0)) for line in lines] == [
        (1, 1, 0), (2, 2, 0), (3, 3, 2), (4, 4, 2), (5, 5, 2)]
    assert parts.log.count("actor") == parts.log.count("closed") == 3
    assert parts.out.getvalue().count("going on from step 2") == 2


@pytest.mark.parametrize("staleness", [0, 2])
async def test_no_task_is_trained_twice_or_left_out_when_an_actor_is_lost(parts_of, staleness: int) -> None:
    parts, calls = parts_of(steps=6, **{"checkpoint.every": 2, "rollout.max_staleness": staleness}), []

    def train() -> None:
        calls.append(1)
        if len(calls) == 4:
            raise ActorLost("rank 1 died")

    parts.train = train
    await asyncio.wait_for(parts.run(), WAIT)
    groups = [json.loads(text)["group"] for step in range(1, 7) for text in
              (parts.run_dir.rollouts_path / f"step-{step:06d}.jsonl").read_text().splitlines()]
    assert sorted(groups[::2]) == list(range(6))


@pytest.mark.parametrize("where", ["save", "update_weights", "check_parity"])
async def test_an_actor_may_be_lost_in_any_call(parts_of, where: str) -> None:
    parts = parts_of(**{"checkpoint.every": 1})
    original, calls = getattr(parts, where), []

    def lost(*arguments: Any) -> Any:
        calls.append(1)
        if len(calls) == 2:
            raise ActorLost("rank 1 died")
        return original(*arguments)

    setattr(parts, where, lost)
    await asyncio.wait_for(parts.run(), WAIT)
    assert [line["updates"] for line in parts.run_dir.read_metrics()] == [1, 2, 3]
    assert parts.saved == ["step-000003"]


async def test_actors_that_are_lost_too_often_end_the_run_with_all_causes(parts_of) -> None:
    parts, causes = parts_of(**{"failures.actor_restarts": 2}), iter(["one", "two", "three"])

    def train() -> None:
        raise ActorLost(f"rank {next(causes)} died")

    parts.train = train
    with pytest.raises(RunFailed, match="(?s)lost 3 times, more than failures.actor_restarts = 2 allows"
                       ".*rank one died.*rank two died.*rank three died"):
        await asyncio.wait_for(parts.run(), WAIT)


async def test_a_start_that_fails_counts_as_one(parts_of) -> None:
    parts, starts = parts_of(), iter([0, 1, 0])
    make, losses = parts.loop.make_actor, iter([1, *[0] * 9])

    def make_actor() -> Actor:
        if next(starts):
            raise ActorLost("rank 1 died at its start")
        return make()

    def train() -> None:
        if next(losses):
            raise ActorLost("rank 1 died")

    parts.train, parts.loop.make_actor = train, make_actor
    await asyncio.wait_for(parts.run(), WAIT)
    assert parts.run_dir.read_metrics()[-1]["actor/restarts"] == 2


# Engines that start again, rows that are lost

async def test_an_engine_that_starts_again_gets_the_weights_while_rollouts_wait_for_it(parts_of) -> None:
    parts, wanted = parts_of(steps=2), asyncio.Event()
    original = parts.play

    async def play(ticket: Any) -> Trajectory:
        if ticket.group == 1 and not wanted.is_set():
            wanted.set()
            parts.wants_weights.set()
        while parts.wants_weights.is_set():
            await asyncio.sleep(0.001)
        return await original(ticket)

    parts.play = play
    await asyncio.wait_for(parts.run(), WAIT)
    assert [entry for entry in parts.log if entry != "saved"] == [
        "actor", "weights 0", "trained", "weights 1", "weights 1", "trained", "weights 2", "closed"]


async def test_rollouts_whose_rows_are_lost_are_failed_ones(parts_of) -> None:
    parts = parts_of(steps=1, **{"rollout.group_size": 4})
    original, trained = parts.play, []

    async def play(ticket: Any) -> Trajectory:
        trajectory = await original(ticket)
        trajectory.rows = [RowRef(f"node {ticket.rollout}", 0, trajectory.rows[0].stats)]
        return trajectory

    parts.play = play
    actor = Actor(parts)
    actor.lost = lambda sources: [source == "node 2" for source in sources]
    actor.train = lambda windows, kl: trained.extend(row.source for window in windows for row in window) or {}
    parts.loop.make_actor = lambda: actor
    await asyncio.wait_for(parts.run(), WAIT)
    assert trained == ["node 0", "node 1", "node 3"]
    assert parts.run_dir.read_metrics()[0]["rollout/failed/rows_lost"] == 1


# Checkpoints

async def test_training_goes_on_while_a_checkpoint_is_written_and_the_next_one_waits_for_it(parts_of) -> None:
    parts, go = parts_of(steps=6, **{"checkpoint.every": 2}), threading.Event()
    parts.write = lambda updates: updates == "2" and go.wait(WAIT)
    run = asyncio.create_task(parts.run())
    await until(lambda: parts.log.count("trained") == 4)
    await asyncio.sleep(0.05)
    assert parts.log.count("saved") == 1 and not parts.saved and len(parts.lines) == 4
    go.set()
    await asyncio.wait_for(run, WAIT)
    assert parts.log.count("saved") == 3 and parts.saved == ["step-000006"]
    assert all(("time/checkpoint" in line) == (line["step"] in (3, 5)) for line in parts.run_dir.read_metrics())


async def test_a_state_that_cannot_be_written_meanwhile_is_told_and_the_run_goes_on(parts_of) -> None:
    parts = parts_of(steps=6, **{"checkpoint.every": 2})

    def write(updates: str) -> None:
        if updates == "4":
            raise OSError("the disk is full")

    parts.write = write
    await asyncio.wait_for(parts.run(), WAIT)
    assert parts.saved == ["step-000006"] and parts.lines[-1] == (6, None)
    assert "step 4 not saved (the disk is full); older checkpoints are as they were" in parts.out.getvalue()


async def test_an_actor_that_is_lost_while_its_last_state_is_written_is_replaced(parts_of) -> None:
    parts = parts_of(steps=3, **{"checkpoint.every": 2})

    def write(updates: str) -> None:
        if updates == "3" and parts.log.count("actor") == 1:
            parts.lost = ActorLost("rank 1 died")
            raise OSError("a connection broke")

    parts.write = write
    await asyncio.wait_for(parts.run(), WAIT)
    assert parts.log.count("actor") == 2 and parts.saved == ["step-000003"]
    assert [line["updates"] for line in parts.run_dir.read_metrics()] == [1, 2, 3]


# Interrupts

async def test_rollouts_go_on_while_a_checkpoint_is_written_and_a_second_interrupt_does_not_lose_it(parts_of) -> None:
    parts, saving, go = parts_of(steps=10_000, **{"rollout.max_staleness": 2}), threading.Event(), threading.Event()

    def save(folder: Path) -> None:
        saving.set()
        assert go.wait(WAIT)

    parts.save = save
    run = asyncio.create_task(parts.run())
    await until(lambda: parts.log.count("trained") >= 2)
    run.cancel()
    await until(saving.is_set)
    run.cancel()
    await asyncio.sleep(0.05)
    run.cancel()
    await asyncio.sleep(0.05)
    assert not run.done() and not parts.saved
    go.set()
    await ended(run)
    step = load_state(newest_checkpoint(parts.run_dir.checkpoints_path))["step"]
    assert parts.lines[-1] == (step, None) and step >= 2


async def test_the_first_interrupt_is_answered_at_once_and_the_step_under_way_is_saved(parts_of) -> None:
    parts, training, go = parts_of(), threading.Event(), threading.Event()

    def train() -> None:
        training.set()
        assert go.wait(WAIT)

    parts.train = train
    run = asyncio.create_task(parts.run())
    await until(training.is_set)
    run.cancel()
    await until(lambda: parts.out.getvalue() == "ending; what is under way is finished first\n")
    go.set()
    await ended(run)
    assert parts.saved == ["step-000001"] and parts.out.getvalue().count("ending;") == 1
    assert "interrupted after step 1, saved as" in parts.out.getvalue()


def without_judge(play: Callable[[Any], Awaitable[Trajectory]]) -> Callable[[Any], Awaitable[Trajectory]]:
    """Rollouts of step 2 fail."""
    async def failing(ticket: Any) -> Trajectory:
        trajectory = await play(ticket)
        if ticket.step == 2:
            trajectory.reward, trajectory.failure = None, Failure("judge", "is away", "")
        return trajectory

    return failing


async def test_an_interrupt_while_a_run_that_failed_comes_to_rest_does_not_lose_what_it_learnt(parts_of) -> None:
    parts, resting, go = parts_of(), asyncio.Event(), asyncio.Event()
    async def close(original: Callable = parts.pool.close) -> None:
        resting.set()
        await go.wait()
        await original()

    parts.play, parts.pool.close = without_judge(parts.play), close
    run = asyncio.create_task(parts.run())
    await asyncio.wait_for(resting.wait(), WAIT)
    run.cancel()
    await asyncio.sleep(0.05)
    go.set()
    await ended(run)
    assert parts.saved == ["step-000001"] and "failed after step 1, saved as" in parts.out.getvalue()


async def test_what_ended_a_run_is_told_also_where_its_state_cannot_be_saved(parts_of) -> None:
    parts = parts_of()

    def save(folder: Path) -> None:
        raise RuntimeError("the device is gone")

    parts.play, parts.save = without_judge(parts.play), save
    with pytest.raises(RunFailed, match="2 of 2 rollouts of step 2 failed .judge 2"):
        await asyncio.wait_for(parts.run(), WAIT)
    assert "failed after step 1, not saved (the device is gone)" in parts.out.getvalue()


async def test_a_step_is_saved_without_the_engines_that_the_same_signal_ended(parts_of) -> None:
    parts, training, go = parts_of(), threading.Event(), threading.Event()

    def train() -> None:
        training.set()
        assert go.wait(WAIT)

    async def update_weights(weights: Any, version: int) -> None:
        raise RunFailed("no engine is left")

    parts.train = train
    run = asyncio.create_task(parts.run())
    await until(training.is_set)
    parts.update_weights = update_weights
    run.cancel()
    await asyncio.sleep(0.05)
    go.set()
    await ended(run)
    assert run.cancelled() and parts.saved == ["step-000001"] and parts.lines == [(1, None)]


async def test_when_nothing_moves_the_watchdog_says_what_the_loop_waits_for(parts_of) -> None:
    parts, go = parts_of(steps=1, **{"failures.watchdog": 0.1}), threading.Event()
    parts.train = lambda: go.wait(WAIT)
    run = asyncio.create_task(parts.run())
    await until(lambda: "nothing has moved for 0.1 s; pending: training step 1 for 0 s" in parts.out.getvalue())
    go.set()
    await asyncio.wait_for(run, WAIT)
