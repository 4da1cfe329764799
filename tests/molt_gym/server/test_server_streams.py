"""Streams, read by the SDKs: the same as the reply, recorded before they end, alive while the engine works."""

import asyncio
import json

import aiohttp
import anthropic
import openai
import pytest

END, NEWLINE = 257, 10
OK = {"role": "user", "content": "ok"}
HELLO = [262, 264, END]
CALL, END_CALL = 267, 268
ADD_CALL = [CALL, *b'\n{"name": "add", "arguments": {"a": 1, "b": "\xc3\xa9"}}\n', END_CALL]
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
# OpenAI's SDK before 3 puts a stream of chat completions together with strict tools alone.
TOOLS = {
    "chat": [{"type": "function", "function": {"name": "add", "parameters": SCHEMA, "strict": True}}],
    "responses": [{"type": "function", "name": "add", "parameters": SCHEMA, "strict": False}],
    "messages": [{"name": "add", "input_schema": SCHEMA}],
}

pytestmark = pytest.mark.timeout(60)
every_wire = pytest.mark.parametrize("name", ["chat", "responses", "messages"])


def streamed(agent, name, *messages, max_tokens=64, **options):
    """A stream that the SDK puts together itself."""
    asked = {"model": "m", **options}
    if name == "chat":
        return agent.openai.chat.completions.stream(
            messages=list(messages), max_tokens=max_tokens, stream_options={"include_usage": True}, **asked)
    if name == "responses":
        return agent.openai.responses.stream(input=list(messages), max_output_tokens=max_tokens, **asked)
    return agent.anthropic.messages.stream(messages=list(messages), max_tokens=max_tokens, **asked)


async def put_together(agent, name, *messages, **options):
    async with streamed(agent, name, *messages, **options) as stream:
        async for _ in stream:
            pass
        if name == "chat":
            return await stream.get_final_completion()
        return await (stream.get_final_response() if name == "responses" else stream.get_final_message())


def content(reply) -> tuple:
    """All that a reply says, without its id and time."""
    data = reply.model_dump(exclude_none=True)
    for volatile in ("id", "created", "created_at", "object", "completed_at"):
        data.pop(volatile, None)
    for item in data.get("output", ()):
        item.pop("id", None)
        item.pop("parsed_arguments", None)
    for choice in data.get("choices", ()):
        for call in choice["message"].get("tool_calls", ()):
            call["function"].pop("parsed_arguments", None)
            call.pop("index", None)
    return data


@every_wire
@pytest.mark.parametrize("sampled", [
    HELLO, [END], [*b"a\n" * 20, 261, END], [0xF0, 0x9F, 0x98, 0x80, 0xF0, END], [*ADD_CALL, END],
    [266, NEWLINE, *ADD_CALL, NEWLINE, *ADD_CALL, END], [*ADD_CALL[:-5], END],
    [259, NEWLINE, 262, NEWLINE, 260, 261, 266, NEWLINE, *ADD_CALL, END],
], ids=["text", "nothing", "lines", "odd bytes", "call", "text and calls", "broken call", "reasoning"])
async def test_a_stream_put_together_is_the_reply(agent_of, engine, wire, name, sampled):
    agent = agent_of("tools", max_tokens=512)
    engine.always = sampled
    options = {"max_tokens": 512, "tools": TOOLS[name]}
    whole = await agent.ask(name, OK, **options)
    pieces = await put_together(agent, name, OK, **options)
    assert content(pieces) == content(whole)
    prompt, reply = wire.counts_of(pieces.usage)
    row = agent.rows[1]
    assert (prompt, reply) == (len(row.ids) - sum(row.mask), sum(row.mask)) == wire.counts_of(whole.usage)


