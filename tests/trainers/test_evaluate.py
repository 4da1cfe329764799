import asyncio
import math
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from unittest.mock import Mock

import gymnasium as gym
import numpy as np
import pytest
import torch

from molt_gym import EnvFailure, RunFailed, Turn, as_policy
from molt_gym.tokens import Failure, Sampling, Trajectory
from molt_gym.trainers.checkpoint import best_checkpoint
from molt_gym.trainers.config import load_config
from molt_gym.trainers.evaluate import Evaluations, evaluate, held_out_kwargs, pass_at_k
from molt_gym.trainers.rollout.gate import WaveGate
from molt_gym.trainers.rollout.pool import TaskStream
from molt_gym.trainers.rollout.runner import Limits, Runner
from molt_gym.trainers.rollout.seats import PolicySeat, TokenSeat
from molt_gym.trainers.rollout.transformers_engine import TransformersEngine
from molt_gym.trainers.run_dir import RunDir
from molt_gym.trainers.scores import TaskScore, summary


def attempts(*rewards):
    """One task's attempts; None is one that failed."""
    return [Trajectory("Test-v0", 0, reward=reward, failure=Failure("judge", "", "") if reward is None else None)
            for reward in rewards]


def tasks(*groups):
    return [TaskScore.of(group) for group in groups]


@pytest.fixture
def play(scripted):
    """Evaluates a scripted env whose tasks score `score(env)` with a policy that does not matter."""

    async def run(score, episodes=6, k=1, tasks=10, chunk=8, seed=0, info=lambda env: {}, **options):
        make = scripted(lambda env, message: Turn(reward=score(env), terminated=True, info=info(env)))
        policy = as_policy(lambda observation: "yes")
        runner = Runner("Test-v0", make, lambda ticket, attempt: PolicySeat(policy), Limits(retries=0))
        try:
            stream = TaskStream(tasks, seed, epochs=1)
            return await asyncio.wait_for(evaluate(runner, stream, episodes, k, chunk=chunk, seed=seed, **options), 20)
        finally:
            runner.close()

    return run


@pytest.mark.parametrize(("n", "c", "k", "value"), [
    (4, 1, 1, 0.25), (4, 1, 2, 0.5), (4, 1, 4, 1.0), (4, 2, 2, 5 / 6), (4, 0, 4, 0.0), (5, 5, 3, 1.0),
    (10, 3, 5, 1 - 21 / 252)])
def test_pass_at_k_is_the_unbiased_estimator(n, c, k, value):
    assert pass_at_k(n, c, k) == pytest.approx(value)


def test_pass_at_one_and_at_k_are_means_over_tasks():
    result = summary("Test-v0", tasks(attempts(1, 0, 0, 0), attempts(1, 1, 1, 1), attempts(0, 0.9, 0, 0)), 4)
    assert result.pass_at == pytest.approx({1: (0.25 + 1 + 0) / 3, 4: 2 / 3})
    assert result.reward_mean == pytest.approx(5.9 / 12)
    assert result.metrics() == pytest.approx({"pass_at_1": 1.25 / 3, "pass_at_4": 2 / 3, "pass_hat_4": 1 / 3,
                                              "mean_at_4": 5.9 / 12, "reward_mean": 5.9 / 12, "length_mean": 0,
                                              "truncated": 0, "episodes": 3})


def test_the_best_checkpoint_can_be_marked_by_several_threads(tmp_path):
    said = []
    with RunDir(tmp_path / "run") as run_dir:
        for step in (1, 2):
            run_dir.append_metrics({"step": step, "eval/when": "", "eval/E/reward_mean": 1.0})
            (run_dir.checkpoints_path / f"step-{step:06d}").mkdir()
        evaluations = Evaluations(load_config("E"), None, run_dir, Mock(message=said.append))
        with ThreadPoolExecutor(4) as threads:
            for _ in range(100):
                threads.submit(evaluations.mark_best)
        assert not said and best_checkpoint(run_dir.checkpoints_path).name == "step-000002"


def test_the_mean_of_rewards_whose_sum_is_too_large_is_none_the_less_theirs():
    result = summary("Test-v0", tasks(attempts(-1.5e308, -1.5e308), attempts(-1.5e308, -1.5e308)), 2)
    assert result.reward_mean == -1.5e308


def test_a_failed_attempt_is_no_score_of_zero():
    result = summary("Test-v0", tasks(attempts(1, None), attempts(0, 0), attempts(None, None)), 2)
    assert result.pass_at == {1: 0.5, 2: 0.0}
    assert result.reward_mean == pytest.approx(1 / 3) and result.failures == {"judge": 3}


async def test_as_many_tasks_are_played_as_asked_each_k_times(play):
    result = await play(lambda env: float(env.index % 2), episodes=6, k=3)
    assert (result.episodes, result.k, len(result.trajectories)) == (6, 3, 18)
    assert len({trajectory.index for trajectory in result.trajectories}) == 6


