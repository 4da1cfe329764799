"""The Responses wire through the stock SDK: streams equal replies, tool loops end, tokens stay exact."""

import asyncio
import json

import openai
import pytest
from openai.types.responses import Response, ResponseErrorEvent

from molt_gym.server.errors import WireError
from molt_gym.server.exchange import Completion, Reply, Token
from molt_gym.server.json import decode_fields, encode
from molt_gym.server.memory import WireMemory
from molt_gym.server.responses import Responses

ADD = {
    "type": "function",
    "name": "add",
    "description": "Adds.",
    "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}},
    "strict": True,
}
END, THINK, END_THINK, TOOL_CALL, END_TOOL_CALL = 257, 259, 260, 267, 268
LONG = "naïve 😀 text, and more of it. " * 20


def assistant(content="", reasoning=None, **arguments):
    message = {"role": "assistant", "content": content} | ({"reasoning_content": reasoning} if reasoning else {})
    if arguments:
        message["tool_calls"] = [
            {"id": id, "type": "function", "function": {"name": "add", "arguments": json.dumps(value)}}
            for id, value in arguments.items()
        ]
    return message


TURNS = [
    assistant("Let me see.", "Two sums.", c1={"a": 1, "b": 2}, c2={"a": 3, "b": 4}),
    assistant("", None, c3={"a": 3, "b": 7}),
    assistant("It is 10."),
]
TOKENS = [Token("Hi", b"Hi", -0.5), Token("", b"", -1.5)]
REPLIES = {
    "text": Reply(assistant("Hello.")),
    "long text": Reply(assistant(LONG)),
    "nothing": Reply(assistant("")),
    "reasoning": Reply(assistant("Hello.", LONG), prompt_tokens=3, completion_tokens=9, reasoning_tokens=5),
    "calls": Reply(TURNS[0], "tool_calls"),
    "long call": Reply(assistant("", None, c1={"a": LONG}), "tool_calls"),
    "logprobs": Reply(assistant("Hi"), tokens=TOKENS),
    "logprobs of a call": Reply(assistant("", None, c1={}), "tool_calls", tokens=TOKENS),
    "cut": Reply(assistant("Hel"), "length"),
}


class Script:
    """Gives replies in turn, and keeps the calls."""

    def __init__(self, *replies):
        self.replies, self.calls = list(replies), []

    async def answer(self, call):
        self.calls.append(call)
        reply = self.replies.pop(0)
        if isinstance(reply, Exception):
            raise reply
        return [reply if isinstance(reply, Reply) else Reply(reply)]

    async def count(self, call):
        return 0


@pytest.fixture
def client_of(server):
    """SDK clients for a respondent: the asynchronous one, and on request the synchronous one."""

    def make(respondent, kind=openai.AsyncOpenAI):
        session = server.open(respondent)
        return kind(base_url=f"{server.url}/v1", api_key=session.key, max_retries=0, timeout=20)

    return make


def stream_and_response(reply, **body):
    """The events of a reply, and the reply, for one and the same completion."""
    wire, memory = Responses(), WireMemory()
    parsed = wire.parse(decode_fields(encode({"model": "policy", "input": "Hi"} | body)), memory)
    completion = Completion("a" * 24, 1_700_000_000, [reply])
    return list(wire.events(parsed, completion, memory)), wire.reply(parsed, completion, memory)


