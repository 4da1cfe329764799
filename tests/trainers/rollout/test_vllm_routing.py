"""Which experts vLLM on CPUs says that it used, against what transformers' routers choose."""

import asyncio
import functools
import tempfile
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer, Qwen3MoeConfig, Qwen3MoeForCausalLM

from molt_gym.errors import RunFailed
from molt_gym.tokens import Sampling
from molt_gym.trainers.rollout import vllm_engine
from molt_gym.trainers.rollout.engine import Request
from molt_gym.trainers.rollout.vllm_engine import VllmEngine
from molt_gym.trainers.rollout.vllm_routing import RoutingRecorder
from molt_gym.trainers.rollout.vllm_spec import HostSpec
from molt_gym.trainers.rollout.vllm_transfer import buckets

vllm = pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed")
PROMPTS = [[5, 7, 9], [1, 40, 300, 17, 200], [11], list(range(20, 60))]
LAYERS, DENSE, TOP_K = 3, 1, 2


@pytest.fixture
def model(tiny_path: Path, tmp_path: Path) -> Qwen3MoeForCausalLM:
    """Experts in the first and the last of three layers; its own recommendations are of the worst kind."""
    tokenizer = AutoTokenizer.from_pretrained(tiny_path)
    config = Qwen3MoeConfig(
        vocab_size=len(tokenizer), hidden_size=64, intermediate_size=96, num_hidden_layers=LAYERS,
        num_attention_heads=2, num_key_value_heads=1, head_dim=32, max_position_embeddings=1024, initializer_range=0.3,
        moe_intermediate_size=64, num_experts=8, num_experts_per_tok=TOP_K, mlp_only_layers=[DENSE],
        tie_word_embeddings=False, eos_token_id=2, pad_token_id=0, bos_token_id=None, attn_implementation="eager")
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = Qwen3MoeForCausalLM(config).float().eval()
    model.generation_config.update(do_sample=True, temperature=0.1, top_k=1, top_p=0.5, repetition_penalty=3.0,
                                   eos_token_id=list(range(2, 200)))
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    return model


@torch.no_grad()
def routed(model: Qwen3MoeForCausalLM, ids: list[int]) -> np.ndarray:
    """[positions, layers, top_k] experts, in ascending order, which the routers of transformers choose."""
    logits = model(torch.tensor([ids]), output_router_logits=True).router_logits
    rows = np.full((len(ids), LAYERS, TOP_K), -1)
    for layer, scores in zip([layer for layer in range(LAYERS) if layer != DENSE], logits, strict=True):
        rows[:, layer] = scores.topk(TOP_K).indices.sort().values
    return rows


def check(reply, prompt: list[int], expected: np.ndarray, cached: int = 0) -> None:
    rows = reply.routed_experts
    assert rows.dtype == np.int16 and rows.shape == (len(prompt) + len(reply.ids) - 1, LAYERS, TOP_K)
    assert (rows[:cached] == -1).all()
    assert np.array_equal(np.sort(rows, -1)[cached:], expected[cached : len(rows)])


