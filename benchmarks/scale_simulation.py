"""Steps from one GPU to 1,024, predicted by `step_simulation.py`, which is held against the runs that were measured.

    python benchmarks/scale_simulation.py [--model slurm/recipes/models/Qwen3-4B.json] [--result NAME]

`CHECKS` names what it takes from benchmarks/results; `molt_gym.trainers.plan_rates` makes seconds of rates and sizes.
"""

import argparse
import json
import math
import pickle
import shlex
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from step_simulation import Run, simulate

from molt_gym.trainers.actor.packing import TrainRow
from molt_gym.trainers.actor.sizes import Shape, Sizes
from molt_gym.trainers.plan_rates import Engine, Rates, operations, update
from molt_gym.trainers.rollout.vllm_transfer import BUCKET_BYTES

ROOT = Path(__file__).parents[1]
MESSAGE = 0.5e-3
"""Seconds of the driver for a message to an engine; assumed."""
SNAPSHOT = 1.2e9
"""Bytes a second of the copy that a checkpoint waits for: h200-checkpoints.md."""


ONE = Run(groups=64, size=8, stale=0, engines=1, a=0.0, b=1 / 19_901, train=7.90, pause=0.432, mean=256, longest=256)
"""h200-rollout-in-training.md, on-policy: the engine alone, the actor's seconds, the four parts of an update."""
TWO = Run(groups=4, size=8, stale=0, engines=1, a=0.57 / 16, b=0.0, train=0.46, pause=0.77, mean=16, longest=16)
"""h200x2-several-gpus.md, strict: what is left of its step makes the engine's, as it was not fed alone."""
CHECKS = [
    ("1 GPU, on-policy", "h200-rollout-in-training", ONE, 16.36, "engine alone, actor, update"),
    ("1 GPU, one version behind", "h200-rollout-in-training",
     replace(ONE, stale=1, b=1 / 22_741, train=8.60, pause=0.411), 9.91, "engine alone, actor, update"),
    ("2 GPUs, on-policy", "h200x2-several-gpus", TWO, 1.80, "all of it: no check"),
    ("2 GPUs, one version behind", "h200x2-several-gpus", replace(TWO, stale=1, train=0.44, pause=0.75), 1.22,
     "engine from the row above, actor, update"),
]


def checks() -> Iterator[str]:
    """Rows of a table: what was predicted, what was measured."""
    yield "| run | results | calibrated on its | predicted | measured | off |"
    yield "|---|---|---|---|---|---|"
    for name, file, run, measured, taken in CHECKS:
        seconds = simulate(run)[0]
        yield (f"| {name}, step | {file} | {taken} | {seconds:.2f} s | {measured:.2f} s | "
               f"{seconds / measured - 1:+.0%} |")
    for name, file, mfu, length, measured in (("4B, full checkpointing, single rows", "Qwen3-4B", 0.30, 2560, 9529),
                                              ("0.6B, single rows", "Qwen3-0.6B", 0.30, 2560, 29258)):
        shape = small() if file == "Qwen3-0.6B" else shape_of(ROOT / "slurm" / "recipes" / "models" / f"{file}.json")
        rates = Rates().train.model_copy(update={"mfu": mfu})
        speed = length / update(shape, Sizes(), 16384, (operations(shape, 0, length, 1, 0), length), rates, True)
        yield (f"| {name}, tokens/s of an update | h200-actor-throughput | 4B, groups: MFU .30 | {speed:,.0f} | "
               f"{measured:,} | {speed / measured - 1:+.0%} |")


def shape_of(path: Path) -> Shape:
    """Of a `config.json`."""
    return Shape.of(json.loads(path.read_text()))


def small() -> Shape:
    """The 0.6B shape of the measurements."""
    return Shape(layers=28, hidden=1024, heads=16, kv_heads=8, head_dim=128, vocab=151936, tied=True, ffn=3072,
                 dense=28)