@every_wire
async def test_a_stream_that_was_cut_says_so(agent, wire, name):
    whole = await agent.ask(name, OK, max_tokens=2)
    events = [event async for event in await agent.ask(name, OK, max_tokens=2, stream=True)]
    if name == "chat":
        (choice,) = whole.choices
        assert choice.finish_reason == events[-1].choices[0].finish_reason == "length"
        assert "".join(event.choices[0].delta.content or "" for event in events) == choice.message.content == "hello"
    elif name == "responses":
        assert events[-1].type == "response.incomplete" and content(events[-1].response) == content(whole)
        assert whole.incomplete_details.reason == "max_output_tokens"
    else:
        assert whole.stop_reason == "max_tokens" == events[-2].delta.stop_reason


@pytest.mark.parametrize("options, count", [({}, 0), ({"stream_options": {"include_usage": False}}, 0),
                                            ({"stream_options": {"include_usage": True}}, 1)])
async def test_usage_comes_in_one_last_chunk_if_it_was_asked_for(agent, options, count):
    chunks = [chunk async for chunk in await agent.chat(OK, stream=True, **options)]
    assert [chunk for chunk in chunks if not chunk.choices] == chunks[len(chunks) - count :]
    assert all(chunk.usage is None for chunk in chunks[: len(chunks) - count])
    assert len([1 for chunk in chunks for choice in chunk.choices if choice.finish_reason]) == 1
    assert {chunk.id for chunk in chunks} == {chunks[0].id}
    if count:
        assert (chunks[-1].usage.prompt_tokens, chunks[-1].usage.completion_tokens) == (20, 3)
    assert sum(agent.rows[0].mask) == 3


@pytest.mark.parametrize("caps", [{"max_completion_tokens": 2}, {"max_tokens": 5, "max_completion_tokens": 2}])
async def test_both_caps_cut_the_reply_and_say_length(agent, engine, caps):
    engine.always = [266] * 10
    reply = await agent.chat(OK, **caps)
    assert reply.choices[0].finish_reason == "length" and reply.usage.completion_tokens == 2
    assert sum(agent.rows[0].mask) == 2 and engine.samplings[0].max_tokens == 2


LAST = {"chat": "finish_reason", "responses": "response.completed", "messages": "message_stop"}


def is_last(name: str, event) -> bool:
    if name == "chat":
        return any(choice.finish_reason for choice in event.choices)
    return event.type == LAST[name]


@every_wire
async def test_the_turn_is_recorded_before_the_client_sees_the_last_event(agent_of, monkeypatch, name):
    from molt_gym.server.respond import TokenRespondent

    async def late(self, call):
        replies = await answer(self, call)
        await asyncio.sleep(0.002)
        return replies

    answer = TokenRespondent.answer
    monkeypatch.setattr(TokenRespondent, "answer", late)
    agent = agent_of()
    for turn in range(1, 201):
        async for event in await agent.ask(name, OK, stream=True):
            if is_last(name, event):
                rows = agent.rows
                assert (agent.session.turns, len(rows), rows[-1].ids[20:]) == (turn, turn, HELLO)
                break


@every_wire
async def test_a_stream_is_told_that_it_is_alive_while_the_engine_works(agent, engine, wire, name, monkeypatch):
    monkeypatch.setattr("molt_gym.server.streaming.KEEP_ALIVE", 0.02)
    engine.seconds = 0.15
    body = {"model": "m", "messages": [OK], "input": [OK], "max_tokens": 64, "stream": True}
    async with aiohttp.ClientSession(headers={"x-api-key": agent.session.key}) as client:
        async with client.post(agent.session.url + wire.paths[name], json=body) as response:
            assert response.headers["Content-Type"].startswith("text/event-stream")
            text = await response.text()
    comments, _, events = text.partition("\n\nevent: " if name != "chat" else "\n\ndata: ")
    assert comments.count(": ") >= 3 and all(line.startswith(":") for line in comments.split("\n") if line)
    assert events and len(engine.received) == 1
    assert content(await put_together(agent, name, OK)) == content(await agent.ask(name, OK, max_tokens=64))


