import asyncio
import copy
import gc
import json
import multiprocessing
import pickle
import subprocess
import sys
import threading
import time
import warnings

import gymnasium as gym
import openai
import pytest
from gymnasium.envs.registration import EnvSpec
from gymnasium.error import ResetNeeded
from gymnasium.utils.env_checker import check_env

from molt_gym import EnvFailure
from molt_gym.agents import AgentEnv, ChatAgent, CommandAgent, Result, register_agent
from molt_gym.vector import ChatVectorEnv

ADD = {"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": {"type": "object"}}}

AGENT = """
import json
from molt_gym.agents import ChatAgent, Result, register_agent

ADD = {"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": {"type": "object"}}}


@register_agent("Adding-v0", max_turns=4)
class Adding(ChatAgent):
    num_tasks = 50
    tools = [ADD]

    def task(self, index, rng):
        return {"prompt": f"task {index} {rng.random()}"}

    async def run(self, ctx):
        client, messages = ctx.openai(), ctx.messages
        while True:
            reply = await client.chat.completions.create(model=ctx.model, messages=messages, tools=ctx.tools)
            message = reply.choices[0].message
            messages.append(message.model_dump(exclude_none=True))
            for call in message.tool_calls or ():
                try:
                    total = str(sum(json.loads(call.function.arguments).values()))
                except (ValueError, TypeError, AttributeError):
                    total = "no numbers"
                messages.append({"role": "tool", "tool_call_id": call.id, "content": total})
                ctx.add_reward(0.25)
            if not message.tool_calls:
                if message.content == "bug":
                    raise KeyError("a bug")
                if message.content != "more":
                    return Result(len(message.content or ""), score=0.5, info={"said": message.content})
                messages.append({"role": "user", "content": "go on"})
"""


@pytest.fixture
def adding(write_module):
    __import__(write_module("adding_agent", AGENT))
    return "Adding-v0"


@pytest.fixture
def make_env():
    """Makes an env of an agent, to be closed after the test."""
    made = []

    def make(agent, **kwargs):
        made.append(AgentEnv(agent, **kwargs))
        return made[-1]

    yield make
    for env in made:
        env.close()


def ask(client, text, **kwargs):
    return client.chat.completions.create(model="policy", messages=[{"role": "user", "content": text}], **kwargs)


def test_a_tools_loop_is_stepped_through_by_hand(adding, say, calls_tool):
    with gym.make(adding) as env:
        observation, info = env.reset(seed=3, options={"index": 8})
        assert info == {"task_index": 8} and observation["tools"] == [ADD]
        assert observation["messages"][0]["content"].startswith("task 8 ")
        action = calls_tool(("add", {"a": 1, "b": 2}), ("add", {"a": 3}))
        second, reward, terminated, truncated, info = env.step(action)
        assert (reward, terminated, truncated, info) == (0.5, False, False, {"task_index": 8})
        assert second["messages"][:2] == [*observation["messages"], action]
        assert [(message["role"], message["content"]) for message in second["messages"][2:]] == [
            ("tool", "3"), ("tool", "3")]
        last, reward, terminated, truncated, info = env.step(say("done"))
        assert (reward, terminated, truncated) == (4.0, True, False)
        assert info == {"task_index": 8, "score": 0.5, "said": "done"}
        assert last["messages"] == [*second["messages"], say("done")]


@pytest.mark.parametrize("nondeterministic", [False, True])
def test_an_agent_passes_gymnasiums_checker_without_a_warning(adding, nondeterministic):
    gym.register("Check-v0", "molt_gym.agents:AgentEnv", kwargs={"agent": "adding_agent:Adding"}, max_episode_steps=3,
                 nondeterministic=nondeterministic)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with gym.make("Check-v0") as env:
            check_env(env.unwrapped)


