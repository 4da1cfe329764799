"""Who answers in a rollout: the policy that is trained, token by token, or any other policy, in messages."""

import copy
from concurrent.futures import ThreadPoolExecutor
from typing import Literal, Protocol

from molt_gym.errors import PromptTooLong
from molt_gym.images import ImageSpan
from molt_gym.messages import Conversation, Message
from molt_gym.policy import Policy
from molt_gym.server.exchange import Call, Reply, Respondent
from molt_gym.server.respond import PolicyRespondent, Rules, TokenRespondent
from molt_gym.tokens import Generation, Renderer, Sampling, Trajectory

from .engine import Request
from .gate import Gate
from .ticket import Ticket


class Seat(Protocol):
    """Answers one rollout: its observations one by one, or all that its agent asks."""

    respondent: Respondent
    """For the requests of an agent."""

    async def reply(self, conversation: Conversation) -> Message | None:
        """The assistant message; None where the conversation has grown so long that there is no room for one.

        Raises:
            PromptTooLong: there was no room from the start.
        """
        ...

    def record(self, trajectory: Trajectory) -> None:
        """Write down what happened; the conversation too, if that is not known."""
        ...


class TokenSeat:
    """Renders, samples, parses, and records token for token what the engine received and returned.

    Seeds depend on the ticket, the attempt and the number of the sample in its rollout; a request's own seed, if it has
    one, takes the place of that number.
    """

    respondent: TokenRespondent

    def __init__(
        self, renderer: Renderer, history: Literal["keep", "rerender"], sampling: Sampling, max_context: int,
        ticket: Ticket, attempt: int, gate: Gate, threads: ThreadPoolExecutor | None = None,
    ) -> None:
        self._ticket, self._attempt, self._gate = ticket, attempt, gate
        rules = Rules(sampling, max_context, seed=self._seed)
        self.respondent = TokenRespondent(renderer, self._generate, rules, history=history, threads=threads)

    async def reply(self, conversation: Conversation) -> Message | None:
        """The engine's reply, parsed."""
        try:
            replies = await self.respondent.answer(Call(conversation["messages"], conversation["tools"]))
        except PromptTooLong:
            if self.respondent.graph.turns:
                return None
            raise
        return replies[0].message

    def record(self, trajectory: Trajectory) -> None:
        """Rows, turns, forks and tool calls; whether the last reply was cut."""
        respondent, graph = self.respondent, self.respondent.graph
        _transcribe(trajectory, respondent.last)
        trajectory.rows, trajectory.turns, trajectory.forks = graph.rows(), graph.turns, graph.forks
        trajectory.tool_calls, trajectory.malformed_calls = respondent.tool_calls, respondent.malformed_calls
        trajectory.tools_offered = respondent.tools_offered
        trajectory.length_limited = trajectory.length_limited or respondent.cut

    def _seed(self, number: int, seed: int | None, sample: int) -> int:
        if seed is None:
            return self._ticket.derive(self._attempt, number)
        return self._ticket.derive(self._attempt, sample, abs(seed), int(seed < 0))

    async def _generate(
        self, ids: list[int], sampling: Sampling, number: int, images: tuple[ImageSpan, ...] = ()
    ) -> Generation:
        key = (self._ticket.group, self._ticket.rollout, self._attempt, number, self._ticket.seat)
        return await self._gate.generate(Request(ids, sampling, key, images))


class PolicySeat:
    """Any policy; there are no tokens to record."""

    respondent: PolicyRespondent

    def __init__(self, policy: Policy) -> None:
        self.respondent = PolicyRespondent(policy)

    async def reply(self, conversation: Conversation) -> Message:
        """The policy's reply."""
        replies = await self.respondent.answer(Call(conversation["messages"], conversation["tools"]))
        return replies[0].message

    def record(self, trajectory: Trajectory) -> None:
        """The turns and, if an endpoint told, their tokens; whether the last reply was cut."""
        last = self.respondent.last
        trajectory.turns, trajectory.reply_tokens = self.respondent.turns, self.respondent.tokens
        trajectory.length_limited = last is not None and last[1].finish_reason == "length"
        _transcribe(trajectory, last)


def _transcribe(trajectory: Trajectory, last: tuple[Call, Reply] | None) -> None:
    """An agent's conversations are known from its requests alone; the last of them stands for all."""
    if last is not None and not trajectory.messages:
        call, reply = last
        trajectory.messages = copy.deepcopy([*call.messages, reply.message])
        trajectory.tools = copy.deepcopy(list(call.tools))
