"""Sampler against trainer on a mixture of experts, with and without routing replay.

    python benchmarks/routing_replay.py                                    anywhere; a minute on two cores
    python benchmarks/routing_replay.py --shape small --new 256 --rows 64  on a GPU
    python benchmarks/routing_replay.py --shape small --ranks 2 --ep 2     on two GPUs: experts over both

vLLM samples in bfloat16 from a Qwen3-MoE with random weights and tells the experts of each token; then the actor
computes the log-probabilities of the same tokens, also in bfloat16. Columns: differences of log-probabilities, and the
share of (token, layer) pairs that plain transformers routes to other experts than vLLM did. Rows: the trainer's routers
as they are, and with noise of that many standard deviations on their weights, in the trainer alone.
"""

import argparse
import asyncio
import multiprocessing
import platform
import random
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM
from vllm_updates import make_tokenizer

from molt_gym.tokens import Generation, Renderer, Sampling
from molt_gym.trainers.actor.fsdp_actor import ActorSpec
from molt_gym.trainers.actor.launch import LocalActor
from molt_gym.trainers.actor.packing import TrainRow
from molt_gym.trainers.actor.routing import Routing
from molt_gym.trainers.config import load_config
from molt_gym.trainers.rollout.engine import Request
from molt_gym.trainers.rollout.vllm_engine import VllmEngine

SHAPES = {
    "tiny": dict(vocab_size=512, hidden_size=64, intermediate_size=128, num_hidden_layers=4, num_attention_heads=4,
                 num_key_value_heads=2, head_dim=32, moe_intermediate_size=32, num_experts=16, num_experts_per_tok=4),
    "small": dict(vocab_size=32_768, hidden_size=1024, intermediate_size=3072, num_hidden_layers=12,
                  num_attention_heads=16, num_key_value_heads=4, head_dim=64, moe_intermediate_size=512,
                  num_experts=64, num_experts_per_tok=8),
}
PROMPT = 32
DEADLINE = 300.0
"""Seconds for a model to be built and asked."""


def make_models(folder: Path, shape: str, noise: float) -> tuple[dict[float, Path], Renderer]:
    """Folders of a random model as it is and with noise on its routers, and the renderer."""
    sizes = SHAPES[shape]
    tokenizer = make_tokenizer(sizes["vocab_size"])
    # A random model with the usual initialization is nearly uniform, so that nothing could be seen.
    config = Qwen3MoeConfig(
        **sizes, norm_topk_prob=True, tie_word_embeddings=False, max_position_embeddings=4096, dtype=torch.bfloat16,
        initializer_range=1.5 / sizes["hidden_size"] ** 0.5, eos_token_id=2, pad_token_id=0, bos_token_id=None)
    torch.manual_seed(0)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = Qwen3MoeForCausalLM(config).to(torch.bfloat16)
    paths = {}
    for level in (0.0, noise):
        if level:
            for router in Routing(model.base_model.layers).routers.values():
                weight = router.weight.data
                weight += level * weight.float().std().to(weight.dtype) * torch.randn_like(weight)
        paths[level] = folder / f"noise-{level}"
        model.save_pretrained(paths[level])
        tokenizer.save_pretrained(paths[level])
    return paths, Renderer(tokenizer)


async def sample(path: Path, renderer: Renderer, prompts: Sequence[list[int]], new: int) -> list[Generation]:
    """Replies of vLLM, with experts; the engine has ended."""
    engine = VllmEngine(path, renderer, dtype=torch.bfloat16, max_context=PROMPT + new, max_sequences=len(prompts),
                        routed_experts=True, engine_args={"enforce_eager": True})
    try:
        return list(await asyncio.gather(*engine.submit(
            [Request(prompt, Sampling(max_tokens=new, seed=number)) for number, prompt in enumerate(prompts)])))
    finally:
        await engine.close()


def train_row(number: int, prompt: list[int], reply: Generation) -> TrainRow:
    """The row that a rollout of one turn leaves; nothing is known of its last token."""
    experts = np.pad(reply.routed_experts, ((0, 1), (0, 0), (0, 0)), constant_values=-1)
    return TrainRow(prompt + reply.ids, [0] * len(prompt) + [1] * len(reply.ids),
                    [0.0] * len(prompt) + reply.logprobs, 1.0, 1.0, number, number, experts=experts)


