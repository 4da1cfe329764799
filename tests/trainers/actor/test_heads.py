"""Output heads, tied or not, and another whose name only ends like theirs: to the engine, and through a checkpoint."""

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM

from molt_gym.tokens import Sampling
from molt_gym.trainers.actor.fsdp_actor import ActorSpec
from molt_gym.trainers.actor.launch import LocalActor
from molt_gym.trainers.actor.packing import TrainRow
from molt_gym.trainers.export import export_checkpoint
from molt_gym.trainers.rollout.engine import Request
from molt_gym.trainers.rollout.transformers_engine import TransformersEngine

PROMPT = [3, 5, 7, 4]


class TwoHeadedConfig(Qwen3Config):
    model_type = "qwen3_two_headed"


class TwoHeaded(Qwen3ForCausalLM):
    """With a head that no log-probability depends on."""

    config_class = TwoHeadedConfig

    def __init__(self, config: TwoHeadedConfig) -> None:
        super().__init__(config)
        self.value_lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()


AutoConfig.register("qwen3_two_headed", TwoHeadedConfig)
AutoModelForCausalLM.register(TwoHeadedConfig, TwoHeaded)


@pytest.fixture(params=[(True, False), (False, False), (True, True), (False, True)],
                ids=["tied", "untied", "tied and auxiliary", "untied and auxiliary"])
def model(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, bool, bool]:
    """A model's folder, whether its head is tied, and whether it has an auxiliary one."""
    tied, auxiliary = request.param
    config = (TwoHeadedConfig if auxiliary else Qwen3Config)(
        vocab_size=8, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, max_position_embeddings=2048, initializer_range=0.3,
        tie_word_embeddings=tied, eos_token_id=2, pad_token_id=2, bos_token_id=None)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        (TwoHeaded if auxiliary else Qwen3ForCausalLM)(config).save_pretrained(tmp_path / "model")
    return tmp_path / "model", tied, auxiliary


@pytest.fixture
def actor(model: tuple[Path, bool, bool], spec: Callable[..., ActorSpec]) -> Iterator[LocalActor]:
    made = LocalActor(spec(model[0]))
    yield made
    made.close()


def raise_embedding(actor: LocalActor) -> None:
    """By one; before anything was computed, as what is computed with stays gathered for a while."""
    dict(actor.weights())["model.embed_tokens.weight"].add_(1.0)


def row(seed: int) -> TrainRow:
    ids = torch.randint(0, 8, (12,), generator=torch.Generator().manual_seed(seed)).tolist()
    return TrainRow(ids, [0] * 4 + [1] * 8, [-2.0] * 12, 1.0, 0.1, 0, 0)


async def test_every_head_that_there_is_is_sent_once_and_the_engine_computes_what_the_actor_does(
        actor, model):
    path, tied, auxiliary = model
    renderer = SimpleNamespace(stop_token_ids=[2], vision=None)
    engine = TransformersEngine(path, renderer, dtype=torch.float32, max_context=64, max_sequences=2)
    try:
        raise_embedding(actor)
        names = [name for name, _ in actor.weights()]
        assert names.count("model.embed_tokens.weight") == 1 and names.count("lm_head.weight") == int(not tied)
        assert names.count("value_lm_head.weight") == int(auxiliary) and len(names) == len(set(names))
        await engine.pause()
        with pytest.raises(ValueError, match="were not sent"):
            await engine.update_weights([], 1)
        await engine.update_weights(actor.weights(), 1)
        await engine.resume()
        reply = await asyncio.wait_for(engine.submit([Request(PROMPT, Sampling(16, seed=1))])[0], 20)
        scores = actor.logprobs(PROMPT + reply.ids)
        assert reply.logprobs == pytest.approx(scores[len(PROMPT) - 1 :], abs=1e-5)
    finally:
        await engine.close()


def test_every_head_comes_back_from_a_checkpoint_and_an_export(actor, model, tmp_path):
    path, tied, auxiliary = model
    raise_embedding(actor)
    actor.train([[row(0)]])
    expected, scores = {name: tensor.clone() for name, tensor in actor.weights()}, actor.logprobs(PROMPT * 3)
    (tmp_path / "saved").mkdir()
    (tmp_path / "saved" / "trainer.json").write_text("{}")
    actor.save(tmp_path / "saved" / "actor")
    export_checkpoint(tmp_path / "saved", tmp_path / "exported", path)
    actor.train([[row(1)]])
    assert actor.logprobs(PROMPT * 3) != scores
    actor.load(tmp_path / "saved" / "actor")
    assert actor.logprobs(PROMPT * 3) == scores
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "exported", dtype=torch.float32)
    assert (exported.get_output_embeddings().weight is exported.get_input_embeddings().weight) is tied
    found = dict(exported.named_parameters())
    assert found.keys() == expected.keys() and ("value_lm_head.weight" in found) is auxiliary
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
