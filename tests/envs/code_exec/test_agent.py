"""AgentCodeExec-v0, stepped like any env; its requests come from Anthropic's SDK."""

import gymnasium as gym
import pytest
from gymnasium.utils.env_checker import check_env

import molt_gym
from molt_gym.envs.code_exec import CodeExecAgent, CodeExecEnv
from molt_gym.envs.code_exec.generator import Generator
from molt_gym.errors import ConfigError

RIGHT = Generator().task(0).right


def say(content):
    return {"role": "assistant", "content": content}


def write(code):
    return say(f"```python\n{code}\n```")


@pytest.fixture
def env():
    with gym.make("AgentCodeExec-v0") as env:
        yield env


def test_it_is_an_env_like_any_other(env):
    check_env(env.unwrapped, skip_render_check=True)


def test_it_asks_the_same_as_code_exec(env):
    with gym.make("CodeExec-v0") as other:
        for index in range(8):
            observed, expected = (e.reset(options={"index": index})[0] for e in (env, other))
            assert observed["messages"] == expected["messages"] and not observed["tools"]


@pytest.mark.parametrize(
    "replies",
    [
        [write(f"print({RIGHT})")],
        [write("print('no')"), say(""), write(f"print({RIGHT})")],
        [say("<tool_call>\n{\"name\": \"f\", \"arguments\": {}}\n</tool_call>"), write("print(x)"), say("so be it")],
    ],
)
def test_replies_fare_as_in_code_exec(env, replies):
    with gym.make("CodeExec-v0") as other:
        for e in (env, other):
            e.reset(options={"index": 0})
        for reply in replies:
            (said, *mine, info), (_, *expected, expected_info) = env.step(reply), other.step(reply)
            assert mine[:2] == expected[:2] and info == expected_info
            if not mine[1] and not any(expected[1:]):
                assert said["messages"] == other.unwrapped.messages


def test_after_its_last_turn_it_is_truncated(env):
    env.reset(options={"index": 0})
    outcomes = [env.step(write("print('no')"))[1:4] for _ in range(3)]
    assert outcomes == [(0.0, False, False)] * 2 + [(0.0, False, True)]


def test_fewer_turns_can_be_asked_for():
    with molt_gym.make("AgentCodeExec-v0", max_episode_steps=1) as env:
        env.reset(options={"index": 0})
        assert env.step(write("print('no')"))[1:4] == (0.0, False, True)


def test_without_a_system_message_there_is_none():
    with gym.make("AgentCodeExec-v0", system=None) as env:
        assert [message["role"] for message in env.reset(seed=0)[0]["messages"]] == ["user"]


def test_settings_and_demonstrations_are_shared_with_code_exec():
    assert CodeExecAgent().demonstrations(20, 1) == CodeExecEnv().demonstrations(20, 1)
    assert CodeExecAgent.presets == CodeExecEnv.presets
    with pytest.raises(ConfigError, match="split: 'dev'"):
        CodeExecAgent(split="dev")
    with pytest.raises(TypeError, match="memory"):
        CodeExecAgent(memory=3)
