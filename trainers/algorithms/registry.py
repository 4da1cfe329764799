"""Names of estimators and losses, and what start-up validation may ask about them.

Invariants: importing this module, and asking about what is built in, does not load torch; a name means one function; a
name written "module:name" is found in any process that can import the module.
"""

import difflib
import importlib
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

__all__ = ["ESTIMATORS", "LOSSES", "EstimatorTraits", "LossTraits", "Registry", "register_estimator", "register_loss"]

T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])


@dataclass(frozen=True)
class EstimatorTraits:
    """What an estimator is and needs.

    per_token: it takes a `TokenBatch` and gives one advantage a token; otherwise one a rollout. whitens: its values are
    whitened over the tokens of the batch. needs_group, needs_batch: fewest rollouts of a task, and of a batch, that its
    baseline is made of. kl_in_reward: it takes a KL penalty as part of the reward. discounts: it has a discount.
    needs_critic: it has values, and so a critic and a λ. needs_teacher: its KL is the one to a teacher, and its only
    signal. ignores_reward: rewards and their shaping have no effect.
    """

    per_token: bool = False
    whitens: bool = False
    needs_group: int = 1
    needs_batch: int = 1
    kl_in_reward: bool = False
    discounts: bool = False
    needs_critic: bool = False
    needs_teacher: bool = False
    ignores_reward: bool = False

    def __post_init__(self) -> None:
        for name in ("kl_in_reward", "discounts", "needs_critic", "needs_teacher"):
            if getattr(self, name) and not self.per_token:
                raise ValueError(f"EstimatorTraits.{name}: true for an estimator of rollouts, which knows no tokens; "
                                 "write per_token=True, or leave it out")


@dataclass(frozen=True)
class LossTraits:
    """What a loss is and takes.

    has_ratio: it uses π/π_old. clips: it takes clip_low and clip_high. dual_clip, ceiling: it takes these options.
    one_update: it holds for one update a batch.
    centres: its gradient in the first update is that of -A·w·log π, so that score centering fits.
    """

    has_ratio: bool = True
    clips: bool = True
    dual_clip: bool = False
    ceiling: bool = False
    one_update: bool = False
    centres: bool = False


class Registry(Generic[T]):
    """Functions by name, each with its traits. `option` is what a user writes the name into.

    built_in: the names of those that are here.
    """

    def __init__(self, option: str, home: str, built_in: Mapping[str, T], default: T) -> None:
        self._option, self._home, self._default = option, home, default
        self.built_in = frozenset(built_in)
        self._traits = dict(built_in)
        self._functions: dict[str, Callable[..., Any]] = {}

    def names(self) -> list[str]:
        """What is known so far, sorted."""
        return sorted(self._traits)

    def register(self, name: str, traits: T | None = None) -> Callable[[F], F]:
        """A decorator that makes a function known as `name`; without `traits`, with the default ones.

        Raises:
            ValueError: another function has the name.
        """
        def enter(function: F) -> F:
            known, here = self._functions.get(name), f"{function.__module__}.{function.__qualname__}"
            there = f"{known.__module__}.{known.__qualname__}" if known else here
            foreign = name in self.built_in and function.__module__ != self._home
            if foreign or (known and _origin(known) != _origin(function)):
                raise ValueError(f"{self._option}: {name!r} is already {there if known else 'built in'}; register "
                                 f"{here} under another name")
            self._traits[name] = traits or self._traits.get(name, self._default)
            self._functions[name] = function
            return function

        return enter

    def traits(self, name: str) -> T:
        """What is declared of `name`, or of "module:name", whose module is imported.

        Raises:
            ValueError: there is no such name, or its module cannot be imported.
        """
        return self._traits[self._known(name)]

    def function(self, name: str) -> Callable[..., Any]:
        """The function called `name` or "module:name"; raises as `traits` does."""
        known = self._known(name)
        if known not in self._functions:
            importlib.import_module(self._home)
        return self._functions[known]

    def portable(self, name: str) -> str:
        """`name` as another process finds it: "module:name" if it is not built in; raises as `traits` does."""
        return self._elsewhere(self._known(name))

    def _elsewhere(self, known: str) -> str:
        module = self._functions[known].__module__ if known in self._functions else self._home
        if module in ("__main__", "__mp_main__"):
            # A script is imported by the name of its file, which multiprocessing and Ray have on their path.
            spec, file = (getattr(sys.modules["__main__"], name, None) for name in ("__spec__", "__file__"))
            module = spec.name if spec else Path(file).stem if file else module
        return known if module == self._home else f"{module}:{known}"

    def _known(self, name: str) -> str:
        module, _, short = name.rpartition(":")
        # A script that is running is not run once more.
        if module and not (short in self._functions and self._elsewhere(short) == name):
            try:
                importlib.import_module(module)
            except Exception as error:  # noqa: BLE001 - a user's file may raise anything
                raise ValueError(f"{self._option}: {name!r}: importing {module!r} raised {type(error).__name__}: "
                                 f"{error}; write the name of a module that can be imported from here") from error
        if short in self._traits and not (module and short in self.built_in):
            return short
        close = difflib.get_close_matches(short, self._traits, 1)
        raise ValueError(f"{self._option}: there is no {short!r}{f' in {module}' if module else ''}; "
                         + (f"did you mean {close[0]!r}? " if close else "")
                         + f"write one of {', '.join(self.names())}, or 'module:name' for one that a module of yours "
                           "registers")


def _origin(function: Callable[..., Any]) -> tuple[str, str]:
    """File and name: a script that is imported as well is one file under two names."""
    code = getattr(function, "__code__", None)
    return os.path.realpath(code.co_filename) if code else function.__module__, function.__qualname__


ESTIMATORS: Registry[EstimatorTraits] = Registry(
    "algorithm.estimator", f"{__package__}.advantages",
    {
        "reinforce": EstimatorTraits(per_token=True, whitens=True, kl_in_reward=True, discounts=True),
        "reinforce_baseline": EstimatorTraits(whitens=True, needs_group=2),
        "dr_grpo": EstimatorTraits(needs_group=2),
        "grpo": EstimatorTraits(needs_group=2),
        "rloo": EstimatorTraits(needs_group=2),
        "flash_reinforce": EstimatorTraits(needs_batch=2),
        "gae": EstimatorTraits(per_token=True, whitens=True, kl_in_reward=True, discounts=True, needs_critic=True),
        "on_policy_distill": EstimatorTraits(per_token=True, kl_in_reward=True, needs_teacher=True,
                                             ignores_reward=True),
    },
    EstimatorTraits())
"""Estimators by the name that `algorithm.estimator` takes."""

LOSSES: Registry[LossTraits] = Registry(
    "algorithm.loss", f"{__package__}.losses",
    {
        "ppo": LossTraits(dual_clip=True, centres=True),
        "gspo": LossTraits(),
        "cispo": LossTraits(ceiling=True, clips=False),
        "reinforce": LossTraits(has_ratio=False, clips=False, one_update=True, centres=True),
    },
    LossTraits())
"""Losses by the name that `algorithm.loss` takes."""


register_estimator = ESTIMATORS.register
"""Makes a function the estimator of a name; see `advantages` for what it takes."""
register_loss = LOSSES.register
"""Makes a function the loss of a name; see `losses` for what it takes."""
