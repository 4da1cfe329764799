"""Tasks from a dataset: a local JSON Lines or Parquet file, or a name on the hub.

The column of tests holds one of
- a list of `{"input": stdin, "output": stdout}`,
- a list of statements such as "assert f(1, 2) == 3" (as in MBPP),
- a program of statements, which may define `check(candidate)` (as in HumanEval, with `entry_point_column`),
or any of these as JSON text. Of a local file each tenth row is held out for `split="test"`.
"""

import functools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from molt_gym.errors import ConfigError, EnvFailure

from .tasks import OutputTest, Task

__all__ = ["Dataset"]

_HELD_OUT_ONE_IN = 10


class Dataset:
    """Rows of a dataset as tasks.

    Args:
        name: a path that ends in .jsonl, .json (JSON Lines too) or .parquet, or the name of a dataset on the hub.
        split: "train" or "test".
        rows: which rows: the name of a split on the hub, default `split` itself; "all" takes all rows of a local file.
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
        self._rows = _load(name, rows or split)
        self.num_tasks: int = len(self._rows)
        if not self.num_tasks:
            raise ConfigError(f"dataset: {name!r} has no rows for split {split!r}; try dataset_split='all'")
        for option, column in (("prompt_column", prompt_column), ("tests_column", tests_column)):
            if column not in self._rows[0]:
                have = ", ".join(self._rows[0])
                raise ConfigError(f"{option}: {name!r} has no column {column!r}; choose from {have}")

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


@functools.lru_cache(maxsize=16)
def _load(name: str, rows: str) -> Sequence[Mapping[str, Any]]:
    path = Path(name)
    if path.suffix in (".jsonl", ".json", ".parquet"):
        everything = _read(path)
        if rows == "all":
            return everything
        last = _HELD_OUT_ONE_IN - 1
        return [row for n, row in enumerate(everything) if (n % _HELD_OUT_ONE_IN == last) == (rows == "test")]
    datasets = _datasets()
    try:
        return datasets.load_dataset(name, split=rows)
    except (OSError, ValueError) as error:
        raise ConfigError(f"dataset: cannot load {name!r}, split {rows!r}: {error}") from error


def _read(path: Path) -> list[dict[str, Any]]:
    if not path.is_file():
        raise ConfigError(f"dataset: there is no file {str(path)!r}")
    if path.suffix == ".parquet":
        return _datasets().Dataset.from_parquet(str(path)).to_list()
    rows = []
    for number, line in enumerate(path.read_bytes().split(b"\n"), start=1):
        if line.strip():
            try:
                row = json.loads(line)
            except ValueError as error:
                raise ConfigError(f"dataset: {path}, line {number}: {error}") from error
            if not isinstance(row, dict):
                raise ConfigError(f"dataset: {path}, line {number}: {row!r:.100} is no object")
            rows.append(row)
    return rows


def _datasets() -> Any:
    try:
        import datasets
    except ImportError as error:
        raise ConfigError("dataset: Parquet files and the hub need pip install 'molt-gym[data]'") from error
    return datasets
