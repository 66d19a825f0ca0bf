"""Perplexity of a checkpoint with each type of latent cache, with and without calibration.

Every network is float32 and runs in ONNX Runtime; only the cache differs. The calibration never sees the text whose
perplexity is measured. Besides the checkpoint as it is, the same function is measured with latents 2^-10 as large:
``kv_a_layernorm`` is divided by 1024 and ``kv_b_proj`` multiplied, both exactly, so that nothing but a quantised cache
can tell the two apart. Prints a table; exit status 1 if a perplexity is above its bound.

    tiny=examples/tiny-mla
    python bench/cache_perplexity.py $tiny --text $tiny/held_out.txt --calibration-text examples/calibration.txt
"""

from __future__ import annotations

import argparse
import math
import shutil
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import numpy.typing as npt
from rich import box
from rich.console import Console
from rich.table import Table
from safetensors.torch import load_file, save_file

from trtllm_mla.cache_rows import CacheDType
from trtllm_mla.calibration.calibrate import calibrate
from trtllm_mla.checkpoint.files import Checkpoint
from trtllm_mla.checkpoint.tokenizer import read_text
from trtllm_mla.config import BuildConfig, MlaPluginConfig
from trtllm_mla.dtypes import DType
from trtllm_mla.errors import UserError
from trtllm_mla.files import atomic_file, write_json
from trtllm_mla.network.directory import NetworkDirectory, convert
from trtllm_mla.runtime.executors.factory import make_executor
from trtllm_mla.runtime.generation import run_text
from trtllm_mla.runtime.pages import pages_for
from trtllm_mla.runtime.scheduler import SchedulerConfig
from trtllm_mla.validation.perplexity import negative_log_likelihoods

PLAIN, QUANTIZED = CacheDType.BF16, (CacheDType.FP8, CacheDType.NVFP4)
# Largest relative increase over bf16.
BOUNDS = {CacheDType.FP8: 0.005, CacheDType.NVFP4: 0.03}
SMALL = 2.0**-10


@dataclass(frozen=True)
class Measurement:
    """Perplexity with one cache.

    Attributes:
        latent_size: What the checkpoint's latents were multiplied by.
        kv_cache_dtype: Type of the cache.
        row_bytes: Bytes of a cached token in a layer.
        calibrated: Whether the outer scales were calibrated; otherwise they are 1.
        latent_scales: The outer scale of each layer.
        perplexity: Perplexity of the text.
        increase: Relative increase over bf16, with latents of the same size.
        standard_error: Of the increase, over the text's tokens.
    """

    latent_size: float
    kv_cache_dtype: CacheDType
    row_bytes: int
    calibrated: bool
    latent_scales: tuple[float, ...]
    perplexity: float
    increase: float
    standard_error: float

    @property
    def bound(self) -> float | None:
        """Largest increase that passes. Latents that were made small owe nothing until they are calibrated."""
        return BOUNDS.get(self.kv_cache_dtype) if self.calibrated or self.latent_size == 1 else None

    @property
    def passed(self) -> bool:
        """Whether the increase is within its bound, if there is one."""
        return self.bound is None or self.increase <= self.bound


def main() -> int:
    """Measures, prints a table, and returns the exit status."""
    arguments = parse_arguments()
    try:
        measurements = list(measure_all(arguments))
    except UserError as error:
        print(f"Error: {error}", file=sys.stderr)
        return 2
    Console().print(make_table(measurements))
    if arguments.json is not None:
        write_json(arguments.json, [asdict(item) for item in measurements])
    if arguments.plot is not None:
        draw(measurements, arguments.plot)
    return 0 if all(item.passed for item in measurements) else 1


def parse_arguments() -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path, help="Hugging Face checkpoint directory")
    parser.add_argument("--text", type=Path, required=True, help="text whose perplexity is measured")
    parser.add_argument("--calibration-text", type=Path, required=True, help="another text, for calibration")
    parser.add_argument("--window", type=int, default=256, help="tokens of a window of the text")
    parser.add_argument("--max-tokens", type=int, help="tokens of the text to measure (default: all)")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", type=Path, help="also write all numbers to this file")
    parser.add_argument("--plot", type=Path, help="also draw the perplexities (.svg, .png)")
    return parser.parse_args()


def measure_all(arguments: argparse.Namespace) -> Iterator[Measurement]:
    """Measures every cache, with the latents as they are and made small."""
    token_ids = read_text(arguments.text, arguments.checkpoint)[: arguments.max_tokens]
    with TemporaryDirectory() as scratch:
        for latent_size in (1.0, SMALL):
            checkpoint = Path(scratch) / f"checkpoint-{latent_size:g}"
            resize_latents(arguments.checkpoint, checkpoint, latent_size)
            baseline = None
            for cache, calibrated in cases():
                path = Path(scratch) / "network"
                plugin = MlaPluginConfig(kv_cache_dtype=cache.value)
                network = convert(checkpoint, path, plugin=plugin, dtype=DType.FLOAT32, overwrite=True)
                if calibrated:
                    calibrate(path, checkpoint, arguments.calibration_text, num_threads=arguments.threads)
                    network = NetworkDirectory.load(path)
                losses = token_losses(network, checkpoint, token_ids, arguments.window, arguments.threads)
                baseline = losses if baseline is None else baseline
                difference = losses - baseline
                ratio = math.exp(difference.mean())
                yield Measurement(
                    latent_size,
                    cache,
                    network.row_layout.row_bytes,
                    calibrated,
                    network.latent_scales,
                    math.exp(losses.mean()),
                    ratio - 1,
                    ratio * float(difference.std()) / math.sqrt(len(losses)),
                )


