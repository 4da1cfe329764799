"""Keys and values of finished sequences, for the next turn of the same conversation.

Invariant: every entry was computed with the current weights; `clear` must follow each change of them.
"""

from collections import OrderedDict
from collections.abc import Sequence

import torch


class PrefixCache:
    """The newest sequences, up to `max_tokens` positions in all."""

    def __init__(self, max_tokens: int) -> None:
        self._entries: OrderedDict[tuple[int, ...], torch.Tensor] = OrderedDict()
        self._room = self._max = max_tokens

    def put(self, ids: Sequence[int], saved: torch.Tensor) -> None:
        """Keep what a slot held for `ids`, forgetting the least recently used."""
        key = tuple(ids)
        if len(key) > self._max or key in self._entries:
            return
        self._room -= len(key)
        while self._room < 0:
            old, _ = self._entries.popitem(last=False)
            self._room += len(old)
        self._entries[key] = saved

    def longest(self, ids: Sequence[int]) -> tuple[int, torch.Tensor | None]:
        """The longest entry that `ids` begin with and go beyond: its length and tensor, else (0, None)."""
        whole, best = tuple(ids), ()
        for key in self._entries:
            if len(best) < len(key) < len(whole) and whole[: len(key)] == key:
                best = key
        if not best:
            return 0, None
        self._entries.move_to_end(best)
        return len(best), self._entries[best]

    def clear(self) -> None:
        """Forget everything."""
        self._entries.clear()
        self._room = self._max
