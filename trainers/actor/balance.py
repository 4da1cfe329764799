"""How work is dealt: bins of a limited size, and shares of about the same size."""

import heapq
from collections.abc import Sequence


def first_fit(sizes: Sequence[int], limit: int) -> list[int]:
    """The bin of each size: the first one in which it does not make more than `limit`, or a new one."""
    loads: list[int] = []
    bins = []
    for size in sizes:
        place = next((place for place, load in enumerate(loads) if load + size <= limit), len(loads))
        loads[place : place + 1] = [size + sum(loads[place : place + 1])]
        bins.append(place)
    return bins


def karmarkar_karp(sizes: Sequence[float], shares: int, *, equal: bool = False) -> list[list[int]]:
    """Deal the places of `sizes` to so many shares, so that their sums differ little: largest differencing.

    Two ways to deal a part of the sizes are joined at a time, those that differ most, the large shares of the one with
    the small ones of the other. equal: shares of as many places each, as far as their number allows.

    Source: Karmarkar and Karp, The Differencing Method of Set Partitioning, 1982.
    """
    order = sorted(range(len(sizes)), key=lambda place: sizes[place])
    step = shares if equal else 1
    heap: list[tuple[float, int, list[tuple[float, list[int]]]]] = []

    def push(ways: list[tuple[float, list[int]]], number: int) -> None:
        ways.sort(reverse=True)
        heapq.heappush(heap, (ways[-1][0] - ways[0][0], number, ways))

    for start in range(0, len(order), step):
        first: list[tuple[float, list[int]]] = [(sizes[place], [place]) for place in order[start : start + step]]
        push(first + [(0, [])] * (shares - len(first)), start)
    number = len(order)
    while len(heap) > 1:
        (_, _, one), (_, _, other) = heapq.heappop(heap), heapq.heappop(heap)
        push([(a + b, x + y) for (a, x), (b, y) in zip(one, reversed(other), strict=True)], number)
        number += 1
    return [sorted(places) for _, places in heap[0][2]] if heap else [[] for _ in range(shares)]
