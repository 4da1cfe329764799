"""The OpenAI Responses API: what is understood of a request, and how its answer is written.

Refused, because a policy that is being trained cannot honour it: a `text.format` of JSON (nothing constrains decoding),
a `tool_choice` that forces or filters tools, `parallel_tool_calls: false` while tools are offered, `top_logprobs` above
0, tools and items other than functions and their calls, tools that are loaded later, files, images that are no data
URI, `truncation: "auto"`, `background`, `conversation`, `prompt`, `context_management`, `moderation`, prewarmed caches.

Accepted without effect: `store` (responses are kept as long as the session, whatever it says), `reasoning` (effort and
summary: reasoning is given as the content of its item, in full), `text.verbosity`, `strict` of a tool, `metadata`,
`user`, `safety_identifier`, `prompt_cache_*`, `service_tier`, `max_tool_calls` (it counts hosted tools),
`stream_options`, the `detail` of an image, encrypted reasoning, unknown fields, and `include` but for
`message.output_text.logprobs`. That one lists every sampled token of the reply on its text, those of reasoning, calls
and markup too.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import count
from reprlib import repr as show
from typing import Annotated, Any, Literal

import msgspec

from ..messages import InternedMessage, Message
from .errors import Kind, WireError, invalid, unsupported
from .exchange import Call, Completion, Event, Memory, Options, Parsed
from .json import decode, encode
from .responses_items import read_items, write_items

LOGPROBS = "message.output_text.logprobs"
MAX_DEPTH = 64
"""Levels of a tool's schema; deeper ones would exhaust the stack of whoever writes them."""
DELTAS = 16
"""Most deltas of one text in a stream."""

_TYPES: dict[str, Any] = {
    "include": list[str],
    "instructions": str,
    "max_output_tokens": Annotated[int, msgspec.Meta(ge=1)],
    "max_tool_calls": Annotated[int, msgspec.Meta(ge=1)],
    "metadata": dict[str, str],
    "model": str,
    "parallel_tool_calls": bool,
    "previous_response_id": str,
    "prompt_cache_key": str,
    "prompt_cache_options": dict[str, Any],
    "reasoning": dict[str, str | None],
    "safety_identifier": str,
    "service_tier": str,
    "store": bool,
    "stream": bool,
    "temperature": Annotated[float, msgspec.Meta(ge=0, le=2)],
    "text": dict[str, Any],
    "tool_choice": str | dict[str, Any],
    "top_logprobs": Annotated[int, msgspec.Meta(ge=0, le=20)],
    "top_p": Annotated[float, msgspec.Meta(gt=0, le=1)],
    "truncation": Literal["auto", "disabled"],
    "user": str,
}

_REFUSED = {
    "background": "leave it out and wait for the reply, or stream it",
    "context_management": "the conversation is not compacted here; do it in the program",
    "conversation": "send the items, or previous_response_id",
    "moderation": "nothing is moderated; leave it out",
    "prompt": "no prompts are stored; send instructions and input",
}

_TOOL_FIELDS = (
    ("name", str, "name"),
    ("description", str | None, "string"),
    ("parameters", dict | None, "JSON schema"),
    ("strict", bool | None, "boolean"),
)

_INPUT = msgspec.json.Decoder(str | list[msgspec.Raw] | None)

_ERROR_TYPES: dict[Kind, str] = {
    "authentication": "authentication_error",
    "rate_limit": "rate_limit_error",
    "unavailable": "server_error",
    "internal": "server_error",
}


@dataclass(frozen=True)
class ParsedResponse(Parsed):
    """A request for a response.

    conversation: the messages without the instructions, which `previous_response_id` does not carry over.
    echo: the fields of the request that the response repeats.
    """

    conversation: list[Message] = field(default_factory=list)
    echo: dict[str, Any] = field(default_factory=dict)


