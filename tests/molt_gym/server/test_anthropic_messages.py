"""Bodies, replies, streams and errors, by the types of the SDK."""

import json

import anthropic.types
import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter

from molt_gym.messages import canonical, same_message, validate_conversation
from molt_gym.server.anthropic_messages import ERROR_TYPES, AnthropicMessages
from molt_gym.server.errors import STATUS, WireError
from molt_gym.server.exchange import Call, Completion, Options, Parsed, Reply
from molt_gym.server.json import encode
from molt_gym.server.memory import WireMemory

WIRE = AnthropicMessages()
PIXEL = "iVBORw0KGgo="
USER = {"role": "user", "content": "ok"}
ADD = {"name": "add", "description": "Adds.", "input_schema": {"type": "object", "properties": {"a": {}}}}
PARSED = Parsed(Call([USER], model="policy"))


def fields_of(body):
    return {name: msgspec.Raw(encode(value)) for name, value in body.items()}


def parse(body, memory=None):
    return WIRE.parse(fields_of(body), memory or WireMemory())


def call_of(*messages, **fields):
    body = {"model": "policy", "max_tokens": 5, "messages": list(messages) or [USER], **fields}
    call = parse(body).call
    validate_conversation({"messages": call.messages, "tools": call.tools})
    return call


def assistant_of(content):
    return call_of(USER, {"role": "assistant", "content": content}, USER).messages[1]


def user_of(*blocks):
    return call_of({"role": "user", "content": list(blocks)}).messages


def text(value, **extra):
    return {"type": "text", "text": value, **extra}


def image(**source):
    return {"type": "image", "source": source}


def tool_use(value, **extra):
    return {"type": "tool_use", "id": "call00000", "name": "add", "input": value, **extra}


def tool_result(content="4", **extra):
    return {"type": "tool_result", "tool_use_id": "call00000", "content": content, **extra}


def replied(message, *args, **counts):
    return Completion("a" * 24, 0, [Reply({"role": "assistant", "content": "", **message}, *args, **counts)])


def calling(*arguments, name="add", **fields):
    function = [{"name": name, "arguments": value} for value in arguments]
    calls = [{"id": f"call{i:05d}", "type": "function", "function": value} for i, value in enumerate(function)]
    return {"role": "assistant", "content": "", "tool_calls": calls, **fields}


def body_of(completion):
    return WIRE.reply(PARSED, completion, WireMemory())


def echoed(message):
    """What the server reads when a stock client sends a reply back."""
    sent = anthropic.types.Message.model_validate(json.loads(encode(body_of(replied(message)))))
    content = json.dumps([block.model_dump() for block in sent.content], ensure_ascii=False, allow_nan=False)
    return assistant_of(json.loads(content.encode()))


def of_stream(events):
    """A message put together from its stream by hand, and how many deltas there were."""
    message, deltas, pieces = None, 0, ""
    for name, data in events:
        assert name == data["type"]
        if name == "message_start":
            message = json.loads(encode(data["message"]))
        elif name == "content_block_start":
            assert data["index"] == len(message["content"])
            message["content"].append(dict(data["content_block"]))
            pieces = ""
        elif name == "content_block_delta":
            deltas += 1
            block, delta = message["content"][data["index"]], dict(data["delta"])
            kind = delta.pop("type")
            [(key, piece)] = delta.items()
            if kind == "input_json_delta":
                pieces += piece
                block["input"] = json.loads(pieces) if _is_json(pieces) else block["input"]
            else:
                assert kind == {"text": "text", "thinking": "thinking", "signature": "signature"}[key] + "_delta"
                block[key] += piece
        elif name == "message_delta":
            message |= data["delta"] | {"usage": data["usage"]}
    assert name == "message_stop"
    return message, deltas


def _is_json(text):
    try:
        return json.loads(text) is not None
    except ValueError:
        return False


# What a body means


def test_a_system_text_is_the_same_as_a_string_or_as_blocks():
    spellings = ["You are helpful.", [text("You are "), text("helpful.", cache_control={"type": "ephemeral"})]]
    for system in spellings:
        assert call_of(system=system).messages == [{"role": "system", "content": "You are helpful."}, USER]


@pytest.mark.parametrize("system", [None, "", [], [text("")], "x-anthropic-billing-header: v=1;"])
def test_no_system_text_is_no_message(system):
    assert call_of(system=system).messages == [USER]


