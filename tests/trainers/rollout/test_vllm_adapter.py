"""Adapters in vLLM itself: an update brings them alone, and the probabilities are those of merged weights."""

import asyncio
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

from molt_gym.errors import RunFailed
from molt_gym.tokens import Sampling
from molt_gym.trainers.actor.fsdp_actor import ActorSpec
from molt_gym.trainers.actor.launch import LocalActor
from molt_gym.trainers.actor.packing import TrainRow
from molt_gym.trainers.config import load_config
from molt_gym.trainers.parity import ParityProbe
from molt_gym.trainers.rollout.engine import Request
from molt_gym.trainers.rollout.vllm_engine import VllmEngine
from molt_gym.trainers.rollout.vllm_spec import Lora

pytestmark = [pytest.mark.slow, pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed")]

LORA = Lora(3, 6.0)
PROMPTS = [[5, 7, 9], [1, 40, 300, 17, 200], list(range(20, 60))]


def adapter(model: Qwen3ForCausalLM, seed: int) -> dict[str, torch.Tensor]:
    """Random, for all linear layers but the head."""
    generator = torch.Generator().manual_seed(seed)
    found = {}
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and name != "lm_head":
            found[f"base_model.model.{name}.lora_A.weight"] = 0.3 * torch.randn(3, module.in_features,
                                                                                generator=generator)
            found[f"base_model.model.{name}.lora_B.weight"] = 0.3 * torch.randn(module.out_features, 3,
                                                                                generator=generator)
    return found


def with_adapter(model: Qwen3ForCausalLM, tensors: dict[str, torch.Tensor]) -> Qwen3ForCausalLM:
    with torch.no_grad():
        for name, a in tensors.items():
            if ".lora_A." in name:
                layer = model.get_submodule(name.removeprefix("base_model.model.").removesuffix(".lora_A.weight"))
                layer.weight += LORA.alpha / LORA.rank * tensors[name.replace("lora_A", "lora_B")] @ a
    return model


@pytest.mark.parametrize("name", ["get_rename_mapper", "get_unstacked_mapper"])
def test_names_are_mapped_without_joining_layers_in_old_and_new_vllm(name):
    from molt_gym.trainers.rollout.vllm_adapter import renames

    stacking, plain = SimpleNamespace(**{name: lambda: "renames"}), SimpleNamespace()
    assert renames(SimpleNamespace(hf_to_vllm_mapper=stacking)) == "renames"
    assert renames(SimpleNamespace(hf_to_vllm_mapper=plain)) is plain and renames(SimpleNamespace()) is None


async def update(engine: VllmEngine, tensors: dict[str, torch.Tensor], version: int) -> None:
    await engine.pause()
    await engine.update_weights(tensors.items(), version)
    await engine.resume()


async def test_updates_bring_adapters_for_those_who_want_them_and_one_without_a_place_ends_the_engine(
    tiny_path: Path, tmp_path: Path, renderer, play, expected
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_path)
    config = Qwen3Config(
        vocab_size=len(tokenizer), hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=32, max_position_embeddings=1024, initializer_range=0.3, eos_token_id=2,
        pad_token_id=0, bos_token_id=None, tie_word_embeddings=True)
    torch.manual_seed(0)
    Qwen3ForCausalLM(config).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)

    def load() -> Qwen3ForCausalLM:
        return AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32, attn_implementation="eager").eval()

    engine = VllmEngine(tmp_path, renderer, dtype=torch.float32, max_context=256, max_sequences=8,
                        lora=LORA)
    try:
        await asyncio.to_thread(engine.wait)
        current, straddling = load(), 0
        for version in range(1, 4):
            for prompt, reply in zip(PROMPTS, await play(engine, PROMPTS), strict=True):
                assert reply.logprobs == pytest.approx(expected(current, prompt, reply.ids), abs=1e-4)
                assert set(reply.versions) == {version - 1}
            flying = engine.submit([Request(prompt, Sampling(max_tokens=200, seed=1)) for prompt in PROMPTS])
            await asyncio.sleep(0.05 * 2**version)
            tensors = adapter(current, version)
            await update(engine, tensors, version)
            before, current = current, with_adapter(load(), tensors)
            for prompt, reply in zip(PROMPTS, await asyncio.gather(*flying), strict=True):
                old = reply.versions.count(version - 1)
                straddling += 0 < old < len(reply.ids)
                assert reply.logprobs[:old] == pytest.approx(expected(before, prompt, reply.ids)[:old], abs=1e-4)
                assert reply.logprobs[old:] == pytest.approx(expected(current, prompt, reply.ids)[old:], abs=1e-4)
        assert straddling
        ids = PROMPTS[2] + [7, 7]
        assert await engine.score(ids) == pytest.approx(expected(current, ids[:1], ids[1:]), abs=1e-4)

        # In one batch: with the adapter, without it, and a text that is scored.
        await engine.pause()
        asked = [(prompt, base) for prompt in PROMPTS for base in (False, True)]
        flying = engine.submit([Request(prompt, Sampling(max_tokens=20, seed=1), base=base) for prompt, base in asked])
        scoring = asyncio.ensure_future(engine.score(ids))
        await asyncio.sleep(0.1)
        await engine.resume()
        assert await scoring == pytest.approx(expected(current, ids[:1], ids[1:]), abs=1e-4)
        for (prompt, base), reply in zip(asked, await asyncio.gather(*flying), strict=True):
            assert reply.logprobs == pytest.approx(
                expected(load() if base else current, prompt, reply.ids), abs=1e-4), base

        config = load_config("Any-v0", overrides={"actor__lr": 0.02, "actor__lora__rank": 3, "actor__lora__alpha": 6.0,
                                                  "engine": "vllm", "rollout__max_context": 1024})
        actor = LocalActor(ActorSpec(str(tmp_path), config, torch.float32, 10))
        try:
            actor.train([[TrainRow(ids, [0] + [1] * 41, [-1.0] * 42, 1.0, 0.01, 0, 0)]])
            await update(engine, dict(actor.weights()), 4)
            assert await ParityProbe.of(renderer, 256, torch.float32, gpu=False).check(engine, actor) < 1e-5
        finally:
            actor.close()
        with pytest.raises(RunFailed, match="no place for 1 layers, such as model.layers.0.strange"):
            await update(engine, {"base_model.model.model.layers.0.strange.lora_A.weight": torch.zeros(3, 64),
                                  "base_model.model.model.layers.0.strange.lora_B.weight": torch.zeros(64, 3)}, 5)
        assert engine.ended is not None
    finally:
        await engine.close()
