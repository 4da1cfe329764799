"""Real processes: what envs do in them stays in them, and ends with them."""

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
import time
from contextlib import closing
from functools import partial
from pathlib import Path

import pytest

import molt_gym
from molt_gym import as_policy
from molt_gym.errors import EnvFailure
from molt_gym.trainers.config import load_config
from molt_gym.trainers.rollout.env_calls import survey
from molt_gym.trainers.rollout.env_process import EnvProcess
from molt_gym.trainers.rollout.ticket import Ticket
from molt_gym.trainers.session import env_maker, policy_runner

WAIT = 90


def gone(pid):
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return True
    return state == "Z"


def until(condition, seconds=30.0):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not come about"
        time.sleep(0.02)


def started(folder):
    return [int(file.name.removeprefix("pid-")) for file in folder.glob("pid-*")]


@pytest.fixture
async def wild(toys, tmp_path):
    """`wild(deeds, env=..., policy=..., **settings)`: a runner of wild envs in processes."""
    runners = []

    def make(deeds=None, env="wild_envs:Wild-v0", policy=lambda observation: "yes", **settings):
        config = load_config(env, overrides={
            "env_kwargs": {"folder": str(tmp_path), "deeds": deeds or {}}, "rollout.retries": 0,
            **{f"rollout.{name}": value for name, value in settings.items()}})
        runners.append(policy_runner(as_policy(policy), env_maker(config), config))
        return runners[-1]

    yield make
    for runner in runners:
        await runner.aclose()


async def play(runner, *indices):
    return await asyncio.wait_for(asyncio.gather(*(runner.play(Ticket(i, i)) for i in indices)), WAIT)


async def test_each_env_has_its_own_working_directory_and_environment(wild):
    here = os.getcwd()
    played = await play(wild(), *range(3))
    assert [t.failure for t in played] == [None] * 3
    assert [(t.info["cwd"], t.info["env"], t.info["said"]) for t in played] == [
        (str(i), str(i), "yes") for i in range(3)]
    assert len({t.info["pid"] for t in played} | {os.getpid()}) == 4
    assert os.getcwd() == here and "WILD" not in os.environ


async def test_a_process_is_used_again_and_closes_its_env_in_the_end(wild, tmp_path):
    runner = wild()
    pids = [(await play(runner, index))[0].info["pid"] for index in range(3)]
    assert len(set(pids)) == 1 and not gone(pids[0])
    await runner.aclose()
    until(lambda: gone(pids[0]))
    assert (tmp_path / f"closed-{pids[0]}").exists()


@pytest.mark.slow
async def test_an_env_that_hangs_is_killed_at_its_deadline_with_all_that_it_started(wild, tmp_path):
    runner = wild({"1": "child daemon hang", "2": "exit daemon"}, step_timeout=10)
    played = await play(runner, 0, 1, 2, 3)
    assert [t.failure and t.failure.reason for t in played] == [None, "step_timeout", "env_died", None]
    assert "exit code 7" in played[2].failure.message and "rollout.step_timeout" in played[1].failure.message
    assert len(started(tmp_path)) == 3
    until(lambda: all(map(gone, started(tmp_path))))
    again = await play(runner, 0, 3)
    assert {t.info["pid"] for t in again} == {t.info["pid"] for t in (played[0], played[3])}
    assert [t.failure for t in await play(runner, 4, 5, 6, 7)] == [None] * 4


async def test_a_rollout_that_is_cancelled_ends_its_process(wild, tmp_path):
    task = asyncio.create_task(wild({"0": "child daemon hang"}).play(Ticket(0, 0)))
    async with asyncio.timeout(WAIT):
        while len(started(tmp_path)) < 2:
            await asyncio.sleep(0.05)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    until(lambda: all(map(gone, started(tmp_path))))


async def test_an_env_that_died_is_tried_again_and_counted(wild):
    runner = wild({"0": "exit"}, retries=2)
    played, = await play(runner, 0)
    assert played.failure.reason == "env_died" and runner.retried == {"env_died": 2}


