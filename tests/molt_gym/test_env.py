import copy
import json
import random
import subprocess
import sys
import warnings
from fractions import Fraction

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.envs.registration import EnvSpec
from gymnasium.error import ResetNeeded
from gymnasium.utils.env_checker import check_env

from molt_gym import ChatEnv, EnvFailure, Turn

TOOL = {"type": "function", "function": {"name": "run", "parameters": {"type": "object", "properties": {}}}}


class Scripted(ChatEnv):
    """Answers with the turns it is given."""

    def __init__(self, *turns, opening="hi", **kwargs):
        super().__init__(**kwargs)
        self.turns = list(turns)
        self.opening = opening
        self.heard = []

    def begin(self, index):
        return [{"role": "user", "content": self.opening}]

    def answer(self, message):
        self.heard.append(self.messages)
        turn = self.turns.pop(0)
        if isinstance(turn, Exception):
            raise turn
        return turn


def random_states():
    return random.getstate(), np.random.get_state()[1].tolist()


def tasks(env, count, seed):
    first = env.reset(seed=seed)
    return [first, *(env.reset() for _ in range(count - 1))]


@pytest.mark.parametrize("nondeterministic", [False, True])
def test_an_env_passes_gymnasiums_checker_without_a_warning(echo_module, echo, nondeterministic):
    gym.register("Check-v0", f"{echo_module}:EchoEnv", max_episode_steps=3, nondeterministic=nondeterministic)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_env(gym.make("Check-v0").unwrapped)


def test_the_passive_checker_sees_nothing_odd_in_any_text(echo, say):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for text in ("", "\x00", "\ud800", "😀 e\u0301\n", "x" * 100_000):
            env = gym.make(echo, disable_env_checker=False)
            env.reset(seed=0, options={"index": 3})
            observation = env.step(say(text))[0]
            assert observation["messages"][-1]["content"] == f"heard {text}"
            assert observation in env.observation_space


def test_sampled_actions_are_answered(echo):
    env = gym.make(echo)
    env.action_space.seed(0)
    for _ in range(30):
        env.reset()
        env.step(env.action_space.sample())


def test_the_cap_on_turns_is_a_truncation(echo, say):
    env = gym.make(echo)
    env.reset(seed=0)
    ends = [env.step(say("on"))[2:4] for _ in range(3)]
    assert ends == [(False, False), (False, False), (False, True)]
    assert all(type(flag) is bool for end in ends for flag in end)


def test_an_end_that_an_env_calls_a_cut_is_a_truncation():
    env = type("Cutting", (Scripted,), {"cut": lambda self: True})(Turn(), Turn(terminated=True))
    env.reset()
    action = {"role": "assistant", "content": ""}
    assert [env.step(action)[2:4] for _ in range(2)] == [(False, False), (False, True)]
    with pytest.raises(ResetNeeded):
        env.step(action)


def test_the_end_is_a_termination(echo, say):
    env = gym.make(echo)
    env.reset(seed=0)
    assert env.step(say("stop"))[1:4] == (4.0, True, False)


def test_the_spec_survives_json(echo, say):
    env = gym.make(echo, prefix="other")
    again = gym.make(EnvSpec.from_json(env.spec.to_json()))
    assert again.spec == env.spec
    assert again.reset(seed=1) == env.reset(seed=1)
    assert again.reset()[0]["messages"][0]["content"].startswith("other")


def test_an_observation_extends_the_last_by_the_reply_and_the_answer(echo, say):
    env = gym.make(echo)
    first, info = env.reset(seed=0, options={"index": 7})
    assert info == {"task_index": 7}
    assert first["tools"] == [] and first["messages"][0]["content"].startswith("task 7 ")
    second = env.step(say("one"))[0]
    assert second["messages"] == [*first["messages"], say("one"), {"role": "user", "content": "heard one"}]


def test_observations_actions_and_turns_are_copies():
    turn = Turn([{"role": "user", "content": "go on"}], info={"notes": ["a"]})
    env = Scripted(turn, turn)
    env.tools = [copy.deepcopy(TOOL)]
    first, _ = env.reset()
    first["messages"][0]["content"] = "forged"
    first["tools"][0]["function"]["name"] = "forged"
    action = {"role": "assistant", "content": "ok"}
    second, *_, info = env.step(action)
    action["content"] = turn.messages[0]["content"] = "forged"
    info["notes"].append("forged")
    third, *_, info = env.step({"role": "assistant", "content": "ok"})
    assert [message["content"] for message in third["messages"]] == ["hi", "ok", "go on", "ok", "forged"]
    assert third["tools"] == [TOOL] and info["notes"] == ["a"]
    assert [message["content"] for message in second["messages"]] == ["hi", "ok", "go on"]


