"""A number from a forked child that may do anything; tried in a process of few threads, as it is meant for."""

import subprocess
import sys
import time

import pytest

SCRIPT = """
import os, subprocess, sys, time
from molt_gym.adapters.forked import number_in_fork

def chain():
    subprocess.Popen(["sleep", "77.125"])
    time.sleep(60)

work = {work}
print(number_in_fork(work, {seconds}))
"""


def said(work: str, seconds: float = 20) -> str:
    script = SCRIPT.format(work=work, seconds=seconds)
    return subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True,
                          timeout=120).stdout.strip()


@pytest.mark.parametrize(("work", "expected"), [
    ("lambda: 0.25", "0.25"), ("lambda: 1 / 0", "None"), ("lambda: sys.exit(3)", "None"),
    ("lambda: os.kill(os.getpid(), 9)", "None"), ("lambda: len(bytearray(3 << 30))", "None")])
def test_a_number_comes_back_and_nothing_else_does(work, expected):
    assert said(work) == expected


def test_what_takes_too_long_is_killed_with_all_that_it_started():
    assert said("chain", 1) == "None"
    deadline = time.monotonic() + 20
    while "sleep\x0077.125" in commands() and time.monotonic() < deadline:
        time.sleep(0.1)
    assert "sleep\x0077.125" not in commands()


def commands() -> str:
    from pathlib import Path

    found = []
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            found.append(file.read_text(errors="replace"))
        except OSError:
            continue
    return "\n".join(found)
