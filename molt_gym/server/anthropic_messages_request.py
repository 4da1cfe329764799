"""Bodies of Anthropic Messages requests, understood.

Invariants: nothing but `WireError` is raised, whatever the body; a message is read by itself, so that it means the same
wherever and whenever it is sent; an assistant message that this server wrote is read as the very message it came from.
`AnthropicMessages` says what is refused and what has no effect.
"""

import base64
import binascii
import json
import re
from collections.abc import Iterator, Mapping
from functools import partial
from reprlib import repr as _show
from typing import Annotated, Any

import msgspec

from ..messages import Message, arguments_of, text_of
from .errors import WireError, invalid, unsupported
from .exchange import Call, Memory, Options, Parsed
from .json import decode, encode

INVALID_JSON = "INVALID_JSON"
"""Key of an `input` that holds the text of arguments which are no JSON object, as in Anthropic's documentation."""

NO_THREADS = "thread_unsupported_request"
"""Code of the refusal upon which SDKs send the whole conversation instead of what is new in it."""

MAX_DEPTH = 64
"""How deep a tool's schema or a call's input may be nested."""

_Count = Annotated[int, msgspec.Meta(ge=1, le=2**31 - 1)]
_TopK = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]
_Temperature = Annotated[float, msgspec.Meta(ge=0, le=2)]
_TopP = Annotated[float, msgspec.Meta(gt=0, le=1)]
_Stop = list[Annotated[str, msgspec.Meta(min_length=1)]]

_REFUSED = {
    "compaction": "is done by the provider; compact the conversation in the agent",
    "container": "is run by the provider; leave it out",
    "mcp_servers": "are called by the provider; call them in the agent and declare their tools in tools",
    "output_format": "output cannot be constrained while a policy is trained; ask for the format in a message",
}
_IMAGES = ("image/jpeg", "image/png", "image/gif", "image/webp")
_BILLING_HEADER = re.compile(r"\A(?:x-anthropic-billing-header[^:\n]*:[^\n]*(?:\n+|\Z))+", re.IGNORECASE)


def parse_request(fields: Mapping[str, msgspec.Raw], memory: Memory, *, counting: bool = False) -> Parsed:
    """The request that the top-level fields of a body spell.

    Args:
        counting: it only counts tokens: `max_tokens` may be missing, and the last message may be the assistant's.

    Raises:
        WireError: a field is missing, wrong or cannot be honoured.
    """
    if (thread := _field(fields, "thread", Any)) is not None:
        raise WireError("unsupported", f"thread: {_show(thread)}: no conversation is held here; leave it out and send "
                        "the whole conversation", param="thread", code=NO_THREADS)
    for name, why in _REFUSED.items():
        if (value := _field(fields, name, Any)) not in (None, [], {}):
            raise unsupported(name, f"{_show(value)} {why}")
    config = _field(fields, "output_config", dict[str, Any]) or {}
    if config.get("format") is not None:
        raise unsupported("output_config.format", f"{_show(config['format'])}; {_REFUSED['output_format']}")
    model, max_tokens = _field(fields, "model", str), _field(fields, "max_tokens", _Count)
    if model is None:
        raise invalid("model", "is missing; write a string")
    if max_tokens is None and not counting:
        raise invalid("max_tokens", "is missing; write the most tokens that the reply may have")
    options = Options(
        temperature=_field(fields, "temperature", _Temperature),
        top_p=_field(fields, "top_p", _TopP),
        top_k=_field(fields, "top_k", _TopK) or None,
        max_tokens=max_tokens,
        stop=tuple(_field(fields, "stop_sequences", _Stop) or ()),
    )
    messages = _conversation(fields, memory)
    if messages[-1]["role"] == "assistant" and not counting:
        raise unsupported("messages", "the last one is the assistant's, and a reply cannot begin with text that the "
                          "policy did not sample; end with a user message")
    call = Call(messages, _tools(fields, memory), options, model=model)
    return Parsed(call, bool(_field(fields, "stream", bool)))


def _field(fields: Mapping[str, msgspec.Raw], name: str, kind: Any) -> Any:
    """A field as a value of a type; None where it is missing or null."""
    return _converted(name, decode(bytes(fields[name])) if name in fields else None, kind)


def _converted(name: str, value: Any, kind: Any) -> Any:
    if value is None:
        return None
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        raise invalid(name, f"{_show(value)} is wrong: {str(error).replace('$', name)}") from None


