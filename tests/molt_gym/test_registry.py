import importlib
import subprocess
import sys
import textwrap
import warnings
from concurrent.futures import ThreadPoolExecutor

import gymnasium as gym
import pytest
from gymnasium.envs.classic_control.cartpole import CartPoleEnv
from gymnasium.envs.registration import EnvSpec

import molt_gym
from molt_gym import ConfigError
from molt_gym.adapters import suites
from molt_gym.registry import find_spec, load_plugins


@pytest.fixture
def install(tmp_path, add_path):
    """Installs a distribution: its modules, and the metadata that an installer leaves."""
    site = tmp_path / "site-packages"
    site.mkdir()
    add_path(site)
    modules = []

    def install(name, module, source, plugin="main"):
        info = site / f"{name}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(f"[molt_gym.envs]\n{plugin} = {module}\n")
        (site / f"{module}.py").write_text(textwrap.dedent(source))
        importlib.invalidate_caches()
        modules.append(module)

    yield install
    for module in modules:
        sys.modules.pop(module, None)


@pytest.fixture
def plugin(tmp_path):
    """A module name of its own for each test, as a plug-in is imported once in a process."""
    return f"plugin_{tmp_path.name}"


@pytest.fixture
def installed_echo(install, echo_module, plugin, tmp_path):
    """A distribution `echo-agents` whose plug-in registers Plugged-v0."""
    source = (tmp_path / f"{echo_module}.py").read_text().replace("Echo-v0", "Plugged-v0")
    install("echo_agents", plugin, source, plugin="echo-agents")
    return "Plugged-v0"


def test_an_env_of_an_installed_plugin_is_made_by_id(installed_echo):
    env = molt_gym.make(installed_echo, prefix="plugged")
    assert env.reset(seed=0)[0]["messages"][0]["content"].startswith("plugged ")
    assert load_plugins()["echo-agents"] is None


def test_plugins_are_imported_in_a_fresh_process_only_when_they_are_needed(installed_echo, plugin):
    script = (
        f"import sys, molt_gym\nassert '{plugin}' not in sys.modules\n"
        f"molt_gym.registry.find_spec('CodeExec-v0')\nassert '{plugin}' not in sys.modules\n"
        f"molt_gym.make('{installed_echo}')\nassert '{plugin}' in sys.modules"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)


def test_a_broken_plugin_warns_by_name_and_hurts_nothing_else(install, installed_echo):
    install("broken_one", "raising_plugin", "raise ValueError('no licence')", plugin="raising")
    install("broken_two", "exiting_plugin", "raise SystemExit(3)", plugin="exiting")
    install("broken_three", "needy_plugin", "import no_such_module", plugin="needy")
    with pytest.warns(UserWarning) as caught:
        molt_gym.make(installed_echo)
    heard = "\n".join(str(warning.message) for warning in caught)
    assert "'raising' (raising_plugin) is left out: ValueError: no licence" in heard
    assert "'exiting'" in heard and "'needy'" in heard and "no_such_module" in heard
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        errors = load_plugins()
        with pytest.raises(molt_gym.UnknownEnv, match="could not be imported: .*raising"):
            molt_gym.make("Nothing-v0")
    assert errors["raising"] == "ValueError: no licence" and errors["echo-agents"] is None


@pytest.mark.parametrize(
    ("wrong", "near"), [("Ecko-v0", "Echo-v0"), ("codeexec-v0", "CodeExec-v0"), ("Echo-v7", "Echo-v0")]
)
def test_an_unknown_id_is_answered_with_the_nearest_ones(echo, wrong, near):
    with pytest.raises(molt_gym.UnknownEnv) as caught:
        molt_gym.make(wrong)
    assert f"no env is registered as {wrong!r}; did you mean {near!r}" in str(caught.value)
    assert "gymnasium.register" in str(caught.value) and "molt_gym.envs" in str(caught.value)


@pytest.mark.parametrize("wrong", ["zzzzzzzzzz", "not an id!", "", "x/y/z-v0"])
def test_an_id_like_none_that_there_is_gets_told_where_to_look(wrong):
    with pytest.raises(molt_gym.ConfigError, match="`molt-gym envs` lists the ids"):
        molt_gym.make(wrong)
    with pytest.raises(gym.error.UnregisteredEnv):
        molt_gym.make(wrong)


def test_a_module_may_be_named_with_the_id(echo_module):
    assert "Echo-v0" not in gym.registry
    assert molt_gym.make(f"{echo_module}:Echo-v0").spec.id == "Echo-v0"
    assert gym.make(f"{echo_module}:Echo-v0").spec.id == "Echo-v0"


def test_a_module_that_is_not_there_is_named():
    with pytest.raises(molt_gym.UnknownEnv, match="there is no module 'no_such_agents'"):
        molt_gym.make("no_such_agents:Echo-v0")


