"""Launch plan of RoutedExperts: sort the slots by expert, two grouped products, weighted sum.

The last two launches repeat, for bands of the output's columns, where the fp32 results of all slots would take more
than ``BAND_BYTES``; they would be 1.9 GB for 8192 tokens of DeepSeek-V3. A band reads its own rows of the weights, so
that none is read more often.

The plan serves every operation of routed experts: they differ in how weights are stored, which ``Products`` says.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from trtllm_mla.dtypes import DType
from trtllm_mla.ops.expression import maximum, minimum
from trtllm_mla.ops.plan import (
    ITEMSIZES,
    MAX_INT32,
    KernelVariant,
    Launch,
    LaunchPlan,
    ScalarArgument,
    TensorArgument,
    WorkspaceArgument,
    WorkspaceLayout,
    ceil_div,
    next_power_of_two,
    repeat,
)
from trtllm_mla.targets import KIB

if TYPE_CHECKING:
    from trtllm_mla.ops.definition import Problem
    from trtllm_mla.targets import Target

BAND_BYTES = 256 * KIB * KIB
# A band's columns are a multiple of it, so that its rows are aligned. Every tile of the second product divides it.
COLUMN_STEP = 128
# Slots that a program of sort_slots looks at together, and the most that a row block has.
_BLOCK_S = 1024
_MAX_BLOCK_M = 128
# Row blocks that go through the column blocks together.
_GROUP_BLOCKS = 8
# Columns of a program of weighted_sum: one load of 16 bytes a choice for each of its 128 threads.
_SUM_COLUMNS = 512


@dataclass(frozen=True)
class Tile:
    """How a program of a product is laid out.

    Attributes:
        block_m: Slots of a program.
        block_n: Columns of the product that it computes.
        block_k: Products that it sums at once.
        num_warps: Warps.
        num_stages: Software pipelining depth.
    """

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int


@dataclass(frozen=True)
class Tiles:
    """The tiles of the two products, which have the same row blocks.

    Attributes:
        gate_up: The first product's. It has two weight tiles and two accumulators.
        down: The second's.
    """

    gate_up: Tile
    down: Tile

    @property
    def block_m(self) -> int:
        """Slots of a row block."""
        return self.gate_up.block_m


@dataclass(frozen=True)
class Products:
    """The two products of an operation of routed experts: what depends on how weights are stored.

    Attributes:
        op: Name of the operation, whose kernels are ``gate_up`` and ``down``. The other kernels are RoutedExperts'.
        gate_up_weights: Name and element type, as in the contract, of the weight inputs that ``gate_up`` reads.
        down_weights: Those that ``down`` reads.
        constants: Compile-time parameters of both kernels beside those of RoutedExperts', in front of the tile's.
        tile_choices: Tiles for ever more slots an expert.
    """

    op: str
    gate_up_weights: tuple[tuple[str, str], ...]
    down_weights: tuple[tuple[str, str], ...]
    constants: tuple[tuple[str, int], ...]
    tile_choices: Callable[[DType, Target], tuple[Tiles, ...]]

    def choose_tiles(self, problem: Problem) -> Tiles:
        """The smallest tiles that hold an expert's slots if they are spread evenly, or the largest there are."""
        choices = self.tile_choices(problem.model_dtype, problem.target)
        slots, experts = _slots(problem), problem.dims["experts"]
        return next((tiles for tiles in choices if slots <= tiles.block_m * experts), choices[-1])


def plan(problem: Problem) -> LaunchPlan:
    """Plans the launches of RoutedExperts."""
    return plan_experts(problem, PRODUCTS)


def variants(problem: Problem) -> tuple[KernelVariant, ...]:
    """The variants of all tiles of RoutedExperts."""
    return experts_variants(problem, PRODUCTS)


def max_workspace_bytes(problem: Problem) -> int:
    """Workspace of RoutedExperts for all numbers of tokens up to the problem's."""
    return max_experts_workspace_bytes(problem, PRODUCTS)


def choose_tiles(problem: Problem) -> Tiles:
    """The tiles of RoutedExperts."""
    return PRODUCTS.choose_tiles(problem)


