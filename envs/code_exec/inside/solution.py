"""Defines the functions under test and answers calls to them; runs inside of a sandbox, after values.py."""

# ruff: noqa: F821, S102, BLE001


def describe(error):
    """An exception as the last line of a traceback shows it."""
    try:
        return type(error).__name__, str(error)
    except Exception:
        return type(error).__name__, ""


def kind_of(error):
    """The builtin exception that an exception is of the kind of, and its arguments."""
    name = next(kind.__name__ for kind in type(error).__mro__ if kind.__module__ == "builtins")
    try:
        return name, encode(list(error.args))
    except Exception:
        return name, [describe(error)[1]]


def reply_to(namespace, name, arguments, keywords):
    """Calls a function and gives its result, or its error, in the form that `checks.py` expects."""
    try:
        arguments = decode(arguments)
        # Of the tests, such as "f", or "Solution().f" for a method.
        result = encode(eval(name, namespace)(*arguments, **decode(keywords)))
        return ["value", result, encode(arguments)]
    except BaseException as error:
        return ["error", *describe(error), *kind_of(error)]


def main(code):
    """Runs the code, then answers calls until none come."""
    channel = Channel()
    # Dataclasses and pickle look for their module.
    namespace = vars(sys.modules.setdefault("solution", type(sys)("solution")))
    try:
        exec(compile(code, "main.py", "exec"), namespace)
    except BaseException as error:
        channel.send(["failed", ": ".join(filter(None, describe(error)))])
        return
    channel.send(["ready"])
    while True:
        try:
            call = channel.receive()
        except EOFError:
            return
        channel.send(reply_to(namespace, *call))
