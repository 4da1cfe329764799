"""What the chat template writes after what was sampled, with no more of the conversation than it looks at.

Invariants: ids that the policy sampled are never encoded again; what is appended to them was checked to be what the
template itself puts there.
"""

import functools
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ..images import images_of
from ..messages import InternedTools, Message, digest_of_tools, text_of
from .markers import Markers, Shield, private_use
from .parsing import END_THINK
from .template import ChatTemplate, ChatTemplateError, ending_in
from .window import QUESTION, is_plain, probes, tool_named, window

if TYPE_CHECKING:
    from .vision import Vision

Tools = Sequence[Mapping[str, Any]]

ODD_TEXT = "Compute  1234 + 5.6\n\n\tdéjà vu 😀 (hello), don't!"
"""Space, accents and marks that tokenizers treat in ways of their own."""
_ODD_MARKUP = " <b>&amp; \\\"{'a': [1]}\" </b> {{ x }} {% y %} # `z`"
_KNOWN_TOOLS = 256


class Extension:
    """`Renderer.extend`, and what it shares with `Renderer.render`.

    Args:
        stop_token_ids: end replies.
        vision: how the model sees, if it does.
    """

    def __init__(self, template: ChatTemplate, markers: Markers, stop_token_ids: Sequence[int],
                 vision: "Vision | None") -> None:
        self._template, self._markers = template, markers
        self._stop_token_ids, self._vision = stop_token_ids, vision
        self._easy_tools: dict[bytes, bool] = {}

    def extend(
        self,
        messages: Sequence[Message],
        reply: Message,
        new_messages: Sequence[Message],
        tools: Tools,
        sampled_ids: Sequence[int],
        keep: bool,
        limit: float,
    ) -> list[int] | None:
        """See `Renderer.extend`."""
        shorter = window(messages, reply, new_messages, self._template.source)
        if not tools and is_plain((shorter or messages)[-4:], reply, new_messages) and self.keeps_plain:
            if (ids := self._extend_plain(reply, new_messages, sampled_ids, limit, len(messages))) is not None:
                return ids
        if shorter is None or not self.writes_locally:
            return self._extend(messages, reply, new_messages, tools, sampled_ids, keep, limit, len(messages))
        return self._extend(shorter, reply, new_messages, tools, sampled_ids, keep, limit, len(messages), brief=True)

    def _extend(
        self,
        messages: Sequence[Message],
        reply: Message,
        new_messages: Sequence[Message],
        tools: Tools,
        sampled_ids: Sequence[int],
        keep: bool = False,
        limit: float = math.inf,
        place: int = 0,
        *,
        brief: bool = False,
    ) -> list[int] | None:
        """`extend` by what the template does with `messages`.

        place: of the reply in the conversation, for errors. brief: one small tool stands in for all, unless what the
        template appends shows tools.
        """
        template = self._template
        plain = brief or self.easy(tools)
        shield = template.shield(messages, reply, new_messages, () if plain else tools)
        sentinel, mark = shield.sentinel(), shield.sentinel()
        schemas = [tool_named(mark)] if brief and tools else tools if plain else shield.value(tools)
        calls = bool(reply.get("tool_calls"))
        before = template.prepare(messages, shield)
        new = template.prepare(new_messages, shield, first=place + 1)
        end = template.prepare([ending_in(sentinel, reply)], shield, first=place)
        try:
            tail = template.after_reply(sentinel, before + end, new, schemas, calls=calls)
            if tail is None or not self._appends(before, reply, new, schemas, tail, sampled_ids, shield):
                if not keep:
                    return None
                ask = template.prepare([QUESTION], shield)
                tail = template.after_reply(sentinel, ask + end, new, schemas, calls=calls)
        except ChatTemplateError:
            return None
        if tail is None:
            return None
        if brief and (mark in tail or ascii(mark)[1:-1] in tail):
            return self._extend(messages, reply, new_messages, tools, sampled_ids, keep, limit, place)
        return self.expand(self._encode_tail(tail, shield, sampled_ids, limit), new_messages, place + 1)

    def _extend_plain(
        self, reply: Message, new_messages: Sequence[Message], sampled_ids: Sequence[int], limit: float, place: int
    ) -> list[int] | None:
        """`extend` where nothing can be written anew, so that the end of the conversation tells all."""
        shield = self._template.shield(new_messages)
        sentinel = shield.sentinel()
        new = self._template.prepare(new_messages, shield, first=place + 1)
        try:
            tail = self._template.after_reply(sentinel, [QUESTION, ending_in(sentinel, reply)], new, (), calls=False)
        except ChatTemplateError:
            return None
        return None if tail is None else self._encode_tail(tail, shield, sampled_ids, limit)

    def _encode_tail(self, tail: str, shield: Shield, sampled_ids: Sequence[int], limit: float) -> list[int]:
        marker, end = self._markers.leading(tail) or (None, 0)
        ended = bool(sampled_ids) and sampled_ids[-1] in self._stop_token_ids and marker == sampled_ids[-1]
        return self._markers.encode(tail[end:] if ended else tail, shield, after=sampled_ids, limit=limit)

    def _appends(
        self,
        before: list[Message],
        reply: Message,
        new: list[Message],
        tools: Sequence[Any],
        tail: str,
        sampled_ids: Sequence[int],
        shield: Shield,
    ) -> bool:
        """Whether the template, given the whole conversation, writes the prompt, all of the reply, and the tail."""
        prompt = self._template.write(before, tools, header=True)
        written = self._template.prepare([reply], shield, first=len(before))
        text = self._template.write([*before, *written, *new], tools, header=True)
        if len(text) < len(prompt) + len(tail) or not (text.startswith(prompt) and text.endswith(tail)):
            return False
        middle = text[len(prompt) : len(text) - len(tail)]
        reasoning = shield.text(reply.get("reasoning_content") or "")
        content = shield.text(text_of(reply), special_only=True)
        if self._template.style.thinks:
            # Only the markers show whether a block of no reasoning was dropped or put in by the template.
            block = bool(reasoning) or self._closes_block(sampled_ids)
            if block != (END_THINK in middle):
                return False
        return reasoning.strip() in middle and content.strip() in middle

    @functools.cached_property
    def writes_locally(self) -> bool:
        """Whether a window on a conversation shows what the template does with the whole."""
        for messages, reply, new, tools in probes():
            tools = tools if self._template.style.tools else ()
            shorter = window(messages, reply, new, self._template.source)
            if shorter is None:
                continue
            whole = self._extend(messages, reply, new, tools, ())
            part = self._extend(shorter, reply, new, tools, (), brief=True)
            if whole != part and self._writes(messages, tools):
                return False
        return True

    @functools.cached_property
    def keeps_plain(self) -> bool:
        """Whether it never writes questions and answers anew, if there is no reasoning and there are no tools."""
        if not self.writes_locally or self._template.style.thinks:
            return False
        for messages, reply, new, _ in probes():
            for said in (reply, {**reply, "content": ODD_TEXT + _ODD_MARKUP}):
                if is_plain(messages, said, new) and self._writes([*messages, said, *new], ()):
                    whole = self._extend(messages, said, new, (), ())
                    if whole is None or whole != self._extend_plain(said, new, (), math.inf, len(messages)):
                        return False
        return True

    def _writes(self, messages: Sequence[Message], tools: Tools) -> bool:
        try:
            self._template.write(self._template.prepare(messages, self._template.shield(messages)), tools, header=True)
        except ChatTemplateError:
            return False
        return True

    def easy(self, tools: Tools) -> bool:
        """Whether there is nothing to shield in the tools."""
        if type(tools) is not InternedTools:
            return not tools
        digest = digest_of_tools(tools)
        if (easy := self._easy_tools.get(digest)) is None:
            easy = not private_use(tools) and self._template.shield(tools).value(tools) == tools
            if len(self._easy_tools) >= _KNOWN_TOOLS:
                self._easy_tools.clear()
            self._easy_tools[digest] = easy
        return easy

    def expand(self, ids: list[int], messages: Sequence[Message], first: int = 0) -> list[int]:
        """Each image's one token as many; `first`: the place of the first message, for errors."""
        if not self._template.style.image or self._vision is None:
            return ids
        counts = [self._vision.count(uri, f"messages[{first + number}]")
                  for number, message in enumerate(messages) for uri in images_of([message])]
        if (written := ids.count(self._vision.token_id)) != len(counts):
            raise ChatTemplateError(f"chat template of {self._template.name}: writes {written} images where the "
                                    f"messages have {len(counts)}")
        rest = iter(counts)
        return [i for token in ids for i in ([token] * next(rest) if token == self._vision.token_id else [token])]

    def _closes_block(self, ids: Sequence[int]) -> bool:
        marker = self._markers.ids.get(END_THINK)
        if marker is not None:
            return marker in ids
        return END_THINK in "".join(text for _, text in self._markers.segments(ids))
