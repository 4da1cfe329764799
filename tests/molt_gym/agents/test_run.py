import asyncio
import gc
import json
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import openai
import pytest

from molt_gym import EnvFailure, PromptTooLong
from molt_gym.agents import ChatAgent, Result

USER = [{"role": "user", "content": "hi"}]
ADD = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}


async def ask(client, ctx, text="hi"):
    reply = await client.chat.completions.create(model=ctx.model, messages=[{"role": "user", "content": text}])
    return reply.choices[0].message.content


def ask_sync(ctx, text="hi", **kwargs):
    client = ctx.openai(**kwargs)
    reply = client.chat.completions.create(model=ctx.model, messages=[{"role": "user", "content": text}])
    return reply.choices[0].message.content


async def failure_of(play, agent, *args, **kwargs):
    with pytest.raises(EnvFailure) as caught:
        await play(agent, *args, **kwargs)
    return caught.value


async def test_an_openai_tools_loop_runs_to_its_end(play, calls_tool):
    async def agent(ctx):
        client, messages = ctx.openai(), [{"role": "user", "content": "What is 2 + 3?"}]
        while True:
            reply = await client.chat.completions.create(model=ctx.model, messages=messages, tools=[ADD])
            message = reply.choices[0].message
            messages.append(message.model_dump(exclude_none=True))
            if not message.tool_calls:
                return message.content == "5"
            for call in message.tool_calls:
                total = str(sum(json.loads(call.function.arguments).values()))
                messages.append({"role": "tool", "tool_call_id": call.id, "content": total})

    def policy(call):
        last = call.messages[-1]
        return last["content"] if last["role"] == "tool" else calls_tool(("add", {"a": 2, "b": 3}))

    assert await play(agent, policy) == Result(1.0)


async def test_an_anthropic_tools_loop_runs_to_its_end(play, calls_tool):
    def agent(ctx):
        client, messages = ctx.anthropic(), [{"role": "user", "content": "What is 2 + 3?"}]
        tools = [{"name": "add", "input_schema": ADD["function"]["parameters"]}]
        while True:
            reply = client.messages.create(model=ctx.model, max_tokens=99, messages=messages, tools=tools)
            messages.append({"role": "assistant", "content": [block.model_dump() for block in reply.content]})
            if reply.stop_reason != "tool_use":
                return reply.content[0].text == "5"
            results = [{"type": "tool_result", "tool_use_id": block.id, "content": str(sum(block.input.values()))}
                       for block in reply.content if block.type == "tool_use"]
            messages.append({"role": "user", "content": results})

    def policy(call):
        last = call.messages[-1]
        return last["content"] if last["role"] == "tool" else calls_tool(("add", {"a": 2, "b": 3}))

    assert await play(agent, policy) == Result(1.0)


