"""Where the commands print: results on standard output, everything else on standard error."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from rich.console import Console

from trtllm_mla.files import write_json

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
