import asyncio
import threading
from functools import partial

import gymnasium as gym
import openai
import pytest

from molt_gym import AgentEnv, EnvFailure, Result, as_policy
from molt_gym.errors import ConfigError
from molt_gym.server.server import LoopbackServer
from molt_gym.tokens import Sampling
from molt_gym.trainers.rollout import agent_episode
from molt_gym.trainers.rollout.agent_episode import AgentServer
from molt_gym.trainers.rollout.gate import OpenGate
from molt_gym.trainers.rollout.runner import Limits, Runner
from molt_gym.trainers.rollout.seats import PolicySeat, TokenSeat
from molt_gym.trainers.rollout.ticket import Ticket

TICKET = Ticket(index=3, group=5, rollout=2, seed=7, step=1)
ASK = [{"role": "user", "content": "Write a number from 0 to 9."}]


async def ask(ctx, messages, client=None, **options):
    client = client or ctx.openai(asynchronous=True)
    completion = await client.chat.completions.create(model=ctx.model, messages=messages, **options)
    return [*messages, completion.choices[0].message.model_dump(exclude_none=True)]


def maker(run, max_turns=None, wrapper=None, **kwargs):
    """Makes the env of an agent as `gymnasium.make` does, with a wrapper of the user's own around it or not."""
    kwargs = {"agent": run, **kwargs}
    spec = gym.envs.registration.EnvSpec("Agent-v0", AgentEnv, max_episode_steps=max_turns, kwargs=kwargs)

    def make():
        env = gym.make(spec)
        return wrapper(env) if wrapper else env

    return make


@pytest.fixture
async def token_runner(engine, renderer):
    """Makes runners on the tiny model."""
    runners = []

    def make_runner(make, max_tokens=8, max_context=256, **limits):
        gate, sampling = OpenGate(engine), Sampling(max_tokens=max_tokens)
        runners.append(Runner("Agent-v0", make, lambda ticket, attempt: TokenSeat(
            renderer, "rerender", sampling, max_context, ticket, attempt, gate), Limits(**limits)))
        return runners[-1]

    yield make_runner
    for runner in runners:
        await runner.aclose()


async def play(runner, ticket=TICKET):
    return await asyncio.wait_for(runner.play(ticket), 30)


@pytest.fixture
async def policy_runner():
    """Makes runners that ask a function."""
    runners = []

    def make_runner(make, policy=lambda observation: "yes", **limits):
        seat = PolicySeat
        runners.append(Runner("Agent-v0", make, lambda ticket, attempt: seat(as_policy(policy)), Limits(**limits)))
        return runners[-1]

    yield make_runner
    for runner in runners:
        await runner.aclose()


async def test_what_an_agent_asks_is_recorded_token_for_token(token_runner, renderer):
    async def run(ctx):
        talk = await ask(ctx, ASK)
        talk = await ask(ctx, [*talk, {"role": "user", "content": "What is 3 + 4?"}])
        ctx.report(info={"said": talk[-1]["content"]})
        return 0.5

    trajectory = await play(token_runner(maker(run)))
    assert trajectory.failure is None, trajectory.failure
    assert (trajectory.reward, trajectory.turns, trajectory.terminated, trajectory.forks) == (0.5, 2, True, 0)
    row, = trajectory.rows
    assert row.ids[: row.mask.index(1)] == renderer.render(ASK)
    assert trajectory.info == {"said": trajectory.messages[-1]["content"]}
    assert [message["role"] for message in trajectory.messages] == ["user", "assistant", "user", "assistant"]


async def test_the_samples_depend_on_the_ticket_alone(token_runner):
    async def run(ctx):
        await ask(ctx, ASK, seed=ctx.index)
        await ask(ctx, ASK)

    def rows(trajectory):
        return [row.ids for row in trajectory.rows]

    runner = token_runner(maker(run), max_tokens=16)
    first, again, other = [await play(runner, ticket) for ticket in (
        TICKET, TICKET, Ticket(index=3, group=5, rollout=3, seed=7, step=1))]
    assert rows(first) == rows(again) != rows(other)


async def test_sub_agents_are_answered_at_the_same_time_and_are_branches(token_runner):
    async def run(ctx):
        client = ctx.openai()
        talks = await asyncio.gather(*(ask(ctx, [{"role": "user", "content": f"What is 3 + {i}?"}], client)
                                       for i in range(4)))
        await asyncio.gather(*(ask(ctx, [*talk, *ASK], client) for talk in talks))
        return 1

    trajectory = await play(token_runner(maker(run)))
    assert trajectory.failure is None and (trajectory.turns, len(trajectory.rows), trajectory.forks) == (8, 4, 0)


async def test_a_slow_policy_is_asked_by_all_sub_agents_before_it_answers_one(policy_runner):
    arrived, barrier = [], threading.Barrier(3)

    def policy(observation):
        arrived.append(observation["messages"][0]["content"])
        barrier.wait(10)
        return "done"

    async def run(ctx):
        client = ctx.openai()
        await asyncio.gather(*(ask(ctx, [{"role": "user", "content": str(i)}], client) for i in range(3)))

    trajectory = await play(policy_runner(maker(run), policy))
    assert trajectory.failure is None and sorted(arrived) == ["0", "1", "2"] and trajectory.turns == 3


