"""What is told when nothing moves."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from molt_gym.trainers.watchdog import MOST, Watchdog

SOON = 0.05


class Run:
    """Rollouts that a test makes pending, and what was said."""

    def __init__(self) -> None:
        self.rollouts: list[tuple[str, float]] = []
        self.said: list[str] = []
        self.heard = asyncio.Event()

    def say(self, text: str) -> None:
        self.said.append(text)
        self.heard.set()

    @contextmanager
    def watched(self, seconds: float = SOON) -> Iterator[Watchdog]:
        watchdog = Watchdog(seconds, lambda: list(self.rollouts), self.say)
        watching = asyncio.create_task(watchdog.watch())
        yield watchdog
        watching.cancel()


@pytest.fixture
async def run() -> Run:
    return Run()


async def test_what_is_pending_is_told_oldest_rollouts_first_and_told_again(run: Run) -> None:
    run.rollouts = [(f"step of rollout {i} of group 0 (Any-v0 5)", 100.0 + i) for i in range(20)]
    run.rollouts += [("reply of rollout 0 of group 1 (Any-v0 6)", 3.0)]
    with run.watched() as watchdog, watchdog.doing("training step 4"):
        await asyncio.wait_for(run.heard.wait(), 10)
        run.heard.clear()
        await asyncio.wait_for(run.heard.wait(), 10)
    first = run.said[0]
    assert first.startswith("nothing has moved for 0.05 s; pending: training step 4 for 0 s; 20 rollouts in step; ")
    assert "1 rollouts in reply; step of rollout 19 of group 0 (Any-v0 5) for 119 s; step of rollout 18" in first
    assert first.count("of group") == MOST


@pytest.mark.parametrize("what", ["phase", "age", "doing"])
async def test_nothing_is_told_while_something_moves(run: Run, what: str) -> None:
    with run.watched(1.0) as watchdog:
        for i in range(15):
            if what == "phase":
                run.rollouts = [(f"{'step' if i % 2 else 'reply'} of rollout 0 of group 0 (Any-v0 5)", i)]
            elif what == "age":
                run.rollouts = [("step of rollout 0 of group 0 (Any-v0 5)", 15.0 - i)]
            with watchdog.doing(f"training step {i if what == 'doing' else 0}"):
                await asyncio.sleep(0.1)
    assert not run.said


async def test_what_is_over_is_not_pending(run: Run) -> None:
    with run.watched() as watchdog:
        with pytest.raises(ValueError), watchdog.doing("saving"):
            raise ValueError
        await asyncio.wait_for(run.heard.wait(), 10)
    assert run.said[0].endswith("pending: nothing that is known of")


async def test_a_watchdog_of_0_seconds_is_none(run: Run) -> None:
    with run.watched(0) as watchdog, watchdog.doing("training"):
        await asyncio.sleep(3 * SOON)
    assert not run.said
