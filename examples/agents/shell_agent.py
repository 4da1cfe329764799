"""A program in another language as an environment: shell_agent.sh, which is bash and curl.

    python examples/agents/shell_agent.py

It finds the server through OPENAI_BASE_URL and OPENAI_API_KEY, its task in MOLT_GYM_TASK, and prints its reward.
"""

from pathlib import Path
from typing import Any

from rich.console import Console

import molt_gym
from molt_gym.transcript import print_trajectory

molt_gym.register("Shell-v0", "molt_gym:AgentEnv", max_episode_steps=3, kwargs={
    "agent": "molt_gym:CommandAgent",
    "command": ["bash", str(Path(__file__).resolve().with_name("shell_agent.sh"))],
    "tasks": [{"secret": number} for number in range(1, 10)],
})


def policy(observation: dict[str, Any]) -> str:
    """A stand-in for a model: goes up and down from 5, which finds every number but 1 and 9."""
    guess, step = 5, 2
    for message in observation["messages"]:
        if message["role"] == "user" and message["content"].startswith("No"):
            guess, step = guess + (step if "larger" in message["content"] else -step), 1
    return str(guess)


if __name__ == "__main__":
    # To train it: molt_gym.train("Shell-v0", model="Qwen/Qwen3-0.6B")
    for trajectory in molt_gym.rollout("Shell-v0", policy, 2):
        print_trajectory(Console(), trajectory)
