"""Bugs that other MLA and paged attention kernels had, and the test here that would fail with each.

Paths are relative to ``tests/``. A source is a repository's issue or pull request.

 1. The offset page * stride overflows int32 (vllm-project/vllm#47671):
    ops/test_peers_bugs.py::TestAddressesBeyond32Bits
 2. An index overflows uint32 and zeros are read (flashinfer-ai/flashinfer#3130, #3136, #3219):
    ops/test_peers_bugs.py::TestAddressesBeyond32Bits. Slots themselves are int32, so a larger pool is refused:
    runtime/executors/test_factory.py::test_sizes_out_of_range
 3. Query offsets overflow beyond 131072 tokens (sgl-project/sglang#20389):
    ops/test_peers_bugs.py::TestAddressesBeyond32Bits::test_latent_attention_finds_its_queries
    ops/test_peers_bugs.py::TestAddressesBeyond32Bits::test_context_attention_finds_its_request
 4. A request of length 0 gives 0/0, and NaN spreads through a scale that the batch shares
    (vllm-project/vllm#57094, #57017; there is no such scale here):
    ops/latent_attention/test_kernels.py::test_requests_without_keys_give_zeros
    ops/latent_attention/test_kernels.py::test_other_requests_do_not_leak
    ops/context_attention/test_kernels.py::test_a_step_without_tokens_or_keys
    ops/context_attention/test_kernels.py::test_other_requests_and_memory_outside_do_not_leak
 5. NaN in unused cache rows leaks through 0 * NaN (flashinfer-ai/flashinfer#942):
    ops/latent_attention/test_kernels.py::test_mixed_requests_against_float64
    ops/latent_attention/test_kernels.py::test_padding_of_the_page_table_is_never_used
    ops/context_attention/test_kernels.py::test_other_requests_and_memory_outside_do_not_leak
 6. Merging an empty part gives NaN (vllm-project/vllm#27491, #15492, #49294, #49334):
    ops/test_peers_bugs.py::test_merge_of_empty_parts
    ops/latent_attention/test_kernels.py::test_pieces_of_keys_that_a_row_block_does_not_see
 7. No keys in a ragged prefill (sgl-project/sglang#22688, #22291, flashinfer-ai/flashinfer#3047):
    ops/context_attention/test_kernels.py::test_fewer_keys_than_queries_leaves_blind_rows
    ops/context_attention/test_kernels.py::test_a_step_without_tokens_or_keys
 8. A kernel hangs with more than one split (vllm-project/vllm#24966, #25509, #26846): cannot exist, since no program
    waits for another; the merge is a launch of its own:
    ops/test_peers_bugs.py::test_no_program_waits_for_another
 9. The number of splits ignores that a cluster takes several multiprocessors (flashinfer-ai/flashinfer#3888): cannot
    exist, since nothing is launched in clusters:
    ops/test_peers_bugs.py::test_no_program_waits_for_another
10. A CUDA graph replays with stale metadata, or with padding that reads out of bounds (vllm-project/vllm#36611,
    #36492, #21691, deepseek-ai/FlashMLA#3). A plan depends on shapes alone, and kernels read lengths from the device:
    ops/test_peers_bugs.py::test_one_plan_serves_every_length
    ops/test_peers_bugs.py::test_a_longest_query_of_one_with_other_than_one_token_a_request
    ops/latent_attention/test_kernels.py::test_padding_of_the_page_table_is_never_used
11. The path without splits leaves outputs unwritten (flashinfer-ai/flashinfer#4002, #4794, #5176):
    ops/test_peers_bugs.py::test_one_plan_serves_every_length
    ops/latent_attention/test_kernels.py::test_requests_without_keys_give_zeros
12. More than 65535 blocks along y or z (deepseek-ai/FlashMLA#182, #114, #173):
    ops/test_peers_bugs.py::test_large_steps_lie_along_x
    ops/test_peers_bugs.py::test_a_step_beyond_every_grid_is_refused
    ops/test_plan.py::test_grids_beyond_the_limits_are_refused
13. Results depend on the batch (deepseek-ai/FlashMLA#212). Promised: AppendLatent, GatherLatent and ContextAttention
    give a request the same bits in every batch; LatentAttention does where row block and pieces are the same,
    RoutedExperts where the tile is, and BlockScaledMatMul where tile and split are, which follow from the batch, and
    otherwise they agree to rounding:
    ops/test_peers_bugs.py::test_context_attention_gives_the_same_bits_in_every_batch
    ops/routed_experts/test_kernels.py::test_one_token_does_not_depend_on_others
    ops/block_scaled_mat_mul/test_kernels.py::test_one_row_does_not_depend_on_others
    ops/test_peers_bugs.py::test_latent_attention_in_a_batch_that_splits_otherwise
    ops/latent_attention/test_kernels.py::test_a_request_alone_gives_the_same_bits_as_in_a_batch
14. The merge strides over more parts than there are, beyond 64K keys (local-inference-lab/vllm#17):
    ops/test_peers_bugs.py::test_parts_of_a_request_longer_than_64k
    ops/latent_attention/test_plan.py::test_split_launches_share_the_partial_results
15. The workspace must be zero (flashinfer-ai/flashinfer#3474, #2408):
    ops/test_peers_bugs.py::test_the_workspace_may_hold_anything
    ops/routed_experts/test_kernels.py::test_the_workspace_may_hold_anything
16. The workspace is too small with the log-sum-exp (vllm-project/vllm#50781):
    ops/test_peers_bugs.py::test_the_workspace_may_hold_anything
    ops/latent_attention/test_plan.py::test_the_workspace_of_every_smaller_step_stays_within_the_bound
    ops/routed_experts/test_plan.py::test_the_workspace_of_every_smaller_step_stays_within_the_bound
    ops/block_scaled_mat_mul/test_plan.py::test_the_workspace_of_every_smaller_step_stays_within_the_bound
17. Inputs that are not contiguous give wrong results (flashinfer-ai/flashinfer#1341):
    ops/test_peers_bugs.py::test_tensors_with_gaps_are_refused
    runtime/executors/test_onnxruntime.py::test_contiguous_weights_are_not_copied
    runtime/executors/test_interpreter.py::TestNetwork::test_a_pool_with_gaps_is_refused
    runtime/test_tensorrt_executor.py::TestBinding::test_an_array_with_gaps_is_refused
18. Pages of more than 128 tokens (flashinfer-ai/flashinfer#4347). Configs refuse them, and kernels are right:
    ops/test_peers_bugs.py::test_pages_of_256_tokens
    test_config.py::test_wrong_values_are_named
19. Graph capture freezes one split (vllm-project/vllm#51119, sgl-project/sglang#34580). Kernels cut the keys by the
    lengths they find on the device:
    ops/test_peers_bugs.py::test_one_plan_serves_every_length
    ops/latent_attention/test_kernels.py::test_pieces_are_those_of_the_rule
20. exp2(-inf + inf) in empty splits, NaN with two queries (pegainfer#21, pengcuo/FlashMLA-ETAP#2):
    ops/test_peers_bugs.py::test_two_queries_of_which_one_sees_no_key_of_a_tile
    ops/latent_attention/test_kernels.py::test_pieces_of_keys_that_a_row_block_does_not_see
"""

