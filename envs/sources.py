"""Where an env's tasks come from: families that generate them, or the rows of a dataset."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from typing import Any, Generic, TypeVar

from molt_gym.errors import ConfigError
from molt_gym.tasks import OPTIONS, TaskRow, Tasks, load_tasks

from .families import FamilyGenerator

__all__ = ["FromRows", "make_source"]

T = TypeVar("T")


@dataclass(frozen=True)
class FromRows(Generic[T]):
    """The rows of a dataset, each of them read as a task when it is played."""

    rows: Tasks
    read: Callable[[TaskRow], T]

    @property
    def num_tasks(self) -> int:
        """How many there are."""
        return len(self.rows)

    def task(self, index: int) -> T:
        """The task of a row.

        Raises:
            EnvFailure: reason "task": the row holds none.
        """
        return self.read(self.rows[index])


def make_source(
    generator: Callable[..., FamilyGenerator],
    read: Callable[[TaskRow], Any],
    split: str,
    *,
    fields: Mapping[str, str],
    optional: Sequence[str] = (),
    families: Sequence[str] | None = None,
    dataset: str | PathLike[str] | None = None,
    **options: Any,
) -> Any:
    """A generator of tasks, or, where there is a dataset, its rows.

    Args:
        generator: takes families, difficulty (1 by default) and split.
        read: makes a task of a row.
        fields, optional, **options: as for `load_tasks`.

    Raises:
        ConfigError: options contradict each other, or as `load_tasks` and `generator`.
        TypeError: there is no such option.
    """
    if dataset is not None:
        if families is not None:
            raise ConfigError("families: these are for generated tasks; leave out families or dataset")
        return FromRows(load_tasks(dataset, split, fields=fields, optional=optional, **options), read)
    difficulty = options.pop("difficulty", None)
    known = {*OPTIONS, *(f"{field}_column" for field in (*fields, *optional, "difficulty"))}
    if unknown := options.keys() - known:
        raise TypeError(f"unexpected keyword argument {min(unknown)!r}")
    if given := sorted(option for option, value in options.items() if value is not None):
        raise ConfigError(f"{', '.join(given)}: this is for a dataset; write dataset too")
    return generator(families, 1 if difficulty is None else difficulty, split)
