from dataclasses import replace

import numpy as np
import pytest

from tests.runtime.fake_executor import VOCAB_SIZE, FakeExecutor, greedy, logits_after
from trtllm_mla.errors import UserError
from trtllm_mla.runtime.generation import (
    ForcedChunk,
    ForcedSequence,
    GenerationSession,
    cut_by_threshold,
    read_cached_rows,
    run_forced,
)
from trtllm_mla.runtime.request import Request
from trtllm_mla.runtime.sampling import SamplingParams
from trtllm_mla.runtime.scheduler import SchedulerConfig

CONFIG = SchedulerConfig(
    vocab_size=VOCAB_SIZE,
    num_pages=30,
    page_size=4,
    max_batch_size=3,
    max_num_tokens=16,
    max_input_len=40,
    max_seq_len=60,
    max_context_kv_tokens=64,
    enable_matrix_absorption=True,
    prefill_absorption_threshold=6,
)


def make_session(config=CONFIG):
    executor = FakeExecutor(config.num_pages, config.page_size)
    return GenerationSession(executor, config), executor


def random_prompts(lengths, seed=0):
    random = np.random.default_rng(seed)
    return [random.integers(0, VOCAB_SIZE, length).tolist() for length in lengths]


class TestGenerate:
    def test_mixed_batch(self):
        session, executor = make_session()
        prompts = random_prompts([1, 37, 5, 16, 3])
        results = session.generate([Request(prompt, 3 + index) for index, prompt in enumerate(prompts)])
        assert [result.output_ids for result in results] == [
            greedy(prompt, 3 + index) for index, prompt in enumerate(prompts)
        ]
        assert {result.finish_reason for result in results} == {"length"}
        mixed = [s for s in executor.steps if len(s.context_position_ids) and len(s.generation_position_ids)]
        assert mixed, "the load is meant to mix groups"

    def test_results_name_the_pages_of_their_rows(self):
        session, executor = make_session()
        prompts = random_prompts([9, 13, 2])
        results = session.generate([Request(prompt, 5) for prompt in prompts])
        pages = np.concatenate([result.pages for result in results])
        assert len(set(pages.tolist())) == len(pages)
        for prompt, result in zip(prompts, results, strict=True):
            text = prompt + result.output_ids[:-1]
            rows = read_cached_rows(executor, 0, result.pages, len(text))
            np.testing.assert_array_equal(rows[:, 0], text)

    def test_the_stop_token_ends_the_output_and_belongs_to_it(self):
        (prompt,) = random_prompts([9])
        unstopped = greedy(prompt, 10)
        (result,) = make_session()[0].generate([Request(prompt, 10, stop_token_ids=frozenset({unstopped[3]}))])
        end = unstopped.index(unstopped[3]) + 1
        assert result.output_ids == unstopped[:end]
        assert result.finish_reason == "stop"

    def test_sampled_tokens_do_not_depend_on_the_batch_or_the_chunks(self):
        prompts = random_prompts([7, 22, 13])
        requests = [
            Request(prompt, 8, SamplingParams(temperature=1.5, top_p=0.9, seed=index))
            for index, prompt in enumerate(prompts)
        ]
        together = [result.output_ids for result in make_session()[0].generate(requests)]
        alone = [make_session()[0].generate([item])[0].output_ids for item in requests]
        chunked = make_session(replace(CONFIG, max_chunk_tokens=3))[0].generate(requests)
        assert together == alone == [result.output_ids for result in chunked]
        assert together != [greedy(prompt, 8) for prompt in prompts]

    def test_times_and_step_stats(self):
        stats = []
        session, executor = make_session()
        results = session.generate([Request(prompt, 4) for prompt in random_prompts([12, 9])], on_step=stats.append)
        assert len(stats) == len(executor.steps)
        assert [item.context_tokens for item in stats[:2]] == [12, 0]
        assert [item.context_keys for item in stats[:2]] == [12, 0]
        assert [item.generation_tokens for item in stats[:2]] == [4, 6]
        assert [item.num_requests for item in stats[:2]] == [2, 2]
        assert all(item.host_seconds > 0 and item.executor_seconds > 0 for item in stats)
        for result in results:
            assert len(result.token_times) == 4
            assert 0 < result.time_to_first_token == result.token_times[0]
            assert list(result.token_times) == sorted(result.token_times)
        assert results[0].time_to_first_token < results[1].time_to_first_token

    def test_nothing_runs_when_one_request_cannot_be_served(self):
        session, executor = make_session()
        with pytest.raises(UserError, match="max_seq_len"):
            session.generate([Request([1], 2), Request([1], 100)])
        assert not executor.steps

    def test_a_session_serves_again_after_an_error(self):
        def fail(token):
            raise RuntimeError(token)

        session, _ = make_session()
        with pytest.raises(RuntimeError):
            session.generate([Request([1, 2, 3], 20, on_token=fail)] * 3)
        assert not session.has_work
        assert session.num_free_pages == CONFIG.num_pages
        assert session.generate([Request([1, 2, 3], 4)])[0].output_ids == greedy([1, 2, 3], 4)

    def test_no_requests(self):
        assert make_session()[0].generate([]) == []

    def test_the_pool_must_be_the_executors(self):
        with pytest.raises(ValueError, match="found a pool of 30 pages of 4 tokens, expected 30 of 8"):
            GenerationSession(FakeExecutor(30, 4), replace(CONFIG, page_size=8))


class TestForced:
    def test_logits_of_every_position_whatever_the_chunks(self):
        texts = random_prompts([23, 9, 1], seed=4)
        sequences = [
            ForcedSequence(texts[0], [ForcedChunk(11, False), ForcedChunk(2, True), ForcedChunk(10, False)]),
            ForcedSequence(texts[1], [ForcedChunk(1, True)] * 9, first_step=1),
            ForcedSequence(texts[2], [ForcedChunk(1, False)], first_step=12),
        ]
        executor = FakeExecutor(12, 4)
        results = run_forced(executor, sequences, page_seed=9)
        for text, result in zip(texts, results, strict=True):
            expected = [logits_after(text[: end + 1]) for end in range(len(text))]
            assert np.array_equal(result.logits, expected)
            rows = read_cached_rows(executor, 0, result.pages, len(text))
            assert np.array_equal(rows, np.stack([text, range(len(text))], axis=1))
        assert [len(step.input_ids) for step in executor.steps] == [11, 3, 11, *[1] * 7, 1]
        pages = np.concatenate([result.pages for result in results])
        assert len(set(pages.tolist())) == len(pages)
        assert (np.diff(results[0].pages) != 1).any(), "pages are meant to be out of order"

    def test_chunks_must_be_the_whole_text(self):
        with pytest.raises(ValueError, match="chunks of 3 tokens for a text of 4"):
            run_forced(FakeExecutor(4, 4), [ForcedSequence([1, 2, 3, 4], [ForcedChunk(3, True)])])

    def test_the_pool_must_hold_the_texts(self):
        sequence = ForcedSequence([1] * 9, [ForcedChunk(9, True)])
        with pytest.raises(ValueError, match="found a pool of 5 pages, expected at least 6"):
            run_forced(FakeExecutor(5, 4), [sequence, sequence])

    @pytest.mark.parametrize(
        ("absorption", "expected"),
        [(True, [(7, False), (7, False), (3, True)]), (False, [(7, False), (7, False), (3, False)])],
    )
    def test_cut_by_threshold(self, absorption, expected):
        config = replace(CONFIG, enable_matrix_absorption=absorption)
        assert cut_by_threshold(17, 7, config) == tuple(ForcedChunk(*item) for item in expected)
