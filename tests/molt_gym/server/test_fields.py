"""Fields are read as they are declared, and refused by their path, in the same words over every wire."""

import json
from typing import Annotated, Any

import msgspec
import pytest

from molt_gym.server.anthropic_messages import AnthropicMessages
from molt_gym.server.chat_completions import ChatCompletions
from molt_gym.server.errors import WireError
from molt_gym.server.fields import MAX_DEPTH, Field, field, interned, is_plain, items_of, messages_of, read, refuse
from molt_gym.server.json import decode_fields
from molt_gym.server.memory import WireMemory
from molt_gym.server.responses import Responses


class Options(msgspec.Struct):
    class Inner(msgspec.Struct, frozen=True):
        flag: bool | None = None

    n: Annotated[int, msgspec.Meta(ge=1, le=64)] = 1
    heat: Annotated[float, msgspec.Meta(ge=0, le=2)] | None = None
    names: list[Annotated[str, msgspec.Meta(min_length=1)]] = []
    inner: Inner = Inner()
    free: dict[str, Any] = {}


def fields_of(**fields):
    return decode_fields(json.dumps(fields).encode())


def error_of(function, *args):
    with pytest.raises(WireError) as caught:
        function(*args)
    return caught.value


def test_fields_are_read_and_null_is_the_default():
    asked = read(fields_of(n=None, heat=1, names=["a"], inner={"flag": True}, other=[{}]), Options)
    assert asked == Options(1, 1.0, ["a"], Options.Inner(True), {}) and isinstance(asked.heat, float)


@pytest.mark.parametrize(("value", "message"), [
    ({"n": 65}, "n: 65; write `int` <= 64"),
    ({"n": True}, "n: True; write `int`"),
    ({"n": 1.0}, "n: 1.0; write `int`"),
    ({"heat": "hot"}, "heat: 'hot'; write `float`"),
    ({"heat": 10**400}, "heat: "),
    ({"names": "a"}, "names: 'a'; write `array`"),
    ({"names": ["a", ""]}, "names: ['a', '']; write `str` of length >= 1"),
    ({"inner": {"flag": 1}}, "inner.flag: {'flag': 1}; write `bool`"),
])
def test_a_field_of_the_wrong_type_or_range_is_named(value, message):
    error = error_of(read, fields_of(**value), Options)
    assert error.message.startswith(message) and error.message.startswith(f"{error.param}: ") and error.status == 400


@pytest.mark.parametrize("raw", [b"1e999", b"9" * 5000, b"[" * 5000, b'"\xff"'])
def test_what_is_no_json_value_is_refused_at_its_field(raw):
    fields = {"free": msgspec.Raw(raw)}
    assert error_of(field, fields, "free").param == error_of(read, fields, Options).param == "free"


@pytest.mark.parametrize(("value", "neutral", "refused"), [
    (None, 0, False), (0, 0, False), (0.0, 0, False), (1, 0, True), (False, 0, True), (True, 1, True), ("", None, True),
    ({"type": "text"}, {"type": "text"}, False), ([], {}, True), (True, False, True),
])
def test_a_value_that_leaves_everything_as_it_is_is_not_refused(value, neutral, refused):
    table = {"x": (neutral, "leave it out")}
    if refused:
        error = error_of(refuse, fields_of(x=value), table)
        assert (error.status, error.message) == (422, f"x: {value!r} is not available; leave it out")
    else:
        refuse(fields_of(x=value), table)


@pytest.mark.parametrize("use", [
    lambda one: one["a"], lambda one: one.get("a", str), lambda one: one.optional("a", str),
    lambda one: one.filled("a"), lambda one: one.expect(str), lambda one: list(one.each()), lambda one: one.kind(),
])
@pytest.mark.parametrize("value", [None, 3, True])
def test_what_is_no_object_has_no_fields(use, value):
    error = error_of(use, Field("messages[2].content", value))
    assert error.message.startswith(f"messages[2].content: {value!r}; write a")


def test_a_field_of_an_object_is_named_by_its_path():
    one = Field("tools[0]", {"name": "", "strict": "yes", "parts": [{"type": 3}]})
    assert error_of(one.filled, "name").message == "tools[0].name: ''; write a string that is not empty"
    assert error_of(one.optional, "strict", bool).message == "tools[0].strict: 'yes'; write true or false"
    assert error_of(one.get, "gone", str).message == "tools[0].gone: None; write a string"
    [part] = one["parts"].each()
    assert error_of(part.kind).param == "tools[0].parts[0]" and one.optional("gone", str) is None


