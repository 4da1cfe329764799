"""Replayed routing in plain transformers models, and on an actor that trains rows with experts."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import (
    AfmoeConfig,
    AutoModelForCausalLM,
    DeepseekV3Config,
    MixtralConfig,
    OlmoeConfig,
    Qwen3MoeConfig,
)

from molt_gym.errors import ConfigError
from molt_gym.tokens import Row, RowRef
from molt_gym.trainers.actor.fsdp_actor import ActorSpec
from molt_gym.trainers.actor.launch import LocalActor
from molt_gym.trainers.actor.packing import TrainRow, build_trie, collate, train_row
from molt_gym.trainers.actor.routing import Routing

VOCAB, LAYERS, EXPERTS, TOP_K, TOKENS = 24, 3, 8, 2, 12
SMALL = {"vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": LAYERS,
         "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 2048, "initializer_range": 0.3,
         "pad_token_id": 0, "bos_token_id": None, "eos_token_id": 2, "tie_word_embeddings": False,
         "num_experts_per_tok": TOP_K}
QWEN = Qwen3MoeConfig(**SMALL, head_dim=8, moe_intermediate_size=16, num_experts=EXPERTS, mlp_only_layers=[1],
                      norm_topk_prob=True)
CONFIGS = {
    "qwen3_moe": QWEN,
    "mixtral": MixtralConfig(**SMALL, num_local_experts=EXPERTS),
    "olmoe": OlmoeConfig(**SMALL, num_experts=EXPERTS),
    "deepseek_v3": DeepseekV3Config(**SMALL | {"num_key_value_heads": 4}, n_routed_experts=EXPERTS, n_group=2,
                                    topk_group=1, moe_intermediate_size=16, first_k_dense_replace=1, q_lora_rank=16,
                                    kv_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=8),
}
Ids = torch.tensor([[(7 * place + 3) % VOCAB for place in range(TOKENS)]])


def make(config, dtype: torch.dtype = torch.float32) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return AutoModelForCausalLM.from_config(config, attn_implementation="eager").to(dtype).eval()


def live(routing: Routing, run: Callable[[], object]) -> Tensor:
    """[T, layers, top_k] that routers choose by themselves in a forward pass."""
    found = torch.full((TOKENS, LAYERS, TOP_K), -1, dtype=torch.int16)

    def keep(layer: int, _router: nn.Module, _arguments: tuple, told: tuple) -> None:
        found[:, layer] = told[2]

    hooks = [router.register_forward_hook(partial(keep, layer)) for layer, router in routing.routers.items()]
    run()
    for hook in hooks:
        hook.remove()
    return found


@pytest.fixture(params=CONFIGS)
def model(request) -> nn.Module:
    return make(CONFIGS[request.param])


def test_only_the_choice_is_replayed_and_the_gate_keeps_its_gradient(model):
    plain = model(Ids).logits
    routing = Routing(model.base_model.layers)
    assert routing.routers
    own = live(routing, lambda: model(Ids))
    assert torch.equal(model(Ids).logits, plain)
    routing.follow(own)
    assert torch.equal(model(Ids).logits, plain)

    other = own.clone()
    layer = max(routing.routers)
    other[5:, layer] = (own[5:, layer] + 3) % EXPERTS
    routing.follow(other)
    logits = model(Ids).logits
    difference = (logits - plain).abs().amax((0, 2))
    assert (difference[:5] < 1e-5).all() and (difference[5:] > 1e-3).all()
    logits.square().sum().backward()
    assert all(router.weight.grad.abs().sum() > 0 for router in routing.routers.values())
    assert torch.equal(live(routing, lambda: model(Ids))[:, layer], other[:, layer])


def test_tokens_of_which_nothing_is_known_are_routed_live(model):
    plain = model(Ids).logits
    routing = Routing(model.base_model.layers)
    own = live(routing, lambda: model(Ids))
    other = (own + 3) % EXPERTS
    other[:9] = -1
    routing.follow(other)
    logits = model(Ids).logits
    torch.testing.assert_close(logits[:, :9], plain[:, :9], rtol=0, atol=1e-5)
    assert ((logits[:, 9:] - plain[:, 9:]).abs().amax(-1) > 1e-3).all()
    assert torch.equal(live(routing, lambda: model(Ids))[:9], own[:9])
    routing.follow(torch.full_like(own, -1))
    assert torch.equal(model(Ids).logits, plain)
    routing.follow(other)
    routing.follow(None)
    assert torch.equal(model(Ids).logits, plain)


def test_layers_that_are_computed_again_go_the_same_way(model):
    routing = Routing(model.base_model.layers)
    other = (live(routing, lambda: model(Ids)) + 3) % EXPERTS
    model(Ids).logits.square().sum().backward()
    unrouted, gradients = model.lm_head.weight.grad.clone(), []
    for again in (False, True):
        for layer in model.base_model.layers if again else ():
            layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)
        routing.follow(other)
        model.zero_grad()
        model(Ids, use_cache=False).logits.square().sum().backward()
        gradients.append([parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None])
    assert all(map(torch.equal, *gradients))
    assert not torch.allclose(model.lm_head.weight.grad, unrouted)


def test_routers_compute_in_float32(model):
    model = model.to(torch.bfloat16)
    routing = Routing(model.base_model.layers)
    layer, router = min(routing.routers.items())
    hidden = torch.randn(TOKENS, 32, generator=torch.Generator().manual_seed(0)).bfloat16()
    with torch.no_grad():
        logits, weights, _ = router(hidden)
        exact = hidden.float() @ router.weight.float().T
    assert weights.dtype == torch.bfloat16
    # Else the product would have been rounded before.
    assert torch.equal(logits.float(), exact.bfloat16().float())


def test_experts_of_another_model_are_refused():
    model = make(QWEN)
    routing = Routing(model.base_model.layers)
    with pytest.raises(ValueError, match="experts of 2 layers for a model of 3"):
        routing.follow(torch.zeros(TOKENS, 2, TOP_K, dtype=torch.int16))
    routing.follow(torch.zeros(TOKENS, LAYERS, 4, dtype=torch.int16))
    with pytest.raises(ValueError, match=r"experts \[12, 4\] for a router that chooses \[12, 2\]"):
        model(Ids)


def row(ids: list[int], told: int | None, number: int = 0) -> TrainRow:
    experts = None if told is None else np.full((len(ids), 1, 1), told, np.int16)
    return TrainRow(ids, [0, *[1] * (len(ids) - 1)], [-1.0] * len(ids), 1.0, 1.0, number, 0, experts=experts)


def test_tokens_that_rows_share_have_the_experts_of_the_first_that_knows():
    rows = [row([1, 2, 3], None), row([1, 2, 4, 5], 7, 1), row([1, 2, 4, 6], 8, 2)]
    rows[1].experts[1] = -1
    batch = collate([build_trie(rows), build_trie([row([9], 3, 3)])], torch.device("cpu"), multiple=4)
    assert batch.input_ids[0, :7].tolist() == [1, 2, 3, 4, 5, 6, 9] and batch.experts.dtype == torch.int16
    assert batch.experts[:, 0, 0].tolist() == [7, 8, -1, 7, 7, 8, 3, -1]
    assert collate([build_trie([row([1, 2], None)])], torch.device("cpu")).experts is None


def test_rows_that_lie_elsewhere_bring_their_experts_along():
    kept = Row([1, 2], [0, 1], [0.0, -1.0], [-1, 0], np.array([[[3]], [[-1]]], np.int16))
    remote = train_row(RowRef("source", 0, kept.stats), 1.0, 1.0, 0, 0)
    assert remote.fetched([kept]).experts is train_row(kept, 1.0, 1.0, 0, 0).experts is kept.experts


@pytest.fixture(scope="module")
def moe_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("moe")
    make(QWEN).save_pretrained(path)
    return path


@pytest.fixture
def rows(random_rows: Callable[..., list[TrainRow]]) -> list[TrainRow]:
    """Rows whose tokens all go to experts that no router would choose for all."""
    made = random_rows(2, 3)
    for one in made:
        one.experts = np.tile(np.array([3, 5], np.int16), (len(one.ids), LAYERS, 1))
    return made


@pytest.fixture
def actor(spec: Callable[..., ActorSpec], moe_path: Path) -> Iterator[Callable[..., LocalActor]]:
    actors = []

    def build(**overrides) -> LocalActor:
        actors.append(LocalActor(spec(moe_path, **overrides)))
        return actors[-1]

    yield build
    for one in actors:
        one.close()


def expected(path: Path, rows: list[TrainRow]) -> list[list[float]]:
    """By transformers alone, with routers that are made to choose experts 3 and 5."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    routing, found = Routing(model.base_model.layers), []
    for one in rows:
        routing.follow(torch.from_numpy(one.experts))
        logs = model(torch.tensor([one.ids])).logits[0].log_softmax(-1)
        found.append([logs[place - 1, one.ids[place]].item() for place in one.trained])
    return found


