"""A game that tests train in, importable by any process that has this folder on its path."""

import molt_gym
from molt_gym import GameEnv
from molt_gym.messages import Message, text_of

LETTERS = "abcdefghijklm"


class Duel(GameEnv):
    """Two seats write twice each; whose reply has the higher share of some letters gets 1 in that round, both 0 if
    equal, else -1."""

    seats = ("left", "right")
    presets = {}

    def begin(self, index: int) -> None:
        self.task, self.shares = index, []

    def turn(self) -> str | None:
        return None if len(self.shares) == 4 else self.seats[len(self.shares) % 2]

    def rules(self, seat: str) -> str:
        return f"task {self.task} {seat}"

    def view(self, seat: str) -> str:
        return f"round {len(self.shares) // 2}"

    def move(self, seat: str, message: Message) -> dict[str, float]:
        text = text_of(message)
        self.shares.append(sum(text.count(letter) for letter in LETTERS) / max(1, len(text)))
        if len(self.shares) % 2:
            return {}
        left, right = self.shares[-2:]
        sign = float((left > right) - (left < right))
        return {"left": sign, "right": -sign}

    def random_move(self, seat: str, rng) -> str:
        return "".join(rng.choice(list("aknz"), 6))


molt_gym.register("Duel-v0", Duel)
