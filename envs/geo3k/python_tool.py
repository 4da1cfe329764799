"""The Python tool: what the model is offered, and what a call gives.

Invariant: whatever is wrong with a call is said in the text that comes of it, for the model to read; what is raised is
trouble of the sandbox alone. Each call is a program of its own: nothing that an earlier one left is there.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from molt_gym.messages import Message
from molt_gym.sandbox import Limits, make_sandbox

from ..code_exec.grading import reason_of, shortened

__all__ = ["TOOL", "PythonTool", "Usage"]

TOOL: dict[str, Any] = {"type": "function", "function": {
    "name": "python",
    "description": "Runs a Python program with the standard library, and gives what it prints. Nothing is kept from "
                   "one call to the next.",
    "parameters": {"type": "object", "required": ["code"], "properties": {
        "code": {"type": "string", "description": "The whole program; print what is to be seen."}}}}}
"""In the OpenAI form."""

_NO_CALLS_LEFT = "Error: no calls are left"
_CHARS = 1000


class PythonTool:
    """Runs programs that a model wrote; threads may share one.

    Args:
        sandbox: "bubblewrap" or "subprocess", as for `make_sandbox`.
        seconds: the time limit of a program.

    Raises:
        ConfigError: there is no such sandbox, or it cannot work here.
    """

    def __init__(self, sandbox: str, seconds: float) -> None:
        self._sandbox = make_sandbox(sandbox)
        self._limits = Limits(seconds=seconds, output_chars=_CHARS, error_chars=_CHARS)

    def run(self, name: str, arguments: str) -> tuple[str, bool]:
        """What a program prints, or what is wrong, and whether the call went well.

        Args:
            name: of the tool that is called.
            arguments: a JSON object, as the model wrote it.

        Raises:
            EnvFailure: reason "sandbox": it did not work.
        """
        if name != TOOL["function"]["name"]:
            return f"Error: there is no tool {name!r:.50}; call python", False
        try:
            given = json.loads(arguments)
        except (ValueError, RecursionError):
            return "Error: the arguments are no JSON", False
        if not isinstance(given, dict) or not isinstance(given.get("code"), str):
            return "Error: python takes code, as text", False
        execution = self._sandbox.run(given["code"], limits=self._limits)
        printed = execution.stdout.rstrip()
        if not execution.timed_out and execution.exit_code == 0:
            return printed or "Nothing was printed.", True
        reason = f"time limit of {self._limits.seconds:g} s" if execution.timed_out else reason_of(execution)
        return f"{printed}\nError: {shortened(reason, _CHARS)}".lstrip(), False

    def cancel(self) -> None:
        """Ends what is running."""
        self._sandbox.cancel()


class Usage:
    """The calls of one episode; `left`: how many may still run."""

    def __init__(self, calls: int) -> None:
        self.left, self.info = calls, {"tool_calls": 0, "tool_errors": 0}

    def run(self, tool: PythonTool, calls: Sequence[Mapping[str, Any]]) -> list[Message]:
        """A tool message for each call, in their order; those that are too many are not run.

        Raises:
            EnvFailure: reason "sandbox": it did not work.
        """
        return [{"role": "tool", "tool_call_id": call["id"], "content": self._one(tool, call["function"])}
                for call in calls]

    def _one(self, tool: PythonTool, function: Mapping[str, Any]) -> str:
        result, well = _NO_CALLS_LEFT, False
        if self.left:
            self.left -= 1
            result, well = tool.run(function["name"], function.get("arguments") or "")
        self.info["tool_calls"] += 1
        self.info["tool_errors"] += not well
        return result
