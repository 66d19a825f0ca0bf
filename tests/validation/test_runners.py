"""The runners with polygraphy's own comparison, and what ExecutorRunner makes of a scenario."""

from __future__ import annotations

import numpy as np
import pytest
from polygraphy.comparator import Comparator, CosineSimilarityCompareFunc, L2CompareFunc, SimpleCompareFunc
from polygraphy.logger import G_LOGGER

from tests.validation.cases import make_case
from trtllm_mla.validation.quantization import QuantizedCache
from trtllm_mla.validation.runners import ExecutorRunner, HuggingFaceRunner
from trtllm_mla.validation.scenarios import TokenSource, make_scenarios, split_texts


@pytest.fixture
def executor(yarn_case):
    executor = yarn_case.executor()
    yield executor
    executor.close()


def _feeds(case):
    source = TokenSource(case.spec.vocab_size, 3)
    return [scenario.to_arrays() for scenario in make_scenarios(source, case.config, (33, 16, 2))]


@pytest.mark.parametrize("streaming", [False, True])
def test_runners_agree_by_polygraphys_own_comparison(yarn_case, executor, streaming):
    runners = [
        HuggingFaceRunner.from_checkpoint(yarn_case.checkpoint.path, yarn_case.spec),
        ExecutorRunner(executor, yarn_case.spec.num_hidden_layers),
    ]
    compare = [SimpleCompareFunc(atol=2e-4, rtol=0), CosineSimilarityCompareFunc(1 - 1e-6), L2CompareFunc(0.1)]
    with G_LOGGER.verbosity(G_LOGGER.CRITICAL):
        run = Comparator.run(runners, data_loader=_feeds(yarn_case), streaming=streaming)
        results = Comparator.compare_accuracy(run, compare_func=compare)
    assert results
    assert len(results) == 3
    for result in results:
        assert list(result) == [("huggingface", "onnxruntime")]
        assert [set(outputs) for outputs in result["huggingface", "onnxruntime"]] == [
            {"logits", "latent_0", "latent_1"}
        ] * 5


def test_outputs(yarn_case, executor):
    (feed, *_) = _feeds(yarn_case)
    with ExecutorRunner(executor, 2, name="mine") as runner:
        outputs = runner.infer(feed)
        first_time = runner.last_inference_time()
        again = runner.infer(feed)
    assert runner.name == "mine"
    assert first_time > 0
    width = yarn_case.spec.latent_width
    assert {name: value.shape for name, value in outputs.items()} == {
        "logits": (51, yarn_case.spec.vocab_size),
        "latent_0": (51, width),
        "latent_1": (51, width),
    }
    # Other pages, the same rows.
    for name, value in outputs.items():
        np.testing.assert_allclose(again[name], value, atol=1e-6)


def test_pages_differ_from_run_to_run(yarn_case, executor):
    written = []
    with ExecutorRunner(executor, 1) as runner:
        for _ in range(2):
            runner.infer(_feeds(yarn_case)[0])
            pool = executor.read_cache(0)
            written.append(np.flatnonzero(np.isfinite(pool[:, 0, 0])).tolist())
    assert len(written[0]) == 5
    assert set(written[1]) > set(written[0])


def _texts(feed):
    """What a reference takes of a scenario."""
    return {name: feed[name] for name in ("input_ids", "sequence_lengths")}


@pytest.fixture(scope="module")
def quantized_case(tmp_path_factory):
    return make_case(tmp_path_factory.mktemp("fp8"), rope="yarn", seed=11, kv_cache_dtype="fp8")


def test_the_reference_reads_the_rows_of_its_teacher(quantized_case):
    case = quantized_case
    cache = QuantizedCache(case.network.row_layout, case.network.latent_scales)
    executor = case.executor()
    teacher = ExecutorRunner(executor, 2, quantized=cache)
    feed = _feeds(case)[0]
    with teacher, HuggingFaceRunner(case.load_reference, teacher=teacher) as runner:
        actual, outputs = teacher.infer(feed), runner.infer(_texts(feed))
    executor.close()
    rank = case.spec.kv_lora_rank
    assert {name: value.shape[1] for name, value in outputs.items()} == {
        "logits": case.spec.vocab_size,
        "unquantized_logits": case.spec.vocab_size,
        **dict.fromkeys(("latent_0", "latent_1"), rank),
        **dict.fromkeys(("k_pe_0", "k_pe_1"), case.spec.qk_rope_head_dim),
    }
    assert actual.keys() == outputs.keys()
    np.testing.assert_array_equal(actual["logits"], actual["unquantized_logits"])
    reference, start = case.load_reference(), 0
    for text in split_texts(feed):
        end = start + len(text)
        cached = [
            np.concatenate([actual[f"latent_{layer}"][start:end], actual[f"k_pe_{layer}"][start:end]], axis=1)
            for layer in range(2)
        ]
        expected = reference.run(text, cached_rows=cached)
        np.testing.assert_array_equal(outputs["logits"][start:end], expected.logits)
        np.testing.assert_array_equal(outputs["latent_1"][start:end], expected.latents[1][:, :rank])
        np.testing.assert_array_equal(outputs["unquantized_logits"][start:end], reference.run(text).logits)
        start = end


def test_a_teacher_that_ran_other_texts_is_an_error(quantized_case):
    case = quantized_case
    executor = case.executor()
    cache = QuantizedCache(case.network.row_layout, case.network.latent_scales)
    teacher = ExecutorRunner(executor, 2, quantized=cache)
    first, second, *_ = _feeds(case)
    with teacher, HuggingFaceRunner(case.load_reference, teacher=teacher) as runner:
        with pytest.raises(ValueError, match="run of other texts"):
            runner.infer(_texts(first))
        teacher.infer(second)
        with pytest.raises(ValueError, match="run of other texts"):
            runner.infer(_texts(first))
    executor.close()


def test_the_model_is_there_only_while_active(yarn_case):
    runner = HuggingFaceRunner(yarn_case.load_reference)
    assert not hasattr(runner, "model")
    with runner:
        assert runner.model is not None
    assert not hasattr(runner, "model")
