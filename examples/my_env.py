"""A new environment in one file, and a model that learns it in about a minute on a laptop's CPU.

    python examples/my_env.py

The policy is shown two numbers and asked for the larger one. `demonstrations` is needed for `model="tiny"` alone, a toy
that knows nothing until it is shown some noisy examples; any other model starts without.
"""

import random

import gymnasium as gym

import molt_gym


class LargerEnv(molt_gym.ChatEnv):
    """Says which of two numbers is larger; a wrong answer ends the episode as well as a right one."""

    def __init__(self, *, split: str = "train", render_mode: str | None = None) -> None:
        super().__init__(render_mode=render_mode)
        self._split = split

    def begin(self, index: int) -> list[dict]:
        """The question of task `index`; the two splits share no seeds."""
        self._a, self._b = random.Random(f"{self._split}/{index}").sample(range(1, 100), 2)
        return [{"role": "user", "content": f"Which is larger, {self._a} or {self._b}?"}]

    def answer(self, message: dict) -> molt_gym.Turn:
        """Reward 1 for the larger number and nothing else."""
        right = molt_gym.text_of(message).strip() == str(max(self._a, self._b))
        return molt_gym.Turn(reward=float(right), terminated=True)

    def demonstrations(self, count: int, seed: int = 0) -> list[list[dict]]:
        """Conversations in which either number is named, the smaller one a little more often."""
        rng = random.Random(seed)
        return [[*self.begin(rng.randrange(2**31)), {"role": "assistant", "content": str(self._guess(rng))}]
                for _ in range(count)]

    def _guess(self, rng: random.Random) -> int:
        return max(self._a, self._b) if rng.random() < 0.45 else min(self._a, self._b)


gym.register("Larger-v0", entry_point=LargerEnv, max_episode_steps=1)

if __name__ == "__main__":
    result = molt_gym.train("Larger-v0", model="tiny")
    print("curve:", result.run_dir / "curve.png")
