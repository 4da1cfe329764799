"""What a model wrote, taken apart: reasoning, content and tool calls.

Invariant: parsing never raises and never loses text. A reply whose tool calls cannot all be read, or to which no tools
were offered, is kept as content, as it was written. A new form of tool call is one function from the text between the
markers to a name and arguments, in `TOOL_CALL_FORMS`.

Llama 3 writes calls as bare JSON. That is a call where all of the content (or all that follows `<|python_tag|>`) is
such JSON; without the tag, its names must be those of offered tools as well, for a model may well have been asked to
answer in JSON.
"""

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import count
from typing import Any

from ..messages import Message, text_of

THINK, END_THINK = "<think>", "</think>"

Call = tuple[str, dict[str, Any]]
Tools = Sequence[Mapping[str, Any]]

_OPEN, _CLOSE, _PYTHON_TAG = "<tool_call>", "</tool_call>", "<|python_tag|>"
_TAGGED_CALL = re.compile(r"\s*<function=[^>\n]+>.*?</function>(?=\s*</tool_call>)", re.DOTALL)
_BARE_CALL = re.compile(r'\s*\{\s*"name"\s*:')
_FUNCTION = re.compile(r"\s*<function=([^>\n]+)>(.*)</function>\s*", re.DOTALL)
_PARAMETER = re.compile(r"<parameter=([^>\n]+)>\n?(.*?)\n?</parameter>\s*", re.DOTALL)


def parse_reply(text: str, messages: Sequence[Message] = (), *, thinking: bool = False, tools: Tools = ()) -> Message:
    """The assistant message that `text` spells.

    Args:
        text: a reply without its end-of-turn token.
        messages: what it answers; the ids of tool calls go on from theirs.
        thinking: the prompt ended inside a `<think>` block.
        tools: that may be called, with schemas that say which arguments are strings.

    Returns:
        A message with `content` and, where there are any, `reasoning_content` and `tool_calls`.
    """
    reasoning, content = split_reasoning(text, thinking=thinking)
    found = (_marked_calls(content, tools) or _bare_calls(content, tools)) if tools else None
    if found is None:
        return message_of(content, None, reasoning)
    calls = [(name, json.dumps(arguments, ensure_ascii=False)) for name, arguments in found[0]]
    return message_of(found[1], numbered(calls, messages), reasoning)


def message_of(content: str, calls: list[dict[str, Any]] | None, reasoning: str | None) -> Message:
    """An assistant message without fields that say nothing."""
    message: Message = {"role": "assistant", "content": content}
    if reasoning:
        message["reasoning_content"] = reasoning
    return message | {"tool_calls": calls} if calls else message


