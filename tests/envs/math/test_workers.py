import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from molt_gym.envs.math import workers
from molt_gym.envs.math.comparison import is_right
from molt_gym.errors import EnvFailure

TOWER = "5^{5^{5^{5^{5}}}}"
BOMBS = [
    TOWER,
    r"(5^{(5^{(5^{(5^5)})-4})}-5)/16",
    "2^{(30^5)}",
    "9!!!!!",
    r"\binom{10^9}{10^8}",
    "(" * 900 + "1",
]
SLACK = 60.0  # to start workers on a machine that others use too


@pytest.fixture(autouse=True)
def pool(monkeypatch):
    pool = workers._Pool()
    monkeypatch.setattr(workers, "_pool", pool)
    yield pool
    for worker in pool.idle:
        worker.end()


@pytest.fixture(scope="module")
def lasting():
    """A pool whose worker the next test goes on with."""
    pool = workers._Pool()
    yield pool
    for worker in pool.idle:
        worker.end()


def gone(pid, seconds=30.0):
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        try:
            with open(f"/proc/{pid}/stat") as file:
                if file.read().rpartition(")")[2].split()[0] == "Z":
                    return True
        except (FileNotFoundError, ProcessLookupError):
            return True
        time.sleep(0.05)
    return False


def test_a_worker_is_kept_and_compares_again():
    large = bytearray(2**29)
    large[::4096] = b"1" * len(large[::4096])
    assert workers.equal("x+1", "1+x", 30.0) is True
    first = workers.pids()
    assert workers.equal("x+1", "2+x", 30.0) is False
    assert workers.pids() == first and len(first) == 1 and large


@pytest.mark.parametrize("bomb", BOMBS, ids=lambda bomb: bomb[:12])
def test_a_bomb_ends_in_time_and_hurts_no_later_verdict(monkeypatch, lasting, bomb):
    monkeypatch.setattr(workers, "_pool", lasting)
    workers.equal("x+1", "1+x", 30.0)
    begin = time.monotonic()
    assert not workers.equal("1", bomb, 1.0)
    assert time.monotonic() - begin < 1.0 + SLACK
    assert workers.equal("x+1", "1+x", 30.0) is True


def test_a_worker_that_overruns_is_killed():
    workers.equal("x+1", "1+x", 30.0)
    (pid,) = workers.pids()
    assert workers.equal("1", TOWER, 0.5) is None
    assert gone(pid) and workers.pids() == []


def test_memory_is_bounded(monkeypatch):
    monkeypatch.setattr(workers, "_MEMORY_MB", 256)
    seen, done = [0], threading.Event()
    workers.equal("x+1", "1+x", 30.0)
    (pid,) = workers.pids()

    def watch():
        while not done.wait(0.02):
            try:
                with open(f"/proc/{pid}/statm") as file:
                    seen.append(int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE"))
            except (FileNotFoundError, ProcessLookupError, IndexError):
                return

    thread = threading.Thread(target=watch)
    thread.start()
    assert not workers.equal("1", r"3^{(40^5)} \cdot 7^{(40^5)}", 10.0)
    done.set()
    thread.join()
    assert 2**20 < max(seen) <= 256 * 2**20
    assert workers.equal("x+1", "1+x", 30.0) is True


@pytest.mark.slow
def test_twenty_verdicts_with_ten_bombs_between_them():
    pairs = [(rf"\sqrt{{{4 * n}}}", rf"2\sqrt{{{n}}}", SLACK) for n in range(2, 12)]
    jobs = [job for n, pair in enumerate(pairs) for job in (pair, (f"{TOWER}+{n}x", "1+x", 0.5))]
    begin = time.monotonic()
    with ThreadPoolExecutor(20) as threads:
        verdicts = list(threads.map(lambda job: is_right(*job[:2], seconds=job[2]), jobs))
    assert verdicts[::2] == [True] * 10 and not any(verdicts[1::2])
    assert time.monotonic() - begin <= 10 * (0.5 + 2.0) / workers.WORKERS + SLACK
    assert len(workers.pids()) <= workers.WORKERS
    with ThreadPoolExecutor(workers.WORKERS) as threads:
        assert all(threads.map(is_right, ["x+1"] * workers.WORKERS, ["1+x"] * workers.WORKERS))


def test_threads_and_tasks_get_verdicts():
    async def main():
        here = is_right(r"\sqrt{12}", r"2\sqrt{3}")
        there = await asyncio.gather(*(asyncio.to_thread(is_right, "1+x", "x+1") for _ in range(3)))
        return [here, *there]

    assert asyncio.run(main()) == [True] * 4


def test_a_worker_that_was_killed_by_others_is_replaced():
    workers.equal("x+1", "1+x", 30.0)
    (pid,) = workers.pids()
    os.kill(pid, signal.SIGKILL)
    assert gone(pid)
    assert workers.equal("x+1", "1+x", 30.0) is True
    assert pid not in workers.pids()


def test_a_death_that_is_no_fault_of_the_answer_is_a_failure():
    workers.equal("x+1", "1+x", 30.0)
    (pid,) = workers.pids()
    timer = threading.Timer(1.0, os.kill, (pid, signal.SIGKILL))
    timer.start()
    with pytest.raises(EnvFailure, match="grader: a worker ended with code -9"):
        workers.equal("1", TOWER, 60.0)
    assert workers.pids() == []


def test_a_worker_that_cannot_start_says_why(monkeypatch, tmp_path):
    program = tmp_path / "worker.py"
    program.write_text(workers._PROGRAM.read_text().replace("from math_verify", "from no_such_module"))
    monkeypatch.setattr(workers, "_PROGRAM", program)
    with pytest.raises(EnvFailure, match="grader: a worker did not start: ModuleNotFoundError"):
        workers.equal("1", "x", 5.0)


@pytest.mark.slow
def test_workers_end_with_their_parent():
    parent = subprocess.Popen(
        [sys.executable, "-c", f"""
import os, threading
from molt_gym.envs.math import workers
first = threading.Thread(target=workers.equal, args=("x+1", "1+x", 60.0))
first.start(); first.join()
print(*workers.pids(), flush=True)
busy = threading.Thread(target=workers.equal, args=("1", {TOWER!r}, 3.0))
busy.start()
worker = workers._Worker()
print(worker.process.pid, flush=True)
os.kill(os.getpid(), 9)
"""], stdout=subprocess.PIPE, text=True)
    said, _ = parent.communicate(timeout=120)
    pids = list(map(int, said.split()))
    assert len(pids) == 2 and all(gone(pid) for pid in pids)


def test_a_child_has_workers_of_its_own():
    workers.equal("x+1", "1+x", 30.0)
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.write(write, str(workers.pids()).encode())
        os._exit(0)
    os.waitpid(pid, 0)
    assert os.read(read, 100) == b"[]"
    os.close(read)
    os.close(write)
    assert workers.equal("x+1", "1+x", 30.0) is True
