"""Envs in modules that can really be imported, as those of a user can."""

import importlib
import os
import sys
import textwrap

import gymnasium as gym
import pytest

ECHO = """
import ast
import threading
import time

import molt_gym
from molt_gym import ChatEnv, EnvFailure, Turn


class EchoEnv(ChatEnv):
    \"\"\"Pays for the length of what is said, and goes on until it hears stop.

    A second line that no list shows.
    \"\"\"

    num_tasks = 100

    def __init__(self, prefix="task", **kwargs):
        super().__init__(**kwargs)
        self.prefix = prefix

    def begin(self, index):
        return [{"role": "user", "content": f"{self.prefix} {index} {self.np_random.random()}"}]

    def answer(self, message):
        said = molt_gym.messages.text_of(message)
        match said.split(":"):
            case ["fail", reason]:
                raise EnvFailure(reason, "on request")
            case ["bug"]:
                raise KeyError("on request")
            case ["sleep", seconds]:
                time.sleep(float(seconds))
            case ["note", literal]:
                return Turn(info={"note": ast.literal_eval(literal)})
        info = {"thread": threading.current_thread().name} if said == "thread" else {"said": said}
        return Turn([{"role": "user", "content": f"heard {said}"}], len(said), terminated=said == "stop", info=info)
"""


@pytest.fixture(autouse=True)
def registry_as_before():
    """Ids that a test registers are gone after it."""
    before = dict(gym.registry)
    yield
    gym.registry.clear()
    gym.registry.update(before)


@pytest.fixture
def add_path(monkeypatch):
    """Puts a folder on the import path of this process and of those that it starts."""

    def add(folder):
        monkeypatch.syspath_prepend(folder)
        paths = [str(folder), *filter(None, [os.environ.get("PYTHONPATH")])]
        monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))

    return add


@pytest.fixture
def write_module(tmp_path, add_path):
    """Writes a module that can be imported for the time of a test."""
    written = []

    def write(name, source):
        (tmp_path / f"{name}.py").write_text(textwrap.dedent(source))
        importlib.invalidate_caches()
        written.append(name)
        return name

    add_path(tmp_path)
    yield write
    for name in written:
        sys.modules.pop(name, None)


@pytest.fixture
def echo_module(write_module):
    """The name of a module with `EchoEnv`, which registers it as Echo-v0 with three turns."""
    register = 'molt_gym.register("Echo-v0", EchoEnv, max_episode_steps=3)'
    return write_module("echo_agent", f"{ECHO}\n\n{register}\n")


@pytest.fixture
def echo(echo_module):
    """The id Echo-v0, registered."""
    importlib.import_module(echo_module)
    return "Echo-v0"


@pytest.fixture
def say():
    """Makes an assistant message of a text."""
    return lambda text: {"role": "assistant", "content": text}
