"""From pictures that an env shows to new weights, and from recorded pictures to weights again."""

from collections import Counter

import pytest
import torch
from transformers import AutoModelForImageTextToText

import molt_gym
from molt_gym.images import images_of
from molt_gym.tokens import read_jsonl
from molt_gym.tokens.vision import Vision
from molt_gym.trainers.config import load_config, load_settings
from molt_gym.trainers.session import load_renderer
from molt_gym.trainers.sft_config import SftConfig
from molt_gym.trainers.sft_data import load_examples

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def path(vision_path):
    return vision_path("qwen3_vl")


@pytest.fixture(scope="module")
def played(train, path):
    return train(env="toy_envs:Colours-v0", model=path, steps=2, actor__freeze_vision=False)


def weights(folder):
    return AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).state_dict()


def test_a_run_in_an_env_of_pictures_learns_from_them(played, path):
    steps = [line for line in played.metrics if "mismatch/abs_diff_mean" in line]
    assert len(steps) == 2
    for step in steps:
        assert step["mismatch/abs_diff_mean"] < 1e-4 and step["optim/grad_norm"] > 0 and step["rollout/turns_mean"] == 2
    before, after = weights(path), weights(played.run_dir / "model")
    for part in ("visual.blocks.0", "visual.merger", "deepstack_merger_list", "language_model.layers.2"):
        assert any(part in name and not torch.equal(before[name], after[name]) for name in before), part
    exported = Vision.of(played.run_dir / "model")
    assert exported is not None and exported.merge == 2


def test_pictures_of_a_run_are_recorded_once_and_can_be_read_back(played):
    folder = played.run_dir / "rollouts"
    assert len(list((folder / "images").iterdir())) <= 3
    files = sorted(folder.glob("*.jsonl"))
    assert len(files) == 2 and "base64" not in files[0].read_text()
    for trajectory in read_jsonl(files[0]):
        (row,) = trajectory.rows
        assert [image.uri for image in row.images] == images_of(trajectory.messages) and len(row.images) == 2


def test_recorded_pictures_and_chats_with_pictures_can_be_learnt_from(played, path, picture, tmp_path):
    rows = [{"messages": [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "?"}]},
                          {"role": "assistant", "content": colour}],
             "images": [picture(colour)["image_url"]]} for colour in ("red", "blue")]
    learnt = molt_gym.sft([played.run_dir, rows[0], *rows[1:]], path, out=tmp_path / "sft", steps=2, batch_size=4,
                          max_context=200, actor__dtype="float32", actor__lr=1e-2)
    before, after = weights(path), weights(learnt.run_dir / "model")
    assert all(torch.equal(before[name], after[name]) for name in before if "visual" in name), "it is frozen by default"
    assert any(not torch.equal(before[name], after[name]) for name in before)


def test_a_row_that_is_cut_never_ends_within_an_image(path, picture):
    renderer = load_renderer(path, load_config("Any-v0"))
    shown = {"role": "user", "content": [picture("red", 64, 64)]}
    rows = [{"messages": [{"role": "user", "content": "say a"}, {"role": "assistant", "content": "a"}, shown,
                          {"role": "assistant", "content": "b"}]}]
    whole = load_examples(rows, load_settings(SftConfig, {}), renderer, 200, Counter())[0].rows[0]
    (image,) = whole.images
    cut = load_settings(SftConfig, {}, overrides={"too_long": "cut"})
    for limit in range(image.start - 1, image.start + image.count + 2):
        (row,) = load_examples(rows, cut, renderer, limit, Counter())[0].rows
        inside = limit < image.start + image.count
        assert len(row.ids) == (min(limit, image.start) if inside else limit) and len(row.images) == (not inside)
