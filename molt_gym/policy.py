"""Policies: whatever answers a conversation with an assistant message.

Anything with `async def reply(messages, tools)` is one. `as_policy` makes one of a function, so that a script, a person
or a client of some API can play an env; `EndpointPolicy` is a model behind an OpenAI-compatible API.
"""

import asyncio
import copy
import inspect
import os
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, Protocol, runtime_checkable

from .messages import Conversation, Message
from .spaces import AssistantMessageSpace
from .threads import call_in_thread

__all__ = ["EndpointPolicy", "Policy", "PolicyFunction", "as_policy"]

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
        from openai import AsyncOpenAI, DefaultAsyncHttpxClient

        key = session or os.environ.get("OPENAI_API_KEY") or "none"
        client = DefaultAsyncHttpxClient(trust_env=False, verify=url.startswith("https:")) if session else None
        self._client = AsyncOpenAI(base_url=url, api_key=key, timeout=timeout, max_retries=retries, http_client=client)
        self._turn = asyncio.Semaphore(concurrency)
        self._options: dict[str, Any] = {
            "model": model, "max_tokens": max_tokens, "temperature": temperature, "top_p": top_p,
            "extra_body": {"top_k": top_k} if top_k else None}

    async def reply(
        self, messages: list[Message], tools: list[dict[str, Any]], *, seed: int | None = None
    ) -> Message:
        """The first choice of a chat completion, as an `EndpointMessage`; raises the SDK's errors."""
        more: dict[str, Any] = ({"tools": tools} if tools else {}) | ({} if seed is None else {"seed": seed})
        async with self._turn:
            completion = await self._client.chat.completions.create(messages=messages, **self._options, **more)
        if not completion.choices:
            raise RuntimeError(f"the endpoint answered without a choice: {completion.to_json()[:200]}")
        choice, usage = completion.choices[0], completion.usage
        message = EndpointMessage(_answered(choice.message.to_dict()))
        message.completion_tokens = usage.completion_tokens or 0 if usage else 0
        message.cut = choice.finish_reason == "length"
        return message

    async def aclose(self) -> None:
        """Close its connections."""
        await self._client.close()


def _answered(message: dict[str, Any]) -> Message:
    """What an API's assistant message says, without what only its own kind of message has."""
    reply: Message = {"role": "assistant", "content": message.get("content") or message.get("refusal") or ""}
    if reasoning := message.get("reasoning_content") or message.get("reasoning"):
        reply["reasoning_content"] = reasoning
    calls = [call for call in message.get("tool_calls") or () if call.get("type", "function") == "function"]
    if calls:
        reply["tool_calls"] = [{"id": call["id"], "type": "function", "function": {
            name: call["function"][name] for name in ("name", "arguments")}} for call in calls]
    return reply


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
