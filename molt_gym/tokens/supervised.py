"""Conversations that somebody else wrote, as rows to train on.

Invariants: a reply stands in exactly the context in which the policy would be asked for it, header of the reply
included; what is trained is what the template writes after that header, up to and including the stop token, if the
template puts one there that really ends a reply. Where the reply begins and ends is found by rendering: no markers of
any template are known here, and text that spells one is only text.
"""

import os
import re
from collections.abc import Mapping, Sequence
from typing import Any

from ..messages import Message, text_of
from .generation import Generation
from .graph import TokenGraph
from .markers import Shield
from .parsing import END_THINK, THINK, join_reasoning, split_reasoning
from .renderer import Renderer
from .template import ChatTemplate, ending_in
from .trajectory import Row

__all__ = ["supervised_rows"]

Tools = Sequence[Mapping[str, Any]]


def supervised_rows(renderer: Renderer, messages: Sequence[Message], tools: Tools = ()) -> list[Row]:
    """Rows in which every assistant message is trained once; log-probabilities and versions of these are 0.

    More than one row where the template writes earlier replies differently once the conversation goes on, as those do
    that drop reasoning: each reply is then trained in the context that it really has.

    Raises:
        ValueError: the first message is a reply, or a reply cannot be written whole; the message is named.
        ChatTemplateError: the template refuses the conversation.
    """
    graph = TokenGraph(renderer)
    for place, message in enumerate(messages):
        if message.get("role") != "assistant":
            continue
        if not place:
            raise ValueError("messages[0].role: 'assistant' answers nothing; begin with a user or system message")
        ids = _reply_ids(renderer, messages[:place], message, tools)
        if ids:
            generation = Generation(ids, [0.0] * len(ids), [0] * len(ids), "stop")
            graph.commit(graph.prepare(messages[:place], tools), generation, message)
    return graph.rows()


def _reply_ids(renderer: Renderer, messages: Sequence[Message], reply: Message, tools: Tools) -> list[int]:
    template, markers = renderer._template, renderer._markers
    if template.style.thinks or template.style.opens_thinking:
        reply = _with_reasoning_apart(reply)
    shield = template.shield(messages, reply, tools)
    # Whatever a template puts around a reply is there around this character, too.
    sentinel, schemas, place = shield.sentinel(), shield.value(tools), len(messages)
    before = template.prepare(messages, shield)
    body = _body(template, before, template.prepare([reply], shield, first=place), schemas, reply, shield, place)
    ids = markers.encode(body, shield, at_start=False)
    stops = set(renderer.stop_token_ids).intersection(markers.ids.values())
    if ends := [position for position, i in enumerate(ids) if i in stops]:
        return ids[: ends[-1] + 1]
    end = template.prepare([ending_in(sentinel, reply)], shield, first=place)
    _, found, after = template.write([*before, *end], schemas, header=False).rpartition(sentinel)
    if found:
        body = body.removesuffix(after.removeprefix(template.style.call_close or "" if reply.get("tool_calls") else ""))
    return markers.encode(body, shield, at_start=False)


def _body(
    template: ChatTemplate, before: list[Message], said: list[Message], tools: Sequence[Any], reply: Message,
    shield: Shield, place: int,
) -> str:
    """What the template writes after the header of the reply, as shielded text."""
    header = template.write(before, tools, header=True)
    text = template.write([*before, *said], tools, header=False)
    reasoning = shield.text(reply.get("reasoning_content") or "")
    shared = len(os.path.commonprefix([header, text]))
    rest, body = header[shared:], text[shared:]
    if rest.strip() == THINK and END_THINK not in body:
        # The header opens a block that the template does not write into a conversation.
        rest, body = "", join_reasoning(reasoning, body).removeprefix(rest)
    content = shield.text(text_of(reply), special_only=True)
    parts = [part.strip() for said in (reasoning, content) for part in re.split(f"{THINK}|{END_THINK}", said)]
    if rest or not all(part in body for part in parts):
        lost = "changes or drops a part of this reply" if not rest else f"begins this reply without {rest!r}"
        raise ValueError(f"messages[{place}]: the chat template of {template.name} {lost}, so that it is not what the "
                         "model would have to say; give another chat template, or leave the row out")
    return body


def _with_reasoning_apart(reply: Message) -> Message:
    """Content that begins with a block of reasoning as two fields."""
    content = text_of(reply)
    if reply.get("reasoning_content") or not content.lstrip().startswith(THINK) or END_THINK not in content:
        return reply
    reasoning, content = split_reasoning(content, thinking=False)
    return {**reply, "reasoning_content": reasoning, "content": content}
