"""What a user sees while a run goes on: a live display on a terminal, one readable line a step elsewhere.

Invariants: nothing here changes a run; a metric that is missing or not finite is shown as a dash, never as 0; `close`
leaves the terminal as it was, whatever was raised.
"""

import contextlib
import math
import os
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Self, TextIO

if TYPE_CHECKING:
    from .config import Config

Metrics = Mapping[str, Any]

TIME_PARTS = ("rollout", "logprobs", "train", "weights")


class _Lasting:
    """A stream that cannot end a run: what it cannot hold is escaped, and lost once its pipe or terminal is closed."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        encoding = self._stream.encoding or "utf-8"
        with contextlib.suppress(OSError):
            self._stream.write(text.encode(encoding, "backslashreplace").decode(encoding))
        return len(text)

    def flush(self) -> None:
        with contextlib.suppress(OSError):
            self._stream.flush()


class Progress:
    """Prints one aligned, self-describing line a step, for logs; but for `message`, told from one thread what happened.

    Use it as a context manager.
    """

    def __init__(self, stream: TextIO | None = None) -> None:
        self.stream: Any = _Lasting(stream or sys.stdout or open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115
        self.steps = 0
        self.evaluations: dict[str, list[tuple[str, float]]] = {}

    def start(self, config: "Config", run_dir: str | os.PathLike[str], history: Sequence[Metrics] = ()) -> None:
        """A run begins, or goes on after the steps whose metrics are `history`."""
        self.steps = config.steps
        resumed = f", resumed after step {history[-1].get('step')}" if history else ""
        self.message(f"{headline(config)} · {config.steps} steps{resumed} → {os.fspath(run_dir)}")

    def rollout_done(self, done: int, total: int, what: str = "rollouts") -> None:
        """`done` of the `total` rollouts of this step (or of what is named) have ended."""

    def step(self, metrics: Metrics) -> None:
        """A step has ended; `metrics` is its line of metrics.jsonl, with "step"."""
        parts = ", ".join(f"{name} {seconds:.1f}" for name, seconds in time_parts(metrics).items())
        self.message(
            f"step {metrics.get('step', 0):>{len(str(self.steps))}}/{self.steps}"
            f"  reward {number(metrics.get('reward/mean')):>5}  pass@1 {number(metrics.get('pass/at_1')):>5}"
            f"  {number(metrics.get('perf/rollout_tokens_per_s'), 0):>6} tok/s"
            f"  {number(metrics.get('time/step'), 1):>5} s ({parts})"
            f"  stale {number(metrics.get('staleness/max'), 0)}"
            f"  |Δlogp| {number(metrics.get('mismatch/abs_diff_mean'), 4)}"
            + "".join(f"  {what} {count:.0f}" for what, count in losses(metrics).items()))

    def evaluation(self, name: str, when: str, result: Metrics) -> None:
        """The env `name` was evaluated `when` (before, step 20, after); `result` has pass_at_<k>, maybe episodes."""
        found = self.evaluations.setdefault(name, [])
        found.append(pass_rate(result))
        gained = f" (from {number(found[0][1])})" if len(found) > 1 else ""
        prompts = f", {result['episodes']} prompts" if "episodes" in result else ""
        self.message(f"held-out {name} {when}: {found[-1][0]} {number(found[-1][1])}{gained}{prompts}")

    def message(self, text: str) -> None:
        """Something worth a line of its own; may come before `start`."""
        # In one go, as print does not: checkpoints are told of from another thread.
        self.stream.write(f"{text}\n")
        self.stream.flush()

    def finish(self, summary: Mapping[str, Any]) -> None:
        """The run is over; `summary` is shown as name and value, a line each."""
        self.close()
        width = max(map(len, summary), default=0)
        for name, value in summary.items():
            self.message(f"{name:<{width}}  {number(value) if isinstance(value, float) else value}")

    def close(self) -> None:
        """Stop showing. Idempotent."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def make_progress(stream: TextIO | None = None) -> Progress:
    """The live display if `stream` (standard output) is a terminal that can show it, else plain lines."""
    stream = stream or sys.stdout
    # Standard output may be closed.
    able = stream is not None and stream.isatty() and (stream.encoding or "").lower().startswith("utf")
    if able and os.environ.get("TERM", "dumb") not in ("dumb", "unknown"):
        from .progress_live import LiveProgress

        return LiveProgress(stream)
    return Progress(stream)


def headline(config: "Config") -> str:
    """What is trained, in a few words."""
    return f"{config.env} · {os.path.basename(config.model or 'smollm2-135m')} · seed {config.seed}"


def number(value: Any, digits: int = 3) -> str:
    """`value` with `digits` decimals and thousands marked; a dash if it is missing or not finite."""
    if not isinstance(value, int | float) or not math.isfinite(value):
        return "–"
    return f"{value:,.{digits}f}" if abs(value) < 1e12 else f"{value:.3g}"


def time_parts(metrics: Metrics) -> dict[str, float]:
    """Seconds of each part of a step and, as "other", of what is left of it; parts below a twentieth are left out."""
    parts = {name: float(metrics.get(f"time/{name}") or 0.0) for name in TIME_PARTS}
    step = float(metrics.get("time/step") or 0.0)
    parts["other"] = step - sum(parts.values())
    return {name: seconds for name, seconds in parts.items() if seconds > step / 20}


def losses(metrics: Metrics) -> dict[str, float]:
    """How many rollouts a step lost, by "failed REASON" and "dropped REASON"."""
    names = [name for name in metrics if name.startswith(("rollout/failed/", "rollout/dropped/"))]
    return {" ".join(name.split("/")[1:]): metrics[name] for name in names if metrics[name]}


def pass_rate(result: Metrics) -> tuple[str, float]:
    """The name and value of the first pass@k in the result of an evaluation."""
    rates = (("pass@" + name[8:], value) for name, value in result.items() if name.startswith("pass_at_"))
    return next(rates, ("pass@1", math.nan))
