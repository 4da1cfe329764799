import subprocess
import sys

import pytest

import molt_gym


def run(script):
    return subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60).stdout


def test_importing_takes_less_than_a_second():
    # Of the processor: what else the machine does is not to count.
    seconds = [float(run("import time, molt_gym; print(time.process_time())")) for _ in range(3)]
    assert min(seconds) < 1


def test_importing_loads_no_heavy_library_and_no_env():
    script = "import sys, molt_gym\nprint(*sorted({name.partition('.')[0] for name in sys.modules} | {*sys.modules}))"
    loaded = set(run(script).split())
    assert "gymnasium" in loaded
    heavy = {"torch", "transformers", "vllm", "ray", "pydantic", "datasets", "matplotlib"}
    assert not loaded & {*heavy, "molt_gym.trainers", "molt_gym.envs"}


@pytest.mark.parametrize("name", molt_gym.__all__)
def test_every_public_name_is_there_and_explained(name):
    assert getattr(molt_gym, name).__doc__


def test_an_id_of_the_package_is_found_in_a_fresh_process_without_an_import():
    script = (
        "import gymnasium\n"
        "try:\n    gymnasium.make('molt_gym:CodeExec-v0', nonsense=1)\n"
        "except TypeError as error:\n    print(error)"
    )
    assert "nonsense" in run(script)
