"""Ranks that are Ray actors: the same update as ranks of this process, and a clear end when one of them dies."""

import os
import random
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from molt_gym.errors import ConfigError, RunFailed
from molt_gym.tokens import Row
from molt_gym.trainers.actor.actor import ActorLost
from molt_gym.trainers.actor.fsdp_actor import ActorSpec
from molt_gym.trainers.actor.launch import LocalActor
from molt_gym.trainers.actor.packing import RemoteRow, TrainRow
from molt_gym.trainers.config import load_config

ray = pytest.importorskip("ray")
ray_actor = pytest.importorskip("molt_gym.trainers.placement.ray_actor")

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("cluster")]

OPTIONS = [{"num_cpus": 1}, {"num_cpus": 1}]


def rows(groups: int, size: int, seed: int = 0, start: int = 0) -> list[TrainRow]:
    rng = random.Random(seed)
    found = []
    for group in range(groups):
        prompt = [rng.randrange(300) for _ in range(rng.randint(2, 9))]
        for _ in range(size):
            reply = [rng.randrange(300) for _ in range(rng.randint(1, 12))]
            mask = [0] * len(prompt) + [1] * len(reply)
            found.append(TrainRow(prompt + reply, mask, [-rng.random() * bit for bit in mask], rng.uniform(-2, 2), 0.01,
                                  start + len(found), start + group))
    return found


def windows() -> list[list[TrainRow]]:
    return [rows(3, 4, seed=1), rows(2, 3, seed=2, start=12)]


def spec(path: Path, ranks: int, **options: Any) -> ActorSpec:
    settings = {"actor__lr": 0.05, "actor__eps": 0.1, "actor__micro_batch_tokens": 40, "actor__world_size": ranks,
                "rollout__max_tokens": 64, "rollout__max_context": 256}
    return ActorSpec(str(path), load_config("Any-v0", overrides=settings | options), torch.float32, 10)


def weights_of(actor: Any) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in actor.weights()}


def check(actor: Any, expected: dict[str, Tensor], tolerance: float = 1e-6) -> None:
    found = weights_of(actor)
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        torch.testing.assert_close(tensor, expected[name], rtol=0, atol=tolerance)


def pids(actor: Any) -> list[int]:
    return ray.get([rank.__ray_call__.remote(lambda _: os.getpid()) for rank in actor._ranks])


