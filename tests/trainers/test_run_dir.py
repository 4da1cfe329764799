import json
import math
import os
import resource
import subprocess
import sys

import numpy as np
import pytest

from molt_gym.errors import ConfigError
from molt_gym.tokens.trajectory import Row, Trajectory, read_jsonl
from molt_gym.trainers.run_dir import RunDir, default_path, latest_run, read_metrics


@pytest.fixture
def run(tmp_path):
    with RunDir(tmp_path / "run") as run:
        run.write_config('env = "CodeExec-v0"\n')
        yield run


def resumed(run):
    run.close()
    return RunDir(run.path, resume=True)


def test_metrics_read_back_as_written(run):
    run.append_metrics({"step": 1, "reward/mean": np.float32(0.5), "policy/note": "a\u2028b\x85c"})
    run.append_metrics({"step": 2, "rollout/failed/sandbox": np.int64(3)})
    assert run.read_metrics() == [
        {"step": 1, "reward/mean": 0.5, "policy/note": "a\u2028b\x85c"},
        {"step": 2, "rollout/failed/sandbox": 3},
    ]


def test_a_number_that_is_not_finite_is_null_and_the_file_stays_json(run):
    run.append_metrics({"step": 1, "policy/loss": math.nan, "optim/grad_norm": np.float64("inf")})
    line = run.metrics_path.read_text()
    assert json.loads(line) == {"step": 1, "policy/loss": None, "optim/grad_norm": None} and "NaN" not in line
    assert math.isnan(run.read_metrics()[0]["policy/loss"])


def test_a_metric_of_another_kind_is_refused_by_name(run):
    with pytest.raises(TypeError, match="reward/mean"):
        run.append_metrics({"step": 1, "reward/mean": [1, 2]})
    assert run.metrics_path.read_bytes() == b""


def test_a_folder_that_holds_a_run_is_refused_and_untouched(run):
    run.append_metrics({"step": 1})
    run.close()
    with pytest.raises(ConfigError, match="in use"):
        RunDir(run.path)
    assert run.read_metrics() == [{"step": 1}]


def test_an_empty_folder_and_one_left_by_a_start_that_was_killed_are_taken(tmp_path):
    (tmp_path / "empty").mkdir()
    RunDir(tmp_path / "empty").close()
    RunDir(tmp_path / "empty").close()


def test_a_file_in_the_place_of_the_folder_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="file"):
        RunDir(tmp_path / "file" / "run")


def test_resuming_a_folder_without_a_run_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="holds no run"):
        RunDir(tmp_path, resume=True)


def test_two_processes_cannot_write_to_one_run(run):
    code = f"from molt_gym.trainers.run_dir import RunDir; RunDir({str(run.path)!r}, resume=True)"
    other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert other.returncode and "another process is writing" in other.stderr


def test_two_runs_of_one_process_cannot_write_to_one_folder(run):
    with pytest.raises(ConfigError, match="another run of this process"):
        RunDir(run.path.parent / "." / "run", resume=True)
    run.close()
    run.metrics_path.write_bytes(b"{\n")
    for _ in range(2):
        with pytest.raises(ValueError, match="metrics.jsonl:1"):
            RunDir(run.path, resume=True)
    run.metrics_path.write_bytes(b"")
    RunDir(run.path, resume=True).close()


def test_a_run_stays_in_its_folder_where_somebody_changes_the_working_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with RunDir("run") as run:
        (tmp_path / "elsewhere").mkdir()
        monkeypatch.chdir(tmp_path / "elsewhere")
        run.append_metrics({"step": 1})
        run.write_rollouts(1, [])
        run.cut_metrics()
    assert run.rollouts_path == tmp_path / "run" / "rollouts" and len(run.read_metrics()) == 1


def test_what_a_user_puts_beside_the_transcripts_stays(run):
    (run.rollouts_path / "step-notes.jsonl").write_text("mine")
    run.write_rollouts(3, [])
    run.cut_metrics(2)
    assert [path.name for path in run.rollouts_path.iterdir()] == ["step-notes.jsonl"]


