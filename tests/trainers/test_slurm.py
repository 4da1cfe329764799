"""The job script, run by bash as Slurm runs it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "slurm" / "train.sbatch"


def submit(*words: str | Path) -> subprocess.CompletedProcess:
    return subprocess.run(["bash", SCRIPT, *words], env=os.environ | {"VENV": sys.prefix, "HF_HUB_OFFLINE": "1"},
                          capture_output=True, text=True, timeout=300, check=False)


@pytest.mark.slow
def test_a_requeued_job_goes_on_with_its_run(tmp_path, tiny_path):
    settings = ["CodeExec-v0", "--model", tiny_path, "--rollout.groups-per-step=1", "--rollout.group-size=2",
                "--rollout.max-tokens=4", "--rollout.max-context=512", "--eval.before=false", "--eval.after=false"]
    assert submit(tmp_path / "run", *settings, "--steps", "1").returncode == 0
    again = submit(tmp_path / "run", *settings, "--steps", "2")
    assert again.returncode == 0, again.stderr
    steps = [json.loads(line)["step"] for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert steps == [1, 2]


def test_a_job_without_a_run_folder_says_how_to_submit_it():
    refused = submit()
    assert refused.returncode != 0
    assert "usage: sbatch" in refused.stderr
