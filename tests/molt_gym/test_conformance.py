"""The checks of `molt-gym check-env`: what there is passes them, and each fault is found by the one that is for it."""

import os
import random
import threading
from contextlib import closing
from itertools import islice

import gymnasium as gym
import pytest

import molt_gym
from molt_gym import cli
from molt_gym.adapters.suites import SUITES
from molt_gym.conformance import CHECKS, check, some_turns
from molt_gym.listing import listing
from molt_gym.trainers.rollout.env_maker import EnvMaker

SHIPPED = [env.id for env in listing().envs if env.source in ("molt_gym", "gymnasium") and not env.needs]
MINIGRID = ["minigrid:MiniGrid-DoorKey-6x6-v0", "minigrid:BabyAI-GoToObj-v0"]
SAMPLE = 2
INSTALLED = [name for name, suite in SUITES.items() if suite.installed]


class Good(molt_gym.ChatEnv):
    """Says a number; right is to say it again."""

    num_tasks = 5

    def begin(self, index):
        return [{"role": "user", "content": f"{index} {self.np_random.integers(100)}"}]

    def answer(self, message):
        return molt_gym.Turn(reward=1.0, terminated=molt_gym.text_of(message) == "x", messages=[
            {"role": "user", "content": "and?"}] * (molt_gym.text_of(message) != "x"))


class DrawsGlobally(Good):
    """Draws from the generator of all."""

    def begin(self, index):
        return [{"role": "user", "content": str(random.random())}]


class Raises(Good):
    """Cannot bear long replies."""

    def answer(self, message):
        if len(molt_gym.text_of(message)) > 1000:
            raise RuntimeError("too long")
        return super().answer(message)


class Fails(Good):
    """Takes nonsense for trouble of its own."""

    def answer(self, message):
        if message.get("tool_calls"):
            raise molt_gym.EnvFailure("tool", "there are no tools")
        return super().answer(message)


class GoesOn(Good):
    """Does not know when it is over."""

    def step(self, action):
        self._over = False
        return super().step(action)


class ClosesOnce(Good):
    """Falls over at the second close."""

    closed = False

    def close(self):
        if self.closed:
            raise RuntimeError("closed already")
        self.closed = True


class Improvises(Good):
    """Says something else each time."""

    count = 0

    def answer(self, message):
        Improvises.count += 1
        return molt_gym.Turn([{"role": "user", "content": f"{Improvises.count}"}])


class MovesAway(Good):
    """Works in another folder, and stays there."""

    def begin(self, index):
        os.chdir("/" if os.getcwd() != "/" else "/tmp")
        return super().begin(index)


class LeavesThreads(Good):
    """Starts what it does not end."""

    def begin(self, index):
        threading.Thread(target=threading.Event().wait, args=[60], daemon=True).start()
        return super().begin(index)


class KeepsFiles(Good):
    """Opens a file for each episode, and forgets it somewhere."""

    kept = []

    def begin(self, index):
        KeepsFiles.kept.append(open(os.devnull))
        return super().begin(index)


class KnowsWhere(Good):
    """Says what is true of one process alone."""

    def begin(self, index):
        return [{"role": "user", "content": f"{os.getpid()}"}]


class TellsObjects(Good):
    """Has in its infos what is equal to nothing."""

    def answer(self, message):
        return molt_gym.Turn(terminated=True, info={"thing": ValueError()})


def played(maker):
    """What some turns in a new env bring about."""
    with closing(maker()) as env:
        return some_turns(env)


@pytest.fixture
def registered(request):
    env_id = f"Checked{request.param.__name__}-v0"
    molt_gym.register(env_id, request.param)
    yield env_id
    gym.registry.pop(env_id, None)


@pytest.mark.parametrize("env_id", SHIPPED)
def test_every_env_that_ships_keeps_to_the_contract(env_id):
    assert [finding for finding in check(env_id) if finding.problem] == []


def can_be_made(env_id):
    """Whether all that it needs is on this machine, such as a data set of the hub."""
    try:
        molt_gym.make(env_id).close()
    except molt_gym.ConfigError:
        return False
    return True


@pytest.fixture
def minigrid():
    """Its ids, which go with the first test that imports it, as each test has the registry to itself."""
    package = pytest.importorskip("minigrid")
    if MINIGRID[0].partition(":")[2] not in gym.registry:
        package.register_minigrid_envs()


