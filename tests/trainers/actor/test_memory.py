"""The memory of a rank, worked out from shapes."""

import multiprocessing
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from transformers import Qwen3Config, Qwen3ForCausalLM

from molt_gym.errors import ConfigError
from molt_gym.trainers.actor import head
from molt_gym.trainers.actor.admission import describe as describe_run
from molt_gym.trainers.actor.admission import planned
from molt_gym.trainers.actor.attention import ATTENTION, Visible
from molt_gym.trainers.actor.fsdp_actor import ActorSpec
from molt_gym.trainers.actor.launch import LocalActor
from molt_gym.trainers.actor.memory import GIB, HEAD_CHUNK, Plan, activations, describe, fit, micro_batch_tokens, needs
from molt_gym.trainers.actor.sizes import Shape, Sizes

DENSE = Shape.of({
    "vocab_size": 151936, "hidden_size": 2560, "intermediate_size": 9728, "head_dim": 128, "num_hidden_layers": 36,
    "num_attention_heads": 32, "num_key_value_heads": 8, "tie_word_embeddings": True})
SPARSE = Shape.of({
    "vocab_size": 129280, "hidden_size": 7168, "intermediate_size": 18432, "num_hidden_layers": 61,
    "num_attention_heads": 128, "num_key_value_heads": 128, "moe_intermediate_size": 2048, "n_routed_experts": 256,
    "n_shared_experts": 1, "num_experts_per_tok": 8, "first_k_dense_replace": 3, "q_lora_rank": 1536,
    "kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128})
H200 = 140 * GIB


def test_a_model_of_4b_on_one_device_takes_16_bytes_a_parameter_and_a_copy_to_compute_with() -> None:
    needed = needs(DENSE, Plan(Sizes(), 16384))
    assert needed["parameters"] == 4 * DENSE.parameters()
    assert needed["optimizer"] == 8 * DENSE.parameters()
    assert needed["gathered weights"] == 2 * DENSE.parameters()
    assert needed["gradients"] == pytest.approx(4 * DENSE.parameters(), rel=0.05)


def test_ranks_share_masters_and_optimizer_but_each_gathers_embedding_and_layers() -> None:
    alone, eight = (needs(DENSE, Plan(Sizes(world), 16384)) for world in (1, 8))
    for part in ("parameters", "optimizer"):
        assert eight[part] == alone[part] / 8
    assert 2 * DENSE.embeddings < eight["gathered weights"] < alone["gathered weights"] / 5


def test_a_gradient_that_is_summed_before_it_is_exchanged_is_whole_on_each_rank() -> None:
    plan = Plan(Sizes(8), 16384)
    extra = needs(DENSE, plan, whole_gradient=True)["gradients"] - needs(DENSE, plan)["gradients"]
    assert extra == 4 * DENSE.parameters()
    alone = replace(plan, sizes=Sizes())
    assert needs(DENSE, alone, whole_gradient=True) == needs(DENSE, alone)


def test_checkpointing_tp_and_cp_leave_fewer_activations() -> None:
    none, selective, full = (activations(DENSE, Plan(Sizes(), 1, mode)) for mode in ("none", "selective", "full"))
    assert none / 2.5 < selective < none / 2
    assert full < none / 15
    assert none / 2 < activations(DENSE, Plan(Sizes(2, tp=2), 1)) < none * 0.7
    whole, half = (needs(DENSE, Plan(Sizes(2, cp=cp), 16384)) for cp in (1, 2))
    assert half["activations"] == whole["activations"] / 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_activations_are_about_what_autograd_keeps(dtype: torch.dtype) -> None:
    config = Qwen3Config(vocab_size=64, hidden_size=128, intermediate_size=384, num_hidden_layers=4, head_dim=64,
                         num_attention_heads=4, num_key_value_heads=2, attn_implementation=ATTENTION)
    model, tokens = Qwen3ForCausalLM(config).to(dtype).eval(), 512
    own = {tensor.untyped_storage().data_ptr() for tensor in (*model.parameters(), *model.buffers())}
    kept: dict[int, torch.Tensor] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        model.model(input_ids=torch.zeros(1, tokens, dtype=torch.long), position_ids=torch.arange(tokens)[None],
                    use_cache=False, visible=Visible(torch.full((tokens,), tokens)))
    found = sum(tensor.untyped_storage().nbytes() for place, tensor in kept.items() if place not in own) / tokens
    assert found == pytest.approx(activations(Shape.of(config.to_dict()), Plan(Sizes(), 1, compute=dtype.itemsize)),
                                  rel=0.15)


def test_frozen_models_a_critic_and_adapters_change_what_is_needed() -> None:
    plan = Plan(Sizes(), 2048)
    needed = needs(DENSE, replace(plan, frozen=1, trained=2, share=0.01))
    assert needed["frozen models"] == 2 * DENSE.parameters()
    assert needed["parameters"] == 8 * DENSE.parameters()
    assert needed["optimizer"] == pytest.approx(0.16 * DENSE.parameters())
    assert "optimizer" not in needs(DENSE, replace(plan, offload=True))


def test_what_does_not_fit_is_refused_with_the_arithmetic_and_what_does() -> None:
    with pytest.raises(ConfigError) as refused:
        fit(DENSE, Plan(Sizes(), 16384), H200)
    message = str(refused.value)
    assert "140.0 GiB" in message and "4.02B parameters" in message and "activations 93.38" in message
    assert message.endswith("Write actor.activation_checkpointing = 'selective' or actor.activation_checkpointing = "
                            "'full'")
    assert fit(DENSE, Plan(Sizes(), 16384, "selective"), H200)


def test_the_same_options_take_700b_on_as_many_devices_as_it_needs() -> None:
    with pytest.raises(ConfigError, match="actor.activation_checkpointing = 'full' with actor.world_size = 128"):
        fit(SPARSE, Plan(Sizes(8, ep=8), 8192), H200)
    plan = Plan(Sizes(128, ep=32), 8192, "full")
    # There is room for it, but not for a whole gradient on each rank.
    assert fit(SPARSE, plan, H200) is False
    assert "671.03B parameters on 128 ranks (dp 128 × cp 1 × tp 1, ep 32)" in describe(SPARSE, plan)


def test_an_actor_is_refused_before_its_ranks_are_started(spec: Callable[..., ActorSpec]) -> None:
    with pytest.raises(ConfigError, match="actor.tp: 4 does not divide the model's 2 key-value heads"):
        LocalActor(spec(actor__world_size=4, actor__tp=4))
    assert not multiprocessing.active_children()


@pytest.mark.parametrize(("checkpointing", "memory", "tokens"), [
    ("none", None, 2048), ("full", H200, 16384), ("selective", H200, 8192), ("none", H200, 4096),
    ("none", 80 * GIB, 2048),
])
def test_a_micro_batch_takes_a_part_of_a_gpu_if_it_is_not_told_how_much(
    checkpointing: str, memory: float | None, tokens: int
) -> None:
    plan = Plan(Sizes(), 1, checkpointing)
    assert micro_batch_tokens(DENSE, plan, memory) == tokens
    assert micro_batch_tokens(DENSE, replace(plan, tokens=100_000), memory) == tokens


def test_what_all_experts_are_handed_counts_too() -> None:
    found = [micro_batch_tokens(SPARSE, Plan(Sizes(256, ep=ep), 1, "full"), H200) for ep in (8, 64, 256)]
    assert found == sorted(found, reverse=True) and found[0] > found[-1] == 2048


@given(memory=st.floats(8, 300), world=st.sampled_from([1, 2, 8]), mode=st.sampled_from(["none", "selective", "full"]))
@example(memory=80, world=1, mode="selective")
def test_nothing_that_fits_is_refused_for_want_of_a_number(memory: float, world: int, mode: str) -> None:
    plan = Plan(Sizes(world), 2048, mode)
    try:
        fit(DENSE, plan, memory * GIB)
    except ConfigError:
        return
    fit(DENSE, replace(plan, tokens=micro_batch_tokens(DENSE, plan, memory * GIB)), memory * GIB)


def test_a_run_is_planned_for_the_memory_that_there_is_and_by_what_it_is_told(spec: Callable[..., ActorSpec]) -> None:
    assert planned(spec(), None)[1].tokens == 2048
    assert planned(spec(), H200)[1].tokens == 16384
    assert planned(spec(actor__micro_batch_tokens=512), H200)[1].tokens == 512


def test_a_run_beside_an_engine_is_planned_for_what_that_leaves(spec: Callable[..., ActorSpec]) -> None:
    def tokens(known: int, **options: Any) -> int:
        return planned(spec(**options), known)[1].tokens

    beside = {"rollout__engine": "vllm", "rollout__engine_args": {"gpu_memory_utilization": 0.9}}
    known = next(1 << power for power in range(40) if tokens(1 << power) == 16384)
    assert tokens(known, **beside) < 16384
    assert tokens(known, **beside, rollout__release_memory=True) == 16384
    assert tokens(known, **beside, placement="ray", ray__layout="disaggregate") == 16384


def test_a_run_is_planned_by_its_options(spec: Callable[..., ActorSpec]) -> None:
    line = describe_run(spec(actor__world_size=4, actor__tp=2, actor__activation_checkpointing="full"))
    assert "on 4 ranks (dp 2 × cp 1 × tp 2), 2,048 tokens a micro-batch, checkpointing full" in line
    adapted = describe_run(spec(actor__lora__rank=4))
    assert "frozen models" in adapted and "parameters 0.00" not in adapted


def test_where_the_memory_is_not_known_all_fits() -> None:
    assert fit(SPARSE, Plan(Sizes(), 8192), None)


def test_logits_are_those_of_the_positions_that_the_head_takes_at_once() -> None:
    assert HEAD_CHUNK == head.CHUNK
