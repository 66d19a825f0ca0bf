"""``trtllm-mla report``: one HTML page from benchmark results."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from trtllm_mla.cli.console import ERR, say_wrote
from trtllm_mla.errors import UserError


def report(
    results: Annotated[
        list[Path],
        typer.Argument(
            metavar="RESULT.json...", help="Results that bench wrote with --json, of any kind.", show_default=False
        ),
    ],
    output: Annotated[Path, typer.Option("--output", "-o", metavar="FILE", help="The page to write (.html).")] = Path(
        "report.html"
    ),
) -> None:
    """Write one self-contained HTML page: a table of all results, figures, and what was measured.

    The page needs no network and no scripts. The same results give the same page.

    Example: trtllm-mla report throughput-1.json throughput-16.json threshold.json -o report.html
    """
    from trtllm_mla.benchmark.html_report import write_html_report
    from trtllm_mla.files import check_writable

    if output.suffix.lower() not in (".html", ".htm"):
        raise UserError(f"--output {output}: found the ending '{output.suffix}', expected .html.")
    check_writable(output)
    with ERR.status("Drawing"):
        size = write_html_report(results, output)
    say_wrote(output, f" ({size / 1e6:.1f} MB)")
