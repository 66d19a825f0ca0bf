"""``trtllm-mla roofline``: the fastest that a model's decode can be on a GPU."""

from __future__ import annotations

from typing import Annotated

import typer

from trtllm_mla.cli.console import OUT, print_json
from trtllm_mla.cli.options import (
    KV_CACHE_FREE_GPU_MEM_FRACTION,
    CheckpointArgument,
    FreeFractionOption,
    JsonFlag,
    parse_numbers,
)


def roofline(
    checkpoint: CheckpointArgument,
    gpu: Annotated[
        str, typer.Option(help="a100, h100, h200, b200, rtx3090, rtx4090, rtx5090 or l40s.", show_default=False)
    ],
    batch_size: Annotated[int, typer.Option(help="Requests of a decode step.")] = 16,
    context: Annotated[
        str,
        typer.Option(
            metavar="TOKENS,...",
            help="Cached tokens of each request, one or several; memory is counted for an engine with room for the "
            "longest.",
        ),
    ] = "4096,65536",
    kv_cache_dtype: Annotated[
        str | None,
        typer.Option(
            metavar="bf16,fp8",
            help="Cache formats: bf16, fp16, fp32, fp8, nvfp4. Left out: the model's own type, fp8 and nvfp4.",
            show_default=False,
        ),
    ] = None,
    kv_cache_free_gpu_mem_fraction: FreeFractionOption = KV_CACHE_FREE_GPU_MEM_FRACTION,
    json: JsonFlag = False,
) -> None:
    """Show what bounds absorbed decode on a GPU, and by how much: bytes, FLOP, time, tokens per second, capacity.

    Rates are a data sheet's peaks, so no kernel gets below the times of memory and MMA; the time to convert a
    quantised cache is an estimate. Needs no weights and no GPU.

    Example: trtllm-mla roofline --gpu h200 examples/tiny-mla --batch-size 16 --context 4096,65536
    """
    from trtllm_mla.checkpoint.architectures import read_model_spec
    from trtllm_mla.checkpoint.files import Checkpoint
    from trtllm_mla.roofline.formats import default_formats, get_format
    from trtllm_mla.roofline.gpus import get_gpu
    from trtllm_mla.roofline.model import make_roofline
    from trtllm_mla.roofline.report import print_roofline, to_json

    device, contexts = get_gpu(gpu), parse_numbers("--context", context)
    named = [get_format(name) for name in dict.fromkeys(kv_cache_dtype.split(","))] if kv_cache_dtype else None
    spec = read_model_spec(Checkpoint.open(checkpoint))
    result = make_roofline(
        spec,
        device,
        formats=named or default_formats(spec),
        contexts=contexts,
        batch_size=batch_size,
        free_fraction=kv_cache_free_gpu_mem_fraction,
    )
    if json:
        print_json(to_json(result))
    else:
        print_roofline(result, OUT)
