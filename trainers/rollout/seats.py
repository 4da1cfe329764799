"""Who answers in a rollout: the policy that is trained, token by token, or any other policy, in messages."""

from dataclasses import replace
from typing import Protocol

from molt_gym.messages import Conversation, Message
from molt_gym.policy import Policy
from molt_gym.spaces import AssistantMessageSpace
from molt_gym.tokens import Renderer, Sampling, TokenGraph, Trajectory

from .engine import Request
from .gate import Gate
from .ticket import Ticket


class Seat(Protocol):
    """Answers one rollout's observations."""

    async def reply(self, conversation: Conversation) -> Message | None:
        """The assistant message; None where the conversation has grown so long that there is no room for one.

        Raises:
            PromptTooLong: there was no room from the start.
        """
        ...

    def record(self, trajectory: Trajectory) -> None:
        """Write down what happened."""
        ...


class TokenSeat:
    """Renders, samples, parses, and records token for token what the engine received and returned."""

    def __init__(
        self, renderer: Renderer, history: str, sampling: Sampling, max_context: int, ticket: Ticket, attempt: int,
        gate: Gate,
    ) -> None:
        self._renderer, self._sampling, self._max_context = renderer, sampling, max_context
        self._ticket, self._attempt, self._gate = ticket, attempt, gate
        self._graph = TokenGraph(renderer, history=history)
        self._cut = False

    async def reply(self, conversation: Conversation) -> Message | None:
        """The engine's reply, parsed."""
        graph, ticket = self._graph, self._ticket
        messages, tools = conversation["messages"], conversation["tools"]
        prompt = graph.prepare(messages, tools)
        if graph.turns and len(prompt.ids) >= self._max_context:
            return None
        sampling = replace(self._sampling, seed=ticket.derive(self._attempt, graph.turns))
        key = (ticket.group, ticket.rollout, self._attempt, graph.turns)
        generation = await self._gate.generate(Request(prompt.ids, sampling, key))
        self._cut = generation.finish_reason == "length"
        reply = self._renderer.parse(generation.ids, messages, tools, stop=sampling.stop)
        graph.commit(prompt, generation, reply)
        return reply

    def record(self, trajectory: Trajectory) -> None:
        """Rows, turns and forks; whether the last reply was cut."""
        graph = self._graph
        trajectory.rows, trajectory.turns, trajectory.forks = graph.rows(), graph.turns, graph.forks
        trajectory.length_limited = trajectory.length_limited or self._cut


class PolicySeat:
    """Any policy; there are no tokens to record."""

    def __init__(self, policy: Policy) -> None:
        self._policy, self._turns, self._space = policy, 0, AssistantMessageSpace()

    async def reply(self, conversation: Conversation) -> Message:
        """The policy's reply."""
        message = await self._policy.reply(conversation["messages"], conversation["tools"])
        self._space.validate(message)
        self._turns += 1
        return message

    def record(self, trajectory: Trajectory) -> None:
        """The turns."""
        trajectory.turns = self._turns
