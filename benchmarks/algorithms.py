"""Whether every estimator and loss learns: the tiny model in CodeExec-v0, a run for each algorithm and seed.

    python benchmarks/algorithms.py --jobs 2 --result algorithms-cpu2     a table, and beside it a picture of the curves

The tasks are the easy ones, as they come: the eight families that print a value, at difficulty 1. Each run is a process
of its own. One that is in `--out` already is not done again, whatever its settings were; one that was cut off goes on.
"""

import argparse
import os
import platform
import shlex
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from datetime import date
from importlib.metadata import version
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Any

from molt_gym.trainers.run_dir import read_metrics

ENV, STEPS, SEEDS, GOAL = "CodeExec-v0", 40, 3, 0.85
SETTINGS: dict[str, Any] = {"eval.every": 10, "eval.episodes": 128, "checkpoint.every": 20, "checkpoint.keep": 1}
ALGORITHMS: dict[str, dict[str, Any]] = {
    **{name: {"algorithm.estimator": name} for name in ("grpo", "dr_grpo", "rloo", "flash_reinforce")},
    "reinforce": {"algorithm.estimator": "reinforce", "actor.lr": 1e-3},
    "gae": {"algorithm.estimator": "gae", "critic.lr": 2e-3, "critic.warmup_steps": 2},
    # In the first update of a batch all losses have the same gradient, so these two get a second one.
    "gspo": {"algorithm.loss": "gspo", "algorithm.updates_per_batch": 2, "actor.lr": 1e-3},
    "cispo": {"algorithm.loss": "cispo", "algorithm.updates_per_batch": 2, "actor.lr": 1e-3},
}
"""What differs from the settings that `molt-gym train CodeExec-v0 --model tiny` has; losses go with estimator grpo."""
STYLE = {"font.size": 8, "axes.spines.top": False, "axes.spines.right": False, "svg.hashsalt": "molt-gym",
         "svg.fonttype": "none", "axes.grid": True, "grid.color": "#e2e8f0", "axes.edgecolor": "#94a3b8",
         "axes.axisbelow": True}
"""Of pictures."""


def words(name: str) -> list[str]:
    """The settings of an algorithm, as on the command line."""
    return [word for key, value in ALGORITHMS[name].items() for word in (f"--{key.replace('_', '-')}", str(value))]


