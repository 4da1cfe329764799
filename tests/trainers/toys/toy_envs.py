"""Envs that tests train in, importable by any process that has this folder on its path."""

import os
import resource
import time

import gymnasium as gym
from PIL import Image

import molt_gym
from molt_gym import ChatEnv, EnvFailure, Turn
from molt_gym.messages import Message, text_of

LETTERS = "abcdefghijklm"


class Letters(ChatEnv):
    """Two turns; the reward is the share of some letters among the characters of both replies."""

    def __init__(self, *, trouble: str = "", share: float = 1.0, num_tasks: int = 20, split: str = "train") -> None:
        super().__init__()
        self.trouble, self.share, self.num_tasks = trouble, share, num_tasks

    def begin(self, index: int) -> list[Message]:
        self._index = index
        # For tests that want to be there before the run ends.
        time.sleep(float(os.environ.get("TOYS_PAUSE", "0")))
        self._trouble_in("reset")
        if self.trouble == "tools":
            self.tools = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]
        if self.trouble == "no room":
            resource.setrlimit(resource.RLIMIT_FSIZE, (1000, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
        return [{"role": "user", "content": f"task {index}" + " word" * (400 if self.trouble == "long" else 0)}]

    def answer(self, message: Message) -> Turn:
        self._trouble_in("step")
        text = text_of(message)
        reward = sum(text.count(letter) for letter in LETTERS) / max(1, len(text)) / 2
        if len(self.messages) == 2:
            return Turn([{"role": "user", "content": "more"}], reward)
        return Turn([], {"nan": float("nan"), "text": "high"}.get(self.trouble, reward), True)

    def _trouble_in(self, place: str) -> None:
        if self.np_random.random() >= self.share:
            return
        if self.trouble == f"raise in {place}":
            raise RuntimeError("the toy broke")
        if self.trouble == f"hang in {place}":
            time.sleep(60)
        if self.trouble == f"fail in {place}":
            raise EnvFailure("toybox", "the toy is lost")


class Coin(ChatEnv):
    """One turn; passes if the reply has an even number of characters."""

    def begin(self, index: int) -> list[Message]:
        return [{"role": "user", "content": f"toss {index}"}]

    def answer(self, message: Message) -> Turn:
        return Turn([], float(len(text_of(message)) % 2 == 0), True)


class Colours(ChatEnv):
    """Two turns, each about a picture of one colour; the reward is the share of right letters in the replies."""

    num_tasks = 3
    names = ("red", "lime", "blue")

    def begin(self, index: int) -> list[Message]:
        self._colour = self.names[index]
        return [{"role": "user", "content": [{"type": "text", "text": "Which colour?"}, self._picture(index)]}]

    def answer(self, message: Message) -> Turn:
        text = text_of(message)
        reward = sum(text.count(letter) for letter in set(self._colour)) / max(1, len(text)) / 2
        more = [] if len(self.messages) > 2 else [{"role": "user", "content": [self._picture(0)]}]
        return Turn(more, reward, not more)

    def _picture(self, index: int) -> dict:
        return {"type": "image", "image": Image.new("RGB", (32, 16), self.names[index])}


class Pixels(gym.Env):
    """An env whose actions nobody could write."""

    observation_space, action_space = gym.spaces.Discrete(2), gym.spaces.Box(0, 1, (8, 8))


molt_gym.register("Colours-v0", Colours, max_episode_steps=4)
molt_gym.register("Letters-v0", Letters, max_episode_steps=4)
molt_gym.register("Coin-v0", Coin, max_episode_steps=1)
gym.register("Pixels-v0", Pixels)