async def test_a_stream_that_was_kept_alive_names_what_the_run_overrides_in_a_comment(agent, engine, wire, monkeypatch):
    monkeypatch.setattr("molt_gym.server.streaming.KEEP_ALIVE", 0.02)
    engine.seconds = 0.1
    body = {"model": "m", "messages": [OK], "temperature": 0.25, "stream": True}
    async with aiohttp.ClientSession(headers={"x-api-key": agent.session.key}) as client:
        async with client.post(agent.session.url + wire.paths["chat"], json=body) as response:
            assert ": x-molt-gym-ignored: temperature\n\ndata: " in await response.text()


@every_wire
async def test_a_failure_after_the_stream_began_reaches_the_sdk_as_an_error(agent, engine, wire, name, monkeypatch):
    monkeypatch.setattr("molt_gym.server.streaming.KEEP_ALIVE", 0.01)
    engine.script, engine.seconds = [RuntimeError("down")], 0.05
    with pytest.raises((openai.APIError, anthropic.APIError), match="down"):
        async for _ in await agent.ask(name, OK, stream=True):
            pass
    assert (agent.session.turns, agent.rows) == (0, [])
    engine.seconds = 0.0
    assert wire.text_of(await agent.ask(name, OK)) == "hello"


@every_wire
async def test_clients_that_split_lines_as_text_get_every_event_whole(agent, engine, wire, name):
    said = "a\x85b\u2028c\u2029d\ve\ff\x1cg\n"
    engine.always = [*said.encode(), END]
    body = {"model": "m", "messages": [OK], "input": [OK], "max_tokens": 64, "stream": True}
    async with aiohttp.ClientSession(headers={"x-api-key": agent.session.key}) as client:
        async with client.post(agent.session.url + wire.paths[name], json=body) as response:
            lines = [line.partition(": ") for line in (await response.text()).splitlines() if line]
    assert {kind for kind, _, _ in lines} <= {"event", "data"}
    events = [json.loads(data) for kind, _, data in lines if kind == "data" and data != "[DONE]"]
    assert len(events) > 2 and all(repr(letter)[1:-1] in repr(events) for letter in said)


@every_wire
async def test_a_failure_before_the_stream_began_has_a_status_and_is_tried_again(agent_of, engine, name):
    agent = agent_of(max_retries=2)
    engine.script = [RuntimeError("down")]
    assert [event async for event in await agent.ask(name, OK, stream=True)]
    assert (len(engine.received), agent.session.turns) == (2, 1)


@every_wire
async def test_a_stream_that_the_client_leaves_early_is_recorded_and_the_next_turn_goes_on(agent, engine, name):
    stream = await agent.ask(name, OK, stream=True)
    async for _ in stream:
        break
    await stream.close()
    await agent.ask(name, OK, {"role": "assistant", "content": "hello"}, OK)
    assert engine.received[1] == engine.received[0] + HELLO + [NEWLINE] + engine.received[0]
    assert agent.session.turns == 2 and len(agent.rows) == 1


@every_wire
async def test_a_slow_reader_does_not_hold_up_other_requests(agent, engine, wire, name):
    engine.script = [[97] * 60_000]
    stream = await agent.ask(name, OK, stream=True)
    assert wire.text_of(await agent.ask(name, {"role": "user", "content": "he"})) == "hello"
    await stream.close()


@pytest.mark.parametrize("n", [1, 3])
async def test_streamed_choices_and_their_logprobs_are_the_recorded_ones(agent, engine, n):
    engine.script = [HELLO, [266, END], [262, END]][:n]
    reply = await put_together(agent, "chat", OK, n=n, logprobs=True)
    assert [choice.message.content for choice in reply.choices] == ["hello", "ok", "he"][:n]
    logprobs = [[token.logprob for token in choice.logprobs.content] for choice in reply.choices]
    assert logprobs == [row.logprobs[20:] for row in agent.rows]
    assert reply.usage.completion_tokens == sum(sum(row.mask) for row in agent.rows)
