"""What an engine is asked for and what it gives back, in ids.

Invariant: `ids`, `logprobs` and `versions` of a generation are parallel. The sampled stop token is part of `ids`; a
token that was not sampled (an end marker added by hand) never is.
"""

import math
import operator
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import numpy as np

FinishReason = Literal["stop", "length", "abort"]

# A float32 `logit - logsumexp` may end one rounding step above 0; at logits of 1000 that is 6e-5.
LOGPROB_ROUNDING = 1e-4

# The likeliest tokens of a position, and the log-probabilities that they had.
TOP = np.dtype([("id", np.int32), ("logprob", np.float32)])

_T = TypeVar("_T", int, float)


@dataclass(frozen=True)
class Sampling:
    """How to sample one reply.

    `top_k` 0 and `top_p` 1 leave the distribution whole; `temperature` 0 is greedy. `stop` strings end the reply with
    the token that completes one; `stop_token_ids` are added to those of the renderer. `top_logprobs`: how many of the
    likeliest tokens are told of at each position.
    """

    max_tokens: int = 512
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    seed: int | None = None
    top_logprobs: int = 0

    def __post_init__(self) -> None:
        rules = (
            ("max_tokens", self.max_tokens >= 1, "write a whole number of at least 1"),
            ("temperature", 0 <= self.temperature < math.inf, "write 0 (greedy) or a positive number"),
            ("top_p", 0 < self.top_p <= 1, "write a number above 0 and at most 1 (1: off)"),
            ("top_k", self.top_k >= 0, "write a whole number of at least 0 (0: off)"),
            ("top_logprobs", self.top_logprobs >= 0, "write a whole number of at least 0 (0: none)"),
        )
        for field, holds, remedy in rules:
            if not holds:
                raise ValueError(f"sampling.{field}: {getattr(self, field)!r} is out of range; {remedy}")


@dataclass(frozen=True)
class Generation:
    """One sampled reply.

    ids: sampled ids, the stop token included.
    logprobs: natural log of the probability each id was drawn with, under the sampling temperature.
    versions: the weight version that produced each id, at least 0.
    routed_experts: [prompt + reply - 1, layers, top_k] whole numbers, or None: row p, counted from the start of the
        prompt, tells the experts of position p in the computation after which id p + 1 was drawn; the last id was not
        processed. -1 where nothing was computed, as the prefix was cached, and in layers without experts (0 on GPUs).
    top: [reply, k] of dtype TOP, the k tokens likeliest to be drawn in the place of each id, if they were asked for.
    """

    ids: list[int]
    logprobs: list[float]
    versions: list[int]
    finish_reason: FinishReason
    routed_experts: np.ndarray | None = None
    top: np.ndarray | None = None

    def checked(self) -> "Generation":
        """Return a copy in plain Python numbers, with log-probabilities within rounding of 0 set to 0.

        Raises:
            ValueError: a field that is not parallel to `ids`, a missing, non-finite or positive log-probability, an
                id or version that is no whole number of at least 0, an unknown finish reason. The field is named.
        """
        ids = _numbers("ids", self.ids, operator.index)
        logprobs = _numbers("logprobs", self.logprobs, float)
        versions = _numbers("versions", self.versions, operator.index)
        for field, values in (("logprobs", logprobs), ("versions", versions), ("top", self.top)):
            if values is not None and len(values) != len(ids):
                raise ValueError(f"generation.{field}: {len(values)} values for {len(ids)} ids; give one an id")
        for field, values in (("ids", ids), ("versions", versions)):
            if values and min(values) < 0:
                raise ValueError(f"generation.{field}: {min(values)} is negative; give whole numbers of at least 0")
        if not all(map(math.isfinite, logprobs)) or max(logprobs, default=0.0) > LOGPROB_ROUNDING:
            position, value = next(
                (p, v) for p, v in enumerate(logprobs) if not math.isfinite(v) or v > LOGPROB_ROUNDING)
            raise ValueError(f"generation.logprobs[{position}]: {value} is no log-probability (finite, at most 0)")
        if self.finish_reason not in ("stop", "length", "abort"):
            raise ValueError(f"generation.finish_reason: {self.finish_reason!r}; give 'stop', 'length' or 'abort'")
        if max(logprobs, default=0.0) > 0.0:
            logprobs = [min(value, 0.0) for value in logprobs]
        return Generation(ids, logprobs, versions, self.finish_reason, self.routed_experts, self.top)

    def ended_at(self, length: int) -> "Generation":
        """Its first `length` ids with all that belongs to them, as if it had stopped there. Raises as `checked`."""
        whole, routed = self.checked(), self.routed_experts
        return Generation(
            whole.ids[:length], whole.logprobs[:length], whole.versions[:length], "stop",
            None if routed is None else routed[: len(routed) - len(whole.ids) + length],
            None if self.top is None else self.top[:length])


def _numbers(field: str, values: Iterable[Any], convert: Callable[[Any], _T]) -> list[_T]:
    if values is None:
        raise ValueError(f"generation.{field}: is missing; give one value an id")
    values = list(values)
    if set(map(type, values)) <= {float if convert is float else int}:
        return values
    numbers = []
    for position, value in enumerate(values):
        try:
            numbers.append(convert(value))
        except (TypeError, ValueError) as error:
            raise ValueError(f"generation.{field}[{position}]: {value!r} is no number") from error
    return numbers
