"""Rows of one task share their prompt, and often more: each shared token is computed once.

The rows of a group form a trie. Its tokens are laid out depth first in one sequence in which every token attends to its
ancestors alone and has its depth as position, so hidden states and gradients equal those of the separate rows (a prefix
tree attention). What follows a token in any row is then an interval behind it, and so it is with tries side by side.
Invariants: masks come from provenance, never from the value of an id; every trainable token is scored by the hidden
state of its predecessor in its own row.
"""

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from molt_gym.images import ImageSpan, keyed
from molt_gym.tokens import Row, RowRef

from .attention import Visible
from .balance import first_fit
from .head import chunk_edges
from .images import ImageBatch


@dataclass
class TrainRow:
    """One row with what the loss needs.

    ids, mask: [L], mask 1 where the id is trained. logprobs: [L] log μ of the sampler, where mask is 1.
    advantage, weight: of its rollout; weight is that of each token in the loss of the optimizer window.
    row, group, rollout: numbers of the row in the batch, of its task and of its rollout. reward: of it, shaped.
    old_logprobs, ref_logprobs: [trained] log π_old and log π_ref, once computed. advantages: [trained], in the place of
    `advantage`, from an estimator that works on tokens. values, returns: [trained] of the critic, and what it learns.
    experts: [L, layers, top_k] int16 of the sampler, -1 where unknown, or None. top: [trained, k] of dtype
    `molt_gym.tokens.generation.TOP`, the sampler's likeliest tokens in the place of each trained one, or None.
    images: those whose tokens are among the ids.
    """

    ids: list[int]
    mask: list[int]
    logprobs: list[float]
    advantage: float
    weight: float
    row: int
    group: int
    rollout: int = 0
    reward: float = 0.0
    old_logprobs: list[float] | None = None
    ref_logprobs: list[float] | None = None
    advantages: list[float] | None = None
    values: list[float] | None = None
    returns: list[float] | None = None
    experts: np.ndarray | None = field(default=None, compare=False, repr=False)
    top: np.ndarray | None = field(default=None, compare=False, repr=False)
    images: list[ImageSpan] = field(default_factory=list, repr=False)

    @cached_property
    def keys(self) -> list[int]:
        """[L] ids, in which images are told apart."""
        return keyed(self.ids, self.images) if self.images else self.ids

    @cached_property
    def trained(self) -> list[int]:
        """Positions whose id is trained; the first id of a row has no predecessor that could score it."""
        return [position for position, bit in enumerate(self.mask) if bit and position]

    @property
    def behaviour(self) -> list[float]:
        """[trained] log μ."""
        return [self.logprobs[position] for position in self.trained]

    @property
    def teaches(self) -> bool:
        """Whether its advantages have a gradient."""
        return bool(self.advantage) if self.advantages is None else any(self.advantages)


@dataclass(frozen=True)
class RemoteRow:
    """A `TrainRow` whose tokens lie elsewhere: row `number` of those at `source`, for instance a Ray ObjectRef."""

    source: Any
    number: int
    advantage: float
    weight: float
    row: int
    group: int
    rollout: int = 0
    reward: float = 0.0

    def fetched(self, rows: Sequence[Row]) -> TrainRow:
        """With its tokens; `rows` are those at its source."""
        return train_row(rows[self.number], self.advantage, self.weight, self.row, self.group, self.rollout,
                         self.reward)


AnyRow = TrainRow | RemoteRow


def train_row(
    row: Row | RowRef, advantage: float, weight: float, number: int, group: int, rollout: int = 0, reward: float = 0.0
) -> AnyRow:
    """A recorded row with what the loss needs of its rollout; see `TrainRow`."""
    if isinstance(row, RowRef):
        return RemoteRow(row.source, row.number, advantage, weight, number, group, rollout, reward)
    return TrainRow(row.ids, row.mask, row.logprobs, advantage, weight, number, group, rollout, reward,
                    experts=row.experts, top=row.top, images=row.images)


