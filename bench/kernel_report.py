"""Compiles every kernel for every target, without a GPU, and lists what each takes and does.

    python bench/kernel_report.py --json kernels.json --markdown kernels.md
    python bench/kernel_report.py --targets sm_90,sm_100 --heads 16,128 --dtypes bfloat16

The kernels are those that an engine with the default tiles uses at DeepSeek-V3's sizes: latent 512 + 64, heads of
128 + 64 and 128. Numbers of heads that need the same kernel, or kernels with the same figures, share a line of the
table, with the longest compile time; the JSON file has every kernel. Columns:

- spills, stack: bytes of a thread; spills as stores/loads.
- shared: dynamic shared memory of a block, of what the target has.
- MMA: the instructions that multiply (mma.sync, wgmma, tcgen05; FMA without tensor cores).
- load: the widest load from global memory, or copy from there to shared memory, in bytes.
- instr/token: instructions of the inner loop's SASS, times the block's warps, over the keys of a step: what a block
  issues for each cached token and all its rows, if it never waits. "PTX" marks a count from PTX.
- compile: seconds, without Triton's cache, while all cores compile.

A budget is broken by spills or a stack, shared memory over the target's, a product other than the one promised for
the tile, loads that all stay below 16 bytes, and copies to shared memory below 16 bytes. The exit status is 1 if one
is, or if a kernel does not compile, apart from the exceptions known to this program, and 2 if the report cannot be
made.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from trtllm_mla._version import __version__
from trtllm_mla.dtypes import DType
from trtllm_mla.engine.kernel_compiler import compile_variant, triton_cache
from trtllm_mla.engine.kernel_resources import KernelResources, read_resources
from trtllm_mla.errors import MissingDependencyError, UserError
from trtllm_mla.files import atomic_file, write_json
from trtllm_mla.ops import OPS
from trtllm_mla.ops.definition import Problem
from trtllm_mla.ops.latent_attention.plan import default_tile
from trtllm_mla.ops.plan import KernelVariant
from trtllm_mla.targets import KIB, TARGETS, Target, get_target

REPORTED_TARGETS = ("sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120")
HEADS = (8, 12, 16, 20, 24, 40, 64, 96, 128)
DEEPSEEK_SIZES = {"kv_lora_rank": 512, "rope_dim": 64, "width": 576, "nope_dim": 128, "v_dim": 128, "page_size": 64}
ATTENTION_KERNELS = ("attend", "attend_split", "context_attention")
PROMISED_LOAD_BYTES = 16
# Bytes of stack that are known, by target, kernel and query rows: ptxas runs out of a thread's 255 registers.
KNOWN_STACKS = {("sm_100", "attend", 64): 32}


@dataclass(frozen=True)
class Kernel:
    """A kernel variant and what needs it.

    Attributes:
        variant: The variant.
        target: The GPU generation.
        dtype: Type of network and cache.
        heads: Local numbers of heads that need it.
    """

    variant: KernelVariant
    target: Target
    dtype: DType
    heads: tuple[int, ...]

    @property
    def rows(self) -> int | None:
        """Query rows of a block of an attention kernel."""
        return dict(self.variant.constants).get("BLOCK_M")

    @property
    def keys(self) -> int | None:
        """Keys of a step of an attention kernel."""
        return dict(self.variant.constants).get("BLOCK_N")


@dataclass(frozen=True)
class Outcome:
    """What became of a kernel.

    Attributes:
        seconds: Time to compile it.
        resources: What it takes and does; None if it did not compile.
        error: Why not.
    """

    seconds: float
    resources: KernelResources | None = None
    error: str | None = None


@dataclass(frozen=True)
class Row:
    """A row of the report.

    Attributes:
        kernel: What was compiled.
        outcome: What came out.
    """

    kernel: Kernel
    outcome: Outcome

    @property
    def instructions_per_token(self) -> float | None:
        """Instructions that a block issues for each cached token; None without a loop over keys, or if unread."""
        resources = self.outcome.resources
        if resources is None or resources.loop is None or self.kernel.keys is None:
            return None
        keys = self.kernel.keys * resources.loop.iterations
        return resources.loop.instructions * self.kernel.variant.num_warps / keys

    @property
    def exceptions(self) -> tuple[str, ...]:
        """Broken budgets that are known."""
        known = KNOWN_STACKS.get((self.kernel.target.name, self.kernel.variant.kernel, self.kernel.rows or 0), 0)
        resources = self.outcome.resources
        if resources is None or not resources.stack_bytes or resources.stack_bytes > known:
            return ()
        return (f"stack {resources.stack_bytes} B",)

    @property
    def problems(self) -> tuple[str, ...]:
        """Broken budgets, but for those known."""
        resources, target = self.outcome.resources, self.kernel.target
        if resources is None:
            return (f"not compiled: {self.outcome.error}",)
        found = []
        if not self.exceptions:
            if resources.stack_bytes:
                found.append(f"stack {resources.stack_bytes} B")
            if resources.spills and (resources.spills.stores or resources.spills.loads):
                found.append(f"spills {resources.spills.stores}/{resources.spills.loads} B")
        if resources.shared_memory_bytes > target.shared_memory_bytes:
            found.append(f"shared memory {resources.shared_memory_bytes} of {target.shared_memory_bytes} B")
        promised = promised_product(self.kernel)
        if promised is not None and resources.product != promised:
            found.append(f"{resources.product or 'no product'} instead of {promised}")
        if resources.widest_load_bytes < PROMISED_LOAD_BYTES:
            found.append(f"no load of {PROMISED_LOAD_BYTES} B")
        narrowest = min(resources.async_copies, default=PROMISED_LOAD_BYTES)
        if narrowest < PROMISED_LOAD_BYTES:
            found.append(f"copies of {narrowest} B")
        return tuple(found)

    def to_json(self) -> dict[str, Any]:
        """The row as JSON values."""
        kernel, outcome = self.kernel, self.outcome
        return {
            "op": kernel.variant.op,
            "kernel": kernel.variant.kernel,
            "target": kernel.target.name,
            "dtype": kernel.dtype.value,
            "heads": list(kernel.heads),
            "constants": dict(kernel.variant.constants),
            "num_warps": kernel.variant.num_warps,
            "num_stages": kernel.variant.num_stages,
            "compile_seconds": round(outcome.seconds, 3),
            "shared_memory_limit_bytes": kernel.target.shared_memory_bytes,
            "promised_product": promised_product(kernel),
            "resources": None if outcome.resources is None else asdict(outcome.resources),
            "instructions_per_token": self.instructions_per_token,
            "problems": list(self.problems),
            "known_exceptions": list(self.exceptions),
        }


def promised_product(kernel: Kernel) -> str | None:
    """The instruction an attention kernel's tile is chosen for; None for kernels without matrix products.

    A warpgroup's MMA has 64 rows. Without TF32 there is no MMA for fp32.
    """
    if kernel.variant.kernel not in ATTENTION_KERNELS or kernel.rows is None:
        return None
    if kernel.dtype is DType.FLOAT32:
        return "FMA"
    warpgroup = {"sm_90": "wgmma", "sm_100": "tcgen05"}.get(kernel.target.name)
    return warpgroup if warpgroup and kernel.rows >= 64 else "mma.sync"


def find_kernels(
    ops: Iterable[str], targets: Iterable[Target], heads: Iterable[int], dtypes: Iterable[DType]
) -> list[Kernel]:
    """The distinct kernels that engines with the default tiles use, ordered by target, type, operation.

    Raises:
        UserError: No tile fits a target.
    """
    needed: dict[tuple[Target, DType, KernelVariant], list[int]] = {}
    for target in targets:
        for dtype in dtypes:
            tile_s, num_stages = default_tile(
                kv_lora_rank=DEEPSEEK_SIZES["kv_lora_rank"],
                rope_dim=DEEPSEEK_SIZES["rope_dim"],
                model_dtype=dtype,
                cache_dtype=dtype,
                target=target,
            )
            for op in ops:
                for count in heads:
                    problem = Problem(
                        # Dynamic dimensions do not change which variants there are.
                        dims={**DEEPSEEK_SIZES, **dict.fromkeys(OPS[op].dynamic_dims, 1), "heads": count},
                        attributes={"softmax_scale": 1.0, "rope_interleave": 1, **DEEPSEEK_SIZES},
                        model_dtype=dtype,
                        cache_dtype=dtype,
                        target=target,
                        tile_s=tile_s,
                        num_stages=num_stages,
                    )
                    for variant in OPS[op].variants(problem):
                        needed.setdefault((target, dtype, variant), []).append(count)
    return [Kernel(variant, target, dtype, tuple(found)) for (target, dtype, variant), found in needed.items()]


def compile_kernel(variant: KernelVariant, target: Target, cache_dir: Path) -> Outcome:
    """Compiles a kernel and reads what came out.

    Args:
        variant: The variant.
        target: The GPU generation.
        cache_dir: Triton's cache; empty, so that everything is compiled.
    """
    from triton import knobs

    begin, log = time.perf_counter(), io.StringIO()
    try:
        with triton_cache(cache_dir), knobs.nvidia.scope(), contextlib.redirect_stdout(log):
            knobs.nvidia.dump_ptxas_log = True
            compiled = compile_variant(variant, target)
        seconds = time.perf_counter() - begin
        return Outcome(seconds, read_resources(compiled, log.getvalue()))
    except Exception as error:
        # A kernel that a compiler pass fails on is a finding; the others are still to be reported.
        lines = str(error).strip().splitlines() or ["no message"]
        return Outcome(time.perf_counter() - begin, error=f"{type(error).__name__}: {lines[0]}")


def compile_all(kernels: Sequence[Kernel], workers: int, done: Callable[[], None]) -> list[Row]:
    """Compiles kernels in worker processes.

    Args:
        kernels: What to compile.
        workers: How many processes.
        done: Called after each kernel.
    """
    outcomes: dict[Kernel, Outcome] = {}
    with (
        TemporaryDirectory() as cache,
        ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn")) as pool,
    ):
        compile_one = partial(compile_kernel, cache_dir=Path(cache))
        futures = {pool.submit(compile_one, kernel.variant, kernel.target): kernel for kernel in kernels}
        try:
            for future in as_completed(futures):
                outcomes[futures[future]] = future.result()
                done()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return [Row(kernel, outcomes[kernel]) for kernel in kernels]


COLUMNS = (
    "kernel", "dtype", "heads", "rows x keys", "warps", "stages", "registers", "spills", "stack", "shared KiB",
    "MMA", "load", "instr/token", "compile s", "remarks",
)  # fmt: skip


def cells(row: Row) -> tuple[str, ...]:
    """A row's cells, in the order of ``COLUMNS``; "?" is what could not be read, "-" what a kernel does not have."""
    kernel, resources = row.kernel, row.outcome.resources
    variant = kernel.variant
    tile = f"{kernel.rows} x {kernel.keys}" if kernel.rows and kernel.keys else "-"
    start = (
        variant.kernel,
        kernel.dtype.value,
        ", ".join(map(str, kernel.heads)),
        tile,
        str(variant.num_warps),
        str(variant.num_stages),
    )
    remarks = [*row.problems, *(f"known: {exception}" for exception in row.exceptions)]
    if resources is None:
        return (*start, *["?"] * 7, f"{row.outcome.seconds:.1f}", "; ".join(remarks))
    instructions = row.instructions_per_token
    issued = "-" if kernel.keys is None else "?"
    if instructions is not None and resources.loop is not None:
        issued = f"{instructions:.0f}{' (PTX)' if resources.loop.source == 'PTX' else ''}"
    return (
        *start,
        _known(resources.registers),
        "?" if resources.spills is None else f"{resources.spills.stores}/{resources.spills.loads}",
        _known(resources.stack_bytes),
        f"{resources.shared_memory_bytes / KIB:.1f} of {kernel.target.shared_memory_bytes // KIB}",
        resources.product or "-",
        str(resources.widest_load_bytes),
        issued,
        f"{row.outcome.seconds:.1f}",
        "; ".join([*remarks, *(f"unread: {reason}" for reason in resources.unread)]),
    )


