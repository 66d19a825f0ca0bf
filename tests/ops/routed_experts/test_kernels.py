import sys
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.ops import reference
from tests.ops.aot import compile_variant
from tests.ops.checks import DTYPES, TOLERANCE, Guarded, interpret, relative_error, torch_dtype
from tests.ops.routed_experts.test_plan import with_dims
from trtllm_mla.dtypes import DType
from trtllm_mla.ops.interpreter import run_plan
from trtllm_mla.ops.plan import Argument, LaunchPlan, TensorArgument, WorkspaceArgument
from trtllm_mla.ops.routed_experts import ROUTED_EXPERTS
from trtllm_mla.ops.routed_experts.plan import Tile, choose_tiles, shared_memory_bytes
from trtllm_mla.targets import TARGETS

Inputs = dict[str, torch.Tensor]


def make_inputs(
    expert_ids: Sequence[Sequence[int]] | torch.Tensor,
    dtype: DType,
    *,
    experts: int = 7,
    hidden_size: int = 100,
    intermediate_size: int = 52,
    first_expert: int = 0,
) -> Inputs:
    """Random inputs for the given choices. The weights of experts that no token chose are NaN."""
    ids = torch.as_tensor(expert_ids, dtype=torch.int32)

    def random(*shape: int, scale: float = 1.0) -> torch.Tensor:
        return (scale * torch.randn(*shape)).to(torch_dtype(dtype))

    inputs = {
        "hidden": random(len(ids), hidden_size),
        "gate_up_proj": random(experts, 2 * intermediate_size, hidden_size, scale=hidden_size**-0.5),
        "down_proj": random(experts, hidden_size, intermediate_size, scale=intermediate_size**-0.5),
        "expert_ids": ids,
        "expert_weights": torch.rand(ids.shape) + 0.1,
    }
    chosen = {int(value) - first_expert for value in ids.flatten()}
    for expert in set(range(experts)) - chosen:
        inputs["gate_up_proj"][expert] = inputs["down_proj"][expert] = float("nan")
    return inputs


def choose(tokens: int, top_k: int, experts: int) -> torch.Tensor:
    """Different experts for each token, as a router gives them."""
    return torch.rand(tokens, experts).topk(top_k).indices.int()


def run(inputs: Inputs, dtype: DType, *, first_expert: int = 0, target: str = "sm_90") -> torch.Tensor:
    (output,) = interpret(ROUTED_EXPERTS, inputs, {"first_expert": first_expert}, model_dtype=dtype, target=target)
    return output


def check(inputs: Inputs, dtype: DType, *, first_expert: int = 0, target: str = "sm_90") -> torch.Tensor:
    """Compares with float64; tokens without an expert give exactly 0."""
    output = run(inputs, dtype, first_expert=first_expert, target=target)
    expected = reference.routed_experts(**inputs, first_expert=first_expert)
    assert output.isfinite().all()
    local = inputs["expert_ids"].long() - first_expert
    served = ((local >= 0) & (local < len(inputs["down_proj"]))).any(dim=1)
    assert (output[~served] == 0).all()
    assert (output[served] != 0).any(dim=1).all()
    if served.any():
        assert relative_error(output, expected) <= TOLERANCE[dtype]
    return output


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("target", ["sm_80", "sm_90"])
def test_ragged_sizes_against_float64(dtype: DType, target: str) -> None:
    check(make_inputs(choose(37, 3, 7), dtype), dtype, target=target)


@pytest.mark.parametrize("top_k", range(1, 9))
def test_numbers_of_choices(top_k: int) -> None:
    check(make_inputs(choose(5, top_k, 11), DType.FLOAT32, experts=11), DType.FLOAT32)


@pytest.mark.parametrize(
    ("tokens", "block_m"), [(1, 16), (33, 64), (250, 128)], ids=["decode", "small prefill", "prefill"]
)
@pytest.mark.parametrize("dtype", [DType.FLOAT16, DType.BFLOAT16])
def test_every_tile(tokens: int, block_m: int, dtype: DType) -> None:
    sizes = {"experts": 3, "hidden_size": 72, "intermediate_size": 40}
    problem = with_dims(tokens=tokens, top_k=2, **sizes)
    assert choose_tiles(problem).block_m == block_m
    check(make_inputs(choose(tokens, 2, 3), dtype, **sizes), dtype)


