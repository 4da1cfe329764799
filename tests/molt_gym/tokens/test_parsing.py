import json
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from molt_gym.messages import validate_message
from molt_gym.tokens.parsing import malformed_calls, parse_reply

THINK, END_THINK, END = 259, 260, 257
CALL, END_CALL = 267, 268


def offer(*names) -> list[dict]:
    return [{"type": "function", "function": {"name": name, "parameters": {}}} for name in names]


def ids(*parts) -> list[int]:
    return [i for part in parts for i in ([part] if isinstance(part, int) else part.encode())]


def test_the_stop_token_is_no_part_of_the_message(renderer_of):
    assert renderer_of().parse([265, END]) == {"role": "assistant", "content": "hello"}
    assert renderer_of().parse([265]) == {"role": "assistant", "content": "hello"}
    assert renderer_of().parse([END]) == {"role": "assistant", "content": ""}
    assert renderer_of().parse([]) == {"role": "assistant", "content": ""}


def test_text_ends_before_the_first_stop_string(renderer_of):
    assert renderer_of().parse([104, 105, 33, 33], stop=["??", "!!"])["content"] == "hi"
    assert renderer_of().parse(ids("a<|im_end|>b", THINK, "c<think>"), stop=["c"])["content"] == "a<|im_end|>b<think>"


@pytest.mark.parametrize(
    ("sampled", "reasoning", "content"),
    [
        (ids(THINK, "\nhm\n", END_THINK, "\n\nyes"), "hm", "yes"),
        (ids(THINK, "hm", END_THINK, "yes"), "hm", "yes"),
        (ids("\n", THINK, "hm", END_THINK, "yes"), "hm", "yes"),
        (ids(THINK, "hm"), "hm", ""),
        (ids(THINK, "\n\n", END_THINK, "\n\nyes"), None, "yes"),
        (ids("yes", THINK, "hm", END_THINK), None, "yes<think>hm</think>"),
        (ids("hm", END_THINK, "yes"), None, "hm</think>yes"),
        (ids("<think>hm</think>yes"), None, "<think>hm</think>yes"),
        (ids(THINK, "</think>", END_THINK, "yes"), "</think>", "yes"),
    ],
)
def test_reasoning_is_what_stands_in_a_leading_block_of_real_markers(renderer_of, sampled, reasoning, content):
    message = renderer_of().parse([*sampled, END])
    assert (message.get("reasoning_content"), message["content"]) == (reasoning, content)


@pytest.mark.parametrize(("template", "prompt", "reasoning", "content"), [
    ("opens thinking", None, "hm", "yes"),
    ("opens thinking", ids("<|im_start|>assistant\n", THINK, "\n"), "hm", "yes"),
    ("opens thinking", ids("results\n"), None, "hm</think>yes"),
    ("opens thinking", ids(THINK, "\n\n", END_THINK, "\n"), None, "hm</think>yes"),
    ("chatml", ids("assistant\n", THINK), "hm", "yes"),
    ("chatml", ids("<think>\n"), None, "hm</think>yes"),
    ("chatml", [], None, "hm</think>yes"),
])
def test_the_prompt_tells_whether_a_block_of_reasoning_is_open(renderer_of, template, prompt, reasoning, content):
    message = renderer_of(template).parse(ids("hm", END_THINK, "yes", END), prompt=prompt)
    assert (message.get("reasoning_content"), message["content"]) == (reasoning, content)


def test_spelled_markers_count_where_the_tokenizer_has_none_of_its_own(renderer_of):
    reply = 'sure\n<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
    message = renderer_of("chatml").parse(ids(reply, END), tools=offer("add"))
    assert message["content"] == "sure" and message["tool_calls"][0]["function"]["name"] == "add"
    assert renderer_of("tools").parse(ids(reply, END), tools=offer("add")) == {"role": "assistant", "content": reply}


def test_private_use_characters_of_the_model_are_its_own(renderer_of):
    assert renderer_of().parse(ids("\ue000<think>\ue001</think>", END))["content"] == "\ue000<think>\ue001</think>"


def test_tool_calls_are_read_and_numbered_through_the_conversation(renderer_of):
    renderer = renderer_of("tools")
    one, two = '{"name": "add", "arguments": {"a": "<|im_end|> é"}}', '\n{"name": "stop"}\n'
    sampled = ids("sure\n", CALL, one, END_CALL, "\n", CALL, two, END_CALL, END)
    tools = offer("add", "stop")
    message = renderer.parse(sampled, tools=tools)
    assert message["content"] == "sure"
    assert [call["id"] for call in message["tool_calls"]] == ["call00000", "call00001"]
    assert [call["function"] for call in message["tool_calls"]] == [
        {"name": "add", "arguments": '{"a": "<|im_end|> é"}'},
        {"name": "stop", "arguments": "{}"},
    ]
    validate_message(message)
    later = renderer.parse(sampled, [message], tools)
    assert [call["id"] for call in later["tool_calls"]] == ["call00002", "call00003"]
    assert [call["id"] for call in renderer.parse(sampled, [later], tools)["tool_calls"]] == ["call00004", "call00005"]
    assert renderer.parse(sampled, tools=tools) == message