@pytest.mark.parametrize(
    "error", [StopIteration(3), SystemExit(2), KeyboardInterrupt(), asyncio.CancelledError(), GeneratorExit(),
              KeyError("lost"), ExceptionGroup("two", [ValueError("lost")])], ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("kind", ["sync", "async", "task"])
async def test_whatever_an_agent_raises_fails_its_run_alone(play, error, kind):
    def sync_agent(ctx):
        raise error

    async def async_agent(ctx):
        await ask(ctx.openai(), ctx)
        raise error

    class BadTask(ChatAgent):
        def task(self, index, rng):
            raise error

        def run(self, ctx): ...

    failure = await failure_of(play, {"sync": sync_agent, "async": async_agent, "task": BadTask}[kind])
    assert failure.reason == "agent"
    assert type(error).__name__ in failure.detail
    # Python turns the StopIteration of a coroutine into a RuntimeError.
    assert "raise error" in failure.detail or (kind, type(error)) == ("async", StopIteration)
    assert (await play(lambda ctx: 1)).reward == 1


async def test_of_tasks_that_failed_together_the_first_is_told_with_its_place(play):
    async def agent(ctx):
        async def lose():
            raise KeyError("board")

        async with asyncio.TaskGroup() as group:
            group.create_task(lose())

    failure = await failure_of(play, agent)
    assert failure.reason == "agent" and "ExceptionGroup: unhandled errors in a TaskGroup" in failure.detail
    assert "\nKeyError: 'board'\n" in failure.detail and 'raise KeyError("board")' in failure.detail


async def test_an_exit_in_a_subtask_fails_the_run(play):
    async def agent(ctx):
        async def leave():
            raise SystemExit(3)

        asyncio.ensure_future(leave())
        await asyncio.sleep(30)

    assert "SystemExit: 3" in (await failure_of(play, agent)).detail


async def test_an_iterator_that_runs_out_in_a_thread_fails_the_run(play):
    async def agent(ctx):
        await asyncio.to_thread(next, iter([]))

    assert "StopIteration" in (await failure_of(play, agent)).detail


async def test_a_return_value_that_is_no_reward_is_a_failure(play):
    assert (await failure_of(play, lambda ctx: float("nan"))).reason == "reward"
    assert (await failure_of(play, lambda ctx: "good")).reason == "reward"


async def test_an_agents_own_failure_keeps_its_reason(play):
    def agent(ctx):
        raise EnvFailure("judge", "unreachable")

    async def grouped(ctx):
        async with asyncio.TaskGroup() as group:
            group.create_task(asyncio.to_thread(agent, ctx))

    for each in (agent, grouped):
        failure = await failure_of(play, each)
        assert (failure.reason, failure.detail) == ("judge", "unreachable")


@pytest.mark.parametrize("swallowed", [False, True])
async def test_a_broken_engine_is_not_the_agents_fault(play, swallowed):
    def engine(call):
        raise RuntimeError("out of memory")

    def agent(ctx):
        try:
            ask_sync(ctx, max_retries=0)
        except openai.APIError:
            if not swallowed:
                raise
        return 0

    failure = await failure_of(play, agent, engine)
    assert failure.reason == "generation" and "out of memory" in failure.detail


async def test_an_engine_that_recovers_is_no_failure(play):
    troubles = [RuntimeError("once")]

    def engine(call):
        if troubles:
            raise troubles.pop()
        return "ok"

    assert (await play(lambda ctx: ask_sync(ctx) == "ok", engine)).reward == 1


async def test_a_context_that_is_used_up_cuts_the_run_off(play):
    def engine(call):
        raise PromptTooLong("9 tokens, and the context has 8")

    async def agent(ctx):
        ctx.add_reward(0.5)
        async with asyncio.TaskGroup() as group:
            group.create_task(ask(ctx.openai(), ctx))

    assert await play(agent, engine) == Result(0.5, truncated=True)


async def test_an_agent_that_makes_room_in_its_context_goes_on(play):
    def engine(call):
        if len(call.messages[0]["content"]) > 2:
            raise PromptTooLong("too long")
        return "ok"

    def agent(ctx):
        with pytest.raises(openai.BadRequestError):
            ask_sync(ctx, "long")
        return ask_sync(ctx) == "ok"

    assert await play(agent, engine) == Result(1.0)


async def test_turns_that_are_used_up_cut_the_run_off(play):
    def agent(ctx):
        for _ in range(10):
            ask_sync(ctx)
            ctx.add_reward(1)

    assert await play(agent, max_turns=3) == Result(3.0, truncated=True)


async def test_an_error_that_comes_of_itself_fails_the_run(play):
    def agent(ctx):
        error = ValueError("mine")
        error.response = SimpleNamespace(headers=None)
        raise error from error

    assert (await failure_of(play, agent)).detail.startswith("ValueError: mine")


async def test_a_refusal_that_a_framework_wraps_and_raises_on_cuts_the_run_off(play):
    def agent(ctx):
        try:
            [ask_sync(ctx), ask_sync(ctx)]
        except openai.APIError as refused:
            try:
                raise RuntimeError("framework") from refused
            except RuntimeError as wrapped:
                raise refused from wrapped

    assert await play(agent, max_turns=1) == Result(truncated=True)


async def test_a_run_without_turns_left_that_is_cancelled_keeps_its_reward(start):
    async def agent(ctx):
        ctx.add_reward(1)
        try:
            await ask(ctx.openai(), ctx)
        except openai.APIError:
            await asyncio.sleep(60)

    run, session, _ = start(agent, max_turns=0)
    await asyncio.wait_for(session.over.wait(), 10)
    run.cancel()
    assert run.future.result(timeout=0) == Result(1.0, truncated=True) and run.join(5)


async def test_eight_agents_that_block_at_once_all_end(start):
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(2))

    def agent(ctx):
        return sum(ask_sync(ctx, str(turn)) == "ok" for turn in range(3))

    async def async_agent(ctx):
        return sum([answer == "ok" for answer in await asyncio.gather(
            *(asyncio.to_thread(ask_sync, ctx, str(turn)) for turn in range(3)))])

    runs = [start(each, wait=0.05)[0] for each in [agent] * 8 + [async_agent] * 8]
    results = await asyncio.wait_for(asyncio.gather(*(asyncio.wrap_future(run.future) for run in runs)), 30)
    assert [result.reward for result in results] == [3.0] * 16


