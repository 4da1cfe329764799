"""The checks of `molt-gym check-env`: what there is passes them, and each fault is found by the one that is for it."""

import random

import gymnasium as gym
import pytest

import molt_gym
from molt_gym import cli
from molt_gym.conformance import CHECKS, check
from molt_gym.listing import listing

SHIPPED = [env.id for env in listing().envs if env.source in ("molt_gym", "gymnasium")]


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


@pytest.fixture
def registered(request):
    env_id = f"Checked{request.param.__name__}-v0"
    molt_gym.register(env_id, request.param)
    yield env_id
    gym.registry.pop(env_id, None)


@pytest.mark.parametrize("env_id", SHIPPED)
def test_every_env_that_ships_keeps_to_the_contract(env_id):
    assert [finding for finding in check(env_id) if finding.problem] == []


@pytest.mark.parametrize("registered", [Good], indirect=True)
def test_a_good_env_of_somebody_passes_all(registered, capsys):
    assert cli.main(["check-env", registered]) == 0
    assert capsys.readouterr().out.splitlines() == [f"ok      {name}" for name in CHECKS]


@pytest.mark.parametrize(("registered", "name", "words"), [
    (DrawsGlobally, "global generators stay as they are", "draw from self.np_random"),
    (Raises, "any reply is taken", "RuntimeError: too long"),
    (Fails, "any reply is taken", "nonsense scores low"),
    (GoesOn, "an end is an end", "did not raise ResetNeeded"),
    (ClosesOnce, "an end is an end", "closed already"),
    (Improvises, "equal seeds, equal episodes", "nondeterministic=True"),
], indirect=["registered"])
def test_a_fault_is_found_and_the_command_fails(registered, name, words, capsys):
    found = {finding.name: finding.problem for finding in check(registered)}
    assert words in found[name]
    assert cli.main(["check-env", registered]) != 0
    assert f"WRONG   {name}: " in capsys.readouterr().out


def test_what_is_no_env_is_said_at_once(capsys):
    assert cli.main(["check-env", "Nothing-v0"]) != 0
    assert "no env is registered as 'Nothing-v0'" in capsys.readouterr().err
