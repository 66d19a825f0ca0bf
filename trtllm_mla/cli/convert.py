"""``trtllm-mla convert``: from a checkpoint to a network."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from trtllm_mla.cli.console import ERR, OUT, print_json
from trtllm_mla.cli.options import CheckpointArgument, JsonFlag, OverwriteOption, PluginConfigOption
from trtllm_mla.dtypes import DType


def convert(
    checkpoint: CheckpointArgument,
    network_dir: Annotated[Path, typer.Argument(metavar="NETWORK_DIR", help="Directory to write.")],
    plugin_config: PluginConfigOption = None,
    dtype: Annotated[
        DType | None, typer.Option(help="Type of the network. Left out: the checkpoint's.", show_default=False)
    ] = None,
    num_layers: Annotated[
        int | None, typer.Option(min=1, help="Keep only the first layers, to try things out.", show_default=False)
    ] = None,
    overwrite: OverwriteOption = False,
    json: JsonFlag = False,
) -> None:
    """Turn a checkpoint into a network with MLA operations. No weight is copied.

    Only config.json is needed; tensors are checked where they are present.

    Example: trtllm-mla convert examples/tiny-mla network
    """
    from trtllm_mla.config import MlaPluginConfig, PluginConfigFile, load_config
    from trtllm_mla.network.directory import convert as convert_checkpoint

    plugin = load_config(plugin_config, PluginConfigFile).mla_plugin if plugin_config else MlaPluginConfig()
    with ERR.status("Converting"):
        network = convert_checkpoint(
            checkpoint, network_dir, plugin=plugin, dtype=dtype, num_layers=num_layers, overwrite=overwrite
        )
    report = {
        "network_dir": str(network_dir),
        "architecture": network.spec.hf_architecture,
        "dtype": str(network.dtype),
        "num_layers": network.num_layers,
        "weights": len(network.weights.shapes),
        "kv_cache_dtype": str(network.plugin.cache_dtype(network.dtype)),
    }
    if json:
        print_json(report)
        return
    OUT.print(
        f"{network_dir}: {report['num_layers']} layers of {report['architecture']} in {report['dtype']}, latent cache "
        f"in {report['kv_cache_dtype']}, {report['weights']} weights to bind",
        soft_wrap=True,
    )
