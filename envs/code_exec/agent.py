"""CodeExecAgent: CodeExec as a program that uses Anthropic's SDK and owns its loop."""

from typing import Any

import numpy as np

from molt_gym.agents import AgentContext, ChatAgent, Result
from molt_gym.messages import Message

from .exercises import PRESETS, Exercises
from .tasks import Task

__all__ = ["CodeExecAgent"]

_TURNS = 3
_MAX_TOKENS = 4096


class CodeExecAgent(ChatAgent):
    """Write Python that passes hidden tests: CodeExec-v0 as an agent on Anthropic's SDK.

    Tasks, feedback, rewards and outcomes are those of `CodeExecEnv`. The program ends when the tests pass, or with the
    last turn that it may take, of three if nothing else is said; it is truncated then.

    Args:
        split: "train" or "test"; no task is in both.
        **options: as for `CodeExecEnv`, further arguments of `Exercises`.

    Raises:
        ConfigError: an argument makes no sense, or the sandbox cannot work here; the message says what to install.
        TypeError: there is no such option.
    """

    presets = PRESETS

    def __init__(self, *, split: str = "train", **options: Any) -> None:
        self._exercises = Exercises(split=split, **options)
        self.num_tasks = self._exercises.num_tasks

    def task(self, index: int, rng: np.random.Generator) -> Task:
        """The task of an index."""
        return self._exercises.task(index)

    def run(self, ctx: AgentContext) -> Result:
        """Asks for a program, runs it, and tells what came of it."""
        client = ctx.anthropic()
        messages: list[Any] = self._exercises.opening(ctx.task)
        system = {"system": messages.pop(0)["content"]} if messages[0]["role"] == "system" else {}
        for _ in range(ctx.max_turns or _TURNS):
            reply = client.messages.create(model=ctx.model, max_tokens=_MAX_TOKENS, messages=messages, **system)
            text = "".join(block.text for block in reply.content if block.type == "text")
            verdict = self._exercises.assess(ctx.task, text)
            ctx.report(info={"outcome": verdict.outcome})
            if verdict.outcome == "passed":
                return Result(reward=1.0)
            messages.append({"role": "assistant", "content": reply.content})
            messages.append({"role": "user", "content": verdict.feedback})
        return Result(truncated=True)

    def demonstrations(self, count: int, seed: int = 0) -> list[list[Message]]:
        """Noisy conversations to warm up a small policy with, fixed by the seed; see `demonstrations.py`.

        Raises:
            ValueError: the tasks are not those that print one value.
        """
        return self._exercises.demonstrations(count, seed)
