"""Whether a long run stays as it begins: mismatch, speed, memory, files and threads, by thirds of its time.

    python benchmarks/stability.py --shape 0.6b --minutes 9 --result NAME                               on a GPU
    python benchmarks/stability.py --shape tiny --minutes 2 --prompts 4 --tokens 48 --prompt 32       anywhere with vLLM

A model of random weights trains one version behind, so that every update of the engine's weights finds requests in
flight. `--minutes` after the first three steps, which compile, fill the pool and grow caches and are left out, it is
asked to stop as by Ctrl-C. Of each measure a line: its mean in each third of the run, and its slope, in per cent of
the mean for a tenth of the run, with the slope's standard error. Memory is what this process and all its
descendants have to themselves, and of the GPU; both are looked at once a second.
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


def look() -> dict[str, float]:
    """At this process and its descendants."""
    found = dict.fromkeys(WATCHED, 0.0)
    if torch.cuda.is_available():
        free, total = torch.cuda.mem_get_info()
        found["gpu"] = (total - free) / 2**30
    me = psutil.Process()
    for process in [me, *me.children(recursive=True)]:
        with suppress(psutil.Error):
            found["memory"] += process.memory_full_info().uss / 2**30
            found["files"] += process.num_fds()
            found["threads"] += process.num_threads()
            found["processes"] += 1
    return found


def train(folder: Path, options: argparse.Namespace) -> tuple[list[dict[str, float]], list[dict[str, float]]]:
    """The lines of the steps but for the first, and what was seen of the processes meanwhile."""
    looks, over = list[dict[str, float]](), threading.Event()

    def watch() -> None:
        end = None
        while not over.wait(1.0):
            if end is None and len(steps(folder)) >= FIRST:
                end = time.monotonic() + 60 * options.minutes
            if end is not None:
                looks.append(look())
                if time.monotonic() > end:
                    os.kill(os.getpid(), signal.SIGINT)
                    return

    molt_gym.register("Arithmetic-v0", "rollout_in_training:Arithmetic", max_episode_steps=1)
    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        molt_gym.train("Arithmetic-v0", folder / "model", out=folder / "run", steps=10**6, engine="vllm", **{
            "env_kwargs.length": options.prompt, "eval.before": False, "eval.after": False, "checkpoint.every": 0,
            "rollout.groups_per_step": options.prompts, "rollout.group_size": GROUP,
            "rollout.max_tokens": options.tokens, "rollout.max_context": options.prompt + options.tokens + 64,
            "rollout.max_concurrency": 2 * options.prompts * GROUP, "rollout.max_staleness": 1, "actor.lr": options.lr,
            "rollout.engine_args.gpu_memory_utilization": options.share,
            "actor.micro_batch_tokens": options.micro_tokens})
    except KeyboardInterrupt:
        print("stopped", flush=True)
    finally:
        over.set()
        watcher.join()
    return steps(folder)[FIRST:], looks


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
    with tempfile.TemporaryDirectory() as folder:
        make_model(Path(folder, "model"), options.shape)
        torch.cuda.empty_cache()
        lines, seen = train(Path(folder), options)
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
    parser.add_argument("--result", help="name of a file in benchmarks/results")
    main(parser.parse_args())
