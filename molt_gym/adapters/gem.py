"""The games and data sets of GEM as chat envs: `gem/NAME-v0` for each.

Invariants: rewards are those of the suite; what happens depends on the index of the task and the replies alone; what
the suite does to the whole process, such as its logging, is undone.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from inspect import signature
from typing import Any

from ..env import ChatEnv, Turn
from ..errors import ConfigError, EnvFailure
from ..messages import Message, text_of
from ..registry import register
from .forked import number_in_fork
from .global_random import GlobalRandom

__all__ = ["GemEnv", "register_ids"]

LONGEST = 10_000
"""Characters of a reply that the suite reads, the last ones."""
TURNS = 100
"""Cap on turns of games that set none of their own."""
_GAMES, _QUESTIONS = "gem.envs.game_env.", ("gem.envs.math_env:MathEnv", "gem.envs.qa_env:QaEnv")

_NO_SETTINGS = ("self", "args", "kwargs", "_")
_BROKEN = ("game:Crosswords-v0-random", "game:FifteenPuzzle-v0-random")
"""What the package itself cannot make."""


class GemEnv(ChatEnv):
    r"""A game or a data set of questions of GEM; answers are read from \boxed{} or, of some data sets, <answer> tags.

    Reward: the suite's, at each turn. A reply that a game breaks at ends it with the reward of what cannot be read, and
    a verdict that fails or takes too long is none and earns nothing: `info["outcome"]` is "broken" or "undecided".
    A game that has used up its own turns is over.

    Args:
        env: id in GEM, such as "game:GuessTheNumber-v0-easy".
        seconds: the limit on the verdict over an answer to a question.
        render_mode: None or "ansi".
        **settings: of the game or the data set, such as `max_turns=5`, or `dataset_name` for the name or the folder of
            another data set.

    Raises:
        ConfigError: GEM cannot make it.
    """

    own_process = True
    presets = {"": {"rollout": {"max_tokens": 1024}}}

    def __init__(
        self, *, env: str, seconds: float = 10.0, render_mode: str | None = None, **settings: Any,
    ) -> None:
        super().__init__(render_mode=render_mode)
        self._id, self._seconds, self._random = env, seconds, GlobalRandom()
        self._random.seed(0)
        with self._random, _same_logging():
            from gem.envs.registration import ENV_REGISTRY, make

            spec = ENV_REGISTRY.get(env)
            if spec is None:
                raise ConfigError(f"env: GEM has no {env!r}; `molt-gym envs gem` lists those that it has")
            self._asks = spec.entry_point in _QUESTIONS
            # Verdicts get a process and a limit here.
            verdicts = {"use_mp": False} if self._asks else {}
            try:
                self._env = make(env, **verdicts | settings)
            except LookupError as error:
                raise ConfigError(f"env: {env!r} needs a word list that has to be downloaded once: "
                                  "python -m nltk.downloader words") from error
            except Exception as error:
                raise ConfigError(f"env: {env!r} cannot be made with {settings}: {error}") from error
            # Games take whatever they are given, and heed what they know.
            taken = {name: None for kind in type(self._env).__mro__ for name in signature(kind.__init__).parameters}
            if unknown := [name for name in settings if name not in taken]:
                raise ConfigError(f"env: {env!r} takes no {', '.join(unknown)}; write one of "
                                  f"{', '.join(name for name in taken if name not in _NO_SETTINGS)}")
        self.num_tasks = len(self._env.dataset) if self._asks else None

    def begin(self, index: int) -> list[Message]:
        """The rules or the question."""
        self._random.seed(index)
        try:
            with self._random, _same_logging():
                # Given a seed, a data set would draw a row instead of taking the one of that number.
                if self._asks:
                    self._env.idx = index
                observation, info = self._env.reset() if self._asks else self._env.reset(seed=index)
        except Exception as error:
            raise EnvFailure("suite", f"{self._id}, task {index}: {type(error).__name__}: {error}") from error
        return [_user(observation, info)]

    def answer(self, message: Message) -> Turn:
        """The suite's next observation, or its verdict."""
        text = text_of(message)[-LONGEST:]
        if self._asks:
            score = number_in_fork(lambda: float(self._env.step(text)[1]), self._seconds)
            return Turn(reward=score or 0.0, terminated=True,
                        info={"outcome": "undecided" if score is None else "scored"})
        from gem.utils.constants import LanguageGameReward

        try:
            with self._random:
                observation, reward, terminated, truncated, info = self._env.step(text)
        except Exception:  # noqa: BLE001  games raise whatever a reply makes them raise
            return Turn(reward=LanguageGameReward.format_error_reward, terminated=True, info={"outcome": "broken"})
        if terminated or truncated:
            return Turn(reward=float(reward), terminated=True, info={"outcome": "scored"})
        return Turn([_user(observation, info)], float(reward))


def register_ids() -> None:
    """An id for each of its games, and for each of its data sets of questions in text."""
    with GlobalRandom(), _same_logging():
        from gem.envs.registration import ENV_REGISTRY
    for env, spec in ENV_REGISTRY.items():
        kind, _, name = env.partition(":")
        if spec.entry_point.startswith(_GAMES) and env not in _BROKEN:
            register(f"gem/{name.replace('-v0', '')}-v0", GemEnv, kwargs={"env": env}, max_episode_steps=TURNS)
        elif spec.entry_point in _QUESTIONS:
            register(f"gem/{kind}-{name}-v0", GemEnv, kwargs={"env": env}, max_episode_steps=1)


def _user(observation: Any, info: dict[str, Any]) -> Message:
    parts = [str(part).strip() for part in (observation, info.get("suffix")) if part]
    return {"role": "user", "content": "\n".join(filter(None, parts)) or "Go on."}


@contextmanager
def _same_logging() -> Iterator[None]:
    """Importing the package sets up logging for the whole process."""
    handlers, level = list(logging.root.handlers), logging.root.level
    try:
        yield
    finally:
        logging.root.handlers[:] = handlers
        logging.root.setLevel(level)
