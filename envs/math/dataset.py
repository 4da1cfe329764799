r"""Problems from the rows of a dataset.

The column of answers holds one of
- a solution that ends with "#### 18" (as in GSM8K),
- a solution with the answer in its last `\boxed{}` (as in MATH),
- the answer alone, in LaTeX or as a number.
"""

import math
from decimal import Decimal
from typing import Any

from molt_gym.tasks import TaskRow

from .answers import find_boxed
from .problems import Problem

__all__ = ["FIELDS", "gold_answer", "problem_in"]

FIELDS = {"prompt": "question", "answer": "answer"}
_LONGEST = 300


def problem_in(row: TaskRow) -> Problem:
    """The problem of a row.

    Raises:
        EnvFailure: reason "task": the row has no prompt or no answer of a known form.
    """
    prompt, answer = row.text("prompt"), gold_answer(row.get("answer"))
    if answer is None:
        raise row.refused("answer", "a solution with '#### ANSWER' or \\boxed{ANSWER}, or the answer alone")
    return Problem(prompt, answer)


def gold_answer(value: Any) -> str | None:
    """The answer that a row gives; None: it gives none."""
    if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
        value = f"{Decimal(str(value)):f}"
    if not isinstance(value, str):
        return None
    _, marked, answer = value.rpartition("####")
    if not marked:
        blank = "\\boxed" in value or "\\fbox" in value
        answer = find_boxed(value)[0] or ("" if blank else value)
    answer = answer.strip()
    return answer if answer and "\n" not in answer and len(answer) <= _LONGEST else None
