"""Two ranks, really started: the same update as one, and a clear end when one of them dies."""

import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from molt_gym.errors import ConfigError, RunFailed
from molt_gym.trainers.actor import admission
from molt_gym.trainers.actor.actor import ActorLost
from molt_gym.trainers.actor.dealing import balance
from molt_gym.trainers.actor.fsdp_actor import ActorSpec
from molt_gym.trainers.actor.launch import LocalActor
from molt_gym.trainers.actor.packing import TrainRow

pytestmark = pytest.mark.slow

Rows = Callable[..., list[TrainRow]]
Build = Callable[..., ActorSpec]
Weights = Callable[..., dict[str, Tensor]]
VOCAB = 24
TWO_RANKS = {"actor__world_size": 2, "actor__micro_batch_tokens": 40, "actor__lr": 0.05}


def batches(random_rows: Rows) -> dict[str, list[list[TrainRow]]]:
    """What is trained on, by what is special about it; made anew, as old log-probs are kept in the rows."""
    poisoned = random_rows(2, 3, seed=5)
    poisoned[4].weight = float("nan")
    return {
        "even": [random_rows(4, 3)],
        "a large group and a small one": [random_rows(1, 9) + random_rows(1, 1, seed=1, start=9)],
        "one rank has no rows": [random_rows(1, 3, seed=2)],
        "nobody has an advantage": [random_rows(2, 2, idle=range(4))],
        "two windows": [random_rows(2, 3, seed=3), random_rows(3, 2, seed=4, start=6, idle=[0, 1])],
        "not finite": [poisoned],
    }


@pytest.fixture(scope="module")
def alone(
    spec: Build, random_rows: Rows, weights_of: Weights, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Any]:
    """The start, as a checkpoint, and what one rank makes of each batch."""
    folder = tmp_path_factory.mktemp("alone")
    actor = LocalActor(spec(**TWO_RANKS | {"actor__world_size": 1}))
    found: dict[str, Any] = {"start": folder / "start"}
    try:
        actor.save(found["start"])
        for name, windows in batches(random_rows).items():
            actor.load(found["start"])
            found[name] = actor.train(windows), weights_of(actor)
        actor.save(folder / "end")
        found["end"] = folder / "end", weights_of(actor)
    finally:
        actor.close()
    return found


@pytest.fixture(scope="module")
def pair(spec: Build, alone: dict[str, Any]) -> Iterator[LocalActor]:
    actor = LocalActor(spec(**TWO_RANKS))
    yield actor
    actor.close()


def ranks_of(actor: LocalActor) -> list[Any]:
    return [child for child in multiprocessing.active_children() if child.name.startswith("molt-gym-actor")]


@pytest.mark.parametrize("name", ["even", "a large group and a small one", "one rank has no rows",
                                  "nobody has an advantage", "two windows", "not finite"])
def test_two_ranks_make_the_update_of_one(
    pair: LocalActor, alone: dict[str, Any], random_rows: Rows, weights_of: Weights, name: str
) -> None:
    pair.load(alone["start"])
    metrics, weights = pair.train(batches(random_rows)[name]), weights_of(pair)
    expected_metrics, expected = alone[name]
    for key, tensor in weights.items():
        torch.testing.assert_close(tensor, expected[key], rtol=0, atol=1e-6)
    for key in metrics.keys() | expected_metrics.keys():
        if not key.startswith(("time/", "perf/")):
            assert metrics[key] == pytest.approx(expected_metrics[key], abs=1e-5, nan_ok=True), key


def test_a_checkpoint_of_one_rank_is_that_of_two_and_back(
    pair: LocalActor, alone: dict[str, Any], weights_of: Weights, tmp_path: Path
) -> None:
    folder, expected = alone["end"]
    pair.load(folder)
    for key, tensor in weights_of(pair).items():
        assert torch.equal(tensor, expected[key])
    pair.save(tmp_path / "state")
    pair.load(alone["start"])
    pair.load(tmp_path / "state")
    for key, tensor in weights_of(pair).items():
        assert torch.equal(tensor, expected[key])


def test_two_ranks_score_a_text_as_plain_transformers_does_and_train_on(
    pair: LocalActor, alone: dict[str, Any], random_rows: Rows, weights_of: Weights, model_path: Callable[..., Path]
) -> None:
    pair.load(alone["start"])
    ids = [3, 1, 4, 1, 5, 9, 2, 6]
    model = AutoModelForCausalLM.from_pretrained(model_path(), dtype=torch.float32).eval()
    with torch.no_grad():
        expected = model(torch.tensor([ids])).logits[0, :-1].log_softmax(-1)[range(7), ids[1:]]
    assert pair.logprobs(ids) == pytest.approx(expected.tolist(), abs=1e-5)
    pair.train(batches(random_rows)["even"])
    for key, tensor in weights_of(pair).items():
        torch.testing.assert_close(tensor, alone["even"][1][key], rtol=0, atol=1e-6)


def test_a_save_that_the_disk_refuses_is_an_os_error_after_which_both_ranks_go_on(
    pair: LocalActor, alone: dict[str, Any], random_rows: Rows, tmp_path: Path
) -> None:
    pair.load(alone["start"])
    (tmp_path / "state").write_text("a file where the folder should be")
    with pytest.raises(OSError, match="state"):
        pair.save(tmp_path / "state")
    assert pair.train(batches(random_rows)["even"])["optim/grad_norm"] > 0


