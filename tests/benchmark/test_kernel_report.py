"""The budgets of the kernels, held by compiling them, and the report that lists them."""

from __future__ import annotations

import importlib
import json
import re
import sys
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from types import ModuleType

import pytest

from trtllm_mla.cache_rows import CacheDType
from trtllm_mla.dtypes import DType
from trtllm_mla.engine import kernel_compiler
from trtllm_mla.engine.kernel_resources import InnerLoop, KernelResources, Spills
from trtllm_mla.targets import TARGETS, get_target

SCRIPT = Path(__file__).parents[2] / "bench" / "kernel_report.py"
# Rows, columns and depth of the 16-bit MMA: PTX ISA, "mma.sync.aligned.m16n8k16".
MMA_SYNC_PRODUCTS = 16 * 8 * 16
# Bytes of codes and rotary key, and of scales, of a row of 512 + 64.
ROW_BYTES = {CacheDType.FP8: (512 + 128, 4 * 4), CacheDType.NVFP4: (256 + 128, 32)}
CHECKED = [
    ("sm_86", 12, CacheDType.BF16, DType.BFLOAT16),
    ("sm_90", 24, CacheDType.BF16, DType.BFLOAT16),
    ("sm_100", 128, CacheDType.BF16, DType.BFLOAT16),
    ("sm_80", 16, CacheDType.FP8, DType.BFLOAT16),
    ("sm_80", 24, CacheDType.BF16, DType.BFLOAT16),
    ("sm_90", 32, CacheDType.FP8, DType.BFLOAT16),
    ("sm_90", 16, CacheDType.NVFP4, DType.BFLOAT16),
    ("sm_100", 128, CacheDType.NVFP4, DType.BFLOAT16),
    ("sm_120", 12, CacheDType.NVFP4, DType.BFLOAT16),
    ("sm_89", 96, CacheDType.FP8, DType.FLOAT16),
    ("sm_90", 20, CacheDType.FP8, DType.FLOAT32),
]
LATENT_OPS = ["AppendLatent", "LatentAttention", "GatherLatent", "ContextAttention"]


@pytest.fixture(scope="module")
def report():
    # Worker processes import it by name too.
    sys.path.insert(0, str(SCRIPT.parent))
    try:
        yield importlib.import_module(SCRIPT.stem)
    finally:
        sys.path.remove(str(SCRIPT.parent))


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def rows(report):
    """All kernels of ``CHECKED``, each compiled once."""
    kernels = [kernel for case in CHECKED for kernel in kernels_for(report, *case)]
    distinct = {(kernel.target, kernel.variant): kernel for kernel in kernels}
    found = report.compile_all(list(distinct.values()), workers=2, done=lambda: None)
    return {(row.kernel.target, row.kernel.variant): row for row in found}


def kernels_for(
    report: ModuleType,
    target: str,
    heads: int,
    cache: CacheDType = CacheDType.BF16,
    dtype: DType = DType.BFLOAT16,
    op: str = "",
) -> list:
    return report.find_kernels([op] if op else LATENT_OPS, [get_target(target)], [heads], [dtype], [cache])


def one_kernel(
    report: ModuleType, target: str, name: str, rows: int | None = None, cache: CacheDType = CacheDType.BF16
):
    kernels = [kernel for kernel in kernels_for(report, target, 32, cache) if kernel.variant.kernel == name]
    (kernel,) = [kernel for kernel in kernels if rows is None or kernel.rows == rows]
    return kernel


def changed(kernel, *, num_warps: int | None = None, num_stages: int | None = None, **constants: int):
    variant = kernel.variant
    variant = replace(
        variant,
        constants=tuple((name, constants.get(name, value)) for name, value in variant.constants),
        num_warps=num_warps or variant.num_warps,
        num_stages=num_stages or variant.num_stages,
    )
    return replace(kernel, variant=variant)


def compiled(report: ModuleType, kernel, cache: Path):
    return report.Row(kernel, report.compile_kernel(kernel.variant, kernel.target, cache))


