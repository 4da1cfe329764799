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

    One whose `weight` is 0 is context alone, as in the data that OpenAI fine-tunes on.

    More than one row where the template writes earlier replies differently once the conversation goes on, as those do
    that drop reasoning: each reply is then trained in the context that it really has.

    Raises:
        ValueError: the first message is a reply, a reply cannot be written whole, or a weight is neither 0 nor 1; the
            message is named.
        ChatTemplateError: the template refuses the conversation.
    """
    graph = TokenGraph(renderer)
    for place, message in enumerate(messages):
        if message.get("role") != "assistant":
            continue
        if (weight := message.get("weight", 1)) not in (0, 1):
            raise ValueError(f"messages[{place}].weight: got {weight!r}; write 0 for a reply that is context, or 1")
        if not weight:
            continue
        if not place:
            raise ValueError("messages[0].role: 'assistant' answers nothing; begin with a user or system message")
        prompt = graph.prepare(messages[:place], tools)
        ids = _reply_ids(renderer, messages[:place], message, tools, prompt.ids)
        if ids:
            graph.commit(prompt, Generation(ids, [0.0] * len(ids), [0] * len(ids), "stop"), message)
    return graph.rows()


def _reply_ids(
    renderer: Renderer, messages: Sequence[Message], reply: Message, tools: Tools, prompt: Sequence[int]
) -> list[int]:
    template, markers = renderer._template, renderer._markers
    if template.style.thinks or template.style.opens_thinking:
        reply = _with_reasoning_apart(reply)
    shield = template.shield(messages, reply, tools)
    # Whatever a template puts around a reply is there around this character, too.
    sentinel, schemas, place = shield.sentinel(), shield.value(tools), len(messages)
    before = template.prepare(messages, shield)
    body = _body(template, before, template.prepare([reply], shield, first=place), schemas, reply, shield, place)
    end = template.prepare([ending_in(sentinel, reply)], shield, first=place)
    _, found, after = template.write([*before, *end], schemas, header=False).rpartition(sentinel)
    after = after.removeprefix(template.style.call_close or "" if reply.get("tool_calls") else "")
    if found and body.endswith(after):
        # What a template writes at the end of a conversation, such as a second end token, is nothing that is sampled.
        _, ending = markers.leading(after) or (None, 0)
        return markers.encode(body.removesuffix(after) + after[:ending], shield, after=prompt)
    ids, stops = markers.encode(body, shield, after=prompt), set(renderer.stop_token_ids)
    return ids[: max((place for place, i in enumerate(ids, start=1) if i in stops), default=len(ids))]


def _body(
    template: ChatTemplate, before: list[Message], said: list[Message], tools: Sequence[Any], reply: Message,
    shield: Shield, place: int,
) -> str:
    """What the template writes after the header of the reply, as shielded text."""
    header = template.write(before, tools, header=True)
    text = template.write([*before, *said], tools, header=False)
    reasoning = shield.text(reply.get("reasoning_content") or "")
    outside, opened = header, ""
    if not text.startswith(header) and header.rstrip().endswith(THINK):
        # The header opens a block that the template writes otherwise, or not at all, into a conversation.
        outside, opened, _ = header.rpartition(THINK)
    body = text.removeprefix(outside)
    if opened and body.startswith(THINK):
        body = body.removeprefix(THINK)
    elif opened and END_THINK not in body:
        body = join_reasoning(reasoning, body.lstrip("\n")).removeprefix(header.removeprefix(outside))
    content = shield.text(text_of(reply), special_only=True)
    parts = [part.strip() for said in (reasoning, content) for part in re.split(f"{THINK}|{END_THINK}", said)]
    parts += [shield.text(call["function"]["name"]) for call in reply.get("tool_calls") or ()]
    begins = text.startswith(outside)
    # Calls that are spelled out here, though the template has a form of its own, are not what the model would write.
    native = template.style.calls == "inline" or bool(said[-1].get("tool_calls")) == bool(reply.get("tool_calls"))
    if not begins or not native or not all(part in body for part in parts):
        missing = header[len(os.path.commonprefix([header, text])) :]
        lost = "changes or drops a part of this reply" if begins else f"begins this reply without {missing!r}"
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
