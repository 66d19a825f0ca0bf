"""Chunks in both forms on an executor of known cost, and the threshold that follows from known times."""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import SimpleNamespace

import numpy as np
import pytest

from tests.runtime.fake_executor import VOCAB_SIZE, FakeExecutor
from trtllm_mla.benchmark import chunk_cost
from trtllm_mla.benchmark.chunk_cost import (
    LENGTHS,
    ChunkCost,
    ChunkSizes,
    Recommendation,
    break_even_tokens,
    cost_ms,
    measure_chunks,
    recommend,
)
from trtllm_mla.checkpoint.attention_cost import break_even_queries
from trtllm_mla.config import BuildConfig, MlaPluginConfig
from trtllm_mla.errors import UserError
from trtllm_mla.runtime.scheduler import SchedulerConfig

PAGE_SIZE = 16
REPETITIONS = 12


def _config(num_pages=40, **limits):
    build = BuildConfig(max_seq_len=600, max_num_tokens=512)
    config = SchedulerConfig.from_build_config(
        build, MlaPluginConfig(page_size=PAGE_SIZE), vocab_size=VOCAB_SIZE, num_pages=num_pages
    )
    return replace(config, **limits)


class CostlyExecutor(FakeExecutor):
    """Moves a clock by what a step costs: tokens absorbed, or keys and tokens decompressed."""

    def __init__(self, num_pages, page_size, *, drift=0.0, noise=0.0):
        super().__init__(num_pages, page_size)
        self.now = 0.0
        self._drift, self._noise, self._generator = drift, noise, np.random.default_rng(3)

    def run(self, step):
        absorbed, decompressed = len(step.generation_position_ids), len(step.context_position_ids)
        seconds = 1e-3 * (absorbed * 0.1 + (5 + decompressed / 60 if decompressed else 0))
        self.now += seconds * (1 + self._drift * len(self.steps)) * self._generator.lognormal(0, self._noise)
        return super().run(step)


def _measure(monkeypatch, sizes, config=None, repetitions=REPETITIONS, **executor_options):
    config = config or _config()
    executor = CostlyExecutor(config.num_pages, PAGE_SIZE, **executor_options)
    monkeypatch.setattr(chunk_cost, "time", SimpleNamespace(perf_counter=lambda: executor.now))
    return measure_chunks(executor, config, sizes, warmup=2, repetitions=repetitions, seed=1), executor


SIZES = ChunkSizes(histories=(0, 40), lengths=(8, 24, 56, 72, 120))


def test_the_clock_encloses_each_chunk_in_each_form(monkeypatch):
    costs, executor = _measure(monkeypatch, SIZES)
    assert [(cost.history, cost.num_tokens) for cost in costs] == [
        (history, length) for history in SIZES.histories for length in SIZES.lengths
    ]
    for cost in costs:
        assert cost.absorbed_ms == pytest.approx([cost.num_tokens * 0.1] * REPETITIONS)
        assert cost.decompressed_ms == pytest.approx([5 + cost.num_tokens / 60] * REPETITIONS)
    # The history once, then each chunk in both forms, alone in its step.
    steps = executor.steps[1:]
    assert len(steps) == (REPETITIONS + 2) * 2 * len(costs)
    for step in steps:
        absorbed, decompressed = len(step.generation_position_ids), len(step.context_position_ids)
        assert (absorbed == 0) != (decompressed == 0)
        assert len(step.last_token_ids) == 1


def test_order_is_drawn_anew_and_the_seed_decides_it(monkeypatch):
    def orders():
        _, executor = _measure(monkeypatch, SIZES)
        keys = [
            (len(step.context_position_ids), *step.context_position_ids[:1], *step.generation_position_ids[[0, -1]])
            if len(step.generation_position_ids)
            else (len(step.context_position_ids), *step.context_position_ids[:1])
            for step in executor.steps[1:]
        ]
        size = 2 * 10
        return [tuple(keys[start : start + size]) for start in range(0, len(keys), size)]

    first = orders()
    assert len(set(first)) == len(first)
    assert all(sorted(order) == sorted(first[0]) for order in first)
    assert orders() == first


@pytest.mark.parametrize(("drift", "noise"), [(0.0, 0.0), (0.02, 0.0), (0.01, 0.1)])
def test_the_known_break_even_is_found_on_a_machine_that_slows_down(monkeypatch, drift, noise):
    """Both forms take the same at 60 tokens; with the drift, the last chunk takes many times what the first took."""
    costs, _ = _measure(monkeypatch, SIZES, drift=drift, noise=noise)
    advised = recommend(costs)
    assert 57 <= advised.threshold <= 72
    assert advised.allows(60)
    assert advised.is_decided
    assert (advised.low, advised.high) == (57, 72) if not noise else advised.low <= 57 <= 72 <= advised.high
    assert advised.contrary == ()
    if not drift and not noise:
        assert advised == Recommendation(60, 57, 72, (), ())


def test_a_long_history_is_cached_in_steps_that_fit(monkeypatch):
    config = _config(max_num_tokens=32, max_batch_size=4)
    sizes = ChunkSizes((100,), (8,))
    _, executor = _measure(monkeypatch, sizes, config)
    assert [len(step.context_position_ids) for step in executor.steps[:4]] == [32, 32, 32, 4]


def _costs(absorbed, decompressed, *, noise=0.0, repetitions=10, histories=(0,), lengths=(16, 32, 64, 128, 256)):
    generator = np.random.default_rng(11)

    def samples(milliseconds):
        return tuple((milliseconds * generator.lognormal(0, noise, repetitions)).tolist())

    return [
        ChunkCost(history, length, samples(absorbed(history, length)), samples(decompressed(history, length)))
        for history in histories
        for length in lengths
    ]


