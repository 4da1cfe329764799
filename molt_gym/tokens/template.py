"""The chat template of a tokenizer as a function from a conversation to text.

What a template knows (reasoning, tool calls, tools) differs from model to model and is found out by trying it. What it
does not know is written as content in the usual spelling, so that no part of a conversation is dropped.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import TYPE_CHECKING, Any, Literal

from jinja2 import TemplateError

from ..errors import ConfigError
from ..images import KINDS, is_data_uri, source_of
from ..messages import ROLES, Message, arguments_of, text_of
from .markers import Markers, Shield, private_use
from .parsing import END_THINK, INLINE_CLOSE, THINK, join_reasoning, join_results, join_tool_call
from .window import QUESTION

if TYPE_CHECKING:
    from jinja2 import Template
    from transformers import PreTrainedTokenizerFast


class ChatTemplateError(ValueError):
    """The chat template refuses a conversation, for instance because of its order of roles."""


@dataclass(frozen=True)
class Style:
    """What a chat template turned out to know.

    reasoning, tools, developer: whether it has a place for them.
    thinks, opens_thinking: whether it deals with `<think>` blocks at all; whether the header of a reply opens one.
    calls: how it takes the arguments of tool calls; "inline": it drops tool calls, so they go into the content.
    call_content: the content of a message that only calls tools.
    calls_beside, calls_several: whether it writes calls beside other content, and takes several of one reply.
    call_close: what it puts between the end of the last argument and the end of turn; None: unknown.
    results: whether it writes the results of tools.
    nothing: the content of a reply that says nothing, as some templates refuse an empty one.
    image: what it writes for an image; "": it has no place for one, or the model sees nothing.
    """

    reasoning: bool = False
    tools: bool = False
    developer: bool = False
    thinks: bool = False
    opens_thinking: bool = False
    calls: Literal["mapping", "text", "inline"] = "inline"
    call_content: str | None = ""
    calls_beside: bool = True
    calls_several: bool = True
    call_close: str | None = None
    results: bool = True
    nothing: str = ""
    image: str = ""


class ChatTemplate:
    """Writes conversations as shielded text (see `Shield`).

    Raises:
        ConfigError: the tokenizer has no chat template, or one that cannot write a user message.
    """

    def __init__(
        self, tokenizer: "PreTrainedTokenizerFast", markers: Markers, template: str | None,
        variables: Mapping[str, Any], image_token: str = "",
    ) -> None:
        self.name = getattr(tokenizer, "name_or_path", "") or type(tokenizer).__name__
        if template is None and not tokenizer.chat_template:
            raise ConfigError(
                f"tokenizer {self.name}: has no chat template; take the instruct version of the model, put a "
                "chat_template.jinja into the folder, or pass chat_template"
            )
        self._tokenizer = tokenizer
        self._markers = markers
        self._template = template
        self.source = str(template or tokenizer.chat_template)
        self._variables = dict(variables)
        self._compiled = _compile(tokenizer, template)
        self._constants = {**tokenizer.special_tokens_map, **self._variables}
        self._reserved = private_use((self.source, self._variables))
        self.style = Style(developer="developer" in self.source, thinks=END_THINK in self.source)
        self.style = replace(self._probe(), image=self._probe_image(image_token))

    def shield(self, *data: Any) -> Shield:
        """A shield for a request that is made of `data`."""
        return Shield(self._markers, data, reserved=self._reserved)

    def prepare(self, messages: Sequence[Message], shield: Shield, *, first: int = 0) -> list[Message]:
        """Messages as the template wants them, shielded. `first`: the place of the first of them, for errors.

        Results of tools that it has no place for become user messages, those of one reply together.

        Raises:
            ValueError: an unknown role, or a part that is no text.
        """
        talk = [self._message(message, shield, f"messages[{first + i}]") for i, message in enumerate(messages)]
        if self.style.results:
            return talk
        turns = groupby(talk, lambda message: message["role"] == "tool")
        return [each for results, run in turns for each in ([join_results(run)] if results else run)]

    def write(self, prepared: Sequence[Message], tools: Sequence[Any], *, header: bool) -> str:
        """The text of prepared messages; `header`: with the header of the next reply."""
        talk, schemas = list(prepared), list(tools) or None
        try:
            if self._compiled is not None:
                return self._compiled.render(
                    messages=talk, tools=schemas, documents=None, add_generation_prompt=header, **self._constants
                )
            return self._tokenizer.apply_chat_template(
                talk,
                tools=schemas,
                chat_template=self._template,
                add_generation_prompt=header,
                tokenize=False,
                **self._variables,
            )
        except (TemplateError, TypeError, ValueError, LookupError, AttributeError) as error:
            roles = ", ".join(message["role"] for message in prepared)
            raise ChatTemplateError(f"chat template of {self.name}: refuses roles {roles}: {error}") from error

    def after_reply(
        self, sentinel: str, until: Sequence[Message], new: Sequence[Message], tools: Sequence[Any], *, calls: bool
    ) -> str | None:
        """What it writes after a reply made by `ending_in`: end of turn, new messages, header of the next reply.

        None where the end of the reply cannot be found. `calls`: the reply ends with a tool call.
        """
        _, found, after = self.write([*until, *new], tools, header=True).rpartition(sentinel)
        close = "" if not calls else self.style.call_close if until[-1].get("tool_calls") else INLINE_CLOSE
        return after[len(close) :] if found and close is not None and after.startswith(close) else None

    def _message(self, message: Message, shield: Shield, where: str) -> Message:
        role, content = message.get("role"), message.get("content")
        if role not in ROLES:
            raise ValueError(f"{where}.role: {role!r} is none of {', '.join(ROLES)}")
        for index, part in enumerate(content if isinstance(content, list) else ()):
            self._check_part(part, role, f"{where}.content[{index}]")
        known = ("role", "content", "reasoning_content", "tool_calls")
        rest = {key: shield.value(value) for key, value in message.items() if key not in known}
        if role == "assistant":
            return {"role": role, **self._reply(message, shield), **rest}
        if role == "developer" and not self.style.developer:
            role = "system"
        parts = content if isinstance(content, list) else [{"type": "text", "text": content or ""}]
        written = ""
        # Texts next to each other are shielded as one, as a marker may be spelled across them.
        for images, run in groupby(parts, lambda part: part["type"] in KINDS):
            texts = [self.style.image if images else part.get("text") or "" for part in run]
            written += "".join(texts) if images else shield.text("".join(texts))
        return {"role": role, "content": written, **rest}

    def _check_part(self, part: Mapping[str, Any], role: str, where: str) -> None:
        kind = part.get("type")
        if kind == "text":
            return
        if kind not in KINDS:
            raise ValueError(f"{where}.type: {kind!r}; only text and images can be written")
        if not self.style.image:
            raise ValueError(f"{where}.type: {kind!r}; only text parts can be written, as {self.name} or its chat "
                             "template takes no images; choose a vision-language model, such as a Qwen3-VL")
        if role not in ("user", "tool"):
            raise ValueError(f"{where}.type: {kind!r} in a message of role {role!r}; put images into user and tool "
                             "messages")
        if not is_data_uri(source := source_of(part)):
            raise ValueError(f"{where}: {str(source)[:60]!r} is no data URI of an image, and nothing is fetched; write "
                             "what molt_gym.image_part makes of a picture, the bytes or the path of a file")

    def _reply(self, message: Message, shield: Shield) -> Message:
        # Templates look for <think> and </think> in what a model wrote, so markers not flagged special stay.
        reply: Message = {"content": shield.text(text_of(message), special_only=True)}
        calls = message.get("tool_calls") or ()
        if self._inline(reply["content"], len(calls)):
            for call in calls:
                name, arguments = shield.text(call["function"]["name"]), json.dumps(_mapping(call), ensure_ascii=False)
                reply["content"] = join_tool_call(reply["content"], name, shield.text(arguments))
        elif calls:
            reply["tool_calls"] = [self._call(call, shield) for call in calls]
        reasoning = shield.text(message.get("reasoning_content") or "")
        if reasoning and self.style.reasoning:
            reply["reasoning_content"] = reasoning
        elif reasoning:
            reply["content"] = join_reasoning(reasoning, reply["content"])
        nothing = self.style.call_content if "tool_calls" in reply else self.style.nothing
        return reply | {"content": reply["content"] or nothing}

    def _inline(self, content: str, calls: int) -> bool:
        style = self.style
        beside, several = content and not style.calls_beside, calls > 1 and not style.calls_several
        return style.calls == "inline" or bool(beside or several)

    def _call(self, call: Mapping[str, Any], shield: Shield) -> dict[str, Any]:
        arguments: Any = arguments_of(call)
        if self.style.calls == "mapping":
            arguments = _mapping(call)
        elif not isinstance(arguments, str):
            arguments = json.dumps(arguments, ensure_ascii=False)
        function = {"name": shield.text(call["function"]["name"]), "arguments": shield.value(arguments)}
        return {"id": shield.value(call.get("id")), "type": "function", "function": function}

    def _probe(self) -> Style:
        shield = self.shield()
        mark = shield.sentinel()
        ask = self.prepare([QUESTION], shield)
        try:
            header = self.write([{"role": "user", "content": mark}], (), header=True)
        except ChatTemplateError as error:
            raise ConfigError(f"{error}; give a chat template that takes one user message") from error
        if mark not in header:
            raise ConfigError(f"tokenizer {self.name}: its chat template drops user messages; give another one")
        header = header.rpartition(mark)[2]
        style = replace(self.style, opens_thinking=header.rfind(THINK) > header.rfind(END_THINK))

        schema = {"name": mark, "description": mark, "parameters": {"type": "object", "properties": {}, "required": []}}
        tools = [{"type": "function", "function": schema}]
        style = replace(style, tools=self._shows(mark, style, ask, tools))
        thought = {"role": "assistant", "content": "x", "reasoning_content": mark}
        style = replace(style, reasoning=self._shows(mark, replace(style, reasoning=True), [QUESTION, thought]))
        said = self._attempt(style, [QUESTION, {"role": "assistant", "content": ""}])
        return self._probe_calls(replace(style, nothing="" if said else " "), mark)

    def _probe_calls(self, style: Style, mark: str) -> Style:
        end = self._attempt(style, [QUESTION, ending_in(mark, {})]).partition(mark)
        call = {"id": "call00000", "type": "function", "function": {"name": "f", "arguments": "{}"}}
        for calls, content in (("mapping", ""), ("mapping", None), ("text", ""), ("text", None), ("inline", "")):
            style = replace(style, calls=calls, call_content=content)
            text = self._attempt(style, [QUESTION, ending_in(mark, {"tool_calls": [call]})])
            if mark in text:
                break
        close = text.rpartition(mark)[2]
        known = mark in text and bool(end[1]) and close.endswith(end[2])
        style = replace(style, call_close=close.removesuffix(end[2]) if known else None)
        one, two = (ending_in(mark, {"tool_calls": calls}) for calls in ([call], [call, {**call, "id": "call00001"}]))
        style = replace(style, calls_beside=self._shows(mark, style, [QUESTION, {**one, "content": "x"}]),
                        calls_several=self._attempt(style, [QUESTION, two]) != "")
        called = {"role": "assistant", "content": "", "tool_calls": [call]}
        result = {"role": "tool", "tool_call_id": "call00000", "content": mark}
        return replace(style, results=self._shows(mark, style, [QUESTION, called, result]))

    def _probe_image(self, token: str) -> str:
        """What stands for each image of a message; nothing around it may depend on which of them it is."""
        if not token:
            return ""
        shield = self.shield()
        a, b, c = shield.sentinel(), shield.sentinel(), shield.sentinel()
        parts = [{"type": "text", "text": a}, {"type": "image"}, {"type": "text", "text": b}, {"type": "image"},
                 {"type": "text", "text": c}]
        try:
            text = self.write([{"role": "user", "content": parts}], (), header=False)
        except ChatTemplateError:
            return ""
        first, second = text.partition(a)[2].partition(b)[0], text.partition(b)[2].partition(c)[0]
        return first if first == second and first.count(token) == 1 else ""

    def _shows(self, mark: str, style: Style, messages: Sequence[Message], tools: Sequence[Any] = ()) -> bool:
        """Whether it writes a mark that is in what it is given, be it as an escape in JSON."""
        text = self._attempt(style, messages, tools)
        return mark in text or ascii(mark)[1:-1] in text

    def _attempt(self, style: Style, messages: Sequence[Message], tools: Sequence[Any] = ()) -> str:
        self.style = style
        try:
            return self.write(self.prepare(messages, self.shield(messages)), tools, header=False)
        except ChatTemplateError:
            return ""


def _compile(tokenizer: "PreTrainedTokenizerFast", template: str | None) -> "Template | None":
    """The template as `apply_chat_template` compiles it; None where it may do more than to run it."""
    from transformers import PreTrainedTokenizerBase

    try:
        from transformers.utils.chat_template_utils import _compile_jinja_template
    except ImportError:
        return None
    plain = type(tokenizer).apply_chat_template is PreTrainedTokenizerBase.apply_chat_template
    if not plain or isinstance(tokenizer.chat_template, dict):
        return None
    try:
        return _compile_jinja_template(template or tokenizer.chat_template)
    except TemplateError:
        return None


def ending_in(sentinel: str, reply: Message) -> Message:
    """A reply of the same kind, content or tool calls, whose text or last argument is the sentinel."""
    calls = reply.get("tool_calls")
    if not calls:
        return {"role": "assistant", "content": sentinel}
    arguments = json.dumps({sentinel: sentinel}, ensure_ascii=False)
    last = {**calls[-1], "function": {**calls[-1]["function"], "arguments": arguments}}
    return {"role": "assistant", "content": "", "tool_calls": [*calls[:-1], last]}


def _mapping(call: Mapping[str, Any]) -> dict[str, Any]:
    arguments = arguments_of(call)
    return {"arguments": arguments} if isinstance(arguments, str) else arguments
