"""Gymnasium's own envs, played in words: same rewards, same ends, and a stated rule for illegal replies."""

import re
import warnings

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.envs.registration import EnvSpec
from gymnasium.envs.toy_text.frozen_lake import FrozenLakeEnv
from gymnasium.spaces import Box, Dict, Discrete, Sequence, Tuple
from gymnasium.utils.env_checker import check_env

import molt_gym
from molt_gym.adapters.env_text import describe, plain_ansi
from molt_gym.vector import ChatVectorEnv

CLASSICS = ["FrozenLake-v1", "Blackjack-v1", "Taxi-v4", "CliffWalking-v1", "CartPole-v1", "MountainCar-v0",
            "Acrobot-v1", "Pendulum-v1"]


def say(text):
    return {"role": "assistant", "content": text}


def written(action):
    return " ".join(map(str, np.ravel(action)))


@pytest.mark.parametrize("env_id", CLASSICS)
def test_rewards_and_ends_are_those_of_the_env(env_id):
    talked, plain = molt_gym.make(env_id, max_episode_steps=30), gym.make(env_id, max_episode_steps=30)
    plain.action_space.seed(0)
    for task in range(6):
        talked.reset(seed=0, options={"index": task})
        plain.reset(seed=task)
        over = False
        while not over:
            action = plain.action_space.sample()
            _, reward, terminated, truncated, info = talked.step(say(written(action)))
            _, expected, *ends, _ = plain.step(action)
            assert (reward, terminated, truncated) == (pytest.approx(float(expected)), *ends)
            assert info["illegal"] is False
            over = terminated or truncated
    talked.close()
    plain.close()


@pytest.mark.parametrize("env_id", CLASSICS)
def test_an_env_in_words_passes_gymnasiums_own_checks(env_id):
    env = molt_gym.make(env_id, render_mode="ansi")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_env(env.unwrapped, skip_render_check=True)
    env.close()


def test_the_policy_reads_what_there_is_to_see_and_to_do():
    env = molt_gym.make("FrozenLake-v1", is_slippery=False)
    opening, _ = env.reset(seed=0)
    system, user = (message["content"] for message in opening["messages"])
    assert "Actions: 0 (Move left), 1 (Move down), 2 (Move right), 3 (Move up)." in system
    assert user == "<red>S</red>FFF\nFHFH\nFFFH\nHFFG"
    later = env.step(say("Down it is.\nAction: down"))[0]["messages"][-1]["content"]
    assert "<red>F</red>HFH" in later and later.endswith("Last reward: 0.")


def test_numbers_are_named_as_the_docstring_names_them():
    opening, _ = molt_gym.make("CartPole-v1").reset(seed=0)
    assert re.search(r"Cart Position: -?0\.\d+\nCart Velocity: ", opening["messages"][1]["content"])
    opening, _ = molt_gym.make("Blackjack-v1").reset(seed=0)
    assert "whether the player holds a usable ace" in opening["messages"][0]["content"]


def test_actions_that_an_env_masks_are_not_among_those_that_are_hinted_at():
    opening, _ = molt_gym.make("Taxi-v4").reset(options={"index": 0})
    hint = opening["messages"][1]["content"].splitlines()[-1]
    assert hint.startswith("Actions that have an effect now: ") and "Drop off" not in hint


def test_illegal_replies_change_nothing_until_there_are_too_many_in_a_row():
    env = molt_gym.make("FrozenLake-v1", is_slippery=False, illegal_limit=2)
    env.reset(seed=0)
    observation, *outcome, info = env.step(say("sideways"))
    assert outcome == [0.0, False, False] and info["illegal"] is True
    assert "'sideways' is no action; write 0 (Move left)" in observation["messages"][-1]["content"]
    assert env.step(say("right"))[2:4] == (False, False)
    assert env.step(say("?"))[2:4] == (False, False)
    assert env.step(say("?"))[1:4] == (0.0, True, False)


