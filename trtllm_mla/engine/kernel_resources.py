"""What a compiled kernel takes and does, read from its code: registers, memory, MMA instructions, loops.

Triton brings ptxas, cuobjdump and nvdisasm, so none of this needs a GPU or the CUDA toolkit.
"""

from __future__ import annotations

import re
import subprocess
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from triton.compiler import CompiledKernel

# In the order of preference for naming a kernel that has several: name, PTX opcode, SASS opcode.
_PRODUCTS = (
    ("tcgen05", re.compile(r"tcgen05\.mma\."), re.compile(r"UTC[A-Z]*MMA")),
    ("wgmma", re.compile(r"wgmma\.mma_async\."), re.compile(r"[HIQ]GMMA\.")),
    ("mma.sync", re.compile(r"mma\.sync\."), re.compile(r"[HIQO]MMA\.")),
    ("FMA", re.compile(r"fma\."), re.compile(r"FFMA")),
)


@dataclass(frozen=True)
class Spills:
    """What ptxas moved from registers to local memory, in bytes of a thread's instructions.

    Attributes:
        stores: Written.
        loads: Read.
    """

    stores: int
    loads: int


@dataclass(frozen=True)
class InnerLoop:
    """The loop that does the kernel's products.

    Attributes:
        source: What was read: the machine's code, or PTX where that cannot be disassembled.
        instructions: Instructions of the loop's body, each counted once, waiting for barriers included.
        products: How many of them are products, that is MMAs or FMAs.
        iterations: How many of the kernel's iterations the body does at once; more than 1 where ptxas unrolled it.
    """

    source: Literal["SASS", "PTX"]
    instructions: int
    products: int
    iterations: int


@dataclass(frozen=True)
class KernelResources:
    """What a compiled kernel takes and does. None is what could not be read.

    Attributes:
        registers: Registers of a thread.
        stack_bytes: Local memory of a thread.
        spills: Spilled registers. Only the run of the compiler that makes a kernel says so.
        shared_memory_bytes: Dynamic shared memory of a block.
        product: ``tcgen05``, ``wgmma``, ``mma.sync`` or ``FMA``, joined by ``+`` if a kernel has several kinds of MMA;
            empty without products.
        global_loads: Width in bytes of loads from global memory to registers: how many instructions have it.
        async_copies: The same for copies from global to shared memory.
        loop: The loop of the products.
        unread: Why something could not be read.
    """

    registers: int | None
    stack_bytes: int | None
    spills: Spills | None
    shared_memory_bytes: int
    product: str
    global_loads: dict[int, int]
    async_copies: dict[int, int]
    loop: InnerLoop | None
    unread: tuple[str, ...]

    @property
    def widest_load_bytes(self) -> int:
        """Width of the widest load or copy from global memory; 0 without one."""
        return max((*self.global_loads, *self.async_copies), default=0)


@dataclass(frozen=True)
class Instruction:
    """An instruction, as far as control flow needs it.

    Attributes:
        opcode: Its opcode with modifiers.
        target: Label it may branch to.
        falls_through: Whether the next instruction may follow.
    """

    opcode: str
    target: str | None = None
    falls_through: bool = True


@dataclass(frozen=True)
class Code:
    """A function's instructions.

    Attributes:
        instructions: In the order of their addresses.
        labels: Index of the instruction behind each label.
    """

    instructions: tuple[Instruction, ...]
    labels: dict[str, int]


def read_resources(compiled: CompiledKernel, ptxas_log: str | None = None) -> KernelResources:
    """Reads what a compiled kernel takes and does.

    Args:
        compiled: The kernel.
        ptxas_log: What ptxas wrote when it made the kernel (``triton.knobs.nvidia.dump_ptxas_log``).
    """
    ptx, unread = compiled.asm["ptx"], []
    registers = stack = sass = None
    try:
        registers, stack = resource_usage(compiled.asm["cubin"])
    except (OSError, subprocess.CalledProcessError, ValueError) as error:
        unread.append(f"registers and stack: {error}")
    try:
        sass = parse_sass(disassemble(compiled.asm["cubin"]))
    except (OSError, subprocess.CalledProcessError) as error:
        unread.append(f"SASS: {error}")
    spills = None if ptxas_log is None else parse_spills(ptxas_log)
    if spills is None:
        unread.append("spills: ptxas did not report them")
    return KernelResources(
        registers=registers,
        stack_bytes=stack,
        spills=spills,
        shared_memory_bytes=compiled.metadata.shared,
        product=find_product(ptx),
        global_loads=global_loads(ptx),
        async_copies=async_copies(ptx),
        loop=find_inner_loop(parse_ptx(ptx), sass),
        unread=tuple(unread),
    )


