"""A Ray of this machine for the session, and what every Ray that tests start is told."""

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(scope="session", autouse=True)
def patient_ray() -> Iterator[None]:
    """Ray starts no processes that nobody asked for, and does not give up those that a busy machine starts slowly.

    It would start one for each CPU, none of which the parts of a run can use, as their environment is another; and
    begin anew with each that takes a minute to say that it is there.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_prestart_worker_first_driver", "0")
        patch.setenv("RAY_worker_register_timeout_seconds", "600")
        yield


@pytest.fixture(scope="session")
def cluster(patient_ray: None) -> Iterator[Any]:
    """A running Ray of 8 CPUs, whether or not there are so many; `add_node` adds to it."""
    pytest.importorskip("ray")
    import ray
    from ray.cluster_utils import Cluster

    with tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp", ignore_cleanup_errors=True) as folder, \
            pytest.MonkeyPatch.context() as patch:
        # Sockets lie within, and their paths must be short. Others of this machine do not find this one.
        patch.setenv("RAY_TMPDIR", folder)
        Path(folder, "ray").mkdir()
        sizes = {"num_cpus": 8, "include_dashboard": False, "object_store_memory": 100_000_000}
        made = Cluster(initialize_head=True, head_node_args=sizes)
        ray.init(address=made.address, log_to_driver=False)
        yield made
        ray.shutdown()
        made.shutdown()
