"""OpenAI's Chat Completions, `POST /v1/chat/completions`.

Invariants: a request that passes has valid messages in one spelling, so that a reply sent back equals the recorded one;
a stream, put together, is the reply; every refusal begins with the path of the field.

Refused, since a policy that samples freely cannot honour it: all of `NEUTRAL` unless it has a value given there, a
`tool_choice` that forces a call, `parallel_tool_calls: false` where tools are offered, tools other than functions, the
deprecated `functions` (write `tools`), audio, files, and images that are no data URI (nothing is read for a request).

Without effect: `strict` of a tool, `detail` of an image, `reasoning_effort`, `verbosity`, `prediction`, `user`,
`metadata`, `store`, `service_tier`, `safety_identifier`, everything about prompt caches, and unknown fields.
"""

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from reprlib import repr as show
from typing import Any

import msgspec

from ..messages import Message, text_of
from .errors import Kind, WireError, invalid, unsupported
from .exchange import Call, Completion, Event, Memory, Options, Parsed, Reply, Token
from .json import decode, encode

NEUTRAL: dict[str, tuple[Any, ...]] = {
    "response_format": ({"type": "text"},),
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "repetition_penalty": (1,),
    "logit_bias": ({},),
    "top_logprobs": (0,),
    "min_p": (0,),
    "min_tokens": (0,),
    "ignore_eos": (False,),
    "modalities": (["text"],),
    "audio": (),
    "functions": ([],),
    "function_call": (),
    "web_search_options": (),
    "moderation": (),
    "structured_outputs": (),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "continue_final_message": (False,),
    "add_generation_prompt": (True,),
    "echo": (False,),
}
"""Fields that change what is sampled, shown or rendered, and the values besides null that leave it as it is."""

MAX_CHOICES = 64
MAX_STOPS = 16
MAX_DEPTH = 64
"""How deep a tool's schema or a call's arguments may be nested."""
MAX_PIECES = 64
"""Deltas that one text is streamed in, at most."""

_ITEMS = msgspec.json.Decoder(list[msgspec.Raw])
_IMAGE = re.compile(r"data:image/[\w.+-]+;base64,(?=.)", re.IGNORECASE)
_FUNCTION_FIELDS = (("description", str, "string"), ("parameters", dict, "JSON schema"), ("strict", bool, "boolean"))
_CHECKED = frozenset({dict, list, float})
_INT64 = 2**63
_ERROR_TYPES: dict[Kind, str] = {"rate_limit": "requests", "unavailable": "server_error", "internal": "server_error"}
_ERROR_CODES: dict[Kind, str] = {"authentication": "invalid_api_key", "rate_limit": "rate_limit_exceeded"}


@dataclass(frozen=True)
class ParsedChat(Parsed):
    """A request, and whether its stream ends with the usage."""

    include_usage: bool = False


class ChatCompletions:
    """See `molt_gym.server.exchange.Wire`."""

    def parse(self, fields: Mapping[str, msgspec.Raw], memory: Memory) -> ParsedChat:
        """See `Wire.parse`."""
        for name in fields:
            if name in NEUTRAL:
                _check_neutral(name, _read(fields, name))
        model = _read(fields, "model")
        if not isinstance(model, str | None):
            raise invalid("model", f"{show(model)} is no string")
        n = _integer(fields, "n", 1, MAX_CHOICES)
        call = Call(_messages(fields, memory), _offered_tools(fields, memory), _options(fields), n or 1, model or "")
        return ParsedChat(call, bool(_flag(fields, "stream")), _include_usage(fields))

    def reply(self, parsed: ParsedChat, completion: Completion, memory: Memory) -> dict[str, Any]:
        """See `Wire.reply`."""
        choices = [
            {
                "index": index,
                "message": _reply_message(reply),
                "logprobs": _logprobs(reply.tokens),
                "finish_reason": reply.finish_reason,
            }
            for index, reply in enumerate(completion.replies)
        ]
        return _head("chat.completion", parsed, completion) | {"choices": choices, "usage": _usage(completion.replies)}

    def events(self, parsed: ParsedChat, completion: Completion, memory: Memory) -> Iterator[Event]:
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

    def error(self, error: WireError) -> dict[str, Any]:
        """See `Wire.error`."""
        kind = _ERROR_TYPES.get(error.kind, "invalid_request_error")
        code = error.code or _ERROR_CODES.get(error.kind)
        return {"error": {"message": error.message, "type": kind, "param": error.param, "code": code}}

    def error_events(self, error: WireError) -> Iterator[Event]:
        """See `Wire.error_events`."""
        yield None, self.error(error)


