"""Who gets which place, with a cluster and engines that are none."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest

from molt_gym.trainers.config import load_config
from molt_gym.trainers.placement.places import Parts

ray_placement = pytest.importorskip("molt_gym.trainers.placement.ray_placement")


class Cluster:
    parts = Parts(1, 3, 1, 1, "CPU")
    plan = SimpleNamespace(layout="disaggregate")

    def __init__(self, *_) -> None:
        pass

    def engine_options(self, number: int) -> tuple[dict, None]:
        return {"place": number}, None


class Engine:
    def __init__(self, path, renderer, options, devices, **settings) -> None:
        self.place, self.ended = options["place"], None
        # As one whose model's configuration is read.
        time.sleep(0.05)


def test_engines_that_ended_together_are_replaced_each_in_a_place_of_its_own(monkeypatch):
    monkeypatch.setattr(ray_placement, "RayCluster", Cluster)
    monkeypatch.setattr(ray_placement, "RayVllmEngine", Engine)
    monkeypatch.setattr(ray_placement, "check_engine_args", lambda _: None)
    config = load_config("X-v0", overrides={"placement": "ray", "rollout.engine": "vllm", "rollout.engines": 3})
    placement = ray_placement.RayPlacement(config, 1, print)
    engines = [placement._engine(None, None) for _ in range(3)]
    for engine in engines[:2]:
        engine.ended = RuntimeError("killed")
    together = threading.Barrier(2)

    def replace(_: int) -> int:
        together.wait(10)
        return placement._engine(None, None).place

    with ThreadPoolExecutor(2) as threads:
        assert sorted(threads.map(replace, range(2))) == [0, 1]
