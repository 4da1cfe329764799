"""How many programs a second the sandboxes run, beside Python started without any sandbox.

    python benchmarks/sandbox_throughput.py [--programs 200] [--at-once 1 2 4 16]
"""

import argparse
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from molt_gym.sandbox import SANDBOXES, Limits, check_bubblewrap, make_sandbox

PROGRAM = "print(17 + 25)"


def bare(program: str) -> str:
    """Runs a program in a Python of its own, with no limit at all."""
    command = [sys.executable, "-I", "-S", "-c", program]
    return subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=True).stdout


def rate(call: Callable[[str], str], programs: int, at_once: int) -> float:
    """Programs per second."""
    call(PROGRAM)
    with ThreadPoolExecutor(at_once) as pool:
        begin = time.perf_counter()
        outputs = list(pool.map(call, [PROGRAM] * programs))
        seconds = time.perf_counter() - begin
    assert set(outputs) == {"42\n"}
    return programs / seconds


def main() -> None:
    """Prints a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--programs", type=int, default=200)
    parser.add_argument("--at-once", type=int, nargs="+", default=[1, 2, 4, 16])
    options = parser.parse_args()
    calls: dict[str, Callable[[str], str]] = {"python": bare}
    for kind in SANDBOXES:
        if kind == "bubblewrap" and (trouble := check_bubblewrap()):
            print(f"bubblewrap left out: {trouble}")
            continue
        sandbox = make_sandbox(kind)
        calls[kind] = lambda program, sandbox=sandbox: sandbox.run(program, limits=Limits(seconds=30)).stdout
    print(f"{'at once':>7} {'kind':<12} {'per second':>10} {'ms each':>8} {'of python':>10}")
    for at_once in options.at_once:
        reference = None
        for kind, call in calls.items():
            result = rate(call, options.programs, at_once)
            reference = reference or result
            share = result / reference
            print(f"{at_once:>7} {kind:<12} {result:>10.1f} {1000 / result:>8.2f} {share:>10.2f}", flush=True)


if __name__ == "__main__":
    main()