def test_the_passive_checker_sees_nothing_odd_in_any_text(adding, say):
    with warnings.catch_warnings(), gym.make(adding, disable_env_checker=False) as env:
        warnings.simplefilter("error")
        for text in ("", "\x00", "\ud800", "😀 e\u0301\n", "x" * 100_000):
            env.reset(seed=0, options={"index": 3})
            observation = env.step(say(text))[0]
            assert observation["messages"][-1]["content"] == text and observation in env.observation_space


def test_sampled_actions_are_answered(adding):
    with gym.make(adding) as env:
        env.action_space.seed(0)
        for _ in range(30):
            env.reset()
            env.step(env.action_space.sample())


def test_the_cap_on_turns_is_a_truncation(adding, say):
    with gym.make(adding) as env:
        env.reset(seed=0)
        ends = [env.step(say("more"))[2:4] for _ in range(4)]
        assert ends == [(False, False)] * 3 + [(False, True)]
        assert all(type(flag) is bool for end in ends for flag in end)


def test_what_a_message_cannot_honour_is_refused_or_named_to_the_agent(make_env, say):
    def agent(ctx):
        create = ctx.openai().chat.completions.with_raw_response.create
        messages = [{"role": "user", "content": "hi"}]
        reply = create(model="m", messages=messages, stop=["."], temperature=0.5, max_tokens=3, seed=1)
        with pytest.raises(openai.UnprocessableEntityError, match="logprobs"):
            create(model="m", messages=messages, logprobs=True)
        return Result(info={"ignored": reply.headers["x-molt-gym-ignored"]})

    env = make_env(agent)
    env.reset(seed=0)
    assert env.step(say("hello"))[4]["ignored"] == "max_tokens, seed, stop, temperature"


def test_a_run_that_was_cut_off_is_a_truncation(make_env, say):
    def agent(ctx):
        ask(ctx.openai(), "hi")
        return Result(1, truncated=True)

    env = make_env(agent)
    env.reset()
    assert env.step(say("ok"))[1:4] == (1.0, False, True)


def test_a_vector_env_plays_agents_at_the_same_time(adding, say):
    envs = gym.make_vec(adding, num_envs=3)
    assert isinstance(envs, ChatVectorEnv)
    observations, infos = envs.reset(seed=5)
    _, rewards, terminated, _, _ = envs.step([say("a"), say("bcd"), say("more")])
    assert rewards.tolist() == [1, 3, 0] and terminated.tolist() == [True, True, False]
    again, _ = envs.reset(seed=5)
    assert again == observations and len(set(infos["task_index"])) > 1
    envs.close()


def test_a_seed_fixes_the_task_and_the_agents_randomness(adding):
    with gym.make(adding) as env, gym.make(adding) as other:
        first = env.reset(seed=42)
        assert first == env.reset(seed=42) == other.reset(seed=42)
        assert all(env.reset() == other.reset() for _ in range(3))
        index = first[1]["task_index"]
        assert env.reset(seed=42, options={"index": index}) == first
        assert env.reset(seed=43, options={"index": index})[0] != first[0]
        for options, message in (({"index": 50}, "an integer from 0 to 49"), ({"indx": 1}, "did you mean 'index'")):
            with pytest.raises(ValueError, match=message):
                env.reset(options=options)


def test_the_spec_survives_json_and_pickle(adding, say):
    for spec in (EnvSpec.from_json(gym.spec(adding).to_json()), pickle.loads(pickle.dumps(gym.spec(adding)))):
        with gym.make(spec) as env, gym.make(adding) as other:
            assert env.reset(seed=1) == other.reset(seed=1)


async def test_it_works_where_a_loop_is_running_as_in_a_notebook(adding, say):
    with gym.make(adding) as env:
        env.reset(seed=0)
        assert env.step(say("ok"))[2]


def test_observations_and_actions_are_copies(adding, say):
    with gym.make(adding) as env:
        first, _ = env.reset(seed=0)
        opening = first["messages"][0]["content"]
        first["messages"][0]["content"] = "forged"
        first["tools"].clear()
        second = env.step(action := say("more"))[0]
        action["content"] = "forged"
        third = env.step(say("ok"))[0]
        assert [message["content"] for message in second["messages"]] == [opening, "more", "go on"]
        assert third == {"messages": [*second["messages"], say("ok")], "tools": [ADD]}


