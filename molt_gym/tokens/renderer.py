"""Chat template to ids and back.

Invariants: a prompt holds exactly the control ids that the template writes, whatever the text of its messages; ids that
the policy sampled are never encoded again; what is appended to them was checked to be what the template itself puts
there.
"""

import functools
import json
import math
import warnings
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ..errors import ConfigError
from ..images import ImageSpan, images_of
from ..messages import InternedTools, Message, digest_of_tools, text_of
from .markers import Markers, Shield, private_use
from .parsing import END_THINK, parse_reply
from .template import ChatTemplate, ChatTemplateError, ending_in
from .window import QUESTION, is_plain, probes, tool_named, window

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

    from .vision import Vision

Tools = Sequence[Mapping[str, Any]]

_KNOWN_TOOLS = 256
_ODD_TEXT = "Compute  1234 + 5.6\n\n\tdéjà vu 😀 (hello), don't!"
_ODD_MARKUP = " <b>&amp; \\\"{'a': [1]}\" </b> {{ x }} {% y %} # `z`"


class Renderer:
    """Renders conversations with the chat template of a tokenizer, and parses replies. Threads may share one.

    Args:
        tokenizer: a fast Hugging Face tokenizer.
        chat_template: a Jinja template, or the name of one of the tokenizer's, to use instead of its own.
        template_kwargs: variables for the template, such as `{"enable_thinking": False}`.
        tool_parser, reasoning_parser: vLLM's parsers to use instead of the built-in ones, such as "vllm:hermes" and
            "vllm:qwen3".
        vision: how the model sees, if it does; without it, images are refused.

    Raises:
        ConfigError: the tokenizer is a slow one, has no chat template, has one that cannot write a user message, or
            encodes text next to control tokens in a way of its own; vLLM or its parser is missing.
    """

    stop_token_ids: tuple[int, ...]
    """Ids that end a reply: of the tokenizer, its generation configuration, and the template's end of turn."""

    def __init__(
        self,
        tokenizer: "PreTrainedTokenizerFast",
        *,
        chat_template: str | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
        tool_parser: str | None = None,
        reasoning_parser: str | None = None,
        vision: "Vision | None" = None,
    ) -> None:
        if not getattr(tokenizer, "is_fast", False):
            raise ConfigError(
                f"tokenizer {getattr(tokenizer, 'name_or_path', tokenizer)}: is not a fast tokenizer; load it with "
                "AutoTokenizer from a folder that holds a tokenizer.json"
            )
        self._markers = Markers(tokenizer.backend_tokenizer)
        self.vision = vision
        self._template = ChatTemplate(tokenizer, self._markers, chat_template, template_kwargs or {},
                                      tokenizer.convert_ids_to_tokens(vision.token_id) if vision else "")
        self._parse = parse_reply
        if tool_parser is not None or reasoning_parser is not None:
            from .vllm_parsers import VllmParsers

            self._parse = VllmParsers(tokenizer, tool_parser, reasoning_parser).parse
        self._easy_tools: dict[bytes, bool] = {}
        self._check_encoding(tokenizer)
        self.stop_token_ids = tuple(dict.fromkeys([*_configured_stops(tokenizer), *self._ends_of_turn()]))

    @property
    def sees(self) -> bool:
        """Whether images can be written."""
        return bool(self._template.style.image)

    def render(
        self,
        messages: Sequence[Message],
        tools: Tools = (),
        *,
        add_generation_prompt: bool = True,
        limit: float = math.inf,
    ) -> list[int]:
        """Ids of a conversation, with the header of the next reply if `add_generation_prompt`.

        Args:
            limit: how many ids fit. Text far too long for that is refused without being encoded; ids that are returned
                may still be more.

        Raises:
            PromptTooLong: the text cannot fit.
            ValueError: there are no messages, or one has an unknown role, or a part that cannot be written.
            ChatTemplateError: the template refuses the conversation.
        """
        if not messages:
            raise ValueError("messages: there are none; give at least one")
        if tools and not self._template.style.tools:
            warnings.warn(f"chat template of {self._template.name}: drops tools; describe them in text", stacklevel=2)
        easy = self._easy(tools)
        shield = self._template.shield(messages, () if easy else tools)
        prepared = self._template.prepare(messages, shield)
        schemas = tools if easy else shield.value(tools)
        text = self._template.write(prepared, schemas, header=add_generation_prompt)
        return self._expand(self._markers.encode(text, shield, limit=limit), messages)

    def image_spans(self, ids: Sequence[int], messages: Sequence[Message], start: int = 0) -> tuple[ImageSpan, ...]:
        """Where the images of messages are in the ids that `render` or `extend` made of them; `start`: of the first."""
        spans: list[ImageSpan] = []
        place = -1
        for uri in images_of(messages):
            place = ids.index(self.vision.token_id, place + 1)
            spans.append(ImageSpan(start + place, self.vision.count(uri), uri))
            place += spans[-1].count - 1
        return tuple(spans)

    def _expand(self, ids: list[int], messages: Sequence[Message], first: int = 0) -> list[int]:
        """Each image's one token as many; `first`: the place of the first message, for errors."""
        if not self._template.style.image or self.vision is None:
            return ids
        counts = [self.vision.count(uri, f"messages[{first + number}]")
                  for number, message in enumerate(messages) for uri in images_of([message])]
        if (written := ids.count(self.vision.token_id)) != len(counts):
            raise ChatTemplateError(f"chat template of {self._template.name}: writes {written} images where the "
                                    f"messages have {len(counts)}")
        rest = iter(counts)
        return [i for token in ids for i in ([token] * next(rest) if token == self.vision.token_id else [token])]

    def extend(
        self,
        messages: Sequence[Message],
        reply: Message,
        new_messages: Sequence[Message],
        tools: Tools,
        sampled_ids: Sequence[int],
        *,
        keep: bool = False,
        limit: float = math.inf,
    ) -> list[int] | None:
        """Context to append to `sampled_ids`, which were sampled as `reply` to `messages`.

        It is what the template puts after the reply, then the new messages, then the header of the next reply. A stop
        token that was sampled and that the template has in the same place is not written twice.

        Args:
            keep: go on from the sampled ids also where the template would now write the history differently (without
                the reasoning of earlier turns, say).
            limit: how many ids fit, as in `render`.

        Returns:
            Ids, or None where the template would write the history differently.

        Raises:
            PromptTooLong: the text cannot fit.
        """
        shorter = window(messages, reply, new_messages, self._template.source)
        if not tools and is_plain((shorter or messages)[-4:], reply, new_messages) and self._keeps_plain:
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
        plain = brief or self._easy(tools)
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
        return self._expand(self._encode_tail(tail, shield, sampled_ids, limit), new_messages, place + 1)

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
        ids = self._markers.encode(tail, shield, at_start=False, limit=limit)
        ended = bool(sampled_ids) and sampled_ids[-1] in self.stop_token_ids and ids[:1] == [sampled_ids[-1]]
        return ids[1:] if ended else ids

    def parse(
        self, ids: Sequence[int], messages: Sequence[Message] = (), tools: Tools = (), *, stop: Sequence[str] = ()
    ) -> Message:
        """The assistant message that sampled ids spell. Never raises on what a model wrote.

        Where the tokenizer has ids for `<think>`, `<tool_call>` and the like, only these count: text that spells them
        is content.

        Args:
            messages: what the reply answers; the ids of its tool calls go on from theirs.
            tools: schemas that say which arguments are strings.
            stop: stop strings; the message ends before the first of them.
        """
        if len(ids) and ids[-1] in self.stop_token_ids:
            ids = ids[:-1]
        segments = list(self._markers.segments(ids))
        raw = "".join(text for _, text in segments)
        room = min((raw.index(string) for string in stop if string and string in raw), default=len(raw))
        shield = self._template.shield(raw)
        text = ""
        for control, segment in segments:
            segment = segment[:room]
            room -= len(segment)
            text += segment if control else shield.whole(segment)
        thinking = self._template.style.opens_thinking
        return shield.lift(self._parse(text, messages, thinking=thinking, tools=tools))

    def reasoning_length(self, ids: Sequence[int]) -> int:
        """How many of the ids of a reply with reasoning belong to it: those up to the end of its `<think>` block."""
        marker = self._markers.ids.get(END_THINK)
        if marker is not None:
            return list(ids).index(marker) + 1 if marker in ids else len(ids)
        return bisect_left(range(len(ids)), True, key=lambda n: END_THINK in self.decode(ids[:n]))

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids, control tokens spelled out; bytes that are no UTF-8 become U+FFFD."""
        return "".join(text for _, text in self._markers.segments(ids))

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
    def _keeps_plain(self) -> bool:
        """Whether it never writes questions and answers anew, if there is no reasoning and there are no tools."""
        if not self.writes_locally or self._template.style.thinks:
            return False
        for messages, reply, new, _ in probes():
            for said in (reply, {**reply, "content": _ODD_TEXT + _ODD_MARKUP}):
                if is_plain(messages, said, new) and self._writes([*messages, said, *new], ()):
                    whole = self._extend(messages, said, new, (), ())
                    if whole is None or whole != self._extend_plain(said, new, (), math.inf, len(messages)):
                        return False
        return True

    def warm_up(self) -> None:
        """Find out now what is otherwise found out when a conversation first goes on: 20 to 130 ms."""
        _ = self._keeps_plain

    def _writes(self, messages: Sequence[Message], tools: Tools) -> bool:
        try:
            self._template.write(self._template.prepare(messages, self._template.shield(messages)), tools, header=True)
        except ChatTemplateError:
            return False
        return True

    def _easy(self, tools: Tools) -> bool:
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

    def _closes_block(self, ids: Sequence[int]) -> bool:
        marker = self._markers.ids.get(END_THINK)
        return END_THINK in self.decode(ids) if marker is None else marker in ids

    def _check_encoding(self, tokenizer: "PreTrainedTokenizerFast") -> None:
        user = {"role": "user", "content": _ODD_TEXT}
        reply = {"role": "assistant", "content": "hello"}
        system = {"role": "system", "content": _ODD_TEXT}
        for messages in ([user], [user, reply, user], [system, user]):
            shield = self._template.shield(messages)
            try:
                text = self._template.write(self._template.prepare(messages, shield), (), header=True)
            except ChatTemplateError:
                continue
            ids = self._markers.encode(text, shield)
            expected = tokenizer.backend_tokenizer.encode(shield.lift(text), add_special_tokens=False).ids
            if ids != expected:
                place = next((i for i, (a, b) in enumerate(zip(ids, expected, strict=False)) if a != b), len(ids))
                raise ConfigError(
                    f"tokenizer {self._template.name}: encodes text next to control tokens in a way of its own (id "
                    f"{expected[place : place + 1]} where its parts give {ids[place : place + 1]}, at {place}); "
                    "take another tokenizer file of this model"
                )

    def _ends_of_turn(self) -> Iterator[int]:
        for new in (QUESTION, {"role": "tool", "tool_call_id": "call00000", "content": "?"}):
            shield = self._template.shield()
            sentinel = shield.sentinel()
            *until, after = self._template.prepare([QUESTION, ending_in(sentinel, {}), new], shield)
            try:
                tail = self._template.after_reply(sentinel, until, [after], (), calls=False)
            except ChatTemplateError:
                continue
            first = self._markers.encode(tail or "", shield, at_start=False)[:1]
            yield from (i for i in first if i in self._markers.ids.values())


def _configured_stops(tokenizer: "PreTrainedTokenizerFast") -> Iterator[int]:
    from transformers.utils import cached_file

    if tokenizer.eos_token_id is not None:
        yield tokenizer.eos_token_id
    try:
        path = cached_file(tokenizer.name_or_path, "generation_config.json", local_files_only=True)
    except OSError:
        return
    with open(path, encoding="utf-8") as file:
        ids = json.load(file).get("eos_token_id")
    yield from ids if isinstance(ids, list) else [] if ids is None else [ids]
