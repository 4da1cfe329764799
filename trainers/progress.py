"""What a user sees while a run goes on: a live display on a terminal, one readable line a step elsewhere.

Invariants: nothing here changes a run; a metric that is missing or not finite is shown as a dash, never as 0; `close`
leaves the terminal as it was, whatever was raised.
"""

import contextlib
import math
import os
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, Self, TextIO

if TYPE_CHECKING:
    from .config import Config

Metrics = Mapping[str, Any]

TIME_PARTS = ("rollout", "logprobs", "train", "weights")


class Progress(Protocol):
    """Told by the loop what happened; all calls come from one thread. Use it as a context manager."""

    def start(self, config: "Config", run_dir: str | os.PathLike[str], history: Sequence[Metrics] = ()) -> None:
        """A run begins, or goes on after the steps whose metrics are `history`."""

    def rollout_done(self, done: int, total: int, what: str = "rollouts") -> None:
        """`done` of the `total` rollouts of this step (or of what is named) have ended."""

    def step(self, metrics: Metrics) -> None:
        """A step has ended; `metrics` is its line of metrics.jsonl, with "step"."""

    def evaluation(self, name: str, when: str, result: Metrics) -> None:
        """The env `name` was evaluated `when` ("before", "step 20", "after").

        `result` has pass_at_<k> and may have length_mean, truncated, episodes.
        """

    def message(self, text: str) -> None:
        """Something worth a line of its own; may come before `start`."""

    def finish(self, summary: Mapping[str, Any]) -> None:
        """The run is over; `summary` is shown as name and value."""

    def close(self) -> None:
        """Stop showing. Idempotent."""

    def __enter__(self) -> Self: ...

    def __exit__(self, *_: object) -> None: ...


def make_progress(stream: TextIO | None = None) -> Progress:
    """The live display if `stream` (standard output) is a terminal that can show it, else plain lines."""
    stream = stream or sys.stdout
    if stream.isatty() and os.environ.get("TERM", "dumb") not in ("dumb", "unknown"):
        from .progress_live import LiveProgress

        return LiveProgress(stream)
    return PlainProgress(stream)


class PlainProgress:
    """One line a step, for logs: aligned, self-describing, flushed."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream or sys.stdout
        self._steps = 0
        self._before: dict[str, float] = {}

    def start(self, config: "Config", run_dir: str | os.PathLike[str], history: Sequence[Metrics] = ()) -> None:
        """See `Progress`."""
        self._steps = config.steps
        resumed = f", resumed after step {history[-1].get('step')}" if history else ""
        self.message(f"{headline(config)} · {config.steps} steps{resumed} → {os.fspath(run_dir)}")

    def rollout_done(self, done: int, total: int, what: str = "rollouts") -> None:
        """Not shown."""

    def step(self, metrics: Metrics) -> None:
        """See `Progress`."""
        width = len(str(self._steps))
        parts = [f"{name} {seconds:.1f}" for name, seconds in time_parts(metrics).items()]
        self.message(
            f"step {metrics.get('step', 0):>{width}}/{self._steps}"
            f"  reward {number(metrics.get('reward/mean')):>5}  pass@1 {number(metrics.get('pass/at_1')):>5}"
            f"  {number(metrics.get('perf/rollout_tokens_per_s'), 0):>6} tok/s"
            f"  {number(metrics.get('time/step'), 1):>5} s ({', '.join(parts)})"
            f"  stale {number(metrics.get('staleness/max'), 0)}"
            f"  |Δlogp| {number(metrics.get('mismatch/abs_diff_mean'), 4)}"
            + "".join(f"  {kind} {reason} {count:.0f}" for kind, reason, count in losses(metrics))
        )

    def evaluation(self, name: str, when: str, result: Metrics) -> None:
        """See `Progress`."""
        label, value = pass_rate(result)
        first = self._before.setdefault(name, value)
        gained = "" if when == "before" else f" (from {number(first)})"
        prompts = f", {result['episodes']} prompts" if "episodes" in result else ""
        self.message(f"held-out {name} {when}: {label} {number(value)}{gained}{prompts}")

    def message(self, text: str) -> None:
        """See `Progress`."""
        encoding = self._stream.encoding or "utf-8"
        with contextlib.suppress(OSError):  # A run outlives the pipe that its log goes to.
            print(text.encode(encoding, "backslashreplace").decode(encoding), file=self._stream, flush=True)

    def finish(self, summary: Mapping[str, Any]) -> None:
        """See `Progress`."""
        width = max(map(len, summary), default=0)
        for name, value in summary.items():
            self.message(f"{name:<{width}}  {number(value) if isinstance(value, float) else value}")

    def close(self) -> None:
        """Nothing to undo."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def headline(config: "Config") -> str:
    """What is trained, in a few words."""
    return f"{config.env} · {config.model or 'smollm2-135m'} · seed {config.seed}"


def number(value: Any, digits: int = 3) -> str:
    """`value` with `digits` decimals and thousands marked; a dash if it is missing or not finite."""
    if not isinstance(value, int | float) or not math.isfinite(value):
        return "–"
    return f"{value:,.{digits}f}"


def duration(seconds: float) -> str:
    """Minutes and seconds, or hours."""
    minutes, rest = divmod(int(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{rest:02d}" if minutes >= 60 else f"{minutes}:{rest:02d}"


def time_parts(metrics: Metrics) -> dict[str, float]:
    """Seconds of each part of a step and, as "other", of what is left of it; parts below a twentieth are left out."""
    parts = {name: float(metrics.get(f"time/{name}") or 0.0) for name in TIME_PARTS}
    step = float(metrics.get("time/step") or 0.0)
    parts["other"] = step - sum(parts.values())
    return {name: seconds for name, seconds in parts.items() if seconds > step / 20}


def losses(metrics: Metrics) -> list[tuple[str, str, float]]:
    """(failed or dropped, reason, count) of the rollouts that a step lost."""
    found = []
    for name, count in metrics.items():
        _, _, rest = name.partition("rollout/")
        kind, _, reason = rest.partition("/")
        if kind in ("failed", "dropped") and reason and count:
            found.append((kind, reason, float(count)))
    return found


def pass_rate(result: Metrics) -> tuple[str, float]:
    """The name and value of the first pass@k in the result of an evaluation."""
    for name, value in result.items():
        if name.startswith("pass_at_"):
            return f"pass@{name.removeprefix('pass_at_')}", float(value)
    return "pass@1", math.nan
