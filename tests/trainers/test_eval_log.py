import json

import pytest

from molt_gym import ConfigError
from molt_gym.trainers.eval_log import EvalLog, eval_folder
from molt_gym.trainers.scores import TaskScore

SETTINGS = {"seed": 1, "rollout": {"max_tokens": 8, "template_kwargs": {}}, "model": "a"}


def score(position, failures=None):
    return TaskScore(position, 10 + position, [1.0], [True], [3], [False], failures or {})


def test_what_was_added_is_there_again_but_for_tasks_with_failures(tmp_path):
    with eval_folder(tmp_path / "out") as folder:
        log = EvalLog(folder, "toys:A-v0", SETTINGS)
        for entry in (score(1), score(0), score(2, {"judge": 1})):
            log.add(entry)
        assert [json.loads(line)["index"] for line in log.path.read_text().splitlines()] == [11, 10, 12]
    with eval_folder(tmp_path / "out") as folder:
        assert EvalLog(folder, "toys:A-v0", SETTINGS).tasks == {0: score(0), 1: score(1)}
        assert EvalLog(folder, "B-v0", SETTINGS).tasks == {}


def test_a_line_that_a_crash_cut_is_a_task_to_play_again(tmp_path):
    with eval_folder(tmp_path) as folder:
        log = EvalLog(folder, "A-v0", SETTINGS)
        log.add(score(0))
        with log.path.open("a") as stream:
            stream.write('{"position": 1, "ind')
        again = EvalLog(folder, "A-v0", SETTINGS)
        assert again.tasks == {0: score(0)}
        again.add(score(1))
        assert EvalLog(folder, "A-v0", SETTINGS).tasks == {0: score(0), 1: score(1)}


def test_settings_that_differ_are_named(tmp_path):
    with eval_folder(tmp_path) as folder:
        EvalLog(folder, "A-v0", SETTINGS)
        with pytest.raises(ConfigError, match=r"rollout.max_tokens: 9, but .* has 8\nwrite the same") as error:
            EvalLog(folder, "A-v0", SETTINGS | {"rollout": SETTINGS["rollout"] | {"max_tokens": 9}})
        assert "seed" not in str(error.value)
        with pytest.raises(ConfigError, match="endpoint: 'x', but .* has None\nmodel: None, but .* has 'a'"):
            EvalLog(folder, "A-v0", {"endpoint": "x"} | {key: SETTINGS[key] for key in ("seed", "rollout")})


def test_a_folder_may_be_in_the_home_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    with eval_folder("~/out") as folder:
        assert folder == tmp_path / "out"


def test_a_folder_that_cannot_be_made_is_refused(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="out: cannot make"), eval_folder(tmp_path / "file" / "out"):
        pass