def numbered(calls: Sequence[tuple[str, str]], messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Tool calls of names and arguments; their ids go on from those in `messages`, of which some may have been cut."""
    taken = {call.get("id") for message in messages for call in message.get("tool_calls") or ()}
    # Nine letters and digits: the one form of id that every chat template accepts.
    free = (identifier for place in count(len(taken)) if (identifier := f"call{place:05d}") not in taken)
    return [
        {"id": next(free), "type": "function", "function": {"name": name, "arguments": arguments}}
        for name, arguments in calls
    ]


def split_reasoning(text: str, *, thinking: bool) -> tuple[str, str]:
    """The leading `<think>` block and what follows it, without the newlines around either.

    A block that is not closed, because the reply was cut, is reasoning to its end.
    """
    body = text.lstrip()
    if body.startswith(THINK):
        body = body[len(THINK) :]
    elif not thinking:
        return "", text
    reasoning, _, content = body.partition(END_THINK)
    return reasoning.strip("\n"), content.lstrip("\n")


def join_reasoning(reasoning: str, content: str) -> str:
    """The usual spelling of a reply with reasoning, for templates that know no field for it."""
    return f"{THINK}\n{reasoning}\n{END_THINK}\n\n{content}"


def join_tool_call(content: str, name: str, arguments: str) -> str:
    """The usual spelling of a reply with a tool call, for templates that know no field for it."""
    call = f'<tool_call>\n{{"name": {json.dumps(name, ensure_ascii=False)}, "arguments": {arguments}}}\n</tool_call>'
    return f"{content}\n{call}" if content else call


INLINE_CLOSE = '"}}\n</tool_call>'
"""What `join_tool_call` puts after arguments that end in a string."""


def join_results(results: Iterable[Message]) -> Message:
    """The usual spelling of the results of tools as a user message, for templates that have no role for them."""
    spelled = (f"<tool_response>\n{result['content']}\n</tool_response>" for result in results)
    return {"role": "user", "content": "\n".join(spelled)}


def malformed_calls(message: Mapping[str, Any]) -> int:
    """How many tool calls a reply seems to have begun that could not be read, so that they are in its content."""
    content = text_of(message)
    marked = max(content.count(_OPEN), content.count(_CLOSE)) + content.count(_PYTHON_TAG)
    return marked or int(_BARE_CALL.match(content) is not None and not message.get("tool_calls"))


def _marked_calls(content: str, tools: Tools) -> tuple[list[Call], str] | None:
    """The calls between markers and the text around them; None if there are none, or one that cannot be read."""
    calls, rest, position = [], [], 0
    while (start := content.find(_OPEN, position)) >= 0:
        end = content.find(_CLOSE, _end_of_call(content, start + len(_OPEN)))
        block = content[start + len(_OPEN) : end]
        call = next(filter(None, (form(block, tools) for form in TOOL_CALL_FORMS)), None) if end >= 0 else None
        if call is None:
            return None
        calls.append(call)
        rest.append(content[position:start])
        position = end + len(_CLOSE)
    text = "".join([*rest, content[position:]])
    return (calls, text.strip()) if calls and _CLOSE not in text else None


def _end_of_call(content: str, start: int) -> int:
    """A place that the closing marker is not before: a marker that an argument spells closes nothing."""
    if (tagged := _TAGGED_CALL.match(content, start)) is not None:
        return tagged.end()
    return _decoded(content, start)[1]


def _bare_calls(content: str, tools: Tools) -> tuple[list[Call], str] | None:
    """`{"name": "add", "parameters": {"a": 1}}; {...}`, the form of Llama 3, and the text before its tag."""
    text, tag, body = content.rpartition(_PYTHON_TAG)
    if not _BARE_CALL.match(body):
        return None
    calls, position = [], 0
    while position < len(body):
        value, end = _decoded(body, position)
        call = _call(value)
        if call is None or not tag and not _offered(call[0], tools):
            return None
        calls.append(call)
        separator = _SEPARATOR.match(body, end)
        if separator is None:
            return None
        position = separator.end()
    return calls, text.strip()


def _json_form(block: str, tools: Tools) -> Call | None:
    """`{"name": "add", "arguments": {"a": 1}}`, the form of Hermes and Qwen."""
    return _call(_json(block))


def _call(call: Any) -> Call | None:
    if not isinstance(call, dict) or not isinstance(call.get("name"), str) or not call["name"]:
        return None
    arguments = call.get("arguments", call.get("parameters", {}))
    return (call["name"], arguments) if isinstance(arguments, dict) else None


def _xml_form(block: str, tools: Tools) -> Call | None:
    """`<function=add><parameter=a>1</parameter></function>`, the form of Qwen3-Coder."""
    function = _FUNCTION.fullmatch(block)
    if function is None:
        return None
    schema, arguments, body, position = _parameters(function[1], tools), {}, function[2].strip(), 0
    # One after the other, as a search for the end of each of many that have none would take minutes.
    while position < len(body):
        if (parameter := _PARAMETER.match(body, position)) is None:
            return None
        arguments[parameter[1]] = _typed(parameter[2], schema.get(parameter[1]))
        position = parameter.end()
    return function[1], arguments


def _offered(name: str, tools: Tools) -> Mapping[str, Any] | None:
    functions = (tool.get("function", tool) for tool in tools)
    return next((each for each in functions if isinstance(each, Mapping) and each.get("name") == name), None)


def _parameters(name: str, tools: Tools) -> Mapping[str, Any]:
    parameters = (_offered(name, tools) or {}).get("parameters")
    properties = parameters.get("properties") if isinstance(parameters, Mapping) else None
    return properties if isinstance(properties, Mapping) else {}


def _typed(text: str, schema: Any) -> Any:
    """An argument that may be a string, and is of no other type that it may have, stays text; else it is read as JSON.

    So are Python's words for true, false and null, as many templates write these in history.
    """
    types, word = _types(schema), text.strip()
    value = _PYTHON[word] if word in _PYTHON else _json(text)
    keeps = "string" in types and types.isdisjoint(_NAMES.get(type(value), ()))
    return text if keeps or value is _NO_JSON else value


def _types(schema: Any) -> set[str]:
    """The types that a schema allows, as far as it tells."""
    if not isinstance(schema, Mapping):
        return set()
    named, choices = schema.get("type"), (schema.get("anyOf") or schema.get("oneOf"), schema.get("enum"))
    types = {name for name in (named if isinstance(named, list) else [named]) if isinstance(name, str)}
    schemas, values = (choice if isinstance(choice, list) else [] for choice in choices)
    return types.union(*map(_types, schemas), *(_NAMES.get(type(value), ("string",)) for value in values))


_NO_JSON = object()
_PYTHON = {"True": True, "False": False, "None": None}
_NAMES = {bool: ("boolean",), int: ("integer", "number"), float: ("number",), type(None): ("null",),
          dict: ("object",), list: ("array",)}
"""What a schema calls the types of JSON, but for strings, which need no quotes here."""
_decoder = json.JSONDecoder()
_SPACE = re.compile(r"\s*")
_SEPARATOR = re.compile(r"\s*(?:;\s*|\Z)")


def _json(text: str) -> Any:
    value, end = _decoded(text, 0)
    return value if not text[end:].strip() else _NO_JSON


def _decoded(text: str, start: int) -> tuple[Any, int]:
    """The JSON value that begins at a place, or `_NO_JSON`, and where it ends."""
    try:
        value, end = _decoder.raw_decode(text, _SPACE.match(text, start).end())  # type: ignore[union-attr]
        json.dumps(value, allow_nan=False)
    except (ValueError, RecursionError):
        return _NO_JSON, start
    return value, end


TOOL_CALL_FORMS: list[Callable[[str, Tools], Call | None]] = [_json_form, _xml_form]
