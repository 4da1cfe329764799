"""Chat messages in the OpenAI form, and what makes two of them the same.

A message is a plain dict: `role`, `content` (a string, a list of parts, or None), and for assistants
`reasoning_content` and `tool_calls`, whose arguments are a JSON *string*, as on the wire. Any string of any code points
is legal text. Validation says where a message is wrong; `canonical` irons out the spellings that mean the same.

Messages and tools that a conversation repeats with every request can be interned: what makes two of them the same is
then worked out once.
"""

import copy
import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from reprlib import repr as _show
from typing import Any

__all__ = [
    "ROLES", "Conversation", "InternedMessage", "InternedTools", "Message", "arguments_of", "canonical", "digest_of",
    "digest_of_tools", "digests_of", "has_digest", "same_message", "text_length", "text_of", "validate_conversation",
    "validate_message",
]

Message = dict[str, Any]
Conversation = dict[str, Any]

ROLES = ("system", "developer", "user", "assistant", "tool")

_NOTHING = (None, "", [], {})
_sorted_json = json.JSONEncoder(sort_keys=True).encode
_strict_sorted_json = json.JSONEncoder(sort_keys=True, allow_nan=False).encode


def _refuse(self: Any, *args: Any, **kwargs: Any) -> Any:
    raise TypeError(f"{type(self).__name__}: is shared and cannot be changed; change a copy of it")


