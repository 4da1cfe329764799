"""Families of generated tasks: small programs to print a value, and small functions."""

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ..families import FamilyGenerator
from .tasks import OutputTest, Task

__all__ = ["FAMILIES", "PRINT_FAMILIES", "Generator", "PrintTask"]

_WORDS = (
    "ant apple arrow bag ball bank bear bird book box bread bus cake car cat chair city cloud coat cow cup day dog "
    "door duck egg farm fish flag fox frog game gift glass goat gold hat hill horse house ice king lake lamp leaf lion "
    "map milk moon nest night paper pen pig plane rain ring river road rock rose salt sand ship shoe snow star stone "
    "sun table tree wind wolf wood"
).split()


@dataclass(frozen=True)
class PrintTask(Task):
    """A task whose answer is one expression to print; `wrong` is the mistake that demonstrations make most."""

    right: str = ""
    wrong: str = ""


def value_of(expression: str) -> str:
    """What printing one of this module's own expressions writes; never give it text of anyone else."""
    return f"{eval(expression)}\n"  # noqa: S307


Family = Callable[[random.Random, int], Task]
Pick = Callable[[random.Random, int], Any]


def _print(prompt: str, right: str, wrong: str) -> PrintTask:
    return PrintTask(f"Print {prompt}.", outputs=(OutputTest("", value_of(right)),), right=right, wrong=wrong)


def _arithmetic(word: str, right: str, wrong: str) -> Family:
    def make(rng: random.Random, difficulty: int) -> Task:
        a, b = _numbers(rng, difficulty, 2)
        return _print(f"{a} {word} {b}", right.format(a=a, b=b), wrong.format(a=a, b=b))

    return make


def _of_numbers(prompt: str, right: str, wrong: str) -> Family:
    def make(rng: random.Random, difficulty: int) -> Task:
        numbers = _numbers(rng, difficulty, 2 + difficulty)
        spaced, tight = ", ".join(map(str, numbers)), ",".join(map(str, numbers))
        return _print(prompt.format(spaced), right.format(tight), wrong.format(tight))

    return make


def _of_word(prompt: str, right: str, wrong: str) -> Family:
    def make(rng: random.Random, difficulty: int) -> Task:
        word = _word(rng, difficulty)
        return _print(prompt.format(word), right.format(word), wrong.format(word))

    return make


def _numbers(rng: random.Random, difficulty: int, count: int) -> list[int]:
    return [rng.randint(1, 10 ** (difficulty + 1) - 1) for _ in range(count)]


PRINT_FAMILIES: dict[str, Family] = {
    "add": _arithmetic("plus", "{a}+{b}", "{a}-{b}"),
    "subtract": _arithmetic("minus", "{a}-{b}", "{b}-{a}"),
    "multiply": _arithmetic("times", "{a}*{b}", "{a}+{b}"),
    "max": _of_numbers("the largest of {}", "max({})", "sum([{}])"),
    "min": _of_numbers("the smallest of {}", "min({})", "max({})"),
    "sort": _of_numbers("the sorted list of {}", "sorted([{}])", "sum([{}])"),
    "reverse": _of_word('"{}" reversed', '"{}"[::-1]', '"{}"'),
    "length": _of_word('the length of "{}"', 'len("{}")', '"{}"'),
}
"""The families whose answer is one expression to print."""


def _function(prompt: str, number: Pick, argument: Pick, reference: Callable[[int, Any], Any]) -> Family:
    """Functions f of one argument, with a number in their description; tested on six arguments."""

    def make(rng: random.Random, difficulty: int) -> Task:
        k = number(rng, difficulty)
        checks = [f"assert f({x!r}) == {reference(k, x)!r}" for x in (argument(rng, difficulty) for _ in range(6))]
        return Task(f"Write a function {prompt.format(k)}.", checks=tuple(checks))

    return make


def _read_sum(rng: random.Random, difficulty: int) -> Task:
    k = _factor(rng, difficulty)
    inputs = [_numbers(rng, difficulty, rng.randint(1, 4)) for _ in range(3)]
    outputs = tuple(OutputTest("".join(f"{n}\n" for n in numbers), f"{k * sum(numbers)}\n") for numbers in inputs)
    return Task(f"Read integers, one on each line, until input ends. Print {k} times their sum.", outputs=outputs)


def _factor(rng: random.Random, difficulty: int) -> int:
    return rng.randint(2, 10**difficulty + 20)


def _whole(rng: random.Random, difficulty: int) -> int:
    return rng.randint(0, 10 ** (difficulty + 1))


def _list(rng: random.Random, difficulty: int) -> list[int]:
    return _numbers(rng, difficulty, rng.randint(0, 3 + difficulty))


def _word(rng: random.Random, difficulty: int) -> str:
    return "".join(rng.choices(_WORDS, k=difficulty))


def _shifted(k: int, word: str) -> str:
    return "".join(chr((ord(letter) - 97 + k) % 26 + 97) for letter in word)


FAMILIES: dict[str, Family] = {
    **PRINT_FAMILIES,
    "read_sum": _read_sum,
    "digit_sum": _function(
        "f(n) that returns the sum of the digits of n, times {}",
        _factor,
        _whole,
        lambda k, n: k * sum(map(int, str(n))),
    ),
    "count_multiples": _function(
        "f(n) that returns how many numbers from 1 to n are divisible by {}",
        lambda rng, difficulty: rng.randint(2, 9 + 10 * difficulty),
        _whole,
        lambda k, n: n // k,
    ),
    "keep_above": _function(
        "f(xs) that returns the list of the items of xs above {}",
        lambda rng, difficulty: rng.randint(2 * 10**difficulty, 8 * 10**difficulty),
        _list,
        lambda k, xs: [x for x in xs if x > k],
    ),
    "pairs": _function(
        "f(xs) that returns the list of the tuples (x, x + {}) for x in xs",
        _factor,
        _list,
        lambda k, xs: [(x, x + k) for x in xs],
    ),
    "shift": _function(
        "f(s) that moves each letter of s by {} in the alphabet, with a after z",
        lambda rng, difficulty: rng.randint(1, 25),
        _word,
        _shifted,
    ),
}
"""All families by name; those after `PRINT_FAMILIES` have tests with several inputs."""


class Generator(FamilyGenerator[Task]):
    """Tasks of these families, by default the eight of `PRINT_FAMILIES`; difficulty makes what is in them longer."""

    known, default = FAMILIES, tuple(PRINT_FAMILIES)