def measure(path: Path, rows: Sequence[TrainRow], ranks: int, ep: int, backend: str) -> dict[bool, torch.Tensor]:
    """Absolute differences of log-probabilities of all sampled tokens, without replay and with it."""
    config = load_config("Any-v0", overrides={
        "actor.world_size": ranks, "actor.ep": ep, "actor.backend": backend, "actor.micro_batch_tokens": 4096})
    actor = LocalActor(ActorSpec(str(path), config, torch.bfloat16, 1))
    sampled = torch.tensor([value for row in rows for value in row.behaviour])
    try:
        return {replayed: (torch.tensor([value for values in actor.score(
            rows if replayed else [replace(row, experts=None) for row in rows]) for value in values]) - sampled).abs()
            for replayed in (False, True)}
    finally:
        actor.close()


@torch.no_grad()
def differing(path: Path, rows: Sequence[TrainRow]) -> float:
    """Share of (token, layer) pairs that transformers, in bfloat16, sends to other experts than the rows tell."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16).eval()
    model = model.cuda() if torch.cuda.is_available() else model
    chosen: dict[int, np.ndarray] = {}

    def keep(layer: int, _router: torch.nn.Module, _arguments: tuple, told: tuple) -> None:
        chosen[layer] = np.sort(told[-1].cpu().numpy(), -1)

    for layer, router in Routing(model.base_model.layers).routers.items():
        router.register_forward_hook(partial(keep, layer))
    found = []
    for row in rows:
        model(torch.tensor([row.ids], device=model.device))
        for layer, experts in chosen.items():
            told = np.sort(row.experts[:, layer], -1)
            known = told[:, 0] >= 0
            found.append((experts != told).any(-1)[known])
    return float(np.concatenate(found).mean())


def apart(function: Callable[..., Any], *arguments: Any) -> Any:
    """What a function returns in a process of its own: nemo_automodel keeps the ranks of a model that it has built."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
        return process.submit(function, *arguments).result(DEADLINE)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", choices=SHAPES, default="tiny")
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--new", type=int, default=64, help="tokens of a reply")
    parser.add_argument("--noise", type=float, default=0.05, help="standard deviations on the trainer's routers")
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--ep", type=int, default=1, help="ranks that share the experts")
    parser.add_argument("--backend", choices=("auto", "transformers", "automodel"), default="auto")
    options = parser.parse_args()
    rng = random.Random(0)
    prompts = [[rng.randrange(3, 256) for _ in range(PROMPT)] for _ in range(options.rows)]
    with tempfile.TemporaryDirectory() as folder:
        paths, renderer = make_models(Path(folder), options.shape, options.noise)
        replies = asyncio.run(sample(paths[0.0], renderer, prompts, options.new))
        rows = [train_row(number, *pair) for number, pair in enumerate(zip(prompts, replies, strict=True))]
        lines = []
        for level, path in paths.items():
            elsewhere = apart(differing, path, rows)
            found = apart(measure, path, rows, options.ranks, options.ep, options.backend)
            for replayed, values in found.items():
                lines.append(f"{level:9.2f} {'yes' if replayed else 'no':>7} {values.mean():12.5f} "
                             f"{values.quantile(0.99):10.4f} {values.max():10.4f} {elsewhere:18.3%}")
                print(lines[-1], flush=True)
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.machine()
    print(f"\n{device}, torch {torch.__version__}, vllm {version_of('vllm')}, {options.shape}, "
          f"{sum(len(reply.ids) for reply in replies)} tokens, {options.ranks} ranks, ep {options.ep}, backend "
          f"{options.backend}")
    print(f"{'noise':>9} {'replay':>7} {'mean |diff|':>12} {'99th':>10} {'max':>10} {'routed elsewhere':>18}")
    print("\n".join(lines))


def version_of(name: str) -> str:
    """Of an installed package, also one that goes by another name on CPUs."""
    names = [name, f"{name}-cpu"]
    for one in names:
        try:
            return version(one)
        except ModuleNotFoundError:
            continue
    return "?"


if __name__ == "__main__":
    main()
