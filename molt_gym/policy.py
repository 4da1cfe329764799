"""Policies: whatever answers a conversation with an assistant message.

Anything with `async def reply(messages, tools)` is one. `as_policy` makes one of a function, so that a script, a person
or a client of some API can play an env; `EndpointPolicy` is a model behind an OpenAI-compatible API.
"""

import asyncio
import copy
import inspect
import json
import os
import secrets
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable
from weakref import WeakKeyDictionary

from .messages import Conversation, Message
from .spaces import AssistantMessageSpace
from .threads import call_in_thread

if TYPE_CHECKING:
    from openai import AsyncOpenAI

__all__ = ["EndpointPolicy", "Policy", "PolicyFunction", "as_policy"]

_FAILED = ("error", "abort")
"""Finish reasons of replies that some APIs, such as vLLM's, gave up."""

PolicyFunction = Callable[[Conversation], Message | str | Awaitable[Message | str]]


@runtime_checkable
class Policy(Protocol):
    """Answers conversations; several at a time may be waiting for their reply."""

    async def reply(self, messages: list[Message], tools: list[dict[str, Any]]) -> Message:
        """The assistant message that answers `messages`, which may call one of `tools`."""
        ...


def as_policy(policy: Policy | PolicyFunction) -> Policy:
    """A policy made of `policy`.

    Args:
        policy: a `Policy` is returned as it is. A function is called with the observation `{"messages": [...], "tools":
            [...]}` and returns an assistant message or its text. An async function runs on the event loop; a plain one
            in a thread of its own for each call, so it may block, and is called by several rollouts at a time.

    Raises:
        TypeError: it is neither.
    """
    if inspect.isclass(policy):
        raise TypeError(f"policy: {policy.__name__} is a class; pass an instance, {policy.__name__}(...)")
    reply = getattr(policy, "reply", None)
    if isinstance(policy, Policy) and inspect.iscoroutinefunction(reply):
        return policy
    if callable(reply):
        return _FunctionPolicy(policy, lambda observation: reply(observation["messages"], observation["tools"]))
    if callable(policy):
        return _FunctionPolicy(policy, policy)
    raise TypeError(
        f"policy: {policy!r:.200} answers nothing; pass a function from an observation to a message or text, or an "
        "object with `async def reply(messages, tools)`"
    )


class EndpointMessage(dict[str, Any]):
    """An assistant message, and what its endpoint told of it: its tokens (0: not told), and whether length cut it."""

    completion_tokens: int = 0
    cut: bool = False


class EndpointPolicy:
    """A model behind an OpenAI-compatible API, asked through the stock SDK, which sends requests that failed again.

    Args:
        url: base URL, such as "http://localhost:8000/v1"; the key is read from OPENAI_API_KEY.
        model: its name there.
        concurrency: most requests at a time.
        timeout: seconds for one request.
        retries: how often a request is sent again that failed in a way that may pass.
        top_k: sent only if it is not 0, as not every API knows it.
        session: the secret of a session, where `url` is that of a loopback server; it is asked past any proxy.
    """

    def __init__(
        self, url: str, model: str, *, concurrency: int = 64, timeout: float = 570.0, retries: int = 4,
        max_tokens: int = 512, temperature: float = 1.0, top_p: float = 1.0, top_k: int = 0,
        session: str | None = None,
    ) -> None:
        self._settings = {"base_url": url, "api_key": session or os.environ.get("OPENAI_API_KEY") or "none",
                          "timeout": timeout, "max_retries": retries}
        self._direct, self._concurrency = session is not None, concurrency
        # Connections and locks are of use on the event loop alone that made them.
        self._on_loop: WeakKeyDictionary[Any, tuple[AsyncOpenAI, asyncio.Semaphore]] = WeakKeyDictionary()
        self._options: dict[str, Any] = {
            "model": model, "max_tokens": max_tokens, "temperature": temperature, "top_p": top_p,
            "extra_body": {"top_k": top_k} if top_k else None}

    async def reply(
        self, messages: list[Message], tools: list[dict[str, Any]], *, seed: int | None = None
    ) -> Message:
        """The first choice of a chat completion, as an `EndpointMessage`.

        Raises:
            OpenAIError: of the SDK.
            RuntimeError: the endpoint tells of a failure in its answer, or answers with something else.
        """
        more: dict[str, Any] = ({"tools": tools} if tools else {}) | ({} if seed is None else {"seed": seed})
        client, turn = self._connected()
        async with turn:
            completion = await self._asked(client, messages=messages, **more)
        # What is no JSON, such as a page of a proxy, comes as text.
        told = {} if isinstance(completion, str) else completion.to_dict(warnings=False)
        choice = (told.get("choices") or [{}])[0]
        if not choice.get("message") or choice.get("finish_reason") in _FAILED:
            raise RuntimeError(f"the endpoint answered without a reply: {str(told or completion)[:200]}")
        message = EndpointMessage(_answered(choice["message"]))
        message.completion_tokens = (told.get("usage") or {}).get("completion_tokens") or 0
        message.cut = choice.get("finish_reason") == "length"
        return message

    def _connected(self) -> "tuple[AsyncOpenAI, asyncio.Semaphore]":
        from openai import AsyncOpenAI, DefaultAsyncHttpxClient

        loop = asyncio.get_running_loop()
        if loop not in self._on_loop:
            tls = self._settings["base_url"].startswith("https:")
            direct = DefaultAsyncHttpxClient(trust_env=False, verify=tls) if self._direct else None
            client = AsyncOpenAI(**self._settings, http_client=direct)
            self._on_loop[loop] = client, asyncio.Semaphore(self._concurrency)
        return self._on_loop[loop]

    async def _asked(self, client: "AsyncOpenAI", **request: Any) -> Any:
        from openai import BadRequestError

        while True:
            options = self._options
            try:
                return await client.chat.completions.create(**options, **request)
            except BadRequestError as error:
                spelled = _respelled(options, error.param) if error.code == "unsupported_parameter" else None
                if spelled is None:
                    raise
                self._options = spelled

    async def aclose(self) -> None:
        """Close its connections on the running event loop."""
        client, _ = self._connected()
        await client.close()