def test_what_a_named_module_lacks_is_reported_as_it_is(write_module):
    module = write_module("needs_more", "import no_such_dependency")
    with pytest.raises(ModuleNotFoundError, match="no_such_dependency"):
        molt_gym.make(f"{module}:Echo-v0")


def test_an_id_without_version_is_the_latest(echo_module, echo):
    molt_gym.register("Echo-v10", f"{echo_module}:EchoEnv", kwargs={"prefix": "ten"})
    molt_gym.register("Echo-v9", f"{echo_module}:EchoEnv")
    assert find_spec("Echo").id == "Echo-v10"
    assert molt_gym.make("Echo").unwrapped.prefix == "ten"


def test_what_is_given_to_make_reaches_the_env_and_gymnasium(echo, say):
    env = molt_gym.make(echo, prefix="given", max_episode_steps=1)
    assert env.reset()[0]["messages"][0]["content"].startswith("given ")
    assert env.step(say("hi"))[3] is True


@pytest.mark.parametrize(("env_id", "taken"), [
    ("Math-v0", "write one of split, turns, .*, render_mode, or what the docstring of MathEnv adds"),
    ("ToolUse-v0", "write one of families, .*, run_timeout, or"), ("TicTacToe-v0", "write one of opponent, "),
    ("CartPole-v1", "write one of sutton_barto_reward, ")])
def test_an_argument_that_the_env_does_not_take_is_refused_with_those_that_it_takes(env_id, taken):
    with pytest.raises(ConfigError, match=f"{env_id}: it takes no argument 'trns'; {taken}"):
        molt_gym.make(env_id, trns=2)


@pytest.mark.parametrize("env_id", [CartPoleEnv, CartPoleEnv(), None, 3])
def test_what_is_no_id_is_refused_with_how_to_get_one(env_id):
    with pytest.raises(ConfigError, match="is no id; write molt_gym.register"):
        molt_gym.make(env_id)


def test_an_id_with_a_colon_is_refused_where_it_is_registered(echo_module):
    with pytest.raises(ConfigError, match="id: 'mine:Echo-v0'; write it without a colon, such as 'mine/Echo-v0'"):
        molt_gym.register("mine:Echo-v0", f"{echo_module}:EchoEnv")


@pytest.mark.parametrize("make", [gym.make, molt_gym.make])
def test_an_env_whose_first_reset_failed_can_be_reset_and_stepped(echo, say, make):
    env = make(echo)
    with pytest.raises(ValueError, match="did you mean 'index'"):
        env.reset(options={"indx": 3})
    env.reset(options={"index": 3})
    assert env.step(say("one"))[1] == 3 and env.step(say("stop"))[2]


def test_gymnasiums_checker_can_be_switched_on_and_off_for_any_env(echo):
    assert "PassiveEnvChecker" in str(molt_gym.make(echo, disable_env_checker=False))
    for on in (False, True):
        assert molt_gym.make("FrozenLake-v1", disable_env_checker=on).action_space == molt_gym.AssistantMessage()


def test_an_error_of_an_env_that_is_made_stays_what_it_is(echo_module):
    molt_gym.register("Echo-v3", lambda prefix, size=1: len(size), kwargs={"prefix": "x"})
    with pytest.raises(TypeError, match="has no len"):
        molt_gym.make("Echo-v3", size=2)


def test_a_spec_as_json_makes_the_env_where_nothing_is_registered(echo):
    text = find_spec(echo, prefix="sent", max_episode_steps=2).to_json()
    script = (
        "import sys\nfrom gymnasium.envs.registration import EnvSpec\nimport molt_gym\n"
        "env = molt_gym.make(EnvSpec.from_json(sys.stdin.read()))\n"
        "print(env.spec.id, env.spec.max_episode_steps, env.reset()[0]['messages'][0]['content'])"
    )
    run = subprocess.run(
        [sys.executable, "-c", script], input=text, capture_output=True, text=True, check=True, timeout=60
    )
    assert run.stdout.startswith("Echo-v0 2 sent ")
    assert molt_gym.make(EnvSpec.from_json(text)).spec.max_episode_steps == 2
    assert gym.registry[echo].kwargs == {}


def test_an_env_that_is_registered_as_a_chat_env_and_is_none_is_refused_with_advice():
    molt_gym.register("Mute-v0", "gymnasium.envs.classic_control:CartPoleEnv")
    with pytest.raises(molt_gym.NotAChatEnv) as caught:
        molt_gym.make("Mute-v0")
    del gym.registry["Mute-v0"]
    for advice in ("Mute-v0 is no chat env", "Discrete(2)", "molt_gym.ChatEnv", "molt_gym.Conversation()"):
        assert advice in str(caught.value)


