"""Fields of a request: read, checked, and refused by their path.

Invariants: nothing but `WireError` is raised, whatever was sent; an error begins with the path of its field and says
what to write instead; an item that was read before costs a look-up.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import chain
from reprlib import repr as show
from typing import Annotated, Any, TypeVar

import msgspec

from ..messages import Message
from .errors import WireError, invalid, unsupported
from .json import decode, encode
from .memory import WireMemory

T = TypeVar("T")
Fields = Mapping[str, msgspec.Raw]

MAX_DEPTH = 64
"""How deep a tool's schema or a call's arguments may be nested; deeper ones would exhaust the stack of a writer."""

Count = Annotated[int, msgspec.Meta(ge=1, le=2**63 - 1)]
Temperature = Annotated[float, msgspec.Meta(ge=0, le=2)]
TopP = Annotated[float, msgspec.Meta(ge=0, le=1)]
Filled = Annotated[str, msgspec.Meta(min_length=1)]

_ITEMS = msgspec.json.Decoder(str | list[msgspec.Raw])
_NAMES = {str: "a string", dict: "an object", list: "a list", bool: "true or false"}


class Field(msgspec.Struct):
    """A JSON value, and where it stands, such as "messages[2].content"."""

    path: str
    value: Any

    def __getitem__(self, name: str) -> "Field":
        """A field of this value, which must be an object; None where it is absent."""
        return Field(f"{self.path}.{name}", self.expect(dict).get(name))

    def invalid(self, instead: str) -> WireError:
        """The error that the value is wrong; `instead` says what to write."""
        return invalid(self.path, f"{show(self.value)}; write {instead}")

    def unsupported(self, why: str) -> WireError:
        """The error that the value is right, but cannot be honoured."""
        return unsupported(self.path, f"{show(self.value)} is not available; {why}")

    def expect(self, kind: type[T], instead: str | None = None) -> T:
        """The value, which must be a str, dict, list or bool."""
        if not isinstance(self.value, kind):
            raise self.invalid(instead or _NAMES[kind])
        return self.value

    def get(self, name: str, kind: type[T]) -> T:
        """The value of a field, in the same way."""
        value = self.expect(dict).get(name)
        return value if isinstance(value, kind) else self[name].expect(kind)

    def optional(self, name: str, kind: type[T]) -> T | None:
        """The same, or None."""
        value = self.expect(dict).get(name)
        return value if value is None or isinstance(value, kind) else self[name].expect(kind)

    def filled(self, name: str) -> str:
        """The value of a field, which must be a string and not empty."""
        if not self.get(name, str):
            raise self[name].invalid("a string that is not empty")
        return self.value[name]

    def each(self, instead: str | None = None) -> Iterator["Field"]:
        """The items of the value, which must be a list."""
        return (Field(f"{self.path}[{i}]", item) for i, item in enumerate(self.expect(list, instead)))

    def kind(self, example: str = "text") -> str:
        """The type of this part; `example` is one that it might be."""
        kind = self.value.get("type") if isinstance(self.value, dict) else None
        if not isinstance(kind, str):
            raise self.invalid(f"an object such as {{'type': {example!r}, ...}}")
        return kind


def is_plain(value: Any, levels: int = MAX_DEPTH) -> bool:
    """Whether JSON can hold a value, and every reader read it: its numbers are finite, and it is not too deep."""
    if isinstance(value, dict | list):
        inner = value.values() if isinstance(value, dict) else value
        return levels > 0 and all(is_plain(item, levels - 1) for item in inner)
    return not isinstance(value, float) or math.isfinite(value)


def field(fields: Fields, name: str) -> Field:
    """A top-level field."""
    try:
        return Field(name, decode(bytes(fields[name])) if name in fields else None)
    except WireError as error:
        raise invalid(name, error.message) from None


def read(fields: Fields, kind: type[T]) -> T:
    """The top-level fields that a msgspec struct names; null stands for its default.

    Raises:
        WireError: a field has not the type, or is not in the range, that the struct says.
    """
    known = kind.__struct_fields__
    given = {name: value for name in fields if name in known and (value := field(fields, name).value) is not None}
    try:
        return msgspec.convert(given, kind)
    except (msgspec.ValidationError, RecursionError) as error:
        what, _, place = str(error).partition(" - at `$.")
        path = place.rstrip("`").partition("[")[0] or "body"
        instead = what.partition(", got")[0].replace("Expected", "write").replace(" | null", "")
        raise invalid(path, f"{show(given.get(path.partition('.')[0]))}; {instead}") from None


def refuse(fields: Fields, refused: Mapping[str, tuple[Any, str]]) -> None:
    """Refuses fields that cannot be honoured.

    Args:
        refused: by name, the value besides null that leaves everything as it is, and why others are refused.
    """
    for name in fields:
        if name in refused:
            given, (neutral, why) = field(fields, name), refused[name]
            same = given.value == neutral and isinstance(given.value, bool) == isinstance(neutral, bool)
            if given.value is not None and not same:
                raise given.unsupported(why)


def items_of(fields: Fields, name: str) -> str | list[msgspec.Raw]:
    """The items of a list as they were sent, [] for null; or the string that stands in its place."""
    try:
        return _ITEMS.decode(fields[name])
    except (KeyError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        given = field(fields, name)
    if isinstance(given.value, str | None):
        return given.value or []
    return [msgspec.Raw(encode(item.value)) for item in given.each()]


def interned(
    name: str, items: Iterable[msgspec.Raw], memory: WireMemory, make: Callable[[Field], list[Message]]
) -> list[list[Message]]:
    """What each item of a list gives; made once for equal ones."""
    found: list[list[Message]] = []

    def read_item(value: Any) -> list[Message]:
        return make(Field(f"{name}[{len(found)}]", value))

    try:
        for item in items:
            found.append(memory.intern(bytes(item), read_item))
    except WireError as error:
        raise error if error.param is not None else invalid(f"{name}[{len(found)}]", error.message) from None
    return found


def messages_of(fields: Fields, memory: WireMemory, make: Callable[[Field], list[Message]]) -> list[Message]:
    """The chat messages that the field `messages` spells, at least one."""
    items = items_of(fields, "messages")
    if not items or isinstance(items, str):
        raise field(fields, "messages").invalid("a list of at least one message")
    return list(chain.from_iterable(interned("messages", items, memory, make)))


def spoken(memory: WireMemory, role: str, text: str) -> list[Message]:
    """A message that is no item of a list."""
    return memory.intern(encode({"role": role, "content": text}), lambda message: [message])