class Responses:
    """`POST /v1/responses`; see `Wire`."""

    def parse(self, fields: Mapping[str, msgspec.Raw], memory: Memory) -> ParsedResponse:
        """See `Wire.parse`."""
        _refuse(fields)
        given = {name: value for name in _TYPES if (value := _field(fields, name)) is not None}
        conversation = _conversation(fields, given, memory)
        system = _spoken(memory, "system", fields["instructions"]) if "instructions" in given else []
        if not conversation:
            raise invalid("input", "is empty; write a string or a list of at least one item")
        tools, offered = _tools(fields.get("tools"), memory)
        if not _may_call(given.get("tool_choice", "auto")):
            offered = []
        if offered and given.get("parallel_tool_calls") is False:
            raise unsupported("parallel_tool_calls", "false; the model may call several tools at once, write true")
        options = Options(
            temperature=given.get("temperature"),
            top_p=given.get("top_p"),
            max_tokens=given.get("max_output_tokens"),
            logprobs=LOGPROBS in given.get("include", ()),
        )
        call = Call([*system, *conversation], offered, options, model=given.get("model", ""))
        return ParsedResponse(call, given.get("stream", False), conversation, _echo(given, tools))

    def reply(self, parsed: ParsedResponse, completion: Completion, memory: Memory) -> dict[str, Any]:
        """See `Wire.reply`. The conversation can be continued from then on."""
        reply = completion.replies[0]
        cut = reply.finish_reason == "length"
        response_id = f"resp_{completion.id}"
        memory.responses[response_id] = [*parsed.conversation, InternedMessage(reply.message)]
        return {
            "id": response_id,
            "object": "response",
            "created_at": completion.created,
            "status": "incomplete" if cut else "completed",
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "output": write_items(completion.id, reply.message, tokens=reply.tokens, cut=cut),
            "usage": {
                "input_tokens": reply.prompt_tokens,
                "input_tokens_details": {"cached_tokens": reply.cached_tokens, "cache_write_tokens": 0},
                "output_tokens": reply.completion_tokens,
                "output_tokens_details": {"reasoning_tokens": reply.reasoning_tokens},
                "total_tokens": reply.prompt_tokens + reply.completion_tokens,
            },
            **parsed.echo,
        }

    def events(self, parsed: ParsedResponse, completion: Completion, memory: Memory) -> Iterator[Event]:
        """See `Wire.events`. The conversation can be continued from the first event on."""
        response = self.reply(parsed, completion, memory)
        numbers = count()

        def event(kind: str, data: dict[str, Any]) -> Event:
            return kind, {"type": kind, "sequence_number": next(numbers), **data}

        begun = response | {"status": "in_progress", "incomplete_details": None, "output": [], "usage": None}
        yield event("response.created", {"response": begun})
        yield event("response.in_progress", {"response": begun})
        for index, item in enumerate(response["output"]):
            for kind, data in _item_events(index, item):
                yield event(kind, data)
        yield event(f"response.{response['status']}", {"response": response})

    def error(self, error: WireError) -> dict[str, Any]:
        """See `Wire.error`."""
        kind = _ERROR_TYPES.get(error.kind, "invalid_request_error")
        return {"error": {"message": error.message, "type": kind, "param": error.param, "code": error.code}}

    def error_events(self, error: WireError) -> Iterator[Event]:
        """See `Wire.error_events`.

        The event has the documented fields, and the object of a plain error, at which the SDK raises.
        """
        told = {"message": error.message, "param": error.param, "code": error.code}
        yield "error", {"type": "error", "sequence_number": 0, **told, **self.error(error)}


def _refuse(fields: Mapping[str, msgspec.Raw]) -> None:
    for name, instead in _REFUSED.items():
        if name in fields and (value := decode(bytes(fields[name]))):
            raise unsupported(name, f"{show(value)}; {instead}")


