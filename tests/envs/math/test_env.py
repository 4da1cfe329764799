import json

import gymnasium
import pytest
from gymnasium.utils.env_checker import check_env

import molt_gym
from molt_gym.envs.math import MathEnv
from molt_gym.envs.math.dataset import gold_answer
from molt_gym.errors import ConfigError, EnvFailure

ROWS = [
    {"question": "How many?", "answer": "There are 3 * 6 = <<3*6=18>>18 of them.\n#### 1,018"},
    {"question": "Half?", "answer": r"First \boxed{2}, so that it is $\boxed{\frac{1}{2}}$."},
    {"question": "Alone?", "answer": r"\left( 3, \frac{\pi}{2} \right)"},
    {"question": "A number?", "answer": 2.5},
]
ANSWERS = ["1018", "0.5", r"(3, \pi/2)", r"\frac52"]


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(map(json.dumps, ROWS)))
    return str(path)


def says(text):
    return {"role": "assistant", "content": text}


def test_it_is_an_env_like_any_other():
    env = gymnasium.make("Math-v0")
    check_env(env.unwrapped, skip_render_check=True)
    assert any(info.id == "Math-v0" and info.summary for info in molt_gym.list_envs())


def test_one_turn_decides_if_nothing_else_is_said():
    env = molt_gym.make("Math-v0", families=["slope"])
    observation, _ = env.reset(options={"index": 4})
    system, user = observation["messages"]
    assert system["content"] == r"Put the answer in \boxed{}." and "slope" in user["content"]
    _, reward, terminated, truncated, info = env.step(says(r"\boxed{0}"))
    assert (reward, terminated, truncated, info["outcome"]) == (0.0, True, False, "wrong")


def test_with_more_turns_a_mistake_is_told_and_can_be_mended(path):
    env = MathEnv(turns=3, dataset=path, dataset_split="all", system=None)
    env.reset(options={"index": 0})
    observation, reward, terminated, _, _ = env.step(says("Hm."))
    assert (reward, terminated) == (0.0, False)
    assert observation["messages"][-1]["content"] == r"No answer. Put the answer in \boxed{}."
    observation, reward, terminated, _, _ = env.step(says(r"\boxed{17}"))
    assert (observation["messages"][-1]["content"], terminated) == ("Wrong, try again.", False)
    _, reward, terminated, _, info = env.step(says(r"\boxed{1018}"))
    assert (reward, terminated, info["outcome"]) == (1.0, True, "right")


def test_what_cannot_be_compared_in_time_earns_nothing(path):
    env = MathEnv(dataset=path, dataset_split="all", seconds=1)
    env.reset(options={"index": 0})
    _, reward, terminated, _, info = env.step(says(r"\boxed{5^{5^{5^{5^{5}}}}}"))
    assert (reward, terminated, info["outcome"]) == (0.0, True, "undecided")


@pytest.mark.parametrize("index", range(4))
def test_rows_of_each_form_are_played(path, index):
    env = MathEnv(dataset=path, dataset_split="all")
    assert env.num_tasks == 4
    for reply, expected in ((ANSWERS[index], 1.0), ("7", 0.0)):
        observation, _ = env.reset(options={"index": index})
        assert observation["messages"][-1]["content"] == ROWS[index]["question"]
        assert env.step(says(f"\\boxed{{{reply}}}"))[1] == expected


def test_columns_can_be_named(tmp_path):
    path = tmp_path / "math.jsonl"
    path.write_text(json.dumps({"problem": "p", "solution": r"\boxed{3}", "level": 1}))
    env = MathEnv(dataset=str(path), prompt_column="problem", answer_column="solution")
    env.reset(options={"index": 0})
    assert env.step(says(r"\boxed{3}"))[1] == 1.0
    with pytest.raises(ConfigError, match="answer_column: .* has no column 'answer'; choose from problem, solution"):
        MathEnv(dataset=str(path), prompt_column="problem")


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"question": "q", "answer": None}, "row 1: answer is None; write a solution with '#### ANSWER'"),
        ({"question": "q", "answer": "  "}, "row 1: answer is"),
        ({"question": "q", "answer": "so ####  "}, "row 1: answer is"),
        ({"question": "q", "answer": r"\boxed{5"}, "row 1: answer is"),
        ({"question": "q", "answer": "It is\nfive"}, "row 1: answer is"),
        ({"question": "q", "answer": True}, "row 1: answer is True"),
        ({"question": "q", "answer": float("nan")}, "row 1: answer is nan"),
        ({"question": 3, "answer": "3"}, "row 1: question is 3; write text"),
        ({"answer": "3"}, "row 1: question is None; write text"),
    ],
)
def test_a_bad_row_is_refused_by_index_and_column(tmp_path, row, message):
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(map(json.dumps, [ROWS[0], row])))
    env = MathEnv(dataset=str(path), dataset_split="all")
    with pytest.raises(EnvFailure, match=f"task: .*{message}"):
        env.reset(options={"index": 1})


@pytest.mark.parametrize(
    ("value", "answer"),
    [(18, "18"), (2.5, "2.5"), ("a #### b #### c ", "c"), (1e-5, "0.00001"), (float("inf"), None),
     (r"so \boxed{}", None), (r"so \boxed{1", None), ("", None)],
)
def test_the_answer_of_a_row(value, answer):
    assert gold_answer(value) == answer


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"turns": 0}, "turns: 0; write an integer from 1 on"),
        ({"rule": "last"}, "rule: 'last'; write one of 'any', 'boxed'"),
        ({"seconds": float("inf")}, "seconds: inf; write a positive number"),
        ({"split": "dev"}, "split: 'dev'"),
        ({"difficulty": 0}, "difficulty: 0"),
        ({"prompt_column": "q", "dataset_seed": 0}, "dataset_seed, prompt_column: this is for a dataset"),
        ({"dataset": "nowhere.jsonl"}, "there is no file 'nowhere.jsonl'"),
        ({"dataset": "x.jsonl", "families": ["slope"]}, "families: these are for generated"),
        ({"dataset": "x.jsonl", "split": "dev"}, "split: 'dev'"),
    ],
)
def test_options_that_make_no_sense_are_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        MathEnv(**options)


def test_an_unknown_option_is_refused():
    for source in ({"dataset": "x.jsonl"}, {}):
        with pytest.raises(TypeError, match="shown_tests"):
            MathEnv(shown_tests=1, **source)


def test_a_missing_math_verify_is_told(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install 'molt-gym\[math\]'"):
        MathEnv()


def test_a_dataset_has_no_demonstrations(path):
    with pytest.raises(ValueError, match="none for a dataset"):
        MathEnv(dataset=path).demonstrations(1)
