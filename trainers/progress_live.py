"""The live display: reward curve, where the time goes, held-out pass rate, what was lost.

It draws what it was told and keeps no other state; see `progress.Progress` for the calls.
"""

import math
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from time import monotonic
from typing import TYPE_CHECKING, TextIO

from rich.console import Console, ConsoleOptions, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from .progress import TIME_PARTS, Metrics, Progress, headline, losses, number, pass_rate, time_parts

if TYPE_CHECKING:
    from .config import Config

# A shade for each part as well as a colour, so that the bar reads without colour.
_LOOKS = dict(zip((*TIME_PARTS, "other"), zip("█▒▓░·", ("cyan", "yellow", "magenta", "green", "dim"), strict=True),
                  strict=True))
_BRAILLE = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))


class LiveProgress(Progress):
    """A panel that redraws itself twice a second; messages scroll by above it."""

    def __init__(self, stream: TextIO | None = None) -> None:
        super().__init__(stream)
        self._console = Console(file=self.stream, highlight=False)
        self._live: Live | None = None
        self._title = self._run_dir = ""
        self._now = self._first = 0
        self._began = monotonic()
        self._rollouts = (0, 0, "")
        self._rewards: dict[int, float] = {}
        self._metrics: Metrics = {}
        self._lost: Counter[str] = Counter()

    def start(self, config: "Config", run_dir: str | os.PathLike[str], history: Sequence[Metrics] = ()) -> None:
        """See `Progress`."""
        self._title, self._run_dir, self.steps = headline(config), os.fspath(run_dir), config.steps
        for metrics in history:
            self._note(metrics)
        self._first, self._began = self._now, monotonic()
        self._live = Live(get_renderable=self._render, console=self._console, refresh_per_second=2)
        self._live.start(refresh=True)

    def rollout_done(self, done: int, total: int, what: str = "rollouts") -> None:
        """See `Progress`."""
        self._rollouts = (done, total, what)

    def step(self, metrics: Metrics) -> None:
        """See `Progress`."""
        if self._now == self._first:
            # Evaluation before the first step is no part of the pace.
            self._began = monotonic() - float(metrics.get("time/step") or 0.0)
        self._note(metrics)
        self._rollouts = (0, 0, "")

    def evaluation(self, name: str, when: str, result: Metrics) -> None:
        """See `Progress`."""
        self.evaluations.setdefault(name, []).append(pass_rate(result))

    def message(self, text: str) -> None:
        """See `Progress`."""
        self._console.print(Text(text))

    def close(self) -> None:
        """Leave the last picture on the screen."""
        if self._live is not None:
            self._rollouts = (0, 0, "")
            self._live.stop()
            self._live = None

    def _note(self, metrics: Metrics) -> None:
        self._now = int(metrics.get("step", self._now))
        if "reward/mean" in metrics:
            self._metrics, reward = metrics, metrics["reward/mean"]
            if isinstance(reward, int | float) and math.isfinite(reward):
                self._rewards[self._now] = float(reward)
        self._lost.update(losses(metrics))

    def _render(self) -> RenderableType:
        middle = _grid(1, 0, max_width=44)
        middle.add_row(_Curve(self._rewards, max([self.steps, 1, *self._rewards])), self._numbers())
        parts = time_parts(self._metrics)
        legend = Text(f"{number(self._metrics.get('time/step'), 1)} s a step", "bold")
        for name, seconds in parts.items():
            shade, style = _LOOKS[name]
            legend.append(f"  {shade} ", style).append(f"{name} {seconds:.1f}", "not bold")
        body = _grid(1)
        for row in (self._headway(), "", middle, "", _Shares(parts), legend):
            body.add_row(row)
        return Panel(body, title=Text(self._title, "bold"), title_align="left", subtitle=Text(self._run_dir, "dim"),
                     subtitle_align="right", border_style="dim")

    def _headway(self) -> Table:
        done, total, what = self._rollouts
        elapsed, steps = monotonic() - self._began, self._now - self._first
        clock = str(timedelta(seconds=int(elapsed)))
        if steps and self._now < self.steps:
            clock += f" · {timedelta(seconds=int(elapsed / steps * (self.steps - self._now)))} left"
        row = _grid(0, 1, 0)
        row.add_row(Text(f"step {self._now}/{self.steps}", "bold"), ProgressBar(max(self.steps, 1), self._now),
                    Text(f"{what} {done}/{total} · {clock}" if total else clock))
        return row

    def _numbers(self) -> Table:
        get, lost = self._metrics.get, " · ".join(f"{what} {count:.0f}" for what, count in self._lost.items())
        rows: list[tuple[str, str | Text]] = [
            ("reward", Text(number(get("reward/mean")), "bold green")),
            ("pass@1", number(get("pass/at_1"))),
            ("tokens/s", number(get("perf/rollout_tokens_per_s"), 0)),
            ("staleness", f"{number(get('staleness/mean'), 1)} max {number(get('staleness/max'), 0)}"),
            ("|Δ log p|", number(get("mismatch/abs_diff_mean"), 4))]
        for name, found in self.evaluations.items():
            label = found[0][0] if len(self.evaluations) == 1 else f"{name} {found[0][0]}"
            ends = [found[0], found[-1]][: len(found)]
            rows.append((f"held-out {label}", Text(" → ".join(number(rate, 2) for _, rate in ends), "bold cyan")))
        table = Table.grid(padding=(0, 2))
        table.add_column(style="dim")
        for row in (*rows, ("lost", Text(lost or "none", "red" if lost else ""))):
            table.add_row(*row)
        return table


