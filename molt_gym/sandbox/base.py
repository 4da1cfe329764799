"""What every sandbox does: start programs, read their output, end them with all that they started.

Invariants: a call returns within the time limit and two seconds of the program's start; when it returns or raises,
nothing that it started is left running; trouble of the sandbox itself is an `EnvFailure("sandbox", ...)`, and nothing
that a program does can look like it.
"""

import os
import signal
import subprocess
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, fields
from math import ceil
from pathlib import Path

from ..errors import ConfigError, EnvFailure
from .output import Capture, read_until

__all__ = ["Execution", "Launch", "Limits", "Sandbox"]

_BOOT = Path(__file__).with_name("boot.py").read_text(encoding="utf-8")
# As `-I -S`, but `-I` would not let the environment, of which nothing is inherited, fix the hash seed.
_PYTHON_FLAGS = ("-s", "-P", "-S", "-B", "-X", "utf8", "-X", "int_max_str_digits=0")
_ENVIRONMENT = {"HOME": "/tmp", "LANG": "C.UTF-8", "MALLOC_ARENA_MAX": "1", "PATH": "/usr/bin", "PYTHONHASHSEED": "0"}
_START_SECONDS = 10.0
_QUEUE_SECONDS = 300.0
_DRAIN_SECONDS = 0.5
_REAP_SECONDS = 5.0


@dataclass(frozen=True)
class Limits:
    """What one execution may use.

    Args:
        seconds: wall time from the program's start on; CPU time of each process, a second more.
        memory_mb: address space of each process, in MiB; all together can have `processes` times as much.
        processes: processes and threads that exist at a time.
        output_chars: characters of stdout that are kept; of more, the middle is cut out.
        error_chars: likewise of stderr.
        disk_mb: the writable folder, in MiB; also the size of a file.
        open_files: file descriptors of each process.

    Raises:
        ConfigError: one is no positive number, or too large, or too little memory for Python.
    """

    seconds: float = 2.0
    memory_mb: int = 256
    processes: int = 16
    output_chars: int = 10_000
    error_chars: int = 10_000
    disk_mb: int = 16
    open_files: int = 64

    def __post_init__(self) -> None:
        for item in fields(self):
            value = getattr(self, item.name)
            kind, name = (int | float, "number") if item.name == "seconds" else (int, "integer")
            if not isinstance(value, kind) or isinstance(value, bool) or not 0 < value < 2**31:
                raise ConfigError(f"{item.name}: {value!r}; write a positive {name} below 2**31")
        if self.memory_mb < 64:
            raise ConfigError(f"memory_mb: {self.memory_mb}; write at least 64, Python itself takes about 40")


@dataclass(frozen=True)
class Execution:
    """What came of running a program.

    Args:
        stdout: decoded as UTF-8, U+FFFD for other bytes; a marker in the middle tells if and how much was cut.
        stderr: likewise.
        exit_code: 0: success; 128 + n: killed by signal n; None: the time limit ended it.
        timed_out: whether a limit on time ended it.
        seconds: wall time.
    """

    stdout: str
    stderr: str
    exit_code: int | None
    timed_out: bool
    seconds: float


@dataclass(frozen=True)
class Launch:
    """How a kind of sandbox starts Python.

    Args:
        command: up to the Python executable, which is its last item.
        uid: the user that the first process becomes; 0: it stays who it is.
        processes: how many that user may have; None: any number.
        fds: file descriptors that `command` reads.
        environment: added to what every program gets.
        cwd: the working directory to start in; None where `command` sees to it.
    """

    command: list[str]
    uid: int = 0
    processes: int | None = None
    fds: tuple[int, ...] = ()
    environment: dict[str, str] = field(default_factory=dict)
    cwd: str | None = None


@dataclass(eq=False)
class _Job:
    process: subprocess.Popen[bytes]
    launch: Launch
    ready: int
    stdout: Capture
    stderr: Capture
    cancelled: bool = False

    @property
    def streams(self) -> dict[int, Capture]:
        return {self.process.stdout.fileno(): self.stdout, self.process.stderr.fileno(): self.stderr}


