from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from tests.ops import reference
from tests.ops.checks import torch_dtype
from tests.ops.latent_attention.test_kernels import BEYOND_EVERY_POOL, device, make_inputs
from tests.ops.routed_experts.test_kernels import choose
from tests.ops.routed_experts.test_kernels import make_inputs as make_expert_inputs
from tests.runtime.networks import make_network
from trtllm_mla.cache_rows import CacheDType
from trtllm_mla.dtypes import DType
from trtllm_mla.ops import OPS
from trtllm_mla.ops.interpreter import run_op
from trtllm_mla.runtime.decode_buckets import DecodeBucket, DecodeBuckets, pad_decode
from trtllm_mla.runtime.executors import interpreter
from trtllm_mla.runtime.step import Chunk, LogitRows, StepInputs, build_step
from trtllm_mla.targets import get_target

PAGE_SIZE, NUM_PAGES = 16, 24
BUCKETS = DecodeBuckets(max_requests=12, max_pages=20)


def chunk(length: int, *pages: int, new: int = 1, logits: LogitRows = LogitRows.LAST) -> Chunk:
    """The last ``new`` tokens of a request of ``length`` tokens."""
    tokens = np.random.default_rng(length).integers(1, 131, new, dtype=np.int32)
    return Chunk(tokens, length - new, np.array(pages, np.int32), logits)


def decode(*chunks: Chunk) -> StepInputs:
    return build_step([], chunks, page_size=PAGE_SIZE, num_pages=NUM_PAGES)


class TestFind:
    @pytest.mark.parametrize(
        ("requests", "bucket"), [(1, 1), (2, 2), (3, 4), (4, 4), (5, 8), (8, 8), (9, 12), (12, 12)]
    )
    def test_requests(self, requests: int, bucket: int) -> None:
        step = decode(*(chunk(5, page) for page in range(requests)))
        assert BUCKETS.find(step) == DecodeBucket(bucket, 1)
        assert replace(BUCKETS, pad_requests=False).find(step) == DecodeBucket(requests, 1)

    @pytest.mark.parametrize(("pages", "bucket"), [(1, 1), (2, 2), (3, 4), (9, 16), (16, 16), (17, 20), (20, 20)])
    def test_pages(self, pages: int, bucket: int) -> None:
        step = decode(chunk(pages * PAGE_SIZE, *range(pages)), chunk(3, 21))
        for buckets in (BUCKETS, replace(BUCKETS, pad_requests=False)):
            assert buckets.find(step) == DecodeBucket(2, bucket)

    def test_beyond_the_limits_there_is_none(self) -> None:
        assert BUCKETS.find(decode(*(chunk(5, page) for page in range(13)))) is None
        assert BUCKETS.find(decode(chunk(21 * PAGE_SIZE, *range(21)))) is None

    @pytest.mark.parametrize(
        "chunks",
        [
            [],
            [chunk(5, 0, new=2)],
            [chunk(5, 0), chunk(6, 1, new=3)],
            [chunk(5, 0), chunk(6, 1, logits=LogitRows.NONE)],
            # As many tokens and rows as requests.
            [chunk(5, 0, new=2, logits=LogitRows.ALL), chunk(6, 1, logits=LogitRows.NONE)],
        ],
        ids=["empty", "two tokens", "a longer chunk", "a row less", "two rows of one request"],
    )
    def test_other_generation_steps(self, chunks: list[Chunk]) -> None:
        step = decode(*chunks)
        assert BUCKETS.find(step) is None
        with pytest.raises(ValueError, match="expected a decode step within"):
            pad_decode(step, DecodeBucket(12, 20))

    @pytest.mark.parametrize("generation", [[], [chunk(5, 0)]])
    def test_a_step_with_a_context_group(self, generation: list[Chunk]) -> None:
        step = build_step([chunk(7, 3, new=7)], generation, page_size=PAGE_SIZE, num_pages=NUM_PAGES)
        assert BUCKETS.find(step) is None


