"""Shared prefixes computed once give what separate rows give, and no token is lost, doubled or moved."""

from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.distributed.utils import _apply_to_tensors
from transformers import AutoModelForCausalLM

from molt_gym.trainers.actor.attention import ATTENTION
from molt_gym.trainers.actor.dealing import balance
from molt_gym.trainers.actor.model import Policy
from molt_gym.trainers.actor.packing import TrainRow, build_trie, collate, micro_batches

CPU = torch.device("cpu")


@st.composite
def rows_of_groups(draw: st.DrawFn) -> list[TrainRow]:
    """Up to 6 rows over 3 ids, so that equal rows, prefixes of each other and shared beginnings are common."""
    ids = draw(st.lists(st.lists(st.integers(0, 2), min_size=2, max_size=9), min_size=1, max_size=6))
    rows = []
    for number, row in enumerate(ids):
        mask = draw(st.lists(st.integers(0, 1), min_size=len(row), max_size=len(row)))
        rows.append(TrainRow(row, mask, [-0.5 * bit for bit in mask], draw(st.sampled_from([-1.0, 0.5])), 0.1, number,
                             draw(st.integers(0, 1))))
    return rows


@pytest.fixture(scope="module")
def model(model_path: Callable[..., Path]) -> torch.nn.Module:
    return AutoModelForCausalLM.from_pretrained(model_path(), dtype=torch.float32, attn_implementation="sdpa").eval()


@pytest.fixture(scope="module")
def policy(model_path: Callable[..., Path]) -> Policy:
    return Policy(AutoModelForCausalLM.from_pretrained(
        model_path(), dtype=torch.float32, attn_implementation=ATTENTION).eval())


def gradient(model: torch.nn.Module, loss: Tensor) -> Tensor:
    model.zero_grad()
    if loss.requires_grad:
        loss.backward()
    return torch.cat([torch.zeros(p.numel()) if p.grad is None else p.grad.flatten() for p in model.parameters()])


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(rows=rows_of_groups(), limit=st.integers(1, 60), multiple=st.sampled_from([1, 1, 7]))
def test_packed_log_probs_and_gradients_equal_those_of_separate_rows(
    model: torch.nn.Module, policy: Policy, plain_logprobs: Callable[..., list[Tensor]], rows: list[TrainRow],
    limit: int, multiple: int,
) -> None:
    factors = torch.linspace(-1, 1, 16)
    expected = {row.row: logp for row, logp in zip(rows, plain_logprobs(model, rows), strict=True)}
    wanted = gradient(model, sum((factors[row.row] * expected[row.row]).sum() for row in rows))
    found: dict[int, Tensor] = {}
    loss = torch.zeros(())
    for batch in (collate(tries, CPU, multiple) for tries in micro_batches(rows, limit)):
        logps = policy(batch).logprobs.split([len(row.trained) for row in batch.order])
        found |= {row.row: logp for row, logp in zip(batch.order, logps, strict=True)}
        loss = loss + (factors[batch.rows] * torch.cat(logps)).sum()
    assert found.keys() == expected.keys()
    for number, logp in found.items():
        torch.testing.assert_close(logp, expected[number], rtol=0, atol=1e-5)
    torch.testing.assert_close(gradient(policy, loss), wanted, rtol=1e-5, atol=1e-5)


@settings(deadline=None)
@given(rows=rows_of_groups(), limit=st.integers(1, 60))
def test_every_trained_token_is_in_exactly_one_micro_batch_with_its_own_numbers(
    rows: list[TrainRow], limit: int
) -> None:
    found: Counter = Counter()
    for batch in (collate(tries, CPU) for tries in micro_batches(rows, limit)):
        found.update(zip(batch.rows.tolist(), batch.targets.tolist(), batch.behaviour.tolist(),
                         batch.advantages.tolist(), strict=True))
    assert found == Counter((row.row, row.ids[p], row.logprobs[p], row.advantage) for row in rows for p in row.trained)


@settings(deadline=None)
@given(rows=rows_of_groups(), limit=st.integers(1, 60))
def test_advantages_and_references_of_tokens_stay_with_their_tokens(rows: list[TrainRow], limit: int) -> None:
    for row in rows:
        row.advantages = [100.0 * row.row + position for position in row.trained]
        row.ref_logprobs = [-value for value in row.advantages]
    found: Counter = Counter()
    for batch in (collate(tries, CPU) for tries in micro_batches(rows, limit)):
        assert torch.equal(batch.reference, -batch.advantages)
        found.update(zip(batch.rows.tolist(), batch.targets.tolist(), batch.advantages.tolist(), strict=True))
    assert found == Counter((row.row, row.ids[p], 100.0 * row.row + p) for row in rows for p in row.trained)
    rows[0].ref_logprobs = None
    assert any(collate(tries, CPU).reference is None for tries in micro_batches(rows, limit))


