"""Noisy demonstrations: what a small policy is trained on before reinforcement learning, so that it can begin.

Half of them write, a third of these well, and half of them judge what such a policy writes, as it may be its own judge:
a good reply gets the best verdict, the usual mistake one in the middle, and what is no sentence the worst.
"""

import json
import random
from collections.abc import Callable

from molt_gym.messages import Message

from ..families import FamilyGenerator
from .tasks import Task

__all__ = ["demonstrations"]

_GOOD, _MISTAKE, _NOTHING = (1.0, "It does what was asked."), (0.4, "It misses a word."), (0.0, "It is no sentence.")


def demonstrations(
    generator: FamilyGenerator, opening: Callable[[Task], list[Message]],
    judging: Callable[[Task, str, float], tuple[list[Message], dict[str, object]]], count: int, seed: int,
) -> list[list[Message]]:
    """Conversations about tasks of a generator.

    Args:
        generator: makes the tasks.
        opening: makes the first messages of a task.
        judging: from a task, a reply and what it is worth, what the judge is asked, and the rest of its verdict.
        count: how many.
        seed: fixes them.
    """
    rng = random.Random(f"demonstrations/{seed}")
    conversations: list[list[Message]] = []
    for number in range(count):
        task: Task = generator.task(rng.randrange(2**31))
        reply, (worth, reasoning) = _reply(task, rng)
        if number % 2:
            question, verdict = judging(task, reply, worth)
            conversations.append([*question, _says(json.dumps({"reasoning": reasoning, **verdict}))])
        else:
            conversations.append([*opening(task), _says(reply)])
    return conversations


def _reply(task: Task, rng: random.Random) -> tuple[str, tuple[float, str]]:
    good, wrong = task.reference or "", task.wrong
    draw = rng.random()
    if draw < 0.33:
        return good, _GOOD
    if draw < 0.75:
        return wrong, _MISTAKE
    words = good.rstrip(".").split()
    return " ".join(words[: rng.randrange(len(words))]), _NOTHING


def _says(content: str) -> Message:
    return {"role": "assistant", "content": content}
