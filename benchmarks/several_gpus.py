"""What one GPU cannot show, on two or more: weights over NCCL, an actor of several ranks, an engine over several GPUs.

    python benchmarks/several_gpus.py --steps 100 --result NAME       on a host with two GPUs or more
    python benchmarks/several_gpus.py --actor --result NAME           updates alone, by layout of the actor's ranks

Each row is a training run of its own with placement "ray", on the same random model, tasks and seed, so that the first
step's gradient norms can be compared. Replies are cut at `--tokens`, as the model knows nothing. Every update is
followed by the parity probe, which ends a run whose engine does not compute what the actor does.

With `--actor`, each layout makes two updates on the same rows; the second one is timed. "off" is how far its weights
are from those of one rank after the first update, as a share of the length of that update.
"""

import argparse
import json
import os
import random
import shlex
import signal
import sys
import tempfile
import threading
import time
from pathlib import Path
from statistics import fmean
from typing import Any

import psutil
import ray
import torch
from rollout_in_training import describe
from vllm_updates import make_model

import molt_gym
from molt_gym.trainers.actor.fsdp_actor import ActorSpec
from molt_gym.trainers.actor.launch import LocalActor
from molt_gym.trainers.actor.packing import TrainRow
from molt_gym.trainers.config import load_config

APART = {"ray.layout": "disaggregate"}
RUNS: dict[str, dict[str, Any]] = {
    "actor on 1 GPU, engine on 1, strict": APART,
    "the same, one version behind": APART | {"rollout.max_staleness": 1},
    "actor and engine share 1 GPU": {"ray.layout": "colocate"},
    "actor on 2 GPUs, 2 engines on the same": {"ray.layout": "colocate", "actor.world_size": 2, "rollout.engines": 2},
    "actor on 2 GPUs, engine over the same 2": {
        "ray.layout": "colocate", "actor.world_size": 2, "rollout.engine_args": {"tensor_parallel_size": 2}},
    "actor on 2 GPUs, a rank killed": {"ray.layout": "colocate", "actor.world_size": 2, "rollout.engines": 2,
                                       "checkpoint.every": 2},
}
LAYOUTS: dict[str, dict[str, Any]] = {
    "1 rank": {},
    "2 ranks": {"world_size": 2},
    "tp 2": {"world_size": 2, "tp": 2},
    "cp 2": {"world_size": 2, "cp": 2},
    "1 rank, selective": {"activation_checkpointing": "selective"},
    "1 rank, full, optimizer offloaded": {"activation_checkpointing": "full", "offload_optimizer": True},
}
LONG = ("actor on 1 GPU, engine on 1, strict", "the same, one version behind")
"""Runs of `--steps` steps; the others have `--short`."""


def main(options: argparse.Namespace) -> None:
    """One of the two tables."""
    here = Path(__file__).resolve().parent
    lines = actor_lines(options) if options.actor else run_lines(here, options)
    print("\n".join(["", describe(), *lines]))
    if options.result:
        command = shlex.join(["python", "benchmarks/several_gpus.py", *sys.argv[1:]])
        text = "\n".join([f"# {torch.cuda.device_count()} GPUs", "", describe(), "", "```", command, "```", "", *lines])
        (here / "results" / f"{options.result}.md").write_text(text + "\n")


def run_lines(here: Path, options: argparse.Namespace) -> list[str]:
    """The table of the training runs."""
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(here), os.environ.get("PYTHONPATH")]))
    molt_gym.register("Arithmetic-v0", "rollout_in_training:Arithmetic", max_episode_steps=1)
    ray.init(include_dashboard=False, log_to_driver=False, logging_level="error")
    lines = ["| | steps | step, s | train, s | weights, s | sampled tokens/s | mismatch | stale, most | first gradient "
             "norm | restarts |", "|---|---|---|---|---|---|---|---|---|---|"]
    with tempfile.TemporaryDirectory() as folder:
        make_model(Path(folder, "model"), options.shape, torch.bfloat16, "cpu")
        for number, (name, settings) in enumerate(RUNS.items()):
            if not options.only or number in options.only:
                steps = options.steps if name in LONG else options.short
                lines.append(row(name, train(Path(folder), number, settings, steps, options)))
                print(lines[-1], flush=True)
    return lines


def actor_lines(options: argparse.Namespace) -> list[str]:
    """The table of the layouts."""
    lines = ["| | update, s | tokens/s | peak memory of the first rank, GiB | gradient norm | off |",
             "|---|---|---|---|---|---|"]
    expected: list[torch.Tensor] = []
    with tempfile.TemporaryDirectory() as folder:
        make_model(Path(folder, "model"), options.shape, torch.bfloat16, "cpu")
        for number, (name, layout) in enumerate(LAYOUTS.items()):
            if options.only and number not in options.only or layout.get("world_size", 1) > torch.cuda.device_count():
                continue
            try:
                cells = update(Path(folder, "model"), layout, expected, options)
            except Exception as error:  # noqa: BLE001  the other layouts go on
                cells = [" ".join(f"{type(error).__name__}: {error}".split())[:300], *[""] * 4]
            lines.append(f"| {name} | " + " | ".join(cells) + " |")
            print(lines[-1], flush=True)
    return lines