@pytest.mark.slow
@pytest.mark.parametrize(("target", "heads", "cache", "dtype"), CHECKED)
def test_default_tiles_keep_their_budgets(report, rows, target, heads, cache, dtype):
    """Dozens of kernels, about a second each."""
    seen = set()
    for kernel in kernels_for(report, target, heads, cache, dtype):
        row = rows[kernel.target, kernel.variant]
        resources, name = row.outcome.resources, kernel.variant.kernel
        assert row.problems == (), (name, kernel.rows)
        assert resources.unread == (), name
        assert resources.shared_memory_bytes <= TARGETS[target].shared_memory_bytes
        assert resources.widest_load_bytes == 16
        assert resources.stack_bytes == 0
        assert resources.spills == Spills(0, 0)
        if kernel.keys is not None:
            check_attention(kernel, resources, cache)
        seen.add((name, kernel.rows))
    quantized = "_quantized" if cache in ROW_BYTES else ""
    copies = {(f"append{quantized}_latent", None), (f"gather{quantized}_latent", None), ("combine", None)}
    large = ("context_attention", 16 if dtype is DType.FLOAT32 else 128)
    assert seen >= {*copies, ("attend", 16), large}
    if target in ("sm_90", "sm_100") and cache not in ROW_BYTES:
        assert ("attend", 64) in seen


@pytest.mark.parametrize("target", ["sm_89", "sm_90"])
def test_experts_and_fp8_weights_keep_their_budgets(report, cache, target):
    seen = set()
    for op in ("RoutedExperts", "BlockScaledMatMul", "BlockScaledRoutedExperts"):
        for kernel in kernels_for(report, target, 8, op=op):
            row = compiled(report, kernel, cache)
            assert row.problems == (), (kernel.variant.kernel, kernel.rows)
            seen.add((kernel.variant.kernel, row.outcome.resources.product))
    large = "wgmma" if target == "sm_90" else "mma.sync"
    assert seen >= {("gate_up", "mma.sync"), ("gate_up", large), ("down", large)}
    assert {"sort_slots", "weighted_sum", "multiply", "sum_splits"} <= {name for name, _ in seen}


def check_attention(kernel, resources: KernelResources, cache: CacheDType) -> None:
    attends, constants = kernel.variant.kernel == "attend", dict(kernel.variant.constants)
    threads = 32 * kernel.variant.num_warps
    if attends and cache in ROW_BYTES:
        # Everything but scales 16 bytes at a time; a thread copies at least 4 bytes of scales.
        wide, scales = ROW_BYTES[cache]
        if kernel.dtype is not DType.FLOAT32:
            tiles, rest = divmod(resources.async_copies[16] * 16 * threads, kernel.keys * wide)
            assert tiles >= kernel.variant.num_stages
            assert rest == 0
            (narrow,) = resources.async_copies.keys() - {16}
            assert narrow in (4, 8)
            copied = resources.async_copies[narrow] * narrow * threads
            assert copied == tiles * max(kernel.keys * scales, 4 * threads)
    else:
        assert resources.async_copies.keys() == {16}
    if kernel.dtype is DType.FLOAT32:
        assert resources.product == "FMA"
        return
    # A warpgroup's MMA has 64 rows; the plan keeps it from quantised rows.
    warpgroup = (kernel.rows >= 64 or constants.get("KEYS_AS_M", False)) and kernel.target.name in ("sm_90", "sm_100")
    assert not (warpgroup and attends and cache in ROW_BYTES)
    name = kernel.target.name
    assert resources.product == ({"sm_90": "wgmma", "sm_100": "tcgen05"}[name] if warpgroup else "mma.sync")
    if attends and name in ("sm_90", "sm_100") and cache not in ROW_BYTES:
        assert constants["KEYS_AS_M"] is (kernel.rows < 64)
    assert resources.loop.source == "SASS"
    if resources.product == "mma.sync":
        # The loop that was found does one step's products; where warps outnumber the blocks of a score tile, some of
        # it is computed twice.
        depth = 512 + 64 + 512 if attends else 128 + 64 + 128
        work = kernel.rows * kernel.keys * depth * resources.loop.iterations
        done = resources.loop.products * kernel.variant.num_warps * MMA_SYNC_PRODUCTS
        assert work <= done < 2 * work


