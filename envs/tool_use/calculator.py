"""Evaluates arithmetic that a model wrote.

Invariants: the text is parsed, never executed; whatever it says, time and memory are bounded, and all that is wrong
with it is a `CalculatorError` whose text the model can be told.
"""

import ast
import math
import operator
import re
from collections.abc import Callable

__all__ = ["CalculatorError", "calculate"]

Number = int | float

_LONGEST = 200
_TEXT = re.compile(r"[0-9eE.+\-*/%() ]*")
_MOST_BITS = 256
_USABLE = "only numbers, + - * / // % ** and parentheses can be used"
_BINARY: dict[type[ast.operator], Callable[[Number, Number], Number]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
_UNARY: dict[type[ast.unaryop], Callable[[Number], Number]] = {ast.UAdd: operator.pos, ast.USub: operator.neg}


class CalculatorError(ValueError):
    """The expression has no value here; the message says why."""


def calculate(expression: str) -> str:
    """The value of an expression of numbers, `+ - * / // % **` and parentheses, in Python's syntax.

    Args:
        expression: at most 200 characters.

    Returns:
        Decimal digits: a whole number exactly, another one as the shortest text of a double.

    Raises:
        CalculatorError: it is too long, it is no such expression, it divides by zero, or it leaves the numbers of at
            most 256 bits.
    """
    if len(expression) > _LONGEST:
        raise CalculatorError(f"the expression has {len(expression)} characters; {_LONGEST} are allowed")
    if not _TEXT.fullmatch(expression):
        raise CalculatorError(_USABLE)
    try:
        value = _value(ast.parse(expression.strip(), mode="eval").body)
    except CalculatorError:
        raise
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        raise CalculatorError("that is no arithmetic expression") from None
    except ZeroDivisionError:
        raise CalculatorError("division by zero") from None
    except OverflowError:
        raise CalculatorError("the numbers are too large") from None
    return str(int(value)) if value == int(value) else repr(value)


def _value(node: ast.expr) -> Number:
    match node:
        case ast.Constant(value=int() | float() as number) if not isinstance(number, bool):
            return _bounded(number)
        case ast.UnaryOp(op=op, operand=operand) if type(op) in _UNARY:
            return _UNARY[type(op)](_value(operand))
        case ast.BinOp(left=left, op=ast.Pow(), right=right):
            return _power(_value(left), _value(right))
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _BINARY:
            return _bounded(_BINARY[type(op)](_value(left), _value(right)))
    raise CalculatorError(_USABLE)


def _power(base: Number, exponent: Number) -> Number:
    # The size of the result is known beforehand; to find it by computing it may take for ever.
    if abs(exponent) * math.log2(max(2.0, abs(base))) > _MOST_BITS:
        raise CalculatorError("the numbers are too large")
    value = base**exponent
    if isinstance(value, complex):
        raise CalculatorError("a negative number has no such power")
    return _bounded(value)


def _bounded(value: Number) -> Number:
    if not math.isfinite(value) or abs(value) >= 2**_MOST_BITS:
        raise CalculatorError("the numbers are too large")
    return value
