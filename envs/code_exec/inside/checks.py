"""Runs tests against functions that live in another sandbox; runs inside of a sandbox, after values.py.

The exit code is the verdict (see `__init__.py`), and stdout says why; what the tests print goes to stderr. Whatever
comes from the other side is data: it can make a test fail, or give the values that the test demands, and nothing else.
"""

import ast
import builtins
import importlib
import os

# ruff: noqa: F821, S102, BLE001

RAISED, UNFIT = 3, 4
_ENDS_LOOPS = (StopIteration, StopAsyncIteration)


class Unfit(Exception):
    """The tests cannot be run against any solution."""


class Raised(Exception):
    """The solution raised; replaced by an exception of the same name where a test may want to catch it."""


class Remote:
    """Functions of the other side."""

    def __init__(self, channel):
        self.channel = channel
        self.calls = 0
        self.raised = None
        self.text = ""

    def start(self):
        """Waits until the other side has run its code."""
        kind, *detail = self.receive()
        if kind != "ready":
            self.fail("".join(map(str, detail)))

    def function(self, name):
        """A function that calls the one of this name."""

        def call(*arguments, **keywords):
            self.calls += 1
            arguments = list(arguments)
            try:
                message = [name, encode(arguments), encode(keywords)]
            except TypeError as error:
                raise Unfit(f"{name} is called with what cannot be sent: {error}") from error
            self.channel.send(message)
            kind, *rest = self.receive()
            if kind == "value":
                result, after = map(decode, rest)
                for given, now in zip(arguments, after, strict=True):
                    update(given, now)
                return result
            self.raise_as(*rest)

        call.__name__ = name
        return call

    def receive(self):
        """The next message."""
        try:
            return self.channel.receive()
        except EOFError:
            self.fail("the program ended")

    def raise_as(self, name, text, builtin, arguments):
        """Raises the builtin exception of which an exception is."""
        kind = getattr(builtins, str(builtin), None)
        # StopIteration would end a loop of the test as if all was well.
        fits = isinstance(kind, type) and issubclass(kind, Exception) and not issubclass(kind, _ENDS_LOOPS)
        self.text = f"{name}: {text}" if text else name
        try:
            self.raised = kind(*decode(arguments)) if fits else Raised(text)
        except Exception:
            self.raised = Raised(text)
        raise self.raised

    def fail(self, text):
        """Ends the tests: there is no other side to test any more."""
        leave(RAISED, text)


_verdict = os.dup(1)
os.dup2(2, 1)


def leave(status, text):
    """Ends this program at once."""
    os.write(_verdict, text.encode("utf-8", "replace"))
    os._exit(status)


def update(given, now):
    """Does to an argument what the function did to its copy."""
    if isinstance(given, list):
        given[:] = now
    elif isinstance(given, dict | set):
        given.clear()
        given.update(now)


def missing_names(tree, entry_point):
    """Names that the tests use and neither define nor import, and whether each is a module, else the solution's."""
    used, called, known = set(), set(), set()
    for node in ast.walk(tree):
        match node:
            case ast.Name(id=name, ctx=ast.Load()):
                used.add(name)
            case ast.Name(id=name) | ast.arg(arg=name) | ast.ExceptHandler(name=name):
                known.add(name)
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                known.add(name)
            case ast.alias(name=name, asname=asname):
                known.add(asname or name.split(".")[0])
            case ast.Call(func=ast.Name(id=name)):
                called.add(name)
    # A check gets the function; other tests call it by its name, which may be that of a builtin.
    ours = set(dir(builtins)) - ({entry_point} if "check" not in known else set())
    return {name: name in sys.stdlib_module_names and name not in called for name in used - known - ours}


def run(checks, entry_point, remote):
    """Runs all checks; raises if one fails."""
    # A real module, because test frameworks look for tests there.
    module = sys.modules["__main__"] = type(sys)("__main__")
    namespace = vars(module)
    try:
        tree = ast.parse("\n".join(checks))
    except (SyntaxError, ValueError) as error:
        raise Unfit(f"the tests do not compile: {error}") from error
    for name, is_module in missing_names(tree, entry_point).items():
        # In one file with the tests, an import of the solution would serve them too.
        namespace[name] = importlib.import_module(name) if is_module else remote.function(name)
    exec(compile(tree, "tests.py", "exec"), namespace)
    if "check" in namespace and entry_point:
        namespace["check"](remote.function(entry_point))


def main(checks, entry_point):
    """Exits with the verdict."""
    remote = Remote(Channel())
    sys.argv = ["tests.py"]
    remote.start()
    status, text = 0, ""
    try:
        run(checks, entry_point, remote)
    except Unfit as error:
        status, text = UNFIT, str(error)
    except SystemExit as error:
        status = 1 if error.code else 0
    except BaseException as error:
        status, text = (RAISED, remote.text) if error is remote.raised else (1, repr(error))
        if isinstance(error, ModuleNotFoundError) and error.name:
            status = UNFIT
    if status < RAISED and not remote.calls:
        status = UNFIT
        text = f"the tests call no function of the solution ({text or 'and pass'}); entry_point may name a builtin's"
    leave(status, text)