@pytest.mark.parametrize("cache_dtype", [CacheDType.BF16, CacheDType.FP8, CacheDType.NVFP4])
def test_a_tile_over_the_shared_memory_is_a_problem(report, cache, cache_dtype):
    """The default tile of 32 keys, made 128 keys with 3 stages."""
    kernel = one_kernel(report, "sm_86", "attend", 16, cache_dtype)
    row = compiled(report, changed(kernel, BLOCK_N=128, num_stages=3), cache)
    (problem,) = row.problems
    assert re.fullmatch(r"not compiled: UserError: .* takes \d{6} bytes .* sm_86 \(RTX 3090\) has 101376 .*", problem)


def test_a_tile_over_the_registers_is_a_problem(report, cache):
    kernel = changed(one_kernel(report, "sm_90", "context_attention"), num_warps=4)
    problems = " ".join(compiled(report, kernel, cache).problems)
    assert re.search(r"stack [1-9]\d* B spills [1-9]\d*/[1-9]\d* B", problems)


@pytest.mark.parametrize("form", [{"BLOCK_M": 64}, {"KEYS_AS_M": True}], ids=["heads", "keys"])
def test_quantised_rows_spill_beside_a_warpgroups_mma(report, cache, form):
    """Why the plan keeps them to mma.sync on sm_90: with 64 rows, or 64 keys as rows, it is too big a tile."""
    kernel = one_kernel(report, "sm_90", "attend", 32, CacheDType.FP8)
    problems = compiled(report, changed(kernel, **form), cache).problems
    assert "wgmma instead of mma.sync" in problems
    assert any(re.fullmatch(r"spills [1-9]\d\d/[1-9]\d\d B", problem) for problem in problems)


def test_fp32_latents_need_two_warps_to_become_nvfp4(report, cache):
    """Sixteen in a thread are too many."""
    (kernel,) = kernels_for(report, "sm_90", 20, CacheDType.NVFP4, DType.FLOAT32, "AppendLatent")
    assert compiled(report, kernel, cache).problems == ()
    assert compiled(report, changed(kernel, num_warps=1), cache).problems == ("stack 16 B",)


def test_a_tile_below_the_warpgroups_is_a_problem(report, cache):
    """Two warps are no warpgroup."""
    kernel = changed(one_kernel(report, "sm_90", "context_attention"), num_warps=2, BLOCK_N=16)
    assert "mma.sync instead of wgmma" in compiled(report, kernel, cache).problems


def test_narrow_loads_are_a_problem(report, cache, monkeypatch):
    """Without the promise of alignment there are no loads of 16 bytes."""
    monkeypatch.setattr(kernel_compiler, "POINTER_ALIGNMENT", 4)
    row = compiled(report, one_kernel(report, "sm_90", "gather_latent"), cache)
    assert row.problems == ("no load of 16 B", "0 of 8192 B loaded 16 B at a time")
    row = compiled(report, one_kernel(report, "sm_86", "context_attention"), cache)
    assert "copies of 4 B x 120" in row.problems
    row = compiled(report, one_kernel(report, "sm_86", "attend", 16, CacheDType.FP8), cache)
    assert row.problems == ("no load of 16 B", "copies of 4 B x 42, where a tile takes 16 B x 5, 4 B x 1")


@pytest.mark.parametrize(
    ("cache_dtype", "tile"),
    [(CacheDType.BF16, {16: 18}), (CacheDType.FP8, {16: 10, 4: 1}), (CacheDType.NVFP4, {16: 6, 8: 1})],
)
def test_only_scales_may_be_copied_narrowly(report, cache_dtype, tile):
    """64 rows, 256 threads: 4 KiB for each copy of 16 bytes."""
    kernel = one_kernel(report, "sm_90", "attend", 32, cache_dtype)
    for tiles in (1, 2, 3):
        copies = {width: tiles * count for width, count in tile.items()}
        assert made_up(report, kernel, async_copies=copies).problems == ()
        for width in (4, 8):
            narrower = copies | {16: copies[16] - 1}
            narrower[width] = narrower.get(width, 0) + 16 // width
            (problem,) = made_up(report, kernel, async_copies=narrower).problems
            assert f"16 B x {copies[16] - 1}, " in problem
            assert f"{width} B x {narrower[width]}" in problem
    (problem,) = made_up(report, kernel, async_copies={}).problems
    assert problem.startswith("copies of nothing, where a tile takes 16 B")


