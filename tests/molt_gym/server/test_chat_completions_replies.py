"""Chat Completions replies, as the SDK's own types and its own client read them."""

import copy
import json

import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai.lib.streaming.chat import ChatCompletionStreamState
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from molt_gym.messages import same_message
from molt_gym.server.chat_completions import ChatCompletions, ParsedChat
from molt_gym.server.errors import STATUS, WireError
from molt_gym.server.exchange import Call, Completion, Options, Reply, Token
from molt_gym.server.json import decode_fields, encode
from molt_gym.server.memory import WireMemory
from molt_gym.server.server import LoopbackServer

WIRE = ChatCompletions()
MODEL = {"model": "policy", "messages": [{"role": "user", "content": "Hi"}]}
TOOL = {"type": "function", "function": {"name": "lookup", "parameters": {"type": "object", "properties": {}}}}
LONG = "naïve 😀 text, and more of it. " * 20


def said(content="", **fields):
    return {"role": "assistant", "content": content, **fields}


def calls(*arguments):
    return [
        {"id": f"call_{i}", "type": "function", "function": {"name": "lookup", "arguments": text}}
        for i, text in enumerate(arguments)
    ]


TEXT = Reply(said("Hello."), prompt_tokens=20, completion_tokens=3, cached_tokens=5)
CALLS = Reply(said(tool_calls=calls('{"city": "Paris"}', "", LONG)), "tool_calls", None, 20, 9)
THINKS = Reply(
    said(LONG, reasoning_content=LONG[::-1], tool_calls=calls("{}")), "tool_calls", prompt_tokens=20,
    completion_tokens=90, reasoning_tokens=40,
)  # fmt: skip
EMPTY = Reply(said(""), "length", prompt_tokens=20, completion_tokens=1)
LOGPROBS = Reply(said("é"), tokens=[Token("\ufffd", None, -0.5), Token("é", b"\xc3\xa9", -1.25), Token("", b"", 0.0)])
REPLIES = [[TEXT], [CALLS], [THINKS], [EMPTY], [LOGPROBS], [TEXT, CALLS, EMPTY], [LOGPROBS, THINKS]]


def both(replies, include_usage=True):
    """The reply, and the data of the events of the same reply, each after a trip through JSON."""
    parsed = ParsedChat(Call([], model="policy", n=len(replies)), True, include_usage)
    completion = Completion("a" * 24, 1_700_000_000, replies)
    reply = json.loads(encode(WIRE.reply(parsed, completion, None)))
    events = list(WIRE.events(parsed, completion, None))
    assert all(name is None for name, _ in events)
    return reply, [data if data == "[DONE]" else json.loads(encode(data)) for _, data in events]


def put_together(events):
    """What a client that knows the protocol only makes of a stream's messages."""
    messages = {}
    for event in events:
        for choice in event["choices"]:
            message = messages.setdefault(choice["index"], {"role": choice["delta"].get("role")})
            for key in ("content", "reasoning_content"):
                if choice["delta"].get(key) is not None:
                    message[key] = message.get(key, "") + choice["delta"][key]
            for delta in choice["delta"].get("tool_calls", ()):
                known = message.setdefault("tool_calls", [])
                if delta["index"] == len(known):
                    known.append({"id": delta["id"], "type": delta["type"], "function": dict(delta["function"])})
                else:
                    known[delta["index"]]["function"]["arguments"] += delta["function"]["arguments"]
    return [messages[index] for index in sorted(messages)]


@pytest.mark.parametrize("replies", REPLIES)
def test_a_reply_is_what_the_sdk_expects(replies):
    body, _ = both(replies)
    completion = ChatCompletion.model_validate(body, strict=True)
    assert completion.id == "chatcmpl-" + "a" * 24 and completion.model == "policy"
    assert [choice.index for choice in completion.choices] == list(range(len(replies)))
    for choice, reply in zip(completion.choices, replies, strict=True):
        assert choice.finish_reason == reply.finish_reason
        assert same_message(choice.message.model_dump(exclude={"refusal"}), reply.message)


@pytest.mark.parametrize("replies", REPLIES)
def test_a_reply_sent_back_is_the_message_that_was_recorded(replies):
    body, _ = both(replies)
    for choice, reply in zip(body["choices"], replies, strict=True):
        echoes = [choice["message"], ChatCompletion.model_validate(body).choices[choice["index"]].message.model_dump()]
        for echo in echoes:
            fields = decode_fields(encode({"messages": [echo]}))
            sent_back = WIRE.parse(fields, WireMemory()).call.messages
            assert same_message(sent_back[0], reply.message)


