"""Chat template to ids and back.

Invariants: a prompt holds exactly the control ids that the template writes, whatever the text of its messages; ids that
the policy sampled are never encoded again; what is appended to them was checked to be what the template itself puts
there.
"""

import json
import math
import warnings
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ..errors import ConfigError
from ..images import ImageSpan, images_of
from ..messages import Message
from .extension import ODD_TEXT, Extension, Tools
from .markers import Markers
from .parsing import END_THINK, THINK, parse_reply
from .template import ChatTemplate, ChatTemplateError, ending_in
from .window import QUESTION

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

    from .vision import Vision


# Ids that hold `<think>` and the white space behind it, however they are cut.
_HEADER_END = 16


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
        self._check_encoding(tokenizer)
        configured = tuple(_configured_stops(tokenizer))
        self.stop_token_ids = tuple(dict.fromkeys([*configured, *self._ends_of_turn(configured)]))
        self._extension = Extension(self._template, self._markers, self.stop_token_ids, vision)

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
        easy = self._extension.easy(tools)
        shield = self._template.shield(messages, () if easy else tools)
        prepared = self._template.prepare(messages, shield)
        schemas = tools if easy else shield.value(tools)
        text = self._template.write(prepared, schemas, header=add_generation_prompt)
        return self._extension.expand(self._markers.encode(text, shield, limit=limit), messages)

    def image_spans(self, ids: Sequence[int], messages: Sequence[Message], start: int = 0) -> tuple[ImageSpan, ...]:
        """Where the images of messages are in the ids that `render` or `extend` made of them; `start`: of the first."""
        spans: list[ImageSpan] = []
        place = -1
        for uri in images_of(messages):
            place = ids.index(self.vision.token_id, place + 1)
            spans.append(ImageSpan(start + place, self.vision.count(uri), uri))
            place += spans[-1].count - 1
        return tuple(spans)

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
        return self._extension.extend(messages, reply, new_messages, tools, sampled_ids, keep, limit)

    def parse(
        self, ids: Sequence[int], messages: Sequence[Message] = (), tools: Tools = (), *, stop: Sequence[str] = (),
        prompt: Sequence[int] | None = None,
    ) -> Message:
        """The assistant message that sampled ids spell. Never raises on what a model wrote.

        Where the tokenizer has ids for `<think>`, `<tool_call>` and the like, only these count: text that spells them
        is content.

        Args:
            messages: what the reply answers; the ids of its tool calls go on from theirs.
            tools: that may be called, with schemas that say which arguments are strings.
            stop: stop strings; the message ends before the first of them.
            prompt: the ids that it was sampled after, which tell whether they open a `<think>` block; None: as they do
                after a user message.
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
        thinking = self._template.style.opens_thinking if prompt is None else self._opens_thinking(prompt)
        return shield.lift(self._parse(text, messages, thinking=thinking, tools=tools))

    def length_to_stop(self, ids: Sequence[int], stop: Sequence[str]) -> int | None:
        """How many ids there are up to the one that completes the first stop string; None where they spell none."""

        def completed(length: int) -> bool:
            text = self.decode(ids[:length])
            return any(string in text for string in stop if string)

        if not stop or not completed(len(ids)):
            return None
        return bisect_left(range(len(ids)), True, key=completed)

    def _opens_thinking(self, prompt: Sequence[int]) -> bool:
        ends = [(control, text) for control, text in self._markers.segments(prompt[-_HEADER_END:]) if text.strip()]
        control, text = ends[-1] if ends else (False, "")
        return text.rstrip().endswith(THINK) and (control or THINK not in self._markers.ids)

    def reasoning_length(self, ids: Sequence[int]) -> int:
        """How many of the ids of a reply with reasoning belong to it: those up to the end of its `<think>` block."""
        marker = self._markers.ids.get(END_THINK)
        if marker is not None:
            return list(ids).index(marker) + 1 if marker in ids else len(ids)
        return bisect_left(range(len(ids)), True, key=lambda n: END_THINK in self.decode(ids[:n]))

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids, control tokens spelled out; bytes that are no UTF-8 become U+FFFD."""
        return "".join(text for _, text in self._markers.segments(ids))

    def warm_up(self) -> None:
        """Find out now what is otherwise found out when a conversation first goes on: 20 to 130 ms."""
        _ = self._extension.keeps_plain

    def _check_encoding(self, tokenizer: "PreTrainedTokenizerFast") -> None:
        user = {"role": "user", "content": ODD_TEXT}
        reply = {"role": "assistant", "content": "hello"}
        system = {"role": "system", "content": ODD_TEXT}
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

    def _ends_of_turn(self, configured: Sequence[int]) -> Iterator[int]:
        for new in ([], [QUESTION], [{"role": "tool", "tool_call_id": "call00000", "content": "?"}]):
            shield = self._template.shield()
            sentinel = shield.sentinel()
            try:
                talk = self._template.prepare([QUESTION, ending_in(sentinel, {}), *new], shield)
                text = self._template.write(talk, (), header=bool(new))
            except ChatTemplateError:
                continue
            end, _ = self._markers.leading(text.rpartition(sentinel)[2]) or (None, 0)
            if not new and end in configured:
                # What such a template writes between turns may also stand in one, as between reasoning and answer.
                return
            if end in self._markers.ids.values():
                yield end


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
