"""Two hundred episodes of what plays at random: nothing is left of them, and what is left would be told."""

import os
import subprocess
import sys
from pathlib import Path

import gymnasium as gym
import pytest

import molt_gym

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


class Hoards(molt_gym.ChatEnv):
    """Keeps a file of each episode."""

    kept = []

    def begin(self, index):
        self.kept.append(open(os.devnull))
        return [{"role": "user", "content": "Go on."}]

    def answer(self, message):
        if len(self.kept) % 5 == 0:
            raise molt_gym.EnvFailure("full")
        return molt_gym.Turn(reward=1.0, terminated=True)


@pytest.mark.slow
def test_random_episodes_over_all_ids_leave_nothing():
    suites = ["reasoning_gym/chain_sum-v0", "reasoning_gym/acre-v0"]
    words = ["--episodes", "220", "--rounds", "4", "--turns", "8", "--only", "molt_gym", "gymnasium", *suites]
    done = subprocess.run([sys.executable, BENCHMARKS / "random_episodes.py", *words], capture_output=True, text=True,
                          timeout=500)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    without_failures = [line.split("|") for line in lines if line.endswith("| none |")]
    assert [cells[1].strip() for cells in without_failures] == ["gymnasium", "molt_gym", "reasoning_gym"]
    assert sum(int(cells[3]) for cells in without_failures) >= 200
    grown = next(line for line in lines if line.startswith("| grown"))
    memory, *rest = (int(cell) for cell in grown.split("|")[2:-1])
    assert rest == [0, 0, 0] and memory < 100


def test_what_is_left_and_what_fails_is_told(monkeypatch, capsys):
    monkeypatch.syspath_prepend(BENCHMARKS)
    import random_episodes

    monkeypatch.setattr(random_episodes, "SETTLES", 0.1)

    molt_gym.register("Hoards-v0", Hoards)
    try:
        assert random_episodes.main(["--only", "Hoards-v0", "--episodes", "16", "--rounds", "4"]) == 1
    finally:
        del gym.registry["Hoards-v0"]
        for file in Hoards.kept:
            file.close()
    shown = capsys.readouterr().out
    assert "| 1 | 16 | 13 | 0.812 |" in shown and "| 3 full: Hoards-v0 |" in shown
    assert "| +8 | +0 | +0 |" in shown
