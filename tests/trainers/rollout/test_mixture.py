import asyncio
import json
import threading
from collections import Counter
from fractions import Fraction

import numpy as np
import pytest

from molt_gym import ConfigError, RunFailed, Turn, as_policy
from molt_gym.trainers.config import load_config
from molt_gym.trainers.rollout.mixture import MixedPool, MixedRunner, Mixture, load_curriculum, split
from molt_gym.trainers.rollout.pool import Plan, TaskStream
from molt_gym.trainers.rollout.runner import Limits, Runner
from molt_gym.trainers.rollout.seats import PolicySeat
from molt_gym.trainers.rollout.ticket import Ticket


def mixture(weights, sizes=(None, None), seed=0):
    return Mixture(weights, [TaskStream(size, seed) for size in sizes], seed)


def envs(mix, positions):
    return [mix[position][0] for position in positions]


# Which env, which task

def test_groups_are_drawn_in_proportion_to_the_weights():
    drawn = Counter(envs(mixture({"A": 7, "B": 3}), range(4000)))
    assert drawn[0] / 4000 == pytest.approx(0.7, abs=0.03)


def test_a_draw_depends_on_seed_and_position_alone():
    forth = envs(mixture({"A": 0.5, "B": 0.5}), range(50))
    back = envs(mixture({"A": 0.5, "B": 0.5}), reversed(range(50)))
    assert forth == back[::-1] != envs(mixture({"A": 0.5, "B": 0.5}, seed=1), range(50))


def test_each_env_goes_through_all_of_its_own_tasks_in_the_order_that_it_has_alone():
    mix, alone = mixture({"A": 0.8, "B": 0.2}, sizes=(5, 7)), [TaskStream(5, 0), TaskStream(7, 0)]
    drawn = [mix[position] for position in range(300)]
    for env in (0, 1):
        own = [index for number, index in drawn if number == env]
        assert own == [alone[env][place] for place in range(len(own))] and len(own) > 30


def test_an_env_of_weight_0_is_never_drawn():
    assert set(envs(mixture({"A": 0, "B": 1}), range(200))) == {1}


def test_other_weights_hold_from_their_position_on_and_leave_what_came_before():
    mix, fixed = mixture({"A": 0.5, "B": 0.5}), mixture({"A": 0.5, "B": 0.5})
    envs(mix, range(40))
    mix.reweigh(40, {"B": 0})
    assert envs(mix, range(40)) == envs(fixed, range(40))
    assert set(envs(mix, range(40, 90))) == {0} and mix.weights == {"A": 0.5, "B": 0}


def test_a_state_in_json_gives_the_same_draws_again():
    mix = mixture({"A": 0.5, "B": 0.5}, sizes=(9, None))
    for place, weight in ((30, 0.1), (60, np.float32(0.9))):
        envs(mix, range(place))
        mix.reweigh(place, {"A": weight})
    again = mixture({"A": 0.5, "B": 0.5}, sizes=(9, None))
    again.load_state(json.loads(json.dumps(mix.state())))
    assert [again[place] for place in range(120)] == [mix[place] for place in range(120)]


@pytest.mark.parametrize(("weights", "words"), [
    ({"C": 1}, "'C' is not in the mixture of A, B"), ({"A": -1}, "A: got -1"), ({"A": float("nan")}, "A: got nan"),
    ({"A": True}, "A: got True"), ({"A": Fraction(1, 2)}, "A: got"), ({"A": 0, "B": 0}, "all weights are 0")])
def test_what_are_no_weights_is_refused(weights, words):
    mix = mixture({"A": 1, "B": 1})
    with pytest.raises(ValueError, match=words):
        mix.reweigh(0, weights)
    assert mix.weights == {"A": 1, "B": 1}


# Who plays

@pytest.fixture
def pool_of(scripted):
    """Makes a pool over A, which is always passed, and B, which never is."""
    policy = as_policy(lambda observation: "yes")

    def make(weights, curriculum=None, last_line=dict, size=4):
        runners = [Runner(env, scripted(lambda env, message, reward=reward: Turn(reward=reward, terminated=True)),
                          lambda ticket, attempt: PolicySeat(policy), Limits())
                   for env, reward in (("A", 1.0), ("B", 0.0))]
        return MixedPool(MixedRunner(runners), mixture(weights), Plan(size, 2), seed=0, curriculum=curriculum,
                         last_line=last_line)

    return make


async def next_batch(pool, step=1):
    return await asyncio.wait_for(pool.next_batch(step), 10)


async def test_a_group_is_of_one_env_and_the_batch_tells_the_weights(pool_of):
    batch = await next_batch(pool_of({"A": 1, "B": 1}, size=16))
    assert {env for group in batch.groups for env in {t.env for t in group}} == {"A", "B"}
    assert all(len({(t.env, t.index) for t in group}) == 1 for group in batch.groups)
    assert all(t.reward == (t.env == "A") for t in batch.played)
    assert batch.weights == {"A": 1, "B": 1}


async def test_what_was_retried_is_counted_over_all_envs_and_cleared():
    class Part:
        def __init__(self):
            self.retried = Counter(judge=1)

        async def play(self, ticket):
            return ticket

    mixed = MixedRunner([Part(), Part()])
    assert mixed.retried == {"judge": 2}
    mixed.retried = Counter()
    assert mixed.retried == {}
    assert (await mixed.play(Ticket(0, 0, env=1))).env == 1