@pytest.mark.parametrize("system", [
    "x-anthropic-billing-header: v=1; cch=NONCE;\nYou are helpful.",
    "x-anthropic-billing-header: v=1; cch=NONCE;\n\nYou are helpful.",
    [text("x-anthropic-billing-header: v=1; cch=NONCE;"), text("You are helpful.")],
    [text("X-Anthropic-Billing-Header-2: v=1; cch=NONCE;\r\n"), text("You are helpful.")],
])
def test_a_header_that_changes_with_every_request_is_no_part_of_the_system_text(system):
    memory, calls = WireMemory(), []
    for nonce in ("aaaaa", "bbbbb"):
        fresh = json.loads(json.dumps(system).replace("NONCE", nonce))
        calls.append(parse({"model": "m", "max_tokens": 1, "messages": [USER], "system": fresh}, memory).call)
    assert calls[0].messages == calls[1].messages == [{"role": "system", "content": "You are helpful."}, USER]
    assert len(memory._messages) == 2


def test_a_line_that_looks_like_the_header_elsewhere_stays():
    system = "See:\nx-anthropic-billing-header: v=1;"
    assert call_of(system=system).messages[0]["content"] == system


def test_a_user_message_is_the_same_as_a_string_or_as_blocks():
    assert user_of(text("o"), text("k", citations=None)) == [USER]
    assert user_of() == [{"role": "user", "content": ""}]


def test_consecutive_messages_of_one_role_stay_apart_and_system_messages_may_come_later():
    messages = [USER, USER, {"role": "assistant", "content": "a"}, {"role": "assistant", "content": "b"},
                {"role": "system", "content": [text("c")]}]
    assert call_of(*messages).messages == [*messages[:4], {"role": "system", "content": "c"}]


def test_tool_results_and_text_become_messages_in_their_order():
    messages = user_of(
        tool_result("4"), tool_result([text("5"), text("6")], tool_use_id="call00001"), text("and"), text(" now?"),
        tool_result(None, tool_use_id="call00002"))
    assert messages == [
        {"role": "tool", "tool_call_id": "call00000", "content": "4"},
        {"role": "tool", "tool_call_id": "call00001", "content": "56"},
        {"role": "user", "content": "and now?"},
        {"role": "tool", "tool_call_id": "call00002", "content": ""},
    ]


@pytest.mark.parametrize("content, seen", [
    ("no such file", "Error: no such file"),
    ("", "Error: "),
    ("Error: no such file", "Error: no such file"),
    ([text("error 7")], "error 7"),
])
def test_the_model_reads_that_a_tool_failed(content, seen):
    assert user_of(tool_result(content, is_error=True))[0]["content"] == seen
    assert user_of(tool_result("fine", is_error=False))[0]["content"] == "fine"


def test_images_become_data_uris_also_in_tool_results():
    part = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{PIXEL}"}}
    base64 = image(type="base64", media_type="image/png", data=PIXEL)
    url = image(type="url", url=f"data:image/png;base64,{PIXEL}")
    assert user_of(text("see"), base64, url) == [{"role": "user", "content": [text("see"), part, part]}]
    assert user_of(tool_result([base64]))[0]["content"] == [part]


def test_thinking_text_and_calls_become_one_message():
    content = [
        {"type": "thinking", "thinking": "hm", "signature": "x"}, {"type": "redacted_thinking", "data": "eA=="},
        text("a"), tool_use({"a": 1}), text("b"), tool_use({}, id="call00001", caller={"type": "direct"}),
    ]
    assert assistant_of(content) == {**calling('{"a": 1}', "{}"), "content": "ab", "reasoning_content": "hm"}


@pytest.mark.parametrize("content", [None, "", [], [text("")]])
def test_an_assistant_message_may_be_empty(content):
    assert same_message(assistant_of(content), {"role": "assistant", "content": ""})


def test_an_assistant_message_without_content_is_an_empty_one():
    assert call_of(USER, {"role": "assistant"}, USER).messages[1] == {"role": "assistant", "content": ""}


