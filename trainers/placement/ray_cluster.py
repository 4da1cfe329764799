"""The cluster that a run joins or starts, and a place in it for every part.

Invariants: nothing is started before all parts have a place, and a run that cannot fit is refused with the arithmetic;
what was joined is left running, what was started ends with the run.
"""

import os
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from molt_gym.errors import ConfigError

from ..config import Config
from ..rollout.vllm_spec import engine_workers
from .places import Bundle, Parts, choose

START_TIMEOUT = 120.0
"""Seconds in which an actor that has its place must start."""
SHARE = 0.4
"""What a rank and an engine each take of a device that they share; a runner takes half of it, of a CPU."""


class RayCluster:
    """Places for a run; make it in a thread other than the main one, whose signal handlers Ray would replace.

    Args:
        ranks: of the actor; 0 to sample only.
        say: told what was decided.

    Raises:
        ConfigError: there is no such cluster, the run does not fit, or got no place within `ray.start_timeout`.
    """

    def __init__(self, config: Config, ranks: int, say: Callable[[str], None] = lambda _: None) -> None:
        self._ours = not ray.is_initialized()
        self._group: PlacementGroup | None = None
        self._holders: dict[int, list[Any]] = {}
        if self._ours:
            _connect(config.ray.address)
        try:
            nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
            device = "GPU" if any(node.get("GPU") for node in nodes) else "CPU"
            self.parts = Parts(ranks, config.rollout.engines,
                               engine_workers(config.rollout.engine_args), config.rollout.runners, device)
            self.plan = choose(self.parts, config.ray.layout, nodes)
            say(f"{self.plan.layout}: {self.parts.ranks} ranks, {self.parts.engines} engines and {self.parts.runners} "
                f"runners on {len(nodes)} nodes, {len(self.plan.bundles)} places of " + _places(self.plan.bundles))
            self._group = placement_group(self.plan.bundles, strategy="PACK")
            if not self._group.wait(config.ray.start_timeout):
                raise ConfigError("ray.start_timeout: others use the cluster, which has had no place for the run "
                                  f"within {config.ray.start_timeout:g} s; write a longer time or wait for them")
            self._threads = max(1, int(sum(node.get("CPU", 0) for node in nodes)) // len(self.plan.bundles))
        except BaseException:
            self.close()
            raise

    def rank_options(self) -> list[dict[str, Any]]:
        """Options of each rank's Ray actor."""
        share = SHARE if self.plan.layout == "colocate" else 1
        return [self._options(bundle, share) for bundle in self.plan.ranks]

    def engine_options(self, number: int) -> tuple[dict[str, Any], str | None]:
        """Options of an engine's Ray actor, and the GPUs it is to see if Ray cannot assign them itself."""
        bundles = self.plan.engines[number]
        if len(bundles) == 1:
            share = SHARE if self.plan.layout == "colocate" else self.parts.workers
            return self._options(bundles[0], share), None
        # Ray gives nobody shares of several GPUs, so that one actor a GPU holds its share, and the engine the CPU.
        for holder in self._holders.pop(number, ()):
            # Of an engine that has ended, in whose place this one is.
            ray.kill(holder)
        holders = [ray.remote(_Holder).options(**self._options(bundle, SHARE) | {"num_cpus": 0}).remote()
                   for bundle in bundles]
        self._holders[number] = holders
        found = ray.get([holder.devices.remote() for holder in holders], timeout=START_TIMEOUT)
        if len({node for node, _ in found}) > 1:
            raise ConfigError(f"ray.layout: 'colocate' gives an engine of {len(bundles)} GPUs places on several nodes; "
                              "write 'disaggregate', or use nodes whose free GPUs are a multiple of these")
        return self._options(bundles[0], 0), ",".join(device for _, devices in found for device in devices)

    def runner_options(self) -> list[dict[str, Any]]:
        """Options of each runner's Ray actor."""
        share = SHARE / 2 if self.parts.device == "CPU" and self.plan.layout == "colocate" else 1
        return [self._options(bundle, share, "CPU") for bundle in self.plan.runners]

    def close(self) -> None:
        """Give the places back; end the cluster if it was started here."""
        if ray.is_initialized() and self._group is not None:
            remove_placement_group(self._group)
            self._group = None
        if self._ours:
            ray.shutdown()

    def _options(self, bundle: int, share: float, device: str | None = None) -> dict[str, Any]:
        strategy = PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=bundle)
        common: dict[str, Any] = {"scheduling_strategy": strategy, "max_restarts": 0}
        if (device or self.parts.device) == "GPU":
            return common | {"num_gpus": share, "num_cpus": 1}
        # Ray would give each a single thread, also where all take turns.
        threads = {} if self.parts.device == "GPU" else {"OMP_NUM_THREADS": str(self._threads)}
        return common | {"num_cpus": share, "num_gpus": 0, "runtime_env": {"env_vars": threads}}


class _Holder:
    """Holds an engine's share of a GPU."""

    def devices(self) -> tuple[str, list[str]]:
        return ray.get_runtime_context().get_node_id(), [str(device) for device in ray.get_gpu_ids()]


def _connect(address: str | None) -> None:
    where = address or os.environ.get("RAY_ADDRESS") or "local"
    options = {"include_dashboard": False} if where == "local" else {}
    try:
        ray.init(where, log_to_driver=False, logging_level="error", **options)
    except (ConnectionError, ValueError, RuntimeError) as error:
        raise ConfigError(f"ray.address: {where!r} cannot be joined ({error}); write the address of a cluster that "
                          "runs, or leave it out to start one here") from error


def _places(bundles: Sequence[Bundle]) -> str:
    kinds = Counter(" and ".join(f"{amount:g} {name}" for name, amount in bundle.items()) for bundle in bundles)
    return ", ".join(f"{count} × {kind}" for kind, count in kinds.items())