def test_an_env_can_look_at_the_conversation_that_it_answers():
    env = Scripted(Turn())
    env.reset()
    env.step({"role": "assistant", "content": "ok"})
    assert [message["role"] for message in env.heard[0]] == ["user", "assistant"]


def test_a_seed_fixes_the_task(echo_module, echo):
    env, other = gym.make(echo), gym.make(echo)
    assert env.reset(seed=42) == env.reset(seed=42) == other.reset(seed=42)
    interleaved = [(env.reset(), other.reset()) for _ in range(5)]
    assert all(a == b for a, b in interleaved)
    script = (
        f"import {echo_module}, gymnasium, json\nenv = gymnasium.make('Echo-v0')\n"
        "print(json.dumps([env.reset(seed=42), env.reset(), env.reset()]))"
    )
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60)
    assert json.loads(run.stdout) == [list(task) for task in tasks(env, 3, seed=42)]


def test_without_a_seed_the_tasks_go_on(echo):
    env = gym.make(echo)
    indices = [info["task_index"] for _, info in tasks(env, 6, seed=42)]
    assert indices == [info["task_index"] for _, info in tasks(env, 6, seed=42)]
    assert len(set(indices)) > 3
    assert {gym.make(echo).reset()[1]["task_index"] for _ in range(6)} != {indices[0]}


def test_no_random_state_but_its_own_is_touched(echo, say):
    before = random_states()
    env = gym.make(echo)
    env.reset(seed=42)
    env.step(say("hi"))
    env.reset()
    assert random_states() == before


def test_the_drawn_task_can_be_played_again_by_index(echo):
    env = gym.make(echo)
    drawn = env.reset(seed=5)
    assert env.reset(seed=5, options={"index": drawn[1]["task_index"]}) == drawn


@pytest.mark.parametrize("index", [0, 99, np.int64(3)])
def test_an_index_chooses_the_task(echo, index):
    assert gym.make(echo).reset(options={"index": index})[1] == {"task_index": int(index)}


@pytest.mark.parametrize("index", [-1, 100, 1.5, "3", True])
def test_an_index_that_is_no_task_is_refused(echo, index):
    with pytest.raises(ValueError, match=r"Echo-v0: reset option 'index' is .*; write an integer from 0 to 99"):
        gym.make(echo).reset(options={"index": index})


def test_without_a_number_of_tasks_any_index_is_one():
    assert Scripted().reset(options={"index": 10**12})[1] == {"task_index": 10**12}
    with pytest.raises(ValueError, match="an integer from 0 on"):
        Scripted().reset(options={"index": -1})


@pytest.mark.parametrize("count", [0, -1])
def test_an_env_without_tasks_says_so(count):
    env = Scripted()
    env.num_tasks = count
    with pytest.raises(ValueError, match=f"num_tasks is {count}"):
        env.reset()


def test_an_unknown_option_is_refused_with_the_nearest_name(echo):
    with pytest.raises(ValueError, match="unknown reset option 'indx'; did you mean 'index'"):
        gym.make(echo).reset(options={"indx": 3})


def test_options_that_are_no_dict_are_refused(echo):
    with pytest.raises(ValueError, match=r"Echo-v0: reset options are \[3\]; write a dict"):
        gym.make(echo).reset(options=[3])


def test_a_step_before_a_reset_is_refused(echo, say):
    for env in (gym.make(echo), gym.make(echo).unwrapped):
        with pytest.raises(ResetNeeded):
            env.step(say("hi"))


def test_a_step_after_the_end_is_refused_and_adds_nothing(echo, say):
    env = gym.make(echo, render_mode="ansi")
    env.reset(seed=0)
    env.step(say("stop"))
    before = env.render()
    with pytest.raises(ResetNeeded, match="Echo-v0: no episode is running"):
        env.step(say("more"))
    assert env.render() == before
    env.reset()
    env.step(say("more"))