@settings(deadline=None)
@given(rows=rows_of_groups(), limit=st.integers(1, 60))
def test_micro_batches_stay_within_the_limit_but_for_a_longer_row(rows: list[TrainRow], limit: int) -> None:
    for tries in micro_batches(rows, limit):
        size = collate(tries, CPU).input_ids.numel()
        longest = max(len(row.ids) for trie in tries for row in trie.rows)
        assert size <= limit or (len(tries) == 1 and size == longest)


def test_a_shared_beginning_stands_once() -> None:
    rows = [TrainRow([7, 8, 9, *tail], [0] * (3 + len(tail)), [0.0] * (3 + len(tail)), 1.0, 1.0, number, 0)
            for number, tail in enumerate([[1, 2], [1, 3], [4], [1, 2], []])]
    trie = build_trie(rows)
    assert sorted(trie.ids) == [1, 2, 3, 4, 7, 8, 9]
    assert [[trie.ids[node] for node in path] for path in trie.paths] == [row.ids for row in trie.rows]
    assert [[trie.positions[node] for node in path] for path in trie.paths] == [
        list(range(len(row.ids))) for row in trie.rows]


def test_the_token_at_t_is_scored_by_the_logits_at_t_minus_1_beside_a_longer_row() -> None:
    table = torch.tensor([[0.0, 1, 2], [1, 0, -1], [0.5, 0.5, 0.5]])
    short = TrainRow([0, 2, 1, 0], [0, 1, 1, 1], [0.0] * 4, 1.0, 1.0, 0, 0)
    long = TrainRow([1] * 9, [0] * 9, [0.0] * 9, 1.0, 1.0, 1, 1)
    (tries,) = micro_batches([short, long], 100)
    batch = collate(tries, CPU)
    logits = table[batch.input_ids].flatten(0, 1)[batch.sources]
    logp = logits.log_softmax(-1)[batch.source_of, batch.targets]
    torch.testing.assert_close(logp, torch.tensor([-0.407606, -1.098612, -0.407606]), rtol=0, atol=1e-6)


@pytest.mark.parametrize("end", [0, 5])
def test_an_end_token_is_trained_and_seen_also_where_its_id_is_that_of_padding(end: int) -> None:
    rows = [TrainRow([7, end, 8, 9, end], [0, 0, 0, 1, 1], [0.0] * 5, 1.0, 1.0, 0, 0),
            TrainRow([7] * 8, [0] * 7 + [1], [0.0] * 8, 1.0, 1.0, 1, 1)]
    (tries,) = micro_batches(rows, 100)
    batch = collate(tries, CPU, multiple=8)
    assert batch.targets.tolist() == [7, 9, end]
    assert batch.input_ids[0, 8:13].tolist() == rows[0].ids and batch.position_ids[0, 8:13].tolist() == [*range(5)]
    # Padding sees itself alone, and nobody sees it.
    assert batch.ends.tolist() == [8] * 8 + [13] * 5 + [14, 15, 16]


@settings(deadline=None)
@given(rows=rows_of_groups(), shares=st.integers(1, 3))
def test_whole_groups_are_dealt_and_each_once(rows: list[TrainRow], shares: int) -> None:
    dealt = balance(rows, shares)
    assert len(dealt) == shares
    assert sorted(row.row for share in dealt for row in share) == sorted(row.row for row in rows)
    homes: dict[int, set[int]] = {}
    for number, share in enumerate(dealt):
        for row in share:
            homes.setdefault(row.group, set()).add(number)
    assert all(len(home) == 1 for home in homes.values())


def test_the_first_id_of_a_row_has_nothing_that_could_score_it() -> None:
    row = TrainRow([5, 6, 7], [1, 0, 1], [0.0] * 3, 1.0, 1.0, 0, 0)
    assert row.trained == [2]
    assert collate([build_trie([row])], CPU).targets.tolist() == [7]


def test_ranks_get_about_the_same_number_of_tokens() -> None:
    rows = [TrainRow([number] * length, [1] * length, [0.0] * length, 1.0, 1.0, number, number)
            for number, length in enumerate([8, 7, 6, 5, 4, 3, 2, 1])]
    loads = [sum(len(row.ids) for row in share) for share in balance(rows, 2)]
    assert loads == [18, 18]


def test_fsdp_finds_the_tensors_of_a_batch_and_does_not_go_through_its_rows() -> None:
    seen: list[Tensor] = []
    rows = [TrainRow([1, 2, number], [0, 0, 1], [0.0, 0.0, -0.5], 1.0, 0.1, number, 0) for number in range(3)]
    batch = collate([build_trie(rows)], CPU)
    copy = _apply_to_tensors(lambda tensor: seen.append(tensor) or tensor, batch)
    assert any(tensor is batch.input_ids for tensor in seen)
    assert copy.order is batch.order
    assert len(list(batch.order)) == 3
