"""The learning curve of a run, or of several in one picture, drawn from their metrics.jsonl.

    python -m molt_gym.trainers.curve runs/seed-0 runs/seed-1 runs/seed-2 --out curves.png

Invariant: only what was measured is drawn: thin lines and points are the numbers in the file, thick lines their moving
average; a step without a finite value leaves a gap.
"""

import argparse
import math
import os
import re
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
_INK, _GREY = "#0f172a", "#64748b"
_STYLE: Any = {
    "font.size": 10, "axes.spines.top": False, "axes.spines.right": False, "axes.edgecolor": "#94a3b8",
    "axes.labelcolor": "#334155", "axes.grid": True, "grid.color": "#e2e8f0", "grid.linewidth": 0.8,
    "axes.axisbelow": True, "xtick.color": _GREY, "ytick.color": _GREY, "legend.frameon": False,
    "legend.labelcolor": "#334155", "axes.titlepad": 10,
    # Names are no formulas.
    "text.parse_math": False}


@dataclass(frozen=True)
class _Run:
    settings: Mapping[str, Any]
    metrics: Sequence[Mapping[str, Any]]

    def series(self, name: str) -> tuple[list[int], list[float]]:
        """Steps and values of a metric; not finite where a line says null."""
        lines = [line for line in self.metrics if name in line]
        return [line["step"] for line in lines], [float(line[name]) for line in lines]

    def course(self) -> str:
        """The name of what is learnt by: a reward, or the loss of supervised fine-tuning."""
        return "train/loss" if any("train/loss" in line for line in self.metrics) else "reward/mean"

    def held_out(self) -> str | None:
        """The name of the first pass@k over held-out tasks, or of the loss on what is held out."""
        names = (name for line in self.metrics for name in line)
        return next((name for name in names if re.match("eval/(.*/pass_at_|loss$)", name)), None)


def draw(runs: str | os.PathLike[str] | Sequence[str | os.PathLike[str]], out: str | os.PathLike[str] | None = None, *,
         title: str | None = None) -> Path:
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
    loaded = [_load(folder) for folder in folders]
    if not any(math.isfinite(value) for run in loaded for value in run.series(run.course())[1]):
        raise ValueError(f"no finite reward or loss in {', '.join(map(str, folders)) or 'no folder'}: nothing to draw")
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
    windows = [[v for v in values[max(i - radius, 0) : i + radius + 1] if math.isfinite(v)] for i in range(len(values))]
    # The sum of what is finite may not be.
    return [sum(value / len(window) for value in window) if window else math.nan for window in windows]


def _draw_rewards(axes: "Axes", run: _Run, label: str, colour: str, *, alone: bool) -> None:
    name = f"training {'loss' if run.course() == 'train/loss' else 'reward'}" if alone else label
    if held_out := run.held_out():
        steps, rates = run.series(held_out)
        what = "loss" if held_out == "eval/loss" else f"pass@{held_out.rpartition('_')[2]}"
        gain = f"held-out {what} {rates[0]:.2f} → {rates[-1]:.2f}"
        axes.plot(steps, rates, color=_INK, linewidth=float(alone), linestyle=(0, (2, 3)), zorder=4)
        axes.plot(steps, rates, "o", color=_INK if alone else colour, markersize=7, markeredgecolor="white",
                  clip_on=False, zorder=5, label=gain if alone else None)
        name = name if alone else f"{label}, {gain}"
    steps, values = run.series(run.course())
    axes.plot(steps, values, color=colour, linewidth=0.9, alpha=0.35)
    axes.plot(steps, smooth(values, max(1, len(values) // 16)), color=colour, linewidth=2.4, label=name)


def _dress(rewards: "Axes", times: "Axes", title: str, runs: Sequence[_Run]) -> None:
    rewards.set_title(title, loc="left", fontweight="bold", color=_INK)
    minutes = [f"{sum(filter(math.isfinite, run.series('time/step')[1])) / 60:.1f}" for run in runs]
    span = sorted({min(minutes, key=float), max(minutes, key=float)}, key=float)
    rewards.set_title(f"{'–'.join(span)} min of steps", loc="right", fontsize=9, color=_GREY)
    losses = any(run.course() == "train/loss" for run in runs)
    rewards.set_ylabel("loss" if losses else "reward")
    low, high = rewards.get_ylim()
    if not losses and low > -0.2 and high < 1.2:
        rewards.set_ylim(-0.02, 1.05)
    rewards.legend(loc="lower right" if len(runs) < 5 and not losses else "best")
    times.set(xlabel="step", ylabel="s a step", ylim=(0, times.get_ylim()[1] * 1.15))
    times.xaxis.get_major_locator().set_params(integer=True)


def _load(folder: Path) -> _Run:
    config = folder / "config.toml"
    settings = tomllib.loads(config.read_text(encoding="utf-8")) if config.is_file() else {}
    return _Run({"name": folder.name, **settings}, read_metrics(folder))


def _describe(settings: Sequence[Mapping[str, Any]]) -> tuple[str, list[str]]:
    """What all runs share, as a title, and what tells them apart, as labels."""
    words = [{"env": run.get("env"), "model": os.path.basename(run.get("model", "")),
              "seed": f"seed {run.get('seed', 0)}"} for run in settings]
    differing = [name for name in words[0] if len({run[name] for run in words}) > 1]
    title = " · ".join(word for name, word in words[0].items() if word and name not in differing)
    return title, [" · ".join(str(word[name]) for name in differing) or run["name"]
                   for word, run in zip(words, settings, strict=True)]


def main(argv: Sequence[str] | None = None) -> None:
    """Draw the run folders named on the command line."""
    parser = argparse.ArgumentParser(prog="python -m molt_gym.trainers.curve", description="Draw runs as a PNG.")
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
