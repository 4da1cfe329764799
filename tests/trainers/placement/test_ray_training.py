"""Learning on a real Ray with real vLLM, and what it survives: a node and the driver really die."""

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from importlib.util import find_spec
from pathlib import Path

import psutil
import pytest

import molt_gym

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900),
              pytest.mark.skipif(not (find_spec("ray") and find_spec("vllm")), reason="Ray or vLLM is not installed")]

TOYS = Path(__file__).parents[1] / "toys"
SMALL = {
    "placement": "ray", "rollout.engine": "vllm", "rollout.engines": 2, "actor.world_size": 2, "rollout.runners": 2,
    "rollout.groups_per_step": 4, "rollout.group_size": 4, "rollout.max_tokens": 16, "rollout.max_context": 256,
    "rollout.dtype": "float32", "actor.dtype": "float32", "checkpoint.every": 1, "eval.before": False,
    "eval.after": False, "env_kwargs.num_tasks": 1000}


@pytest.fixture(autouse=True)
def toys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(TOYS))


def steps_of(run: Path) -> list[dict]:
    path = run / "metrics.jsonl"
    lines = path.read_text().splitlines() if path.is_file() else []
    return [line for line in map(json.loads, lines) if "time/step" in line]


def whole(run: Path, steps: int, groups: int, size: int) -> None:
    """Every step trained all its groups, none twice and none left out."""
    lines = steps_of(run)
    assert [line["step"] for line in lines] == list(range(1, steps + 1))
    assert all(line["rollout/count"] == groups * size for line in lines)
    files = sorted(run.glob("rollouts/*.jsonl"))
    played = [json.loads(line) for path in files for line in path.read_text().splitlines()]
    counts = Counter((one["group"], one["rollout"]) for one in played)
    assert counts == Counter((group, rollout) for group in range(steps * groups) for rollout in range(size))


@pytest.mark.learning
@pytest.mark.parametrize(("env", "staleness"), [("CodeExec-v0", 0), ("AgentCodeExec-v0", 1)])
def test_a_tiny_model_learns_on_ray(cluster, tmp_path, env, staleness):
    result = molt_gym.train(env, "tiny", out=tmp_path / "run", steps=10, seed=1, **{
        "placement": "ray", "rollout.engine": "vllm", "rollout.engines": 2, "actor.world_size": 2,
        "ray.layout": "colocate", "rollout.max_staleness": staleness})
    scores = [line[f"eval/{env}/pass_at_1"] for line in result.metrics if "eval/when" in line]
    assert scores[-1] >= 0.5 and scores[-1] - scores[0] >= 0.3
    assert len(steps_of(result.run_dir)) == 10


def run_script(text: str, *arguments: object) -> subprocess.Popen:
    path = os.pathsep.join([str(TOYS), os.environ.get("PYTHONPATH", "")])
    return subprocess.Popen([sys.executable, "-c", text, *map(str, arguments)], stdout=subprocess.PIPE,
                            stderr=subprocess.STDOUT, text=True, env=os.environ | {"PYTHONPATH": path})


ONE_OF_EACH = SMALL | {"rollout.engines": 1, "actor.world_size": 1, "rollout.runners": 1}
TRAIN = f"""
import sys, molt_gym
molt_gym.train("toy_envs:Letters-v0", sys.argv[1], out=sys.argv[2], steps=12, **{ONE_OF_EACH!r})
"""


def stopped(model: Path, run: Path, steps: int, number: signal.Signals) -> int:
    """Train until there are so many steps, send the driver a signal, and see all of its processes end."""
    driver = run_script(TRAIN, model, run)
    while len(steps_of(run)) < steps and driver.poll() is None:
        time.sleep(0.05)
    assert driver.poll() is None, driver.stdout.read()
    family = psutil.Process(driver.pid).children(recursive=True)
    assert any("vllm_host" in " ".join(child.cmdline()) for child in family)
    # Ray's own agents end a while after the rest of it.
    ours = [child for child in family if "Agent" not in child.name()]
    driver.send_signal(number)
    driver.communicate()
    _, left = psutil.wait_procs(ours, timeout=60)
    assert not left
    return driver.returncode


def test_a_run_whose_driver_is_killed_leaves_nothing_behind_and_goes_on_in_another_cluster_until_it_is_stopped(
        wide_path, tmp_path):
    run = tmp_path / "run"
    assert stopped(wide_path, run, 2, signal.SIGKILL) == -signal.SIGKILL
    assert stopped(wide_path, run, len(steps_of(run)) + 2, signal.SIGTERM) == 128 + signal.SIGTERM
    saved = len(steps_of(run))
    assert (run / "checkpoints" / f"step-{saved:06d}").is_dir()
    whole(run, saved, 4, 4)


NODES = f"""
import os, sys, threading, time
from pathlib import Path
import ray
from ray.cluster_utils import Cluster

import molt_gym

cluster = Cluster(initialize_head=True, head_node_args={{"num_cpus": 2}})
lost = cluster.add_node(num_cpus=2)
cluster.wait_for_nodes()
os.environ["RAY_ADDRESS"] = cluster.address

def train():
    molt_gym.train("toy_envs:Letters-v0", sys.argv[1], out=sys.argv[2], steps=6,
                   **{SMALL | {"ray.layout": "disaggregate", "actor.world_size": 1, "rollout.runners": 1}!r})

# Nodes can be added in the main thread alone.
training = threading.Thread(target=train)
training.start()
metrics = Path(sys.argv[2]) / "metrics.jsonl"
while training.is_alive() and not (metrics.is_file() and len(metrics.read_text().splitlines()) >= 2):
    time.sleep(0.05)
cluster.add_node(num_cpus=2)
cluster.remove_node(lost, allow_graceful=False)
training.join()
ray.init(log_to_driver=False)
print("nodes", sorted(node["Alive"] for node in ray.nodes()))
ray.shutdown()
cluster.shutdown()
"""


def test_a_node_that_is_lost_is_made_up_for_by_one_that_is_added(wide_path, tmp_path):
    script = run_script(NODES, wide_path, tmp_path / "run")
    output = script.communicate(timeout=800)[0]
    assert script.returncode == 0, output
    assert "nodes [False, True, True]" in output
    whole(tmp_path / "run", 6, 4, 4)
    lost = Counter({"actor/restarts": 0})
    for line in steps_of(tmp_path / "run"):
        lost.update({name: value for name, value in line.items() if name.endswith("_restarts")})
        lost["actor/restarts"] = line.get("actor/restarts", 0)
    assert lost.total() >= 1
