"""What passes and what does not; above all, what a program may try in order to pass without being right."""

import time

import pytest

from molt_gym.envs.code_exec.grading import grade, judge_output
from molt_gym.envs.code_exec.tasks import OutputTest, Task
from molt_gym.errors import EnvFailure
from molt_gym.sandbox import Execution, Limits, make_sandbox

LIMITS = Limits(seconds=5)
SQUARE = Task("square", checks=("assert f(3) == 9", "assert f(-2) == 4"))


VALUES = "(1, [2.5, None], {'a': {1, 2}, 3: b'x'}, 1j, frozenset())"
UNITTEST = """
import unittest

class Test(unittest.TestCase):
    def test(self):
        self.assertEqual(f(1), 1)

unittest.main()
"""
RAISES = """
try:
    f(-1)
    assert False
except ValueError as error:
    assert str(error) == "no"
"""
RAISES_OWN = """
class TooFew(ValueError): pass
def f(x):
    if x < 0: raise KeyError("k")
    raise TooFew("no", 2)
"""
CATCHES = """
for x, kind, args, text in ((-1, KeyError, ("k",), "'k'"), (1, ValueError, ("no", 2), "('no', 2)")):
    try:
        f(x)
        assert False
    except kind as error:
        assert (error.args, str(error)) == (args, text)
"""
COUNTS = """
from collections import Counter, OrderedDict
def f(s): return Counter(s), OrderedDict(a=1, b=2)
def g(c): return c.most_common(1)
"""
SUBCLASSES = """
from collections import Counter, namedtuple
P = namedtuple("P", "x y")
def f(s): return P(Counter(s), 2)
"""
VIEWS = "def f(d): return d.keys(), d.values(), d.items()"
LIBRARY = """
from collections import deque
from datetime import timedelta
from decimal import Decimal
from fractions import Fraction
def f(): return Fraction(1, 3), Decimal("0.5"), deque([4])
def g(day): return day + timedelta(days=2)
"""
ENUMS = """
from enum import Enum, IntEnum
class Word(str, Enum): A = "a"
class Number(IntEnum): ONE = 1
def f(): return Word.A, Number.ONE, {Word.A: True}
"""
DATACLASS = """
from __future__ import annotations
import pickle
from dataclasses import dataclass
@dataclass
class P:
    x: int
def f(x): return pickle.loads(pickle.dumps(P(x))).x
"""
HONEST = {
    "plain": ("def f(x): return x * x", *SQUARE.checks),
    "keywords": ("f = lambda *a, k=0: sum(a) + k", "assert f(1, 2, k=3) == 6"),
    "types": (f"def f(): return {VALUES}", f"assert f() == {VALUES}", "assert type(f()) is tuple"),
    "long": ("def f(): return 10 ** 5000", "assert f() == 10 ** 5000"),
    "floats": ("def f(): return float('nan'), float('-inf')", "a, b = f()", "assert a != a and b < 0"),
    "text": ("def f(s): return s[::-1]", "assert f('a\\ud800é\\u2028') == '\\u2028é\\ud800a'"),
    "generators": ("def f(n):\n    yield n\n    yield 2", "assert list(f(3)) == [3, 2]", "assert next(f(1)) == 1"),
    "subclasses": (SUBCLASSES, "assert f('aab') == ({'a': 2, 'b': 1}, 2)"),
    "enums": (ENUMS, "assert f() == ('a', 1, {'a': True})"),
    "ranges": ("def f(n): return range(1, n)", "assert f(3) == range(1, 3)", "assert list(f(3)) == [1, 2]"),
    "views": (VIEWS, "a, b, c = f({1: 2})", "assert a == {1}", "assert list(b) == [2]", "assert list(c) == [(1, 2)]"),
    "library types": (LIBRARY, "from fractions import Fraction", "a, b, c = f()",
                      "assert (a, b, list(c)) == (Fraction(1, 3), 0.5, [4])",
                      "from datetime import date", "assert g(date(2024, 2, 28)) == date(2024, 3, 1)"),
    "dataclasses": (DATACLASS, "assert f(3) == 3"),
    "a builtin's name": ("def f(n): return n\ndef sum(a, b): return 9", "assert f(1) == 1", "assert sum([1, 2]) == 3"),
    "a module's name": ("def queue(x): return x", "assert queue(3) == 3"),
    "list in place": ("def f(xs): xs.sort()", "x = [3, 1]", "assert f(x) is None", "assert x == [1, 3]"),
    "dict in place": ("def f(d): d['k'] = 1", "d = {}", "f(d)", "assert d == {'k': 1}"),
    "exceptions": ("def f(x):\n    if x < 0: raise ValueError('no')\n    return x", RAISES, "assert f(1) == 1"),
    "exceptions of its own": (RAISES_OWN, CATCHES),
    "counters": (COUNTS, "from collections import Counter, OrderedDict", "a, b = f('aab')",
                 "assert a.most_common(1) == g(Counter('aab')) == [('a', 2)]",
                 "assert b == OrderedDict(a=1, b=2) != OrderedDict(b=2, a=1)"),
    "two functions": ("def g(x): return x + 1\ndef h(x): return 2 * x", "assert h(g(1)) == 4"),
    "imports": ("import math\nf = math.sqrt", "assert math.isclose(f(2), 1.41421356, rel_tol=1e-6)"),
    "unittest": ("def f(x): return x", UNITTEST),
    "noise": ("import sys\nprint('noise', file=sys.stderr)\ndef f(x):\n    print(x)\n    return x", "assert f(1) == 1"),
}

