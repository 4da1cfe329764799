"""Tasks from the rows of a dataset.

The column of tests holds one of
- a list of `{"input": stdin, "output": stdout}`,
- a list of statements such as "assert f(1, 2) == 3" (as in MBPP),
- a program of statements, which may define `check(candidate)` (as in HumanEval, with `entry_point_column`),
or any of these as JSON text.

Statements run apart from the code, so that what crosses between them is a copy of plain data, or of a few types of the
standard library (`inside/values.py`): no object of a class of the code's own, no function as an argument, no iterator
without end. A list, dictionary or set that a function changes in place is changed in the tests too; `is` tells nothing.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from molt_gym.tasks import TaskRow

from .tasks import OutputTest, Task

__all__ = ["FIELDS", "OPTIONAL", "task_in"]

FIELDS, OPTIONAL = {"prompt": "prompt", "tests": "tests"}, ("entry_point",)

_Tests = tuple[tuple[OutputTest, ...], tuple[str, ...]]


def task_in(row: TaskRow, shown: int = 0) -> Task:
    """The task of a row.

    Args:
        shown: how many of the tests that are statements are shown in the prompt, such as to tell a name.

    Raises:
        EnvFailure: reason "task": the row has no prompt or no tests of a known form.
    """
    prompt, tests = row.text("prompt"), _tests(row.get("tests"))
    if tests is None:
        raise row.refused("tests", "a list of statements, or of {'input': text, 'output': text}")
    if not isinstance(row.get("entry_point"), str | None):
        raise row.refused("entry_point", "the name of a function")
    outputs, checks = tests
    return Task("\n".join((prompt, *checks[:shown])), outputs, checks, row.get("entry_point"))


def _tests(value: Any) -> _Tests | None:
    if isinstance(value, str):
        try:
            parsed = json.loads(value)
        except ValueError:
            parsed = None
        value = parsed if isinstance(parsed, list | dict) else [value]
    items = list(value) if isinstance(value, Sequence) else []
    if items and all(isinstance(item, str) and item.strip() for item in items):
        return (), tuple(items)
    if items and all(isinstance(item, Mapping) for item in items):
        runs = tuple(OutputTest("" if item.get("input") is None else item["input"], item.get("output"))
                     for item in items)
        return (runs, ()) if all(isinstance(text, str) for run in runs for text in (run.stdin, run.stdout)) else None
    return None
