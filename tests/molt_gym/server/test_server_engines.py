"""Engines and policies that answer in odd ways, as the SDKs see it."""

import asyncio

import anthropic
import openai
import pytest

from molt_gym.server.respond import PolicyRespondent
from molt_gym.tokens import Generation

END = 257
OK = {"role": "user", "content": "ok"}
HELLO = [262, 264, END]

pytestmark = pytest.mark.timeout(60)
every_wire = pytest.mark.parametrize("name", ["chat", "responses", "messages"])


def generation(ids, reason="stop", logprob=-1.0) -> Generation:
    return Generation(list(ids), [logprob] * len(ids), [0] * len(ids), reason)


def playing(*script):
    """An engine that returns or raises what it is given, one after the other."""
    left = list(script)

    async def generate(ids, sampling, number, images):
        await asyncio.sleep(0)
        outcome = left.pop(0)
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome

    return generate, left


@every_wire
@pytest.mark.parametrize("trouble", [
    generation([262], "abort"), generation([], "abort"), generation(HELLO, logprob=float("nan")),
    generation(HELLO, logprob=1.0), generation([-1]), Generation(HELLO, [], [], "stop"), generation(HELLO, "other"),
    RuntimeError(), TimeoutError("of the engine"), KeyError("x"), asyncio.CancelledError(),
], ids=repr)
async def test_a_reply_that_cannot_be_used_is_asked_for_again(agent_of, wire, name, trouble):
    generate, left = playing(trouble, generation(HELLO))
    agent = agent_of(generate=generate, max_retries=2)
    assert wire.text_of(await agent.ask(name, OK)) == "hello"
    assert (agent.session.turns, len(agent.rows), left) == (1, 1, [])
    assert agent.rows[0].ids[20:] == HELLO


@pytest.mark.parametrize("trouble", [asyncio.CancelledError(), TimeoutError("of the engine"), generation([], "abort")],
                         ids=repr)
@every_wire
async def test_an_engine_that_gives_up_is_no_lost_connection_and_no_deadline(agent_of, name, trouble):
    agent = agent_of(generate=playing(trouble)[0])
    with pytest.raises((openai.APIStatusError, anthropic.APIStatusError), match="aborted|of the engine") as failed:
        await agent.ask(name, OK)
    assert failed.value.status_code == 503 and failed.value.response.headers["x-should-retry"] == "true"
    assert agent.session.failure is not None


async def test_if_one_of_the_choices_fails_the_others_are_aborted(agent_of):
    ended = []

    async def generate(ids, sampling, number, images):
        try:
            await asyncio.sleep(0.02 if number == 1 else 30.0)
        finally:
            ended.append(number)
        raise RuntimeError("down")

    agent = agent_of(generate=generate)
    with pytest.raises(openai.InternalServerError, match="down"):
        await agent.chat(OK, n=3)
    assert sorted(ended) == [0, 1, 2] and agent.rows == []


@every_wire
async def test_a_reply_without_a_token_is_an_empty_text(agent_of, wire, name, prompt_ids):
    generate, _ = playing(generation([]), generation(HELLO))
    agent = agent_of(generate=generate)
    first = await agent.ask(name, OK)
    assert wire.text_of(first) == "" and wire.counts_of(first.usage) == (20, 0)
    await agent.ask(name, OK, *wire.said(first), OK)
    assert agent.rows[0].ids == prompt_ids + [END, 10] + prompt_ids + HELLO


@every_wire
async def test_usage_tells_what_of_a_prompt_was_there_before(agent, wire, name):
    first = await agent.ask(name, OK)
    second = await agent.ask(name, OK, *wire.said(first), OK)
    assert [wire.counts_of(reply.usage) for reply in (first, second)] == [(20, 3), (44, 3)]
    usage = second.usage.model_dump()
    details = usage.get("prompt_tokens_details") or usage.get("input_tokens_details") or {}
    assert details.get("cached_tokens", usage.get("cache_read_input_tokens")) == 23


class Echo:
    """A policy in messages."""

    def __init__(self) -> None:
        self.calls = 0

    async def reply(self, messages, tools):
        self.calls += 1
        if tools and messages[-1]["role"] != "tool":
            function = {"name": tools[0]["function"]["name"], "arguments": '{"a": 1}'}
            return {"role": "assistant", "content": "", "tool_calls": [
                {"id": "call00000", "type": "function", "function": function}]}
        return {"role": "assistant", "content": f"{self.calls}: {messages[-1]['content']}"}


@every_wire
async def test_a_policy_without_tokens_answers_over_every_wire(agent_of, wire, name):
    agent = agent_of(respondent=PolicyRespondent(Echo()))
    reply = await agent.ask(name, OK)
    assert wire.text_of(reply) == "1: ok" and wire.counts_of(reply.usage) == (0, 0)
    assert wire.text_of(await agent.ask(name, OK, *wire.said(reply), OK | {"content": "more"})) == "2: more"
    assert agent.session.turns == 2


async def test_a_policy_without_tokens_calls_tools_samples_twice_and_has_no_logprobs(agent_of):
    agent = agent_of(respondent=PolicyRespondent(Echo()))
    tools = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
    call = (await agent.chat(OK, tools=tools)).choices[0]
    assert call.finish_reason == "tool_calls" and call.message.tool_calls[0].function.arguments == '{"a": 1}'
    two = await agent.chat(OK, n=2)
    assert sorted(choice.message.content for choice in two.choices) == ["2: ok", "3: ok"]
    with pytest.raises(openai.UnprocessableEntityError, match="logprobs"):
        await agent.chat(OK, logprobs=True)
    raw = await agent.openai.chat.completions.with_raw_response.create(
        model="m", messages=[OK], stop=".", max_completion_tokens=2, top_p=0.5)
    assert raw.headers["x-molt-gym-ignored"] == "max_tokens, stop, top_p"
    assert (await agent.anthropic.messages.count_tokens(model="m", messages=[OK])).input_tokens == 0


async def test_a_policy_whose_reply_is_no_message_has_failed(agent_of):
    class Wrong:
        async def reply(self, messages, tools):
            return {"role": "user", "content": 1}

    agent = agent_of(respondent=PolicyRespondent(Wrong()))
    with pytest.raises(openai.InternalServerError, match="the policy failed"):
        await agent.chat(OK)
    assert agent.session.failure is not None and agent.session.turns == 0
