"""Tasks from a dataset; `rows.py` says where it can be.

The column of tests holds one of
- a list of `{"input": stdin, "output": stdout}`,
- a list of statements such as "assert f(1, 2) == 3" (as in MBPP),
- a program of statements, which may define `check(candidate)` (as in HumanEval, with `entry_point_column`),
or any of these as JSON text.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from molt_gym.errors import EnvFailure

from ..rows import load_rows
from .tasks import OutputTest, Task

__all__ = ["Dataset"]


class Dataset:
    """Rows of a dataset as tasks.

    Args:
        name, split, rows: as for `load_rows`.
        prompt_column, tests_column: columns that must be there.
        entry_point_column: a column that may be there.
        shown_tests: how many of the tests that are statements are shown in the prompt, such as to tell a name.

    Raises:
        ConfigError: the dataset cannot be read, is empty, or lacks a column.
    """

    def __init__(
        self,
        name: str,
        split: str = "train",
        *,
        rows: str | None = None,
        prompt_column: str = "prompt",
        tests_column: str = "tests",
        entry_point_column: str = "entry_point",
        shown_tests: int = 0,
    ) -> None:
        self._name, self._shown = name, shown_tests
        self._prompt, self._tests, self._entry_point = prompt_column, tests_column, entry_point_column
        columns = {"prompt_column": prompt_column, "tests_column": tests_column}
        self._rows = load_rows(name, split, rows, columns)
        self.num_tasks: int = len(self._rows)

    def task(self, index: int) -> Task:
        """The task of a row.

        Raises:
            EnvFailure: reason "task": the row has no prompt or no tests of a known form.
        """
        row = self._rows[index]
        where = f"{self._name}, row {index}"
        prompt = row.get(self._prompt)
        if not isinstance(prompt, str):
            raise EnvFailure("task", f"{where}: {self._prompt} is {prompt!r:.100}, no text")
        outputs, checks = _tests(row.get(self._tests), f"{where}: {self._tests}")
        shown = "".join(f"\n{check}" for check in checks[: self._shown])
        return Task(prompt + shown, outputs, checks, row.get(self._entry_point))


def _tests(value: Any, where: str) -> tuple[tuple[OutputTest, ...], tuple[str, ...]]:
    if isinstance(value, str):
        try:
            parsed = json.loads(value)
        except ValueError:
            parsed = None
        value = parsed if isinstance(parsed, list) else [value]
    items = list(value) if isinstance(value, Sequence) else []
    if items and all(isinstance(item, str) and item.strip() for item in items):
        return (), tuple(items)
    if items and all(isinstance(item, Mapping) and isinstance(item.get("output"), str) for item in items):
        return tuple(OutputTest(item.get("input") or "", item["output"]) for item in items), ()
    forms = "a list of statements, or of {'input': ..., 'output': ...}"
    raise EnvFailure("task", f"{where} is {value!r:.100}; write {forms}")
