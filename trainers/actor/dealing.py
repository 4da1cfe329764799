"""Which rows each rank computes, and in which micro-batches.

Invariants: every rank knows the shares of all, so they agree without asking each other; groups stay whole, so what they
share is computed once; all ranks make as many passes, since each takes part in every gathering of weights.
"""

import math
from collections.abc import Iterator, Sequence

import torch

from molt_gym.tokens.vision import Vision

from .attention import Visible
from .balance import karmarkar_karp
from .images import ImageBatch
from .packing import MicroBatch, TrainRow, Trie, build_trie, collate, groups_of, micro_batches
from .parallel import Layout


class Dealer:
    """Deals rows to the ranks of a layout.

    device: where micro-batches go. pair_cost: that of a token that sees another, in tokens. vision: how the model sees,
    if it does.
    """

    def __init__(
        self, layout: Layout, device: torch.device, pair_cost: float, vision: Vision | None = None
    ) -> None:
        self._layout, self._device, self._pair_cost, self._vision = layout, device, pair_cost, vision

    def dealt(
        self, rows: Sequence[TrainRow], limit: int, window: Sequence[TrainRow]
    ) -> Iterator[tuple[MicroBatch, bool, bool]]:
        """Micro-batches of at most `limit` tokens; whether their rows are this rank's own, and the last pass.

        A rank with no rows left takes part with one of `window`, which must not count.
        """
        shares = [micro_batches(part, limit) for part in balance(rows, self._layout.sizes.dp, self._pair_cost)]
        own, passes = shares[self._layout.share], max(map(len, shares))
        for number in range(passes):
            mine = number < len(own)
            yield self.collate(own[number]) if mine else self.lent(window), mine, number == passes - 1

    def lent(self, window: Sequence[TrainRow]) -> MicroBatch:
        """The shortest row that has something to score, if one has."""
        shortest = min(window, key=lambda row: (not any(row.mask), len(row.ids)))
        return self.collate([build_trie([shortest])])

    def collate(self, tries: Sequence[Trie]) -> MicroBatch:
        """On the device, and of a length that it and the layout can compute."""
        batch = collate(tries, self._device, math.lcm(Visible.multiple(self._device), self._layout.sizes.cp))
        if self._vision is not None:
            batch.images = ImageBatch.of(tries, batch.input_ids.shape[1], self._vision, self._device)
        return batch


def balance(rows: Sequence[TrainRow], shares: int, pair_cost: float = 0.0) -> list[list[TrainRow]]:
    """Whole groups dealt to so many shares, which have about the same to compute."""
    if shares == 1:
        return [list(rows)]
    groups = groups_of(rows)
    costs = []
    for group in groups:
        ends = build_trie(group).ends
        pairs = sum(ends) - len(ends) * (len(ends) - 1) // 2
        costs.append(len(ends) + pair_cost * pairs)
    return [[row for place in share for row in groups[place]] for share in karmarkar_karp(costs, shares)]
