"""Scenarios: what they cover, and that they survive the form in which polygraphy carries them."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from tests.runtime.fake_executor import FakeExecutor
from trtllm_mla.runtime.generation import run_forced
from trtllm_mla.runtime.scheduler import SchedulerConfig
from trtllm_mla.validation.scenarios import (
    TokenSource,
    context_passes,
    default_lengths,
    forced_sequences,
    make_scenarios,
    split_texts,
)

CONFIG = SchedulerConfig(
    vocab_size=97,
    num_pages=64,
    page_size=16,
    max_batch_size=4,
    max_num_tokens=256,
    max_input_len=255,
    max_seq_len=256,
    max_context_kv_tokens=256,
    enable_matrix_absorption=True,
    prefill_absorption_threshold=256,
)


def _scenarios(config=CONFIG, lengths=None, text_ids=None):
    source = TokenSource(config.vocab_size, 0, text_ids)
    return {item.name: item for item in make_scenarios(source, config, lengths or default_lengths(config))}


def test_default_lengths_cross_a_page_and_stay_within_one():
    for page_size in (16, 32, 64, 128):
        lengths = default_lengths(
            replace(CONFIG, page_size=page_size, max_num_tokens=1024, max_context_kv_tokens=1024)
        )
        assert max(lengths) > page_size > lengths[1] > lengths[2] > 1


@pytest.mark.parametrize(
    "limits",
    [
        {"max_batch_size": 1},
        {"max_batch_size": 2, "max_num_tokens": 9},
        {"max_context_kv_tokens": 7},
        {"max_context_kv_tokens": 1},
        {"max_seq_len": 4, "max_input_len": 3},
        {"max_batch_size": 3, "max_num_tokens": 3},
    ],
)
def test_default_lengths_obey_limits(limits):
    config = replace(CONFIG, **limits)
    lengths = default_lengths(config)
    assert len(lengths) <= config.max_batch_size
    assert 1 <= min(lengths) <= max(lengths) <= config.max_seq_len
    assert sum(lengths) <= min(config.max_num_tokens, config.max_context_kv_tokens)
    for scenario in _scenarios(config).values():
        for sequence in scenario.sequences:
            assert sum(chunk.num_tokens for chunk in sequence.chunks) == len(sequence.token_ids)


@pytest.mark.parametrize("lengths", [(25, 11, 5), (1,), (2, 1), (3, 4), (64,)])
@pytest.mark.parametrize("absorption", [True, False])
def test_chunks_make_up_each_text(lengths, absorption):
    for scenario in _scenarios(replace(CONFIG, enable_matrix_absorption=absorption), lengths).values():
        assert tuple(len(sequence.token_ids) for sequence in scenario.sequences) == lengths
        assert scenario.num_tokens == sum(lengths)
        for sequence in scenario.sequences:
            assert all(chunk.num_tokens > 0 for chunk in sequence.chunks)
            assert sum(chunk.num_tokens for chunk in sequence.chunks) == len(sequence.token_ids)
            assert absorption or not any(chunk.absorbed for chunk in sequence.chunks)


def test_every_scenario_does_what_it_says():
    scenarios = _scenarios()
    assert list(scenarios) == ["context", "absorbed", "chunked", "mixed", "decode"]
    assert scenarios["context"].num_steps == scenarios["absorbed"].num_steps == 1
    assert not any(chunk.absorbed for item in scenarios["context"].sequences for chunk in item.chunks)
    assert all(chunk.absorbed for item in scenarios["absorbed"].sequences for chunk in item.chunks)
    groups = [chunk.absorbed for chunk in scenarios["chunked"].sequences[0].chunks]
    assert groups == [False, True, False, True]
    decode = scenarios["decode"].sequences[0].chunks
    assert [chunk.num_tokens for chunk in decode[1:]] == [1] * 6
    assert decode[1].absorbed


@pytest.mark.parametrize("absorption", [True, False])
@pytest.mark.parametrize("count", [1, 3])
def test_passes_have_room_for_the_fullest_step_and_no_more(count, absorption):
    scenarios = _scenarios(replace(CONFIG, max_context_passes=count, enable_matrix_absorption=absorption))
    for scenario in scenarios.values():
        passes = scenario.context_passes
        assert passes.count == count
        run_forced(FakeExecutor(CONFIG.num_pages, CONFIG.page_size), scenario.sequences, context_passes=passes)
        if scenario.name == "absorbed":
            continue
        tighter = replace(passes, max_keys=passes.max_keys - 1)
        with pytest.raises(ValueError, match="in the context group, expected at most"):
            run_forced(FakeExecutor(CONFIG.num_pages, CONFIG.page_size), scenario.sequences, context_passes=tighter)


def test_mixed_scenario_has_both_groups_in_one_step_and_staggered_starts():
    sequences = _scenarios()["mixed"].sequences
    assert [sequence.first_step for sequence in sequences] == [0, 1, 2]
    groups: dict[int, set[bool]] = {}
    for sequence in sequences:
        for step, chunk in enumerate(sequence.chunks, sequence.first_step):
            groups.setdefault(step, set()).add(chunk.absorbed)
    assert sum(both == {True, False} for both in groups.values()) >= 2


def test_without_absorption_there_is_no_absorbed_scenario():
    assert list(_scenarios(replace(CONFIG, enable_matrix_absorption=False))) == [
        "context",
        "chunked",
        "mixed",
        "decode",
    ]


def test_scenarios_have_texts_of_their_own():
    texts = [tuple(item.token_ids) for scenario in _scenarios().values() for item in scenario.sequences]
    assert len(set(texts)) == len(texts)


def test_seed_decides_the_prompts():
    first, again, other = (TokenSource(97, seed).draw(20, text=False) for seed in (1, 1, 2))
    assert first == again != other
    assert all(0 <= token < 97 for token in first)


def test_text_is_used_for_the_first_prompt_and_starts_over():
    text = list(range(40, 50))
    scenario = _scenarios(text_ids=text)["context"]
    tokens = scenario.sequences[0].token_ids
    assert set(tokens) == set(text)
    assert all(second == (first + 1 if first < 49 else 40) for first, second in pairwise(tokens))
    assert not set(scenario.sequences[1].token_ids) <= set(text)


def test_arrays_carry_everything():
    for scenario in _scenarios().values():
        arrays = scenario.to_arrays()
        assert all(array.dtype == np.int64 for array in arrays.values())
        assert split_texts(arrays) == [list(item.token_ids) for item in scenario.sequences]
        assert context_passes(arrays) == scenario.context_passes
        restored = forced_sequences(arrays)
        for before, after in zip(scenario.sequences, restored, strict=True):
            assert list(before.token_ids) == after.token_ids
            assert tuple(before.chunks) == after.chunks
            assert before.first_step == after.first_step
