"""Geo3kAgent: Geo3k as a program that uses OpenAI's SDK or Anthropic's, and owns its loop."""

import json
from collections.abc import Mapping
from typing import Any, Literal

import numpy as np

from molt_gym.agents import AgentContext, ChatAgent, Result
from molt_gym.errors import ConfigError
from molt_gym.images import source_of
from molt_gym.messages import Message

from ..math.problems import Problem
from .env import Geo3kEnv
from .python_tool import Usage

__all__ = ["Geo3kAgent"]

_MAX_TOKENS = 4096


class Geo3kAgent(ChatAgent):
    """Solve problems of geometry whose numbers stand in a figure: Geo3k-v0 as an agent on a stock SDK.

    Problems, tool, rewards and outcomes are those of `Geo3kEnv`.

    Args:
        split: "train" or "test"; no figure is in both.
        sdk: "openai" or "anthropic", whose SDK the program uses.
        **options: as for `Geo3kEnv`.

    Raises:
        ConfigError: an argument makes no sense, or as `Geo3kEnv`.
        TypeError: there is no such option.
    """

    presets = Geo3kEnv.presets

    def __init__(self, *, split: str = "train", sdk: Literal["openai", "anthropic"] = "openai", **options: Any) -> None:
        if sdk not in _SDKS:
            raise ConfigError(f"sdk: {sdk!r}; write one of {', '.join(map(repr, _SDKS))}")
        self._env, self._sdk = Geo3kEnv(split=split, **options), sdk
        self.num_tasks, self.tools = self._env.num_tasks, self._env.tools

    def task(self, index: int, rng: np.random.Generator) -> Problem:
        """The problem of an index."""
        return self._env.task(index)

    def run(self, ctx: AgentContext) -> Result:
        """Asks, runs what is called, and asks again, until the answer is right or no try is left."""
        env, usage = self._env, Usage(self._env.calls)
        chat = _SDKS[self._sdk](ctx, env.opening(ctx.task))
        tries = env.turns
        while True:
            text, calls = chat.ask()
            tried = not (calls and env.python and usage.left)
            results = usage.run(env.python, calls) if calls and env.python else []
            outcome = env.grade(ctx.task, text) if tried else "no_answer"
            ctx.report(info={"outcome": outcome} | (usage.info if env.python else {}))
            tries -= tried
            if outcome == "right" or not tries:
                return Result(reward=float(outcome == "right"))
            chat.tell(results, env.feedback(outcome) if tried else "")

    def demonstrations(self, count: int, seed: int = 0) -> list[list[Message]]:
        """Those of `Geo3kEnv`."""
        return self._env.demonstrations(count, seed)


_Said = tuple[str, list[dict[str, Any]]]
"""What a reply says, and its calls in the OpenAI form."""


class _OpenAI:
    """A conversation by way of an SDK: `ask` for the reply, `tell` the results of calls and what the user says."""

    def __init__(self, ctx: AgentContext, messages: list[Message]) -> None:
        self._create, self._messages = ctx.openai().chat.completions.create, list[Any](messages)
        self._fixed = {"model": ctx.model} | ({"tools": ctx.tools} if ctx.tools else {})

    def ask(self) -> _Said:
        reply = self._create(messages=self._messages, **self._fixed).choices[0].message
        self._messages.append(reply)
        return reply.content or "", [call.model_dump() for call in reply.tool_calls or ()]

    def tell(self, results: list[Message], words: str) -> None:
        self._messages += [*results, *([{"role": "user", "content": words}] if words else [])]


class _Anthropic:
    def __init__(self, ctx: AgentContext, messages: list[Message]) -> None:
        self._create = ctx.anthropic().messages.create
        system = messages[0]["content"] if messages[0]["role"] == "system" else None
        user = [_block(part) for part in messages[-1]["content"]]
        self._messages: list[Any] = [{"role": "user", "content": user}]
        tools = [{"name": tool["function"]["name"], "description": tool["function"]["description"],
                  "input_schema": tool["function"]["parameters"]} for tool in ctx.tools]
        self._fixed = {"model": ctx.model, "max_tokens": _MAX_TOKENS} | (
            {"tools": tools} if tools else {}) | ({"system": system} if system else {})

    def ask(self) -> _Said:
        reply = self._create(messages=self._messages, **self._fixed)
        self._messages.append({"role": "assistant", "content": reply.content})
        calls = [{"id": block.id, "type": "function", "function": {
            "name": block.name, "arguments": json.dumps(block.input)}} for block in reply.content
            if block.type == "tool_use"]
        return "".join(block.text for block in reply.content if block.type == "text"), calls

    def tell(self, results: list[Message], words: str) -> None:
        blocks = [{"type": "tool_result", "tool_use_id": result["tool_call_id"], "content": result["content"]}
                  for result in results]
        said = [{"type": "text", "text": words}] if words else []
        self._messages.append({"role": "user", "content": [*blocks, *said]})


def _block(part: Mapping[str, Any]) -> dict[str, Any]:
    """A part of a message as Anthropic's SDK takes it."""
    if part["type"] == "text":
        return {"type": "text", "text": part["text"]}
    kind, _, data = source_of(part).removeprefix("data:").partition(";base64,")
    return {"type": "image", "source": {"type": "base64", "media_type": kind, "data": data}}


_SDKS = {"openai": _OpenAI, "anthropic": _Anthropic}
