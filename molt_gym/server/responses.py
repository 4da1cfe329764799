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

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import count
from reprlib import repr as show
from typing import Any

import msgspec

from ..messages import InternedMessage, Message
from . import parts
from .errors import WireError
from .exchange import Call, Completion, Event, Options, Parsed
from .fields import Count, Field, Fields, Temperature, TopP, items_of, read, refuse, spoken
from .fields import field as field_of
from .memory import WireMemory
from .replies import openai_error, pieces
from .responses_items import read_items, write_items

LOGPROBS = "message.output_text.logprobs"

REFUSED: dict[str, tuple[Any, str]] = {
    "background": (False, "leave it out and wait for the reply, or stream it"),
    "context_management": ([], "the conversation is not compacted here, do it in the program"),
    "conversation": (None, "no conversation is stored, send the items, or previous_response_id"),
    "moderation": (None, "nothing is moderated, leave it out"),
    "prompt": (None, "no prompts are stored, send instructions and input"),
    "top_logprobs": (0, f"only the sampled token's is known, include {LOGPROBS!r}"),
    "truncation": ("disabled", "nothing is dropped from a conversation here, write 'disabled'"),
}
"""Fields that cannot be honoured, and the value besides null that leaves everything as it is."""


class _Echoed(msgspec.Struct):
    """Fields that the response repeats."""

    instructions: str | None = None
    max_output_tokens: Count | None = None
    metadata: dict[str, str] = {}
    model: str = ""
    parallel_tool_calls: bool = True
    previous_response_id: str | None = None
    store: bool = True
    temperature: Temperature | None = None
    tool_choice: str | dict[str, Any] = "auto"
    top_p: TopP | None = None


class _Request(_Echoed):
    """All that is read besides input and tools."""

    include: list[str] = []
    prompt_cache_options: dict[str, Any] = {}
    stream: bool = False
    text: dict[str, Any] = {}


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

    def parse(self, fields: Mapping[str, msgspec.Raw], memory: WireMemory) -> ParsedResponse:
        """See `Wire.parse`."""
        refuse(fields, REFUSED)
        asked = read(fields, _Request)
        _check_nested(asked)
        conversation = _conversation(fields, asked.previous_response_id, memory)
        system = [] if asked.instructions is None else spoken(memory, "system", asked.instructions)
        limit = None if asked.parallel_tool_calls else Field("parallel_tool_calls", False)
        choice = Field("tool_choice", asked.tool_choice)
        tools = parts.offered_tools(fields, memory, _tool, choice, ("required",), limit)
        options = Options(
            temperature=asked.temperature, top_p=asked.top_p, max_tokens=asked.max_output_tokens,
            logprobs=LOGPROBS in asked.include)
        call = Call([*system, *conversation], tools, options, model=asked.model)
        return ParsedResponse(call, asked.stream, conversation, _echo(asked, field_of(fields, "tools").value or []))

    def reply(self, parsed: ParsedResponse, completion: Completion, memory: WireMemory) -> dict[str, Any]:
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

    def events(self, parsed: ParsedResponse, completion: Completion, memory: WireMemory) -> Iterator[Event]:
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

    error = staticmethod(openai_error)

    def error_events(self, error: WireError) -> Iterator[Event]:
        """See `Wire.error_events`.

        The event has the documented fields, and the object of a plain error, at which the SDK raises.
        """
        told = {"message": error.message, "param": error.param, "code": error.code}
        yield "error", {"type": "error", "sequence_number": 0, **told, **self.error(error)}


def _check_nested(asked: _Request) -> None:
    form = Field("text.format", asked.text.get("format"))
    if isinstance(form.value, dict) and form.value.get("type") in ("json_object", "json_schema"):
        raise form.unsupported(parts.FORMAT)
    if form.value not in (None, {"type": "text"}):
        raise form.invalid("{'type': 'text'}")
    if asked.prompt_cache_options.get("prewarm"):
        raise Field("prompt_cache_options.prewarm", True).unsupported("a request samples a reply, leave it out")


def _conversation(fields: Fields, previous: str | None, memory: WireMemory) -> list[Message]:
    """What went before, and what is new."""
    if previous is not None and previous not in memory.responses:
        raise WireError("not_found", f"previous_response_id: {show(previous)} is no response of this session; send its "
                        "items", param="previous_response_id", code="previous_response_not_found")
    before = [] if previous is None else memory.responses[previous]
    items = items_of(fields, "input")
    conversation = [*before, *(spoken(memory, "user", items) if isinstance(items, str) else read_items(items, memory))]
    if not conversation:
        raise Field("input", items).invalid("a string or a list of at least one item")
    return conversation


def _tool(tool: Field) -> dict[str, Any]:
    if tool.get("type", str) != "function":
        raise tool["type"].unsupported("there are no hosted tools, write a tool of type 'function'")
    if "function" in tool.value:
        raise tool["name"].invalid("it beside the type, not into 'function'")
    if tool.value.get("defer_loading"):
        raise tool["defer_loading"].unsupported("there is no tool search, leave it out")
    return parts.function_of(tool)


def _echo(asked: _Request, tools: list[dict[str, Any]]) -> dict[str, Any]:
    fixed = {"background": False, "reasoning": None, "service_tier": "default", "text": {"format": {"type": "text"}},
             "top_logprobs": 0, "truncation": "disabled"}
    return {name: getattr(asked, name) for name in _Echoed.__struct_fields__} | fixed | {"tools": tools}


def _item_events(index: int, item: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """How an output item comes into being, without the numbers of the events."""
    place = {"item_id": item["id"], "output_index": index}
    call = item["type"] == "function_call"
    blank = {"status": "in_progress", **({"arguments": ""} if call else {"content": []})}
    yield "response.output_item.added", {"output_index": index, "item": item | blank}
    if call:
        for piece in pieces(item["arguments"]):
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
    for piece in [text] if part.get("logprobs") else pieces(text):
        yield f"{kind}.delta", {**place, "delta": piece, **known}
    yield f"{kind}.done", {**place, "text": text, **known}
    yield "response.content_part.done", {**place, "part": part}
