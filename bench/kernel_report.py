"""Compiles every kernel for every target, without a GPU, and lists what each takes and does.

    python bench/kernel_report.py --json kernels.json --markdown kernels.md
    python bench/kernel_report.py --targets sm_90,sm_100 --heads 16,128 --dtypes bfloat16 --caches bf16,nvfp4

The kernels are those that an engine with the default tiles uses at DeepSeek-V3's sizes: latent 512 + 64, heads of
128 + 64 and 128. The Markdown file says what its columns mean and which budgets are held; its tables share a line
between kernels with the same figures, while the JSON file has every kernel. The exit status is 1 if a kernel breaks a
budget or does not compile, and 2 if the report cannot be made.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import multiprocessing
import os
import shlex
import sys
import time
from collections import Counter
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
from trtllm_mla.cache_rows import CacheDType, RowLayout
from trtllm_mla.dtypes import DType
from trtllm_mla.engine.kernel_compiler import compile_variant, triton_cache
from trtllm_mla.engine.kernel_resources import KernelResources, read_resources
from trtllm_mla.engine.launcher import WARP_SIZE
from trtllm_mla.errors import MissingDependencyError, UserError
from trtllm_mla.files import atomic_file, write_json
from trtllm_mla.ops import OPS
from trtllm_mla.ops.definition import Problem
from trtllm_mla.ops.latent_attention.plan import default_tile
from trtllm_mla.ops.plan import KernelVariant, ceil_div
from trtllm_mla.targets import KIB, TARGETS, Target, get_target

REPORTED_TARGETS = ("sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120")
HEADS = (8, 12, 16, 20, 24, 32, 40, 64, 96, 128)
DEEPSEEK_SIZES = {"kv_lora_rank": 512, "rope_dim": 64, "nope_dim": 128, "v_dim": 128, "page_size": 64}
# DeepSeek-V3's experts, with the blocks of their FP8 weights, and kv_a_proj_with_mqa, the one weight whose rows are no
# multiple of 128.
OTHER_SIZES = {
    "experts": 256,
    "top_k": 8,
    "hidden_size": 7168,
    "intermediate_size": 2048,
    "gate_up_size": 4096,
    "hidden_blocks": 56,
    "intermediate_blocks": 16,
    "gate_up_blocks": 32,
    "in_features": 7168,
    "out_features": 576,
    "scale_rows": 5,
    "scale_columns": 56,
}
ATTENTION_KERNELS = ("attend", "context_attention")
EXPERT_PRODUCTS = ("gate_up", "down")
# Whose products are weights times rows, not rows times weights: their tiles have at least 64 rows of a weight.
WEIGHTS_AS_M = ("BlockScaledRoutedExperts",)
# They read int32 one by one: there is no promise that these are aligned or many.
ID_KERNELS = ("sort_slots",)
PROMISED_LOAD_BYTES = 16
# PTX ISA, "cp.async": a copy has 4, 8 or 16 bytes.
NARROWEST_COPY_BYTES = 4


@dataclass(frozen=True)
class Kernel:
    """A kernel variant and what needs it.

    Attributes:
        variant: The variant.
        target: The GPU generation.
        dtype: The network's type.
        caches: Types of latent cache that need it.
        heads: Local numbers of heads that need it.
    """

    variant: KernelVariant
    target: Target
    dtype: DType
    caches: tuple[CacheDType, ...]
    heads: tuple[int, ...]

    @property
    def constants(self) -> dict[str, int | bool]:
        """The variant's constants."""
        return dict(self.variant.constants)

    @property
    def rows(self) -> int | None:
        """Query rows of a block of an attention kernel."""
        return self.constants.get("BLOCK_M")

    @property
    def keys(self) -> int | None:
        """Keys of a step of an attention kernel."""
        return None if self.rows is None else self.constants.get("BLOCK_N")

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return self.variant.num_warps * WARP_SIZE

    @property
    def layout(self) -> RowLayout:
        """The cached rows of a kernel that reads or writes them, for which it is one type's alone."""
        (cache,) = self.caches
        return cache.layout(DEEPSEEK_SIZES["kv_lora_rank"], DEEPSEEK_SIZES["rope_dim"])


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
    def problems(self) -> tuple[str, ...]:
        """Broken budgets."""
        kernel, resources = self.kernel, self.outcome.resources
        if resources is None:
            return (f"not compiled: {self.outcome.error}",)
        found = []
        if resources.stack_bytes:
            found.append(f"stack {resources.stack_bytes} B")
        if resources.spills and (resources.spills.stores or resources.spills.loads):
            found.append(f"spills {resources.spills.stores}/{resources.spills.loads} B")
        if resources.shared_memory_bytes > kernel.target.shared_memory_bytes:
            found.append(f"shared memory {resources.shared_memory_bytes} of {kernel.target.shared_memory_bytes} B")
        promised = promised_product(kernel)
        if promised is not None and resources.product != promised:
            found.append(f"{resources.product or 'no product'} instead of {promised}")
        if resources.widest_load_bytes < PROMISED_LOAD_BYTES and kernel.variant.kernel not in ID_KERNELS:
            found.append(f"no load of {PROMISED_LOAD_BYTES} B")
        wide = resources.global_loads.get(PROMISED_LOAD_BYTES, 0) * PROMISED_LOAD_BYTES * kernel.threads
        if wide < promised_load_bytes(kernel):
            found.append(f"{wide} of {promised_load_bytes(kernel)} B loaded {PROMISED_LOAD_BYTES} B at a time")
        copies, tile = resources.async_copies, promised_tile_copies(kernel)
        if tile is not None:
            tiles = max(1, copies.get(PROMISED_LOAD_BYTES, 0) // tile[PROMISED_LOAD_BYTES])
            if copies != {width: tiles * count for width, count in tile.items()}:
                found.append(f"copies of {_widths(copies)}, where a tile takes {_widths(tile)}")
        elif min(copies, default=PROMISED_LOAD_BYTES) < PROMISED_LOAD_BYTES:
            found.append(f"copies of {_widths(copies)}")
        return tuple(found)

    def to_json(self) -> dict[str, Any]:
        """The row as JSON values."""
        kernel, outcome = self.kernel, self.outcome
        return {
            "op": kernel.variant.op,
            "kernel": kernel.variant.kernel,
            "target": kernel.target.name,
            "dtype": kernel.dtype.value,
            "caches": [cache.value for cache in kernel.caches],
            "heads": list(kernel.heads),
            "constants": kernel.constants,
            "num_warps": kernel.variant.num_warps,
            "num_stages": kernel.variant.num_stages,
            "compile_seconds": round(outcome.seconds, 3),
            "shared_memory_limit_bytes": kernel.target.shared_memory_bytes,
            "promised_product": promised_product(kernel),
            "promised_tile_copies": promised_tile_copies(kernel),
            "resources": None if outcome.resources is None else asdict(outcome.resources),
            "instructions_per_token": self.instructions_per_token,
            "problems": list(self.problems),
        }


def promised_product(kernel: Kernel) -> str | None:
    """The instruction that the tile of an attention kernel or an expert product is chosen for; None for others.

    A warpgroup's MMA has 64 rows, of queries, of keys or of FP8 weights. Without TF32 there is no MMA for fp32. Beside
    the decoding of quantised rows there are no registers for a warpgroup's MMA.
    """
    if kernel.variant.kernel not in (*ATTENTION_KERNELS, *EXPERT_PRODUCTS) or kernel.rows is None:
        return None
    if kernel.dtype is DType.FLOAT32:
        return "FMA"
    if kernel.variant.kernel == "attend" and kernel.layout.dtype.is_quantized:
        return "mma.sync"
    warpgroup = {"sm_90": "wgmma", "sm_100": "tcgen05"}.get(kernel.target.name)
    fills = kernel.rows >= 64 or kernel.constants.get("KEYS_AS_M", False) or kernel.variant.op in WEIGHTS_AS_M
    return warpgroup if warpgroup and fills else "mma.sync"


def promised_load_bytes(kernel: Kernel) -> int:
    """Bytes that a block of a gathering kernel loads 16 bytes at a time: its rows' codes, or unquantised latents."""
    if kernel.variant.op != "GatherLatent":
        return 0
    return kernel.constants["BLOCK_S"] * kernel.layout.code_bytes


def promised_tile_copies(kernel: Kernel) -> dict[int, int] | None:
    """Copies from global to shared memory that a tile of ``attend`` takes, by width in bytes; None for other kernels.

    The code has them once in the loop and once for each tile fetched before it. Codes (or latents), scales and rotary
    keys are copied 16 bytes at a time. Where a tile has fewer of one for each of the block's threads, each copies its
    share, an element at least; for a 16-bit network, these are scales alone. What is narrower than a copy can be is
    loaded to registers.
    """
    if kernel.variant.kernel != "attend" or kernel.keys is None:
        return None
    layout, copies = kernel.layout, Counter[int]()
    scale_bytes = layout.rope_offset - layout.scale_offset
    # Bytes of a row, and of an element: codes are read as 32-bit words, fp8's scales are fp32.
    sections = (
        (layout.code_bytes, 4),
        (scale_bytes, scale_bytes // max(1, layout.num_scales)),
        (layout.row_bytes - layout.rope_offset, 2),
    )
    for row_bytes, element_bytes in sections:
        tile_bytes = kernel.keys * row_bytes
        width = min(PROMISED_LOAD_BYTES, max(element_bytes, tile_bytes // kernel.threads))
        if width >= NARROWEST_COPY_BYTES:
            copies[width] += ceil_div(tile_bytes, width * kernel.threads)
    return dict(copies)


def _widths(copies: dict[int, int]) -> str:
    return ", ".join(f"{width} B x {count}" for width, count in sorted(copies.items(), reverse=True)) or "nothing"


def latent_problem(op: str, target: Target, heads: int, dtype: DType, cache: CacheDType, **dims: int) -> Problem:
    """A problem of DeepSeek-V3's sizes with the default tile. Of the dynamic dimensions, those not given are 1.

    Raises:
        UserError: No tile fits the target.
    """
    sizes = {name: DEEPSEEK_SIZES[name] for name in ("kv_lora_rank", "rope_dim")}
    tile_s, num_stages = default_tile(**sizes, model_dtype=dtype, cache_dtype=cache, target=target)
    width = cache.layout(**sizes).width
    attributes = {"softmax_scale": 1.0, "causal": 1, "latent_scale": 1.0, "rope_interleave": 1, "first_expert": 0}
    dims = {**dict.fromkeys(OPS[op].dynamic_dims, 1), "heads": heads, **dims}
    return Problem(
        dims={**DEEPSEEK_SIZES, **OTHER_SIZES, "width": width, **dims},
        attributes={**attributes, **DEEPSEEK_SIZES},
        model_dtype=dtype,
        cache_dtype=cache,
        target=target,
        tile_s=tile_s,
        num_stages=num_stages,
    )


def cache_types(dtypes: Iterable[DType], caches: Iterable[CacheDType]) -> list[tuple[DType, CacheDType]]:
    """Types of network and cache that go together: a cache that is not quantised has the network's type."""
    allowed = list(caches)
    return [(dtype, cache) for dtype in dtypes for cache in allowed if cache.element in (None, dtype)]


def find_kernels(
    ops: Iterable[str],
    targets: Iterable[Target],
    heads: Iterable[int],
    dtypes: Iterable[DType],
    caches: Iterable[CacheDType] = tuple(CacheDType),
) -> list[Kernel]:
    """The distinct kernels that engines with the default tiles use, ordered by target, type, operation.

    Raises:
        UserError: No tile fits a target.
    """
    # Dynamic dimensions do not change which variants there are.
    needed: dict[tuple[Target, DType, KernelVariant], dict[tuple[CacheDType, int], None]] = {}
    counts, types = list(heads), cache_types(dtypes, caches)
    operations = list(ops)
    for target in targets:
        for dtype, cache in types:
            for op in operations:
                for count in counts:
                    for variant in OPS[op].variants(latent_problem(op, target, count, dtype, cache)):
                        needed.setdefault((target, dtype, variant), {})[cache, count] = None
    return [
        Kernel(variant, target, dtype, tuple(dict.fromkeys(c for c, _ in of)), tuple(dict.fromkeys(h for _, h in of)))
        for (target, dtype, variant), of in needed.items()
    ]


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


TEXT_COLUMNS = ("kernel", "network", "cache", "heads", "M", "MMA", "remarks")
COLUMNS = (
    "kernel", "network", "cache", "heads", "rows x keys", "M", "warps", "stages", "registers", "spills", "stack",
    "shared KiB", "MMA", "load", "instr/token", "compile s", "remarks",
)  # fmt: skip


def cells(row: Row) -> tuple[str, ...]:
    """A row's cells, in the order of ``COLUMNS``; "?" is what could not be read, "-" what a kernel does not have."""
    kernel, resources = row.kernel, row.outcome.resources
    variant = kernel.variant
    tile = f"{kernel.rows} x {kernel.keys}" if kernel.rows and kernel.keys else "-"
    start = (
        variant.kernel,
        kernel.dtype.value,
        ", ".join(kernel.caches),
        ", ".join(map(str, kernel.heads)),
        tile,
        product_rows(kernel),
        str(variant.num_warps),
        str(variant.num_stages),
    )
    remarks = row.problems
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


def product_rows(kernel: Kernel) -> str:
    """What fills the rows (M) of an attention kernel's products."""
    if kernel.variant.kernel != "attend":
        return "-" if kernel.rows is None else "queries"
    return "keys" if kernel.constants["KEYS_AS_M"] else "heads"


def _known(value: int | None) -> str:
    return "?" if value is None else str(value)


def table_lines(rows: Sequence[Row]) -> list[tuple[Row, tuple[str, ...]]]:
    """The table's lines: kernels that differ in heads and compile time alone share one, with the longest time.

    Targets, types and kernels keep their order; a kernel's lines follow its caches, its tile, then the fewest heads.

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
    types = list(CacheDType)
    return sorted(
        lines,
        key=lambda line: (
            order.index(_group(line[0])),
            types.index(line[0].kernel.caches[0]),
            line[0].kernel.rows or 0,
            line[0].kernel.heads,
        ),
    )


def _group(row: Row) -> tuple[Target, DType, str]:
    return row.kernel.target, row.kernel.dtype, row.kernel.variant.kernel


def rich_table(rows: Sequence[Row]) -> Table:
    """The report for a terminal."""
    table = Table("target", title="Kernels at DeepSeek-V3's sizes, default tiles")
    for column in COLUMNS:
        table.add_column(column, justify="left" if column in TEXT_COLUMNS else "right")
    for row, line in table_lines(rows):
        table.add_row(row.kernel.target.name, *map(escape, line), style="red" if row.problems else None)
    return table


@dataclass(frozen=True)
class Form:
    """How ``attend`` is launched for one new token of a request.

    Attributes:
        row_blocks: Programs that share the token's heads, for each piece of the keys.
        kernel: What they run.
    """

    row_blocks: int
    kernel: Kernel

    @classmethod
    def choose(cls, target: Target, heads: int, dtype: DType, cache: CacheDType) -> Form:
        """The form that the plan chooses with the default tile."""
        plan = OPS["LatentAttention"].plan(latent_problem("LatentAttention", target, heads, dtype, cache))
        kernel = Kernel(plan.launches[0].variant, target, dtype, (cache,), (heads,))
        return cls(ceil_div(heads, kernel.constants["BLOCK_M"]), kernel)

    def __str__(self) -> str:
        blocks = f"{self.row_blocks} x " if self.row_blocks > 1 else ""
        return f"{blocks}{self.kernel.rows} {product_rows(self.kernel)}"


def form_lines(kernels: Iterable[Kernel]) -> list[tuple[str, ...]]:
    """A table of the forms by number of heads. Targets with the same forms share a line, numbers of heads a column."""
    asked: dict[tuple[Target, DType, CacheDType], None] = {}
    heads: set[int] = set()
    for kernel in kernels:
        if kernel.variant.kernel == "attend":
            heads.update(kernel.heads)
            asked |= dict.fromkeys((kernel.target, kernel.dtype, cache) for cache in kernel.caches)
    found: dict[tuple[str, ...], list[str]] = {}
    for target, dtype, cache in asked:
        forms = [Form.choose(target, count, dtype, cache) for count in sorted(heads)]
        products = dict.fromkeys(str(promised_product(form.kernel)) for form in forms)
        tile = f"{forms[0].kernel.keys} x {forms[0].kernel.variant.num_stages}"
        found.setdefault((dtype.value, cache, tile, ", ".join(products), *map(str, forms)), []).append(target.name)
    lines = [(", ".join(names), *line) for line, names in found.items()]
    if not lines:
        return []
    titles = ["targets", "network", "cache", "tile", "MMA"]
    columns = list(zip(*lines, strict=True))
    by_heads: dict[tuple[str, ...], list[str]] = {}
    for count, column in zip(sorted(heads), columns[len(titles) :], strict=True):
        by_heads.setdefault(column, []).append(str(count))
    titles += [f"{', '.join(counts)} heads" for counts in by_heads.values()]
    return [tuple(titles), ("---",) * len(titles), *zip(*columns[:5], *by_heads, strict=True)]


INTRODUCTION = """\
# What the kernels take

Every kernel that engines with the default tiles use at DeepSeek-V3's sizes (latent 512 + 64, heads of 128 + 64 and
128), as Triton {triton} and its ptxas compile it: {kernels} kernels for {targets} and
{heads} local heads.

```
{command}
```

**Nothing on this page ran on a GPU.** The figures are read from the compiled code. They say what a kernel occupies
and issues, not how long it takes.

## Forms by number of heads

What a decode step with one new token a request runs, as the plan chooses it. `2 x 64 heads` is two programs of 64
query rows, which each read the keys; the rows of their products (the MMA's M) are heads. `16 keys` is one program of
up to 16 query rows whose products have keys as rows: 64 keys fill a warpgroup's MMA that few heads would not. With
several new tokens, query rows are tokens times heads. A tile is the keys of a step and the steps in flight.

{forms}

With quantised caches sm_90 and sm_100 run mma.sync too. Codes are decoded in registers, and on sm_90 a warpgroup's
MMA beside that spills hundreds of bytes with fp8 in either form (held by
`pytest tests/benchmark/test_kernel_report.py -k warpgroup`). On sm_100 keys as rows issue more instructions than
mma.sync; with 64 heads as rows fp8 compiles without spills, but nvfp4, by Triton 3.9, to an empty kernel. fp32 has no
MMA without TF32.

## Columns

Kernels with the same figures share a line, with the longest of their compile times.

- **rows x keys**: query rows of a block and keys of a step of an attention kernel.
- **M**: what the rows of the products are.
- **spills**, **stack**: bytes of a thread, from ptxas and cuobjdump; spills as stores/loads.
- **shared**: dynamic shared memory of a block, of what the target has, in KiB.
- **MMA**: the instructions that multiply; FMA without tensor cores.
- **load**: the widest load from global memory, or copy from there to shared memory, in bytes.
- **instr/token**: instructions of the inner loop in nvdisasm's SASS (waits for barriers included, each counted once),
  times the block's warps, over the keys of a step: what a block issues for each cached token and all its rows. A loop
  that ptxas unrolled is recognised by its MMAs, beside those of the PTX; "(PTX)" marks a count from there. Where a
  block has more warps than a score tile has blocks of 16 x 8, its scores are computed more than once. `-`: a kernel
  without a loop over keys.
- **compile**: wall-clock seconds, without Triton's cache, while all cores compile; other load on them counts.

## Budgets

- No spills and no stack; shared memory within the target's.
- The product that the form is chosen for: wgmma on sm_90 and tcgen05 on sm_100 where the rows are keys or at least 64
  queries and the cache is not quantised, mma.sync otherwise, FMA in fp32 networks.
- 16-byte loads. `attend` and `context_attention` copy keys and values to shared memory 16 bytes at a time;
  `gather_latent` and `gather_quantized_latent` so load latents or their codes. There is one exception, held to the
  exact number of copies of each tile: what `attend` has, in a tile, fewer than 16 bytes of for each thread of the
  block. In 16-bit networks with quantised caches that is the scales, copied 4 or 8 bytes at a time. In fp32 networks
  with such caches, whose tiles have 16 keys, rotary keys are copied 8 bytes at a time, and nvfp4's scales are loaded.

{broken}

`pytest tests/benchmark/test_kernel_report.py` holds the budgets for a part of the tables, and that a tile made too big
breaks them.
"""


def markdown(rows: Sequence[Row], command: str) -> str:
    """The report as Markdown: forms, budgets, and one table for each target.

    Args:
        rows: The report.
        command: What made it.
    """
    import triton

    lines = table_lines(rows)
    targets = list(dict.fromkeys(row.kernel.target for row in rows))
    broken = [(row.kernel.target.name, *(line[i] for i in (0, 1, 2, 3, 4, -1))) for row, line in lines if row.problems]
    head = ("target", "kernel", "network", "cache", "heads", "rows x keys", "broken")
    text = INTRODUCTION.format(
        triton=triton.__version__,
        kernels=len(rows),
        targets=", ".join(target.name for target in targets),
        heads=", ".join(map(str, sorted({count for row in rows for count in row.kernel.heads}))),
        command=command,
        forms=_markdown_table(form_lines(row.kernel for row in rows)) or "No attention kernel was asked for.",
        broken="These break a budget:\n\n" + _markdown_table([head, ("---",) * len(head), *broken])
        if broken
        else "No kernel of this report breaks one.",
    )
    for target in targets:
        table = [COLUMNS, ("---",) * len(COLUMNS), *(line for row, line in lines if row.kernel.target == target)]
        text += f"\n## {target.name} ({target.example})\n\n{_markdown_table(table)}\n"
    return text


def _markdown_table(lines: Iterable[Sequence[str]]) -> str:
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


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
    dtypes, caches = [dtype.value for dtype in DType], [cache.value for cache in CacheDType]
    parser.add_argument("--targets", type=partial(_choice, "target", TARGETS), default=list(REPORTED_TARGETS))
    parser.add_argument("--heads", type=_head_counts, default=list(HEADS), help="local numbers of heads")
    parser.add_argument("--dtypes", type=partial(_choice, "type", dtypes), default=dtypes, help="of the network")
    parser.add_argument(
        "--caches",
        type=partial(_choice, "cache", caches),
        default=caches,
        help="types of the latent cache; one that is not quantised is compiled with networks of its type",
    )
    parser.add_argument("--ops", type=partial(_choice, "operation", OPS), default=list(OPS))
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the report as JSON")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the tables as Markdown")
    options = parser.parse_args(arguments)
    if not cache_types(map(DType, options.dtypes), map(CacheDType, options.caches)):
        parser.error(
            f"found networks {','.join(options.dtypes)} with caches {','.join(options.caches)}, expected a cache of a "
            "network's type, or fp8 or nvfp4"
        )
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """Makes the report."""
    options = parse_arguments(arguments)
    kernels = find_kernels(
        options.ops,
        map(get_target, options.targets),
        options.heads,
        map(DType, options.dtypes),
        map(CacheDType, options.caches),
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
            command = shlex.join(
                ["python", "bench/kernel_report.py", *(sys.argv[1:] if arguments is None else arguments)]
            )
            path.write_text(markdown(rows, command), encoding="utf-8")
    # Piped, rich would squeeze the columns into 80 characters.
    console = Console() if sys.stdout.isatty() else Console(width=250)
    console.print(rich_table(rows))
    broken = [row for row in rows if row.problems]
    console.print(f"{len(rows)} kernels; {len(broken)} break a budget")
    return 1 if broken else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except UserError as error:
        print(error, file=sys.stderr)
        sys.exit(2)