def _field(fields: Mapping[str, msgspec.Raw], name: str) -> Any:
    """The value of a known field, checked as far as it is the business of that field alone; None without one."""
    if name not in fields:
        return None
    value = _converted(name, decode(bytes(fields[name])), _TYPES[name])
    match name, value:
        case "truncation", "auto":
            raise unsupported(name, "'auto'; nothing is dropped from a conversation here, write 'disabled'")
        case "top_logprobs", int() if value > 0:
            raise unsupported(name, f"{value}; only the sampled token's is known, include {LOGPROBS!r}")
        case "prompt_cache_options", {"prewarm": True}:
            raise unsupported(f"{name}.prewarm", "true; a request samples a reply, leave it out")
        case "text", {"format": dict() as form} if form.get("type") in ("json_object", "json_schema"):
            raise unsupported("text.format", f"{form['type']!r}; nothing constrains decoding, write 'text'")
        case "text", {"format": form} if form is not None and form != {"type": "text"}:
            raise invalid("text.format", f"{show(form)}; write {{'type': 'text'}}")
    return value


def _converted(name: str, value: Any, kind: Any) -> Any:
    try:
        return msgspec.convert(value, kind | None)
    except (msgspec.ValidationError, RecursionError) as error:
        raise invalid(name, f"{show(value)}; {error}") from None


def _conversation(fields: Mapping[str, msgspec.Raw], given: dict[str, Any], memory: Memory) -> list[Message]:
    """What went before, and what is new."""
    before: list[Message] = []
    if (previous := given.get("previous_response_id")) is not None:
        if previous not in memory.responses:
            raise WireError("not_found", f"previous_response_id: {show(previous)} is no response of this session; send "
                            "its items", param="previous_response_id", code="previous_response_not_found")
        before = memory.responses[previous]
    items = _items(fields.get("input", b"null"))
    return [*before, *(_spoken(memory, "user", fields["input"]) if items is None else read_items(items, memory))]


def _items(raw: bytes | msgspec.Raw) -> list[msgspec.Raw] | None:
    """The items of an input; None if it is a string."""
    try:
        value = _INPUT.decode(raw)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        value = decode(bytes(raw))
        if isinstance(value, list):
            value = [msgspec.Raw(encode(item)) for item in value]
    if not isinstance(value, str | list | None):
        raise invalid("input", f"{show(value)}; write a string or a list of items")
    return None if isinstance(value, str) else value or []


def _spoken(memory: Memory, role: str, raw: msgspec.Raw) -> list[Message]:
    # No item begins with a blank, so that none is taken for this.
    key = b' ["%b",%b]' % (role.encode(), bytes(raw))
    return memory.intern(key, lambda said: [{"role": said[0], "content": said[1]}])


def _may_call(choice: str | dict[str, Any]) -> bool:
    if choice in ("auto", "none"):
        return choice == "auto"
    if choice == "required" or isinstance(choice, dict):
        raise unsupported("tool_choice", f"{show(choice)}; no call can be forced and no tool held back, write 'auto' "
                          "or 'none', and offer only the tools that may be called")
    raise invalid("tool_choice", f"{show(choice)}; write 'auto' or 'none'")


