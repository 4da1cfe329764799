import asyncio
import functools
import threading
import time

import pytest
from aiohttp import web
from openai import BadRequestError

from molt_gym import Policy, as_policy
from molt_gym.policy import EndpointPolicy
from molt_gym.spaces import AssistantMessageSpace
from molt_gym.threads import loop_in_thread

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


@pytest.fixture
async def endpoint(request):
    """A policy whose endpoint answers with what is in `answers`, in their order."""
    options = getattr(request, "param", {})
    answers = []

    async def answer(request):
        told = answers.pop(0)
        told = told(await request.json()) if callable(told) else told
        return told if isinstance(told, web.Response) else web.json_response(told)

    runner = web.ServerRunner(web.Server(answer))
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    policy = EndpointPolicy(f"http://127.0.0.1:{runner.addresses[0][1]}/v1", "any", retries=0, **options)
    yield policy, answers
    await policy.aclose()
    await runner.cleanup()


@pytest.mark.parametrize(("told", "arguments"), [
    ({"arguments": '{"a": 1}'}, '{"a": 1}'), ({"arguments": {"a": 1}}, '{"a": 1}'), ({"arguments": '{"a":'}, '{"a":'),
    ({"arguments": None}, "{}"), ({}, "{}")])
@pytest.mark.parametrize("beside", [{"id": "call_1", "type": "function"}, {"id": None, "type": None}, {"id": ""}, {}])
async def test_a_call_of_an_endpoint_is_read_in_all_its_spellings(endpoint, told, arguments, beside):
    policy, answers = endpoint
    call = {**beside, "function": {"name": "look", **told}}
    answers.append({"choices": [{"message": {"role": "assistant", "content": None, "tool_calls": [call, call]}}]})
    reply = await policy.reply(MESSAGES, [])
    AssistantMessageSpace().validate(reply)
    assert [call["function"] for call in reply["tool_calls"]] == [{"name": "look", "arguments": arguments}] * 2
    assert beside.get("id") or len({call["id"] for call in reply["tool_calls"]}) == 2


@pytest.mark.parametrize(("told", "words"), [
    ({"error": {"message": "overloaded"}}, "overloaded"), ({"choices": []}, "choices"),
    (lambda asked: web.Response(text="<html>"), "<html>"),
    ({"choices": [{"message": None, "finish_reason": "stop"}]}, "None"),
    ({"choices": [{"message": {"role": "assistant", "content": ""}, "finish_reason": "error"}]}, "error"),
    ({"choices": [{"message": {"role": "assistant", "content": "ha"}, "finish_reason": "abort"}]}, "abort")])
async def test_an_endpoint_that_gives_no_reply_is_an_error_and_no_empty_reply(endpoint, told, words):
    policy, answers = endpoint
    answers.append(told)
    with pytest.raises(RuntimeError, match=f"the endpoint answered without a reply: .*{words}"):
        await policy.reply(MESSAGES, [])


async def test_reasoning_of_an_endpoint_is_text_or_none(endpoint):
    policy, answers = endpoint
    for told in ({"reasoning": "hm"}, {"reasoning_content": "hm", "reasoning": "no"}, {"reasoning": [{"text": "hm"}]}):
        answers.append({"choices": [{"message": {"role": "assistant", "content": "a", **told}}]})
    replies = [await policy.reply(MESSAGES, []) for _ in range(3)]
    assert [reply.get("reasoning_content") for reply in replies] == ["hm", "hm", None]


def reasoning_model(asked):
    for name in ("max_tokens", "top_p"):
        if name in asked:
            error = {"message": f"no {name}", "param": name, "code": "unsupported_parameter"}
            return web.json_response({"error": error}, status=400)
    said = f"{asked['max_completion_tokens']} {asked['temperature']}"
    return {"choices": [{"message": {"role": "assistant", "content": said}}]}


async def test_a_parameter_that_a_model_has_not_got_is_spelled_otherwise(endpoint):
    policy, answers = endpoint
    answers += [reasoning_model] * 9
    replies = [*await asyncio.gather(*(policy.reply(MESSAGES, []) for _ in range(2))), await policy.reply(MESSAGES, [])]
    assert [reply["content"] for reply in replies] == ["512 1.0"] * 3 and len(answers) >= 2


@pytest.mark.parametrize("endpoint", [{"top_p": 0.5}], indirect=True)
async def test_a_parameter_that_a_model_has_not_got_and_that_matters_is_an_error(endpoint):
    policy, answers = endpoint
    answers += [reasoning_model] * 9
    with pytest.raises(BadRequestError, match="no top_p"):
        await policy.reply(MESSAGES, [])
    assert len(answers) == 7


def test_an_endpoint_can_be_asked_on_one_event_loop_after_another():
    async def answer(request):
        await asyncio.sleep(0.02)
        return web.json_response({"choices": [{"message": {"role": "assistant", "content": "a"}}]})

    async def serve():
        runner = web.ServerRunner(web.Server(answer))
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        return runner

    async def ask_four_times():
        return [reply["content"] for reply in await asyncio.gather(*(policy.reply(MESSAGES, []) for _ in range(4)))]

    loop = loop_in_thread("endpoint")
    runner = asyncio.run_coroutine_threadsafe(serve(), loop).result(10)
    policy = EndpointPolicy(f"http://127.0.0.1:{runner.addresses[0][1]}/v1", "any", retries=0, concurrency=2)
    for _ in range(2):
        assert asyncio.run(ask_four_times()) == ["a"] * 4
    asyncio.run_coroutine_threadsafe(runner.cleanup(), loop).result(10)
