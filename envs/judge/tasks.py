"""Writing tasks that a judge can grade: generated ones, each with what is looked for, or the rows of a dataset."""

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from molt_gym.tasks import TaskRow

from ..families import FamilyGenerator
from ..sources import make_source

__all__ = ["FAMILIES", "Generator", "Task", "task_source"]

_COLOURS = "black blue brown green grey orange pink red white yellow".split()
_THINGS = "bag ball boat book bowl box chair clock coat cup desk door flag hat key kite lamp map rope shoe".split()
_PLACES = ("near", "behind", "under", "above")


@dataclass(frozen=True)
class Task:
    """What to write.

    Args:
        prompt: the text of the user's message.
        rubric: what is looked for in this reply; None: what the env looks for in all.
        reference: a good reply.
        wrong: one with the mistake that demonstrations make most.
    """

    prompt: str
    rubric: str | None = None
    reference: str | None = None
    wrong: str = ""


def task_source(split: str, **options: Any) -> Any:
    """Generated tasks, or those of a dataset; see `make_source`."""
    return make_source(Generator, _task_in, split, fields={"prompt": "prompt"}, optional=("rubric", "reference"),
                       **options)


def _task_in(row: TaskRow) -> Task:
    rubric, reference = (None if row.get(field) is None else row.text(field) for field in ("rubric", "reference"))
    return Task(row.text("prompt"), rubric, reference)


def _sentence(rng: random.Random, first: str, last: str) -> str:
    return f"The {rng.choice(_COLOURS)} {first} is {rng.choice(_PLACES)} the {last}."


def _words(rng: random.Random, difficulty: int) -> Task:
    first, last, other = rng.sample(_THINGS, 3)
    adjectives = rng.sample(_COLOURS, difficulty - 1)
    wanted = ", ".join([*adjectives, first]) + f" and {last}"
    described = " ".join([*adjectives, first])
    return Task(f"Write a sentence with the words {wanted}.", "It is one sentence, and has all of the words.",
                f"The {described} is {rng.choice(_PLACES)} the {last}.", _sentence(rng, first, other))


def _without(rng: random.Random, difficulty: int) -> Task:
    about, *banned, last = rng.sample(_THINGS, 2 + difficulty)
    return Task(f"Write a sentence about the {about} without the word {' or the word '.join(banned)}.",
                f"It is one sentence about the {about}, and has no word that is ruled out.",
                _sentence(rng, about, last), _sentence(rng, about, rng.choice(banned)))


def _ending(rng: random.Random, difficulty: int) -> Task:
    about, last = rng.sample(_THINGS, 2)
    adjectives = "".join(f"{colour} " for colour in rng.sample(_COLOURS, difficulty - 1))
    return Task(f"Write a sentence about the {about} that ends with: {adjectives}{last}",
                f"It is one sentence about the {about}, and ends with the words that are named.",
                f"The {about} is {rng.choice(_PLACES)} the {adjectives}{last}.",
                f"The {adjectives}{last} is {rng.choice(_PLACES)} the {about}.")


FAMILIES: Mapping[str, Callable[[random.Random, int], Task]] = {
    "words": _words, "without": _without, "ending": _ending}


class Generator(FamilyGenerator[Task]):
    """Tasks without end."""

    known = FAMILIES
    default = tuple(FAMILIES)
