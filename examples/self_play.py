"""A game of your own in one file, both seats of which the policy plays and learns from.

    python examples/self_play.py

Nim: by turns two seats take one to three matches, and who takes the last one wins. A seat that leaves the other a
multiple of four cannot lose.
"""

import numpy as np

import molt_gym


class Nim(molt_gym.GameEnv):
    """Nim: take one to three matches; who takes the last one wins."""

    seats = ("first", "second")
    presets = {"": molt_gym.GameEnv.presets[""], "tiny": {"rollout": {"max_tokens": 4}}}

    def begin(self, index: int) -> None:
        """A pile for the task."""
        self.matches, self.moves = int(self.rng.integers(5, 13)), 0

    def turn(self) -> str | None:
        """The two by turns, as long as there are matches."""
        return self.seats[self.moves % 2] if self.matches else None

    def rules(self, seat: str) -> str:
        """The system message."""
        return "Take 1, 2 or 3 matches. Who takes the last one wins."

    def view(self, seat: str) -> str:
        """What a seat reads when it is its turn."""
        return f"{self.matches} matches"

    def move(self, seat: str, message: dict) -> dict[str, float]:
        """Takes matches; rewards at the end."""
        text = molt_gym.text_of(message).strip()
        if text not in ("1", "2", "3") or int(text) > self.matches:
            raise molt_gym.IllegalMove(f"write a number from 1 to {min(3, self.matches)}")
        self.matches, self.moves = self.matches - int(text), self.moves + 1
        return {} if self.matches else {each: 1.0 if each == seat else -1.0 for each in self.seats}

    def random_move(self, seat: str, rng: np.random.Generator) -> str:
        """What the random player replies."""
        return str(rng.integers(1, min(3, self.matches) + 1))

    def demonstrations(self, count: int, seed: int = 0) -> list[list[dict]]:
        """Legal moves at random, from which a toy model learns to write moves at all."""
        rng, found = np.random.default_rng(seed), []
        for _ in range(count):
            self.matches = int(rng.integers(1, 13))
            found.append([{"role": "system", "content": self.rules("")}, {"role": "user", "content": self.view("")},
                          {"role": "assistant", "content": self.random_move("", rng)}])
        return found


molt_gym.register("Nim-v0", Nim)

if __name__ == "__main__":
    result = molt_gym.train("Nim-v0", "tiny", steps=20, rollout={"groups_per_step": 8}, eval={"episodes": 128})
    for line in result.metrics:
        if "eval/when" in line:
            print(f"{line['eval/when']}: lost {line['eval/Nim-v0/loss']:.2f} of the games against a random player")