def _tools(fields: Mapping[str, msgspec.Raw], memory: Memory) -> list[dict[str, Any]]:
    tools = memory.intern_tools(bytes(fields.get("tools", b"null")), _schemas)
    choice = _field(fields, "tool_choice", dict[str, Any]) or {"type": "auto"}
    kind = choice.get("type")
    if kind in ("any", "tool"):
        raise unsupported("tool_choice.type", f"{kind!r}: a call cannot be forced while a policy is trained; write "
                          "'auto' or 'none'")
    if kind not in ("auto", "none"):
        raise invalid("tool_choice.type", f"{_show(kind)}; write 'auto' or 'none'")
    if kind == "none":
        return []
    if tools and choice.get("disable_parallel_tool_use"):
        raise unsupported("tool_choice.disable_parallel_tool_use", "true: the number of calls cannot be limited while "
                          "a policy is trained; leave it out and take the first call")
    return tools


def _schemas(declared: Any) -> list[dict[str, Any]]:
    declared = _converted("tools", declared, list[dict[str, Any]]) or []
    tools = [_tool(tool, f"tools[{index}]") for index, tool in enumerate(declared)]
    if len({tool["function"]["name"] for tool in tools}) < len(tools):
        raise invalid("tools", "two of them have the same name; write each once")
    return tools


def _tool(tool: dict[str, Any], where: str) -> dict[str, Any]:
    kind, schema, description = tool.get("type"), tool.get("input_schema"), tool.get("description")
    if kind not in (None, "custom"):
        raise unsupported(f"{where}.type", f"{_show(kind)}: is a tool of the provider; declare a custom one with name, "
                          "description and input_schema")
    if not isinstance(schema, dict):
        raise invalid(f"{where}.input_schema", f"{_show(schema)}; write a JSON schema, {{'type': 'object', ...}}")
    _json_text(schema, f"{where}.input_schema")
    function = {"name": _string(tool, "name", where), "parameters": schema}
    if description is not None:
        function["description"] = _string(tool, "description", where)
    return {"type": "function", "function": function}


def _conversation(fields: Mapping[str, msgspec.Raw], memory: Memory) -> list[Message]:
    messages: list[Message] = []
    if (value := _field(fields, "system", Any)) is not None:
        texts = (_string(block, "text", here) for here, _, block in _blocks(value, "system", ("text",)))
        if system := "".join(_BILLING_HEADER.sub("", text) for text in texts):
            # Not the raw field: a nonce in it would be kept with every request.
            messages += memory.intern(encode({"role": "system", "content": system}), lambda message: [message])
    for index, raw in enumerate(_items(fields)):
        messages += memory.intern(raw, partial(_messages, where=f"messages[{index}]"))
    return messages


def _items(fields: Mapping[str, msgspec.Raw]) -> list[bytes]:
    raw = bytes(fields.get("messages", b"null"))
    try:
        items = [bytes(item) for item in msgspec.json.decode(raw, type=list[msgspec.Raw])]
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        value = decode(raw)
        items = [encode(item) for item in value] if isinstance(value, list) else []
    if not items:
        raise invalid("messages", f"{_show(decode(raw))}; write a list of at least one message")
    return items


def _messages(value: Any, where: str) -> list[Message]:
    role = value.get("role") if isinstance(value, dict) else None
    if role == "user":
        return _user(value.get("content"), f"{where}.content")
    if role == "assistant":
        return [_assistant(value.get("content"), f"{where}.content")]
    if role == "system":
        blocks = _blocks(value.get("content"), f"{where}.content", ("text",))
        return [{"role": "system", "content": "".join(_string(block, "text", here) for here, _, block in blocks)}]
    raise invalid(where, f"{_show(value)} is no message; write {{'role': 'user' or 'assistant', 'content': ...}}")


