"""Signals to all processes of a run."""

import signal
import time
from types import SimpleNamespace

import psutil
import pytest
from torch._inductor.compile_worker.subproc_pool import SubprocPool

from molt_gym.trainers.actor.launch import LocalActor
from molt_gym.trainers.interrupts import spared


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
    assert signal.SIGTERM in actor.train([])
    assert signal.SIGTERM not in blocked()


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
