"""The process in which an engine runs, and calls to it.

Invariants: when the process ends, every call fails, at once, with its exit code and the last lines of its log; a call
that is given up is cancelled there too; nothing of the process is left once it is closed.
"""

import itertools
import os
import queue
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from concurrent.futures import Future
from contextlib import suppress
from multiprocessing.connection import Connection
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

from molt_gym.errors import RunFailed

from .vllm_spec import HostSpec, environment

_CORE_ERROR = re.compile(r"\((?:EngineCore|Worker)\S* pid=\d+\) ERROR [^\]]*\]\s*(\S.*)")

_MEMORY = "rollout.engine_args.gpu_memory_utilization"
ADVICE = {
    "No available memory for the cache blocks": f"""\
write a larger {_MEMORY}; where other processes start on the same GPU at the same time, vLLM counts what they take as
its own: tell it the bytes of its cache, rollout.engine_args.kv_cache_memory_bytes""",
    "is less than desired GPU memory utilization": f"""\
others hold that memory; write a smaller {_MEMORY}, a share of the whole GPU""",
    "larger than the available KV cache memory": f"""\
write a smaller rollout.max_context or a larger {_MEMORY}""",
}
"""By what vLLM says: what to write instead, by our names of its options."""
LAST_LINES = 15
"""Of the log, in errors."""
CLOSE_TIMEOUT = 10.0
"""Seconds to end in an orderly way."""


class HostProcess:
    """Starts at once; calls queue until the engine is ready, which `ready` tells."""

    def __init__(self, spec: HostSpec) -> None:
        # vLLM's sockets are files in it, whose paths may have 107 characters.
        folder = tempfile.gettempdir()
        self.scratch = Path(tempfile.mkdtemp(prefix="molt-gym-vllm-", dir=folder if len(folder) < 45 else "/tmp"))
        self.log = self.scratch / "engine.log"
        self.ended: Exception | None = None
        self._failed = False
        self.ready: Future[int] = Future()
        self._calls: dict[int, Future[Any]] = {0: self.ready}
        self._numbers, self._lock, self._ending = itertools.count(1), threading.Lock(), threading.Lock()
        ours, theirs = socket.socketpair()
        self._connection = Connection(ours.detach())
        with theirs, self.log.open("wb") as log:
            # A group of its own: Ctrl-C at the terminal is the trainer's affair, and the whole group can be killed.
            self._process = subprocess.Popen(
                [sys.executable, "-m", f"{__package__}.vllm_host", str(theirs.fileno())], pass_fds=[theirs.fileno()],
                env=environment(spec.cpu, self.scratch, spec.vision), stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                start_new_session=True)
        self._outbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._send(spec)
        self._reader = threading.Thread(target=self._read, name="molt-gym-vllm", daemon=True)
        self._reader.start()
        threading.Thread(target=self._write, name="molt-gym-vllm-calls", daemon=True).start()

    @property
    def pid(self) -> int:
        """Of the process, which leads the group in which vLLM's are."""
        return self._process.pid

    def call(self, name: str, *arguments: Any) -> Future[Any]:
        """Call a method of `VllmHost`. Raises nothing; cancelling the future cancels the call."""
        future: Future[Any] = Future()
        with self._lock:
            if self.ended is not None:
                future.set_exception(self.ended)
                return future
            number = next(self._numbers)
            self._calls[number] = future
            self._send((number, name, arguments))
        future.add_done_callback(lambda done: self._cancel(number) if done.cancelled() else None)
        return future

    def close(self, reason: Exception) -> None:
        """Fail what is pending for `reason` and end the process, by force after `CLOSE_TIMEOUT`. Idempotent.

        After a failure, which is a RunFailed, by force at once. The log stays then, and after a call that failed.
        """
        fine = self.ended is None and not isinstance(reason, RunFailed)
        orderly = fine and self.ready.done() and not self.ready.exception()
        if orderly:
            self.call("close")
        self._fail(reason)
        if orderly:
            self._reader.join(CLOSE_TIMEOUT)
        self._kill()
        if fine and not self._failed:
            shutil.rmtree(self.scratch, ignore_errors=True)

    def _cancel(self, number: int) -> None:
        with self._lock:
            if self._calls.pop(number, None) is not None and self.ended is None:
                self._send((number, "cancel", ()))

    def _send(self, message: Any) -> None:
        self._outbox.put(ForkingPickler.dumps(message))

    def _write(self) -> None:
        """In a thread of its own, as a process that is frozen takes nothing, and must not hold up who asks it."""
        # A broken pipe is the end of the process, which the reader sees and reports.
        with suppress(OSError):
            while (message := self._outbox.get()) is not None:
                self._connection.send_bytes(message)

    def _read(self) -> None:
        while True:
            try:
                number, worked, result = self._connection.recv()
            except (EOFError, OSError):
                break
            with self._lock:
                future = self._calls.pop(number, None)
            if future is not None and future.set_running_or_notify_cancel():
                if worked:
                    future.set_result(result)
                else:
                    self._failed = True
                    future.set_exception(RunFailed(f"the vLLM engine failed: {result}\nThe end of its log, "
                                                   f"{self.log}:\n{self._last_lines()}"))
        self._kill()
        self._outbox.put(None)
        self._fail(RunFailed(f"the vLLM engine's process ended (exit code {self._process.wait()}); the end of its log, "
                             f"{self.log}:\n{self._last_lines()}"))

    def _kill(self) -> None:
        """The whole group, of which members may be left when its leader is gone."""
        with self._ending:
            # Once it was waited for, its number may be another's.
            if self._process.returncode is None:
                os.killpg(self._process.pid, signal.SIGKILL)
                self._process.wait()

    def _fail(self, error: Exception) -> None:
        with self._lock:
            self.ended = self.ended or error
            calls, self._calls = self._calls, {}
        for future in calls.values():
            if future.set_running_or_notify_cancel():
                future.set_exception(self.ended)

    def _last_lines(self) -> str:
        try:
            text = self.log.read_text(encoding="utf-8", errors="replace")
        except OSError as error:
            return f"({error})"
        return telling(text)


def telling(log: str) -> str:
    """What tells what went wrong: the last errors of vLLM's own processes, or the end of the log; and advice."""
    lines = log.splitlines()
    # What they died of is above what that made their client say.
    errors = [match[1] for line in lines if (match := _CORE_ERROR.match(line))]
    told = "\n".join((errors or lines)[-LAST_LINES:])
    return "\n".join([told, *(advice.replace("\n", " ") for words, advice in ADVICE.items() if words in told)])
