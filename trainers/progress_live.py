"""The live display: reward curve, where the time goes, held-out pass rate, what was lost.

It draws what it was told and keeps no other state; see `progress.Progress` for the calls.
"""

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from time import monotonic
from typing import TYPE_CHECKING, Any, Self, TextIO

from rich.console import Console, ConsoleOptions, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from .progress import TIME_PARTS, Metrics, duration, headline, losses, number, pass_rate, time_parts

if TYPE_CHECKING:
    from .config import Config

# A shade for each part as well as a colour, so that the bar reads without colour.
_PARTS = {
    name: (shade, style)
    for name, shade, style in zip(
        (*TIME_PARTS, "other"), "█▒▓░·", ("cyan", "yellow", "magenta", "green", "dim"), strict=True
    )
}
_BRAILLE = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))


class LiveProgress:
    """A panel that redraws itself twice a second; messages scroll by above it."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._console = Console(file=stream, highlight=False)
        self._live: Live | None = None
        self._title, self._run_dir, self._steps = "", "", 0
        self._step = self._first_step = 0
        self._began = self._step_began = monotonic()
        self._rollouts = (0, 0, "rollouts")
        self._rewards: dict[int, float] = {}
        self._metrics: Metrics = {}
        self._lost: dict[str, float] = {}
        self._evaluations: dict[str, list[tuple[str, str, float]]] = {}

    def start(self, config: "Config", run_dir: str | os.PathLike[str], history: Sequence[Metrics] = ()) -> None:
        """See `Progress`."""
        self._title, self._run_dir, self._steps = headline(config), os.fspath(run_dir), config.steps
        for metrics in history:
            self._note(metrics)
        self._first_step, self._began = self._step, monotonic()
        self._live = Live(get_renderable=self._render, console=self._console, refresh_per_second=2)
        self._live.start(refresh=True)

    def rollout_done(self, done: int, total: int, what: str = "rollouts") -> None:
        """See `Progress`."""
        self._rollouts = (done, total, what)

    def step(self, metrics: Metrics) -> None:
        """See `Progress`."""
        if self._step == self._first_step:
            # Evaluation before the first step is no part of the pace.
            self._began = monotonic() - float(metrics.get("time/step") or 0.0)
        self._note(metrics)
        self._rollouts = (0, 0, "rollouts")

    def evaluation(self, name: str, when: str, result: Metrics) -> None:
        """See `Progress`."""
        self._evaluations.setdefault(name, []).append((when, *pass_rate(result)))

    def message(self, text: str) -> None:
        """See `Progress`."""
        self._console.print(Text(text))

    def finish(self, summary: Mapping[str, Any]) -> None:
        """See `Progress`."""
        self._rollouts = (0, 0, "")
        self.close()
        table = Table.grid(padding=(0, 2))
        for name, value in summary.items():
            table.add_row(Text(name, "bold"), Text(number(value) if isinstance(value, float) else str(value)))
        self._console.print(table)

    def close(self) -> None:
        """Leave the last picture on the screen."""
        if self._live is not None:
            self._live.stop()
            self._live = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _note(self, metrics: Metrics) -> None:
        self._step = int(metrics.get("step", self._step))
        self._metrics = metrics
        reward = metrics.get("reward/mean")
        if isinstance(reward, int | float) and math.isfinite(reward):
            self._rewards[self._step] = float(reward)
        for kind, reason, count in losses(metrics):
            self._lost[f"{kind} {reason}"] = self._lost.get(f"{kind} {reason}", 0.0) + count

    def _render(self) -> RenderableType:
        body = Table.grid(expand=True)
        body.add_row(self._progress_row())
        middle = Table.grid(expand=True, padding=(0, 2))
        middle.add_column(ratio=1)
        middle.add_column(max_width=44)
        middle.add_row(_Curve(self._rewards, self._steps), self._numbers())
        body.add_row("")
        body.add_row(middle)
        body.add_row("")
        parts = time_parts(self._metrics)
        body.add_row(_Shares(parts))
        body.add_row(self._time_legend(parts))
        return Panel(body, title=Text(self._title, "bold"), title_align="left", subtitle=Text(self._run_dir, "dim"),
                     subtitle_align="right", border_style="dim", padding=(0, 1))  # fmt: skip

    def _progress_row(self) -> Table:
        row = Table.grid(expand=True, padding=(0, 2))
        row.add_column()
        row.add_column(ratio=1)
        row.add_column(justify="right")
        done, total, what = self._rollouts
        elapsed, steps = monotonic() - self._began, self._step - self._first_step
        clock = duration(elapsed)
        if steps and self._step < self._steps:
            clock += f" · {duration(elapsed / steps * (self._steps - self._step))} left"
        row.add_row(
            Text(f"step {self._step}/{self._steps}", "bold"),
            ProgressBar(total=max(self._steps, 1), completed=self._step),
            Text(f"{what} {done}/{total} · {clock}" if total else clock),
        )
        return row

    def _numbers(self) -> Table:
        metrics = self._metrics
        table = Table.grid(padding=(0, 2))
        table.add_column(style="dim")
        table.add_column()
        table.add_row("reward", Text(number(metrics.get("reward/mean")), "bold green"))
        table.add_row("pass@1", number(metrics.get("pass/at_1")))
        table.add_row("tokens/s", number(metrics.get("perf/rollout_tokens_per_s"), 0))
        stale = number(metrics.get("staleness/mean"), 1)
        table.add_row("staleness", f"{stale} max {number(metrics.get('staleness/max'), 0)}")
        table.add_row("|Δ log p|", number(metrics.get("mismatch/abs_diff_mean"), 4))
        for name, found in self._evaluations.items():
            label = found[0][1] if len(self._evaluations) == 1 else f"{name} {found[0][1]}"
            rates = [number(found[0][2], 2)] + ([number(found[-1][2], 2)] if len(found) > 1 else [])
            table.add_row(f"held-out {label}", Text(" → ".join(rates), "bold cyan"))
        lost = " · ".join(f"{reason} {count:.0f}" for reason, count in self._lost.items())
        table.add_row("lost", Text(lost or "none", "red" if lost else "", overflow="fold"))
        return table

    def _time_legend(self, parts: Mapping[str, float]) -> Text:
        legend = Text(f"{number(self._metrics.get('time/step'), 1)} s a step", "bold")
        for name, seconds in parts.items():
            legend.append(f"  {_PARTS[name][0]} ", _PARTS[name][1]).append(f"{name} {seconds:.1f}", "not bold")
        return legend


class _Shares:
    """A bar as wide as there is room, cut in proportion to seconds."""

    def __init__(self, parts: Mapping[str, float]) -> None:
        self.parts = parts

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        bar, edge, total = Text(no_wrap=True), 0.0, sum(self.parts.values())
        for name, seconds in self.parts.items():
            shade, style = _PARTS[name]
            begin, edge = edge, edge + seconds / total * options.max_width
            bar.append(shade * (round(edge) - round(begin)), style)
        yield bar


class _Curve:
    """Values by step as dots of braille, over the whole run from left to right, with the axis."""

    def __init__(self, values: Mapping[int, float], steps: int, rows: int = 7) -> None:
        self.values, self.steps, self.rows = values, max([steps, 1, *values]), rows

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        low, high = min([0.0, *self.values.values()]), max([1.0, *self.values.values()])
        axis = {0: f"{high:.1f}", self.rows - 1: f"{low:.1f}"}
        indent = max(map(len, axis.values()))
        lines = braille(self.values, self.steps, max(options.max_width - indent - 2, 1), self.rows, low, high)
        for i, line in enumerate(lines):
            tick = "┤" if i in axis else "│"
            yield Text(f"{axis.get(i, ''):>{indent}} {tick}", "dim").append(line, "not dim green")


def braille(values: Mapping[int, float], steps: int, width: int, rows: int, low: float, high: float) -> list[str]:
    """A curve through `values` (by step, 1 to `steps`) in `rows` lines of `width` braille characters (2 × 4 dots each).

    Steps that share a column of dots are drawn as one stroke from the least to the greatest.
    """
    cells = [[0] * width for _ in range(rows)]

    def dot(x: int, y: int) -> None:
        cells[rows - 1 - y // 4][x // 2] |= _BRAILLE[3 - y % 4][x % 2]

    last: tuple[int, int] | None = None
    for step, value in sorted(values.items()):
        x = round((step - 1) / max(steps - 1, 1) * (2 * width - 1))
        y = round((value - low) / (high - low) * (4 * rows - 1))
        from_x, from_y = last or (x, y)
        for i in range(span := max(x - from_x, abs(y - from_y), 1) + 1):
            part = i / (span - 1)
            dot(round(from_x + part * (x - from_x)), round(from_y + part * (y - from_y)))
        last = x, y
    return ["".join(chr(0x2800 + bits) for bits in line) for line in cells]
