"""Bodies of Anthropic Messages requests, understood.

Invariants: nothing but `WireError` is raised, whatever the body; a message is read by itself, so that it means the same
wherever and whenever it is sent; an assistant message that this server wrote is read as the very message it came from.
`AnthropicMessages` says what is refused and what has no effect.
"""

import json
import re
from collections.abc import Iterator, Mapping
from itertools import groupby
from typing import Annotated, Any

import msgspec

from ..messages import Message, arguments_of, text_of
from . import parts
from .errors import WireError, invalid, unsupported
from .exchange import Call, Options, Parsed
from .fields import Count, Field, Filled, Temperature, TopP, field, is_plain, messages_of, read, refuse, spoken
from .memory import WireMemory

INVALID_JSON = "INVALID_JSON"
"""Key of an `input` that holds the text of arguments which are no JSON object, as in Anthropic's documentation."""

NO_THREADS = "thread_unsupported_request"
"""Code of the refusal upon which SDKs send the whole conversation instead of what is new in it."""

REFUSED: dict[str, tuple[Any, str]] = {
    "compaction": (None, "it is done by the provider, compact the conversation in the agent"),
    "container": (None, "it is run by the provider, leave it out"),
    "mcp_servers": ([], "the provider calls them, call them in the agent and declare their tools in tools"),
    "output_format": (None, parts.FORMAT),
}
"""Fields that cannot be honoured, and the value besides null that leaves everything as it is."""
_MESSAGE = "a message such as {'role': 'user', 'content': 'Hi'}"
_BILLING_HEADER = re.compile(r"\A(?:x-anthropic-billing-header[^:\n]*:[^\n]*(?:\n+|\Z))+", re.IGNORECASE)


class _Request(msgspec.Struct):
    """What is read besides messages, system and tools."""

    model: str | None = None
    max_tokens: Count | None = None
    temperature: Temperature | None = None
    top_p: TopP | None = None
    top_k: Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)] = 0
    stop_sequences: list[Filled] = []
    output_config: dict[str, Any] = {}
    tool_choice: dict[str, Any] = {}
    stream: bool = False


def parse_request(fields: Mapping[str, msgspec.Raw], memory: WireMemory, *, counting: bool = False) -> Parsed:
    """The request that the top-level fields of a body spell.

    Args:
        counting: it only counts tokens: `max_tokens` may be missing, and the last message may be the assistant's.

    Raises:
        WireError: a field is missing, wrong or cannot be honoured.
    """
    if (thread := field(fields, "thread")).value is not None:
        told = thread.unsupported("no conversation is held here, leave it out and send the whole conversation")
        raise WireError(told.kind, told.message, param="thread", code=NO_THREADS)
    refuse(fields, REFUSED)
    asked = read(fields, _Request)
    if asked.output_config.get("format") is not None:
        raise Field("output_config", asked.output_config)["format"].unsupported(parts.FORMAT)
    if asked.model is None:
        raise Field("model", None).invalid("a string")
    if asked.max_tokens is None and not counting:
        raise Field("max_tokens", None).invalid("the most tokens that the reply may have")
    options = Options(
        temperature=asked.temperature, top_p=asked.top_p, top_k=asked.top_k or None, max_tokens=asked.max_tokens,
        stop=tuple(asked.stop_sequences))
    messages = messages_of(fields, memory, _messages)
    if messages[-1]["role"] == "assistant" and not counting:
        raise unsupported("messages", "the last one is the assistant's, and a reply cannot begin with text that the "
                          "policy did not sample; end with a user message")
    choice, forcing = Field("tool_choice", asked.tool_choice or {"type": "auto"}), ("any", "tool")
    limit = choice["disable_parallel_tool_use"]
    tools = parts.offered_tools(fields, memory, _tool, choice["type"], forcing, limit if limit.value else None)
    if len({tool["function"]["name"] for tool in tools}) < len(tools):
        raise invalid("tools", "two of them have the same name; write each once")
    call = Call([*_system(field(fields, "system"), memory), *messages], tools, options, model=asked.model)
    return Parsed(call, asked.stream)


def _tool(tool: Field) -> dict[str, Any]:
    if tool.expect(dict).get("type") not in (None, "custom"):
        raise tool["type"].unsupported("the provider runs it, declare one with name, description and input_schema")
    tool.get("input_schema", dict)
    return parts.function_of(tool, "input_schema")


