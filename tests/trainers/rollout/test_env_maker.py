import json
import threading
import time

import gymnasium as gym
import numpy as np
import pytest

from molt_gym import ChatEnv, ConfigError
from molt_gym.trainers.rollout import env_maker
from molt_gym.trainers.rollout.env_maker import EnvMaker


class Any(ChatEnv):
    """Has as many tasks as it is told, and closes when it may."""

    may_close = threading.Event()

    def __init__(self, tasks=3, patient=True):
        super().__init__()
        self.num_tasks, self.patient = tasks, patient

    def begin(self, index):
        return [{"role": "user", "content": ""}]

    def answer(self, message):
        raise NotImplementedError

    def close(self):
        if not self.patient:
            self.may_close.wait(120)
            raise OSError("too late")


@pytest.fixture(autouse=True)
def registered():
    gym.register("AnyCount-v0", Any)
    yield
    del gym.registry["AnyCount-v0"]
    Any.may_close.set()


@pytest.mark.parametrize("tasks", [None, 0, 7, np.int64(7)])
def test_an_env_is_asked_for_its_tasks(tasks):
    count = EnvMaker.of("AnyCount-v0", {"tasks": tasks}).num_tasks()
    # Checkpoints are JSON.
    assert json.dumps(count) == json.dumps(None if tasks is None else int(tasks))


@pytest.mark.parametrize("tasks", [-1, 2.5, "10"])
def test_what_is_no_number_of_tasks_is_refused(tasks):
    with pytest.raises(ConfigError, match="AnyCount-v0: num_tasks is .*; write an integer"):
        EnvMaker.of("AnyCount-v0", {"tasks": tasks}).num_tasks()


def test_an_env_that_does_not_close_is_not_waited_for(monkeypatch):
    monkeypatch.setattr(env_maker, "CLOSE_TIMEOUT", 0.1)
    started = time.monotonic()
    assert EnvMaker.of("AnyCount-v0", {"patient": False}).num_tasks() == 3
    assert time.monotonic() - started < 60
