"""RL steps on one GPU, side by side in one run: here and with TRL's GRPOTrainer, both with vLLM on the same GPU.

    pip install --no-deps trl datasets         beside this package and vLLM
    python benchmarks/peer_step.py --shape 0.6b --result NAME       on a GPU
    python benchmarks/peer_step.py --shape tiny --prompts 2 --tokens 16 --prompt 32 --steps 3 --no-vllm    anywhere

The same random model, prompts, group size (8), lengths, rate and precision (float32 weights and optimizer, bfloat16
computing); rewards are computed from the replies' digits. Replies are cut at `--tokens`, as the model knows no end, and
tokens are counted, not assumed. Each side runs in a process of its own, one after the other. TRL trains with its own
defaults but for what is named in `trl`: it recomputes activations and takes `--micro` rows at a time. Ours takes
`--micro-tokens` and does not recompute unless `--checkpointing` says so. Columns are means over all steps but the first
two: tokens that were sampled and trained on a second of the whole step, the step, its parts, and the most memory of the
GPU that was in use (vLLM's cache included). Tokens of a prompt are not counted.

The last two columns are the step over the time of engine and actor alone: over their sum, and over the longer of the
two. Alone they are in the on-policy run, where one waits for the other; TRL's are its own. The longer alone is a limit
that two who share a GPU cannot reach together.
"""

import argparse
import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from rollout_in_training import describe, question
from vllm_updates import SHAPES, make_tokenizer

import molt_gym

GROUP = 8
SIDES = {
    "TRL": ("trl", {}),
    "molt-gym, on-policy": ("ours", {}),
    "molt-gym, one version behind": ("ours", {"rollout.max_staleness": 1}),
}
FOUR_B = dict(hidden_size=2560, intermediate_size=9728, num_hidden_layers=36, num_attention_heads=32,
              num_key_value_heads=8, head_dim=128, vocab_size=151_936)


