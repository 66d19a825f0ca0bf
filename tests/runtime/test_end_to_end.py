"""Whole networks against transformers: greedy tokens, and logits at every position."""

from dataclasses import replace
from functools import cache

import numpy as np
import pytest

from tests.runtime.networks import CHECKPOINTS, MAX_POSITIONS, make_network
from tests.support.hf import ORIGINAL_MAX_POSITION_EMBEDDINGS
from trtllm_mla.runtime.generation import ForcedChunk, ForcedSequence, GenerationSession, read_cached_rows, run_forced
from trtllm_mla.runtime.request import Request
from trtllm_mla.runtime.scheduler import SchedulerConfig
from trtllm_mla.runtime.step import ContextPasses

CONFIG = SchedulerConfig(
    vocab_size=131,
    num_pages=40,
    page_size=16,
    max_batch_size=8,
    max_num_tokens=256,
    max_input_len=200,
    max_seq_len=220,
    max_context_kv_tokens=400,
    enable_matrix_absorption=True,
    prefill_absorption_threshold=16,
)

# The first prompt grows past the positions that YaRN starts from while it is generated, the second begins past them.
PROMPT_LENGTHS = (ORIGINAL_MAX_POSITION_EMBEDDINGS - 5, ORIGINAL_MAX_POSITION_EMBEDDINGS + 26, 1, 16, 15)
NEW_TOKENS = 12

SCHEDULES = {
    "one_shot": {},
    "all_prefill_decompressed": {"prefill_absorption_threshold": 0},
    "all_prefill_absorbed": {"prefill_absorption_threshold": 1000},
    "chunks_above_the_threshold_rest_below": {"max_chunk_tokens": 20},
    "chunks_below_the_threshold": {"max_chunk_tokens": 7},
    "chunks_cut_by_the_step": {"max_num_tokens": 27},
    "context_workspace_of_one_prompt": {"max_context_kv_tokens": 95},
    "context_workspace_smaller_than_a_prompt": {"max_context_kv_tokens": 40},
    "one_at_a_time": {"max_batch_size": 1},
    "pages_run_out": {"num_pages": 8},
    "large_pages": {"page_size": 64, "num_pages": 12},
    "largest_pages": {"page_size": 128, "num_pages": 5},
    "without_absorption": {"enable_matrix_absorption": False},
    "without_absorption_in_chunks": {"enable_matrix_absorption": False, "max_chunk_tokens": 13, "page_size": 32},
}


def random_tokens(count, seed=0):
    return np.random.default_rng(seed).integers(0, CONFIG.vocab_size, count).tolist()


def requests():
    return [Request(random_tokens(length, seed), NEW_TOKENS - seed) for seed, length in enumerate(PROMPT_LENGTHS)]


@cache
def expected_tokens(checkpoint):
    network = make_network(checkpoint)
    return [network.hf_greedy(request.prompt_ids, request.max_new_tokens) for request in requests()]


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("checkpoint", CHECKPOINTS)
def test_onnxruntime_gives_the_greedy_tokens_of_transformers(checkpoint, schedule):
    config = replace(CONFIG, **SCHEDULES[schedule])
    network = make_network(checkpoint, absorption=config.enable_matrix_absorption)
    executor = network.onnxruntime(num_pages=config.num_pages, page_size=config.page_size)
    results = GenerationSession(executor, config).generate(requests())
    assert [result.output_ids for result in results] == expected_tokens(checkpoint)


def test_generation_stops_where_transformers_does():
    network = make_network("yarn")
    prompt = random_tokens(21, seed=11)
    stop = network.hf_greedy(prompt, 12)[5]
    executor = network.onnxruntime(num_pages=CONFIG.num_pages, page_size=CONFIG.page_size)
    request = Request(prompt, 12, stop_token_ids=frozenset({stop}))
    (result,) = GenerationSession(executor, CONFIG).generate([request])
    assert result.output_ids == network.hf_greedy(prompt, 12, eos_token_id=stop)
    assert result.finish_reason == "stop"


PASSES = {
    "chunks": {"max_chunk_tokens": 19, "max_context_kv_tokens": 32, "max_context_passes": 4},
    "chunks_as_long_as_a_pass": {"max_context_kv_tokens": 24, "max_context_passes": 5},
    "passes_that_stay_empty": {"max_context_kv_tokens": 200, "max_context_passes": 3},
    "a_pass_for_two_requests": {"max_chunk_tokens": 19, "max_context_kv_tokens": 60, "max_context_passes": 4},
    "without_absorption": {
        "max_chunk_tokens": 19,
        "max_context_kv_tokens": 40,
        "max_context_passes": 3,
        "enable_matrix_absorption": False,
    },
}


