r"""What a problem is, and families of generated ones.

At difficulty 1 an answer can be read off by whoever knows what is asked; from 2 on it has to be computed, with numbers
that get longer. Right answers are exact, in LaTeX; `wrong` is the mistake that demonstrations make most.
"""

import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction

from ..families import FamilyGenerator

__all__ = ["FAMILIES", "Generator", "Problem"]


@dataclass(frozen=True)
class Problem:
    """A problem and its answer.

    Args:
        prompt: the text of the first message of the user.
        answer: in LaTeX.
        strict: whether an answer must have the form of the right one; see `comparison.is_right`.
        wrong: a mistaken answer, "" where none is known.
    """

    prompt: str
    answer: str
    strict: bool = False
    wrong: str = ""


Made = tuple[str, object, object]


def _family(easy: Callable[[int, int], Made], hard: Callable[[random.Random, int], Made]) -> Callable:
    """A family of an easy form, for two different numbers of two digits, and a form to compute with numbers up to n."""

    def make(rng: random.Random, difficulty: int) -> Problem:
        if difficulty == 1:
            prompt, right, wrong = easy(*rng.sample(range(2, 100), 2))
        else:
            prompt, right, wrong = hard(rng, 10 ** (difficulty - 1))
        return Problem(prompt, _latex(right), strict=True, wrong=_latex(wrong))

    return make


def _latex(value: object) -> str:
    if isinstance(value, Fraction) and value.denominator != 1:
        return f"{'-' * (value < 0)}\\frac{{{abs(value.numerator)}}}{{{value.denominator}}}"
    return str(value)


def _fractions(rng: random.Random, n: int) -> Made:
    (a, c), (b, d) = _two(rng, n), _two(rng, n)
    right = {"+": Fraction(a, b) + Fraction(c, d), "-": Fraction(a, b) - Fraction(c, d),
             "\\cdot": Fraction(a * c, b * d), "\\div": Fraction(a * d, b * c)}
    sign = rng.choice(list(right))
    return f"Compute $\\frac{{{a}}}{{{b}}} {sign} \\frac{{{c}}}{{{d}}}$.", right[sign], Fraction(a + c, b + d)


def _linear(rng: random.Random, n: int) -> Made:
    a, x = _two(rng, n)
    b = rng.randint(1, n)
    return f"Solve ${a}x + {b} = {a * x + b}$ for $x$.", x, a * x


def _common(rng: random.Random, n: int) -> Made:
    k = rng.randint(2, n)
    a, b = (k * factor for factor in _two(rng, n))
    values = math.gcd(a, b), math.lcm(a, b)
    asked = rng.randrange(2)
    name = ("greatest common divisor", "least common multiple")[asked]
    return f"What is the {name} of {a} and {b}?", values[asked], values[1 - asked]


def _modular(rng: random.Random, n: int) -> Made:
    m, a, b = (rng.randint(3, 9 * n) for _ in range(3))
    return f"What is the remainder of ${a} \\cdot {b}$ divided by {m}?", a * b % m, a * b // m


def _percent(rng: random.Random, n: int) -> Made:
    share, unit = _two(rng, 100)
    whole = 100 * rng.randint(1, n) // math.gcd(share, 100)
    if unit % 2:
        return f"What is {share}\\% of {whole}?", Fraction(share * whole, 100), share * whole
    return f"{share * whole // 100} is {share}\\% of what number?", whole, share * whole


def _sequence(rng: random.Random, n: int) -> Made:
    first, step = _two(rng, n)
    if rng.randrange(2):
        *terms, right = (first + step * k for k in range(5))
        wrong = right + first
    else:
        *terms, right = (first * (2 + step % 4) ** k for k in range(5))
        wrong = 2 * terms[-1] - terms[-2]
    return f"What comes next in {', '.join(map(str, terms))}?", right, wrong


def _probability(rng: random.Random, n: int) -> Made:
    red, blue = _two(rng, n)
    right = Fraction(red * (red - 1), (red + blue) * (red + blue - 1))
    prompt = f"A bag holds {red} red and {blue} blue balls. What is the probability that two drawn at once are red?"
    return prompt, right, Fraction(red, red + blue)


def _slope(rng: random.Random, n: int) -> Made:
    x, dx = _two(rng, n)
    y, dy = rng.randint(-n, n), rng.choice((-1, 1)) * rng.randint(1, n)
    prompt = f"What is the slope of the line through $({x}, {y})$ and $({x + dx}, {y + dy})$?"
    return prompt, Fraction(dy, dx), Fraction(dx, dy)


def _roots(rng: random.Random, n: int) -> Made:
    a, b = sorted(_two(rng, n))
    return f"What is the largest root of $x^2 - {a + b}x + {a * b}$?", b, a


def _expand(rng: random.Random, n: int) -> Made:
    a, b = _two(rng, n)
    return f"Expand $(x + {a})(x + {b})$.", f"x^2 + {a + b}x + {a * b}", f"x^2 + {a * b}x + {a + b}"


def _two(rng: random.Random, n: int) -> list[int]:
    return rng.sample(range(2, n + 10), 2)


FAMILIES: dict[str, Callable[[random.Random, int], Problem]] = {
    "fractions": _family(
        lambda a, b: (f"Compute ${a} \\cdot \\frac{{1}}{{{b}}}$.", f"\\frac{{{a}}}{{{b}}}", f"\\frac{{{b}}}{{{a}}}"),
        _fractions,
    ),
    "linear": _family(lambda a, b: (f"Solve ${a}x = {a} \\cdot {b}$ for $x$.", b, a), _linear),
    "common": _family(
        lambda a, b: (f"What is the least common multiple of {a} and {(2 + b // 12) * a}?", (2 + b // 12) * a, a)
        if b % 2
        else (f"What is the greatest common divisor of {a} and {(2 + b // 12) * a}?", a, (2 + b // 12) * a),
        _common,
    ),
    "modular": _family(
        lambda a, b: (f"What is the remainder of {min(a, b)} divided by {max(a, b)}?", min(a, b), max(a, b)), _modular
    ),
    "percent": _family(
        lambda a, b: (f"What is {a}\\% of 100?", a, 100)
        if b % 2
        else (f"{a} of 100 are how many percent?", a, 100),
        _percent,
    ),
    "sequence": _family(lambda a, b: (f"What comes next in {a}, {b}, {a}, {b}, {a}?", b, a), _sequence),
    "probability": _family(
        lambda a, b: (
            f"{min(a, b)} of {max(a, b)} balls are red. What is the probability to draw a red one?",
            f"\\frac{{{min(a, b)}}}{{{max(a, b)}}}",
            f"\\frac{{{max(a, b)}}}{{{min(a, b)}}}",
        ),
        _probability,
    ),
    "slope": _family(lambda a, b: (f"What is the slope of $y = {a}x + {b}$?", a, b), _slope),
    "roots": _family(
        lambda a, b: (f"What is the largest root of $(x - {a})(x + {b})$?", a, b), _roots
    ),
    "expand": _family(lambda a, b: (f"Expand ${a}(x + {b}) - {a} \\cdot {b}$.", f"{a}x", f"{b}x"), _expand),
}
"""All families by name."""


class Generator(FamilyGenerator[Problem]):
    """Problems of these families, by default of all."""

    known, default = FAMILIES, tuple(FAMILIES)
