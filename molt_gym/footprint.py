"""What this process holds: memory, files, threads, and the processes that descend from it. For Linux alone."""

import gc
import os
from collections import defaultdict
from contextlib import suppress
from dataclasses import astuple, dataclass
from pathlib import Path

__all__ = ["Footprint", "footprint"]

_PAGE_MB = os.sysconf("SC_PAGE_SIZE") / 2**20


@dataclass(frozen=True)
class Footprint:
    """memory: resident, in MiB, of this process and its descendants. files: open descriptors of this process.
    threads: of this process. processes: descendants, those included that ended and nobody waited for."""

    memory: float
    files: int
    threads: int
    processes: int

    def __sub__(self, before: "Footprint") -> "Footprint":
        """How much it has grown."""
        return Footprint(*(now - then for now, then in zip(astuple(self), astuple(before), strict=True)))


def footprint() -> Footprint | None:
    """What there is after a garbage collection; None where there is no /proc."""
    if not Path("/proc/self/fd").is_dir():
        return None
    gc.collect()
    resident, children = _processes()
    family, ahead = [], [os.getpid()]
    while ahead:
        family.append(ahead.pop())
        ahead += children[family[-1]]
    # Listing the folder opens it.
    return Footprint(sum(resident[pid] for pid in family) * _PAGE_MB, len(os.listdir("/proc/self/fd")) - 1,
                     len(os.listdir("/proc/self/task")), len(family) - 1)


def _processes() -> tuple[dict[int, int], dict[int, list[int]]]:
    """Resident pages and children of each process."""
    resident: dict[int, int] = defaultdict(int)
    children: dict[int, list[int]] = defaultdict(list)
    for name in filter(str.isdigit, os.listdir("/proc")):
        with suppress(OSError):
            fields = Path(f"/proc/{name}/stat").read_text(errors="replace").rpartition(")")[2].split()
            resident[int(name)] = int(fields[21])
            children[int(fields[1])].append(int(name))
    return resident, children
