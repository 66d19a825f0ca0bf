"""``trtllm-mla build``: from a network to an engine."""

from __future__ import annotations

import typing
from pathlib import Path
from typing import Annotated

import typer

from trtllm_mla.cli.console import ERR, OUT, print_json
from trtllm_mla.cli.options import JsonFlag, OverwriteOption
from trtllm_mla.config import BackendName
from trtllm_mla.errors import UserError


def build(
    network_dir: Annotated[Path, typer.Argument(metavar="NETWORK_DIR", help="Network directory (from convert).")],
    engine_dir: Annotated[Path, typer.Argument(metavar="ENGINE_DIR", help="Directory to write.")],
    config: Annotated[
        Path | None,
        typer.Option("--config", metavar="FILE", help="Build config (JSON or TOML).", show_default="defaults"),
    ] = None,
    backend: Annotated[
        str | None,
        typer.Option(help="tensorrt-rtx (needs no GPU) or tensorrt. Left out: the config's.", show_default=False),
    ] = None,
    targets: Annotated[
        str | None,
        typer.Option(metavar="sm_89,sm_120", help="GPU generations. Left out: the config's.", show_default=False),
    ] = None,
    native: Annotated[bool, typer.Option("--native", help="Without plugins: TensorRT's own layers.")] = False,
    plugin_library: Annotated[
        Path | None,
        typer.Option(
            metavar="LIBRARY.so",
            help="Compiled plugin library (from plugin-library) to build with. Left out: the plugins in Python.",
            show_default=False,
        ),
    ] = None,
    overwrite: OverwriteOption = False,
    json: JsonFlag = False,
) -> None:
    """Build an engine and compile its kernels ahead of time. TensorRT-RTX needs no GPU for it.

    Example: trtllm-mla build network engine --config build_configs/tiny_mla.json
    """
    from trtllm_mla.config import BuildConfig, load_config
    from trtllm_mla.engine.builder import build as build_engine

    limits = load_config(config, BuildConfig) if config else BuildConfig()
    with ERR.status("Building") as status:
        report = build_engine(
            network_dir,
            engine_dir,
            config=limits,
            backend=_backend(backend),
            targets=targets.split(",") if targets is not None else None,
            native=native,
            plugin_library_path=plugin_library,
            overwrite=overwrite,
            progress=status.update,
        )
    info = report.directory.info
    if json:
        print_json({"engine_dir": str(engine_dir), **info.model_dump(mode="json")})
        return
    for warning in report.warnings:
        ERR.print(f"[yellow]TensorRT warns:[/] {warning}", soft_wrap=True, highlight=False)
    tiles = ", ".join(
        item.target if info.native else f"{item.target} (tile {item.tile_s} x {item.num_stages})"
        for item in info.targets
    )
    OUT.print(
        f"{engine_dir}: {info.backend} {info.backend_version}, {info.engine_bytes / 1e6:.1f} MB, "
        f"{info.num_plugin_layers} plugin layers, for {tiles}; {info.build_seconds:.1f} s, of which network "
        f"{report.parse_seconds:.1f}, kernels {report.kernel_seconds:.1f}, engine {report.engine_seconds:.1f}; "
        f"peak memory {info.peak_memory_bytes / 1e9:.2f} GB",
        soft_wrap=True,
        highlight=False,
    )


def _backend(name: str | None) -> BackendName | None:
    names = typing.get_args(BackendName)
    if name is not None and name not in names:
        raise UserError(f"--backend: found '{name}', expected {' or '.join(names)}.")
    return typing.cast("BackendName | None", name)
