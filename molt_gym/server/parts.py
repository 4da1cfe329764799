"""What requests of all wires spell in one way or another: contents, images, tools and their calls, in the chat form."""

import json
import re
from collections.abc import Callable, Container
from typing import Any

from ..messages import Message
from .errors import WireError, invalid
from .fields import MAX_DEPTH, Field, Fields, is_plain
from .memory import WireMemory

FORMAT = "nothing constrains decoding, ask for the format in a message"
"""Why a format of the reply is refused."""
_IMAGE = re.compile(r"data:image/[\w.+-]+;base64,[\w+/=\s-]+", re.IGNORECASE | re.ASCII)


def text_part(part: Field, name: str = "text") -> dict[str, Any]:
    """A part of a content that is text."""
    return {"type": "text", "text": part.get(name, str)}


def image_part(url: Field) -> dict[str, Any]:
    """A part of a content that is an image, given by a data URI."""
    if url.expect(str, "a data URI, 'data:image/png;base64,...'")[:5].lower() != "data:":
        raise url.unsupported("nothing is fetched, write a data URI, 'data:image/png;base64,...'")
    if not _IMAGE.fullmatch(url.value):
        raise url.invalid("an image in base64, as in 'data:image/png;base64,...'")
    return {"type": "image_url", "image_url": {"url": url.value}}


def content_of(
    owner: Field, make: Callable[[Field], dict[str, Any]], name: str = "content", *, optional: bool = False
) -> str | list[dict[str, Any]]:
    """A string, or what `make` gives of each part; of a single text, the string. `optional`: null is no text."""
    value = owner.value.get(name)
    if isinstance(value, str) or value is None and optional:
        return value or ""
    parts = [make(part) for part in owner[name].each("a string or a list of parts")]
    return parts if len(parts) > 1 or parts and parts[0]["type"] != "text" else parts[0]["text"] if parts else ""


def assistant(content: Any, reasoning: str | None, calls: list[dict[str, Any]]) -> Message:
    """An assistant message, in which nothing but the content is empty."""
    fields = {"reasoning_content": reasoning, "tool_calls": calls}
    return {"role": "assistant", "content": content, **{name: value for name, value in fields.items() if value}}


def call_of(identifier: str, name: str, arguments: str) -> dict[str, Any]:
    """A tool call."""
    return {"id": identifier, "type": "function", "function": {"name": name, "arguments": arguments}}


def arguments_of(arguments: Field) -> str:
    """The arguments of a call as JSON text, whether they come as text or as an object."""
    if isinstance(arguments.value, str):
        return arguments.value
    return "{}" if arguments.value is None else json.dumps(_plain(arguments), ensure_ascii=False)


def function_of(function: Field, parameters: str = "parameters") -> dict[str, Any]:
    """A function that is declared, as a tool; `parameters` is the name of the field with its schema."""
    declared = {"name": function.filled("name")}
    if (description := function.optional("description", str)) is not None:
        declared["description"] = description
    schema = function.optional(parameters, dict) and _plain(function[parameters])
    declared["parameters"] = schema or {"type": "object", "properties": {}}
    function.optional("strict", bool)
    return {"type": "function", "function": declared}


def offered_tools(
    fields: Fields, memory: WireMemory, make: Callable[[Field], dict[str, Any]], choice: Field, forcing: Container[Any],
    limit: Field | None,
) -> list[dict[str, Any]]:
    """The tools that may be called.

    Args:
        make: reads a tool of the field `tools`; not asked again for the same tools.
        choice: "auto", "none", one of `forcing`, or an object that forces a call.
        limit: the field that limits how many calls there may be at a time, if one does.
    """
    def read_tools(value: Any) -> list[dict[str, Any]]:
        return [] if value is None else [make(tool) for tool in Field("tools", value).each()]

    try:
        tools = memory.intern_tools(bytes(fields.get("tools", b"null")), read_tools)
    except WireError as error:
        raise error if error.param is not None else invalid("tools", error.message) from None
    if isinstance(choice.value, dict) or choice.value in forcing:
        raise choice.unsupported("the policy cannot be made to call, write 'auto' or 'none'")
    if choice.value not in ("auto", "none"):
        raise choice.invalid("'auto' or 'none'")
    if choice.value == "none":
        return []
    if tools and limit is not None:
        raise limit.unsupported("the policy may call several tools at a time, leave it out and take the first call")
    return tools


def _plain(value: Field) -> dict[str, Any]:
    if not is_plain(value.expect(dict)):
        raise value.invalid(f"an object that is nested at most {MAX_DEPTH} levels deep")
    return value.value