from __future__ import annotations

import ast
import math
import mmap
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.ops import reference
from tests.ops.append_latent.test_kernels import make_inputs as append_inputs
from tests.ops.append_latent.test_plan import PROBLEM as APPEND_PROBLEM
from tests.ops.block_scaled_mat_mul.test_kernels import make_inputs as linear_inputs
from tests.ops.block_scaled_mat_mul.test_plan import PROBLEM as LINEAR_PROBLEM
from tests.ops.block_scaled_routed_experts.test_kernels import make_inputs as block_scaled_experts_inputs
from tests.ops.block_scaled_routed_experts.test_plan import PROBLEM as BLOCK_SCALED_EXPERTS_PROBLEM
from tests.ops.checks import LOG_SUM_EXP_TOLERANCE, TOLERANCE, as_cache_dtype, check_plan, interpret, relative_error
from tests.ops.context_attention.test_kernels import attend as attend_context
from tests.ops.context_attention.test_kernels import make_inputs as context_inputs
from tests.ops.context_attention.test_plan import PROBLEM as CONTEXT_PROBLEM
from tests.ops.gather_latent.test_plan import PROBLEM as GATHER_PROBLEM
from tests.ops.latent_attention.pieces import parts_of
from tests.ops.latent_attention.test_kernels import (
    MANY_MULTIPROCESSORS,
    ONE_MULTIPROCESSOR,
    assert_close,
    can_split,
    check,
    device,
    plan_for,
)
from tests.ops.latent_attention.test_kernels import attend as attend_latent
from tests.ops.latent_attention.test_kernels import make_inputs as latent_inputs
from tests.ops.latent_attention.test_plan import PROBLEM as LATENT_PROBLEM
from tests.ops.latent_attention.test_plan import scalars
from tests.ops.routed_experts.test_kernels import make_inputs as experts_inputs
from tests.ops.routed_experts.test_plan import PROBLEM as EXPERTS_PROBLEM
from trtllm_mla.dtypes import DType
from trtllm_mla.ops import OPS
from trtllm_mla.ops.append_latent import APPEND_LATENT
from trtllm_mla.ops.block_scaled_routed_experts import BLOCK_SCALED_ROUTED_EXPERTS
from trtllm_mla.ops.context_attention import CONTEXT_ATTENTION
from trtllm_mla.ops.definition import Attribute, OpDefinition, Problem
from trtllm_mla.ops.gather_latent import GATHER_LATENT
from trtllm_mla.ops.interpreter import run_plan
from trtllm_mla.ops.kernels import interpreted_kernel, jit_kernel
from trtllm_mla.ops.latent_attention import LATENT_ATTENTION
from trtllm_mla.ops.plan import Launch, LaunchPlan, TensorArgument, WorkspaceArgument
from trtllm_mla.ops.routed_experts import ROUTED_EXPERTS
from trtllm_mla.targets import TARGETS, Target

TESTS = Path(__file__).parent.parent
DTYPE = DType.BFLOAT16
SCALE = 0.11
LATENT_ATTRIBUTES = {"softmax_scale": SCALE, "latent_scale": 1.0}
# mmap.MAP_NORESERVE, which Python names from 3.13 on: no memory is set aside for the mapping.
MAP_NORESERVE = 0x4000

PROBLEMS = {
    "AppendLatent": APPEND_PROBLEM,
    "GatherLatent": GATHER_PROBLEM,
    "LatentAttention": LATENT_PROBLEM,
    "ContextAttention": CONTEXT_PROBLEM,
    "RoutedExperts": EXPERTS_PROBLEM,
    "BlockScaledMatMul": LINEAR_PROBLEM,
    "BlockScaledRoutedExperts": BLOCK_SCALED_EXPERTS_PROBLEM,
}

Tensors = dict[str, torch.Tensor]
Program = tuple[int, int, int]
RunPrograms = Callable[[Launch, Sequence[Program], Tensors], None]


def references(docstring: str) -> dict[int, list[str]]:
    """The tests named for each number."""
    parts = re.split(r"^ ?(\d+)\. ", docstring, flags=re.MULTILINE)[1:]
    numbers, texts = map(int, parts[::2]), parts[1::2]
    return {number: re.findall(r"\S+\.py(?:::\w+)+", text) for number, text in zip(numbers, texts, strict=True)}


def defined_names(path: Path) -> set[str]:
    """Functions and classes of a file, methods as ``Class::method``."""
    names = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        if isinstance(node, ast.ClassDef):
            names |= {f"{node.name}::{item.name}" for item in node.body if isinstance(item, ast.FunctionDef)}
    return names


def test_every_test_that_the_table_names_exists() -> None:
    assert __doc__ is not None
    table = references(__doc__)
    assert list(table) == list(range(1, 21))
    for number, tests in table.items():
        assert tests, number
        for test in tests:
            path, _, name = test.partition("::")
            assert re.match(r"(Test\w+::)?test_|Test", name), test
            assert name in defined_names(TESTS / path), test