SAY = "import os, sys\nsay = lambda text: os.write(int(sys.argv[2]), text)\n"
ENCODE = "import sys\nsys.modules['__main__'].encode = lambda v: "
ONE = "\ndef f(x): return 1"
KILL = """
import os
for pid in range(2, 100):
    if pid != os.getpid():
        try: os.kill(pid, 9)
        except OSError: pass
"""
DISHONEST = [
    "import os; os._exit(0)",
    "raise SystemExit(0)",
    "def f(x): import os; os._exit(0)",
    "def f(x): raise SystemExit(0)",
    "def f(x): raise KeyboardInterrupt",
    "def f(x): raise GeneratorExit",
    "class SystemExit(Exception): pass\ndef f(x): raise SystemExit(0)",
    "class Equal:\n    def __eq__(self, other): return True\ndef f(x): return Equal()",
    "class Equal(int):\n    def __eq__(self, other): return True\ndef f(x): return Equal(1)",
    "class Equal(list):\n    def __eq__(self, other): return True\ndef f(x): return Equal()",
    "import builtins\nbuiltins.AssertionError = type('A', (Exception,), {})" + ONE,
    "import sys\nsys.settrace(lambda *a: None)\nsys.setprofile(lambda *a: None)" + ONE,
    "import atexit, os\natexit.register(os._exit, 0)" + ONE,
    "import os\nos.closerange(0, 1024)" + ONE,
    "import os\nos.kill(-1, 9)" + ONE,
    KILL + ONE,
    "print('passed')\ndef f(x): print('OK'); return 1",
    "import json\njson.dumps = lambda *a, **k: '[\"value\", true, [3]]'" + ONE,
    SAY + "say(b'[\"ready\"]\\n[\"passed\"]\\n[\"value\", 9, [3]]\\n[\"value\", 0, [1]]\\n')" + ONE,
    SAY + "say(b'\\x00\\xff garbage\\n' * 9)" + ONE,
    SAY + "say(b'[\"ready\"]\\n' + b'[' * 60_000 + b'\\n')" + ONE,
    SAY + "os.close(int(sys.argv[2]))" + ONE,
    ENCODE + "{'iterator': 5}" + ONE,
    ENCODE + "{'bytes': [1], 'x': 2}" + ONE,
    ENCODE + "{'dict': [[[], 1]]}" + ONE,
    ENCODE + "{'range': ['x']}" + ONE,
    ENCODE + "{'system': ['x']}" + ONE,
    "def f(x): return lambda: 1",
    "def f(x): return f",
    "def f(x): return f(x)",
    "def f(x):\n    y = []\n    for _ in range(5000): y = [y]\n    return y",
    "def g(x): return 9",
    "f = 9",
    "def f(x:",
    "f\0",
    "",
]
HANGING = [
    "while True: pass",
    "def f(x):\n    while True: pass",
    "import time\ndef f(x): time.sleep(60)",
    "import itertools\ndef f(x): return itertools.count()",
    SAY + "say(b'[\"ready\"]')\nwhile True: pass",
]


@pytest.fixture(params=["bubblewrap", "subprocess"])
def sandbox(request):
    return make_sandbox(request.param)


@pytest.fixture
def bubblewrap():
    return make_sandbox("bubblewrap")


def verdict(sandbox, code, *checks, entry_point=None, limits=LIMITS):
    return grade(sandbox, code, Task("", checks=checks, entry_point=entry_point), limits)


