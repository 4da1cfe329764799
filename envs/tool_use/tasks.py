"""Families of generated tasks: questions about numbers that take a tool or two to answer."""

import json
import random
from collections.abc import Callable
from dataclasses import dataclass

from ..families import FamilyGenerator
from .tools import CALCULATE, COLUMNS, LOOK_UP, Table, run_tool

__all__ = ["DEFAULT_FAMILIES", "FAMILIES", "Generator", "Task", "ToolCall"]

_COLORS = "black blue brown gray green orange pink red white yellow".split()
_THINGS = "bag ball boat book bowl box chair clock coat cup desk door flag hat key kite lamp map rope shoe".split()
_ITEMS_IN_TABLE = 4


@dataclass(frozen=True)
class ToolCall:
    """A call of a tool; `arguments` are JSON."""

    name: str
    arguments: str


@dataclass(frozen=True)
class Task:
    """A question and its answer.

    Args:
        prompt: the text of the user's message.
        table: what `look_up` reads.
        right: calls, the last of which gives the answer.
        wrong: the mistake that demonstrations make most, likewise.
    """

    prompt: str
    table: Table
    right: tuple[ToolCall, ...]
    wrong: tuple[ToolCall, ...]

    @property
    def answer(self) -> int:
        """The right number."""
        return int(run_tool(self.right[-1].name, self.right[-1].arguments, self.table))


Family = Callable[[random.Random, int], Task]


def calculation(expression: str) -> ToolCall:
    """The call that calculates."""
    return ToolCall(CALCULATE, json.dumps({"expression": expression}))


def look(item: str, column: str) -> ToolCall:
    """The call that looks up."""
    return ToolCall(LOOK_UP, json.dumps({"item": item, "column": column}))


def _arithmetic(question: str, right: str, wrong: str) -> Family:
    """Questions about numbers a, b and c."""

    def make(rng: random.Random, difficulty: int) -> Task:
        numbers = {name: rng.randint(2, 10 ** (difficulty + 1) - 1) for name in "abc"}
        calls = [(calculation(expression.format(**numbers)),) for expression in (right, wrong)]
        return Task(question.format(**numbers), _table(rng, difficulty), *calls)

    return make


def _looked_up(question: str, column: str, mistaken: str) -> Family:
    def make(rng: random.Random, difficulty: int) -> Task:
        table = _table(rng, difficulty)
        item = rng.choice(list(table))
        return Task(question.format(item), table, (look(item, column),), (look(item, mistaken),))

    return make


def _cost(rng: random.Random, difficulty: int) -> Task:
    """Looks a price up and calculates with it; the mistake is to forget the latter."""
    table = _table(rng, difficulty)
    item, count = rng.choice(list(table)), rng.randint(2, 10 ** (difficulty + 1) - 1)
    price = look(item, "price")
    return Task(
        f'What do {count} of "{item}" cost?',
        table,
        (price, calculation(f"{count}*{table[item]['price']}")),
        (price,),
    )


def _worth(rng: random.Random, difficulty: int) -> Task:
    """Looks up two numbers and multiplies them; the mistake is to add them."""
    table = _table(rng, difficulty)
    item = rng.choice(list(table))
    row, looks = table[item], (look(item, "stock"), look(item, "price"))
    right, wrong = (calculation(f"{row['stock']}{sign}{row['price']}") for sign in "*+")
    return Task(f'What is all of "{item}" worth?', table, (*looks, right), (*looks, wrong))


def _table(rng: random.Random, difficulty: int) -> Table:
    """Prices as long as the numbers of questions, and others twice as long."""
    digits = {column: difficulty + 1 if column == "price" else 2 * (difficulty + 1) for column in COLUMNS}
    items = [f"{rng.choice(_COLORS)} {thing}" for thing in rng.sample(_THINGS, _ITEMS_IN_TABLE)]
    return {
        item: {column: rng.randint(10 ** (digits[column] - 1), 10 ** digits[column] - 1) for column in COLUMNS}
        for item in items
    }


FAMILIES: dict[str, Family] = {
    "times": _arithmetic("What is {a} times {b}?", "{a}*{b}", "{a}+{b}"),
    "square": _arithmetic("What is the square of {a}?", "{a}**2", "{a}**3"),
    "fence": _arithmetic("How long is a fence around {a} by {b} meters?", "2*({a}+{b})", "{a}*{b}"),
    "boxes": _arithmetic("How much is {a} boxes of {b}, and {c} more?", "{a}*{b}+{c}", "{a}*({b}+{c})"),
    "price": _looked_up('What does "{}" cost?', "price", "weight"),
    "stock": _looked_up('How many of "{}" are there?', "stock", "price"),
    "weight": _looked_up('How heavy is "{}"?', "weight", "stock"),
    "cost": _cost,
    "worth": _worth,
}
"""All families by name."""

DEFAULT_FAMILIES = tuple(family for family in FAMILIES if family != "worth")
"""Those that take at most two calls."""


class Generator(FamilyGenerator[Task]):
    """Tasks of these families, by default those of `DEFAULT_FAMILIES`; difficulty makes numbers longer."""

    known, default = FAMILIES, DEFAULT_FAMILIES