async def test_an_async_agent_that_blocks_holds_up_nobody(start, play):
    release = threading.Event()

    async def blocking(ctx):
        release.wait(20)

    run, *_ = start(blocking)
    begin = time.monotonic()

    async def agent(ctx):
        return await ask(ctx.openai(), ctx) == "ok"

    assert (await play(agent)).reward == 1 and time.monotonic() - begin < 10 and not run.future.done()
    release.set()
    await asyncio.wait_for(asyncio.wrap_future(run.future), 5)


async def test_more_threads_of_one_agent_wait_for_each_other_than_a_pool_would_have(play):
    meeting = threading.Barrier(80)

    async def agent(ctx):
        await asyncio.gather(*(asyncio.to_thread(meeting.wait, 20) for _ in range(80)))
        return 1

    assert (await play(agent)).reward == 1


async def test_cancelling_ends_an_async_agent_and_its_request(start):
    cleaned = []

    async def agent(ctx):
        try:
            await ask(ctx.openai(), ctx)
        finally:
            cleaned.append(True)

    run, session, policy = start(agent, wait=60)
    while not policy.calls:
        await asyncio.sleep(0.01)
    run.cancel()
    with pytest.raises(EnvFailure, match="cancelled: the run of .* was cancelled"):
        run.future.result(timeout=0)
    assert await asyncio.to_thread(run.join, 5) and cleaned


async def test_cancelling_before_the_first_step_of_an_agent_works(start):
    for _ in range(20):
        async def agent(ctx):
            await asyncio.sleep(60)

        run, *_ = start(agent)
        run.cancel()
        assert await asyncio.to_thread(run.join, 5)


async def test_a_cancelled_sync_agent_ends_with_its_session(start):
    def agent(ctx):
        while True:
            ask_sync(ctx)

    run, session, policy = start(agent)
    while not policy.calls:
        await asyncio.sleep(0.01)
    run.cancel()
    session.close()
    with pytest.raises(EnvFailure, match="cancelled"):
        run.future.result(timeout=0)
    assert await asyncio.to_thread(run.join, 5)


async def test_cancelling_a_run_that_has_ended_changes_nothing(start):
    run, *_ = start(lambda ctx: 1)
    await asyncio.wrap_future(run.future)
    run.cancel()
    assert run.future.result(timeout=0) == Result(1.0)


async def test_what_an_agent_left_on_its_loop_ends_with_it(play):
    ended = []

    async def agent(ctx):
        async def forever():
            try:
                await asyncio.sleep(60)
            finally:
                ended.append(True)

        agent.task = asyncio.ensure_future(forever())
        await asyncio.sleep(0)
        return 1

    assert (await play(agent)).reward == 1 and ended


def resources():
    gc.collect()
    return len(os.listdir("/proc/self/fd")), threading.active_count()


async def test_a_hundred_runs_leave_no_thread_loop_or_socket(start, server):
    async def agent(ctx):
        await ask(ctx.openai(), ctx)
        if ctx.index % 4 == 1:
            raise KeyError("lost")
        if ctx.index % 4 == 2:
            await ask(ctx.openai(), ctx, "wait")

    def sync_agent(ctx):
        ask_sync(ctx)
        plain = openai.DefaultHttpxClient(verify=False)
        client = openai.OpenAI(base_url=ctx.base_url, api_key=ctx.api_key, timeout=30, http_client=plain)
        if ctx.index % 4 == 1:
            client.models.list()
            raise KeyError("lost")
        client.close()

    def wait(call):
        return 60 if call.messages[0]["content"] == "wait" else 0

    async def one(index):
        run, session, policy = start(agent if index % 2 else sync_agent, index=index // 2, wait=wait)
        if index // 2 % 4 == 2 and index % 2:
            while len(policy.calls) < 2:
                await asyncio.sleep(0.002)
            run.cancel()
        try:
            return await asyncio.wait_for(asyncio.wrap_future(run.future), 30)
        except EnvFailure as failure:
            return failure.reason
        finally:
            session.close()
            assert await asyncio.to_thread(run.join, 20)

    for index in range(8):
        await one(index)
    before = resources()
    outcomes = []
    for begin in range(0, 100, 10):
        outcomes += await asyncio.gather(*(one(begin + i) for i in range(10)))
    assert [outcomes.count(reason) for reason in ("agent", "cancelled", Result())] == [26, 12, 62]
    # Idle threads of this test's own pool are none of the runs'. Sockets close when the loop gets to it.
    for _ in range(50):
        await asyncio.sleep(0.2)
        after = resources()
        if after[0] <= before[0] + 2 and after[1] <= before[1] + 10:
            break
    assert after[0] <= before[0] + 2 and after[1] <= before[1] + 10 and server.sessions == 0