@pytest.fixture(scope="module")
def local(wide_path: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What one rank of this process makes of the windows, and its checkpoint before."""
    folder = tmp_path_factory.mktemp("local")
    actor = LocalActor(spec(wide_path, 1))
    try:
        actor.save(folder / "start")
        metrics = actor.train(windows())
        return {"folder": folder, "metrics": metrics, "weights": weights_of(actor), "updates": actor.updates,
                "logprobs": actor.logprobs([3, 1, 4, 1, 5])}
    finally:
        actor.close()


@pytest.fixture(scope="module")
def pair(cluster: None, wide_path: Path) -> Iterator[Any]:
    actor = ray_actor.RayActor(spec(wide_path, 2), OPTIONS)
    yield actor
    actor.close()


def test_one_rank_behind_ray_makes_the_update_of_one_here_and_writes_what_two_read(
    pair: Any, wide_path: Path, local: dict[str, Any], tmp_path: Path
) -> None:
    actor = ray_actor.RayActor(spec(wide_path, 1), OPTIONS[:1])
    try:
        actor.train(windows())
        check(actor, local["weights"], 0)
        actor.save(tmp_path / "state")
    finally:
        actor.close()
    pair.load(tmp_path / "state")
    assert pair.updates == 2
    check(pair, local["weights"], 0)


def test_two_ranks_make_the_update_of_one(pair: Any, local: dict[str, Any]) -> None:
    pair.load(local["folder"] / "start")
    assert pair.updates == 0
    metrics = pair.train(windows())
    check(pair, local["weights"])
    assert pair.updates == local["updates"] == 2
    assert pair.logprobs([3, 1, 4, 1, 5]) == pytest.approx(local["logprobs"], abs=1e-5)
    for name, value in local["metrics"].items():
        if not name.startswith(("time/", "perf/")):
            assert metrics[name] == pytest.approx(value, abs=1e-5), name


def test_rows_that_lie_elsewhere_train_as_those_at_hand(pair: Any, local: dict[str, Any]) -> None:
    pair.load(local["folder"] / "start")
    remote = []
    for window in windows():
        source = ray.put([Row(row.ids, row.mask, row.logprobs, [0] * len(row.ids)) for row in window])
        remote.append([RemoteRow(source, number, row.advantage, row.weight, row.row, row.group)
                       for number, row in enumerate(window)])
    assert pair.lost([window[0].source for window in remote]) == [False, False]
    pair.train(remote)
    check(pair, local["weights"])


def test_rows_that_are_lost_with_their_node_are_found_before_training_and_told_if_nobody_asked(
    cluster: Any, pair: Any, local: dict[str, Any]
) -> None:
    pair.load(local["folder"] / "start")
    node = cluster.add_node(num_cpus=1, resources={"away": 1}, object_store_memory=80_000_000)

    @ray.remote(resources={"away": 1})
    class Player:
        @ray.method(num_returns=2)
        def play(self) -> tuple[None, list[Row]]:
            # So large that they stay on the node.
            return None, [Row(list(range(10**5, 10**5 + 50_000)), *([0] * 50_000 for _ in range(3)))]

    played, lost = Player.remote().play.remote()
    ray.get(played, timeout=60)
    kept = ray.put([Row(row.ids, row.mask, row.logprobs, [0] * len(row.ids)) for row in windows()[0]])
    cluster.remove_node(node, allow_graceful=False)
    remote = [RemoteRow(kept, 0, 1.0, 0.1, 0, 0), RemoteRow(lost, 0, 1.0, 0.1, 1, 0)]
    started = time.monotonic()
    assert pair.lost([kept, lost, kept]) == [False, True, False]
    assert time.monotonic() < started + 120
    with pytest.raises(RunFailed, match="1 rows are lost"):
        pair.train([remote])
    assert pair.train([remote[:1]])["optim/grad_norm"] > 0


def test_what_is_wrong_with_a_folder_is_raised_as_such_and_the_ranks_go_on(
    pair: Any, local: dict[str, Any], tmp_path: Path
) -> None:
    (tmp_path / "state").write_text("a file where the folder should be")
    with pytest.raises(OSError, match="state"):
        pair.save(tmp_path / "state")
    with pytest.raises(RunFailed, match=r"actor rank \d of 2 failed: .*"):
        pair.train([[RemoteRow(ray.put([]), 0, 1.0, 0.1, 0, 0)]])
    pair.load(local["folder"] / "start")
    assert pair.train(windows())["optim/grad_norm"] > 0


def test_a_model_that_cannot_be_trained_is_a_config_error(wide_path: Path) -> None:
    with pytest.raises(ConfigError, match="max_context"):
        ray_actor.RayActor(spec(wide_path, 1, rollout__max_context=2048), OPTIONS[:1])


def test_ranks_that_get_no_place_are_told_with_the_option(wide_path: Path) -> None:
    with pytest.raises(RunFailed, match="[12] of 2 actor ranks got no place .* ray.start_timeout = 2 s"):
        ray_actor.RayActor(spec(wide_path, 2, ray__start_timeout=2.0), [{"num_cpus": 1}, {"num_cpus": 64}])


def test_a_rank_that_is_killed_in_a_call_ends_it_within_seconds_and_the_others_too(pair: Any) -> None:
    # The last test of this pair.
    killed, other = pids(pair)[1], pids(pair)[0]
    killer = threading.Timer(1.0, os.kill, (killed, signal.SIGKILL))
    killer.start()
    started = time.monotonic()
    with pytest.raises(ActorLost, match="actor rank 1 of 2 died"):
        while time.monotonic() < started + 60:
            pair.train([rows(20, 8)])
    assert time.monotonic() < started + 30
    with pytest.raises(ActorLost, match="rank 1"):
        list(pair.weights())
    deadline = time.monotonic() + 20
    while Path(f"/proc/{other}").exists() and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not Path(f"/proc/{other}").exists()
