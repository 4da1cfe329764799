"""What one session remembers for one wire: messages and tools that it has read, and conversations by name."""

from collections.abc import Callable, Iterable
from typing import Any

from ..messages import InternedMessage, InternedTools, Message
from .json import decode

__all__ = ["WireMemory"]


class WireMemory:
    """See `molt_gym.server.exchange.Memory`. It lives as long as its session, and holds each distinct message once."""

    responses: dict[str, list[Message]]

    def __init__(self) -> None:
        self.responses = {}
        self._messages: dict[bytes, list[Message]] = {}
        self._tools: dict[bytes, InternedTools] = {}

    def intern(self, raw: bytes, make: Callable[[Any], Iterable[Message]]) -> list[Message]:
        """See `Memory.intern`."""
        known = self._messages.get(raw)
        if known is None:
            known = self._messages[raw] = [InternedMessage(message) for message in make(decode(raw))]
        return known

    def intern_tools(self, raw: bytes, make: Callable[[Any], Iterable[dict[str, Any]]]) -> InternedTools:
        """See `Memory.intern_tools`."""
        known = self._tools.get(raw)
        if known is None:
            known = self._tools[raw] = InternedTools(make(decode(raw)))
        return known
