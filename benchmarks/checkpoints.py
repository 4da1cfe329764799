"""For how long a checkpoint holds up training: written while it goes on, and waited for.

    python benchmarks/checkpoints.py --shape 0.6b --folder /some/disk       on a GPU
    python benchmarks/checkpoints.py --shape small                          anywhere

One rank trains on random rows of random weights, made here; each of `--saves` checkpoints is followed by updates until
it is on disk. Held: seconds until `begin` returns. Slower: how much longer updates take meanwhile.
"""

import argparse
import platform
import tempfile
import time
from pathlib import Path
from statistics import fmean

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from molt_gym.trainers.actor.fsdp_actor import ActorSpec
from molt_gym.trainers.actor.launch import LocalActor
from molt_gym.trainers.actor.packing import TrainRow
from molt_gym.trainers.checkpoint import Checkpoints
from molt_gym.trainers.config import load_config

SHAPES = {
    "small": dict(hidden_size=512, intermediate_size=1536, num_hidden_layers=8, num_attention_heads=8,
                  num_key_value_heads=4, head_dim=64, vocab_size=32_000),
    "0.6b": dict(hidden_size=1024, intermediate_size=3072, num_hidden_layers=28, num_attention_heads=16,
                 num_key_value_heads=8, head_dim=128, vocab_size=151_936),
}


def main() -> None:
    """Print a line for each way."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="small")
    parser.add_argument("--tokens", type=int, default=256, help="in an update")
    parser.add_argument("--saves", type=int, default=3)
    parser.add_argument("--folder", type=Path, help="of the disk to write to; a temporary one by default")
    options = parser.parse_args()
    gpu = torch.cuda.is_available()
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        model = Qwen3ForCausalLM(Qwen3Config(**SHAPES[options.shape], tie_word_embeddings=True))
        parameters = sum(parameter.numel() for parameter in model.parameters())
        model.save_pretrained(Path(folder) / "model")
        del model
        config = load_config("Any-v0", overrides={"rollout": {"max_context": options.tokens, "max_tokens": 8}})
        dtype = torch.bfloat16 if gpu else torch.float32
        actor = LocalActor(ActorSpec(str(Path(folder) / "model"), config, dtype, 1000))
        print(f"{parameters / 1e6:.0f}M parameters, {12 * parameters / 1e9:.2f} GB a checkpoint, "
              f"{torch.cuda.get_device_name() if gpu else platform.processor() or 'CPU'}")
        for asynchronous in (True, False):
            print(measure(actor, Path(folder), options.saves, options.tokens, asynchronous))
        actor.close()


def measure(actor: LocalActor, folder: Path, saves: int, tokens: int, asynchronous: bool) -> str:
    """What it takes with or without."""
    folder = folder / f"checkpoints-{asynchronous}"
    folder.mkdir()
    checkpoints = Checkpoints(folder, 1, asynchronous=asynchronous)
    alone = [update(actor, tokens) for _ in range(4)][1:]
    held, total, meanwhile = [], [], []
    for step in range(saves):
        started = time.perf_counter()
        checkpoints.begin(step, actor, {})
        held.append(time.perf_counter() - started)
        while not checkpoints.written:
            meanwhile.append(update(actor, tokens))
        total.append(time.perf_counter() - started)
        checkpoints.finish()
    slower = f", updates {fmean(meanwhile) / fmean(alone):.2f} × as long meanwhile" if meanwhile else ""
    return (f"{'asynchronous' if asynchronous else 'waited for'}: held up {fmean(held):.2f} s of {fmean(total):.2f} s "
            f"({', '.join(f'{value:.2f}' for value in held)}), update {fmean(alone):.2f} s{slower}")


def update(actor: LocalActor, tokens: int) -> float:
    """Seconds of one."""
    ids = torch.randint(30_000, (tokens,)).tolist()
    row = TrainRow(ids, [0] + [1] * (tokens - 1), [0.0] + [-10.0] * (tokens - 1), 1.0, 1 / (tokens - 1), 0, 0)
    started = time.perf_counter()
    actor.train([[row]])
    return time.perf_counter() - started


if __name__ == "__main__":
    main()