def _read(fields: Mapping[str, msgspec.Raw], name: str) -> Any:
    """The value of a field; None where it is absent."""
    raw = fields.get(name)
    if raw is None:
        return None
    try:
        return decode(bytes(raw))
    except WireError as error:
        raise invalid(name, error.message) from None


def _check_neutral(name: str, value: Any) -> None:
    same = any(value == neutral and isinstance(value, bool) == isinstance(neutral, bool) for neutral in NEUTRAL[name])
    if value is not None and not same:
        instead = "write tools and tool_choice instead" if name.startswith("function") else "leave it out"
        raise unsupported(name, f"{show(value)} cannot be honoured, since the run decides how is sampled; {instead}")


def _flag(fields: Mapping[str, msgspec.Raw], name: str) -> bool | None:
    value = _read(fields, name)
    if not isinstance(value, bool | None):
        raise invalid(name, f"{show(value)}; write true or false")
    return value


def _integer(fields: Mapping[str, msgspec.Raw], name: str, low: int, high: int) -> int | None:
    value = _read(fields, name)
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high):
        raise invalid(name, f"{show(value)}; write an integer from {low} to {high}")
    return value


def _number(fields: Mapping[str, msgspec.Raw], name: str, high: int, *, zero: bool) -> float | None:
    """A number from 0, which must not be 0 itself unless `zero`, to `high`."""
    value = _read(fields, name)
    if value is None:
        return None
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not 0 <= value <= high or not value and not zero:
        raise invalid(name, f"{show(value)}; write a number {'from' if zero else 'above'} 0, at most {high}")
    return float(value)


def _options(fields: Mapping[str, msgspec.Raw]) -> Options:
    caps = [_integer(fields, name, 1, _INT64 - 1) for name in ("max_tokens", "max_completion_tokens")]
    top_k = _integer(fields, "top_k", -1, _INT64 - 1)
    return Options(
        temperature=_number(fields, "temperature", 2, zero=True),
        top_p=_number(fields, "top_p", 1, zero=False),
        top_k=None if top_k is None else max(top_k, 0),
        max_tokens=min((cap for cap in caps if cap is not None), default=None),
        stop=_stops(_read(fields, "stop")),
        seed=_integer(fields, "seed", -_INT64, _INT64 - 1),
        logprobs=bool(_flag(fields, "logprobs")),
    )


def _stops(value: Any) -> tuple[str, ...]:
    stops = [value] if isinstance(value, str) else [] if value is None else value
    texts = isinstance(stops, list) and all(isinstance(stop, str) and stop for stop in stops)
    if not texts or len(stops) > MAX_STOPS:
        raise invalid("stop", f"{show(value)}; write a string or a list of at most {MAX_STOPS}, none of them empty")
    return tuple(stops)


def _include_usage(fields: Mapping[str, msgspec.Raw]) -> bool:
    options = _read(fields, "stream_options")
    if not isinstance(options, dict | None):
        raise invalid("stream_options", f"{show(options)}; write an object such as {{'include_usage': true}}")
    include = (options or {}).get("include_usage")
    if not isinstance(include, bool | None):
        raise invalid("stream_options.include_usage", f"{show(include)}; write true or false")
    return bool(include)


