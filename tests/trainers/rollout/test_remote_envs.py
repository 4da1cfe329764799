"""Envs that servers run, as a run plays and trains on them."""

import asyncio
import json
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import molt_gym
from molt_gym import as_policy
from molt_gym.trainers.rollout.runner import Limits, Runner
from molt_gym.trainers.rollout.seats import PolicySeat
from molt_gym.trainers.rollout.ticket import Ticket

pytestmark = pytest.mark.slow
ROW = {"responses_create_params": {"input": "Which number is it?"}, "initial": 1, "expected": 1, "secret": 3}


@pytest.fixture(scope="module", params=["openenv", "count", "guess"])
def remote(request: pytest.FixtureRequest, serve: Callable, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A server, the id of its env and the arguments for it."""
    if request.param == "openenv":
        pytest.importorskip("openenv")
        server = serve("molt_gym/adapters/openenv_server.py")
        return server, "openenv/Remote-v0", {"url": [f"{server.url}/guess", "http://127.0.0.1:9"]}
    pytest.importorskip("itsdangerous")
    rows = tmp_path_factory.mktemp("rows") / "rows.jsonl"
    rows.write_text((json.dumps(ROW) + "\n") * 20)
    server = serve("molt_gym/adapters/nemo_gym_server.py")
    return server, "nemo_gym/Remote-v0", {"url": f"{server.url}/{request.param}", "dataset": str(rows)}


def sessions_of(server: Any) -> int:
    with urllib.request.urlopen(f"{server.url}/open", timeout=30) as answer:
        return json.load(answer)["guess"]


async def test_a_rollout_whose_server_is_killed_is_counted_and_played_again(remote: Any) -> None:
    server, env_id, kwargs = remote
    deaths = iter([True])

    def answer(observation: dict) -> str:
        if next(deaths, False):
            server.kill()
            server.start()
        return "1"

    policy = as_policy(answer)
    runner = Runner(env_id, lambda: molt_gym.make(env_id, max_episode_steps=2, **kwargs),
                    lambda ticket, attempt: PolicySeat(policy), Limits(generate_timeout=150.0))
    ticket = Ticket(index=3, group=0, rollout=0, seed=7, step=1)
    first, second = [await asyncio.wait_for(runner.play(ticket), 300) for _ in range(2)]
    async with asyncio.timeout(30):
        # Both were cut short, and their env waits for the next one.
        while sessions_of(server):
            await asyncio.sleep(0.05)
    await runner.aclose()
    # Where a session is more than a connection, a server that is back already says that it does not know it.
    assert sum(runner.retried.values()) == 1 and set(runner.retried) <= {"server_gone", "server_error"}
    assert first.failure is None and second.failure is None
    assert (first.reward, first.messages) == (second.reward, second.messages)


def test_a_run_trains(remote: Any, train: Callable, tmp_path: Path) -> None:
    _, env_id, kwargs = remote
    run = tmp_path / "run"
    train(run, env=env_id, steps=2, env_kwargs=kwargs, eval={"before": False, "after": False})
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [line["rollout/count"] for line in lines] == [8, 8]
    assert all(-1.75 <= line["reward/mean"] <= 1.0 and line["mismatch/abs_diff_mean"] < 1e-3 for line in lines)