class TestStream:
    @pytest.mark.parametrize("name", REPLIES)
    def test_events_are_numbered_and_end_with_the_reply(self, name):
        events, response = stream_and_response(REPLIES[name], tools=[ADD])
        assert [data["sequence_number"] for _, data in events] == list(range(len(events)))
        assert all(kind == data["type"] for kind, data in events)
        kinds = [kind for kind, _ in events]
        assert kinds[:2] == ["response.created", "response.in_progress"]
        assert kinds[-1] == f"response.{response['status']}" and events[-1][1]["response"] == response
        assert kinds.count("response.output_item.done") == len(response["output"])

    @pytest.mark.parametrize("name", REPLIES)
    def test_deltas_add_up_to_the_items(self, name):
        events, response = stream_and_response(REPLIES[name], tools=[ADD])
        joined, done = {}, {}
        for kind, data in events:
            if kind.endswith(".delta"):
                place = data["output_index"], data.get("content_index")
                joined[place] = joined.get(place, "") + data["delta"]
            if kind == "response.output_item.done":
                done[data["output_index"]] = data["item"]
        assert [done[index] for index in sorted(done)] == response["output"]
        for index, item in enumerate(response["output"]):
            if item["type"] == "function_call":
                assert joined.get((index, None), "") == item["arguments"]
            else:
                assert [joined.get((index, at), "") for at in range(len(item["content"]))] == [
                    part["text"] for part in item["content"]
                ]

    def test_deltas_list_each_token_once(self):
        events, _ = stream_and_response(Reply(assistant(LONG), tokens=TOKENS))
        listed = [entry["token"] for kind, data in events if kind.endswith(".delta") for entry in data["logprobs"]]
        assert listed == [token.text for token in TOKENS]

    def test_the_events_of_an_item_come_in_the_order_of_openai(self):
        events, _ = stream_and_response(Reply(assistant("Hi", "Hm", c1={})))
        assert [kind.removeprefix("response.") for kind, _ in events] == [
            "created", "in_progress",
            "output_item.added", "content_part.added", "reasoning_text.delta", "reasoning_text.done",
            "content_part.done", "output_item.done",
            "output_item.added", "content_part.added", "output_text.delta", "output_text.done", "content_part.done",
            "output_item.done",
            "output_item.added", "function_call_arguments.delta", "function_call_arguments.done", "output_item.done",
            "completed",
        ]  # fmt: skip

    @pytest.mark.parametrize("name", [name for name in REPLIES if name != "cut"])
    async def test_the_sdk_puts_together_the_reply(self, client_of, name):
        script = Script(REPLIES[name], REPLIES[name], REPLIES[name])
        body = {"model": "policy", "input": "Hi", "tools": [ADD], "include": ["message.output_text.logprobs"]}
        async with client_of(script) as client:
            plain = await client.responses.create(**body)
            raw = [event async for event in await client.responses.create(**body, stream=True)]
            async with client.responses.stream(**body) as stream:
                final = await stream.get_final_response()
        assert said_by(plain) == said_by(raw[-1].response) == said_by(final)
        assert script.calls[0] == script.calls[1] == script.calls[2]
        assert not [event for event in raw if type(event).__name__ == "BaseModel"]

    async def test_a_cut_stream_ends_incomplete(self, client_of):
        async with client_of(Script(REPLIES["cut"])) as client:
            events = [event async for event in await client.responses.create(model="policy", input="Hi", stream=True)]
        assert events[-1].type == "response.incomplete"
        assert events[-1].response.incomplete_details.reason == "max_output_tokens"

    async def test_the_synchronous_sdk_reads_the_same(self, client_of):
        client = client_of(Script(*[TURNS[0]] * 2), openai.OpenAI)

        def ask():
            with client, client.responses.stream(model="policy", input="Hi", tools=[ADD]) as stream:
                return client.responses.create(model="policy", input="Hi", tools=[ADD]), stream.get_final_response()

        plain, final = await asyncio.to_thread(ask)
        assert said_by(plain) == said_by(final)
        assert final.output[2].parsed_arguments == {"a": 1, "b": 2}


def said_by(response):
    """A response without what is new in every one: its ids and its time."""
    data = response.to_dict()
    Response.model_validate(data)
    for item in data["output"]:
        item.pop("id")
        item.pop("parsed_arguments", None)
        for part in item.get("content") or ():
            part.pop("parsed", None)
    return {key: value for key, value in data.items() if key not in ("id", "created_at")}


def outputs_for(response):
    calls = [item for item in response.output if item.type == "function_call"]
    sums = [sum(json.loads(call.arguments).values()) for call in calls]
    return [
        {"type": "function_call_output", "call_id": call.call_id, "output": str(total)}
        for call, total in zip(calls, sums, strict=True)
    ]


CONVERSATION = [
    {"role": "system", "content": "Add."},
    {"role": "user", "content": "1 + 2 + 3 + 4?"},
    TURNS[0],
    {"role": "tool", "tool_call_id": "c1", "content": "3"},
    {"role": "tool", "tool_call_id": "c2", "content": "7"},
    TURNS[1],
    {"role": "tool", "tool_call_id": "c3", "content": "10"},
]