@pytest.mark.parametrize(("hidden_size", "intermediate_size"), [(128, 64), (1, 1), (7, 3), (129, 65), (127, 130)])
@pytest.mark.parametrize("dtype", [DType.FLOAT32, DType.BFLOAT16])
def test_tile_edges(hidden_size: int, intermediate_size: int, dtype: DType) -> None:
    """One column more or less than a tile has, and whole tiles, which are read without masks.

    Several choices of one column might cancel, which no error relative to the result allows for.
    """
    inputs = make_inputs(
        choose(9, 1, 4), dtype, experts=4, hidden_size=hidden_size, intermediate_size=intermediate_size
    )
    output = run(inputs, dtype)
    expected = reference.routed_experts(**inputs, first_expert=0)
    assert relative_error(output, expected) <= TOLERANCE[dtype]


@pytest.mark.parametrize("count", [15, 16, 17, 32, 33])
def test_row_block_edges(count: int) -> None:
    """One slot more or less than row blocks hold, beside an expert with one and experts with none."""
    ids = torch.full((count + 1, 1), 4)
    ids[count // 2] = 6
    check(make_inputs(ids, DType.FLOAT32, experts=9), DType.FLOAT32)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("expert", [0, 3, 6])
def test_all_tokens_choose_one_expert(expert: int, dtype: DType) -> None:
    """Far more row blocks than an even distribution has, of the smallest size."""
    check(make_inputs(torch.full((41, 2), expert), dtype), dtype)


def test_an_expert_chosen_twice_counts_twice() -> None:
    inputs = make_inputs([[2, 2], [5, 2], [2, 5]], DType.FLOAT32)
    check(inputs, DType.FLOAT32)
    inputs["expert_weights"][0] = torch.tensor([0.25, 0.5])
    once = inputs | {"expert_ids": torch.tensor([[2, -1], [5, 2], [2, 5]], dtype=torch.int32)}
    once["expert_weights"] = inputs["expert_weights"].clone()
    once["expert_weights"][0] = torch.tensor([0.75, 1.0])
    difference = run(inputs, DType.FLOAT32)[0] - run(once, DType.FLOAT32)[0]
    assert difference.abs().max() < 1e-6


WILD = (-1, -(2**31), -(2**31) + 5, 2**31 - 1, 2**31 - 5, 1_000_000)


@pytest.mark.parametrize("first_expert", [0, 5, 2**31 - 8])
def test_ids_outside_contribute_nothing(first_expert: int) -> None:
    """Neighbours of the range, and numbers whose difference from it wraps around; every tensor has NaN around it."""
    inside = [first_expert, first_expert + 6, first_expert + 3]
    outside = [value for value in (first_expert - 1, first_expert + 7, *WILD) if -(2**31) <= value < 2**31]
    outside = [value for value in outside if not first_expert <= value < first_expert + 7]
    ids = torch.tensor([[outside[token % len(outside)], inside[token % 3]] for token in range(12)])
    ids[4], ids[7, 0] = torch.tensor(outside[:2]), inside[0]
    inputs = make_inputs(ids, DType.FLOAT32, first_expert=first_expert)
    expected = check(inputs, DType.FLOAT32, first_expert=first_expert)
    # A weight of a choice that counts for nothing may be NaN.
    local = ids - first_expert
    inputs["expert_weights"][(local < 0) | (local >= 7)] = float("nan")
    assert torch.equal(run(guarded(inputs), DType.FLOAT32, first_expert=first_expert), expected)


def test_no_id_inside() -> None:
    inputs = make_inputs([[-1, 7], [9, -5]], DType.BFLOAT16)
    assert (check(inputs, DType.BFLOAT16) == 0).all()


@pytest.mark.parametrize("seed", range(4))
def test_arbitrary_ids_do_not_crash(seed: int) -> None:
    """Other memory may hold any integers: an access 2^31 rows away would end this process."""
    generator = torch.Generator().manual_seed(seed)
    bound = 2**31 if seed % 2 else 12
    ids = torch.randint(-bound, bound, (20, 3), generator=generator, dtype=torch.int64)
    check(guarded(make_inputs(ids, DType.FLOAT32)), DType.FLOAT32)


@pytest.mark.parametrize("dtype", DTYPES)
def test_experts_split_over_two_calls_add_up(dtype: DType) -> None:
    inputs = make_inputs(choose(19, 3, 7), dtype)
    parts = []
    for first, last in ((0, 3), (3, 7)):
        part = inputs | {name: inputs[name][first:last].contiguous() for name in ("gate_up_proj", "down_proj")}
        parts.append(check(part, dtype, first_expert=first))
    expected = reference.routed_experts(**inputs, first_expert=0)
    assert relative_error(parts[0].double() + parts[1].double(), expected) <= TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_step_without_tokens(dtype: DType) -> None:
    assert run(make_inputs(torch.zeros(0, 3), dtype), dtype).shape == (0, 100)


def guarded(inputs: Inputs) -> Inputs:
    """The inputs, with NaN around every tensor of floating-point values."""
    return {name: Guarded(tensor).tensor if tensor.is_floating_point() else tensor for name, tensor in inputs.items()}


def test_one_token_does_not_depend_on_others() -> None:
    """NaN in the other tokens' rows, and their absence, change no bit."""
    inputs = make_inputs(choose(20, 3, 7), DType.BFLOAT16)
    expected = run(inputs, DType.BFLOAT16)[11]
    poisoned = inputs | {"hidden": inputs["hidden"].clone()}
    poisoned["hidden"][torch.arange(20) != 11] = float("nan")
    output = run(poisoned, DType.BFLOAT16)
    assert torch.equal(output[11], expected)
    assert output.isnan().all(dim=1).sum() == 19
    alone = inputs | {name: inputs[name][11:12] for name in ("hidden", "expert_ids", "expert_weights")}
    assert torch.equal(run(alone, DType.BFLOAT16)[0], expected)


@pytest.mark.parametrize("hidden_size", [300, 384])
@pytest.mark.parametrize("dtype", [DType.FLOAT32, DType.BFLOAT16])
def test_bands_change_no_bit(hidden_size: int, dtype: DType, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = make_inputs(choose(23, 2, 7), dtype, hidden_size=hidden_size)
    whole = check(inputs, dtype)
    for limit, bands in ((1, 3), (46 * 4 * 256, 2)):
        # The package's attribute of this name is the function.
        monkeypatch.setattr(sys.modules["trtllm_mla.ops.routed_experts.plan"], "BAND_BYTES", limit)
        problem = with_dims(tokens=23, top_k=2, experts=7, hidden_size=hidden_size, intermediate_size=52)
        assert len(ROUTED_EXPERTS.plan(problem).launches) == 2 + 2 * bands
        assert torch.equal(run(inputs, dtype), whole)


@pytest.mark.parametrize("slots", [1, 1023, 1024, 1025, 2050])
@pytest.mark.parametrize("experts", [1, 3, 130])
def test_slots_are_sorted_into_row_blocks(slots: int, experts: int) -> None:
    """The table itself, for more slots than a program looks at together."""
    problem = with_dims(tokens=slots, top_k=1, experts=experts)
    full = ROUTED_EXPERTS.plan(problem)
    block_m = choose_tiles(problem).block_m
    ids = torch.randint(-2, experts + 3, (slots, 1), dtype=torch.int32)
    tables = run_sort(full, ids)
    num_blocks, block_expert = int(tables[0][0]), tables[1].tolist()
    block_slots = tables[2].view(-1, block_m)
    expected = []
    for expert in range(experts):
        listed = (ids.flatten() == expert).nonzero().flatten().int()
        expected += [(expert, part) for part in listed.split(block_m)] if len(listed) else []
    assert num_blocks == len(expected) <= len(block_slots)
    for block, (expert, part) in enumerate(expected):
        assert block_expert[block] == expert
        assert torch.equal(block_slots[block, : len(part)], part)
        assert (block_slots[block, len(part) :] == -1).all()
    # Nothing is written behind the row blocks that there are: the workspace held bytes of 0xFF, and 7 in the table.
    assert (block_slots[num_blocks:] == 7).all()


def run_sort(plan: LaunchPlan, expert_ids: torch.Tensor) -> list[torch.Tensor]:
    """Runs the first launch alone, with its three tables as tensors full of sevens."""
    plan, workspace = with_workspace_as_tensors(LaunchPlan(plan.launches[:1]))
    for table in workspace.values():
        table.fill_(7)
    run_plan(plan, {"expert_ids": expert_ids, **workspace})
    return [workspace[name] for name in ("num_blocks", "block_expert", "block_slots")]


class CheckedMemory:
    """Stands in for the interpreter's loads and stores: each must lie in one of the tensors."""

    def __init__(self, real: Any, tensors: Iterable[torch.Tensor]) -> None:
        self._real = real
        self._ranges = [(tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes) for tensor in tensors]
        self.accesses = 0

    def load(self, addresses: Any, mask: Any, other: Any, dtype: Any) -> Any:
        self._check(addresses[mask], np.dtype(dtype).itemsize)
        return self._real.load(addresses, mask, other, dtype)

    def store(self, addresses: Any, values: Any, mask: Any) -> Any:
        self._check(addresses[mask], values.dtype.itemsize)
        return self._real.store(addresses, values, mask)

    def _check(self, addresses: Any, itemsize: int) -> None:
        inside = np.zeros(addresses.shape, dtype=bool)
        for begin, end in self._ranges:
            inside |= (addresses >= begin) & (addresses + itemsize <= end)
        assert inside.all()
        self.accesses += addresses.size


@pytest.mark.parametrize("dtype", [DType.FLOAT32, DType.BFLOAT16])
@pytest.mark.parametrize(
    ("ids", "sizes"),
    [
        pytest.param([[6, 0], [-1, 6], [7, 3], [6, 2**31 - 1]], (100, 52), id="masked tiles"),
        pytest.param([[0, 6]] * 19, (128, 64), id="whole tiles"),
        pytest.param([[-(2**31), -3], [8, 7]], (129, 65), id="no expert"),
    ],
)
def test_nothing_outside_the_tensors_is_accessed(
    ids: list[list[int]], sizes: tuple[int, int], dtype: DType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Address by address: reading a row too many would change no result."""
    from triton.runtime import interpreter

    hidden_size, intermediate_size = sizes
    tensors = make_inputs(ids, dtype, hidden_size=hidden_size, intermediate_size=intermediate_size)
    expected = reference.routed_experts(**tensors, first_expert=0)
    tensors["output"] = torch.full((len(ids), hidden_size), float("nan"), dtype=torch_dtype(dtype))
    problem = with_dims(
        tokens=len(ids), top_k=2, experts=7, hidden_size=hidden_size, intermediate_size=intermediate_size
    )
    plan = ROUTED_EXPERTS.plan(replace(problem, model_dtype=dtype))
    plan, workspace = with_workspace_as_tensors(plan)
    tensors |= workspace
    memory = CheckedMemory(interpreter._interpreter, tensors.values())
    with monkeypatch.context() as patch:
        patch.setattr(interpreter, "_interpreter", memory)
        run_plan(plan, tensors)
    assert memory.accesses > tensors["expert_ids"].numel()
    assert relative_error(tensors["output"], expected) <= TOLERANCE[dtype] or not expected.any()


def with_workspace_as_tensors(plan: LaunchPlan) -> tuple[LaunchPlan, dict[str, torch.Tensor]]:
    """The plan with tensors, named as the kernels' parameters, in place of parts of the workspace; and these."""
    dtypes = {"i32": torch.int32, "fp32": torch.float32, "bf16": torch.bfloat16}
    launches, workspace = [], {}
    for launch in plan.launches:
        arguments: list[Argument] = []
        for (name, _), argument in zip(launch.variant.signature, launch.arguments, strict=True):
            if isinstance(argument, WorkspaceArgument):
                # As an index, it would lead far away.
                workspace[name] = torch.full((argument.elements,), 2**30, dtype=dtypes[argument.dtype])
                arguments.append(TensorArgument(name))
            else:
                arguments.append(argument)
        launches.append(replace(launch, arguments=tuple(arguments)))
    return LaunchPlan(tuple(launches)), workspace


@pytest.mark.parametrize("byte", [0x00, 0x7F, 0xFF], ids=["zero", "largest", "nan"])
def test_the_workspace_may_hold_anything(monkeypatch: pytest.MonkeyPatch, byte: int) -> None:
    """Its content changes no bit of the result, and nothing is written around it."""
    inputs = make_inputs([[0, 9], [5, 5], [-1, 8], [6, 0], [-3, 77]], DType.BFLOAT16)
    expected = run(inputs, DType.BFLOAT16)
    problem = with_dims(tokens=5, top_k=2, experts=7, hidden_size=100, intermediate_size=52)
    plan, margin = ROUTED_EXPERTS.plan(problem), 1 << 16
    memory = torch.full((plan.workspace_bytes + 2 * margin,), byte, dtype=torch.uint8)

    def workspace(size: tuple[int], fill_value: int, *, dtype: torch.dtype) -> torch.Tensor:
        assert (size, dtype) == ((plan.workspace_bytes,), torch.uint8)
        return memory[margin:-margin]

    output = Guarded(torch.full((5, 100), float("nan"), dtype=torch.bfloat16))
    with monkeypatch.context() as patch:
        patch.setattr(torch, "full", workspace)
        run_plan(plan, inputs | {"output": output.tensor})
    assert (memory[:margin] == byte).all()
    assert (memory[-margin:] == byte).all()
    assert torch.equal(output.tensor, expected)
    output.assert_margins_untouched()


@pytest.mark.parametrize(
    ("target", "dtype", "dims"),
    [
        ("sm_89", DType.BFLOAT16, {}),
        ("sm_90", DType.BFLOAT16, {"experts": 384}),
        ("sm_90", DType.FLOAT16, {"experts": 3, "top_k": 2, "hidden_size": 1000, "intermediate_size": 520}),
        ("sm_100", DType.BFLOAT16, {}),
        ("sm_89", DType.FLOAT32, {"experts": 1, "top_k": 1}),
    ],
)
def test_compiles_ahead_of_time_within_the_budget(
    target: str, dtype: DType, dims: dict[str, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No spilled registers, copies of 16 bytes, the tensor cores' largest instruction, and 64-bit weight addresses."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    problem = replace(with_dims(**dims), target=TARGETS[target], model_dtype=dtype)
    for variant in ROUTED_EXPERTS.variants(problem):
        constants = dict(variant.constants)
        compiled = compile_variant(variant, problem.target, tmp_path)
        assert compiled.stack_bytes == 0
        assert compiled.shared_memory_bytes <= problem.target.shared_memory_bytes
        if variant.kernel == "weighted_sum":
            assert compiled.wide_accesses >= constants["TOP_K"]
        if variant.kernel not in ("gate_up", "down"):
            continue
        block_m, block_n, block_k = (constants[name] for name in ("BLOCK_M", "BLOCK_N", "BLOCK_K"))
        tile = Tile(block_m, block_n, block_k, variant.num_warps, variant.num_stages)
        weight_tiles = 2 if variant.kernel == "gate_up" else 1
        assert compiled.shared_memory_bytes <= shared_memory_bytes(tile, weight_tiles, dtype, problem.target)
        assert "cp.async.cg" in compiled.ptx
        assert "cp.async.ca" not in compiled.ptx
        if dtype is not DType.FLOAT32:
            warpgroup = {"sm_90": "wgmma", "sm_100": "tcgen05.mma"}.get(target)
            assert (warpgroup if warpgroup and tile.block_m >= 64 else "mma.sync") in compiled.ptx
