"""Where the commands print: results on standard output, everything else on standard error."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.text import Text

from trtllm_mla.errors import one_line
from trtllm_mla.files import write_json

if TYPE_CHECKING:
    from rich.progress import Progress

OUT = Console()
ERR = Console(stderr=True)


def accept_any_text() -> None:
    """Has standard output show characters that its encoding lacks as escapes, where it would fail."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


def print_json(value: object) -> None:
    """Prints a value as JSON on standard output, untouched by the terminal's width."""
    sys.stdout.write(json.dumps(value, indent=2) + "\n")


def save_json(path: Path | None, value: object) -> None:
    """Writes a report where the user asked for one."""
    if path is not None:
        write_json(path, value)
        say_wrote(path)


def say_wrote(path: Path, facts: str = "") -> None:
    """Says on standard error that a file was written, whatever characters its name has."""
    ERR.print(Text(f"Wrote {one_line(str(path))}{facts}"), soft_wrap=True)


@contextmanager
def progress_bar(description: str, *, in_bytes: bool) -> Iterator[Callable[[int, int], None]]:
    """A bar, on a terminal only, while the block runs; yields what to tell how much is done, and how much there is."""
    with _bars(in_bytes=in_bytes) as progress:
        task = progress.add_task(description, total=None)
        yield lambda done, total: progress.update(task, completed=done, total=total)


@contextmanager
def stage_bar() -> Iterator[Callable[[str, int, int], None]]:
    """The same for work in stages: also told which one is under way."""
    with _bars(in_bytes=False) as progress:
        task = progress.add_task("", total=None)
        yield lambda stage, done, total: progress.update(task, description=stage, completed=done, total=total)


def _bars(*, in_bytes: bool) -> Progress:
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    amounts = (DownloadColumn(), TransferSpeedColumn()) if in_bytes else (MofNCompleteColumn(),)
    columns = (TextColumn("{task.description}"), BarColumn(), *amounts, TimeRemainingColumn())
    return Progress(*columns, console=ERR, transient=True, disable=not ERR.is_terminal)
