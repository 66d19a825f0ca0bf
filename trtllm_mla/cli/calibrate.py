"""``trtllm-mla calibrate``: outer scales for a quantised latent cache."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from trtllm_mla.cli.console import ERR, OUT, print_json
from trtllm_mla.cli.options import CheckpointOption, JsonFlag, OverwriteOption, ThreadsOption


def calibrate(
    network_dir: Annotated[
        Path,
        typer.Argument(metavar="NETWORK_DIR", help="Network directory (from convert) with an fp8 or nvfp4 cache."),
    ],
    checkpoint: CheckpointOption,
    text: Annotated[
        Path,
        typer.Option("--text", metavar="FILE", help="Text like what the model is going to read.", show_default=False),
    ],
    output: Annotated[
        Path | None,
        typer.Option(
            "--output", metavar="DIR", help="Network directory to write. Left out: in place.", show_default=False
        ),
    ] = None,
    overwrite: OverwriteOption = False,
    window: Annotated[int, typer.Option(help="Tokens of a window, into which the text is cut.")] = 256,
    max_tokens: Annotated[int, typer.Option(min=2, help="Tokens of the text to use, from the first.")] = 4096,
    threads: ThreadsOption = None,
    json: JsonFlag = False,
) -> None:
    """Choose each layer's outer scale for a quantised latent cache from a text, and store the scales.

    The text runs through the unquantised network on the CPU. A scale stays 1 unless another is clearly better.

    Example: trtllm-mla calibrate network --checkpoint examples/tiny-mla --text examples/calibration.txt
    """
    from trtllm_mla.calibration.calibrate import calibrate as calibrate_network
    from trtllm_mla.calibration.report import print_calibration, to_json

    with ERR.status("Calibrating") as status:
        report = calibrate_network(
            network_dir,
            checkpoint,
            text,
            output=output,
            overwrite=overwrite,
            window=window,
            max_tokens=max_tokens,
            num_threads=threads,
            on_progress=lambda line: status.update(f"Calibrating: {line}"),
        )
    if json:
        print_json(to_json(report))
    else:
        print_calibration(report, OUT)
