"""The scores of an evaluation as a table for people."""

from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

__all__ = ["print_scores"]


def print_scores(results: Sequence[dict[str, Any]]) -> None:
    """A line for each score, with its 95 % interval, and a column for each env."""
    def cells(result: dict[str, Any], name: str) -> tuple[str, str]:
        value = result.get(name, "–")
        interval = result["intervals"].get(name)
        return (f"{value:.4g}" if isinstance(value, float) else str(value),
                "[{:.3g}, {:.3g}]".format(*interval) if interval else "")

    table = Table(box=None, show_header=False, pad_edge=False)
    for name in dict.fromkeys(name for result in results for name in result if name not in ("intervals", "failures")):
        table.add_row(*map(Text, (name, *(text for result in results for text in cells(result, name)))))
    for reason in sorted({reason for result in results for reason in result["failures"]}):
        counts = (str(result["failures"].get(reason, 0)) for result in results)
        table.add_row(*map(Text, (f"failed {reason}", *(text for count in counts for text in (count, "")))))
    console = Console(highlight=False)
    if not console.is_terminal:
        # A file or a pipe is as wide as it takes.
        console.width = console.measure(table, options=console.options.update(width=10**6)).maximum
    console.print(table)
