"""Plain values as JSON and back; runs inside of sandboxes."""

import importlib
import json
import sys
from collections import Counter, OrderedDict, deque

_CONTAINERS = {"tuple": tuple, "set": set, "frozenset": frozenset, "iterator": iter, "deque": deque,
               "dict_keys": lambda items: dict.fromkeys(items).keys(), "dict_items": lambda items: dict(items).items(),
               "dict_values": lambda items: dict(enumerate(items)).values()}
_DICTS = {"dict": dict, "Counter": Counter, "OrderedDict": OrderedDict}
_MADE = {"range": "builtins", "Fraction": "fractions", "Decimal": "decimal", "date": "datetime", "time": "datetime",
         "datetime": "datetime", "timedelta": "datetime"}
"""Types of the standard library that are made of plain data, by the modules that have them."""


def encode(value):
    """Plain data as JSON has it, other containers as {"type": [items]}; a TypeError names what is no plain data."""
    if value is None or isinstance(value, int | float | str):
        return value
    if isinstance(value, list):
        return [encode(item) for item in value]
    if isinstance(value, dict):
        name = next(name for name in reversed(_DICTS) if isinstance(value, _DICTS[name]))
        return {name: [[encode(key), encode(item)] for key, item in value.items()]}
    if isinstance(value, complex):
        return {"complex": [value.real, value.imag]}
    if isinstance(value, bytes | bytearray):
        return {"bytes": value.hex()}
    kind = type(value).__name__
    name = next((name for name in ("tuple", "set", "frozenset") if isinstance(value, _CONTAINERS[name])), kind)
    if name in _CONTAINERS:
        return {name: [encode(item) for item in value]}
    if _MADE.get(kind) == type(value).__module__:
        return {kind: [encode(item) for item in value.__reduce__()[1]]}
    if hasattr(value, "__next__"):
        return {"iterator": [encode(item) for item in value]}
    raise TypeError(f"a value of type {kind} cannot leave the sandbox")


def decode(data):
    """The value of what `encode` gave, made of types of the standard library alone."""
    if isinstance(data, list):
        return [decode(item) for item in data]
    if not isinstance(data, dict):
        return data
    ((name, items),) = data.items()
    if name in _DICTS:
        return _DICTS[name]({decode(key): decode(item) for key, item in items})
    if name == "complex":
        return complex(*items)
    if name == "bytes":
        return bytes.fromhex(items)
    items = (decode(item) for item in items)
    if name in _MADE:
        return getattr(importlib.import_module(_MADE[name]), name)(*items)
    return _CONTAINERS[name](items)


class Channel:
    """Sends and receives lines of JSON."""

    def __init__(self):
        self._inbox = open(int(sys.argv[1]), encoding="utf-8", newline="\n")
        self._outbox = open(int(sys.argv[2]), "w", encoding="utf-8", newline="\n")

    def send(self, message):
        """Sends a message that is JSON."""
        self._outbox.write(json.dumps(message) + "\n")
        self._outbox.flush()

    def receive(self):
        """The next message; EOFError at the end."""
        line = self._inbox.readline()
        if not line:
            raise EOFError
        return json.loads(line)