def test_old_and_reference_log_probs_are_those_of_the_replayed_experts(actor, moe_path, rows):
    one = actor(algorithm__kl__coefficient=0.1, algorithm__updates_per_batch=2, actor__micro_batch_tokens=40)
    right = expected(moe_path, rows)
    unrouted = one.score([replace(each, experts=None) for each in rows])
    assert max(abs(a - b) for x, y in zip(unrouted, right, strict=True) for a, b in zip(x, y, strict=True)) > 0.1
    one.train([rows[:3], rows[3:]])
    for each, values in zip(rows, right, strict=True):
        assert each.ref_logprobs == pytest.approx(values, abs=1e-4)
        assert each.old_logprobs == pytest.approx(values, abs=1e-4)


@pytest.mark.parametrize("again", ["none", "selective", "full"])
def test_rows_go_to_their_experts_and_train_no_others(actor, rows, again):
    one = actor(actor__weight_decay=0.0, actor__activation_checkpointing=again)
    before = {name: tensor.clone() for name, tensor in one.weights()}
    one.train([rows])
    for name, tensor in one.weights():
        if name.endswith("experts.down_proj"):
            moved = (tensor - before[name]).abs().sum((1, 2)).nonzero().flatten().tolist()
            assert moved == [3, 5], name
        elif name.endswith("mlp.gate.weight"):
            assert not torch.equal(tensor, before[name])


