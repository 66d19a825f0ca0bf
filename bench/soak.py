"""Random load for a long time: whether tokens stay right, pages come back and memory stays flat.

A checkpoint is converted to a float32 network in a temporary directory and served by ``LLM`` on ONNX Runtime. Clients
come at random, ask for one of a fixed set of prompts, stream the answer or wait for it, and some leave early. The pool
is too small for all of them, so that requests are preempted, and prompts begin alike, so that pages are shared. Each
whole answer is compared with the one that the prompt got when it was served alone.

    python bench/soak.py examples/tiny-mla --minutes 20

Exit status 1 means that an answer was wrong, pages were lost, or memory grew: the median of the last tenth of its
samples lies more than ``--allowed-growth`` above the median of the second tenth.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Final

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from trtllm_mla.config import BuildConfig, MlaPluginConfig
from trtllm_mla.dtypes import DType
from trtllm_mla.errors import UserError
from trtllm_mla.files import write_json
from trtllm_mla.network.directory import convert
from trtllm_mla.runtime.llm import LLM
from trtllm_mla.runtime.scheduler import SchedulingPolicy

LIMITS = BuildConfig(max_batch_size=8, max_num_tokens=96, max_seq_len=256, max_context_kv_tokens=512)
PAGE_SIZE: Final = 16
CACHE_TOKENS = 512
NUM_PROMPTS = 60
NUM_CLIENTS = 24


@dataclass(frozen=True)
class Prompt:
    """A prompt and the answer it gets alone."""

    token_ids: list[int]
    max_new_tokens: int
    answer: list[int]


@dataclass
class Outcome:
    """What the load came to."""

    counts: Counter[str] = field(default_factory=Counter)
    memory_mib: list[float] = field(default_factory=list)


def main() -> int:
    """Runs the load, prints what it came to, and returns the exit status."""
    arguments = parse_arguments()
    console = Console()
    with TemporaryDirectory() as directory:
        network, limits = Path(directory) / "network", Path(directory) / "limits.json"
        try:
            plugin = MlaPluginConfig(page_size=PAGE_SIZE, prefill_absorption_threshold=24)
            spec = convert(arguments.checkpoint, network, plugin=plugin, dtype=DType.FLOAT32).spec
            write_json(limits, LIMITS.model_dump(mode="json", exclude_unset=True))
            prompts = answer_alone(arguments, network, limits, spec.vocab_size)
            llm = make_llm(arguments, network, limits, enable_block_reuse=True)
        except UserError as error:
            print(f"Error: {error}", file=sys.stderr)
            return 2
        with llm:
            outcome = asyncio.run(serve(llm, prompts, arguments))
            statistics, whole = llm.statistics, llm.num_free_pages == llm.num_pages
    growth = memory_growth(outcome.memory_mib)
    flat = growth <= arguments.allowed_growth
    counts = outcome.counts
    console.print(
        f"{arguments.minutes:g} minutes, {counts['asked']} requests ({counts['cancelled']} left early, "
        f"{statistics.num_preemptions} preemptions, {statistics.num_reused_tokens} of {statistics.num_prompt_tokens} "
        f"prompt tokens reused)\nanswers: {counts['right']} right, {counts['wrong']} wrong\npages: "
        f"{'all came back' if whole else 'LOST'}\nmemory: {outcome.memory_mib[0]:.1f} MiB at the start, "
        f"{outcome.memory_mib[-1]:.1f} at the end; median of the last tenth {growth:+.2f} MiB over that of the second",
        highlight=False,
    )
    if arguments.json is not None:
        values = {"counts": dict(counts), "memory_mib": outcome.memory_mib, "growth_mib": growth, "pages_whole": whole}
        write_json(arguments.json, values)
    return 0 if flat and whole and not counts["wrong"] and counts["right"] else 1


def parse_arguments() -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path, help="Hugging Face checkpoint directory")
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--allowed-growth", type=float, default=4.0, help="MiB")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1, help="threads of an operator")
    parser.add_argument("--json", type=Path, help="also write counts and memory samples to this file")
    return parser.parse_args()


def make_llm(arguments: argparse.Namespace, network: Path, limits: Path, *, enable_block_reuse: bool) -> LLM:
    """The network on ONNX Runtime, with a pool that is too small for all clients."""
    return LLM(
        network,
        arguments.checkpoint,
        config=limits,
        cache_tokens=CACHE_TOKENS,
        policy=SchedulingPolicy.MAX_UTILIZATION,
        enable_block_reuse=enable_block_reuse,
        num_threads=arguments.threads,
    )


def answer_alone(arguments: argparse.Namespace, network: Path, limits: Path, vocab_size: int) -> list[Prompt]:
    """Random prompts, many of which begin alike, each with the answer it gets when nothing else is served."""
    random = np.random.default_rng(arguments.seed)
    common = random.integers(vocab_size, size=90).tolist()
    prompts = []
    with make_llm(arguments, network, limits, enable_block_reuse=False) as llm:
        for _ in range(NUM_PROMPTS):
            token_ids = common[: int(random.integers(0, 90))] + random.integers(vocab_size, size=30).tolist()
            max_new_tokens = int(random.integers(1, 100))
            output = llm.generate([token_ids], max_new_tokens=max_new_tokens, ignore_eos=True)[0]
            prompts.append(Prompt(token_ids, max_new_tokens, output.token_ids))
    return prompts


async def serve(llm: LLM, prompts: list[Prompt], arguments: argparse.Namespace) -> Outcome:
    """Clients ask for prompts until the time is over; once a second the process's memory is read."""
    outcome = Outcome()
    end = time.monotonic() + arguments.minutes * 60
    clients = [
        asyncio.create_task(
            be_client(llm, prompts, end, np.random.default_rng([arguments.seed, number]), outcome.counts)
        )
        for number in range(NUM_CLIENTS)
    ]
    columns = (TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("serving", total=arguments.minutes * 60)
        while time.monotonic() < end:
            outcome.memory_mib.append(private_mib())
            description = f"{outcome.counts['asked']} requests, {outcome.memory_mib[-1]:.0f} MiB"
            progress.update(task, completed=arguments.minutes * 60 - (end - time.monotonic()), description=description)
            await asyncio.sleep(min(1.0, max(end - time.monotonic(), 0)))
    await asyncio.gather(*clients)
    outcome.memory_mib.append(private_mib())
    return outcome


async def be_client(
    llm: LLM, prompts: list[Prompt], end: float, random: np.random.Generator, counts: Counter[str]
) -> None:
    """Asks for one prompt after the other, with pauses, and leaves some answers early."""
    while time.monotonic() < end:
        prompt = prompts[random.integers(len(prompts))]
        leaves_after = int(random.integers(prompt.max_new_tokens)) if random.random() < 0.2 else None
        counts["asked"] += 1
        generation = llm.generate_async(prompt.token_ids, max_new_tokens=prompt.max_new_tokens, ignore_eos=True)
        received = []
        if leaves_after is not None or random.random() < 0.5:
            async for delta in generation:
                if delta.token_id is not None:
                    received.append(delta.token_id)
                if leaves_after is not None and len(received) >= leaves_after:
                    generation.cancel()
        output = await generation
        if received and received != output.token_ids:
            counts["wrong"] += 1
        elif output.finish_reason == "cancelled":
            counts["cancelled"] += 1
            counts["wrong"] += output.token_ids != prompt.answer[: len(output.token_ids)]
        else:
            counts["right" if output.token_ids == prompt.answer else "wrong"] += 1
        await asyncio.sleep(random.exponential(0.05))


def private_mib() -> float:
    """Memory of this process that no file backs. The system takes back what files back as it likes."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon:")) / 1024


def memory_growth(samples: list[float]) -> float:
    """Median of the last tenth of the samples over that of the second tenth; the first is warm-up."""
    tenth = max(len(samples) // 10, 1)
    return median(samples[-tenth:]) - median(samples[tenth : 2 * tenth])


if __name__ == "__main__":
    sys.exit(main())
