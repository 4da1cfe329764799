"""CommandAgent: a program in any language as an agent.

Invariants: of this process's environment the program sees only what `PASSED` lists; when a run or this process has
ended, in whatever way, nothing that it started is left running, but for a process that hides by leaving its session and
clearing its environment; its output takes bounded memory, whatever bytes it is made of. **Not a sandbox**: it has the
files and the network of the user.
"""

import json
import os
import shlex
import signal
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import fields
from typing import Any

import numpy as np

from ..errors import EnvFailure
from ..sandbox.base import memory_file
from ..sandbox.output import Capture, read_until
from ..strays import end_all, marked
from .agent import ChatAgent, Result
from .context import AgentContext
from .run import ProgramFailed

__all__ = ["PASSED", "CommandAgent"]

PASSED = ("HOME", "LANG", "LC_ALL", "LC_CTYPE", "LOGNAME", "PATH", "PYTHONPATH", "SHELL", "TMPDIR", "TZ", "USER",
          "VIRTUAL_ENV")
"""Variables that a program inherits."""

_STDOUT_CHARS = 1 << 20
_STDERR_CHARS = 4000
_LONGEST_VARIABLE = 100_000
_DRAIN_SECONDS = 0.5
_REAP_SECONDS = 5.0
_SHOWN = 1000
_FIELDS = {field.name for field in fields(Result)}


class CommandAgent(ChatAgent):
    """Runs a program for each task.

        molt_gym.register("Node-v0", "molt_gym:AgentEnv", max_episode_steps=8, kwargs={
            "agent": "molt_gym:CommandAgent", "command": ["node", "agent.js"], "tasks": [{"question": "6 * 7"}]})

    The program finds the model through the variables `OPENAI_BASE_URL`, `OPENAI_API_KEY`, `ANTHROPIC_BASE_URL` and
    `ANTHROPIC_API_KEY`, and the task as JSON in `MOLT_GYM_TASK`, if it has less than 100,000 bytes, and on its standard
    input. The last line that it prints, of at most 500,000 characters, is its result: a number, or a JSON object with
    "reward" and, if it likes, "score", "info" and "truncated".

    Args:
        command: the program and its arguments, or a line that is split like a shell's, though no shell runs it.
        tasks: in JSON; None: the number of the task is all that there is to it.
        env: further variables.
        cwd: the folder to run in; None: that of this process.
    """

    def __init__(
        self, command: Sequence[str] | str, *, tasks: Sequence[Any] | None = None, env: Mapping[str, str] | None = None,
        cwd: str | os.PathLike[str] | None = None,
    ) -> None:
        self.command = shlex.split(command) if isinstance(command, str) else [str(word) for word in command]
        if not self.command:
            raise ValueError(f"command: {command!r}; write the name of a program, or a list that begins with it")
        if unset := [name for name, value in (env or {}).items() if value is None]:
            raise ValueError(f"env: {unset[0]!r} is None; write its text, or leave it out")
        self.env = {name: str(value) for name, value in (env or {}).items()}
        self.cwd, self._tasks = cwd, tasks
        self.num_tasks = None if tasks is None else len(tasks)

    def task(self, index: int, rng: np.random.Generator) -> Any:
        """Task number `index`."""
        return index if self._tasks is None else self._tasks[index]

    def run(self, ctx: AgentContext) -> Result:
        """Runs the program.

        Raises:
            ProgramFailed: it cannot be started, ends with another exit code than 0, or prints no result.
            EnvFailure: reason "timeout": it has not ended in time.
        """
        stdout, stderr = Capture(_STDOUT_CHARS), Capture(_STDERR_CHARS)
        with ExitStack() as stack:
            program = _Program(stack, self.command, self._environment(ctx), self.cwd, _json(ctx.task))
            ctx.on_cancel(program.kill)
            exit_code = program.watch(stdout, stderr, ctx.deadline)
        if exit_code is None:
            raise EnvFailure("timeout", f"{self}: no end before the deadline; {_said(stderr)}")
        if exit_code:
            raise ProgramFailed(f"{self}: exit code {exit_code}; {_said(stderr)}")
        return self._result(stdout, stderr)

    def __str__(self) -> str:
        return f"command {shlex.join(self.command):.200}"

    def _environment(self, ctx: AgentContext) -> dict[str, str]:
        task = _json(ctx.task)
        variables = {name: os.environ[name] for name in PASSED if name in os.environ}
        variables |= ctx.environment() | ({"MOLT_GYM_TASK": task} if len(task) < _LONGEST_VARIABLE else {})
        return variables | self.env

    def _result(self, stdout: Capture, stderr: Capture) -> Result:
        # JSON text may hold every line end but this one.
        line = stdout.text().rstrip().rpartition("\n")[2]
        try:
            value = json.loads(line)
        except (ValueError, RecursionError):
            value = None
        if isinstance(value, dict) and value.get("reward") is not None and value.keys() <= _FIELDS:
            return Result(**{name: item for name, item in value.items() if item is not None})
        if isinstance(value, int | float):
            return Result(value)
        raise ProgramFailed(f"{self}: the last line that it printed is {line!r:.200}; print a number, or a JSON object "
                            f"with \"reward\" and no fields but {', '.join(sorted(_FIELDS))}; {_said(stderr)}")


class _Program:
    """A process in a session of its own, with all that it starts."""

    def __init__(
        self, stack: ExitStack, command: list[str], environment: dict[str, str], cwd: Any, stdin: str
    ) -> None:
        environment, self._mark = marked(environment)
        self._lock = threading.Lock()
        with ExitStack() as handed:
            try:
                self._process = subprocess.Popen(
                    command, stdin=memory_file(handed, stdin.encode()), stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                    bufsize=0, env=environment, cwd=cwd, start_new_session=True,
                )
            except (OSError, ValueError) as error:
                raise ProgramFailed(f"cannot start {command[0]!r}: {error}") from None
        stack.callback(self._end)

    def watch(self, stdout: Capture, stderr: Capture, deadline: float) -> int | None:
        """Reads its output to the end, which is the end of its first process; the exit code, None at the deadline."""
        streams = {self._process.stdout.fileno(): stdout, self._process.stderr.fileno(): stderr}
        pidfd = os.pidfd_open(self._process.pid)
        try:
            in_time = read_until(streams, deadline, pidfd)
        finally:
            os.close(pidfd)
        self.kill()
        end_all(self._mark)
        # What it wrote is still in the pipes.
        read_until(streams, time.monotonic() + _DRAIN_SECONDS)
        return self._reap() if in_time else None

    def kill(self) -> None:
        """Kills its process group; from any thread."""
        # The id may belong to somebody else once the process is reaped.
        with self._lock, suppress(ProcessLookupError):
            if self._process.returncode is None:
                os.killpg(self._process.pid, signal.SIGKILL)

    def _reap(self) -> int:
        with self._lock:
            return self._process.wait(_REAP_SECONDS)

    def _end(self) -> None:
        if self._process.returncode is None:
            self.kill()
            self._reap()
        self._process.stdout.close()
        self._process.stderr.close()


def _json(task: Any) -> str:
    try:
        return json.dumps(task)
    except (TypeError, ValueError) as error:
        raise ProgramFailed(f"the task {task!r:.200} is no JSON, which a program gets it as: {error}") from None


def _said(stderr: Capture) -> str:
    text = stderr.text().strip()
    return f"stderr ends with:\n{text[-_SHOWN:]}" if text else "nothing on stderr"
