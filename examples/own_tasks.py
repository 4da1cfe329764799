"""An environment of your own whose tasks are the rows of a file, or of whatever dataset its users name.

    python examples/own_tasks.py
    cd examples && molt-gym rollout own_tasks:Capitals-v0 --human --env-kwargs.difficulty.max 1

`load_tasks` is given the keywords of the env, so that users choose the dataset, its split, its columns, a difficulty
and an order without another line here.
"""

from pathlib import Path
from typing import Any

import molt_gym

CAPITALS = Path(__file__).with_name("capitals.csv")


class Capitals(molt_gym.ChatEnv):
    """Name the capital of a country."""

    def __init__(
        self, *, dataset: str = str(CAPITALS), split: str = "train", render_mode: str | None = None, **options: Any
    ) -> None:
        super().__init__(render_mode=render_mode)
        self._tasks = molt_gym.load_tasks(dataset, split, fields=("country", "capital"), **options)
        self.num_tasks = len(self._tasks)

    def begin(self, index: int) -> list[dict]:
        """The question of row `index`."""
        self._task = self._tasks[index]
        return [{"role": "user", "content": f"What is the capital of {self._task.text('country')}? Only its name."}]

    def answer(self, message: dict) -> molt_gym.Turn:
        """Reward 1 for the name and nothing else."""
        right = molt_gym.text_of(message).strip().casefold() == self._task.text("capital").casefold()
        return molt_gym.Turn(reward=float(right), terminated=True)


molt_gym.register("Capitals-v0", Capitals, max_episode_steps=1)


def guess(observation: dict) -> str:
    """A policy that believes all capitals to have the name of their country and some letters more."""
    country = observation["messages"][-1]["content"].split("capital of ")[1].split("?")[0]
    return country + " City"


if __name__ == "__main__":
    for difficulty in ({"max": 1}, {"min": 2}):
        played = molt_gym.rollout("Capitals-v0", guess, 8, env_kwargs={"difficulty": difficulty, "dataset_seed": 1})
        print(difficulty, sum(trajectory.reward for trajectory in played), "of", len(played))
