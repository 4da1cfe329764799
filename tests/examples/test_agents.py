"""Each example of an agent: run as a user would, asked for its reward, and recorded token for token."""

import asyncio
import os
import subprocess
import sys
import threading

import pytest

import molt_gym
from molt_gym.tokens import Sampling
from molt_gym.trainers.rollout.runner import Limits, Runner
from molt_gym.trainers.rollout.seats import TokenSeat
from molt_gym.trainers.rollout.ticket import Ticket

# Script, id, arguments of the env, turns, rows.
AGENTS = [
    ("openai_tools", "OpenAITools-v0", {}, 2, 1),
    ("anthropic_tools", "AnthropicTools-v0", {}, 2, 1),
    ("compaction", "Compaction-v0", {}, 10, 3),
    ("planner", "Planner-v0", {}, 4, 3),
    ("shell_agent", "Shell-v0", {}, 3, 1),
    ("openai_agents_sdk", "AgentsSDK-v0", {"api": "responses"}, 3, 2),
    ("openai_agents_sdk", "AgentsSDK-v0", {"api": "chat_completions"}, 3, 2),
]
TICKET = Ticket(index=5, group=0)

pytestmark = [pytest.mark.timeout(120), pytest.mark.usefixtures("curl")]
every_agent = pytest.mark.parametrize(("script", "env_id", "env_kwargs", "turns", "rows"), AGENTS)


def policy_of(example, script):
    module = example(script)
    return getattr(module, "policy", None) or module.toolbox.policy


async def play_all(env_id, env_kwargs, renderer, player, tickets):
    """Rollouts as the trainer plays them, up to the engine."""
    sampling = Sampling(max_tokens=300)
    runner = Runner(env_id, lambda: molt_gym.make(env_id, **env_kwargs), lambda ticket, attempt: TokenSeat(
        renderer, "rerender", sampling, 4096, ticket, attempt, player), Limits(retries=0))
    try:
        return await asyncio.wait_for(asyncio.gather(*map(runner.play, tickets)), 60)
    finally:
        await runner.aclose()


async def play(env_id, env_kwargs, renderer, player, ticket=TICKET):
    trajectory, = await play_all(env_id, env_kwargs, renderer, player, [ticket])
    return trajectory


def assert_each_token_is_trained_once(trajectory, player):
    trained = [logprob for row in trajectory.rows for logprob, bit in zip(row.logprobs, row.mask, strict=True) if bit]
    assert sorted(trained) == sorted(-float(number + 1) for number in range(sum(map(len, player.sampled))))
    for prompt, reply in zip(player.received, player.sampled, strict=True):
        start, end = len(prompt), len(prompt) + len(reply)
        assert any(row.ids[:end] == prompt + reply and all(row.mask[start:end]) for row in trajectory.rows)


