"""The budgets of the kernels, held by compiling them, and the report that lists them."""

from __future__ import annotations

import importlib
import json
import re
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest

from trtllm_mla.dtypes import DType
from trtllm_mla.engine import kernel_compiler
from trtllm_mla.engine.kernel_resources import InnerLoop, KernelResources, Spills
from trtllm_mla.ops import OPS
from trtllm_mla.targets import TARGETS, get_target

SCRIPT = Path(__file__).parents[2] / "bench" / "kernel_report.py"
# Rows, columns and depth of the 16-bit MMA: PTX ISA, "mma.sync.aligned.m16n8k16".
MMA_SYNC_PRODUCTS = 16 * 8 * 16


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


def kernels_for(report: ModuleType, target: str, heads: int, dtype: DType = DType.BFLOAT16, op: str = "") -> list:
    return report.find_kernels([op] if op else list(OPS), [get_target(target)], [heads], [dtype])


def one_kernel(report: ModuleType, target: str, name: str, rows: int | None = None):
    kernels = [kernel for kernel in kernels_for(report, target, 24) if kernel.variant.kernel == name]
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
@pytest.mark.parametrize(("target", "heads"), [("sm_86", 12), ("sm_90", 24), ("sm_100", 128)])
def test_default_tiles_keep_their_budgets(report, cache, target, heads):
    """Nine kernels for each of three targets, about a second each."""
    seen = set()
    for kernel in kernels_for(report, target, heads):
        row = compiled(report, kernel, cache)
        resources, name = row.outcome.resources, kernel.variant.kernel
        assert row.problems == (), name
        assert resources.unread == (), name
        assert resources.shared_memory_bytes <= TARGETS[target].shared_memory_bytes
        assert resources.widest_load_bytes == 16
        known_stack = 32 if (target, name, kernel.rows) == ("sm_100", "attend", 64) else 0
        assert resources.stack_bytes <= known_stack
        if not known_stack:
            assert resources.spills == Spills(0, 0)
        seen.add((name, kernel.rows, resources.product))
        if kernel.keys is None:
            continue
        assert resources.async_copies.keys() == {16}
        warpgroup = kernel.rows >= 64 and target in ("sm_90", "sm_100")
        assert resources.product == ({"sm_90": "wgmma", "sm_100": "tcgen05"}[target] if warpgroup else "mma.sync")
        # The plan chooses the form by the same rule.
        assert dict(kernel.variant.constants).get("HOIST", not warpgroup) is not warpgroup
        assert resources.loop.source == "SASS"
        if resources.product == "mma.sync":
            # The loop that was found does one step's products; where warps outnumber the blocks of a score tile, some
            # of it is computed twice.
            depth = 128 + 64 + 128 if name == "context_attention" else 512 + 64 + 512
            work = kernel.rows * kernel.keys * depth * resources.loop.iterations
            done = resources.loop.products * kernel.variant.num_warps * MMA_SYNC_PRODUCTS
            assert work <= done < 2 * work
    rows = {(name, rows) for name, rows, _ in seen}
    large = {(name, 64) for name in ("attend", "attend_split")} if target in ("sm_90", "sm_100") else set()
    assert rows >= {("attend", 16), ("attend_split", 16), ("combine", None), ("context_attention", 128)} | large


@pytest.mark.xfail(strict=True, reason="ptxas needs more than 255 registers with 24 heads; see docs/kernels.md")
@pytest.mark.parametrize(("target", "name", "rows"), [("sm_80", "context_attention", 128), ("sm_100", "attend", 64)])
def test_default_tiles_that_break_their_budgets(report, cache, target, name, rows):
    assert compiled(report, one_kernel(report, target, name, rows), cache).problems == ()


def test_a_tile_over_the_shared_memory_is_a_problem(report, cache):
    """The default tile of 32 keys, made 128 keys with 3 stages: 288 KiB of tiles alone."""
    row = compiled(report, changed(one_kernel(report, "sm_86", "attend", 16), BLOCK_N=128, num_stages=3), cache)
    (problem,) = row.problems
    assert re.fullmatch(r"not compiled: UserError: .* takes \d{6} bytes .* sm_86 \(RTX 3090\) has 101376 .*", problem)


def test_a_tile_over_the_registers_is_a_problem(report, cache):
    kernel = changed(one_kernel(report, "sm_90", "context_attention"), num_warps=4)
    problems = " ".join(compiled(report, kernel, cache).problems)
    assert re.search(r"stack [1-9]\d* B spills [1-9]\d*/[1-9]\d* B", problems)


