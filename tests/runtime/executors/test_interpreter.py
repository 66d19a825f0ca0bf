import copy

import ml_dtypes
import numpy as np
import onnx
import pytest
import torch
from onnx import helper
from onnx.reference import ReferenceEvaluator

from tests.runtime.networks import make_network
from tests.support.hf import ORIGINAL_MAX_POSITION_EMBEDDINGS
from trtllm_mla.dtypes import DType
from trtllm_mla.runtime.executors import interpreter as module
from trtllm_mla.runtime.generation import ForcedChunk, ForcedSequence, GenerationSession, read_cached_rows, run_forced
from trtllm_mla.runtime.request import Request
from trtllm_mla.runtime.scheduler import SchedulerConfig
from trtllm_mla.runtime.step import Chunk, ContextPasses, LogitRows, build_step

TOKENS = np.random.default_rng(3).integers(0, 131, 21).tolist()


def relative_error(found, expected):
    return np.linalg.norm(found - expected) / np.linalg.norm(expected)


class TestOperators:
    """The operators that replace the evaluator's own, against float64."""

    @staticmethod
    def evaluate(name, inputs, **attributes):
        names = [f"x{number}" for number in range(len(inputs))]
        node = helper.make_node(name, names, ["y"], **attributes)
        element_type = helper.np_dtype_to_tensor_dtype(inputs[0].dtype)
        values = [helper.make_tensor_value_info(item, element_type, None) for item in names]
        output = helper.make_tensor_value_info("y", element_type, None)
        model = helper.make_model(
            helper.make_graph([node], "one", values, [output]), opset_imports=[helper.make_opsetid("", 23)]
        )
        operators = [module._fp32_operator(*item) for item in module._FP32_FUNCTIONS.items()]
        evaluator = ReferenceEvaluator(model, new_ops=operators)
        (result,) = evaluator.run(None, dict(zip(names, inputs, strict=True)))
        assert result.dtype == inputs[0].dtype
        return result

    @staticmethod
    def random(dtype, *shape, seed=0):
        return np.random.default_rng(seed).standard_normal(shape).astype(dtype.numpy)

    @staticmethod
    def check(found, expected, dtype):
        """Rounded once: half a unit in the last place, and the error of fp32 sums."""
        bits = {DType.FLOAT32: 24, DType.FLOAT16: 11, DType.BFLOAT16: 8}[dtype]
        scale = np.abs(expected).max()
        error = np.abs(found.astype(np.float64) - expected)
        assert (error <= np.abs(expected) * 2.0**-bits + 2e-6 * scale).all()

    @pytest.mark.parametrize("dtype", DType)
    @pytest.mark.parametrize("bias", [True, False])
    def test_gemm(self, dtype, bias):
        inputs = [self.random(dtype, 7, 300), self.random(dtype, 5, 300, seed=1)]
        expected = inputs[0].astype(np.float64) @ inputs[1].astype(np.float64).T
        if bias:
            inputs.append(self.random(dtype, 5, seed=2))
            expected += inputs[2].astype(np.float64)
        self.check(self.evaluate("Gemm", inputs, transB=1), expected, dtype)

    @pytest.mark.parametrize("dtype", DType)
    def test_matmul(self, dtype):
        a, b = self.random(dtype, 3, 7, 300), self.random(dtype, 3, 300, 5, seed=1)
        self.check(self.evaluate("MatMul", [a, b]), a.astype(np.float64) @ b.astype(np.float64), dtype)

    @pytest.mark.parametrize("dtype", DType)
    def test_rms_normalization(self, dtype):
        x, scale = self.random(dtype, 6, 80), self.random(dtype, 80, seed=1)
        wide = x.astype(np.float64)
        expected = wide / np.sqrt((wide**2).mean(-1, keepdims=True) + 1e-2) * scale.astype(np.float64)
        found = self.evaluate("RMSNormalization", [x, scale], axis=-1, epsilon=1e-2, stash_type=1)
        self.check(found, expected, dtype)

    @pytest.mark.parametrize("dtype", DType)
    def test_sigmoid(self, dtype):
        x = np.concatenate([self.random(dtype, 100), np.array([-120, -40, 0, 40, 120], dtype.numpy)])
        expected = torch.sigmoid(torch.tensor(x.astype(np.float64))).numpy()
        self.check(self.evaluate("Sigmoid", [x]), expected, dtype)