class TestPad:
    STEP = decode(chunk(40, 7, 3, 20), chunk(5, 11), chunk(17, 9, 2))

    def test_padding_requests_have_no_keys_and_no_slot(self) -> None:
        padded = pad_decode(self.STEP, DecodeBucket(5, 4))
        assert padded.input_ids.tolist() == [*self.STEP.input_ids, 0, 0]
        assert padded.slot_mapping.tolist() == [20 * 16 + 7, 11 * 16 + 4, 2 * 16, -1, -1]
        assert padded.last_token_ids.tolist() == [0, 1, 2, 3, 4]
        assert padded.generation_position_ids.tolist() == [39, 4, 16, 0, 0]
        assert padded.generation_query_offsets.tolist() == [0, 1, 2, 3, 4, 5]
        assert padded.generation_sequence_length.tolist() == [40, 5, 17, 0, 0]
        assert padded.generation_query_index.tolist() == [[0], [1], [2], [3], [4]]
        table = [[7, 3, 20, 0], [11, 0, 0, 0], [9, 2, 0, 0], [0] * 4, [0] * 4]
        assert padded.kv_cache_block_offsets.tolist() == table

    def test_inputs_stay_contiguous_int32(self) -> None:
        before = self.STEP.arrays(absorption=True)
        for name, array in pad_decode(self.STEP, DecodeBucket(8, 16)).arrays(absorption=True).items():
            assert array.dtype == np.int32, name
            assert array.flags.c_contiguous, name
            if name.startswith("context"):
                np.testing.assert_array_equal(array, before[name])

    def test_a_step_that_fills_its_bucket_stays_as_it_is(self) -> None:
        padded = pad_decode(self.STEP, DecodeBucket(3, 3)).arrays(absorption=True)
        for name, array in self.STEP.arrays(absorption=True).items():
            np.testing.assert_array_equal(padded[name], array, err_msg=name)

    @pytest.mark.parametrize("bucket", [DecodeBucket(2, 4), DecodeBucket(4, 2)])
    def test_a_bucket_that_is_too_small_is_refused(self, bucket: DecodeBucket) -> None:
        with pytest.raises(ValueError, match="found a step of 3 tokens, 3 requests and 3 pages"):
            pad_decode(self.STEP, bucket)


class TestOperations:
    """Real rows of padded steps are those of unpadded ones, bit for bit, in the real kernels."""

    # Many pieces; one piece for each request; a page table of two tiles, which the plan knows not to split.
    @pytest.mark.parametrize(
        ("multiprocessors", "lengths"), [(40, [150, 1, 33]), (1, [150, 1, 33]), (40, [30, 1, 17])]
    )
    @pytest.mark.parametrize("cache_dtype", [CacheDType.FP32, CacheDType.BF16, CacheDType.FP8, CacheDType.NVFP4])
    def test_latent_attention(self, cache_dtype: CacheDType, multiprocessors: int, lengths: list[int]) -> None:
        torch.manual_seed(sum(lengths))
        dtype = DType.FLOAT32 if cache_dtype is CacheDType.FP32 else DType.BFLOAT16
        inputs = make_inputs([(1, length) for length in lengths], dtype)
        inputs["block_offsets"] = inputs["block_offsets"][:, :-1].contiguous()
        if cache_dtype.is_quantized:
            rows = inputs["latent_cache"].float().numpy()
            layout = cache_dtype.layout(96, 32)
            quantized = reference.quantize_rows(np.nan_to_num(rows).reshape(-1, 128), layout)
            quantized[np.isnan(rows).any(-1).reshape(-1)] = 0xFF
            inputs["latent_cache"] = torch.from_numpy(quantized.reshape(*rows.shape[:2], -1).view(np.int8))
        pages = inputs["block_offsets"].shape[1]
        padded = {
            **inputs,
            "q_latent": torch.cat([inputs["q_latent"], torch.randn(5, 5, 96).to(torch_dtype(dtype))]),
            "q_pe": torch.cat([inputs["q_pe"], torch.randn(5, 5, 32).to(torch_dtype(dtype))]),
            "block_offsets": torch.full((8, 16), BEYOND_EVERY_POOL, dtype=torch.int32),
            "sequence_length": torch.tensor([*lengths, 0, 0, 0, 0, 0], dtype=torch.int32),
            "query_offsets": torch.arange(9, dtype=torch.int32),
            "query_index": torch.arange(8, dtype=torch.int32)[:, None],
        }
        padded["block_offsets"][:3, :pages] = inputs["block_offsets"]

        def run(values: dict[str, torch.Tensor]) -> tuple[torch.Tensor, ...]:
            op = OPS["LatentAttention"]
            return run_op(
                op,
                [values[tensor.name] for tensor in op.inputs],
                {"softmax_scale": 0.11, "latent_scale": 0.7 if cache_dtype.is_quantized else 1.0},
                model_dtype=dtype,
                cache_dtype=cache_dtype,
                target=device(multiprocessors),
                tile_s=16,
                num_stages=2,
            )

        output, log_sum_exp = run(padded)
        for found, expected in zip((output, log_sum_exp), run(inputs), strict=True):
            assert torch.equal(found[:3], expected)
            assert not expected.isnan().any()
        assert (output[3:] == 0).all()
        assert (log_sum_exp[3:] == float("-inf")).all()

    @pytest.mark.parametrize("dtype", [DType.FLOAT32, DType.BFLOAT16])
    def test_routed_experts(self, dtype: DType) -> None:
        """Padding shares row blocks with real tokens, and may hold anything."""
        torch.manual_seed(3)
        ids = choose(5, 3, 7)
        inputs = make_expert_inputs(torch.cat([ids, ids[:1].expand(3, 3)]), dtype)
        inputs["hidden"][5:] = float("nan")
        tokens = ("hidden", "expert_ids", "expert_weights")

        def run(count: int) -> torch.Tensor:
            op = OPS["RoutedExperts"]
            values = {name: value[:count] if name in tokens else value for name, value in inputs.items()}
            (output,) = run_op(
                op,
                [values[tensor.name].contiguous() for tensor in op.inputs],
                {"first_expert": 0},
                model_dtype=dtype,
                cache_dtype=CacheDType.of(dtype),
                target=get_target("sm_90"),
                tile_s=16,
                num_stages=2,
            )
            return output

        found, expected = run(8), run(5)
        assert torch.equal(found[:5], expected)
        assert not expected.isnan().any()
        assert found[5:].isnan().all()