def test_a_tile_below_the_warpgroups_is_a_problem(report, cache):
    """Two warps are no warpgroup."""
    kernel = changed(one_kernel(report, "sm_90", "context_attention"), num_warps=2, BLOCK_N=16)
    assert "mma.sync instead of wgmma" in compiled(report, kernel, cache).problems


def test_narrow_loads_are_a_problem(report, cache, monkeypatch):
    """Without the promise of alignment there are no loads of 16 bytes."""
    monkeypatch.setattr(kernel_compiler, "POINTER_ALIGNMENT", 4)
    row = compiled(report, one_kernel(report, "sm_90", "gather_latent"), cache)
    assert row.problems == ("no load of 16 B",)
    row = compiled(report, one_kernel(report, "sm_86", "context_attention"), cache)
    assert "copies of 4 B" in row.problems


def made_up(report: ModuleType, kernel, **resources):
    values = {
        "registers": 200,
        "stack_bytes": 0,
        "spills": Spills(0, 0),
        "shared_memory_bytes": 1024,
        "product": report.promised_product(kernel) or "",
        "global_loads": {4: 8},
        "async_copies": {16: 36},
        "loop": InnerLoop("SASS", 800, 100, 2),
        "unread": (),
    }
    return report.Row(kernel, report.Outcome(1.0, KernelResources(**{**values, **resources})))


def test_known_stacks_are_named_and_no_larger_ones_pass(report):
    known = one_kernel(report, "sm_100", "attend", 64)
    row = made_up(report, known, stack_bytes=32, spills=Spills(28, 36))
    assert row.problems == ()
    assert "known: stack 32 B" in report.cells(row)[-1]
    assert made_up(report, known, stack_bytes=40).problems == ("stack 40 B",)
    assert made_up(report, one_kernel(report, "sm_100", "attend", 32), stack_bytes=32).problems == ("stack 32 B",)
    assert made_up(report, known).exceptions == ()


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
    assert line[6:8] == ("?", "?")
    assert line[-1] == "unread: SASS: no tool"


def test_heads_share_kernels_and_lines(report):
    kernels = report.find_kernels(["GatherLatent", "AppendLatent"], [get_target("sm_80")], [8, 12], [DType.FLOAT16])
    assert [(kernel.variant.kernel, kernel.heads) for kernel in kernels] == [
        ("gather_latent", (8, 12)),
        ("append_latent", (8,)),
        ("append_latent", (12,)),
    ]
    lines = report.table_lines([made_up(report, kernel) for kernel in kernels])
    assert [(row.kernel.variant.kernel, line[2]) for row, line in lines] == [
        ("gather_latent", "8, 12"),
        ("append_latent", "8, 12"),
    ]
    different = [made_up(report, kernels[1]), made_up(report, kernels[2], registers=201)]
    assert len(report.table_lines(different)) == 2


def test_command(report, tmp_path, capsys):
    options = ["--targets", "sm_90,sm_120", "--heads", "8,12", "--dtypes", "float16", "--ops", "GatherLatent"]
    files = ["--json", str(tmp_path / "out.json"), "--markdown", str(tmp_path / "out.md")]
    assert report.main([*options, *files]) == 0
    assert "2 kernels; 0 break a budget" in capsys.readouterr().out
    values = json.loads((tmp_path / "out.json").read_text())
    assert [(row["target"], row["heads"], row["dtype"]) for row in values["kernels"]] == [
        ("sm_90", [8, 12], "float16"),
        ("sm_120", [8, 12], "float16"),
    ]
    for row in values["kernels"]:
        assert row["resources"]["spills"] == {"stores": 0, "loads": 0}
        assert row["resources"]["stack_bytes"] == 0
        assert row["compile_seconds"] > 0
    text = (tmp_path / "out.md").read_text()
    assert text.startswith("## sm_90 (H100)\n\n| kernel | dtype | heads |")
    assert "\n| gather_latent | float16 | 8, 12 |" in text


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
        (["--heads", "16,many"], "found '16,many', expected numbers from 1 to 1024"),
        (["--heads", "0"], "found '0', expected numbers"),
    ],
)
def test_wrong_options_are_refused(report, options, message, capsys):
    with pytest.raises(SystemExit) as status:
        report.main(options)
    assert status.value.code == 2
    assert message in capsys.readouterr().err