def resource_usage(cubin: bytes) -> tuple[int, int]:
    """Registers and stack bytes of a thread, as cuobjdump reads them from a cubin.

    Raises:
        ValueError: cuobjdump does not say.
    """
    usage = _run_tool("cuobjdump", "-res-usage", cubin)
    found = re.search(r"REG:(\d+) STACK:(\d+)", usage)
    if not found:
        raise ValueError(f"cuobjdump says {usage!r}")
    return int(found[1]), int(found[2])


def disassemble(cubin: bytes) -> str:
    """A cubin's SASS, as nvdisasm prints it."""
    return _run_tool("nvdisasm", "-c", cubin)


def parse_spills(ptxas_log: str) -> Spills | None:
    """The spills that ptxas reports with ``-v``; None if the log does not tell."""
    found = re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", ptxas_log)
    return Spills(int(found[1]), int(found[2])) if found else None


def find_product(ptx: str) -> str:
    """The instructions that multiply: every kind of MMA, or ``FMA`` without one."""
    opcodes = [instruction.opcode for instruction in parse_ptx(ptx).instructions]
    kinds = [name for name, pattern, _ in _PRODUCTS if any(map(pattern.match, opcodes))]
    return "+".join(kind for kind in kinds if kind != "FMA") or "".join(kinds)


