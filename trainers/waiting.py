"""Ways to wait for work that must not be cut off, or needs attention meanwhile."""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from typing import Any, TypeVar

T = TypeVar("T")


async def finished(
    work: Coroutine[Any, Any, T], interrupted: Callable[[], Awaitable[None]], say: Callable[[str], None]
) -> T:
    """What becomes of `work`; if this is cancelled, however often, `work` is done all the same before this ends.

    Args:
        interrupted: called when this is cancelled, to make `work` short.
        say: told what `work` raised then.
    """
    task = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await interrupted()
        while not task.done():
            with suppress(asyncio.CancelledError):
                await asyncio.wait([task])
        if not task.cancelled() and (error := task.exception()) is not None:
            say(f"while this was interrupted: {error}")
        raise


async def attended(
    work: Coroutine[Any, Any, T], wanted: asyncio.Event | None, attend: Callable[[], Awaitable[None]]
) -> T:
    """What becomes of `work`; whenever `wanted` is set meanwhile, `attend` is called, which is to clear it."""
    task = asyncio.ensure_future(work)
    try:
        while wanted is not None and not task.done():
            wish = asyncio.ensure_future(wanted.wait())
            await asyncio.wait([task, wish], return_when=asyncio.FIRST_COMPLETED)
            wish.cancel()
            if not task.done():
                await attend()
        return await task
    finally:
        task.cancel()
