"""Programs in a process of their own and nothing more: for machines where bubblewrap cannot work.

Given: limits on time, memory of a process, size of a file, open files and output; an environment without a variable of
the host; an empty working directory; nothing is left running, also when this process has ended in whatever way, but for
a process that hides in time by clearing its environment and leaving its session. **Not given**: the program reads and
writes all files that the user may, has the network, sees all processes, may start any number of them, and fills the
disk. Run only programs that you trust.
"""

import itertools
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from contextlib import ExitStack, suppress

from ..strays import MARK, end_all, marked
from .base import Launch, Limits, Sandbox

__all__ = ["PlainProcess"]


class PlainProcess(Sandbox):
    """The lesser choice: see the top of this module for what it does not give."""

    def _launch(self, stack: ExitStack, limits: Limits) -> Launch:
        room = tempfile.mkdtemp(prefix="molt-gym-")
        stack.callback(_remove, room)
        folder = os.path.join(room, "tmp")
        os.mkdir(folder)
        environment, _ = marked({"HOME": folder})
        return Launch([os.path.realpath(sys.executable)], environment=environment, cwd=folder)

    def _kill(self, process: subprocess.Popen[bytes], launch: Launch) -> None:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        end_all(f"{MARK}={launch.environment[MARK]}")

    def _exit_code(self, returncode: int) -> int:
        return returncode if returncode >= 0 else 128 - returncode


def _remove(room: str) -> None:
    """Removes a folder. Other than `shutil.rmtree`, which recurses, it takes folders nested to any depth."""
    names = itertools.count()
    with suppress(OSError):
        while folders := [entry.path for entry in os.scandir(room) if entry.is_dir(follow_symlinks=False)]:
            for folder in folders:
                os.chmod(folder, 0o700)
                for name in os.listdir(folder):
                    os.rename(os.path.join(folder, name), os.path.join(room, str(next(names))))
                os.rmdir(folder)
    shutil.rmtree(room, ignore_errors=True)