def make_model(folder: Path, shape: str) -> None:
    """Random weights and a tokenizer of single bytes."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    sizes = SHAPES.get(shape, FOUR_B)
    config = Qwen3Config(**sizes, tie_word_embeddings=True, max_position_embeddings=8192, dtype=torch.bfloat16,
                         eos_token_id=2, pad_token_id=0, bos_token_id=None)
    torch.manual_seed(0)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = Qwen3ForCausalLM(config).to(torch.bfloat16)
    model.save_pretrained(folder)
    make_tokenizer(sizes["vocab_size"]).save_pretrained(folder)


def ours(model: Path, out: Path, options: argparse.Namespace, settings: dict[str, Any]) -> None:
    """Train until `run` has seen enough steps."""
    molt_gym.register("Arithmetic-v0", "rollout_in_training:Arithmetic", max_episode_steps=1)
    engine = {} if options.no_vllm else {"engine": "vllm", "rollout.engine_args.gpu_memory_utilization": options.share}
    molt_gym.train("Arithmetic-v0", model, out=out, steps=options.steps + 1, **engine, **{
        "env_kwargs.length": options.prompt, "eval.before": False, "eval.after": False, "checkpoint.every": 0,
        "rollout.groups_per_step": options.prompts, "rollout.group_size": GROUP, "rollout.max_tokens": options.tokens,
        "rollout.max_context": options.prompt + options.tokens + 64, "actor.lr": 1e-6,
        "rollout.max_concurrency": options.prompts * GROUP + 1, "actor.micro_batch_tokens": options.micro_tokens,
        "actor.activation_checkpointing": options.checkpointing, "actor.compile": options.compile, **settings})


def steps(out: Path) -> list[dict[str, float]]:
    """A line a step of ours, so far."""
    path = out / "metrics.jsonl"
    lines = [json.loads(line) for line in (path.read_text() if path.exists() else "").splitlines(keepends=True)
             if line.endswith("\n")]
    return [{"tokens": line["rollout/length_mean"] * line["rollout/count"], "step": line["time/step"],
             "sample": line["time/rollout"], "weights": line["time/weights"], "train": line["time/train"],
             "engine": line["time/generate"], "actor": line["time/train"] + line.get("time/logprobs", 0.0)}
            for line in lines if "time/step" in line]


def trl(model: Path, out: Path, options: argparse.Namespace, _: dict[str, Any]) -> None:
    """The same with TRL, and leave a line a step; its tokens are those that its rewards were asked about."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        # Else it takes the same one each time, which another run on this machine may have.
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
    from datasets import Dataset
    from transformers import AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    lines: list[dict[str, float]] = []
    now: dict[str, float] = defaultdict(float)

    def reward(completions: list[str], completion_ids: list[list[int]], **_: Any) -> list[float]:
        now["tokens"] += sum(map(len, completion_ids))
        return [sum(int(c) for c in text if c in "0123456789") % 10 / 10 for text in completions]

    class Steps(TrainerCallback):
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            now.clear()
            now["began"] = time.perf_counter()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            step = time.perf_counter() - now["began"]
            train = step - now["sample"] - now["weights"]
            lines.append({"tokens": now["tokens"], "step": step, "sample": now["sample"], "weights": now["weights"],
                          "train": train, "engine": now["sample"], "actor": train})

    def timed(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def inner(*arguments: Any, **keywords: Any) -> Any:
            started = time.perf_counter()
            try:
                return call(*arguments, **keywords)
            finally:
                now[name] += time.perf_counter() - started

        return inner

    rollouts, tokenizer = options.prompts * GROUP, AutoTokenizer.from_pretrained(model)
    prompts = [tokenizer.apply_chat_template([{"role": "user", "content": question(index, options.prompt)}],
                                             tokenize=False, add_generation_prompt=True)
               for index in range(options.prompts * options.steps)]
    vllm = {} if options.no_vllm else {
        "use_vllm": True, "vllm_mode": "colocate", "vllm_gpu_memory_utilization": options.share,
        "vllm_max_model_length": options.prompt + options.tokens + 64}
    trainer = GRPOTrainer(str(model), reward, GRPOConfig(
        output_dir=str(out), per_device_train_batch_size=min(options.micro, rollouts),
        gradient_accumulation_steps=max(1, rollouts // options.micro), num_generations=GROUP,
        max_completion_length=options.tokens, max_steps=options.steps, learning_rate=1e-6, beta=0.0, temperature=1.0,
        report_to=[], save_strategy="no", logging_steps=1, bf16=torch.cuda.is_available(), shuffle_dataset=False,
        use_cpu=not torch.cuda.is_available(), optim="adamw_torch_fused", model_init_kwargs={"dtype": "float32"},
        **vllm), train_dataset=Dataset.from_dict({"prompt": prompts}), processing_class=tokenizer, callbacks=[Steps()])
    if options.no_vllm:
        trainer._generate_single_turn = timed("sample", trainer._generate_single_turn)
    else:
        generation = trainer.vllm_generation
        generation.generate = timed("sample", generation.generate)
        generation.sync_weights = timed("weights", generation.sync_weights)
    trainer.train()
    Path(f"{out}.json").write_text(json.dumps(lines))


def run(name: str, folder: Path, options: argparse.Namespace) -> dict[str, float]:
    """Means of a side that runs in a process of its own, while the GPU's memory is watched."""
    out = folder / f"run-{list(SIDES).index(name)}"
    command = [sys.executable, __file__, *sys.argv[1:], "--side", name, str(folder), str(out)]
    process = subprocess.Popen(command, start_new_session=True)
    most, lines, end = 0.0, list[dict[str, float]](), time.monotonic() + options.deadline
    try:
        while process.poll() is None and len(lines) < options.steps:
            if time.monotonic() > end:
                raise SystemExit(f"{name}: {len(lines)} steps in {options.deadline:g} s; write a larger --deadline")
            time.sleep(0.2)
            lines = steps(out)
            if torch.cuda.is_available():
                free, total = torch.cuda.mem_get_info()
                most = max(most, (total - free) / 2**30)
        if process.poll():
            raise SystemExit(f"{name}: ended with {process.returncode}")
    finally:
        # Ours would go on to write a checkpoint, which takes longer than the steps.
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    lines = lines or json.loads(Path(f"{out}.json").read_text())
    later = lines[2:] or lines
    means = {key: fmean(line[key] for line in later) for key in later[0]}
    return means | {"rate": sum(line["tokens"] for line in later) / sum(line["step"] for line in later),
                    "memory": most}


def main(options: argparse.Namespace) -> None:
    """The table."""
    here = Path(__file__).resolve().parent
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(here), os.environ.get("PYTHONPATH")]))
    if options.side:
        name, folder, out = options.side
        side, settings = SIDES[name]
        globals()[side](Path(folder, "model"), Path(out), options, settings)
        return
    found: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        make_model(Path(folder, "model"), options.shape)
        torch.cuda.empty_cache()
        for name in SIDES:
            try:
                found[name] = run(name, Path(folder), options)
                print(name, found[name], flush=True)
            except SystemExit as error:
                print(error, flush=True)
    peer = found.get("TRL", {}).get("rate")
    lines = ["| | tokens/s | over TRL | tokens a step | step, s | sampling, s | weights, s | training, s | GPU, GiB | "
             "over engine + actor | over the longer |", "|---|---|---|---|---|---|---|---|---|---|---|"]
    for name, row in found.items():
        alone = row if name == "TRL" else found.get("molt-gym, on-policy", row)
        cells = [f"{row['rate']:,.0f}", f"{row['rate'] / peer:.2f}" if peer else "", f"{row['tokens']:,.0f}",
                 f"{row['step']:.2f}", f"{row['sample']:.2f}", f"{row['weights']:.2f}", f"{row['train']:.2f}",
                 f"{row['memory']:.1f}", f"{row['step'] / (alone['engine'] + alone['actor']):.2f}",
                 f"{row['step'] / max(alone['engine'], alone['actor']):.2f}"]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    print("\n".join(["", describe(), *lines]))
    if options.result:
        command = shlex.join(["python", "benchmarks/peer_step.py", *sys.argv[1:]])
        text = "\n".join(["# RL steps beside TRL's", "", describe(), "", "```", command, "```", "", *lines])
        (here / "results" / f"{options.result}.md").write_text(text + "\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", choices=[*SHAPES, "4b"], default="0.6b")
    for name, default in {"steps": 6, "prompts": 32, "prompt": 128, "tokens": 512, "micro": 16,
                          "micro_tokens": 16384}.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=default)
    parser.add_argument("--share", type=float, default=0.35, help="of the GPU's memory that vLLM takes")
    parser.add_argument("--checkpointing", choices=["none", "selective", "full"], default="none")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--no-vllm", action="store_true", help="both sides sample with transformers")
    parser.add_argument("--deadline", type=float, default=280.0, help="seconds a side may take")
    parser.add_argument("--result", help="name of a file in benchmarks/results")
    parser.add_argument("--side", nargs=3, metavar=("NAME", "FOLDER", "OUT"), help=argparse.SUPPRESS)
    main(parser.parse_args())