@pytest.mark.parametrize(("deed", "reason", "message"), [
    ("judge", "judge", "judge: no route"), ("away", "judge", "judge: http://judge does not answer"),
    ("raise", "step_error", "Unforeseen: this and that"), ("quit", "step_error", "RuntimeError: SystemExit: 3")])
async def test_errors_arrive_with_their_reason_and_the_traceback_from_there(wild, deed, reason, message):
    played, = await play(wild({"0": deed}), 0)
    assert played.failure.reason == reason and message in played.failure.message
    assert "wild_envs.py" in played.failure.traceback and "in answer" in played.failure.traceback


async def test_an_env_that_cannot_be_made_fails_its_rollouts(wild):
    played, = await play(wild({"make": "refuse"}), 0)
    assert played.failure.reason == "reset_error" and "FileNotFoundError: tasks.json" in played.failure.message


@pytest.mark.parametrize(("mode", "env", "own"), [
    ("auto", "wild_envs:Wild-v0", True), ("never", "wild_envs:Wild-v0", False), ("auto", "toy_envs:Coin-v0", False),
    ("always", "toy_envs:Coin-v0", True), ("auto", "wild_envs:WildAgent-v0", True)])
def test_an_env_says_itself_whether_it_needs_a_process_unless_the_user_does(toys, mode, env, own):
    assert env_maker(load_config(env, overrides={"rollout.env_processes": mode})).own_process == own


async def test_what_a_rollout_waits_for_is_told(wild):
    runner = wild({"5": "hang"})
    task = asyncio.create_task(runner.play(Ticket(5, 6, 7)))
    async with asyncio.timeout(WAIT):
        while not (pending := runner.pending()) or "step" not in pending[0][0]:
            await asyncio.sleep(0.05)
    (what, seconds), = pending
    assert what == "step of rollout 7 of group 6 (wild_envs:Wild-v0 5)" and 0 <= seconds < WAIT
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert runner.pending() == []


# Agents

async def test_an_agent_in_a_process_asks_the_policy_with_its_own_client(wild):
    played = await play(wild(env="wild_envs:WildAgent-v0"), *range(2))
    assert [t.failure for t in played] == [None] * 2
    assert [(t.reward, t.turns, t.info["env"], t.info["said"]) for t in played] == [
        (0.75, 1, str(i), "yes") for i in range(2)]
    assert len({t.info["pid"] for t in played} | {os.getpid()}) == 3
    assert played[0].messages[-1]["content"] == "yes" and played[0].terminated


@pytest.mark.slow
async def test_agents_that_hang_or_die_are_killed_with_what_they_started(wild, tmp_path):
    runner = wild({"1": "daemon hang", "2": "daemon exit"}, env="wild_envs:WildAgent-v0", episode_timeout=25)
    played = await play(runner, 0, 1, 2)
    assert [t.failure and t.failure.reason for t in played] == [None, "episode_timeout", "env_died"]
    until(lambda: len(started(tmp_path)) == 2 and all(map(gone, started(tmp_path))))
    assert (await play(runner, 4))[0].reward == 0.75


@pytest.mark.parametrize("deed", ["more", pytest.param("greedy", marks=pytest.mark.slow)])
async def test_an_agent_that_wants_more_than_its_turns_is_truncated_with_what_it_earned(wild, deed):
    runner = wild({"0": deed}, env="wild_envs:WildAgent-v0")
    played, other = [(await play(runner, index))[0] for index in (0, 1)]
    assert (played.failure, played.reward, played.truncated, played.terminated) == (None, 0.25, True, False)
    assert other.reward == 0.75


async def test_an_agent_that_raises_and_an_engine_that_fails_are_told_apart(wild):
    played, = await play(wild({"0": "raise"}, env="wild_envs:WildAgent-v0"), 0)
    assert played.failure.reason == "agent" and "KeyError: 'board'" in played.failure.message

    def policy(observation):
        raise RuntimeError("out of memory")

    played, = await play(wild(env="wild_envs:WildAgent-v0", policy=policy), 0)
    assert played.failure.reason == "generation" and "RuntimeError: out of memory" in played.failure.message