def test_content_is_null_only_beside_tool_calls():
    (text, called, empty) = (both([reply])[0]["choices"][0]["message"] for reply in (TEXT, CALLS, EMPTY))
    assert (text["content"], called["content"], empty["content"]) == ("Hello.", None, "")
    assert "tool_calls" not in text and "reasoning_content" not in text


def test_arguments_are_text_as_they_were_written():
    written = [call["function"]["arguments"] for call in both([CALLS])[0]["choices"][0]["message"]["tool_calls"]]
    assert written == ['{"city": "Paris"}', "", LONG]


def test_a_reply_made_by_hand_may_have_parts_or_no_content():
    for content in (None, [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]):
        body, _ = both([Reply(said(content))])
        assert body["choices"][0]["message"]["content"] == ("ab" if content else "")


def test_usage_counts_the_prompt_once_and_all_replies():
    usage = ChatCompletion.model_validate(both([TEXT, THINKS])[0]).usage
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (20, 93, 113)
    assert usage.prompt_tokens_details.cached_tokens == 5
    assert usage.completion_tokens_details.reasoning_tokens == 40


def test_logprobs_tell_token_bytes_and_logprob():
    content = ChatCompletion.model_validate(both([LOGPROBS])[0], strict=True).choices[0].logprobs.content
    assert [(token.token, token.logprob, token.bytes) for token in content] == [
        ("\ufffd", -0.5, None),
        ("é", -1.25, [0xC3, 0xA9]),
        ("", 0.0, []),
    ]
    assert all(token.top_logprobs == [] for token in content)
    assert both([TEXT])[0]["choices"][0]["logprobs"] is None


def plain(completion):
    """All but the usage, without what the SDK adds to a stream that it put together."""
    fields = completion.model_dump(exclude_none=True, exclude={"usage"})
    for choice in fields["choices"]:
        for call in choice["message"].get("tool_calls", ()):
            call.pop("index", None)
            call["function"].pop("parsed_arguments", None)
    return fields


@pytest.mark.parametrize("replies", REPLIES)
@pytest.mark.parametrize("include_usage", [True, False])
def test_a_stream_put_together_is_the_reply(replies, include_usage):
    body, (*events, done) = both(replies, include_usage)
    assert done == "[DONE]"
    state = ChatCompletionStreamState()
    for event in events:
        state.handle_chunk(ChatCompletionChunk.model_validate(event, strict=True))
    expected = ChatCompletion.model_validate(body)
    assert plain(state.current_completion_snapshot) == plain(expected)
    assert state.current_completion_snapshot.usage == (expected.usage if include_usage else None)
    messages = [choice["message"].items() for choice in body["choices"]]
    assert put_together(events) == [{key: value for key, value in items if value is not None} for items in messages]


@pytest.mark.parametrize("replies", REPLIES)
def test_a_stream_has_one_role_and_one_end_for_each_choice(replies):
    *events, _ = both(replies, include_usage=False)[1]
    for index in range(len(replies)):
        own = [choice for event in events for choice in event["choices"] if choice["index"] == index]
        assert [choice["delta"].get("role") for choice in own] == ["assistant"] + [None] * (len(own) - 1)
        assert [choice["finish_reason"] for choice in own] == [None] * (len(own) - 1) + [replies[index].finish_reason]


@pytest.mark.parametrize("replies", REPLIES)
def test_usage_comes_last_alone_and_only_if_it_was_asked_for(replies):
    *without, _ = both(replies, include_usage=False)[1]
    assert all(event["choices"] and "usage" not in event for event in without)
    body, (*events, last, _) = both(replies, include_usage=True)
    assert last["choices"] == [] and last["usage"] == body["usage"]
    assert all(event["choices"] and event["usage"] is None for event in events)


def test_a_long_text_comes_in_several_pieces_and_a_huge_one_in_not_too_many():
    for text, fewest, most in ((LONG, 10, 70), ("x" * 3_000_000, 10, 70)):
        *events, _ = both([Reply(said(text, tool_calls=calls(text)), "tool_calls")], include_usage=False)[1]
        assert 2 * fewest <= len(events) <= 2 * most


@given(st.text(st.characters(exclude_categories=())), st.integers(0, 40))
def test_no_cut_parts_two_surrogates(text, at):
    text = "x" * at + text + "\ud83d\ude00" * 9 + text
    pieces = stream_of(text)
    assert "".join(pieces) == text
    for before, after in zip(pieces, pieces[1:], strict=False):
        assert not ("\ud800" <= before[-1] <= "\udbff" and "\udc00" <= after[0] <= "\udfff")