def test_gathered_codes_must_be_loaded_widely(report):
    """8 rows of 512 bytes of codes are two 16-byte loads for each of 128 threads; one wide load is not enough."""
    kernel = one_kernel(report, "sm_90", "gather_quantized_latent", cache=CacheDType.FP8)
    assert made_up(report, kernel, global_loads={16: 2, 4: 9}).problems == ()
    assert made_up(report, kernel, global_loads={16: 1, 4: 9}).problems == ("2048 of 4096 B loaded 16 B at a time",)


def made_up(report: ModuleType, kernel, **resources):
    values = {
        "registers": 200,
        "stack_bytes": 0,
        "spills": Spills(0, 0),
        "shared_memory_bytes": 1024,
        "product": report.promised_product(kernel) or "",
        "global_loads": {16: 8},
        "async_copies": report.promised_tile_copies(kernel) or {},
        "loop": InnerLoop("SASS", 800, 100, 2),
        "unread": (),
    }
    return report.Row(kernel, report.Outcome(1.0, KernelResources(**{**values, **resources})))


def test_instructions_per_token(report):
    kernel = one_kernel(report, "sm_90", "attend", 64)
    # 8 warps issue 800 instructions for two steps of 64 keys.
    assert made_up(report, kernel).instructions_per_token == 8 * 800 / (2 * 64)
    assert "(PTX)" in report.cells(made_up(report, kernel, loop=InnerLoop("PTX", 800, 50, 1)))[-3]
    assert report.cells(made_up(report, kernel, loop=None))[-3] == "?"
    assert report.cells(made_up(report, one_kernel(report, "sm_90", "combine")))[-3] == "-"


def test_what_was_not_read_is_said(report):
    line = report.cells(
        made_up(report, one_kernel(report, "sm_90", "combine"), registers=None, spills=None, unread=("SASS: no tool",))
    )
    assert line[8:10] == ("?", "?")
    assert line[-1] == "unread: SASS: no tool"


def test_heads_and_caches_share_kernels_and_lines(report):
    ops, heads, plain, fp8 = ["GatherLatent", "AppendLatent"], (8, 12), CacheDType.FP16, CacheDType.FP8
    kernels = report.find_kernels(ops, [get_target("sm_80")], heads, [DType.FLOAT16], [plain, fp8])
    assert [(kernel.variant.kernel, kernel.caches, kernel.heads) for kernel in kernels] == [
        ("gather_latent", (plain,), heads),
        ("append_latent", (plain,), (8,)),
        ("append_latent", (plain,), (12,)),
        ("gather_quantized_latent", (fp8,), heads),
        ("append_quantized_latent", (fp8,), (8,)),
        ("append_quantized_latent", (fp8,), (12,)),
    ]
    lines = report.table_lines([made_up(report, kernel) for kernel in kernels])
    assert [(row.kernel.variant.kernel, *line[2:4]) for row, line in lines] == [
        ("gather_latent", "fp16", "8, 12"),
        ("append_latent", "fp16", "8, 12"),
        ("gather_quantized_latent", "fp8", "8, 12"),
        ("append_quantized_latent", "fp8", "8, 12"),
    ]
    different = [made_up(report, kernels[1]), made_up(report, kernels[2], registers=201)]
    assert len(report.table_lines(different)) == 2
    (shared,) = report.find_kernels(["ContextAttention"], [get_target("sm_80")], [8], [DType.FLOAT16], [plain, fp8])
    assert shared.caches == (plain, fp8)