def test_a_rank_leaves_it_to_the_first_to_react_to_a_signal(pair: LocalActor, random_rows: Rows) -> None:
    (rank,) = ranks_of(pair)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        os.kill(rank.pid, number)
    time.sleep(0.2)
    assert pair.train(batches(random_rows)["even"])["optim/grad_norm"] > 0


def test_weights_that_nobody_takes_to_the_end_leave_the_ranks_in_step(pair: LocalActor, random_rows: Rows) -> None:
    weights = pair.weights()
    next(weights)
    weights.close()
    assert pair.train(batches(random_rows)["even"])["optim/grad_norm"] > 0
    assert len(list(pair.weights())) > 1


def test_a_process_has_one_actor_at_a_time_and_a_second_does_not_disturb_it(
    pair: LocalActor, spec: Build, random_rows: Rows
) -> None:
    with pytest.raises(ConfigError, match="actor: this process trains already"):
        LocalActor(spec())
    pair.train([random_rows(2, 2)])


def test_a_rank_that_was_killed_between_two_calls_is_named(pair: LocalActor, random_rows: Rows) -> None:
    # The last test of this pair.
    (rank,) = ranks_of(pair)
    os.kill(rank.pid, signal.SIGKILL)
    rank.join(10)
    with pytest.raises(ActorLost, match=r"rank 1 of 2 failed: the process died \(exit code -9\)"):
        pair.train(batches(random_rows)["even"])
    with pytest.raises(ActorLost, match="rank 1 of 2"):
        list(pair.weights())


def test_a_rank_that_is_killed_in_a_call_ends_it_within_seconds(
    pair: LocalActor, spec: Build, random_rows: Rows
) -> None:
    pair.close()
    actor = LocalActor(spec(**TWO_RANKS | {"actor__micro_batch_tokens": 1}))
    try:
        (rank,) = ranks_of(actor)
        killer = threading.Timer(1.0, os.kill, (rank.pid, signal.SIGKILL))
        killer.start()
        started = time.monotonic()
        with pytest.raises(ActorLost, match=r"rank 1 of 2 failed: the process died \(exit code -9\)"):
            while time.monotonic() < started + 60:
                actor.train([random_rows(20, 8)])
        assert time.monotonic() < started + 30
    finally:
        actor.close()
    assert not ranks_of(actor)


def test_ranks_on_gpus_of_several_sizes_train_micro_batches_that_each_can_hold(
    pair: LocalActor, spec: Build, random_rows: Rows, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair.close()
    # The other rank is a process of its own, which knows of no GPU.
    monkeypatch.setattr(admission, "device_memory", lambda: 100 << 30)
    for world, tokens in ((1, 16384), (2, 2048)):
        actor = LocalActor(spec(actor__world_size=world))
        try:
            assert actor.micro_batch_tokens == tokens
            actor.train([random_rows(200, 4)])
        finally:
            actor.close()


def test_a_rank_that_alone_cannot_go_on_ends_the_call_within_seconds_and_says_why(
    pair: LocalActor, spec: Build, random_rows: Rows
) -> None:
    pair.close()
    actor = LocalActor(spec(**TWO_RANKS))
    try:
        rows = random_rows(2, 3)
        balance(rows, 2)[1][0].ids[0] = VOCAB
        started = time.monotonic()
        with pytest.raises(RunFailed, match=r"rank 1 of 2 failed: Traceback[^$]*IndexError: index out of range"):
            actor.train([rows])
        assert time.monotonic() < started + 30
    finally:
        actor.close()


PARENT = """
import multiprocessing, sys
from molt_gym.trainers.actor.fsdp_actor import ActorSpec
from molt_gym.trainers.actor.launch import LocalActor
from molt_gym.trainers.config import load_config
import torch

if __name__ == "__main__":
    config = load_config("Any-v0", overrides={"actor__world_size": 2})
    actor = LocalActor(ActorSpec(sys.argv[1], config, torch.float32, 1))
    print(multiprocessing.active_children()[0].pid, flush=True)
    # The other rank waits for this one in a collective.
    weights = actor.weights()
    next(weights)
    sys.stdin.read()
"""


def test_no_rank_outlives_a_parent_that_was_killed(model_path: Callable[..., Path], tmp_path: Path) -> None:
    script = tmp_path / "parent.py"
    script.write_text(PARENT)
    parent = subprocess.Popen([sys.executable, str(script), str(model_path())], stdin=subprocess.PIPE,
                              stdout=subprocess.PIPE, text=True)
    try:
        rank = int(parent.stdout.readline())
        assert Path(f"/proc/{rank}").exists()
    finally:
        parent.kill()
        parent.communicate()
    deadline = time.monotonic() + 20
    while alive(rank) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not alive(rank)


SCRIPT = """
import sys
import torch
from molt_gym.trainers.actor.fsdp_actor import ActorSpec
from molt_gym.trainers.actor.launch import LocalActor
from molt_gym.trainers.config import load_config

with open(sys.argv[2], "a") as file:
    file.write("run once ")
config = load_config("Any-v0", overrides={"actor.world_size": 2})
LocalActor(ActorSpec(sys.argv[1], config, torch.float32, 1)).close()
"""


def test_ranks_do_not_run_the_script_that_starts_them(model_path: Callable[..., Path], tmp_path: Path) -> None:
    script, log = tmp_path / "script.py", tmp_path / "log"
    script.write_text(SCRIPT)
    subprocess.run([sys.executable, str(script), str(model_path()), str(log)], check=True, timeout=300)
    assert log.read_text() == "run once "


def alive(pid: int) -> bool:
    status = Path(f"/proc/{pid}/status")
    return status.exists() and "State:\tZ" not in status.read_text()