@pytest.mark.parametrize("value, arguments", [
    ({"city": "Paris"}, '{"city": "Paris"}'),
    (None, "{}"),
    ("", ""),
    ('{"a":', '{"a":'),
    ({"INVALID_JSON": '{"a":'}, '{"a":'),
    ({"INVALID_JSON": "{}"}, '{"INVALID_JSON": "{}"}'),
    ({"a": 2**70, "b": "é\ud800"}, '{"a": 1180591620717411303424, "b": "é\ud800"}'),
])
def test_the_input_of_a_call_becomes_json_text(value, arguments):
    assert assistant_of([tool_use(value)]) == calling(arguments)


def test_tools_become_functions():
    function = {"name": "add", "description": "Adds.", "parameters": ADD["input_schema"]}
    expected = [{"type": "function", "function": function}]
    assert call_of(tools=[ADD]).tools == expected
    extra = {"type": "custom", "strict": True, "cache_control": {"type": "ephemeral"}, "input_examples": [{"a": 1}]}
    auto = {"type": "auto", "disable_parallel_tool_use": False}
    assert call_of(tools=[ADD | extra], tool_choice=auto).tools == expected
    assert call_of(tools=[ADD], tool_choice={"type": "none"}).tools == []
    del function["description"]
    assert call_of(tools=[{**ADD, "description": None}]).tools == expected


def test_sampling_options_are_passed_on():
    call = call_of(temperature=1, top_p=0.5, top_k=7, stop_sequences=["\n"], max_tokens=9)
    assert call.options == Options(temperature=1.0, top_p=0.5, top_k=7, stop=("\n",), max_tokens=9)
    nulls = dict.fromkeys(["temperature", "top_p", "top_k", "stop_sequences", "tools", "tool_choice", "stream"])
    assert call_of(**nulls).options == call_of(top_k=0).options == Options(max_tokens=5)


def test_what_has_no_effect_is_accepted():
    assert call_of(
        thinking={"type": "enabled", "budget_tokens": 1024}, metadata={"user_id": "x"}, service_tier="auto",
        output_config={"effort": "low"}, cache_control={"type": "ephemeral"}, mcp_servers=[], container=None,
        context_management={"edits": []}, new_field={"a": [1]},
    ) == call_of()


def test_a_stream_is_asked_for():
    body = {"model": "m", "max_tokens": 1, "messages": [USER]}
    assert [parse({**body, "stream": value}).stream for value in (None, False, True)] == [False, False, True]


def test_history_is_read_once():
    memory = WireMemory()
    body = {"model": "m", "max_tokens": 1, "messages": [USER, {"role": "assistant", "content": "a"}, USER]}
    first, again = parse(body, memory).call.messages, parse(body, memory).call.messages
    assert all(a is b for a, b in zip(first, again, strict=True)) and len(memory._messages) == 2


def test_counting_needs_no_limit_and_may_end_with_the_assistant():
    body = {"model": "m", "messages": [USER, {"role": "assistant", "content": "a"}], "tools": [ADD]}
    call = WIRE.parse_count(fields_of(body), WireMemory()).call
    assert len(call.messages) == 2 and len(call.tools) == 1
    assert anthropic.types.MessageTokensCount.model_validate(WIRE.count(7)).input_tokens == 7


# What is refused

DEEP = json.loads('{"a":' * 100 + "1" + "}" * 100)
FORCED = {"type": "tool", "name": "add"}
DOCUMENT = {"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": "x"}}
SEARCH = {"type": "search_result", "source": "x", "title": "x", "content": [text("x")]}
FETCHED = "https://example.org/a.png"
FORMAT = {"type": "json_schema", "schema": {}}


def said(*blocks):
    return {"messages": [{"role": "user", "content": list(blocks)}]}


def answered(*blocks):
    return {"messages": [USER, {"role": "assistant", "content": list(blocks)}, USER]}


