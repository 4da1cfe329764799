"""Whole evaluations: several envs, endpoints, and going on after an end."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import molt_gym
from molt_gym import ChatEnv, ConfigError, RunFailed, Turn, as_policy
from molt_gym.cli import main
from molt_gym.policy import EndpointMessage, EndpointPolicy
from molt_gym.server.respond import PolicyRespondent
from molt_gym.server.server import LoopbackServer
from molt_gym.threads import call_in_thread

LETTERS, COIN = "toy_envs:Letters-v0", "toy_envs:Coin-v0"
SMALL = {"rollout": {"max_tokens": 4, "max_context": 128}}


class Api:
    """An OpenAI-compatible endpoint whose model answers with `reply(observation)`; `asked` are its prompts."""

    def __init__(self, reply: Any) -> None:
        self.asked: list[Any] = []
        self.most = self.now = 0
        self._reply, self._loop = reply, asyncio.new_event_loop()
        self._ended = call_in_thread(self._loop.run_forever, "api")
        self.url, self.key = asyncio.run_coroutine_threadsafe(self._start(), self._loop).result(30)

    async def _start(self) -> tuple[str, str]:
        self.server = LoopbackServer()
        await self.server.start()
        session = self.server.open(PolicyRespondent(as_policy(self._answer)), max_turns=None)
        return session.url + "/v1", session.key

    async def _answer(self, observation: Any) -> Any:
        self.asked.append(observation)
        self.now += 1
        self.most = max(self.most, self.now)
        await asyncio.sleep(0.02)
        self.now -= 1
        reply = self._reply(observation)
        return await reply if asyncio.iscoroutine(reply) else reply

    def close(self) -> None:
        asyncio.run_coroutine_threadsafe(self.server.close(), self._loop).result(30)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._ended.result(30)
        self._loop.close()


@pytest.fixture
def api(monkeypatch: pytest.MonkeyPatch) -> Any:
    """`api(reply)` serves; the key is in the environment, and the SDK does not wait before it asks again."""
    made: list[Api] = []
    monkeypatch.setattr("openai._base_client.INITIAL_RETRY_DELAY", 0.01)

    def make(reply: Any) -> Api:
        made.append(Api(reply))
        monkeypatch.setenv("OPENAI_API_KEY", made[-1].key)
        return made[-1]

    yield make
    for one in made:
        one.close()


def test_an_endpoint_is_evaluated_like_a_model(toys: Path, api: Any) -> None:
    served = api(lambda observation: "abc")
    result = molt_gym.evaluate(LETTERS, endpoint=served.url, endpoint_model="any", episodes=5, k=2)
    same = molt_gym.evaluate(LETTERS, lambda observation: "abc", episodes=5, k=2)
    assert result.metrics() == same.metrics() and result.pass_at[1] == 1
    assert [t.index for t in result.trajectories] == [t.index for t in same.trajectories]
    assert served.most > 1


def test_an_endpoint_is_asked_for_no_more_than_it_may_be_at_a_time(toys: Path, api: Any) -> None:
    served = api(lambda observation: "abc")
    options = {"rollout.max_concurrency": 2}
    molt_gym.evaluate(COIN, endpoint=served.url, endpoint_model="any", episodes=6, **options)
    assert served.most <= 2


def test_the_tokens_that_an_endpoint_tells_are_the_lengths_and_what_it_cut_is_truncated(
    toys: Path, api: Any, tmp_path: Path
) -> None:
    def reply(observation: Any) -> EndpointMessage:
        message = EndpointMessage(role="assistant", content="abc")
        message.completion_tokens, message.cut = 7, "task 1" in observation["messages"][0]["content"]
        return message

    served, options = api(reply), {"episodes": 4, "env_kwargs": {"num_tasks": 4}, "out": tmp_path}
    for _ in range(2):
        result = molt_gym.evaluate(LETTERS, endpoint=served.url, endpoint_model="any", **options)
        assert (result.length_mean, result.truncated) == (2 * 7, 0.25)


def test_an_endpoint_that_fails_is_a_failure_by_reason_and_no_score(toys: Path, api: Any) -> None:
    def reply(observation: Any) -> str:
        if "task 1" in observation["messages"][0]["content"]:
            raise ValueError("no idea")
        return "abc"

    served = api(reply)
    wait = {"retries": 0}
    result = molt_gym.evaluate(LETTERS, endpoint=served.url, endpoint_model="any", episodes=4,
                               env_kwargs={"num_tasks": 4}, rollout=wait)
    assert result.pass_at == {1: 1.0} and sum(result.failures.values()) == 1


def test_an_endpoint_that_is_not_there_is_said(toys: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("openai._base_client.INITIAL_RETRY_DELAY", 0.01)
    with pytest.raises(RunFailed, match="no rollout ended.*policy_error.*APIConnectionError"):
        molt_gym.evaluate(COIN, endpoint="http://127.0.0.1:9/v1", endpoint_model="any", episodes=1)


async def test_a_policy_of_an_endpoint_passes_tools_and_calls_on(api: Any) -> None:
    call = {"id": "call_1", "type": "function", "function": {"name": "look", "arguments": '{"at": 1}'}}
    served = api(lambda observation: {"role": "assistant", "content": "", "reasoning_content": "hm",
                                      "tool_calls": [call]})
    policy = EndpointPolicy(served.url, "any", max_tokens=5, temperature=0.5)
    tool = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}
    try:
        reply = await policy.reply([{"role": "user", "content": "Where?"}], [tool])
    finally:
        await policy.aclose()
    assert reply == {"role": "assistant", "content": "", "reasoning_content": "hm", "tool_calls": [call]}
    assert served.asked[0]["messages"] == [{"role": "user", "content": "Where?"}]
    assert served.asked[0]["tools"][0]["function"]["name"] == "look"


class Bench(ChatEnv):
    """Tasks to be evaluated on alone."""

    num_tasks = 3

    def __init__(self, split: str = "train") -> None:
        super().__init__()
        if split != "test":
            raise ConfigError(f"split: {split!r}; there is only 'test'")

    def begin(self, index: int) -> list[dict[str, Any]]:
        return [{"role": "user", "content": f"task {index}"}]

    def answer(self, message: dict[str, Any]) -> Turn:
        return Turn([], 1.0, True)


@pytest.mark.parametrize("env", [Bench, None, []])
def test_what_is_no_id_is_refused(env: Any) -> None:
    with pytest.raises(ConfigError, match="env: got .*; write the id of an env"):
        molt_gym.evaluate(env, "tiny")


def test_an_env_that_has_held_out_tasks_alone_is_evaluated(tiny_path: Path) -> None:
    molt_gym.register("Bench-v0", Bench)
    small = {"rollout": {"max_tokens": 4, "max_context": 128}, "episodes": 2}
    assert molt_gym.evaluate("Bench-v0", tiny_path, **small).pass_at == {1: 1.0}


@pytest.mark.parametrize(("wrong", "words"), [
    ({"endpoint": "http://x/v1"}, "endpoint_model = None; write both"),
    ({"endpoint_model": "any"}, "endpoint: None"),
    ({"endpoint": "http://x/v1", "endpoint_model": "any", "model": "tiny"}, "model: 'tiny' with an endpoint"),
    ({"k": []}, r"k: \[\]"), ({"k": [4, 0]}, "k: "), ({"k": 2.0}, "k: 2.0"),
    ({"env": []}, r"env: got \[\]; write the id")])
def test_what_makes_no_sense_is_refused(toys: Path, wrong: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        molt_gym.evaluate(**{"env": COIN} | wrong)


def test_several_envs_score_as_each_does_alone_on_one_engine(
    toys: Path, tiny_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from molt_gym.trainers import evaluation

    opened: list[Any] = []
    original = evaluation.open_sampler

    async def counted(*args: Any) -> Any:
        opened.append(args)
        return await original(*args)

    monkeypatch.setattr(evaluation, "open_sampler", counted)
    both = molt_gym.evaluate([LETTERS, COIN], tiny_path, episodes=3, **SMALL)
    assert list(both) == [LETTERS, COIN] and len(opened) == 1
    for env, result in both.items():
        assert result.metrics() == molt_gym.evaluate(env, tiny_path, episodes=3, **SMALL).metrics()


def test_an_evaluation_goes_on_with_the_tasks_that_it_lacks(toys: Path, tiny_path: Path, tmp_path: Path) -> None:
    options = {"k": [1, 2, 4], "out": tmp_path / "out", **SMALL}
    whole = molt_gym.evaluate(COIN, tiny_path, episodes=5, **options | {"out": None})
    first = molt_gym.evaluate(COIN, tiny_path, episodes=2, **options)
    rest = molt_gym.evaluate(COIN, tiny_path, episodes=5, **options)
    assert (len(first.trajectories), len(rest.trajectories)) == (8, 12)
    assert rest.metrics() == whole.metrics() and rest.intervals == whole.intervals
    assert set(whole.pass_at) == {1, 2, 4} and set(whole.pass_hat) == {2, 4}
    again = molt_gym.evaluate(COIN, tiny_path, episodes=5, **options)
    assert again.trajectories == [] and again.metrics() == whole.metrics()
    rows = [json.loads(line) for line in (tmp_path / "out" / "toy_envs-Coin-v0.jsonl").read_text().splitlines()]
    assert [row["attempts"] for row in rows] == [4] * 5
    with pytest.raises(ConfigError, match="seed: 3, but"):
        molt_gym.evaluate(COIN, tiny_path, episodes=5, seed=3, **options)


def test_a_checkpoint_and_a_run_are_evaluated_as_the_model_that_the_run_left(train: Any, tmp_path: Path) -> None:
    run = train(tmp_path / "run", actor__lr=0.05).run_dir
    options = {"episodes": 6, **SMALL}
    expected = molt_gym.evaluate(LETTERS, run / "model", **options).tasks
    assert molt_gym.evaluate(LETTERS, str(run), **options).tasks == expected
    checkpoint = run / "checkpoints" / "step-000002"
    for played in (6, 0):
        result = molt_gym.evaluate(LETTERS, checkpoint, out=tmp_path / "out", **options)
        assert result.tasks == expected and len(result.trajectories) == played
    assert json.loads((tmp_path / "out" / "toy_envs-Letters-v0.json").read_text())["model"] == str(checkpoint)


def test_a_task_whose_attempt_failed_is_played_again(toys: Path, tmp_path: Path) -> None:
    broken = [True]

    def reply(observation: Any) -> str:
        if broken[0] and observation["messages"][0]["content"] == "task 1":
            raise ValueError("no idea")
        return "abc"

    options = {"episodes": 4, "out": tmp_path, "env_kwargs": {"num_tasks": 4}}
    assert molt_gym.evaluate(LETTERS, reply, **options).failures == {"policy_error": 1}
    broken[0] = False
    result = molt_gym.evaluate(LETTERS, reply, **options)
    assert (result.failures, result.episodes, [t.index for t in result.trajectories]) == ({}, 4, [1])


@pytest.mark.slow
def test_a_killed_evaluation_plays_no_finished_task_again(toys: Path, api: Any, tmp_path: Path) -> None:
    slow, table = [True], tmp_path / "out" / "toy_envs-Coin-v0.jsonl"

    async def reply(observation: Any) -> str:
        # All but the first six tasks take for ever.
        while slow[0] and served.asked.index(observation) >= 6:
            await asyncio.sleep(0.01)
        return "ab"

    served = api(reply)
    words = ["eval", COIN, "--endpoint", served.url, "--endpoint-model", "any", "--out", str(tmp_path / "out"),
             "--rollout.max-concurrency", "4", "--episodes", "12", "--json"]
    process = subprocess.Popen([sys.executable, "-m", "molt_gym", *words], stdout=subprocess.DEVNULL,
                               env=os.environ | {"PYTHONPATH": os.environ["PYTHONPATH"]})
    deadline = time.monotonic() + 300
    while not table.exists() or table.read_bytes().count(b"\n") < 6:
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait(30)
    slow[0], before = False, len(served.asked)
    assert main(words) == 0
    asked = [observation["messages"][0]["content"] for observation in served.asked]
    assert len(asked) - before == 6 and not set(asked[:6]) & set(asked[before:])


def test_the_command_prints_a_column_for_each_env_and_json_in_a_list(
    toys: Path, tiny_path: Path, capsys: pytest.CaptureFixture
) -> None:
    words = ["eval", LETTERS, COIN, "--model", str(tiny_path), "--episodes", "2", "--k", "1,2",
             "--rollout.max-tokens", "4", "--rollout.max-context", "128"]
    assert main(words) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["env", LETTERS, COIN] in lines
    assert any(len(line) == 7 and line[0] == "mean_at_2" for line in lines)
    assert {"pass_at_1", "pass_at_2", "pass_hat_2", "mean_at_2", "length_mean"} <= {line[0] for line in lines if line}
    assert main([*words, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [one["env"] for one in found] == [LETTERS, COIN] and len(found[1]["intervals"]["pass_at_2"]) == 2