def update(model: Path, layout: dict[str, Any], expected: list[torch.Tensor], options: argparse.Namespace) -> list[str]:
    """A row of cells; expected: weights before and after the first update of the first layout, which are added."""
    config = load_config("Arithmetic-v0", overrides={
        "actor": {"lr": 1e-3, "eps": 1e-3, "micro_batch_tokens": options.micro_batch} | layout,
        "rollout": {"max_context": 4096, "max_tokens": 1024}})
    torch.cuda.reset_peak_memory_stats()
    actor = LocalActor(ActorSpec(str(model), config, torch.bfloat16, 10))

    def flat() -> torch.Tensor:
        return torch.cat([tensor.flatten().cpu() for _, tensor in actor.weights()])

    try:
        if not expected:
            expected.append(flat())
        norm = actor.train([rows(options)])["optim/grad_norm"]
        after = flat()
        if len(expected) == 1:
            expected.append(after)
        started = time.perf_counter()
        actor.train([rows(options)])
        torch.cuda.synchronize()
        seconds = time.perf_counter() - started
    finally:
        actor.close()
    tokens = sum(len(row.ids) for row in rows(options))
    off = float((after - expected[1]).norm() / (expected[1] - expected[0]).norm())
    return [f"{seconds:.2f}", f"{tokens / seconds:,.0f}", f"{torch.cuda.max_memory_allocated() / 2**30:.1f}",
            f"{norm:.5f}", f"{off:.1e}"]


def rows(options: argparse.Namespace) -> list[TrainRow]:
    """Random ids: groups of one, so that no token is shared."""
    draw, length = random.Random(0), options.row
    mask = [int(place >= length // 4) for place in range(length)]
    return [TrainRow([draw.randrange(3, 256) for _ in range(length)], mask, [-5.0] * length,
                     draw.choice([-1.0, 1.0]), 1 / (options.rows * length), number, number)
            for number in range(options.rows)]


def train(folder: Path, number: int, settings: dict[str, Any], steps: int, options: argparse.Namespace) -> list[dict]:
    """One run's metrics, a line a step; a failure in place of them."""
    out = folder / f"run-{number}"
    engine_args = {"enforce_eager": options.eager} | settings.get("rollout.engine_args", {})
    if settings.get("checkpoint.every"):
        threading.Thread(target=kill_a_rank, args=(out,), daemon=True).start()
    try:
        molt_gym.train(
            "Arithmetic-v0", folder / "model", out=out, steps=steps, engine="vllm", placement="ray",
            **{"env_kwargs.length": options.prompt, "eval.before": False, "eval.after": False, "checkpoint.every": 0,
               "actor.micro_batch_tokens": 8192, "rollout.groups_per_step": options.rollouts // 8,
               "rollout.group_size": 8, "rollout.max_tokens": options.tokens,
               "rollout.max_context": options.prompt + options.tokens + 64,
               "rollout.max_concurrency": options.rollouts + 1, "failures.watchdog": 60.0} | settings
               | {"rollout.engine_args": engine_args})
    except Exception as error:  # noqa: BLE001  the other runs go on, and the table says what this one ended with
        return [{"error": f"{type(error).__name__}: {error}"}]
    return [line for line in map(json.loads, (out / "metrics.jsonl").read_text().splitlines()) if "time/step" in line]


def kill_a_rank(out: Path) -> None:
    """Once there is a checkpoint to go on from."""
    while not list(out.glob("checkpoints/step-*/manifest.json")):
        time.sleep(0.1)
    ranks = [child for child in psutil.Process().children(recursive=True) if "ray::Rank" in " ".join(child.cmdline())]
    ranks[-1].send_signal(signal.SIGKILL)


def row(name: str, lines: list[dict]) -> str:
    """A line of the table; the first two steps, in which kernels are chosen, are left out of the times."""
    if "error" in lines[0]:
        return f"| {name} | {' '.join(lines[0]['error'].split())[:300]} |" + " |" * 8
    later = lines[2:] or lines

    def mean(metric: str) -> float:
        return fmean(line.get(metric, 0.0) for line in later)

    restarts = sum(line.get(f"rollout/{part}_restarts", 0) for line in lines for part in ("engine", "runner"))
    cells = [len(lines), f"{mean('time/step'):.2f}", f"{mean('time/train'):.2f}", f"{mean('time/weights'):.2f}",
             f"{mean('perf/rollout_tokens_per_s'):,.0f}", f"{mean('mismatch/abs_diff_mean'):.4f}",
             max(line.get("staleness/max", 0) for line in lines), f"{lines[0]['optim/grad_norm']:.4f}",
             f"{restarts} + {lines[-1].get('actor/restarts', 0)} of the actor"]
    return f"| {name} | " + " | ".join(map(str, cells)) + " |"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", choices=["tiny", "0.6b"], default="0.6b")
    for name, default in {"steps": 100, "short": 6, "rollouts": 64, "prompt": 128, "tokens": 64, "rows": 64,
                          "row": 1024, "micro_batch": 16384}.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=default)
    parser.add_argument("--actor", action="store_true", help="updates of the actor alone, by layout")
    parser.add_argument("--eager", action="store_true", help="without CUDA graphs, which take a while to make")
    parser.add_argument("--only", type=int, nargs="*", help="numbers of runs, from 0")
    parser.add_argument("--result", help="name of a file in benchmarks/results")
    main(parser.parse_args())
