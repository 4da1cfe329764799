"""Models that are not trained and play against the one that is: earlier checkpoints of the run, or given folders.

Invariants: who plays is a function of the ticket's group and of the members that there are, so that all rollouts of a
group meet the same one; a model is loaded once, however many ask for it, and given up when its time is over; with waves
its replies are a function of the seed, as those of the policy are.
"""

import asyncio
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch

from molt_gym.errors import EnvFailure
from molt_gym.messages import Conversation, Message
from molt_gym.opponents import LEAGUE, MODEL
from molt_gym.tokens import Renderer, Sampling, Trajectory

from ..checkpoint import by_step
from ..config import Config
from .engine import RolloutEngine
from .gate import Gate
from .seats import TokenSeat
from .table import Others
from .ticket import Ticket
from .transformers_engine import TransformersEngine

_SALT = 0x6C67
"""Keeps the draws of opponents apart from others."""


def league_folder(config: Config) -> Path | None:
    """Where the league of a run is, if it has a folder."""
    return Path(config.out) / "league" if config.out else None


class FrozenModels:
    """Loads models when a game wants them, and gives their seats.

    Args:
        config: of the run.
        base: the model with which training began, which plays until the league has a member.
        load_renderer: makes the renderer of a model folder.
    """

    def __init__(self, config: Config, base: Path, load_renderer: Callable[[Path, Config], Renderer]) -> None:
        self.config, self._base, self._league, self._load_renderer = config, base, league_folder(config), load_renderer
        self._loaded: dict[Path, asyncio.Future[tuple[Renderer, RolloutEngine]]] = {}
        self._used: dict[Path, int] = {}
        self._step = 0

    def others(self, gate: Gate, sampling: Sampling, threads: ThreadPoolExecutor | None) -> Others:
        """What `Runner` asks for further players; for the arguments see `TokenSeat`."""
        rollout = self.config.rollout

        def seat(player: str, ticket: Ticket, attempt: int) -> tuple[str, _FrozenSeat]:
            path = self.choose(player, ticket)
            name = player if player != LEAGUE else "start" if path == self._base else path.name

            async def sit() -> TokenSeat:
                renderer, engine = await self.get(path, ticket.step)
                return TokenSeat(renderer, rollout.history, sampling, rollout.max_context, ticket, attempt,
                                 gate.beside(engine), threads)

            return name, _FrozenSeat(sit)

        return seat

    def choose(self, player: str, ticket: Ticket) -> Path:
        """The folder of the model that plays.

        Raises:
            EnvFailure: reason "opponent": a league is wanted, and there is no run that has one.
        """
        if player.startswith(MODEL):
            return Path(player.removeprefix(MODEL))
        if self._league is None or not self._league.is_dir():
            raise EnvFailure("opponent", "opponent: 'league' needs a run that trains; write 'model:FOLDER', 'random' "
                             "or 'self' here")
        found = by_step(self._league) or [self._base]
        return found[np.random.default_rng([ticket.seed, ticket.group, _SALT]).integers(len(found))]

    async def get(self, path: Path, step: int) -> tuple[Renderer, RolloutEngine]:
        """Renderer and engine of a folder, for a rollout of a step; 0 is evaluation."""
        if step != self._step:
            self._step = step
            await self._tidy()
        self._used[path] = max(step, self._used.get(path, 0))
        if path not in self._loaded:
            self._loaded[path] = asyncio.ensure_future(asyncio.to_thread(self._load, path))
        try:
            return await asyncio.shield(self._loaded[path])
        except Exception:
            self._loaded.pop(path, None)
            raise

    def _load(self, path: Path) -> tuple[Renderer, RolloutEngine]:
        renderer, rollout = self._load_renderer(path, self.config), self.config.rollout
        # Loading in another precision changes torch's default, for a moment, for all threads that compute.
        return renderer, TransformersEngine(path, renderer, dtype=torch.float32, max_context=rollout.max_context,
                                            max_sequences=rollout.max_concurrency)

    async def aclose(self) -> None:
        """End all engines."""
        for path in list(self._loaded):
            await self._drop(path)

    async def _tidy(self) -> None:
        """At a new step: what earlier ones left is forgotten, and models that are no members any more are dropped."""
        playing = by_step(self._league) if self._league else []
        left = {path for path in self._loaded if path.parent == self._league} | {self._base}
        for path, loaded in list(self._loaded.items()):
            late = self._used[path] < self._step - self.config.rollout.max_staleness
            if late and path in left.difference(playing or [self._base]):
                await self._drop(path)
            elif loaded.done() and not loaded.exception():
                await loaded.result()[1].reset_prefix_cache()

    async def _drop(self, path: Path) -> None:
        (loaded,) = await asyncio.gather(self._loaded.pop(path), return_exceptions=True)
        if not isinstance(loaded, BaseException):
            await loaded[1].close()


class _FrozenSeat:
    """The seat of a model that is loaded with its first reply; nothing of it is recorded."""

    def __init__(self, sit: Callable[[], Awaitable[TokenSeat]]) -> None:
        self._sit = sit
        self._seat: TokenSeat | None = None

    async def reply(self, conversation: Conversation) -> Message | None:
        """See `Seat.reply`."""
        if self._seat is None:
            self._seat = await self._sit()
        return await self._seat.reply(conversation)

    def record(self, trajectory: Trajectory) -> None:
        """Nothing."""
