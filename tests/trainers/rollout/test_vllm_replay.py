"""From vLLM's experts to the actor's: rollouts of a mixture of experts, trained with the routing that sampled them."""

import asyncio
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoTokenizer, Qwen3MoeConfig, Qwen3MoeForCausalLM

from molt_gym.tokens import Renderer, Sampling, TokenGraph
from molt_gym.trainers.actor.fsdp_actor import ActorSpec
from molt_gym.trainers.actor.launch import LocalActor
from molt_gym.trainers.actor.packing import TrainRow, train_row
from molt_gym.trainers.actor.routing import Routing
from molt_gym.trainers.config import load_config
from molt_gym.trainers.rollout.engine import Request
from molt_gym.trainers.rollout.vllm_engine import VllmEngine

pytestmark = [pytest.mark.slow, pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed")]
LAYERS, TOP_K, ROLLOUTS = 4, 4, 6


def make(folder: Path, tokenizer, noise: float = 0.0, seed: int = 0) -> Path:
    """The folder of a random model; noise: on its routers, in standard deviations of their weights."""
    config = Qwen3MoeConfig(
        vocab_size=len(tokenizer), hidden_size=64, intermediate_size=96, num_hidden_layers=LAYERS,
        num_attention_heads=4, num_key_value_heads=2, head_dim=32, max_position_embeddings=2048, initializer_range=0.2,
        moe_intermediate_size=32, num_experts=16, num_experts_per_tok=TOP_K, norm_topk_prob=True,
        tie_word_embeddings=False, eos_token_id=2, pad_token_id=0, bos_token_id=None, dtype=torch.bfloat16)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = Qwen3MoeForCausalLM(config).bfloat16()
        for router in Routing(model.base_model.layers).routers.values() if noise else ():
            router.weight.data += noise * 0.2 * torch.randn_like(router.weight)
    path = folder / f"{noise}-{seed}"
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


async def play(engine: VllmEngine, renderer: Renderer, number: int) -> list[TrainRow]:
    """A rollout of two turns."""
    graph, talk = TokenGraph(renderer), [{"role": "user", "content": f"What is {number}?"}]
    for _ in range(2):
        prompt = graph.prepare(talk)
        request = Request(list(prompt.ids), Sampling(max_tokens=24, seed=number))
        generation, = await asyncio.wait_for(asyncio.gather(*engine.submit([request])), 180)
        reply = renderer.parse(generation.ids, talk, ())
        graph.commit(prompt, generation, reply)
        talk = [*talk, reply, {"role": "user", "content": "Are you sure?"}]
    return [train_row(row, 1.0, 1.0, 10 * number + place, number) for place, row in enumerate(graph.rows())]


def mismatch(path: Path, rows: list[TrainRow]) -> tuple[float, float]:
    """Mean |log π - log μ| of the actor, with live routing and with that of the sampler."""
    actor = LocalActor(ActorSpec(str(path), load_config("Any-v0"), torch.bfloat16, 1))
    sampled = np.array([value for row in rows for value in row.behaviour])
    try:
        return tuple(np.abs(np.array([value for values in actor.score(some) for value in values]) - sampled).mean()
                     for some in ([replace(row, experts=None) for row in rows], rows))
    finally:
        actor.close()


async def test_the_sampler_s_experts_reach_the_trainer_and_bring_both_together(tiny_path, tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(tiny_path)
    renderer = Renderer(tokenizer)
    path, noisy, other = (make(tmp_path, tokenizer, *changes) for changes in ((), (0.05,), (0.0, 1)))
    engine = VllmEngine(path, renderer, dtype=torch.bfloat16, max_context=512, max_sequences=8, routed_experts=True)
    try:
        await engine.pause()
        await engine.resume()
        rollouts = await asyncio.gather(*(play(engine, renderer, number) for number in range(ROLLOUTS)))
        # By the names of the checkpoint, as the weights of nemo_automodel's models are.
        await engine.pause()
        await engine.update_weights(load_file(other / "model.safetensors").items(), 1)
        await engine.resume()
        ids = rollouts[0][0].ids
        told = await engine.score(ids)
    finally:
        await engine.close()
    rows = [row for rollout in rollouts for row in rollout]
    for row in rows:
        assert row.experts.dtype == np.int16 and row.experts.shape == (len(row.ids), LAYERS, TOP_K)
        assert (row.experts[:-1] >= 0).all() and (row.experts[-1] == -1).all()
    with torch.no_grad():
        model = Qwen3MoeForCausalLM.from_pretrained(other, dtype=torch.bfloat16).eval()
        right = model(torch.tensor([ids])).logits[0, :-1].float().log_softmax(-1)[range(len(ids) - 1), ids[1:]]
    assert np.abs(np.array(told) - right.numpy()).mean() < 0.1

    live, replayed = mismatch(path, rows)
    live_noisy, replayed_noisy = mismatch(noisy, rows)
    print(f"mean |log π - log μ|: {live:.4f} live, {replayed:.4f} replayed; with noise on the trainer's routers "
          f"{live_noisy:.4f} and {replayed_noisy:.4f}")
    assert replayed <= live
    assert replayed_noisy < 0.6 * live_noisy