def _known(value: int | None) -> str:
    return "?" if value is None else str(value)


def table_lines(rows: Sequence[Row]) -> list[tuple[Row, tuple[str, ...]]]:
    """The table's lines: kernels that differ in heads and compile time alone share one, with the longest time.

    Targets, types and kernels keep their order; a kernel's lines follow its tile, then the fewest heads.

    Returns:
        A row that stands for the line, and the line's cells.
    """
    merged: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        alike = replace(row, kernel=replace(row.kernel, heads=()), outcome=replace(row.outcome, seconds=0.0))
        merged.setdefault((row.kernel.target, cells(alike)), []).append(row)
    lines = []
    for same in merged.values():
        heads = tuple(sorted({count for row in same for count in row.kernel.heads}))
        first, seconds = same[0], max(row.outcome.seconds for row in same)
        shown = Row(replace(first.kernel, heads=heads), replace(first.outcome, seconds=seconds))
        lines.append((shown, cells(shown)))
    order = list(dict.fromkeys(_group(row) for row in rows))
    return sorted(
        lines, key=lambda line: (order.index(_group(line[0])), line[0].kernel.rows or 0, line[0].kernel.heads)
    )


def _group(row: Row) -> tuple[Target, DType, str]:
    return row.kernel.target, row.kernel.dtype, row.kernel.variant.kernel


