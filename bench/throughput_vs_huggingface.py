"""Throughput of a list of requests through this package, beside transformers' ``generate``.

Both run in this process on this machine's CPU, in float32, with the same weights, prompts and threads. Requests have
mixed lengths. This package serves them with in-flight batching, so many at once and one at a time; ``generate`` takes
them one at a time, and all together as one batch padded to the longest, of which only the tokens asked for count. The
contestants take turns, in an order that is drawn anew for each iteration.

    python bench/throughput_vs_huggingface.py examples/tiny-mla
    python bench/throughput_vs_huggingface.py --random-model

``--random-model`` makes a checkpoint of 119 million random weights first: 12 dense layers of the DeepSeek-V3
architecture. With ``--check``, exit status 1 means that throughput at ``--concurrency`` is less than 3 times that of
``generate`` one at a time or not ahead of the padded batch, that one request decodes more slowly than with
``generate``, or that the scheduler takes more than 5 % of the time of a step.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
import transformers
from rich.console import Console
from rich.progress import track
from rich.table import Table

from trtllm_mla.benchmark.driver import Load, StepTotals, serve
from trtllm_mla.benchmark.huggingface import load_model, time_generate
from trtllm_mla.benchmark.machine import Machine
from trtllm_mla.checkpoint.files import Checkpoint
from trtllm_mla.config import BuildConfig, MlaPluginConfig
from trtllm_mla.dtypes import DType
from trtllm_mla.errors import UserError
from trtllm_mla.files import write_json
from trtllm_mla.network.directory import convert
from trtllm_mla.runtime.executors.factory import make_executor
from trtllm_mla.runtime.generation import GenerationSession
from trtllm_mla.runtime.limits import pool_pages
from trtllm_mla.runtime.request import Request
from trtllm_mla.runtime.scheduler import SchedulerConfig

LEAST_OVER_ONE_AT_A_TIME = 3.0
LARGEST_SCHEDULER_SHARE = 0.05


@dataclass(frozen=True)
class Run:
    """One contestant on all requests.

    Attributes:
        seconds: From start to end.
        output_ids: The new tokens of each request.
        decode_ms: Milliseconds between two tokens of a request that runs alone; empty where several run.
        steps: What steps took, where this package ran them.
    """

    seconds: float
    output_ids: list[list[int]]
    decode_ms: list[float]
    steps: StepTotals | None = None


def main() -> int:
    """Measures, prints a table, and returns the exit status."""
    arguments = parse_arguments()
    torch.set_num_threads(arguments.threads)
    with TemporaryDirectory() as directory:
        try:
            checkpoint = arguments.checkpoint or make_random_checkpoint(Path(directory) / "checkpoint")
            contestants, requests = make_contestants(arguments, checkpoint, Path(directory) / "network")
        except UserError as error:
            print(f"Error: {error}", file=sys.stderr)
            return 2
        runs: dict[str, list[Run]] = {name: [] for name in contestants}
        random = np.random.default_rng(arguments.seed)
        turns = [
            (iteration, str(name))
            for iteration in range(-1, arguments.iterations)  # the first is warm-up
            for name in random.permutation(list(contestants))
        ]
        for iteration, name in track(turns, description="measuring", console=Console(stderr=True), transient=True):
            run = contestants[name]()
            if iteration >= 0:
                runs[name].append(run)
    return report(arguments, requests, runs)


def parse_arguments() -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    model = parser.add_mutually_exclusive_group(required=True)
    model.add_argument("checkpoint", type=Path, nargs="?", help="Hugging Face checkpoint directory")
    model.add_argument("--random-model", action="store_true", help="make one of 119 million random weights")
    parser.add_argument("--num-requests", type=int, default=32)
    parser.add_argument("--concurrency", type=int, default=16, help="requests that this package serves at once")
    parser.add_argument("--input-len", type=int, nargs=2, default=(16, 128), metavar=("LEAST", "MOST"))
    parser.add_argument("--output-len", type=int, nargs=2, default=(8, 64), metavar=("LEAST", "MOST"))
    parser.add_argument("--iterations", type=int, default=3)
    parser.add_argument("--attention", default="sdpa", help="attention of transformers")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1, help="threads of either side")
    parser.add_argument("--check", action="store_true", help="exit with status 1 below the ratios named above")
    parser.add_argument("--json", type=Path, help="also write all numbers to this file")
    return parser.parse_args()


def make_random_checkpoint(path: Path) -> Path:
    """Saves a random model of 119 million weights."""
    torch.manual_seed(0)
    config = transformers.DeepseekV3Config(
        vocab_size=16000,
        hidden_size=768,
        intermediate_size=2560,
        num_hidden_layers=12,
        first_k_dense_replace=12,
        num_attention_heads=12,
        num_key_value_heads=12,
        q_lora_rank=384,
        kv_lora_rank=256,
        qk_nope_head_dim=64,
        qk_rope_head_dim=32,
        v_head_dim=64,
        n_group=1,
        topk_group=1,
        max_position_embeddings=4096,
        bos_token_id=None,
        eos_token_id=None,
    )
    transformers.utils.logging.disable_progress_bar()
    transformers.DeepseekV3ForCausalLM(config).save_pretrained(path)
    return path


def make_contestants(
    arguments: argparse.Namespace, checkpoint: Path, network_path: Path
) -> tuple[dict[str, Callable[[], Run]], list[Request]]:
    """Converts the checkpoint, draws the requests, and loads both sides."""
    plugin = MlaPluginConfig(page_size=32)
    network = convert(checkpoint, network_path, plugin=plugin, dtype=DType.FLOAT32)
    random = np.random.default_rng(arguments.seed)
    vocab_size = network.spec.vocab_size
    requests = [
        Request(
            random.integers(
                vocab_size, size=random.integers(arguments.input_len[0], arguments.input_len[1] + 1)
            ).tolist(),
            int(random.integers(arguments.output_len[0], arguments.output_len[1] + 1)),
        )
        for _ in range(arguments.num_requests)
    ]
    limits = BuildConfig(
        max_batch_size=arguments.concurrency,
        max_num_tokens=max(512, arguments.concurrency),
        max_seq_len=arguments.input_len[1] + arguments.output_len[1],
        max_context_kv_tokens=4096,
    )
    num_pages = pool_pages(network, limits, None)
    executor = make_executor(
        "onnxruntime", network, Checkpoint.open(checkpoint), num_pages=num_pages, num_threads=arguments.threads
    )
    # No prompt is served twice by one session, and none finds another's pages.
    config = SchedulerConfig.from_build_config(
        limits, network.plugin, vocab_size=vocab_size, num_pages=num_pages, enable_block_reuse=False
    )
    model = load_model(checkpoint, arguments.attention, num_threads=arguments.threads)
    at_once = f"trtllm_mla, {arguments.concurrency} at once"
    contestants: dict[str, Callable[[], Run]] = {
        at_once: lambda: run_session(GenerationSession(executor, config), requests, arguments.concurrency),
        "trtllm_mla, one at a time": lambda: run_session(GenerationSession(executor, config), requests, 1),
        "generate, one at a time": lambda: run_generate(model, requests),
        "generate, one padded batch": lambda: run_padded(model, requests),
    }
    return contestants, requests


def run_session(session: GenerationSession, requests: list[Request], concurrency: int) -> Run:
    """Serves the requests with in-flight batching."""
    output_ids: list[list[int]] = [[] for _ in requests]
    listening = [
        Request(item.prompt_ids, item.max_new_tokens, on_token=tokens.append)
        for item, tokens in zip(requests, output_ids, strict=True)
    ]
    begin = time.perf_counter()
    outcome = serve(session, listening, Load(concurrency=concurrency))
    seconds = time.perf_counter() - begin
    alone = [record.token_times for record in outcome.records] if concurrency == 1 else []
    return Run(seconds, output_ids, decode_intervals(alone), outcome.steps)


def run_generate(model: Any, requests: list[Request]) -> Run:
    """``generate`` on one request after the other."""
    output_ids, times = [], []
    begin = time.perf_counter()
    for item in requests:
        timed = time_generate(model, torch.tensor([list(item.prompt_ids)]), item.max_new_tokens)
        output_ids += timed.output_ids
        times.append(tuple(timed.times[1:]))
    return Run(time.perf_counter() - begin, output_ids, decode_intervals(times))


def run_padded(model: Any, requests: list[Request]) -> Run:
    """``generate`` on all requests together, padded on the left; the tokens that nobody asked for are cut off."""
    longest = max(len(item.prompt_ids) for item in requests)
    input_ids = torch.zeros(len(requests), longest, dtype=torch.int64)
    mask = torch.zeros_like(input_ids)
    for row, item in enumerate(requests):
        input_ids[row, longest - len(item.prompt_ids) :] = torch.tensor(list(item.prompt_ids))
        mask[row, longest - len(item.prompt_ids) :] = 1
    config = transformers.GenerationConfig(
        do_sample=False,
        max_new_tokens=max(item.max_new_tokens for item in requests),
        eos_token_id=None,
        pad_token_id=0,
    )
    begin = time.perf_counter()
    with torch.inference_mode():
        output = model.generate(input_ids, attention_mask=mask, generation_config=config)
    seconds = time.perf_counter() - begin
    rows = output[:, longest:].tolist()
    return Run(seconds, [row[: item.max_new_tokens] for row, item in zip(rows, requests, strict=True)], [])


def decode_intervals(times: list[tuple[float, ...]]) -> list[float]:
    """Milliseconds between the tokens of each request."""
    return [float(gap) * 1e3 for moments in times for gap in np.diff(moments)]


def report(arguments: argparse.Namespace, requests: list[Request], runs: dict[str, list[Run]]) -> int:
    """Prints the table, and returns the exit status."""
    console = Console()
    asked = sum(item.max_new_tokens for item in requests)
    rates = {name: [asked / run.seconds for run in items] for name, items in runs.items()}
    at_once, ours_alone, theirs_alone, padded = runs
    table = Table(
        title_justify="left", title=f"{len(requests)} requests, {asked} new tokens", box=None, pad_edge=False
    )
    for heading in ("", "tokens / s", "range", "ratio", "decode, ms", "equal"):
        table.add_column(heading, justify="right" if heading else "left", no_wrap=True)
    expected = runs[theirs_alone][0].output_ids
    for name, items in runs.items():
        decode = [step for run in items for step in run.decode_ms]
        table.add_row(
            name,
            f"{median(rates[name]):.0f}",
            f"{min(rates[name]):.0f}-{max(rates[name]):.0f}",
            f"{median(rates[name]) / median(rates[theirs_alone]):.2f}",
            f"{median(decode):.3f}" if decode else "",
            f"{equal_tokens(items[0].output_ids, expected) / asked:.1%}",
        )
    console.print(table)
    console.print(
        "decode: between two tokens of a request that runs alone; equal: tokens as generate's, one at a time, up to "
        "the first difference",
        highlight=False,
    )
    steps = [run.steps for run in runs[at_once] if run.steps is not None]
    scheduler = sum(item.scheduler_seconds for item in steps)
    total = scheduler + sum(item.host_seconds + item.executor_seconds for item in steps)
    console.print(
        f"{median(rates[at_once]) / median(rates[padded]):.2f} times the padded batch; the scheduler takes "
        f"{scheduler / total:.2%} of a step of up to {arguments.concurrency} requests "
        f"({total / sum(item.count for item in steps) * 1e3:.2f} ms)",
        highlight=False,
    )
    machine = Machine.here()
    console.print(
        f"{machine.name}, {arguments.threads} threads; float32; medians over {arguments.iterations} iterations; "
        f"Python {machine.python}, torch {torch.__version__}, transformers {transformers.__version__}, "
        f"{arguments.attention} attention",
        highlight=False,
    )
    checks = {
        "over_one_at_a_time": median(rates[at_once]) / median(rates[theirs_alone]) >= LEAST_OVER_ONE_AT_A_TIME,
        "over_the_padded_batch": median(rates[at_once]) > median(rates[padded]),
        "single_decode": median(runs[ours_alone][0].decode_ms) <= median(runs[theirs_alone][0].decode_ms),
        "scheduler": scheduler / total <= LARGEST_SCHEDULER_SHARE,
    }
    if arguments.json is not None:
        values = {"tokens_per_second": rates, "scheduler_share": scheduler / total, "checks": checks}
        write_json(arguments.json, values)
    failed = [name for name, passed in checks.items() if not passed]
    if arguments.check and failed:
        print(f"Failed: {', '.join(failed)}", file=sys.stderr)
        return 1
    return 0


def equal_tokens(found: list[list[int]], expected: list[list[int]]) -> int:
    """Tokens before the first difference, over all requests."""
    return sum(
        next((place for place, pair in enumerate(zip(*rows, strict=True)) if pair[0] != pair[1]), len(rows[0]))
        for rows in zip(found, expected, strict=True)
    )


if __name__ == "__main__":
    sys.exit(main())