@dataclass
class Trie:
    """Rows over shared tokens; `paths[i][j]` is where token j of row i lies in `ids`, `ends[k]` where what follows
    token k in any row ends.
    """

    rows: list[TrainRow]
    ids: list[int]
    positions: list[int]
    ends: list[int]
    paths: list[list[int]]


class Order:
    """Rows one after the other, in what FSDP does not look for tensors: it would go through all of their numbers."""

    def __init__(self, rows: list[TrainRow]) -> None:
        self._rows = rows

    def __iter__(self) -> Iterator[TrainRow]:
        return iter(self._rows)


@dataclass
class MicroBatch:
    """Tries side by side in one sequence of T tokens, and the flat list of their trainable tokens [N].

    input_ids, position_ids: [1, T]. ends: [T], token q sees token k if and only if k <= q < ends[k]. tokens: without
    padding, which is at the end and sees itself. pairs: how often one of them sees one. sources: [S] positions whose
    logits are needed, in ascending order. source_of: [N] index into them; by_source, edges: see `head.Targets`.
    targets, behaviour, advantages, weights, rows: [N]. order: the rows, in the order of their tokens in the flat list.
    reference, values, returns: [N], where all rows have them. experts: [T, layers, top_k] int16, where any row has
    some; -1 where unknown. images: where any row has some.
    """

    input_ids: Tensor
    position_ids: Tensor
    ends: Tensor
    tokens: int
    pairs: int
    sources: Tensor
    source_of: Tensor
    by_source: Tensor
    edges: list[int]
    targets: Tensor
    behaviour: Tensor
    advantages: Tensor
    weights: Tensor
    rows: Tensor
    order: Order
    reference: Tensor | None = None
    values: Tensor | None = None
    returns: Tensor | None = None
    experts: Tensor | None = None
    top: Tensor | None = None
    images: ImageBatch | None = None

    @cached_property
    def visible(self) -> Visible:
        """What sees what."""
        return Visible(self.ends)


def build_trie(rows: Sequence[TrainRow]) -> Trie:
    """Lay out rows so that a common beginning stands once."""
    ordered = sorted(rows, key=lambda row: (row.keys, row.row))
    trie = Trie(ordered, [], [], [], [])
    previous, path = [], []
    for row in ordered:
        keys = row.keys
        # In sorted order no earlier row shares more with this one than the last does, and no later one shares what
        # the last does not.
        shared, start = _common_prefix(previous, keys), len(trie.ids)
        for node in path[shared:]:
            trie.ends[node] = start
        path = path[:shared] + list(range(start, start + len(row.ids) - shared))
        trie.ids += row.ids[shared:]
        trie.positions += range(shared, len(row.ids))
        trie.ends += [0] * (len(row.ids) - shared)
        trie.paths.append(path)
        previous = keys
    for node in path:
        trie.ends[node] = len(trie.ids)
    return trie


def micro_batches(rows: Sequence[TrainRow], max_tokens: int) -> list[list[Trie]]:
    """Tries of at most `max_tokens` tokens (a longer row has one of its own), in batches of at most `max_tokens`.

    Tries are of one group each, and batches are filled by first fit, the largest tries first.
    """
    tries: list[Trie] = []
    for group in groups_of(rows):
        tries += _split(sorted(group, key=lambda row: (row.keys, row.row)), max_tokens)
    tries.sort(key=lambda trie: -len(trie.ids))
    bins = first_fit([len(trie.ids) for trie in tries], max_tokens)
    batches: list[list[Trie]] = [[] for _ in range(max(bins, default=-1) + 1)]
    for trie, place in zip(tries, bins, strict=True):
        batches[place].append(trie)
    return batches


