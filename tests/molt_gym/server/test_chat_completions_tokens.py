"""Chat Completions by the stock SDK, down to the ids that the engine receives."""

import openai
import pytest

CALL = {"id": "call_1", "type": "function", "function": {"name": "lookup", "arguments": '{"city": "Paris"}'}}
ASK = {"model": "policy", "messages": [{"role": "user", "content": "ok"}]}


@pytest.fixture
async def chat(server, respondent_of):
    """Requests of a stock client to the toy policy."""
    session = server.open(respondent_of())
    async with openai.AsyncOpenAI(base_url=f"{session.url}/v1", api_key=session.key, max_retries=0) as client:
        yield client.chat.completions.create


def conversation(**assistant):
    call = {"role": "assistant", "tool_calls": [CALL], **assistant}
    return [*ASK["messages"], call, {"role": "tool", "tool_call_id": "call_1", "content": "Sunny"}]


def spelled(ids):
    toy = {262: b"he", 263: b"ll", 264: b"llo", 265: b"hello", 266: b"ok", 261: b"\n\n"}
    return b"".join(toy.get(i, bytes([i]) if i < 256 else b"|") for i in ids)


async def test_a_prompt_is_the_same_however_absent_text_is_spelled(chat, engine):
    for index, content in enumerate(({}, {"content": None}, {"content": ""}, {"content": []})):
        await chat(**ASK | {"messages": conversation(**content)}, seed=index)
    first, *others = engine.received
    assert all(ids == first for ids in others) and len(others) == 3
    prompt = spelled(first)
    assert b"lookup" in prompt and b"Sunny" in prompt and b"None" not in prompt and b"null" not in prompt
    assert prompt.count(b"assistant") == 2


@pytest.mark.parametrize(
    "arguments, written",
    [
        ('{"city": "Paris"}', b'"arguments": {"city": "Paris"}'),
        ({"city": "Paris"}, b'"arguments": {"city": "Paris"}'),
        ("", b'"arguments": {}'),
        (None, b'"arguments": {}'),
    ],
)
async def test_arguments_are_not_encoded_twice(chat, engine, arguments, written):
    call = {**CALL, "function": {"name": "lookup", "arguments": arguments}}
    await chat(**ASK | {"messages": conversation(tool_calls=[call])})
    prompt = spelled(engine.received[0])
    assert written in prompt and b'\\"' not in prompt


async def test_broken_arguments_are_answered_too(chat, engine):
    call = {**CALL, "function": {"name": "lookup", "arguments": '{"a":'}}
    await chat(**ASK | {"messages": conversation(tool_calls=[call])})
    assert b"lookup" in spelled(engine.received[0])


@pytest.mark.parametrize("caps", [{"max_completion_tokens": 2}, {"max_tokens": 5, "max_completion_tokens": 2}])
@pytest.mark.parametrize("include_usage", [True, False])
async def test_a_cut_reply_says_length_and_counts_its_ids(chat, engine, caps, include_usage):
    engine.always = [107] * 10
    reply = await chat(**ASK, **caps)
    assert (reply.choices[0].finish_reason, reply.usage.completion_tokens) == ("length", 2)
    assert reply.usage.prompt_tokens == len(engine.received[0]) == 20
    options = {"stream_options": {"include_usage": True}} if include_usage else {}
    chunks = [chunk async for chunk in await chat(**ASK, **caps, stream=True, **options)]
    assert [choice.finish_reason for chunk in chunks for choice in chunk.choices if choice.finish_reason] == ["length"]
    if include_usage:
        *chunks, last = chunks
        assert last.choices == [] and last.usage.completion_tokens == 2
    assert all(chunk.choices and chunk.usage is None for chunk in chunks)


async def test_a_reply_sent_back_extends_the_ids_that_were_sampled(chat, engine):
    first = await chat(**ASK)
    messages = [*ASK["messages"], first.choices[0].message, ASK["messages"][0]]
    second = await chat(**ASK | {"messages": messages})
    assert engine.received[1][:23] == [*engine.received[0], 262, 264, 257]
    assert len(engine.received[1]) == 44
    assert second.usage.prompt_tokens_details.cached_tokens == 23