def test_it_renders_the_transcript(adding, say):
    with gym.make(adding, render_mode="ansi") as env:
        env.reset(seed=0, options={"index": 1})
        env.step(say("hello"))
        assert env.render().startswith("[user]\ntask 1 ")
        assert env.render().endswith("[assistant]\nhello\n\n[reward] 5 (episode over)")


def test_requests_of_subagents_are_observed_one_after_the_other(make_env, say):
    async def subagent(ctx, name):
        client, words = ctx.openai(), []
        for turn in range(3):
            reply = await ask(client, f"{name} {turn}")
            words.append(reply.choices[0].message.content)
        return words

    async def planner(ctx):
        plan = (await ask(ctx.openai(), "plan")).choices[0].message.content
        found = await asyncio.gather(*(subagent(ctx, name) for name in plan.split()))
        return Result(1, info={"found": found})

    env = make_env(planner)
    observation, _ = env.reset()
    observation, *_ = env.step(say("left right"))
    time.sleep(0.3)
    asked, done = [], False
    while not done:
        asked.append(observation["messages"][0]["content"])
        observation, reward, done, _, info = env.step(say(f"to {asked[-1]}"))
    assert sorted(asked) == [f"{name} {turn}" for name in ("left", "right") for turn in range(3)]
    assert set(asked[:2]) == {"left 0", "right 0"}
    assert info["found"] == [[f"to {name} {turn}" for turn in range(3)] for name in ("left", "right")]


def test_each_sample_of_a_request_is_an_observation(make_env, say):
    def agent(ctx):
        reply = ask(ctx.openai(), "three", n=3)
        return Result(1, info={"said": [choice.message.content for choice in reply.choices]})

    env = make_env(agent)
    first, _ = env.reset()
    assert env.step(say("a"))[:3] == (first, 0.0, False)
    assert env.step(say("b"))[:3] == (first, 0.0, False)
    _, reward, terminated, _, info = env.step(say("c"))
    assert terminated and info["said"] == ["a", "b", "c"]


def test_a_streaming_agent_gets_the_reply_in_events(make_env, say, calls_tool):
    def agent(ctx):
        events = ask(ctx.openai(), "hi", stream=True, tools=[ADD])
        calls = [event.choices[0].delta.tool_calls for event in events if event.choices]
        with ctx.anthropic().messages.stream(
            model="policy", max_tokens=9, messages=[{"role": "user", "content": "and?"}]
        ) as stream:
            said = "".join(stream.text_stream)
        return Result(info={"name": next(filter(None, calls))[0].function.name, "said": said})

    env = make_env(agent)
    env.reset()
    assert env.step(calls_tool(("add", {})))[0]["messages"] == [{"role": "user", "content": "and?"}]
    assert env.step(say("bye"))[4] | {"task_index": 0} == {"name": "add", "said": "bye", "task_index": 0}


def test_reasoning_reaches_the_agent(make_env):
    def agent(ctx):
        message = ask(ctx.openai(), "hi").choices[0].message
        return Result(info={"thought": message.reasoning_content, "said": message.content})

    env = make_env(agent)
    env.reset()
    info = env.step({"role": "assistant", "content": [{"type": "text", "text": "ok"}], "reasoning_content": "hm"})[4]
    assert (info["thought"], info["said"]) == ("hm", "ok")


def test_an_agent_that_ends_before_its_first_request_is_a_failure(make_env):
    with pytest.raises(EnvFailure, match=r"agent: AgentEnv: the agent ended with .*reward=1.0.* first request"):
        make_env(lambda ctx: 1).reset()


def test_an_agent_that_fails_is_a_failure_and_the_next_episode_works(adding, say):
    with gym.make(adding) as env:
        env.reset(seed=0)
        with pytest.raises(EnvFailure, match="agent: KeyError: 'a bug'"):
            env.step(say("bug"))
        with pytest.raises(ResetNeeded):
            env.step(say("ok"))
        env.reset(seed=0)
        assert env.step(say("ok"))[2]
        with pytest.raises(ResetNeeded):
            env.step(say("ok"))


