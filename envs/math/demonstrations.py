r"""Noisy demonstrations: what a small policy is trained on before reinforcement learning, so that it can begin.

About .3 of the answers are right, .4 make the mistake that is typical of the family, and the rest is anything: another
number, or no answer in a box. So reinforcement learning has something to find out. Most name the numbers of the
problem first: a tiny model that has learnt to copy in order chooses more easily what to copy.
"""

import random
import re
from collections.abc import Callable

from molt_gym.messages import Message

from ..families import FamilyGenerator
from .problems import Problem

__all__ = ["demonstrations"]

_RIGHT, _WRONG = 0.3, 0.4


def demonstrations(
    generator: FamilyGenerator, opening: Callable[[Problem], list[Message]], count: int, seed: int
) -> list[list[Message]]:
    """Conversations about problems of a generator.

    Args:
        generator: makes the problems.
        opening: makes the first messages of a problem.
        count: how many.
        seed: fixes them.
    """
    rng = random.Random(f"demonstrations/{seed}")
    conversations: list[list[Message]] = []
    for _ in range(count):
        problem = generator.task(rng.randrange(2**31))
        draw = rng.random()
        boxed = problem.answer if draw < _RIGHT else problem.wrong if draw < _RIGHT + _WRONG else None
        reply = _junk(problem, rng) if boxed is None else f"\\boxed{{{boxed}}}"
        if reply.startswith("\\"):
            reply = f"{', '.join(dict.fromkeys(re.findall('[0-9]+', problem.prompt)))}: {reply}"
        conversations.append([*opening(problem), {"role": "assistant", "content": reply}])
    return conversations


def _junk(problem: Problem, rng: random.Random) -> str:
    answer = problem.wrong if rng.random() < 0.5 else str(rng.randint(2, 99))
    return rng.choice((f"\\boxed{{{rng.randint(2, 99)}}}", f"\\boxed{{{answer}", "I do not know."))
