"""What one session remembers for one wire: messages and tools that it has read, and conversations by name."""

from collections.abc import Callable, Iterable
from typing import Any

from ..messages import InternedMessage, InternedTools, Message
from .json import decode

__all__ = ["WireMemory"]


class WireMemory:
    """It lives as long as its session, and holds each distinct message once."""

    responses: dict[str, list[Message]]
    """Conversations, reply included, by response id, for `previous_response_id`."""

    def __init__(self) -> None:
        self.responses = {}
        self._messages: dict[bytes, list[Message]] = {}
        self._tools: dict[bytes, InternedTools] = {}

    def intern(self, raw: bytes, make: Callable[[Any], Iterable[Message]]) -> list[Message]:
        """The messages that `make(decoded raw)` gives; made once for equal bytes, so that history costs a look-up.

        What `make` raises is handed on and nothing is kept. The messages are read-only.
        """
        known = self._messages.get(raw)
        if known is None:
            known = self._messages[raw] = [InternedMessage(message) for message in make(decode(raw))]
        return known

    def intern_tools(self, raw: bytes, make: Callable[[Any], Iterable[dict[str, Any]]]) -> InternedTools:
        """The same for a list of tools."""
        known = self._tools.get(raw)
        if known is None:
            known = self._tools[raw] = InternedTools(make(decode(raw)))
        return known