def untouched(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """A tensor of zeros whose memory exists only where it is written, so that it may be larger than the machine's."""
    size = math.prod(shape) * dtype.itemsize
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE)
    return torch.frombuffer(memory, dtype=dtype).view(shape)


def random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape).bfloat16()


def int32(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def first_launch(op: OpDefinition, tensors: Tensors, attributes: Mapping[str, Attribute]) -> Launch:
    dims = op.resolve_dims({tensor.name: tuple(tensors[tensor.name].shape) for tensor in op.inputs})
    problem = Problem(dims, attributes, DTYPE, as_cache_dtype(DTYPE), TARGETS["sm_90"], 16, 2)
    return check_plan(op, problem).launches[0]


@pytest.fixture
def run_programs(monkeypatch: pytest.MonkeyPatch) -> RunPrograms:
    """Runs only some programs of a launch; they see the whole grid."""
    from triton.runtime.interpreter import interpreter_builder

    def run(launch: Launch, programs: Sequence[Program], tensors: Tensors) -> None:
        set_grid_dim, set_grid_idx = interpreter_builder.set_grid_dim, interpreter_builder.set_grid_idx
        with monkeypatch.context() as patch:
            patch.setattr(interpreter_builder, "set_grid_dim", lambda *_: set_grid_dim(*launch.grid))
            patch.setattr(interpreter_builder, "set_grid_idx", lambda x, y, z: set_grid_idx(*programs[x]))
            run_plan(LaunchPlan((replace(launch, grid=(len(programs), 1, 1)),)), tensors)

    return run


class TestAddressesBeyond32Bits:
    """Elements at offsets from 2^32 on.

    Cut to 32 bits, signed or not, such an offset is small and inside the tensor, where there are zeros.
    """

    @pytest.mark.parametrize("interleave", [True, False])
    def test_append_latent(self, run_programs: RunPrograms, interleave: bool) -> None:
        tokens, kv_lora_rank, rope_dim = 2**23 + 2, 512, 512
        slots, positions = [2**22 + 5, 2**22 + 31], [2**23 + 1, 2**23]
        angles = torch.rand(2, rope_dim // 2) * 6.3
        tensors = {
            "past_latent": untouched(2**18 + 2, 16, kv_lora_rank + rope_dim),
            "latent": untouched(tokens, kv_lora_rank),
            "k_pe": untouched(tokens, rope_dim),
            "q_pe": untouched(tokens, 1, rope_dim),
            "position_ids": untouched(tokens, dtype=torch.int32),
            "slot_mapping": untouched(tokens, dtype=torch.int32),
            "rotary_cos_sin": untouched(2**23 + 2, rope_dim, dtype=torch.float32),
            "rotated_q_pe": untouched(tokens, 1, rope_dim),
        }
        tensors["present_latent"] = tensors["past_latent"]
        tensors["rotary_cos_sin"][positions] = torch.cat([angles.cos(), angles.sin()], dim=-1)
        tensors["position_ids"][-2:], tensors["slot_mapping"][-2:] = int32(*positions), int32(*slots)
        for name in ("latent", "k_pe", "q_pe"):
            tensors[name][-2:] = torch.randn_like(tensors[name][-2:])
        programs = [(token, part, 0) for token in (tokens - 2, tokens - 1) for part in (0, 1)]
        attributes = {"rope_interleave": int(interleave), "latent_scale": 1.0}
        run_programs(first_launch(APPEND_LATENT, tensors, attributes), programs, tensors)

        rows = tensors["present_latent"].view(-1, kv_lora_rank + rope_dim)
        assert torch.equal(rows[slots, :kv_lora_rank], tensors["latent"][-2:])
        assert not rows[:64].any()
        table, position_ids = tensors["rotary_cos_sin"], tensors["position_ids"][-2:]
        for source, found in (
            (tensors["k_pe"][-2:], rows[slots, kv_lora_rank:]),
            (tensors["q_pe"][-2:], tensors["rotated_q_pe"][-2:]),
        ):
            expected = reference.rotate(source, position_ids, table, rope_interleave=interleave)
            assert relative_error(found, expected) <= TOLERANCE[DTYPE]

    def test_gather_latent(self, run_programs: RunPrograms) -> None:
        keys, width = 2**23 + 3, 1024
        slots = [2**22 + 17, 3, 2**22]
        tensors = {
            "latent_cache": untouched(2**18 + 2, 16, width),
            "kv_slots": untouched(keys, dtype=torch.int32),
            "latent": untouched(keys, 512),
            "k_pe": untouched(keys, 512),
        }
        rows = tensors["latent_cache"].view(-1, width)
        rows[slots] = random(3, width)
        tensors["kv_slots"][-3:] = int32(*slots)
        attributes = {"kv_lora_rank": 512, "rope_dim": 512, "latent_scale": 1.0}
        launch = first_launch(GATHER_LATENT, tensors, attributes)
        run_programs(launch, [(launch.grid[0] - 1, 0, 0)], tensors)
        assert torch.equal(torch.cat([tensors["latent"][-3:], tensors["k_pe"][-3:]], dim=-1), rows[slots])

    @pytest.mark.parametrize("tile", [(16, 2), (64, 2)], ids=["within_a_page", "across_pages"])
    @pytest.mark.parametrize("target", [ONE_MULTIPROCESSOR, MANY_MULTIPROCESSORS], ids=["1", "40"])
    def test_latent_attention_finds_its_pages(self, tile: tuple[int, int], target: Target) -> None:
        inputs = latent_inputs([(1, 70), (2, 16)], DTYPE, spare_pages=0)
        expected = reference.latent_attention(**inputs, softmax_scale=SCALE)
        small, table = inputs["latent_cache"], inputs["block_offsets"]
        pages = 2**32 // small[0].numel() + len(small)
        pool = untouched(pages, *small.shape[1:])
        pool[-len(small) :] = small
        in_use = (table >= 0) & (table < len(small))
        moved = torch.where(in_use, table + pages - len(small), table)
        inputs |= {"latent_cache": pool, "block_offsets": moved}
        assert_close(attend_latent(inputs, DTYPE, target=target, tile=tile), expected, DTYPE)

    def test_latent_attention_finds_its_queries(self, run_programs: RunPrograms) -> None:
        """Behind a request of 2^32 query rows, two tokens, of which the first sees a key less.

        The long request has one key, which its first tokens do not see.
        """
        first, heads, kv_lora_rank, rope_dim, length = 2**20, 4096, 16, 16, 20
        tensors = {
            "q_latent": untouched(first + 2, heads, kv_lora_rank),
            "q_pe": untouched(first + 2, heads, rope_dim),
            "latent_cache": random(2, 16, kv_lora_rank + rope_dim),
            "block_offsets": int32(0, 0, 1, 0).view(2, 2),
            "sequence_length": int32(1, length),
            "query_offsets": int32(0, first, first + 2),
            "query_index": untouched(2, first, dtype=torch.int32),
            "output": untouched(first + 2, heads, kv_lora_rank),
            "log_sum_exp": untouched(first + 2, heads, dtype=torch.float32),
        }
        for name in ("q_latent", "q_pe"):
            tensors[name][first:] = torch.randn_like(tensors[name][first:])
        launch = first_launch(LATENT_ATTENTION, tensors, LATENT_ATTRIBUTES)
        block_m = dict(launch.variant.constants)["BLOCK_M"]
        first_block, last = first * heads // block_m, 2 * heads // block_m - 1
        run_programs(launch, [(5, 0, 0), (first_block, 0, 0), (first_block + last, 0, 0)], tensors)

        assert tensors["log_sum_exp"][0, 5 * block_m : 6 * block_m].isneginf().all()
        keys = tensors["latent_cache"][[1, 0]].flatten(0, 1)
        for token, head, visible in ((first, 0, length - 1), (first + 1, heads - 1, length)):
            query = torch.cat([tensors["q_latent"][token, head], tensors["q_pe"][token, head]])
            seen = keys[:visible]
            expected, log_sum_exp = reference.attend(query, seen, seen[:, :kv_lora_rank], SCALE)
            assert relative_error(tensors["output"][token, head], expected) <= TOLERANCE[DTYPE]
            assert abs(tensors["log_sum_exp"][token, head] - log_sum_exp) <= LOG_SUM_EXP_TOLERANCE

    def test_latent_attention_finds_its_row_of_the_page_table(self, run_programs: RunPrograms) -> None:
        requests, columns = 2**17 + 1, 2**15
        tensors = {
            "q_latent": untouched(requests, 1, 16),
            "q_pe": untouched(requests, 1, 16),
            "latent_cache": random(3, 16, 32),
            "block_offsets": untouched(requests, columns, dtype=torch.int32),
            "sequence_length": untouched(requests, dtype=torch.int32),
            "query_offsets": torch.arange(requests + 1, dtype=torch.int32),
            "query_index": untouched(requests, 1, dtype=torch.int32),
            "output": untouched(requests, 1, 16),
            "log_sum_exp": untouched(requests, 1, dtype=torch.float32),
        }
        tensors["block_offsets"][-1, :2], tensors["sequence_length"][-1] = int32(2, 1), 20
        for name in ("q_latent", "q_pe"):
            tensors[name][-1] = random(1, 16)
        launch = first_launch(LATENT_ATTENTION, tensors, LATENT_ATTRIBUTES)
        run_programs(launch, [(requests - 1, 0, 0)], tensors)
        keys = tensors["latent_cache"][[2, 1]].flatten(0, 1)[:20]
        query = torch.cat([tensors["q_latent"][-1, 0], tensors["q_pe"][-1, 0]])
        expected, _ = reference.attend(query, keys, keys[:, :16], SCALE)
        assert relative_error(tensors["output"][-1, 0], expected) <= TOLERANCE[DTYPE]

    def test_context_attention_finds_its_request(self, run_programs: RunPrograms) -> None:
        """Behind a request of 2^25 queries and keys of 128 elements, one of five new tokens and nine keys."""
        first, queries, keys, dim = 2**25, 5, 9, 128
        tensors = {
            "q_nope": untouched(first + queries, 1, dim),
            "q_pe": untouched(first + queries, 1, dim),
            "k_nope": untouched(first + keys, 1, dim),
            "k_pe": untouched(first + keys, dim),
            "v": untouched(first + keys, 1, dim),
            "query_offsets": int32(0, first, first + queries),
            "key_offsets": int32(0, first, first + keys),
            "query_index": untouched(2, first, dtype=torch.int32),
            "key_index": untouched(2, first, dtype=torch.int32),
            "output": untouched(first + queries, 1, dim),
            "log_sum_exp": untouched(first + queries, 1, dtype=torch.float32),
        }
        floats = ("q_nope", "q_pe", "k_nope", "k_pe", "v")
        for name in floats:
            tensors[name][first:] = torch.randn_like(tensors[name][first:])
        launch = first_launch(CONTEXT_ATTENTION, tensors, {"softmax_scale": SCALE, "causal": 1})
        block = first // dict(launch.variant.constants)["BLOCK_M"] + 1
        run_programs(launch, [(launch.grid[0] - 1 - block, 0, 0)], tensors)
        expected, log_sum_exp = reference.context_attention(
            **{name: tensors[name][first:] for name in floats},
            query_offsets=int32(0, queries),
            key_offsets=int32(0, keys),
            softmax_scale=SCALE,
        )
        assert relative_error(tensors["output"][first:], expected) <= TOLERANCE[DTYPE]
        assert (tensors["log_sum_exp"][first:] - log_sum_exp).abs().max() <= LOG_SUM_EXP_TOLERANCE

    def test_context_attention_finds_the_last_keys_of_a_long_request(self, run_programs: RunPrograms) -> None:
        """4096 heads of 256 elements stand for what fewer heads have with more keys."""
        keys, heads, head, dim, rope_dim = 4096 + 6, 4096, 7, 256, 16
        tensors = {
            "q_nope": untouched(keys, heads, dim),
            "q_pe": untouched(keys, heads, rope_dim),
            "k_nope": untouched(keys, heads, dim),
            "k_pe": random(keys, rope_dim),
            "v": untouched(keys, heads, dim),
            "query_offsets": int32(0, keys),
            "key_offsets": int32(0, keys),
            "query_index": untouched(1, keys, dtype=torch.int32),
            "key_index": untouched(1, keys, dtype=torch.int32),
            "output": untouched(keys, heads, dim),
            "log_sum_exp": untouched(keys, heads, dtype=torch.float32),
        }
        tensors["k_nope"][:, head], tensors["v"][:, head] = random(keys, dim), random(keys, dim)
        tensors["v"][4096:, head] *= 16  # what is read past the limit decides the result
        tensors["q_nope"][4096:, head], tensors["q_pe"][4096:, head] = random(6, dim), random(6, rope_dim)
        launch = first_launch(CONTEXT_ATTENTION, tensors, {"softmax_scale": SCALE, "causal": 1})
        row_blocks = launch.grid[0] // heads
        block = (keys - 1) // dict(launch.variant.constants)["BLOCK_M"]
        run_programs(launch, [(head * row_blocks + row_blocks - 1 - block, 0, 0)], tensors)
        query = torch.cat([tensors["q_nope"][-1, head], tensors["q_pe"][-1, head]])
        key = torch.cat([tensors["k_nope"][:, head], tensors["k_pe"]], dim=-1)
        expected, log_sum_exp = reference.attend(query, key, tensors["v"][:, head], SCALE)
        assert relative_error(tensors["output"][-1, head], expected) <= TOLERANCE[DTYPE]
        assert abs(tensors["log_sum_exp"][-1, head] - log_sum_exp) <= LOG_SUM_EXP_TOLERANCE

    def test_routed_experts_find_their_weights(self, run_programs: RunPrograms) -> None:
        """The last of 2^20 + 1 experts, chosen by the second of two tokens."""
        experts, hidden_size, intermediate_size = 2**20 + 1, 64, 64
        tensors = {
            "hidden": random(2, hidden_size),
            "gate_up_proj": untouched(experts, 2 * intermediate_size, hidden_size),
            "down_proj": untouched(experts, hidden_size, intermediate_size),
            "expert_ids": int32(0, experts - 1).view(2, 1),
            "expert_weights": torch.tensor([[1.0], [0.7]]),
            "output": torch.zeros(2, hidden_size, dtype=torch.bfloat16),
            "num_blocks": int32(1),
            "block_expert": int32(experts - 1),
            "block_slots": int32(1, *[-1] * 15),
            "gated": torch.zeros(2, intermediate_size, dtype=torch.bfloat16),
            "partial": torch.zeros(2, 128),
        }
        for name in ("gate_up_proj", "down_proj"):
            tensors[name][-1] = random(*tensors[name].shape[1:]) / 8
        _, gate_up, down, weighted_sum = routed_experts_launches(tensors, first_expert=0)
        run_programs(gate_up, [(0, 0, 0)], tensors)
        run_programs(down, [(0, 0, 0)], tensors)
        run_programs(weighted_sum, [(1, 0, 0)], tensors)
        expected = expected_of_last_token(tensors, first_expert=experts - 1)
        assert relative_error(tensors["output"][-1:], expected) <= TOLERANCE[DTYPE]

    def test_block_scaled_routed_experts_find_their_weights(self, run_programs: RunPrograms) -> None:
        """The last of 2^20 + 1 experts, chosen by the second of two tokens."""
        experts, hidden_size, intermediate_size = 2**20 + 1, 128, 64
        last = block_scaled_experts_inputs(
            [[0]], DTYPE, experts=1, hidden_size=hidden_size, intermediate_size=intermediate_size
        )
        tensors = {
            "hidden": random(2, hidden_size),
            "expert_ids": int32(0, experts - 1).view(2, 1),
            "expert_weights": torch.tensor([[1.0], [0.7]]),
            "output": torch.zeros(2, hidden_size, dtype=torch.bfloat16),
            "num_blocks": int32(1),
            "block_expert": int32(experts - 1),
            "block_slots": int32(1, *[-1] * 15),
            "gated": torch.zeros(2, intermediate_size, dtype=torch.bfloat16),
            "partial": torch.zeros(2, 128),
        }
        weights = ("gate_up_proj", "gate_up_scale", "down_proj", "down_scale")
        for name in weights:
            tensors[name] = untouched(experts, *last[name].shape[1:], dtype=last[name].dtype)
            tensors[name][-1] = last[name][0]
        op = BLOCK_SCALED_ROUTED_EXPERTS
        _, gate_up, down, weighted_sum = routed_experts_launches(tensors, first_expert=0, op=op)
        run_programs(gate_up, [(0, 0, 0)], tensors)
        # Two row blocks take turns.
        run_programs(down, [(0, 0, 0), (2, 0, 0)], tensors)
        run_programs(weighted_sum, [(1, 0, 0)], tensors)
        chosen = {name: tensors[name][-1:] for name in (*weights, "hidden", "expert_ids", "expert_weights")}
        expected = reference.block_scaled_routed_experts(**chosen, first_expert=experts - 1)
        assert relative_error(tensors["output"][-1:], expected) <= TOLERANCE[DTYPE]

    def test_routed_experts_find_their_tokens(self, run_programs: RunPrograms) -> None:
        """The last of 2^25 + 1 tokens, the only one with an expert here; its row block stands first."""
        tokens, hidden_size, intermediate_size = 2**25 + 1, 256, 128
        tensors = {
            "hidden": untouched(tokens, hidden_size),
            "gate_up_proj": random(1, 2 * intermediate_size, hidden_size) / 16,
            "down_proj": random(1, hidden_size, intermediate_size) / 8,
            "expert_ids": untouched(tokens, 1, dtype=torch.int32),
            "expert_weights": untouched(tokens, 1, dtype=torch.float32),
            "output": untouched(tokens, hidden_size),
            "num_blocks": int32(1),
            "block_expert": int32(0),
            "block_slots": int32(tokens - 1, *[-1] * 127),
            "gated": untouched(tokens, intermediate_size),
            "partial": untouched(tokens, 128, dtype=torch.float32),
        }
        tensors["hidden"][-1], tensors["expert_ids"][-1], tensors["expert_weights"][-1] = random(hidden_size), 1, 0.7
        _, gate_up, *bands = routed_experts_launches(tensors, first_expert=1)
        assert [launch.variant.kernel for launch in bands] == ["down", "weighted_sum"] * 2
        # Eight row blocks take turns.
        run_programs(gate_up, [(0, 0, 0), (8, 0, 0)], tensors)
        for down, weighted_sum in (bands[:2], bands[2:]):
            run_programs(down, [(0, 0, 0)], tensors)
            run_programs(weighted_sum, [(tokens - 1, 0, 0)], tensors)
        expected = expected_of_last_token(tensors, first_expert=1)
        assert relative_error(tensors["output"][-1:], expected) <= TOLERANCE[DTYPE]


def routed_experts_launches(tensors: Tensors, *, first_expert: int, op: OpDefinition = ROUTED_EXPERTS) -> list[Launch]:
    """The launches, with tensors, named as the kernels' parameters, in place of parts of the workspace."""
    dims = op.resolve_dims({tensor.name: tuple(tensors[tensor.name].shape) for tensor in op.inputs})
    problem = Problem(dims, {"first_expert": first_expert}, DTYPE, as_cache_dtype(DTYPE), TARGETS["sm_90"], 16, 2)
    launches = []
    for launch in check_plan(op, problem).launches:
        arguments = (
            TensorArgument(name) if isinstance(argument, WorkspaceArgument) else argument
            for (name, _), argument in zip(launch.variant.signature, launch.arguments, strict=True)
        )
        launches.append(replace(launch, arguments=tuple(arguments)))
    return launches


def expected_of_last_token(tensors: Tensors, *, first_expert: int) -> torch.Tensor:
    """What the last token gets from the last expert."""
    last = {name: tensors[name][-1:] for name in ("hidden", "expert_ids", "expert_weights")}
    weights = {name: tensors[name][-1:] for name in ("gate_up_proj", "down_proj")}
    return reference.routed_experts(**last, **weights, first_expert=first_expert)


def test_merge_of_empty_parts() -> None:
    """Rows whose parts are all empty, all but one, and none; an empty part's output was never written.

    One request of 7 rows and 9 tiles of keys in 5 parts, behind a request that is not split.
    """
    splits, rows, width = 5, 7, 200
    step = latent_inputs([(1, 20), (7, 140)], DType.FLOAT32, heads=1, kv_lora_rank=width)
    plan = plan_for(step, DType.FLOAT32)
    assert parts_of(plan, [(1, 20), (7, 140)]) == [1, splits]
    (combine,) = plan.launches[1:]
    largest_argument = combine.arguments[1]
    assert isinstance(largest_argument, WorkspaceArgument)
    block_m = scalars(combine)["block_m"]
    slots = largest_argument.elements // block_m
    part = torch.full((slots, block_m, width), torch.nan)
    largest, total = torch.full((slots, block_m), torch.nan), torch.full((slots, block_m), torch.nan)
    largest[:splits, :rows], total[:splits, :rows] = torch.randn(splits, rows), torch.rand(splits, rows) + 1
    part[:splits, :rows] = torch.randn(splits, rows, width)
    empty = torch.zeros(splits, rows, dtype=torch.bool)
    empty[:, 0] = True  # nowhere a key
    empty[:4, 1] = empty[1:, 2] = empty[2, 3] = True
    largest[:splits, :rows][empty], total[:splits, :rows][empty] = -torch.inf, 0.0
    part[:splits, :rows][empty] = torch.nan

    tensors = with_outputs(step)
    values = {
        name: tensors[argument.name] if isinstance(argument, TensorArgument) else getattr(argument, "value", None)
        for (name, _), argument in zip(combine.variant.signature, combine.arguments, strict=True)
    }
    values |= {"partial_output": part, "partial_max": largest, "partial_sum": total, "scale_log2e": 0.5}
    kernel = interpreted_kernel("LatentAttention", "combine")
    kernel[combine.grid](**values, **dict(combine.variant.constants), INTERPRET=True)
    output, log_sum_exp = tensors["output"][:, 0], tensors["log_sum_exp"][:, 0]
    assert output[0].isnan().all()
    assert log_sum_exp[0].isnan()

    weight = torch.exp2(largest[:splits, :rows].double() * 0.5)
    weight[empty] = 0.0
    expected_total = (weight * total[:splits, :rows].double()).sum(0)
    expected = (weight[..., None] * part[:splits, :rows].double().nan_to_num()).sum(0)[1:] / expected_total[1:, None]
    assert torch.equal(output[1], torch.zeros(width))
    assert log_sum_exp[1] == -torch.inf
    assert relative_error(output[2:], expected) <= TOLERANCE[DType.FLOAT32]
    assert (log_sum_exp[2:] - expected_total[1:].log()).abs().max() <= LOG_SUM_EXP_TOLERANCE


@pytest.mark.parametrize("op", OPS.values(), ids=OPS)
def test_no_program_waits_for_another(op: OpDefinition) -> None:
    """Programs share no memory that one writes and another reads: no atomics, barriers, or clusters of blocks."""
    for variant in op.variants(PROBLEMS[op.name]):
        source = Path(jit_kernel(variant.op, variant.kernel).fn.__code__.co_filename).read_text()
        assert f"def {variant.kernel}(" in source
        assert not re.search(r"\btl\.(atomic|debug_barrier)", source)
        assembled = re.findall(r"\btl\.inline_asm\w*\(\s*\"(\w+)", source)
        assert len(assembled) == source.count("inline_asm")
        assert set(assembled) <= {"fma"}
        assert not hasattr(variant, "num_ctas")


def step_of(requests: list[tuple[int, int]], *, pages: int, columns: int, longest_query: int) -> Tensors:
    """Inputs of LatentAttention whose shapes do not follow from the requests, but for the number of tokens."""
    used = sum(-(-length // 16) for _, length in requests)
    step = latent_inputs(requests, DTYPE, spare_pages=pages - used)
    missing = columns - step["block_offsets"].shape[1]
    step["block_offsets"] = torch.nn.functional.pad(step["block_offsets"], (0, missing), value=2**31 - 1)
    step["query_index"] = torch.zeros(len(requests), longest_query, dtype=torch.int32)
    return step


def with_outputs(step: Tensors) -> Tensors:
    """The tensors of a plan of LatentAttention; nothing was written to the outputs."""
    output = torch.full_like(step["q_latent"], torch.nan)
    return step | {"output": output, "log_sum_exp": torch.full(output.shape[:2], torch.nan)}


@pytest.mark.parametrize(("tile", "is_split"), [((16, 2), True), ((128, 2), False)], ids=["split", "whole"])
def test_one_plan_serves_every_length(tile: tuple[int, int], is_split: bool) -> None:
    """A plan is made once for the shapes, as for a CUDA graph, and run with other lengths and pages each time.

    Requests without keys or new tokens pad the batch. Every element of the outputs is written.
    """
    shapes = {"pages": 40, "columns": 21 if is_split else 16, "longest_query": 3}
    plan = plan_for(step_of([(1, 1), (2, 2), (1, 1)], **shapes), DTYPE, tile=tile)
    assert can_split(plan) == is_split
    for requests in (
        [(1, 240), (1, 17), (2, 161)],
        [(1, 1), (2, 2), (1, 1)],
        [(3, 250), (1, 0), (0, 0)],
        [(0, 33), (1, 31), (3, 0)],
        [(1, 0), (2, 0), (1, 0)],
    ):
        step = step_of(requests, **shapes)
        assert plan_for(step, DTYPE, tile=tile) == plan
        tensors = with_outputs(step)
        run_plan(plan, tensors)
        expected = reference.latent_attention(**step, softmax_scale=SCALE)
        assert_close((tensors["output"], tensors["log_sum_exp"]), expected, DTYPE)


@pytest.mark.parametrize("target", [ONE_MULTIPROCESSOR, MANY_MULTIPROCESSORS], ids=["1", "40"])
@pytest.mark.parametrize(
    "requests",
    [[(0, 0), (1, 40), (0, 70), (1, 17), (0, 1)], [(7, 40), (0, 9), (5, 70)]],
    ids=["fewer_tokens_than_requests", "more_tokens_than_requests"],
)
def test_a_longest_query_of_one_with_other_than_one_token_a_request(
    requests: list[tuple[int, int]], target: Target
) -> None:
    """The second case contradicts itself, as a builder's sizes may: rows are found by the offsets all the same."""
    check(step_of(requests, pages=20, columns=6, longest_query=1), DTYPE, target=target)


def problem_for(op: OpDefinition, dims: Mapping[str, int]) -> Problem:
    problem = PROBLEMS[op.name]
    return replace(problem, dims={**problem.dims, **dims})


LARGE_STEPS: dict[str, dict[str, int]] = {
    "AppendLatent": {"tokens": 200_000},
    "GatherLatent": {"keys": 8 * 200_000},
    "LatentAttention": {"tokens": 200_000, "requests": 200_000, "longest_query": 1},
    "ContextAttention": {"tokens": 20_000, "requests": 20_000, "longest_query": 1, "keys": 10**6},
    "RoutedExperts": {"tokens": 200_000},
    "BlockScaledMatMul": {"rows": 200_000},
    "BlockScaledRoutedExperts": {"tokens": 200_000},
}


@pytest.mark.parametrize("op", OPS.values(), ids=OPS)
def test_large_steps_lie_along_x(op: OpDefinition) -> None:
    plan = check_plan(op, problem_for(op, LARGE_STEPS[op.name]))
    assert max(launch.grid[0] for launch in plan.launches) > 65535


@pytest.mark.parametrize("op", OPS.values(), ids=OPS)
def test_a_step_beyond_every_grid_is_refused(op: OpDefinition) -> None:
    dims = {name: size * 2**20 for name, size in LARGE_STEPS[op.name].items()}
    with pytest.raises(ValueError, match=r"found grid|found \d+ (tokens|rows)"):
        op.plan(problem_for(op, dims))


@pytest.mark.parametrize("dtype", [DType.FLOAT32, DTYPE])
def test_context_attention_gives_the_same_bits_in_every_batch(dtype: DType) -> None:
    """Row blocks and key tiles are counted from the request's own beginning."""
    inputs = context_inputs([(19, 25), (21, 50), (40, 45)], dtype)
    alone = {name: inputs[name][19:40].contiguous() for name in ("q_nope", "q_pe")}
    alone |= {name: inputs[name][25:75].contiguous() for name in ("k_nope", "k_pe", "v")}
    alone |= {"query_offsets": int32(0, 21), "key_offsets": int32(0, 50)}
    alone |= {"query_index": inputs["query_index"][:1, :21], "key_index": inputs["key_index"][:1, :50]}
    batch, single = attend_context(inputs, dtype), attend_context(alone, dtype)
    assert torch.equal(batch[0][19:40], single[0])
    assert torch.equal(batch[1][19:40], single[1])


def test_latent_attention_in_a_batch_that_splits_otherwise() -> None:
    """A long neighbour and a small device change how the keys are cut: the result stays within its bound."""
    requests = [(1, 77), (1, 600), (2, 90)]
    inputs = latent_inputs(requests, DTYPE)
    alone = inputs | {name: inputs[name][:1].contiguous() for name in ("q_latent", "q_pe", "sequence_length")}
    alone |= {"block_offsets": inputs["block_offsets"][:1, :5].contiguous()}
    alone |= {"query_offsets": int32(0, 1), "query_index": torch.zeros(1, 1, dtype=torch.int32)}
    target = device(4)
    plans = [plan_for(step, DTYPE, target=target) for step in (inputs, alone)]
    assert (parts_of(plans[0], requests)[0], parts_of(plans[1], requests[:1])[0]) == (2, 3)
    check(inputs, DTYPE, target=target)
    check(alone, DTYPE, target=target)


def test_parts_of_a_request_longer_than_64k() -> None:
    """Some hundred parts, beside a request that fills two."""
    requests = [(1, 73_563), (2, 300)]
    inputs = latent_inputs(requests, DTYPE, heads=2, kv_lora_rank=16, rope_dim=16, page_size=128)
    target = device(200)
    assert parts_of(plan_for(inputs, DTYPE, tile=(128, 2), target=target), requests) == [288, 2]
    check(inputs, DTYPE, tile=(128, 2), softmax_scale=0.5, target=target)


@pytest.mark.parametrize("byte", [0x00, 0x7F, 0xFF], ids=["zero", "largest", "nan"])
def test_the_workspace_may_hold_anything(monkeypatch: pytest.MonkeyPatch, byte: int) -> None:
    """Its content changes no bit of the result, and nothing is written around it."""
    step = latent_inputs([(1, 200), (3, 1), (1, 0), (0, 0), (2, 90)], DTYPE)
    plan, margin = plan_for(step, DTYPE), 1 << 16
    assert can_split(plan)
    memory = torch.full((plan.workspace_bytes + 2 * margin,), byte, dtype=torch.uint8)

    def workspace(size: tuple[int], fill_value: int, *, dtype: torch.dtype) -> torch.Tensor:
        assert (size, dtype) == ((plan.workspace_bytes,), torch.uint8)
        return memory[margin:-margin]

    tensors = with_outputs(step)
    with monkeypatch.context() as patch:
        patch.setattr(torch, "full", workspace)
        run_plan(plan, tensors)
    assert (memory[:margin] == byte).all()
    assert (memory[-margin:] == byte).all()
    assert (memory[margin:-margin] != byte).any()
    expected = attend_latent(step, DTYPE)
    assert torch.equal(tensors["output"], expected[0])
    assert torch.equal(tensors["log_sum_exp"], expected[1])


def gather_inputs(page_size: int = 16) -> Tensors:
    return {"latent_cache": random(2, page_size, 128), "kv_slots": int32(17, 3, 2 * page_size - 1)}


INPUTS: dict[str, Callable[[], Tensors]] = {
    "AppendLatent": lambda: append_inputs(DTYPE, DTYPE),
    "GatherLatent": gather_inputs,
    "LatentAttention": lambda: latent_inputs([(2, 20), (3, 30)], DTYPE),
    "ContextAttention": lambda: context_inputs([(5, 9), (3, 3)], DTYPE),
    "RoutedExperts": lambda: experts_inputs([[0, 4], [3, 0], [2, 6]], DTYPE),
    "BlockScaledMatMul": lambda: linear_inputs(3, 130, 140, DTYPE),
    "BlockScaledRoutedExperts": lambda: block_scaled_experts_inputs([[0, 4], [3, 0], [2, 6]], DTYPE),
}
ATTRIBUTES: dict[str, dict[str, Attribute]] = {
    "AppendLatent": {"rope_interleave": 1, "latent_scale": 1.0},
    "GatherLatent": {"kv_lora_rank": 96, "rope_dim": 32, "latent_scale": 1.0},
    "LatentAttention": {"softmax_scale": SCALE, "latent_scale": 1.0},
    "ContextAttention": {"softmax_scale": SCALE, "causal": 1},
    "RoutedExperts": {"first_expert": 0},
    "BlockScaledMatMul": {},
    "BlockScaledRoutedExperts": {"first_expert": 0},
}
# Kernels never see these: their shapes say how long the longest request is.
SHAPE_CARRIERS = {"query_index", "key_index"}


@pytest.mark.parametrize(
    ("op", "name"),
    [
        pytest.param(op, tensor.name, id=f"{op.name}-{tensor.name}")
        for op in OPS.values()
        for tensor in op.inputs
        if tensor.name not in SHAPE_CARRIERS
    ],
)
def test_tensors_with_gaps_are_refused(op: OpDefinition, name: str) -> None:
    inputs, attributes = INPUTS[op.name](), ATTRIBUTES[op.name]
    interpret(op, inputs, attributes, model_dtype=DTYPE)
    with_gaps = torch.stack([inputs[name], inputs[name]], dim=-1)[..., 0]
    assert torch.equal(with_gaps.nan_to_num(), inputs[name].nan_to_num())
    with pytest.raises(ValueError, match=f"{name}|{op.outputs[0].name}.*found strides"):
        interpret(op, inputs | {name: with_gaps}, attributes, model_dtype=DTYPE)


def test_pages_of_256_tokens() -> None:
    inputs = latent_inputs([(1, 700), (2, 256), (1, 257)], DTYPE, page_size=256)
    for tile in ((16, 2), (128, 2)):
        check(inputs, DTYPE, tile=tile)

    pool = gather_inputs(page_size=256)
    pool["kv_slots"] = int32(0, 127, 128, 255, 256, 511)
    latent, k_pe = interpret(GATHER_LATENT, pool, ATTRIBUTES["GatherLatent"], model_dtype=DTYPE)
    rows = pool["latent_cache"].view(512, 128)[pool["kv_slots"].long()]
    assert torch.equal(torch.cat([latent, k_pe], dim=-1), rows)

    new = append_inputs(DTYPE, DTYPE, tokens=6, page_size=256)
    new["slot_mapping"] = int32(0, 127, 128, 255, 256, 767)
    present, _ = interpret(APPEND_LATENT, new, ATTRIBUTES["AppendLatent"], model_dtype=DTYPE)
    rows = present.view(768, 128)
    assert torch.equal(rows[new["slot_mapping"].long(), :96], new["latent"])
    assert (~rows.isnan()).any(dim=-1).sum() == 6


@pytest.mark.parametrize("target", [ONE_MULTIPROCESSOR, MANY_MULTIPROCESSORS], ids=["1", "40"])
@pytest.mark.parametrize("length", [1, 2, 16, 17, 33, 65])
def test_two_queries_of_which_one_sees_no_key_of_a_tile(length: int, target: Target) -> None:
    """Tiles hold 16 keys: of length 17, the first query sees the first tile alone; of length 1, nothing."""
    check(latent_inputs([(2, length), (2, 200)], DType.FLOAT32), DType.FLOAT32, target=target)
    tokens = context_inputs([(2, length)], DType.FLOAT32)
    output, log_sum_exp = attend_context(tokens, DType.FLOAT32)
    expected, expected_log_sum_exp = reference.context_attention(**tokens, softmax_scale=SCALE)
    assert torch.equal(log_sum_exp.isneginf(), expected_log_sum_exp.isneginf())
    assert relative_error(output, expected) <= TOLERANCE[DType.FLOAT32]