def test_a_suite_is_registered_once_and_wholly_for_all_threads(write_module, monkeypatch):
    module = write_module("slow_suite", """
        import time
        import gymnasium as gym

        calls = []

        def register_ids():
            calls.append(1)
            for name in "ab":
                gym.register(f"slow/{name}-v0", "gymnasium.envs.classic_control:CartPoleEnv")
                time.sleep(0.2)
        """)
    monkeypatch.setitem(suites.SUITES, "slow", suites.Suite("slow", "", "", module, ""))
    with ThreadPoolExecutor(4) as threads:
        specs = list(threads.map(find_spec, ["slow/b-v0"] * 4))
    assert [spec.id for spec in specs] == ["slow/b-v0"] * 4 and len(importlib.import_module(module).calls) == 1


class Talker(molt_gym.ChatEnv):
    """Says hi."""

    def begin(self, index):
        return [{"role": "user", "content": "hi"}]

    def answer(self, message):
        return molt_gym.Turn(terminated=True)


def test_what_one_creator_makes_is_found_out_for_each_id_and_its_arguments():
    def make(talks, render_mode=None):
        return Talker() if talks else CartPoleEnv()

    gym.register("Talks-v0", make, kwargs={"talks": True})
    gym.register("Counts-v0", make, kwargs={"talks": False})
    first = [molt_gym.make(env_id, **more).reset(seed=0)[0]["messages"][0]["content"] for env_id, more in (
        ("Talks-v0", {}), ("Counts-v0", {}), ("Talks-v0", {"talks": False}), ("Counts-v0", {"talks": True}))]
    assert first[0] == first[3] == "hi" and first[1] == first[2] != "hi"


def test_an_env_that_is_wrapped_as_the_advice_says_is_accepted(write_module):
    module = write_module(
        "talking",
        """
        import gymnasium as gym
        import molt_gym


        class TalkingCartPole(gym.Wrapper):
            def __init__(self, **kwargs):
                super().__init__(gym.make("CartPole-v1", **kwargs))
                self.observation_space = molt_gym.Conversation()
                self.action_space = molt_gym.AssistantMessage()

            def _say(self, observation):
                return {"messages": [{"role": "user", "content": str(observation)}], "tools": []}

            def reset(self, **kwargs):
                observation, info = self.env.reset(**kwargs)
                return self._say(observation), info

            def step(self, action):
                observation, *rest = self.env.step(int(action["content"] == "right"))
                return self._say(observation), *rest


        molt_gym.register("TalkingCartPole-v0", TalkingCartPole)
        """,
    )
    env = molt_gym.make(f"{module}:TalkingCartPole-v0")
    env.reset(seed=0)
    assert env.step({"role": "assistant", "content": "right"})[1] == 1.0
    assert "TalkingCartPole-v0" in {info.id for info in molt_gym.list_envs()}


def test_envs_are_listed_with_a_summary_and_their_package(echo, installed_echo, plugin, write_module):
    write_module("will_not_import", "raise ImportError('too old')")
    molt_gym.register("Stale-v0", "will_not_import:Env")
    gym.register("Board-v0", "gymnasium.envs.classic_control:CartPoleEnv")
    listed = {info.id: info for info in molt_gym.list_envs()}
    summary = "Pays for the length of what is said, and goes on until it hears stop."
    assert listed["Echo-v0"] == molt_gym.EnvInfo("Echo-v0", summary, "echo_agent")
    assert listed[installed_echo].source == plugin
    assert listed["CodeExec-v0"].source == "molt_gym"
    assert listed["Stale-v0"].summary == "cannot be imported: ImportError: too old"
    assert listed["CartPole-v1"].source == listed["Board-v0"].source == "gymnasium"
    assert "Pong-v5" not in listed and "CartPole-v0" not in listed
    assert list(listed) == sorted(listed)


def test_an_env_that_is_registered_with_gymnasium_alone_is_listed_and_made(echo_module, echo):
    gym.register("Plain-v0", f"{echo_module}:EchoEnv")
    assert "Plain-v0" in {info.id for info in molt_gym.list_envs()}
    assert molt_gym.make("Plain-v0").spec.id == "Plain-v0"


def test_a_class_is_registered_by_its_import_path(echo_module, echo):
    cls = sys.modules[echo_module].EchoEnv
    molt_gym.register("ByClass-v0", cls)
    assert find_spec("ByClass-v0").entry_point == f"{echo_module}:EchoEnv"
    local = type("LocalEnv", (cls,), {})
    molt_gym.register("Local-v0", local)
    assert find_spec("Local-v0").entry_point is local
    assert {info.id: info.summary for info in molt_gym.list_envs()}["Local-v0"] == ""
    assert molt_gym.make("Local-v0").reset(seed=1) == molt_gym.make("ByClass-v0").reset(seed=1)


def test_the_built_in_id_is_registered_by_string_with_a_cap_on_turns():
    spec = gym.spec("CodeExec-v0")
    assert (spec.entry_point, spec.max_episode_steps) == ("molt_gym.envs.code_exec:CodeExecEnv", 3)
    assert spec.nondeterministic
    assert EnvSpec.from_json(spec.to_json()) == spec