def _offered_tools(fields: Mapping[str, msgspec.Raw], memory: Memory) -> list[dict[str, Any]]:
    schemas = memory.intern_tools(bytes(fields.get("tools", b"null")), _schemas)
    choice = _read(fields, "tool_choice")
    if choice == "required" or isinstance(choice, dict):
        raise unsupported("tool_choice", f"{show(choice)} cannot be forced on the policy; write 'auto' or 'none'")
    if choice not in (None, "auto", "none"):
        raise invalid("tool_choice", f"{show(choice)}; write 'auto' or 'none'")
    if choice == "none":
        return []
    if _flag(fields, "parallel_tool_calls") is False and schemas:
        raise unsupported("parallel_tool_calls", "false cannot be forced on the policy; leave it out")
    return schemas


def _schemas(tools: Any) -> list[dict[str, Any]]:
    if not isinstance(tools, list | None):
        raise invalid("tools", f"{show(tools)}; write a list of tools")
    return [_tool(tool, f"tools[{index}]") for index, tool in enumerate(tools or ())]


def _tool(tool: Any, where: str) -> dict[str, Any]:
    if not isinstance(tool, dict):
        raise invalid(where, f"{show(tool)}; write {{'type': 'function', 'function': {{'name': ...}}}}")
    kind, function = tool.get("type", "function"), tool.get("function")
    if kind != "function":
        raise unsupported(f"{where}.type", f"{show(kind)}; only tools of type 'function' can be called here")
    where = f"{where}.function"
    if not isinstance(function, dict):
        raise invalid(where, f"{show(function)}; write {{'name': ..., 'description': ..., 'parameters': ...}}")
    _filled(function, "name", where, "the name of the function")
    for name, form, what in _FUNCTION_FIELDS:
        if not isinstance(function.get(name), form | None):
            raise invalid(f"{where}.{name}", f"{show(function[name])} is no {what}")
    _check_json(function, where)
    schema = {name: value for name, value in function.items() if value is not None and name != "strict"}
    if not schema.get("parameters"):
        schema["parameters"] = {"type": "object", "properties": {}}
    return {"type": "function", "function": schema}


def _check_json(value: dict[str, Any], where: str) -> None:
    """Refuses what cannot be written again: numbers that overflow, and nesting that exhausts the stack."""
    level: list[Any] = [value]
    for _ in range(MAX_DEPTH):
        items = [item for v in level for item in (v.values() if type(v) is dict else v) if type(item) in _CHECKED]
        if any(math.isinf(item) for item in items if type(item) is float):
            raise invalid(where, "holds a number that is too large; write it as a string")
        level = [item for item in items if type(item) is not float]
        if not level:
            return
    raise invalid(where, f"is nested deeper than {MAX_DEPTH} levels; flatten it")


def _messages(fields: Mapping[str, msgspec.Raw], memory: Memory) -> list[Message]:
    try:
        items = _ITEMS.decode(fields.get("messages", b"null"))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        value = _read(fields, "messages")
        if not isinstance(value, list):
            raise invalid("messages", "is no list; write a list of at least one message") from None
        items = [encode(item) for item in value]
    if not items:
        raise invalid("messages", "is empty; write a list of at least one message")
    messages: list[Message] = []
    for index, item in enumerate(items):
        try:
            messages += memory.intern(bytes(item), _message)
        except WireError as error:
            where, separator = f"messages[{index}]", "" if error.param is not None else ": "
            raise WireError(
                error.kind, f"{where}{separator}{error.message}", param=where + (error.param or ""), code=error.code
            ) from None
    return messages


