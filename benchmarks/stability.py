"""Whether a long run stays as it begins: mismatch, speed, memory, files and threads, by thirds of its time.

    python benchmarks/stability.py --shape 0.6b --minutes 9 --result NAME                               on a GPU
    python benchmarks/stability.py --shape tiny --minutes 2 --prompts 4 --tokens 48 --prompt 32       anywhere with vLLM

A model of random weights trains one version behind, so that every update of the engine's weights finds requests in
flight. `--minutes` after the first three steps, which compile, fill the pool and grow caches and are left out, it is
killed. Of each measure a line: its mean in each third of the run, and its slope, in per cent of
the mean for a tenth of the run, with the slope's standard error. Memory is what its process and all
descendants have to themselves, and of the GPU; both are looked at once a second.
"""

import argparse
import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from statistics import fmean

import psutil
import torch
from peer_step import GROUP, make_model
from rollout_in_training import describe
from vllm_updates import SHAPES

import molt_gym

LINES = {"mismatch/abs_diff_mean": "difference of log-probabilities, mean", "mismatch/kl": "KL of sampler and trainer",
         "policy/entropy": "entropy", "time/step": "step, s", "time/weights": "weight update, s",
         "perf/rollout_tokens_per_s": "sampled tokens/s", "staleness/mean": "versions behind, mean"}
FIRST = 3
"""Steps that are left out."""
WATCHED = {"gpu": "GPU's memory in use, GiB", "memory": "memory of all processes, GiB", "files": "open files",
           "threads": "threads", "processes": "processes"}


def look(process: psutil.Process) -> dict[str, float]:
    """At a process and its descendants."""
    found = dict.fromkeys(WATCHED, 0.0)
    if torch.cuda.is_available():
        free, total = torch.cuda.mem_get_info()
        found["gpu"] = (total - free) / 2**30
    for one in [process, *process.children(recursive=True)]:
        with suppress(psutil.Error):
            found["memory"] += one.memory_full_info().uss / 2**30
            found["files"] += one.num_fds()
            found["threads"] += one.num_threads()
            found["processes"] += 1
    return found


def train(folder: Path, options: argparse.Namespace) -> None:
    """Until `watch` has seen enough."""
    molt_gym.register("Arithmetic-v0", "rollout_in_training:Arithmetic", max_episode_steps=1)
    molt_gym.train("Arithmetic-v0", folder / "model", out=folder / "run", steps=10**6, engine="vllm", **{
        "env_kwargs.length": options.prompt, "eval.before": False, "eval.after": False, "checkpoint.every": 0,
        "rollout.groups_per_step": options.prompts, "rollout.group_size": GROUP,
        "rollout.max_tokens": options.tokens, "rollout.max_context": options.prompt + options.tokens + 64,
        "rollout.max_concurrency": 2 * options.prompts * GROUP, "rollout.max_staleness": 1, "actor.lr": options.lr,
        "rollout.engine_args.gpu_memory_utilization": options.share,
        "actor.micro_batch_tokens": options.micro_tokens})


def watch(folder: Path, options: argparse.Namespace) -> tuple[list[dict[str, float]], list[dict[str, float]]]:
    """The lines of the steps but for the first, and what was seen of a run's processes meanwhile; it has ended."""
    command = [sys.executable, __file__, *sys.argv[1:], "--train", str(folder)]
    process = subprocess.Popen(command, start_new_session=True)
    looks, end, late = list[dict[str, float]](), None, time.monotonic() + options.patience
    try:
        while end is None or time.monotonic() < end:
            time.sleep(1.0)
            if process.poll() is not None:
                raise SystemExit(f"the run ended with {process.returncode}")
            if end is not None:
                looks.append(look(psutil.Process(process.pid)))
            elif len(steps(folder)) >= FIRST:
                end = time.monotonic() + 60 * options.minutes
            elif time.monotonic() > late:
                raise SystemExit(f"{len(steps(folder))} steps in {options.patience:g} s")
        return steps(folder)[FIRST:], looks
    finally:
        # It would go on to write a checkpoint.
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def steps(folder: Path) -> list[dict[str, float]]:
    """The lines of the steps so far."""
    path = folder / "run" / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines if "time/step" in line and line.endswith("\n")]


def thirds(values: Sequence[float]) -> str:
    """Cells: the mean of each third, and the slope."""
    size = len(values) // 3
    means = [fmean(values[:size]), fmean(values[size:-size]), fmean(values[-size:])]
    x = torch.linspace(0, 10, len(values), dtype=torch.float64)
    y = torch.tensor(values, dtype=torch.float64)
    spread = ((x - x.mean()) ** 2).sum()
    slope = ((x - x.mean()) * (y - y.mean())).sum() / spread
    error = ((y - y.mean() - slope * (x - x.mean())).square().sum() / (len(values) - 2) / spread).sqrt()
    scale = 100 / abs(float(y.mean())) if y.mean() else 0.0
    return " | ".join([*(f"{mean:.4g}" for mean in means), f"{slope * scale:+.2f} ± {error * scale:.2f} %"])


def main(options: argparse.Namespace) -> None:
    """The run and its table."""
    here = Path(__file__).resolve().parent
    # Envs are made in other processes too.
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(here), os.environ.get("PYTHONPATH")]))
    if options.train:
        train(options.train, options)
        return
    with tempfile.TemporaryDirectory() as folder:
        make_model(Path(folder, "model"), options.shape)
        torch.cuda.empty_cache()
        lines, seen = watch(Path(folder), options)
    if len(lines) < 9:
        raise SystemExit(f"{len(lines)} steps are too few for a trend; write more --minutes")
    table = ["| | first third | second | last | slope of a tenth of the run |", "|---|---|---|---|---|",
             *(f"| {label} | {thirds([line[name] for line in lines])} |" for name, label in LINES.items()),
             *(f"| {label} | {thirds([look[name] for look in seen])} |" for name, label in WATCHED.items()
               if any(look[name] for look in seen))]
    minutes = sum(line["time/step"] for line in lines) / 60
    told = f"{len(lines)} steps in {minutes:.1f} minutes; most versions behind: " \
           f"{max(line['staleness/max'] for line in lines):.0f}"
    print("\n".join(["", describe(), told, *table]))
    if options.result:
        command = shlex.join(["python", "benchmarks/stability.py", *sys.argv[1:]])
        text = ["# A long run", "", describe(), "", "```", command, "```", "", told + ".", "", *table]
        (here / "results" / f"{options.result}.md").write_text("\n".join(text) + "\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", choices=[*SHAPES, "4b"], default="0.6b")
    parser.add_argument("--minutes", type=float, default=9.0)
    for name, default in {"prompts": 32, "prompt": 128, "tokens": 256, "micro_tokens": 16384}.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=default)
    parser.add_argument("--lr", type=float, default=1e-6)
    parser.add_argument("--share", type=float, default=0.35, help="of the GPU's memory that vLLM takes")
    parser.add_argument("--patience", type=float, default=300.0, help="seconds that the first steps may take")
    parser.add_argument("--train", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--result", help="name of a file in benchmarks/results")
    main(parser.parse_args())
