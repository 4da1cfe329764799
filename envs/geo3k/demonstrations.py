"""Demonstrations that call the Python tool, made of those that answer at once."""

import json
import random
import re

from molt_gym.messages import Message

__all__ = ["with_calls"]

_CALLING = 0.5
_ANSWER = re.compile(r"^(?P<seen>.*?)\\boxed\{(?P<value>[0-9]+)\}$")


def with_calls(conversations: list[list[Message]], seed: int) -> list[list[Message]]:
    """The conversations, in half of which an answer in a box is first printed by a program.

    Args:
        conversations: each with one reply, at its end.
        seed: fixes which.
    """
    rng = random.Random(f"calls/{seed}")
    return [_calling(conversation) if rng.random() < _CALLING else conversation for conversation in conversations]


def _calling(conversation: list[Message]) -> list[Message]:
    found = _ANSWER.match(conversation[-1]["content"])
    if found is None:
        return conversation
    arguments = json.dumps({"code": f"print({found['value']})"})
    call = {"id": "call00000", "type": "function", "function": {"name": "python", "arguments": arguments}}
    return [*conversation[:-1], {"role": "assistant", "content": found["seen"].strip(), "tool_calls": [call]},
            {"role": "tool", "tool_call_id": call["id"], "content": found["value"]},
            {"role": "assistant", "content": f"\\boxed{{{found['value']}}}"}]
