"""Tiny models without a tokenizer, random rows, and what plain PyTorch makes of them, each row by itself."""

import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM

from molt_gym.trainers.actor.fsdp_actor import ActorSpec
from molt_gym.trainers.actor.packing import TrainRow
from molt_gym.trainers.config import Config, load_config

VOCAB = 24


@pytest.fixture(scope="session")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """The folder of a random model, with or without a head of its own, in float32 or bfloat16."""
    root = tmp_path_factory.mktemp("models")

    def folder(*, tied: bool = True, dtype: torch.dtype = torch.float32) -> Path:
        path = root / f"{tied}-{dtype}"
        if not path.exists():
            config = Qwen3Config(
                vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
                num_key_value_heads=2, head_dim=8, max_position_embeddings=2048, initializer_range=0.3,
                tie_word_embeddings=tied, eos_token_id=2, pad_token_id=2, bos_token_id=None, attention_dropout=0.5)
            with torch.random.fork_rng():
                torch.manual_seed(0)
                Qwen3ForCausalLM(config).to(dtype).save_pretrained(path)
        return path

    return folder


@pytest.fixture(scope="session")
def spec(model_path: Callable[..., Path]) -> Callable[..., ActorSpec]:
    """An actor's spec in float32: overrides of the configuration by their dotted names."""

    def build(path: Path | None = None, *, total_updates: int = 10, **overrides: Any) -> ActorSpec:
        settings = {"actor__lr": 1e-2, "actor__weight_decay": 0.1, "actor__eps": 0.1, **overrides}
        return ActorSpec(str(path or model_path()), load_config("Any-v0", overrides=settings), torch.float32,
                         total_updates)

    return build


@pytest.fixture(scope="session")
def random_rows() -> Callable[..., list[TrainRow]]:
    """Groups of rows that share a prompt, and now and then a whole turn; every row has an advantage unless told."""

    def build(groups: int, size: int, *, seed: int = 0, idle: Sequence[int] = (), start: int = 0) -> list[TrainRow]:
        rng = random.Random(seed)
        rows = []
        for group in range(groups):
            prompt = [rng.randrange(VOCAB) for _ in range(rng.randint(2, 9))]
            turn = [rng.randrange(VOCAB) for _ in range(rng.randint(1, 6))]
            for _ in range(size):
                tail = [rng.randrange(VOCAB) for _ in range(rng.randint(1, 9))]
                reply = turn + tail if rng.random() < 0.5 else tail
                mask = [0] * len(prompt) + [int(rng.random() < 0.8) for _ in reply[:-1]] + [1]
                number = start + len(rows)
                rows.append(TrainRow(prompt + reply, mask, [-rng.random() * bit for bit in mask],
                                     0.0 if len(rows) in idle else rng.uniform(-2, 2), 0.0, number, start + group))
        total = sum(len(row.trained) for row in rows)
        for row in rows:
            row.weight = 1 / total
        return rows

    return build


@pytest.fixture(scope="session")
def plain_logprobs() -> Callable[..., list[Tensor]]:
    """Log-probabilities of each row's trained tokens, computed one row at a time by transformers alone."""

    def compute(model: torch.nn.Module, rows: Sequence[TrainRow], temperature: float = 1.0) -> list[Tensor]:
        found = []
        for row in rows:
            logits = model(input_ids=torch.tensor([row.ids]), use_cache=False).logits[0].float() / temperature
            logs = logits.log_softmax(-1)
            found.append(torch.stack([logs[p - 1, row.ids[p]] for p in row.trained]) if row.trained else logs[:0, 0])
        return found

    return compute


@pytest.fixture(scope="session")
def plain_training(plain_logprobs: Callable[..., list[Tensor]]) -> Callable[..., dict[str, Tensor]]:
    """The weights after PPO updates on windows, with torch's own optimizer and nothing skipped, packed or sharded."""

    def train(path: str, config: Config, batches: Sequence[Sequence[Sequence[TrainRow]]]) -> dict[str, Tensor]:
        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager").eval()
        actor, low, high = config.actor, 1 - config.algorithm.clip_low, 1 + config.algorithm.clip_high
        decayed = [p for p in model.parameters() if p.ndim > 1]
        others = [p for p in model.parameters() if p.ndim == 1]
        optimizer = torch.optim.AdamW(
            [{"params": decayed, "weight_decay": actor.weight_decay}, {"params": others, "weight_decay": 0.0}],
            lr=actor.lr, betas=actor.betas, eps=actor.eps)
        temperature = config.rollout.temperature
        for windows in batches:
            with torch.no_grad():
                old = [plain_logprobs(model, window, temperature) for window in windows]
            for window, before in zip(windows, old, strict=True):
                loss = torch.zeros(())
                now = plain_logprobs(model, window, temperature)
                for row, logp, old_logp in zip(window, now, before, strict=True):
                    ratio = (logp - old_logp).exp()
                    objective = torch.minimum(ratio * row.advantage, ratio.clamp(low, high) * row.advantage)
                    loss = loss - row.weight * objective.sum()
                loss.backward()
                torch.nn.utils.clip_grad_norm_(model.parameters(), actor.max_grad_norm)
                optimizer.step()
                optimizer.zero_grad()
        return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}

    return train


@pytest.fixture(scope="session")
def weights_of() -> Callable[..., dict[str, Tensor]]:
    """A copy of an actor's weights."""
    return lambda actor: {name: tensor.detach().clone() for name, tensor in actor.weights()}