@vllm
@pytest.mark.slow
async def test_replies_tell_the_experts_of_each_position_also_across_updates_by_small_files_in_flight(
        model, tmp_path, renderer, play, expected, monkeypatch):
    # Versions are known from the boundaries, as with a vLLM that does not tell them.
    monkeypatch.setattr(vllm_engine, "HostSpec", functools.partial(HostSpec, spans=False))
    monkeypatch.setattr(vllm_engine, "buckets", functools.partial(buckets, limit=10_000))
    engine = VllmEngine(tmp_path, renderer, dtype=torch.float32, max_context=256, max_sequences=3, backend="file",
                        routed_experts=True)
    files = tmp_path / "files"
    files.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(files))
    try:
        await engine.pause()
        await engine.resume()
        for prompt, reply in zip(PROMPTS, await play(engine, PROMPTS, max_tokens=30), strict=True):
            check(reply, prompt, routed(model, prompt + reply.ids))
            assert reply.logprobs == pytest.approx(expected(model, prompt, reply.ids), abs=1e-4)
            # Else the end of a reply in the model's own recommendations would have been heeded.
            assert len(reply.ids) == 30 or reply.ids[-1] == 2

        for cached in (0, 128):
            reply, = await play(engine, [list(range(3, 153))], max_tokens=4)
            check(reply, list(range(3, 153)), routed(model, [*range(3, 153), *reply.ids]), cached)

        straddling = 0
        # A machine that is busy may answer all of them before the pause, or none.
        while not straddling and engine.version < 8:
            gone = engine.submit([Request([5], Sampling(max_tokens=250))])
            flying = engine.submit([Request(prompt, Sampling(max_tokens=200, seed=1)) for prompt in PROMPTS])
            await asyncio.sleep(0.15 * (1 + engine.version))
            gone[0].cancel()
            await engine.pause()
            state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
            move(model)
            await engine.update_weights(model.named_parameters(), engine.version + 1)
            folder, = files.iterdir()
            assert not list(folder.iterdir())
            await engine.resume()
            replies = await asyncio.wait_for(asyncio.gather(*flying), 180)
            new = [routed(model, prompt + reply.ids) for prompt, reply in zip(PROMPTS, replies, strict=True)]
            after = [expected(model, prompt, reply.ids) for prompt, reply in zip(PROMPTS, replies, strict=True)]
            moved = {name: tensor.clone() for name, tensor in model.state_dict().items()}
            model.load_state_dict(state)
            for rows, logprobs, prompt, reply in zip(new, after, PROMPTS, replies, strict=True):
                count = reply.versions.count(engine.version - 1)
                assert reply.versions == [engine.version - 1] * count + [engine.version] * (len(reply.ids) - count)
                straddling += 0 < count < len(reply.ids)
                if count:
                    rows[: len(prompt) - 1 + count] = routed(model, prompt + reply.ids)[: len(prompt) - 1 + count]
                check(reply, prompt, rows)
                assert reply.logprobs[count:] == pytest.approx(logprobs[count:], abs=1e-4)
            model.load_state_dict(moved)
        assert straddling

        flying = engine.submit([Request([5], Sampling(max_tokens=250, temperature=0))])
        await engine.pause()
        flying = [future for future in flying if not future.done()]
        with pytest.raises(RunFailed, match="parameters were not sent, such as lm_head.weight"):
            await engine.update_weights(list(model.named_parameters())[:-1], engine.version + 1)
        await engine.resume()
        for future in (*flying, *engine.submit([Request([5], Sampling())])):
            with pytest.raises(RunFailed, match="weights were not updated"):
                await asyncio.wait_for(future, 30)
        assert engine.ended is not None and engine._host.log.exists()
    finally:
        await asyncio.wait_for(engine.close(), 30)
    assert not list(files.iterdir())


@torch.no_grad()
def move(model: torch.nn.Module) -> None:
    """Other weights."""
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        parameter += 0.05 * torch.randn(parameter.shape, generator=generator)


class Runner:
    """As much of vLLM's as the recorder looks at: one layer with one expert a position, told by `chosen`."""

    def __init__(self) -> None:
        self.model = torch.nn.Module()
        self.model.layer_id = 0
        self.model.router = SimpleNamespace(set_capture_fn=lambda capture: setattr(self, "capture", capture))
        self.model_config = SimpleNamespace(hf_text_config=SimpleNamespace(num_hidden_layers=1))
        self.chosen: list[int] = []

    def execute_model(self, scheduled) -> str:
        self.capture(torch.tensor(self.chosen)[:, None])
        return "output"

    def step(self, start: int, chosen: list[int], new: int = 0) -> None:
        """Compute positions from `start` on of request "a"; `new` is the length of the prompt of one that starts."""
        self.chosen = chosen
        self.input_batch = SimpleNamespace(req_ids=["a-1"], num_computed_tokens_cpu=[start])
        requests = [SimpleNamespace(req_id="a-1", prompt_token_ids=[0] * new)] if new else []
        assert self.execute_model(SimpleNamespace(
            scheduled_new_reqs=requests, num_scheduled_tokens={"a-1": len(chosen)},
            total_num_scheduled_tokens=len(chosen))) == "output"


def rows(recorder: RoutingRecorder) -> list[int]:
    data, shape = recorder.take("a")
    return np.frombuffer(data, np.int16).reshape(shape)[:, 0, 0].tolist()


def test_what_is_computed_again_changes_no_row_but_that_of_an_id_that_is_drawn_again():
    recorder = RoutingRecorder(runner := Runner())
    runner.step(0, [1, 2, 3], new=3)
    runner.step(3, [4])
    runner.step(0, [9, 9, 9, 9, 5])
    assert rows(recorder) == [1, 2, 3, 4, 5]
    runner.step(5, [6])
    assert recorder.take("a") is None

    runner.step(0, [1, 2, 3], new=3)
    runner.step(3, [4])
    runner.step(0, [9, 9, 9, 8])
    assert rows(recorder) == [1, 2, 3, 8]


def test_a_prompt_in_parts_that_is_begun_again_has_the_rows_of_the_computation_that_drew_from_it():
    recorder = RoutingRecorder(runner := Runner())
    runner.step(0, [1, 2], new=4)
    runner.step(2, [3, 4])
    assert rows(recorder) == [1, 2, 3, 4]
    runner.step(0, [1, 2], new=4)
    runner.step(0, [5, 6, 7, 8])
    assert rows(recorder) == [5, 6, 7, 8]


def test_positions_whose_prefix_was_cached_have_no_experts():
    recorder = RoutingRecorder(runner := Runner())
    runner.step(2, [3, 4], new=4)
    runner.step(4, [5])
    assert rows(recorder) == [-1, -1, 3, 4, 5]
