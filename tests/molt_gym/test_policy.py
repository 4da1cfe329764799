import asyncio
import functools
import threading
import time

import pytest

from molt_gym import Policy, as_policy

MESSAGES = [{"role": "user", "content": "hi"}]


def ask(policy, messages=MESSAGES, tools=()):
    return asyncio.run(asyncio.wait_for(as_policy(policy).reply(messages, list(tools)), timeout=10))


async def shout(observation):
    await asyncio.sleep(0)
    return observation["messages"][-1]["content"].upper()


class Shouter:
    async def __call__(self, observation):
        return await shout(observation)


class Blocking:
    def reply(self, messages, tools):
        return messages[-1]["content"].upper()


@pytest.mark.parametrize(
    "policy",
    [
        lambda observation: observation["messages"][-1]["content"].upper(),
        lambda observation: {"role": "assistant", "content": "HI"},
        lambda observation: shout(observation),
        functools.partial(lambda word, observation: word, "HI"),
        shout,
        Shouter(),
        Blocking(),
    ],
    ids=["text", "message", "awaitable", "partial", "async", "async object", "blocking reply"],
)
def test_a_function_is_a_policy(policy):
    assert isinstance(as_policy(policy), Policy)
    assert ask(policy) == {"role": "assistant", "content": "HI"}


def test_a_policy_is_taken_as_it_is():
    class Silent:
        async def reply(self, messages, tools):
            return {"role": "assistant", "content": ""}

    policy = Silent()
    assert as_policy(policy) is policy


def test_a_function_gets_the_tools_and_cannot_change_the_conversation():
    messages, tools = [{"role": "user", "content": "hi"}], [{"type": "function"}]

    def meddle(observation):
        observation["messages"].clear()
        return f"{len(observation.pop('tools'))} tool"

    assert ask(meddle, messages, tools)["content"] == "1 tool"
    assert messages == [{"role": "user", "content": "hi"}] and tools == [{"type": "function"}]


def test_replies_that_block_do_not_wait_for_each_other_and_free_the_event_loop():
    together = threading.Barrier(40, timeout=10)

    def block(observation):
        together.wait()
        return "done"

    async def all_at_once():
        policy = as_policy(block)
        return await asyncio.gather(*(policy.reply(MESSAGES, []) for _ in range(40)))

    assert len(asyncio.run(all_at_once())) == 40


def test_a_function_that_hangs_can_be_given_up():
    release = threading.Event()

    async def give_up():
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(as_policy(lambda observation: release.wait(30)).reply(MESSAGES, []), timeout=0.1)

    started = time.monotonic()
    asyncio.run(give_up())
    release.set()
    assert time.monotonic() - started < 5


@pytest.mark.parametrize(
    ("answer", "error", "complaint"),
    [
        (None, TypeError, "returned None; return an assistant message or its text"),
        (3, TypeError, "returned 3"),
        ({"role": "user", "content": "hi"}, ValueError, "action.role: 'user'; write 'assistant'"),
        ({"content": "hi"}, ValueError, "action.role: None"),
    ],
)
def test_a_reply_that_is_no_message_is_refused_by_the_name_of_the_function(answer, error, complaint):
    def my_policy(observation):
        return answer

    with pytest.raises(error, match=complaint) as caught:
        ask(my_policy)
    assert "my_policy" in str(caught.value)


def test_what_a_function_raises_comes_through():
    with pytest.raises(KeyError, match="nothing"):
        ask(lambda observation: observation["nothing"])


def test_a_script_that_ends_is_an_error_and_no_hang():
    script = iter(["one"])
    policy = as_policy(lambda observation: next(script))
    assert ask(policy)["content"] == "one"
    with pytest.raises(RuntimeError, match=r"policy .*lambda.*: raised StopIteration\(\)"):
        ask(policy)


@pytest.mark.parametrize(
    ("thing", "complaint"),
    [
        ("Qwen/Qwen3-4B", "'Qwen/Qwen3-4B' answers nothing; pass a function"),
        (None, "None"),
        (Blocking, "pass an instance, Blocking"),
    ],
)
def test_what_cannot_answer_is_refused(thing, complaint):
    with pytest.raises(TypeError, match=complaint):
        as_policy(thing)