class TestNetwork:
    @pytest.mark.parametrize(
        ("dtype", "tolerance"),
        # Spacing of the type, times a few for the two layers.
        [(DType.FLOAT32, 3e-6), (DType.FLOAT16, 4 * 2**-10), (DType.BFLOAT16, 4 * 2**-7)],
    )
    def test_logits_of_transformers_at_every_position(self, dtype, tolerance):
        network = make_network("yarn", dtype=dtype)
        executor = network.interpreter(num_pages=6, page_size=16)
        sequences = [
            ForcedSequence(TOKENS, [ForcedChunk(17, False), ForcedChunk(3, True), ForcedChunk(1, True)]),
            ForcedSequence(TOKENS[::-1][:6], [ForcedChunk(2, True), ForcedChunk(4, False)], first_step=1),
        ]
        for sequence, result in zip(sequences, run_forced(executor, sequences), strict=True):
            expected = network.hf_logits(sequence.token_ids)
            assert relative_error(result.logits, expected) < tolerance

    @pytest.mark.parametrize(
        ("dtype", "tolerance"),
        # As above: a merged output is rounded twice, which the other roundings of two layers hide.
        [(DType.FLOAT32, 3e-6), (DType.FLOAT16, 4 * 2**-10), (DType.BFLOAT16, 4 * 2**-7)],
    )
    def test_a_long_history_in_passes(self, dtype, tolerance):
        """Three passes of eight keys: the second and the third are empty, partly and wholly used in turn."""
        network = make_network("yarn", dtype=dtype, context_passes=3)
        executor = network.interpreter(num_pages=6, page_size=16)
        sequences = [
            ForcedSequence(TOKENS, [ForcedChunk(size, False) for size in (8, 6, 7)]),
            ForcedSequence(TOKENS[::-1][:6], [ForcedChunk(6, True)], first_step=1),
        ]
        results = run_forced(executor, sequences, context_passes=ContextPasses(3, 8))
        for sequence, result in zip(sequences, results, strict=True):
            assert relative_error(result.logits, network.hf_logits(sequence.token_ids)) < tolerance
        if dtype is DType.FLOAT32:
            assert np.abs(results[0].logits - network.hf_logits(TOKENS)).max() < 2e-4

    @pytest.mark.parametrize("checkpoint", ["deepseek_v2", "deepseek_v3_experts"])
    def test_experts_in_bfloat16_are_as_exact_as_transformers(self, checkpoint):
        network = make_network(checkpoint, dtype=DType.BFLOAT16)
        executor = network.interpreter(num_pages=3, page_size=16)
        (result,) = run_forced(executor, [ForcedSequence(TOKENS, [ForcedChunk(13, False), ForcedChunk(8, True)])])
        peer = copy.deepcopy(network.hf_model).bfloat16()
        for layer in peer.model.layers:
            if hasattr(layer.mlp, "gate"):
                layer.mlp.gate.float()  # as transformers loads it, whatever the model's type
        with torch.inference_mode():
            rounded = peer(torch.tensor([TOKENS])).logits[0].float().numpy()
        expected = network.hf_logits(TOKENS)
        assert 0 < relative_error(result.logits, expected) < 1.5 * relative_error(rounded, expected)

    @pytest.mark.parametrize("cache", ["bf16", "fp16"])
    def test_a_cache_of_another_type_holds_rounded_rows(self, cache):
        network = make_network("yarn", kv_cache_dtype=cache)
        executor = network.interpreter(num_pages=2, page_size=16)
        sequence = ForcedSequence(TOKENS, [ForcedChunk(13, False), ForcedChunk(8, True)])
        (result,) = run_forced(executor, [sequence])
        assert (
            relative_error(result.logits, network.hf_logits(TOKENS)) < {"bf16": 4 * 2**-7, "fp16": 2 * 2**-10}[cache]
        )
        rows = read_cached_rows(executor, 1, result.pages, len(TOKENS))
        stored = ml_dtypes.bfloat16 if cache == "bf16" else np.float16
        assert np.array_equal(rows, rows.astype(stored).astype(np.float32))

    @pytest.mark.parametrize(
        ("checkpoint", "lengths", "changes"),
        [
            # The prompt is longer than the positions that YaRN starts from, and its rest falls below the threshold.
            ("yarn", (ORIGINAL_MAX_POSITION_EMBEDDINGS + 5,), {"max_chunk_tokens": 64}),
            ("half_split", (21, 5), {}),
            ("youtu", (21, 5), {"max_chunk_tokens": 7}),
            ("linear", (21, 5), {"enable_matrix_absorption": False, "max_chunk_tokens": 16}),
            ("half_split", (40, 5), {"max_chunk_tokens": 12, "max_context_kv_tokens": 16, "max_context_passes": 3}),
            ("deepseek_v2", (21, 5), {"max_chunk_tokens": 7}),
            ("minicpm3", (21, 5), {}),
            ("mistral4", (21, 5), {}),
            ("axk1", (21, 5), {}),
            ("longcat_flash", (21, 5), {}),
            ("deepseek_v3_experts", (21, 5), {}),
        ],
    )
    def test_greedy_tokens_of_transformers(self, checkpoint, lengths, changes):
        config = SchedulerConfig(
            vocab_size=131,
            num_pages=16,
            page_size=16,
            max_batch_size=4,
            max_num_tokens=64,
            max_input_len=100,
            max_seq_len=110,
            **{
                "enable_matrix_absorption": True,
                "prefill_absorption_threshold": 8,
                "max_context_kv_tokens": 110,
                **changes,
            },
        )
        network = make_network(
            checkpoint, absorption=config.enable_matrix_absorption, context_passes=config.max_context_passes
        )
        executor = network.interpreter(num_pages=config.num_pages, page_size=config.page_size)
        prompts = [np.random.default_rng(length).integers(0, 131, length).tolist() for length in lengths]
        results = GenerationSession(executor, config).generate([Request(prompt, 3) for prompt in prompts])
        assert [result.output_ids for result in results] == [network.hf_greedy(prompt, 3) for prompt in prompts]

    def test_only_slots_of_new_tokens_are_written(self):
        executor = make_network("yarn").interpreter(num_pages=3, page_size=16)
        chunk = Chunk(np.array(TOKENS[:5], np.int32), 0, np.array([2], np.int32), LogitRows.NONE)
        logits = executor.run(build_step([], [chunk], page_size=16, num_pages=3))
        assert logits.shape == (0, 131)
        for layer in range(2):
            written = np.isfinite(executor.read_cache(layer)).all(axis=-1)
            assert np.argwhere(written).tolist() == [[2, offset] for offset in range(5)]

    def test_a_pool_with_gaps_is_refused(self):
        executor = make_network("yarn").interpreter(num_pages=3, page_size=16)
        pool = executor._fixed["past_latent_1"]
        executor._fixed["past_latent_1"] = np.repeat(pool, 2, axis=0)[::2]
        chunk = Chunk(np.array(TOKENS[:5], np.int32), 0, np.array([2], np.int32), LogitRows.NONE)
        with pytest.raises(ValueError, match="AppendLatent: output 0 is not the memory of input 0"):
            executor.run(build_step([], [chunk], page_size=16, num_pages=3))

    def test_description_says_what_runs(self):
        executor = make_network("yarn", dtype=DType.BFLOAT16).interpreter(num_pages=1, page_size=16)
        assert executor.description == (
            "launch plans and Triton kernels for sm_90 in Triton's interpreter, the rest in ONNX "
            f"{onnx.__version__}'s reference evaluator, CPU, bfloat16 network"
        )
        assert executor.name == "interpreter"
