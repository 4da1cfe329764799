"""ToolUse-v0, stepped like any env; its requests come from OpenAI's SDK."""

import json
from decimal import Decimal

import gymnasium as gym
import pytest
from gymnasium.utils.env_checker import check_env

from molt_gym.envs.tool_use import ToolUseAgent
from molt_gym.envs.tool_use.agent import last_number
from molt_gym.envs.tool_use.tasks import DEFAULT_FAMILIES, Generator
from molt_gym.envs.tool_use.tools import TOOLS

COST = DEFAULT_FAMILIES.index("cost")


def say(content):
    return {"role": "assistant", "content": content}


def call(*calls):
    return {"role": "assistant", "content": "", "tool_calls": [
        {"id": f"call{i:05d}", "type": "function", "function": {"name": name, "arguments": arguments}}
        for i, (name, arguments) in enumerate(calls)]}


@pytest.fixture
def env():
    with gym.make("ToolUse-v0") as env:
        yield env


def test_it_is_an_env_like_any_other(env):
    check_env(env.unwrapped, skip_render_check=True)


def test_it_asks_a_question_and_offers_its_tools(env):
    observation, _ = env.reset(options={"index": COST})
    assert observation["tools"] == TOOLS
    assert observation["messages"] == [
        {"role": "system", "content": "Use the tools, then answer with the number."},
        {"role": "user", "content": Generator().task(COST).prompt},
    ]


def test_the_right_calls_and_the_answer_earn_the_reward(env):
    task = Generator().task(COST)
    env.reset(options={"index": COST})
    for step in task.right:
        observation, reward, *over, info = env.step(call((step.name, step.arguments)))
        assert (reward, over) == (0.0, [False, False])
    assert observation["messages"][-1] == {"role": "tool", "tool_call_id": "call00000", "content": str(task.answer)}
    _, reward, *over, info = env.step(say(f"That makes {task.answer:,} in all."))
    assert (reward, over) == (1.0, [True, False])
    assert info == {"tool_calls": 2, "tool_errors": 0, "outcome": "right", "task_index": COST}


@pytest.mark.parametrize(("reply", "outcome"), [("It is 3.", "wrong"), ("No idea.", "no_number"), ("", "no_number")])
def test_other_answers_earn_nothing(env, reply, outcome):
    env.reset(options={"index": 0})
    _, reward, terminated, _, info = env.step(say(reply))
    assert (reward, terminated, info["outcome"]) == (0.0, True, outcome)


def test_calls_of_one_reply_are_all_answered_and_errors_counted(env):
    env.reset(options={"index": 0})
    good, bad, unknown = ("calculate", json.dumps({"expression": "6*7"})), ("calculate", "{"), ("f", "{}")
    observation, *_ = env.step(call(good, bad, unknown))
    results = [message["content"] for message in observation["messages"][-3:]]
    assert results[0] == "42" and all(result.startswith("Error: ") for result in results[1:])
    info = env.step(say("42"))[-1]
    assert (info["tool_calls"], info["tool_errors"]) == (3, 2)


def test_a_loop_of_calls_is_cut_off(env):
    env.reset(options={"index": 0})
    for _ in range(6):
        *_, reward, terminated, truncated, info = env.step(call(("f", "{}")))
    assert (reward, terminated, truncated) == (0.0, False, True)


def test_splits_differ():
    test = ToolUseAgent(split="test").task(0, None)
    assert test.prompt == Generator(split="test").task(0).prompt != Generator().task(0).prompt


@pytest.mark.parametrize(
    ("text", "number"),
    [("12 and 3.50", "3.5"), ("-7", "-7"), ("10-3", "3"), ("1,234.", "1234"), ("x-2", "2"), ("none", None),
     ("\u22127", "-7"), ("1, 2,3", "3"), ("1,2,34", "34")],
)
def test_the_last_number_counts(text, number):
    assert last_number(text) == (None if number is None else Decimal(number))