def cluster(shape: Shape, gpus: int, rates: Rates, driver: float) -> tuple[Run, dict[str, float]]:
    """A run on so many GPUs, half of which sample with 64 sequences each, and what grows."""
    engines, ranks = max(1, gpus // 2), max(1, gpus // 2)
    mean, prompt = 2048.0, rates.episode.prompt
    numbers = 2 * shape.layers * shape.kv_heads * shape.head_dim * 2
    engine = Engine(shape, 1, 2 * shape.parameters(), numbers, rates.engine)
    a, at_64 = engine.step(0, 0), engine.step(64, prompt + mean / 2)
    rollouts = 64 * engines
    work = (operations(shape, prompt, mean, rollouts, rollouts // 8), rollouts * mean + rollouts // 8 * prompt)
    buckets = math.ceil(2 * shape.parameters() / BUCKET_BYTES["cuda"])
    messages = buckets * engines
    sent = rates.weights.fixed + 2 * shape.parameters() / rates.weights.bytes_per_s
    run = Run(groups=rollouts // 8, size=8, stale=0 if gpus == 1 else 1, engines=engines, a=a, b=(at_64 - a) / 64,
              train=update(shape, Sizes(world=ranks), 16384, work, rates.train, ranks <= 8),
              pause=max(sent, messages * MESSAGE), mean=mean, longest=8192, spread=0.7, driver=driver,
              together=gpus == 1)
    tokens = range(int(prompt + mean))
    row = TrainRow([1000 + n for n in tokens], [1 for _ in tokens], [-1 / (n + 2) for n in tokens], 0.1, 1.0, 0, 0)
    state = 12 * shape.parameters() / ranks
    return run, {"messages": messages + 2 * rollouts, "store": rollouts * len(pickle.dumps(row)), "weights": run.pause,
                 "checkpoint": state, "held": state / SNAPSHOT, "driver": rollouts * driver}


def scale(shape: Shape, sizes: list[int], rates: Rates, driver: float) -> Iterator[str]:
    """Rows of a table."""
    yield ("| GPUs | rollouts | step | training | weights | tokens/s a GPU | staleness | messages | driver | object "
           "store | checkpoint a rank | held up |")
    yield "|---:" * 12 + "|"
    for gpus in sizes:
        run, grows = cluster(shape, gpus, rates, driver)
        seconds, stale, _ = simulate(run, steps=max(2, min(8, 4096 // gpus)))
        rollouts = run.groups * run.size
        yield (f"| {gpus:,} | {rollouts:,} | {seconds:.1f} s | {run.train:.1f} s | {grows['weights']:.1f} s | "
               f"{rollouts * run.mean / seconds / gpus:,.0f} | {stale:.2f} | {grows['messages']:,.0f} | "
               f"{grows['driver']:.1f} s | {grows['store'] / 1e6:,.0f} MB | {grows['checkpoint'] / 1e9:.1f} GB | "
               f"{grows['held']:.1f} s |")


def measure_driver(tokens: int = 2560) -> float:
    """Seconds in which this machine writes down a rollout of so many tokens, at best."""
    from molt_gym.tokens import Row, Trajectory

    row = Row(ids=list(range(tokens)), mask=[1] * tokens, logprobs=[-0.123456] * tokens, versions=[3] * tokens)
    trajectory = Trajectory(env="Math-v0", index=1, rows=[row])
    times = []
    for _ in range(9):
        began = time.perf_counter()
        trajectory.to_json()
        times.append(time.perf_counter() - began)
    return min(times)


def main() -> None:
    """Print both tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, default=ROOT / "slurm" / "recipes" / "models" / "Qwen3-4B.json")
    parser.add_argument("--gpus", type=int, nargs="+", default=[1, 2, 8, 32, 128, 512, 1024])
    parser.add_argument("--driver", type=float, help="seconds of the driver for a rollout; without it, measured here")
    parser.add_argument("--result", help="name of a file in benchmarks/results")
    options = parser.parse_args()
    driver = measure_driver() if options.driver is None else options.driver
    lines = ["# Predicted and measured steps, and predicted ones at scale", "", "```",
             f"python {shlex.join(sys.argv)}", "```", "", *checks(), "",
             f"{options.model.stem}, {driver * 1e3:.2f} ms of the driver for a rollout:", "",
             *scale(shape_of(options.model), options.gpus, Rates(), driver)]
    print("\n".join(lines))
    if options.result:
        (ROOT / "benchmarks" / "results" / f"{options.result}.md").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