def test_forms_by_number_of_heads(report):
    """What the plans promise: keys as rows below 64 heads, 64 heads as rows, two programs of 64 for 128."""
    targets = [get_target(name) for name in ("sm_90", "sm_100", "sm_86")]
    caches = [CacheDType.BF16, CacheDType.FP8]
    kernels = report.find_kernels(["LatentAttention"], targets, (12, 16, 32, 64, 128), [DType.BFLOAT16], caches)
    few, many = ("16 heads", "32 heads", "2 x 32 heads", "4 x 32 heads"), ("64 heads", "2 x 64 heads")
    assert report.form_lines(kernels) == [
        ("targets", "network", "cache", "tile", "MMA", "12, 16 heads", "32 heads", "64 heads", "128 heads"),
        ("---",) * 9,
        ("sm_90", "bfloat16", "bf16", "64 x 2", "wgmma", "16 keys", "32 keys", *many),
        ("sm_90, sm_100", "bfloat16", "fp8", "64 x 2", "mma.sync", *few),
        ("sm_100", "bfloat16", "bf16", "64 x 2", "tcgen05", "16 keys", "32 keys", *many),
        ("sm_86", "bfloat16", "bf16", "32 x 2", "mma.sync", *few),
        ("sm_86", "bfloat16", "fp8", "32 x 2", "mma.sync", *few),
    ]
    assert report.form_lines([]) == []


def test_command(report, tmp_path, capsys):
    options = ["--targets", "sm_90,sm_120", "--heads", "8,12", "--dtypes", "float16", "--ops", "GatherLatent"]
    options += ["--caches", "fp16,nvfp4,bf16"]
    files = ["--json", str(tmp_path / "out.json"), "--markdown", str(tmp_path / "out.md")]
    assert report.main([*options, *files]) == 0
    assert "4 kernels; 0 break a budget" in capsys.readouterr().out
    values = json.loads((tmp_path / "out.json").read_text())
    assert [
        (row["target"], row["kernel"], row["caches"], row["heads"], row["dtype"]) for row in values["kernels"]
    ] == [
        ("sm_90", "gather_latent", ["fp16"], [8, 12], "float16"),
        ("sm_90", "gather_quantized_latent", ["nvfp4"], [8, 12], "float16"),
        ("sm_120", "gather_latent", ["fp16"], [8, 12], "float16"),
        ("sm_120", "gather_quantized_latent", ["nvfp4"], [8, 12], "float16"),
    ]
    for row in values["kernels"]:
        assert row["resources"]["spills"] == {"stores": 0, "loads": 0}
        assert row["resources"]["stack_bytes"] == 0
        assert row["compile_seconds"] > 0
    text = (tmp_path / "out.md").read_text()
    assert f"\npython bench/kernel_report.py {' '.join(options)} --json " in text
    assert f"Triton {version('triton')} and its ptxas" in text
    assert "Nothing on this page ran on a GPU" in text
    assert "No kernel of this report breaks one." in text
    assert "\n## sm_90 (H100)\n\n| kernel | network | cache | heads |" in text
    assert "\n| gather_quantized_latent | float16 | nvfp4 | 8, 12 |" in text


def test_broken_budgets_are_listed(report):
    kernel = one_kernel(report, "sm_90", "attend", 32, CacheDType.NVFP4)
    rows = [made_up(report, kernel, stack_bytes=8), made_up(report, one_kernel(report, "sm_90", "combine"))]
    assert report.cells(rows[0])[-1] == "stack 8 B"
    text = report.markdown(rows, "command")
    assert "\n| sm_90 | attend | bfloat16 | nvfp4 | 32 | 32 x 64 | stack 8 B |\n" in text
    assert "No kernel of this report breaks one." not in text


def test_a_broken_budget_is_the_exit_status(report, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(report, "PROMISED_LOAD_BYTES", 32)
    assert report.main(["--targets", "sm_90", "--heads", "8", "--dtypes", "float16", "--ops", "GatherLatent"]) == 1
    assert "no load of 32 B" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--targets", "sm_70"], "found target 'sm_70', expected some of sm_80,sm_86"),
        (["--dtypes", "fp8,float16"], "found type 'fp8', expected some of float32"),
        (["--ops", ","], "found operation none, expected some of"),
        (["--caches", "int4"], "found cache 'int4', expected some of fp32,fp16,bf16,fp8,nvfp4"),
        (["--dtypes", "float16", "--caches", "bf16,fp32"], "expected a cache of a network's type, or fp8 or nvfp4"),
        (["--heads", "16,many"], "found '16,many', expected numbers from 1 to 1024"),
        (["--heads", "0"], "found '0', expected numbers"),
    ],
)
def test_wrong_options_are_refused(report, options, message, capsys):
    with pytest.raises(SystemExit) as status:
        report.main(options)
    assert status.value.code == 2
    assert message in capsys.readouterr().err