@pytest.mark.parametrize("schedule", PASSES)
@pytest.mark.parametrize("checkpoint", CHECKPOINTS)
def test_long_prompts_in_passes_give_the_greedy_tokens_of_transformers(checkpoint, schedule):
    """Prompts several times as long as a pass, whose chunks all stay in the context group."""
    config = replace(CONFIG, prefill_absorption_threshold=0, **PASSES[schedule])
    network = make_network(
        checkpoint, absorption=config.enable_matrix_absorption, context_passes=config.max_context_passes
    )
    executor = RecordingExecutor(network.onnxruntime(num_pages=config.num_pages, page_size=config.page_size))
    results = GenerationSession(executor, config).generate(requests())
    assert [result.output_ids for result in results] == expected_tokens(checkpoint)

    context = [step for step in executor.steps if len(step.context_position_ids)]
    if config.enable_matrix_absorption:
        assert sum(len(step.context_position_ids) for step in context) == sum(PROMPT_LENGTHS)
    longest = max(step.num_context_keys for step in context)
    assert (longest > config.max_context_kv_tokens) == (schedule != "passes_that_stay_empty")
    for step in context:
        sizes = [len(step.context_kv_slots), *(len(item.kv_slots) for item in step.context_history)]
        assert len(sizes) == config.max_context_passes
        assert max(sizes) <= config.max_context_kv_tokens


class RecordingExecutor:
    """Keeps the steps that another executor runs."""

    def __init__(self, executor):
        self._executor = executor
        self.steps = []

    def __getattr__(self, name):
        return getattr(self._executor, name)

    def run(self, step):
        self.steps.append(step)
        return self._executor.run(step)


@pytest.mark.parametrize("max_keys", [31, 37, 90])
@pytest.mark.parametrize("checkpoint", CHECKPOINTS)
def test_passes_give_the_logits_of_transformers_at_every_position(checkpoint, max_keys):
    network = make_network(checkpoint, context_passes=4)
    executor = network.onnxruntime(num_pages=20, page_size=16)
    first, second = random_tokens(90, seed=7), random_tokens(33, seed=8)
    sequences = [
        ForcedSequence(first, [ForcedChunk(size, False) for size in (30, 1, 29, 30)]),
        ForcedSequence(second, [ForcedChunk(5, True), ForcedChunk(28, False)], first_step=0),
    ]
    results = run_forced(executor, sequences, context_passes=ContextPasses(4, max_keys))
    for sequence, result in zip(sequences, results, strict=True):
        assert np.abs(result.logits - network.hf_logits(sequence.token_ids)).max() < 2e-4


CHUNKINGS = {
    "one_shot_decompressed": [ForcedChunk(90, False)],
    "one_shot_absorbed": [ForcedChunk(90, True)],
    "token_by_token": [ForcedChunk(1, True)] * 90,
    "both_ways": [ForcedChunk(31, False), ForcedChunk(17, True), ForcedChunk(1, True), ForcedChunk(41, False)],
}


@pytest.mark.parametrize("chunking", CHUNKINGS)
@pytest.mark.parametrize("checkpoint", CHECKPOINTS)
def test_onnxruntime_gives_the_logits_of_transformers_at_every_position(checkpoint, chunking):
    network = make_network(checkpoint)
    executor = network.onnxruntime(num_pages=20, page_size=16)
    first, second = random_tokens(90, seed=7), random_tokens(23, seed=8)
    sequences = [
        ForcedSequence(first, CHUNKINGS[chunking]),
        ForcedSequence(second, [ForcedChunk(20, False), *[ForcedChunk(1, True)] * 3], first_step=1),
    ]
    for sequence, result in zip(sequences, run_forced(executor, sequences), strict=True):
        assert np.abs(result.logits - network.hf_logits(sequence.token_ids)).max() < 2e-4
    written = sum(np.isfinite(executor.read_cache(0)).all(axis=-1).ravel())
    assert written == 90 + 23, "every token has one cache row, and the rest of the pool stays as it was"


def test_cached_rows_do_not_depend_on_the_chunks():
    network = make_network("yarn")
    tokens = random_tokens(90, seed=9)
    rows = []
    for chunks in CHUNKINGS.values():
        executor = network.onnxruntime(num_pages=8, page_size=16)
        (result,) = run_forced(executor, [ForcedSequence(tokens, chunks)])
        rows.append([read_cached_rows(executor, layer, result.pages, 90) for layer in range(2)])
    assert np.ptp(np.array(rows), axis=0).max() < 1e-5


def test_positions_end_with_the_table():
    assert CONFIG.max_seq_len <= MAX_POSITIONS
