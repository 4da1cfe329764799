"""Signals to a run and to all of its processes."""

import asyncio
import os
import signal
import time
from types import SimpleNamespace

import psutil
import pytest
from torch._inductor.compile_worker.subproc_pool import SubprocPool

from molt_gym.trainers.actor.launch import LocalActor
from molt_gym.trainers.interrupts import run, spared


def blocked() -> set[int]:
    return signal.pthread_sigmask(signal.SIG_BLOCK, ())


@pytest.mark.slow
def test_what_torch_compiles_in_outlives_a_signal_to_all_processes() -> None:
    with spared():
        pool = SubprocPool(1)
    try:
        assert pool.submit(abs, -1).result(60) == 1
        job = pool.submit(time.sleep, 1)
        for process in (psutil.Process(pool.process.pid), *psutil.Process(pool.process.pid).children(recursive=True)):
            process.send_signal(signal.SIGTERM)
        assert job.result(30) is None
    finally:
        pool.shutdown()


def test_an_actor_begins_processes_only_where_they_are_spared() -> None:
    actor = LocalActor.__new__(LocalActor)
    actor._ranks, actor._lost, actor._first = [], False, SimpleNamespace(train=lambda *_: blocked())
    assert {signal.SIGTERM, signal.SIGHUP} <= actor.train([])
    assert not {signal.SIGTERM, signal.SIGHUP} & blocked()


def test_a_signal_that_came_meanwhile_comes_afterwards() -> None:
    received = []
    before = signal.signal(signal.SIGTERM, lambda number, _: received.append(number))
    try:
        with spared():
            signal.raise_signal(signal.SIGTERM)
            assert received == []
        assert received == [signal.SIGTERM]
    finally:
        signal.signal(signal.SIGTERM, before)


@pytest.mark.parametrize(("number", "default", "ends"), [
    (signal.SIGINT, signal.default_int_handler, KeyboardInterrupt), (signal.SIGTERM, signal.SIG_DFL, SystemExit),
    (signal.SIGHUP, signal.SIG_DFL, SystemExit)])
def test_work_that_is_told_to_end_saves_first_and_further_signals_only_get_an_answer(
    number: signal.Signals, default: object, ends: type[BaseException], capsys: pytest.CaptureFixture
) -> None:
    saved = []

    async def work() -> None:
        try:
            signal.raise_signal(number)
            await asyncio.sleep(60)
        finally:
            signal.raise_signal(number)
            await asyncio.sleep(0.05)
            saved.append(1)

    before = signal.signal(number, default)
    try:
        with pytest.raises(ends) as caught:
            run(work())
        assert signal.getsignal(number) is default
    finally:
        signal.signal(number, before)
    assert saved == [1] and getattr(caught.value, "code", 128 + number) == 128 + number
    assert f"already ending; what there is gets saved first (kill -KILL {os.getpid()} " in capsys.readouterr().err


def test_a_run_that_does_not_mind_a_closed_terminal_goes_on() -> None:
    async def work() -> int:
        signal.raise_signal(signal.SIGHUP)
        await asyncio.sleep(0.05)
        return 1

    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        assert run(work()) == 1
    finally:
        signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize("times", [1, 3])
@pytest.mark.parametrize("start", ["asyncio.run", "run_until_complete"])
def test_ctrl_c_reaches_work_that_a_coroutine_waits_for(start: str, times: int) -> None:
    saved = []

    async def work() -> None:
        try:
            for _ in range(times):
                os.kill(os.getpid(), signal.SIGINT)
                await asyncio.sleep(0.5)
            await asyncio.sleep(60)
        finally:
            await asyncio.sleep(0.5)
            saved.append(1)

    async def main() -> None:
        run(work())

    loop = asyncio.new_event_loop()
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            asyncio.run(main()) if start == "asyncio.run" else loop.run_until_complete(main())
    finally:
        signal.signal(signal.SIGINT, before)
        loop.close()
    assert saved == [1]