def cases() -> list[tuple[CacheDType, bool]]:
    """Each cache, and whether it is calibrated; the baseline comes first."""
    return [(PLAIN, False), *((cache, calibrated) for cache in QUANTIZED for calibrated in (False, True))]


def resize_latents(checkpoint: Path, output: Path, factor: float) -> None:
    """Writes a checkpoint that computes the same with latents ``factor`` times as large, a power of two."""
    shutil.copytree(checkpoint, output, ignore=shutil.ignore_patterns("*.safetensors"))
    for file in checkpoint.glob("*.safetensors"):
        tensors = load_file(file)
        for name, tensor in tensors.items():
            if name.endswith("kv_a_layernorm.weight"):
                tensors[name] = tensor * factor
            if name.endswith("kv_b_proj.weight"):
                tensors[name] = tensor / factor
        save_file(tensors, output / file.name, metadata={"format": "pt"})


def token_losses(
    network: NetworkDirectory, checkpoint: Path, token_ids: list[int], window: int, num_threads: int
) -> npt.NDArray[np.float64]:
    """Negative log-likelihood of each token of a text in ONNX Runtime."""
    build = BuildConfig(max_seq_len=network.spec.max_position_embeddings)
    num_pages = pages_for(window, network.plugin.page_size)
    config = SchedulerConfig.from_build_config(
        build, network.plugin, vocab_size=network.spec.vocab_size, num_pages=num_pages
    )
    executor = make_executor(
        "onnxruntime", network, Checkpoint.open(checkpoint), num_pages=num_pages, num_threads=num_threads
    )
    try:
        runs = run_text(executor, config, token_ids, window=window)
        return np.concatenate([negative_log_likelihoods(run.logits[:-1], tokens[1:]) for tokens, run in runs])
    finally:
        executor.close()


def make_table(measurements: list[Measurement]) -> Table:
    """A row for each measurement."""
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    for heading in ("latents", "cache", "calibrated"):
        table.add_column(heading, no_wrap=True)
    for heading in ("bytes", "perplexity", "over bf16", "±", "bound"):
        table.add_column(heading, no_wrap=True, justify="right")
    for item in measurements:
        quantized = item.kv_cache_dtype.is_quantized
        table.add_row(
            size_name(item.latent_size),
            item.kv_cache_dtype,
            ("yes" if item.calibrated else "no") if quantized else "",
            str(item.row_bytes),
            f"{item.perplexity:#.5g}",
            percent(item.increase) if quantized else "",
            percent(item.standard_error) if quantized else "",
            "" if item.bound is None else f"{'' if item.passed else 'FAILED '}<= {item.bound:.1%}",
        )
    return table


def percent(value: float) -> str:
    """A share with two digits behind the point, unless it is large."""
    return f"{value:.2%}" if abs(value) < 1 else f"{value:.0%}"


def size_name(latent_size: float) -> str:
    """How the table and the plot call latents of a size."""
    return "as trained" if latent_size == 1 else f"x 2^{math.log2(latent_size):g}"


def draw(measurements: list[Measurement], path: Path) -> None:
    """Draws the increase over bf16 of each measurement and its bound: one panel for each size of the latents."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    sizes = list(dict.fromkeys(item.latent_size for item in measurements))
    with mpl.rc_context({"svg.hashsalt": "cache_perplexity"}):  # the same numbers give the same file
        figure = Figure(figsize=(8, 3.6), layout="constrained")
        panels = figure.subplots(1, len(sizes), sharey=True)
        for axes, latent_size in zip(panels, sizes, strict=True):
            for calibrated, offset, label in ((False, -0.2, "not calibrated"), (True, 0.2, "calibrated")):
                items = [
                    item
                    for cache in QUANTIZED
                    for item in measurements
                    if (item.latent_size, item.kv_cache_dtype, item.calibrated) == (latent_size, cache, calibrated)
                ]
                bars = axes.bar(
                    [index + offset for index in range(len(items))],
                    [item.increase * 100 for item in items],
                    0.38,
                    yerr=[item.standard_error * 100 for item in items],
                    capsize=3,
                    label=label,
                )
                axes.bar_label(bars, [percent(item.increase) for item in items], fontsize="small", padding=2)
            for index, cache in enumerate(QUANTIZED):
                bound = BOUNDS[cache] * 100
                axes.hlines(bound, index - 0.4, index + 0.4, "black", "dashed", label=None if index else "bound")
            axes.axhline(0, color="black", linewidth=0.8)
            axes.set_xticks(range(len(QUANTIZED)), [str(cache) for cache in QUANTIZED])
            axes.set_yscale("symlog", linthresh=0.2)
            axes.set_title(f"latents {size_name(latent_size)}", fontsize="medium")
            axes.margins(y=0.15)
        panels[0].set_ylabel("perplexity over bf16, %")
        panels[0].legend(loc="upper left", fontsize="small")
        with atomic_file(path) as temporary:
            kind = path.suffix.removeprefix(".")
            figure.savefig(temporary, format=kind, metadata={"Date": None} if kind == "svg" else None, dpi=150)


if __name__ == "__main__":
    sys.exit(main())
