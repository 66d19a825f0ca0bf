"""Arguments and options that several commands share."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from trtllm_mla.errors import UserError
from trtllm_mla.files import check_writable, resolve_output

CheckpointArgument = Annotated[
    Path, typer.Argument(metavar="CHECKPOINT", help="Hugging Face checkpoint directory.", show_default=False)
]
CheckpointOption = Annotated[
    Path,
    typer.Option("--checkpoint", "-c", help="Hugging Face checkpoint the weights are bound from.", show_default=False),
]
DirectoryArgument = Annotated[
    Path,
    typer.Argument(
        metavar="DIRECTORY", help="Network directory (from convert) or engine directory.", show_default=False
    ),
]
OverwriteOption = Annotated[
    bool, typer.Option("--overwrite", help="Replace an output directory that this command wrote before.")
]
JsonFileOption = Annotated[
    Path | None, typer.Option("--json", metavar="FILE", help="Also write the report as JSON.", show_default=False)
]
JsonFlag = Annotated[bool, typer.Option("--json", help="Print JSON on standard output and nothing else.")]
PluginConfigOption = Annotated[
    Path | None,
    typer.Option("--plugin-config", metavar="FILE", help="Plugin config (JSON or TOML).", show_default=False),
]
ThreadsOption = Annotated[
    int | None, typer.Option("--threads", help="CPU threads of an operator.", show_default=False)
]
ConfigOption = Annotated[
    Path | None,
    typer.Option(
        "--config",
        metavar="FILE",
        help="Build config (JSON or TOML) whose limits apply to a network; an engine has its own.",
        show_default=False,
    ),
]


# The default of TensorRT-LLM's option of this name.
KV_CACHE_FREE_GPU_MEM_FRACTION = 0.9

FreeFractionOption = Annotated[
    float,
    typer.Option(
        "--kv-cache-free-gpu-mem-fraction",
        min=0.01,
        max=1.0,
        help="Share of the memory left by weights and workspace that the cache may take; the rest is for the driver, "
        "CUDA and fragmentation.",
    ),
]


class ExecutorName(StrEnum):
    """What runs a network."""

    ONNXRUNTIME = "onnxruntime"
    INTERPRETER = "interpreter"
    TENSORRT = "tensorrt"


ExecutorOption = Annotated[
    ExecutorName,
    typer.Option(
        "--executor",
        help="onnxruntime: CPU. interpreter: the plugins' real kernels, interpreted on the CPU. tensorrt: GPU.",
    ),
]

CudaGraphOption = Annotated[
    bool,
    typer.Option(
        "--cuda-graph/--no-cuda-graph",
        help="Capture decode steps in CUDA graphs, or enqueue them launch by launch; tensorrt only.",
    ),
]


def parse_numbers(option: str, text: str) -> list[int]:
    """Whole numbers separated by commas, each once.

    Args:
        option: The option they were given for.
        text: What was given.

    Raises:
        UserError: It is something else.
    """
    try:
        # Bounded, since Python refuses to read numbers of thousands of digits.
        return list(dict.fromkeys(int(item[:20]) for item in text.split(",")))
    except ValueError:
        raise UserError(
            f"{option}: found '{text:.40}', expected numbers separated by commas, such as 4096,65536."
        ) from None


def check_outputs(paths: Mapping[str, Path | None]) -> None:
    """Checks, before long work, that the files it is to write can be written.

    Args:
        paths: What was given for each option; None where it was left out.

    Raises:
        UserError: One cannot, or two are the same.
    """
    seen: dict[Path, str] = {}
    for option, path in paths.items():
        if path is None:
            continue
        check_writable(path)
        other = seen.setdefault(resolve_output(path), option)
        if other != option:
            raise UserError(f"{other} and {option}: found {path} for both, expected a file for each.")
