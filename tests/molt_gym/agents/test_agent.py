import importlib
import pickle
import sys
from fractions import Fraction

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.envs.registration import EnvSpec

from molt_gym import EnvFailure
from molt_gym.agents import AgentEnv, ChatAgent, Result, load_agent, register_agent
from molt_gym.agents.agent import as_result


class Greeter(ChatAgent):
    num_tasks = 7

    def __init__(self, greeting="hello"):
        self.greeting = greeting

    def run(self, ctx):
        return 1.0


async def function_agent(ctx, level=1):
    return level


def test_an_agent_is_loaded_from_a_class_an_object_and_a_function():
    assert load_agent(Greeter, greeting="hi").greeting == "hi"
    greeter = Greeter()
    assert load_agent(greeter) is greeter
    assert load_agent(function_agent).task(5, np.random.default_rng()) == 5


def test_an_agent_is_loaded_by_its_name(write_module):
    source = """
        from molt_gym.agents import ChatAgent
        class Outer:
            class Inner(ChatAgent):
                def run(self, ctx): ...
        ready = Outer.Inner()
        def play(ctx): ...
    """
    module = write_module("named_agents", source)
    loaded = [load_agent(f"{module}:{name}") for name in ("Outer.Inner", "ready", "play")]
    assert [str(agent) for agent in loaded] == ["Inner", "Inner", "play"]


@pytest.mark.parametrize(
    ("agent", "kwargs", "error", "message"),
    [
        ("no_such_module:Agent", {}, ModuleNotFoundError, "no module 'no_such_module'"),
        ("json", {}, ValueError, "package.module:Name"),
        ("json:dump2", {}, AttributeError, "did you mean 'dump"),
        ("json:JSONDecoder", {}, TypeError, "derives from molt_gym.ChatAgent, or a function"),
        ("os:sep", {}, TypeError, "derives from"),
        (Greeter, {"colour": 1}, TypeError, r"'Greeter' cannot be called with \(colour=1\)"),
        (function_agent, {"colour": 1}, TypeError, r"cannot be called with \(ctx, colour=1\)"),
        (lambda: 1, {}, TypeError, r"cannot be called with \(ctx\)"),
        (Greeter(), {"greeting": "hi"}, TypeError, "is an object already"),
        (3, {}, TypeError, "derives from"),
    ],
)
def test_what_is_no_agent_is_refused_with_advice(agent, kwargs, error, message):
    with pytest.raises(error, match=message):
        load_agent(agent, **kwargs)


def test_an_import_error_inside_the_agents_module_is_shown_as_it_is(write_module):
    module = write_module("needs_something", "import not_installed_anywhere")
    with pytest.raises(ModuleNotFoundError, match="not_installed_anywhere"):
        load_agent(f"{module}:Agent")


@pytest.mark.parametrize("value", [0, 1, True, -2.5, Fraction(1, 2), np.float32(0.5), np.bool_(True)])
def test_a_number_is_a_reward(value):
    assert as_result(value, "agent") == Result(float(value))


def test_nothing_is_a_reward_of_0_on_top_of_what_was_added():
    assert as_result(None, "agent") == Result()


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 10**400, "1", [1], 1j, Result(float("nan")),
                                   Result(1, score=float("inf")), Result(None), Result(1, score="good")])
def test_a_reward_or_score_that_is_no_finite_number_is_a_failure(value):
    with pytest.raises(EnvFailure, match="agent: the (reward|score) is .*, no finite real number") as caught:
        as_result(value, "agent")
    assert caught.value.reason == "reward"


@pytest.mark.parametrize(("value", "field"), [(Result(info=[1]), "info"), (Result(truncated=None), "truncated")])
def test_a_result_with_a_wrong_field_is_refused_by_name(value, field):
    with pytest.raises(TypeError, match=f"Result.{field}"):
        as_result(value, "agent")


