"""Which limits apply to a directory that is about to be run."""

from __future__ import annotations

from pathlib import Path

from trtllm_mla.config import BuildConfig, load_config
from trtllm_mla.engine.directory import EngineDirectory
from trtllm_mla.errors import UserError
from trtllm_mla.network.directory import NetworkDirectory


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
