"""The tiny model that sees: made for an env whose demonstrations hold images, and taught by them to look."""

import random

import pytest
import torch
from PIL import Image
from transformers import AutoModelForImageTextToText, AutoTokenizer

import molt_gym
from molt_gym import image_part
from molt_gym.envs.geo3k import Geo3kEnv
from molt_gym.errors import ConfigError
from molt_gym.images import images_of
from molt_gym.tokens import Renderer, read_jsonl
from molt_gym.tokens.vision import Vision
from molt_gym.trainers.models import resolve_model, tiny
from molt_gym.trainers.models.tiny_tokenizer import encode_examples, train_tokenizer
from molt_gym.trainers.models.tiny_vision import build_seeing
from molt_gym.trainers.vision_inputs import pictures

COLOURS = ("red", "green", "blue", "black")


@pytest.fixture(autouse=True)
def at_hand(monkeypatch, tmp_path):
    monkeypatch.setenv("MOLT_GYM_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(tiny, "_SEEING_STEPS", 2)


def talks(count):
    """Conversations about the colour of the last of one picture or two."""
    rng = random.Random(0)
    found = []
    for _ in range(count):
        shown = [rng.choice(COLOURS) for _ in range(rng.choice((1, 2)))]
        parts = [image_part(Image.new("RGB", (16, 16 * len(shown)), colour)) for colour in shown]
        found.append([{"role": "system", "content": "Look."},
                      {"role": "user", "content": [*parts, {"type": "text", "text": "Which?"}]},
                      {"role": "assistant", "content": shown[-1]}])
    return found


def test_the_warm_start_teaches_it_to_tell_what_it_sees(tmp_path):
    conversations = talks(32 * 24)
    build_seeing(tmp_path, train_tokenizer(conversations), conversations, [], seed=0)
    model = AutoModelForImageTextToText.from_pretrained(tmp_path).eval()
    renderer = Renderer(AutoTokenizer.from_pretrained(tmp_path), vision=Vision.of(tmp_path))
    assert 5e5 < sum(p.numel() for p in model.parameters()) < 2e6 and model.config.model_type == "qwen3_vl"
    said = [renderer.decode([likeliest(model, renderer, conversation[:2])]) for conversation in conversations[:20]]
    assert sum(word == conversation[2]["content"]
               for word, conversation in zip(said, conversations, strict=False)) >= 18


@torch.no_grad()
def likeliest(model, renderer, messages):
    """The id that transformers itself finds likeliest after a prompt."""
    ids = renderer.render(messages)
    spans = renderer.image_spans(ids, messages)
    kinds = torch.zeros(1, len(ids), dtype=torch.long)
    for span in spans:
        kinds[0, span.start : span.start + span.count] = 1
    pixels, grids = pictures(spans, renderer.vision, torch.device("cpu"))
    logits = model(input_ids=torch.tensor([ids]), pixel_values=pixels, image_grid_thw=grids,
                   mm_token_type_ids=kinds).logits
    return logits[0, -1].argmax().item()


def test_its_template_writes_the_same_with_and_without_parts(tmp_path):
    tools = Geo3kEnv(python=True).tools
    conversations = Geo3kEnv(python=True).demonstrations(200)
    tokenizer = train_tokenizer(conversations, tools)
    text = [[message if message["role"] != "user" else {**message, "content": "Look?"} for message in conversation]
            for conversation in conversations[:9]]
    blind = Renderer(tokenizer)
    for conversation, example in zip(text, encode_examples(tokenizer, text, tools), strict=True):
        assert blind.render(conversation, tools, add_generation_prompt=False) == example.ids
    assert "<|image_pad|>" not in train_tokenizer(text, tools).get_vocab(), "where there is nothing to see"


def test_geo3k_is_trained_with_it_by_its_name_alone(tmp_path):
    options = {"rollout__groups_per_step": 2, "rollout__group_size": 2, "eval__before": False, "eval__after": False}
    result = molt_gym.train("Geo3k-v0", "tiny", out=tmp_path / "run", steps=1, env_kwargs={"python": True}, **options)
    (step,) = [line for line in result.metrics if "mismatch/abs_diff_mean" in line]
    assert step["mismatch/abs_diff_mean"] < 1e-4
    (file,) = (result.run_dir / "rollouts").glob("*.jsonl")
    played = read_jsonl(file)
    assert len(played) == 4 and all(len(trajectory.tools) == 1 for trajectory in played)
    for trajectory in played:
        assert [image.uri for image in trajectory.rows[0].images] == images_of(trajectory.messages)
    assert (result.run_dir / "model" / "preprocessor_config.json").is_file()


def test_an_env_that_has_no_demonstrations_as_it_is_set_up_is_refused(tmp_path):
    (tmp_path / "rows.jsonl").write_text('{"problem": "x", "answer": "3", "images": []}\n')
    kwargs = {"dataset": str(tmp_path / "rows.jsonl"), "dataset_split": "all"}
    with pytest.raises(ConfigError, match="model: 'tiny' .* Geo3k-v0 has none as it is set up here .*for a dataset"):
        resolve_model("tiny", env="Geo3k-v0", env_kwargs=kwargs, say=str)


def test_it_is_made_once_and_is_another_one_for_other_figures():
    first = resolve_model("tiny", env="Geo3k-v0", say=str).path
    assert resolve_model("tiny", env="Geo3k-v0", say=str).path == first
    assert resolve_model("tiny", env="Geo3k-v0", env_kwargs={"families": ["circle"]}, say=str).path != first