class TestNetwork:
    """Padded and unpadded steps of whole networks with the plugins' kernels: bit for bit, cache rows included."""

    @pytest.fixture(autouse=True)
    def products_row_by_row(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """BLAS sums in another order for another number of rows."""

        def by_row(function: Callable[..., Any]) -> Callable[..., Any]:
            def product(a: Any, *others: Any, **attributes: Any) -> Any:
                rows = (function(a[..., row : row + 1, :], *others, **attributes) for row in range(a.shape[-2]))
                return np.concatenate(list(rows), axis=-2) if a.shape[-2] else function(a, *others, **attributes)

            return product

        functions = dict(interpreter._FP32_FUNCTIONS)
        functions |= {name: by_row(functions[name]) for name in ("Gemm", "MatMul")}
        monkeypatch.setattr(interpreter, "_FP32_FUNCTIONS", functions)

    @pytest.mark.parametrize(
        ("checkpoint", "dtype", "kv_cache_dtype"),
        [
            ("yarn", DType.FLOAT32, "auto"),
            ("yarn", DType.BFLOAT16, "fp8"),
            ("half_split", DType.BFLOAT16, "nvfp4"),
            ("deepseek_v3_experts", DType.FLOAT32, "auto"),
            ("mistral4", DType.FLOAT32, "auto"),
        ],
    )
    def test_decode(self, checkpoint: str, dtype: DType, kv_cache_dtype: str) -> None:
        network = make_network(checkpoint, dtype=dtype, kv_cache_dtype=kv_cache_dtype)
        lengths, pages = (23, 16, 3), ([7, 3], [11, 9], [5])
        prompts = [chunk(length, *owned, new=length) for length, owned in zip(lengths, pages, strict=True)]
        prefill = build_step(prompts, [], page_size=PAGE_SIZE, num_pages=NUM_PAGES)
        step = decode(*(chunk(length + 1, *owned) for length, owned in zip(lengths, pages, strict=True)))

        executor = network.interpreter(num_pages=NUM_PAGES, page_size=PAGE_SIZE)
        executor.run(prefill)
        before = [pool.copy() for pool in executor._pools]
        expected = executor.run(step)
        after = [pool.copy() for pool in executor._pools]
        for pool, old, new in zip(executor._pools, before, after, strict=True):
            assert old.tobytes() != new.tobytes()
            pool[...] = old
        found = executor.run(pad_decode(step, DecodeBucket(8, 5)))

        assert not np.isnan(found).any()
        np.testing.assert_array_equal(found[:3], expected)
        for pool, new in zip(executor._pools, after, strict=True):
            assert pool.tobytes() == new.tobytes()