@pytest.mark.slow
@pytest.mark.parametrize("script", sorted({script for script, *_ in AGENTS}))
def test_a_script_plays_and_wins(agents_folder, tmp_path, script):
    done = subprocess.run([sys.executable, agents_folder / f"{script}.py"], cwd=tmp_path,
                          env=os.environ | {"NO_COLOR": "1"}, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    ends = [line for line in done.stdout.splitlines() if line.startswith("reward")]
    assert ends and all(line.startswith("reward 1 ") and "terminated" in line for line in ends), done.stdout


@every_agent
def test_a_policy_that_knows_how_gets_the_whole_reward(example, script, env_id, env_kwargs, turns, rows):
    policy = policy_of(example, script)
    trajectories = molt_gym.rollout(env_id, policy, 3, env_kwargs=env_kwargs)
    assert [(trajectory.failure, trajectory.reward) for trajectory in trajectories] == [(None, 1.0)] * 3


@every_agent
def test_a_policy_that_does_not_gets_none(example, script, env_id, env_kwargs, turns, rows):
    example(script)
    trajectory, = molt_gym.rollout(env_id, lambda observation: "I do not know.", 1, env_kwargs=env_kwargs)
    assert (trajectory.failure, trajectory.reward) == (None, 0.0)


@every_agent
async def test_every_sampled_token_is_trained_once(example, renderer, player, script, env_id, env_kwargs, turns, rows):
    player = player(policy_of(example, script))
    trajectory = await play(env_id, env_kwargs, renderer, player)
    assert trajectory.failure is None, trajectory.failure
    assert (trajectory.reward, trajectory.turns, len(trajectory.rows)) == (1.0, turns, rows)
    assert trajectory.terminated and trajectory.malformed_calls == 0
    assert_each_token_is_trained_once(trajectory, player)


@every_agent
async def test_a_model_that_has_learnt_nothing_fails_no_rollout(
    example, renderer, player, script, env_id, env_kwargs, turns, rows
):
    example(script)
    for rollout in range(2):
        noise = player(None)
        trajectory = await play(env_id, env_kwargs, renderer, noise, Ticket(index=5, group=0, rollout=rollout))
        assert trajectory.failure is None, trajectory.failure
        assert_each_token_is_trained_once(trajectory, noise)


@every_agent
async def test_runs_at_the_same_time_do_not_mix(example, renderer, player, script, env_id, env_kwargs, turns, rows):
    tickets = [Ticket(index=index, group=index) for index in range(1, 8)]
    played = await play_all(env_id, env_kwargs, renderer, player(policy_of(example, script)), tickets)
    assert [(trajectory.failure, trajectory.reward) for trajectory in played] == [(None, 1.0)] * 7
    assert all(len(trajectory.rows) == rows for trajectory in played)


@every_agent
def test_an_agent_steps_like_any_env(example, script, env_id, env_kwargs, turns, rows):
    policy, env = policy_of(example, script), molt_gym.make(env_id, **env_kwargs)
    observation, _ = env.reset(options={"index": 5})
    total, over, steps = 0.0, False, 0
    while not over:
        reply = policy(observation)
        reply = {"role": "assistant", "content": reply} if isinstance(reply, str) else reply
        observation, reward, terminated, truncated, _ = env.step(reply)
        total, steps, over = total + reward, steps + 1, terminated or truncated
    env.close()
    assert (total, steps, terminated) == (1.0, turns, True)


async def test_tools_that_are_called_in_one_reply_run_at_the_same_time(example, renderer, player, monkeypatch):
    toolbox, both = example("openai_tools").toolbox, threading.Barrier(2)

    def run_tool(name, arguments):
        both.wait(20)
        return original(name, arguments)

    original = toolbox.run_tool
    monkeypatch.setattr(toolbox, "run_tool", run_tool)
    trajectory = await play("OpenAITools-v0", {}, renderer, player(toolbox.policy))
    assert (trajectory.reward, trajectory.tool_calls) == (1.0, 2)


async def test_both_sdks_send_the_policy_the_same_conversation(example, renderer, player):
    asked = []
    for script, env_id in (("openai_tools", "OpenAITools-v0"), ("anthropic_tools", "AnthropicTools-v0")):
        gate = player(policy_of(example, script))
        await play(env_id, {}, renderer, gate)
        # The second one alone has a system message, before the first message of the user.
        asked.append(gate.received[-1][gate.received[-1].index(ord("?")):])
    assert asked[0] == asked[1]


async def test_the_sub_agents_are_under_way_at_the_same_time(example, renderer, player):
    module, waiting, both = example("planner"), [], asyncio.Event()

    class Slow(player):
        async def generate(self, request):
            if "Answer with a number" in renderer.decode(request.ids):
                waiting.append(request)
                if len(waiting) == 2:
                    both.set()
                await asyncio.wait_for(both.wait(), 20)
            return await super().generate(request)

    trajectory = await play("Planner-v0", {}, renderer, Slow(module.policy))
    assert trajectory.failure is None and trajectory.reward == 1.0


STOCK = """
import json, os
import agents

@agents.function_tool
def look_up(order: int) -> str:
    return "shipped"

agents.set_default_openai_api("chat_completions" if os.environ["MOLT_GYM_TASK"] == "1" else "responses")
agents.set_tracing_disabled(True)
agent = agents.Agent("Clerk", instructions="Look up orders.", tools=[look_up], model="gpt-5")
result = agents.Runner.run_sync(agent, "What about order 7?")
print(json.dumps({"reward": float("shipped" in result.final_output), "info": {"said": result.final_output}}))
"""


@pytest.mark.slow
@pytest.mark.parametrize("task", [0, 1])
async def test_a_stock_program_of_the_framework_finds_the_server_by_its_environment(
    example, renderer, player, tmp_path, task
):
    (tmp_path / "stock.py").write_text(STOCK)
    kwargs = {"agent": "molt_gym:CommandAgent", "command": [sys.executable, str(tmp_path / "stock.py")]}
    molt_gym.register(f"Stock{task}-v0", "molt_gym:AgentEnv", kwargs=kwargs)
    gate = player(example("openai_agents_sdk").policy)
    trajectory = await play(f"Stock{task}-v0", {}, renderer, gate, Ticket(index=task, group=0))
    assert trajectory.failure is None, trajectory.failure
    assert (trajectory.reward, trajectory.turns, len(trajectory.rows)) == (1.0, 2, 1)
    assert trajectory.info == {"said": "It is shipped."}
    assert_each_token_is_trained_once(trajectory, gate)


def test_every_example_is_run_here(agents_folder):
    assert {path.name for path in agents_folder.iterdir() if path.is_file()} == {
        "toolbox.py", "shell_agent.sh", *(f"{script}.py" for script, *_ in AGENTS)}