def _system(system: Field, memory: WireMemory) -> list[Message]:
    texts = (_BILLING_HEADER.sub("", block.get("text", str)) for _, block in _blocks(system, "text"))
    # Not the raw field: a nonce in it would be kept with every request.
    return spoken(memory, "system", text) if (text := "".join(texts)) else []


def _messages(message: Field) -> list[Message]:
    role, content = message.expect(dict, _MESSAGE).get("role"), message["content"]
    if role == "assistant":
        return [_assistant(content)]
    if role not in ("user", "system"):
        raise message.invalid(_MESSAGE)
    if content.value is None:
        raise content.invalid("a string or a list of blocks")
    if role == "user":
        return _user(content)
    return [{"role": "system", "content": "".join(block.get("text", str) for _, block in _blocks(content, "text"))}]


def _blocks(content: Field, *known: str) -> Iterator[tuple[str, Field]]:
    """Type and block, for each."""
    value = [] if content.value is None else content.value
    blocks = [{"type": "text", "text": value}] if isinstance(value, str) else value
    for block in Field(content.path, blocks).each("a string or a list of blocks"):
        kind = block.kind()
        if kind not in known:
            raise block["type"].unsupported(f"here write only {', '.join(known)}")
        yield kind, block


def _user(content: Field) -> list[Message]:
    messages: list[Message] = []
    blocks = _blocks(content, "text", "image", "tool_result")
    for results, group in groupby(blocks, lambda block: block[0] == "tool_result"):
        if results:
            messages += [_result(block) for _, block in group]
        else:
            messages.append({"role": "user", "content": _joined([_part(kind, block) for kind, block in group])})
    return messages or [{"role": "user", "content": ""}]


def _joined(parts: list[dict[str, Any]]) -> str | list[dict[str, Any]]:
    return text_of({"content": parts}) if all(part["type"] == "text" for part in parts) else parts


def _result(block: Field) -> Message:
    said = [_part(kind, part) for kind, part in _blocks(block["content"], "text", "image")]
    if block.value.get("is_error") and not text_of({"content": said}).lstrip().lower().startswith("error"):
        said.insert(0, {"type": "text", "text": "Error: "})
    return {"role": "tool", "tool_call_id": block.get("tool_use_id", str), "content": _joined(said)}


def _part(kind: str, block: Field) -> dict[str, Any]:
    if kind == "text":
        return parts.text_part(block)
    source = block["source"]
    form = source.expect(dict).get("type")
    if form == "url" and source.get("url", str).startswith("data:"):
        return parts.image_part(source["url"])
    if form in ("url", "file"):
        raise source.unsupported("nothing is fetched, write {'type': 'base64', 'media_type': 'image/png', 'data': ...}")
    if form != "base64":
        raise source["type"].invalid("'base64'")
    if not (media_type := source.get("media_type", str)).startswith("image/"):
        raise source["media_type"].invalid("'image/png', for one")
    return parts.image_part(Field(f"{source.path}.data", f"data:{media_type};base64,{source.get('data', str)}"))


def _assistant(content: Field) -> Message:
    said = {"text": "", "thinking": "", "redacted_thinking": ""}
    calls: list[dict[str, Any]] = []
    for kind, block in _blocks(content, *said, "tool_use"):
        if kind == "tool_use":
            calls.append(parts.call_of(block.get("id", str), block.get("name", str), _arguments(block["input"])))
        elif kind != "redacted_thinking":
            said[kind] += block.get(kind, str)
    return parts.assistant(said["text"], said["thinking"], calls)


def _arguments(value: Field) -> str:
    if isinstance(value.value, dict) and value.value.keys() == {INVALID_JSON}:
        text = value.value[INVALID_JSON]
        if isinstance(text, str) and input_of(text) is None:
            return text
    return parts.arguments_of(value)


def input_of(arguments: str) -> dict[str, Any] | None:
    """The arguments of a tool call as a JSON object that every client can read and send back; None if they are none."""
    value = arguments_of({"function": {"arguments": arguments}})
    try:
        if isinstance(value, dict) and is_plain(value):
            json.dumps(value, ensure_ascii=False).encode()
            return value
    except UnicodeEncodeError:
        pass
    return None
