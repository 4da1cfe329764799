"""What a model wrote, taken apart: reasoning, content and tool calls.

Invariant: parsing never raises and never loses text. A reply whose tool calls cannot all be read is kept as content, as
it was written. A new form of tool call is one function from the text between the markers to a name and arguments, in
`TOOL_CALL_FORMS`.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ..messages import Message

THINK, END_THINK = "<think>", "</think>"

Call = tuple[str, dict[str, Any]]
Tools = Sequence[Mapping[str, Any]]

_TOOL_CALL = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)
_FUNCTION = re.compile(r"\s*<function=([^>\n]+)>(.*)</function>\s*", re.DOTALL)
_PARAMETER = re.compile(r"<parameter=([^>\n]+)>\n?(.*?)\n?</parameter>", re.DOTALL)


def parse_reply(text: str, messages: Sequence[Message] = (), *, thinking: bool = False, tools: Tools = ()) -> Message:
    """The assistant message that `text` spells.

    Args:
        text: a reply without its end-of-turn token.
        messages: what it answers; the ids of tool calls go on from theirs.
        thinking: the prompt ended inside a `<think>` block.
        tools: schemas that say which arguments are strings.

    Returns:
        A message with `content` and, where there are any, `reasoning_content` and `tool_calls`.
    """
    reasoning, content = split_reasoning(text, thinking=thinking)
    calls = _calls(content, tools)
    message: Message = {"role": "assistant", "content": content}
    if reasoning:
        message["reasoning_content"] = reasoning
    if calls:
        message["content"] = _TOOL_CALL.sub("", content).strip()
        first_call = sum(len(earlier.get("tool_calls") or ()) for earlier in messages)
        # Nine letters and digits: the one form of id that every chat template accepts.
        message["tool_calls"] = [
            {
                "id": f"call{first_call + index:05d}",
                "type": "function",
                "function": {"name": name, "arguments": json.dumps(arguments, ensure_ascii=False)},
            }
            for index, (name, arguments) in enumerate(calls)
        ]
    return message


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


def _calls(content: str, tools: Tools) -> list[Call]:
    blocks = _TOOL_CALL.findall(content)
    if any(marker in _TOOL_CALL.sub("", content) for marker in ("<tool_call>", "</tool_call>")):
        return []
    calls = [next(filter(None, (form(block, tools) for form in TOOL_CALL_FORMS)), None) for block in blocks]
    return [] if None in calls else calls


def _json_form(block: str, tools: Tools) -> Call | None:
    """`{"name": "add", "arguments": {"a": 1}}`, the form of Hermes and Qwen."""
    call = _json(block)
    if not isinstance(call, dict) or not isinstance(call.get("name"), str) or not call["name"]:
        return None
    arguments = call.get("arguments", {})
    return (call["name"], arguments) if isinstance(arguments, dict) else None


def _xml_form(block: str, tools: Tools) -> Call | None:
    """`<function=add><parameter=a>1</parameter></function>`, the form of Qwen3-Coder."""
    function = _FUNCTION.fullmatch(block)
    if function is None or _PARAMETER.sub("", function[2]).strip():
        return None
    schema = _parameters(function[1], tools)
    return function[1], {name: _typed(value, schema.get(name)) for name, value in _PARAMETER.findall(function[2])}


def _parameters(name: str, tools: Tools) -> Mapping[str, Any]:
    for tool in tools:
        function = tool.get("function", tool)
        if isinstance(function, Mapping) and function.get("name") == name:
            properties = (function.get("parameters") or {}).get("properties")
            return properties if isinstance(properties, Mapping) else {}
    return {}


def _typed(text: str, schema: Any) -> Any:
    """An argument that is declared a string stays text; another one is read as JSON where it is JSON."""
    if isinstance(schema, Mapping) and schema.get("type") == "string":
        return text
    value = _json(text)
    return text if value is _NO_JSON else value


_NO_JSON = object()


def _json(text: str) -> Any:
    try:
        value = json.loads(text)
        json.dumps(value, allow_nan=False)
    except (ValueError, RecursionError):
        return _NO_JSON
    return value


TOOL_CALL_FORMS: list[Callable[[str, Tools], Call | None]] = [_json_form, _xml_form]
