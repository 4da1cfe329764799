"""Sampler against trainer over variants of the actor: short runs with vLLM on one GPU, each in its own process.

    python benchmarks/gpu_variants.py --result NAME        on a GPU, about a minute a run
    python benchmarks/gpu_variants.py --shape tiny         anywhere

Random Qwen3 and Qwen3-VL weights, made here, large enough that replies depend on what they follow. Columns, of the
last step: mean absolute difference of the log-probabilities of sampled tokens between vLLM and the actor, share of
them that are equal to the bit, and estimated KL; seconds of the step and of its update of weights; peak memory of the
actor. A run whose engine does not compute what the actor does after an update (parity probe) ends, and the table says
so. A float32 head means logits that are not rounded to bfloat16: `actor.head_dtype` in the actor, and in vLLM its
option `--hf-overrides '{"head_dtype": "float32"}'`.
"""

import argparse
import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from rollout_in_training import describe
from transformers import AutoConfig, AutoModelForImageTextToText, Qwen3Config, Qwen3ForCausalLM
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from vllm_updates import SHAPES, make_tokenizer

import molt_gym

FLOAT_HEAD = {"rollout.engine_args.hf_overrides": {"head_dtype": "float32"}}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "all weights": ("text", {}),
    "float32 head in the actor": ("text", {"actor.head_dtype": "float32"}),
    "float32 head in both": ("text", {"actor.head_dtype": "float32"} | FLOAT_HEAD),
    "LoRA, rank 16, adapters sent": ("text", {"actor.lora.rank": 16, "actor.lora.transfer": "adapter"}),
    "LoRA, rank 16, merged weights sent": ("text", {"actor.lora.rank": 16, "actor.lora.transfer": "merged"}),
    "engine and actor in turns": ("text", {"rollout.release_memory": True}),
    "images, vision tower frozen": ("vision", {}),
    "images, vision tower trained": ("vision", {"actor.freeze_vision": False}),
}
PLACES = ["<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]
TEMPLATE = """\
{%- for message in messages %}{{- '<|im_start|>' + message.role + '\n' }}
{%- if message.content is string %}{{- message.content }}{%- else %}{%- for part in message.content or () %}
{%- if part.type == 'image' %}{{- '<|vision_start|><|image_pad|><|vision_end|>' }}{%- else %}{{- part.text }}
{%- endif %}{%- endfor %}{%- endif %}{{- '<|im_end|>\n' }}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"""


def make_text(folder: Path, sizes: dict[str, int]) -> None:
    """A random Qwen3."""
    config = Qwen3Config(**sizes, tie_word_embeddings=True, max_position_embeddings=4096, dtype=torch.bfloat16,
                         initializer_range=1.5 / sizes["hidden_size"] ** 0.5, eos_token_id=2, pad_token_id=0)
    save(Qwen3ForCausalLM, config, folder)
    make_tokenizer(sizes["vocab_size"]).save_pretrained(folder)


def make_vision(folder: Path, sizes: dict[str, int]) -> None:
    """A random Qwen3-VL with a small tower; an image has up to 256 tokens of 32 x 32 pixels."""
    tokenizer = make_tokenizer(sizes["vocab_size"])
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", *PLACES]})
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    width, ids = sizes["hidden_size"], dict(zip(PLACES, tokenizer.convert_tokens_to_ids(PLACES), strict=True))
    quarter = sizes["head_dim"] // 8
    text = sizes | {"vocab_size": len(tokenizer), "max_position_embeddings": 4096, "eos_token_id": 2, "pad_token_id": 0,
                    "initializer_range": 1.5 / width**0.5, "rope_parameters": {
                        "rope_type": "default", "rope_theta": 1e6, "mrope_interleaved": True,
                        "mrope_section": [2 * quarter, quarter, quarter]}}
    vision = {"depth": 4, "hidden_size": 256, "intermediate_size": 512, "num_heads": 4, "patch_size": 16,
              "spatial_merge_size": 2, "temporal_patch_size": 2, "out_hidden_size": width,
              "num_position_embeddings": 256, "deepstack_visual_indexes": [0, 1], "initializer_range": 0.1}
    config = AutoConfig.for_model(
        "qwen3_vl", text_config=text, vision_config=vision, tie_word_embeddings=True, dtype=torch.bfloat16,
        image_token_id=ids["<|image_pad|>"], video_token_id=ids["<|video_pad|>"],
        vision_start_token_id=ids["<|vision_start|>"], vision_end_token_id=ids["<|vision_end|>"])
    save(AutoModelForImageTextToText, config, folder)
    Qwen2VLImageProcessorPil(patch_size=16, temporal_patch_size=2, merge_size=2, size={
        "shortest_edge": 32 * 32, "longest_edge": 256 * 32 * 32}).save_pretrained(folder)


def save(kind: Any, config: Any, folder: Path) -> None:
    """Random weights of that configuration, in bfloat16."""
    torch.manual_seed(0)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = (kind._from_config if kind is Qwen3ForCausalLM else kind.from_config)(config).to(torch.bfloat16)
    model.save_pretrained(folder)


def play(name: str, folder: Path, out: Path, options: argparse.Namespace) -> None:
    """One run, in this process."""
    kind, settings = VARIANTS[name]
    molt_gym.register("Arithmetic-v0", "rollout_in_training:Arithmetic", max_episode_steps=1)
    envs = {"text": ("Arithmetic-v0", {"env_kwargs.length": 128}), "vision": ("Geo3k-v0", {})}
    env, keywords = envs[kind]
    molt_gym.train(env, folder / kind, out=out, steps=options.steps, engine="vllm", **{
        "eval.before": False, "eval.after": False, "checkpoint.every": 0, "rollout.groups_per_step": options.groups,
        "rollout.group_size": 8, "rollout.max_tokens": options.tokens, "rollout.max_context": 1024,
        "actor.micro_batch_tokens": 8192, "rollout.engine_args.enforce_eager": True, "actor.dtype": "bfloat16",
        **keywords, **settings})


def row(name: str, folder: Path, options: argparse.Namespace) -> str:
    """A line of the table, from a process of its own."""
    out = folder / f"run-{list(VARIANTS).index(name)}"
    command = [sys.executable, __file__, *sys.argv[1:], "--play", name, str(folder), str(out)]
    with open(f"{out}.log", "w+", encoding="utf-8") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
        try:
            code = process.wait(options.deadline)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            code = process.wait()
        log.seek(0)
        said = log.read().strip()
    if code:
        print(said[-3000:], flush=True)
        return f"| {name} | failed with {code}: {said.rpartition(chr(10))[2][:200]} |" + " |" * 6
    lines = [line for line in map(json.loads, (out / "metrics.jsonl").read_text().splitlines()) if "time/step" in line]
    last = lines[-1]
    cells = [len(lines), f"{last['mismatch/abs_diff_mean']:.5f}", f"{last['mismatch/bitwise_fraction']:.1%}",
             f"{last['mismatch/kl']:.5f}", f"{last['time/step']:.2f}", f"{last['time/weights']:.2f}",
             f"{max(line.get('perf/gpu_memory_peak', 0.0) for line in lines):.1f}"]
    return f"| {name} | " + " | ".join(map(str, cells)) + " |"


def main(options: argparse.Namespace) -> None:
    """The table."""
    here = Path(__file__).resolve().parent
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(here), os.environ.get("PYTHONPATH")]))
    if options.play:
        name, folder, out = options.play
        return play(name, Path(folder), Path(out), options)
    lines = ["| | steps | difference, mean | equal bits | KL | step, s | weights, s | actor's peak, GiB |",
             "|---|---|---|---|---|---|---|---|"]
    with tempfile.TemporaryDirectory() as folder:
        make_text(Path(folder, "text"), SHAPES[options.shape])
        make_vision(Path(folder, "vision"), SHAPES[options.shape] | {"vocab_size": 512})
        for number, name in enumerate(VARIANTS):
            if not options.only or number in options.only:
                lines.append(row(name, Path(folder), options))
                print(lines[-1], flush=True)
    print("\n".join(["", describe(), *lines]))
    if options.result:
        command = shlex.join(["python", "benchmarks/gpu_variants.py", *sys.argv[1:]])
        text = "\n".join(["# Variants of the actor", "", describe(), "", "```", command, "```", "", *lines])
        (here / "results" / f"{options.result}.md").write_text(text + "\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", choices=SHAPES, default="0.6b")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--groups", type=int, default=8, help="groups of 8 rollouts a step")
    parser.add_argument("--tokens", type=int, default=128, help="most tokens of a reply")
    parser.add_argument("--only", type=int, nargs="*", help="numbers of rows")
    parser.add_argument("--deadline", type=float, default=240.0, help="seconds a run may take")
    parser.add_argument("--result", help="name of a file in benchmarks/results")
    parser.add_argument("--play", nargs=3, metavar=("NAME", "FOLDER", "OUT"), help=argparse.SUPPRESS)
    main(parser.parse_args())
