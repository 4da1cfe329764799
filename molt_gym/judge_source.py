"""Who judges: an endpoint, a model of the run, another local model, or any policy.

Invariant: a source is found where it is used, so that a `Judge` holds nothing but settings and can be sent anywhere.
"""

import os
from collections.abc import Callable, Hashable
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from .errors import ConfigError, EnvFailure
from .policy import EndpointPolicy, Policy, PolicyFunction, as_policy

__all__ = ["OF_THE_RUN", "USUAL", "Address", "Calls", "Seat", "Source", "check_source", "desk", "is_local", "seat"]

Source = str | os.PathLike[str] | Policy | PolicyFunction
"""An http address, "policy", "frozen", the name or folder of a model, or who answers conversations."""
OF_THE_RUN = ("policy", "frozen")
"""The model that is trained, and as it was when the run began."""


@dataclass(frozen=True)
class Address:
    """Where a run answers judges. version: gives that of its weights, where they can be asked; it is not sent along."""

    url: str
    key: str
    version: Callable[[], int] | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return Address, (self.url, self.key)


desk: ContextVar[Callable[[], Address] | None] = ContextVar("desk", default=None)
"""Gives the address of the run whose envs this thread, or this task, plays."""


def _is_number(value: Any, low: float, high: float) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and low <= value <= high


@dataclass(frozen=True)
class Calls:
    """How a judge is asked.

    Args:
        temperature: None: 0 for one judgement, 1 for several.
        max_tokens: of one verdict.
        deadline: seconds for one judgement, from its turn on, with its retries and its repair.
        retries: how often a request is sent again after a connection that failed, status 408, 409, 429 or 5xx; first
            after half a second, or when the endpoint says (Retry-After).
        concurrency: requests at a time that this process has with one source.
        cache: whether what is judged again, word for word, has the verdict that it had.
    """

    temperature: float | None = None
    max_tokens: int = 512
    deadline: float = 120.0
    retries: int = 4
    concurrency: int = 64
    cache: bool = True

    def __post_init__(self) -> None:
        numbers = {"max_tokens": 1, "retries": 0, "concurrency": 1}
        for name, least in numbers.items():
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ConfigError(f"judge.calls.{name}: {value!r}; write an integer from {least} on")
        if self.temperature is not None and not _is_number(self.temperature, 0, 100):
            raise ConfigError(f"judge.calls.temperature: {self.temperature!r}; write a number from 0 on, or None")
        if not _is_number(self.deadline, 0, 86400) or not self.deadline:
            raise ConfigError(f"judge.calls.deadline: {self.deadline!r}; write seconds above 0, a day at most")


USUAL = Calls()


@dataclass(frozen=True)
class Seat:
    """Who is asked. name: for people. key: tells sources apart. make: gives the policy, once for each key. version: of
    its weights; None: not known, so that what it said before tells nothing."""

    name: str
    key: Hashable
    make: Callable[[], Policy]
    version: int | None = 0


def check_source(source: Any, model: str | None) -> None:
    """Raises ConfigError where nobody could be meant."""
    if not isinstance(source, str | os.PathLike):
        if model is not None:
            raise ConfigError(f"judge.model: {model!r} with a policy; it is for an http address, leave it out")
        as_policy(source)
        return
    name = os.fspath(source)
    if not name.strip():
        raise ConfigError("judge.source: is empty; write an address (http://…), 'policy', 'frozen', or a model")
    if _is_address(name) and not (urlsplit(name).hostname and model):
        raise ConfigError(f"judge.model: {model!r} with the endpoint {name!r}; write the model's name there, such as "
                          "Judge('http://localhost:8000/v1', model='Qwen/Qwen3-8B')")
    if not _is_address(name) and model is not None:
        raise ConfigError(f"judge.model: {model!r} with {name!r}, which is no address; write one that begins with "
                          "http:// or https://, or leave judge.model out")


def is_local(source: Any) -> bool:
    """Whether it is a model that runs here, or in the run."""
    return isinstance(source, str | os.PathLike) and not _is_address(os.fspath(source))


def seat(source: Source, model: str | None, calls: Calls) -> Seat:
    """Who is asked from here.

    Raises:
        EnvFailure: reason "judge": a model of the run, where there is no run.
    """
    options: dict[str, Any] = {"concurrency": calls.concurrency, "timeout": calls.deadline, "retries": calls.retries,
                               "max_tokens": calls.max_tokens, "temperature": calls.temperature}
    if not isinstance(source, str | os.PathLike):
        return Seat(f"judge {getattr(source, '__qualname__', type(source).__name__)}", (id(source), calls),
                    lambda: as_policy(source))
    name, run = os.fspath(source), desk.get()
    if _is_address(name):
        return Seat(f"judge {model} at {name}", (name, model, calls), lambda: EndpointPolicy(name, model, **options))
    if run is not None:
        try:
            address = run()
        except Exception as error:
            raise EnvFailure("judge", f"{name!r}: the run cannot be asked: {type(error).__name__}: {error}") from error
        version = address.version and address.version() if name == "policy" else 0
        url, key = f"{address.url}/v1", address.key
        return Seat(f"judge {name!r} of the run", (url, key, name, calls),
                    lambda: EndpointPolicy(url, name, session=key, **options), version)
    if name in OF_THE_RUN:
        raise EnvFailure("judge", f"{name!r} is a model of the run in which an env is played, and here is none; name "
                                  "an address (http://…) or a model")
    from .trainers.judging import LocalJudge

    return Seat(f"judge {name!r}", (name, calls), lambda: LocalJudge(name, calls.max_tokens, calls.temperature))


def _is_address(name: str) -> bool:
    return name.lower().startswith(("http://", "https://"))
