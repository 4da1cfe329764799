"""Tasks of an env from a dataset: which rows, under which names, in which order.

Invariants: the same arguments choose the same rows in the same order; no row is in both "train" and "test"; a row that
cannot serve is named by its number in the dataset and its column.
"""

import copy
import random
from collections.abc import Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any

from .errors import ConfigError, EnvFailure
from .images import image_part, is_data_uri, open_image
from .task_files import column, columns, read

__all__ = ["OPTIONS", "TaskRow", "Tasks", "check_split", "load_tasks"]

OPTIONS = ("dataset_split", "dataset_subset", "dataset_seed")
"""What `load_tasks` takes beside `difficulty` and the columns."""
_SPLITS = ("train", "test")
_SHOWN = 10


class TaskRow:
    """A row of a dataset, whose values go by the names that an env gave them.

    Args:
        values: by column.
        names: the column of each field.
        where: names the row in errors.
        folder: where the paths of its images begin.
    """

    def __init__(self, values: Mapping[str, Any], names: Mapping[str, str], where: str, folder: Path) -> None:
        self._values, self._names, self._where, self._folder = values, names, where, folder

    @property
    def values(self) -> dict[str, Any]:
        """A copy of the whole row, by column."""
        return copy.deepcopy(dict(self._values))

    def get(self, field: str) -> Any:
        """A copy of the value as it stands in the dataset; None if this row has none."""
        return copy.deepcopy(self._values.get(self._names.get(field, field)))

    def text(self, field: str) -> str:
        """A value that must be text, and more than blanks.

        Raises:
            EnvFailure: reason "task": it is not.
        """
        value = self.get(field)
        if not isinstance(value, str) or not value.strip():
            raise self.refused(field, "text")
        return value

    def images(self, field: str) -> list[dict[str, Any]]:
        """The parts of a message that show an image, or each of a list of them; [] for None.

        An image is whatever `image_part` takes, or what `datasets` keeps in a column of images. The path of a file
        begins at the folder of the dataset's file.

        Raises:
            EnvFailure: reason "task": one of them is no image.
        """
        value = self.get(field)
        found = list(value) if isinstance(value, list | tuple) else [] if value is None else [value]
        try:
            return [self._part(image) for image in found]
        except ValueError as error:
            raise self.refused(field, "an image, or a list of them", f"{error}") from error

    def refused(self, field: str, write: str, problem: str = "") -> EnvFailure:
        """The failure to raise where a value of this row cannot serve.

        Args:
            field: whose value it is.
            write: what would do.
            problem: what is wrong; "" shows the value.
        """
        is_wrong = f": {problem}" if problem else f" is {self.get(field)!r:.100}"
        return EnvFailure("task", f"{self._where}: {self._names.get(field, field)}{is_wrong}; write {write}")

    def _part(self, image: Any) -> dict[str, Any]:
        if isinstance(image, Mapping) and not image.get("bytes"):
            image = image.get("path")
        if is_data_uri(image):
            open_image(image)
        elif isinstance(image, str) and "://" not in image:
            image = self._folder / image
        return image_part(image)


class Tasks(Sequence[TaskRow]):
    """The rows that were chosen: `tasks[index]` is task number `index`, `len(tasks)` how many there are.

    Args:
        name: of the dataset.
        rows: all of it.
        numbers: of the rows that are chosen, in order.
        names: the column of each field.
    """

    def __init__(self, name: str, rows: Sequence[Any], numbers: Sequence[int], names: Mapping[str, str]) -> None:
        self._name, self._rows, self._numbers, self._names = name, rows, numbers, names

    def __len__(self) -> int:
        return len(self._numbers)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return Tasks(self._name, self._rows, self._numbers[index], self._names)
        number = self._numbers[index]
        return TaskRow(self._rows[number], self._names, f"{self._name}, row {number}", Path(self._name).parent)


