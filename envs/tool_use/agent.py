"""ToolUseAgent: the usual tool loop of a program that uses OpenAI's SDK."""

import re
from collections.abc import Sequence
from decimal import Decimal
from typing import Any, Literal

import numpy as np

from molt_gym.agents import AgentContext, ChatAgent, Result
from molt_gym.messages import Message

from .demonstrations import demonstrations
from .tasks import Generator, Task
from .tools import TOOLS, run_tool

__all__ = ["ToolUseAgent", "last_number"]

SYSTEM = "Use the tools, then answer with the number."
_NUMBER = re.compile(r"(?:(?<![0-9A-Za-z.])[-\u2212])?[0-9]+(?:,[0-9]{3}(?![0-9]))*(?:\.[0-9]+)?")


class ToolUseAgent(ChatAgent):
    """Answer questions about numbers with a calculator and a table to look things up in.

    The loop goes on as long as the model calls tools; what is wrong with a call is told to the model in place of a
    result. Reward 1 if the last number of the final answer is the right one, else 0. `info["outcome"]` is "right",
    "wrong" or "no_number"; `info["tool_calls"]` and `info["tool_errors"]` say how many calls there were and how many of
    them got an error.

    Args:
        families: names of families of tasks (`tasks.FAMILIES`); None: the eight that take one call or two.
        difficulty: from 1 on; longer numbers.
        split: "train" or "test"; no question is in both.
        system: the system message; None: there is none.

    Raises:
        ConfigError: an argument makes no sense.
    """

    tools = TOOLS
    presets = {
        "": {"rollout": {"max_tokens": 256}},
        "tiny": {"steps": 24, "rollout": {"max_tokens": 40}},
    }

    def __init__(
        self,
        *,
        families: Sequence[str] | None = None,
        difficulty: int = 1,
        split: str = "train",
        system: str | None = SYSTEM,
    ) -> None:
        self._generator = Generator(families, difficulty, split)
        self._system = system

    def task(self, index: int, rng: np.random.Generator) -> Task:
        """The task of an index."""
        return self._generator.task(index)

    def run(self, ctx: AgentContext) -> Result:
        """Asks, runs the tools that are called, and asks again, until there is an answer."""
        task: Task = ctx.task
        client = ctx.openai()
        messages: list[Any] = self._opening(task)
        calls = errors = 0
        while True:
            completion = client.chat.completions.create(model=ctx.model, messages=messages, tools=ctx.tools)
            reply = completion.choices[0].message
            ctx.report(info={"tool_calls": calls, "tool_errors": errors})
            if not reply.tool_calls:
                break
            messages.append(reply)
            for call in reply.tool_calls:
                result = run_tool(call.function.name, call.function.arguments, task.table)
                messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
                calls, errors = calls + 1, errors + result.startswith("Error")
        outcome = _judge(reply.content or "", task.answer)
        return Result(reward=float(outcome == "right"), info={"outcome": outcome})

    def demonstrations(self, count: int, seed: int = 0) -> list[list[Message]]:
        """Noisy conversations to warm up a small policy with, fixed by the seed; see `demonstrations.py`."""
        return demonstrations(self._generator, self._opening, count, seed)

    def _opening(self, task: Task) -> list[Message]:
        system = [{"role": "system", "content": self._system}] if self._system else []
        return [*system, {"role": "user", "content": task.prompt}]


def last_number(text: str) -> Decimal | None:
    """The last number that a text holds, in decimal digits, commas between them left out."""
    numbers = _NUMBER.findall(text)
    return Decimal(numbers[-1].replace(",", "").replace("\u2212", "-")) if numbers else None


def _judge(text: str, answer: int) -> Literal["right", "wrong", "no_number"]:
    number = last_number(text)
    if number is None:
        return "no_number"
    return "right" if number == answer else "wrong"