def _message(value: Any) -> list[Message]:
    """One message in the neutral form; the paths of errors begin within the message."""
    if not isinstance(value, dict):
        raise invalid("", f"{show(value)} is no message; write an object such as {{'role': 'user', 'content': 'Hi'}}")
    role = value.get("role")
    if role == "assistant":
        return [_assistant(value)]
    if value.get("tool_calls"):
        raise invalid(".tool_calls", f"only an assistant message calls tools, this one is of role {show(role)}")
    if role == "function":
        name = _filled(value, "name", "", "the name of the function that returned this")
        return [{"role": "tool", "content": _content(value, "tool"), "tool_call_id": _legacy_id(name), "name": name}]
    if role == "tool":
        call = _filled(value, "tool_call_id", "", "the id of the tool call that this answers")
        return [{"role": "tool", "content": _content(value, role), "tool_call_id": call} | _name(value)]
    if role in ("system", "developer", "user"):
        return [{"role": role, "content": _content(value, role)} | _name(value)]
    raise invalid(".role", f"{show(role)} is none of system, developer, user, assistant, tool")


def _assistant(value: dict[str, Any]) -> Message:
    if value.get("audio") is not None:
        raise unsupported(".audio", "audio is not available; send its transcript as content")
    message = {"role": "assistant", "content": _content(value, "assistant")} | _name(value)
    refusal = _optional_text(value, "refusal")
    if refusal and message["content"]:
        raise invalid(".refusal", "this message has content too; write one of them")
    message["content"] = message["content"] or refusal
    reasoning = [_optional_text(value, name) for name in ("reasoning_content", "reasoning")]
    if any(reasoning):
        message["reasoning_content"] = reasoning[0] or reasoning[1]
    calls, legacy = value.get("tool_calls"), value.get("function_call")
    if not isinstance(calls, list | None):
        raise invalid(".tool_calls", f"{show(calls)}; write a list of tool calls")
    if calls:
        message["tool_calls"] = [_call(call, f".tool_calls[{index}]") for index, call in enumerate(calls)]
    elif legacy is not None:
        function = _function(legacy, ".function_call")
        message["tool_calls"] = [{"id": _legacy_id(function["name"]), "type": "function", "function": function}]
    return message


def _legacy_id(name: str) -> str:
    """Calls of the time before tools had no id: a function's name said what a result belongs to."""
    return f"call_{name}"


def _call(call: Any, where: str) -> dict[str, Any]:
    if not isinstance(call, dict):
        raise invalid(where, f"{show(call)}; write {{'id': ..., 'type': 'function', 'function': ...}}")
    if call.get("type") not in (None, "function"):
        raise unsupported(f"{where}.type", f"{show(call['type'])}; only calls of type 'function' exist here")
    identifier = _filled(call, "id", where, "the id that the call came with")
    return {"id": identifier, "type": "function", "function": _function(call.get("function"), f"{where}.function")}


def _function(function: Any, where: str) -> dict[str, Any]:
    if not isinstance(function, dict):
        raise invalid(where, f"{show(function)}; write {{'name': ..., 'arguments': '{{}}'}}")
    name, arguments = _filled(function, "name", where, "the name of the function"), function.get("arguments")
    if isinstance(arguments, dict):
        _check_json(arguments, f"{where}.arguments")
        arguments = json.dumps(arguments, ensure_ascii=False)
    if not isinstance(arguments, str | None):
        raise invalid(f"{where}.arguments", f"{show(arguments)}; write a JSON object as a string")
    return {"name": name, "arguments": arguments if arguments and not arguments.isspace() else "{}"}


def _filled(value: dict[str, Any], name: str, where: str, what: str) -> str:
    text = value.get(name)
    if not isinstance(text, str) or not text:
        raise invalid(f"{where}.{name}", f"{show(text) if name in value else 'is missing'}; write {what}")
    return text


def _optional_text(value: dict[str, Any], name: str) -> str:
    text = value.get(name)
    if not isinstance(text, str | None):
        raise invalid(f".{name}", f"{show(text)} is no string")
    return text or ""


def _name(value: dict[str, Any]) -> dict[str, str]:
    name = _optional_text(value, "name")
    return {"name": name} if name else {}


