"""The part of a conversation that decides how a chat template goes on after a reply.

Most templates write a message by itself, its neighbours, and whether a user message or a final answer comes later. For
these a window on the end of a conversation shows all that the whole of it would. Invariant: a window is used only with
a template that passed a probe, conversations of many shapes written both ways.
"""

import random
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ..messages import Message, text_of

QUESTION: Message = {"role": "user", "content": "?"}
_ANSWER: Message = {"role": "assistant", "content": "!"}
_TAG = re.compile(r"\s*(<[^\s>]+)")
_LEADING = ("system", "developer")

Extension = tuple[list[Message], Message, list[Message], list[Mapping[str, Any]]]
"""Messages, the reply to them, new messages, tools."""


def tool_named(name: str) -> dict[str, Any]:
    """A small tool that shows its name wherever something of it is written."""
    properties = {name: {"type": "string", "description": name}}
    parameters = {"type": "object", "properties": properties, "required": [name]}
    return {"type": "function", "function": {"name": name, "description": name, "parameters": parameters}}


def window(messages: Sequence[Message], reply: Message, new: Sequence[Message], source: str) -> list[Message] | None:
    """What may stand for `messages`; None where nothing shorter may.

    A short window is right while a loop of tool calls goes on. Else the reply or what is new may be the later message
    that changes how a template writes what came since the last answered question, so all of that is in the window.

    Args:
        source: of the template. A user message that begins with a tag which it mentions may be no question to it.
    """
    first = next((place for place, message in enumerate(messages) if message["role"] not in _LEADING), len(messages))
    looping = reply.get("tool_calls") and new and all(message["role"] == "tool" for message in new)
    start = len(messages) - 1
    if looping and first < len(messages) and _asks(messages[first], source):
        while start > first and messages[start]["role"] == "tool":
            start -= 1
    elif not looping:
        while start > first and not _opens(messages, start, source):
            start -= 1
    else:
        return None
    role = messages[start]["role"] if start > first else None
    if role == "user":
        stand_in = [] if _asks(messages[start], source) else [QUESTION, _ANSWER]
    elif role == "assistant":
        stand_in = [QUESTION]
    else:
        return None
    return [*messages[:first], *stand_in, *messages[start:]] if start > first + len(stand_in) else None


def _opens(messages: Sequence[Message], place: int, source: str) -> bool:
    """Whether a message is a question that comes after an answer."""
    message, before = messages[place], messages[place - 1]
    return before["role"] == "assistant" and not before.get("tool_calls") and _asks(message, source)


def _asks(message: Message, source: str) -> bool:
    tag = _TAG.match(text_of(message)) if message["role"] == "user" else None
    return message["role"] == "user" and (tag is None or tag[1] not in source)


def is_plain(messages: Sequence[Message], reply: Message, new: Sequence[Message]) -> bool:
    """Whether there are only questions and answers: nothing but text, and some of it; no tool calls, no reasoning."""
    for message in new:
        if message["role"] != "user":
            return False
    for message in (*messages, reply, *new):
        content = message.get("content")
        if not isinstance(content, str) or not content.strip() or message["role"] == "tool":
            return False
        if message.get("tool_calls") or message.get("reasoning_content"):
            return False
    return True


def probes() -> Iterator[Extension]:
    """Extensions of conversations of many shapes, for which a window is shorter than the whole."""
    draw = random.Random(0)
    for number in range(20):
        conversation = _conversation(draw, exchanges=3 + number % 3, plain=number % 3 == 0)
        replies = [place for place, message in enumerate(conversation) if message["role"] == "assistant"]
        yield from (_cut(conversation, place, number) for place in draw.sample(replies[2:], min(2, len(replies[2:]))))
    yield _cut(_conversation(draw, exchanges=40, plain=True), 79, 0)


def _cut(conversation: list[Message], place: int, number: int) -> Extension:
    """The extension of what is before the reply at `place` by what is after it."""
    lead = [{"role": "system", "content": f"s{number}"}] if number % 2 else []
    late = [{"role": "system", "content": "late"}] if number % 8 == 7 else []
    end = place + 1
    while conversation[end]["role"] != "assistant" and end < len(conversation) - 1:
        end += 1
    new = conversation[place + 1 : end] or conversation[-1:]
    tools = [tool_named("f"), tool_named("g")] if number % 4 > 1 else []
    return [*lead, *conversation[:place]], conversation[place], [*late, *new], tools


def _conversation(draw: random.Random, *, exchanges: int, plain: bool) -> list[Message]:
    """`plain`: questions and answers in turn, without reasoning."""
    messages: list[Message] = []
    for number in range(exchanges):
        tagged = not plain and number > 1 and draw.random() < 0.15
        question = f"<tool_response>\nu{number}\n</tool_response>" if tagged else f"u{number}"
        messages.append({"role": "user", "content": question})
        for _ in range(0 if plain else draw.choice((0, 0, 1, 2))):
            calls = [_call(f"call{len(messages):04d}{index}") for index in range(draw.choice((1, 1, 2)))]
            messages.append({**_assistant(draw, draw.choice(("", "a")), plain), "tool_calls": calls})
            messages += [{"role": "tool", "tool_call_id": call["id"], "name": "f", "content": "t"} for call in calls]
        if plain or not messages[-1]["role"] == "tool" or draw.random() < 0.8:
            messages.append(_assistant(draw, f"a{number}", plain))
    return [*messages, {"role": "user", "content": "last"}]


def _assistant(draw: random.Random, content: str, plain: bool) -> Message:
    message = {"role": "assistant", "content": content}
    return message if plain or draw.random() < 0.5 else message | {"reasoning_content": f"r{draw.randrange(9)}"}


def _call(name: str) -> dict[str, Any]:
    return {"id": name, "type": "function", "function": {"name": "f", "arguments": '{"a": "b"}'}}