async def test_an_agent_that_wants_more_than_its_turns_is_truncated_with_what_it_earned(policy_runner):
    async def run(ctx):
        talk = ASK
        while True:
            talk = [*await ask(ctx, talk), *ASK]
            ctx.add_reward(0.25)

    trajectory = await play(policy_runner(maker(run, max_turns=2)))
    assert trajectory.failure is None
    assert (trajectory.turns, trajectory.truncated, trajectory.terminated, trajectory.reward) == (2, True, False, 0.5)


async def test_an_agent_may_end_by_itself_when_its_turns_are_used_up(policy_runner):
    async def run(ctx):
        import openai

        try:
            for _ in range(3):
                await ask(ctx, ASK)
        except openai.APIStatusError as error:
            return Result(0.75, info={"status": error.status_code})

    trajectory = await play(policy_runner(maker(run, max_turns=2)))
    assert (trajectory.turns, trajectory.truncated, trajectory.reward) == (2, True, 0.75)
    assert trajectory.info == {"status": 410}


async def test_replies_that_are_under_way_when_one_more_is_refused_still_come(policy_runner, monkeypatch):
    async def run(ctx):
        await asyncio.gather(*(ask(ctx, [{"role": "user", "content": str(i)}]) for i in range(3)),
                             return_exceptions=True)
        return 1.0

    async def policy(observation):
        await asyncio.sleep(1.0)
        return "yes"

    monkeypatch.setattr(agent_episode, "END_TIMEOUT", 0.3)
    trajectory = await play(policy_runner(maker(run, max_turns=2), policy))
    assert (trajectory.turns, trajectory.truncated, trajectory.reward) == (2, True, 1.0)


async def test_an_agent_whose_conversation_outgrows_the_context_is_truncated(token_runner):
    async def run(ctx):
        talk = ASK
        while True:
            talk = [*await ask(ctx, talk), {"role": "user", "content": "7 " * 30}]

    trajectory = await play(token_runner(maker(run)))
    assert trajectory.failure is None and trajectory.truncated and trajectory.reward == 0.0
    assert trajectory.turns >= 2 and len(trajectory.rows) == 1


@pytest.mark.parametrize("sdk", ["openai", "anthropic"])
async def test_a_sub_agent_that_outgrew_the_context_truncates_though_another_went_on(token_runner, sdk):
    async def say(ctx, content):
        messages = [{"role": "user", "content": content}]
        if sdk == "openai":
            await ask(ctx, messages)
        else:
            await ctx.anthropic().messages.create(model=ctx.model, max_tokens=8, messages=messages)

    async def run(ctx):
        long, _ = await asyncio.gather(say(ctx, "7 " * 300), asyncio.sleep(0.2), return_exceptions=True)
        await say(ctx, "What is 3 + 4?")
        raise RuntimeError("the first one failed") from long

    trajectory = await play(token_runner(maker(run), retries=0))
    assert trajectory.failure is None and trajectory.truncated and trajectory.turns == 1


@pytest.mark.parametrize("first", ["bad", "good"])
async def test_a_sub_agent_that_the_engine_failed_is_no_failure_of_the_agent(policy_runner, first):
    def policy(observation):
        if observation["messages"][0]["content"] == "bad":
            raise RuntimeError("out of memory")
        return "yes"

    async def run(ctx):
        async def bad():
            await ask(ctx, [{"role": "user", "content": "bad"}], ctx.openai(max_retries=0))

        asked = [bad, partial(ask, ctx, ASK)]
        failed = []
        for one in asked if first == "bad" else reversed(asked):
            try:
                await one()
            except openai.APIError as error:
                failed.append(error)
        raise ExceptionGroup("of sub-agents", failed)

    trajectory = await play(policy_runner(maker(run), policy, retries=0))
    assert trajectory.failure.reason == "generation" and "out of memory" in trajectory.failure.message


async def test_an_agent_that_raises_fails_its_rollout_and_is_tried_again(policy_runner):
    async def run(ctx):
        await ask(ctx, ASK)
        raise KeyError("board")

    runner = policy_runner(maker(run), retries=2)
    trajectory = await play(runner)
    assert trajectory.failure.reason == "agent" and "KeyError: 'board'" in trajectory.failure.message
    assert trajectory.reward is None and runner.retried == {"agent": 2}


@pytest.mark.parametrize("error", [EnvFailure("judge", "unreachable"), EnvFailure("sandbox")])
async def test_an_agents_own_reason_is_kept(policy_runner, error):
    async def run(ctx):
        raise error

    assert (await play(policy_runner(maker(run), retries=0))).failure.reason == error.reason


async def test_an_agent_that_asks_nothing_has_failed_whatever_reward_it_claims(policy_runner):
    async def run(ctx):
        return 1.0

    trajectory = await play(policy_runner(maker(run), retries=0))
    assert trajectory.failure.reason == "agent" and "without having been answered once" in trajectory.failure.message


