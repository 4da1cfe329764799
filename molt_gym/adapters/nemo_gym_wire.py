"""Tasks of NeMo Gym as conversations, and replies to them as objects of OpenAI's Responses API."""

import json
import time
from collections.abc import Iterator
from typing import Any

import msgspec

from ..messages import Message
from ..server.errors import WireError
from ..server.memory import WireMemory
from ..server.responses import Responses
from ..server.responses_items import write_items

__all__ = ["conversation_of", "filled", "items_of", "response_of"]


def conversation_of(parameters: Any) -> tuple[list[Message], list[dict[str, Any]]]:
    """Messages and tools of a task's `responses_create_params`: its instructions, input and tools. What it says of
    sampling is the trainer's business.

    Raises:
        ValueError: something of it cannot be read; the words name the field.
    """
    if not isinstance(parameters, dict):
        raise ValueError(f"{parameters!r:.100} is no object")
    asked = {name: parameters[name] for name in ("instructions", "input", "tools") if parameters.get(name)}
    fields = {name: msgspec.Raw(json.dumps(value).encode()) for name, value in asked.items()}
    try:
        call = Responses().parse(fields, WireMemory()).call
    except WireError as error:
        raise ValueError(error.message) from error
    return [dict(message) for message in call.messages], list(call.tools)


def items_of(turn: int, message: Message, results: list[Message]) -> Iterator[dict[str, Any]]:
    """The items that spell a reply, and the results of its calls."""
    yield from write_items(str(turn), message)
    for result in results:
        yield {"type": "function_call_output", "call_id": result["tool_call_id"], "output": result["content"]}


def response_of(row: dict[str, Any], items: list[dict[str, Any]]) -> dict[str, Any]:
    """The row of a task, and the response that a policy gave to it."""
    asked = row["responses_create_params"]
    response = {"id": "resp_0", "object": "response", "created_at": time.time(), "model": "policy", "output": items,
                "status": "completed", "tools": asked.get("tools") or [],
                "tool_choice": asked.get("tool_choice") or "auto",
                "parallel_tool_calls": asked.get("parallel_tool_calls") is not False}
    return row | {"response": response}


def filled(value: Any) -> Any:
    """Without the fields that hold null, which tables put into each row that lacks what another has."""
    if isinstance(value, dict):
        return {name: filled(item) for name, item in value.items() if item is not None}
    return [filled(item) for item in value] if isinstance(value, list) else value