# Alone

def test_what_depends_on_hashes_is_the_same_in_all_processes(monkeypatch):
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    seen = set()
    for _ in range(2):
        with closing(EnvProcess(partial(molt_gym.make, "TicTacToe-v0"))) as process:
            seen.add(process.run(lambda env: hash("a task")))
    assert len(seen) == 1


def test_whoever_asks_a_process_that_has_ended_is_told_so_each_time():
    with closing(EnvProcess(dict)) as process:
        for _ in range(3):
            with pytest.raises(EnvFailure, match="env_died: .*exit code 7"):
                process.run(lambda env: os._exit(7))


def test_a_process_that_was_killed_before_it_began_does_not_begin():
    process = EnvProcess(dict)
    process.kill()
    with pytest.raises(EnvFailure, match="env_died"):
        process.run(survey)
    process.close()


SCRIPT = """
    import os, sys
    import molt_gym
    from molt_gym import ChatEnv, Turn

    REWARD = 0.75

    class Here(ChatEnv):
        own_process = True

        def begin(self, index):
            os.environ["HERE"] = str(index)
            return [{"role": "user", "content": "hi"}]

        def answer(self, message):
            if message["content"] == "hang":
                import subprocess, time
                sleeper = subprocess.Popen(["sleep", "300"], start_new_session=True)
                print(os.getpid(), os.getppid(), sleeper.pid, flush=True)
                time.sleep(300)
            return Turn([], REWARD, True, {"pid": os.getpid()})

    molt_gym.register("Here-v0", ENTRY)
    print("once", flush=True)
"""
ROLLOUT = """
    trajectory, = molt_gym.rollout("Here-v0", lambda observation: "yes", 1)
    reward, info = trajectory.reward, trajectory.info
"""
CALLS = """
    from functools import partial
    from molt_gym.trainers.rollout.env_calls import reset, step
    from molt_gym.trainers.rollout.env_maker import EnvMaker
    from molt_gym.trainers.rollout.env_process import EnvProcess
    from molt_gym.trainers.rollout.ticket import Ticket

    maker = EnvMaker.of("Here-v0", {}, MODE)
    assert maker.own_process
    process = EnvProcess(maker)
    process.run(partial(reset, ticket=Ticket(0, 0)))
    _, reward, _, _, info = process.run(partial(step, reply={"role": "assistant", "content": sys.argv[1]}))
    process.close()
"""
END = """
    print("reward", reward, info["pid"] != os.getpid(), "HERE" in os.environ)
"""


@pytest.fixture
def script(tmp_path):
    """Writes a program that registers an env of its own and plays it."""
    def write(play=CALLS, entry="Here", mode="'auto'"):
        file = tmp_path / "script.py"
        file.write_text(textwrap.dedent(SCRIPT + play + END).replace("ENTRY", entry).replace("MODE", mode))
        return file

    return write


@pytest.mark.parametrize(("play", "entry", "mode"), [
    (CALLS, "Here", "'auto'"), (CALLS, "'__main__:Here'", "'auto'"),
    (CALLS, "lambda **kwargs: Here(**kwargs)", "'always'"),
    pytest.param(ROLLOUT, "Here", "", marks=pytest.mark.slow)])
def test_a_script_without_a_guard_may_define_its_env_itself(script, tmp_path, play, entry, mode):
    ended = subprocess.run([sys.executable, script(play, entry, mode), "yes"], capture_output=True, text=True,
                           timeout=WAIT, cwd=tmp_path)
    assert ended.stdout == "once\nreward 0.75 True False\n", ended.stderr


def test_no_process_is_left_when_the_trainer_is_killed(script):
    with subprocess.Popen([sys.executable, script(), "hang"], stdout=subprocess.PIPE, text=True) as trainer:
        assert trainer.stdout.readline() == "once\n"
        pids = list(map(int, trainer.stdout.readline().split()))
        assert len(pids) == 3 and not any(map(gone, pids))
        os.kill(trainer.pid, signal.SIGKILL)
        until(lambda: all(map(gone, pids)))