def makeable(suite, count, monkeypatch):
    """Some ids of a suite, the same ones each time, that need nothing else: no server, data of the hub or opponent."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    ids = [env.id for env in molt_gym.list_envs(suite) if not env.needs]
    random.Random(0).shuffle(ids)
    return list(islice(filter(can_be_made, ids), count))


@pytest.mark.slow
@pytest.mark.parametrize("suite", INSTALLED)
def test_a_sample_of_each_suite_keeps_to_the_contract(suite, monkeypatch):
    if all(env.needs for env in molt_gym.list_envs(suite)):
        pytest.skip(f"every id of {suite} needs arguments, such as the URL of a server")
    ids = makeable(suite, SAMPLE, monkeypatch)
    assert ids
    for env_id in ids:
        assert (env_id, [finding for finding in check(env_id) if finding.problem]) == (env_id, [])


@pytest.mark.slow
@pytest.mark.parametrize("env_id", MINIGRID)
def test_envs_of_packages_that_register_with_gymnasium_keep_to_the_contract(minigrid, env_id):
    assert [finding for finding in check(env_id) if finding.problem] == []


@pytest.mark.slow
def test_every_env_plays_in_a_worker_of_ray_as_it_plays_here(minigrid, monkeypatch):
    ray = pytest.importorskip("ray")
    samples = [env_id for suite in INSTALLED for env_id in makeable(suite, 1, monkeypatch)]
    makers = [EnvMaker.of(env_id, {}) for env_id in (*SHIPPED, *MINIGRID[:1], *samples)]
    # Other tests may have a cluster, which this process is then in.
    alone = not ray.is_initialized()
    if alone:
        ray.init("local", num_cpus=1, include_dashboard=False, log_to_driver=False)
    try:
        play = ray.remote(played)
        there = ray.get([play.remote(maker) for maker in makers], timeout=300)
    finally:
        if alone:
            ray.shutdown()
    for maker, said in zip(makers, there, strict=True):
        here = played(maker)
        assert said == here if not maker.spec.nondeterministic else said[0] == here[0], maker.env_id


@pytest.mark.parametrize("registered", [Good], indirect=True)
def test_a_good_env_of_somebody_passes_all(registered, capsys):
    assert cli.main(["check-env", registered]) == 0
    assert capsys.readouterr().out.splitlines() == [f"ok      {name}" for name in CHECKS]


@pytest.mark.parametrize(("registered", "name", "words"), [
    (DrawsGlobally, "what all envs share stays as it is", "changed Python's global generator"),
    (MovesAway, "what all envs share stays as it is", "changed the working directory"),
    (Raises, "any reply is taken", "too long"),
    (Fails, "any reply is taken", "nonsense scores low"),
    (GoesOn, "an end is an end", "did not raise ResetNeeded"),
    (ClosesOnce, "an end is an end", "closed already"),
    (LeavesThreads, "what is closed leaves nothing", "left 0 open files, 8 threads and 0 processes"),
    (KeepsFiles, "what is closed leaves nothing", "left 8 open files, 0 threads"),
    (KnowsWhere, "it plays in another process", "different outcomes in another process"),
    (TellsObjects, "it plays in another process", "give infos plain values"),
    (Improvises, "equal seeds, equal episodes", "nondeterministic=True"),
], indirect=["registered"])
def test_a_fault_is_found_by_the_check_that_is_for_it(registered, name, words, monkeypatch):
    monkeypatch.chdir(os.getcwd())
    monkeypatch.setattr("molt_gym.conformance._SETTLES", 0.1)
    with pytest.raises(Exception, match=words):
        CHECKS[name](EnvMaker.of(registered, {}))


@pytest.mark.parametrize("registered", [Raises], indirect=True)
def test_the_command_fails_and_says_what_is_wrong(registered, capsys):
    assert cli.main(["check-env", registered]) != 0
    wrong = [line for line in capsys.readouterr().out.splitlines() if not line.startswith("ok ")]
    assert wrong == ["WRONG   any reply is taken: RuntimeError: too long"]


def test_what_is_no_env_is_said_at_once(capsys):
    assert cli.main(["check-env", "Nothing-v0"]) != 0
    assert "no env is registered as 'Nothing-v0'" in capsys.readouterr().err


def moves_alone():
    """Makes an env whose class nobody asks before it is made."""
    return type("MovesAlone", (MovesAway,), {"own_process": True})()


def test_a_process_of_its_own_that_nobody_will_give_is_told(monkeypatch):
    monkeypatch.chdir(os.getcwd())
    gym.register("MovesAlone-v0", moves_alone)
    problems = {finding.name: finding.problem for finding in check("MovesAlone-v0")}
    assert "register the class" in problems["what all envs share stays as it is"]