def _tools(raw: msgspec.Raw | None, memory: Memory) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The tools as the response repeats them, and in the chat form."""
    if raw is None:
        return [], []

    def check(declared: Any) -> list[dict[str, Any]]:
        declared = _converted("tools", declared, list[dict[str, Any]]) or ()
        return [_tool(tool, f"tools[{index}]") for index, tool in enumerate(declared)]

    tools = memory.intern_tools(bytes(raw), check)
    # No field begins with a blank, so that the one form is not taken for the other.
    return tools, memory.intern_tools(b" %b" % bytes(raw), lambda _: map(_chat_tool, tools))


def _tool(tool: dict[str, Any], where: str) -> dict[str, Any]:
    """A tool as the response repeats it."""
    kind = tool.get("type")
    if not isinstance(kind, str):
        raise invalid(f"{where}.type", f"{show(kind)}; write 'function'")
    if kind != "function":
        raise unsupported(f"{where}.type", f"{show(kind)}; there are no hosted tools, write a tool of type 'function'")
    for key, form, what in _TOOL_FIELDS:
        if not isinstance(tool.get(key), form) or tool.get(key) == "" and key == "name":
            hint = "; write it beside the type, not into 'function'" if "function" in tool else ""
            raise invalid(f"{where}.{key}", f"{show(tool.get(key))} is no {what}{hint}")
    if tool.get("defer_loading"):
        raise unsupported(f"{where}.defer_loading", "true; there is no tool search, leave it out")
    if not _is_plain(tool.get("parameters"), MAX_DEPTH):
        raise invalid(f"{where}.parameters", f"no finite JSON, or nested deeper than {MAX_DEPTH} levels")
    return {"type": "function", **{key: tool.get(key) for key, _, _ in _TOOL_FIELDS}}


def _chat_tool(tool: dict[str, Any]) -> dict[str, Any]:
    function = {key: tool[key] for key in ("name", "description") if tool[key] is not None}
    parameters = tool["parameters"] or {"type": "object", "properties": {}}
    return {"type": "function", "function": function | {"parameters": parameters}}


def _is_plain(value: Any, levels: int) -> bool:
    if isinstance(value, dict | list):
        inner = value.values() if isinstance(value, dict) else value
        return levels > 0 and all(_is_plain(item, levels - 1) for item in inner)
    return not isinstance(value, float) or math.isfinite(value)


def _echo(given: dict[str, Any], tools: list[dict[str, Any]]) -> dict[str, Any]:
    same = ("instructions", "max_output_tokens", "max_tool_calls", "previous_response_id", "prompt_cache_key",
            "safety_identifier", "temperature", "top_p", "user")
    return {
        **{name: given.get(name) for name in same},
        "background": False,
        "metadata": given.get("metadata", {}),
        "model": given.get("model", ""),
        "parallel_tool_calls": given.get("parallel_tool_calls", True),
        "reasoning": given.get("reasoning", {}),
        "service_tier": "default",
        "store": given.get("store", True),
        "text": {"format": {"type": "text"}},
        "tool_choice": given.get("tool_choice", "auto"),
        "tools": tools,
        "top_logprobs": 0,
        "truncation": "disabled",
    }


def _item_events(index: int, item: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """How an output item comes into being, without the numbers of the events."""
    place = {"item_id": item["id"], "output_index": index}
    call = item["type"] == "function_call"
    blank = {"status": "in_progress", **({"arguments": ""} if call else {"content": []})}
    yield "response.output_item.added", {"output_index": index, "item": item | blank}
    if call:
        for piece in _pieces(item["arguments"]):
            yield "response.function_call_arguments.delta", {**place, "delta": piece}
        whole = {"name": item["name"], "arguments": item["arguments"]}
        yield "response.function_call_arguments.done", {**place, **whole}
    else:
        for at, part in enumerate(item["content"]):
            yield from _part_events({**place, "content_index": at}, part)
    yield "response.output_item.done", {"output_index": index, "item": item}


def _part_events(place: dict[str, Any], part: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    kind, text = f"response.{part['type']}", part["text"]
    none = {"logprobs": []} if "logprobs" in part else {}
    known = {"logprobs": part["logprobs"]} if "logprobs" in part else {}
    yield "response.content_part.added", {**place, "part": part | {"text": ""} | none}
    # The tokens of a reply do not add up to its text, so they come with the whole of it.
    for piece in [text] if part.get("logprobs") else _pieces(text):
        yield f"{kind}.delta", {**place, "delta": piece, **known}
    yield f"{kind}.done", {**place, "text": text, **known}
    yield "response.content_part.done", {**place, "part": part}


def _pieces(text: str) -> Iterator[str]:
    size = max(16, -(-len(text) // DELTAS))
    return (text[at : at + size] for at in range(0, len(text), size))
