"""docs/agents.md: its code runs, its links lead somewhere, and what its tables say of runs is so."""

import re
from pathlib import Path

import gymnasium as gym
import pytest

import molt_gym

PAGE = Path(__file__).parents[2] / "docs" / "agents.md"
TEXT = PAGE.read_text(encoding="utf-8")


@pytest.fixture
def code():
    """The names that the page's code leaves behind."""
    before, names = dict(gym.registry), {"__name__": "__main__"}
    for block in re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL):
        exec(compile(block, PAGE.name, "exec"), names)  # noqa: S102
    yield names
    gym.registry.clear()
    gym.registry.update(before)


def test_the_code_runs(code):
    assert {"Capital-v0", "Sums-v0", "Echo-v0"} <= gym.registry.keys()


def test_all_links_lead_to_files():
    links = re.findall(r"\]\((?!http)([^)#]+)", TEXT)
    assert len(links) > 8 and [link for link in links if not (PAGE.parent / link).exists()] == []


def test_all_agents_are_in_the_table(agents_folder):
    scripts = {path.name for path in agents_folder.glob("*_*.*")} | {"compaction.py", "planner.py"}
    assert scripts <= {Path(link).name for link in re.findall(r"\]\(([^)]+)", TEXT)}


def raising(ctx, error):
    ask(ctx)
    raise error


def ask(ctx, times=1):
    for _ in range(times):
        ctx.openai(max_retries=0).chat.completions.create(model="m", messages=[{"role": "user", "content": "?"}])
        ctx.add_reward(0.25)


@pytest.mark.parametrize(("run", "outcome"), [
    (lambda ctx: ask(ctx), ("terminated", 0.25)),
    (lambda ctx: ask(ctx) or molt_gym.Result(1.0, truncated=True), ("truncated", 1.25)),
    (lambda ctx: ask(ctx, 5), ("truncated", 0.5)),
    (lambda ctx: raising(ctx, KeyError("tool")), ("agent", None)),
    (lambda ctx: raising(ctx, molt_gym.EnvFailure("judge", "is down")), ("judge", None)),
    (lambda ctx: float("nan"), ("reward", None)),
])
def test_what_a_run_becomes(code, run, outcome):
    molt_gym.register("Outcome-v0", "molt_gym:AgentEnv", max_episode_steps=2, kwargs={"agent": run})
    trajectory, = molt_gym.rollout("Outcome-v0", lambda observation: "!", 1, rollout__retries=0)
    failure = trajectory.failure and trajectory.failure.reason
    how = failure or ("truncated" if trajectory.truncated else "terminated")
    assert (how, trajectory.reward) == outcome


def test_a_policy_that_breaks_down_fails_the_run_as_generation(code):
    def policy(observation):
        raise RuntimeError("out of memory")

    trajectory, = molt_gym.rollout("Capital-v0", policy, 1, rollout__retries=0)
    assert trajectory.failure.reason == "generation"
