"""Which part gets which place, and when there is none; on a real Ray where that matters."""

import os
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack

import pytest

from molt_gym.errors import ConfigError
from molt_gym.trainers.config import load_config
from molt_gym.trainers.placement.places import Parts, choose, plan
from molt_gym.trainers.placement.ray_cluster import RayCluster


def parts(ranks=2, engines=2, workers=1, runners=1, device="CPU") -> Parts:
    return Parts(ranks, engines, workers, runners, device)


def test_apart_each_part_has_a_bundle_of_its_own():
    found = plan(parts(device="GPU", workers=4), "disaggregate")
    assert found.bundles == [{"GPU": 1, "CPU": 1}] * 2 + [{"GPU": 4, "CPU": 1}] * 2 + [{"CPU": 1}]
    assert (found.ranks, found.engines, found.runners) == ([0, 1], [[2], [3]], [4])


def test_together_on_gpus_an_engine_is_on_the_ranks_gpus_and_runners_are_beside_them():
    found = plan(parts(ranks=4, engines=2, workers=2, device="GPU"), "colocate")
    assert found.bundles == [{"GPU": 1, "CPU": 2}] * 4 + [{"CPU": 1}]
    assert (found.ranks, found.engines, found.runners) == ([0, 1, 2, 3], [[0, 1], [2, 3]], [4])


def test_together_on_cpus_all_take_turns():
    found = plan(parts(ranks=1, engines=2, runners=3), "colocate")
    assert found.bundles == [{"CPU": 1}] * 3
    assert (found.ranks, found.engines, found.runners) == ([0], [[0], [1]], [0, 1, 2])


def test_auto_is_apart_where_that_fits_and_else_together():
    assert choose(parts(), "auto", [{"CPU": 5}]).layout == "disaggregate"
    assert choose(parts(), "auto", [{"CPU": 2}, {"CPU": 2}]).layout == "colocate"
    assert choose(parts(), "colocate", [{"CPU": 64}]).layout == "colocate"


def test_what_does_not_fit_is_refused_with_the_arithmetic():
    with pytest.raises(ConfigError, match="ray.layout") as refused:
        choose(parts(ranks=4, engines=2, workers=2, runners=3, device="GPU"), "auto", [{"GPU": 2, "CPU": 64}])
    assert "4 actor.world_size × 1 + 2 rollout.engines × 2 = 8 GPU; the cluster has 2" in str(refused.value)
    assert "4 places (actor.world_size 4, rollout.engines 2, rollout.runners 3, 2 GPUs an engine) = 4 GPU" in str(
        refused.value)


def test_an_engine_that_is_larger_than_any_node_is_refused():
    with pytest.raises(ConfigError, match="no node has 4 GPU and 1 CPU for one part"):
        choose(parts(workers=4, device="GPU"), "disaggregate", [{"GPU": 2, "CPU": 8}] * 8)


def test_what_fits_into_the_cluster_but_not_into_its_nodes_is_refused():
    with pytest.raises(ConfigError, match="3 parts need 2 GPU and 1 CPU on a node each; the nodes have room for 2"):
        choose(parts(ranks=0, engines=3, workers=2, device="GPU"), "disaggregate", [{"GPU": 3, "CPU": 8}] * 2)
    with pytest.raises(ConfigError, match="2 parts need 2 GPU and 4 CPU on a node each; the nodes have room for 1"):
        choose(parts(ranks=4, workers=2, device="GPU"), "colocate", [{"GPU": 3, "CPU": 8}, {"GPU": 1, "CPU": 8}])
    assert choose(parts(ranks=4, workers=2, device="GPU"), "colocate", [{"GPU": 2, "CPU": 8}] * 2)


def test_without_ranks_there_is_no_place_for_them():
    assert choose(parts(ranks=0, engines=1), "auto", [{"CPU": 2}]).bundles == [{"CPU": 1}] * 2
    with pytest.raises(ConfigError, match="disaggregate: 1 rollout.engines × 1 [+] 1 rollout.runners × 1 = 2 CPU"):
        choose(parts(ranks=0, engines=1), "disaggregate", [{"CPU": 1}])


