"""The system calls that a sandboxed program is refused: ways around its limits, and large targets in the kernel.

A new user namespace would give it rights over mounts of its own; System V memory, memory files, kernel keys and
attributes of files are counted by no limit on a process or its folder; no namespace keeps it from the host's kernel
log, nor from the machine under a virtual one (vsock) and others, but where sockets are of the families allowed here.
"""

import errno
import platform
import struct

__all__ = ["filter_program"]

# AUDIT_ARCH, clone, socket, and the refused calls whose numbers differ: unshare, shmget, semget, msgget, memfd_create,
# add_key, request_key, keyctl, bpf, userfaultfd, perf_event_open, syslog, setxattr, lsetxattr, fsetxattr.
_MACHINES = {
    "x86_64": (0xC000003E, 56, 41, (272, 29, 64, 68, 319, 248, 249, 250, 321, 323, 298, 103, 188, 189, 190)),
    "aarch64": (0xC00000B7, 220, 198, (97, 194, 190, 186, 279, 217, 218, 219, 280, 282, 241, 116, 5, 6, 7)),
}
# AF_UNIX, AF_INET, AF_INET6, AF_NETLINK.
_FAMILIES = (1, 2, 10, 16)
# io_uring_setup, memfd_secret, setxattrat.
_EVERYWHERE = (425, 447, 463)
_CLONE3 = 435
_CLONE_NEWUSER = 0x10000000
_X32 = 0x40000000

_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_NUMBER, _ARCHITECTURE, _FIRST_ARGUMENT = 0, 4, 16
_KILL, _ALLOW, _ERRNO = 0x80000000, 0x7FFF0000, 0x00050000


def filter_program(machine: str | None = None) -> bytes | None:
    """The filter in the kernel's form (an array of `struct sock_filter`), or None for an unknown machine."""
    known = _MACHINES.get(machine or platform.machine())
    if known is None:
        return None
    architecture, clone, make_socket, refused = known
    refuse, kill, allow = ((_RETURN, 0, 0, what) for what in (_ERRNO | errno.EPERM, _KILL, _ALLOW))
    program = [
        (_LOAD, 0, 0, _ARCHITECTURE),
        (_EQUAL, 1, 0, architecture),
        kill,
        (_LOAD, 0, 0, _NUMBER),
        (_AT_LEAST, 0, 1, _X32),
        kill,
    ]
    for number in (*refused, *_EVERYWHERE):
        program += [(_EQUAL, 0, 1, number), refuse]
    # The flags of clone3 lie in memory, out of reach; without it the C library falls back to clone.
    program += [(_EQUAL, 0, 1, _CLONE3), (_RETURN, 0, 0, _ERRNO | errno.ENOSYS)]
    program += [(_EQUAL, 0, len(_FAMILIES) + 3, make_socket), (_LOAD, 0, 0, _FIRST_ARGUMENT)]
    program += [(_EQUAL, len(_FAMILIES) - place, 0, family) for place, family in enumerate(_FAMILIES)]
    program += [refuse, allow]
    program += [(_EQUAL, 0, 3, clone), (_LOAD, 0, 0, _FIRST_ARGUMENT), (_ANY_BIT, 0, 1, _CLONE_NEWUSER), refuse]
    program += [allow]
    return b"".join(struct.pack("=HBBI", *instruction) for instruction in program)
