"""What one GPU cannot show, on two or more: weights over NCCL, an actor of several ranks, an engine over several GPUs.

    python benchmarks/several_gpus.py --steps 100 --result NAME       on a host with two GPUs or more

Each row is a training run of its own with placement "ray", on the same random model, tasks and seed, so that the first
step's gradient norms can be compared. Replies are cut at `--tokens`, as the model knows nothing. Every update is
followed by the parity probe, which ends a run whose engine does not compute what the actor does.
"""

import argparse
import json
import os
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
LONG = ("actor on 1 GPU, engine on 1, strict", "the same, one version behind")
"""Runs of `--steps` steps; the others have `--short`."""


def main(options: argparse.Namespace) -> None:
    """All runs and the table."""
    here = Path(__file__).resolve().parent
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
    print("\n".join(["", describe(), *lines]))
    if options.result:
        command = shlex.join(["python", "benchmarks/several_gpus.py", *sys.argv[1:]])
        text = "\n".join([f"# {torch.cuda.device_count()} GPUs", "", describe(), "", "```", command, "```", "", *lines])
        (here / "results" / f"{options.result}.md").write_text(text + "\n")


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
    """Once three steps are written."""
    metrics = out / "metrics.jsonl"
    while not metrics.is_file() or len(metrics.read_text().splitlines()) < 3:
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
    for name, default in {"steps": 100, "short": 6, "rollouts": 64, "prompt": 128, "tokens": 64}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--eager", action="store_true", help="without CUDA graphs, which take a while to make")
    parser.add_argument("--only", type=int, nargs="*", help="numbers of runs, from 0")
    parser.add_argument("--result", help="name of a file in benchmarks/results")
    main(parser.parse_args())
