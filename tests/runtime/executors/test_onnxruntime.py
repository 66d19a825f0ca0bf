import gc
import time
import weakref
from dataclasses import replace

import numpy as np
import onnxruntime
import pytest

from tests.runtime.networks import make_network
from trtllm_mla.dtypes import DType
from trtllm_mla.runtime.executors import onnxruntime as module
from trtllm_mla.runtime.generation import ForcedChunk, ForcedSequence, read_cached_rows, run_forced
from trtllm_mla.runtime.step import Chunk, LogitRows, build_step

TOKENS = np.random.default_rng(0).integers(0, 131, 30).astype(np.int32)
CHUNKS = [ForcedChunk(17, False), ForcedChunk(13, True)]


def step_of(logits, *, num_pages=4):
    chunk = Chunk(TOKENS[:5], 0, np.array([2], np.int32), logits)
    return build_step([], [chunk], page_size=16, num_pages=num_pages)


def test_description_says_what_runs():
    version = onnxruntime.__version__
    network = make_network("linear")
    plain = network.onnxruntime(num_pages=2, page_size=16)
    twin = network.onnxruntime(num_pages=2, page_size=16, twin_of=DType.BFLOAT16)
    assert plain.description == f"ONNX Runtime {version}, CPU, float32 network"
    assert twin.description == f"ONNX Runtime {version}, CPU, float32 twin of the bfloat16 network"
    assert plain.name == "onnxruntime"


def test_only_slots_of_new_tokens_are_written():
    executor = make_network("yarn").onnxruntime(num_pages=4, page_size=16)
    executor.run(step_of(LogitRows.LAST))
    for layer in range(2):
        pool = executor.read_cache(layer)
        assert pool.shape == (4, 16, 128)
        assert pool.dtype == np.float32
        written = np.isfinite(pool).all(axis=-1)
        assert np.argwhere(written).tolist() == [[2, offset] for offset in range(5)]
        assert np.isnan(pool[~written]).all()


def test_logit_rows_belong_to_the_caller():
    executor = make_network("yarn").onnxruntime(num_pages=4, page_size=16)
    every = executor.run(step_of(LogitRows.ALL))
    kept = every.copy()
    last = executor.run(step_of(LogitRows.LAST))
    none = executor.run(step_of(LogitRows.NONE))
    assert [every.shape, last.shape, none.shape] == [(5, 131), (1, 131), (0, 131)]
    assert np.array_equal(every, kept)
    assert np.abs(every[-1:] - last).max() < 1e-4


def test_the_cache_is_updated_in_place():
    """Copying the pools of both layers once would take longer than the whole step is allowed to."""
    num_pages = 16384
    executor = make_network("yarn").onnxruntime(num_pages=num_pages, page_size=16)
    pool = executor.read_cache(0)
    target = np.empty_like(pool)
    step = step_of(LogitRows.LAST, num_pages=num_pages)

    def fastest(action):
        times = []
        for _ in range(7):
            begin = time.perf_counter()
            action()
            times.append(time.perf_counter() - begin)
        return min(times)

    assert fastest(lambda: executor.run(step)) < fastest(lambda: np.copyto(target, pool))


def test_contiguous_weights_are_not_copied():
    weight = np.random.default_rng(0).standard_normal((7, 5)).astype(np.float32)
    weight.flags.writeable = False
    assert module._ort_value(weight).data_ptr() == weight.ctypes.data
    with pytest.raises(ValueError, match="expected a contiguous array"):
        module._ort_value(weight.T)


def forced_logits(network):
    executor = network.onnxruntime(num_pages=4, page_size=16)
    (result,) = run_forced(executor, [ForcedSequence(TOKENS.tolist(), CHUNKS)])
    return result.logits, read_cached_rows(executor, 1, result.pages, len(TOKENS))


@pytest.mark.parametrize(
    ("dtype", "cache", "tolerance"),
    # Spacing of the type, times a few for the two layers.
    [(DType.FLOAT16, "auto", 4 * 2**-10), (DType.FLOAT32, "fp16", 2 * 2**-10), (DType.FLOAT32, "bf16", 4 * 2**-7)],
)
def test_other_types(dtype, cache, tolerance):
    network = make_network("yarn", dtype=dtype, kv_cache_dtype=cache)
    logits, rows = forced_logits(network)
    expected = network.hf_logits(TOKENS.tolist())
    assert np.linalg.norm(logits - expected) < tolerance * np.linalg.norm(expected)
    stored = DType.BFLOAT16 if cache == "bf16" else DType.FLOAT16
    assert np.array_equal(rows, rows.astype(stored.numpy).astype(np.float32)), "rows are rounded to the cache's type"


def test_a_closed_executor_lets_its_weights_go():
    network = make_network("linear")
    weights = {name: array.copy() for name, array in network.weights.items()}
    watched = weakref.ref(weights["model.norm.weight"])
    executor = replace(network, weights=weights).onnxruntime(num_pages=4, page_size=16)
    executor.run(step_of(LogitRows.LAST))
    del weights
    gc.collect()
    assert watched() is not None
    executor.close()
    gc.collect()
    assert watched() is None
