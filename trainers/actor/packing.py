"""Rows of one task share their prompt, and often more: each shared token is computed once.

The rows of a group form a trie. Its tokens are laid out in one sequence in which every token attends to its ancestors
alone and has its depth as position, so hidden states and gradients equal those of the separate rows (a prefix tree
attention; the layout needs full attention over an arbitrary mask). Invariants: masks come from provenance, never from
the value of an id; every trainable token is scored by the hidden state of its predecessor in its own row.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from molt_gym.tokens import Row, RowRef


@dataclass
class TrainRow:
    """One row with what the loss needs.

    ids, mask: [L], mask 1 where the id is trained. logprobs: [L] log μ of the sampler, where mask is 1.
    advantage, weight: of its rollout; weight is that of each token in the loss of the optimizer window.
    row, group, rollout: numbers of the row in the batch, of its task and of its rollout. reward: of it, shaped.
    old_logprobs, ref_logprobs: [trained] log π_old and log π_ref, once computed. advantages: [trained], in the place of
    `advantage`, from an estimator that works on tokens. values, returns: [trained] of the critic, and what it learns.
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

    @property
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
    return TrainRow(row.ids, row.mask, row.logprobs, advantage, weight, number, group, rollout, reward)


@dataclass
class Trie:
    """Rows over shared tokens; `paths[i][j]` is where token j of row i lies in `ids`."""

    rows: list[TrainRow]
    ids: list[int]
    positions: list[int]
    paths: list[list[int]]

    def attention(self) -> Tensor:
        """[T, T] bool: each token sees its ancestors and itself."""
        mask = torch.eye(len(self.ids), dtype=torch.bool)
        known = 0
        for path in self.paths:
            shared = sum(1 for node in path if node < known)
            fresh = len(path) - shared
            if fresh:
                new = slice(path[shared], path[-1] + 1)
                mask[new, path[:shared]] = True
                mask[new, new] = torch.ones(fresh, fresh, dtype=torch.bool).tril()
                known = path[-1] + 1
        return mask


@dataclass
class MicroBatch:
    """Tries side by side, and the flat list of their trainable tokens [N].

    input_ids, position_ids: [B, T]. attention_mask: [B, 1, T, T] bool. sources: [S] positions in [B·T] whose logits are
    needed; source_of: [N] index into them. targets, behaviour, advantages, weights, rows: [N]. order: the rows, in the
    order of their tokens in the flat list. reference, values, returns: [N], where all rows have them.
    """

    input_ids: Tensor
    position_ids: Tensor
    attention_mask: Tensor
    sources: Tensor
    source_of: Tensor
    targets: Tensor
    behaviour: Tensor
    advantages: Tensor
    weights: Tensor
    rows: Tensor
    order: list[TrainRow]
    reference: Tensor | None = None
    values: Tensor | None = None
    returns: Tensor | None = None


def build_trie(rows: Sequence[TrainRow]) -> Trie:
    """Lay out rows so that a common beginning stands once."""
    ordered = sorted(rows, key=lambda row: (row.ids, row.row))
    trie = Trie(ordered, [], [], [])
    previous, path = [], []
    for row in ordered:
        # In sorted order no earlier row shares more with this one than the last does.
        shared = _common_prefix(previous, row.ids)
        start = len(trie.ids)
        path = path[:shared] + list(range(start, start + len(row.ids) - shared))
        trie.ids += row.ids[shared:]
        trie.positions += range(shared, len(row.ids))
        trie.paths.append(path)
        previous = row.ids
    return trie


