"""Reading what compiled kernels take: parsers on listings written by hand, and the tools on a real kernel."""

from __future__ import annotations

import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.ops.gather_latent.test_plan import PROBLEM
from trtllm_mla.engine import kernel_resources
from trtllm_mla.engine.kernel_compiler import compile_variant, triton_cache
from trtllm_mla.engine.kernel_resources import (
    InnerLoop,
    Spills,
    async_copies,
    find_inner_loop,
    find_loops,
    find_product,
    global_loads,
    parse_ptx,
    parse_sass,
    parse_spills,
    read_resources,
)
from trtllm_mla.ops.gather_latent import GATHER_LATENT
from trtllm_mla.targets import TARGETS

# An outer loop (2 to 7) around an inner one (3 to 6), which waits for a barrier in a block behind the end (9 to 11);
# then a function that is called, which jumps to itself, as cubins have for padding.
SASS = """
kernel:
.text.kernel:
        /*0000*/                   S2R R0, SR_CTAID.X ;
        /*0010*/              @!P0 BRA `(.L_x_3) ;
.L_x_0:
        /*0020*/                   LDG.E.128 R4, desc[UR4][R2.64] ;
.L_x_1:
        /*0030*/                   HMMA.16816.F32.BF16 R4, R8, R12, R4 ;
        /*0040*/              @!P1 BRA `(.L_x_4) ;
.L_x_2:
        /*0050*/                   HMMA.16816.F32.BF16 R4, R8, R14, R4 ;
        /*0060*/                   BRA P2, `(.L_x_1) ;
        /*0070*/                   BRA.U UP0, `(.L_x_0) ;
.L_x_3:
        /*0080*/                   EXIT ;
.L_x_4:
        /*0090*/                   SYNCS.PHASECHK.TRANS64.TRYWAIT P1, [R3], R5 ;
        /*00a0*/              @!P1 BRA `(.L_x_4) ;
        /*00b0*/                   BRA `(.L_x_2) ;
.L_x_5:
        /*00c0*/                   HFMA2.MMA R4, -RZ, RZ, 0, 0 ;
        /*00d0*/                   BRA `(.L_x_5);
"""
PTX = """
.visible .entry kernel(
$L__func_begin0:
	.loc	1 20 0
	mov.u32 	%r1, %ctaid.x;
	@%p1 bra 	$L__BB0_3;
$L__BB0_1:                              // %loop
	// begin inline asm
	@%p3 cp.async.cg.shared.global [ %r1 + 0 ], [ %rd1 + 0 ], 0x10, %r2;
	{
	.reg .pred complete;
	waitLoop:
	mbarrier.try_wait.shared.b64 complete, [%r3], %r4;
	@!complete bra.uni waitLoop;
	}
	mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 { %f1 }, { %r1 }, { %r2 }, { %f1 };
	fma.rn.f32 	%f2, %f3, %f4, %f5;
	@%p2 bra 	$L__BB0_1;
	bra.uni 	$L__BB0_3;
$L__BB0_3:
	ret;
"""


def test_sass_loops_keep_their_out_of_line_waits():
    loops = sorted(map(sorted, find_loops(parse_sass(SASS))), key=len)
    assert loops == [[9, 10], [3, 4, 5, 6, 9, 10, 11], [2, 3, 4, 5, 6, 7, 9, 10, 11]]


def test_inner_loop_of_the_products():
    ptx = parse_ptx(PTX)
    # ptxas does two steps of the PTX loop, with one product each, in an iteration.
    assert find_inner_loop(ptx, parse_sass(SASS)) == InnerLoop("SASS", instructions=7, products=2, iterations=2)
    assert find_inner_loop(ptx, None) == InnerLoop("PTX", instructions=6, products=1, iterations=1)


def test_no_loop_and_disagreeing_loops_are_none():
    straight = parse_ptx(PTX.replace("@%p2 bra", "//"))
    assert find_inner_loop(straight, parse_sass(SASS)) is None
    assert find_inner_loop(parse_ptx(PTX), parse_sass(SASS.replace("HMMA", "IADD3"))) is None
    two_in_three = PTX.replace("fma.rn.f32 ", "mma.sync.aligned ").replace("mov.u32", "mma.sync.aligned")
    three = SASS.replace("SYNCS.PHASECHK.TRANS64.TRYWAIT", "HMMA.16816")
    assert find_inner_loop(parse_ptx(two_in_three), parse_sass(three)) is None


