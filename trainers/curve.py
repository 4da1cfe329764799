"""The learning curve of a run, or of several in one picture, drawn from their metrics.jsonl.

    python -m molt_gym.trainers.curve runs/seed-0 runs/seed-1 runs/seed-2 --out curves.png

Invariant: only what was measured is drawn: thin lines and points are the numbers in the file, thick lines their moving
average; a step without a finite value leaves a gap.
"""

import argparse
import math
import os
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .atomic import atomic_path
from .run_dir import read_metrics

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_COLOURS = ("#2563eb", "#ea580c", "#059669", "#9333ea", "#dc2626", "#0891b2", "#ca8a04", "#475569")
_INK = "#0f172a"
_STYLE = {
    "font.size": 10, "axes.spines.top": False, "axes.spines.right": False, "axes.edgecolor": "#94a3b8",
    "axes.labelcolor": "#334155", "axes.grid": True, "grid.color": "#e2e8f0", "grid.linewidth": 0.8,
    "axes.axisbelow": True, "xtick.color": "#64748b", "ytick.color": "#64748b", "legend.frameon": False,
}  # fmt: skip


@dataclass(frozen=True)
class _Run:
    settings: Mapping[str, Any]
    metrics: Sequence[Mapping[str, Any]]

    def series(self, name: str) -> tuple[list[int], list[float]]:
        """Steps and values of a metric; not finite where a line says null."""
        found = [(int(line["step"]), float(line[name])) for line in self.metrics if name in line and "step" in line]
        return [step for step, _ in found], [value for _, value in found]

    @property
    def held_out(self) -> str | None:
        """The name of the first pass@k over held-out tasks."""
        names = (name for line in self.metrics for name in line if name.startswith("eval/") and "/pass_at_" in name)
        return next(names, None)


def draw(
    runs: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    out: str | os.PathLike[str] | None = None,
    *,
    title: str | None = None,
) -> Path:
    """Draw one run folder or several as a PNG.

    Args:
        runs: run folders.
        out: the picture; without it, curve.png in the first folder.
        title: without it, what the runs have in common: env, model, seed.

    Raises:
        FileNotFoundError: a folder without metrics.jsonl.
        ValueError: no runs, or none of them has a finite reward yet.
    """
    import matplotlib
    from matplotlib.figure import Figure

    folders = [Path(runs)] if isinstance(runs, str | os.PathLike) else [Path(run) for run in runs]
    if not folders:
        raise ValueError("runs: got none; write at least one run folder")
    loaded = [_load(folder) for folder in folders]
    if not any(math.isfinite(value) for run in loaded for value in run.series("reward/mean")[1]):
        raise ValueError(f"{', '.join(map(str, folders))}: no finite reward/mean in metrics.jsonl; nothing to draw")
    common, labels = _describe([run.settings for run in loaded])
    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(8, 5), dpi=150, layout="constrained")
        rewards, times = figure.subplots(2, 1, sharex=True, height_ratios=(4, 1))
        for run, label, colour in zip(loaded, labels, _COLOURS * len(loaded), strict=False):
            _draw_rewards(rewards, run, label, colour, alone=len(loaded) == 1)
            times.plot(*run.series("time/step"), color=colour, linewidth=1.2)
        _dress(rewards, times, title or common, loaded)
        path = Path(out) if out is not None else folders[0] / "curve.png"
        with atomic_path(path) as temporary:
            figure.savefig(temporary, format="png")
    return path


def smooth(values: Sequence[float], radius: int) -> list[float]:
    """Mean of each value and up to `radius` neighbours on either side, those that are finite."""
    means = []
    for i in range(len(values)):
        near = [value for value in values[max(i - radius, 0) : i + radius + 1] if math.isfinite(value)]
        means.append(sum(near) / len(near) if near else math.nan)
    return means


def _draw_rewards(axes: "Axes", run: _Run, label: str, colour: str, *, alone: bool) -> None:
    steps, values = run.series("reward/mean")
    if run.held_out is not None:
        at, rates = run.series(run.held_out)
        pass_at_k = f"held-out pass@{run.held_out.rpartition('_')[2]}"
        gain = f"{rates[0]:.2f} → {rates[-1]:.2f}"
        if alone:
            axes.plot(at, rates, color=_INK, linewidth=1, linestyle=(0, (2, 3)), zorder=4)
        axes.plot(at, rates, "o", color=_INK if alone else colour, markersize=7, markeredgecolor="white", clip_on=False,
                  zorder=5, label=f"{pass_at_k}, {gain}" if alone else None)  # fmt: skip
        label = f"{label}, {pass_at_k} {gain}"
    axes.plot(steps, values, color=colour, linewidth=0.9, alpha=0.35)
    axes.plot(steps, smooth(values, max(1, len(values) // 16)), color=colour, linewidth=2.4,
              label="training reward" if alone else label)  # fmt: skip


def _dress(rewards: "Axes", times: "Axes", title: str, runs: Sequence[_Run]) -> None:
    rewards.set_title(title, loc="left", fontweight="bold", color=_INK, pad=10)
    minutes = [sum(value for value in run.series("time/step")[1] if math.isfinite(value)) / 60 for run in runs]
    if max(minutes) > 0:
        span = sorted({f"{min(minutes):.1f}", f"{max(minutes):.1f}"}, key=float)
        rewards.set_title(f"{'–'.join(span)} min of steps", loc="right", fontsize=9, color="#64748b", pad=10)
    rewards.set_ylabel("reward")
    low, high = rewards.get_ylim()
    if low > -0.2 and high < 1.2:
        rewards.set_ylim(-0.02, 1.05)
    rewards.legend(loc="lower right" if len(runs) < 5 else "best", labelcolor="#334155")
    times.set_ylabel("s a step")
    times.set_ylim(0, times.get_ylim()[1] * 1.15)
    times.set_xlabel("step")
    times.xaxis.get_major_locator().set_params(integer=True)


def _load(folder: Path) -> _Run:
    config = folder / "config.toml"
    settings = tomllib.loads(config.read_text(encoding="utf-8")) if config.is_file() else {}
    metrics = read_metrics(folder)
    return _Run({"name": folder.name, **settings}, metrics)


def _describe(settings: Sequence[Mapping[str, Any]]) -> tuple[str, list[str]]:
    """What all runs share, as a title, and what tells them apart, as labels."""

    def word(name: str, value: Any) -> str:
        return f"seed {value}" if name == "seed" else Path(str(value)).name

    shared, differing = [], []
    for name in ("env", "model", "seed"):
        values = [run.get(name) for run in settings]
        (shared if all(value == values[0] for value in values) else differing).append(name)
    title = " · ".join(word(name, settings[0][name]) for name in shared if settings[0].get(name) is not None)
    labels = [" · ".join(word(name, run.get(name)) for name in differing) or str(run["name"]) for run in settings]
    return title or "learning curve", labels


def main(argv: Sequence[str] | None = None) -> None:
    """Draw the run folders named on the command line."""
    parser = argparse.ArgumentParser(prog="python -m molt_gym.trainers.curve", description=draw.__doc__.split("\n")[0])
    parser.add_argument("runs", nargs="+", metavar="RUN", help="run folder")
    parser.add_argument("--out", help="the picture; without it, curve.png in the first folder")
    parser.add_argument("--title")
    options = parser.parse_args(argv)
    try:
        print(draw(options.runs, options.out, title=options.title))
    except (OSError, ValueError) as error:
        parser.exit(2, f"{parser.prog}: {error}\n")


if __name__ == "__main__":
    main()
