"""What a benchmark measures, and the blocks of its report that say so."""

from __future__ import annotations

import hashlib
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Self

from trtllm_mla._version import __version__
from trtllm_mla.benchmark.machine import Machine
from trtllm_mla.cache_rows import CacheDType
from trtllm_mla.checkpoint.files import Checkpoint
from trtllm_mla.checkpoint.footprint import CacheFootprint, cache_footprint
from trtllm_mla.checkpoint.spec import ModelSpec
from trtllm_mla.config import BuildConfig
from trtllm_mla.dtypes import DType
from trtllm_mla.engine.directory import ENGINE_NAME, KERNELS_NAME
from trtllm_mla.engine.kernel_store import MANIFEST
from trtllm_mla.errors import UserError
from trtllm_mla.network.directory import ONNX_NAME, NetworkDirectory
from trtllm_mla.runtime.executors.base import Executor
from trtllm_mla.runtime.executors.decode_graphs import GraphStatistics
from trtllm_mla.runtime.scheduler import SchedulerConfig, SchedulerStatistics

RESULT_FORMAT = 1
_GIB = 1 << 30


@dataclass(frozen=True)
class Subject:
    """What is measured, for the report.

    Attributes:
        model: Name of the model, for example its directory's.
        model_path: Checkpoint that the weights come from.
        engine_dir: Network or engine directory.
        sha256: Hash of its ``network.onnx`` or ``rank0.engine``.
        spec: The model, with the layers that run.
        kernels_sha256: Hash of an engine's ``kernels/manifest.json``, which holds the hash of every kernel; None where
            there are none.
    """

    model: str
    model_path: str
    engine_dir: str
    sha256: str
    spec: ModelSpec
    kernels_sha256: str | None = None

    @classmethod
    def of(cls, network: NetworkDirectory, checkpoint: Path) -> Self:
        """Describes a network or an engine with the weights of a checkpoint."""
        engine, manifest = network.path / ENGINE_NAME, network.path / KERNELS_NAME / MANIFEST
        return cls(
            model=checkpoint.resolve().name,
            model_path=str(checkpoint),
            engine_dir=str(network.path),
            sha256=_sha256(engine if engine.is_file() else network.path / ONNX_NAME),
            spec=replace(network.spec, num_hidden_layers=network.num_layers),
            kernels_sha256=_sha256(manifest) if manifest.is_file() else None,
        )


@dataclass(frozen=True)
class ExecutorInfo:
    """What ran it: facts of an executor that outlive it.

    Attributes:
        name: Name on the command line.
        description: What ran.
        dtype: Type of the network that ran.
        cache_dtype: Type of the latent cache as it lay in memory.
        cuda_graphs: How decode steps were run so far, warm-up included; None where no CUDA graphs were used.
    """

    name: str
    description: str
    dtype: DType
    cache_dtype: CacheDType
    cuda_graphs: GraphStatistics | None = None

    @classmethod
    def of(cls, executor: Executor) -> Self:
        """Describes an executor."""
        # Those that compute on the CPU have none.
        cuda_graphs: GraphStatistics | None = getattr(executor, "graph_statistics", None)
        return cls(executor.name, executor.description, executor.dtype, executor.cache_dtype, cuda_graphs)

    def footprint(self, spec: ModelSpec) -> CacheFootprint:
        """Bytes of a cached token."""
        return cache_footprint(spec, self.cache_dtype)


def open_model(directory: Path, checkpoint: Path, build: BuildConfig) -> tuple[NetworkDirectory, Checkpoint]:
    """Opens what is measured.

    Args:
        directory: A network or an engine directory.
        checkpoint: A Hugging Face directory with the weights.
        build: Limits, with the settings that override the network's.

    Raises:
        UserError: One of them is unusable.
    """
    network = NetworkDirectory.load(directory).configured(build.mla_plugin)
    opened = Checkpoint.open(checkpoint)
    if not opened.has_weights:
        raise UserError(f"{checkpoint}: found no weights, expected a checkpoint with safetensors to bind.")
    return network, opened


def report_head(
    subject: Subject, executor: ExecutorInfo, config: SchedulerConfig, machine: Machine, *, issue_rate: float | None
) -> dict[str, Any]:
    """The blocks ``engine``, ``machine`` and ``world_info``, with trtllm-bench's keys.

    Args:
        subject: What was measured.
        executor: What ran it.
        config: Limits that it ran under.
        machine: What it ran on.
        issue_rate: Requests that arrived per second; None where all arrived at once.
    """
    return {
        "engine": {
            "model": subject.model,
            "model_path": subject.model_path,
            "engine_dir": subject.engine_dir,
            "version": __version__,
            "backend": executor.name,
            "dtype": str(executor.dtype),
            "kv_cache_dtype": str(executor.cache_dtype),
            "quantization": None,
            "max_input_length": config.max_input_len,
            "max_sequence_length": config.max_seq_len,
        },
        "machine": {"name": machine.name, "memory.total": machine.memory_bytes / _GIB, "clocks.mem": None},
        "world_info": {
            "tp_size": 1,
            "pp_size": 1,
            "ep_size": 1,
            "world_size": 1,
            "max_batch_size": config.max_batch_size,
            "max_num_tokens": config.max_num_tokens,
            "scheduling_policy": config.policy.upper(),
            "kv_cache_percentage": None,
            "issue_rate": issue_rate,
        },
    }


def report_identity(
    kind: str, subject: Subject, executor: ExecutorInfo, config: SchedulerConfig, machine: Machine, timer: str
) -> dict[str, Any]:
    """The part of the block ``trtllm_mla`` that says what was measured, on what, and what the clock encloses."""
    footprint = executor.footprint(subject.spec)
    return {
        "format": RESULT_FORMAT,
        "kind": kind,
        "executor": executor.description,
        "cuda_graphs": None if executor.cuda_graphs is None else asdict(executor.cuda_graphs),
        "timer": timer,
        "sha256": subject.sha256,
        "kernels_sha256": subject.kernels_sha256,
        "versions": {"trtllm_mla": __version__, "python": machine.python, **machine.packages},
        "num_layers": subject.spec.num_hidden_layers,
        "page_size": config.page_size,
        "num_pages": config.num_pages,
        "enable_block_reuse": config.enable_block_reuse,
        "enable_matrix_absorption": config.enable_matrix_absorption,
        "prefill_absorption_threshold": config.prefill_absorption_threshold,
        "cache_bytes_per_token": asdict(footprint),
        "cache_bytes_pool": config.num_pages * config.page_size * footprint.latent,
        "machine": asdict(machine),
    }


def counts_json(counts: SchedulerStatistics) -> dict[str, Any]:
    """The part of the block ``trtllm_mla`` that says what the scheduler did."""
    return {
        "pages_peak": counts.peak_pages_in_use,
        "num_preemptions": counts.num_preemptions,
        "prompt_tokens": counts.num_prompt_tokens,
        "reused_tokens": counts.num_reused_tokens,
        "chunks": {
            "context": counts.num_context_chunks,
            "context_tokens": counts.num_context_tokens,
            "absorbed": counts.num_absorbed_chunks,
            "absorbed_tokens": counts.num_absorbed_tokens,
            "decodes": counts.num_decodes,
        },
    }


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
