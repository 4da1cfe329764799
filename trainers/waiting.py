"""Ways to wait for work that must not be cut off, or needs attention meanwhile."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Iterator
from typing import Any, TypeVar

T = TypeVar("T")


async def finished(
    work: Coroutine[Any, Any, T], interrupted: Callable[[], Awaitable[None]], say: Callable[[str], None]
) -> T:
    """What becomes of `work`; if this is cancelled, however often, `work` is done all the same before this ends.

    There is no limit to that: a step takes as long as it takes, and what it waits for has deadlines of its own.

    Args:
        interrupted: called when this is cancelled, to make `work` short.
        say: told what `work` raised then.
    """
    task = asyncio.ensure_future(work)
    pending, cut = {task}, None
    while pending:
        try:
            _, pending = await asyncio.wait(pending)
        except asyncio.CancelledError as error:
            if cut is None:
                pending.add(asyncio.ensure_future(interrupted()))
            cut = error
    if cut is None:
        return task.result()
    if not task.cancelled() and (error := task.exception()) is not None:
        say(f"while this was interrupted: {error}")
    raise cut


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


async def threaded(items: Iterator[T], *, ahead: bool) -> AsyncGenerator[T, None]:
    """What an iterator that takes its time gives, made in a thread; once this is closed, the iterator is at rest.

    Args:
        items: none of them None.
        ahead: whether to begin with the next one while one is in use.
    """
    def begin() -> "asyncio.Future[T | None]":
        return asyncio.ensure_future(asyncio.to_thread(next, items, None))

    coming = begin()
    try:
        # A thread cannot be cancelled.
        while (item := await asyncio.shield(coming)) is not None:
            coming = begin() if ahead else coming
            yield item
            coming = coming if ahead else begin()
    finally:
        await asyncio.wait([coming])
        # Of no interest to who closes this.
        coming.exception()