def stream_of(text):
    events = WIRE.events(ParsedChat(Call([])), Completion("a", 1, [Reply(said(text))]), None)
    deltas = [event["choices"][0]["delta"] for _, event in events if event != "[DONE]"]
    return [delta["content"] for delta in deltas if delta.get("content")]


@pytest.mark.parametrize(
    "kind, name, code",
    [
        ("invalid_request", "invalid_request_error", None),
        ("authentication", "invalid_request_error", "invalid_api_key"),
        ("unsupported", "invalid_request_error", None),
        ("rate_limit", "requests", "rate_limit_exceeded"),
        ("unavailable", "server_error", None),
        ("internal", "server_error", None),
    ],
)
def test_an_error_has_the_shape_of_the_api(kind, name, code):
    error = WireError(kind, "n: 0; write more", param="n")
    body = {"error": {"message": "n: 0; write more", "type": name, "param": "n", "code": code}}
    assert WIRE.error(error) == body
    assert list(WIRE.error_events(error)) == [(None, body)]
    assert WIRE.error(WireError(kind, "a", code="own"))["error"]["code"] == "own"


class Script:
    """A respondent that answers with the next list of replies, or raises it."""

    def __init__(self, *answers):
        self.answers, self.asked = list(answers), []

    async def answer(self, call):
        self.asked.append(copy.deepcopy(call))
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    async def count(self, call):
        return 0


@pytest.fixture
async def connect():
    """A stock client whose requests a script answers."""
    async with LoopbackServer() as server:
        clients = []

        def client(script):
            session = server.open(script)
            clients.append(openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key=session.key, max_retries=0))
            return clients[-1]

        yield client
        for one in clients:
            await one.close()


async def test_the_sdk_runs_a_tool_loop_to_its_end(connect):
    script = Script([CALLS], [TEXT])
    client, messages = connect(script), [{"role": "user", "content": "Weather?"}]
    first = await client.chat.completions.create(model="policy", messages=messages, tools=[TOOL])
    messages += [first.choices[0].message]
    messages += [
        {"role": "tool", "tool_call_id": call.id, "content": "Sunny"} for call in first.choices[0].message.tool_calls
    ]
    last = await client.chat.completions.create(model="policy", messages=messages, tools=[TOOL])
    assert last.choices[0].message.content == "Hello."
    assert same_message(script.asked[1].messages[1], said(tool_calls=calls('{"city": "Paris"}', "{}", LONG)))
    assert [message["tool_call_id"] for message in script.asked[1].messages[2:]] == ["call_0", "call_1", "call_2"]


@pytest.mark.parametrize("replies", REPLIES)
async def test_the_sdk_streams_what_it_gets_at_once(connect, replies):
    asked = {**MODEL, "n": len(replies), "logprobs": replies[0].tokens is not None, "seed": 1}
    client = connect(Script(replies, replies))
    at_once = await client.chat.completions.create(**asked)
    async with client.chat.completions.stream(**asked, stream_options={"include_usage": True}) as stream:
        await stream.until_done()
    streamed = stream.current_completion_snapshot
    assert streamed.usage == at_once.usage
    assert plain(streamed)["choices"] == plain(at_once)["choices"]


async def test_options_reach_the_respondent(connect):
    script = Script([EMPTY])
    await connect(script).chat.completions.create(
        **MODEL, max_tokens=5, max_completion_tokens=2, temperature=0.5, stop=["END"], extra_body={"top_k": 4, "new": 1}
    )
    assert script.asked[0].options == Options(temperature=0.5, top_k=4, max_tokens=2, stop=("END",))


@pytest.mark.parametrize(
    "fields, error",
    [
        ({"temperature": 3}, openai.BadRequestError),
        ({"response_format": {"type": "json_object"}}, openai.UnprocessableEntityError),
    ],
)
@pytest.mark.parametrize("stream", [True, False])
async def test_the_sdk_raises_its_own_errors(connect, fields, error, stream):
    with pytest.raises(error) as refused:
        await connect(Script()).chat.completions.create(**MODEL, **fields, stream=stream)
    field = next(iter(fields))
    assert refused.value.param == field and refused.value.body["message"].startswith(f"{field}: ")
    assert refused.value.status_code == STATUS["invalid_request" if field == "temperature" else "unsupported"]
