"""A stock agent of a framework, OpenAI's Agents SDK, as an environment: with a tool, and with a hand-off.

    pip install openai-agents && python examples/agents/openai_agents_sdk.py

The framework need not know of it: it gets a client, and talks to either of the two APIs that it can talk to.
"""

import json
from typing import Any

import agents
from agents import Agent, RunConfig, Runner, function_tool
from rich.console import Console

import molt_gym
from molt_gym.transcript import print_trajectory

STATES = ["paid", "packed", "shipped", "lost"]
MODELS = {"responses": agents.OpenAIResponsesModel, "chat_completions": agents.OpenAIChatCompletionsModel}


@function_tool
def look_up(order: int) -> str:
    """The state of an order."""
    return STATES[order % 4]


@molt_gym.register_agent("AgentsSDK-v0", max_turns=8)
async def run(ctx: molt_gym.AgentContext, api: str = "responses") -> float:
    """A desk that hands over to a clerk, who can look up orders. `api` is a key of `MODELS`."""
    model = MODELS[api](ctx.model, ctx.openai())
    clerk = Agent("Clerk", instructions="Look up orders.", tools=[look_up], model=model)
    desk = Agent("Desk", instructions="Hand over whoever asks about an order.", handoffs=[clerk], model=model)
    order = ctx.index % 1000
    try:
        result = await Runner.run(desk, f"What about order {order}?", run_config=RunConfig(tracing_disabled=True))
    except (agents.ModelBehaviorError, agents.MaxTurnsExceeded):
        # The policy's fault, such as a call of no such tool. An error that is raised on would leave out the run.
        return 0.0
    return float(STATES[order % 4] in str(result.final_output))


def policy(observation: dict[str, Any]) -> str | dict[str, Any]:
    """A stand-in for a model: does what it was told to."""
    last = observation["messages"][-1]
    tool = observation["tools"][0]["function"]["name"]
    if last["content"] in STATES:
        return f"It is {last['content']}."
    question = next(message["content"] for message in observation["messages"] if message["role"] == "user")
    arguments = {"order": int(question.split()[-1].strip("?"))} if tool == "look_up" else {}
    call = {"id": f"call_{tool}", "type": "function", "function": {"name": tool, "arguments": json.dumps(arguments)}}
    return {"role": "assistant", "content": "", "tool_calls": [call]}


if __name__ == "__main__":
    # To train it: molt_gym.train("AgentsSDK-v0", model="Qwen/Qwen3-0.6B")
    for api in MODELS:
        for trajectory in molt_gym.rollout("AgentsSDK-v0", policy, 1, env_kwargs={"api": api}):
            print_trajectory(Console(), trajectory)
