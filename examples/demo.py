"""Takes the example checkpoint through every command, prints what they print, and ends in a summary table.

Run it with ``make demo``, or with the environment's Python after setting up:

    python examples/demo.py --output demo-output
"""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from trtllm_mla.cli.inspect import describe

ROOT = Path(__file__).resolve().parents[1]
CHECKPOINT = "examples/tiny-mla"
HELD_OUT = f"{CHECKPOINT}/held_out.txt"
PROMPT = "The import statement"


@dataclass(frozen=True)
class Stage:
    """One command of the demo.

    Attributes:
        name: Row of the summary.
        arguments: What follows ``trtllm-mla``.
        outcome: Makes the summary's text from the command's standard output.
    """

    name: str
    arguments: tuple[str, ...]
    outcome: Callable[[str], str]


def stages(output: Path) -> list[Stage]:
    """The commands, in order; each uses what those before it wrote."""
    network, engine, common = f"{output}/network", f"{output}/engine", ("--checkpoint", CHECKPOINT)
    on_onnxruntime, interpreted = output / "validation.json", output / "validation-interpreter.json"
    latency, throughput, page = output / "latency.json", output / "throughput.json", output / "report.html"
    dataset = f"{output}/dataset.jsonl"
    return [
        Stage("inspect", ("inspect", CHECKPOINT), lambda _: _cache()),
        Stage("convert", ("convert", CHECKPOINT, network, "--overwrite"), _after_colon),
        Stage(
            "build",
            ("build", network, engine, "--config", "build_configs/tiny_mla.json", "--overwrite"),
            _after_colon,
        ),
        Stage(
            "validate",
            ("validate", network, *common, "--text", HELD_OUT, "--json", f"{on_onnxruntime}"),
            lambda _: _validation(on_onnxruntime),
        ),
        Stage(
            "validate, plugin kernels",
            ("validate", engine, *common, "--executor", "interpreter", "--quick", "--json", f"{interpreted}"),
            lambda _: _validation(interpreted),
        ),
        Stage(
            "generate",
            (
                *("generate", engine, *common, "--prompt", PROMPT, "--max-new-tokens", "200"),
                *("--temperature", "0.7", "--top-p", "0.9", "--seed", "11"),
            ),
            lambda text: " ".join(text.split()),
        ),
        Stage(
            "bench latency",
            (
                *("bench", "latency", engine, *common, "--input-len", "128", "--output-len", "32"),
                *("--batch-size", "4", "--threads", "1", "--json", f"{latency}"),
            ),
            lambda _: _latency(latency),
        ),
        Stage(
            "bench prepare-dataset",
            (
                *("bench", "prepare-dataset", "token-norm-dist", "--output", dataset, "--checkpoint", CHECKPOINT),
                *("--input-mean", "128", "--input-stdev", "32", "--output-mean", "64", "--output-stdev", "16"),
                *("--num-requests", "200", "--shared-prefix", "64"),
            ),
            lambda _: f"{len((ROOT / dataset).read_text(encoding='utf-8').splitlines())} requests",
        ),
        Stage(
            "bench throughput",
            (
                *("bench", "throughput", engine, *common, "--dataset", dataset, "--concurrency", "16", "--streaming"),
                *("--threads", "1", "--json", f"{throughput}"),
            ),
            lambda _: _throughput(throughput),
        ),
        Stage(
            "report",
            ("report", f"{throughput}", f"{latency}", "--output", f"{page}"),
            lambda _: f"{page}, {(ROOT / page).stat().st_size / 1000:.0f} kB",
        ),
    ]


def main() -> int:
    """Runs the demo.

    Returns:
        0 if every command succeeded, else the status of the one that did not.
    """
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--output", type=Path, default=Path("demo-output"), help="directory to write to")
    console = Console()
    table = Table("command", "seconds", "outcome", title="Summary", title_justify="left")
    for stage in stages(parser.parse_args().output):
        console.print(f"\n[bold]$ trtllm-mla {shlex.join(stage.arguments)}[/]", soft_wrap=True, highlight=False)
        begin = time.perf_counter()
        result = _run(stage)
        seconds = time.perf_counter() - begin
        if result.returncode != 0:
            return result.returncode
        table.add_row(stage.name, f"{seconds:.1f}", stage.outcome(result.stdout))
    console.print()
    console.print(table)
    return 0


def _run(stage: Stage) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "trtllm_mla.cli.main", *stage.arguments]
    # The commands are this file's own.
    result = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=False)  # noqa: S603
    sys.stdout.write(result.stdout)
    sys.stdout.flush()
    return result


def _after_colon(text: str) -> str:
    return text.strip().split(": ", 1)[1]


def _cache() -> str:
    cache = describe(ROOT / CHECKPOINT, None)["cache_bytes_per_token"]
    return f"{cache['latent']:,} bytes of cache a token; multi-head attention {cache['multi_head']:,}"


def _read(path: Path) -> dict[str, Any]:
    report: dict[str, Any] = json.loads((ROOT / path).read_text(encoding="utf-8"))
    return report


def _validation(path: Path) -> str:
    report = _read(path)
    greedy = report["greedy"]
    matching, total = (sum(item[key] for item in greedy) for key in ("matching", "total"))
    text = f"{len(report['scenarios'])} scenarios passed, {matching} of {total} greedy tokens as transformers"
    if report["perplexity"]:
        text += f", perplexity per byte {report['perplexity']['executor']['perplexity']:.3f}"
    return text


def _latency(path: Path) -> str:
    phases = _read(path)["trtllm_mla"]
    prefill, decode = (phases[name]["latency_ms"]["median"] for name in ("prefill", "decode"))
    return f"ONNX Runtime on this CPU: prefill of 4 x 128 tokens {prefill:.1f} ms, decode step {decode:.2f} ms"


def _throughput(path: Path) -> str:
    report = _read(path)
    tokens = report["performance"]["system_output_throughput_tok_s"]
    requests, reused = report["dataset"]["num_requests"], report["trtllm_mla"]["reused_tokens"]
    return (
        f"{requests} requests, 16 at once: {tokens:.0f} tokens a second, {reused:,} prompt tokens found in the cache"
    )


if __name__ == "__main__":
    sys.exit(main())