@dataclass(frozen=True)
class _Shares:
    """A bar as wide as there is room, cut in proportion to seconds."""

    parts: Mapping[str, float]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        bar, edge, total = Text(no_wrap=True), 0.0, sum(self.parts.values())
        for name, seconds in self.parts.items():
            begin, edge = edge, edge + seconds / total * options.max_width
            bar.append(_LOOKS[name][0] * (round(edge) - round(begin)), _LOOKS[name][1])
        yield bar


@dataclass(frozen=True)
class _Curve:
    """Values by step as dots of braille, over the whole run from left to right, with the axis."""

    values: Mapping[int, float]
    steps: int
    rows: int = 7

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        low, high = min([0.0, *self.values.values()]), max([1.0, *self.values.values()])
        labels = [f"{high:.1f} ┤", *["│"] * (self.rows - 2), f"{low:.1f} ┤"]
        indent = max(map(len, labels))
        lines = braille(self.values, self.steps, max(options.max_width - indent, 1), self.rows, low, high)
        for label, line in zip(labels, lines, strict=True):
            yield Text(label.rjust(indent), "dim").append(line, "not dim green")


def braille(values: Mapping[int, float], steps: int, width: int, rows: int, low: float, high: float) -> list[str]:
    """A curve through `values` (by step, 1 to `steps`) in `rows` lines of `width` braille characters (2 × 4 dots each).

    Steps that share a column of dots are drawn as one stroke from the least to the greatest.
    """
    cells = [[0] * width for _ in range(rows)]
    last: tuple[int, int] | None = None
    for step, value in sorted(values.items()):
        end_x = round((step - 1) / max(steps - 1, 1) * (2 * width - 1))
        end_y = round((value - low) / (high - low) * (4 * rows - 1))
        x, y = last or (end_x, end_y)
        span = max(end_x - x, abs(end_y - y), 1)
        for i in range(span + 1):
            dot_x, dot_y = round(x + i / span * (end_x - x)), round(y + i / span * (end_y - y))
            cells[rows - 1 - dot_y // 4][dot_x // 2] |= _BRAILLE[3 - dot_y % 4][dot_x % 2]
        last = end_x, end_y
    return ["".join(chr(0x2800 + bits) for bits in line) for line in cells]


def _grid(*ratios: int, max_width: int | None = None) -> Table:
    """A full-width grid; a column with ratio 0 is as wide as what it holds, at most `max_width`."""
    grid = Table.grid(expand=True, padding=(0, 2) if len(ratios) > 1 else 0)
    for ratio in ratios:
        grid.add_column(ratio=ratio or None, max_width=None if ratio else max_width)
    return grid
