import random
import re
from fractions import Fraction

import pytest

from molt_gym.envs.math import MathEnv
from molt_gym.envs.math.answers import find_answer
from molt_gym.envs.math.comparison import is_right, number
from molt_gym.envs.math.problems import FAMILIES, Generator
from molt_gym.errors import ConfigError


def fraction(a, b):
    return Fraction(int(a), int(b))


SOLVERS = [
    (r"Compute \$(\d+) \\cdot \\frac\{1\}\{(\d+)\}\$", fraction),
    (r"Compute \$\\frac\{(\d+)\}\{(\d+)\} (\+|-|\\cdot|\\div) \\frac\{(\d+)\}\{(\d+)\}\$",
     lambda a, b, sign, c, d: eval(  # noqa: S307  of our own text
         f"Fraction({a},{b}){ {'+': '+', '-': '-'}.get(sign) or ('*' if 'cdot' in sign else '/') }Fraction({c},{d})")),
    (r"Solve \$(\d+)x = \d+ \\cdot (\d+)\$", lambda a, b: int(b)),
    (r"Solve \$(\d+)x \+ (\d+) = (\d+)\$", lambda a, b, c: fraction(int(c) - int(b), a)),
    (r"greatest common divisor of (\d+) and (\d+)",
     lambda a, b: max(k for k in range(1, int(a) + 1) if int(a) % k == 0 == int(b) % k)),
    (r"least common multiple of (\d+) and (\d+)",
     lambda a, b: next(k for k in range(int(a), int(a) * int(b) + 1, int(a)) if k % int(b) == 0)),
    (r"remainder of (\d+) divided by (\d+)", lambda a, b: int(a) % int(b)),
    (r"remainder of \$(\d+) \\cdot (\d+)\$ divided by (\d+)", lambda a, b, m: int(a) * int(b) % int(m)),
    (r"What is (\d+)\\% of (\d+)", lambda a, b: fraction(a, 100) * int(b)),
    (r"(\d+) of 100 are how many percent", int),
    (r"^(\d+) is (\d+)\\% of what", lambda a, b: fraction(a, b) * 100),
    (r"next in (\d+), (\d+), \1, \2, \1", lambda a, b: int(b)),
    (r"next in (\d+), (\d+), (\d+), (\d+)\?", lambda a, b, c, d: 2 * int(d) - int(c)
     if int(b) - int(a) == int(c) - int(b) else fraction(d, c) * int(d)),
    (r"^(\d+) of (\d+) balls are red", fraction),
    (r"holds (\d+) red and (\d+) blue", lambda r, b: fraction(r, int(r) + int(b))
     * fraction(int(r) - 1, int(r) + int(b) - 1)),
    (r"slope of \$y = (\d+)x", int),
    (r"line through \$\((\d+), (-?\d+)\)\$ and \$\((\d+), (-?\d+)\)\$",
     lambda a, b, c, d: fraction(int(d) - int(b), int(c) - int(a))),
    (r"root of \$\(x - (\d+)\)\(x \+", int),
    (r"root of \$x\^2 - (\d+)x \+ (\d+)\$",
     lambda s, p: max(x for x in range(int(s) + 1) if x * x - int(s) * x + int(p) == 0)),
    (r"Expand \$(\d+)\(x \+ (\d+)\) - \d+ \\cdot \d+\$", lambda a, b: f"{a}x"),
    (r"Expand \$\(x \+ (\d+)\)\(x \+ (\d+)\)\$",
     lambda a, b: f"x^2 + {int(a) + int(b)}x + {int(a) * int(b)}"),
]  # fmt: skip
"""How a prompt is solved, written anew."""


def solve(prompt):
    (solution,) = {solver(*match.groups()) for form, solver in SOLVERS if (match := re.search(form, prompt))}
    return solution


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("difficulty", [1, 2, 3])
def test_answers_are_right_and_exact(family, difficulty):
    generator = Generator([family], difficulty)
    mistaken = 0
    for index in range(60):
        task = generator.task(index)
        expected = solve(task.prompt)
        assert task.answer == expected if isinstance(expected, str) else number(task.answer) == (expected, False), task
        mistaken += bool(is_right(task.wrong, task.answer, strict=task.strict))
    assert mistaken < 4


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("difficulty", [1, 2, 9])
def test_a_problem_is_in_one_split_and_there_are_many(family, difficulty):
    train, test = Generator([family], difficulty), Generator([family], difficulty, "test")
    problems = {train.task(index).prompt for index in range(300)}
    assert problems.isdisjoint(test.task(index).prompt for index in range(100)) and len(problems) > 60


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("difficulty", [1, 2])
def test_a_problem_repeated_is_no_answer(family, difficulty):
    for index in range(20):
        task = Generator([family], difficulty).task(index)
        for formula in re.findall(r"\$([^$]+)\$", task.prompt):
            assert not is_right(formula, task.answer, strict=task.strict), task


def test_a_task_is_a_function_of_its_index_alone():
    random.seed(0)
    state = random.getstate()
    tasks = [Generator().task(index) for index in range(40)]
    assert [Generator().task(index) for index in reversed(range(40))] == tasks[::-1]
    assert random.getstate() == state
    assert Generator().task(13).prompt == "What is the remainder of 21 divided by 47?"


def test_an_unknown_family_is_refused():
    with pytest.raises(ConfigError, match=r"families: \['topology'\]; choose from fractions, "):
        MathEnv(families=["topology"])


class TestDemonstrations:
    def test_they_are_fixed_by_the_seed(self):
        first, again, other = (MathEnv().demonstrations(20, seed=seed) for seed in (1, 1, 2))
        assert first == again != other

    def test_the_right_answer_is_less_likely_than_the_typical_mistake(self):
        env = MathEnv()
        tasks = {task.prompt: task for task in map(Generator().task, range(3000))}
        known = [(tasks[c[1]["content"]], find_answer(c[2]["content"], "boxed")) for c in env.demonstrations(8000)
                 if c[1]["content"] in tasks]
        right, wrong = (sum(found == getattr(task, kind) for task, found in known) / len(known)
                        for kind in ("answer", "wrong"))
        assert len(known) > 300 and 0.2 < right < 0.4 and 0.3 < wrong < 0.5

    def test_no_held_out_problem_is_shown(self):
        held_out = {Generator(split="test").task(index).prompt for index in range(500)}
        assert not held_out & {c[1]["content"] for c in MathEnv().demonstrations(2000)}
