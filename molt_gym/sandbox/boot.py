"""The first lines that run inside a sandbox: give up rights, set limits, say that all is ready, run the program.

Started as `python -c <this text> SOURCE_FD READY_FD UID LIMITS [FD ...]`; LIMITS is "NAME=value,...". The host never
imports this file. Once the byte on READY_FD is written, whatever happens is the program's doing.
"""

import os
import resource
import site
import sys


def _boot() -> None:
    source_fd, ready_fd, uid = map(int, sys.argv[1:4])
    if uid:
        os.setgroups([])
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)
    with open(source_fd, "rb") as file:
        source = file.read().decode("utf-8-sig", "surrogatepass")  # of bytes, a comment could say another encoding
    for limit in sys.argv[4].split(","):
        name, value = limit.split("=")
        # At the harder of two limits on time the kernel sends SIGKILL, which does not tell what for.
        harder = int(value) + (name == "CPU")
        resource.setrlimit(getattr(resource, f"RLIMIT_{name}"), (int(value), harder))
    os.write(ready_fd, b"R")
    os.close(ready_fd)
    site.setquit()  # `-S` leaves out exit and quit
    sys.argv = ["main.py", *sys.argv[5:]]
    main = sys.modules["__main__"] = type(sys)("__main__")
    try:
        exec(compile(source, "main.py", "exec"), vars(main))  # noqa: S102  this is what the sandbox is for
    except SystemExit:
        raise
    except BaseException as error:  # noqa: BLE001  reported as Python does, without the frame of this file
        error.__traceback__ = error.__traceback__ and error.__traceback__.tb_next
        sys.excepthook(type(error), error, error.__traceback__)
        sys.exit(1)


_boot()