@pytest.mark.parametrize("fields, param", [
    ({"messages": [USER, {"role": "assistant", "content": "The"}]}, "messages"),
    ({"tools": [ADD], "tool_choice": {"type": "any"}}, "tool_choice.type"),
    ({"tools": [ADD], "tool_choice": FORCED}, "tool_choice.type"),
    ({"tools": [ADD], "tool_choice": {"type": "auto", "disable_parallel_tool_use": True}},
     "tool_choice.disable_parallel_tool_use"),
    ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0].type"),
    ({"tools": [ADD, {"type": "bash_20250124", "name": "bash"}]}, "tools[1].type"),
    ({"tools": [{"type": "mcp_toolset", "mcp_server_name": "x"}]}, "tools[0].type"),
    ({"mcp_servers": [{"type": "url", "url": FETCHED, "name": "x"}]}, "mcp_servers"),
    ({"container": "c"}, "container"),
    ({"compaction": {"type": "enabled"}}, "compaction"),
    ({"thread": {"type": "create"}}, "thread"),
    ({"thread": {"type": "continue", "previous_message_id": "msg_1"}}, "thread"),
    ({"output_format": FORMAT}, "output_format"),
    ({"output_config": {"format": FORMAT}}, "output_config.format"),
    (said(image(type="url", url=FETCHED)), "messages[0].content[0].source"),
    (said(text("x"), image(type="file", file_id="x")), "messages[0].content[1].source"),
    (said(DOCUMENT), "messages[0].content[0].type"),
    (said(SEARCH), "messages[0].content[0].type"),
    (said(tool_result([DOCUMENT])), "messages[0].content[0].content[0].type"),
    (said(tool_use({})), "messages[0].content[0].type"),
    (answered({"type": "server_tool_use", "id": "x", "name": "x", "input": {}}), "messages[1].content[0].type"),
    (answered(image(type="base64", media_type="image/png", data=PIXEL)), "messages[1].content[0].type"),
    ({"system": [image(type="base64", media_type="image/png", data=PIXEL)]}, "system[0].type"),
])
def test_what_a_run_cannot_honour_is_refused(fields, param):
    with pytest.raises(WireError) as caught:
        call_of(**fields)
    assert (caught.value.kind, caught.value.param) == ("unsupported", param)
    assert caught.value.message.startswith(f"{param}: ")


