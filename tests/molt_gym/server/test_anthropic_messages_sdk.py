"""The stock SDK of Anthropic against the server that listens."""

import asyncio
import itertools
import re

import anthropic
import pytest

from molt_gym.messages import same_message
from molt_gym.server.exchange import Reply

END = 257
USER = {"role": "user", "content": "ok"}
ADD = {"name": "add", "description": "Adds.", "input_schema": {
    "type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}}}
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'
MESSAGES = [
    {"content": ""},
    {"content": " \n"},
    {"content": "\n\nA longer text, with é and 😀.\u2028"},
    {"content": "so", "reasoning_content": "hm\n"},
    {"content": "", "tool_calls": [
        {"id": f"call{i:05d}", "type": "function", "function": {"name": "add", "arguments": arguments}}
        for i, arguments in enumerate(['{"a": 1, "b": [1.5, null, {"c": "é\\n\\u0000\\""}]}', "{}", '{"a":'])]},
]


NAMES = dict(enumerate(["\n\n", "he", "ll", "llo", "hello", "ok", "<tool_call>", "</tool_call>"], start=261))


def spelled(text):
    pieces = re.split("(</?tool_call>)", text)
    ids = [[267 + (piece[1] == "/")] if place % 2 else piece.encode() for place, piece in enumerate(pieces)]
    return [*itertools.chain(*ids), END]


def text_of(ids):
    return b"".join(bytes([i]) if i < 256 else NAMES.get(i, "").encode() for i in ids).decode()


class Scripted:
    """Answers every call with one message."""

    def __init__(self, message, **fields):
        self.message, self.fields, self.calls = {"role": "assistant", **message}, fields, []

    async def answer(self, call):
        self.calls.append(call)
        reason = "tool_calls" if self.message.get("tool_calls") else "stop"
        return [Reply(self.message, **{"finish_reason": reason, "prompt_tokens": 7, **self.fields})]

    async def count(self, call):
        return 7


@pytest.fixture
async def client_of(server):
    """Makes clients of new sessions."""
    clients = []

    def make(respondent, *, max_turns=None, kind=anthropic.AsyncAnthropic, **options):
        session = server.open(respondent, max_turns=max_turns)
        clients.append(kind(base_url=session.url, api_key=session.key, **{"max_retries": 0, **options}))
        return clients[-1]

    yield make
    for client in clients:
        if isinstance(client, anthropic.AsyncAnthropic):
            await client.close()
        else:
            client.close()


@pytest.fixture
def ask():
    """Asks a client for a message."""
    return lambda client, *messages, **fields: client.messages.create(
        model="policy", messages=list(messages) or [USER], **{"max_tokens": 500, **fields})


@pytest.mark.parametrize("message", MESSAGES)
async def test_a_streamed_message_is_the_one_that_is_not_streamed_and_comes_back_as_recorded(client_of, ask, message):
    respondent = Scripted(message, completion_tokens=3, cached_tokens=2, reasoning_tokens=1)
    client = client_of(respondent)
    whole = await ask(client)
    async with client.messages.stream(model="policy", max_tokens=500, messages=[USER]) as stream:
        texts = [text async for text in stream.text_stream]
        streamed = await stream.get_final_message()
    assert streamed.model_dump(exclude={"id"}) == whole.model_dump(exclude={"id"})
    assert "".join(texts) == message["content"]
    for content in (whole.content, streamed.content):
        await ask(client, USER, {"role": "assistant", "content": content}, USER)
        assert same_message(respondent.calls[-1].messages[1], respondent.message)


@pytest.mark.parametrize("message", MESSAGES)
async def test_the_blocking_client_sees_the_same(client_of, ask, message):
    client = client_of(Scripted(message), kind=anthropic.Anthropic)

    def run():
        with client.messages.stream(model="policy", max_tokens=500, messages=[USER]) as stream:
            return ask(client), stream.get_final_message()

    whole, streamed = await asyncio.to_thread(run)
    assert streamed.model_dump(exclude={"id"}) == whole.model_dump(exclude={"id"})


async def test_a_nonce_in_the_system_text_does_not_fork_the_conversation(client_of, ask, engine, respondent_of):
    client = client_of(respondent_of())
    engine.script = [[262, 264, END]] * 3
    first = await ask(client, system=[
        {"type": "text", "text": "x-anthropic-billing-header: v=1; cch=aaaaa;"},
        {"type": "text", "text": "You are helpful.", "cache_control": {"type": "ephemeral"}}])
    messages = [USER, {"role": "assistant", "content": first.content}, USER]
    second = await ask(client, *messages, metadata={"user_id": "x"}, system=[
        {"type": "text", "text": "x-anthropic-billing-header: v=1; cch=bbbbb;"},
        {"type": "text", "text": "You are helpful.", "cache_control": {"type": "ephemeral"}}])
    seen = [*engine.received[0], 262, 264, END]
    assert engine.received[1][: len(seen)] == seen
    assert "You are helpful." in text_of(seen)
    assert second.usage.cache_read_input_tokens == len(seen)
    assert second.usage.input_tokens + len(seen) == len(engine.received[1])
    await ask(client_of(respondent_of()), *messages, system="You are helpful.")
    assert engine.received[2][: len(engine.received[0])] == engine.received[0]


async def test_the_tool_loop_of_the_sdk_runs_to_its_end_on_one_branch(client_of, engine, respondent_of):
    client = client_of(respondent_of("tools", max_tokens=500))
    engine.script = sampled = [spelled(f"Let me add.\n{CALL}\n{CALL}"), spelled(CALL), spelled("It is 3.")]
    first, second, _ = sampled
    added = []

    @anthropic.beta_async_tool
    async def add(a: int, b: int) -> str:
        """Adds."""
        added.append((a, b))
        if len(added) == 2:
            raise ValueError("busy")
        return str(a + b)

    runner = client.beta.messages.tool_runner(model="policy", max_tokens=500, messages=[USER], tools=[add])
    message = await runner.until_done()
    assert (message.stop_reason, message.content[0].text) == ("end_turn", "It is 3.")
    assert added == [(1, 2)] * 3
    one, two, three = engine.received
    assert "Error: ValueError('busy')" in text_of(two)
    assert two[: len(one + first)] == one + first
    assert three[: len(two + second)] == two + second


async def test_threads_held_by_the_server_are_refused(client_of, engine, respondent_of):
    thread = client_of(respondent_of()).beta.messages.thread(model="policy", max_tokens=5)
    with pytest.raises(anthropic.APIStatusError, match="send the whole conversation"):
        await thread.send([USER])
    assert not engine.received


async def test_arguments_reach_the_template_as_a_mapping(client_of, ask, engine, respondent_of):
    for value, shown in [({"city": "Paris"}, '{"city": "Paris"}'), ({}, "{}"), (None, "{}"), ("", "{}")]:
        use = {"type": "tool_use", "id": "call_1", "name": "lookup", "input": value}
        result = {"type": "tool_result", "tool_use_id": "call_1", "content": "Sunny"}
        await ask(client_of(respondent_of("tools")), USER, {"role": "assistant", "content": [use]},
                  {"role": "user", "content": [result]})
        prompt = text_of(engine.received[-1])
        assert f'"arguments": {shown}' in prompt and "Sunny" in prompt and '\\"' not in prompt


async def test_a_reply_that_stops_or_is_cut_says_why(client_of, ask, engine, respondent_of):
    client = client_of(respondent_of())
    engine.script = [[*b"one END two", END], [*b"one two", END]]
    stopped = await ask(client, stop_sequences=["END"])
    assert (stopped.stop_reason, stopped.stop_sequence, stopped.content[0].text) == ("stop_sequence", "END", "one ")
    cut = await ask(client, max_tokens=3)
    assert (cut.stop_reason, cut.content[0].text, cut.usage.output_tokens) == ("max_tokens", "one", 3)


async def test_tokens_are_counted_as_the_engine_will_get_them(client_of, ask, engine, respondent_of):
    client = client_of(respondent_of("tools"))
    counted = await client.messages.count_tokens(model="policy", messages=[USER], tools=[ADD], system="Be kind.")
    await ask(client, tools=[ADD], system="Be kind.")
    assert counted.input_tokens == len(engine.received[0])
    messages = [USER, {"role": "assistant", "content": "a"}]
    assert (await client.beta.messages.count_tokens(model="policy", messages=messages)).input_tokens > 0


async def test_a_retry_after_a_failure_of_the_engine_is_recorded_once(client_of, ask, engine, respondent_of):
    respondent = respondent_of()
    engine.script = [RuntimeError("down"), [262, END]]
    message = await ask(client_of(respondent, max_retries=2))
    assert (message.content[0].text, len(engine.received)) == ("he", 2)


@pytest.mark.parametrize("error, fields", [
    (anthropic.BadRequestError, {"messages": []}),
    (anthropic.BadRequestError, {"messages": [{"role": "user", "content": "o" * 5000}]}),
    (anthropic.UnprocessableEntityError, {"tools": [ADD], "tool_choice": {"type": "any"}}),
    (anthropic.UnprocessableEntityError, {"messages": [USER, {"role": "assistant", "content": "The"}]}),
])
@pytest.mark.parametrize("stream", [False, True])
async def test_refusals_are_the_errors_of_the_sdk_and_are_not_repeated(
    client_of, engine, respondent_of, error, fields, stream
):
    client = client_of(respondent_of(), max_retries=2)
    body = {"model": "policy", "max_tokens": 5, "messages": [USER], "stream": stream}
    with pytest.raises(error) as caught:
        await client.messages.create(**body | fields)
    assert caught.value.type == "invalid_request_error"
    assert caught.value.body["error"]["message"].split(":")[0] in ("messages", "prompt is too long", "tool_choice.type")
    assert not engine.received


async def test_errors_without_a_session_or_after_its_end(client_of, ask, server):
    respondent = Scripted({"content": "a"})
    with pytest.raises(anthropic.AuthenticationError):
        await ask(client_of(respondent).copy(api_key="sk-of-nobody"))
    client = client_of(respondent, max_turns=1, max_retries=2)
    await ask(client)
    with pytest.raises(anthropic.APIStatusError) as caught:
        await ask(client, USER, USER)
    assert (caught.value.status_code, caught.value.type) == (410, "not_found_error")


async def test_an_engine_that_fails_while_a_stream_is_open_ends_it_with_an_error(client_of, ask, monkeypatch):
    class Failing(Scripted):
        async def answer(self, call):
            await asyncio.sleep(0.2)
            raise RuntimeError("down")

    monkeypatch.setattr("molt_gym.server.streaming.KEEP_ALIVE", 0.05)
    with pytest.raises(anthropic.APIStatusError, match="down") as caught:
        async for _ in await ask(client_of(Failing({})), stream=True):
            pass
    assert caught.value.body["error"]["type"] == "overloaded_error"
