"""Tasksets of verifiers, on the package itself: its loop, its interception server and its scoring."""

import asyncio
import os
import subprocess
import sys

import pytest

import molt_gym
from molt_gym.conformance import check

pytest.importorskip("verifiers")

PACKAGE = '''
"""Sums, which may be asked for hints, as an installed taskset."""

import itertools

import verifiers.v1 as vf


def said(trace):
    return trace.branches[-1].messages[-1].content or ""


class Config(vf.TasksetConfig):
    number: int = 60
    hint: bool = False
    endless: bool = False
    broken: bool = False


class Data(vf.TaskData):
    answer: str
    hint: bool
    broken: bool


class Sum(vf.Task[Data, vf.State, vf.TaskConfig]):
    @vf.reward(weight=2.0)
    async def right(self, task, trace) -> float:
        if task.broken:
            raise KeyError("no such column")
        return float(task.answer in said(trace))

    @vf.reward(weight=0.5)
    async def short(self, trace) -> float:
        return float(len(said(trace)) < 20)

    @vf.metric
    async def turns(self, trace) -> float:
        return float(trace.num_turns)


class Sums(vf.Taskset[Sum, Config]):
    def load(self):
        numbers = itertools.count() if self.config.endless else range(self.config.number)
        for i in numbers:
            data = Data(prompt=f"{i} + {i}?", system_prompt="Add.", answer=str(2 * i), hint=self.config.hint,
                        broken=self.config.broken)
            yield Sum(data, self.config.task)

    @property
    def bounded(self):
        return super().bounded and not self.config.endless


class Talk(vf.EnvConfig):
    agent: vf.AgentConfig = vf.AgentConfig()


class Talks(vf.Env[Talk]):
    async def run(self, task, agents):
        async with agents.agent.interaction(task) as interaction:
            segment = await interaction.turn()
            while task.data.hint and not segment.terminated and "hint" in segment.last_reply:
                segment = await interaction.turn(f"It is {task.data.answer}.")


__all__ = ["Sums", "Talks"]
'''

TOOLS = '''
"""A server of a tool, and sums that are to be made with it."""

import verifiers.v1 as vf


class Adder(vf.Toolset[vf.ToolsetConfig, vf.State]):
    @vf.tool
    async def add(self, a: int, b: int) -> str:
        """Adds."""
        return str(a + b)


class Sum(vf.Task[vf.TaskData, vf.State, vf.TaskConfig]):
    @classmethod
    def toolsets(cls, config):
        return [Adder(vf.ToolsetConfig())]

    @vf.reward
    async def right(self, trace) -> float:
        return float(trace.branches[-1].messages[-1].content == "42")


class Sums(vf.Taskset[Sum, vf.TasksetConfig]):
    def load(self):
        return [Sum(vf.TaskData(prompt="40 + 2?"), self.config.task)]


__all__ = ["Sums"]

if __name__ == "__main__":
    Adder.run()
'''


def say(text):
    return {"role": "assistant", "content": text}


def call(name, arguments, key):
    function = {"name": name, "arguments": arguments}
    return {"role": "assistant", "content": None, "tool_calls": [{"id": key, "type": "function", "function": function}]}


@pytest.fixture(autouse=True)
def sums(tmp_path, monkeypatch):
    """An installed taskset, `sums-v1`; new for each test."""
    info = tmp_path / "sums_v1-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: sums-v1\nVersion: 1.0\nRequires-Dist: verifiers>=0.4\n")
    (tmp_path / "sums_v1.py").write_text(PACKAGE)
    (tmp_path / "tool_sums.py").write_text(TOOLS)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    yield
    for name in ("sums_v1", "tool_sums"):
        sys.modules.pop(name, None)


def theirs(index, reply):
    """What verifiers records for a reply that its own in-memory model gives, without any of ours."""
    import verifiers.v1 as vf

    taskset = vf.load_taskset(vf.taskset_config_type("sums-v1")(id="sums-v1"))
    task = list(taskset)[index]

    async def score():
        trace = vf.Trace(task=vf.TraceTask(type="Sum", data=task.data), agent=vf.AgentInfo(config=vf.AgentConfig()))
        trace.nodes.append(vf.MessageNode(message=vf.AssistantMessage(content=reply), parent=None))
        await task.score(trace)
        return trace.reward

    return asyncio.run(score())