def test_a_frozen_router_stays_as_it_is_and_has_no_optimizer_state(actor, rows, tmp_path):
    one = actor(actor__frozen_router=True)
    before = {name: tensor.clone() for name, tensor in one.weights()}
    one.train([rows])
    changed = {name for name, tensor in one.weights() if not torch.equal(tensor, before[name])}
    assert before.keys() - changed == {f"model.layers.{layer}.mlp.gate.weight" for layer in (0, 2)}
    one.save(tmp_path / "state")
    from torch.distributed.checkpoint import FileSystemReader
    saved = FileSystemReader(tmp_path / "state").read_metadata().state_dict_metadata
    assert not [name for name in saved if name.startswith("optimizer") and "mlp.gate.weight" in name]
    assert [name for name in saved if name.startswith("optimizer") and "experts.down_proj" in name]


@pytest.mark.parametrize(("options", "words"), [
    ({"actor__frozen_router": True}, "actor.frozen_router: true for a model without routers"),
    ({"rollout__engine": "vllm", "rollout__routed_experts": True}, "rollout.routed_experts: true, but Qwen3For"),
])
def test_a_dense_model_has_no_routers(spec, options, words):
    with pytest.raises(ConfigError, match=words):
        LocalActor(spec(**options))




def test_a_router_that_cannot_replay_routes_as_ever() -> None:
    model = make(AfmoeConfig(**SMALL, head_dim=8, num_experts=EXPERTS, moe_intermediate_size=16, num_dense_layers=1,
                             sliding_window=64, layer_types=["full_attention"] * LAYERS))
    with torch.no_grad():
        expected = model(Ids).logits
        assert not Routing(model.model.layers).routers
        assert torch.equal(model(Ids).logits, expected)