def micro_batches(rows: Sequence[TrainRow], max_tokens: int) -> list[list[Trie]]:
    """Tries of at most `max_tokens` tokens (a longer row has one of its own), batched within `max_tokens` with padding.

    Tries are of one group each and sorted by size, so that little is padding.
    """
    tries: list[Trie] = []
    for group in _groups(rows):
        tries += _split(sorted(group, key=lambda row: (row.ids, row.row)), max_tokens)
    batches: list[list[Trie]] = []
    for trie in sorted(tries, key=lambda trie: -len(trie.ids)):
        if batches and len(batches[-1][0].ids) * (len(batches[-1]) + 1) <= max_tokens:
            batches[-1].append(trie)
        else:
            batches.append([trie])
    return batches


def collate(tries: Sequence[Trie], device: torch.device) -> MicroBatch:
    """Pad tries to one length; padding attends to itself and is never scored."""
    width = max(len(trie.ids) for trie in tries)
    input_ids = torch.zeros(len(tries), width, dtype=torch.long)
    position_ids = torch.zeros_like(input_ids)
    mask = torch.eye(width, dtype=torch.bool).expand(len(tries), 1, width, width).clone()
    sources: dict[int, int] = {}
    source_of, tokens = [], []
    for b, trie in enumerate(tries):
        size = len(trie.ids)
        input_ids[b, :size] = torch.tensor(trie.ids)
        position_ids[b, :size] = torch.tensor(trie.positions)
        mask[b, 0, :size, :size] = trie.attention()
        for row, path in zip(trie.rows, trie.paths, strict=True):
            positions = row.trained
            advantages = [row.advantage] * len(positions) if row.advantages is None else row.advantages
            for position, advantage in zip(positions, advantages, strict=True):
                source_of.append(sources.setdefault(b * width + path[position - 1], len(sources)))
                tokens.append((row.ids[position], row.logprobs[position], advantage, row.weight, row.row))
    targets, behaviour, advantages, weights, numbers = zip(*tokens, strict=True) if tokens else ((),) * 5

    def flat(values: Iterable[float], dtype: torch.dtype) -> Tensor:
        return torch.tensor(list(values), dtype=dtype, device=device)

    order = [row for trie in tries for row in trie.rows]

    def known(name: str) -> Tensor | None:
        parts = [getattr(row, name) for row in order]
        return None if None in parts else flat((value for part in parts for value in part), torch.float32)

    return MicroBatch(
        input_ids.to(device), position_ids.to(device), mask.to(device), flat(sources, torch.long),
        flat(source_of, torch.long), flat(targets, torch.long), flat(behaviour, torch.float32),
        flat(advantages, torch.float32), flat(weights, torch.float32), flat(numbers, torch.long), order,
        known("ref_logprobs"), known("values"), known("returns"))


def balance(rows: Sequence[TrainRow], shares: int) -> list[list[TrainRow]]:
    """Whole groups dealt to `shares` ranks, the largest first and each to the rank with the fewest tokens."""
    dealt: list[list[TrainRow]] = [[] for _ in range(shares)]
    loads = [0] * shares
    sized = [(len(build_trie(group).ids), group) for group in _groups(rows)]
    for size, group in sorted(sized, key=lambda pair: -pair[0]):
        lightest = loads.index(min(loads))
        dealt[lightest] += group
        loads[lightest] += size
    return dealt


def _groups(rows: Sequence[TrainRow]) -> list[list[TrainRow]]:
    groups: dict[int, list[TrainRow]] = {}
    for row in rows:
        groups.setdefault(row.group, []).append(row)
    return list(groups.values())


def _split(ordered: Sequence[TrainRow], max_tokens: int) -> list[Trie]:
    tries: list[Trie] = []
    start, size = 0, 0
    for end, row in enumerate(ordered):
        shared = _common_prefix(ordered[end - 1].ids, row.ids) if end > start else 0
        if end > start and size + len(row.ids) - shared > max_tokens:
            tries.append(build_trie(ordered[start:end]))
            start, size, shared = end, 0, 0
        size += len(row.ids) - shared
    return [*tries, build_trie(ordered[start:])]


def _common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    length = min(len(a), len(b))
    return next((i for i in range(length) if a[i] != b[i]), length)