class Sandbox(ABC):
    """Runs untrusted Python programs; may be called from many threads.

    A program gets the standard library, an empty writable folder as its working directory, and `stdin`; its hash seed
    is fixed, so that a program which asks for neither time nor randomness always does the same.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running: set[_Job] = set()
        self._cancels = 0

    def run(self, code: str, *, stdin: str = "", limits: Limits | None = None) -> Execution:
        """Runs a program.

        Raises:
            EnvFailure: reason "sandbox": it could not be started, died, or was cancelled.
        """
        limits, since = limits or Limits(), self._cancels
        with _turn(), ExitStack() as stack:
            return self._watch([self._start(stack, code, stdin, (), limits, since)], limits)[0]

    def run_pair(self, code: str, peer: str, *, limits: Limits | None = None) -> tuple[Execution, Execution]:
        """Runs two programs, each in a sandbox and with limits of its own, joined by two pipes and by nothing else.

        Each finds two file descriptors in `sys.argv[1:]`: to read what the other one writes, and to write. When `code`
        ends, `peer` is ended too.

        Raises:
            EnvFailure: reason "sandbox": one could not be started or died, or they were cancelled.
        """
        limits, since = limits or Limits(), self._cancels
        with _turn(), ExitStack() as stack:
            # Only the programs may hold the pipes, or neither would see that the other has ended.
            with ExitStack() as pipes:
                reads_peer, to_code = _pipe(pipes)
                reads_code, to_peer = _pipe(pipes)
                first = self._start(stack, code, "", (reads_peer, to_peer), limits, since)
                second = self._start(stack, peer, "", (reads_code, to_code), limits, since)
            ours, theirs = self._watch([first, second], limits)
            return ours, theirs

    def cancel(self) -> None:
        """Ends what is running or waits for a turn; these calls raise `EnvFailure`. Later calls are not affected."""
        with self._lock:
            self._cancels += 1
            for job in self._running:
                job.cancelled = True
                if job.process.returncode is None:
                    self._kill(job.process, job.launch)

    @abstractmethod
    def _launch(self, stack: ExitStack, limits: Limits) -> Launch:
        """Prepares the start of a program; `stack` closes what it opens."""

    @abstractmethod
    def _kill(self, process: subprocess.Popen[bytes], launch: Launch) -> None:
        """Kills a process, which may have ended but is not reaped yet, and all that it started."""

    @abstractmethod
    def _exit_code(self, returncode: int) -> int:
        """The exit code of the program; raises EnvFailure if it was the sandbox that ended."""

    def _start(self, stack: ExitStack, code: str, stdin: str, fds: tuple[int, ...], limits: Limits, since: int) -> _Job:
        if _ignores_children():
            raise EnvFailure("sandbox", "this process ignores SIGCHLD, so that no exit code is known; write "
                                        "signal.signal(signal.SIGCHLD, signal.SIG_DFL)")
        with ExitStack() as handed:
            ready, write_ready = os.pipe()
            stack.callback(os.close, ready)
            handed.callback(os.close, write_ready)
            source = memory_file(handed, code.encode("utf-8", "surrogatepass"))
            launch = self._launch(stack, limits)
            rlimits = {"CORE": 0, "CPU": ceil(limits.seconds) + 1, "FSIZE": limits.disk_mb << 20,
                       "NOFILE": limits.open_files, "NPROC": launch.processes, "AS": limits.memory_mb << 20}
            told = ",".join(f"{name}={value}" for name, value in rlimits.items() if value is not None)
            arguments = [str(source), str(write_ready), str(launch.uid), told, *map(str, fds)]
            process = subprocess.Popen(
                [*launch.command, *_PYTHON_FLAGS, "-c", _BOOT, *arguments],
                stdin=memory_file(handed, stdin.encode("utf-8", "surrogatepass")) if stdin else subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                bufsize=0,
                env=_ENVIRONMENT | launch.environment,
                cwd=launch.cwd,
                pass_fds=(source, write_ready, *fds, *launch.fds),
                start_new_session=True,
            )
        job = _Job(process, launch, ready, Capture(limits.output_chars), Capture(limits.error_chars))
        stack.callback(self._finish, job)
        with self._lock:
            if since != self._cancels:
                raise EnvFailure("sandbox", "cancelled")
            self._running.add(job)
        return job

    def _watch(self, jobs: list[_Job], limits: Limits) -> list[Execution]:
        streams = {fd: capture for job in jobs for fd, capture in job.streams.items()}
        deadline = time.monotonic() + _START_SECONDS
        started = all(read_until(streams, deadline, job.ready) and os.read(job.ready, 1) for job in jobs)
        begin = time.monotonic()
        ended = False
        if started:
            pidfd = os.pidfd_open(jobs[0].process.pid)
            try:
                ended = read_until(streams, begin + limits.seconds, pidfd)
            finally:
                os.close(pidfd)
        seconds = time.monotonic() - begin
        for job in jobs:
            self._kill(job.process, job.launch)
        # What they wrote is still in the pipes; only what escaped from the weaker sandbox can keep them open.
        read_until(streams, time.monotonic() + _DRAIN_SECONDS)
        if any(job.cancelled for job in jobs):
            raise EnvFailure("sandbox", "cancelled")
        if not started:
            said = " / ".join(text for job in jobs if (text := job.stderr.text().strip()))
            raise EnvFailure("sandbox", f"not started: {said[-500:] or f'no sign in {_START_SECONDS:g} s'}")
        return [self._execution(job, ended and job is jobs[0], ended, seconds) for job in jobs]

    def _execution(self, job: _Job, by_itself: bool, ended: bool, seconds: float) -> Execution:
        returncode = _reap(job.process)
        code = self._exit_code(returncode) if by_itself else None
        late = not ended or code == 128 + signal.SIGXCPU
        return Execution(job.stdout.text(), job.stderr.text(), None if late else code, late, seconds)

    def _finish(self, job: _Job) -> None:
        with self._lock:
            self._running.discard(job)
        job.process.stdout.close()
        job.process.stderr.close()
        if job.process.returncode is None:
            self._kill(job.process, job.launch)
            _reap(job.process)


def _reap(process: subprocess.Popen[bytes]) -> int:
    try:
        # Popen says of a child that is not there any more that it ended well.
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        process.wait()
        raise EnvFailure("sandbox", "something in this process waits for children that are not its own") from None
    try:
        return process.wait(_REAP_SECONDS)
    except subprocess.TimeoutExpired:
        raise EnvFailure("sandbox", f"process {process.pid} was killed and does not end") from None


def _ignores_children() -> bool:
    """Whether a parent or a library made this process ignore SIGCHLD; what it starts does so too."""
    with open("/proc/self/status", encoding="ascii", errors="replace") as file:
        ignored = next(int(line.split()[1], 16) for line in file if line.startswith("SigIgn:"))
    return bool(ignored >> (signal.SIGCHLD - 1) & 1)


def _pipe(stack: ExitStack) -> tuple[int, int]:
    ends = os.pipe()
    for end in ends:
        stack.callback(os.close, end)
    return ends


def memory_file(stack: ExitStack, data: bytes) -> int:
    fd = os.memfd_create("molt-gym")
    stack.callback(os.close, fd)
    with open(fd, "wb", closefd=False) as file:
        file.write(data)
    os.lseek(fd, 0, os.SEEK_SET)
    return fd


_slots = threading.BoundedSemaphore(max(16, 4 * (os.cpu_count() or 1)))


def _new_slots() -> None:
    global _slots
    _slots = threading.BoundedSemaphore(max(16, 4 * (os.cpu_count() or 1)))


# A fork may copy slots that are taken by threads which the child does not have.
os.register_at_fork(after_in_child=_new_slots)


@contextmanager
def _turn() -> Iterator[None]:
    """One of a few turns: more at once would be late. What the host lacks to run it is a failure of the sandbox."""
    slots = _slots
    if not slots.acquire(timeout=_QUEUE_SECONDS):
        raise EnvFailure("sandbox", f"no turn to run in {_QUEUE_SECONDS:g} s")
    try:
        yield
    except OSError as error:
        raise EnvFailure("sandbox", f"cannot start a program: {error}") from error
    finally:
        slots.release()
