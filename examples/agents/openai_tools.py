"""The usual tool loop on OpenAI's SDK, as an environment. Tools that are called in one reply run at the same time.

    python examples/agents/openai_tools.py
"""

import asyncio
from typing import Any

import toolbox
from rich.console import Console

import molt_gym
from molt_gym.transcript import print_trajectory


@molt_gym.register_agent("OpenAITools-v0", max_turns=6)
class OpenAITools(molt_gym.ChatAgent):
    """Answers questions with a calculator and a sandbox for Python."""

    tools = toolbox.TOOLS

    def task(self, index: int, rng: Any) -> dict[str, Any]:
        """Task number `index`."""
        return toolbox.make_task(index)

    async def run(self, ctx: molt_gym.AgentContext) -> float:
        """Asks, runs the tools that are called, and asks again, until there is an answer."""
        client, messages = ctx.openai(), ctx.messages
        while True:
            completion = await client.chat.completions.create(model=ctx.model, messages=messages, tools=ctx.tools)
            reply = completion.choices[0].message
            if not reply.tool_calls:
                return toolbox.reward(ctx.task, reply.content)
            results = await asyncio.gather(*(
                asyncio.to_thread(toolbox.run_tool, call.function.name, call.function.arguments)
                for call in reply.tool_calls))
            messages.append(reply)
            messages += [{"role": "tool", "tool_call_id": call.id, "content": result}
                         for call, result in zip(reply.tool_calls, results, strict=True)]


if __name__ == "__main__":
    # To train it: molt_gym.train("OpenAITools-v0", model="Qwen/Qwen3-0.6B")
    for trajectory in molt_gym.rollout("OpenAITools-v0", toolbox.policy, 2):
        print_trajectory(Console(), trajectory)