def nested(levels):
    return {"a": nested(levels - 1)} if levels else {}


@pytest.mark.parametrize(("value", "plain"), [
    ({"a": [1, 2.5, None, "x"]}, True), ({"a": float("inf")}, False), ([float("nan")], False),
    (nested(MAX_DEPTH - 1), True), (nested(MAX_DEPTH), False), (nested(500), False),
])
def test_what_every_reader_can_read_is_finite_and_not_too_deep(value, plain):
    assert is_plain(value) == plain


def test_items_come_as_they_were_sent():
    fields = decode_fields(b'{"a": [ {"x":  1}, "\\ud800"], "b": "text", "c": null}')
    assert [json.loads(bytes(item)) for item in items_of(fields, "a")] == [{"x": 1}, "\ud800"]
    assert bytes(items_of(decode_fields(b'{"a": [ {"x":  1}]}'), "a")[0]) == b'{"x":  1}'
    assert (items_of(fields, "b"), items_of(fields, "c"), items_of(fields, "gone")) == ("text", [], [])
    assert error_of(items_of, fields_of(a={"x": 1}), "a").message == "a: {'x': 1}; write a list"


def test_an_item_is_read_once_and_one_that_cannot_be_read_is_named():
    memory, read_paths = WireMemory(), []

    def make(item):
        read_paths.append(item.path)
        return [item.value]

    items = items_of(fields_of(a=[{"x": 1}, {"x": 2}, {"x": 1}]), "a")
    first, second = (interned("a", items, memory, make) for _ in range(2))
    assert first == second == [[{"x": 1}], [{"x": 2}], [{"x": 1}]] and read_paths == ["a[0]", "a[1]"]
    broken = [*items, msgspec.Raw(b"1e999")]
    assert error_of(interned, "a", broken, memory, make).message.startswith("a[3]: ")


@pytest.mark.parametrize("value", [None, [], {}, "Hi", 3])
def test_messages_are_a_list_of_at_least_one(value):
    error = error_of(messages_of, fields_of(messages=value), WireMemory(), lambda item: [item.value])
    assert error.message.startswith("messages: ") and "; write a list" in error.message


WIRES = [(ChatCompletions(), "messages"), (Responses(), "input"), (AnthropicMessages(), "messages")]


@pytest.mark.parametrize(("fields", "status", "message"), [
    ({"temperature": 3}, 400, "temperature: 3; write `float` <= 2.0"),
    ({"top_p": "x"}, 400, "top_p: 'x'; write `float`"),
    ({"stream": 1}, 400, "stream: 1; write `bool`"),
    ({"tools": 3}, 400, "tools: 3; write a list"),
    ({"tools": [3]}, 400, "tools[0]: 3; write an object"),
    ({"model": 3}, 400, "model: 3; write `str`"),
])
def test_the_same_mistake_is_told_in_the_same_words_over_every_wire(fields, status, message):
    for wire, name in WIRES:
        body = {"model": "m", "max_tokens": 1, name: [{"role": "user", "content": "Hi"}]} | fields
        error = error_of(wire.parse, decode_fields(json.dumps(body).encode()), WireMemory())
        assert (error.status, error.message) == (status, message)


def test_the_same_tool_is_the_same_to_the_policy_over_every_wire():
    schema = {"type": "object", "properties": {"city": {"type": "string"}}}
    flat = {"name": "look", "description": "Looks.", "parameters": schema}
    told = [{"type": "function", "function": flat}], [{"type": "function", **flat}], [
        {"name": "look", "input_schema": schema, "description": "Looks."}]
    read_tools = []
    for (wire, name), tools in zip(WIRES, told, strict=True):
        body = {"model": "m", "max_tokens": 1, name: [{"role": "user", "content": "Hi"}], "tools": tools}
        read_tools.append(wire.parse(decode_fields(json.dumps(body).encode()), WireMemory()).call.tools)
    assert [json.dumps(tools) for tools in read_tools] == [json.dumps(told[0])] * 3
