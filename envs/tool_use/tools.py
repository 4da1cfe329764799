"""The two tools, as a model is offered them and as they run.

Invariant: a call never raises. Whatever is wrong with it is said in the text that it returns, for the model to read.
"""

import json
from collections.abc import Mapping
from typing import Any

from .calculator import CalculatorError, calculate

__all__ = ["CALCULATE", "COLUMNS", "LOOK_UP", "TOOLS", "Table", "run_tool"]

CALCULATE, LOOK_UP = "calculate", "look_up"
COLUMNS = ("price", "stock", "weight")

Table = Mapping[str, Mapping[str, int]]
"""Numbers by item and column."""


def _schema(name: str, description: str, properties: Mapping[str, Any]) -> dict[str, Any]:
    parameters = {"type": "object", "properties": dict(properties), "required": list(properties)}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


TOOLS: list[dict[str, Any]] = [
    _schema(
        CALCULATE,
        "The value of an arithmetic expression.",
        {"expression": {"type": "string", "description": "Numbers, + - * / // % ** and parentheses, such as 2*(3+4)."}},
    ),
    _schema(
        LOOK_UP,
        "A number from the list of the shop: what an item costs, how many there are, or how much one weighs.",
        {"item": {"type": "string"}, "column": {"type": "string", "enum": list(COLUMNS)}},
    ),
]
"""Schemas in the OpenAI form."""


def run_tool(name: str, arguments: str, table: Table) -> str:
    """What a call gives, or what is wrong with it, which begins with "Error: ".

    Args:
        name: of the tool.
        arguments: a JSON object, as the model wrote it.
        table: what `look_up` reads.
    """
    parameters = next((tool["function"]["parameters"]["required"] for tool in TOOLS
                       if tool["function"]["name"] == name), None)
    if parameters is None:
        return f"Error: there is no tool {name!r:.50}; call {CALCULATE} or {LOOK_UP}"
    try:
        given = json.loads(arguments)
    except (ValueError, RecursionError):
        return "Error: the arguments are no JSON"
    if not isinstance(given, dict) or any(not isinstance(given.get(key), str) for key in parameters):
        return f"Error: {name} takes {' and '.join(parameters)}, as text"
    if name == LOOK_UP:
        return _look_up(given["item"], given["column"], table)
    try:
        return calculate(given["expression"])
    except CalculatorError as error:
        return f"Error: {error}"


def _look_up(item: str, column: str, table: Table) -> str:
    if item not in table:
        return f"Error: there is no {item!r:.50}; there are {', '.join(table)}"
    if column not in table[item]:
        return f"Error: there is no column {column!r:.50}; there are {', '.join(table[item])}"
    return str(table[item][column])
