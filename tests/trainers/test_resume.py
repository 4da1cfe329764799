"""Runs in processes of their own that are killed, interrupted or told to end, and go on as if nothing had been."""

import fcntl
import hashlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest

from molt_gym.errors import ConfigError
from molt_gym.tokens.trajectory import read_jsonl
from molt_gym.trainers.checkpoint import load_state, newest_checkpoint
from molt_gym.trainers.run_dir import RunDir, holds_run, read_metrics

pytestmark = pytest.mark.slow

STEPS = 14
OPTIONS = {"eval__every": 4, "checkpoint__every": 3, "algorithm__updates_per_batch": 2, "actor__schedule": "cosine"}
Train = Callable[..., Any]


@pytest.fixture(scope="module")
def straight(train: Train) -> Path:
    """The folder of the run that nothing happened to."""
    return train(steps=STEPS, **OPTIONS).run_dir


def started(out: Path, model: Path, *, popen_options: Mapping[str, Any] = MappingProxyType({}), **more: Any
            ) -> subprocess.Popen:
    """The same run as a command; `more` are further options."""
    small = {
        "rollout.groups-per-step": 2, "rollout.group-size": 4, "rollout.max-tokens": 8, "rollout.max-context": 256,
        "eval.episodes": 2, "actor.lr": 3e-3, "actor.dtype": "float32",
    } | {name.replace("__", ".").replace("_", "-"): value for name, value in (OPTIONS | more).items()}
    words = [word for name, value in small.items() for word in (f"--{name}", str(value))]
    command = [sys.executable, "-m", "molt_gym", "train", "toy_envs:Letters-v0", "--model", model, "--out", out,
               "--seed", "1", "--steps", str(STEPS), *words]
    return popen(command, **popen_options)


def popen(command: list[Any], **options: Any) -> subprocess.Popen:
    # What runs in the background of a shell ignores Ctrl-C, and so would its children.
    return subprocess.Popen(command, **{
        "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "process_group": 0,
        "env": {**os.environ, "TOYS_PAUSE": "0.3", "TERM": "xterm"},
        "preexec_fn": lambda: signal.signal(signal.SIGINT, signal.SIG_DFL)} | options)


def wait_for_lines(folder: Path, lines: int, process: subprocess.Popen) -> None:
    """Until the metrics have so many lines."""
    file, deadline = folder / "metrics.jsonl", time.monotonic() + 300
    while not file.exists() or file.read_bytes().count(b"\n") < lines:
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline
        time.sleep(0.005)


