"""The data sets of reasoning-gym as chat envs: `reasoning_gym/NAME-v0` for each.

Invariants: rewards are those of the suite's own verifier; task i of a split is always the same, and none is in both
splits; nothing that a reply makes a verifier do outlives its limit.
"""

from typing import Any

from ..env import ChatEnv, Turn
from ..errors import ConfigError
from ..messages import Message, text_of
from ..registry import register
from ..tasks import check_split
from .forked import number_in_fork
from .global_random import GlobalRandom

__all__ = ["ReasoningGymEnv", "register_ids"]

SYSTEM = "Think as long as you need to, then give the final answer, and nothing else, between <answer> and </answer>."
TASKS = 1_000_000
"""Tasks of a split."""
_FEWER = {"acre": 2_000, "word_ladder": 20_000}
"""Of data sets that make all tasks at once, or refuse more."""
_COMPOSED = {"composite"}
_TEST_SEEDS = 10**9


class ReasoningGymEnv(ChatEnv):
    """One puzzle, one reply, and the verdict of the data set's own verifier.

    Reward: what the verifier gives, from 0 to 1; 0 without an answer in <answer> tags. `info["outcome"]` is "scored",
    "no_answer", or "undecided" where the verifier raised or did not end in time, which earns nothing either.

    Args:
        dataset: name in reasoning-gym.
        split: "train" or "test".
        system: the system message; None: there is none.
        seconds: the limit on the verifier.
        longest: characters of an answer; a longer one is worth nothing.
        render_mode: None or "ansi".
        seed: of all tasks; either split has its own ones with each.
        **settings: of the data set, such as `min_terms=3`.

    Raises:
        ConfigError: there is no such data set, or it refuses a setting.
    """

    # Verifiers run code that a reply can make hang, and some evaluate it.
    own_process = True
    presets = {"": {"rollout": {"max_tokens": 1024}}}

    def __init__(
        self, *, dataset: str, split: str = "train", system: str | None = SYSTEM, seconds: float = 10.0,
        longest: int = 10_000, render_mode: str | None = None, seed: int = 0, **settings: Any,
    ) -> None:
        super().__init__(render_mode=render_mode)
        check_split(split)
        if isinstance(seed, bool) or not isinstance(seed, int):
            raise ConfigError(f"seed: {seed!r}; write an integer")
        with GlobalRandom():
            from reasoning_gym.factory import DATASETS, create_dataset

            if dataset not in DATASETS:
                raise ConfigError(f"dataset: reasoning-gym has no {dataset!r}; `molt-gym envs` lists those that it has")
            try:
                # Item i is drawn from seed + i alone.
                self._data = create_dataset(dataset, seed=seed + _TEST_SEEDS * (split == "test"),
                                            **{"size": _FEWER.get(dataset, TASKS)} | settings)
            except (TypeError, ValueError, AssertionError) as error:
                raise ConfigError(f"{dataset}: {error or 'a setting is out of range'}; got {settings}") from error
        self.num_tasks = len(self._data)
        self._system, self._seconds, self._longest = system, seconds, longest

    def begin(self, index: int) -> list[Message]:
        """How to answer, and the puzzle."""
        with GlobalRandom():
            self._entry = self._data[index]
        user = {"role": "user", "content": self._entry["question"]}
        return [{"role": "system", "content": self._system}, user] if self._system else [user]

    def answer(self, message: Message) -> Turn:
        """The verdict."""
        from reasoning_gym.utils import extract_answer

        found = extract_answer(text_of(message))
        if found is None or len(found) > self._longest:
            return Turn(terminated=True, info={"outcome": "no_answer"})
        score = number_in_fork(lambda: self._data.score_answer(found, self._entry), self._seconds)
        outcome = "undecided" if score is None else "scored"
        return Turn(reward=score or 0.0, terminated=True, info={"outcome": outcome})


def register_ids() -> None:
    """An id for each data set."""
    with GlobalRandom():
        from reasoning_gym.factory import DATASETS
    for name in sorted(set(DATASETS) - _COMPOSED):
        register(f"reasoning_gym/{name}-v0", ReasoningGymEnv, kwargs={"dataset": name}, max_episode_steps=1)
