"""Calibration of a network: runs a text through the unquantised model and stores the outer scales that fit it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from trtllm_mla._version import __version__
from trtllm_mla.cache_rows import CacheDType
from trtllm_mla.calibration.scale_search import ScaleChoice, choose_scale
from trtllm_mla.checkpoint.files import Checkpoint
from trtllm_mla.checkpoint.tokenizer import read_text
from trtllm_mla.config import BuildConfig
from trtllm_mla.errors import UserError
from trtllm_mla.files import check_replaceable, check_writable
from trtllm_mla.network.directory import ONNX_NAME, NetworkDirectory, check_output, store_latent_scales
from trtllm_mla.ops.row_codec import Float32Array
from trtllm_mla.runtime.executors.base import Executor
from trtllm_mla.runtime.executors.factory import make_float32_twin
from trtllm_mla.runtime.generation import DEFAULT_WINDOW, read_cached_rows, run_text
from trtllm_mla.runtime.pages import pages_for
from trtllm_mla.runtime.scheduler import SchedulerConfig

DEFAULT_MAX_TOKENS = 4096


@dataclass(frozen=True)
class CalibrationReport:
    """What a calibration found and stored.

    Attributes:
        version: Version of this package.
        network_dir: The network that was calibrated.
        output_dir: Where the scales were stored.
        kv_cache_dtype: Type of its cache.
        executor: What the text ran on.
        tokens: Tokens of the text that were used.
        window: Tokens of a window; nothing is carried from one to the next.
        layers: What was chosen for each layer.
    """

    version: str
    network_dir: str
    output_dir: str
    kv_cache_dtype: CacheDType
    executor: str
    tokens: int
    window: int
    layers: tuple[ScaleChoice, ...]


def calibrate(
    directory: Path,
    checkpoint: Path,
    text: Path,
    *,
    output: Path | None = None,
    overwrite: bool = False,
    window: int = DEFAULT_WINDOW,
    max_tokens: int = DEFAULT_MAX_TOKENS,
    num_threads: int | None = None,
    on_progress: Callable[[str], None] | None = None,
) -> CalibrationReport:
    """Chooses and stores the outer scale of each layer.

    The text runs teacher-forced through the network's float32 twin with a cache that is not quantised, in ONNX
    Runtime; each layer's latents are read from that cache. They are kept in memory: 4 bytes an element.

    Args:
        directory: A network directory with a quantised cache.
        checkpoint: Whose weights are bound.
        text: The text, which should be like what the model is going to read.
        output: A directory to make; None stores the scales in ``directory``.
        overwrite: Replace what is in ``output``.
        window: Tokens of a window, into which the text is cut.
        max_tokens: Tokens to use, from the first; 2 or more.
        num_threads: Threads of an operator.
        on_progress: Called with a line when a part begins.

    Raises:
        UserError: The cache is not quantised, a directory, the checkpoint or the text is unusable, the window is
            outside the network's limits, or a latent is not finite. Nothing is written then.
    """
    say = on_progress or (lambda _: None)
    network = NetworkDirectory.load(directory)
    network.check_calibratable()
    if output is None:
        check_writable(network.onnx_path)
    else:
        check_output(network, output)
        check_replaceable(output, marker=ONNX_NAME, overwrite=overwrite)
    opened = Checkpoint.open(checkpoint)
    network.check_model(opened)
    token_ids = read_text(text, checkpoint)[:max_tokens]

    plain = network.unquantized()
    limit = min(window, network.spec.max_position_embeddings)
    config = SchedulerConfig.from_build_config(
        BuildConfig(max_seq_len=network.spec.max_position_embeddings),
        plain.plugin,
        vocab_size=network.spec.vocab_size,
        num_pages=pages_for(max(limit, 1), plain.plugin.page_size),
    )
    say("loading")
    executor = make_float32_twin(plain, opened, num_pages=config.num_pages, num_threads=num_threads)
    try:
        description = executor.description
        latents = _collect_latents(executor, config, network, token_ids, window, say)
    finally:
        executor.close()

    dtype = network.row_layout.dtype
    layers = []
    for layer in range(network.num_layers):
        say(f"layer {layer + 1} of {network.num_layers}: searching")
        layers.append(choose_scale(latents[layer], dtype))
    stored = store_latent_scales(network, [item.latent_scale for item in layers], output=output, overwrite=overwrite)
    return CalibrationReport(
        __version__, str(directory), str(stored.path), dtype, description, len(latents[0]), window, tuple(layers)
    )


def _collect_latents(
    executor: Executor,
    config: SchedulerConfig,
    network: NetworkDirectory,
    token_ids: list[int],
    window: int,
    say: Callable[[str], None],
) -> list[Float32Array]:
    """Each layer's latents of the whole text: fp32 [tokens, kv_lora_rank]."""
    parts: list[list[Float32Array]] = [[] for _ in range(network.num_layers)]
    done = 0
    say(f"running {len(token_ids)} tokens")
    for tokens, run in run_text(executor, config, token_ids, window=window):
        for layer, part in enumerate(parts):
            rows = read_cached_rows(executor, layer, run.pages, len(tokens))
            part.append(rows[:, : network.spec.kv_lora_rank].copy())
        done += len(tokens)
        say(f"ran {done} of {len(token_ids)} tokens")
    latents = [np.concatenate(part) for part in parts]
    broken = [layer for layer, rows in enumerate(latents) if not np.isfinite(rows).all()]
    if broken:
        raise UserError(
            f"{network.path}: found latents that are not finite in layer {broken[0]}, expected finite ones. Check the "
            "checkpoint with: trtllm-mla validate"
        )
    return latents