class TestHonestPrograms:
    @pytest.mark.parametrize("name", HONEST)
    def test_right_functions_pass(self, sandbox, name):
        code, *checks = HONEST[name]
        assert verdict(sandbox, code, *checks).outcome == "passed"

    def test_a_program_of_tests_with_an_entry_point(self, sandbox):
        check = """
METADATA = {'author': 'x'}

def check(candidate):
    assert candidate([1.0, 2.0, 3.9, 4.0, 5.0, 2.2], 0.3) == True
    for values in ([1.0, 2.0], []):
        assert helper(values) == sorted(values)
"""
        code = """
def helper(xs):
    return sorted(xs)

def close(numbers, threshold):
    xs = helper(numbers)
    return any(b - a < threshold for a, b in zip(xs, xs[1:]))

if __name__ == "__main__":
    print(close(input()))
"""
        assert verdict(sandbox, code, check, entry_point="close").outcome == "passed"
        wrong = verdict(sandbox, code.replace("any", "all"), check, entry_point="close")
        assert (wrong.outcome, wrong.feedback) == ("wrong", "A hidden test failed. Wrong, try again.")


    def test_the_entry_point_may_be_a_method(self, sandbox):
        code = "class Solution:\n    def twice(self, x): return 2 * x"
        check = "def check(candidate): assert candidate(x=2) == 4"
        assert verdict(sandbox, code, check, entry_point="Solution().twice").outcome == "passed"
        assert verdict(sandbox, code.replace("2 *", "3 *"), check, entry_point="Solution().twice").outcome == "wrong"
        missing = verdict(sandbox, "x = 1", check, entry_point="Solution().twice")
        assert missing.feedback == "Error: NameError: name 'Solution' is not defined"

    def test_the_entry_point_may_have_the_name_of_a_builtin(self, sandbox):
        code, tests = "def sum(a, b): return a + b", "assert sum(10, 15) == 25"
        assert verdict(sandbox, code, tests, entry_point="sum").outcome == "passed"
        assert verdict(sandbox, code.replace("+", "-"), tests, entry_point="sum").outcome == "wrong"


class TestDishonestPrograms:
    @pytest.mark.parametrize("code", DISHONEST)
    def test_nothing_but_right_values_passes(self, sandbox, code):
        if "os.kill" in code:
            sandbox = make_sandbox("bubblewrap")
        assert grade(sandbox, code, SQUARE, LIMITS).outcome in ("wrong", "error")

    @pytest.mark.parametrize("error", ["StopIteration", "StopAsyncIteration", "AssertionError", "Unfit", "EOFError"])
    @pytest.mark.parametrize(
        "check", ["assert all(map(lambda x: f(x) == x * x, [2, 3]))", "for x in (2, 3):\n    assert f(x) == x * x"]
    )
    def test_no_exception_ends_the_tests_well(self, bubblewrap, check, error):
        code = f"class Unfit(Exception): pass\ndef f(x): raise {error}"
        assert verdict(bubblewrap, code, check).outcome in ("wrong", "error")

    def test_the_tests_cannot_be_found(self, bubblewrap):
        code = """
import gc, glob, os, sys

def texts():
    frame = sys._getframe()
    while frame:
        yield repr(frame.f_globals)
        yield repr(frame.f_locals)
        frame = frame.f_back
    for thing in gc.get_objects():
        yield repr(thing)
    yield repr(sys.argv)
    for root in ("/tmp", "/proc", "/dev"):
        for path in glob.glob(root + "/**", recursive=True):
            yield path
            if os.path.isfile(path):
                yield open(path, errors="replace").read()
    for fd in range(64):
        try:
            yield repr(os.pread(fd, 100_000, 0))
        except OSError:
            pass

def f(x):
    try:
        return any("9781" + chr(51) in text for text in texts())
    except Exception as error:
        return repr(error)
"""
        checks = ("result = f(3)", "97813", "assert result is False, result")
        assert verdict(bubblewrap, code, *checks).outcome == "passed"

    def test_a_name_of_the_tests_own_is_never_the_solutions(self, bubblewrap):
        code = "def all(x): return True\ndef isclose(*a): return True\ndef helper(x): return True\ndef f(x): return 0"
        for check in (
            "assert all(f(x) == x for x in [1, 2])",
            "from math import isclose\nassert isclose(f(1), 1)",
            "def helper(x): return f(x) == x\nassert helper(1)",
        ):
            assert verdict(bubblewrap, code, check).outcome == "wrong"

    @pytest.mark.parametrize("code", HANGING)
    def test_one_that_hangs_is_ended(self, sandbox, code):
        begin = time.monotonic()
        result = grade(sandbox, code, SQUARE, Limits(seconds=1))
        assert time.monotonic() - begin < 10
        # What it piles up may reach the memory limit before.
        assert result.outcome == "timeout" or "MemoryError" in result.feedback

    def test_a_flood_of_answers_takes_no_memory_of_the_host(self, bubblewrap):
        code = "import os, sys\nwhile True: os.write(int(sys.argv[2]), b'x' * 65536)"
        result = grade(bubblewrap, code, SQUARE, Limits(seconds=5))
        assert result.outcome in ("wrong", "error", "timeout")


