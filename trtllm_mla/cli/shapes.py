"""``trtllm-mla shapes``: a network's optimization profile, for tools that build engines themselves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from trtllm_mla.cli.options import JsonFlag


class Tool(StrEnum):
    """A program that builds engines from ONNX files."""

    POLYGRAPHY = "polygraphy"
    TRTEXEC = "trtexec"


def shapes(
    network_dir: Annotated[Path, typer.Argument(metavar="NETWORK_DIR", help="Network directory (from convert).")],
    config: Annotated[
        Path | None,
        typer.Option("--config", metavar="FILE", help="Build config (JSON or TOML).", show_default="defaults"),
    ] = None,
    tool: Annotated[Tool, typer.Option(help="Whose options to print.")] = Tool.POLYGRAPHY,
    json: JsonFlag = False,
) -> None:
    """Print the shapes that an engine is to accept, as options of polygraphy or trtexec.

    They are those that build uses. A tool that is told none assumes 1 for every size, which contradicts itself: a
    step's tokens are those of its two groups together.

    Example: trtllm-mla shapes network --config build_configs/tiny_mla.json --tool trtexec
    """
    from trtllm_mla.cli.console import print_json
    from trtllm_mla.config import BuildConfig, load_config, merge_plugin_configs
    from trtllm_mla.engine.profile import input_shape_ranges
    from trtllm_mla.network.directory import NetworkDirectory

    network = NetworkDirectory.load(network_dir)
    limits = load_config(config, BuildConfig) if config else BuildConfig()
    plugin = merge_plugin_configs(network.plugin, limits.mla_plugin)
    ranges = input_shape_ranges(network, limits.model_copy(update={"mla_plugin": plugin}))
    if json:
        names = ("min", "opt", "max")
        print_json({name: dict(zip(names, shape, strict=True)) for name, shape in ranges.items()})
        return
    for index, name in enumerate(("min", "opt", "max")):
        typer.echo(_option(tool, name, {key: shape[index] for key, shape in ranges.items()}))


def _option(tool: Tool, name: str, shapes: Mapping[str, Sequence[int]]) -> str:
    if tool is Tool.POLYGRAPHY:
        texts = (f"{key}:[{','.join(map(str, shape))}]" for key, shape in shapes.items())
        return f"--trt-{name}-shapes {' '.join(texts)}"
    texts = (f"{key}:{'x'.join(map(str, shape))}" for key, shape in shapes.items())
    return f"--{name}Shapes={','.join(texts)}"