def collate(tries: Sequence[Trie], device: torch.device, multiple: int = 1) -> MicroBatch:
    """Lay tries out side by side, and pad the sequence to a multiple of that."""
    ids: list[int] = []
    places: list[int] = []
    ends: list[int] = []
    scored: list[int] = []
    columns: tuple[list, ...] = [], [], [], [], []
    for trie in tries:
        start = len(ids)
        ids += trie.ids
        places += trie.positions
        ends += [end + start for end in trie.ends]
        for row, path in zip(trie.rows, trie.paths, strict=True):
            positions = row.trained
            count = len(positions)
            scored += [start + path[position - 1] for position in positions]
            for column, values in zip(columns, (
                    [row.ids[position] for position in positions], row.behaviour, row.advantages or
                    [row.advantage] * count, [row.weight] * count, [row.row] * count), strict=True):
                column += values
    size, padding = len(ids), -len(ids) % multiple
    pairs = sum(ends) - size * (size - 1) // 2
    ends += range(size + 1, size + padding + 1)
    sources, source_of = torch.tensor(scored, dtype=torch.long).unique(return_inverse=True)
    targets, behaviour, advantages, weights, numbers = columns
    if (top := _top(tries)) is not None:
        source_of = torch.cat([source_of, source_of.repeat_interleave(top.shape[1])])
        targets += top["id"].flatten().tolist()
    by_source = source_of.argsort(stable=True)

    def moved(tensor: Tensor) -> Tensor:
        # From other memory a GPU takes it only once all that was asked of it before is done.
        return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)

    def flat(values: Iterable[float], dtype: torch.dtype) -> Tensor:
        return moved(torch.tensor(list(values), dtype=dtype))

    order = Order([row for trie in tries for row in trie.rows])
    experts = _experts(tries, size + padding)

    def known(name: str) -> Tensor | None:
        parts = [getattr(row, name) for row in order]
        return None if None in parts else flat((value for part in parts for value in part), torch.float32)

    return MicroBatch(
        flat(ids + [0] * padding, torch.long)[None], flat(places + [0] * padding, torch.long)[None],
        flat(ends, torch.long), size, pairs, moved(sources), moved(source_of), moved(by_source),
        chunk_edges(source_of[by_source], len(sources)), flat(targets, torch.long), flat(behaviour, torch.float32),
        flat(advantages, torch.float32), flat(weights, torch.float32), flat(numbers, torch.long), order,
        known("ref_logprobs"), known("values"), known("returns"), None if experts is None else moved(experts),
        None if top is None else moved(torch.from_numpy(top["logprob"].copy())))


def _top(tries: Sequence[Trie]) -> np.ndarray | None:
    """[N, k] of all trainable tokens."""
    parts = [row.top for trie in tries for row in trie.rows]
    return None if not parts or any(part is None for part in parts) else np.concatenate(parts)


def _experts(tries: Sequence[Trie], size: int) -> Tensor | None:
    """[size, layers, top_k] of all tokens; one that rows share has those of the first row that knows them."""
    shape = next((row.experts.shape[1:] for trie in tries for row in trie.rows if row.experts is not None), None)
    if shape is None:
        return None
    found, start = np.full((size, *shape), -1, np.int16), 0
    for trie in tries:
        for row, path in zip(trie.rows, trie.paths, strict=True):
            if row.experts is not None:
                places = np.array(path) + start
                unknown = (found[places] < 0).all((1, 2))
                found[places[unknown]] = row.experts[unknown]
        start += len(trie.ids)
    return torch.from_numpy(found)


def groups_of(rows: Sequence[TrainRow]) -> list[list[TrainRow]]:
    """The rows by their group."""
    groups: dict[int, list[TrainRow]] = {}
    for row in rows:
        groups.setdefault(row.group, []).append(row)
    return list(groups.values())


def _split(ordered: Sequence[TrainRow], max_tokens: int) -> list[Trie]:
    tries: list[Trie] = []
    start, size = 0, 0
    for end, row in enumerate(ordered):
        shared = _common_prefix(ordered[end - 1].keys, row.keys) if end > start else 0
        if end > start and size + len(row.ids) - shared > max_tokens:
            tries.append(build_trie(ordered[start:end]))
            start, size, shared = end, 0, 0
        size += len(row.ids) - shared
    return [*tries, build_trie(ordered[start:])]


def _common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    # Comparing slices is much faster than comparing ids one by one.
    return bisect_left(range(min(len(a), len(b))), 1, key=lambda last: a[: last + 1] != b[: last + 1])
