"""Any function can be the policy: play CodeExec-v0 with one, and read the transcripts.

    python examples/play_with_a_function.py
"""

import re

import molt_gym


def policy(observation: dict) -> str:
    """Solves "Print 17 plus 25." and the like; knows nothing else."""
    numbers = re.findall(r"\d+", observation["messages"][-1]["content"])
    return f"```python\nprint({' + '.join(numbers) or 0})\n```"


if __name__ == "__main__":
    for trajectory in molt_gym.rollout("CodeExec-v0", policy, 8):
        print(f"reward {trajectory.reward:g} after {trajectory.turns} turns: {trajectory.messages[1]['content']}")
