"""Noisy demonstrations: what a small policy is trained on before reinforcement learning, so that it can begin.

About .3 of the conversations are right, .45 make the mistake that is typical of the family, and the rest is anything:
so reinforcement learning has something to find out. All calls in them really ran.
"""

import random
from collections.abc import Callable

from molt_gym.messages import Message

from .tasks import Generator, Task, ToolCall, calculation, look
from .tools import COLUMNS, run_tool

__all__ = ["demonstrations"]

_RIGHT, _WRONG = 0.3, 0.45


def demonstrations(
    generator: Generator, opening: Callable[[Task], list[Message]], count: int, seed: int
) -> list[list[Message]]:
    """Conversations about tasks of a generator.

    Args:
        generator: makes the tasks.
        opening: makes the first messages of a task.
        count: how many.
        seed: fixes them.
    """
    rng = random.Random(f"demonstrations/{seed}")
    conversations: list[list[Message]] = []
    while len(conversations) < count:
        task = generator.task(rng.randrange(2**31))
        draw = rng.random()
        calls = task.right if draw < _RIGHT else task.wrong if draw < _RIGHT + _WRONG else None
        conversations.append([*opening(task), *(_junk(task, rng) if calls is None else _play(task, *calls))])
    return conversations


def _play(task: Task, *calls: ToolCall) -> list[Message]:
    """The calls, and the answer that the last one gave."""
    messages: list[Message] = []
    result = ""
    for number, call in enumerate(calls):
        messages.append(_calls(call, number))
        result = run_tool(call.name, call.arguments, task.table)
        messages.append({"role": "tool", "tool_call_id": messages[-1]["tool_calls"][0]["id"], "content": result})
    return [*messages, _says("I do not know." if result.startswith("Error") else result)]


def _junk(task: Task, rng: random.Random) -> list[Message]:
    number = rng.randint(2, 99)
    match rng.randrange(5):
        case 0:
            return [_says(str(number))]
        case 1:
            return _play(task, calculation(f"{number}{rng.choice('+-*')}{rng.randint(2, 99)}"))
        case 2:
            return _play(task, look(rng.choice(list(task.table)), rng.choice(COLUMNS)))
        case 3:
            return _play(task, calculation(f"{number}*"), *task.right)
        case _:
            call = rng.choice((task.right[0], task.wrong[0]))
            return [_says(f'<tool_call>\n{{"name": "{call.name}", "arguments": {call.arguments}\n</tool_call>')]


def _calls(call: ToolCall, number: int) -> Message:
    function = {"name": call.name, "arguments": call.arguments}
    return {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"id": f"call{number:05d}", "type": "function", "function": function}],
    }


def _says(content: str) -> Message:
    return {"role": "assistant", "content": content}
