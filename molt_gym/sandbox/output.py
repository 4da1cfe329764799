"""Reads what running programs write, within bounded memory and until a deadline.

Invariants: both streams are read at once, so that no program blocks on a full pipe; of each stream only the first and
the last bytes are kept; text is cut between characters, and bytes that are no UTF-8 become U+FFFD.
"""

import os
import select
import time
from collections.abc import Mapping

__all__ = ["Capture", "read_until"]

_CHUNK = 1 << 16
_LONGEST_WAIT = 3600.0


class Capture:
    """The beginning and the end of one stream.

    Args:
        chars: how many characters `text` gives at most, not counting the marker of a cut.
    """

    def __init__(self, chars: int) -> None:
        self._chars = chars
        self._room = 4 * (chars - chars // 2)
        self._head = bytearray()
        self._tail = bytearray()
        self._total = 0

    def add(self, data: bytes) -> None:
        """Takes the next bytes of the stream."""
        self._total += len(data)
        room = self._room - len(self._head)
        self._head += data[:room]
        self._tail += data[room:] if room > 0 else data
        del self._tail[: -self._room]

    def text(self) -> str:
        """The stream, or its two ends around a marker that tells how many bytes are left out between them."""
        # Surrogates stand for odd bytes one to one, so that the bytes of a slice can be counted.
        if self._total <= len(self._head) + len(self._tail):
            whole = (self._head + self._tail).decode("utf-8", "surrogateescape")
            if len(whole) <= self._chars:
                return _replaced(whole.encode("utf-8", "surrogateescape"))
            first = last = whole
        else:
            first = self._head.decode("utf-8", "surrogateescape")
            last = self._tail.decode("utf-8", "surrogateescape")
        half = self._chars // 2
        start = first[: self._chars - half].encode("utf-8", "surrogateescape")
        end = last[len(last) - half :].encode("utf-8", "surrogateescape")
        cut = self._total - len(start) - len(end)
        return f"{_replaced(start)}\n[... {cut} bytes cut ...]\n{_replaced(end)}"


def _replaced(data: bytes) -> str:
    return data.decode("utf-8", "replace")


def read_until(streams: Mapping[int, Capture], deadline: float, stop: int | None = None) -> bool:
    """Reads all streams until each has ended, or the file descriptor `stop` becomes readable, or the deadline.

    Args:
        streams: a capture for each file descriptor.
        deadline: on the clock of `time.monotonic`.
        stop: usually a pidfd; None waits for the streams alone.

    Returns:
        Whether it stopped for another reason than the deadline.
    """
    poll = select.poll()
    waiting = set(streams) | ({stop} if stop is not None else set())
    for fd in waiting:
        poll.register(fd, select.POLLIN)
    while waiting:
        left = deadline - time.monotonic()
        if left <= 0:
            return False
        for fd, _ in poll.poll(min(left, _LONGEST_WAIT) * 1000 + 1):
            if fd == stop:
                return True
            data = os.read(fd, _CHUNK)
            if data:
                streams[fd].add(data)
            else:
                poll.unregister(fd)
                waiting.discard(fd)
    return True
