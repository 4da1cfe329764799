"""Operations are those that torch counts, and what is told by the second is what was computed."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from molt_gym.trainers.actor.flops import Cost, peak_operations, rates
from molt_gym.trainers.actor.fsdp_actor import ActorSpec
from molt_gym.trainers.actor.launch import LocalActor
from molt_gym.trainers.actor.packing import TrainRow, build_trie, collate


def counted(model: nn.Module, ids: torch.Tensor) -> int:
    """By torch, of a forward and a backward pass in which every token sees every other, as eager attention does."""
    with FlopCounterMode(display=False) as counter:
        model(ids, use_cache=False).logits.sum().backward()
    return counter.get_total_flops()


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("frozen", [True, False])
def test_operations_are_those_of_a_dense_model(model_path: Callable[..., Path], tied: bool, frozen: bool) -> None:
    model = AutoModelForCausalLM.from_pretrained(model_path(tied=tied), dtype=torch.float32,
                                                 attn_implementation="eager").eval()
    if frozen:
        # As with adapters: gradients pass through, but are not made for the weights.
        model.requires_grad_(False)
        model.get_input_embeddings().register_forward_hook(lambda _module, _args, out: out.requires_grad_())
    cost, length = Cost.of(model), 32
    expected = (cost.token + cost.scored) * length + cost.pair * length**2
    assert counted(model, torch.zeros(1, length, dtype=torch.long)) == pytest.approx(expected, rel=0.02)


def test_of_many_experts_those_count_that_a_token_goes_through() -> None:
    config = Qwen3MoeConfig(
        vocab_size=24, hidden_size=32, intermediate_size=48, moe_intermediate_size=16, num_experts=8,
        num_experts_per_tok=2, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2, head_dim=8,
        tie_word_embeddings=False)
    cost = Cost.of(Qwen3MoeForCausalLM(config))
    attention, router, expert = 32 * (4 + 2 + 2 + 4) * 8, 32 * 8, 3 * 32 * 16
    assert cost.token == 6 * (attention + router + 2 * expert)


def test_pairs_of_a_batch_are_tokens_that_see_each_other() -> None:
    rows = [TrainRow([1, 2, *tail], [0] * (2 + len(tail)), [0.0] * (2 + len(tail)), 1.0, 1.0, number, 0)
            for number, tail in enumerate([[3, 4], [5]])]
    batch = collate([build_trie(rows)], torch.device("cpu"), multiple=8)
    assert (batch.tokens, batch.pairs) == (5, 1 + 2 + 3 + 4 + 3)


def test_rates_are_sums_over_ranks_by_the_second() -> None:
    total = {name: torch.tensor([value, 0.0]) for name, value in
             (("perf/operations", 600.0), ("perf/tokens", 30.0), ("perf/trained", 12.0), ("policy/loss", 1.0))}
    assert rates(total, 3.0, 1000.0) == {"perf/train_tokens_per_s": 10.0, "perf/trained_tokens_per_s": 4.0,
                                         "perf/mfu": pytest.approx(0.2)}
    assert list(total) == ["policy/loss"]
    assert rates(total, 3.0, 1000.0) == {}


def test_a_step_tells_what_it_computed(
    spec: Callable[..., ActorSpec], random_rows: Callable[..., list[TrainRow]]
) -> None:
    rows = random_rows(3, 4, idle=[0, 1, 2, 3])
    actor = LocalActor(spec(actor__micro_batch_tokens=4096))
    try:
        metrics = actor.train([rows])
    finally:
        actor.close()
    tries = [build_trie(rows[start : start + 4]) for start in (4, 8)]
    seconds = metrics["time/train"]
    assert metrics["perf/train_tokens_per_s"] * seconds == pytest.approx(sum(len(trie.ids) for trie in tries))
    assert metrics["perf/trained_tokens_per_s"] * seconds == pytest.approx(sum(len(row.trained) for row in rows[4:]))
    peak = peak_operations(torch.device("cpu"), torch.float32)
    assert peak == peak_operations(torch.device("cpu"), torch.float32) > 1e8
    assert metrics["perf/mfu"] > 0
