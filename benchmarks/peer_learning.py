r"""Learning curves beside TRL's GRPOTrainer: the same model, tasks, rewards, sizes and rate, by step and by second.

    pip install --no-deps trl datasets         beside this package
    python benchmarks/peer_learning.py --result NAME                                       the tiny model, anywhere
    python benchmarks/peer_learning.py --model smollm2-135m --steps 200 --vllm --lr 2e-5 --tokens 128 --context 768 \
        --dtype bfloat16 --every 50 --jobs 2 --share 0.15 --result NAME                            on a GPU

Both start from the same weights and take one turn a task, `--prompts` tasks of `--group` rollouts a step, GRPO with
clipping at .2, the mean over tokens, no KL, AdamW at a constant rate. Rewards are the environment's own: TRL's reward
function steps it. Seconds are those of steps; evaluations and checkpoints are left out. Scores are those of
`molt_gym.evaluate`, greedy, on `--episodes` held-out tasks; TRL's are taken from its checkpoints, after it has ended.
Each run is a process of its own, `--jobs` of them at a time; with two, both sides of an environment and a seed share
the machine, and their seconds are those of sharing it. One whose result is in `--out` already is not done again.
"""

import argparse
import json
import os
import shlex
import socket
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import accumulate, islice, product
from pathlib import Path
from statistics import fmean
from typing import Any

from algorithms import STYLE
from rollout_in_training import describe

import molt_gym
from molt_gym.trainers.models import resolve_model
from molt_gym.trainers.run_dir import read_metrics

