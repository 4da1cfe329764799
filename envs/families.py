"""Tasks without end, made from an index by families of tasks that take turns.

Invariants: a task depends on split, difficulty, family and index alone; a prompt belongs to one split, chosen by its
hash, so that no task of "test" is ever met in "train".
"""

import random
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar, Generic, Protocol, TypeVar

from molt_gym.errors import ConfigError
from molt_gym.tasks import check_split

__all__ = ["FamilyGenerator", "HasPrompt"]

_TEST_ONE_IN = 5


class HasPrompt(Protocol):
    """What a family makes."""

    @property
    def prompt(self) -> str:
        """The text of the first message of the user."""
        ...


T = TypeVar("T", bound=HasPrompt)


class FamilyGenerator(Generic[T]):
    """Tasks of some families in turn. A subclass names the families that there are.

    Args:
        families: names in `known`, or one; None: those of `default`.
        difficulty: from 1 on.
        split: "train" or "test".

    Raises:
        ConfigError: there is no such family, difficulty or split.
    """

    known: ClassVar[Mapping[str, Callable[[random.Random, int], HasPrompt]]]
    default: ClassVar[Sequence[str]]
    num_tasks: None = None

    def __init__(self, families: Sequence[str] | None = None, difficulty: int = 1, split: str = "train") -> None:
        chosen = self.default if families is None else families
        self.families = (chosen,) if isinstance(chosen, str) else tuple(chosen)
        unknown = [family for family in self.families if family not in self.known]
        if unknown or not self.families:
            raise ConfigError(f"families: {unknown or 'none'}; choose from {', '.join(self.known)}")
        if isinstance(difficulty, bool) or not isinstance(difficulty, int) or not 1 <= difficulty <= 9:
            raise ConfigError(f"difficulty: {difficulty!r}; write an integer from 1 to 9")
        check_split(split)
        self.difficulty, self.split = difficulty, split

    def task(self, index: int) -> T:
        """The task of an index, of family number `index` modulo their number."""
        family = self.families[index % len(self.families)]
        rng = random.Random(f"{self.split}/{self.difficulty}/{family}/{index}")
        while True:
            task = self.known[family](rng, self.difficulty)
            held_out = zlib.crc32(f"{family}/{task.prompt}".encode()) % _TEST_ONE_IN == 0
            if held_out == (self.split == "test"):
                return task
