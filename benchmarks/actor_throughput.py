"""How fast the actor trains and scores on one GPU, and whether it computes what plain transformers does.

    python benchmarks/actor_throughput.py [--sizes 4B 0.6B] [--only NUMBER ...] [--seconds 190]
    python benchmarks/actor_throughput.py --tiny      # on a CPU, in a minute
    python benchmarks/actor_throughput.py --only 4 --kernels 30     # and what a step's time goes to

Qwen3 shapes with random weights, written to a temporary folder (10 GB for both sizes). Rows are groups of 8 with a
prompt of 512 tokens and replies of 512 to 2,048, or single ones of 1,024 to 4,096. Each step is whole: a real actor on
one rank packs its rows, computes log-probabilities, loss and gradients, and its optimizer updates float32 masters. The
first steps, which compile kernels, do not count. Columns: tokens computed in a training pass a second, a shared prompt
once; operations that the update needs, without what is computed again; their share of what large products reach here;
peak memory; tokens a second of a pass that only scores, and that over the training pass; mean and largest difference of
the log-probabilities of a row, packed with others, from those that transformers computes of it alone in the same
precision. A variant that fails, or for which no time is left, is told so.

`--kernels` traces one more step of each kind of rows: its seconds, how many of them the GPU computes for (on a CPU: all
operations), and which kernels take most. A GPU that computes for much less than the step waits for the processor.
"""

import argparse
import gc
import random
import tempfile
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, Qwen3Config