@pytest.mark.parametrize(
    ("line", "name"),
    [
        ("wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {%f1}, %rd1;", "wgmma"),
        ("@%p4 tcgen05.mma.cta_group::1.kind::f16 [ %r1 + 0 ], %rd1, %rd2, %r3, %p1;", "tcgen05"),
        ("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%f1};", "mma.sync"),
        ("fma.rn.ftz.f32 %f1, %f2, %f3;", "FMA"),
        ("tcgen05.wait::ld.sync.aligned;", ""),
        ("add.f32 %f1, %f2, %f3; // wgmma.mma_async.sync", ""),
    ],
)
def test_product(line, name):
    assert find_product(f"\t{line}\n") == name


def test_two_kinds_of_mma_are_both_named():
    assert find_product("\twgmma.mma_async.sync x;\n\tmma.sync.aligned y;\n\tfma.rn.f32 z;\n") == "wgmma+mma.sync"


def test_widths():
    ptx = """
	@%p1 ld.global.v4.b32 { %r1, %r2, %r3, %r4 }, [ %rd1 + 0 ];
	ld.global.L1::evict_last.v2.b32 { %r1, %r2 }, [ %rd1 + 0 ];
	ld.global.nc.v4.b64 { %rd1, %rd2, %rd3, %rd4 }, [ %rd1 + 0 ];
	ld.global.b16 { %rs1 }, [ %rd1 + 0 ];
	ld.global.b16 { %rs1 }, [ %rd1 + 2 ];
	st.global.v4.b32 [ %rd1 + 0 ], { %r1, %r2, %r3, %r4 };
	ld.shared.v4.b32 { %r1, %r2, %r3, %r4 }, [ %r1 ];
	cp.async.cg.shared.global [ %r1 + 0 ], [ %rd1 + 0 ], 0x10, %r2;
	cp.async.ca.shared.global [ %r1 + 0 ], [ %rd1 + 0 ], 0x4, %r2;
	cp.async.wait_group 	0;
"""
    assert global_loads(ptx) == {32: 1, 16: 1, 8: 1, 2: 2}
    assert async_copies(ptx) == {16: 1, 4: 1}


def test_spills():
    log = "ptxas info    : Function properties for attend\n    32 bytes stack frame, 28 bytes spill stores, 36 bytes"
    assert parse_spills(log + " spill loads\n") == Spills(stores=28, loads=36)
    assert parse_spills("ptxas info    : 0 bytes gmem") is None


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    (variant,) = GATHER_LATENT.variants(PROBLEM)
    with triton_cache(tmp_path_factory.mktemp("cache")):
        return compile_variant(variant, TARGETS["sm_80"])


def test_what_is_not_known_is_said(compiled):
    resources = read_resources(compiled)
    assert 0 < resources.registers <= 255
    assert resources.stack_bytes == 0
    assert resources.shared_memory_bytes == 0
    assert resources.widest_load_bytes == 16
    assert resources.product == ""
    assert resources.loop is None
    assert resources.spills is None
    assert resources.unread == ("spills: ptxas did not report them",)


def test_missing_tools_are_said(compiled, monkeypatch):
    def absent(tool: str, option: str, cubin: bytes) -> str:
        raise FileNotFoundError(f"no {tool}")

    monkeypatch.setattr(kernel_resources, "_run_tool", absent)
    loop = SimpleNamespace(asm={**compiled.asm, "ptx": PTX}, metadata=compiled.metadata)
    resources = read_resources(loop, "0 bytes spill stores, 0 bytes spill loads")
    assert (resources.registers, resources.stack_bytes) == (None, None)
    assert resources.loop.source == "PTX"
    assert resources.unread == ("registers and stack: no cuobjdump", "SASS: no nvdisasm")


def test_broken_cubins_are_refused(tmp_path: Path):
    with pytest.raises(subprocess.CalledProcessError):
        kernel_resources.resource_usage(b"no cubin")
