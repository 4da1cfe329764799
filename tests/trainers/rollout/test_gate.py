import asyncio
import random
import time

import pytest

from molt_gym import Turn
from molt_gym.tokens import Sampling
from molt_gym.trainers.rollout.engine import Request
from molt_gym.trainers.rollout.gate import OpenGate, WaveGate
from molt_gym.trainers.rollout.pool import Plan, Pool, TaskStream
from molt_gym.trainers.rollout.runner import Limits, Runner
from molt_gym.trainers.rollout.seats import TokenSeat
from molt_gym.trainers.rollout.stage import Stage


class Watched:
    """An engine, the keys of each wave that it was given, and its replies."""

    def __init__(self, engine):
        self.engine, self.waves, self.replies = engine, [], []

    def submit(self, requests):
        self.waves.append([request.key for request in requests])
        self.replies += (replies := self.engine.submit(requests))
        return replies


def request(*key, max_tokens=2):
    return Request([5, 7 + key[0]], Sampling(max_tokens=max_tokens, temperature=0), key)


async def settle():
    for _ in range(5):
        await asyncio.sleep(0)


async def rollout(gate, key, turns=1, after=0.0):
    with gate.rollout():
        for turn in range(turns):
            await asyncio.sleep(after)
            await gate.generate(request(*key, turn))


async def test_an_open_gate_passes_at_once_whoever_else_is_live(engine):
    gate = OpenGate(engine)
    with gate.rollout(), gate.rollout():
        await asyncio.wait_for(gate.generate(request(0)), 5)


async def test_a_wave_leaves_when_all_have_asked_in_the_order_of_keys(engine):
    watched = Watched(engine)
    gate = WaveGate(watched)
    delays = {(1, 0): 0.0, (0, 1): 0.05, (0, 0): 0.02, (10, 0): 0.03}
    await asyncio.wait_for(asyncio.gather(*(rollout(gate, key, 2, after) for key, after in delays.items())), 10)
    assert watched.waves == [[(*key, turn) for key in sorted(delays)] for turn in (0, 1)]


async def test_a_rollout_that_ends_releases_those_that_wait(engine):
    watched = Watched(engine)
    gate = WaveGate(watched)
    await asyncio.wait_for(asyncio.gather(rollout(gate, (0,), 3), rollout(gate, (1,), 1), rollout(gate, (2,), 2)), 10)
    assert watched.waves == [[(0, 0), (1, 0), (2, 0)], [(0, 1), (2, 1)], [(0, 2)]]


async def test_a_rollout_that_fails_releases_those_that_wait(engine):
    gate = WaveGate(engine)

    async def failing():
        with gate.rollout():
            await asyncio.sleep(0.02)
            raise ValueError

    results = await asyncio.wait_for(
        asyncio.gather(rollout(gate, (0,)), failing(), return_exceptions=True), 10)
    assert results[0] is None and isinstance(results[1], ValueError)


async def test_a_rollout_cancelled_while_it_waits_releases_the_others(engine):
    watched = Watched(engine)
    gate = WaveGate(watched)
    tasks = [asyncio.create_task(rollout(gate, (i,))) for i in range(3)]
    with gate.rollout():
        await settle()
        tasks[1].cancel()
        await settle()
        assert not watched.waves
    await asyncio.wait_for(asyncio.gather(tasks[0], tasks[2]), 10)
    assert watched.waves == [[(0, 0), (2, 0)]]


async def test_a_rollout_cancelled_just_after_its_wave_left_frees_its_slot(make_engine):
    gate = WaveGate(make_engine(max_sequences=1, max_context=1024))
    endless = asyncio.create_task(gate.generate(request(0, max_tokens=1000)))
    with gate.rollout(), gate.rollout():
        await settle()
        short = asyncio.create_task(gate.generate(request(1)))
        asyncio.get_running_loop().call_soon(endless.cancel)
        started = time.monotonic()
        await asyncio.wait_for(short, 5)
    assert time.monotonic() - started < 1
    assert endless.cancelled()


async def test_cancelling_a_rollout_ends_its_generation(make_engine):
    watched = Watched(make_engine(max_sequences=1, max_context=1024))
    gate = WaveGate(watched)
    with gate.rollout():
        endless = asyncio.create_task(gate.generate(request(0, max_tokens=1000)))
        await settle()
        endless.cancel()
        await settle()
        await asyncio.wait_for(gate.generate(request(1)), 60)
    assert [reply.cancelled() for reply in watched.replies] == [True, False]


@pytest.mark.parametrize("gate_type", [OpenGate, WaveGate])
async def test_an_error_of_the_engine_reaches_the_rollout(engine, gate_type):
    await engine.close()
    gate = gate_type(engine)
    with gate.rollout(), pytest.raises(RuntimeError, match="closed"):
        await gate.generate(request(0))


@pytest.mark.parametrize("most", [None, 4])
async def test_what_is_sampled_is_a_function_of_the_seed_however_long_env_steps_take(
    make_engine, scripted, renderer, most
):
    def answer(env, message):
        time.sleep(random.random() * 0.03)
        over = len(message["content"] or "") % 3 == 0
        return Turn([] if over else [{"role": "user", "content": "No, try again."}], reward=1.0, terminated=over)

    def begin(env, index):
        time.sleep(random.random() * 0.03)
        return [{"role": "user", "content": f"Write a number from 0 to {index % 3}."}]

    async def play(seed):
        gate = WaveGate(make_engine(max_sequences=5))
        sampling = Sampling(max_tokens=8)
        runner = Runner("Talk-v0", scripted(answer, begin=begin, max_turns=4),
                        lambda ticket, attempt: TokenSeat(renderer, "rerender", sampling, 256, ticket, attempt, gate),
                        Limits(), live=gate.rollout, stage=Stage(most))
        pool = Pool(runner, TaskStream(100, seed), Plan(3, 3), seed=seed)
        batches = [await asyncio.wait_for(pool.next_batch(step), 30) for step in (1, 2)]
        runner.close()
        return [trajectory for batch in batches for trajectory in batch.played]

    first, second, other = await play(1), await play(1), await play(2)
    assert [trajectory.rows for trajectory in first] == [trajectory.rows for trajectory in second]
    assert [trajectory.rows for trajectory in first] != [trajectory.rows for trajectory in other]
    assert {trajectory.turns for trajectory in first} == {1, 2, 3, 4}


async def test_requests_to_another_engine_pass_in_the_same_waves_and_each_engine_gets_its_own(make_engine):
    ours, theirs = Watched(make_engine()), Watched(make_engine())
    gate = WaveGate(ours)
    beside = gate.beside(theirs)

    async def game(key, first, second):
        with gate.rollout():
            await settle()
            await first.generate(request(*key, 0))
            await second.generate(request(*key, 1))

    games = game((2,), beside, gate), game((0,), gate, beside), game((1,), gate, gate)
    await asyncio.wait_for(asyncio.gather(*games), 10)
    assert ours.waves == [[(0, 0), (1, 0)], [(1, 1), (2, 1)]]
    assert theirs.waves == [[(2, 0)], [(0, 1)]]