class TestToolLoop:
    @pytest.mark.parametrize("stream", [False, True])
    async def test_goes_to_its_end_by_echo(self, client_of, stream):
        script = Script(*TURNS)
        async with client_of(script) as client:
            items = [{"role": "user", "content": "1 + 2 + 3 + 4?"}]
            while True:
                response = await ask(client, stream, input=items)
                items += response.output
                if not (outputs := outputs_for(response)):
                    break
                items += outputs
        assert response.output_text == "It is 10."
        assert script.calls[-1].messages == CONVERSATION

    @pytest.mark.parametrize("stream", [False, True])
    async def test_goes_to_its_end_by_previous_response_id(self, client_of, stream):
        script = Script(*TURNS)
        async with client_of(script) as client:
            response = await ask(client, stream, input="1 + 2 + 3 + 4?")
            while outputs := outputs_for(response):
                response = await ask(client, stream, input=outputs, previous_response_id=response.id)
        assert response.output_text == "It is 10."
        assert script.calls[-1].messages == CONVERSATION

    @pytest.mark.parametrize("by_id", [False, True])
    async def test_extends_the_recorded_tokens(self, client_of, respondent_of, engine, by_id):
        """What was sampled is in the next prompt id for id, whichever way the conversation is continued."""
        # Bytes one by one, and JSON in an order and spacing of its own: a rendering from the messages would differ.
        arguments = b'\n{"name":"add",  "arguments":{"b":2,"a":1}}\n'
        sampled = [THINK, *b"\nHm\n", END_THINK, *b"\n\nok", TOOL_CALL, *arguments, END_TOOL_CALL, END]
        engine.script = [sampled]
        async with client_of(respondent_of("tools", max_tokens=200)) as client:
            first = await ask(client, False, input="1 + 2?")
            outputs = outputs_for(first)
            assert [item.type for item in first.output] == ["reasoning", "message", "function_call"]
            if by_id:
                await ask(client, False, input=outputs, previous_response_id=first.id)
            else:
                await ask(client, False, input=[{"role": "user", "content": "1 + 2?"}, *first.output, *outputs])
        before, after = engine.received
        assert after[: len(before) + len(sampled)] == before + sampled


async def ask(client, stream, **body):
    body = {"model": "policy", "instructions": "Add.", "tools": [ADD]} | body
    if not stream:
        return await client.responses.create(**body)
    async with client.responses.stream(**body) as events:
        return await events.get_final_response()


class TestErrors:
    async def test_a_refusal_is_an_error_of_the_sdk(self, client_of):
        async with client_of(Script()) as client:
            with pytest.raises(openai.UnprocessableEntityError) as caught:
                await client.responses.create(model="policy", input="Hi", truncation="auto")
            assert (caught.value.param, caught.value.code) == ("truncation", "unsupported_parameter")
            with pytest.raises(openai.NotFoundError):
                await client.responses.create(model="policy", input="Hi", previous_response_id="resp_x")

    async def test_a_failure_after_the_stream_began_raises_in_the_sdk(self, client_of, monkeypatch):
        monkeypatch.setattr("molt_gym.server.streaming.KEEP_ALIVE", 0.01)

        class Slow(Script):
            async def answer(self, call):
                await asyncio.sleep(0.05)
                return await super().answer(call)

        error = WireError("unavailable", "the engine is down", code="engine_failed")
        async with client_of(Slow(error, error)) as client:
            with pytest.raises(openai.APIError, match="the engine is down"):
                [event async for event in await client.responses.create(model="policy", input="Hi", stream=True)]
            with pytest.raises(openai.APIError, match="the engine is down"):
                async with client.responses.stream(model="policy", input="Hi") as stream:
                    await stream.get_final_response()

    def test_the_error_event_has_the_documented_fields(self):
        [(name, data)] = Responses().error_events(WireError("unavailable", "down", code="engine_failed"))
        event = ResponseErrorEvent.model_validate(data)
        assert (name, event.code, event.message) == ("error", "engine_failed", "down")
