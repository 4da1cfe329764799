"""The league of a run: some of its earlier checkpoints as model folders, against which games are played.

Invariant: between two steps the members are a function of the checkpoints up to the newest one, so that a run which
goes on from that one plays against the same.
"""

import shutil
from pathlib import Path

import numpy as np

from molt_gym.opponents import LEAGUE
from molt_gym.registry import find_spec

from .atomic import recover
from .checkpoint import by_step, step_of
from .config import Config
from .export import export_checkpoint
from .rollout.frozen import league_folder
from .rollout.mixture import split

__all__ = ["League", "wants_league"]

_SALT = 0x6C65


def wants_league(config: Config) -> bool:
    """Whether an env of the run, in training or in evaluation, is told to play against it."""
    for part in split(config):
        kwargs = find_spec(part.env).kwargs | part.env_kwargs
        for opponent in (kwargs.get("opponent"), part.eval.env_kwargs.get("opponent")):
            if LEAGUE in (opponent if isinstance(opponent, list | tuple) else [opponent]):
                return True
    return False


class League:
    """Keeps the folder.

    Args:
        config: of a run, with its folder.
        base: model folder with which training began.
    """

    def __init__(self, config: Config, base: Path) -> None:
        self._base, self._options, self._seed = base, config.league, config.seed
        self._folder = league_folder(config)
        self._folder.mkdir(parents=True, exist_ok=True)
        recover(self._folder)

    def update(self, checkpoint: Path | None) -> None:
        """Let the newest checkpoint join, and members leave that are too many or that come after it.

        Raises:
            OSError: the disk is full or refuses.
        """
        last = -1 if checkpoint is None else step_of(checkpoint)
        steps = {step for path in by_step(self._folder) if (step := step_of(path)) < last}
        if checkpoint is not None:
            steps.add(last)
        chosen = sorted(steps, key=self._rank)[: self._options.size]
        if last in chosen and not (own := self._folder / checkpoint.name).is_dir():
            export_checkpoint(checkpoint, own, self._base)
        for path in by_step(self._folder):
            if step_of(path) not in chosen:
                shutil.rmtree(path)

    def _rank(self, step: int) -> float:
        # Those with the lowest of numbers drawn once for each are a sample of all that there ever were.
        return -step if self._options.pick == "newest" else np.random.default_rng([self._seed, _SALT, step]).random()
