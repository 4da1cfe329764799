"""Whether a policy learns from what it sees: the tiny model that sees, in Geo3k-v0, warm start and training.

    python benchmarks/vision.py --result vision-cpu2

The figures are the easy ones, rectangles on squared paper. Afterwards the policy is asked about a white picture in the
place of each: what it still scores is what can be had without looking. A run that is in `--out` already is not done
again; one that was cut off goes on.
"""

import argparse
import os
import platform
import shlex
import sys
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from datetime import date
from importlib.metadata import version
from multiprocessing import get_context
from pathlib import Path
from statistics import fmean
from typing import Any

import gymnasium
from PIL import Image

import molt_gym
from molt_gym.envs.geo3k import Geo3kEnv
from molt_gym.trainers.run_dir import read_metrics

ENV, BLANK, STEPS, SEEDS, GOAL = "Geo3k-v0", "Geo3kBlank-v0", 24, 3, 0.8
SETTINGS: dict[str, Any] = {"eval__every": 8, "checkpoint__every": 12, "checkpoint__keep": 1}
Metrics = list[dict[str, Any]]


class BlankGeo3kEnv(Geo3kEnv):
    """Geo3k-v0 with nothing to see."""

    def opening(self, problem: Any) -> list[dict[str, Any]]:
        """The question about a white picture."""
        return super().opening(replace(problem, images=(Image.new("RGB", (128, 128), "white"),)))


def learn(seed: int, folder: Path, steps: int = STEPS) -> Metrics:
    """Trains, or goes on; returns the lines of metrics.jsonl."""
    done = scores(read_metrics(folder)) if (folder / "metrics.jsonl").exists() else []
    if all(step < steps for step, _ in done):
        molt_gym.train(ENV, "tiny", out=folder, seed=seed, steps=steps, **SETTINGS)
    return read_metrics(folder)


def scores(lines: Metrics) -> list[tuple[int, float]]:
    """(step, held-out share of figures that are read rightly by the greedy policy) of each evaluation."""
    return [(line["step"], line[f"eval/{ENV}/pass_at_1"]) for line in lines if f"eval/{ENV}/pass_at_1" in line]


def rewards(lines: Metrics) -> list[float]:
    """The mean reward of each step."""
    return [line["reward/mean"] for line in lines if "reward/mean" in line]


def unseen(model: Path, episodes: int = 64) -> float:
    """The held-out score where every picture is white."""
    if BLANK not in gymnasium.registry:
        molt_gym.register(BLANK, BlankGeo3kEnv)
    return molt_gym.evaluate(BLANK, model, episodes=episodes, rollout__max_tokens=32).pass_at[1]


def one(seed: int, folder: Path) -> tuple[Metrics, float]:
    """A run and its control."""
    lines = learn(seed, folder)
    return lines, unseen(folder / "model")


def report(runs: list[tuple[Metrics, float]]) -> str:
    """A line a seed."""
    versions = ", ".join(f"{name} {version(name)}" for name in ("torch", "transformers", "molt-gym"))
    lines = [
        "# Learning from pictures", "",
        f"{date.today()}, {os.cpu_count()} × {platform.machine()}, Python {platform.python_version()}, {versions}", "",
        "```", shlex.join(["python", "benchmarks/vision.py", *sys.argv[1:]]), "```", "",
        f"{ENV} with `--model tiny`, a Qwen3-VL of 0.8 million parameters that was warmed up with demonstrations of "
        f"which a third is right; {STEPS} steps of 128 rollouts. Held-out scores are those of the greedy policy.", "",
        "| seed | mean reward, first step → last 5 steps | held-out score, before → after | white pictures | s/step |",
        "|---|---|---|---|---|"]
    for seed, (metrics, blank) in enumerate(runs):
        (_, before), *_, (_, after) = scores(metrics)
        first, last = rewards(metrics)[0], fmean(rewards(metrics)[-5:])
        seconds = fmean(line["time/step"] for line in metrics if "time/step" in line)
        cells = f"{first:.3f} → {last:.3f}", f"{before:.3f} → {after:.3f}", f"{blank:.3f}", f"{seconds:.1f}"
        lines.append(f"| {seed} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main(options: argparse.Namespace) -> None:
    """All runs and the table."""
    seeds = range(options.seeds)
    with ProcessPoolExecutor(options.jobs, get_context("spawn")) as pool:
        runs = list(pool.map(one, seeds, [options.out / f"vision-{seed}" for seed in seeds]))
    text = report(runs)
    print(text)
    if options.result:
        (Path(__file__).resolve().parent / "results" / f"{options.result}.md").write_text(text)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=SEEDS)
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time")
    parser.add_argument("--out", type=Path, default=Path("runs/vision"), help="folder of the runs")
    parser.add_argument("--result", help="name of a file in benchmarks/results")
    main(parser.parse_args())
