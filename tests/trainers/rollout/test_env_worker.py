import asyncio
import threading
import time

import gymnasium as gym
import pytest

from molt_gym import ChatEnv, Turn
from molt_gym.trainers.rollout.env_calls import choose_task
from molt_gym.trainers.rollout.env_worker import DeadlinePassed, EnvPool, EnvWorker


async def until(condition, seconds=5.0):
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.005)


class Marked(gym.Env):
    """An env that writes down in which thread it was made, used and closed."""

    def __init__(self, threads):
        self.threads = threads
        self.threads.append(threading.get_ident())

    def close(self):
        self.threads.append(threading.get_ident())


async def test_an_env_lives_in_one_thread_which_is_not_the_loops():
    threads = []
    worker = EnvWorker(lambda: Marked(threads))
    for _ in range(3):
        await worker.call(lambda env: env.threads.append(threading.get_ident()), 5)
    worker.retire()
    await until(lambda: len(threads) == 5)
    assert len(set(threads)) == 1 and threads[0] != threading.get_ident()


@pytest.mark.parametrize("own_process", [False, True])
async def test_an_env_that_is_given_back_frees_what_its_episode_holds(own_process):
    class Holding(ChatEnv):
        held, left = False, 0

        def begin(self, index):
            self.held = True
            return [{"role": "user", "content": "hi"}]

        def answer(self, message):
            return Turn()

        def leave(self):
            self.held, self.left = False, self.left + 1

    pool = EnvPool(Holding, own_process=own_process)
    worker = pool.take()
    await worker.call(lambda env: env.reset(seed=0) and None, 60)
    assert await worker.call(lambda env: env.held, 60)
    pool.give_back(worker)
    assert pool.take() is worker and await worker.call(lambda env: (env.held, env.left), 60) == (False, 1)
    worker.retire()


async def test_a_slow_env_does_not_hold_up_the_loop_or_another_env(scripted):
    slow, fast = EnvWorker(scripted()), EnvWorker(scripted())
    waiting = asyncio.create_task(slow.call(lambda env: time.sleep(0.5), 5))
    started = time.monotonic()
    await fast.call(lambda env: env.reset(seed=0), 5)
    assert time.monotonic() - started < 0.4 and not waiting.done()
    await waiting
    assert slow.usable and fast.usable


async def test_a_hung_call_is_given_up_at_its_deadline_with_its_worker(scripted):
    release = threading.Event()
    worker = EnvWorker(scripted())
    started = time.monotonic()
    with pytest.raises(DeadlinePassed, match=r"0\.05 s"):
        await worker.call(lambda env: release.wait(20), 0.05)
    assert time.monotonic() - started < 2 and not worker.usable
    release.set()


async def test_a_timeout_error_of_the_env_is_no_deadline(scripted):
    def work(env):
        raise TimeoutError("the judge")

    with pytest.raises(TimeoutError, match="the judge"):
        await EnvWorker(scripted()).call(work, 5)


@pytest.mark.parametrize("error", [StopIteration("no more tasks"), SystemExit(3), KeyboardInterrupt(),
                                   asyncio.CancelledError("inner")])
async def test_what_a_future_or_the_loop_cannot_carry_arrives_as_a_plain_error(scripted, error):
    def work(env):
        raise error

    with pytest.raises(RuntimeError, match=f"{type(error).__name__}: {error}"):
        await asyncio.wait_for(EnvWorker(scripted()).call(work, 5), 2)


async def test_an_error_or_a_cancellation_makes_a_worker_unusable(scripted):
    worker = EnvWorker(scripted())
    with pytest.raises(ZeroDivisionError):
        await worker.call(lambda env: 1 / 0, 5)
    assert not worker.usable
    worker = EnvWorker(scripted())
    call = asyncio.create_task(worker.call(lambda env: time.sleep(0.2), 5))
    await asyncio.sleep(0.02)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert not worker.usable


async def test_workers_are_used_again_unless_they_broke():
    threads = []
    pool = EnvPool(lambda: Marked(threads))
    first = pool.take()
    second = pool.take()
    assert first is not second
    pool.give_back(first)
    assert pool.take() is first
    with pytest.raises(ZeroDivisionError):
        await first.call(lambda env: 1 / 0, 5)
    pool.give_back(first)
    await until(lambda: len(threads) == 2)
    assert pool.take() is not first


async def test_closing_a_pool_closes_its_envs_before_it_returns():
    threads = []
    pool = EnvPool(lambda: Marked(threads))
    workers = [pool.take() for _ in range(3)]
    for worker in workers:
        await worker.call(lambda env: None, 5)
        pool.give_back(worker)
    pool.close()
    assert len(threads) == 6
    pool.close()


async def test_a_worker_that_never_made_an_env_can_be_closed():
    pool = EnvPool(lambda: 1 / 0)
    pool.give_back(pool.take())
    pool.close()


def test_a_chat_env_takes_its_task_as_an_option_and_another_env_as_its_seed(scripted):
    assert choose_task(scripted()(), 4, 99) == {"seed": 99, "options": {"index": 4}}
    assert choose_task(gym.make("CartPole-v1"), 4, 99) == {"seed": 4}


async def test_reset_plays_the_task_that_was_chosen(scripted):
    worker = EnvWorker(scripted(lambda env, message: Turn(terminated=True)))
    observation, info = await worker.call(lambda env: env.reset(**choose_task(env, 4, 99)), 5)
    assert observation["messages"][0]["content"] == "What is 4?" and info == {"task_index": 4}
