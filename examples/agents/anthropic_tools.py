"""The same agent as openai_tools.py on Anthropic's SDK; the policy does not notice the difference.

    python examples/agents/anthropic_tools.py
"""

import asyncio
from typing import Any

import toolbox
from rich.console import Console

import molt_gym
from molt_gym.transcript import print_trajectory

TOOLS = [{"name": tool["function"]["name"], "description": tool["function"]["description"],
          "input_schema": tool["function"]["parameters"]} for tool in toolbox.TOOLS]


@molt_gym.register_agent("AnthropicTools-v0", max_turns=6)
class AnthropicTools(molt_gym.ChatAgent):
    """Answers questions with a calculator and a sandbox for Python."""

    def task(self, index: int, rng: Any) -> dict[str, Any]:
        """Task number `index`."""
        return toolbox.make_task(index)

    async def run(self, ctx: molt_gym.AgentContext) -> float:
        """Asks, runs the tools that are called, and asks again, until there is an answer."""
        client, messages = ctx.anthropic(), ctx.messages
        while True:
            reply = await client.messages.create(
                model=ctx.model, max_tokens=1024, system="Use the tools.", messages=messages, tools=TOOLS)
            calls = [block for block in reply.content if block.type == "tool_use"]
            if not calls:
                return toolbox.reward(ctx.task, "".join(block.text for block in reply.content if block.type == "text"))
            results = await asyncio.gather(*(
                asyncio.to_thread(toolbox.run_tool, call.name, call.input) for call in calls))
            messages.append({"role": "assistant", "content": reply.content})
            messages.append({"role": "user", "content": [
                {"type": "tool_result", "tool_use_id": call.id, "content": result}
                for call, result in zip(calls, results, strict=True)]})


if __name__ == "__main__":
    # To train it: molt_gym.train("AnthropicTools-v0", model="Qwen/Qwen3-0.6B")
    for trajectory in molt_gym.rollout("AnthropicTools-v0", toolbox.policy, 2):
        print_trajectory(Console(), trajectory)
