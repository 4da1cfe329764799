"""Noisy demonstrations: what a small policy is trained on before reinforcement learning, so that it can begin.

About .3 of the first answers are right, .4 make the mistake that is typical of the family, and the rest is anything:
so reinforcement learning has something to find out. Some conversations go on with the env's feedback.
"""

import random
from collections.abc import Callable

from molt_gym.messages import Message
from molt_gym.sandbox import Execution, Limits

from .generator import Generator, PrintTask, value_of
from .grading import NO_PROGRAM, judge_output
from .tasks import Task

__all__ = ["demonstrations"]

_RIGHT, _WRONG, _SECOND_TRY = 0.3, 0.4, 0.15


def demonstrations(
    generator: Generator, opening: Callable[[Task], list[Message]], count: int, seed: int
) -> list[list[Message]]:
    """Conversations about tasks of a generator.

    Args:
        generator: makes the tasks.
        opening: makes the first messages of a task.
        count: how many.
        seed: fixes them.

    Raises:
        ValueError: the answer to a task is no single expression.
    """
    rng = random.Random(f"demonstrations/{seed}")
    conversations: list[list[Message]] = []
    while len(conversations) < count:
        task = generator.task(rng.randrange(2**31))
        if not isinstance(task, PrintTask):
            raise ValueError("demonstrations: only families of PRINT_FAMILIES have them")
        draw = rng.random()
        expression = task.right if draw < _RIGHT else task.wrong if draw < _RIGHT + _WRONG else None
        reply, feedback = _answer(task, expression) if expression else _junk(task, rng)
        conversation = [*opening(task), _says("assistant", reply)]
        if feedback and rng.random() < _SECOND_TRY / (1 - _RIGHT):
            second = task.right if rng.random() < 0.5 else task.wrong
            conversation += [_says("user", feedback), _says("assistant", fenced(f"print({second})"))]
        conversations.append(conversation)
    return conversations


def fenced(code: str) -> str:
    """A program as a reply."""
    return f"```python\n{code}\n```"


def _answer(task: PrintTask, expression: str) -> tuple[str, str]:
    execution = Execution(value_of(expression), "", exit_code=0, timed_out=False, seconds=0.0)
    return fenced(f"print({expression})"), judge_output(execution, task.outputs[0].stdout, Limits()).feedback


def _junk(task: PrintTask, rng: random.Random) -> tuple[str, str]:
    """A reply of no use and what the env says to it; "" where only running it would tell."""
    match rng.randrange(4):
        case 0:
            numbers = rng.randint(1, 99), rng.choice("+-*"), rng.randint(1, 99)
            return _answer(task, "".join(map(str, numbers)))
        case 1:
            return fenced(f"print({task.wrong}"), ""
        case 2:
            return f"```python\nprint({task.wrong})\n", NO_PROGRAM
        case _:
            return f"print({task.wrong})", NO_PROGRAM


def _says(role: str, content: str) -> Message:
    return {"role": role, "content": content}
