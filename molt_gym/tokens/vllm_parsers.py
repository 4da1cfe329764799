"""vLLM's parsers of tool calls and reasoning in place of the built-in ones, by the names that vLLM gives them.

Loaded only for a renderer that is told to use one, for vLLM takes seconds to import. Invariant: parsing never raises;
where a parser does, or finds no call, the reply is content. What a parser leaves out of the message, such as text after
a call, is not in it; the recorded ids are what was sampled all the same.
"""

import functools
import json
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from ..errors import ConfigError
from ..messages import Message
from .parsing import Tools, message_of, numbered, parse_reply, split_reasoning

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

_PREFIX = "vllm:"


class VllmParsers:
    """Parses replies as `parse_reply` does. Threads may share one.

    Args:
        tool_parser: such as "vllm:hermes"; used where tools are offered. None: the built-in one.
        reasoning_parser: such as "vllm:qwen3". None: the built-in one.

    Raises:
        ConfigError: vLLM cannot be imported, or has no parser of this name.
    """

    def __init__(
        self, tokenizer: "PreTrainedTokenizerFast", tool_parser: str | None, reasoning_parser: str | None
    ) -> None:
        try:
            from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
            from vllm.reasoning import ReasoningParserManager
            from vllm.tool_parsers import ToolParserManager
        except ImportError as error:
            raise ConfigError(
                f"tool_parser {tool_parser!r}, reasoning_parser {reasoning_parser!r}: vLLM cannot be imported "
                f"({error}); install it, or leave them out"
            ) from error
        tools, reasoning = ToolParserManager, ReasoningParserManager
        self._tool_parser = _load("tool_parser", tool_parser, tools.get_tool_parser, tools.list_registered)
        load = functools.partial(_load, "reasoning_parser", reasoning_parser)
        reasoning_class = load(reasoning.get_reasoning_parser, reasoning.list_registered)
        self._reasoning = reasoning_class and reasoning_class(tokenizer)
        self._tokenizer, self._request = tokenizer, ChatCompletionRequest
        self._prepared = functools.lru_cache(maxsize=64)(self._prepare)
        self._lock = threading.Lock()

    def parse(
        self, text: str, messages: Sequence[Message] = (), *, thinking: bool = False, tools: Tools = ()
    ) -> Message:
        """The assistant message that `text` spells."""
        # Parsers keep what they found on themselves, so that two threads must not share one at a time.
        with self._lock:
            try:
                return self._read(text, messages, thinking, tools)
            except Exception:  # noqa: BLE001 - a parser may raise anything on what a model wrote
                return message_of(text, None, None)

    def _read(self, text: str, messages: Sequence[Message], thinking: bool, tools: Tools) -> Message:
        parser, request = self._prepared(json.dumps(list(tools)))
        if self._reasoning is None:
            reasoning, content = split_reasoning(text, thinking=thinking)
        else:
            reasoning, content = self._reasoning.extract_reasoning(text, request)
        content = content or ""
        if self._tool_parser is None:
            reply = parse_reply(content, messages, tools=tools)
            return message_of(reply["content"], reply.get("tool_calls"), reasoning)
        found = parser.extract_tool_calls(content, request) if parser is not None else None
        if found is None or not found.tools_called:
            return message_of(content, None, reasoning)
        calls = [(call.function.name, call.function.arguments) for call in found.tool_calls]
        return message_of((found.content or "").strip(), numbered(calls, messages), reasoning)

    def _prepare(self, tools: str) -> tuple[Any, Any]:
        request = self._request(messages=[], model="", tools=json.loads(tools) or None)
        parser = self._tool_parser(self._tokenizer, request.tools) if self._tool_parser and request.tools else None
        return parser, request


def _load(
    field: str, name: str | None, get: Callable[[str], type], registered: Callable[[], list[str]]
) -> Callable[..., Any] | None:
    if name is None:
        return None
    known = registered()
    if not name.startswith(_PREFIX) or name.removeprefix(_PREFIX) not in known:
        raise ConfigError(f"{field}: {name!r} is unknown; write {_PREFIX} and one of {', '.join(known)}")
    return get(name.removeprefix(_PREFIX))