def test_the_user_may_describe_and_parse():
    env = molt_gym.make("CartPole-v1", describe=lambda env, seen, info: "left" if seen[2] < 0 else "right",
                        parse=lambda env, text: {"l": 0, "r": 1}.get(text[:1], 7), instructions="Balance.")
    opening, _ = env.reset(seed=0)
    assert opening["messages"][0]["content"].startswith("Balance.\n\n")
    assert opening["messages"][1]["content"] in ("left", "right")
    assert env.step(say("l"))[4]["illegal"] is False
    assert env.step(say("x"))[4]["illegal"] is True


def test_what_is_described_may_be_content_parts():
    parts = [{"type": "text", "text": "a pole"}]
    env = molt_gym.make("CartPole-v1", describe=lambda env, seen, info: parts)
    assert env.reset(seed=0)[0]["messages"][-1]["content"] == parts
    said = env.step(say("1"))[0]["messages"][-1]["content"]
    assert said == [*parts, {"type": "text", "text": "Last reward: 1."}] and len(parts) == 1


@pytest.mark.parametrize("seen", [None, 5])
def test_what_is_described_as_nothing_that_can_be_read_is_refused(seen):
    answers = iter(["fine", seen])
    env = molt_gym.make("CartPole-v1", describe=lambda *given: next(answers))
    env.reset(seed=0)
    with pytest.raises(ValueError, match="content: .*; write a string"):
        env.step(say("1"))


class Pixels(gym.Env):
    """An env whose actions nobody could write."""

    observation_space = Discrete(2)
    action_space = Box(0, 1, (8, 8))

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return 0, {}

    def step(self, action):
        return 0, float(action.mean()), True, False, {}


class Dial(Pixels):
    """An env of another package that cuts its episodes itself."""

    action_space = Discrete(3)

    def step(self, action):
        return 1, float(action), False, action == 2, {}


@pytest.fixture(autouse=True)
def registered():
    before = dict(gym.registry)
    for cls in (Pixels, Dial):
        gym.register(f"{cls.__name__}-v0", cls)
    yield
    gym.registry.clear()
    gym.registry.update(before)


def test_an_env_whose_actions_cannot_be_written_is_refused_with_the_way_out():
    with pytest.raises(molt_gym.NotAChatEnv, match="Pixels.*give parse='module:function'"):
        molt_gym.make("Pixels-v0")
    env = molt_gym.make("Pixels-v0", parse=lambda env, text: np.full((8, 8), float(text), np.float32))
    env.reset(seed=0)
    assert env.step(say("0.5"))[1:3] == (0.5, True)


def test_an_episode_that_an_env_cuts_is_truncated():
    env = molt_gym.make("Dial-v0")
    env.reset(seed=0)
    assert env.step(say("1"))[1:4] == (1.0, False, False)
    assert env.step(say("2"))[1:4] == (2.0, False, True)


def test_an_episode_that_ends_as_it_is_cut_has_ended(monkeypatch):
    monkeypatch.setattr(Dial, "step", lambda self, action: (1, 1.0, True, True, {}))
    env = molt_gym.make("Dial-v0")
    env.reset(seed=0)
    assert env.step(say("1"))[2:4] == (True, False)


@pytest.mark.parametrize(("given", "reward"), [(np.array([0.5]), 0.5), (np.float32(0.5), 0.5), (None, None),
                                               ("0.5", None), (float("nan"), None), (np.ones(2), None)])
@pytest.mark.filterwarnings("ignore:.*The reward")
def test_a_reward_is_one_number_or_a_failure(monkeypatch, given, reward):
    monkeypatch.setattr(Dial, "step", lambda self, action: (1, given, False, False, {}))
    env = molt_gym.make("Dial-v0")
    env.reset(seed=0)
    if reward is not None:
        assert env.step(say("1"))[1] == reward
        return
    with pytest.raises(molt_gym.EnvFailure, match="Dial-v0: the reward of the env within is") as caught:
        env.step(say("1"))
    assert caught.value.reason == "reward"


