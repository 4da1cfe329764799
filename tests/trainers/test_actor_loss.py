"""Ranks of the actor that die while a run goes on, which then goes on from its newest checkpoint by itself."""

import json
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from molt_gym import RunFailed
from molt_gym.tokens.trajectory import read_jsonl

pytestmark = pytest.mark.slow

OPTIONS = {"steps": 5, "actor__world_size": 2, "eval__every": 2, "checkpoint__every": 3}
Train = Callable[..., Any]


@contextmanager
def killed_at(folder: Path, *lines: int) -> Iterator[None]:
    """Kills a rank whenever the run's metrics have as many lines, or more."""
    over, file = threading.Event(), folder / "metrics.jsonl"

    def kill(count: int) -> None:
        while not over.is_set():
            ranks = [child for child in multiprocessing.active_children() if child.name.startswith("molt-gym-actor")]
            if ranks and file.exists() and file.read_bytes().count(b"\n") >= count:
                os.kill(ranks[0].pid, signal.SIGKILL)
                ranks[0].join(10)
                return
            time.sleep(0.002)

    thread = threading.Thread(target=lambda: [kill(count) for count in lines])
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def record(folder: Path) -> dict[str, Any]:
    """What a run leaves but times and restarts."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return {
        "metrics": [{name: value for name, value in line.items()
                     if not name.startswith(("time/", "perf/", "actor/restarts"))} for line in lines],
        "played": {file.name: [(t.index, t.group, t.rollout, t.reward) for t in read_jsonl(file)]
                   for file in (folder / "rollouts").iterdir()},
        "model": (folder / "model" / "model.safetensors").read_bytes(),
        "best": os.readlink(folder / "checkpoints" / "best"),
    }


def test_a_run_whose_rank_is_killed_ends_as_one_that_nothing_happened_to(
    train: Train, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    straight = train(tmp_path / "straight", **OPTIONS)
    capsys.readouterr()
    # Before there is a checkpoint, and after there is one.
    with killed_at(tmp_path / "killed", 2, 5):
        result = train(tmp_path / "killed", **OPTIONS)
    ours, theirs = record(result.run_dir), record(straight.run_dir)
    for name, value in ours.items():
        assert value == theirs[name], name
    assert result.metrics[-2]["actor/restarts"] == 2
    printed = capsys.readouterr().out
    assert "rank 1 of 2 failed: the process died (exit code -9)\nthe actor starts again (1 of 3 times)" in printed
    assert "going on from step 0" in printed and printed.count("going on from step ") == 2
    assert "actor restarts" in printed


def test_a_run_whose_ranks_die_too_often_ends_with_the_causes_and_goes_on_when_it_is_resumed(
    train: Train, tmp_path: Path
) -> None:
    with killed_at(tmp_path / "run", 4), pytest.raises(
            RunFailed, match="(?s)lost 1 times, more than failures.actor_restarts = 0 allows.*the process died"):
        train(tmp_path / "run", failures__actor_restarts=0, **OPTIONS)
    assert not multiprocessing.active_children()
    result = train(tmp_path / "run", failures__actor_restarts=0, **OPTIONS)
    steps = [line["step"] for line in result.metrics if "eval/when" not in line]
    assert steps == [1, 2, 3, 4, 5]
