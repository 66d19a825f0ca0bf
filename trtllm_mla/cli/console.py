"""Where the commands print: results on standard output, everything else on standard error."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from trtllm_mla.files import write_json

if TYPE_CHECKING:
    from collections.abc import Callable

OUT = Console()
ERR = Console(stderr=True)


def print_json(value: object) -> None:
    """Prints a value as JSON on standard output, untouched by the terminal's width."""
    sys.stdout.write(json.dumps(value, indent=2) + "\n")


def save_json(path: Path | None, value: object) -> None:
    """Writes a report where the user asked for one."""
    if path is not None:
        write_json(path, value)
        ERR.print(f"Wrote {path}")


@contextmanager
def progress(description: str) -> Iterator[Callable[[str, int, int], None]]:
    """Shows a progress bar with an estimate on standard error.

    Args:
        description: What is being done, until the first report.

    Yields:
        A function that takes what is being done, how many steps are done, and how many there are.
    """
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        SpinnerColumn,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=ERR, transient=True) as bar:
        task = bar.add_task(description, total=None)

        def report(doing: str, done: int, total: int) -> None:
            bar.update(task, description=doing, completed=done, total=total)

        yield report
