"""Games and data sets of GEM, on the package itself."""

import json
import logging
import random
import subprocess
import sys

import numpy as np
import pytest

import molt_gym
from molt_gym.adapters.global_random import GlobalRandom
from molt_gym.conformance import check

pytest.importorskip("gem")

PLAYED = ["gem/GuessTheNumber-easy-v0", "gem/TowerofHanoi-easy-v0"]
QUESTIONS = [{"problem": f"What is {number} + {number}?", "question": f"Double {number}?", "answer": str(2 * number)}
             for number in range(60)]


def say(text):
    return {"role": "assistant", "content": text}


def last(observation):
    return observation["messages"][-1]["content"]


@pytest.fixture(scope="module")
def questions(tmp_path_factory):
    folder = tmp_path_factory.mktemp("questions")
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in QUESTIONS))
    return str(folder)


def test_a_binary_search_earns_what_the_game_itself_pays_it_in_fifty_episodes():
    import gem

    env, theirs = molt_gym.make("gem/GuessTheNumber-hard-v0"), gem.make("game:GuessTheNumber-v0-hard")
    for index in range(50):
        env.reset(options={"index": index})
        lent = GlobalRandom()
        lent.seed(index)
        with lent:
            theirs.reset(seed=index)
        low, high, over, total, paid = 1, 50, False, 0.0, 0.0
        while not over:
            guess = (low + high) // 2
            observation, reward, over, _, info = env.step(say(rf"I guess \boxed{{{guess}}}."))
            said, pay, terminated, truncated, _ = theirs.step(rf"\boxed{{{guess}}}")
            assert over == (terminated or truncated) and (over or said in last(observation))
            low, high = (low, guess - 1) if "lower" in said else (guess + 1, high)
            total, paid = total + reward, paid + pay
        assert (total, info) == (paid, {"outcome": "scored", "task_index": index}) and total == 1.0


def test_the_observation_has_what_the_game_says_at_its_end():
    env = molt_gym.make("gem/GuessTheNumber-easy-v0")
    opening, _ = env.reset(options={"index": 0})
    assert "between 1 and 10 (inclusive) within 4 turns" in last(opening)
    assert last(opening).endswith("Enter your next guess.")


def test_what_cannot_be_read_costs_what_the_suite_says():
    env = molt_gym.make("gem/GuessTheNumber-easy-v0")
    env.reset(options={"index": 0})
    assert env.step(say("five"))[1:4] == (-0.1, True, False)


def test_a_reply_that_a_game_breaks_at_costs_the_same(monkeypatch):
    from gem.envs.game_env.guess_the_number import GuessTheNumberEnv

    monkeypatch.setattr(GuessTheNumberEnv, "step", lambda self, action: {}["bug"])
    env = molt_gym.make("gem/GuessTheNumber-easy-v0")
    env.reset(options={"index": 0})
    _, reward, over, _, info = env.step(say("5"))
    assert (reward, over, info["outcome"]) == (-0.1, True, "broken")


@pytest.mark.parametrize(("env_id", "form"), [("gem/math-GSM8K-v0", r"\boxed{{{}}}"),
                                              ("gem/qa-HotpotQA-v0", "<answer>{}</answer>"),
                                              ("gem/logic-RuleTaker-d0-v0", r"\boxed{{{}}}")])
def test_questions_of_a_local_data_set_are_tasks_by_their_number_and_scored_by_the_suite(questions, env_id, form):
    key = "problem" if "math" in env_id else "question"
    env = molt_gym.make(env_id, dataset_name=questions, question_key=key)
    assert env.unwrapped.num_tasks == 60
    asked, answers = [], {row[key]: row["answer"] for row in QUESTIONS}
    for index in range(10):
        opening, _ = env.reset(options={"index": index})
        asked.append(next(question for question in answers if question in last(opening)))
        right = index % 5 != 0
        answer = answers[asked[-1]] if right else "7001"
        assert env.step(say(f"So it is {form.format(answer)}."))[1:3] == (float(right), True), asked[-1]
    assert len(set(asked)) == 10
    assert asked[3] in last(env.reset(options={"index": 3})[0])


def test_no_answer_earns_nothing_and_a_verdict_that_hangs_ends(questions, monkeypatch):
    from gem.envs.qa_env import QaEnv

    env = molt_gym.make("gem/qa-HotpotQA-v0", dataset_name=questions, seconds=2)
    env.reset(options={"index": 0})
    assert env.step(say("no idea"))[1:3] == (0.0, True)
    monkeypatch.setattr(QaEnv, "check_correct", lambda *_: __import__("time").sleep(60))
    env.reset(options={"index": 0})
    _, reward, over, _, info = env.step(say("<answer>7</answer>"))
    assert (reward, over, info["outcome"]) == (0.0, True, "undecided")


def test_a_data_set_that_is_not_there_is_said_with_its_name(tmp_path):
    with pytest.raises(molt_gym.ConfigError, match="'math:GSM8K' cannot be made with .*nothing"):
        molt_gym.make("gem/math-GSM8K-v0", dataset_name=str(tmp_path / "nothing"))


def test_a_setting_that_a_game_would_not_heed_is_refused():
    with pytest.raises(molt_gym.ConfigError, match="takes no nope; write one of .*max_turns"):
        molt_gym.make("gem/GuessTheNumber-easy-v0", nope=3)
    molt_gym.make("gem/GuessTheNumber-easy-v0", max_turns=3).close()


def test_word_games_say_what_to_download(monkeypatch, tmp_path):
    import nltk

    monkeypatch.setattr(nltk.data, "path", [str(tmp_path)])
    monkeypatch.setattr(nltk, "download", lambda *args, **kwargs: False)
    with pytest.raises(molt_gym.ConfigError, match=r"python -m nltk\.downloader words"):
        molt_gym.make("gem/Wordle-easy-v0")


@pytest.mark.parametrize("env_id", PLAYED)
def test_it_conforms(env_id):
    assert [found for found in check(env_id) if found.problem] == []


def test_neither_generators_nor_logging_of_the_caller_change():
    random.seed(3)
    np.random.seed(3)
    before = random.getstate(), np.random.get_state()[1].tolist()
    env = molt_gym.make("gem/Sudoku-easy-v0")
    env.reset(options={"index": 4})
    env.step(say(r"\boxed{1 1 1}"))
    assert (random.getstate(), np.random.get_state()[1].tolist()) == before
    script = ("import logging, random; before = random.getstate(); import molt_gym\n"
              "ids = {info.id for info in molt_gym.list_envs('gem')}\n"
              "print(len(ids) > 50, any('rg' in i or 'code' in i.lower() for i in ids), logging.root.handlers,\n"
              "      logging.root.level, random.getstate() == before)")
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == f"True False [] {logging.WARNING} True", done.stderr