async def test_the_server_can_be_bound_where_containers_reach_it(tiny_path):
    from molt_gym.trainers.config import load_config
    from molt_gym.trainers.session import loopback

    config = load_config("CodeExec-v0", overrides={
        "rollout.server_host": "0.0.0.0", "rollout.server_url": "http://host.docker.internal:9"})
    async with loopback(config) as server:
        assert server.url == "http://host.docker.internal:9" and server._bound == "0.0.0.0"


async def test_runners_that_share_a_server_need_one_port(unused_tcp_port):
    async def run(ctx):
        await ask(ctx, ASK)
        return 1

    server = AgentServer(lambda: LoopbackServer(port=unused_tcp_port))
    training, evaluation = [
        Runner("Agent-v0", maker(run), lambda ticket, attempt: PolicySeat(as_policy(lambda _: "yes")), Limits(),
               server=server) for _ in range(2)]
    rewards = [(await play(training)).reward, (await play(evaluation)).reward]
    await evaluation.aclose()
    rewards.append((await play(training)).reward)
    await training.aclose()
    assert rewards == [1, 1, 1]
    async with LoopbackServer(port=unused_tcp_port):
        pass


async def test_a_port_that_is_taken_is_said_by_its_setting(unused_tcp_port):
    async def run(ctx):
        return 1

    server = AgentServer(lambda: LoopbackServer(port=unused_tcp_port))
    runner = Runner("Agent-v0", maker(run), lambda ticket, attempt: PolicySeat(as_policy(lambda _: "yes")), Limits(),
                    server=server)
    async with LoopbackServer(port=unused_tcp_port):
        with pytest.raises(ConfigError, match="rollout.server_port.* 0 for any"):
            await play(runner)
    await runner.aclose()


async def test_training_and_evaluation_share_a_server(tiny_path, toys):
    from molt_gym.trainers.config import load_config
    from molt_gym.trainers.session import Sampler, env_maker

    config = load_config("toy_envs:Letters-v0", model=str(tiny_path), overrides={
        "rollout.max_context": 256, "rollout.max_tokens": 8})
    sampler = Sampler(tiny_path, config)
    try:
        one, other = [sampler.runner(env_maker(config), 1.0, ordered=False) for _ in range(2)]
        assert await one._server.get(one) is await other._server.get(other)
        await asyncio.gather(one.aclose(), other.aclose())
    finally:
        await sampler.engine.close()


async def test_a_policy_that_fails_is_asked_three_times_and_named_as_the_reason(policy_runner):
    asked = []

    def policy(observation):
        asked.append(observation)
        raise RuntimeError("out of memory")

    async def run(ctx):
        await ask(ctx, ASK)

    trajectory = await play(policy_runner(maker(run), policy))
    assert trajectory.failure.reason == "generation" and "out of memory" in trajectory.failure.message
    assert len(asked) == 3


async def test_an_agent_that_never_ends_is_stopped_at_the_deadline(policy_runner):
    ended = threading.Event()

    async def run(ctx):
        try:
            await asyncio.sleep(60)
        finally:
            ended.set()

    trajectory = await play(policy_runner(maker(run), retries=0, episode_timeout=0.3))
    assert trajectory.failure.reason == "episode_timeout" and await asyncio.to_thread(ended.wait, 5)


async def test_an_agent_is_stopped_at_the_deadline_of_its_env(policy_runner):
    ended = threading.Event()

    async def run(ctx):
        await ask(ctx, ASK)
        try:
            await asyncio.sleep(60)
        finally:
            ended.set()

    trajectory = await play(policy_runner(maker(run, run_timeout=0.5), retries=0))
    assert trajectory.failure.reason == "timeout" and "run_timeout" in trajectory.failure.message
    assert await asyncio.to_thread(ended.wait, 5)


async def test_a_blocking_agent_holds_up_nobody(policy_runner):
    def run(ctx):
        completion = ctx.openai().chat.completions.create(model="m", messages=ASK)
        return float(completion.choices[0].message.content == "yes")

    runner = policy_runner(maker(run))
    trajectories = await asyncio.wait_for(asyncio.gather(*(
        runner.play(Ticket(index=i, group=i)) for i in range(16))), 30)
    assert [trajectory.reward for trajectory in trajectories] == [1.0] * 16


class Halve(gym.RewardWrapper):
    def reward(self, reward):
        return reward / 2


async def test_a_wrapper_of_the_users_own_sees_every_step(policy_runner):
    async def run(ctx):
        await ask(ctx, await ask(ctx, ASK))
        return 1

    trajectory = await play(policy_runner(maker(run, wrapper=Halve)))
    assert (trajectory.reward, trajectory.turns, trajectory.terminated) == (0.5, 2, True)


async def test_the_server_and_its_sessions_are_gone_after_aclose(policy_runner):
    import psutil

    async def run(ctx):
        await ask(ctx, ASK)

    runner = policy_runner(maker(run))
    await play(runner)
    before = {c.laddr.port for c in psutil.Process().net_connections("tcp") if c.status == "LISTEN"}
    await runner.aclose()
    after = {c.laddr.port for c in psutil.Process().net_connections("tcp") if c.status == "LISTEN"}
    assert len(before - after) == 1