@pytest.mark.parametrize(
    "call",
    [
        '{"name": "add", "arguments": {"a": 1}',
        '{"name": "add", "arguments": [1]}',
        '{"name": "add", "arguments": {"a": NaN}}',
        '{"name": "add", "arguments": {"a": 1e999}}',
        '{"name": 1}',
        '{"name": ""}',
        "[]",
        "",
        "[" * 3000,
        "<function=add>x</function>",
        "<function=add>",
    ],
)
def test_a_tool_call_that_cannot_be_read_stays_content(renderer_of, call):
    good = ids(CALL, '{"name": "add"}', END_CALL)
    message = renderer_of("tools").parse([*good, *ids(CALL, call, END_CALL, END)], tools=offer("add"))
    expected = f'<tool_call>{{"name": "add"}}</tool_call><tool_call>{call}</tool_call>'
    assert message == {"role": "assistant", "content": expected}


@pytest.mark.parametrize(
    "sampled",
    [
        ids(CALL, '{"name": "f"}'),
        ids('{"name": "f"}', END_CALL),
        ids(CALL, CALL, '{"name": "f"}', END_CALL),
        ids(CALL, '{"name": "f"}', END_CALL, CALL, '{"name": "f"}'),
    ],
)
def test_a_tool_call_without_both_its_markers_stays_content(renderer_of, sampled):
    assert "tool_calls" not in renderer_of("tools").parse(sampled, tools=offer("f"))


def test_calls_in_tags_are_read_with_the_types_of_the_schema(renderer_of):
    properties = {"text": {"type": "string"}, "n": {"type": "integer"}}
    tools = [{"type": "function", "function": {"name": "add", "parameters": {"properties": properties}}}]
    body = "\n<function=add>\n<parameter=text>\n1\n</parameter>\n<parameter=n>\n3\n</parameter>\n"
    body += "<parameter=other>\nx\ny\n</parameter>\n</function>\n"
    message = renderer_of("tools").parse(ids(CALL, body, END_CALL, END), tools=tools)
    assert json.loads(message["tool_calls"][0]["function"]["arguments"]) == {"text": "1", "n": 3, "other": "x\ny"}


OPTIONAL = {"anyOf": [{"type": "string"}, {"type": "null"}]}


@pytest.mark.parametrize(
    ("schema", "written", "expected"),
    [
        ({"type": "boolean"}, "False", False), ({"type": "boolean"}, "true", True), ({}, "None", None),
        ({"type": "string"}, "False", "False"), ({"type": "string"}, '"5"', '"5"'), (OPTIONAL, "5", "5"),
        (OPTIONAL, "None", None), (OPTIONAL, "null", None), ({"type": ["string", "null"]}, "[1]", "[1]"),
        ({"type": ["string", "integer"]}, "5", 5), ({"type": ["string", "number"]}, "5", 5),
        ({"enum": ["1"]}, "1", "1"), ({"enum": [1, "a"]}, "1", 1), ({"oneOf": [{"type": "array"}]}, "[1]", [1]),
        ({"type": 3, "anyOf": "no", "enum": None}, "1", 1), ("no schema", "1", 1), ({"type": [["string"]]}, "1", 1),
    ],
)
def test_an_argument_in_tags_is_of_a_type_that_its_schema_allows(schema, written, expected):
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"properties": {"a": schema}}}}]
    text = f"<tool_call><function=f><parameter=a>\n{written}\n</parameter></function></tool_call>"
    assert calls_of(parse_reply(text, tools=tools)) == [("f", {"a": expected})]


def test_parameters_in_tags_that_are_never_closed_are_given_up_at_once():
    text = "<tool_call>\n<function=f>\n" + "<parameter=a>\n" * 10_000 + "</function></tool_call>"
    began = time.process_time()
    assert parse_reply(text, tools=offer("f"))["content"] == text
    assert time.process_time() - began < 5


def calls_of(message) -> list[tuple]:
    functions = [call["function"] for call in message.get("tool_calls", ())]
    return [(function["name"], json.loads(function["arguments"])) for function in functions]