def rich_table(rows: Sequence[Row]) -> Table:
    """The report for a terminal."""
    table = Table("target", title="Kernels at DeepSeek-V3's sizes, default tiles")
    for column in COLUMNS:
        table.add_column(column, justify="left" if column in ("kernel", "dtype", "heads", "remarks") else "right")
    for row, line in table_lines(rows):
        style = "red" if row.problems else "yellow" if row.exceptions else None
        table.add_row(row.kernel.target.name, *map(escape, line), style=style)
    return table


def markdown(rows: Sequence[Row]) -> str:
    """The report as Markdown: one table for each target."""
    lines = table_lines(rows)
    parts = []
    for target in dict.fromkeys(row.kernel.target for row in rows):
        table = [COLUMNS, ("---",) * len(COLUMNS), *(line for row, line in lines if row.kernel.target == target)]
        parts += ["", f"## {target.name} ({target.example})", ""]
        parts += ["| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in table]
    return "\n".join(parts[1:]) + "\n"


def report_json(rows: Sequence[Row]) -> dict[str, Any]:
    """The report as JSON values."""
    import triton

    return {
        "version": __version__,
        "triton": triton.__version__,
        "sizes": DEEPSEEK_SIZES,
        "kernels": [row.to_json() for row in rows],
    }


def _names(text: str) -> list[str]:
    return list(dict.fromkeys(filter(None, (part.strip() for part in text.split(",")))))


def _choice(what: str, choices: Iterable[str], text: str) -> list[str]:
    """A list of names separated by commas, each one of ``choices``."""
    names, allowed = _names(text), tuple(choices)
    wrong = [name for name in names if name not in allowed]
    if wrong or not names:
        raise argparse.ArgumentTypeError(
            f"found {what} {', '.join(map(repr, wrong)) or 'none'}, expected some of {','.join(allowed)}"
        )
    return names


def _head_counts(text: str) -> list[int]:
    names = _names(text)
    if not names or not all(name.isascii() and name.isdigit() and 1 <= int(name) <= 1024 for name in names):
        raise argparse.ArgumentTypeError(f"found {text!r}, expected numbers from 1 to 1024, separated by commas")
    return [int(name) for name in names]


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    dtypes = [dtype.value for dtype in DType]
    parser.add_argument("--targets", type=partial(_choice, "target", TARGETS), default=list(REPORTED_TARGETS))
    parser.add_argument("--heads", type=_head_counts, default=list(HEADS), help="local numbers of heads")
    parser.add_argument("--dtypes", type=partial(_choice, "type", dtypes), default=dtypes)
    parser.add_argument("--ops", type=partial(_choice, "operation", OPS), default=list(OPS))
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the report as JSON")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the tables as Markdown")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Makes the report."""
    options = parse_arguments(arguments)
    kernels = find_kernels(
        options.ops, map(get_target, options.targets), options.heads, [DType(name) for name in options.dtypes]
    )
    try:
        import triton  # noqa: F401
    except ModuleNotFoundError as error:
        raise MissingDependencyError("triton", "compile the MLA kernels", "rtx") from error
    workers = max(1, min(len(kernels), len(os.sched_getaffinity(0))))
    columns = (TextColumn("compiling"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task("", total=len(kernels))
        rows = compile_all(kernels, workers, lambda: progress.advance(task))
    if options.json is not None:
        write_json(options.json, report_json(rows))
    if options.markdown is not None:
        with atomic_file(options.markdown) as path:
            path.write_text(markdown(rows), encoding="utf-8")
    # Piped, rich would squeeze the columns into 80 characters.
    console = Console() if sys.stdout.isatty() else Console(width=250)
    console.print(rich_table(rows))
    broken = [row for row in rows if row.problems]
    known = [row for row in rows if row.exceptions]
    console.print(f"{len(rows)} kernels; {len(broken)} break a budget, {len(known)} are known exceptions")
    return 1 if broken else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except UserError as error:
        print(error, file=sys.stderr)
        sys.exit(2)