def _blocks(content: Any, where: str, known: tuple[str, ...]) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Place, type and block, for each."""
    if isinstance(content, str):
        content = [{"type": "text", "text": content}]
    if not isinstance(content, list):
        raise invalid(where, f"{_show(content)}; write a string or a list of blocks")
    for index, block in enumerate(content):
        here = f"{where}[{index}]"
        kind = block.get("type") if isinstance(block, dict) else None
        if not isinstance(kind, str):
            raise invalid(here, f"{_show(block)}; write a block such as {{'type': 'text', 'text': '...'}}")
        if kind not in known:
            raise unsupported(f"{here}.type", f"{_show(kind)}; here write only {', '.join(known)}")
        yield here, kind, block


def _string(block: Mapping[str, Any], name: str, where: str) -> str:
    value = block.get(name)
    if not isinstance(value, str):
        raise invalid(f"{where}.{name}", f"{_show(value)}; write a string")
    return value


def _user(content: Any, where: str) -> list[Message]:
    messages: list[Message] = []
    parts: list[dict[str, Any]] = []
    for here, kind, block in _blocks(content, where, ("text", "image", "tool_result")):
        if kind != "tool_result":
            parts.append(_part(here, kind, block))
            continue
        if parts:
            messages.append({"role": "user", "content": _content(parts)})
            parts = []
        messages.append(_result(here, block))
    if parts or not messages:
        messages.append({"role": "user", "content": _content(parts)})
    return messages


def _content(parts: list[dict[str, Any]]) -> str | list[dict[str, Any]]:
    return text_of({"content": parts}) if all(part["type"] == "text" for part in parts) else parts


def _result(where: str, block: dict[str, Any]) -> Message:
    content = block.get("content")
    blocks = _blocks([] if content is None else content, f"{where}.content", ("text", "image"))
    parts = [_part(here, kind, part) for here, kind, part in blocks]
    if block.get("is_error") and not text_of({"content": parts}).lstrip().lower().startswith("error"):
        parts.insert(0, {"type": "text", "text": "Error: "})
    return {"role": "tool", "tool_call_id": _string(block, "tool_use_id", where), "content": _content(parts)}


def _part(where: str, kind: str, block: dict[str, Any]) -> dict[str, Any]:
    if kind == "text":
        return {"type": "text", "text": _string(block, "text", where)}
    source = block.get("source")
    where = f"{where}.source"
    if not isinstance(source, dict):
        raise invalid(where, f"{_show(source)}; write {{'type': 'base64', 'media_type': 'image/png', 'data': '...'}}")
    return {"type": "image_url", "image_url": {"url": _image_url(source, where)}}


def _image_url(source: dict[str, Any], where: str) -> str:
    kind = source.get("type")
    if kind == "url" and (url := _string(source, "url", where)).startswith("data:"):
        return url
    if kind in ("url", "file"):
        raise unsupported(where, f"{_show(source)} would have to be fetched; write {{'type': 'base64', ...}}")
    if kind != "base64":
        raise invalid(f"{where}.type", f"{_show(kind)}; write 'base64'")
    media_type, data = _string(source, "media_type", where), _string(source, "data", where)
    if media_type not in _IMAGES:
        raise invalid(f"{where}.media_type", f"{_show(media_type)}; write one of {', '.join(_IMAGES)}")
    try:
        base64.b64decode(data, validate=True)
    except (binascii.Error, ValueError):
        raise invalid(f"{where}.data", f"{_show(data)} is no base64; encode the bytes of the image") from None
    return f"data:{media_type};base64,{data}"


def _assistant(content: Any, where: str) -> Message:
    text = reasoning = ""
    calls: list[dict[str, Any]] = []
    known = ("text", "thinking", "redacted_thinking", "tool_use")
    for here, kind, block in _blocks([] if content is None else content, where, known):
        if kind == "text":
            text += _string(block, "text", here)
        elif kind == "thinking":
            reasoning += _string(block, "thinking", here)
        elif kind == "tool_use":
            function = {"name": _string(block, "name", here), "arguments": _arguments(here, block)}
            calls.append({"id": _string(block, "id", here), "type": "function", "function": function})
    message: Message = {"role": "assistant", "content": text}
    if reasoning:
        message["reasoning_content"] = reasoning
    if calls:
        message["tool_calls"] = calls
    return message


def _arguments(where: str, block: dict[str, Any]) -> str:
    value = block.get("input")
    if value is None:
        return "{}"
    if isinstance(value, str):
        return value
    if not isinstance(value, dict):
        raise invalid(f"{where}.input", f"{_show(value)}; write an object, {{}} for no arguments")
    raw = value.get(INVALID_JSON)
    if len(value) == 1 and isinstance(raw, str) and input_of(raw) is None:
        return raw
    return _json_text(value, f"{where}.input")


def _json_text(value: dict[str, Any], where: str) -> str:
    try:
        if _depth(value) <= MAX_DEPTH:
            return json.dumps(value, ensure_ascii=False, allow_nan=False)
    except RecursionError:
        pass
    except ValueError:
        raise invalid(where, f"{_show(value)} holds a number that JSON has not; write finite ones") from None
    raise invalid(where, f"{_show(value)} is nested more than {MAX_DEPTH} deep; write something flatter")


def _depth(value: Any) -> int:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return 1 + max(map(_depth, inner), default=0)


def input_of(arguments: str) -> dict[str, Any] | None:
    """The arguments of a tool call as a JSON object that every client can read and send back; None if they are none."""
    value = arguments_of({"function": {"arguments": arguments}})
    try:
        if isinstance(value, dict) and _depth(value) <= MAX_DEPTH:
            json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
            return value
    except (ValueError, RecursionError):
        pass
    return None
