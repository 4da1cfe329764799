"""Streaming, and compaction: when the conversation gets long, the model sums it up, and goes on from its summary.

    python examples/agents/compaction.py

A conversation that goes on is one row of training data. What is rewritten, as here, begins another row. Every reply is
trained in the context in which it was sampled, summaries too, so the reward teaches to sum up well.
"""

import random
import re
from collections.abc import Callable
from functools import partial
from typing import Any

from rich.console import Console

import molt_gym
from molt_gym.transcript import print_trajectory

LONGEST = 6
"""Messages of a conversation that is not compacted yet; a real agent looks at `usage.total_tokens`."""
SYSTEM = "You look after a barn. Be brief."
SUM_UP = "Sum up how many apples have come so far."
ASK = "How many apples are there in all? Answer with the number."


async def say(stream: Callable[..., Any], messages: list[Any], text: str) -> str:
    """Adds a message, and the reply to it as it is, reasoning included: what is changed begins another row."""
    messages.append({"role": "user", "content": text})
    async with stream(messages=messages) as events:
        reply = (await events.get_final_completion()).choices[0].message
    messages.append(reply)
    return reply.content or ""


@molt_gym.register_agent("Compaction-v0", max_turns=16)
async def run(ctx: molt_gym.AgentContext) -> float:
    """Tells of deliveries one by one, and asks for the sum in the end."""
    stream = partial(ctx.openai().chat.completions.stream, model=ctx.model)
    messages: list[Any] = [{"role": "system", "content": SYSTEM}]
    apples = random.Random(ctx.index).choices(range(2, 10), k=7)
    for number in apples:
        await say(stream, messages, f"{number} apples come.")
        if len(messages) > LONGEST:
            summary = await say(stream, messages, SUM_UP)
            messages = [{"role": "system", "content": f"{SYSTEM} So far: {summary}"}]
    answer = await say(stream, messages, ASK)
    return float(re.findall(r"\d+", answer)[-1:] == [str(sum(apples))])


def policy(observation: dict[str, Any]) -> str:
    """A stand-in for a model: adds up what it was told."""
    told = [message["content"] for message in observation["messages"] if message["role"] != "assistant"]
    apples = sum(int(number) for text in told for number in re.findall(r"(\d+) apples", text))
    return f"{apples} apples" if told[-1] in (SUM_UP, ASK) else "They are in the barn now."


if __name__ == "__main__":
    # To train it: molt_gym.train("Compaction-v0", model="Qwen/Qwen3-0.6B")
    for trajectory in molt_gym.rollout("Compaction-v0", policy, 1):
        print_trajectory(Console(), trajectory)
