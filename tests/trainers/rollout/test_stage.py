"""Few places for many rollouts: never too many at a time, none lost, none forgotten."""

import asyncio
import threading
from contextlib import contextmanager, nullcontext

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from molt_gym import EnvFailure, Turn, as_policy
from molt_gym.trainers.rollout.runner import Limits, Runner
from molt_gym.trainers.rollout.seats import PolicySeat
from molt_gym.trainers.rollout.stage import Stage
from molt_gym.trainers.rollout.ticket import Ticket

WAIT = 60


@settings(deadline=None)
@given(most=st.integers(1, 4),
       players=st.lists(st.tuples(st.integers(0, 5), st.none() | st.integers(0, 8)), max_size=12))
def test_there_are_never_more_than_places_and_who_waits_longest_gets_the_next_one(most, players):
    """players: for how many turns each plays, and when it is cancelled, if it is."""
    async def run():
        stage, playing, order = Stage(most), [], []

        async def play(number, turns):
            async with stage.place(nullcontext):
                playing.append(number)
                order.append(number)
                assert len(playing) <= most
                try:
                    for _ in range(turns):
                        await asyncio.sleep(0)
                finally:
                    playing.remove(number)

        tasks = [asyncio.create_task(play(number, turns)) for number, (turns, _) in enumerate(players)]
        for moment in range(9):
            await asyncio.sleep(0)
            for task, (_, cancelled) in zip(tasks, players, strict=True):
                if cancelled == moment:
                    task.cancel()
        await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), WAIT)
        assert order == sorted(order) and not [t for t in tasks if not t.cancelled() and t.exception()]
        assert set(order) >= {number for number, (_, cancelled) in enumerate(players) if cancelled is None}
        again = [asyncio.create_task(play(100 + number, 1)) for number in range(most)]
        await asyncio.sleep(0)
        assert len(playing) == most
        await asyncio.wait_for(asyncio.gather(*again), WAIT)

    asyncio.run(run())


async def test_who_is_next_is_live_before_the_last_one_is_not_any_more():
    stage, live, seen = Stage(1), [], []

    @contextmanager
    def lively(name):
        live.append(name)
        seen.append(list(live))
        yield
        live.remove(name)
        seen.append(list(live))

    async def play(name):
        async with stage.place(lambda: lively(name)):
            await asyncio.sleep(0)

    await asyncio.wait_for(asyncio.gather(play("a"), play("b")), WAIT)
    assert seen == [["a"], ["a", "b"], ["b"], []]


@pytest.mark.parametrize("most", [2, 100])
async def test_envs_that_share_a_stage_play_few_at_a_time_whatever_becomes_of_them(scripted, most):
    playing, peaks, lock = [0], [], threading.Lock()

    def begin(env, index):
        with lock:
            playing[0] += 1
            peaks.append(playing[0])
        return [{"role": "user", "content": "hi"}]

    def answer(env, message):
        with lock:
            playing[0] -= 1
        if env.index % 3 == 0:
            raise EnvFailure("server", "it is away") if env.index % 2 else ValueError("oh")
        return Turn(reward=1.0, terminated=True)

    stage, policy = Stage(most), as_policy(lambda observation: "yes")
    runners = [Runner("Test-v0", scripted(answer, begin=begin), lambda ticket, attempt: PolicySeat(policy), Limits(),
                      stage=stage) for _ in range(2)]
    played = await asyncio.wait_for(asyncio.gather(*(
        runners[index % 2].play(Ticket(index, index)) for index in range(24))), WAIT)
    assert max(peaks) <= most and len(peaks) == 24 + 4
    assert [t.index for t in played if t.failure is None] == [index for index in range(24) if index % 3]
    for runner in runners:
        runner.close()
