"""The examples run as a newcomer would run them."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from molt_gym.trainers.config import load_config
from molt_gym.trainers.models import resolve_model

EXAMPLES = Path(__file__).parents[1] / "examples"


def run_example(name: str, folder: Path) -> str:
    done = subprocess.run([sys.executable, EXAMPLES / name], cwd=folder, env=os.environ | {"NO_COLOR": "1"},
                          capture_output=True, text=True, timeout=400, check=False)
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


def test_every_example_is_run_here():
    assert {path.name for path in EXAMPLES.glob("*.py")} == {
        "distill.py", "my_env.py", "own_estimator.py", "play_with_a_function.py", "sft.py"}