def config(**given):
    return load_config("X-v0", overrides={"placement": "ray", "rollout.engine": "vllm"} | given)


@pytest.fixture
def placed(cluster):
    """Makes places, which are given back at the end."""
    with ExitStack() as stack:
        def make(said=lambda _: None, **given):
            made = RayCluster(config(**{"rollout.engines": 2} | given), 2, said)
            stack.callback(made.close)
            return made

        yield make


def test_a_cluster_that_runs_is_joined_and_left_running(placed):
    ray = pytest.importorskip("ray")
    said = []
    first = placed(said.append)
    assert said == ["disaggregate: 2 ranks, 2 engines and 1 runners on 1 nodes, 5 places of 5 × 1 CPU"]
    # What is free is known a moment later.
    deadline = time.monotonic() + 60
    while ray.available_resources()["CPU"] != 3 and time.monotonic() < deadline:
        time.sleep(0.1)
    assert ray.available_resources()["CPU"] == 3
    with pytest.raises(ConfigError, match="ray.start_timeout"):
        placed(**{"ray.start_timeout": 1, "ray.layout": "disaggregate"})
    first.close()
    assert ray.is_initialized()
    second = placed(**{"ray.start_timeout": 60})
    options, devices = second.engine_options(1)
    assert devices is None and options["scheduling_strategy"].placement_group_bundle_index == 3
    assert [options["num_cpus"] for options in second.rank_options()] == [1, 1]


GPUS_BY_NAME_ALONE = """
import ray
from ray.cluster_utils import Cluster
from molt_gym.errors import ConfigError
from molt_gym.trainers.config import load_config
from molt_gym.trainers.placement import ray_cluster
from molt_gym.trainers.placement.ray_cluster import RayCluster

class Part:
    def where(self):
        return ray.get_gpu_ids()

def placed(ranks, engines):
    return RayCluster(load_config("X-v0", overrides={
        "placement": "ray", "rollout.engine": "vllm", "rollout.engine_args.tensor_parallel_size": 2,
        "rollout.engines": engines, "actor.world_size": ranks, "ray.layout": "colocate"}), ranks)

ray_cluster.START_TIMEOUT = 30
made = Cluster(initialize_head=True, head_node_args={"num_cpus": 9, "num_gpus": 3, "include_dashboard": False})
made.add_node(num_cpus=9, num_gpus=3)
ray.init(made.address, log_to_driver=False)
cluster = placed(2, 1)
chosen, devices = cluster.engine_options(0)
options = [chosen, *cluster.rank_options(), *cluster.runner_options()]
parts = [ray.remote(Part).options(**each).remote() for each in options]
print(devices, ray.get([part.where.remote() for part in parts], timeout=60))
ray.kill(parts[0])
print("again", cluster.engine_options(0)[1])
for part in parts[1:]:
    ray.kill(part)
cluster.close()
cluster = placed(4, 2)
print("of one node", cluster.engine_options(0)[1])
try:
    print("of two", cluster.engine_options(1)[1])
except ConfigError as error:
    print(error)
"""


@pytest.mark.slow
def test_an_engine_over_the_gpus_of_two_ranks_leaves_both_their_places_to_one_after_it_too_and_has_them_on_one_node(
        tmp_path):
    pytest.importorskip("ray")
    script = tmp_path / "places.py"
    script.write_text(GPUS_BY_NAME_ALONE)
    # Ray counts GPUs by what it is told.
    with tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp", ignore_cleanup_errors=True) as folder:
        done = subprocess.run([sys.executable, script], env=os.environ | {"RAY_TMPDIR": folder}, capture_output=True,
                              text=True, timeout=300)
    *fine, refused = done.stdout.splitlines() or [""]
    assert fine == ["0,1 [[], [0], [1], []]", "again 0,1", "of one node 0,1"], done.stderr[-2000:]
    assert refused.startswith("ray.layout: 'colocate' gives an engine of 2 GPUs places on several nodes; write")