def test_parts_of_an_observation_are_told_as_numbers():
    assert describe((np.int64(2), np.float32(0.5)), Sequence(Discrete(3))) == "(2, 0.5)"
    assert describe((np.int64(1), {"a": np.int64(2)}), Tuple([Discrete(2), Dict(a=Discrete(3))])) == "(1, a: 2)"


def test_numbers_are_told_with_the_digits_that_matter():
    told = describe(np.array([1234567, 3]), None, ["money", "days"])
    assert told == "money: 1234567\ndays: 3"
    assert describe(np.array([0.00003, 123456.7, -1.23456, 2]), None) == "[3e-05, 123456.7, -1.235, 2]"


def test_it_reads_the_same_of_an_env_that_is_registered_by_its_class():
    gym.register("Lake-v0", FrozenLakeEnv, max_episode_steps=9)
    env = molt_gym.make("Lake-v0", is_slippery=False)
    assert env.reset(seed=0)[0] == molt_gym.make("FrozenLake-v1", is_slippery=False).reset(seed=0)[0]
    assert env.spec.max_episode_steps == 9


def test_wrappers_of_a_spec_hold_also_where_nothing_is_registered():
    spec = gym.wrappers.ClipReward(gym.make("MountainCar-v0"), -0.5, 0.5).spec
    for made in (molt_gym.make(spec), molt_gym.make(EnvSpec.from_json(molt_gym.make(spec).spec.to_json()))):
        made.reset(seed=0)
        assert made.step(say("1"))[1] == -0.5
    spec.id = "Hill-v0"
    env = molt_gym.make(EnvSpec.from_json(molt_gym.make(spec).spec.to_json()))
    env.reset(seed=0)
    assert env.step(say("1"))[1] == -0.5


def test_a_policy_can_be_scored_on_it():
    def downright(conversation):
        moves = sum(message["role"] == "assistant" for message in conversation["messages"])
        return ["down", "down", "right", "down", "right", "right"][moves % 6]

    result = molt_gym.evaluate("FrozenLake-v1", downright, episodes=4, env_kwargs={"is_slippery": False})
    assert result.reward_mean == result.pass_at[1] == 1.0


def test_several_are_played_at_once():
    envs = ChatVectorEnv("FrozenLake-v1", num_envs=2)
    observations, _ = envs.reset(seed=0)
    assert len(observations) == 2
    envs.close()


def test_the_classics_are_listed_once_by_their_latest_version():
    ids = [env.id for env in molt_gym.list_envs()]
    assert set(CLASSICS) <= set(ids) and "CartPole-v0" not in ids and len(ids) == len(set(ids))


@pytest.mark.parametrize("given", [{"illegal_limit": 0}, {"illegal_limit": True}, {"parse": "no.such:thing"},
                                   {"describe": "math:nothing"}, {"describe": 3}, {"parse": "math:pi"},
                                   {"describe": ":f"}, {"parse": ".x:f"}])
def test_wrong_arguments_are_named(given):
    with pytest.raises(molt_gym.ConfigError, match=next(iter(given))):
        molt_gym.TextEnv("FrozenLake-v1", **given)


def test_what_makes_no_env_is_refused():
    for env in (gym.make("CartPole-v1"), None):
        with pytest.raises(molt_gym.ConfigError, match="env: .*; write an id, a spec, or a function that makes an env"):
            molt_gym.TextEnv(env)


def test_colours_of_a_terminal_become_tags():
    assert plain_ansi("\n\x1b[41mS\x1b[0mFF\x1b[1mX\x1b[0m\x1b[2K\n") == "<red>S</red>FFX"
    assert plain_ansi("\x1b[31mA\x1b[1;32mB\x1b[1mC\x1b[mD\x1b[91mE\x1b[39mF\x1b[38;5;31mG") == (
        "<red>A</red><green>B</green><green>C</green>D<red>E</red>FG")