def test_interpolation_between_lengths():
    advised = recommend(_costs(lambda _, m: m / 10, lambda _, m: 5 + m / 60))
    assert advised == Recommendation(60, 33, 64, (), ())


def test_histories_count_together():
    """Alone, the histories break even at 40 and 200 tokens; their times together at 120."""
    costs = _costs(
        lambda h, m: m, lambda h, m: 40.0 if h == 0 else 200.0, histories=(0, 512), lengths=(64, 96, 160, 256)
    )
    assert recommend(costs).threshold == 120
    assert recommend([cost for cost in costs if cost.history == 0]).threshold == 1
    assert recommend([cost for cost in costs if cost.history]).threshold == 200


def test_one_form_always_faster():
    never = recommend(_costs(lambda _, m: 2.0 * m, lambda _, m: m))
    assert never == Recommendation(1, 1, 16, (), ())
    always = recommend(_costs(lambda _, m: m, lambda _, m: 2.0 * m))
    assert always == Recommendation(257, 257, None, (), ())
    assert always.is_decided
    assert not always.allows(256)
    assert always.allows(10**6)


def test_differences_within_noise_are_no_recommendation():
    advised = recommend(_costs(lambda _, m: 10.0, lambda _, m: 10.0, noise=0.2))
    assert not advised.is_decided
    assert (advised.low, advised.high) == (1, None)
    assert advised.undecided == (16, 32, 64, 128, 256)
    few = recommend(_costs(lambda _, m: m / 10, lambda _, m: 5 + m / 60, repetitions=5))
    assert not few.is_decided, "five repetitions cannot tell with 95 %"
    assert few.threshold == 60


def test_noise_next_to_the_break_even_widens_the_range():
    advised = recommend(_costs(lambda _, m: m / 10, lambda _, m: 5 + m / 60, noise=0.15))
    assert advised.undecided == (64,)
    assert (advised.low, advised.high) == (33, 128)


def test_lengths_that_no_threshold_suits_are_named():
    advised = recommend(_costs(lambda _, m: 1.0 if m == 256 else m, lambda _, m: 40.0 if m < 256 else 2.0))
    assert advised.threshold == 40
    assert advised.contrary == (256,)


def test_the_recommended_threshold_costs_least():
    generator = np.random.default_rng(5)
    for _ in range(20):
        times = generator.uniform(1, 10, (2, 6))
        costs = [
            ChunkCost(0, length, (first,) * 6, (second,) * 6)
            for length, first, second in zip((8, 16, 32, 64, 128, 256), *times.tolist(), strict=True)
        ]
        best = min(range(1, 300), key=lambda threshold: cost_ms(costs, threshold))
        advised = recommend(costs)
        assert cost_ms(costs, advised.threshold) == pytest.approx(cost_ms(costs, best))
        assert cost_ms(costs, advised.low) == pytest.approx(cost_ms(costs, best))
        assert cost_ms(costs, advised.high or 10**6) == pytest.approx(cost_ms(costs, best))


@dataclass(frozen=True)
class Sizes:
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    kv_lora_rank: int
    v_head_dim: int


V3 = Sizes(128, 64, 512, 128)
TINY = Sizes(24, 16, 48, 20)


@pytest.mark.parametrize("sizes", [V3, TINY])
@pytest.mark.parametrize("history", [0, 1, 37, 512, 100_000])
def test_break_even_by_counting_operations(sizes, history):
    """Every query sees the history and the new tokens up to its own; each form's operations are added up."""
    tokens = break_even_tokens(sizes, history)
    nope, rope, latent, value = vars(sizes).values()
    up = 2 * latent * (nope + value)

    def absorbed(count):
        pairs = sum(history + position + 1 for position in range(count))
        return count * up + pairs * (2 * (latent + rope) + 2 * latent)

    def decompressed(count):
        pairs = sum(history + position + 1 for position in range(count))
        return (history + count) * up + pairs * (2 * (nope + rope) + 2 * value)

    assert all(absorbed(count) <= decompressed(count) for count in range(1, int(tokens) + 1))
    assert absorbed(int(tokens) + 1) > decompressed(int(tokens) + 1)
    assert tokens <= break_even_queries(sizes)


def test_break_even_approaches_the_rooflines_with_a_long_history():
    assert break_even_tokens(V3, 10**8) == pytest.approx(break_even_queries(V3), rel=1e-3)
    assert break_even_queries(V3) == pytest.approx(170.67, abs=0.01)
    assert break_even_tokens(Sizes(128, 64, 32, 128), 512) is None


def test_default_sizes_fit_the_limits():
    sizes = ChunkSizes.choose(_config())
    assert sizes.histories == (0, 300)
    assert sizes.lengths == tuple(length for length in LENGTHS if length <= 300)
    assert ChunkSizes.choose(_config(max_seq_len=100_000)).histories == (0, 2048)
    assert ChunkSizes.choose(_config(max_context_kv_tokens=320)).lengths == (8, 16)
    assert ChunkSizes.choose(_config(), [5, 0, 5], [9, 3]) == ChunkSizes((0, 5), (3, 9))


@pytest.mark.parametrize(
    ("histories", "lengths", "message"),
    [
        ([0], [513], "513 tokens after 0 cached ones: found 513 tokens, expected at most 512 .max_num_tokens"),
        ([500], [101], "found 601 tokens, expected at most 600 .max_seq_len"),
        ([-1], [8], "expected 0 cached tokens or more"),
        ([0], [0], "1 new token or more"),
        ([599], None, "No chunk fits after 599 cached tokens"),
    ],
)
def test_sizes_that_do_not_fit(histories, lengths, message):
    with pytest.raises(UserError, match=message):
        ChunkSizes.choose(_config(), histories, lengths)