def plan_experts(problem: Problem, products: Products) -> LaunchPlan:
    """Plans the launches of an operation of routed experts.

    Args:
        problem: The problem.
        products: The operation's products.
    """
    dims, tokens, slots = problem.dims, problem.dims["tokens"], _slots(problem)
    _check(problem, products)
    if slots == 0:
        return LaunchPlan(())
    tiles = products.choose_tiles(problem)
    row_blocks = row_block_bound(slots, dims["experts"], tiles.block_m)
    steps, band = ceil_div(dims["hidden_size"], COLUMN_STEP), _band_steps(problem)
    work = _Workspace.reserve(problem, tiles.block_m, slots * band * COLUMN_STEP)
    first_expert = ScalarArgument(problem.attributes["first_expert"])
    first = (
        Launch(
            _sort_slots(problem),
            (dims["experts"], 1, 1),
            (
                TensorArgument("expert_ids"),
                *work.blocks,
                ScalarArgument(slots),
                first_expert,
                ScalarArgument(tiles.block_m),
            ),
        ),
        Launch(
            _gate_up(problem, products, tiles.gate_up),
            (row_blocks * ceil_div(dims["intermediate_size"], tiles.gate_up.block_n), 1, 1),
            (
                TensorArgument("hidden"),
                *(TensorArgument(name) for name, _ in products.gate_up_weights),
                *work.blocks,
                work.gated,
                ScalarArgument(row_blocks),
            ),
        ),
    )

    def band_of(first_step: int) -> tuple[Launch, Launch]:
        band_steps = minimum(band, steps - first_step)
        columns = (ScalarArgument(first_step), ScalarArgument(band_steps))
        return (
            Launch(
                _down(problem, products, tiles.down),
                (row_blocks * band_steps * (COLUMN_STEP // tiles.down.block_n), 1, 1),
                (
                    work.gated,
                    *(TensorArgument(name) for name, _ in products.down_weights),
                    *work.blocks,
                    work.partial,
                    ScalarArgument(row_blocks),
                    *columns,
                ),
            ),
            Launch(
                _weighted_sum(problem),
                (tokens * ceil_div(band_steps * COLUMN_STEP, _SUM_COLUMNS), 1, 1),
                (
                    work.partial,
                    TensorArgument("expert_ids"),
                    TensorArgument("expert_weights"),
                    TensorArgument("output"),
                    ScalarArgument(tokens),
                    first_expert,
                    *columns,
                ),
            ),
        )

    return LaunchPlan((*first, *repeat(steps, band, band_of)), work.size)


def experts_variants(problem: Problem, products: Products) -> tuple[KernelVariant, ...]:
    """The variants of all tiles of an operation of routed experts."""
    choices = products.tile_choices(problem.model_dtype, problem.target)
    found = (
        _sort_slots(problem),
        *(_gate_up(problem, products, tiles.gate_up) for tiles in choices),
        *(_down(problem, products, tiles.down) for tiles in choices),
        _weighted_sum(problem),
    )
    return tuple(dict.fromkeys(found))


def max_experts_workspace_bytes(problem: Problem, products: Products) -> int:
    """Workspace of an operation of routed experts for all numbers of tokens up to the problem's.

    All of its parts but the last grow with the tokens. Fewer tokens may make wider bands, of up to ``BAND_BYTES`` or
    one step, whichever is more.
    """
    slots = _slots(problem)
    if slots == 0:
        return 0
    all_columns = ceil_div(problem.dims["hidden_size"], COLUMN_STEP) * COLUMN_STEP
    widest_band = maximum(BAND_BYTES // ITEMSIZES["fp32"], slots * COLUMN_STEP)
    block_m = products.choose_tiles(problem).block_m
    return _Workspace.reserve(problem, block_m, minimum(slots * all_columns, widest_band)).size


def tile_choices(dtype: DType, target: Target) -> tuple[Tiles, ...]:
    """Tiles of RoutedExperts for ever more slots an expert.

    Few slots leave the time to reading weights, for which many small tiles in flight are enough. The largest tiles
    leave shared memory and registers for two programs on a multiprocessor, so that one multiplies while the other
    begins or ends. Fp32 is multiplied without tensor cores, from registers.
    """
    if dtype is DType.FLOAT32:
        return (Tiles(Tile(16, 32, 32, 4, 2), Tile(16, 64, 32, 4, 2)),)
    stages = 4 if _multiplies_shared(target) else 3
    return (
        Tiles(Tile(16, 64, 64, 4, stages), Tile(16, 64, 64, 4, stages)),
        Tiles(Tile(64, 64, 64, 4, 3), Tile(64, 128, 64, 4, 3)),
        Tiles(Tile(128, 64, 64, 8, 3), Tile(128, 128, 64, 8, 3)),
    )


PRODUCTS = Products(
    op="RoutedExperts",
    gate_up_weights=(("gate_up_proj", "model"),),
    down_weights=(("down_proj", "model"),),
    constants=(),
    tile_choices=tile_choices,
)


def shared_memory_bytes(tile: Tile, weight_tiles: int, dtype: DType, target: Target) -> int:
    """Upper bound on the shared memory of a program of a product, as Triton 3.9 compiles it.

    Tensor cores that read tiles from shared memory still hold one while that ``num_stages`` behind it is loaded. The
    product is rearranged for storing where the tiles were.

    Args:
        tile: The tile.
        weight_tiles: Weight tiles of a step: 2 for gate and up, 1 for down.
        dtype: The model's type.
        target: The GPU generation.
    """
    reads_shared = _multiplies_shared(target) and tile.block_m >= 64
    step = (tile.block_m + weight_tiles * tile.block_n) * tile.block_k * dtype.itemsize
    return (
        max((tile.num_stages if reads_shared else tile.num_stages - 1) * step, 4 * tile.block_m * tile.block_n) + KIB
    )


def row_block_bound(slots: int, experts: int, block_m: int) -> int:
    """Most row blocks that the slots can need.

    Only the device knows how many slots each expert has. The first slots of n experts need n row blocks, and every
    ``block_m`` of the others at most one more.
    """
    nonempty = minimum(experts, slots)
    return nonempty + (slots - nonempty) // block_m


@dataclass(frozen=True)
class _Workspace:
    """Parts of the workspace.

    Attributes:
        blocks: Number of row blocks, their experts, and their slots.
        gated: [slots, intermediate_size], of the model's type.
        partial: fp32 [slots, columns of the widest band].
        size: Bytes of all.
    """

    blocks: tuple[WorkspaceArgument, WorkspaceArgument, WorkspaceArgument]
    gated: WorkspaceArgument
    partial: WorkspaceArgument
    size: int

    @classmethod
    def reserve(cls, problem: Problem, block_m: int, partial_elements: int) -> _Workspace:
        layout, slots = WorkspaceLayout(), _slots(problem)
        row_blocks = row_block_bound(slots, problem.dims["experts"], block_m)
        blocks = (
            layout.reserve("i32", 1),
            # There are no more row blocks than slots. Unlike their bound, slots do not become fewer with more tokens,
            # when larger tiles are chosen.
            layout.reserve("i32", slots),
            layout.reserve("i32", row_blocks * block_m),
        )
        gated = layout.reserve(problem.model_dtype.triton, slots * problem.dims["intermediate_size"])
        return cls(blocks, gated, layout.reserve("fp32", partial_elements), layout.size)


def _check(problem: Problem, products: Products) -> None:
    dims, first_expert = problem.dims, problem.attributes["first_expert"]
    if dims["gate_up_size"] != 2 * dims["intermediate_size"]:
        raise ValueError(
            f"{products.op}: found gate_up_proj of {dims['gate_up_size']} rows an expert, expected 2 * "
            f"{dims['intermediate_size']}"
        )
    if not 0 <= first_expert <= MAX_INT32 - dims["experts"]:
        raise ValueError(
            f"{products.op}: found first_expert {first_expert} of {dims['experts']} experts, expected int32 ids"
        )
    if _slots(problem) > MAX_INT32 - _BLOCK_S:
        raise ValueError(f"{products.op}: found {dims['tokens']} tokens of {dims['top_k']} choices, expected < 2^31")


def _slots(problem: Problem) -> int:
    return problem.dims["tokens"] * problem.dims["top_k"]


def _band_steps(problem: Problem) -> int:
    """Steps of ``COLUMN_STEP`` columns of a band."""
    steps = ceil_div(problem.dims["hidden_size"], COLUMN_STEP)
    return minimum(steps, maximum(1, BAND_BYTES // (_slots(problem) * COLUMN_STEP * ITEMSIZES["fp32"])))


def _multiplies_shared(target: Target) -> bool:
    """Whether the tensor cores read both operands from shared memory (wgmma, tcgen05) and not from registers."""
    return target.compute_capability in (90, 100)


_BLOCK_PARAMETERS = (("num_blocks", "*i32"), ("block_expert", "*i32"), ("block_slots", "*i32"))


def _sort_slots(problem: Problem) -> KernelVariant:
    experts = problem.dims["experts"]
    return KernelVariant(
        op="RoutedExperts",
        kernel="sort_slots",
        signature=(
            ("expert_ids", "*i32"),
            *_BLOCK_PARAMETERS,
            ("slots", "i32"),
            ("first_expert", "i32"),
            ("block_m", "i32"),
        ),
        constants=(
            ("EXPERTS", experts),
            ("BLOCK_X", next_power_of_two(experts)),
            ("BLOCK_S", _BLOCK_S),
            ("BLOCK_PADDING", _MAX_BLOCK_M),
        ),
        num_warps=4,
        num_stages=1,
    )


def _gate_up(problem: Problem, products: Products, tile: Tile) -> KernelVariant:
    model = problem.model_dtype.triton
    return KernelVariant(
        op=products.op,
        kernel="gate_up",
        signature=(
            ("hidden", f"*{model}"),
            *_weight_parameters(problem, products.gate_up_weights),
            *_BLOCK_PARAMETERS,
            ("gated", f"*{model}"),
            ("row_blocks", "i32"),
        ),
        constants=(
            ("TOP_K", problem.dims["top_k"]),
            ("HIDDEN_SIZE", problem.dims["hidden_size"]),
            ("INTERMEDIATE_SIZE", problem.dims["intermediate_size"]),
            *products.constants,
            *_tile_constants(tile),
        ),
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )


def _down(problem: Problem, products: Products, tile: Tile) -> KernelVariant:
    model = problem.model_dtype.triton
    return KernelVariant(
        op=products.op,
        kernel="down",
        signature=(
            ("gated", f"*{model}"),
            *_weight_parameters(problem, products.down_weights),
            *_BLOCK_PARAMETERS,
            ("partial", "*fp32"),
            ("row_blocks", "i32"),
            ("first_step", "i32"),
            ("band_steps", "i32"),
        ),
        constants=(
            ("HIDDEN_SIZE", problem.dims["hidden_size"]),
            ("INTERMEDIATE_SIZE", problem.dims["intermediate_size"]),
            ("COLUMN_STEP", COLUMN_STEP),
            *products.constants,
            *_tile_constants(tile),
        ),
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )


def _weighted_sum(problem: Problem) -> KernelVariant:
    return KernelVariant(
        op="RoutedExperts",
        kernel="weighted_sum",
        signature=(
            ("partial", "*fp32"),
            ("expert_ids", "*i32"),
            ("expert_weights", "*fp32"),
            ("output", f"*{problem.model_dtype.triton}"),
            ("tokens", "i32"),
            ("first_expert", "i32"),
            ("first_step", "i32"),
            ("band_steps", "i32"),
        ),
        constants=(
            ("EXPERTS", problem.dims["experts"]),
            ("TOP_K", problem.dims["top_k"]),
            ("HIDDEN_SIZE", problem.dims["hidden_size"]),
            ("COLUMN_STEP", COLUMN_STEP),
            ("BLOCK_N", _SUM_COLUMNS),
        ),
        num_warps=4,
        num_stages=1,
    )


def _weight_parameters(problem: Problem, weights: tuple[tuple[str, str], ...]) -> tuple[tuple[str, str], ...]:
    types = {"model": problem.model_dtype.triton, "int8": "i8", "float32": "fp32"}
    return tuple((name, f"*{types[element_type]}") for name, element_type in weights)


def _tile_constants(tile: Tile) -> tuple[tuple[str, int], ...]:
    return (
        ("BLOCK_M", tile.block_m),
        ("BLOCK_N", tile.block_n),
        ("BLOCK_K", tile.block_k),
        ("GROUP_BLOCKS", _GROUP_BLOCKS),
    )
