"""The driver on a clock of its own: arrivals, limits, records."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trtllm_mla.benchmark.driver import (
    MAX_TIMELINE,
    PROGRESS_SECONDS,
    Load,
    Timeline,
    poisson_arrivals,
    serve,
    warmup_requests,
)
from trtllm_mla.errors import UserError
from trtllm_mla.runtime.generation import StepStats
from trtllm_mla.runtime.request import Request

STEP = 0.5


class FakeClock:
    """Moves on when somebody sleeps or a step runs."""

    def __init__(self) -> None:
        self.moment = 1000.0
        self.naps: list[tuple[float, float]] = []

    def now(self) -> float:
        return self.moment

    def sleep(self, seconds: float) -> None:
        assert seconds > 0
        self.naps.append((self.moment, seconds))
        # However short the nap, time goes on.
        self.moment = max(self.moment + seconds, float(np.nextafter(self.moment, np.inf)))


@dataclass
class FakeActive:
    request: Request
    submitted: float
    token_times: list[float] = field(default_factory=list)
    finish_reason: str | None = None
    num_preemptions: int = 0
    num_reused_tokens: int = 0


class FakeSession:
    """Every running request gets a token a step; as many run as there are places."""

    def __init__(self, clock: FakeClock, *, places: int = 10**9, step: float = STEP) -> None:
        self.clock = clock
        self.places = places
        self.step_seconds = step
        self.active: list[FakeActive] = []
        self.all: list[FakeActive] = []
        self.most = 0

    def submit(self, request: Request) -> FakeActive:
        item = FakeActive(request, self.clock.moment)
        self.active.append(item)
        self.all.append(item)
        self.most = max(self.most, len(self.active))
        return item

    def step(self) -> StepStats:
        assert self.active, "a step without work"
        running = self.active[: self.places]
        for number, item in enumerate(running):
            # Tokens of a step come one after the other.
            item.token_times.append(self.clock.moment + self.step_seconds * (1 - 0.25 * (number % 4 == 0)))
            if len(item.token_times) == item.request.max_new_tokens:
                item.finish_reason = "length"
        self.clock.moment += self.step_seconds
        self.active = [item for item in self.active if item.finish_reason is None]
        num_running = min(len(self.active), self.places)
        waiting = len(self.active) - num_running
        return StepStats(0, 0, len(running), len(running), num_running, waiting, 3 * num_running, 0.1, 0.2, 0.3)


def run(lengths, load, *, places=10**9, step=STEP, **values):
    clock = FakeClock()
    session = FakeSession(clock, places=places, step=step)
    requests = [Request([1] * (number + 1), length) for number, length in enumerate(lengths)]
    return serve(session, requests, load, clock=clock, **values), session, clock


def test_all_at_once():
    outcome, session, clock = run([3, 1, 2], Load())
    assert [item.submitted for item in session.all] == [1000.0] * 3
    assert [record.arrival for record in outcome.records] == [0.0] * 3
    assert [record.output_tokens for record in outcome.records] == [3, 1, 2]
    assert [record.input_tokens for record in outcome.records] == [1, 2, 3]
    assert outcome.records[0].token_times == pytest.approx((0.375, 0.875, 1.375))
    assert [record.end for record in outcome.records] == pytest.approx([1.375, 0.5, 1.0])
    assert outcome.steps.count == 3
    assert outcome.steps.executor_seconds == pytest.approx(0.9)
    assert not clock.naps


def test_records_are_in_the_order_of_the_requests_and_carry_their_numbers():
    outcome, session, _ = run([4, 1, 2], Load(), task_ids=[30, 10, 20])
    assert [record.task_id for record in outcome.records] == [30, 10, 20]
    session.all[0].num_preemptions, session.all[1].num_reused_tokens = 2, 5
    outcome, _, _ = run([4, 1], Load())
    assert [record.task_id for record in outcome.records] == [0, 1]


def test_what_the_scheduler_counted_is_in_the_record():
    clock = FakeClock()

    class Counting(FakeSession):
        def submit(self, request):
            item = super().submit(request)
            item.num_preemptions, item.num_reused_tokens = 2, 16
            return item

    (record,) = serve(Counting(clock), [Request([1], 2)], Load(), clock=clock).records
    assert (record.num_preemptions, record.reused_tokens, record.finish_reason) == (2, 16, "length")


def overlap(records):
    """Most records that are between arrival and end at one moment; an end makes room for an arrival at that moment."""
    events = sorted([(record.end, -1) for record in records] + [(record.arrival, 1) for record in records])
    count = most = 0
    for _, change in events:
        count += change
        most = max(most, count)
    return most


@pytest.mark.parametrize("concurrency", [1, 2, 3, 7, 50])
def test_concurrency_is_reached_and_never_exceeded(concurrency):
    lengths = [1 + number % 5 for number in range(30)]
    outcome, session, _ = run(lengths, Load(concurrency))
    assert session.most == overlap(outcome.records) == min(concurrency, 30)


def test_a_client_sends_its_next_request_when_the_last_one_has_ended():
    outcome, _, _ = run([2, 4, 1, 1, 3], Load(2))
    ends = sorted(record.end for record in outcome.records)
    arrivals = sorted(record.arrival for record in outcome.records)
    assert arrivals[:2] == [0.0, 0.0]
    # Each end is the arrival of one further request: no time passes between them.
    assert arrivals[2:] == ends[: len(arrivals) - 2]


def test_requests_are_not_served_before_they_are_due_and_not_later_than_the_next_step():
    arrivals = (0.0, 0.1, 0.6, 5.0, 5.0, 9.25)
    outcome, session, clock = run([2] * 6, Load(arrivals=arrivals))
    for item, due in zip(session.all, arrivals, strict=True):
        assert 0 <= item.submitted - 1000.0 - due < STEP
    # Nothing was in flight: the thread slept until the very moment.
    assert clock.naps == [(pytest.approx(1002.0), pytest.approx(3.0)), (pytest.approx(1006.0), pytest.approx(3.25))]
    assert [record.arrival for record in outcome.records] == list(arrivals)
    assert outcome.records[1].ttft == pytest.approx(2 * STEP - 0.1)


def test_latency_counts_from_the_arrival_also_where_all_places_are_taken():
    outcome, session, _ = run([10, 1], Load(concurrency=1, arrivals=(0.0, 0.25)))
    assert session.most == 1
    _, second = outcome.records
    assert second.arrival == 0.25
    assert session.all[1].submitted - 1000 == 10 * STEP
    assert second.latency == pytest.approx(11 * STEP - STEP / 4 - 0.25)
    assert second.ttft == second.latency


@pytest.mark.parametrize("rate", [0.5, 4.0, 40.0])
def test_the_request_rate_is_respected(rate):
    count = 400
    arrivals = poisson_arrivals(count, rate, seed=3)
    outcome, session, _ = run([1] * count, Load(arrivals=arrivals), step=0.001)
    submitted = np.array([item.submitted - 1000 for item in session.all])
    assert np.all(submitted >= np.array(arrivals) - 1e-9)
    assert np.all(submitted < np.array(arrivals) + 0.001 + 1e-9)
    # The mean of 399 exponential gaps is within 20 % of 1 / rate with p = 0.9999.
    assert (count - 1) / submitted[-1] == pytest.approx(rate, rel=0.2)
    assert [record.arrival for record in outcome.records] == list(arrivals)


def test_poisson_arrivals():
    arrivals = np.array(poisson_arrivals(20_000, 8.0, seed=1))
    gaps = np.diff(arrivals)
    assert arrivals[0] == 0
    assert gaps.mean() == pytest.approx(1 / 8, rel=0.03)
    assert gaps.std() == pytest.approx(1 / 8, rel=0.04)
    # Quantiles of the exponential distribution: -ln(1 - q) / rate.
    for share in (0.1, 0.5, 0.9):
        assert np.quantile(gaps, share) == pytest.approx(-np.log(1 - share) / 8, rel=0.05)
    assert abs(np.corrcoef(gaps[:-1], gaps[1:])[0, 1]) < 0.03
    assert poisson_arrivals(9, 8.0, seed=1) == tuple(arrivals[:9])
    assert poisson_arrivals(9, 8.0, seed=2) != tuple(arrivals[:9])


@settings(max_examples=150, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 6), max_size=25),
    concurrency=st.none() | st.integers(1, 8),
    places=st.integers(1, 5),
    gaps=st.none() | st.lists(st.sampled_from([0.0, 0.05, 0.5, 3.0]), min_size=25, max_size=25),
)
def test_any_schedule(lengths, concurrency, places, gaps):
    arrivals = None if gaps is None else tuple(np.cumsum(gaps)[: len(lengths)].tolist())
    outcome, session, clock = run(lengths, Load(concurrency, arrivals), places=places)
    assert [record.output_tokens for record in outcome.records] == lengths
    assert session.most <= (concurrency or len(lengths))
    assert [item.request.max_new_tokens for item in session.all] == lengths, "first come, first served"
    for number, (record, item) in enumerate(zip(outcome.records, session.all, strict=True)):
        assert record.arrival <= item.submitted - 1000.0 + 1e-9
        assert record.end == pytest.approx(item.token_times[-1] - 1000.0)
        if arrivals is not None:
            assert record.arrival == arrivals[number]
    if arrivals is None:
        assert not clock.naps
        assert overlap(outcome.records) <= (concurrency or len(lengths))


@pytest.mark.parametrize("concurrency", [0, -2])
def test_no_places(concurrency):
    with pytest.raises(UserError, match=f"concurrency: found {concurrency}"):
        run([1], Load(concurrency))


def test_nothing_to_serve():
    outcome, _, _ = run([], Load(4))
    assert outcome.records == []


def test_progress_is_told_now_and_then_and_at_the_end():
    told = []
    outcome, _, _ = run([40, 3], Load(), step=PROGRESS_SECONDS / 4, on_progress=told.append)
    assert (told[-1].done, told[-1].total, told[-1].output_tokens) == (2, 2, 43)
    assert (told[0].done, told[0].output_tokens, told[0].num_running, told[0].pages_in_use) == (0, 2, 2, 6)
    seconds = [item.seconds for item in told]
    assert all(gap >= PROGRESS_SECONDS * 0.99 for gap in np.diff(seconds)[:-1])
    assert len(told) <= 12 < outcome.steps.count


@pytest.mark.parametrize("steps", [1, MAX_TIMELINE, MAX_TIMELINE + 1, 3 * MAX_TIMELINE + 17, 20 * MAX_TIMELINE])
def test_timeline_is_thinned_evenly(steps):
    timeline = Timeline()
    for number in range(steps):
        timeline.add(float(number), StepStats(0, 0, 0, 0, number, number + 1, number + 2, 0.0, 0.0, 0.0))
    columns = timeline.to_json()
    seconds = columns["seconds"]
    assert len(seconds) <= MAX_TIMELINE
    assert len(seconds) == steps or len(seconds) >= MAX_TIMELINE / 2
    assert seconds[0] == 0
    assert len(set(np.diff(seconds))) <= 1
    assert steps - seconds[-1] <= (seconds[1] - seconds[0] if len(seconds) > 1 else 1)
    assert columns["running"] == seconds
    assert columns["waiting"] == [value + 1 for value in seconds]
    assert columns["pages_in_use"] == [value + 2 for value in seconds]


def test_warmup_has_the_lengths_and_not_the_prompts():
    like = [Request([3] * length, length + 1) for length in (2, 5, 9)]
    warmup = warmup_requests(like, 7, vocab_size=50, seed=1)
    assert [len(item.prompt_ids) for item in warmup] == [2, 5, 9, 2, 5, 9, 2]
    assert [item.max_new_tokens for item in warmup] == [3, 6, 10, 3, 6, 10, 3]
    assert all(0 <= token < 50 for item in warmup for token in item.prompt_ids)
    assert warmup[1].prompt_ids != warmup[4].prompt_ids
    again = warmup_requests(like, 7, vocab_size=50, seed=1)
    assert [item.prompt_ids for item in again] == [item.prompt_ids for item in warmup]