def record(folder: Path) -> dict[str, Any]:
    """All that is left of a run but times: metrics, what was played, the model, the last checkpoint's state."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    best = newest_checkpoint(folder / "checkpoints")
    assert best is not None
    played = {file.name: [(t.index, t.group, t.rollout, t.reward, t.rows) for t in read_jsonl(file)]
              for file in sorted((folder / "rollouts").iterdir())}
    return {
        "metrics": [{name: value for name, value in line.items() if not name.startswith(("time/", "perf/"))}
                    for line in lines],
        "played": played,
        "model": (folder / "model" / "model.safetensors").read_bytes(),
        # What libraries draw from the global generators when they are used first is theirs.
        "state": json.loads((best / "trainer.json").read_text()) | {"generators": None},
        "weights and moments": (best / "actor" / "__0_0.distcp").read_bytes(),
    }


def assert_same(folder: Path, straight: Path) -> None:
    ours, theirs = record(folder), record(straight)
    for name, value in ours.items():
        assert value == theirs[name], name


def test_a_run_that_is_killed_at_any_write_of_a_save_or_of_a_step_ends_as_one_that_is_not(
    train: Train, tmp_path: Path, at_each_write: Callable[[Callable[[], None]], AbstractContextManager[None]]
) -> None:
    """What SIGKILL leaves is what is on disk: a copy of the folder, at each moment at which that changes."""
    options = {"eval__every": 1, "checkpoint__every": 1, "checkpoint__keep": 1, "actor__schedule": "cosine", "steps": 2}
    folder, moments = tmp_path / "straight", dict[str, Path]()

    def photograph() -> None:
        if folder.exists() and (state := digest(folder)) not in moments:
            moments[state] = shutil.copytree(folder, tmp_path / f"moment-{len(moments)}", symlinks=True)

    with at_each_write(photograph):
        train(folder, **options)
    assert len(moments) > 40
    different = dict[str, Path]()
    for copy in moments.values():
        # As a run that goes on does first of all. What is the same after that goes on in the same way.
        if holds_run(copy):
            with RunDir(copy, resume=True) as run:
                newest = newest_checkpoint(run.checkpoints_path)
                run.cut_metrics(load_state(newest)["step"] if newest else -1)
        different.setdefault(digest(copy), copy)
    print(len(moments), "moments,", len(different), "of them different")
    for copy in different.values():
        train(copy, **options)
        assert_same(copy, folder)


def digest(folder: Path) -> str:
    """Of the names and contents that a folder has, but for the lock."""
    found = hashlib.blake2b()
    for path in sorted(path for path in folder.rglob("*") if path.name != ".lock"):
        content = os.readlink(path).encode() if path.is_symlink() else path.read_bytes() if path.is_file() else b""
        found.update(f"{path.relative_to(folder)} {len(content)} ".encode() + content)
    return found.hexdigest()


@pytest.mark.parametrize("lines", [1, 9])
def test_a_run_that_is_killed_at_any_moment_ends_as_one_that_is_not(
    train: Train, tiny_path: Path, tmp_path: Path, straight: Path, lines: int
) -> None:
    folder = tmp_path / "killed"
    process = started(folder, tiny_path)
    try:
        wait_for_lines(folder, lines, process)
        time.sleep(random.uniform(0, 0.4))
    finally:
        process.kill()
        process.communicate()
    train(folder, steps=STEPS)
    assert_same(folder, straight)


@pytest.mark.parametrize("options", [
    {"algorithm__estimator": "gae", "critic__warmup_steps": 1, "critic__lr": 1e-2},
    {"algorithm__kl__coefficient": 0.1, "algorithm__kl__target": 0.01, "algorithm__kl__horizon": 20,
     "rollout__dynamic_filter": True},
], ids=["critic", "adaptive KL and dynamic filter"])
def test_a_run_that_is_gone_on_with_has_the_lines_of_one_that_did_not_stop(
    train: Train, tmp_path: Path, options: dict[str, Any]
) -> None:
    options |= {"eval__before": False, "eval__after": False, "actor__warmup_steps": 3}
    straight = train(steps=4, **options)
    train(tmp_path / "run", steps=2, **options)
    train(tmp_path / "run", steps=4, **options)
    assert_same(tmp_path / "run", straight.run_dir)


def test_a_schedule_that_falls_over_other_steps_is_refused_and_a_constant_one_is_gone_on_with(
    train: Train, tmp_path: Path
) -> None:
    options = {"eval__before": False, "eval__after": False, "actor__schedule": "linear"}
    train(tmp_path / "run", steps=1, **options)
    settings = (tmp_path / "run" / "config.toml").read_bytes()
    with pytest.raises(ConfigError, match="steps: the learning rate .* falls over 1 updates .* if there were 2; write"):
        train(tmp_path / "run", steps=2, **options)
    assert (tmp_path / "run" / "config.toml").read_bytes() == settings
    rates = [line["optim/lr"] for line in train(tmp_path / "run", steps=2, actor__schedule="constant").metrics
             if "optim/lr" in line]
    assert rates == [3e-3, 3e-3]


def test_a_run_whose_terminal_is_closed_saves_and_goes_on_from_there(
    train: Train, tiny_path: Path, tmp_path: Path, straight: Path
) -> None:
    folder, (ours, theirs) = tmp_path / "hung-up", os.openpty()

    def on_terminal() -> None:
        os.setsid()
        fcntl.ioctl(theirs, termios.TIOCSCTTY, 0)
        signal.signal(signal.SIGHUP, signal.SIG_DFL)

    process = started(folder, tiny_path, popen_options={
        "stdin": theirs, "stdout": theirs, "stderr": theirs, "preexec_fn": on_terminal, "process_group": None})
    os.close(theirs)
    reader = threading.Thread(target=drained, args=(ours, folder))
    reader.start()
    try:
        reader.join(300)
        os.close(ours)
        assert process.wait(timeout=300) == 129
    finally:
        process.kill()
    best = newest_checkpoint(folder / "checkpoints")
    assert best is not None and load_state(best)["step"] == read_metrics(folder)[-1]["step"]
    train(folder, steps=STEPS)
    assert_same(folder, straight)


def drained(terminal: int, folder: Path) -> None:
    """Reads what is shown until the metrics have some lines."""
    file = folder / "metrics.jsonl"
    while not file.exists() or file.read_bytes().count(b"\n") < 6:
        os.read(terminal, 65536)


@pytest.mark.parametrize(("sent", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_run_that_is_told_to_end_saves_says_where_and_goes_on_from_there(
    train: Train, tiny_path: Path, tmp_path: Path, straight: Path, sent: signal.Signals, code: int
) -> None:
    folder = tmp_path / "ended"
    process = started(folder, tiny_path)
    try:
        wait_for_lines(folder, 6, process)
        process.send_signal(sent)
        output = process.communicate(timeout=300)[0]
    finally:
        process.kill()
    assert process.returncode == code, output
    best = newest_checkpoint(folder / "checkpoints")
    assert f"saved as {best}; go on with --resume {folder}" in output
    assert "Traceback" not in output
    assert not (folder / "model").exists()
    train(folder, steps=STEPS)
    assert_same(folder, straight)


def test_signals_to_all_processes_of_a_run_again_and_again_lose_nothing(
    train: Train, tiny_path: Path, tmp_path: Path
) -> None:
    two, folder = {"actor__world_size": 2}, tmp_path / "preempted"
    process = started(folder, tiny_path, **two)
    try:
        wait_for_lines(folder, 4, process)
        # As Slurm does before it kills, while somebody presses Ctrl-C.
        for sent in (signal.SIGTERM, signal.SIGTERM, signal.SIGINT, signal.SIGTERM):
            os.killpg(process.pid, sent)
            time.sleep(0.02)
        output = process.communicate(timeout=300)[0]
    finally:
        process.kill()
    assert process.returncode == 143, output
    best = newest_checkpoint(folder / "checkpoints")
    assert f"saved as {best}; go on with --resume {folder}" in output
    assert "already ending" in output and "Traceback" not in output
    result = train(folder, steps=STEPS, **two)
    assert [line["step"] for line in result.metrics if "eval/when" not in line] == list(range(1, STEPS + 1))
    played = [t.group for file in (folder / "rollouts").iterdir() for t in read_jsonl(file) if t.rollout == 0]
    assert sorted(played) == list(range(2 * STEPS))


@pytest.mark.parametrize("max_staleness", [0, 1, 2])
def test_a_run_that_is_stopped_twice_loses_no_task_and_plays_none_twice(
    train: Train, tmp_path: Path, max_staleness: int
) -> None:
    options = {"rollout__max_staleness": max_staleness, "eval__before": False, "eval__after": False}
    cursors = []
    for steps in (3, 6, 10):
        result = train(tmp_path / "run", steps=steps, **options)
        pool = json.loads((result.checkpoint / "trainer.json").read_text())["pool"]
        cursors.append(pool["cursor"])
        played = [t for file in (result.run_dir / "rollouts").iterdir() for t in read_jsonl(file) if t.rollout == 0]
        assert sorted([t.group for t in played] + pool["pending"]) == list(range(pool["cursor"]))
        assert len(played) == 2 * steps
    assert cursors == sorted(set(cursors))
    if not max_staleness:
        assert sorted(t.index for t in played) == list(range(20))
        straight = train(tmp_path / "straight", steps=10, **options)
        assert record(result.run_dir)["played"] == record(straight.run_dir)["played"]
        assert [line["policy/loss"] for line in result.metrics] == [line["policy/loss"] for line in straight.metrics]


def test_an_interrupt_in_a_notebook_ends_the_run_with_its_state_saved(
    tiny_path: Path, toys: Path, tmp_path: Path
) -> None:
    script = tmp_path / "cell.py"
    script.write_text(f"""
import asyncio
import molt_gym

async def cell():
    molt_gym.train("toy_envs:Letters-v0", {str(tiny_path)!r}, out={str(tmp_path / "run")!r}, steps=10_000,
                   rollout={{"max_tokens": 8, "max_context": 256}}, eval={{"before": False}})

if __name__ == "__main__":
    try:
        asyncio.new_event_loop().run_until_complete(cell())
    except KeyboardInterrupt:
        print("interrupted as expected")
""")
    process = popen([sys.executable, script])
    try:
        wait_for_lines(tmp_path / "run", 2, process)
        process.send_signal(signal.SIGINT)
        output = process.communicate(timeout=300)[0]
    finally:
        process.kill()
    assert "interrupted as expected" in output
    assert newest_checkpoint(tmp_path / "run" / "checkpoints") is not None
