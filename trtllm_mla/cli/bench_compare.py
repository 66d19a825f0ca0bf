"""``trtllm-mla bench compare``: executors in one run, or results of several, side by side."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.text import Text

from trtllm_mla.cli.console import ERR, OUT, save_json
from trtllm_mla.cli.options import ConfigOption, JsonFileOption, ThreadsOption
from trtllm_mla.errors import UserError

if TYPE_CHECKING:
    from trtllm_mla.benchmark.compare import Entrant


def compare(
    subjects: Annotated[
        list[str],
        typer.Argument(
            metavar="RESULT.json... | [NAME=]DIRECTORY...",
            help="Results to set side by side; or, with --checkpoint, what to run: network or engine directories, "
            "each with all --executors, and NAME=DIRECTORY, an engine run by tensorrt or a network run by "
            "onnxruntime.",
            show_default=False,
        ),
    ],
    checkpoint: Annotated[
        Path | None,
        typer.Option("--checkpoint", "-c", help="Run: the checkpoint the weights are bound from.", show_default=False),
    ] = None,
    executors: Annotated[
        str,
        typer.Option(
            metavar="NAME,...",
            help="Run: onnxruntime, interpreter, tensorrt, and transformers' own generate in float32 as huggingface "
            "(huggingface-sdpa) or huggingface-eager. Ratios refer to the first.",
        ),
    ] = "onnxruntime,huggingface",
    input_len: Annotated[int, typer.Option(help="Tokens of each prompt.")] = 128,
    output_len: Annotated[int, typer.Option(help="New tokens of each prompt.")] = 32,
    batch_size: Annotated[int, typer.Option(help="Prompts served together.")] = 1,
    warmup: Annotated[int, typer.Option(help="Iterations before the clock starts.")] = 2,
    iterations: Annotated[int, typer.Option(help="Iterations that are measured.")] = 10,
    seed: Annotated[int, typer.Option(help="Seed of the prompts and of the order.")] = 0,
    config: ConfigOption = None,
    threads: ThreadsOption = None,
    json: JsonFileOption = None,
) -> None:
    """Compare executors in one run, taking turns on the same prompts, or results that were written before.

    Example: trtllm-mla bench compare network -c examples/tiny-mla --executors onnxruntime,huggingface --threads 1

    Example: trtllm-mla bench compare before.json after.json
    """
    from trtllm_mla.benchmark.compare import compare_files, compare_run
    from trtllm_mla.benchmark.latency import LatencyOptions
    from trtllm_mla.benchmark.result_files import load_results
    from trtllm_mla.benchmark.tables import print_comparison
    from trtllm_mla.files import check_writable

    if json is not None:
        check_writable(json)
    if checkpoint is None:
        for subject in subjects:
            if "=" in subject or Path(subject).is_dir():
                raise UserError(
                    f"{subject}: found a directory, expected results to read. Pass --checkpoint to run the directory."
                )
        comparison = compare_files(load_results([Path(subject) for subject in subjects]))
    else:
        options = LatencyOptions(input_len, output_len, batch_size, warmup, iterations, seed)
        entrants = _entrants(subjects, executors, config)
        with ERR.status("Loading") as status:
            comparison = compare_run(
                entrants,
                checkpoint,
                options,
                num_threads=threads,
                on_progress=lambda line: status.update(Text(line)),  # names may look like rich's markup
            )
    save_json(json, comparison.to_json())
    print_comparison(comparison, OUT)


def _entrants(subjects: list[str], executors: str, config: Path | None) -> list[Entrant]:
    """Who takes part, with the limits of each one's directory."""
    from trtllm_mla.benchmark.compare import Entrant, parse_contestants
    from trtllm_mla.runtime.limits import find_limits

    names = list(dict.fromkeys(executors.split(",")))
    return [
        Entrant(name, runner, directory, find_limits(directory, config))
        for name, runner, directory in parse_contestants(subjects, names)
    ]
