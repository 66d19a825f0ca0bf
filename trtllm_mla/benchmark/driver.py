"""Serving a list of requests by a schedule, and keeping a record of each."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from trtllm_mla.benchmark.records import RequestRecord
from trtllm_mla.errors import UserError
from trtllm_mla.runtime.generation import StepStats
from trtllm_mla.runtime.request import ActiveRequest, Request

MAX_TIMELINE = 2000
PROGRESS_SECONDS = 0.1
# Four months between requests: not what anybody meant, and time.sleep() takes no centuries.
MIN_REQUEST_RATE = 1e-7
# The first numbers of the streams of random numbers that a seed is split into.
_ARRIVALS, _WARMUP = 0, 1


class Session(Protocol):
    """What serves requests: the part of ``GenerationSession`` that is used here."""

    def submit(self, request: Request) -> ActiveRequest:
        """Queues a request."""

    def step(self) -> StepStats:
        """Runs one step."""


class Clock(Protocol):
    """What time it is. Its moments are those of ``ActiveRequest.token_times``."""

    def now(self) -> float:
        """Seconds from some moment on."""

    def sleep(self, seconds: float) -> None:
        """Waits."""


class WallClock:
    """The processor's clock, ``time.perf_counter``."""

    def now(self) -> float:
        """Seconds from some moment on."""
        return time.perf_counter()

    def sleep(self, seconds: float) -> None:
        """Waits."""
        time.sleep(seconds)


@dataclass(frozen=True)
class Load:
    """When requests arrive, and how many are served at once.

    Without arrival times and without a limit, all requests are there when the clock starts. With a limit alone, so
    many clients each send their next request when their last one has ended: it arrives at that moment. With arrival
    times, a request that finds all places taken waits, and its latency counts from its arrival all the same.

    Attributes:
        concurrency: Requests that are in flight at most; None is no limit.
        arrivals: Seconds from the start of the clock to each request, in order; None lets each come as soon as it may.
    """

    concurrency: int | None = None
    arrivals: tuple[float, ...] | None = None


@dataclass(frozen=True)
class Progress:
    """How far a benchmark is.

    Attributes:
        done: Requests that have ended.
        total: Requests in all.
        output_tokens: New tokens so far.
        seconds: On the clock.
        pages_in_use: Pages that are held; None where a server does not show them.
        num_running: Requests that hold pages, or that a server was sent.
    """

    done: int
    total: int
    output_tokens: int
    seconds: float
    pages_in_use: int | None
    num_running: int = 0


class Timeline:
    """How many pages and requests there were after each step, thinned evenly to at most ``MAX_TIMELINE`` moments."""

    def __init__(self) -> None:
        self._rows: list[tuple[float, int, int, int]] = []
        self._stride = 1
        self._steps = 0

    def add(self, seconds: float, stats: StepStats) -> None:
        """Adds a step.

        Args:
            seconds: When it ended, on the benchmark's clock.
            stats: What it ran.
        """
        if self._steps % self._stride == 0:
            if len(self._rows) == MAX_TIMELINE:
                self._rows = self._rows[::2]
                self._stride *= 2
            self._rows.append((seconds, stats.pages_in_use, stats.num_running, stats.num_waiting))
        self._steps += 1

    def to_json(self) -> dict[str, list[Any]]:
        """The moments, column by column."""
        names = ("seconds", "pages_in_use", "running", "waiting")
        return {name: [row[index] for row in self._rows] for index, name in enumerate(names)}


@dataclass
class StepTotals:
    """What all steps together took.

    Attributes:
        count: Steps.
        scheduler_seconds: The scheduler's share.
        host_seconds: Packing of inputs, choice of tokens.
        executor_seconds: The executor's share.
    """

    count: int = 0
    scheduler_seconds: float = 0.0
    host_seconds: float = 0.0
    executor_seconds: float = 0.0

    def add(self, stats: StepStats) -> None:
        """Adds a step."""
        self.count += 1
        self.scheduler_seconds += stats.scheduler_seconds
        self.host_seconds += stats.host_seconds
        self.executor_seconds += stats.executor_seconds


@dataclass(frozen=True)
class Outcome:
    """What a list of requests came to.

    Attributes:
        records: One a request, in the order of the list.
        timeline: Pages and requests after each step.
        steps: What the steps took.
    """

    records: list[RequestRecord]
    timeline: Timeline
    steps: StepTotals


@dataclass(frozen=True)
class _InFlight:
    index: int
    arrival: float
    active: ActiveRequest