def learn(name: str, seed: int, folder: Path) -> list[dict[str, Any]]:
    """Train, or go on; returns the lines of metrics.jsonl.

    Raises:
        RuntimeError: the run failed; its log is beside the folder.
    """
    fixed = [word for key, value in SETTINGS.items() for word in (f"--{key}", str(value))]
    command = [sys.executable, "-m", "molt_gym", "train", ENV, "--model", "tiny", "--seed", str(seed), "--steps",
               str(STEPS), "--out", str(folder), *fixed, *words(name)]
    if (folder / "metrics.jsonl").exists() and any(step == STEPS for step, _ in scores(read_metrics(folder))):
        return read_metrics(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    log = folder.with_suffix(".log")
    with log.open("a") as written:
        code = subprocess.call(command, stdout=written, stderr=subprocess.STDOUT,
                               env={"OMP_NUM_THREADS": "1", **os.environ})
    if code:
        raise RuntimeError(f"{shlex.join(command)} ended with {code}; see {log}")
    return read_metrics(folder)


def scores(lines: list[dict[str, Any]]) -> list[tuple[int, float]]:
    """(step, held-out share of tasks solved by the greedy policy) of each evaluation."""
    return [(line["step"], line[f"eval/{ENV}/pass_at_1"]) for line in lines if f"eval/{ENV}/pass_at_1" in line]


def main(options: argparse.Namespace) -> None:
    """All runs, the table, the picture."""
    pairs = list(product(range(options.seeds), options.algorithms))

    def one(pair: tuple[int, str]) -> list[dict[str, Any]]:
        seed, name = pair
        lines = learn(name, seed, options.out / f"{name}-{seed}")
        print(f"{name}, seed {seed}: " + " → ".join(f"{score:.3f}" for _, score in scores(lines)), flush=True)
        return lines

    with ThreadPoolExecutor(options.jobs) as pool:
        runs = dict(zip(pairs, pool.map(one, pairs), strict=True))
    text = report({name: [runs[seed, name] for seed in range(options.seeds)] for name in options.algorithms})
    print(text)
    if options.result:
        results = Path(__file__).resolve().parent / "results"
        (results / f"{options.result}.md").write_text(text)
        draw({name: [runs[seed, name] for seed in range(options.seeds)] for name in options.algorithms},
             results / f"{options.result}.svg")


def report(runs: dict[str, list[list[dict[str, Any]]]]) -> str:
    """A line an algorithm: its settings, and how it went with each seed."""
    versions = ", ".join(f"{name} {version(name)}" for name in ("torch", "transformers", "molt-gym"))
    seeds = range(len(next(iter(runs.values()))))
    lines = [
        "# Learning, by algorithm", "",
        f"{date.today()}, {os.cpu_count()} × {platform.machine()}, Python {platform.python_version()}, {versions}", "",
        "```", shlex.join(["python", "benchmarks/algorithms.py", *sys.argv[1:]]), "```", "",
        f"Share of {SETTINGS['eval.episodes']} held-out tasks of {ENV} that the tiny model solves, greedily, before "
        f"and after {STEPS} steps; in brackets, after how many the mean reward of five steps was above {GOAL}.", "",
        f"| algorithm | settings | {' | '.join(f'seed {seed}' for seed in seeds)} | seconds a step |",
        "|---|---|" + "---|" * (len(seeds) + 1)]
    for name, of_seeds in runs.items():
        seconds = fmean(line["time/step"] for metrics in of_seeds for line in metrics if "time/step" in line)
        cells = [f"{first:.3f} → {last:.3f} ({reached(metrics)})" for metrics in of_seeds
                 for (_, first), *_, (_, last) in [scores(metrics)]]
        lines.append(f"| {name} | `{' '.join(words(name)) or '(none)'}` | {' | '.join(cells)} | {seconds:.1f} |")
    return "\n".join(lines) + "\n"


def reached(lines: list[dict[str, Any]]) -> int | str:
    """The first step at which the mean training reward of it and the four before was above the goal."""
    rewards = [(line["step"], line["reward/mean"]) for line in lines if "reward/mean" in line]
    return next((step for end, (step, _) in enumerate(rewards, 1)
                 if end >= 5 and fmean(reward for _, reward in rewards[end - 5 : end]) > GOAL), "never")


def draw(runs: dict[str, list[list[dict[str, Any]]]], path: Path) -> None:
    """A panel an algorithm: thin lines are the training rewards of its seeds, points the held-out scores."""
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(9, 4.4), layout="constrained")
        panels = figure.subplots(2, -(-len(runs) // 2), sharex=True, sharey=True, squeeze=False).flatten()
        for panel, (name, of_seeds) in zip(panels, runs.items(), strict=False):
            for metrics, colour in zip(of_seeds, ("#2563eb", "#ea580c", "#059669") * len(of_seeds), strict=False):
                rewards = [(line["step"], line["reward/mean"]) for line in metrics if "reward/mean" in line]
                panel.plot(*zip(*rewards, strict=True), color=colour, linewidth=0.8, alpha=0.6)
                panel.plot(*zip(*scores(metrics), strict=True), "o", color=colour, markersize=4, clip_on=False)
            panel.axhline(GOAL, color="#64748b", linewidth=0.8, linestyle="--")
            panel.set_title(name, loc="left", fontweight="bold")
            panel.set_ylim(-0.02, 1.02)
        figure.supxlabel("step")
        figure.supylabel("training reward, held-out score")
        figure.savefig(path, metadata={"Date": None})


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("algorithms", nargs="*", default=list(ALGORITHMS), metavar="ALGORITHM",
                        help=f"of {', '.join(ALGORITHMS)}; all")
    parser.add_argument("--seeds", type=int, default=SEEDS)
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time")
    parser.add_argument("--out", type=Path, default=Path("runs/algorithms"), help="folder of the runs")
    parser.add_argument("--result", help="name of a file in benchmarks/results")
    main(parser.parse_args())