async def test_a_curriculum_is_given_the_last_line_before_each_step_but_the_first(pool_of):
    seen = []

    def curriculum(line):
        seen.append(line)
        return {"A": 0}

    pool = pool_of({"A": 1, "B": 0}, curriculum, lambda: {"step": 1, "reward/A": 1.0})
    with pytest.raises(RunFailed, match="curriculum: ValueError: all weights are 0"):
        await next_batch(pool, 2)
    pool = pool_of({"A": 1, "B": 0}, lambda line: {"A": 0, "B": line["step"]}, lambda: {"step": 3})
    first, second = await next_batch(pool, 1), await next_batch(pool, 4)
    assert {t.env for t in first.played} == {"A"} and {t.env for t in second.played} == {"B"}
    assert second.weights == {"A": 0, "B": 3} and seen == [{"step": 1, "reward/A": 1.0}]


async def test_a_curriculum_that_has_run_out_ends_the_run(pool_of):
    weights = iter(())
    with pytest.raises(RunFailed, match="curriculum: RuntimeError: StopIteration"):
        await next_batch(pool_of({"A": 1, "B": 1}, lambda line: next(weights)), 2)


def test_a_curriculum_that_hangs_does_not_keep_the_run_from_ending(pool_of):
    hung, release, ended = threading.Event(), threading.Event(), threading.Event()

    def curriculum(line):
        hung.set()
        release.wait(60)
        ended.set()

    async def interrupted():
        batch = asyncio.create_task(pool_of({"A": 1, "B": 1}, curriculum).next_batch(2))
        await asyncio.to_thread(hung.wait, 60)
        batch.cancel()
        await asyncio.wait([batch])

    asyncio.run(interrupted())
    assert hung.is_set() and not ended.is_set()
    release.set()


async def test_a_pool_goes_on_with_the_groups_that_it_would_have_played(pool_of):
    def curriculum(line):
        return {"A": 0.2, "B": 0.8}

    pool = pool_of({"A": 1, "B": 1}, curriculum)
    for step in (1, 2):
        pool.confirm(await next_batch(pool, step))
    state = json.loads(json.dumps(pool.state()))
    again = pool_of({"A": 1, "B": 1}, curriculum)
    again.load_state(state)
    ours, theirs = await next_batch(pool, 3), await next_batch(again, 3)
    assert [(t.env, t.group, t.index) for t in ours.played] == [(t.env, t.group, t.index) for t in theirs.played]
    assert theirs.weights == {"A": 0.2, "B": 0.8}


async def test_without_a_curriculum_the_weights_of_the_settings_hold_for_what_comes_next(pool_of):
    pool = pool_of({"A": 1, "B": 1})
    pool.confirm(await next_batch(pool))
    other = pool_of({"A": 0, "B": 1})
    other.load_state(pool.state())
    assert {t.env for t in (await next_batch(other, 2)).played} == {"B"}


# Settings

def test_the_settings_of_each_env_are_its_own():
    config = load_config("A-v0+B-v0", overrides={"rollout.max_turns": 3, "mixture": {
        "A-v0": 0.5, "B-v0": {"weight": 2, "env_kwargs": {"level": 2}, "max_turns": 1}}})
    parts = split(config)
    assert [(part.env, part.env_kwargs, part.rollout.max_turns, part.mixture) for part in parts] == [
        ("A-v0", {}, 3, {}), ("B-v0", {"level": 2}, 1, {})]
    assert split(load_config("B-v0", overrides={"mixture": config.mixture})) == [
        part.model_copy(update={"rollout": part.rollout}) for part in parts[1:]]
    assert split(parts[0]) == [parts[0]]


def test_a_mixture_survives_its_config_file(tmp_path):
    config = load_config("A-v0+B-v0", overrides={"mixture": {"A-v0": 1, "B-v0": {"weight": 0.5, "max_turns": 2}}})
    path = tmp_path / "config.toml"
    path.write_text(config.to_toml())
    assert load_config(file=path) == config and config.mixture["A-v0"] == {"weight": 1}


@pytest.mark.parametrize(("settings", "words"), [
    ({"mixture": {"A-v0": "much"}}, r"mixture.A-v0.weight: got 'much'; write a number"),
    ({"mixture": {"A-v0": {"max_turns": 1}}}, r"mixture.A-v0.weight: got None"),
    ({"mixture": {"A-v0": {"weight": 1, "max_turns": 0}}}, r"mixture.A-v0.max_turns: got 0"),
    ({"mixture": {"A-v0": {"weight": 1, "kwargs": {}}}}, r"mixture.A-v0.kwargs: unknown option"),
    ({"mixture": {"A-v0": 0}}, "all weights are 0"), ({"mixture": {"A-v0": float("inf")}}, "got inf"),
    ({"mixture": {"B-v0": 1, "C-v0": 1}}, r"env: 'A-v0' with a mixture of B-v0, C-v0; write 'B-v0\+C-v0'"),
    ({"mixture": {"A-v0": 1}, "env_kwargs": {"x": 1}}, r"env_kwargs: x with a mixture"),
    ({"curriculum": "m:f"}, "curriculum: 'm:f' without a mixture"), ({"mixture": 3}, "mixture.*write a table")])
def test_a_mixture_that_is_wrong_is_refused_in_words(settings, words):
    with pytest.raises(ConfigError, match=words):
        load_config("A-v0", overrides=settings)


def test_a_curriculum_is_found_by_name():
    assert load_curriculum("json:dumps") is json.dumps
    for wrong in ("json", "json:nothing", "no_such_module:f", "json:__name__", ":f"):
        with pytest.raises(ConfigError, match="curriculum: .*write module:function"):
            load_curriculum(wrong)
