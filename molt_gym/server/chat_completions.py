"""OpenAI's Chat Completions, `POST /v1/chat/completions`.

Invariants: a request that passes has valid messages in one spelling, so that a reply sent back equals the recorded one;
a stream, put together, is the reply; every refusal begins with the path of the field.

Refused, since a policy that samples freely cannot honour it: all of `REFUSED` unless it has a value given there, a
`tool_choice` that forces a call, `parallel_tool_calls: false` where tools are offered, tools other than functions, the
deprecated `functions` and `function_call` (write `tools` and `tool_calls`), audio, files, and images that are no data
URI (nothing is read for a request).

Without effect: `strict` of a tool, `detail` of an image, `reasoning_effort`, `verbosity`, `prediction`, `user`,
`metadata`, `store`, `service_tier`, `safety_identifier`, everything about prompt caches, and unknown fields.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec

from ..messages import Message, text_of
from . import parts
from .errors import WireError
from .exchange import Call, Completion, Event, Options, Parsed, Reply, Token
from .fields import Count, Field, Filled, Temperature, TopP, messages_of, read, refuse
from .memory import WireMemory
from .replies import openai_error, openai_logprob, pieces

_FREE = "the run decides how is sampled, leave it out"
_OLD = "write tools and tool_choice"
_NEUTRAL: dict[str, Any] = {
    "modalities": ["text"], "audio": None, "web_search_options": None, "moderation": None, "frequency_penalty": 0,
    "presence_penalty": 0, "logit_bias": {}, "top_logprobs": 0,
    # of vLLM
    "repetition_penalty": 1, "min_p": 0, "min_tokens": 0, "ignore_eos": False, "structured_outputs": None,
    "chat_template": None, "chat_template_kwargs": {}, "continue_final_message": False, "add_generation_prompt": True,
    "echo": False, "documents": [], "truncate_prompt_tokens": None, "prompt_logprobs": None, "stop_token_ids": [],
    "include_stop_str_in_output": False, "allowed_token_ids": None, "bad_words": [], "thinking_token_budget": None,
    "use_beam_search": False, "length_penalty": 1, "repetition_detection": None, "guided_json": None,
    "guided_regex": None, "guided_choice": None, "guided_grammar": None, "skip_special_tokens": True,
    "return_token_ids": False, "return_tokens_as_token_ids": False, "logits_processors": None,
    # of SGLang, llama.cpp and others
    "regex": None, "ebnf": None, "grammar": None, "json_schema": None, "repeat_penalty": 1, "typical_p": 1,
    "mirostat": 0,
}
REFUSED = {name: (value, _FREE) for name, value in _NEUTRAL.items()} | {
    "response_format": ({"type": "text"}, parts.FORMAT), "functions": ([], _OLD), "function_call": (None, _OLD)}
"""Fields that change what is sampled, shown or rendered, and the values besides null that leave it as it is."""


class _StreamOptions(msgspec.Struct, frozen=True):
    include_usage: bool | None = None


class _Request(msgspec.Struct):
    """What is read besides messages and tools."""

    model: str = ""
    n: Annotated[int, msgspec.Meta(ge=1, le=64)] = 1
    temperature: Temperature | None = None
    top_p: TopP | None = None
    top_k: Annotated[int, msgspec.Meta(ge=-1, le=2**63 - 1)] | None = None
    max_tokens: Count | None = None
    max_completion_tokens: Count | None = None
    stop: Filled | Annotated[list[Filled], msgspec.Meta(max_length=16)] = []
    seed: Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    logprobs: bool = False
    parallel_tool_calls: bool = True
    stream: bool = False
    stream_options: _StreamOptions = _StreamOptions()
    tool_choice: str | dict[str, Any] = "auto"


@dataclass(frozen=True)
class ParsedChat(Parsed):
    """A request, and whether its stream ends with the usage."""

    include_usage: bool = False


class ChatCompletions:
    """See `molt_gym.server.exchange.Wire`."""

    def parse(self, fields: Mapping[str, msgspec.Raw], memory: WireMemory) -> ParsedChat:
        """See `Wire.parse`."""
        refuse(fields, REFUSED)
        asked = read(fields, _Request)
        caps = [cap for cap in (asked.max_tokens, asked.max_completion_tokens) if cap is not None]
        options = Options(
            temperature=asked.temperature, top_p=asked.top_p, max_tokens=min(caps, default=None),
            top_k=None if asked.top_k is None else max(asked.top_k, 0), seed=asked.seed, logprobs=asked.logprobs,
            stop=(asked.stop,) if isinstance(asked.stop, str) else tuple(asked.stop))
        limit = None if asked.parallel_tool_calls else Field("parallel_tool_calls", False)
        choice = Field("tool_choice", asked.tool_choice)
        tools = parts.offered_tools(fields, memory, _tool, choice, ("required",), limit)
        call = Call(messages_of(fields, memory, _message), tools, options, asked.n, asked.model)
        return ParsedChat(call, asked.stream, bool(asked.stream_options.include_usage))

    def reply(self, parsed: ParsedChat, completion: Completion, memory: WireMemory) -> dict[str, Any]:
        """See `Wire.reply`."""
        choices = [
            {"index": index, "message": _reply_message(reply), "logprobs": _logprobs(reply.tokens),
             "finish_reason": reply.finish_reason}
            for index, reply in enumerate(completion.replies)]
        return _head("chat.completion", parsed, completion) | {"choices": choices, "usage": _usage(completion.replies)}

    def events(self, parsed: ParsedChat, completion: Completion, memory: WireMemory) -> Iterator[Event]:
        """See `Wire.events`. The choices follow each other; log-probabilities come with the finish reason."""
        head = _head("chat.completion.chunk", parsed, completion)
        no_usage = {"usage": None} if parsed.include_usage else {}
        for index, reply in enumerate(completion.replies):
            for delta in _deltas(reply):
                choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
                yield None, head | {"choices": [choice]} | no_usage
            end = {"index": index, "delta": {}, "logprobs": _logprobs(reply.tokens)}
            yield None, head | {"choices": [end | {"finish_reason": reply.finish_reason}]} | no_usage
        if parsed.include_usage:
            yield None, head | {"choices": [], "usage": _usage(completion.replies)}
        yield None, "[DONE]"

    error = staticmethod(openai_error)

    def error_events(self, error: WireError) -> Iterator[Event]:
        """See `Wire.error_events`."""
        yield None, self.error(error)


def _tool(tool: Field) -> dict[str, Any]:
    if tool.expect(dict).get("type", "function") != "function":
        raise tool["type"].unsupported("write tools of type 'function'")
    tool["function"].expect(dict, "{'name': ..., 'description': ..., 'parameters': ...}")
    return parts.function_of(tool["function"])


def _message(message: Field) -> list[Message]:
    role = message.expect(dict, "a message such as {'role': 'user', 'content': 'Hi'}").get("role")
    if role == "assistant":
        return [_assistant(message)]
    if role not in ("system", "developer", "user", "tool"):
        raise message["role"].invalid("system, developer, user, assistant or tool")
    if message.value.get("tool_calls"):
        raise message["tool_calls"].invalid(f"nothing; only an assistant message calls tools, this one is a {role}'s")
    call = {"tool_call_id": message.filled("tool_call_id")} if role == "tool" else {}
    return [{"role": role, "content": _content(message, role)} | call | _name(message)]


def _assistant(message: Field) -> Message:
    for name, instead in (("audio", "send its transcript as content"), ("function_call", "write tool_calls")):
        if message.value.get(name) is not None:
            raise message[name].unsupported(instead)
    content, refusal = _content(message, "assistant"), message.optional("refusal", str)
    if refusal and content:
        raise message["refusal"].invalid("either this or content")
    reasoning = message.optional("reasoning_content", str) or message.optional("reasoning", str)
    calls = [_call(call) for call in message["tool_calls"].each()] if message.optional("tool_calls", list) else []
    return parts.assistant(content or refusal or "", reasoning, calls) | _name(message)


def _call(call: Field) -> dict[str, Any]:
    kind, function = call["type"], call["function"]
    if kind.value not in (None, "function"):
        raise kind.unsupported("write calls of type 'function'")
    arguments = parts.arguments_of(function["arguments"])
    return parts.call_of(call.get("id", str), function.get("name", str), arguments if arguments.strip() else "{}")


def _name(message: Field) -> dict[str, str]:
    name = message.optional("name", str)
    return {"name": name} if name else {}


def _content(message: Field, role: str) -> str | list[dict[str, Any]]:
    return parts.content_of(message, lambda part: _part(part, role), optional=role in ("assistant", "tool"))


def _part(part: Field, role: str) -> dict[str, Any]:
    kind = part.kind()
    if kind == "text" or kind == "refusal" and role == "assistant":
        return parts.text_part(part, kind)
    if kind == "image_url" and role in ("user", "tool"):
        image = part["image_url"]
        return parts.image_part(image["url"] if isinstance(image.value, dict) else image)
    raise part["type"].unsupported(f"write text in a message of role {role}")


def _head(kind: str, parsed: ParsedChat, completion: Completion) -> dict[str, Any]:
    identifier = f"chatcmpl-{completion.id}"
    return {"id": identifier, "object": kind, "created": completion.created, "model": parsed.call.model}


def _reply_message(reply: Reply) -> dict[str, Any]:
    text, functions = text_of(reply.message), reply.message.get("tool_calls") or ()
    calls = [parts.call_of(call["id"], call["function"]["name"], call["function"]["arguments"]) for call in functions]
    content = None if calls and not text else text
    return parts.assistant(content, reply.message.get("reasoning_content"), calls) | {"refusal": None}


def _deltas(reply: Reply) -> Iterator[dict[str, Any]]:
    message = _reply_message(reply)
    yield {"role": "assistant", "content": None if message["content"] is None else "", "refusal": None}
    for name in ("reasoning_content", "content"):
        for piece in pieces(message.get(name) or ""):
            yield {name: piece}
    for index, call in enumerate(message.get("tool_calls", ())):
        function = call["function"]
        yield {"tool_calls": [{**call, "index": index, "function": {"name": function["name"], "arguments": ""}}]}
        for piece in pieces(function["arguments"]):
            yield {"tool_calls": [{"index": index, "function": {"arguments": piece}}]}


def _logprobs(tokens: Sequence[Token] | None) -> dict[str, Any] | None:
    if tokens is None:
        return None
    return {"content": [openai_logprob(token, token.data) for token in tokens], "refusal": None}


def _usage(replies: Sequence[Reply]) -> dict[str, Any]:
    """The prompt counts once, whatever the number of replies."""
    prompt, completion = replies[0].prompt_tokens, sum(reply.completion_tokens for reply in replies)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": replies[0].cached_tokens},
        "completion_tokens_details": {"reasoning_tokens": sum(reply.reasoning_tokens for reply in replies)},
    }
