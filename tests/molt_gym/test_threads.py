import asyncio
import gc
import subprocess
import sys
import threading
import weakref
from concurrent.futures import CancelledError

import pytest

from molt_gym.threads import Worker, call_in_thread


def test_a_worker_runs_its_calls_in_order_in_one_thread():
    worker = Worker("mine")
    order = []
    futures = [worker.submit(lambda i=i: order.append(i) or threading.current_thread().name) for i in range(20)]
    assert {future.result(timeout=10) for future in futures} == {"mine"}
    assert order == list(range(20))
    worker.stop()


def test_a_worker_is_busy_until_its_call_returns():
    worker, release = Worker("mine"), threading.Event()
    future = worker.submit(release.wait)
    assert worker.busy
    release.set()
    future.result(timeout=10)
    assert not worker.busy
    worker.stop()


def test_an_error_belongs_to_the_future_and_the_worker_goes_on():
    worker = Worker("mine")
    with pytest.raises(SystemExit):
        worker.submit(sys.exit).result(timeout=10)
    assert worker.submit(lambda: 7).result(timeout=10) == 7
    worker.stop()


@pytest.mark.parametrize("error", [StopIteration("over"), CancelledError()])
async def test_what_asyncio_cannot_hand_on_reaches_who_waits_as_an_error(error):
    def call():
        raise error

    with pytest.raises(RuntimeError, match=f"mine: raised {type(error).__name__}"):
        await asyncio.wait_for(asyncio.wrap_future(call_in_thread(call, "mine")), 5)


def test_a_call_that_was_cancelled_in_time_is_not_made():
    worker, release, made = Worker("mine"), threading.Event(), []
    worker.submit(release.wait)
    late = worker.submit(lambda: made.append(1))
    assert late.cancel()
    release.set()
    assert worker.submit(lambda: made).result(timeout=10) == []
    with pytest.raises(CancelledError):
        late.result(timeout=10)
    worker.stop()


def test_an_idle_worker_keeps_nothing_alive():
    class Thing:
        def work(self):
            return None

    worker, thing = Worker("mine"), Thing()
    worker.submit(thing.work).result(timeout=10)
    worker.submit(lambda: None).result(timeout=10)
    alive = weakref.ref(thing)
    del thing
    gc.collect()
    assert alive() is None
    worker.stop()


def test_a_call_that_hangs_does_not_keep_the_interpreter_from_ending():
    script = "import threading\nfrom molt_gym.threads import call_in_thread\ncall_in_thread(threading.Event().wait)"
    subprocess.run([sys.executable, "-c", script], check=True, timeout=30)


def test_a_call_in_a_thread_gives_its_value():
    assert call_in_thread(lambda: 3).result(timeout=10) == 3
