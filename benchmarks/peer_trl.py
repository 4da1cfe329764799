"""Two updates of a tiny model by TRL's GRPO loss and by ours: the same rollouts, losses and gradients side by side.

    python -m venv peer && peer/bin/pip install -e . && peer/bin/pip install --no-deps trl datasets
    peer/bin/python benchmarks/peer_trl.py --result peer-trl-cpu

TRL pads prompts on the left and replies on the right, and scores them with its own head; here rows are packed without
padding, and a prompt that rollouts share is computed once. Both take two steps of plain gradient descent, one a group.
In the second step the ratios are not 1, some tokens are clipped, and the reference is behind.
"""

import argparse
import platform
import random
import shlex
import sys
import tempfile
from collections import defaultdict
from contextlib import nullcontext
from datetime import date
from functools import partial
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM
from trl.trainer.grpo_trainer import GRPOTrainer
from trl.trainer.utils import add_fused_lm_head

from molt_gym.tokens import Row, Trajectory
from molt_gym.trainers.actor.fsdp_actor import ActorSpec
from molt_gym.trainers.actor.launch import LocalActor
from molt_gym.trainers.batch import windows
from molt_gym.trainers.config import load_config

VOCAB, LENGTH, SIZE, TEMPERATURE = 64, 12, 6, 0.8
STEP = 0.1
ADAM = {"lr": STEP * 1e6, "eps": 1e6, "betas": (0.0, 0.0), "max_grad_norm": 1e9, "dtype": "float32"}
"""Adam without memory and with a huge epsilon is gradient descent with a rate of lr / eps."""
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "grpo": ({"loss_type": "grpo"}, {"aggregation": "rollout_mean_token_mean"}),
    "dapo": ({"loss_type": "dapo"}, {"aggregation": "token_mean"}),
    "bnpo": ({"loss_type": "bnpo"}, {"aggregation": "token_mean"}),
    "dr_grpo": ({"loss_type": "dr_grpo"}, {"estimator": "dr_grpo", "aggregation": "rollout_mean_token_sum",
                                           "token_sum_divisor": LENGTH}),
    "grpo, delta": ({"loss_type": "grpo", "delta": 1.3}, {"aggregation": "rollout_mean_token_mean", "dual_clip": 1.3}),
    "grpo, sequence": ({"loss_type": "grpo", "importance_sampling_level": "sequence"},
                       {"loss": "gspo", "aggregation": "rollout_mean_token_mean"}),
    "cispo": ({"loss_type": "cispo", "epsilon_high": 1.1}, {"loss": "cispo", "ceiling": 1.1}),
}
"""By name, options of TRL and of ours that mean the same."""
Gradients = dict[str, torch.Tensor]


def make_model(path: Path) -> None:
    """Random weights, so large that every token depends on those before it."""
    torch.manual_seed(0)
    Qwen3ForCausalLM(Qwen3Config(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, max_position_embeddings=2048, initializer_range=0.2, eos_token_id=2,
        pad_token_id=2, bos_token_id=None)).save_pretrained(path)


def make_rollouts() -> list[list[Trajectory]]:
    """Two groups; a prompt each, replies of all lengths, rewards in tenths."""
    rng = random.Random(0)
    groups = []
    for group in range(2):
        prompt, rollouts = [rng.randrange(VOCAB) for _ in range(5 + group)], []
        for number in range(SIZE):
            reply = [rng.randrange(VOCAB) for _ in range(rng.randint(1, LENGTH))]
            mask = [0] * len(prompt) + [1] * len(reply)
            row = Row(prompt + reply, mask, [-1.0 * bit for bit in mask], [bit - 1 for bit in mask])
            rollouts.append(Trajectory("Any-v0", group, group, number, rows=[row], reward=rng.randrange(11) / 10))
        groups.append(rollouts)
    return groups


def ours(path: Path, groups: list[list[Trajectory]], beta: float, options: dict[str, Any]) -> tuple[Any, Gradients]:
    """The mean loss of the two updates, the sum of their gradients, and the advantages; by the actor of training."""
    kl = {"coefficient": beta, "kind": "k3"} if beta else {}
    config = load_config("Any-v0", overrides={
        "actor": ADAM, "rollout": {"groups_per_step": 2, "group_size": SIZE, "temperature": TEMPERATURE},
        "algorithm": {"updates_per_batch": 2, "kl": kl, **({} if "ceiling" in options else {"clip_high": 0.28}),
                      **options}})
    batch, _ = windows(groups, config)
    actor = LocalActor(ActorSpec(str(path), config, torch.float32, 2))
    try:
        before = {name: tensor.detach().clone() for name, tensor in actor.weights()}
        found = actor.train(batch)
        gradients = {name: (before[name] - tensor.detach()) / STEP for name, tensor in actor.weights()}
    finally:
        actor.close()
    advantages = [torch.tensor([row.advantage for row in window]) for window in batch]
    return (found["policy/loss"], found["policy/clip_fraction"], advantages), gradients