SIDES = ("molt-gym", "TRL")
COLOURS = {"molt-gym": "#2563eb", "TRL": "#ea580c"}
ENVS = ("CodeExec-v0", "Math-v0")
CACHE = 6 * 2**30
"""Bytes of vLLM's cache; it cannot measure what is left while others start on the same GPU."""
ADAM = {"betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.0, "max_grad_norm": 1.0}


def ours(env: str, model: Path, out: Path, seed: int, options: argparse.Namespace) -> dict[str, Any]:
    """Train here; the curve."""
    engine = {"engine": "vllm", "rollout.engine_args.gpu_memory_utilization": options.share,
              "rollout.engine_args.kv_cache_memory_bytes": CACHE} if options.vllm else {}
    molt_gym.train(env, model, out=out, steps=options.steps, seed=seed, env_kwargs=world(env, options), **engine, **{
        "eval.every": options.every, "eval.episodes": options.episodes, "checkpoint.every": 0,
        "rollout.groups_per_step": options.prompts, "rollout.group_size": options.group, "rollout.max_turns": 1,
        "rollout.max_tokens": options.tokens, "rollout.max_concurrency": options.prompts * options.group,
        "rollout.max_context": options.context, "algorithm.estimator": "grpo", "algorithm.aggregation": "token_mean",
        "algorithm.clip_low": 0.2, "algorithm.clip_high": 0.2, "actor.lr": options.lr, "actor.dtype": options.dtype,
        "actor.micro_batch_tokens": options.micro_tokens, **{f"actor.{name}": value for name, value in ADAM.items()}})
    lines = read_metrics(out)
    steps = [line for line in lines if "time/step" in line]
    return {"rewards": [line["reward/mean"] for line in steps], "seconds": [line["time/step"] for line in steps],
            "scores": [[line["step"], line[name]] for line in lines if (name := f"eval/{env}/pass_at_1") in line]}


def trl(env: str, model: Path, out: Path, seed: int, options: argparse.Namespace) -> dict[str, Any]:
    """Train with TRL; the curve."""
    import torch
    from datasets import Dataset
    from transformers import AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer
    from trl.generation import vllm_generation

    if options.vllm:
        vllm_generation.LLM = partial(vllm_generation.LLM, kv_cache_memory_bytes=CACHE)
    seconds, rewards, began = list[float](), defaultdict[int, list[float]](list), [0.0]
    game = molt_gym.make(env, **world(env, options))

    def reward(completions: list[list[dict[str, str]]], task: list[int], **_: Any) -> list[float]:
        values = []
        for index, completion in zip(task, completions, strict=True):
            game.reset(options={"index": index})
            values.append(game.step({"role": "assistant", "content": completion[0]["content"]})[1])
        rewards[len(seconds)] += values
        return values

    class Clock(TrainerCallback):
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            began[0] = time.perf_counter()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            seconds.append(time.perf_counter() - began[0])

    rows = [{"prompt": game.reset(options={"index": index})[0]["messages"], "task": index}
            for index in islice(tasks(game, seed), options.steps * options.prompts)]
    vllm = {"use_vllm": True, "vllm_mode": "colocate", "vllm_gpu_memory_utilization": options.share,
            "vllm_max_model_length": options.context} if options.vllm else {}
    rollouts = options.prompts * options.group
    trainer = GRPOTrainer(str(model), reward, GRPOConfig(
        output_dir=str(out), per_device_train_batch_size=min(options.micro, rollouts),
        gradient_accumulation_steps=max(1, rollouts // options.micro), num_generations=options.group,
        max_completion_length=options.tokens, max_steps=options.steps, learning_rate=options.lr, beta=0.0,
        temperature=1.0, epsilon=0.2, loss_type="dapo", lr_scheduler_type="constant", adam_beta1=ADAM["betas"][0],
        adam_beta2=ADAM["betas"][1], adam_epsilon=ADAM["eps"], weight_decay=0.0, max_grad_norm=1.0, report_to=[],
        save_strategy="steps", save_steps=options.every, save_only_model=True, logging_steps=options.steps,
        bf16=options.dtype == "bfloat16", use_cpu=not torch.cuda.is_available(), shuffle_dataset=False, seed=seed,
        model_init_kwargs={"dtype": "float32"}, disable_tqdm=True, **vllm), train_dataset=Dataset.from_list(rows),
        processing_class=AutoTokenizer.from_pretrained(model), callbacks=[Clock()])
    trainer.train()
    del trainer
    torch.cuda.empty_cache()
    scores = [[step, score(env, model if step == 0 else out / f"checkpoint-{step}", seed, options)]
              for step in range(0, options.steps + 1, options.every)]
    return {"rewards": [fmean(rewards[step]) for step in range(options.steps)], "seconds": seconds, "scores": scores}


def world(env: str, options: argparse.Namespace) -> dict[str, Any]:
    """What the environment is made with."""
    return {"sandbox": options.sandbox} if options.sandbox and env.startswith("CodeExec") else {}


def tasks(env: Any, seed: int) -> Iterator[int]:
    """In the order in which a run here takes them."""
    from molt_gym.trainers.rollout.pool import TaskStream

    stream = TaskStream(env.unwrapped.num_tasks, seed)
    position = 0
    while True:
        yield stream[position]
        position += 1


def score(env: str, model: Path, seed: int, options: argparse.Namespace) -> float:
    """Held-out."""
    result = molt_gym.evaluate(env, model, episodes=options.episodes, seed=seed, env_kwargs=world(env, options), **{
        "rollout.dtype": options.dtype, "rollout.max_turns": 1, "rollout.max_tokens": options.tokens,
        "rollout.max_context": options.context, "rollout.max_concurrency": options.prompts * options.group})
    return result.pass_at[1]


def learn(side: str, env: str, seed: int, options: argparse.Namespace) -> dict[str, Any]:
    """The curve of one run."""
    out = options.out / f"{side}-{env}-{seed}"
    result, log = out.with_suffix(".json"), out.with_suffix(".log")
    if not result.exists():
        with log.open("w") as written:
            code = subprocess.call([sys.executable, __file__, *sys.argv[1:], "--one", side, env, str(seed)],
                                   stdout=written, stderr=subprocess.STDOUT, timeout=options.deadline,
                                   env=os.environ | {"MASTER_PORT": str(free_port())})
        if code:
            raise RuntimeError(f"{side}, {env}, seed {seed}: ended with {code}; see {log}")
    return json.loads(result.read_text())


def free_port() -> int:
    """For TRL, which takes the same port in every run otherwise."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def one(side: str, env: str, seed: int, options: argparse.Namespace) -> None:
    """A run, in this process; its curve is left in `--out`."""
    out = options.out / f"{side}-{env}-{seed}"
    model = resolve_model(options.model, env=env, seed=seed).path
    curve = (ours if side == SIDES[0] else trl)(env, model, out, seed, options)
    out.with_suffix(".json").write_text(json.dumps(curve))


def main(options: argparse.Namespace) -> None:
    """All runs, the table, the picture."""
    options.out.mkdir(parents=True, exist_ok=True)
    curves: dict[tuple[str, int, str], dict[str, Any]] = {}
    runs = list(product(options.envs, range(options.seeds), SIDES))
    with ThreadPoolExecutor(options.jobs) as pool:
        found = [pool.submit(learn, side, env, seed, options) for env, seed, side in runs]
    curves.update(zip(runs, (future.result() for future in found), strict=True))
    for (env, seed, side), curve in curves.items():
        print(env, seed, side, " → ".join(f"{value:.3f}" for _, value in curve["scores"]),
              f"{sum(curve['seconds']):.0f} s", flush=True)
    lines = ["| env, seed | side | held-out score before → after | mean reward, all steps | seconds, all steps |",
             "|---|---|---|---|---|"]
    for (env, seed, side), curve in curves.items():
        (_, first), *_, (_, last) = curve["scores"]
        lines.append(f"| {env}, {seed} | {side} | {first:.3f} → {last:.3f} | {fmean(curve['rewards']):.3f} | "
                     f"{sum(curve['seconds']):,.0f} |")
    print("\n".join(["", describe(), *lines]))
    if options.result:
        results = Path(__file__).resolve().parent / "results"
        command = shlex.join(["python", "benchmarks/peer_learning.py", *sys.argv[1:]])
        text = ["# Learning beside TRL", "", describe(), "", "```", command, "```", "", *lines, "",
                f"![curves]({options.result}.svg)"]
        (results / f"{options.result}.md").write_text("\n".join(text) + "\n")
        draw(curves, results / f"{options.result}.svg", options)


def draw(curves: dict[tuple[str, int, str], dict[str, Any]], path: Path, options: argparse.Namespace) -> None:
    """A row an environment, by step and by second: lines are training rewards, points held-out scores."""
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(9, 2.6 * len(options.envs)), layout="constrained")
        panels = figure.subplots(len(options.envs), 2, sharey=True, squeeze=False)
        for (env, seed, side), curve in curves.items():
            times = [0.0, *accumulate(curve["seconds"])]
            for panel, at in zip(panels[options.envs.index(env)], (range(len(times)), times), strict=True):
                panel.plot(at[1:], curve["rewards"], color=COLOURS[side], linewidth=0.8, alpha=0.6,
                           label=None if seed else f"{side}: training reward")
                panel.plot([at[step] for step, _ in curve["scores"]], [value for _, value in curve["scores"]], "o",
                           color=COLOURS[side], markersize=4, clip_on=False,
                           label=None if seed else f"{side}: held-out score")
                panel.set_title(env, loc="left", fontweight="bold")
                panel.set_ylim(-0.02, 1.02)
        for panel, label in zip(panels[-1], ("step", "seconds of training"), strict=True):
            panel.set_xlabel(label)
        panels[0][0].legend(frameon=False)
        figure.savefig(path, metadata={"Date": None})


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--envs", nargs="+", default=list(ENVS))
    parser.add_argument("--model", default="tiny")
    for name, default in {"steps": 40, "seeds": 2, "every": 10, "episodes": 128, "prompts": 16, "group": 8,
                          "tokens": 40, "context": 512, "micro": 64, "micro_tokens": 8192, "jobs": 1}.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=default)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32", help="of computing")
    parser.add_argument("--vllm", action="store_true", help="both sides sample with vLLM, on the GPU they train on")
    parser.add_argument("--share", type=float, default=0.35, help="of the GPU's memory that vLLM takes")
    parser.add_argument("--sandbox", help="of CodeExec-v0, where bubblewrap is not to be had: subprocess")
    parser.add_argument("--deadline", type=float, default=3600.0, help="seconds a run may take")
    parser.add_argument("--out", type=Path, default=Path("runs/peer-learning"), help="folder of the runs")
    parser.add_argument("--result", help="name of a file in benchmarks/results")
    parser.add_argument("--one", nargs=3, metavar=("SIDE", "ENV", "SEED"), help=argparse.SUPPRESS)
    given = parser.parse_args()
    os.environ["PYTHONPATH"] = os.pathsep.join(
        filter(None, [str(Path(__file__).resolve().parent), os.environ.get("PYTHONPATH")]))
    one(given.one[0], given.one[1], int(given.one[2]), given) if given.one else main(given)
