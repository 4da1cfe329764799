"""A run on a Ray cluster: the engines, the actor and the runners that the loop is given with `placement = "ray"`.

Invariant: requests go from the runners to the engines and weights from the actor to the engines; through this process
go announcements, and of rollouts what the loop decides by.
"""

import asyncio
import threading
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from molt_gym.tokens import Renderer, Trajectory

from ..actor.actor import ActorSpec
from ..actor.admission import describe
from ..config import Config
from ..rollout.env_maker import EnvMaker
from ..rollout.fleet import EngineFleet
from ..rollout.gate import Gate
from ..rollout.vllm_spec import Backend, check_engine_args
from ..session import Sampler, vllm_settings, with_dtypes
from .ray_actor import RayActor
from .ray_cluster import RayCluster
from .ray_engine import RayVllmEngine
from .ray_runner import RayPlayers, RayRunner


class RayPlacement:
    """Makes the parts of a run, each at its place.

    Args:
        ranks: of the actor; 0 to sample only.
        say: told what was decided.

    Raises:
        ConfigError: as `RayCluster`.
    """

    def __init__(self, config: Config, ranks: int, say: Callable[[str], None]) -> None:
        check_engine_args(config.rollout.engine_args)
        self.cluster, self._say = RayCluster(config, ranks, say), say
        self.gpu = self.cluster.parts.device == "GPU"
        self.config = with_dtypes(config, self.gpu)
        self._engines: list[RayVllmEngine | None] = [None] * config.rollout.engines
        self._placing = threading.Lock()

    def sampler(self, path: Path, done: Callable[[Trajectory], None]) -> Sampler:
        """What plays."""
        return RaySampler(path, self.config, done, self)

    def actor(self, spec: ActorSpec) -> RayActor:
        """What learns."""
        for engine in self._engines:
            if self._backend == "ipc" and engine is not None and engine.ended is None:
                # vLLM measures the GPU's free memory while it starts, and must be alone with it.
                engine.wait()
        if self.gpu:
            self._say(describe(spec))
        return RayActor(spec, self.cluster.rank_options())

    def fleet(self, path: Path, renderer: Renderer) -> EngineFleet:
        """The engines."""
        rollout = self.config.rollout
        return EngineFleet(partial(self._engine, path, renderer), rollout.engines, self.config.failures.engine_restarts)

    def close(self) -> None:
        """Give the places back."""
        self.cluster.close()

    @property
    def _backend(self) -> Backend:
        chosen = self.config.rollout.weight_transfer
        if chosen != "auto":
            return chosen
        if not self.gpu:
            return "gloo"
        return "ipc" if self.cluster.plan.layout == "colocate" else "nccl"

    def _engine(self, path: Path, renderer: Renderer) -> RayVllmEngine:
        # Those that ended together are replaced at the same time, each in a thread.
        with self._placing:
            number = next(n for n, engine in enumerate(self._engines) if engine is None or engine.ended is not None)
            options, devices = self.cluster.engine_options(number)
            engine = RayVllmEngine(path, renderer, options, devices=devices,
                                   **vllm_settings(self.config) | {"backend": self._backend})
            self._engines[number] = engine
        return engine


class RaySampler(Sampler):
    """Plays in the processes of `rollout.runners`. To be made where an event loop runs."""

    engine: EngineFleet

    def __init__(self, path: Path, config: Config, done: Callable[[Trajectory], None], placement: RayPlacement) -> None:
        self._placement = placement
        super().__init__(path, config, done, gpu=placement.gpu)
        self._players = RayPlayers(path, config, placement.cluster.runner_options())
        self.engine.joined = self._joined
        # Until the first update all have the weights of their folder.
        self._joining = asyncio.ensure_future(self._joined(self.engine.members))

    def _make_engine(self) -> EngineFleet:
        return self._placement.fleet(self._path, self.renderer)

    def runner(
        self, maker: EnvMaker, temperature: float, *, ordered: bool, gate: Gate | None = None
    ) -> RayRunner:
        """Plays in all of them; the order of requests is not a function of the seed, whatever `ordered` says."""
        runner = RayRunner(self._players, maker, temperature, self._done)
        self._runners.add(runner)
        return runner

    async def aclose(self) -> None:
        """End the runners and the engines."""
        await self._players.aclose()
        await super().aclose()

    def take_faults(self) -> dict[str, int]:
        """What had to be started or sent again since the last call."""
        faults, more = self.engine.take_faults(), self._players.take_faults()
        return {name: faults.get(name, 0) + more.get(name, 0) for name in faults | more}

    async def _joined(self, engines: Sequence[RayVllmEngine]) -> None:
        await self._players.set_engines([engine.proxy() for engine in engines])
