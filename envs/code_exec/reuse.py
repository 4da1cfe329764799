"""Runs equal programs once: the rollouts of a group often give the same answer, and starting Python takes the time.

Only programs that can do nothing but the same again are shared. In the sandbox hashes are fixed, so that without an
import, a file and the address of an object nothing varies. What ran into the time limit, was killed or is long is not
kept.
"""

import os
import re
import threading
from collections import OrderedDict
from concurrent.futures import Future

from molt_gym.errors import EnvFailure
from molt_gym.sandbox import Execution, Limits, Sandbox

__all__ = ["run_once"]

_KEPT = 4096
_LONGEST = 10_000
_PATIENCE = 60.0
_MAY_VARY = re.compile(r"import|\b(?:id|open|hash|object|eval|exec|globals)\b|__")
_lock = threading.Lock()
_results: OrderedDict[tuple, Future[Execution]] = OrderedDict()


def run_once(sandbox: Sandbox, code: str, *, stdin: str, limits: Limits) -> Execution:
    """As `sandbox.run`, or the result of an equal call, which may still be running.

    Raises:
        EnvFailure: as `sandbox.run`; the failure of another caller is not shared.
    """
    if len(code) + len(stdin) > _LONGEST or _MAY_VARY.search(code):
        return sandbox.run(code, stdin=stdin, limits=limits)
    key = (type(sandbox), code, stdin, limits)
    with _lock:
        future = _results.get(key)
        mine = future is None
        if future is None:
            future = _results[key] = Future()
            if len(_results) > _KEPT:
                _results.popitem(last=False)
    if not mine:
        try:
            return future.result(_PATIENCE)
        except (EnvFailure, TimeoutError):
            return sandbox.run(code, stdin=stdin, limits=limits)
    kept = False
    try:
        result = sandbox.run(code, stdin=stdin, limits=limits)
        kept = result.exit_code in range(129) and len(result.stdout) + len(result.stderr) <= _LONGEST
        future.set_result(result)
        return result
    except BaseException:
        future.set_exception(EnvFailure("sandbox", "the run that was shared failed"))
        raise
    finally:
        with _lock:
            if not kept and _results.get(key) is future:
                del _results[key]


def _start_anew() -> None:
    global _lock
    _lock = threading.Lock()
    _results.clear()


# A child has no threads that would end what is running.
os.register_at_fork(after_in_child=_start_anew)
