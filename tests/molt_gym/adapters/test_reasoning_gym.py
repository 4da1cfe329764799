"""Envs of reasoning-gym, on the package itself."""

import random
import subprocess
import sys

import pytest

import molt_gym
from molt_gym.adapters import suites

pytest.importorskip("reasoning_gym")

def say(text):
    return {"role": "assistant", "content": text}


@pytest.fixture
def truth():
    from reasoning_gym.factory import create_dataset

    return lambda name, index, seed=0: create_dataset(name, seed=seed, size=10**6)[index]["answer"]


def test_the_right_answer_scores_and_others_do_not(truth):
    env = molt_gym.make("reasoning_gym/chain_sum-v0")
    for index in (0, 1, 999_999):
        env.reset(seed=0, options={"index": index})
        answer = truth("chain_sum", index)
        assert env.step(say(f"Well, <answer>0.5</answer>? No: <answer>{answer}</answer>"))[1:3] == (1.0, True)
        env.reset(seed=0, options={"index": index})
        _, reward, over, _, info = env.step(say(answer))
        assert (reward, over, info["outcome"]) == (0.0, True, "no_answer")


def test_splits_share_no_task_and_are_the_same_each_time(truth):
    train, test = (molt_gym.make("reasoning_gym/chain_sum-v0", split=split) for split in ("train", "test"))
    question = train.reset(options={"index": 5})[0]["messages"][-1]["content"]
    assert question == train.reset(options={"index": 5})[0]["messages"][-1]["content"]
    assert question != test.reset(options={"index": 5})[0]["messages"][-1]["content"]
    assert test.step(say(f"<answer>{truth('chain_sum', 5, 10**9)}</answer>"))[1] == 1.0


def test_splits_share_no_task_whatever_the_seed(truth):
    train, test = (molt_gym.make("reasoning_gym/chain_sum-v0", split=split, seed=7) for split in ("train", "test"))
    for env, seed in ((train, 7), (test, 7 + 10**9)):
        env.reset(options={"index": 5})
        assert env.step(say(f"<answer>{truth('chain_sum', 5, seed)}</answer>"))[1] == 1.0


def test_settings_go_to_the_data_set_and_bad_ones_are_named():
    env = molt_gym.make("reasoning_gym/chain_sum-v0", min_terms=4, max_terms=4)
    assert env.reset(options={"index": 0})[0]["messages"][-1]["content"].count(" + ") <= 3
    for given, words in [({"min_terms": 0}, "min_terms"), ({"colour": 1}, "colour"), ({"split": "dev"}, "split"),
                         ({"seed": None}, "seed: None; write an integer")]:
        with pytest.raises(molt_gym.ConfigError, match=words):
            molt_gym.make("reasoning_gym/chain_sum-v0", **given)


@pytest.mark.parametrize(("name", "tasks"), [("acre", 2_000), ("word_ladder", 20_000)])
def test_data_sets_that_cannot_be_large_are_smaller(name, tasks):
    env = molt_gym.make(f"reasoning_gym/{name}-v0")
    assert env.unwrapped.num_tasks == tasks
    env.reset(options={"index": tasks - 1})
    assert env.step(say("<answer>on</answer>"))[4]["outcome"] == "scored"


def test_a_verifier_that_raises_or_hangs_earns_nothing():
    env = molt_gym.make("reasoning_gym/prime_factorization-v0", seconds=5)
    env.reset(options={"index": 0})
    assert env.step(say("<answer>x</answer>"))[4]["outcome"] == "undecided"
    env.reset(options={"index": 0})
    assert env.step(say(f"<answer>{'9' * 20_000}</answer>"))[4]["outcome"] == "no_answer"


def test_no_global_generator_is_touched():
    script = ("import random; random.seed(1); state = random.getstate(); import molt_gym\n"
              "env = molt_gym.make('reasoning_gym/arc_1d-v0'); env.reset(seed=0)\n"
              "env.step({'role': 'assistant', 'content': '<answer>1</answer>'})\n"
              "print(random.getstate() == state)")
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "True", done.stderr


def test_an_id_is_there_without_a_listing_first():
    script = "import molt_gym; print(molt_gym.registry.find_spec('reasoning_gym/chain_sum-v0').kwargs)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "{'dataset': 'chain_sum'}", done.stderr


def test_all_data_sets_are_listed_under_their_package():
    listed = molt_gym.list_envs("reasoning_gym")
    assert len(listed) > 90 and {info.source for info in listed} == {"reasoning_gym"}
    assert "reasoning_gym/composite-v0" not in {info.id for info in listed}


def test_a_suite_that_is_not_installed_says_how_to_install_it(monkeypatch):
    monkeypatch.setitem(suites.SUITES, "moon_gym", suites.Suite("moon_gym", "moon_gym", "moon", "no.module", ""))
    with pytest.raises(molt_gym.UnknownEnv, match=r"moon_gym is not installed: pip install 'molt-gym\[moon\]'"):
        molt_gym.make("moon_gym/Crater-v0")


def test_a_suite_that_is_broken_hurts_no_other(monkeypatch):
    monkeypatch.setitem(suites.SUITES, "bad", suites.Suite("bad", "json", "bad", "no.such.module", ""))
    monkeypatch.setattr(suites, "_problems", {})
    with pytest.warns(UserWarning, match="the envs of json are left out: ModuleNotFoundError"):
        assert molt_gym.list_envs("bad") == []
    assert "CodeExec-v0" in {info.id for info in molt_gym.list_envs()}
    with pytest.raises(molt_gym.UnknownEnv, match="could not be registered: ModuleNotFoundError"):
        molt_gym.make("bad/Thing-v0")


@pytest.mark.slow
def test_the_suites_own_answers_score_as_the_suite_scores_them():
    from reasoning_gym.factory import DATASETS, create_dataset

    generator = random.Random(0)
    for name in generator.sample(sorted(set(DATASETS) - {"composite"}), 20):
        env = molt_gym.make(f"reasoning_gym/{name}-v0", max_episode_steps=1)
        for index in range(3):
            env.reset(seed=0, options={"index": index})
            data = create_dataset(name, seed=0, size=10**6)
            entry = data[index]
            expected = data.score_answer(str(entry["answer"]), entry)
            assert env.step(say(f"<answer>{entry['answer']}</answer>"))[1] == pytest.approx(expected), name
        env.close()
