"""Programs in namespaces of their own, made by bubblewrap.

A program sees a read-only Python with its standard library and shared libraries, /dev/null, an empty folder in memory,
and nothing else: no other file, process, network, user or variable of the host, no capability.

Real root keeps the host's user namespace and has each program become a user id that nobody has: the kernel does not
count the processes of root, whatever name root goes by in a user namespace. Everyone else gets a user namespace.
"""

import functools
import glob
import os
import platform
import secrets
import shutil
import signal
import subprocess
import sys
import sysconfig
from contextlib import ExitStack, suppress
from pathlib import Path

from ..errors import EnvFailure
from .base import Launch, Limits, Sandbox, memory_file
from .seccomp import filter_program

__all__ = ["Bubblewrap", "check_bubblewrap"]

_working: set[str] = set()
_NAMESPACES = ("--unshare-ipc", "--unshare-pid", "--unshare-net", "--unshare-uts", "--hostname", "sandbox",
               "--unshare-cgroup-try")
_HINT = (
    "It needs the right to make namespaces: on a host, sysctl -w kernel.unprivileged_userns_clone=1 (Debian) or "
    "kernel.apparmor_restrict_unprivileged_userns=0 (Ubuntu); in a container, --cap-add SYS_ADMIN and "
    "--security-opt seccomp=unconfined."
)


class Bubblewrap(Sandbox):
    """The real sandbox. Make it with `make_sandbox`, which checks that it works here."""

    def __init__(self) -> None:
        super().__init__()
        self._program = shutil.which("bwrap") or "bwrap"
        self._as_root = _is_real_root()

    def _launch(self, stack: ExitStack, limits: Limits) -> Launch:
        python, mounts = _runtime()
        refused = memory_file(stack, filter_program() or b"")
        if self._as_root:
            rights = ["--cap-drop", "ALL", "--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"]
        else:
            rights = ["--unshare-user", "--cap-drop", "ALL", "--uid", "65534", "--gid", "65534"]
        folder = ["--perms", "1777", "--size", str(limits.disk_mb << 20), "--tmpfs", "/tmp"]
        command = [self._program, *_NAMESPACES, "--die-with-parent", "--new-session", *rights, *mounts, *folder]
        command += ["--remount-ro", "/", "--chdir", "/tmp", "--seccomp", str(refused), python]
        if self._as_root:
            return Launch(command, secrets.randbelow(2**30) + 2**30, limits.processes, (refused,))
        return Launch(command, processes=limits.processes + 1, fds=(refused,))

    def _kill(self, process: subprocess.Popen[bytes], launch: Launch) -> None:
        # The kernel ends a process namespace with its first process, the child of bubblewrap. That one dies with its
        # parent, but not yet while the namespace is made; then it is in the process group, or is already known.
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
        first = [int(pid) for pid in children.read_text().split()] if children.exists() else []
        for kill, pid in [(os.killpg, process.pid), *((os.kill, pid) for pid in first)]:
            with suppress(ProcessLookupError, PermissionError):
                kill(pid, signal.SIGKILL)

    def _exit_code(self, returncode: int) -> int:
        if returncode < 0:
            raise EnvFailure("sandbox", f"bubblewrap was killed by signal {-returncode}")
        return returncode


def check_bubblewrap() -> str | None:
    """None if bubblewrap works here, else what to do about it."""
    if sys.platform != "linux" or filter_program() is None:
        return f"bubblewrap needs Linux on x86_64 or aarch64, and this is {sys.platform} on {platform.machine()}"
    program = shutil.which("bwrap")
    if program is None:
        return "bubblewrap is not installed: apt-get install bubblewrap (likewise with dnf, pacman or apk)"
    if program not in _working:
        try:
            result = Bubblewrap().run("print(6 * 7)", limits=Limits(seconds=10))
        except EnvFailure as failure:
            return f"{program} does not work here: {failure.detail}. {_HINT}"
        if result.stdout != "42\n":
            return f"{program} does not run Python here: {result.stderr[-500:]}. {_HINT}"
        _working.add(program)
    return None


def _is_real_root() -> bool:
    with open("/proc/self/uid_map") as file:
        return os.geteuid() == 0 and file.read().split() == ["0", "0", str(2**32 - 1)]


@functools.cache
def _runtime() -> tuple[str, list[str]]:
    """The Python executable behind a virtual environment, and the mounts that it needs to run."""
    python, base = os.path.realpath(sys.executable), sys.base_prefix
    stdlib, libraries = sysconfig.get_path("stdlib"), sysconfig.get_config_var("MULTIARCH") or ""
    wanted = [python, stdlib, "/lib64", "/usr/lib64"]
    wanted += [os.path.join(root, libraries) for root in ("/lib", "/usr/lib")] if libraries else []
    # Outside of /usr the prefix has shared libraries of its own.
    mounts: list[str] = []
    if base != "/usr":
        wanted.append(os.path.join(base, "lib"))
        mounts += ["--setenv", "LD_LIBRARY_PATH", os.path.join(base, "lib")]
    bound: list[str] = []
    folders: dict[str, None] = {}
    for path in sorted({path for path in wanted if os.path.exists(path)}):
        real = os.path.realpath(path)
        folders |= dict.fromkeys(_parents(real) + _parents(path))
        if not any(real == other or real.startswith(other + "/") for other in bound):
            bound.append(real)
            mounts += ["--ro-bind", real, real]
        if path != real:
            mounts += ["--symlink", real, path]
    # Installed packages may be private, and cannot be imported anyway.
    for root in bound:
        for packages in glob.glob(f"{root}/*-packages") + glob.glob(f"{root}/python*/*-packages"):
            mounts += ["--size", "4096", "--tmpfs", packages, "--remount-ro", packages]
    mounts += ["--dev-bind", "/dev/null", "/dev/null", "--symlink", "/tmp", "/dev/shm"]
    made = [option for folder in (*folders, "/dev") for option in ("--perms", "0755", "--dir", folder)]
    return python, made + mounts


def _parents(path: str) -> list[str]:
    parts = path.strip("/").split("/")[:-1]
    return ["/" + "/".join(parts[: end + 1]) for end in range(len(parts))]
