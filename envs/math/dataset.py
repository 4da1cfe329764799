r"""Problems from a dataset; `rows.py` says where it can be.

The column of answers holds one of
- a solution that ends with "#### 18" (as in GSM8K),
- a solution with the answer in its last `\boxed{}` (as in MATH),
- the answer alone, in LaTeX or as a number.
"""

import math
from collections.abc import Mapping
from decimal import Decimal
from typing import Any

from molt_gym.errors import EnvFailure

from ..rows import load_rows
from .answers import find_boxed
from .problems import Problem

__all__ = ["Dataset", "gold_answer"]

_LONGEST = 300


class Dataset:
    """Rows of a dataset as problems.

    Args:
        name, split, rows, subset: as for `load_rows`.
        prompt_column, answer_column: columns that must be there.

    Raises:
        ConfigError: the dataset cannot be read, is empty, or lacks a column.
    """

    def __init__(
        self,
        name: str,
        split: str = "train",
        *,
        rows: str | None = None,
        subset: str | None = None,
        prompt_column: str = "question",
        answer_column: str = "answer",
    ) -> None:
        self._name, self._prompt, self._answer = name, prompt_column, answer_column
        columns = {"prompt_column": prompt_column, "answer_column": answer_column}
        self._rows = load_rows(name, split, rows, columns, subset)
        self.num_tasks: int = len(self._rows)

    def row(self, index: int) -> Mapping[str, Any]:
        """A row as it is."""
        return self._rows[index]

    def task(self, index: int) -> Problem:
        """The problem of a row.

        Raises:
            EnvFailure: reason "task": the row has no prompt or no answer of a known form.
        """
        row = self._rows[index]
        where = f"{self._name}, row {index}"
        prompt, value = row.get(self._prompt), row.get(self._answer)
        if not isinstance(prompt, str) or not prompt.strip():
            raise EnvFailure("task", f"{where}: {self._prompt} is {prompt!r:.100}, no text")
        answer = gold_answer(value)
        if answer is None:
            forms = "a solution with '#### ANSWER' or \\boxed{ANSWER}, or the answer alone"
            raise EnvFailure("task", f"{where}: {self._answer} is {value!r:.100}; write {forms}")
        return Problem(prompt, answer)


def gold_answer(value: Any) -> str | None:
    """The answer that a row gives; None: it gives none."""
    if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
        value = f"{Decimal(str(value)):f}"
    if not isinstance(value, str):
        return None
    _, marked, answer = value.rpartition("####")
    if not marked:
        boxed, cut_off = find_boxed(value)
        answer = "" if cut_off and boxed is None else boxed or value
    answer = answer.strip()
    return answer if answer and "\n" not in answer and len(answer) <= _LONGEST else None