def test_fifty_episodes_earn_what_verifiers_gives_to_the_same_replies():
    env = molt_gym.make("verifiers/sums-v1")
    assert env.unwrapped.num_tasks == 60
    for index in range(50):
        opening, _ = env.reset(options={"index": index})
        assert opening["messages"] == [{"role": "system", "content": "Add."},
                                       {"role": "user", "content": f"{index} + {index}?"}]
        reply = [str(2 * index), "none", f"I believe that it is {2 * index}.", "I cannot tell what it is."][index % 4]
        _, reward, terminated, truncated, info = env.step(say(reply))
        assert (reward, terminated, truncated) == ([2.5, 0.5, 2.0, 0.0][index % 4], True, False)
        assert reward == theirs(index, reply)
    assert info["metrics"] == {"turns": 1.0} and info["rewards"].keys() == {"right", "short"}
    env.close()


def test_turns_are_those_that_verifiers_makes_and_no_others():
    env = molt_gym.make("verifiers/sums-v1", hint=True)
    env.reset(options={"index": 7})
    observation, reward, over, *_ = env.step(say("A hint, please."))
    assert [message["content"] for message in observation["messages"]] == [
        "Add.", "7 + 7?", "A hint, please.", "It is 14."]
    assert (reward, over) == (0.0, False)
    _, reward, over, _, info = env.step(say("14"))
    assert (reward, over, info["metrics"]) == (2.5, True, {"turns": 2.0})


def test_at_the_cap_on_turns_the_episode_is_cut_off_and_scored():
    trajectory, = molt_gym.rollout("verifiers/sums-v1", lambda _: "hint", 1, env_kwargs={"hint": True},
                                   rollout__env_processes="never")
    assert trajectory.failure is None and trajectory.truncated and trajectory.reward == 0.5


def test_an_error_that_verifiers_records_is_a_failure_and_no_reward():
    env = molt_gym.make("verifiers/sums-v1", broken=True)
    env.reset(options={"index": 0})
    with pytest.raises(molt_gym.EnvFailure, match="no such column"):
        env.step(say("0"))


@pytest.mark.parametrize(("given", "words"), [
    ({"taskset": "no-such-taskset"}, "'no-such-taskset' cannot be loaded"), ({"number": "many"}, "number"),
    ({"colour": 1}, "colour"), ({"endless": True}, "tasks: 'sums-v1' has no end"), ({"tasks": 0}, "tasks: 0"),
    ({"env": {"agent": {"harness": {"id": "no-such-harness"}}}}, "no-such-harness")])
def test_what_makes_no_sense_is_said(given, words):
    with pytest.raises(molt_gym.ConfigError, match=words):
        molt_gym.make("verifiers/sums-v1", **given)


def test_a_taskset_without_an_end_has_as_many_tasks_as_are_asked_for():
    env = molt_gym.make("verifiers/sums-v1", endless=True, tasks=7)
    assert env.unwrapped.num_tasks == 7


def test_any_taskset_can_be_named():
    with pytest.raises(molt_gym.ConfigError, match="taskset missing"):
        molt_gym.make("verifiers/Taskset-v0")
    env = molt_gym.make("verifiers/Taskset-v0", taskset="sums-v1", number=3)
    assert env.unwrapped.num_tasks == 3
    assert [(info.id, info.needs) for info in molt_gym.list_envs("verifiers") if "Taskset" in info.id] == [
        ("verifiers/Taskset-v0", ("taskset",))]


@pytest.mark.slow
def test_the_tools_of_a_task_are_offered_and_bad_calls_are_told_why():
    env = molt_gym.make("verifiers/Taskset-v0", taskset="tool_sums")
    opening, _ = env.reset(options={"index": 0})
    name, = (tool["function"]["name"] for tool in opening["tools"])
    for number, (called, arguments, words) in enumerate([
            (name, '{"a": 40, "b": 2}', "42"), ("nope", "{}", f"There is no tool 'nope'; there are {name}."),
            (name, '{"a": ', "no JSON"), (name, "[1]", "no JSON object"), (name, '{"a": "x"}', "valid integer")]):
        observation, _, over, *_ = env.step(call(called, arguments, f"call_{number}"))
        assert words in observation["messages"][-1]["content"] and not over
    assert env.step(say("42"))[1:3] == (1.0, True)
    env.close()


@pytest.mark.slow
def test_it_conforms():
    assert [found for found in check("verifiers/sums-v1") if found.problem] == []


def test_nothing_is_left_in_the_environment():
    before = dict(os.environ)
    env = molt_gym.make("verifiers/sums-v1")
    env.reset(options={"index": 0})
    env.step(say("0"))
    env.close()
    assert dict(os.environ) == before


def test_what_is_installed_is_listed():
    script = "import molt_gym; print([info.id for info in molt_gym.list_envs('verifiers')])"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "['verifiers/Taskset-v0', 'verifiers/sums-v1']", done.stderr
