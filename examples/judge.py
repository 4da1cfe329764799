"""An env whose reward is a judge's, with a second part that code computes; then how far the judge can be trusted.

    python examples/judge.py
    JUDGE_URL=http://localhost:8000/v1 JUDGE_MODEL=Qwen/Qwen3-8B python examples/judge.py

Without an address, a function stands in for the judge: it likes short replies, and of two that are alike the first.
In training, "frozen" in the place of the address is the model with which the run began, on the run's own engines.
"""

import json
import os
import re

import gymnasium as gym

import molt_gym

RUBRIC = {"catchy": "Would one remember it?", "fitting": "Does it say what is sold?"}
GOODS = ["tea", "umbrellas", "bicycles", "maps"]


def policy(observation: dict) -> str:
    """Has one idea."""
    return observation["messages"][0]["content"].replace("Write a slogan for", "Better")


def stand_in(observation: dict) -> str:
    """What a judging model would say."""
    system, user = (message["content"] for message in observation["messages"][:2])
    replies = re.findall(r"<reply\S*>\n(.*)\n</reply", user)
    if "winner" in system:
        first, second = map(len, replies)
        return json.dumps({"winner": "A" if first <= second else "B"})
    return json.dumps({"scores": {"catchy": max(1, 10 - len(replies[0]) // 5), "fitting": 7}})


def make_judge() -> molt_gym.Judge:
    """The model at JUDGE_URL, or the stand-in."""
    url = os.environ.get("JUDGE_URL")
    return molt_gym.Judge(url or stand_in, RUBRIC, model=os.environ["JUDGE_MODEL"] if url else None)


class Slogan(molt_gym.ChatEnv):
    """Write a slogan; what it is worth says a judge, and that it names what is sold is checked."""

    num_tasks = len(GOODS)

    def __init__(self, **kwargs: str) -> None:
        super().__init__(**kwargs)
        self.judge = make_judge()
        self.rewards = molt_gym.Rewards(judged=1.0, names_it=0.5)

    def begin(self, index: int) -> list[dict]:
        """Asks for it."""
        self.goods = GOODS[index]
        return [{"role": "user", "content": f"Write a slogan for {self.goods}."}]

    def answer(self, message: dict) -> molt_gym.Turn:
        """Has it judged."""
        text = molt_gym.text_of(message)
        verdict = self.judge.score(self.messages[:-1], text)
        return molt_gym.Turn(reward=self.rewards(judged=verdict.score, names_it=self.goods in text), terminated=True)


gym.register("Slogan-v0", Slogan)

if __name__ == "__main__":
    for one in molt_gym.rollout("Slogan-v0", policy, 4):
        print(f"{one.messages[-1]['content']:24}", f"reward {one.reward:.2f}", one.info)
    judge = make_judge()
    pairs = [("Tea for two.", "Tea is a drink that people drink."), ("Tea?", "Tea!")]
    for a, b in pairs:
        found = judge.compare("Write a slogan for tea.", a, b)
        print(f"{a} / {b}", found.winner, f"consistent {found.consistent:.0%}")
    trust = judge.agreement([{"prompt": "Write a slogan for tea.", "a": a, "b": b} for a, b in pairs])
    print(f"alpha {trust.alpha:.2f}, the same in both orders {trust.consistent:.0%}")