def _content(value: dict[str, Any], role: str) -> str | list[dict[str, Any]]:
    content = value.get("content")
    if content is None and role in ("assistant", "tool"):
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise invalid(".content", f"{show(content)}; write a string, '' for no text, or a list of parts")
    parts = [_part(part, f".content[{index}]", role) for index, part in enumerate(content)]
    return parts if len(parts) > 1 or parts and parts[0]["type"] != "text" else text_of({"content": parts})


def _part(part: Any, where: str, role: str) -> dict[str, Any]:
    kind = part.get("type") if isinstance(part, dict) else None
    if not isinstance(kind, str):
        raise invalid(where, f"{show(part)}; write a part such as {{'type': 'text', 'text': 'Hi'}}")
    if kind == "text" or kind == "refusal" and role == "assistant":
        if not isinstance(part.get(kind), str):
            raise invalid(f"{where}.{kind}", f"{show(part.get(kind))} is no string")
        return {"type": "text", "text": part[kind]}
    if kind == "image_url" and role in ("user", "tool"):
        return {"type": "image_url", "image_url": {"url": _image(part.get("image_url"), f"{where}.image_url")}}
    raise unsupported(f"{where}.type", f"{show(kind)} is not available in a message of role {role}; write text")


def _image(image: Any, where: str) -> str:
    if isinstance(image, dict):
        image, where = image.get("url"), f"{where}.url"
    if not isinstance(image, str):
        raise invalid(where, f"{show(image)}; write a data URI, 'data:image/png;base64,...'")
    if image[:5].lower() != "data:":
        raise unsupported(where, f"{show(image)} is not fetched; write a data URI, 'data:image/png;base64,...'")
    if not _IMAGE.match(image):
        raise invalid(where, f"{show(image)} is no image in base64; write 'data:image/png;base64,...'")
    return image


def _head(kind: str, parsed: ParsedChat, completion: Completion) -> dict[str, Any]:
    return {
        "id": f"chatcmpl-{completion.id}",
        "object": kind,
        "created": completion.created,
        "model": parsed.call.model,
    }


def _reply_message(reply: Reply) -> dict[str, Any]:
    text, calls = text_of(reply.message), reply.message.get("tool_calls")
    message = {"role": "assistant", "content": None if calls and not text else text, "refusal": None}
    if reply.message.get("reasoning_content"):
        message["reasoning_content"] = reply.message["reasoning_content"]
    if calls:
        functions = [{name: call["function"][name] for name in ("name", "arguments")} for call in calls]
        message["tool_calls"] = [
            {"id": call["id"], "type": "function", "function": function}
            for call, function in zip(calls, functions, strict=True)
        ]
    return message


def _deltas(reply: Reply) -> Iterator[dict[str, Any]]:
    message = _reply_message(reply)
    yield {"role": "assistant", "content": None if message["content"] is None else "", "refusal": None}
    for name in ("reasoning_content", "content"):
        for piece in _pieces(message.get(name) or ""):
            yield {name: piece}
    for index, call in enumerate(message.get("tool_calls", ())):
        function = call["function"]
        yield {"tool_calls": [{**call, "index": index, "function": {"name": function["name"], "arguments": ""}}]}
        for piece in _pieces(function["arguments"]):
            yield {"tool_calls": [{"index": index, "function": {"arguments": piece}}]}


def _pieces(text: str) -> Iterator[str]:
    """A text in pieces; two surrogates that would be one character stay together."""
    size = max(16, math.ceil(len(text) / MAX_PIECES))
    start = 0
    while start < len(text):
        end = start + size
        while "\ud800" <= text[end - 1 : end] <= "\udbff":
            end += 1
        yield text[start:end]
        start = end


def _logprobs(tokens: Sequence[Token] | None) -> dict[str, Any] | None:
    if tokens is None:
        return None
    content = [
        {
            "token": token.text,
            "logprob": token.logprob,
            "bytes": None if token.data is None else list(token.data),
            "top_logprobs": [],
        }
        for token in tokens
    ]
    return {"content": content, "refusal": None}


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
