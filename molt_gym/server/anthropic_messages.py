"""The Anthropic Messages API: `/v1/messages` and `/v1/messages/count_tokens`.

Invariants: a message and its stream say the same; a reply that comes back in a later request is read as the message
that was recorded, so that the conversation goes on from the sampled ids.
"""

import json
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from ..messages import Message, text_of
from .anthropic_messages_request import INVALID_JSON, NO_THREADS, input_of, parse_request
from .errors import Kind, WireError
from .exchange import Completion, Event, Parsed
from .memory import WireMemory
from .replies import pieces

ERROR_TYPES: dict[Kind, str] = {
    "invalid_request": "invalid_request_error",
    "authentication": "authentication_error",
    "not_found": "not_found_error",
    "closed": "not_found_error",
    "too_large": "request_too_large",
    "unsupported": "invalid_request_error",
    "rate_limit": "rate_limit_error",
    "internal": "api_error",
    "unavailable": "overloaded_error",
}

_STOP_REASONS = {"length": "max_tokens", "tool_calls": "tool_use"}

SIGNATURE = "unsigned"
"""Of thinking blocks; it is not checked. Not empty, as some clients send back only thinking that is signed."""


class AnthropicMessages:
    """Anthropic Messages, as a `Wire`.

    How a body is read:
        - The text blocks of `system`, of a message or of a tool result are joined with nothing between them. Leading
          lines `x-anthropic-billing-header: ...` of system texts are dropped: they change with every request.
        - A user message with tool results becomes several messages in its order, of the roles tool and user.
        - The blocks of an assistant message become one message: all thinking, all text, all tool calls.
        - The text of a tool result with `is_error` gets "Error: " in front, unless it begins with that word.
        - `input` of a tool call is null or "" for no arguments. `{"INVALID_JSON": text}` stands, here and in replies,
          for arguments that are no JSON object.
        - `top_k` 0 says nothing.

    Refused: a last message of the assistant (except for counting); `tool_choice` any and tool;
    `disable_parallel_tool_use` with tools; `output_format`, `output_config.format`; `container`, `mcp_servers`,
    `compaction`; tools of the provider; images that would have to be fetched; blocks other than text, image, tool_use,
    tool_result and thinking, such as document, search_result and those of server tools; `thread`, upon which the SDK's
    tool runner sends whole conversations, without the program's noticing.

    Without effect: `thinking`, `output_config.effort`, `cache_control`, `context_management`, `metadata`,
    `service_tier`, `speed`, `fallbacks`, betas, redacted_thinking, signatures, citations, image `transformations`, and
    of tools `strict`, `input_examples`, `defer_loading`, `allowed_callers`; unknown fields.
    """

    parse = staticmethod(parse_request)

    def reply(self, parsed: Parsed, completion: Completion, memory: WireMemory) -> dict[str, Any]:
        """A message. `input_tokens` leaves out those of `cache_read_input_tokens`; their sum is the prompt.

        A reply without tool calls always has a text block, be it an empty one.
        """
        reply = completion.replies[0]
        stop_reason = _STOP_REASONS.get(reply.finish_reason) or ("end_turn" if reply.stop is None else "stop_sequence")
        return {
            "id": f"msg_{completion.id}",
            "type": "message",
            "role": "assistant",
            "model": parsed.call.model,
            "content": list(_blocks(reply.message)),
            "stop_reason": stop_reason,
            "stop_sequence": reply.stop if stop_reason == "stop_sequence" else None,
            "usage": {
                "input_tokens": reply.prompt_tokens - reply.cached_tokens,
                "cache_creation_input_tokens": 0,
                "cache_read_input_tokens": reply.cached_tokens,
                "output_tokens": reply.completion_tokens,
                "output_tokens_details": {"thinking_tokens": reply.reasoning_tokens},
            },
        }

    def events(self, parsed: Parsed, completion: Completion, memory: WireMemory) -> Iterator[Event]:
        """The events of a message, in the order of the API."""
        message = self.reply(parsed, completion, memory)
        usage = {**message["usage"], "output_tokens": 0, "output_tokens_details": None}
        start = {**message, "content": [], "stop_reason": None, "stop_sequence": None, "usage": usage}
        yield _event("message_start", message=start)
        for index, block in enumerate(message["content"]):
            first, deltas = _streamed(block)
            yield _event("content_block_start", index=index, content_block=first)
            for delta in deltas:
                yield _event("content_block_delta", index=index, delta=delta)
            yield _event("content_block_stop", index=index)
        end = {name: message[name] for name in ("stop_reason", "stop_sequence")}
        yield _event("message_delta", delta=end, usage=message["usage"])
        yield _event("message_stop")

    def error(self, error: WireError) -> dict[str, Any]:
        """An error. Its text begins as the API's does where a conversation is too long, which agents look for."""
        too_long = "prompt is too long: " if error.code == "context_length_exceeded" else ""
        body: dict[str, Any] = {"type": ERROR_TYPES[error.kind], "message": too_long + error.message}
        if error.code == NO_THREADS:
            body["details"] = {"error_code": NO_THREADS}
        return {"type": "error", "error": body}

    def error_events(self, error: WireError) -> Iterator[Event]:
        """One event of the name error."""
        yield "error", self.error(error)

    def parse_count(self, fields: Mapping[str, msgspec.Raw], memory: WireMemory) -> Parsed:
        """As `parse`, for a body of `count_tokens`: `max_tokens` may be missing, the last message the assistant's."""
        return parse_request(fields, memory, counting=True)

    def count(self, tokens: int) -> dict[str, int]:
        """The answer: how many tokens the prompt has, with the header of the next reply."""
        return {"input_tokens": tokens}


def _blocks(message: Message) -> Iterator[dict[str, Any]]:
    text, calls = text_of(message), message.get("tool_calls") or ()
    if reasoning := message.get("reasoning_content"):
        yield {"type": "thinking", "thinking": reasoning, "signature": SIGNATURE}
    if text or not calls:
        yield {"type": "text", "text": text}
    for call in calls:
        name, arguments = call["function"]["name"], call["function"]["arguments"]
        value = input_of(arguments)
        given = {INVALID_JSON: arguments} if value is None else value
        yield {"type": "tool_use", "id": call["id"], "name": name, "input": given}


def _streamed(block: dict[str, Any]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """A block as it begins, and the deltas that fill it."""
    kind = block["type"]
    if kind == "tool_use":
        text = json.dumps(block["input"], ensure_ascii=False)
        deltas = [{"type": "input_json_delta", "partial_json": piece} for piece in pieces(text, 4, 1)]
        return {**block, "input": {}}, deltas
    deltas = [{"type": f"{kind}_delta", kind: piece} for piece in pieces(block[kind], 4, 1)]
    signed = [{"type": "signature_delta", "signature": SIGNATURE}] if kind == "thinking" else []
    return block | {name: "" for name in (kind, "signature") if name in block}, deltas + signed


def _event(name: str, **data: Any) -> Event:
    return name, {"type": name, **data}