from molt_gym.trainers.actor.flops import peak_operations
from molt_gym.trainers.actor.fsdp_actor import ActorSpec
from molt_gym.trainers.actor.launch import LocalActor
from molt_gym.trainers.actor.packing import TrainRow, micro_batches
from molt_gym.trainers.config import load_config

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
DTYPE = torch.bfloat16 if DEVICE.type == "cuda" else torch.float32
SHAPES = {
    "0.6B": {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16},
    "4B": {"hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36, "num_attention_heads": 32},
    "tiny": {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4},
}
VARIANTS = [
    ("4B", {"compile": True}),
    ("4B", {"activation_checkpointing": "full"}),
    ("0.6B", {}),
    ("0.6B", {"backend": "automodel"}),
    ("0.6B", {"compile": True}),
    ("4B", {"backend": "automodel", "activation_checkpointing": "full"}),
    ("4B", {"compile": True, "activation_checkpointing": "selective"}),
    ("tiny", {}),
    ("tiny", {"activation_checkpointing": "full"}),
    ("tiny", {"backend": "automodel"}),
]
HEAD = (f"{'model':6} {'variant':38} {'rows':7} {'tokens/s':>9} {'TFLOP/s':>8} {'MFU':>5} {'GiB':>6} "
        f"{'scoring/s':>9} {'ratio':>5} {'difference':>13}")


@dataclass(frozen=True)
class Scale:
    """How much is computed: most tokens of a micro-batch, micro-batches a step, and the unit of rows' lengths."""

    tokens: int = 16_384
    batches: int = 2
    unit: int = 512
    vocab: int = 151_936

    def rows(self, kind: str, seed: int) -> list[TrainRow]:
        """Those of a step."""
        chance = random.Random(f"{kind}/{seed}")
        rows: list[TrainRow] = []
        left, group = self.tokens * self.batches, 0
        while True:
            prompt = [chance.randrange(self.vocab) for _ in range(self.unit if kind == "groups" else self.unit // 4)]
            longest = self.unit * (4 if kind == "groups" else 8)
            sizes = [chance.randint(self.unit if kind == "groups" else 2 * self.unit, longest)
                     for _ in range(8 if kind == "groups" else 1)]
            left -= len(prompt) + sum(sizes)
            if rows and left < 0:
                break
            for size in sizes:
                ids = prompt + [chance.randrange(self.vocab) for _ in range(size - len(prompt) * (kind != "groups"))]
                mask = [0] * len(prompt) + [1] * (len(ids) - len(prompt))
                rows.append(TrainRow(ids, mask, [-12.0] * len(ids), chance.uniform(-1, 1), 0.0, len(rows), group))
            group += 1
        trained = sum(sum(row.mask) for row in rows)
        for row in rows:
            row.weight = 1 / trained
        return rows


def write_model(size: str, vocab: int, folder: Path) -> None:
    """A folder with random weights, made on the device."""
    config = Qwen3Config(vocab_size=vocab, num_key_value_heads=SHAPES[size]["num_attention_heads"] // (
        4 if size == "4B" else 2), head_dim=16 if size == "tiny" else 128, tie_word_embeddings=True, dtype=DTYPE,
        max_position_embeddings=16_384, architectures=["Qwen3ForCausalLM"], rope_theta=1e6, **SHAPES[size])
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    torch.manual_seed(0)
    weights = {name: torch.ones(weight.shape, dtype=DTYPE) if weight.ndim == 1 else torch.randn(
        weight.shape, dtype=DTYPE, device=DEVICE).mul_(0.02).cpu() for name, weight in model.named_parameters()}
    folder.mkdir()
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    config.save_pretrained(folder)


@torch.no_grad()
def plain_logprobs(path: Path, row: TrainRow) -> torch.Tensor:
    """Of a row's trained tokens, by transformers alone."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=DTYPE, attn_implementation="sdpa").to(DEVICE).eval()
    ids = torch.tensor([row.ids], device=DEVICE)
    hidden = model.base_model(ids, use_cache=False).last_hidden_state[0, [place - 1 for place in row.trained]]
    found = [model.lm_head(part).float().log_softmax(-1) for part in hidden.split(512)]
    wanted = ids[0, row.trained].split(512)
    return torch.cat([logs.gather(1, part[:, None])[:, 0] for logs, part in zip(found, wanted, strict=True)]).cpu()


def measure(actor: LocalActor, scale: Scale, kind: str) -> list[str]:
    """The columns of one kind of rows."""
    for seed in (2, 1):
        # Two lengths, after which kernels are for any.
        actor.train([scale.rows(kind, seed)])
    rows = scale.rows(kind, 0)
    steps = [actor.train([rows]) for _ in range(2)]
    rate, mfu, memory = (max(step.get(f"perf/{name}", 0.0) for step in steps)
                         for name in ("train_tokens_per_s", "mfu", "gpu_memory_peak"))
    actor.score(rows[:2])
    started = time.perf_counter()
    actor.score(rows)
    seconds = time.perf_counter() - started
    scored = sum(len(trie.ids) for tries in micro_batches(rows, 4 * scale.tokens) for trie in tries) / seconds
    operations = mfu * peak_operations(DEVICE, DTYPE) / 1e12
    return [f"{kind:7}", f"{rate:9,.0f}", f"{operations:8.2f}", f"{mfu:5.2f}", f"{memory:6.1f}", f"{scored:9,.0f}",
            f"{scored / rate:5.2f}"]


def kernels(actor: LocalActor, rows: list[TrainRow], count: int) -> list[str]:
    """The `count` kernels that a step takes most time for: milliseconds, share of the step, calls."""
    where = "cuda" if DEVICE.type == "cuda" else "cpu"
    started = time.perf_counter()
    with torch.profiler.profile(activities=[getattr(torch.profiler.ProfilerActivity, where.upper())]) as trace:
        actor.train([rows])
        # How long the trace takes to be written is no part of the step.
        seconds = time.perf_counter() - started
    spent = {event.key: (event.self_device_time_total if where == "cuda" else event.self_cpu_time_total, event.count)
             for event in trace.key_averages()}
    most = sorted(spent.items(), key=lambda item: -item[1][0])[:count]
    busy = sum(time for time, _ in spent.values()) / 1e6
    lines = [f"a step of {seconds:.3f} s, of which {where} computes for {busy:.3f}"]
    return lines + [f"{time / 1e3:9.2f} ms {time / 1e6 / seconds:6.1%} {calls:6} x {name[:84]}"
                    for name, (time, calls) in most]


def difference(actor: LocalActor, rows: Sequence[TrainRow], plain: torch.Tensor) -> str:
    """Mean and largest, of the first row."""
    apart = (torch.tensor(actor.score(rows)[0]) - plain).abs()
    return f"{apart.mean():.4f}/{apart.max():.4f}"


def run(
    size: str, options: dict[str, Any], path: Path, plain: torch.Tensor, scale: Scale, traced: int = 0
) -> list[str]:
    """Lines of a variant; traced: how many kernels of a step are printed."""
    overrides = {f"actor__{name}": value for name, value in options.items()}
    config = load_config("Any-v0", overrides={
        "actor__micro_batch_tokens": scale.tokens, "actor__lr": 1e-7, "rollout__max_context": 8192, **overrides})
    name = ", ".join(str(value) if name != "compile" else "compiled" for name, value in options.items()) or "plain"
    lines = []
    actor = LocalActor(ActorSpec(str(path), config, DTYPE, 100))
    try:
        apart = difference(actor, scale.rows("groups", 0), plain)
        for kind in ("groups", "single"):
            lines.append(" ".join([f"{size:6} {name:38}", *measure(actor, scale, kind), f"{apart:>13}"]))
            print(lines[-1], flush=True)
            if traced:
                print("\n".join(kernels(actor, scale.rows(kind, 0), traced)), flush=True)
    except Exception:  # noqa: BLE001  the other variants are of interest all the same
        lines.append(f"{size:6} {name:38} failed: {traceback.format_exc().splitlines()[-1][:90]}")
        print(traceback.format_exc(), flush=True)
    finally:
        actor.close()
    return lines


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", nargs="+", default=["4B", "0.6B"], choices=SHAPES)
    parser.add_argument("--seconds", type=float, default=190.0, help="after which no variant is begun")
    parser.add_argument("--only", type=int, nargs="*", help="numbers of variants, from 0 on in the order of the script")
    parser.add_argument("--kernels", type=int, default=0, metavar="N", help="print the N that take most of a step")
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args()
    sizes, scale = (["tiny"], Scale(256, 2, 16, 2048)) if options.tiny else (options.sizes, Scale())
    started, lines = time.monotonic(), []
    peak = peak_operations(DEVICE, DTYPE) / 1e12
    made: dict[str, torch.Tensor] = {}
    with tempfile.TemporaryDirectory() as folder:
        chosen = [VARIANTS[number] for number in options.only] if options.only else VARIANTS
        for size, variant in [found for found in chosen if found[0] in sizes]:
            left = options.seconds - (time.monotonic() - started)
            print(f"{size} {variant}, {left:.0f} s left", flush=True)
            if left < 0:
                lines.append(f"{size:6} {variant}: no time left")
                continue
            try:
                path = Path(folder) / size
                if size not in made:
                    write_model(size, scale.vocab, path)
                    made[size] = plain_logprobs(path, scale.rows("groups", 0)[0])
                lines += run(size, variant, path, made[size], scale, options.kernels)
            except Exception:  # noqa: BLE001  the same
                lines.append(f"{size:6} {variant} failed: {traceback.format_exc().splitlines()[-1][:90]}")
                print(traceback.format_exc(), flush=True)
            gc.collect()
            torch._dynamo.reset()
            if DEVICE.type == "cuda":
                torch.cuda.empty_cache()
    seconds = time.monotonic() - started
    print(f"\n{DEVICE.type}, {DTYPE}, products reach {peak:.2f} TFLOP/s; {seconds:.0f} s in all\n{HEAD}")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