def global_loads(ptx: str) -> dict[int, int]:
    """How many loads from global memory to registers there are of each width in bytes, widest first."""
    found = re.findall(r"\bld\.global(?:\.[\w:]+)*?(?:\.v(\d))?\.[bsuf](8|16|32|64|128)\s", ptx)
    return _widths(int(elements or 1) * int(bits) // 8 for elements, bits in found)


def async_copies(ptx: str) -> dict[int, int]:
    """How many copies from global to shared memory there are of each width in bytes, widest first."""
    found = re.findall(r"\bcp\.async\.c[ag]\S* \[[^]]*\], \[[^]]*\], (0x[0-9a-f]+|\d+)", ptx)
    return _widths(int(size, 0) for size in found)


def _widths(widths: Iterable[int]) -> dict[int, int]:
    return dict(sorted(Counter(widths).items(), reverse=True))


def parse_sass(text: str) -> Code:
    """Reads what nvdisasm prints."""
    instructions: list[Instruction] = []
    labels = {}
    for line in text.splitlines():
        if label := re.match(r"(\.L\w+):", line):
            labels[label[1]] = len(instructions)
        elif found := re.match(r"\s+/\*[0-9a-f]{4,}\*/\s+(@\S+ )?\s*([A-Z][\w.]*)(.*?);", line):
            guard, opcode, operands = found.groups()
            name = opcode.partition(".")[0]
            target = re.search(r"`\((\.L\w+)\)", operands) if name == "BRA" else None
            # A branch depends on a condition before it or among its operands.
            always = not guard and (name in ("EXIT", "RET") or (target and operands[: target.start()].strip() == ""))
            instructions.append(Instruction(opcode, target and target[1], not always))
    return Code(tuple(instructions), labels)


def parse_ptx(text: str) -> Code:
    """Reads PTX as Triton prints it: an instruction a line. Loops in inline assembly count as part of their line."""
    instructions: list[Instruction] = []
    labels = {}
    for line in text.splitlines():
        if label := re.match(r"(\$L__BB\w+):", line):
            labels[label[1]] = len(instructions)
        elif found := re.match(r"\s*(@!?%?\w+\s+)?([a-z]\w*(?:(?:\.|::)\w+)*)\b(?!:)(.*)", line):
            guard, opcode, operands = found.groups()
            name = opcode.partition(".")[0]
            target = re.match(r"\s*(\$L__BB\w+);", operands) if name == "bra" else None
            always = not guard and (target or name == "ret")
            instructions.append(Instruction(opcode, target and target[1], not always))
    return Code(tuple(instructions), labels)


def find_inner_loop(ptx: Code, sass: Code | None) -> InnerLoop | None:
    """Finds the loop of a kernel's products: the innermost one with most of them, the shortest of equals.

    ptxas may unroll it. How often is the number of products in the SASS of the loop, over that in its PTX.

    Args:
        ptx: The code as Triton compiled it, which does one step of the kernel's loop in an iteration.
        sass: The machine's code; None if it could not be disassembled.

    Returns:
        The loop; None if there is none, or if SASS and PTX do not agree.
    """
    for _, ptx_pattern, sass_pattern in _PRODUCTS:
        of_ptx = _product_loop(ptx, ptx_pattern)
        if of_ptx is None:
            continue
        if sass is None:
            return InnerLoop("PTX", *of_ptx, iterations=1)
        of_sass = _product_loop(sass, sass_pattern)
        if of_sass is None:
            return None
        unrolled = of_sass[1] / of_ptx[1]
        iterations = round(unrolled)
        # FMAs also turn up where a product is added or subtracted, so that their numbers agree only roughly.
        if iterations < 1 or abs(unrolled - iterations) > 0.1:
            return None
        return InnerLoop("SASS", *of_sass, iterations)
    return None


def _product_loop(code: Code, product: re.Pattern[str]) -> tuple[int, int] | None:
    """Instructions and products of the loop of the products."""
    loops = []
    for loop in find_loops(code):
        products = sum(bool(product.match(code.instructions[index].opcode)) for index in loop)
        if products:
            loops.append((loop, products))
    innermost = [(loop, count) for loop, count in loops if not any(other < loop for other, _ in loops)]
    if not innermost:
        return None
    loop, count = max(innermost, key=lambda found: (found[1], -len(found[0])))
    return len(loop), count


def find_loops(code: Code) -> list[frozenset[int]]:
    """The natural loops of a function: for each header of a loop, the indices of the loop's instructions.

    An edge to a block that dominates the edge's origin closes a loop; its body is what reaches the origin without
    passing that block (Aho, Lam, Sethi, Ullman: Compilers, section 9.6.6).
    """
    starts = _block_starts(code)
    ends = [*starts[1:], len(code.instructions)]
    block_at = {start: block for block, start in enumerate(starts)}
    successors: list[set[int]] = []
    for block, end in enumerate(ends):
        last = code.instructions[end - 1]
        after = {block + 1} if last.falls_through and block + 1 < len(starts) else set()
        if last.target is not None and code.labels[last.target] in block_at:
            after.add(block_at[code.labels[last.target]])
        successors.append(after)
    predecessors: list[set[int]] = [set() for _ in starts]
    dominators = _dominators(successors)
    for block in dominators:
        for following in successors[block]:
            predecessors[following].add(block)

    bodies: dict[int, set[int]] = {}
    for block, of_block in dominators.items():
        for header in successors[block] & of_block:
            body, pending = bodies.setdefault(header, {header}), [block]
            while pending:
                member = pending.pop()
                if member not in body:
                    body.add(member)
                    pending.extend(predecessors[member])
    return [frozenset(i for block in body for i in range(starts[block], ends[block])) for body in bodies.values()]


def _block_starts(code: Code) -> list[int]:
    branches = (i for i, found in enumerate(code.instructions) if found.target is not None or not found.falls_through)
    starts = {0, *code.labels.values(), *(index + 1 for index in branches)}
    return sorted(start for start in starts if start < len(code.instructions))


def _dominators(successors: Sequence[set[int]]) -> dict[int, set[int]]:
    """For each block that can be reached from block 0, the blocks on every way to it, itself included."""
    reached, pending = {0}, [0]
    while pending:
        for after in successors[pending.pop()] - reached:
            reached.add(after)
            pending.append(after)
    dominators = {block: set(reached) for block in reached}
    dominators[0] = {0}
    changed = True
    while changed:
        changed = False
        for block in sorted(reached - {0}):
            before = [dominators[other] for other in reached if block in successors[other]]
            found = {block} | set.intersection(*before)
            if found != dominators[block]:
                dominators[block], changed = found, True
    return dominators


def _run_tool(tool: str, option: str, cubin: bytes) -> str:
    """Runs one of the tools that come with Triton on a cubin and returns what it prints."""
    import triton

    program = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / tool
    with TemporaryDirectory() as directory:
        path = Path(directory) / "kernel.cubin"
        path.write_bytes(cubin)
        return subprocess.run([program, option, path], capture_output=True, text=True, check=True).stdout  # noqa: S603
