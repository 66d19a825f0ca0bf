"""Which limits apply to a directory that is about to be run."""

from __future__ import annotations

import os
from pathlib import Path

from trtllm_mla.config import BuildConfig, load_config
from trtllm_mla.engine.directory import EngineDirectory
from trtllm_mla.errors import UserError
from trtllm_mla.network.directory import NetworkDirectory
from trtllm_mla.runtime.pages import pages_for

# Share of the machine's memory that pools take where nobody says how large they are to be.
_POOL_SHARE = 0.25


def find_limits(path: Path, config: Path | None) -> BuildConfig:
    """Finds the limits of steps and requests.

    Args:
        path: A network or an engine directory.
        config: A build config that the user named.

    Returns:
        The engine's; for a network the named config, or else defaults with the sequence length of the model.

    Raises:
        UserError: One of the files is unusable, or a config is named for an engine, which has its own.
    """
    if EngineDirectory.is_engine(path):
        if config is not None:
            raise UserError(
                f"--config {config}: found an engine directory, {path}, whose limits were set when it was built. "
                "Leave --config out, or name the network directory."
            )
        return EngineDirectory.load(path).config
    if config is not None:
        return load_config(config, BuildConfig)
    return BuildConfig(max_seq_len=NetworkDirectory.load(path).spec.max_position_embeddings)


def pool_pages(network: NetworkDirectory, limits: BuildConfig, cache_tokens: int | None) -> int:
    """Pages of a pool.

    Args:
        network: The network, with the page size that applies.
        limits: Limits of steps and requests.
        cache_tokens: Tokens that the pool is to hold; None takes what the limits can fill, or what a quarter of this
            machine's memory holds where that is less.

    Raises:
        UserError: ``cache_tokens`` is less than one.
    """
    page_size = network.plugin.page_size
    most = limits.max_batch_size * pages_for(limits.max_seq_len, page_size)
    if cache_tokens is not None:
        if cache_tokens < 1:
            raise UserError(f"cache_tokens: found {cache_tokens}, expected at least 1.")
        return min(pages_for(cache_tokens, page_size), most)
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    # ONNX Runtime holds a bf16 cache as float32.
    page_bytes = 2 * network.num_layers * page_size * network.row_layout.row_bytes
    return max(min(most, int(memory * _POOL_SHARE) // page_bytes), 1)
