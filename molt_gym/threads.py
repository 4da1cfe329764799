"""Blocking calls in daemon threads: one that hangs can be given up, and never keeps the interpreter from ending.

The pools of `concurrent.futures` are joined at exit, and a shared pool can fill up with waiters on its own work.
"""

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import CancelledError, Future
from queue import SimpleQueue
from typing import Any, TypeVar

__all__ = ["Worker", "call_in_thread", "loop_in_thread"]

T = TypeVar("T")


class Worker:
    """One daemon thread that runs calls in order, for objects that must stay in the thread which made them."""

    def __init__(self, name: str) -> None:
        self._inbox: SimpleQueue[tuple[Future, Callable[[], Any]] | None] = SimpleQueue()
        self._last: Future | None = None
        threading.Thread(target=_work, args=(self._inbox,), name=name, daemon=True).start()

    @property
    def busy(self) -> bool:
        """Whether a call has not returned yet."""
        return self._last is not None and not self._last.done()

    def submit(self, call: Callable[[], T]) -> "Future[T]":
        """Queues a call; its future holds the value or whatever it raised."""
        future: Future[T] = Future()
        self._last = future
        self._inbox.put((future, call))
        return future

    def stop(self) -> None:
        """Ends the thread after the calls that are queued; does not wait."""
        self._inbox.put(None)


def call_in_thread(call: Callable[[], T], name: str = "molt-gym-call") -> "Future[T]":
    """Runs one call in a thread of its own; what it raises is an error that asyncio can hand on."""

    def guarded() -> T:
        try:
            return call()
        except (StopIteration, CancelledError) as error:
            # asyncio would wait for ever after the one, and take the other for a cancellation of who waits.
            raise RuntimeError(f"{name}: raised {error!r}") from error

    worker = Worker(name)
    future = worker.submit(guarded)
    worker.stop()
    return future


def loop_in_thread(name: str) -> asyncio.AbstractEventLoop:
    """A new event loop that runs in a thread of its own, for as long as the process does."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name=name, daemon=True).start()
    return loop


def _work(inbox: SimpleQueue) -> None:
    while (item := inbox.get()) is not None:
        future, call = item
        if future.set_running_or_notify_cancel():
            try:
                result = call()
            except BaseException as error:  # noqa: BLE001  it belongs to whoever waits for the future
                future.set_exception(error)
            else:
                future.set_result(result)
                del result
        # An idle thread must not keep alive what it worked on last.
        del item, future, call