def _respelled(options: dict[str, Any], unsupported: str | None) -> dict[str, Any] | None:
    """Options that say the same without a parameter that a model, such as OpenAI's reasoning ones, has not got."""
    rest = {name: value for name, value in options.items() if name != unsupported}
    if unsupported == "max_tokens" and unsupported in options:
        return {**rest, "max_completion_tokens": options["max_tokens"]}
    return rest if unsupported in ("temperature", "top_p") and options.get(unsupported) == 1 else None


def _answered(message: dict[str, Any]) -> Message:
    """What an API's assistant message says, without what only its own kind of message has."""
    reply: Message = {"role": "assistant", "content": message.get("content") or message.get("refusal") or ""}
    for name in ("reasoning", "reasoning_content"):
        if message.get(name) and isinstance(message[name], str):
            reply["reasoning_content"] = message[name]
    if calls := [_called(call) for call in message.get("tool_calls") or () if call.get("type") in (None, "function")]:
        reply["tool_calls"] = calls
    return reply


def _called(call: Mapping[str, Any]) -> dict[str, Any]:
    """A tool call in OpenAI's own spelling, of which APIs leave out the id, or write arguments as an object."""
    name, arguments = call["function"]["name"], call["function"].get("arguments")
    text = arguments if isinstance(arguments, str) else json.dumps(arguments or {})
    identifier = call.get("id") or f"call_{secrets.token_hex(8)}"
    return {"id": identifier, "type": "function", "function": {"name": name, "arguments": text}}


class _FunctionPolicy:
    def __init__(self, source: Any, function: Callable[[Conversation], Any]) -> None:
        self._name = getattr(source, "__qualname__", None) or type(source).__name__
        self._function = function
        self._is_async = inspect.iscoroutinefunction(function)

    async def reply(self, messages: list[Message], tools: list[dict[str, Any]]) -> Message:
        observation = copy.deepcopy({"messages": messages, "tools": tools})
        if self._is_async:
            answer = self._function(observation)
        else:
            call = partial(self._function, observation)
            answer = await asyncio.wrap_future(call_in_thread(call, f"policy {self._name}"))
        return self._message(await answer if inspect.isawaitable(answer) else answer)

    def _message(self, answer: Any) -> Message:
        if isinstance(answer, str):
            return {"role": "assistant", "content": answer}
        if not isinstance(answer, dict):
            raise TypeError(f"policy {self._name}: returned {answer!r:.200}; return an assistant message or its text")
        try:
            AssistantMessageSpace().validate(answer)
        except ValueError as error:
            raise ValueError(f"policy {self._name}: returned no assistant message; {error}") from None
        return copy.deepcopy(answer)