def load_tasks(
    dataset: str | PathLike[str],
    split: str = "train",
    *,
    fields: str | Sequence[str] | Mapping[str, str],
    optional: str | Sequence[str] = (),
    dataset_split: str | None = None,
    dataset_subset: str | None = None,
    dataset_seed: int | None = None,
    difficulty: Any = None,
    **names: str,
) -> Tasks:
    """The rows of a dataset as tasks. Pass on the keywords of your env, and its users can choose.

    Args:
        dataset: a .jsonl, .json, .csv or .parquet file, a folder that `Dataset.save_to_disk` wrote, or a name on the
            hub.
        split: "train" or "test". Of a file, or a folder without splits, each tenth row is for "test".
        fields: what each row must have; a mapping gives the columns by default, where they have other names.
        optional: fields that the dataset may lack.
        dataset_split: another split of the dataset than `split`; "all" takes all rows of a file.
        dataset_subset: of a dataset on the hub that has several.
        dataset_seed: shuffles the rows; without it they stay in their order.
        difficulty: takes the rows alone whose difficulty is this value, one of a list of values, or a number within
            {"min": 2, "max": 4}, one end of which may be left out.
        **names: FIELD_column names the column of a field, `difficulty_column` that of the difficulty ("difficulty").

    Raises:
        ConfigError: the dataset cannot be read, lacks a column, or no row is left; the message says what there is.
        TypeError: there is no such keyword.
    """
    check_split(split)
    if not isinstance(dataset, str | PathLike) or not str(dataset):
        raise ConfigError(f"dataset: {dataset!r:.100}; write the path of a file or a folder, or a name on the hub")
    fields, optional = ([given] if isinstance(given, str) else given for given in (fields, optional))
    chosen = _columns(fields, optional, names)
    name = str(dataset)
    rows, numbers = read(name, dataset_subset, dataset_split or split)
    if not numbers:
        found = f" for split {split!r}; try dataset_split='all'" if len(rows) else ""
        raise ConfigError(f"dataset: {name!r} has no rows{found}")
    there = columns(rows)
    for field in (*fields, *(["difficulty"] if difficulty is not None else [])):
        if chosen[field] not in there:
            raise ConfigError(f"{field}_column: {name!r} has no column {chosen[field]!r}; choose from "
                              f"{', '.join(there)}")
    if difficulty is not None:
        numbers = _of_difficulty(difficulty, column(rows, chosen["difficulty"]), numbers, name)
    if dataset_seed is not None:
        numbers = random.Random(f"{dataset_seed}").sample(numbers, len(numbers))
    return Tasks(name, rows, numbers, chosen)


def check_split(split: str) -> None:
    """Raises ConfigError if there is no such split."""
    if split not in _SPLITS:
        raise ConfigError(f"split: {split!r}; write one of {', '.join(map(repr, _SPLITS))}")


def _columns(
    fields: Sequence[str] | Mapping[str, str], optional: Sequence[str], names: Mapping[str, str]
) -> dict[str, str]:
    """The column of each field."""
    known = {field: field for field in (*optional, "difficulty", *fields)} | (
        dict(fields) if isinstance(fields, Mapping) else {})
    options = {f"{field}_column": field for field in known}
    if unknown := names.keys() - options.keys():
        choice = ", ".join((*OPTIONS, "difficulty", *options))
        raise TypeError(f"unknown keyword {', '.join(sorted(unknown))}; write one of {choice}")
    return known | {options[option]: name for option, name in names.items()}


def _of_difficulty(wanted: Any, values: Sequence[Any], numbers: Sequence[int], name: str) -> list[int]:
    if isinstance(wanted, Mapping):
        low, high = _bounds(wanted)
        found = [number for number in numbers if low <= _number(values[number], f"{name}, row {number}") <= high]
    else:
        # Files of text have "3" for 3.
        texts = {str(value) for value in (wanted if isinstance(wanted, list | tuple) else [wanted])}
        found = [number for number in numbers if str(values[number]) in texts]
    if not found:
        there = sorted({str(values[number]) for number in numbers})
        raise ConfigError(f"difficulty: no row of {name!r} has {wanted!r}; there are {', '.join(there[:_SHOWN])}"
                          + ", ..." * (len(there) > _SHOWN))
    return found


def _bounds(wanted: Mapping[str, Any]) -> tuple[float, float]:
    ends = {"min": float("-inf"), "max": float("inf")} | dict(wanted)
    if len(ends) > 2 or any(isinstance(end, bool) or not isinstance(end, int | float) for end in ends.values()):
        raise ConfigError(f"difficulty: {dict(wanted)!r}; write numbers, as {{'min': 2, 'max': 4}}")
    return ends["min"], ends["max"]


def _number(value: Any, where: str) -> float:
    try:
        return float(value)
    except (TypeError, ValueError):
        raise ConfigError(f"{where}: difficulty is {value!r:.100}, no number; write a list of the values to take"
                          ) from None
