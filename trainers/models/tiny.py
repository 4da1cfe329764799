"""The tiny model: half a million parameters, made on this machine for one environment in well under a minute.

For an environment whose demonstrations hold images it is one that sees; see `tiny_vision.py`.

Invariant: it is a function of the recipe, the environment with its arguments and demonstrations, and the seed; the
cache keeps it under a hash of these.
"""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from molt_gym.errors import ConfigError
from molt_gym.images import images_of
from molt_gym.messages import Message
from molt_gym.registry import find_spec, make

from .cache import cached_folder, is_cached

__all__ = ["tiny_model"]

_RECIPE = 2  # to be raised whenever other weights or another tokenizer come out
_STEPS, _SEEING_STEPS = 300, 200
_SAMPLE = 256  # demonstrations that stand for all in the hash

Conversations = Sequence[Sequence[Message]]
Tools = Sequence[Mapping[str, Any]]


def tiny_model(env_id: str, env_kwargs: Mapping[str, Any], seed: int, say: Callable[[str], None]) -> Path:
    """The folder of the tiny model for an environment, made if the cache lacks it.

    Raises:
        ConfigError: the environment has no demonstrations to learn from.
    """
    from .warm_start import BATCH

    env = make(env_id, **env_kwargs)
    try:
        player = getattr(env.unwrapped, "agent", env.unwrapped)
        demonstrate, tools = getattr(player, "demonstrations", None), getattr(player, "tools", ())
        if demonstrate is None:
            raise ConfigError(f"model: 'tiny' learns to talk from the environment's own demonstrations, and {env_id} "
                              "has no method demonstrations(count, seed) that returns a list of conversations; add it, "
                              "or choose another model, such as 'smollm2-135m' or a local folder")
        sample = _demonstrated(env_id, demonstrate, _SAMPLE, seed)
        name = _name(env_id, env_kwargs, seed, tools, sample)
        steps = _SEEING_STEPS if any(map(images_of, sample)) else _STEPS
        count = steps * BATCH
        if not is_cached(name):
            say(f"warm start of tiny: {steps} steps on {count:,} demonstrations of {env_id}, once")

        def build(folder: Path) -> None:
            _build(folder, _demonstrated(env_id, demonstrate, count, seed), tools, seed)

        return cached_folder(name, build)
    finally:
        env.close()


def _demonstrated(env_id: str, demonstrate: Callable[..., Conversations], count: int, seed: int) -> Conversations:
    try:
        conversations = demonstrate(count, seed)
    except ValueError as error:
        raise ConfigError(f"model: 'tiny' learns to talk from the environment's own demonstrations, and {env_id} has "
                          f"none as it is set up here ({error}); choose another model") from error
    for i, conversation in enumerate(conversations):
        if not any(message.get("role") == "assistant" for message in conversation):
            raise ConfigError(f"demonstrations of {env_id}: number {i} has no assistant message; each is a list of "
                              "messages in the OpenAI form that ends with the assistant's answer")
    if not conversations:
        raise ConfigError(f"demonstrations of {env_id}: there are none; demonstrations(count, seed) must return count")
    return conversations


def _name(env_id: str, env_kwargs: Mapping[str, Any], seed: int, tools: Tools, sample: Conversations) -> str:
    content = [_RECIPE, find_spec(env_id).id, env_kwargs, seed, tools, sample]
    text = json.dumps(content, sort_keys=True, default=repr)
    return f"tiny-{hashlib.sha256(text.encode()).hexdigest()[:16]}"


def _build(folder: Path, conversations: Conversations, tools: Tools, seed: int) -> None:
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    from .tiny_tokenizer import VOCABULARY, encode_examples, train_tokenizer
    from .tiny_vision import build_seeing
    from .warm_start import train_on_examples

    tokenizer = train_tokenizer(conversations, tools)
    if any(map(images_of, conversations)):
        build_seeing(folder, tokenizer, conversations, tools, seed)
        return
    config = Qwen3Config(
        vocab_size=VOCABULARY, hidden_size=128, intermediate_size=384, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, tie_word_embeddings=True, max_position_embeddings=4096,
        initializer_range=0.08,  # about 1 / sqrt(hidden_size): with the usual .02 so small a model hardly starts
        bos_token_id=None, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id, dtype="float32",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen3ForCausalLM(config)
    train_on_examples(model, encode_examples(tokenizer, conversations, tools))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
