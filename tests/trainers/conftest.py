"""A tiny model that is whole: random Qwen3 weights in float32, a BPE tokenizer trained here, a ChatML template."""

import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import gymnasium as gym
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from molt_gym import ChatEnv, Turn
from molt_gym.tokens import Renderer
from molt_gym.trainers.algorithms.registry import ESTIMATORS, LOSSES

TEMPLATE = (
    "{%- for message in messages %}{{- '<|im_start|>' + message['role'] + '\n' + (message['content'] or '')"
    " + '<|im_end|>\n' }}{%- endfor %}{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"
)
TEXTS = [
    "system\nYou are a helpful assistant.", "user\nWrite a number from 0 to 9.", "user\nWhat is 3 + 4?",
    "user\nNo, try again. The number is too small, too large, or right.", "assistant\nThe number is 7.",
]


@pytest.fixture(scope="session")
def tiny_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a random model of 2 layers, hidden size 64, with a tokenizer of about 300 entries."""
    path = tmp_path_factory.mktemp("tiny-qwen3")
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.train_from_iterator(TEXTS, trainers.BpeTrainer(
        vocab_size=320, show_progress=False, special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet()))
    PreTrainedTokenizerFast(
        tokenizer_object=backend, chat_template=TEMPLATE, eos_token="<|im_end|>", pad_token="<|endoftext|>",
        clean_up_tokenization_spaces=False,
    ).save_pretrained(path)
    # Weights larger than a real model's, so that every token depends on the whole context before it.
    config = Qwen3Config(
        vocab_size=backend.get_vocab_size(), hidden_size=64, intermediate_size=96, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=16, max_position_embeddings=1024,
        initializer_range=0.3, tie_word_embeddings=True, eos_token_id=2, pad_token_id=0, bos_token_id=None,
    )
    state = torch.random.get_rng_state()
    torch.manual_seed(0)
    Qwen3ForCausalLM(config).float().save_pretrained(path)
    torch.random.set_rng_state(state)
    return path


@pytest.fixture(scope="module", autouse=True)
def _algorithms_of_a_module_are_unknown_to_the_next() -> Iterator[None]:
    """Those that tests register, and the modules they are in, so that importing these registers them again."""
    registries = [ESTIMATORS, LOSSES]
    before = [set(registry.names()) for registry in registries]
    yield
    for registry, known in zip(registries, before, strict=True):
        for name in {*registry.names()} - known:
            sys.modules.pop(registry.function(name).__module__, None)
            del registry._functions[name], registry._traits[name]


@pytest.fixture(scope="session")
def wide_path(tiny_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model whose attention has heads of 32, the least that vLLM takes on CPUs."""
    path = tmp_path_factory.mktemp("wide")
    tokenizer = AutoTokenizer.from_pretrained(tiny_path)
    tokenizer.save_pretrained(path)
    config = Qwen3Config(
        vocab_size=len(tokenizer), hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=32, max_position_embeddings=1024, initializer_range=0.3,
        tie_word_embeddings=True, eos_token_id=2, pad_token_id=0, bos_token_id=None)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        Qwen3ForCausalLM(config).float().save_pretrained(path)
    return path


@pytest.fixture
def tiny_model(tiny_path: Path) -> Qwen3ForCausalLM:
    """The model as transformers itself computes it; a fresh copy for each test."""
    return AutoModelForCausalLM.from_pretrained(tiny_path, dtype=torch.float32, attn_implementation="eager").eval()


@pytest.fixture(scope="session")
def renderer(tiny_path: Path) -> Renderer:
    """The renderer of the tiny model."""
    return Renderer(AutoTokenizer.from_pretrained(tiny_path))


class ScriptedEnv(ChatEnv):
    """An env made of two functions of itself: what opens task `index`, and what follows a message."""

    def __init__(self, begin: Callable[..., Any], answer: Callable[..., Any], num_tasks: int | None) -> None:
        super().__init__()
        self._begin, self._answer, self.num_tasks = begin, answer, num_tasks

    def begin(self, index: int) -> list[dict]:
        self.index = index
        return self._begin(self, index)

    def answer(self, message: dict) -> Turn:
        return self._answer(self, message)


@pytest.fixture
def scripted() -> Callable[..., Callable[[], gym.Env]]:
    """`scripted(answer, begin=..., num_tasks=..., max_turns=...)` returns what makes such an env."""

    def begin_plainly(env: ScriptedEnv, index: int) -> list[dict]:
        return [{"role": "user", "content": f"What is {index}?"}]

    def end_well(env: ScriptedEnv, message: dict) -> Turn:
        return Turn(reward=1.0, terminated=True)

    def maker(answer: Callable = end_well, *, begin: Callable = begin_plainly, num_tasks: int | None = None,
              max_turns: int = 8) -> Callable[[], gym.Env]:
        return lambda: gym.wrappers.TimeLimit(ScriptedEnv(begin, answer, num_tasks), max_turns)

    return maker


@pytest.fixture
def at_each_write() -> Callable[[Callable[[], None]], AbstractContextManager[None]]:
    """Within `at_each_write(call)`, it is called at every moment at which a file is opened, renamed, removed, flushed.

    Other threads, which might do such things as well, wait meanwhile.
    """

    @contextmanager
    def hooked(call: Callable[[], None]) -> Iterator[None]:
        events = {"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.symlink", "shutil.rmtree"}
        lock, active, calling = threading.RLock(), True, threading.local()

        def hook(event: str, _: tuple) -> None:
            if active and event in events and not getattr(calling, "now", False):
                calling.now = True
                try:
                    with lock:
                        call()
                finally:
                    calling.now = False

        def fsync(fd: Any, original: Callable[[Any], None] = os.fsync) -> None:
            hook("open", ())
            original(fd)
            hook("open", ())

        sys.addaudithook(hook)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(os, "fsync", fsync)
            try:
                yield
            finally:
                # An audit hook stays for the life of the process.
                active = False

    return hooked


@pytest.fixture(scope="session")
def toys() -> Iterator[Path]:
    """The folder of `toy_envs`, which processes started from the test can import as well."""
    folder = Path(__file__).parent / "toys"
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        patch.setenv("PYTHONPATH", str(folder))
        yield folder


@pytest.fixture(scope="session")
def train(toys: Path, tiny_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Any]:
    """`molt_gym.train` in a toy env with a tiny model, small everywhere; `defaults=False` takes the project's sizes."""
    import molt_gym

    small = {
        "rollout__groups_per_step": 2, "rollout__group_size": 4, "rollout__max_tokens": 8, "rollout__max_context": 256,
        "eval__episodes": 2, "checkpoint__every": 2, "actor__lr": 3e-3, "actor__dtype": "float32",
    }

    def run(out: Path | None = None, *, env: str = "toy_envs:Letters-v0", model: Path = tiny_path, steps: int = 2,
            seed: int | None = 1, defaults: bool = True, **overrides: Any) -> Any:
        out = out or tmp_path_factory.mktemp("run")
        return molt_gym.train(env, model, out=out, steps=steps, seed=seed, **(small if defaults else {}) | overrides)

    return run