@pytest.mark.parametrize(
    ("reply", "content", "calls"),
    [
        ('{"name": "f", "parameters": {"a": "x; y"}}', "", [("f", {"a": "x; y"})]),
        (' {"name": "f"} ;\n{"name": "g", "arguments": {"b": {}}}\n', "", [("f", {}), ("g", {"b": {}})]),
        ('<|python_tag|>{"name": "f", "parameters": {}}; {"name": "g"}', "", [("f", {}), ("g", {})]),
        ('Sure.\n<|python_tag|>{"name": "other", "parameters": {"a": 1}}', "Sure.", [("other", {"a": 1})]),
    ],
)
def test_bare_json_that_calls_an_offered_tool_is_a_call(reply, content, calls):
    message = parse_reply(reply, tools=offer("f", "g"))
    assert (message["content"], calls_of(message)) == (content, calls)
    assert malformed_calls(message) == 0
    assert "tool_calls" not in parse_reply(reply)


@pytest.mark.parametrize(
    ("reply", "malformed"),
    [
        ('{"name": "other", "parameters": {}}', 1),
        ('{"name": "f", "parameters": {}} and {"name": "g", "parameters": {}}', 1),
        ('{"name": "f", "parameters": {}}; {"name": "g", "par', 1),
        ('{"name": "f", "parameters": [1]}', 1),
        ('<|python_tag|>print("hi")', 1),
        ('<|python_tag|>{"name": "f", "parameters"', 1),
        ('Use {"name": "f", "parameters": {}}', 0),
        ('{"age": 1, "name": "f"}', 0),
        ("hello", 0),
    ],
)
def test_bare_json_that_is_no_call_stays_content(reply, malformed):
    message = parse_reply(reply, tools=offer("f", "g"))
    assert message == {"role": "assistant", "content": reply}
    assert malformed_calls(message) == malformed


def test_a_closing_marker_that_an_argument_spells_closes_nothing():
    one = '<tool_call>\n{"name": "f", "arguments": {"a": "</tool_call><tool_call>"}}\n</tool_call>'
    two = "<tool_call>\n<function=g>\n<parameter=b>\n</tool_call>\n</parameter>\n</function>\n</tool_call>"
    message = parse_reply(f"<think>hm</think>one {one} two {two} three", tools=offer("f", "g"))
    assert calls_of(message) == [("f", {"a": "</tool_call><tool_call>"}), ("g", {"b": "</tool_call>"})]
    assert message["content"] == "one  two  three" and message["reasoning_content"] == "hm"
    assert malformed_calls(message) == 0


@pytest.mark.parametrize(
    ("reply", "malformed"),
    [
        ('<tool_call>{"name": "f"}</tool_call> then <tool_call>{"name": "g", "argu', 2),
        ('<tool_call>{"name": "f", "arguments": {}}{"name": "g"}</tool_call>', 1),
        ('{"name": "f"}</tool_call>', 1),
    ],
)
def test_calls_that_were_cut_or_run_together_stay_content_and_are_counted(reply, malformed):
    message = parse_reply(reply, tools=offer("f"))
    assert message == {"role": "assistant", "content": reply} and malformed_calls(message) == malformed


def test_arguments_under_the_name_parameters_are_not_lost():
    reply = '<tool_call>{"name": "f", "parameters": {"a": 1}}</tool_call>'
    assert calls_of(parse_reply(reply, tools=offer("f"))) == [("f", {"a": 1})]


def test_the_length_of_reasoning_is_what_was_sampled_to_its_end(renderer_of, monkeypatch):
    renderer = renderer_of()
    assert renderer.reasoning_length([THINK, *b"hm", END_THINK, *b"</think>", END]) == 4
    assert renderer.reasoning_length([THINK, *b"hm"]) == 3
    monkeypatch.delitem(renderer._markers.ids, "</think>")
    assert renderer.reasoning_length([*b"<think>hm</think>yes", *b"</think>"]) == len("<think>hm</think>")
    assert renderer.reasoning_length([*b"<think>hm"]) == len("<think>hm")


def test_bytes_that_are_no_text_become_replacement_characters(renderer_of):
    assert renderer_of().parse([0xF0, 104, THINK, 0xE9, END])["content"] == "\ufffdh<think>\ufffd"
    assert renderer_of().decode([256, 0xF0, 265, 257]) == "<|im_start|>\ufffdhello<|im_end|>"


@given(sampled=st.lists(st.integers(0, 300) | st.sampled_from([THINK, END_THINK, CALL, END_CALL, END])))
def test_parsing_never_fails_and_gives_a_legal_message(renderer_of, sampled):
    for template in ("toy", "tools", "opens thinking"):
        message = renderer_of(template).parse(sampled, tools=offer("f"))
        validate_message(message)
        assert message == renderer_of(template).parse(list(sampled), tools=offer("f"))


@given(
    parts=st.lists(
        st.sampled_from([CALL, END_CALL, THINK, END_THINK, '{"name": "f"', ', "arguments": {}', "}", "a", "\n"])
    )
)
def test_replies_made_of_call_syntax_are_legal_messages(renderer_of, parts):
    validate_message(renderer_of("tools").parse(ids(*parts), tools=offer("f")))
