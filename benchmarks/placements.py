"""Whether a run learns the same wherever its parts are: held-out scores of the tiny model, one line a seed.

    python benchmarks/placements.py --seeds 3 --steps 12 --result NAME

Local is one process with transformers; the others are Ray with two vLLM engines, two actor ranks and two runners,
on-policy and one version behind.
"""

import argparse
import shlex
import sys
import tempfile
from pathlib import Path
from statistics import fmean
from typing import Any

import ray
from rollout_in_training import describe

import molt_gym

RAY = {"placement": "ray", "rollout.engine": "vllm", "rollout.engines": 2, "actor.world_size": 2, "rollout.runners": 2,
       "ray.layout": "colocate"}
RUNS: dict[str, dict[str, Any]] = {
    "local": {}, "ray": RAY, "ray, one version behind": RAY | {"rollout.max_staleness": 1}}


def main(options: argparse.Namespace) -> None:
    """All runs and the table."""
    titles = " | ".join(f"{name}: before → after (mean reward)" for name in RUNS)
    lines = [f"| {options.env}, seed | {titles} |",
             "|---|" + "---|" * len(RUNS)]
    ray.init(include_dashboard=False, log_to_driver=False, logging_level="error")
    for seed in range(options.seeds):
        cells = []
        for settings in RUNS.values():
            with tempfile.TemporaryDirectory() as folder:
                result = molt_gym.train(options.env, "tiny", out=Path(folder, "run"), steps=options.steps, seed=seed,
                                        **settings)
            scores = [line[f"eval/{options.env}/pass_at_1"] for line in result.metrics if "eval/when" in line]
            rewards = [line["reward/mean"] for line in result.metrics if "reward/mean" in line]
            cells.append(f"{scores[0]:.3f} → {scores[-1]:.3f} ({fmean(rewards):.3f})")
        lines.append(f"| {seed} | " + " | ".join(cells) + " |")
        print(lines[-1], flush=True)
    print("\n".join(["", describe(), *lines]))
    if options.result:
        command = shlex.join(["python", "benchmarks/placements.py", *sys.argv[1:]])
        text = "\n".join(["# Learning, by placement", "", describe(), "", "```", command, "```", "", *lines])
        (Path(__file__).resolve().parent / "results" / f"{options.result}.md").write_text(text + "\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--env", default="CodeExec-v0")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--result", help="name of a file in benchmarks/results")
    main(parser.parse_args())