@pytest.mark.parametrize("fields, param", [
    ({"model": None}, "model"),
    ({"model": 3}, "model"),
    ({"max_tokens": None}, "max_tokens"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": True}, "max_tokens"),
    ({"max_tokens": 2**70}, "max_tokens"),
    ({"temperature": "hot"}, "temperature"),
    ({"temperature": -1}, "temperature"),
    ({"temperature": 10**400}, "temperature"),
    ({"top_p": -0.1}, "top_p"),
    ({"top_k": -1}, "top_k"),
    ({"stop_sequences": "x"}, "stop_sequences"),
    ({"stop_sequences": ["x", ""]}, "stop_sequences"),
    ({"stream": "yes"}, "stream"),
    ({"system": 3}, "system"),
    ({"system": 0}, "system"),
    ({"system": [3]}, "system[0]"),
    ({"system": [{"type": "text"}]}, "system[0].text"),
    ({"messages": None}, "messages"),
    ({"messages": []}, "messages"),
    ({"messages": {"role": "user"}}, "messages"),
    ({"messages": [USER, "hello"]}, "messages[1]"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0]"),
    ({"messages": [{"role": "user"}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": 3}]}, "messages[0].content"),
    (said("x"), "messages[0].content[0]"),
    (said({"text": "x"}), "messages[0].content[0]"),
    (said(text(None)), "messages[0].content[0].text"),
    (said(image()), "messages[0].content[0].source.type"),
    (said({"type": "image"}), "messages[0].content[0].source"),
    (said(image(type="base64", media_type="text/html", data=PIXEL)), "messages[0].content[0].source.media_type"),
    (said(image(type="base64", media_type="image/png", data="é")), "messages[0].content[0].source.data"),
    (said(tool_result(3)), "messages[0].content[0].content"),
    (said(tool_result(tool_use_id=None)), "messages[0].content[0].tool_use_id"),
    (answered({"type": "thinking"}), "messages[1].content[0].thinking"),
    (answered(tool_use([])), "messages[1].content[0].input"),
    (answered(tool_use(DEEP)), "messages[1].content[0].input"),
    (answered(tool_use({}, id=3)), "messages[1].content[0].id"),
    (answered(tool_use({}, name=None)), "messages[1].content[0].name"),
    ({"tools": {}}, "tools"),
    ({"tools": [3]}, "tools[0]"),
    ({"tools": [{"name": "add"}]}, "tools[0].input_schema"),
    ({"tools": [{**ADD, "input_schema": DEEP}]}, "tools[0].input_schema"),
    ({"tools": [{**ADD, "name": None}]}, "tools[0].name"),
    ({"tools": [{**ADD, "description": 3}]}, "tools[0].description"),
    ({"tools": [ADD, ADD]}, "tools"),
    ({"tool_choice": "auto"}, "tool_choice"),
    ({"tool_choice": {"name": "add"}}, "tool_choice.type"),
    ({"tool_choice": {"type": "sometimes"}}, "tool_choice.type"),
])
def test_what_is_wrong_is_named(fields, param):
    with pytest.raises(WireError) as caught:
        call_of(**fields)
    assert (caught.value.kind, caught.value.param) == ("invalid_request", param)
    assert caught.value.message.startswith(f"{param}: ")


@pytest.mark.parametrize("value", ['{"a": 1e999}', '{"a": NaN}', '{"a": [1e999, "\\ud800"]}', "[" * 100_000])
def test_what_is_no_json_value_is_refused(value):
    raw = json.dumps(answered(tool_use(0))["messages"]).replace('"input": 0', f'"input": {value}')
    with pytest.raises(WireError, match="JSON"):
        WIRE.parse(fields_of({"model": "m", "max_tokens": 1}) | {"messages": msgspec.Raw(raw.encode())}, WireMemory())


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(codec="utf-8"), max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("abtypetext", max_size=4), inner, max_size=3),
    max_leaves=8)
BLOCK = st.fixed_dictionaries({"type": st.sampled_from(
    ["text", "image", "tool_use", "tool_result", "thinking", "redacted_thinking", "document"]) | JSON}, optional={
        "text": JSON, "thinking": JSON, "id": JSON, "name": JSON, "input": JSON, "tool_use_id": JSON, "is_error": JSON,
        "content": JSON, "source": JSON | st.fixed_dictionaries({"type": st.sampled_from(["base64", "url", "file"])},
                                                                optional={"url": JSON, "data": JSON})})
ROLE = st.sampled_from(["user", "assistant", "system"]) | JSON
TURN = JSON | st.fixed_dictionaries({"role": ROLE, "content": JSON | st.lists(BLOCK | JSON, max_size=3)})
TOOL = st.fixed_dictionaries({}, optional={"name": JSON, "type": JSON, "description": JSON, "input_schema": JSON})
BODY = st.fixed_dictionaries({"messages": st.lists(TURN, max_size=3) | JSON}, optional={
    "model": st.just("m") | JSON, "max_tokens": st.just(5) | JSON, "system": JSON | st.lists(BLOCK, max_size=2),
    "tools": JSON | st.lists(TOOL | JSON, max_size=2), "tool_choice": JSON, "stop_sequences": JSON, "temperature": JSON,
    "top_p": JSON, "top_k": JSON, "stream": JSON, "output_config": JSON, "thinking": JSON, "container": JSON})


@given(BODY)
@settings(max_examples=100, deadline=None)
def test_any_body_gives_a_valid_call_or_a_typed_refusal(body):
    try:
        call = parse(body).call
    except WireError as error:
        assert error.status in (400, 422)
        assert error.message.startswith(error.param)
    else:
        validate_conversation({"messages": call.messages, "tools": call.tools})


# What a reply looks like


def test_a_reply_is_a_message():
    reply = replied({"content": "hi"}, prompt_tokens=9, cached_tokens=5, completion_tokens=3, reasoning_tokens=1)
    body = body_of(reply)
    message = TypeAdapter(anthropic.types.Message).validate_python(body, strict=True)
    assert (message.id, message.model, message.role, message.stop_reason) == ("msg_" + "a" * 24, "policy", "assistant",
                                                                             "end_turn")
    usage = message.usage
    assert (usage.input_tokens, usage.cache_read_input_tokens, usage.cache_creation_input_tokens) == (4, 5, 0)
    assert (usage.output_tokens, usage.output_tokens_details.thinking_tokens) == (3, 1)


@pytest.mark.parametrize("finish, stop, reason", [
    ("stop", None, "end_turn"),
    ("length", None, "max_tokens"),
    ("tool_calls", None, "tool_use"),
    ("tool_calls", "\n", "tool_use"),
    ("stop", "\n", "stop_sequence"),
])
def test_why_a_reply_ended(finish, stop, reason):
    body = body_of(replied({}, finish, stop))
    assert (body["stop_reason"], body["stop_sequence"]) == (reason, "\n" if reason == "stop_sequence" else None)


@pytest.mark.parametrize("message, kinds", [
    ({}, ["text"]),
    ({"content": " \n"}, ["text"]),
    ({"reasoning_content": "hm"}, ["thinking", "text"]),
    (calling("{}"), ["tool_use"]),
    (calling("{}", "{}", reasoning_content="hm", content="so"), ["thinking", "text", "tool_use", "tool_use"]),
])
def test_a_reply_without_calls_always_has_text(message, kinds):
    assert [block["type"] for block in body_of(replied(message))["content"]] == kinds


@pytest.mark.parametrize("arguments, value", [
    ('{"a": 1}', {"a": 1}),
    ("", {}),
    ("null", {}),
    ('{"a":', {"INVALID_JSON": '{"a":'}),
    ("[1]", {"INVALID_JSON": "[1]"}),
    ('{"a": NaN}', {"INVALID_JSON": '{"a": NaN}'}),
    ('{"a": 1e999}', {"INVALID_JSON": '{"a": 1e999}'}),
    ('{"a": "\\ud800"}', {"INVALID_JSON": '{"a": "\\ud800"}'}),
    ('{"a":' * 99 + "1" + "}" * 99, {"INVALID_JSON": '{"a":' * 99 + "1" + "}" * 99}),
    ("[" * 100_000, {"INVALID_JSON": "[" * 100_000}),
])
def test_arguments_that_no_client_could_read_come_as_text_and_go_back_as_they_were(arguments, value):
    message = calling(arguments)
    assert body_of(replied(message))["content"][0]["input"] == value
    assert same_message(echoed(message), message)


TEXT = st.text(st.characters(codec="utf-8"), max_size=20) | st.sampled_from(["", " ", "\n\nx", "x\n", "<think>", "\0"])
OBJECT = st.dictionaries(TEXT, JSON, max_size=3)
ARGUMENTS = st.builds(json.dumps, OBJECT, ensure_ascii=st.booleans()) | TEXT
MESSAGES = st.builds(
    lambda content, reasoning, arguments, name: {
        "role": "assistant", "content": content, **({"reasoning_content": reasoning} if reasoning else {}),
        **({"tool_calls": calling(*arguments, name=name)["tool_calls"]} if arguments else {})},
    TEXT, TEXT, st.lists(ARGUMENTS, max_size=3), TEXT)


@given(MESSAGES)
@example(calling('{"b": 1.0, "a": 1e22, "a": -0.0}', content="\n"))
@settings(max_examples=300, deadline=None)
def test_a_reply_that_is_sent_back_is_the_message_that_was_recorded(message):
    assert canonical(echoed(message)) == canonical(message)


@given(MESSAGES)
@settings(max_examples=200, deadline=None)
def test_a_stream_says_what_the_message_says(message):
    completion = replied(message, prompt_tokens=9, cached_tokens=5, completion_tokens=3)
    streamed, _ = of_stream(WIRE.events(PARSED, completion, WireMemory()))
    assert streamed == body_of(completion)


def test_a_stream_comes_in_pieces_that_the_sdk_knows():
    completion = replied(calling('{"city": "Paris"}', content="a long text", reasoning_content="a long thought"))
    events = list(WIRE.events(PARSED, completion, WireMemory()))
    known = TypeAdapter(anthropic.types.RawMessageStreamEvent)
    assert [known.validate_python(data).type for _, data in events] == [name for name, _ in events]
    _, deltas = of_stream(events)
    assert deltas == 4 + 1 + 4 + 4
    assert events[0][1]["message"]["usage"]["output_tokens"] == 0


# What an error looks like


@pytest.mark.parametrize("kind", STATUS)
def test_errors_have_the_shape_of_the_api(kind):
    body = WIRE.error(WireError(kind, "messages: no"))
    assert body == {"type": "error", "error": {"type": ERROR_TYPES[kind], "message": "messages: no"}}
    assert list(WIRE.error_events(WireError(kind, "messages: no"))) == [("error", body)]


def test_a_conversation_that_is_too_long_is_called_so_in_the_words_that_agents_look_for():
    error = WireError("invalid_request", "messages: 9 tokens", code="context_length_exceeded")
    assert WIRE.error(error)["error"] == {
        "type": "invalid_request_error", "message": "prompt is too long: messages: 9 tokens"}
