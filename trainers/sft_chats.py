"""Chat rows as ids, however datasets spell conversations."""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from molt_gym.errors import ConfigError
from molt_gym.images import inline_images, with_images
from molt_gym.messages import Message, validate_conversation
from molt_gym.tokens import ChatTemplateError, Renderer, Row
from molt_gym.tokens.supervised import supervised_rows

from .sft_config import DatasetConfig


def chat_rows(where: str, record: Mapping[str, Any], columns: DatasetConfig, renderer: Renderer) -> list[Row]:
    """A chat row as ids; `where` it is, for errors.

    Raises:
        ConfigError: it cannot be learnt from.
    """
    try:
        messages, tools = _conversation(record, columns)
        messages = _with_images(record, messages)
    except (ConfigError, ValueError) as error:
        raise ConfigError(f"{where}.{error}") from None
    try:
        validate_conversation({"messages": messages, "tools": tools}, where)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    try:
        rows = supervised_rows(renderer, messages, tools)
    except ChatTemplateError as error:
        raise ConfigError(f"{where}.messages: {error}") from None
    except ValueError as error:
        raise ConfigError(f"{where}.{error}") from None
    if not rows:
        raise ConfigError(f"{where}.messages: no reply in them has anything to learn; add an assistant message")
    return rows


def _conversation(record: Mapping[str, Any], columns: DatasetConfig) -> tuple[Any, Any]:
    """Messages and tools, with what datasets spell in ways of their own as OpenAI does."""
    if columns.prompt is not None and columns.completion is not None:
        pair = [_column(record, name, "text") for name in (columns.prompt, columns.completion)]
        for name, text in zip((columns.prompt, columns.completion), pair, strict=True):
            if not isinstance(text, str):
                raise ConfigError(f"{name}: got {text!r:.60} ({type(text).__name__}); write text")
        return [{"role": role, "content": text} for role, text in zip(("user", "assistant"), pair, strict=True)], []
    messages, tools = _column(record, columns.messages, "messages"), record.get(columns.tools)
    if isinstance(tools, str):
        try:
            tools = json.loads(tools or "[]")
        except ValueError as error:
            raise ConfigError(f"{columns.tools}: is no JSON: {error}") from None
    if isinstance(messages, list) and all(isinstance(message, Mapping) for message in messages):
        messages = list(_messages(messages))
    return messages, [_without_none(tool) for tool in tools] if isinstance(tools, list) else tools or []


def _column(record: Mapping[str, Any], name: str, option: str) -> Any:
    if name not in record:
        known = ", ".join(map(repr, record)) or "none"
        write = "dataset.messages, or dataset.prompt and dataset.completion" if option == "messages" else "another name"
        raise ConfigError(f"{name}: is missing; the columns are {known}; write {write}")
    return record[name]


def _messages(messages: Sequence[Mapping[str, Any]]) -> Iterator[Message]:
    unanswered: list[Any] = []
    for place, message in enumerate(messages):
        clean = {key: value for key, value in message.items() if value is not None or key == "content"}
        if "function_call" in clean:
            raise ConfigError(f"messages[{place}].function_call: is the form before tool_calls; write those, and their "
                              "results as messages of role tool")
        if isinstance(calls := clean.get("tool_calls"), list):
            calls = [_call(call, f"call{place:03}{number:02}") for number, call in enumerate(calls)]
            clean["tool_calls"] = calls
            unanswered = [call["id"] for call in calls if isinstance(call, dict) and "id" in call]
        if clean.get("role") == "tool":
            name = unanswered.pop(0) if unanswered else f"call{place:05}"
            clean.setdefault("tool_call_id", name)
        yield clean


def _call(call: Any, name: str) -> Any:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping):
        return call
    arguments = function.get("arguments")
    if isinstance(arguments, Mapping) or arguments is None:
        arguments = json.dumps(_without_none(arguments or {}), ensure_ascii=False)
    return {**call, "id": call.get("id") or name, "type": call.get("type") or "function",
            "function": {**function, "arguments": arguments}}


def _without_none(value: Any) -> Any:
    """Without the keys that a table, which has the same ones in every row, adds."""
    if isinstance(value, Mapping):
        return {key: _without_none(item) for key, item in value.items() if item is not None}
    return [_without_none(item) for item in value] if isinstance(value, list) else value


def _with_images(record: Mapping[str, Any], messages: Any) -> Any:
    """The conversation with the images of the row in it; what is no conversation is told later."""
    images = record.get("images") or record.get("image") or []
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
        return messages
    if images:
        messages = with_images(messages, images if isinstance(images, list) else [images])
    return inline_images(messages)
