"""Work that must not be cut off, and iterators that take their time, off the event loop."""

import asyncio
import threading
from contextlib import aclosing

import pytest

from molt_gym.trainers.waiting import finished, threaded

SECONDS = 10


def counted(begun, gate=None):
    """Numbers; `begun` gets each before it is made, and the second waits for `gate`."""
    for number in range(3):
        begun.append(number)
        if number == 1 and gate is not None:
            assert gate.wait(SECONDS)
        yield number


async def begins(begun, count):
    async with asyncio.timeout(SECONDS):
        while len(begun) < count:
            await asyncio.sleep(0.001)


@pytest.mark.parametrize("ahead", [True, False])
def test_everything_comes_in_order(ahead):
    async def all_of():
        return [number async for number in threaded(counted([]), ahead=ahead)]

    assert asyncio.run(all_of()) == [0, 1, 2]


def test_the_next_one_is_made_while_one_is_in_use_if_that_was_asked_for():
    async def in_use(ahead):
        begun = []
        async with aclosing(threaded(counted(begun), ahead=ahead)) as items:
            assert await anext(items) == 0
            if ahead:
                await begins(begun, 2)
            else:
                await asyncio.sleep(0.05)
            return len(begun)

    assert asyncio.run(in_use(True)) >= 2
    assert asyncio.run(in_use(False)) == 1


def test_whoever_closes_it_finds_the_iterator_at_rest():
    async def close_early():
        begun, gate = [], threading.Event()
        source = counted(begun, gate)
        async with aclosing(threaded(source, ahead=True)) as items:
            await anext(items)
            await begins(begun, 2)
            asyncio.get_running_loop().call_later(0.1, gate.set)
        source.close()  # ValueError while a thread is in it

    asyncio.run(close_early())


def test_a_cancelled_reader_leaves_the_iterator_at_rest():
    async def cancel():
        begun, gate = [], threading.Event()
        source = counted(begun, gate)

        async def read():
            async with aclosing(threaded(source, ahead=False)) as items:
                async for _ in items:
                    pass

        reader = asyncio.ensure_future(read())
        await begins(begun, 2)
        reader.cancel()
        await asyncio.sleep(0.05)
        assert not reader.done()
        gate.set()
        with pytest.raises(asyncio.CancelledError):
            await reader
        source.close()

    asyncio.run(cancel())


def test_what_the_iterator_raises_reaches_the_reader():
    def failing():
        yield 0
        raise OSError("no more")

    async def read():
        return [item async for item in threaded(failing(), ahead=True)]

    with pytest.raises(OSError, match="no more"):
        asyncio.run(read())


@pytest.mark.parametrize("trouble", [None, "the disk is full"])
def test_work_is_done_to_its_end_however_often_and_whenever_that_is_cancelled(trouble):
    async def interrupt():
        told, said, done = [], [], asyncio.Event()

        async def work():
            await done.wait()
            if trouble:
                raise OSError(trouble)

        async def interrupted():
            told.append(1)
            await asyncio.sleep(0.05)

        task = asyncio.ensure_future(finished(work(), interrupted, said.append))
        for _ in range(3):
            await asyncio.sleep(0.01)
            task.cancel()
        await asyncio.sleep(0.1)
        assert told == [1] and not task.done()
        done.set()
        with pytest.raises(asyncio.CancelledError):
            await asyncio.wait_for(task, SECONDS)
        assert said == ([f"while this was interrupted: {trouble}"] if trouble else [])

    asyncio.run(interrupt())