def test_a_half_written_line_is_dropped_with_a_warning_and_the_next_one_is_whole(run):
    run.append_metrics({"step": 1})
    with run.metrics_path.open("ab") as file:
        file.write(b'{"step": 2, "rew')
    with pytest.warns(UserWarning, match="cut off"):
        assert read_metrics(run.path) == [{"step": 1}]
    with pytest.warns(UserWarning, match="cut off"):
        again = resumed(run)
    with again:
        again.append_metrics({"step": 2})
        assert again.read_metrics() == [{"step": 1}, {"step": 2}]


def test_a_broken_line_in_the_middle_is_an_error_with_its_number(run):
    run.metrics_path.write_bytes(b'{"step": 1}\n{"step"\n{"step": 3}\n')
    with pytest.raises(ConfigError, match="metrics.jsonl:2: .*; mend that line, or remove it"):
        run.read_metrics()


def test_a_resumed_run_gives_the_same_files_as_one_that_was_never_stopped(run):
    def train(run, steps):
        for step in steps:
            run.append_metrics({"step": step, "reward/mean": step / 10})
            run.write_rollouts(step, [Trajectory(env="E-v0", index=step)])

    def content(run):
        return run.metrics_path.read_bytes(), sorted(os.listdir(run.rollouts_path))

    train(run, range(1, 6))
    whole = content(run)
    with resumed(run) as again:
        again.cut_metrics(2)
        assert [record["step"] for record in again.read_metrics()] == [1, 2]
        assert sorted(os.listdir(again.rollouts_path)) == ["step-000001.jsonl", "step-000002.jsonl"]
        train(again, range(3, 6))
        assert content(again) == whole


def test_a_full_disk_is_reported_and_leaves_whole_lines(run):
    run.append_metrics({"step": 1})
    room, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (run.metrics_path.stat().st_size + 5, hard))
    try:
        with pytest.raises(OSError, match="too large"):
            run.append_metrics({"step": 2, "reward/mean": 0.5})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (room, hard))
    run.append_metrics({"step": 2})
    assert run.read_metrics() == [{"step": 1}, {"step": 2}]


def test_transcripts_are_written_whole_under_the_step(run):
    row = Row(ids=[1, 2], mask=[0, 1], logprobs=[0.0, -0.5], versions=[-1, 3])
    trajectory = Trajectory(env="E-v0", index=7, rows=[row], messages=[{"role": "user", "content": "\ud800\x00\u2028"}])
    path = run.write_rollouts(12, [trajectory])
    assert path.name == "step-000012.jsonl" and read_jsonl(path) == [trajectory]


def test_a_default_name_says_env_and_model_and_is_free(tmp_path):
    path = default_path("my_pkg:suite/Env-v0", "Qwen/Qwen3-4B", tmp_path)
    assert path.name.startswith("suite-Env-v0-Qwen3-4B-2") and path.parent == tmp_path
    path.mkdir()
    assert default_path("my_pkg:suite/Env-v0", "Qwen/Qwen3-4B", tmp_path) != path


def test_a_mixture_of_many_envs_has_a_default_name_that_file_systems_take(tmp_path):
    env, model = "+".join(f"suite/task_number_{number}-v0" for number in range(40)), "m" * 250
    with RunDir(default_path(env, model, tmp_path)) as run:
        run.write_config("")
    assert latest_run(env, tmp_path) == run.path


def test_the_latest_run_of_an_env_is_found(tmp_path):
    for name, time in (("A-v0-tiny-1", 1), ("A-v0-tiny-2", 3), ("B-v0-tiny-1", 9), ("A-v0-tiny-0", 2)):
        with RunDir(tmp_path / name) as run:
            run.write_config("")
        for file in run.path.iterdir():
            os.utime(file, (time, time))
    (tmp_path / "A-v0-no-run").mkdir()
    assert latest_run("A-v0", tmp_path).name == "A-v0-tiny-2"
    assert latest_run(None, tmp_path).name == "B-v0-tiny-1"
    assert latest_run("C-v0", tmp_path) is None


def test_a_run_that_did_not_begin_leaves_no_folder_of_its_own(tmp_path):
    (tmp_path / "mine").mkdir()
    for name in ("new", "mine"):
        with RunDir(tmp_path / name) as run:
            (run.path / "league").mkdir()
        run.close()
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]
    with RunDir(tmp_path / "new") as run:
        run.write_rollouts(1, [Trajectory(env="E-v0", index=1)])
    assert (run.rollouts_path / "step-000001.jsonl").exists()
