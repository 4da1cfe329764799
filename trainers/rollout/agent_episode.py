"""An episode whose agent plays by itself: its requests are answered as they come, several at a time.

The same envs can be stepped like any other. That is what happens, one request after the other, where a wrapper of the
user's own is around them, for it could not see what goes past it.
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from molt_gym.agents import AgentRun, Result
from molt_gym.errors import ConfigError, EnvFailure
from molt_gym.server.server import LoopbackServer
from molt_gym.server.session import Session

from .env_calls import END_TIMEOUT, deadline_passed
from .seats import Seat


class AgentServer:
    """The one server of all who share it: started for the first of them, and closed when the last is done with it."""

    def __init__(self, make: Callable[[], LoopbackServer] = LoopbackServer) -> None:
        self._make = make
        self._server: LoopbackServer | None = None
        self._users: set[object] = set()
        self._changing = asyncio.Lock()

    async def get(self, user: object) -> LoopbackServer:
        """The server; it runs at least until this user's `release`.

        Raises:
            ConfigError: it cannot listen where the settings say.
        """
        async with self._changing:
            if self._server is None:
                server = self._make()
                try:
                    await server.start()
                except OSError as error:
                    raise ConfigError(f"rollout.server_host, rollout.server_port: {error}; write an address of this "
                                      "machine and a port that is free, or 0 for any") from error
                self._server = server
            self._users.add(user)
            return self._server

    async def release(self, user: object) -> None:
        """This user needs it no more; without effect if it never did."""
        async with self._changing:
            self._users.discard(user)
            if self._server is not None and not self._users:
                server, self._server = self._server, None
                await server.close()


def info_of(result: Result) -> dict[str, Any]:
    """The info of the last step."""
    return result.info | ({} if result.score is None else {"score": result.score})


async def play_agent(
    server: LoopbackServer, seat: Seat, run: Callable[[Session], Awaitable[Result]], max_turns: int | None
) -> Result:
    """Run an agent to its end, or until it asked for more than `max_turns` replies.

    Args:
        run: runs it, given its session.

    Raises:
        EnvFailure: from the agent, or because it asked nothing.
    """
    session = server.open(seat.respondent, max_turns=max_turns)
    try:
        result = await run(session)
    finally:
        session.close()
    if not session.turns and not result.truncated:
        raise EnvFailure("agent", f"it ended with {result} without having been answered once; it has to ask the policy "
                         "something at ctx.base_url, for instance through ctx.openai()")
    return result


async def outcome(run: AgentRun, session: Session) -> Result:
    """What comes of a run in this process, which has ended then.

    Raises:
        EnvFailure: from the agent, or, with the reason "timeout", because its own deadline passed.
    """
    ended = asyncio.wrap_future(run.future)
    spent = asyncio.ensure_future(session.spent.wait())
    try:
        await asyncio.wait([ended, spent], timeout=run.context.remaining(), return_when=asyncio.FIRST_COMPLETED)
        if not ended.done() and not spent.done():
            raise deadline_passed()
        if not ended.done():
            await asyncio.wait([ended], timeout=END_TIMEOUT)
        return ended.result() if ended.done() else run.so_far(truncated=True)
    finally:
        spent.cancel()
        # Otherwise what becomes of the run is an exception that nobody retrieves.
        ended.cancel()
        run.cancel()


def state_of(session: Session) -> tuple[bool, bool, str, str]:
    """What a run in another process reads of its session: spent, limited, and kind and text of its failure."""
    failure, limited = session.failure, session.overflowed or session.over.is_set()
    return session.spent.is_set(), limited, type(failure).__name__ if failure else "", str(failure or "")
