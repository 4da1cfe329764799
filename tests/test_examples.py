"""The examples run as a newcomer would run them."""

import io
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import molt_gym
from molt_gym import cli
from molt_gym.trainers.config import load_config
from molt_gym.trainers.models import resolve_model

pytestmark = pytest.mark.timeout(1800)

EXAMPLES = Path(__file__).parents[1] / "examples"


def run_example(name: str, folder: Path) -> str:
    done = subprocess.run([sys.executable, EXAMPLES / name], cwd=folder, env=os.environ | {"NO_COLOR": "1"},
                          capture_output=True, text=True, timeout=1500, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_a_function_plays_and_solves_the_additions(tmp_path):
    output = run_example("play_with_a_function.py", tmp_path)
    lines = [line for line in output.splitlines() if line.startswith("reward")]
    assert len(lines) == 8
    assert all(line.startswith("reward 1 after 1 turns") for line in lines if " plus " in line)


@pytest.mark.slow
def test_a_new_env_in_one_file_is_learnt_by_the_tiny_model(tmp_path):
    output = run_example("my_env.py", tmp_path)
    before, after = next(line for line in output.splitlines() if "pass_at_1" in line).split()[-3::2]
    assert float(after) >= max(0.85, float(before) + 0.2)
    assert next(tmp_path.glob("runs/*/curve.png")).stat().st_size


def test_an_env_takes_its_tasks_from_a_file_of_which_its_users_choose_rows(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(EXAMPLES)
    env = molt_gym.make("own_tasks:Capitals-v0", difficulty={"min": 3}, dataset_split="all", dataset_seed=0)
    assert env.unwrapped.num_tasks == 4
    observation, _ = env.reset(options={"index": 0})
    country = observation["messages"][-1]["content"].removeprefix("What is the capital of ").partition("?")[0]
    capital = {"Kazakhstan": "Astana", "Myanmar": "Naypyidaw", "Bhutan": "Thimphu", "Suriname": "Paramaribo"}[country]
    assert env.step({"role": "assistant", "content": capital.upper()})[1:3] == (1.0, True)
    (tmp_path / "mine.jsonl").write_text('{"land": "Chile", "town": "Santiago"}')
    mine = {"dataset": str(tmp_path / "mine.jsonl"), "country_column": "land", "capital_column": "town"}
    observation, _ = molt_gym.make("own_tasks:Capitals-v0", **mine).reset()
    assert "Chile" in observation["messages"][-1]["content"]


def test_its_rows_are_chosen_on_the_command_line_too(monkeypatch, capsys):
    monkeypatch.syspath_prepend(EXAMPLES)
    monkeypatch.setattr("sys.stdin", io.StringIO("Thimphu\n.\n"))
    words = ["--env-kwargs.difficulty.min", "3", "--env-kwargs.dataset-split", "all", "--seed", "2"]
    assert cli.main(["rollout", "own_tasks:Capitals-v0", "--human", *words]) == 0
    shown = capsys.readouterr().out
    assert any(country in shown for country in ("Bhutan", "Kazakhstan", "Myanmar", "Suriname"))


@pytest.mark.slow
def test_tasks_are_chosen_by_their_difficulty(tmp_path):
    assert run_example("own_tasks.py", tmp_path).splitlines() == ["{'max': 1} 0.0 of 8", "{'min': 2} 3.0 of 8"]


@pytest.mark.slow
def test_an_estimator_and_a_loss_of_ones_own_train_the_tiny_model(tmp_path):
    output = run_example("own_estimator.py", tmp_path)
    lines = [line for line in output.splitlines() if "at their group's median" in line]
    assert [line.split(":")[0] for line in lines] == ["step 1", "step 2"]
    config = next(tmp_path.glob("runs/*/config.toml")).read_text()
    assert 'estimator = "median_baseline"' in config and 'loss = "soft_clip"' in config


@pytest.mark.slow
def test_a_model_learns_from_the_best_that_it_played(tmp_path):
    words = next(line for line in run_example("sft.py", tmp_path).splitlines() if line.startswith("pass@1")).split()
    before, after = float(words[1]), float(words[3].rstrip(";"))
    assert after >= max(0.5, before + 0.2)


@pytest.mark.slow
def test_a_student_comes_ten_times_closer_to_its_teacher_on_held_out_tasks(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(EXAMPLES.parent / "benchmarks")
    from distillation import divergence

    words = run_example("distill.py", tmp_path).splitlines()[-1]
    student = tmp_path / words.rpartition(" ")[2]
    teacher = tmp_path / load_config(file=student.parent / "config.toml").algorithm.teacher
    start = resolve_model("tiny", env="CodeExec-v0").path
    before, after = (divergence("CodeExec-v0", model, teacher, 128, seed=0) for model in (start, student))
    assert before > 0.05 and after < before / 10


def test_a_judge_grades_and_shows_how_far_it_can_be_trusted(tmp_path):
    output = run_example("judge.py", tmp_path)
    rewards = [re.search(r"reward (\S+) \{'reward/judged': (\S+), 'reward/names_it': 1.0", line)
               for line in output.splitlines() if line.startswith("Better")]
    assert len(rewards) == 4
    assert all(float(found[1]) == pytest.approx(float(found[2].rstrip(",")) + 0.5, abs=0.01) for found in rewards)
    assert "Tea? / Tea! tie consistent 0%" in output and "the same in both orders 50%" in output


def test_every_example_is_run_here():
    assert {path.name for path in EXAMPLES.glob("*.py")} == {
        "distill.py", "judge.py", "my_env.py", "own_estimator.py", "own_tasks.py", "play_with_a_function.py",
        "self_play.py", "sft.py"}


def test_a_game_in_one_file_is_played_by_the_policy_in_both_seats(monkeypatch):
    monkeypatch.syspath_prepend(EXAMPLES)

    def careful(observation):
        matches = int(observation["messages"][-1]["content"].split()[0])
        return str(matches % 4 or 1)

    seats = molt_gym.rollout("self_play:Nim-v0", careful, 8)
    assert [seat.seat for seat in seats] == ["first", "second"] * 8
    assert all(first.reward == -second.reward for first, second in zip(seats[::2], seats[1::2], strict=True))
    alone = molt_gym.rollout("self_play:Nim-v0", careful, 40, env_kwargs={"opponent": "random"})
    assert {seat.seat for seat in alone} == {"first", "second"}
    assert sum(seat.info["result"] == "win" for seat in alone) > 30