def test_a_step_before_reset_is_refused(adding, say):
    with gym.make(adding) as env, pytest.raises(ResetNeeded):
        env.unwrapped.step(say("ok"))


def test_an_action_outside_of_the_space_leaves_the_request_open(adding, say):
    with gym.make(adding) as env:
        env.reset(seed=0)
        with pytest.raises(ValueError, match="action.role"):
            env.unwrapped.step({"role": "user", "content": "ok"})
        assert env.step(say("ok"))[2]


def test_a_reward_that_is_no_number_is_a_failure(make_env, say):
    def agent(ctx):
        ask(ctx.openai(), "hi")
        return float("inf")

    env = make_env(agent)
    env.reset()
    with pytest.raises(EnvFailure, match="reward: .*agent.run: the reward is inf"):
        env.step(say("ok"))


@pytest.mark.parametrize("when", ["reset", "step"])
def test_an_agent_that_does_not_end_is_a_failure_in_time(make_env, say, when):
    async def agent(ctx):
        if when == "step":
            await ask(ctx.openai(), "hi")
        await asyncio.sleep(60)

    env = make_env(agent, run_timeout=0.5 if when == "reset" else 2.5)
    begin = time.monotonic()
    with pytest.raises(EnvFailure, match=r"timeout: .* has not ended after .* s \(run_timeout\)"):
        env.reset()
        env.step(say("ok"))
    assert time.monotonic() - begin < 5


def test_close_and_reset_end_the_agent_that_was_running(make_env):
    ended = []

    async def agent(ctx):
        try:
            await ask(ctx.openai(), "hi")
        finally:
            ended.append(ctx.index)

    env = make_env(agent)
    for index in range(3):
        env.reset(options={"index": index})
        assert ended == list(range(index))
    env.close()
    assert ended == [0, 1, 2]
    env.close()


@pytest.mark.filterwarnings("error::pytest.PytestUnraisableExceptionWarning")
def test_a_copy_that_cannot_be_is_let_go_of_quietly():
    env = gym.make("ToolUse-v0")
    env.reset(seed=0)
    with pytest.raises(TypeError):
        copy.deepcopy(env)
    env.close()
    gc.collect()


def test_an_env_that_is_dropped_ends_its_agent():
    ended = threading.Event()

    def agent(ctx):
        try:
            ask(ctx.openai(), "hi")
        finally:
            ended.set()

    env = AgentEnv(agent)
    env.reset()
    del env
    assert ended.wait(10)


BLOCKED = """
import asyncio, time
from molt_gym.agents import AgentEnv

async def agent(ctx):
    sleeping = asyncio.ensure_future(asyncio.to_thread(time.sleep, 1000))
    await ctx.openai().chat.completions.create(model="m", messages=[{"role": "user", "content": "hi"}])

def sync_agent(ctx):
    ctx.openai().chat.completions.create(model="m", messages=[{"role": "user", "content": "hi"}])

envs = [AgentEnv(agent), AgentEnv(sync_agent)]
print([env.reset()[0]["messages"][0]["content"] for env in envs])
"""


def test_agents_that_were_left_do_not_keep_the_interpreter_from_ending():
    run = subprocess.run([sys.executable, "-c", BLOCKED], capture_output=True, text=True, timeout=30)
    assert (run.returncode, run.stdout, run.stderr) == (0, "['hi', 'hi']\n", "")


def test_a_request_that_nobody_waits_for_any_more_is_no_observation(make_env, say):
    async def agent(ctx):
        client = ctx.openai(max_retries=0)
        first = asyncio.ensure_future(ask(client, "first"))
        await asyncio.sleep(0.2)
        given_up = asyncio.ensure_future(ask(client, "given up"))
        await asyncio.sleep(0.2)
        given_up.cancel()
        await first
        await ask(client, "last")

    env = make_env(agent)
    assert env.reset()[0]["messages"][0]["content"] == "first"
    time.sleep(1)
    assert env.step(say("ok"))[0]["messages"][0]["content"] == "last"


