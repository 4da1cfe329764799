"""Runs untrusted Python programs with limits, apart from the host.

    sandbox = make_sandbox("bubblewrap")
    sandbox.run("print(6 * 7)", limits=Limits(seconds=1)).stdout     # "42\\n"

"bubblewrap" isolates files, processes, network and environment. "subprocess" isolates none of the first three, and must
be asked for by name; `plain.py` says what is missing. Neither protects from faults of the kernel.
"""

from collections.abc import Callable

from ..errors import ConfigError
from .base import Execution, Limits, Sandbox
from .bubblewrap import Bubblewrap, check_bubblewrap
from .plain import PlainProcess

__all__ = ["SANDBOXES", "Execution", "Limits", "Sandbox", "check_bubblewrap", "make_sandbox"]

SANDBOXES: dict[str, Callable[[], Sandbox]] = {"bubblewrap": Bubblewrap, "subprocess": PlainProcess}


def make_sandbox(kind: str = "bubblewrap") -> Sandbox:
    """Makes a sandbox of a kind: "bubblewrap" or "subprocess".

    Raises:
        ConfigError: there is no such kind, or it cannot work here; the message says what to install or to choose.
    """
    if kind not in SANDBOXES:
        raise ConfigError(f"sandbox: {kind!r}; write one of {', '.join(map(repr, SANDBOXES))}")
    trouble = check_bubblewrap() if kind == "bubblewrap" else None
    if trouble:
        lesser = 'sandbox="subprocess" runs without, but isolates neither files nor network'
        raise ConfigError(f"sandbox: {trouble} ({lesser})")
    return SANDBOXES[kind]()