class TestOutputs:
    def test_all_runs_must_be_right(self, sandbox):
        task = Task("", outputs=(OutputTest("1\n", "2\n"), OutputTest("5\n", "10\n")))
        assert grade(sandbox, "print(2 * int(input()))", task, LIMITS).outcome == "passed"
        wrong = grade(sandbox, "print(2)", task, LIMITS)
        assert (wrong.outcome, wrong.feedback) == ("wrong", "Output: 2\nWrong, try again.")

    @pytest.mark.parametrize(
        "code",
        [
            "import os; os._exit(0)",
            "import sys; sys.exit(0)",
            "print('passed')",
            "import gc\nprint([x for x in gc.get_objects() if '4242' in repr(x)])",
            "import sys\nsys.stdout = None",
            "import os\nos.closerange(0, 99)",
            "class E(str):\n    __eq__ = lambda s, o: True\nprint(E('x'))",
        ],
    )
    def test_only_the_right_output_passes(self, sandbox, code):
        assert grade(sandbox, code, Task("", outputs=(OutputTest("", "42424242\n"),)), LIMITS).outcome != "passed"


    @pytest.mark.parametrize(
        ("printed", "expected", "passes"),
        [
            ("0.30000000000000004", "0.3", True), ("1", "1.0", True), ("3.1415927", "3.141592654", True),
            ("x = 2.50, y", "x = 2.5, y", True), ("1e3 -0.0", "1000.0 0.0", True), ("2.0000004 7", "2.0 7", True),
            ("3.14", "3.141592654", False), ("2.1", "2.0", False), ("1.0", "1", False), ("1000001", "1000000", False),
            ("0.3 0.3", "0.3", False), ("a0.3", "b0.3", False), ("1 .5", "1.5", False), ("nan", "0.5", False),
        ],
    )  # fmt: skip
    def test_a_millionth_of_a_decimal_number_does_not_count(self, printed, expected, passes):
        execution = Execution(printed + "\n", "", 0, False, 0.1)
        assert (judge_output(execution, expected, LIMITS).outcome == "passed") is passes


class TestErrorsAreTold:
    @pytest.mark.parametrize(
        ("code", "feedback"),
        [
            ("def f(x): return x / 0", "Error: ZeroDivisionError: division by zero"),
            ("class Odd(Exception): pass\ndef f(x): raise Odd('so')", "Error: Odd: so"),
            ("def g(x): return x", "Error: NameError: name 'f' is not defined"),
            ("f = 3", "Error: TypeError: 'int' object is not callable"),
            ("def f(): return 1", "Error: TypeError: f() takes 0 positional arguments but 1 was given"),
            ("x = y", "Error: NameError: name 'y' is not defined"),
            ("def f(x): return object()", "Error: TypeError: a value of type object cannot leave the sandbox"),
            ("def f(x): assert False", "Error: AssertionError"),
            ("import os; os._exit(0)", "Error: the program ended"),
        ],
    )
    def test_an_error_of_the_code_is_told(self, sandbox, code, feedback):
        assert grade(sandbox, code, SQUARE, LIMITS).feedback == feedback

    def test_a_failed_test_is_not_shown(self, sandbox):
        assert "9" not in grade(sandbox, "def f(x): return 1", SQUARE, LIMITS).feedback

    def test_an_error_of_the_tests_own_is_no_error_of_the_code(self, sandbox):
        assert verdict(sandbox, "def f(x): return None", "assert f(1) + 1 == 2").outcome == "wrong"


class TestTestsThatFitNothing:
    @pytest.mark.parametrize(
        ("checks", "reason"),
        [
            (["assert f("], "the tests do not compile"),
            (["x = 1"], "the tests call no function of the solution"),
            (["def check(c):\n    assert c(1)"], "the tests call no function of the solution"),
            (["assert sum(1, 2) == 3"], "the tests call no function of the solution \\(TypeError"),
            (["import numpy", "assert f(1) == 1"], ".*No module named 'numpy'"),
            (["assert f(1) == 1", "import numpy"], ".*No module named 'numpy'"),
            (["assert f(lambda x: x)"], "f is called with what cannot be sent: a value of type function"),
        ],
    )
    def test_they_are_a_failure_of_the_env(self, sandbox, checks, reason):
        with pytest.raises(EnvFailure, match=f"tests: {reason}.*, in the task 'Write f'"):
            grade(sandbox, "def f(x): return x", Task("Write f", checks=tuple(checks)), LIMITS)
