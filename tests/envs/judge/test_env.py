import json

import pytest

import molt_gym
from molt_gym.envs.judge import JudgeEnv
from molt_gym.envs.judge.tasks import FAMILIES, Generator
from molt_gym.errors import ConfigError, EnvFailure
from molt_gym.judge_prompts import read_scores, read_winner


def says(text):
    return {"role": "assistant", "content": text}


class Scripted:
    """A judge that remembers what it was asked."""

    def __init__(self, *verdicts):
        self.verdicts, self.asked = list(verdicts), []

    def __call__(self, observation):
        self.asked.append(observation["messages"])
        return self.verdicts.pop(0)


@pytest.fixture
def rows(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(map(json.dumps, [
        {"prompt": "Say hello.", "rubric": "Is it Dutch?", "reference": "Hallo."}, {"prompt": "Say bye."}])))
    return {"dataset": str(path), "dataset_split": "all"}


def played(reply="Hoi.", index=0, **options):
    env = JudgeEnv(**options)
    observation, _ = env.reset(options={"index": index})
    return (observation, *env.step(says(reply))[1:])


def test_the_reward_is_the_judges_score_and_info_has_its_reasons(rows):
    judge = Scripted('{"reasoning": "nearly", "score": 4}')
    observation, reward, terminated, _, info = played(judge=judge, calls={"scale": [0, 5]}, **rows)
    assert observation["messages"] == [{"role": "user", "content": "Say hello."}]
    assert (reward, terminated, info["verdict"]) == (0.8, True, "nearly")
    user = judge.asked[0][1]["content"]
    assert all(text in user for text in ("Is it Dutch?", "Say hello.", "Hallo.", "Hoi."))


def test_a_row_without_a_rubric_is_judged_by_that_of_the_env_and_criteria_are_parts(rows):
    judge = Scripted('{"scores": {"kind": 10, "short": 1}}')
    reward, *_, info = played(index=1, judge=judge, rubric={"kind": "Is it kind?", "short": "Is it short?"}, **rows)[1:]
    assert (reward, info["reward/kind"], info["reward/short"]) == (0.5, 1.0, 0.0)


def test_compared_with_the_reference_in_both_orders(rows):
    asked = []

    def judge(observation):
        asked.append(user := observation["messages"][1]["content"])
        return '{"winner": "A"}' if user.index("Hoi.") < user.index("Hallo.") else '{"winner": "B"}'

    assert played(judge=judge, mode="compare", **rows)[1] == 1.0
    assert sorted(user.index("Hoi.") < user.index("Hallo.") for user in asked) == [False, True]
    with pytest.raises(EnvFailure, match="task: task 1 has no reference"):
        played(index=1, judge=judge, mode="compare", **rows)


@pytest.mark.parametrize(("reply", "shown"), [("<think>Loud.</think>Hoi.", True), ("<think>Loud. Hoi.", False)])
def test_a_judge_is_not_shown_what_is_thought(rows, reply, shown):
    judge = Scripted('{"score": 4}')
    played(reply, judge=judge, **rows)
    user = judge.asked[0][1]["content"]
    assert "Loud." not in user and ("Hoi." in user) is shown


def test_a_judge_that_fails_is_no_reward(rows):
    with pytest.raises(EnvFailure, match="^judge: .*malformed"):
        played(judge=Scripted("?", "?"), **rows)


@pytest.mark.parametrize("family", FAMILIES)
def test_generated_tasks_have_a_good_reply_and_a_wrong_one_and_no_task_in_both_splits(family):
    train, test = ([Generator([family], 2, split).task(index) for index in range(50)] for split in ("train", "test"))
    assert all(task.rubric and task.reference != task.wrong for task in train + test)
    assert not {task.prompt for task in train} & {task.prompt for task in test}
    for task in train:
        if family == "ending":
            assert task.reference.rstrip(".").endswith(task.prompt.partition(": ")[2])


@pytest.mark.parametrize(("mode", "read"), [
    ("score", lambda text: read_scores(text, "r", (1, 10)).score), ("compare", lambda text: read_winner(text).score)])
def test_demonstrations_teach_writing_and_judging(mode, read):
    env = molt_gym.make("Judge-v0", mode=mode).unwrapped
    shown = env.demonstrations(60)
    assert shown == env.demonstrations(60)
    writing, judging = ([talk for talk in shown if (len(talk) == 3) == judges] for judges in (False, True))
    assert len(writing) == len(judging) == 30
    assert len({read(talk[2]["content"]) for talk in judging}) >= 2


@pytest.mark.parametrize(("options", "complaint"), [
    ({"mode": "rank"}, "mode: 'rank'"),
    ({"calls": {"dedline": 3}}, "calls.dedline: unknown; write repeats, scale, temperature"),
    ({"judge": "http://localhost/v1"}, "judge.model: None"),
    ({"rubric": ""}, "judge.rubric"),
    ({"families": ["odes"]}, "families: .*odes"),
])
def test_what_makes_no_sense_is_refused(options, complaint):
    with pytest.raises(ConfigError, match=complaint):
        JudgeEnv(**options)


def test_a_dataset_has_no_demonstrations(rows):
    with pytest.raises(ValueError, match="there are none for a dataset"):
        JudgeEnv(**rows).demonstrations(2)
