"""The engine directory: what ``build`` writes and the TensorRT executor reads.

```
config.json      version, pretrained_config, mla_plugin, build_config
network.onnx     the network, as converted
weights.json     source of each weight input
rank0.engine     the TensorRT engine
kernels/         cubins for each target and their manifest; none in a native engine
```
``build_config`` has TensorRT-LLM's keys where it has one for a value. What it has none for, and what a repetition of
the build needs, is under ``build_config.trtllm_mla``.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import Field, StringConstraints

from trtllm_mla.config import BackendName, BuildConfig, StrictModel, parse_config
from trtllm_mla.engine.kernel_store import KernelStore
from trtllm_mla.engine.operation import TargetTile
from trtllm_mla.errors import UserError
from trtllm_mla.files import read_table
from trtllm_mla.network.directory import CONFIG_NAME, MAX_CONFIG_BYTES, NetworkDirectory

ENGINE_NAME = "rank0.engine"
KERNELS_NAME = "kernels"
MAX_ENGINE_BYTES = 1 << 34

_Text = Annotated[str, Field(max_length=64)]
_Count = Annotated[int, Field(ge=0, strict=True)]
_Sha256 = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]


class TargetInfo(StrictModel):
    """How an engine's kernels were compiled for one target; the attributes are those of ``TargetTile``."""

    target: _Text
    tile_s: _Count
    num_stages: _Count


class EngineInfo(StrictModel):
    """How an engine was built: ``build_config.trtllm_mla`` in ``config.json``.

    Attributes:
        backend: Name of the TensorRT library.
        backend_version: Its version.
        native: The engine has no plugins: TensorRT runs the operations' function bodies.
        targets: GPU generations it was built for, each with its tile.
        triton_version: The Triton that compiled the kernels; None in a native engine.
        engine_bytes: Size of ``rank0.engine``.
        engine_sha256: Its digest.
        num_plugin_layers: MLA plugins in it.
        plugin_library_sha256: Digest of the compiled plugin library that it was built with; None with Python plugins.
        activation_bytes: Memory that TensorRT planned for intermediate values and workspaces, where it said so.
        build_seconds: Time that the build took.
        peak_memory_bytes: Most memory that the building process had, before it wrote the engine.
        build_config: The effective build config; building with it again repeats the build.
    """

    backend: BackendName
    backend_version: _Text
    native: bool
    targets: Annotated[tuple[TargetInfo, ...], Field(min_length=1, max_length=64)]
    triton_version: _Text | None
    engine_bytes: _Count
    engine_sha256: _Sha256
    num_plugin_layers: _Count
    plugin_library_sha256: _Sha256 | None = None
    activation_bytes: _Count | None = None
    build_seconds: Annotated[float, Field(ge=0)]
    peak_memory_bytes: _Count
    build_config: BuildConfig

    @property
    def tiles(self) -> tuple[TargetTile, ...]:
        """The tile of each target."""
        return tuple(TargetTile(item.target, item.tile_s, item.num_stages) for item in self.targets)


@dataclass(frozen=True)
class EngineDirectory:
    """An engine on disk.

    Attributes:
        path: The directory.
        network: The network it was built from, with the engine's plugin config.
        info: How it was built.
    """

    path: Path
    network: NetworkDirectory
    info: EngineInfo

    @property
    def config(self) -> BuildConfig:
        """The effective build config: the engine's limits and settings."""
        return self.info.build_config

    @staticmethod
    def is_engine(path: Path) -> bool:
        """Whether a directory holds an engine, and not just a network."""
        return (path / ENGINE_NAME).is_file()

    @classmethod
    def load(cls, path: Path) -> Self:
        """Reads an engine directory, but for the engine and its kernels.

        Raises:
            UserError: The directory or one of its files is missing, or not what ``build`` writes.
        """
        network = NetworkDirectory.load(path)
        if not cls.is_engine(path):
            raise UserError(
                f"{path}: found no {ENGINE_NAME}, expected an engine directory. Make one with: trtllm-mla build"
            )
        source = f"{path / CONFIG_NAME}: build_config.trtllm_mla"
        config = read_table(path / CONFIG_NAME, max_bytes=MAX_CONFIG_BYTES)
        build_config = config.get("build_config")
        if not isinstance(build_config, dict) or "trtllm_mla" not in build_config:
            raise UserError(f"{source}: missing; expected the config of an engine. Build the engine again.")
        return cls(path, network, parse_config(build_config["trtllm_mla"], EngineInfo, source=source))

    def read_engine(self) -> bytes:
        """The serialised engine.

        Raises:
            UserError: It is not the file that was built.
        """
        path = self.path / ENGINE_NAME
        size = path.stat().st_size
        if size != self.info.engine_bytes or size > MAX_ENGINE_BYTES:
            raise UserError(
                f"{path}: found {size} bytes, expected {self.info.engine_bytes} as in {CONFIG_NAME}. Build the engine "
                "again."
            )
        engine = path.read_bytes()
        digest = hashlib.sha256(engine).hexdigest()
        if digest != self.info.engine_sha256:
            raise UserError(
                f"{path}: found the SHA-256 digest {digest}, expected {self.info.engine_sha256} as in {CONFIG_NAME}. "
                "Build the engine again."
            )
        return engine

    def kernels(self) -> KernelStore:
        """The engine's kernels; see ``KernelStore.load``. A native engine has none."""
        return KernelStore.load(self.path / KERNELS_NAME)


def to_build_config(info: EngineInfo, *, dtype: str) -> dict[str, Any]:
    """``build_config`` of ``config.json``, in TensorRT-LLM's shape.

    Args:
        info: How the engine was built.
        dtype: The network's type.
    """
    config = info.build_config
    return {
        "max_input_len": config.effective_max_input_len,
        "max_seq_len": config.max_seq_len,
        "opt_batch_size": config.effective_opt_batch_size,
        "max_batch_size": config.max_batch_size,
        "max_beam_width": 1,
        "max_num_tokens": config.max_num_tokens,
        "opt_num_tokens": config.effective_opt_num_tokens,
        "kv_cache_type": "PAGED",
        "strongly_typed": True,
        "plugin_config": {
            "dtype": dtype,
            "paged_kv_cache": True,
            "remove_input_padding": True,
            "tokens_per_block": config.mla_plugin.page_size,
        },
        "trtllm_mla": info.model_dump(mode="json"),
    }