@pytest.mark.parametrize("action", ["hi", None, {"role": "user", "content": "hi"}, {"role": "assistant", "content": 5}])
def test_an_action_outside_of_the_space_is_refused_and_the_episode_goes_on(echo, say, action):
    env = gym.make(echo)
    env.reset(seed=0)
    with pytest.raises(ValueError, match="action"):
        env.step(action)
    assert len(env.step(say("hi"))[0]["messages"]) == 3


@pytest.mark.parametrize("reward", ["1", None, float("nan"), float("inf"), 10**400, 1j, [1.0]])
def test_a_reward_that_is_no_finite_number_is_a_failure_of_the_env(reward):
    env = Scripted(Turn(reward=reward))
    env.reset()
    with pytest.raises(EnvFailure, match="Scripted.answer: the reward is") as caught:
        env.step({"role": "assistant", "content": ""})
    assert caught.value.reason == "reward"


@pytest.mark.parametrize("reward", [1, True, 0.5, np.float32(0.5), np.bool_(True), Fraction(1, 2)])
def test_a_reward_of_any_numeric_type_becomes_a_float(reward):
    env = Scripted(Turn(reward=reward, terminated=np.bool_(True)))
    env.reset()
    _, got, terminated, truncated, _ = env.step({"role": "assistant", "content": ""})
    assert type(got) is float and got == float(reward)
    assert terminated is True and truncated is False


@pytest.mark.parametrize(
    ("turn", "error", "complaint"),
    [
        (None, TypeError, "Scripted.answer returned None; return a molt_gym.Turn"),
        (Turn(terminated="no"), TypeError, "Turn.terminated is 'no'"),
        (Turn(messages=None), TypeError, "Turn.messages is None"),
        (Turn(info=None), TypeError, "Turn.info is None; write a dict"),
        (Turn(messages=[{"role": "user"}]), ValueError, r"Scripted.answer.messages\[2\].content: None"),
        (EnvFailure("judge", "is away"), EnvFailure, "judge: is away"),
    ],
)
def test_an_episode_ends_with_a_turn_that_is_wrong(turn, error, complaint):
    env = Scripted(turn, Turn())
    env.reset()
    action = {"role": "assistant", "content": ""}
    with pytest.raises(error, match=complaint):
        env.step(action)
    with pytest.raises(ResetNeeded):
        env.step(action)
    env.reset()
    assert len(env.step(action)[0]["messages"]) == 2


@pytest.mark.parametrize("opening", [None, 3, ["a"]])
def test_an_opening_that_is_no_message_is_refused(opening):
    with pytest.raises(ValueError, match=r"Scripted.begin.messages\[0\].content"):
        Scripted(opening=opening).reset()


@pytest.mark.parametrize("begin", [lambda env, index: ({} for _ in "ab"), lambda env, index: "hi"])
def test_an_opening_that_is_no_list_is_refused(begin):
    with pytest.raises(ValueError, match=r"begin.messages: .*; write a list of at least one message"):
        type("Other", (Scripted,), {"begin": begin})().reset()


def test_a_class_without_answer_cannot_be_made():
    class Half(ChatEnv):
        def begin(self, index):
            return []

    with pytest.raises(TypeError, match="answer"):
        Half()


def test_the_transcript_shows_roles_reasoning_calls_and_reward():
    env = Scripted(
        Turn([{"role": "tool", "tool_call_id": "c", "content": "4"}], 0.25), Turn([], 1, True), render_mode="ansi"
    )
    env.reset()
    call = {"id": "c", "type": "function", "function": {"name": "run", "arguments": '{"code": "2+2"}'}}
    env.step({"role": "assistant", "content": None, "reasoning_content": "hm", "tool_calls": [call]})
    env.step(
        {"role": "assistant", "content": [{"type": "text", "text": "four"}, {"type": "image_url", "image_url": {}}]}
    )
    assert env.render() == (
        '[user]\nhi\n\n[assistant]\n(thinks) hm\n(calls) run({"code": "2+2"})\n\n[tool]\n4\n\n'
        "[assistant]\nfour\n(image_url)\n\n[reward] 1.25 (episode over)"
    )


def test_rendering_without_a_mode_warns_and_an_unknown_mode_is_refused():
    env = Scripted()
    env.reset()
    with pytest.warns(UserWarning, match='render_mode="ansi"'):
        assert env.render() is None
    with pytest.raises(ValueError, match="render_mode: 'human'"):
        Scripted(render_mode="human")


def test_closing_twice_is_fine(echo):
    env = gym.make(echo)
    env.close()
    env.close()
