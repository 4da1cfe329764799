"""Coroutines that a signal asks to end.

Invariant: the first Ctrl-C, SIGTERM or SIGHUP (the terminal is closed) cancels the work, which then saves what it has;
later ones do not disturb that.
Where others handle the signals already, they are left to them; from who takes them over later, as Ray does, they are
taken back by `retake`.
"""

import asyncio
import os
import signal
import sys
from collections.abc import Coroutine, Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager, suppress
from threading import current_thread, main_thread
from typing import Any, TypeVar

from molt_gym.threads import call_in_thread

T = TypeVar("T")

_DEFAULTS = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_DFL, signal.SIGHUP: signal.SIG_DFL}


LOOK_EVERY = 0.2
"""Seconds."""


def run(work: Coroutine[Any, Any, T]) -> T:
    """Run on an event loop of its own, in a thread of its own where one is running already, as in a notebook.

    Ctrl-C cancels the work and raises KeyboardInterrupt when it has ended; SIGTERM does so with SystemExit(143), SIGHUP
    with SystemExit(129).
    """
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(_terminable(work, _defaults()))
    task: Future[asyncio.Task[T]] = Future()

    async def main() -> T:
        task.set_result(asyncio.ensure_future(work))
        return await task.result()

    result = call_in_thread(lambda: asyncio.run(main()), "molt-gym-loop")
    caller, interrupted = asyncio.current_task(), False
    while not result.done():
        try:
            wait([result], LOOK_EVERY)
            # asyncio.run lets Ctrl-C cancel its task, which is not told while it is in here.
            now = caller is not None and caller.cancelling() > 0
        except KeyboardInterrupt:
            now = True
        if now and not interrupted:
            interrupted = True
            running = task.result()
            running.get_loop().call_soon_threadsafe(running.cancel)
    if interrupted:
        raise KeyboardInterrupt
    return result.result()


def retake() -> None:
    """Handle signals as before a library put its own handlers; Ray's ends a process 3 s after SIGTERM."""
    for number in _DEFAULTS if current_thread() is main_thread() else ():
        if (handler := signal.getsignal(number)) is not None:
            signal.signal(number, handler)
            # As asyncio has it, system calls go on after a signal.
            signal.siginterrupt(number, False)


@contextmanager
def spared() -> Iterator[None]:
    """Processes that are started within are not ended by a signal to all of a run's, which is for this one to heed.

    Torch compiles in such processes, and waits for ever for those that are gone; they end with this process.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGHUP})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _defaults() -> list[signal.Signals]:
    """Signals that nobody handles or ignores."""
    if current_thread() is not main_thread():
        return []
    return [number for number, default in _DEFAULTS.items() if signal.getsignal(number) is default]


async def _terminable(work: Coroutine[Any, Any, T], signals: list[signal.Signals]) -> T:
    loop, task, received = asyncio.get_running_loop(), asyncio.ensure_future(work), list[signal.Signals]()

    def end(number: signal.Signals) -> None:
        received.append(number)
        if len(received) == 1:
            task.cancel()
        else:
            # The terminal may be gone.
            with suppress(OSError):
                print(f"already ending; what there is gets saved first (kill -KILL {os.getpid()} gives that up; older "
                      "checkpoints stay whole)", file=sys.stderr, flush=True)

    for number in signals:
        loop.add_signal_handler(number, end, number)
    try:
        return await task
    except asyncio.CancelledError:
        if received:
            raise (KeyboardInterrupt if received[0] is signal.SIGINT else SystemExit(128 + received[0])) from None
        raise
    finally:
        for number in signals:
            loop.remove_signal_handler(number)
