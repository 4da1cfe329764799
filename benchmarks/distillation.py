"""How far on-policy distillation brings a student to its teacher: the tiny model, and itself after training, by seed.

    python benchmarks/distillation.py --seeds 3 --result distillation-cpu2

The divergence is that of the student from the teacher on replies to held-out tasks that the student samples anew, in
nats per token; at each token it is the exact sum over the vocabulary, computed by plain transformers.
"""

import argparse
import shlex
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

import molt_gym
from molt_gym.trainers.models import resolve_model
from molt_gym.trainers.session import env_preset

QUIET: dict[str, Any] = {"checkpoint.every": 0, "eval.before": False}


@torch.no_grad()
def divergence(env: str, student: str | Path, teacher: str | Path, episodes: int, seed: int) -> float:
    """KL(student ‖ teacher) in nats per token that the student, a tiny model, samples in the test split of `env`."""
    models = [AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval() for path in (student, teacher)]
    parts = []
    for trajectory in molt_gym.rollout(env, student, episodes, seed=seed, config=env_preset(env, "tiny"),
                                       env_kwargs__split="test"):
        for row in trajectory.rows:
            before = [place - 1 for place, bit in enumerate(row.mask) if bit]
            ours, theirs = (model(torch.tensor([row.ids])).logits[0, before].log_softmax(-1) for model in models)
            parts.append((ours.exp() * (ours - theirs)).sum(-1))
    return torch.cat(parts).mean().item()


def solved(result: Any) -> list[float]:
    """Shares of held-out tasks that the greedy policy solved, in the order of the evaluations."""
    return [line[name] for line in result.metrics for name in line if name.endswith("/pass_at_1") and "eval" in name]


def run(env: str, seed: int, options: argparse.Namespace, folder: Path) -> str:
    """Train a teacher, distil it, and say what came of it in a line of the table."""
    student = resolve_model("tiny", env=env, seed=seed).path
    teacher = molt_gym.train(env, "tiny", out=folder / "teacher", steps=options.teacher_steps, seed=seed, **QUIET)
    path = teacher.run_dir / "model"
    before = divergence(env, student, path, options.episodes, seed)
    result = molt_gym.distill(env, "tiny", path, out=folder / "student", steps=options.steps, seed=seed,
                              **QUIET | {"eval.before": True})
    after = divergence(env, result.run_dir / "model", path, options.episodes, seed)
    scores = solved(result)
    return (f"| {env} | {seed} | {before:.4f} → {after:.4f} | {after / before:.3f} | {scores[0]:.3f} → "
            f"{scores[-1]:.3f} | {solved(teacher)[-1]:.3f} |")


def main(options: argparse.Namespace) -> None:
    """All runs and the table."""
    lines = ["| env | seed | divergence: before → after | ratio | student solves: before → after | teacher solves |",
             "|---|---|---|---|---|---|"]
    for env in options.envs:
        for seed in range(options.seeds):
            with tempfile.TemporaryDirectory() as folder:
                lines.append(run(env, seed, options, Path(folder)))
            print(lines[-1], flush=True)
            if options.result:
                write(options.result, lines)


def write(name: str, lines: list[str]) -> None:
    """The table as it is by now."""
    from rollout_in_training import describe

    command = shlex.join(["python", "benchmarks/distillation.py", *sys.argv[1:]])
    text = "\n".join(["# On-policy distillation", "", describe(), "", "```", command, "```", "", *lines])
    (Path(__file__).resolve().parent / "results" / f"{name}.md").write_text(text + "\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--envs", nargs="+", default=["CodeExec-v0"])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--teacher-steps", type=int, default=16)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--episodes", type=int, default=128)
    parser.add_argument("--result", help="name of a file in benchmarks/results")
    main(parser.parse_args())