def check_request_rate(rate: float) -> None:
    """Checks a rate of arrivals.

    Raises:
        UserError: It is no number of requests per second, or next to none.
    """
    if not rate >= MIN_REQUEST_RATE:  # NaN neither
        raise UserError(
            f"request_rate: found {rate}, expected requests per second of at least {MIN_REQUEST_RATE}, or inf for no "
            "pauses."
        )


def poisson_arrivals(count: int, rate: float, *, seed: int) -> tuple[float, ...]:
    """Arrivals of a Poisson process: independent, exponentially distributed times between requests.

    Args:
        count: Requests; the first one arrives at 0.
        rate: Requests per second, on average.
        seed: Decides the times.
    """
    gaps = np.random.default_rng([_ARRIVALS, seed]).exponential(1 / rate, size=count)
    return tuple((np.cumsum(gaps) - gaps[:1]).tolist())


def warmup_requests(like: Sequence[Request], count: int, *, vocab_size: int, seed: int) -> list[Request]:
    """Requests of the same lengths with random prompts, so that none of them helps a measured one.

    Args:
        like: The measured requests.
        count: How many; the lengths start anew when all have been taken.
        vocab_size: Token ids are below it.
        seed: Decides the prompts.
    """
    generator = np.random.default_rng([_WARMUP, seed])
    chosen = [like[index % len(like)] for index in range(count)]
    return [
        Request(generator.integers(vocab_size, size=len(item.prompt_ids)).tolist(), item.max_new_tokens)
        for item in chosen
    ]


def serve(
    session: Session,
    requests: Sequence[Request],
    load: Load,
    *,
    task_ids: Sequence[int] | None = None,
    clock: Clock | None = None,
    on_progress: Callable[[Progress], None] | None = None,
) -> Outcome:
    """Serves requests until all have ended; the clock starts with the call.

    Requests that are due are handed over between steps. With none in flight and none due, the thread sleeps.

    Args:
        session: What serves them; it has no other work.
        requests: The requests, in the order of their arrival.
        load: When they arrive.
        task_ids: Number of each in its dataset; left out, its place in the list.
        clock: What time it is; left out, ``WallClock``.
        on_progress: Called after a step, at most every ``PROGRESS_SECONDS``, and after the last one.
    """
    clock = clock or WallClock()
    places = len(requests) if load.concurrency is None else load.concurrency
    if places < 1 <= len(requests):
        raise UserError(f"concurrency: found {places}, expected at least 1.")
    free_since = deque([0.0] * min(places, len(requests)))
    in_flight: list[_InFlight] = []
    records: dict[int, RequestRecord] = {}
    timeline, totals = Timeline(), StepTotals()
    output_tokens, next_progress = 0, 0.0
    waiting = deque(range(len(requests)))
    begin = clock.now()
    while waiting or in_flight:
        while waiting and free_since:
            due = load.arrivals[waiting[0]] if load.arrivals is not None else free_since[0]
            wait = due - (clock.now() - begin)
            if wait <= 0:
                index = waiting.popleft()
                free_since.popleft()
                in_flight.append(_InFlight(index, due, session.submit(requests[index])))
            elif in_flight:
                break
            else:
                clock.sleep(wait)
        stats = session.step()
        seconds = clock.now() - begin
        timeline.add(seconds, stats)
        totals.add(stats)
        if len(in_flight) > stats.num_running + stats.num_waiting:
            for item in in_flight:
                if item.active.finish_reason is not None:
                    record = _record(item, item.index if task_ids is None else task_ids[item.index], begin)
                    records[item.index] = record
                    output_tokens += record.output_tokens
                    free_since.append(record.end)
            in_flight = [item for item in in_flight if item.active.finish_reason is None]
        if on_progress is not None and (seconds >= next_progress or not (waiting or in_flight)):
            tokens = output_tokens + sum(len(item.active.token_times) for item in in_flight)
            on_progress(Progress(len(records), len(requests), tokens, seconds, stats.pages_in_use, stats.num_running))
            next_progress = seconds + PROGRESS_SECONDS
    return Outcome([records[index] for index in range(len(requests))], timeline, totals)


def _record(item: _InFlight, task_id: int, begin: float) -> RequestRecord:
    active = item.active
    if active.finish_reason is None:
        raise ValueError("found a request without a finish reason, expected that it has ended")
    times = tuple(moment - begin for moment in active.token_times)
    return RequestRecord(
        task_id=task_id,
        input_tokens=len(active.request.prompt_ids),
        output_tokens=len(times),
        arrival=item.arrival,
        token_times=times,
        end=times[-1],
        finish_reason=active.finish_reason,
        num_preemptions=active.num_preemptions,
        reused_tokens=active.num_reused_tokens,
    )
