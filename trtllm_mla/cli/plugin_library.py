"""``trtllm-mla plugin-library``: from networks to a library of plugins that needs no Python."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from trtllm_mla.cli.console import ERR, OUT, print_json
from trtllm_mla.cli.options import JsonFlag, OverwriteOption
from trtllm_mla.errors import UserError


def plugin_library(
    output: Annotated[Path, typer.Argument(metavar="OUT_DIR", help="Directory to write.")],
    network: Annotated[
        list[Path],
        typer.Option(
            "--network", "-n", metavar="NETWORK_DIR", help="Network (from convert) to serve; may be repeated."
        ),
    ],
    config: Annotated[
        Path | None,
        typer.Option("--config", metavar="FILE", help="Build config (JSON or TOML).", show_default="defaults"),
    ] = None,
    targets: Annotated[
        str | None,
        typer.Option(metavar="sm_89,sm_120", help="GPU generations. Left out: the config's.", show_default=False),
    ] = None,
    tensorrt_include: Annotated[
        Path | None,
        typer.Option(
            envvar="TENSORRT_INCLUDE_DIR",
            metavar="DIR",
            help="Folder with TensorRT's NvInferRuntime.h.",
            show_default=False,
        ),
    ] = None,
    sources: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="The repository's folder plugins.", show_default="beside the package"),
    ] = None,
    compile_library: Annotated[
        bool, typer.Option("--compile/--no-compile", help="Compile the library, or write its data alone.")
    ] = True,
    overwrite: OverwriteOption = False,
    json: JsonFlag = False,
) -> None:
    """Compile the plugins of networks into one C++ library, for trtexec, polygraphy and servers without Python.

    Example: trtllm-mla plugin-library out --network network --targets sm_89 --tensorrt-include TensorRT/include
    """
    from trtllm_mla.config import BuildConfig, load_config
    from trtllm_mla.engine.plugin_library import LIBRARY_NAME, SOURCES, CompilerSettings, make_plugin_library

    if compile_library and tensorrt_include is None:
        raise UserError(
            "found no folder with TensorRT's headers, which compiling the library needs; the pip packages have none. "
            "They are in TensorRT's and TensorRT-RTX's archives (developer.nvidia.com/tensorrt) and in "
            "github.com/NVIDIA/TensorRT, folder include: name it with --tensorrt-include or TENSORRT_INCLUDE_DIR, or "
            "pass --no-compile."
        )
    compiler = None
    if compile_library and tensorrt_include is not None:
        compiler = CompilerSettings(tensorrt_include, sources or SOURCES)
    with ERR.status("Planning") as status:
        report = make_plugin_library(
            output,
            network,
            config=load_config(config, BuildConfig) if config else BuildConfig(),
            targets=targets.split(",") if targets is not None else None,
            compiler=compiler,
            overwrite=overwrite,
            progress=status.update,
        )
    if json:
        print_json({**asdict(report), "path": str(report.path)})
        return
    made = LIBRARY_NAME if report.compiled else "the data of a library"
    OUT.print(
        f"{report.path}: {made} for {', '.join(report.targets)}: {report.operations} operations, {report.kernels} "
        f"kernels, {report.data_bytes / 1e6:.1f} MB",
        soft_wrap=True,
        highlight=False,
    )
