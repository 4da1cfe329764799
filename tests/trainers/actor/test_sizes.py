"""Sizes of models and of the groups of ranks that share them, without torch."""

import subprocess
import sys
from typing import Any

import pytest

from molt_gym.errors import ConfigError
from molt_gym.trainers.actor.sizes import Shape, Sizes, check_sizes

QWEN3_4B = {
    "model_type": "qwen3", "vocab_size": 151936, "hidden_size": 2560, "intermediate_size": 9728, "head_dim": 128,
    "num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8, "tie_word_embeddings": True}
QWEN3_30B = {
    "model_type": "qwen3_moe", "vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 6144, "head_dim": 128,
    "num_hidden_layers": 48, "num_attention_heads": 32, "num_key_value_heads": 4, "moe_intermediate_size": 768,
    "num_experts": 128, "num_experts_per_tok": 8, "mlp_only_layers": [], "decoder_sparse_step": 1}
QWEN3_235B = QWEN3_30B | {"hidden_size": 4096, "num_hidden_layers": 94, "num_attention_heads": 64,
                          "moe_intermediate_size": 1536}
DEEPSEEK_V3 = {
    "model_type": "deepseek_v3", "vocab_size": 129280, "hidden_size": 7168, "intermediate_size": 18432,
    "num_hidden_layers": 61, "num_attention_heads": 128, "num_key_value_heads": 128, "moe_intermediate_size": 2048,
    "n_routed_experts": 256, "n_shared_experts": 1, "num_experts_per_tok": 8, "first_k_dense_replace": 3,
    "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128}
LLAMA_8B = {"vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
            "num_attention_heads": 32, "num_key_value_heads": 8}
MIXTRAL = LLAMA_8B | {"vocab_size": 32000, "num_local_experts": 8, "num_experts_per_tok": 2}


@pytest.mark.parametrize(("config", "billions"), [
    (QWEN3_4B, 4.02), (QWEN3_30B, 30.5), (QWEN3_235B, 235.1), (DEEPSEEK_V3, 671.0), (LLAMA_8B, 8.03), (MIXTRAL, 46.7),
    ({"text_config": QWEN3_4B, "vision_config": {}}, 4.02)])
def test_parameters_are_counted_as_the_makers_of_the_model_do(config: dict[str, Any], billions: float) -> None:
    assert Shape.of(config).parameters() / 1e9 == pytest.approx(billions, rel=0.002)


def test_a_model_without_attention_is_refused_by_what_its_configuration_lacks() -> None:
    config = {"model_type": "mamba", "vocab_size": 50280, "hidden_size": 768, "num_hidden_layers": 24}
    with pytest.raises(ConfigError, match="model: the configuration of mamba has no num_attention_heads"):
        Shape.of(config)


def test_ranks_of_tensor_and_expert_parallelism_hold_parts_of_layers_and_all_of_the_embedding() -> None:
    shape = Shape.of(QWEN3_30B)
    whole, half, eighth = shape.parameters(), shape.parameters(tp=2), shape.parameters(ep=8)
    assert whole - half == pytest.approx(48 * shape.attention / 2)
    assert whole - eighth == pytest.approx(48 * shape.routed * 7 / 8)


def test_rows_are_dealt_to_what_tensor_and_context_parallelism_leave() -> None:
    sizes = Sizes(world=16, tp=2, cp=4)
    assert (sizes.dp, sizes.shards) == (2, 8)


@pytest.mark.parametrize(("config", "sizes", "words"), [
    (QWEN3_4B, Sizes(16, tp=16), ["actor.tp: 16", "8 key-value heads", "divisor of 8"]),
    (QWEN3_4B, Sizes(12, tp=4, cp=3), ["actor.tp × actor.cp: 12", "32 attention heads"]),
    (LLAMA_8B | {"num_attention_heads": 24, "num_key_value_heads": 8}, Sizes(3, cp=3), ["actor.cp: 3", "8 key-value"]),
    (QWEN3_4B | {"intermediate_size": 9730}, Sizes(4, tp=4), ["actor.tp: 4", "9730 columns"]),
    (QWEN3_4B, Sizes(4, ep=2), ["actor.ep: 2", "without experts", "write 1"]),
    (QWEN3_30B, Sizes(24, ep=24), ["actor.ep: 24", "128 experts", "divisor of 128"]),
    (QWEN3_30B, Sizes(8, tp=2, ep=8), ["actor.ep: 8", "4 ranks", "divisor of 4"])])
def test_a_model_that_cannot_be_cut_so_is_refused_with_what_to_write(
    config: dict[str, Any], sizes: Sizes, words: list[str]
) -> None:
    with pytest.raises(ConfigError) as refused:
        check_sizes(Shape.of(config), sizes)
    for word in words:
        assert word in str(refused.value)


@pytest.mark.parametrize(("config", "sizes"), [
    (QWEN3_4B, Sizes()), (QWEN3_4B, Sizes(8, tp=2, cp=4)), (QWEN3_4B, Sizes(16, cp=16)),
    (DEEPSEEK_V3, Sizes(256, ep=32))])
def test_a_model_that_can_be_cut_so_is_not(config: dict[str, Any], sizes: Sizes) -> None:
    check_sizes(Shape.of(config), sizes)


def test_sizes_and_memory_are_known_without_torch() -> None:
    code = "import molt_gym.trainers.actor.memory, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
