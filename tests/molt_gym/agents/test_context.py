import asyncio
import contextlib
import time

import anthropic
import numpy as np
import openai
import pytest

from molt_gym import EnvFailure
from molt_gym.agents import AgentContext, ChatAgent

USER = [{"role": "user", "content": "hi"}]


async def test_a_client_is_async_in_a_coroutine_and_sync_elsewhere(play):
    kinds = []

    async def agent(ctx):
        kinds.extend([ctx.openai(), ctx.anthropic(), ctx.openai(asynchronous=False)])
        kinds.append(await asyncio.to_thread(ctx.anthropic))

    def sync_agent(ctx):
        kinds.extend([ctx.openai(), ctx.anthropic(), ctx.openai(asynchronous=True)])

    await play(agent)
    await play(sync_agent)
    assert list(map(type, kinds)) == [
        openai.AsyncOpenAI, anthropic.AsyncAnthropic, openai.OpenAI, anthropic.Anthropic,
        openai.OpenAI, anthropic.Anthropic, openai.AsyncOpenAI,
    ]


async def test_clients_are_closed_after_the_run(play):
    clients = []

    async def agent(ctx):
        clients.extend([ctx.openai(), ctx.anthropic(), ctx.openai(asynchronous=False)])
        for client in clients[::2]:
            answer = client.chat.completions.create(model=ctx.model, messages=USER)
            await answer if asyncio.iscoroutine(answer) else answer
        raise KeyError

    with pytest.raises(EnvFailure):
        await play(agent)
    assert len(clients) == 3 and all(client.is_closed() for client in clients)


async def test_a_client_is_ready_in_a_few_milliseconds_without_proxies(play, monkeypatch):
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    seconds = []

    def agent(ctx):
        for make in (ctx.openai, ctx.anthropic) * 5:
            begin = time.perf_counter()
            make()
            seconds.append(time.perf_counter() - begin)
        ctx.anthropic().messages.create(model=ctx.model, max_tokens=5, messages=USER)
        return ctx.openai().chat.completions.create(model=ctx.model, messages=USER).choices[0].message.content == "ok"

    assert (await play(agent)).reward == 1
    assert sorted(seconds)[len(seconds) // 2] < 0.01


async def test_a_client_takes_the_settings_of_the_user(play):
    def agent(ctx):
        client = ctx.openai(max_retries=7, timeout=3.0)
        own = ctx.openai()
        return client.max_retries == 7 and client.timeout == 3.0 and own.max_retries == 2 and 25 < own.timeout <= 30

    assert (await play(agent)).reward == 1


@pytest.mark.parametrize("url", ["http", "https"])
def test_a_public_url_with_tls_is_verified(monkeypatch, url):
    made = []
    monkeypatch.setattr(openai, "DefaultHttpxClient", lambda **options: made.append(options) or None)
    context = AgentContext(0, np.random.default_rng(0), url=f"{url}://agents.example", key="k", tools=[],
                           max_turns=None, timeout=30.0, model="m")
    context.openai(asynchronous=False)
    assert [options["verify"] for options in made] == [url == "https"]


@pytest.mark.parametrize("proxy", [None, "http://127.0.0.1:9"])
async def test_the_environment_is_what_the_sdks_read_also_beside_a_proxy(play, monkeypatch, proxy):
    if proxy is not None:
        monkeypatch.setenv("HTTP_PROXY", proxy)
        monkeypatch.setenv("http_proxy", proxy)

    async def agent(ctx):
        for name, value in ctx.environment().items():
            monkeypatch.setenv(name, value)
        async with openai.AsyncOpenAI() as client:
            await client.responses.create(model=ctx.model, input="hi")
        async with anthropic.AsyncAnthropic() as client:
            await client.messages.create(model=ctx.model, max_tokens=5, messages=USER)
        return 1

    assert (await play(agent)).reward == 1


@pytest.mark.parametrize(
    ("task", "messages"),
    [
        ({"prompt": "hi", "answer": 3}, USER),
        ({"messages": USER}, USER),
        ("hi", USER),
        (7, []),
        ({"answer": 3}, []),
        (None, []),
    ],
)
async def test_a_task_with_a_prompt_or_messages_opens_the_conversation(play, task, messages):
    seen = []

    class Agent(ChatAgent):
        tools = [{"type": "function"}]

        def task(self, index, rng):
            return task

        def run(self, ctx):
            seen.append((ctx.task, ctx.messages, ctx.index, ctx.tools, ctx.max_turns))
            ctx.messages.append("mine")
            ctx.tools.append("mine")

    await play(Agent, index=4, max_turns=9)
    assert seen == [(task, [*messages, "mine"], 4, [{"type": "function"}, "mine"], 9)]
    assert Agent.tools == [{"type": "function"}] and USER == [{"role": "user", "content": "hi"}]


async def test_the_reward_is_what_was_added_and_what_was_returned(play):
    def agent(ctx):
        ctx.add_reward(0.5)
        ctx.report(reward=1, score=0.1, info={"a": 1, "b": 1})
        ctx.report(score=0.25, info={"b": 2})
        return 2

    result = await play(agent)
    assert (result.reward, result.score, result.info, result.truncated) == (3.5, 0.25, {"a": 1, "b": 2}, False)


async def test_a_run_can_report_that_it_was_cut_off(play):
    assert (await play(lambda ctx: ctx.report(truncated=True))).truncated


async def test_a_reward_that_is_no_number_fails_the_run_even_if_the_agent_catches_it(play):
    def agent(ctx):
        with contextlib.suppress(Exception):
            ctx.add_reward(float("nan"))
        return 1

    with pytest.raises(EnvFailure, match="the reward is nan") as caught:
        await play(agent)
    assert caught.value.reason == "reward"


async def test_rewards_can_be_added_from_many_threads(play):
    async def agent(ctx):
        await asyncio.gather(*(asyncio.to_thread(lambda: [ctx.add_reward(1) for _ in range(200)]) for _ in range(8)))

    assert (await play(agent)).reward == 1600


async def test_what_a_run_began_is_told_of_its_cancellation(start):
    heard = []

    def agent(ctx):
        ctx.on_cancel(lambda: heard.append("then"))
        while not heard:
            time.sleep(0.01)
        ctx.on_cancel(lambda: heard.append("at once"))

    run, session, _ = start(agent)
    await asyncio.sleep(0.05)
    run.cancel()
    assert run.join(5) and heard == ["then", "at once"]


async def test_the_time_that_remains_runs_out(play):
    def agent(ctx):
        first = ctx.remaining()
        time.sleep(0.02)
        second = ctx.remaining()
        time.sleep(0.2)
        return 0.15 >= first > second > 0 and ctx.remaining() == 0

    assert (await play(agent, timeout=0.15)).reward == 1
