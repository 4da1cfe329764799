"""A new environment in one file, and a model that learns it in about a minute on a laptop's CPU.

    python examples/my_env.py

The policy is shown three numbers and asked for the last one. `demonstrations` is needed for `model="tiny"` alone, a toy
that knows nothing until it is shown some noisy examples; any other model starts without.
"""

import random

import gymnasium as gym

import molt_gym


class LastEnv(molt_gym.ChatEnv):
    """Asks for the last of three numbers; a wrong answer ends the episode as well as a right one."""

    def __init__(self, *, split: str = "train", render_mode: str | None = None) -> None:
        super().__init__(render_mode=render_mode)
        self._split = split

    def begin(self, index: int) -> list[dict]:
        """The question of task `index`; the two splits share no seeds."""
        self._numbers = random.Random(f"{self._split}/{index}").sample(range(1, 100), 3)
        return [{"role": "user", "content": "Which number is last: {}, {} or {}?".format(*self._numbers)}]

    def answer(self, message: dict) -> molt_gym.Turn:
        """Reward 1 for the last number and nothing else."""
        right = molt_gym.text_of(message).strip() == str(self._numbers[-1])
        return molt_gym.Turn(reward=float(right), terminated=True)

    def demonstrations(self, count: int, seed: int = 0) -> list[list[dict]]:
        """Conversations in which any of the numbers is named, the first one most often."""
        rng = random.Random(seed)
        return [[*self.begin(rng.randrange(2**31)), {"role": "assistant", "content": str(self._guess(rng))}]
                for _ in range(count)]

    def _guess(self, rng: random.Random) -> int:
        return rng.choices(self._numbers, (5, 2, 3))[0]


gym.register("Last-v0", entry_point=LastEnv, max_episode_steps=1)

if __name__ == "__main__":
    result = molt_gym.train("Last-v0", model="tiny")
    print("curve:", result.run_dir / "curve.png")
