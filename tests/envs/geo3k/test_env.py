import json
import re

import gymnasium
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env
from hypothesis import given, settings
from hypothesis import strategies as st

import molt_gym
from molt_gym import image_part
from molt_gym.envs.geo3k import Geo3kEnv
from molt_gym.envs.geo3k.figures import FAMILIES, FigureGenerator
from molt_gym.envs.math.problems import Problem
from molt_gym.errors import ConfigError, EnvFailure
from molt_gym.images import images_of, open_image
from molt_gym.messages import text_of

DOT = image_part(np.zeros((4, 4, 3), np.uint8))["image_url"]["url"]
BOX = image_part(np.full((4, 4, 3), 9, np.uint8))["image_url"]["url"]
ROWS = [
    {"problem": "<image>Find x.", "answer": "3", "images": [DOT]},
    {"problem": "Find x.", "answer": "4", "images": DOT},
    {"problem": "Is it <image> or <image>?", "answer": r"\frac{1}{2}", "images": [{"bytes": None, "path": DOT}, BOX]},
    {"problem": "<image> and <image>", "answer": "4", "images": [DOT]},
    {"problem": "<image>", "answer": "4", "images": ["nowhere.png"]},
]


@pytest.fixture
def rows(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(map(json.dumps, ROWS)))
    return Geo3kEnv(dataset=str(path), dataset_split="all", system=None)


def says(text):
    return {"role": "assistant", "content": text}


def kinds(observation):
    return [part["type"] for part in observation["messages"][-1]["content"]]


def test_it_is_an_env_like_any_other():
    check_env(gymnasium.make("Geo3k-v0").unwrapped, skip_render_check=True)
    assert any(info.id == "Geo3k-v0" and info.summary for info in molt_gym.list_envs())


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("difficulty", [1, 3])
def test_the_numbers_are_in_the_picture_and_the_right_answer_earns_1(family, difficulty):
    env = molt_gym.make("Geo3k-v0", families=[family], difficulty=difficulty)
    pictures = set()
    for index in range(6):
        observation, _ = env.reset(options={"index": index})
        problem = FigureGenerator([family], difficulty).task(index)
        assert kinds(observation) == ["image", "text"] or kinds(observation) == ["image_url", "text"]
        assert not re.search("[0-9]", observation["messages"][-1]["content"][1]["text"])
        (uri,) = images_of(observation["messages"])
        drawn = np.asarray(open_image(uri))
        assert np.array_equal(drawn, np.asarray(problem.images[0])) and (drawn < 100).sum() > 300
        pictures.add(uri)
        assert problem.answer != problem.wrong and int(problem.answer) > 0
        assert env.step(says(f"\\boxed{{{problem.answer}}}"))[1] == 1.0
    assert len(pictures) > 2


def test_no_figure_is_in_both_splits():
    train, test = ({FigureGenerator(None, 2, split).task(index).prompt for index in range(90)}
                   for split in ("train", "test"))
    assert len(train) > 60 and not train & test


def test_pictures_of_rows_stand_where_their_prompt_says(rows):
    expected = [["image_url", "text"], ["image_url", "text"], ["text", "image_url", "text", "image_url", "text"]]
    for index, parts in enumerate(expected):
        observation, _ = rows.reset(options={"index": index})
        assert kinds(observation) == parts
    assert images_of(observation["messages"]) == [DOT, BOX]
    assert rows.step(says("0.5"))[1] == 1.0
    with pytest.raises(EnvFailure, match="task: .*row 3: images: 1 images; write as many images as"):
        rows.reset(options={"index": 3})
    with pytest.raises(EnvFailure, match="task: .*row 4: images: .*nowhere.png cannot be read"):
        rows.reset(options={"index": 4})


def test_a_mistake_in_the_options_is_named(tmp_path):
    (tmp_path / "rows.jsonl").write_text(json.dumps({"problem": "x", "answer": "3", "picture": DOT}))
    path = str(tmp_path / "rows.jsonl")
    with pytest.raises(ConfigError, match="image_column: .* has no column 'images'; choose from problem, a"):
        Geo3kEnv(dataset=path, dataset_split="all")
    Geo3kEnv(dataset=path, dataset_split="all", image_column="picture")
    with pytest.raises(ConfigError, match="image_column: this is for a dataset"):
        Geo3kEnv(image_column="x")
    with pytest.raises(ConfigError, match="families: .*choose from right_triangle"):
        Geo3kEnv(families=["spheres"])
    with pytest.raises(ConfigError, match="calls: 0; write an integer from 1"):
        Geo3kEnv(python=True, calls=0)
    with pytest.raises(ConfigError, match="sandbox: 'chroot'; write one of"):
        Geo3kEnv(python=True, sandbox="chroot")


def test_the_easy_figures_are_widths_to_count_and_those_after_them_are_of_all_families():
    questions = {difficulty: {Geo3kEnv(difficulty=difficulty).task(index).question for index in range(40)}
                 for difficulty in (1, 2)}
    assert questions[1] == {"How many squares wide is the rectangle?"}
    assert len(questions[2]) > len(FAMILIES) and not questions[1] & questions[2]


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**31), st.sampled_from([*FAMILIES]), st.integers(1, 4))
def test_the_usual_mistake_is_never_right(index, family, difficulty):
    figure = FigureGenerator([family], difficulty).task(index)
    assert figure.wrong != figure.answer


def test_a_rectangle_has_as_many_squares_as_its_problem_says():
    for index in range(20):
        figure = FigureGenerator(["grid"]).task(index)
        (image,), (width, height) = figure.images, map(int, re.findall("[0-9]+", figure.prompt))
        inside = np.asarray(image)[16::32, 16::32].min(axis=2) < 10
        assert (inside.any(axis=0).sum(), inside.any(axis=1).sum(), inside.sum()) == (width, height, width * height)
        assert int(figure.answer) == width


def test_demonstrations_show_the_picture_and_are_right_in_a_third_of_cases():
    env = Geo3kEnv()
    shown = env.demonstrations(400, seed=1)
    assert shown[:20] == env.demonstrations(20, seed=1)
    assert all(len(images_of(conversation)) == 1 and len(conversation) == 3 for conversation in shown)
    right = sum(env.grade(figure, text_of(conversation[-1])) == "right"
                for conversation, figure in zip(shown, figures_of(shown), strict=True))
    assert 80 < right < 160


def figures_of(conversations):
    """The problems that were demonstrated, as their pictures tell."""
    drawn = [np.asarray(open_image(images_of(conversation)[0])) for conversation in conversations]
    widths = [(picture[16::32, 16::32].min(axis=2) < 10).any(axis=0).sum() for picture in drawn]
    return [Problem("", str(width), strict=True) for width in widths]