def theirs(
    path: Path, groups: list[list[Trajectory]], beta: float, options: dict[str, Any], advantages: list[torch.Tensor]
) -> tuple[float, Gradients]:
    """The same by TRL's methods, on an object that has what they read of a trainer."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    start = {name: tensor.detach().clone() for name, tensor in model.named_parameters()}
    add_fused_lm_head(model, temperature=TEMPERATURE, outputs=("log_probs", "entropy"))
    level, high = options.get("importance_sampling_level", "token"), options.get("epsilon_high", 0.28)
    accelerator = SimpleNamespace(num_processes=1, is_main_process=False, sync_gradients=True, gather=lambda x: x,
                                  autocast=nullcontext, reduce=lambda x, reduction: x, gather_for_metrics=lambda x: x)
    trainer = SimpleNamespace(
        model=SimpleNamespace(training=True), accelerator=accelerator, args=SimpleNamespace(
            delta=options.get("delta"), use_bias_correction_kl=False, steps_per_generation=1),
        loss_type=options["loss_type"], importance_sampling_level=level, epsilon_low=0.2, epsilon_high=high, beta=beta,
        aux_loss_enabled=False, top_entropy_quantile=1.0, off_policy_mask_threshold=None, use_vllm=False,
        max_completion_length=LENGTH, current_gradient_accumulation_steps=1, _entropy_bonus_enabled=False,
        _metrics={"train": defaultdict(list)})
    score = partial(GRPOTrainer._get_per_token_logps_and_entropies, trainer)
    trainer._get_per_token_logps_and_entropies = score
    losses, inputs = [], [padded(group, part) for group, part in zip(groups, advantages, strict=True)]
    for part in inputs:
        with torch.no_grad():
            ids, mask = (torch.cat([part[f"prompt_{what}"], part[f"completion_{what}"]], 1) for what in ("ids", "mask"))
            old = score(model, ids, mask, part["completion_ids"].size(1))[0]
        part["old_per_token_logps"] = part["ref_per_token_logps"] = old
    for part in inputs:
        loss = GRPOTrainer._compute_loss(trainer, model, part)
        gradients = torch.autograd.grad(loss, list(model.parameters()))
        losses.append(loss.item())
        with torch.no_grad():
            for parameter, gradient in zip(model.parameters(), gradients, strict=True):
                parameter -= STEP * gradient
    total = {name: (start[name] - tensor.detach()) / STEP for name, tensor in model.named_parameters()}
    return sum(losses) / len(losses), total


def padded(group: list[Trajectory], advantages: torch.Tensor) -> dict[str, torch.Tensor]:
    """A group as TRL's collator leaves it."""
    rows = [rollout.rows[0] for rollout in group]
    prompt = rows[0].mask.count(0)
    longest = max(len(row.ids) - prompt for row in rows)
    replies = [row.ids[prompt:] for row in rows]
    completion = torch.tensor([reply + [2] * (longest - len(reply)) for reply in replies])
    mask = torch.tensor([[1] * len(reply) + [0] * (longest - len(reply)) for reply in replies])
    return {"prompt_ids": torch.tensor([[2] * 2 + row.ids[:prompt] for row in rows]),
            "prompt_mask": torch.tensor([[0] * 2 + [1] * prompt for _ in rows]), "completion_ids": completion,
            "completion_mask": mask, "advantages": advantages, "num_items_in_batch": mask.sum()}


def main(options: argparse.Namespace) -> None:
    """All cases, with and without a KL."""
    lines = ["| TRL | here | KL | loss there | here | difference | largest gradient | largest difference | clipped |",
             "|---|---|---|---|---|---|---|---|---|"]
    groups = make_rollouts()
    with tempfile.TemporaryDirectory() as folder:
        make_model(Path(folder))
        for (name, (peer, own)), beta in ((case, beta) for case in CASES.items() for beta in (0.0, 0.1)):
            (loss, clipped, advantages), gradients = ours(Path(folder), groups, beta, own)
            other, expected = theirs(Path(folder), groups, beta, peer, advantages)
            largest = max(tensor.abs().max().item() for tensor in expected.values())
            apart = max((gradients[key] - tensor).abs().max().item() for key, tensor in expected.items())
            words = ", ".join(f"`{key} = {value}`" for key, value in own.items())
            lines.append(f"| {name} | {words} | {beta} | {other:.7f} | {loss:.7f} | {abs(loss - other):.1e} | "
                         f"{largest:.3f} | {apart:.1e} | {clipped:.2f} |")
            print(lines[-1], flush=True)
    if options.result:
        versions = ", ".join(f"{package} {version(package)}" for package in ("trl", "torch", "transformers"))
        text = ["# Losses and gradients, TRL and here", "",
                f"{date.today()}, {platform.machine()}, Python {platform.python_version()}, {versions}; float32", "",
                "```", shlex.join(["python", "benchmarks/peer_trl.py", *sys.argv[1:]]), "```", "",
                f"Two groups of {SIZE} rollouts, an update each; the loss is the mean of the two updates, the gradient "
                "their sum, over all parameters.", "", *lines]
        path = Path(__file__).resolve().parent / "results" / f"{options.result}.md"
        path.write_text("\n".join(text) + "\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--result", help="name of a file in benchmarks/results")
    main(parser.parse_args())
