"""Runs a program against the hidden tests of a task and says what the policy is told.

Invariants: expected outputs stay in this process; checks run in a sandbox of their own, which the program under test
can reach only by the values that its functions return. So a verdict cannot be forged, only earned.
"""

import re
from dataclasses import dataclass, replace
from functools import partial
from math import isclose
from typing import Literal

from molt_gym.errors import EnvFailure
from molt_gym.sandbox import Execution, Limits, Sandbox

from .inside import PASSED, RAISED, UNFIT, checks_program, solution_program
from .reuse import run_once
from .tasks import Task

__all__ = ["NO_PROGRAM", "Verdict", "grade", "judge_output", "reason_of", "shortened"]

NO_PROGRAM = "No closed ```python code block."
"""What the policy is told about a reply without a program."""

_MARKER = 50
_NUMBER = re.compile(r"(-?[0-9]+(?:\.[0-9]*)?(?:[eE][-+]?[0-9]+)?)", re.ASCII)
_WRONG = "Wrong, try again."


@dataclass(frozen=True)
class Verdict:
    """The outcome for one program, and what the policy is told about it, "" if it passed."""

    outcome: Literal["passed", "wrong", "error", "timeout", "no_program"]
    feedback: str = ""


def grade(sandbox: Sandbox, code: str, task: Task, limits: Limits, *, reuse: bool = True) -> Verdict:
    """Runs the tests of a task until one fails.

    Args:
        sandbox: where code and checks run.
        code: the program of the policy.
        task: with its tests.
        limits: for each execution; `output_chars` is what feedback shows of an output or an error.
        reuse: whether programs that can only do the same again are run once (see `reuse.py`).

    Raises:
        EnvFailure: "sandbox", if no verdict could be had; "tests", if they fit no solution at all.
    """
    for test in task.outputs:
        # The whole of an output that may be right has to be there to be compared.
        room = replace(limits, output_chars=max(limits.output_chars, 2 * len(test.stdout)))
        run = partial(run_once, sandbox) if reuse else sandbox.run
        verdict = judge_output(run(code, stdin=test.stdin, limits=room), test.stdout, limits)
        if verdict.outcome != "passed":
            return verdict
    return _check(sandbox, code, task, limits) if task.checks else Verdict("passed")


def judge_output(execution: Execution, expected: str, limits: Limits) -> Verdict:
    """Compares stdout with what was expected.

    Space at the ends of lines and of the text does not count, and where a number with a decimal point is expected, nor
    does a millionth.
    """
    if execution.timed_out:
        return _timeout(limits)
    if execution.exit_code != 0:
        return Verdict("error", f"Error: {shortened(reason_of(execution), limits.output_chars)}")
    if _alike(_normal(execution.stdout), _normal(expected)):
        return Verdict("passed")
    output = shortened(execution.stdout.rstrip(), limits.output_chars)
    return Verdict("wrong", f"Output: {output}\n{_WRONG}" if output else f"No output. {_WRONG}")


def _check(sandbox: Sandbox, code: str, task: Task, limits: Limits) -> Verdict:
    tests = checks_program(task.checks, task.entry_point)
    result, _ = sandbox.run_pair(tests, solution_program(code), limits=replace(limits, output_chars=10_000))
    if result.timed_out:
        return _timeout(limits)
    if result.exit_code == PASSED:
        return Verdict("passed")
    if result.exit_code == RAISED:
        return Verdict("error", f"Error: {shortened(result.stdout, limits.output_chars)}")
    if result.exit_code == UNFIT:
        raise EnvFailure("tests", f"{result.stdout}, in the task {task.prompt!r:.100}")
    return Verdict("wrong", f"A hidden test failed. {_WRONG}")


def _timeout(limits: Limits) -> Verdict:
    return Verdict("timeout", f"Error: time limit of {limits.seconds:g} s")


def reason_of(execution: Execution) -> str:
    """Why a program failed, in a line: the last one of stderr, or its exit code."""
    lines = execution.stderr.strip().split("\n")
    code = execution.exit_code or 0
    return lines[-1].strip() or (f"killed by signal {code - 128}" if code > 128 else f"exit code {code}")


def _alike(output: str, expected: str) -> bool:
    if output == expected:
        return True
    ours, theirs = _NUMBER.split(output), _NUMBER.split(expected)
    return len(ours) == len(theirs) and all(
        part == right
        or (place % 2 == 1 and "." in right and isclose(float(part), float(right), rel_tol=1e-6, abs_tol=1e-6))
        for place, (part, right) in enumerate(zip(ours, theirs, strict=True)))


def _normal(text: str) -> str:
    return "\n".join(line.rstrip() for line in text.rstrip().split("\n"))


def shortened(text: str, chars: int) -> str:
    """A text, or its two ends around a marker; a text that a sandbox cut to as many characters stays as it is."""
    if len(text) <= chars + _MARKER:
        return text
    half = chars // 2
    return f"{text[:half]}\n[... {len(text) - 2 * half} characters cut ...]\n{text[len(text) - half :]}"
