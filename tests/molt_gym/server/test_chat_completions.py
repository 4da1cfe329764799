"""What a Chat Completions request means, and what is refused."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from molt_gym.messages import same_message, validate_message
from molt_gym.server.chat_completions import ChatCompletions, ParsedChat
from molt_gym.server.errors import WireError
from molt_gym.server.exchange import Options
from molt_gym.server.json import decode_fields
from molt_gym.server.memory import WireMemory

HI = {"role": "user", "content": "Hi"}
CALL = {"id": "call_1", "type": "function", "function": {"name": "lookup", "arguments": '{"city": "Paris"}'}}
TOOL = {"type": "function", "function": {"name": "lookup", "parameters": {"type": "object", "properties": {}}}}
PNG = "data:image/png;base64,iVBORw0KGgo="


def memory():
    return WireMemory()


def parse_text(text, session=None):
    body = text if isinstance(text, bytes) else text.encode()
    return ChatCompletions().parse(decode_fields(body), session or memory())


def parse(messages=[HI], **fields):  # noqa: B006
    return parse_text(json.dumps({"model": "policy", "messages": messages, **fields}))


def parsed_message(message):
    messages = parse([HI, message]).call.messages
    validate_message(messages[1])
    return messages[1]


def assistant(**fields):
    return {"role": "assistant", **fields}


def test_a_bare_request_asks_for_one_reply_and_says_nothing_of_sampling():
    parsed = parse()
    assert (parsed.call.messages, parsed.call.tools, parsed.call.n, parsed.call.model) == ([HI], [], 1, "policy")
    assert parsed.call.options == Options()
    assert not parsed.stream and not parsed.include_usage


@pytest.mark.parametrize("role", ["system", "developer", "user", "assistant", "tool"])
@pytest.mark.parametrize(
    "content, expected",
    [
        ("text", "text"),
        ("", ""),
        ([], ""),
        ([{"type": "text", "text": "a"}], "a"),
        (
            [{"type": "text", "text": "a", "cache_control": {}}, {"type": "text", "text": "b"}],
            [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}],
        ),
    ],
)
def test_every_role_takes_a_string_or_text_parts(role, content, expected):
    message = {"role": role, "content": content} | ({"tool_call_id": "call_1"} if role == "tool" else {})
    assert parsed_message(message) == {**message, "content": expected}


@pytest.mark.parametrize("content", [{}, {"content": None}, {"content": ""}, {"content": []}])
def test_an_assistant_that_only_calls_has_no_text_however_that_is_spelled(content):
    assert parsed_message(assistant(tool_calls=[CALL], **content)) == assistant(content="", tool_calls=[CALL])


@pytest.mark.parametrize("content", [{}, {"content": None}])
def test_a_tool_result_without_content_is_empty(content):
    message = parsed_message({"role": "tool", "tool_call_id": "call_1", **content})
    assert message == {"role": "tool", "content": "", "tool_call_id": "call_1"}


@pytest.mark.parametrize(
    "arguments, expected",
    [
        ('{"city": "Paris"}', '{"city": "Paris"}'),
        ({"city": "Paris", "in": {"é": [1, None]}}, '{"city": "Paris", "in": {"é": [1, null]}}'),
        ("", "{}"),
        (" \n", "{}"),
        (None, "{}"),
        ('{"a":', '{"a":'),
    ],
)
def test_arguments_become_text_and_broken_text_is_kept(arguments, expected):
    call = {**CALL, "function": {"name": "lookup", "arguments": arguments}}
    sent = assistant(content=None, tool_calls=[call])
    message = parsed_message(sent)
    assert message["tool_calls"][0]["function"]["arguments"] == expected
    assert same_message(message, sent)


def test_arguments_may_be_absent():
    call = {**CALL, "function": {"name": "lookup"}}
    assert parsed_message(assistant(tool_calls=[call]))["tool_calls"][0]["function"]["arguments"] == "{}"


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning"])
def test_reasoning_comes_under_either_name(name):
    message = parsed_message(assistant(content="4", **{name: "2 + 2"}))
    assert message == assistant(content="4", reasoning_content="2 + 2")


def test_what_sdks_echo_beside_the_reply_is_left_out():
    empty = dict.fromkeys(["refusal", "audio", "function_call", "tool_calls", "reasoning_content"])
    assert parsed_message(assistant(content="4", annotations=[], **empty)) == assistant(content="4")
    call = {**CALL, "index": 0, "type": None}
    assert parsed_message(assistant(content="", tool_calls=[call])) == assistant(content="", tool_calls=[CALL])


@pytest.mark.parametrize("refused", [{"refusal": "No."}, {"content": [{"type": "refusal", "refusal": "No."}]}])
def test_a_refusal_is_what_the_assistant_said(refused):
    assert parsed_message(assistant(**refused)) == assistant(content="No.")


def test_a_name_stays():
    assert parsed_message({**HI, "name": "Ann"}) == {**HI, "name": "Ann"}


@pytest.mark.parametrize("role", ["user", "tool"])
@pytest.mark.parametrize("image", [PNG, {"url": PNG}, {"url": PNG, "detail": "low"}])
def test_an_image_is_a_data_uri(role, image):
    parts = [{"type": "image_url", "image_url": image}]
    message = parsed_message({"role": role, "content": parts, "tool_call_id": "call_1"})
    assert message["content"] == [{"type": "image_url", "image_url": {"url": PNG}}]


def test_history_is_understood_once():
    session, text = memory(), json.dumps({"messages": [HI, assistant(content="a")]})
    first, second = (parse_text(text, session).call.messages for _ in range(2))
    assert all(a is b for a, b in zip(first, second, strict=True))


def test_a_tool_keeps_its_schema_and_gets_one_where_it_has_none():
    schema = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
    full = {"name": "lookup", "description": "Looks up.", "parameters": schema, "strict": True}
    bare = {"name": "now", "description": None, "strict": None}
    tools = parse(tools=[{"type": "function", "function": full}, {"type": "function", "function": bare}]).call.tools
    nothing = {"type": "object", "properties": {}}
    assert tools == [
        {"type": "function", "function": {"name": "lookup", "description": "Looks up.", "parameters": schema}},
        {"type": "function", "function": {"name": "now", "parameters": nothing}},
    ]


@pytest.mark.parametrize("choice, offered", [(None, 1), ("auto", 1), ("none", 0)])
def test_tool_choice_none_offers_no_tools(choice, offered):
    assert len(parse(tools=[TOOL], tool_choice=choice, parallel_tool_calls=True).call.tools) == offered


def test_parallel_tool_calls_may_be_off_where_nothing_can_be_called():
    assert parse(parallel_tool_calls=False).call.tools == []
    assert parse(parallel_tool_calls=False, tools=[TOOL], tool_choice="none").call.tools == []


def test_sampling_options_are_handed_on():
    fields = {"temperature": 0, "top_p": 1, "top_k": -1, "stop": "END", "seed": -3, "logprobs": True, "n": 64}
    call = parse(**fields).call
    assert call.options == Options(temperature=0.0, top_p=1.0, top_k=0, stop=("END",), seed=-3, logprobs=True)
    assert call.n == 64
    assert parse(stop=["a", "b"]).call.options.stop == ("a", "b")


@pytest.mark.parametrize(
    "caps, expected",
    [
        ({"max_completion_tokens": 2}, 2),
        ({"max_tokens": 5}, 5),
        ({"max_tokens": 5, "max_completion_tokens": 2}, 2),
        ({"max_tokens": 2, "max_completion_tokens": 5}, 2),
        ({"max_tokens": None, "max_completion_tokens": None}, None),
    ],
)
def test_the_smaller_cap_counts(caps, expected):
    assert parse(**caps).call.options.max_tokens == expected


def test_a_stream_may_ask_for_its_usage():
    parsed = parse(stream=True, stream_options={"include_usage": True, "include_obfuscation": False})
    assert parsed.stream and parsed.include_usage
    assert not parse(stream=True, stream_options={}).include_usage


def test_what_has_no_effect_is_accepted():
    parse(
        user="u", metadata={"a": "b"}, store=True, service_tier="auto", reasoning_effort="high", verbosity="low",
        prompt_cache_key="k", safety_identifier="s", prediction={"type": "content", "content": ""}, made_up=[{}],
        frequency_penalty=0, presence_penalty=0.0, repetition_penalty=1.0, logit_bias={}, top_logprobs=0, min_p=0,
        stop_token_ids=[], bad_words=[], skip_special_tokens=True, return_token_ids=False,
        repeat_penalty=1.0, grammar=None, use_beam_search=False, length_penalty=1.0, documents=None,
        response_format={"type": "text"}, modalities=["text"], audio=None, functions=[], chat_template_kwargs={},
    )  # fmt: skip


def in_messages(*messages):
    return {"messages": list(messages)}


def user(*parts):
    return in_messages({"role": "user", "content": list(parts)})


def calling(call):
    return in_messages(HI, assistant(tool_calls=[CALL, call]))


def function(**fields):
    return {"tools": [TOOL, {"type": "function", "function": {"name": "f", **fields}}]}


def nested(depth):
    return {"a": nested(depth - 1)} if depth else {}


INVALID = [
    ({"messages": None}, "messages"),
    ({"messages": []}, "messages"),
    ({"messages": {"role": "user"}}, "messages"),
    (in_messages(HI, 5), "messages[1]"),
    (in_messages({"content": "Hi"}), "messages[0].role"),
    (in_messages({"role": ["user"], "content": "Hi"}), "messages[0].role"),
    (in_messages({"role": "robot", "content": "Hi"}), "messages[0].role"),
    (in_messages({"role": "user"}), "messages[0].content"),
    (in_messages({"role": "system", "content": None}), "messages[0].content"),
    (in_messages({"role": "user", "content": {"text": "a"}}), "messages[0].content"),
    (user("a"), "messages[0].content[0]"),
    (user({"text": "a"}), "messages[0].content[0]"),
    (user({"type": "text"}), "messages[0].content[0].text"),
    (user({"type": "text", "text": "a"}, {"type": "text", "text": 1}), "messages[0].content[1].text"),
    (user({"type": "image_url"}), "messages[0].content[0].image_url"),
    (user({"type": "image_url", "image_url": {"url": 3}}), "messages[0].content[0].image_url.url"),
    (user({"type": "image_url", "image_url": {"url": "data:text/html,hi"}}), "messages[0].content[0].image_url.url"),
    (user({"type": "image_url", "image_url": "data:image/png;base64,"}), "messages[0].content[0].image_url"),
    (in_messages({"role": "user", "content": "a", "name": 1}), "messages[0].name"),
    (in_messages({"role": "user", "content": "a", "tool_calls": [CALL]}), "messages[0].tool_calls"),
    (in_messages(HI, {"role": "tool", "content": "Sunny"}), "messages[1].tool_call_id"),
    (in_messages(HI, {"role": "tool", "content": "Sunny", "tool_call_id": ""}), "messages[1].tool_call_id"),
    (in_messages({"role": "function", "name": "lookup", "content": "Sunny"}), "messages[0].role"),
    (in_messages(assistant(content=3)), "messages[0].content"),
    (in_messages(assistant(content="a", refusal="b")), "messages[0].refusal"),
    (in_messages(assistant(reasoning=["a"])), "messages[0].reasoning"),
    (in_messages(assistant(tool_calls={"id": "a"})), "messages[0].tool_calls"),
    (in_messages(assistant(tool_calls="")), "messages[0].tool_calls"),
    (calling(None), "messages[1].tool_calls[1]"),
    (calling({"function": CALL["function"]}), "messages[1].tool_calls[1].id"),
    (calling({**CALL, "id": 7}), "messages[1].tool_calls[1].id"),
    (calling({"id": "a"}), "messages[1].tool_calls[1].function"),
    (calling({"id": "a", "function": {"arguments": "{}"}}), "messages[1].tool_calls[1].function.name"),
    (
        calling({"id": "a", "function": {"name": "f", "arguments": [1]}}),
        "messages[1].tool_calls[1].function.arguments",
    ),
    (
        calling({"id": "a", "function": {"name": "f", "arguments": nested(70)}}),
        "messages[1].tool_calls[1].function.arguments",
    ),
    ({"tools": {}}, "tools"),
    ({"tools": [None]}, "tools[0]"),
    ({"tools": [{"name": "f"}]}, "tools[0].function"),
    ({"tools": [{"type": "function", "function": {"parameters": {}}}]}, "tools[0].function.name"),
    (function(description=3), "tools[1].function.description"),
    (function(parameters=[]), "tools[1].function.parameters"),
    (function(strict="yes"), "tools[1].function.strict"),
    (function(parameters=nested(70)), "tools[1].function.parameters"),
    ({"tool_choice": "any"}, "tool_choice"),
    ({"parallel_tool_calls": 0}, "parallel_tool_calls"),
    ({"model": 3}, "model"),
    ({"n": 0}, "n"),
    ({"n": 65}, "n"),
    ({"n": True}, "n"),
    ({"n": 1.0}, "n"),
    ({"temperature": -0.1}, "temperature"),
    ({"temperature": 2.1}, "temperature"),
    ({"temperature": "1"}, "temperature"),
    ({"temperature": True}, "temperature"),
    ({"top_p": -0.1}, "top_p"),
    ({"top_p": 1.01}, "top_p"),
    ({"top_k": -2}, "top_k"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_completion_tokens": False}, "max_completion_tokens"),
    ({"max_completion_tokens": 2**63}, "max_completion_tokens"),
    ({"seed": 2**63}, "seed"),
    ({"seed": "1"}, "seed"),
    ({"stop": ""}, "stop"),
    ({"stop": ["a", 1]}, "stop"),
    ({"stop": ["a"] * 17}, "stop"),
    ({"stop": {"a": 1}}, "stop"),
    ({"logprobs": 1}, "logprobs"),
    ({"stream": "true"}, "stream"),
    ({"stream_options": True}, "stream_options"),
    ({"stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
]

UNSUPPORTED = [
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tool_choice": {"type": "function", "function": {"name": "lookup"}}, "tools": [TOOL]}, "tool_choice"),
    ({"parallel_tool_calls": False, "tools": [TOOL]}, "parallel_tool_calls"),
    ({"response_format": {"type": "json_object"}}, "response_format"),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {}}}}, "response_format"),
    ({"frequency_penalty": 0.5}, "frequency_penalty"),
    ({"presence_penalty": -1}, "presence_penalty"),
    ({"repetition_penalty": 1.1}, "repetition_penalty"),
    ({"repetition_penalty": True}, "repetition_penalty"),
    ({"stop_token_ids": [5]}, "stop_token_ids"),
    ({"bad_words": ["a"]}, "bad_words"),
    ({"allowed_token_ids": []}, "allowed_token_ids"),
    ({"guided_choice": ["yes", "no"]}, "guided_choice"),
    ({"grammar": 'root ::= "yes"'}, "grammar"),
    ({"regex": "yes|no"}, "regex"),
    ({"json_schema": {"type": "object"}}, "json_schema"),
    ({"repeat_penalty": 1.1}, "repeat_penalty"),
    ({"return_token_ids": True}, "return_token_ids"),
    ({"skip_special_tokens": False}, "skip_special_tokens"),
    ({"truncate_prompt_tokens": 8}, "truncate_prompt_tokens"),
    ({"logit_bias": {"50256": -100}}, "logit_bias"),
    ({"logprobs": True, "top_logprobs": 2}, "top_logprobs"),
    ({"modalities": ["text", "audio"]}, "modalities"),
    ({"audio": {"voice": "ash", "format": "wav"}}, "audio"),
    ({"functions": [{"name": "f"}]}, "functions"),
    ({"function_call": "none"}, "function_call"),
    ({"web_search_options": {}}, "web_search_options"),
    ({"chat_template_kwargs": {"enable_thinking": False}}, "chat_template_kwargs"),
    ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
    ({"tools": [{"type": "custom", "custom": {"name": "f"}}]}, "tools[0].type"),
    (calling({"id": "a", "type": "custom", "custom": {}}), "messages[1].tool_calls[1].type"),
    (user({"type": "image_url", "image_url": {"url": "https://a.b/c.png"}}), "messages[0].content[0].image_url.url"),
    (user({"type": "image_url", "image_url": "file:///etc/hosts"}), "messages[0].content[0].image_url"),
    (user({"type": "input_audio", "input_audio": {"data": "", "format": "wav"}}), "messages[0].content[0].type"),
    (user({"type": "file", "file": {"file_id": "file-1"}}), "messages[0].content[0].type"),
    (user({"type": "refusal", "refusal": "No."}), "messages[0].content[0].type"),
    (in_messages(assistant(content=[{"type": "image_url", "image_url": PNG}])), "messages[0].content[0].type"),
    (in_messages(assistant(audio={"id": "audio_1"})), "messages[0].audio"),
    (in_messages(assistant(function_call={"name": "lookup", "arguments": "{}"})), "messages[0].function_call"),
]


@pytest.mark.parametrize(
    "fields, param, kind",
    [(*case, "invalid_request") for case in INVALID] + [(*case, "unsupported") for case in UNSUPPORTED],
    ids=[param for _, param in INVALID + UNSUPPORTED],
)
def test_a_refusal_begins_with_the_field(fields, param, kind):
    with pytest.raises(WireError) as refused:
        parse(**{"messages": [HI], **fields})
    assert (refused.value.kind, refused.value.param) == (kind, param)
    assert refused.value.message.startswith(f"{param}: ")


def test_messages_may_not_be_missing():
    with pytest.raises(WireError, match="^messages: "):
        parse_text('{"model": "policy"}')


@pytest.mark.parametrize(
    "text, param",
    [
        ('{"messages": [{"role": "user", "content": %s}]}' % ("9" * 5000), "messages[0]"),
        ('{"messages": [{"role": "user", "content": %s}]}' % ("[" * 600 + "]" * 600), "messages[0].content[0]"),
        ('{"messages": [{"role": "user", "content": "a"}], "temperature": 1e999}', "temperature"),
        ('{"messages": [{"role": "user", "content": "a"}], "seed": %s}' % ("9" * 5000), "seed"),
        ('{"messages": [{"role": "user", "content": "a"}], "seed": 1%s}' % ("0" * 4000), "seed"),
        (
            '{"messages": [{"role": "assistant", "tool_calls": [{"id": "a", "function": '
            '{"name": "f", "arguments": {"x": -1e999}}}]}]}',
            "messages[0]",
        ),
        (b'{"messages": [{"role": "user", "content": "\xff"}]}', "messages[0]"),
    ],
)
def test_odd_json_is_refused_at_its_field(text, param):
    with pytest.raises(WireError) as refused:
        parse_text(text)
    assert refused.value.message.startswith(f"{param}: ")


def test_nothing_of_a_refused_message_is_remembered():
    session, bad = memory(), '{"messages": [{"role": "user", "content": "a"}, {"role": "tool", "content": "b"}]}'
    for _ in range(2):
        with pytest.raises(WireError, match=r"^messages\[1\]\.tool_call_id: "):
            parse_text(bad, session)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text()
    | st.sampled_from(["auto", "none", "required", "function", "assistant", "tool", "text", PNG]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=5,
)  # fmt: skip

GOOD = {
    "model": "policy",
    "messages": [
        {"role": "developer", "content": [{"type": "text", "text": "Be brief."}], "name": "Ann"},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "image_url", "image_url": {"url": PNG}}]},
        assistant(content=None, reasoning_content="hm", refusal=None, tool_calls=[CALL]),
        {"role": "tool", "content": "Sunny", "tool_call_id": "call_1"},
        assistant(content=None, tool_calls=[{"id": "call_2", "function": {"name": "f", "arguments": {"a": 1}}}]),
        {"role": "tool", "name": "f", "content": None, "tool_call_id": "call_2"},
    ],
    "tools": [{"type": "function", "function": {"name": "f", "description": "", "parameters": {}, "strict": True}}],
    "tool_choice": "auto", "parallel_tool_calls": True, "n": 2, "stop": ["a"], "seed": 1, "temperature": 1,
    "top_p": 0.5, "top_k": 5, "max_tokens": 5, "max_completion_tokens": 2, "logprobs": True, "top_logprobs": 0,
    "logit_bias": {}, "response_format": {"type": "text"}, "stream": True, "stream_options": {"include_usage": True},
}  # fmt: skip


def places(value, path=()):
    yield path
    for key, inner in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        yield from places(inner, (*path, key))


def changed(value, path, new, remove):
    if not path:
        return new
    copy = value.copy()
    if len(path) == 1 and remove:
        del copy[path[0]]
    else:
        copy[path[0]] = changed(value[path[0]], path[1:], new, remove)
    return copy


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_any_body_is_understood_or_refused(data):
    body = GOOD
    for _ in range(data.draw(st.integers(1, 2))):
        path = data.draw(st.sampled_from([path for path in places(body) if path] or [()]))
        body = changed(body, path, data.draw(JSON), data.draw(st.booleans()))
    if not isinstance(body, dict):
        return
    try:
        parsed = parse_text(json.dumps(body))
    except WireError as error:
        assert error.param is None or error.message.startswith(error.param)
        return
    assert isinstance(parsed, ParsedChat) and parsed.call.messages
    for message in parsed.call.messages:
        validate_message(message)


@pytest.mark.parametrize("value", [None, True, -1, 0.5, "", "x", [], [None], {}, {"type": "x"}], ids=repr)
def test_a_value_of_any_type_anywhere_is_understood_or_refused(value):
    for path in places(GOOD):
        if path:
            try:
                parsed = parse_text(json.dumps(changed(GOOD, path, value, False)))
            except WireError as error:
                assert error.param.startswith(path[0]), path
            else:
                for message in parsed.call.messages:
                    validate_message(message)
