"""What a task is, whatever it comes from."""

from dataclasses import dataclass

__all__ = ["OutputTest", "Task"]


@dataclass(frozen=True)
class OutputTest:
    """A run of the program: what it reads from stdin, and what it must write to stdout."""

    stdin: str
    stdout: str


@dataclass(frozen=True)
class Task:
    """A task and its hidden tests: either runs of a program, or checks that call functions.

    Args:
        prompt: the text of the first user message.
        outputs: runs, all of which must give the right output.
        checks: Python statements, such as "assert f(2) == 4", run in order; none may raise.
        entry_point: the function, such as "f" or "Solution().f", to be given to `check`, if the checks define it; else
            what the checks call by its name, even if it is that of a builtin.
    """

    prompt: str
    outputs: tuple[OutputTest, ...] = ()
    checks: tuple[str, ...] = ()
    entry_point: str | None = None