@pytest.mark.parametrize("value", [math.nan, math.inf, np.float32("nan")])
async def test_a_score_that_is_not_finite_fails_its_rollout_rather_than_leave_it_to_the_reward(play, value):
    result = await play(lambda env: 1.0, info=lambda env: {"score": value if env.index % 2 else 0.0}, tasks=6)
    assert (result.pass_at, result.failures) == ({1: 0.0}, {"reward": 3})
    assert next(t.failure.message for t in result.trajectories if t.failure).startswith("reward: the score is")


async def test_fewer_tasks_than_asked_end_the_evaluation(play):
    result = await play(lambda env: float(env.index < 3), episodes=100, tasks=4, chunk=3)
    assert (result.episodes, result.pass_at) == (4, {1: 0.75})


@pytest.mark.parametrize(("episodes", "tasks"), [(6, 10), (6, None), (9, 4)])
async def test_rolling_the_same_tasks_are_played(play, episodes, tasks):
    chunks = await play(lambda env: env.index % 3 / 2, episodes=episodes, k=2, tasks=tasks, chunk=5)
    rolling = await play(lambda env: env.index % 3 / 2, episodes=episodes, k=2, tasks=tasks, chunk=5, rolling=True)
    assert rolling.metrics() == chunks.metrics() and rolling.tasks == chunks.tasks


async def test_rolling_a_slow_task_holds_up_nobody_and_no_more_are_played_at_a_time(play):
    rest, playing, most = threading.Semaphore(0), Counter(), []

    def score(env):
        playing[env.index] += 1
        most.append(len(playing))
        # The first waits for all others, of which only two fit beside it.
        for _ in range(7 if env.index == first else 0):
            assert rest.acquire(timeout=20)
        rest.release()
        del playing[env.index]
        return 1.0

    first = TaskStream(8, 0)[0]
    result = await play(score, episodes=8, tasks=8, chunk=3, rolling=True)
    assert result.pass_at == {1: 1.0} and max(most) <= 3


async def test_a_seed_fixes_the_tasks(play):
    async def order(seed):
        return [t.index for t in (await play(lambda env: 1.0, tasks=1000, seed=seed)).trajectories]

    assert await order(1) == await order(1) != await order(2)


async def test_failures_are_counted_and_left_out(play):
    def score(env):
        if env.index == 0:
            raise EnvFailure("judge")
        return 1.0

    result = await play(score, episodes=4, tasks=4)
    assert (result.pass_at, result.reward_mean, result.failures) == ({1: 1.0}, 1.0, {"judge": 1})


async def test_an_evaluation_in_which_nothing_ended_says_so(play):
    def score(env):
        raise EnvFailure("judge")

    with pytest.raises(RunFailed, match="judge': 4"):
        await play(score, episodes=4)


async def test_a_cancelled_evaluation_leaves_nothing_running(scripted):
    release, ended = threading.Event(), []
    make = scripted(lambda env, message: Turn(reward=float(release.wait(20)), terminated=True))
    policy = as_policy(lambda observation: "yes")
    runner = Runner("Test-v0", make, lambda ticket, attempt: PolicySeat(policy), Limits(), done=ended.append)
    task = asyncio.create_task(evaluate(runner, TaskStream(9, 0), 4, 1, chunk=4, seed=0))
    await asyncio.sleep(0.05)
    others = asyncio.all_tasks() - {asyncio.current_task()}
    assert len(others) > 4
    task.cancel()
    await asyncio.wait(others, timeout=2)
    assert not any(other for other in others if not other.done()) and not ended
    release.set()


async def test_how_many_are_played_at_a_time_does_not_change_the_result(tiny_path, renderer, scripted):
    engine = TransformersEngine(tiny_path, renderer, dtype=torch.float32, max_context=128, max_sequences=4)
    make = scripted(lambda env, message: Turn(reward=float(len(message["content"]) % 2), terminated=True))

    async def run(chunk):
        gate = WaveGate(engine)
        runner = Runner("Test-v0", make, lambda ticket, attempt: TokenSeat(
            renderer, "rerender", Sampling(max_tokens=6), 128, ticket, attempt, gate), Limits(), live=gate.rollout)
        result = await asyncio.wait_for(evaluate(runner, TaskStream(20, 0), 5, 2, chunk=chunk, seed=3), 20)
        runner.close()
        return [t.rows[0].ids for t in result.trajectories], result.pass_at, result.length_mean

    try:
        results = [await run(chunk) for chunk in (1, 4, 7, 100)]
    finally:
        await engine.close()
    assert all(result == results[0] for result in results)
    assert 0 < results[0][1][1] < 1 and results[0][2] > 1


class WithSplit(gym.Env):
    def __init__(self, split="train"):
        self.split = split


def with_size(size=3):
    return gym.Env()


def test_the_test_split_is_held_out_where_there_is_one():
    spec = partial(gym.envs.registration.EnvSpec, "Split-v0")
    assert held_out_kwargs(spec(entry_point=WithSplit)) == {"split": "test"}
    assert held_out_kwargs(spec(entry_point=with_size)) == {}
    assert held_out_kwargs(spec(entry_point="gymnasium.envs.classic_control:CartPoleEnv")) == {}