def test_an_agent_may_give_up_a_request_that_is_observed(make_env, say):
    async def agent(ctx):
        try:
            await asyncio.wait_for(ask(ctx.openai(), "hi"), 0.3)
        except TimeoutError:
            ctx.add_reward(1)

    env = make_env(agent)
    env.reset()
    time.sleep(0.5)
    assert env.step(say("too late"))[1:4] == (1.0, True, False)


def test_agents_know_the_cap_on_turns(make_env):
    @register_agent("Capped-v0", max_turns=7)
    def agent(ctx):
        ask(ctx.openai(), f"{ctx.max_turns} turns")

    with gym.make("Capped-v0") as env:
        assert env.reset()[0]["messages"][0]["content"] == "7 turns"


def test_arguments_reach_the_agent_and_odd_ones_are_refused():
    class Agent(ChatAgent):
        def __init__(self, level):
            self.level = level

        def run(self, ctx): ...

    assert AgentEnv(Agent, level=3, run_timeout=5).agent.level == 3
    with pytest.raises(TypeError, match="colour"):
        AgentEnv(Agent, colour=3)
    for run_timeout in (0, -1, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="run_timeout"):
            AgentEnv(Agent, level=1, run_timeout=run_timeout)


def test_a_shell_script_with_curl_is_an_env(make_env, say):
    script = """
        body="{\\"model\\": \\"m\\", \\"messages\\": [{\\"role\\": \\"user\\", \\"content\\": \\"$(cat)\\"}]}"
        curl -sf "$OPENAI_BASE_URL/chat/completions" -H "Authorization: Bearer $OPENAI_API_KEY" -d "$body" \\
            -H 'Content-Type: application/json' | grep -q sesame && echo 1 || echo 0
    """
    env = make_env(CommandAgent(["bash", "-c", script], tasks=[11, 12]))
    for answer, reward in (("open sesame", 1.0), ("open up", 0.0)):
        assert env.reset(options={"index": 1})[0]["messages"] == [{"role": "user", "content": "12"}]
        assert env.step(say(answer))[1:4] == (reward, True, False)


def test_a_run_can_be_launched_on_another_server_with_the_same_effect(adding, say):
    from molt_gym.agents.background import QueueRespondent, background

    with gym.make(adding) as env:
        observation, info = env.reset(seed=9)
        questions = []
        session = background().open(QueueRespondent(questions.append))
        run = env.unwrapped.launch(session, index=info["task_index"], seed=9, max_turns=4)
        while not questions:
            time.sleep(0.01)
        assert questions[0][0].messages == observation["messages"] and run.context.max_turns == 4
        run.cancel()
        background().close(session)
        assert run.join(5)


def _played_in_a_fork(connection):
    env = AgentEnv(lambda ctx: ask(ctx.openai(), "in the child") and None)
    connection.send(json.dumps(env.reset()[0]))
    env.close()


def test_a_forked_process_has_a_server_of_its_own(make_env, say):
    env = make_env(lambda ctx: ask(ctx.openai(), "in the parent") and None)
    env.reset()
    ours, theirs = multiprocessing.Pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        child = multiprocessing.get_context("fork").Process(target=_played_in_a_fork, args=(theirs,))
        child.start()
    assert ours.poll(30) and "in the child" in ours.recv()
    child.join(10)
    assert env.step(say("ok"))[2]


def test_the_key_of_a_run_opens_nothing_after_its_end(make_env, say):
    def agent(ctx):
        client.base_url, client.api_key = ctx.base_url, ctx.api_key
        ask(client, "hi")

    with openai.OpenAI(base_url="http://127.0.0.1:9/v1", api_key="none", max_retries=0) as client:
        env = make_env(agent)
        env.reset()
        assert env.step(say("ok"))[2]
        with pytest.raises(openai.AuthenticationError, match="no open session"):
            ask(client, "late")
