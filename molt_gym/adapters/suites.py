"""The suites of others whose envs have ids here, as far as they are installed.

Invariants: a suite's package is imported only for an id in its namespace or for a listing; one that is not installed is
named with what to install.
"""

import importlib
import importlib.util
import threading
import warnings
from dataclasses import dataclass

import gymnasium as gym

__all__ = ["SUITES", "Suite", "hint", "load"]


@dataclass(frozen=True)
class Suite:
    """namespace: of its ids. package: what has to be importable. extra: of molt-gym, that installs it; both "" where
    nothing has to be. module: its adapter, whose `register_ids()` registers them. about: one line for people."""

    namespace: str
    package: str
    extra: str
    module: str
    about: str

    @property
    def installed(self) -> bool:
        """Whether its package can be found."""
        return not self.package or importlib.util.find_spec(self.package) is not None

    @property
    def install(self) -> str:
        """The command that adds it."""
        return f"pip install 'molt-gym[{self.extra}]'" if self.extra else "pip install molt-gym"


SUITES = {suite.namespace: suite for suite in [
    Suite("reasoning_gym", "reasoning_gym", "reasoning-gym", "molt_gym.adapters.reasoning_gym",
          "Procedural reasoning puzzles, each scored by its own verifier"),
    Suite("gem", "gem", "gem", "molt_gym.adapters.gem", "Games, and questions from data sets of the hub, of GEM"),
    Suite("textarena", "textarena", "textarena", "molt_gym.adapters.textarena",
          "Text games for one player, or for two against an opponent"),
    Suite("pettingzoo", "pettingzoo", "pettingzoo", "molt_gym.adapters.pettingzoo",
          "PettingZoo's classic games, whose seats the policy and its opponents have"),
    Suite("verifiers", "verifiers", "verifiers", "molt_gym.adapters.verifiers",
          "Installed tasksets of verifiers, each episode played by its own loop"),
    Suite("openenv", "", "", "molt_gym.adapters.openenv", "Whatever an OpenEnv server runs, by its URL"),
    Suite("nemo_gym", "", "", "molt_gym.adapters.nemo_gym", "Tasks of a NeMo Gym resources server, by its URL"),
]}
_problems: dict[str, str] = {}
_loading = threading.RLock()


def load(namespace: str | None) -> None:
    """Registers the ids of a suite where there are none yet; `hint` has what keeps it from that."""
    suite = SUITES.get(namespace or "")
    if suite is None or not suite.installed:
        return
    # Half of a suite is none to a thread that comes in between.
    with _loading:
        there = any(spec.namespace == namespace for spec in tuple(gym.registry.values()))
        if not there and suite.namespace not in _problems:
            try:
                importlib.import_module(suite.module).register_ids()
            except Exception as error:  # noqa: BLE001  one broken suite must not hurt the others
                _problems[suite.namespace] = problem = f"{type(error).__name__}: {error}"
                warnings.warn(f"the envs of {suite.package or namespace} are left out: {problem}", stacklevel=3)


def hint(namespace: str | None) -> str:
    """What to do about an id of this namespace that nobody knows; "" if it is of no suite."""
    suite = SUITES.get(namespace or "")
    if suite is None:
        return ""
    if not suite.installed:
        return f"{suite.package} is not installed: {suite.install}."
    problem = _problems.get(suite.namespace)
    return f"The envs of {suite.package} could not be registered: {problem}." if problem else ""