class _Shared:
    """What may be interned; a copy is one of `_plain`."""

    __slots__ = ()
    _plain: type

    def __copy__(self) -> Any:
        return self._plain(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return copy.deepcopy(self._plain(self), memo)

    def __reduce__(self) -> tuple[Any, ...]:
        return self._plain, (self._plain(self),)


class InternedMessage(_Shared, dict[str, Any]):
    """A message that nobody changes, which remembers its digest. What it holds must not be changed either.

    Copies of it, also pickled ones, are plain dicts.
    """

    __slots__ = ("_digest",)
    _digest: bytes
    _plain = dict

    __setitem__ = __delitem__ = __ior__ = clear = pop = popitem = setdefault = update = _refuse  # type: ignore


class InternedTools(_Shared, list[dict[str, Any]]):
    """Tool schemas that nobody changes, as `InternedMessage`. Copies of it are plain lists."""

    __slots__ = ("_digest",)
    _digest: bytes
    _plain = list

    __setitem__ = __delitem__ = __iadd__ = __imul__ = append = clear = extend = _refuse  # type: ignore
    insert = pop = remove = reverse = sort = _refuse  # type: ignore


def digest_of(message: Mapping[str, Any]) -> bytes:
    """16 bytes (BLAKE2b) that messages of the same meaning have in common, and no others."""
    if type(message) is not InternedMessage:
        return _digest(_canonical(message))
    try:
        return message._digest
    except AttributeError:
        message._digest = _digest(_canonical(message))
        return message._digest


def digests_of(messages: Sequence[Mapping[str, Any]]) -> list[bytes]:
    """`digest_of` each; quick where all are interned and were asked for theirs before."""
    try:
        return [message._digest for message in messages]  # type: ignore[attr-defined]
    except AttributeError:
        return [digest_of(message) for message in messages]


def has_digest(message: Mapping[str, Any]) -> bool:
    """Whether the message remembers its digest, having been asked for it before."""
    return type(message) is InternedMessage and hasattr(message, "_digest")


def text_length(message: Mapping[str, Any]) -> int:
    """About how many characters a message holds, tool calls, reasoning and images included."""
    calls = sum(len(call["function"].get("arguments") or "") for call in message.get("tool_calls") or ())
    content = message.get("content")
    images = sum(len(str(part)) for part in content if part.get("type") != "text") if isinstance(content, list) else 0
    return len(text_of(message)) + len(message.get("reasoning_content") or "") + calls + images


def digest_of_tools(tools: Sequence[Mapping[str, Any]]) -> bytes:
    """16 bytes (BLAKE2b) that equal lists of tool schemas have in common, and no others."""
    if type(tools) is not InternedTools:
        return _digest(list(tools))
    try:
        return tools._digest
    except AttributeError:
        tools._digest = _digest(tools)
        return tools._digest


def _digest(value: Any) -> bytes:
    return hashlib.blake2b(_sorted_json(value).encode(), digest_size=16).digest()


def text_of(message: Mapping[str, Any]) -> str:
    """The text of a message: its content, or its text parts joined; "" where there is none."""
    content = message.get("content")
    if isinstance(content, str):
        return content
    return "".join(part.get("text") or "" for part in content or () if part.get("type") == "text")


def arguments_of(call: Mapping[str, Any]) -> dict[str, Any] | str:
    """The arguments of a tool call as a mapping, {} where there are none; the raw text if it is no JSON object."""
    arguments = call["function"].get("arguments")
    if isinstance(arguments, Mapping):
        return dict(arguments)
    if arguments is None or arguments.strip() in ("", "null"):
        return {}
    try:
        parsed = json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments
    return parsed if isinstance(parsed, dict) else arguments


def canonical(message: Mapping[str, Any]) -> Message:
    """A fresh copy in which spellings of equal meaning are equal.

    Content that is None, absent, "" or [] becomes ""; parts that are all text become the text; the arguments of a tool
    call become JSON text with sorted keys (raw text that is no JSON object is kept); other fields without a value go.
    """
    return copy.deepcopy(_canonical(message))


def _canonical(message: Mapping[str, Any]) -> Message:
    """`canonical`, which may share what it holds with the message."""
    clean = {key: value for key, value in message.items() if value not in _NOTHING}
    content = clean.get("content", "")
    only_text = isinstance(content, list) and all(part.get("type") == "text" for part in content)
    clean["content"] = text_of(clean) if only_text else content
    if "tool_calls" in clean:
        clean["tool_calls"] = [_canonical_call(call) for call in clean["tool_calls"]]
    return clean


def _canonical_call(call: Mapping[str, Any]) -> dict[str, Any]:
    arguments = arguments_of(call)
    if not isinstance(arguments, str):
        try:
            arguments = _strict_sorted_json(arguments)
        except (ValueError, RecursionError):
            arguments = call["function"]["arguments"]
    function = {"name": call["function"].get("name"), "arguments": arguments}
    return {"id": call.get("id"), "type": call.get("type") or "function", "function": function}


def same_message(a: Mapping[str, Any], b: Mapping[str, Any]) -> bool:
    """Whether two messages mean the same, in whichever of the wire's spellings each of them is."""
    return _canonical(a) == _canonical(b)


def validate_message(message: Any, where: str = "message") -> None:
    """Checks one message.

    Raises:
        ValueError: names the field, its value and what to write instead.
    """
    if not isinstance(message, dict):
        raise ValueError(f"{where}: {_show(message)} is no message; write a dict such as {{'role': 'user', ...}}")
    role = message.get("role")
    if role not in ROLES:
        raise ValueError(f"{where}.role: {_show(role)} is none of {', '.join(ROLES)}")
    if role == "assistant":
        if not isinstance(message.get("reasoning_content"), str | None):
            raise ValueError(f"{where}.reasoning_content: {_show(message['reasoning_content'])} is no string")
        _validate_calls(message.get("tool_calls"), f"{where}.tool_calls")
    elif message.get("tool_calls"):
        raise ValueError(f"{where}.tool_calls: only an assistant message calls tools, this one is of role {role!r}")
    if role == "tool" and not isinstance(message.get("tool_call_id"), str):
        raise ValueError(f"{where}.tool_call_id: {_show(message.get('tool_call_id'))}; write the id of the call")
    _validate_content(message.get("content"), f"{where}.content", optional=role == "assistant")
    if not _is_json({key: value for key, value in message.items() if key != "content"}):
        raise ValueError(f"{where}: {_show(message)} holds a value that JSON has not; use strings, finite numbers, ...")


def validate_conversation(conversation: Any, where: str = "") -> None:
    """Checks a conversation: at least one message, and a list of tools that may be empty.

    Raises:
        ValueError: names the field, such as "messages[2].role: 'robot' ...".
    """
    if not isinstance(conversation, dict) or conversation.keys() != {"messages", "tools"}:
        raise ValueError(f"{where or 'conversation'}: {_show(conversation)}; write {{'messages': [...], 'tools': []}}")
    prefix = f"{where}." if where else ""
    messages, tools = conversation["messages"], conversation["tools"]
    if not isinstance(messages, list) or not messages:
        raise ValueError(f"{prefix}messages: {_show(messages)}; write a list of at least one message")
    for index, message in enumerate(messages):
        validate_message(message, f"{prefix}messages[{index}]")
    if not isinstance(tools, list):
        raise ValueError(f"{prefix}tools: {_show(tools)}; write a list of tool schemas, [] for none")
    for index, tool in enumerate(tools):
        if not isinstance(tool, dict) or not _is_json(tool):
            raise ValueError(f"{prefix}tools[{index}]: {_show(tool)} is no tool schema in JSON")


def _validate_content(content: Any, where: str, *, optional: bool) -> None:
    if isinstance(content, str) or (content is None and optional):
        return
    if not isinstance(content, list):
        raise ValueError(f"{where}: {_show(content)}; write a string, '' for no text, or a list of parts")
    for index, part in enumerate(content):
        if not isinstance(part, dict) or not isinstance(part.get("type"), str) or not _is_json(part):
            raise ValueError(f"{where}[{index}]: {_show(part)}; write a part such as {{'type': 'text', 'text': '...'}}")
        if part["type"] == "text" and not isinstance(part.get("text"), str):
            raise ValueError(f"{where}[{index}].text: {_show(part.get('text'))} is no string")


def _validate_calls(calls: Any, where: str) -> None:
    if not isinstance(calls, list | None):
        raise ValueError(f"{where}: {_show(calls)}; write a list of tool calls")
    for index, call in enumerate(calls or ()):
        here = f"{where}[{index}]"
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict):
            raise ValueError(
                f"{here}: {_show(call)}; write {{'id': ..., 'type': 'function', 'function': {{'name': ..., "
                "'arguments': '{}'}}"
            )
        if not isinstance(call.get("id"), str):
            raise ValueError(f"{here}.id: {_show(call.get('id'))} is no string")
        if call.get("type") != "function":
            raise ValueError(f"{here}.type: {_show(call.get('type'))}; write 'function'")
        if not isinstance(function.get("name"), str):
            raise ValueError(f"{here}.function.name: {_show(function.get('name'))} is no string")
        if not isinstance(function.get("arguments"), str):
            raise ValueError(
                f"{here}.function.arguments: {_show(function.get('arguments'))}; write JSON text, json.dumps(arguments)"
            )


def _is_json(value: Any) -> bool:
    try:
        if isinstance(value, dict):
            return all(isinstance(key, str) and _is_json(item) for key, item in value.items())
        if isinstance(value, list):
            return all(map(_is_json, value))
    except RecursionError:
        return False
    if isinstance(value, float):
        return math.isfinite(value)
    return isinstance(value, str | int | None)
