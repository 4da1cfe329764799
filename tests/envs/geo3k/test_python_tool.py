"""The Python tool, as Geo3k-v0 and its agent twin on both SDKs offer it: all three treat a reply alike."""

import json
import threading

import pytest

import molt_gym
from molt_gym.envs.geo3k import Geo3kAgent, Geo3kEnv
from molt_gym.envs.geo3k.python_tool import TOOL
from molt_gym.errors import ConfigError, EnvFailure

FORMS = [("Geo3k-v0", {}), ("Geo3kAgent-v0", {"sdk": "openai"}), ("Geo3kAgent-v0", {"sdk": "anthropic"})]
RIGHT = Geo3kEnv().task(0).answer
in_every_form = pytest.mark.parametrize("form", FORMS, ids=["env", "openai", "anthropic"])


def says(text, *programs, name="python"):
    calls = [{"id": f"call{number}", "type": "function", "function": {
        "name": name, "arguments": json.dumps({"code": program})}} for number, program in enumerate(programs)]
    return {"role": "assistant", "content": text} | ({"tool_calls": calls} if calls else {})


def play(form, *replies, **options):
    """(messages after the opening, reward, ended, info), once the episode is over."""
    env_id, own = form
    with molt_gym.make(env_id, **own, **options) as env:
        observation, _ = env.reset(options={"index": 0})
        opening = len(observation["messages"])
        for number, reply in enumerate(replies):
            observation, reward, ended, _, info = env.step(reply)
            assert ended == (number == len(replies) - 1)
        return observation["messages"][opening:], reward, info


@in_every_form
def test_what_a_program_prints_comes_back_as_a_tool_message(form):
    said, reward, info = play(form, says("Let me see.", f"print({RIGHT})"), says(f"\\boxed{{{RIGHT}}}"), python=True)
    assert [message["role"] for message in said] == ["assistant", "tool", "assistant"]
    assert said[1]["content"] == RIGHT and said[1]["tool_call_id"] == said[0]["tool_calls"][0]["id"]
    assert reward == 1.0
    assert info == {"outcome": "right", "tool_calls": 1, "tool_errors": 0, "task_index": 0}


@in_every_form
def test_nothing_is_kept_between_programs_and_errors_are_told(form):
    said, _, info = play(form, says("", "x = 1", "print(x)"), says("", "print(2); 1/0"), says("?"), python=True)
    results = [message["content"] for message in said if message["role"] == "tool"]
    assert results == ["Nothing was printed.", "Error: NameError: name 'x' is not defined",
                       "2\nError: ZeroDivisionError: division by zero"]
    assert (info["outcome"], info["tool_calls"], info["tool_errors"]) == ("no_answer", 3, 2)


@in_every_form
def test_calls_beyond_their_number_are_not_run_and_a_reply_after_that_is_a_try(form):
    replies = [says("", "print(1)", "print(2)", "print(3)"), says("\\boxed{0}", "print(4)"), says("", "print(5)"),
               says(f"\\boxed{{{RIGHT}}}")]
    said, reward, info = play(form, *replies, python=True, calls=2, turns=3)
    left = "Error: no calls are left"
    assert [message["content"] for message in said if message["role"] == "tool"] == ["1", "2", left, left, left]
    assert [message["content"] for message in said if message["role"] == "user"] == [
        "Wrong, try again.", "No answer. Put the answer in \\boxed{}."]
    assert (reward, info["tool_calls"], info["tool_errors"]) == (1.0, 5, 3)


@in_every_form
def test_a_reply_that_calls_what_is_not_there_is_told_so(form):
    said, _, _ = play(form, says("", "1", name="look"), says(""), python=True)
    assert said[1]["content"] == "Error: there is no tool 'look'; call python"
    said, reward, info = play(form, says(f"\\boxed{{{RIGHT}}}"))
    assert (reward, info) == (1.0, {"outcome": "right", "task_index": 0}), "without the tool it is Math with a picture"


@pytest.mark.parametrize(("arguments", "words"), [
    ("{", "Error: the arguments are no JSON"), ("[" * 9999, "no JSON"), ("[]", "takes code, as text"),
    ('{"code": 3}', "takes code, as text"), ('{"code": "while True: pass"}', "Error: time limit of 0.5 s"),
    (json.dumps({"code": "print('ab' * 10_000)"}), "cut"), ('{"code": "\\ud800"}', "Error: ")])
def test_whatever_is_wrong_with_a_call_is_said_in_its_result(arguments, words):
    env = Geo3kEnv(python=True, python_seconds=0.5)
    env.reset(options={"index": 0})
    call = {"id": "c", "type": "function", "function": {"name": "python", "arguments": arguments}}
    observation = env.step({"role": "assistant", "content": "", "tool_calls": [call]})[0]
    result = observation["messages"][-1]["content"]
    assert words in result and len(result) < 1200


def test_a_sandbox_that_ends_is_a_failure_of_the_env():
    env = Geo3kEnv(python=True, python_seconds=30)
    env.reset(options={"index": 0})
    threading.Timer(0.5, env.close).start()
    with pytest.raises(EnvFailure, match="sandbox: cancelled"):
        env.step(says("", "import time; time.sleep(20)"))


def test_the_twin_asks_the_same_and_offers_the_same_tool():
    for python in (False, True):
        asked = []
        for env_id, own in FORMS:
            with molt_gym.make(env_id, python=python, **own) as env:
                asked.append(env.reset(options={"index": 3})[0])
        assert asked[0] == asked[1] and asked[0]["tools"] == [TOOL] * python
        assert asked[0]["messages"] == asked[2]["messages"]
    with pytest.raises(ConfigError, match="sdk: 'cohere'; write one of 'openai', 'anthropic'"):
        Geo3kAgent(sdk="cohere")


def test_half_of_the_demonstrations_call_the_tool_where_there_is_one():
    shown = Geo3kEnv(python=True).demonstrations(100)
    calling = [conversation for conversation in shown if len(conversation) > 3]
    assert 25 < len(calling) < 60 and Geo3kAgent(python=True).demonstrations(100) == shown
    call, result, answer = calling[0][2:]
    code = json.loads(call["tool_calls"][0]["function"]["arguments"])["code"]
    assert code == f"print({result['content']})" and answer["content"] == f"\\boxed{{{result['content']}}}"
