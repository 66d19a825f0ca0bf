"""``trtllm-mla convert``: from a checkpoint to a network, and to TensorRT-LLM's checkpoint layout and back."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from trtllm_mla.cli.console import OUT, print_json, progress_bar, stage_bar
from trtllm_mla.cli.options import CheckpointArgument, JsonFlag, OverwriteOption, PluginConfigOption
from trtllm_mla.dtypes import DType
from trtllm_mla.errors import UserError

if TYPE_CHECKING:
    from trtllm_mla.checkpoint.trtllm_convert import ConversionReport


class Layout(StrEnum):
    """What ``convert`` makes of a checkpoint."""

    NETWORK = "network"
    TRTLLM = "trtllm"


def convert(
    checkpoint: CheckpointArgument,
    output_dir: Annotated[Path, typer.Argument(metavar="OUTPUT_DIR", help="Directory to write.")],
    plugin_config: PluginConfigOption = None,
    dtype: Annotated[
        DType | None, typer.Option(help="Type of the network. Left out: the checkpoint's.", show_default=False)
    ] = None,
    num_layers: Annotated[
        int | None, typer.Option(min=1, help="Keep only the first layers, to try things out.", show_default=False)
    ] = None,
    layout: Annotated[
        Layout,
        typer.Option(help="network: graph and weight map. trtllm: TensorRT-LLM's config.json and rank files."),
    ] = Layout.NETWORK,
    tp: Annotated[
        int | None, typer.Option(min=1, help="Layout trtllm: ranks to split the model over.", show_default=False)
    ] = None,
    moe_ep: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Layout trtllm: groups of ranks that share out whole experts. Left out: every expert is split over "
            "all ranks.",
            show_default=False,
        ),
    ] = None,
    from_trtllm: Annotated[
        bool, typer.Option("--from-trtllm", help="CHECKPOINT is in layout trtllm: write the Hugging Face one.")
    ] = False,
    overwrite: OverwriteOption = False,
    json: JsonFlag = False,
) -> None:
    """Turn a checkpoint into a network with MLA operations. No weight is copied.

    Only config.json is needed; tensors are checked where they are present.

    With --layout trtllm, write DeepSeek's weights as TensorRT-LLM names, orders and splits them; with --from-trtllm,
    the way back.

    Example: trtllm-mla convert examples/tiny-mla network
    """
    options: dict[str, object] = {
        "--plugin-config": plugin_config,
        "--dtype": dtype,
        "--num-layers": num_layers,
        "--tp": tp,
        "--moe-ep": moe_ep,
        "--overwrite": overwrite or None,
    }
    if from_trtllm:
        _refuse(options | {"--layout": None if layout is Layout.NETWORK else layout}, "--from-trtllm")
        report = _read_trtllm(checkpoint, output_dir)
    elif layout is Layout.TRTLLM:
        _refuse({"--plugin-config": plugin_config}, "--layout trtllm")
        report = _write_trtllm(checkpoint, output_dir, tp or 1, moe_ep or 1, dtype, num_layers, overwrite)
    else:
        _refuse({"--tp": tp, "--moe-ep": moe_ep}, "--layout network")
        report = _write_network(checkpoint, output_dir, plugin_config, dtype, num_layers, overwrite)
    summary = report.pop("summary")
    if json:
        print_json(report)
    else:
        OUT.print(summary, soft_wrap=True)


def _refuse(options: dict[str, object], beside: str) -> None:
    given = [name for name, value in options.items() if value is not None]
    if given:
        raise UserError(f"{given[0]}: it has no effect with {beside}. Leave one of them out.")


def _write_network(
    checkpoint: Path,
    output_dir: Path,
    plugin_config: Path | None,
    dtype: DType | None,
    num_layers: int | None,
    overwrite: bool,
) -> dict[str, Any]:
    from trtllm_mla.config import MlaPluginConfig, PluginConfigFile, load_config
    from trtllm_mla.network.directory import convert as convert_checkpoint

    plugin = load_config(plugin_config, PluginConfigFile).mla_plugin if plugin_config else MlaPluginConfig()
    with stage_bar() as progress:
        network = convert_checkpoint(
            checkpoint,
            output_dir,
            plugin=plugin,
            dtype=dtype,
            num_layers=num_layers,
            overwrite=overwrite,
            progress=progress,
        )
    report = {
        "network_dir": str(output_dir),
        "architecture": network.spec.hf_architecture,
        "dtype": str(network.dtype),
        "num_layers": network.num_layers,
        "weights": len(network.weights.shapes),
        "kv_cache_dtype": str(network.plugin.cache_dtype(network.dtype)),
    }
    summary = (
        f"{output_dir}: {report['num_layers']} layers of {report['architecture']} in {report['dtype']}, latent cache "
        f"in {report['kv_cache_dtype']}, {report['weights']} weights to bind"
    )
    return report | {"summary": summary}


def _write_trtllm(
    checkpoint: Path,
    output_dir: Path,
    tp: int,
    moe_ep: int,
    dtype: DType | None,
    num_layers: int | None,
    overwrite: bool,
) -> dict[str, Any]:
    from trtllm_mla.checkpoint.files import Checkpoint
    from trtllm_mla.checkpoint.trtllm_convert import write_trtllm
    from trtllm_mla.checkpoint.trtllm_layout import RankGrid

    with progress_bar("Reading headers", in_bytes=False) as progress:
        opened = Checkpoint.open(checkpoint, progress=progress)
    with progress_bar("Writing ranks", in_bytes=True) as progress:
        done = write_trtllm(
            opened,
            output_dir,
            RankGrid(tp, moe_ep),
            dtype=dtype,
            num_layers=num_layers,
            overwrite=overwrite,
            progress=progress,
        )
    report = _describe(done, output_dir) | {"tp_size": tp, "moe_ep_size": moe_ep, "rounded": list(done.rounded)}
    summary = (
        f"{output_dir}: {report['num_layers']} layers of {report['architecture']} in {report['dtype']}, split over "
        f"{tp} ranks, {done.nbytes / 1e9:.3g} GB"
    )
    for reason in dict.fromkeys(done.skipped.values()):
        names = [name for name, other in done.skipped.items() if other == reason]
        summary += f"\nLeft out, {reason}: {_some(names)}"
    if done.rounded:
        summary += f"\nRounded, cannot come back as they were: {_some(list(done.rounded))}"
    return report | {"skipped": dict(done.skipped), "summary": summary}


def _read_trtllm(path: Path, output_dir: Path) -> dict[str, Any]:
    from trtllm_mla.checkpoint.trtllm_convert import read_trtllm

    with progress_bar("Writing shards", in_bytes=True) as progress:
        done = read_trtllm(path, output_dir, progress=progress)
    report = _describe(done, output_dir)
    summary = (
        f"{output_dir}: {done.tensors} tensors of {report['architecture']} in {done.files} files, "
        f"{done.nbytes / 1e9:.3g} GB\nNot in the layout: tokenizer files and layers for multi-token prediction. Copy "
        "the tokenizer from the original checkpoint."
    )
    return report | {"summary": summary}


def _describe(done: ConversionReport, output_dir: Path) -> dict[str, Any]:
    spec = done.model.spec
    return {
        "output_dir": str(output_dir),
        "architecture": spec.hf_architecture,
        "dtype": str(spec.dtype),
        "num_layers": spec.num_hidden_layers,
        "tensors": done.tensors,
        "files": done.files,
        "nbytes": done.nbytes,
    }


def _some(names: list[str]) -> str:
    names = sorted(names)
    return ", ".join(names[:2]) + (f" and {len(names) - 2} more" if len(names) > 2 else "")
