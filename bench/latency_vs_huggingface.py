"""Latency of a checkpoint through this package, beside transformers' own generation.

Both run in this process on this machine's CPU, in float32, with the same weights, lengths and threads, on random
prompts of the same seed. The checkpoint is converted to a temporary network directory first. transformers is timed
twice: ``generate``, with a clock as its stopping criterion, and the bare forward passes that it makes.

    python bench/latency_vs_huggingface.py examples/tiny-mla --input-len 128 --output-len 64 --batch-size 4
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
import transformers
from rich.console import Console
from rich.table import Table

from trtllm_mla.benchmark.huggingface import TokenTimer, load_model, time_forward, time_generate
from trtllm_mla.benchmark.latency import LatencyOptions, LatencyReport, bench_latency
from trtllm_mla.benchmark.machine import Machine
from trtllm_mla.config import BuildConfig, MlaPluginConfig
from trtllm_mla.dtypes import DType
from trtllm_mla.errors import UserError
from trtllm_mla.files import write_json
from trtllm_mla.network.directory import convert


def main() -> int:
    """Measures, prints a table, and returns the exit status."""
    arguments = parse_arguments()
    torch.set_num_threads(arguments.threads)
    options = LatencyOptions(
        arguments.input_len,
        arguments.output_len,
        arguments.batch_size,
        arguments.warmup,
        arguments.iterations,
        arguments.seed,
    )
    console = Console()
    try:
        ours = {name: measure_executor(arguments, options, name) for name in arguments.executors.split(",")}
    except UserError as error:
        print(f"Error: {error}", file=sys.stderr)
        return 2
    theirs = {}
    for attention in arguments.attention.split(","):
        model = load_model(arguments.checkpoint, attention)
        theirs[f"generate, {attention}"] = measure_transformers(model, options, time_generate)
        theirs[f"forward passes, {attention}"] = measure_transformers(model, options, time_forward)
    console.print(make_table(options, ours, theirs))
    machine = Machine.here()
    console.print(
        f"{machine.name}, {arguments.threads} threads; float32; medians over {options.iterations} batches after "
        f"{options.warmup} of warm-up; Python {machine.python}, torch {torch.__version__}, transformers "
        f"{transformers.__version__}",
        highlight=False,
    )
    if arguments.json is not None:
        values = {"trtllm_mla": {name: report.to_json() for name, report in ours.items()}, "transformers": theirs}
        write_json(arguments.json, values)
    return 0


def parse_arguments() -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path, help="Hugging Face checkpoint directory")
    parser.add_argument("--input-len", type=int, default=128)
    parser.add_argument("--output-len", type=int, default=64)
    parser.add_argument("--batch-size", type=int, default=1)
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--iterations", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1, help="threads of either side")
    parser.add_argument("--executors", default="onnxruntime", help="comma-separated executors of this package")
    parser.add_argument("--attention", default="eager,sdpa", help="comma-separated attentions of transformers")
    parser.add_argument("--json", type=Path, help="also write all numbers to this file")
    return parser.parse_args()


def measure_executor(arguments: argparse.Namespace, options: LatencyOptions, executor: str) -> LatencyReport:
    """Converts the checkpoint and measures an executor on it."""
    with TemporaryDirectory() as directory:
        network = convert(
            arguments.checkpoint, Path(directory) / "network", plugin=MlaPluginConfig(), dtype=DType.FLOAT32
        )
        length = options.input_len + options.output_len
        build = BuildConfig(
            max_batch_size=options.batch_size,
            max_num_tokens=max(options.batch_size * options.input_len, 1),
            max_seq_len=max(length, 2),
            max_context_kv_tokens=options.batch_size * length,
        )
        return bench_latency(
            network.path, arguments.checkpoint, executor, options, build=build, num_threads=arguments.threads
        )


def measure_transformers(model: Any, options: LatencyOptions, timer: TokenTimer) -> dict[str, list[float]]:
    """Milliseconds of each batch's prefill and of each decode step, on prompts of the seed."""
    generator = np.random.default_rng(options.seed)
    shape = (options.batch_size, options.input_len)
    prefill, decode = [], []
    for index in range(-options.warmup, options.iterations):
        input_ids = torch.from_numpy(generator.integers(model.config.vocab_size, size=shape))
        steps = np.diff(timer(model, input_ids, options.output_len).times) * 1e3
        if index >= 0:
            prefill.append(float(steps[0]))
            decode.extend(steps[1:].tolist())
    return {"prefill_ms": prefill, "decode_step_ms": decode}


def make_table(
    options: LatencyOptions, ours: dict[str, LatencyReport], theirs: dict[str, dict[str, list[float]]]
) -> Table:
    """Medians of both sides."""
    lengths = f"{options.batch_size} x {options.input_len} prompt tokens, {options.output_len} new ones each"
    table = Table(title=f"{lengths}: medians, ms", title_justify="left")
    table.add_column("", no_wrap=True)
    for heading in ("prefill", "decode step", "new tokens / s", "batch, from start to end"):
        table.add_column(heading, justify="right")
    rows = [
        (f"trtllm_mla, {name}", report.prefill.latency_ms.median, report.decode.latency_ms.median)
        for name, report in ours.items()
    ]
    rows += [
        (f"transformers, {name}", median(values["prefill_ms"]), median(values["decode_step_ms"]))
        for name, values in theirs.items()
    ]
    for label, prefill, step in rows:
        total = prefill + step * (options.output_len - 1)
        rate = options.batch_size * options.output_len / total * 1e3
        table.add_row(label, f"{prefill:.2f}", f"{step:.3f}", f"{rate:.0f}", f"{total:.1f}")
    return table


if __name__ == "__main__":
    sys.exit(main())
