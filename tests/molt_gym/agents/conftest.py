"""A real server and a scripted policy for runs of agents."""

import asyncio
import json

import numpy as np
import pytest

from molt_gym.agents import AgentRun, load_agent
from molt_gym.server.exchange import Reply
from molt_gym.server.server import LoopbackServer


def reply_of(answer):
    """A reply of a text, or of an assistant message."""
    message = {"role": "assistant", "content": answer} if isinstance(answer, str) else answer
    return Reply(message, "tool_calls" if message.get("tool_calls") else "stop")


class Scripted:
    """Answers each call with what a function makes of it."""

    def __init__(self, answer, wait):
        self.make, self.wait, self.calls = answer, wait, []

    async def answer(self, call):
        self.calls.append(call)
        await asyncio.sleep(self.wait(call) if callable(self.wait) else self.wait)
        return [reply_of(self.make(call)) for _ in range(call.n)]

    async def count(self, call):
        return 0


@pytest.fixture
async def server():
    async with LoopbackServer() as server:
        yield server


@pytest.fixture
def start(server):
    """Starts a run; gives it, its session, and the policy."""

    def start(agent, answer=lambda call: "ok", *, wait=0.0, max_turns=None, index=0, timeout=30.0, **kwargs):
        policy = Scripted(answer, wait)
        session = server.open(policy, max_turns=max_turns)
        run = AgentRun(load_agent(agent, **kwargs), session, index=index, rng=np.random.default_rng(0),
                       max_turns=max_turns, timeout=timeout)
        return run, session, policy

    return start


@pytest.fixture
def play(start):
    """Runs an agent to its end."""

    async def play(agent, *args, **kwargs):
        run, session, _ = start(agent, *args, **kwargs)
        try:
            return await asyncio.wait_for(asyncio.wrap_future(run.future), 30)
        finally:
            session.close()
            assert run.join(5)

    return play


@pytest.fixture
def calls_tool():
    """An assistant message that calls tools, given as name and arguments."""

    def make(*calls):
        return {
            "role": "assistant",
            "content": "",
            "tool_calls": [
                {"id": f"call_{i}", "type": "function", "function": {"name": name, "arguments": json.dumps(arguments)}}
                for i, (name, arguments) in enumerate(calls)
            ],
        }

    return make
