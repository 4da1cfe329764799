"""A planner and two sub-agents that work at the same time, on OpenAI's Responses API.

    python examples/agents/planner.py

Each of the three conversations is a row of training data of its own, and all of them get the reward of the run.
"""

import asyncio
import random
import re
from typing import Any

from rich.console import Console

import molt_gym
from molt_gym.transcript import print_trajectory

PLAN = "Divide the question into two simpler ones, and write each of them on a line of its own."


@molt_gym.register_agent("Planner-v0", max_turns=4)
class Planner(molt_gym.ChatAgent):
    """Has a question divided into two, has both answered, and asks for the sum."""

    def task(self, index: int, rng: Any) -> dict[str, Any]:
        """Task number `index`."""
        a, b, c, d = random.Random(index).choices(range(2, 10), k=4)
        prompt = f"Ann has {a} boxes of {b} pens, and Ben has {c} boxes of {d} pens. How many pens have they got?"
        return {"prompt": prompt, "answer": a * b + c * d}

    async def run(self, ctx: molt_gym.AgentContext) -> float:
        """Asks four times, the second and the third time at once."""
        create = ctx.openai().responses.create
        plan = await create(model=ctx.model, instructions=PLAN, input=ctx.task["prompt"])
        questions = plan.output_text.strip().splitlines()
        if len(questions) != 2:
            return 0.0
        answers = await asyncio.gather(*(
            create(model=ctx.model, instructions="Answer with a number.", input=question) for question in questions))
        results = " and ".join(answer.output_text for answer in answers)
        # Instructions are no part of what an earlier response remembers. With others, the plan would be a fork.
        merged = await create(
            model=ctx.model, instructions=PLAN, previous_response_id=plan.id,
            input=f"The answers are {results}. So what is the answer to the first question?")
        return float(re.findall(r"\d+", merged.output_text)[-1:] == [str(ctx.task["answer"])])


def policy(observation: dict[str, Any]) -> str:
    """A stand-in for a model, in all three of its parts."""
    *_, last = (message["content"] for message in observation["messages"])
    numbers = [int(number) for number in re.findall(r"\d+", last)]
    match numbers:
        case [a, b, c, d]:
            return f"What is {a} times {b}?\nWhat is {c} times {d}?"
        case [a, b] if "times" in last:
            return str(a * b)
    return f"They have got {sum(numbers)} pens."


if __name__ == "__main__":
    # To train it: molt_gym.train("Planner-v0", model="Qwen/Qwen3-0.6B")
    for trajectory in molt_gym.rollout("Planner-v0", policy, 2):
        print_trajectory(Console(), trajectory)