REGISTERED = """
from molt_gym.agents import ChatAgent, register_agent


@register_agent("Counted-v0", max_turns=3, kwargs={"step": 2}, nondeterministic=True)
class Counted(ChatAgent):
    num_tasks = 5
    presets = {"": {"seed": 3}}

    def __init__(self, step=1):
        self.step = step

    def run(self, ctx):
        while True:
            ctx.openai().chat.completions.create(model=ctx.model, messages=[{"role": "user", "content": "?"}])
            ctx.add_reward(self.step)


@register_agent("Once-v0")
def once(ctx):
    ctx.openai().chat.completions.create(model=ctx.model, messages=[{"role": "user", "content": "once"}])
    return 1
"""


@pytest.fixture
def registered(write_module):
    module = write_module("registered_agents", REGISTERED)
    __import__(module)
    return module


def test_a_decorator_registers_a_class(registered, say):
    with gym.make("Counted-v0") as env:
        assert env.unwrapped.num_tasks == 5 and env.unwrapped.presets == {"": {"seed": 3}}
        assert env.spec.nondeterministic and env.spec.kwargs == {"agent": "registered_agents:Counted", "step": 2}
        env.reset(seed=0)
        assert [env.step(say("on"))[1:4] for _ in range(3)] == [(2, False, False), (2, False, False), (2, False, True)]


def test_a_decorator_registers_a_function_and_leaves_it_as_it_is(registered, say):
    assert sys.modules[registered].once.__name__ == "once"
    with gym.make("Once-v0") as env:
        env.reset(seed=0)
        assert env.step(say("ok"))[1:4] == (1.0, True, False)


def test_the_spec_of_a_registered_agent_survives_json_and_pickle(registered, say):
    for copied in (EnvSpec.from_json(gym.spec("Once-v0").to_json()), pickle.loads(pickle.dumps(gym.spec("Once-v0")))):
        with gym.make(copied) as env:
            assert env.reset(seed=0)[0]["messages"] == [{"role": "user", "content": "once"}]


def test_an_agent_that_cannot_be_imported_is_registered_itself(say):
    @register_agent("Local-v0")
    def local(ctx):
        ctx.openai().chat.completions.create(model=ctx.model, messages=[{"role": "user", "content": "local"}])

    assert gym.spec("Local-v0").kwargs["agent"] is local
    with gym.make("Local-v0") as env:
        assert isinstance(env.unwrapped, AgentEnv)
        assert env.reset()[0]["messages"][0]["content"] == "local"


NAMELESS = """
from molt_gym.agents import register_agent


class Sayer:
    def __init__(self, word):
        self.word = word

    def play(self, ctx):
        ctx.openai().chat.completions.create(model=ctx.model, messages=[{"role": "user", "content": self.word}])


register_agent("Method-v0")(Sayer("method").play)
register_agent("Lambda-v0")(lambda ctx: Sayer("lambda").play(ctx))
"""


def test_an_agent_whose_name_does_not_say_all_is_registered_itself(write_module):
    __import__(write_module("nameless_agents", NAMELESS))
    for word in ("Method", "Lambda"):
        with gym.make(f"{word}-v0") as env:
            assert env.reset()[0]["messages"][0]["content"] == word.lower()


ALIKE = """
from molt_gym.agents import register_agent

for word in ("one", "two"):
    @register_agent(f"Alike-{word}-v0")
    def play(ctx, word=word):
        pass
"""

TWICE = """
from molt_gym.agents import register_agent


@register_agent("Twice-one-v0", kwargs={"word": "one"})
@register_agent("Twice-two-v0", kwargs={"word": "two"})
def play(ctx, word):
    ctx.openai().chat.completions.create(model=ctx.model, messages=[{"role": "user", "content": word}])
"""


@pytest.mark.filterwarnings("ignore:.*Overriding environment")
def test_two_agents_of_one_name_are_not_taken_for_each_other(write_module):
    with pytest.raises(ValueError, match="'Alike-two-v0'.*'alike_agents:play'.*'Alike-one-v0'; give each a name"):
        __import__(write_module("alike_agents", ALIKE))
    module = importlib.import_module(write_module("twice_agents", TWICE))
    importlib.reload(module)
    for word in ("one", "two"):
        with gym.make(f"Twice-{word}-v0") as env:
            assert env.reset()[0]["messages"][0]["content"] == word
