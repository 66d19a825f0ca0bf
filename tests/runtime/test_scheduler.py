from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.runtime.fake_executor import VOCAB_SIZE, FakeExecutor, greedy
from trtllm_mla.config import BuildConfig, MlaPluginConfig
from trtllm_mla.errors import UserError
from trtllm_mla.runtime.request import Request, RequestState
from trtllm_mla.runtime.sampling import SamplingParams
from trtllm_mla.runtime.scheduler import Scheduler, SchedulerConfig, SchedulingPolicy
from trtllm_mla.runtime.step import LogitRows, build_step

CONFIG = SchedulerConfig(
    vocab_size=VOCAB_SIZE,
    num_pages=40,
    page_size=16,
    max_batch_size=4,
    max_num_tokens=64,
    max_input_len=100,
    max_seq_len=128,
    max_context_kv_tokens=128,
    enable_matrix_absorption=True,
    prefill_absorption_threshold=8,
    enable_block_reuse=False,
)
REUSE = replace(CONFIG, enable_block_reuse=True)


def request(prompt_len, max_new_tokens=4, **values):
    return Request(list(range(prompt_len)), max_new_tokens, **values)


def run_step(scheduler, executor):
    plan = scheduler.schedule()
    step = build_step(
        [item.chunk for item in plan.context],
        [item.chunk for item in plan.generation],
        page_size=executor.page_size,
        num_pages=executor.num_pages,
        context_passes=scheduler._config.context_passes,
    )
    scheduler.complete(plan, plan.choose_tokens(executor.run(step)))
    return plan


def sizes(items):
    return [(item.chunk.start, len(item.chunk.token_ids)) for item in items]


NO_EVICT, MAX_UTILIZATION = SchedulingPolicy


def run_to_the_end(scheduler, executor):
    while scheduler.has_work:
        run_step(scheduler, executor)


class TestAnyLoad:
    """Random limits, arrivals, common beginnings, cancellations and pools that are too small for all."""

    @staticmethod
    @st.composite
    def loads(draw):
        max_batch_size = draw(st.integers(1, 5))
        page_size = draw(st.sampled_from([4, 7, 16]))
        config = SchedulerConfig(
            vocab_size=VOCAB_SIZE,
            num_pages=draw(st.integers(-(-32 // page_size), 20)),
            page_size=page_size,
            max_batch_size=max_batch_size,
            max_num_tokens=draw(st.integers(max_batch_size, 40)),
            max_input_len=24,
            max_seq_len=32,
            max_context_kv_tokens=60,
            enable_matrix_absorption=draw(st.booleans()),
            prefill_absorption_threshold=draw(st.integers(0, 20)),
            max_chunk_tokens=draw(st.none() | st.integers(1, 12)),
            max_context_passes=draw(st.integers(1, 4)),
            policy=draw(st.sampled_from(SchedulingPolicy)),
            enable_block_reuse=draw(st.booleans()),
        )
        # Without a generation group, the passes must have room for any request of 32 tokens but its last one.
        least = 1 if config.enable_matrix_absorption else -(-31 // config.max_context_passes)
        config = replace(config, max_context_kv_tokens=draw(st.integers(least, 60)))
        token = st.integers(0, VOCAB_SIZE - 1)
        common = draw(st.lists(token, max_size=20))
        requests = []
        for _ in range(draw(st.integers(1, 9))):
            prompt = [*common[: draw(st.integers(0, len(common)))], *draw(st.lists(token, max_size=24))][:24]
            requests.append(
                Request(
                    prompt or [draw(token)],
                    draw(st.integers(1, 8)),
                    SamplingParams(draw(st.sampled_from([0.0, 1.5])), seed=draw(st.integers(0, 9))),
                    stop_token_ids=frozenset(draw(st.lists(token, max_size=6))),
                )
            )
        arrivals = sorted(draw(st.lists(st.integers(0, 12), min_size=len(requests), max_size=len(requests))))
        cancelled_at = draw(st.lists(st.none() | st.integers(0, 20), min_size=len(requests), max_size=len(requests)))
        return config, list(zip(arrivals, requests, cancelled_at, strict=True))

    @pytest.mark.slow  # thousands of schedules, each compared with serving its requests alone
    @given(loads())
    @settings(max_examples=2000, deadline=None)
    def test_limits_hold_everyone_finishes_rightly_and_the_pool_is_whole_at_the_end(self, load):
        config, arrivals = load
        scheduler, executor = Scheduler(config), FakeExecutor(config.num_pages, config.page_size)
        served, cancellations, started = [], [], []
        for number in range(2000):
            while arrivals and (arrivals[0][0] <= number or not scheduler.has_work):
                _, request, cancelled_at = arrivals.pop(0)
                served.append(scheduler.submit(request))
                cancellations.append(cancelled_at)
            for item, moment in zip(served, cancellations, strict=True):
                if moment == number:
                    scheduler.cancel(item)
            if not scheduler.has_work:
                if arrivals:
                    continue
                break
            unfinished = [item for item in served if item.finish_reason is None]
            plan = run_step(scheduler, executor)
            self.check_plan(plan, config)
            self.check_pages(served, scheduler, config)
            self.check_oldest(unfinished, plan, config)
            started += [item for item in served if item.num_cached and item not in started]
        assert not scheduler.has_work
        assert not arrivals
        assert [item for item in served if item in started] == started, "first come, first served"
        assert scheduler.num_free_pages == config.num_pages
        for item in served:
            self.check_outcome(item)
        preemptions = scheduler.statistics.num_preemptions
        assert preemptions == sum(item.num_preemptions for item in served)
        if config.policy is NO_EVICT:
            assert preemptions == 0
        if not config.enable_block_reuse:
            assert scheduler.statistics.num_reused_tokens == 0

    @staticmethod
    def check_outcome(item):
        asked = item.request
        assert item.state is RequestState.FINISHED
        alone = Scheduler(replace(CONFIG, max_chunk_tokens=None))
        other = alone.submit(asked)
        run_to_the_end(alone, FakeExecutor(CONFIG.num_pages, CONFIG.page_size))
        if asked.sampling.temperature == 0:
            assert other.output_ids == greedy(asked.prompt_ids, asked.max_new_tokens, asked.stop_token_ids)
        if item.finish_reason == "cancelled":
            assert item.output_ids == other.output_ids[: len(item.output_ids)]
        else:
            assert (item.output_ids, item.finish_reason) == (other.output_ids, other.finish_reason)
            assert (item.finish_reason == "stop") == (item.output_ids[-1] in asked.stop_token_ids)

    @staticmethod
    def check_plan(plan, config):
        assert 1 <= len(plan.chunks) <= config.max_batch_size
        assert len({id(item.owner) for item in plan.chunks}) == len(plan.chunks)
        assert sum(len(item.chunk.token_ids) for item in plan.chunks) <= config.max_num_tokens
        passes = config.max_context_passes
        assert sum(item.chunk.length for item in plan.context) <= config.max_context_kv_tokens * passes
        assert sum(len(item.chunk.token_ids) for item in plan.context) <= config.max_context_kv_tokens
        for item in plan.chunks:
            count = len(item.chunk.token_ids)
            last_known = item.chunk.logits is LogitRows.LAST
            # One uncached token behind the prompt is a decode; more of them are computed again.
            decode = item.chunk.start >= item.owner.prompt_len and count == 1 and last_known
            assert decode or count <= (config.max_chunk_tokens or count)
            absorbed = config.enable_matrix_absorption and (
                decode
                or count < config.prefill_absorption_threshold
                or item.chunk.length > config.max_context_kv_tokens * passes
            )
            assert (item in plan.generation) == absorbed

    @staticmethod
    def check_pages(served, scheduler, config):
        """No page is written by two requests, and each has what its cached tokens need and no more."""
        own, shared = [], set()
        for item in served:
            if item.state in (RequestState.WAITING, RequestState.FINISHED):
                assert not len(item.pages)
                continue
            assert len(item.pages) == -(-item.num_cached // config.page_size) > 0
            full = item.num_cached // config.page_size
            shared |= set(item.pages[:full].tolist())
            own += item.pages[full:].tolist()
        assert len(set(own)) == len(own)
        assert not shared & set(own), "a page that others read is never written"
        assert len(own) + len(shared) + scheduler.num_free_pages == config.num_pages

    @staticmethod
    def check_oldest(unfinished, plan, config):
        """Nobody starves: the oldest request is in every step.

        Without a generation group it may wait for the keys of younger requests' decodes; nobody is admitted meanwhile.
        """
        if config.enable_matrix_absorption:
            assert unfinished[0] in [item.owner for item in plan.chunks]


class TestPreemption:
    CONFIG = replace(CONFIG, num_pages=3, max_seq_len=48, policy=MAX_UTILIZATION)

    def test_the_youngest_loses_its_pages_and_is_computed_again(self):
        scheduler, executor = Scheduler(self.CONFIG), FakeExecutor(3, CONFIG.page_size)
        old, young = scheduler.submit(Request([1] * 14, 25)), scheduler.submit(Request([2] * 10, 20))
        while not young.num_preemptions:
            run_step(scheduler, executor)
        assert young.state is RequestState.WAITING
        assert (old.num_pages, young.num_pages, scheduler.num_free_pages) == (2, 0, 1)
        assert young.output_ids == greedy([2] * 10, len(young.output_ids)), "what it has stays"
        run_to_the_end(scheduler, executor)
        assert (old.output_ids, old.num_preemptions) == (greedy([1] * 14, 25), 0)
        assert young.output_ids == greedy([2] * 10, 20)
        assert scheduler.statistics.num_preemptions == young.num_preemptions

    def test_a_preempted_request_goes_before_those_that_wait(self):
        scheduler, executor = Scheduler(self.CONFIG), FakeExecutor(3, CONFIG.page_size)
        items = [scheduler.submit(Request([index] * 14, 12)) for index in range(3)]
        ends = []
        while scheduler.has_work:
            run_step(scheduler, executor)
            ends += [item for item in items if item.finish_reason and item not in ends]
        assert sum(item.num_preemptions for item in items) > 0
        assert ends == items

    def test_its_full_pages_are_found_again_where_others_did_not_take_them(self):
        config = replace(self.CONFIG, num_pages=4, page_size=8, max_seq_len=32, enable_block_reuse=True)
        scheduler, executor = Scheduler(config), FakeExecutor(4, 8)
        old, young = scheduler.submit(Request([1] * 7, 12)), scheduler.submit(Request([2] * 15, 9))
        plans = []
        while scheduler.has_work:
            plans.append(run_step(scheduler, executor))
        assert young.num_preemptions == 1, "it cannot have a third page while the old one has two"
        starts = [item.chunk.start for plan in plans for item in plan.chunks if item.owner is young]
        assert starts[:4] == [0, 15, 8, 17], "the first of its two full pages is left when the old request has three"
        assert old.output_ids == greedy([1] * 7, 12)
        assert young.output_ids == greedy([2] * 15, 9)
        assert young.num_reused_tokens == 0, "its own rows are no prefix hit"

    @pytest.mark.parametrize("policy", [NO_EVICT, "guaranteed_no_evict"])
    def test_without_eviction_the_same_load_waits_instead(self, policy):
        config = replace(self.CONFIG, policy=policy)
        scheduler, executor = Scheduler(config), FakeExecutor(3, CONFIG.page_size)
        old, young = scheduler.submit(Request([1] * 14, 25)), scheduler.submit(Request([2] * 10, 20))
        run_step(scheduler, executor)
        assert (old.num_pages, young.state) == (1, RequestState.WAITING)
        run_to_the_end(scheduler, executor)
        assert young.num_preemptions == 0

    def test_pages_are_taken_when_tokens_need_them(self):
        scheduler, executor = Scheduler(CONFIG), FakeExecutor(CONFIG.num_pages, CONFIG.page_size)
        item = scheduler.submit(request(14, 40))
        held = []
        while scheduler.has_work:
            run_step(scheduler, executor)
            held.append(item.num_pages)
        assert held[:5] == [1, 1, 1, 2, 2]
        assert held[-2:] == [4, 0]


class TestReuse:
    PROMPT = tuple(range(50))

    def serve(self, scheduler, executor, prompt, max_new_tokens=4):
        item = scheduler.submit(Request(prompt, max_new_tokens))
        run_to_the_end(scheduler, executor)
        assert item.output_ids == greedy(prompt, max_new_tokens)
        return item

    def test_a_common_beginning_is_read_not_computed(self):
        scheduler, executor = Scheduler(REUSE), FakeExecutor(CONFIG.num_pages, CONFIG.page_size)
        self.serve(scheduler, executor, self.PROMPT)
        executor.steps.clear()
        item = self.serve(scheduler, executor, [*self.PROMPT[:40], 7, 7])
        assert item.num_reused_tokens == 32, "two full pages of 16"
        assert len(executor.steps[0].input_ids) == 10
        assert scheduler.statistics.num_reused_tokens == 32
        assert scheduler.statistics.num_prompt_tokens == 92

    def test_the_last_token_is_always_computed(self):
        scheduler, executor = Scheduler(REUSE), FakeExecutor(CONFIG.num_pages, CONFIG.page_size)
        self.serve(scheduler, executor, self.PROMPT[:32])
        assert self.serve(scheduler, executor, self.PROMPT[:32]).num_reused_tokens == 16

    def test_an_output_is_reused_by_a_longer_prompt(self):
        scheduler, executor = Scheduler(REUSE), FakeExecutor(CONFIG.num_pages, CONFIG.page_size)
        first = self.serve(scheduler, executor, self.PROMPT[:20], 30)
        longer = [*self.PROMPT[:20], *first.output_ids, 3]
        assert self.serve(scheduler, executor, longer).num_reused_tokens == 48

    def test_requests_that_run_share_pages(self):
        scheduler, executor = Scheduler(REUSE), FakeExecutor(CONFIG.num_pages, CONFIG.page_size)
        first = scheduler.submit(Request(self.PROMPT, 20))
        run_step(scheduler, executor)
        second = scheduler.submit(Request(self.PROMPT, 20))
        run_step(scheduler, executor)
        assert second.pages[:3].tolist() == first.pages[:3].tolist()
        assert second.pages[3] != first.pages[3]
        assert scheduler.num_free_pages == CONFIG.num_pages - 5
        run_to_the_end(scheduler, executor)
        assert first.output_ids == second.output_ids == greedy(self.PROMPT, 20)
        assert scheduler.num_free_pages == CONFIG.num_pages

    def test_a_beginning_that_differs_early_shares_nothing(self):
        scheduler, executor = Scheduler(REUSE), FakeExecutor(CONFIG.num_pages, CONFIG.page_size)
        self.serve(scheduler, executor, self.PROMPT)
        assert self.serve(scheduler, executor, [9, *self.PROMPT[1:]]).num_reused_tokens == 0

    def test_pages_that_others_took_are_computed_again(self):
        config = replace(REUSE, num_pages=4)
        scheduler, executor = Scheduler(config), FakeExecutor(4, CONFIG.page_size)
        self.serve(scheduler, executor, self.PROMPT)
        self.serve(scheduler, executor, [5] * 40, 20)
        assert self.serve(scheduler, executor, self.PROMPT).num_reused_tokens == 0

    def test_it_can_be_switched_off(self):
        scheduler = Scheduler(CONFIG)
        executor = FakeExecutor(CONFIG.num_pages, CONFIG.page_size)
        self.serve(scheduler, executor, self.PROMPT)
        assert self.serve(scheduler, executor, self.PROMPT).num_reused_tokens == 0


class TestCancellation:
    def test_a_waiting_and_a_running_request(self):
        config = replace(CONFIG, num_pages=2)
        scheduler, executor = Scheduler(config), FakeExecutor(2, CONFIG.page_size)
        running, waiting = scheduler.submit(request(20, 6)), scheduler.submit(request(20, 6))
        run_step(scheduler, executor)
        scheduler.cancel(waiting)
        scheduler.cancel(running)
        assert (running.finish_reason, len(running.output_ids)) == ("cancelled", 1)
        assert (waiting.finish_reason, waiting.output_ids) == ("cancelled", [])
        assert not scheduler.has_work
        assert scheduler.num_free_pages == 2

    def test_from_a_callback_of_the_same_step(self):
        scheduler, executor = Scheduler(CONFIG), FakeExecutor(CONFIG.num_pages, CONFIG.page_size)
        items = []
        for index in range(3):
            items.append(scheduler.submit(request(5 + index, 9, on_token=lambda _: scheduler.cancel(items[1]))))
        run_to_the_end(scheduler, executor)
        assert [item.finish_reason for item in items] == ["length", "cancelled", "length"]
        assert items[1].output_ids == []
        assert items[2].output_ids == greedy(range(7), 9)
        assert scheduler.num_free_pages == CONFIG.num_pages

    def test_cancelling_twice_or_after_the_end_changes_nothing(self):
        scheduler, executor = Scheduler(CONFIG), FakeExecutor(CONFIG.num_pages, CONFIG.page_size)
        item = scheduler.submit(request(5, 2))
        run_to_the_end(scheduler, executor)
        scheduler.cancel(item)
        assert item.finish_reason == "length"


def test_statistics_count_where_tokens_ran():
    scheduler, executor = Scheduler(CONFIG), FakeExecutor(CONFIG.num_pages, CONFIG.page_size)
    scheduler.submit(request(30, 4))
    scheduler.submit(request(5, 1))
    run_to_the_end(scheduler, executor)
    found = scheduler.statistics
    assert (found.num_context_chunks, found.num_context_tokens) == (1, 30)
    assert (found.num_absorbed_chunks, found.num_absorbed_tokens) == (1, 5)
    assert found.num_decodes == 3
    assert found.peak_pages_in_use == 3


class TestRouting:
    def test_a_prefill_of_threshold_tokens_is_decompressed_and_one_less_absorbed(self):
        scheduler = Scheduler(CONFIG)
        scheduler.submit(request(8))
        scheduler.submit(request(7))
        plan = scheduler.schedule()
        assert sizes(plan.context) == [(0, 8)]
        assert sizes(plan.generation) == [(0, 7)]

    def test_decode_is_absorbed_whatever_the_threshold(self):
        scheduler = Scheduler(replace(CONFIG, prefill_absorption_threshold=0))
        scheduler.submit(request(3))
        executor = FakeExecutor(CONFIG.num_pages, CONFIG.page_size)
        first, second = run_step(scheduler, executor), run_step(scheduler, executor)
        assert (sizes(first.context), sizes(first.generation)) == ([(0, 3)], [])
        assert (sizes(second.context), sizes(second.generation)) == ([], [(3, 1)])

    def test_without_absorption_everything_is_decompressed(self):
        scheduler = Scheduler(replace(CONFIG, enable_matrix_absorption=False))
        scheduler.submit(request(3))
        executor = FakeExecutor(CONFIG.num_pages, CONFIG.page_size)
        plans = [run_step(scheduler, executor) for _ in range(4)]
        assert [sizes(plan.context) for plan in plans] == [[(0, 3)], [(3, 1)], [(4, 1)], [(5, 1)]]
        assert not any(plan.generation for plan in plans)

    def test_chunks_of_a_prompt_cross_the_threshold_where_the_step_has_less_room(self):
        scheduler = Scheduler(replace(CONFIG, max_num_tokens=20))
        scheduler.submit(request(26))
        executor = FakeExecutor(CONFIG.num_pages, CONFIG.page_size)
        first, second = run_step(scheduler, executor), run_step(scheduler, executor)
        assert (sizes(first.context), sizes(first.generation)) == ([(0, 20)], [])
        assert (sizes(second.context), sizes(second.generation)) == ([], [(20, 6)])

    def test_max_chunk_tokens(self):
        scheduler = Scheduler(replace(CONFIG, max_chunk_tokens=9))
        scheduler.submit(request(20))
        executor = FakeExecutor(CONFIG.num_pages, CONFIG.page_size)
        plans = [run_step(scheduler, executor) for _ in range(3)]
        assert [sizes(plan.context) for plan in plans] == [[(0, 9)], [(9, 9)], []]
        assert sizes(plans[2].generation) == [(18, 2)]

    def test_a_chunk_waits_for_room_in_the_context_workspace(self):
        scheduler = Scheduler(replace(CONFIG, max_context_kv_tokens=40))
        scheduler.submit(request(30))
        scheduler.submit(request(20))
        scheduler.submit(request(5))
        executor = FakeExecutor(CONFIG.num_pages, CONFIG.page_size)
        first, second = run_step(scheduler, executor), run_step(scheduler, executor)
        assert sizes(first.context) == [(0, 30)]
        assert sizes(first.generation) == [], "the short prompt does not overtake the waiting one"
        assert sizes(second.context) == [(0, 20)]
        assert sizes(second.generation) == [(30, 1), (0, 5)]

    def test_nobody_is_admitted_while_a_started_prompt_waits_for_room(self):
        config = replace(
            CONFIG, max_context_kv_tokens=40, max_chunk_tokens=16, prefill_absorption_threshold=0, page_size=16
        )
        scheduler, executor = Scheduler(config), FakeExecutor(config.num_pages, config.page_size)
        scheduler.submit(request(40))
        scheduler.submit(request(20))
        first = run_step(scheduler, executor)
        late = scheduler.submit(request(5))
        second = run_step(scheduler, executor)
        assert sizes(first.context) == [(0, 16), (0, 16)]
        assert sizes(second.context) == [(16, 16)], "the rest of the second prompt, 20 keys, does not fit beside 32"
        assert late.state is RequestState.WAITING

    def test_a_history_longer_than_the_context_workspace_is_absorbed(self):
        scheduler = Scheduler(replace(CONFIG, max_context_kv_tokens=20, max_chunk_tokens=16))
        scheduler.submit(request(32))
        executor = FakeExecutor(CONFIG.num_pages, CONFIG.page_size)
        first, second = run_step(scheduler, executor), run_step(scheduler, executor)
        assert sizes(first.context) == [(0, 16)]
        assert sizes(second.generation) == [(16, 16)]

    def test_with_passes_a_long_history_stays_decompressed(self):
        config = replace(CONFIG, max_context_kv_tokens=20, max_chunk_tokens=16, max_context_passes=4)
        scheduler, executor = Scheduler(config), FakeExecutor(config.num_pages, config.page_size)
        scheduler.submit(Request([7] * 96, 4))
        plans = [run_step(scheduler, executor) for _ in range(6)]
        assert [sizes(plan.context) for plan in plans[:5]] == [[(start, 16)] for start in range(0, 80, 16)]
        assert sizes(plans[5].generation) == [(80, 16)], "96 keys are more than four passes of 20"

    def test_with_passes_a_chunk_is_cut_to_what_the_first_has_room_for(self):
        config = replace(CONFIG, max_context_kv_tokens=20, max_context_passes=4)
        scheduler, executor = Scheduler(config), FakeExecutor(config.num_pages, config.page_size)
        scheduler.submit(request(60))
        plans = [run_step(scheduler, executor) for _ in range(3)]
        assert [sizes(plan.context) for plan in plans] == [[(0, 20)], [(20, 20)], [(40, 20)]]

    def test_new_tokens_of_all_requests_share_the_first_pass(self):
        config = replace(CONFIG, max_context_kv_tokens=20, max_chunk_tokens=12, max_context_passes=4)
        scheduler, executor = Scheduler(config), FakeExecutor(config.num_pages, config.page_size)
        scheduler.submit(request(24))
        scheduler.submit(request(24))
        plans = [run_step(scheduler, executor) for _ in range(4)]
        assert [sizes(plan.context) for plan in plans] == [[(0, 12)], [(12, 12)], [(0, 12)], [(12, 12)]]

    def test_without_absorption_passes_serve_longer_requests(self):
        config = replace(CONFIG, enable_matrix_absorption=False, max_context_kv_tokens=25, max_context_passes=4)
        scheduler, executor = Scheduler(config), FakeExecutor(config.num_pages, config.page_size)
        item = scheduler.submit(Request([7] * 90, 11))
        while scheduler.has_work:
            run_step(scheduler, executor)
        assert item.output_ids == greedy([7] * 90, 11)
        assert [len(part.kv_slots) for part in executor.steps[-1].context_history] == [25, 25, 25]
        with pytest.raises(UserError, match="102 tokens exceed max_context_kv_tokens = 25 in 4 passes, and"):
            scheduler.submit(Request([7] * 90, 12))


class TestAdmission:
    def test_without_eviction_a_request_waits_until_pages_for_all_its_tokens_are_free(self):
        config = replace(CONFIG, num_pages=3)
        scheduler, executor = Scheduler(config), FakeExecutor(3, CONFIG.page_size)
        first = scheduler.submit(request(16, 2))
        second = scheduler.submit(request(16, 1))
        third = scheduler.submit(request(1, 1))
        run_step(scheduler, executor)
        assert [item.state for item in (first, second, third)] == [
            RequestState.GENERATION,
            RequestState.WAITING,
            RequestState.WAITING,
        ]
        run_step(scheduler, executor)
        assert first.state is RequestState.FINISHED
        run_step(scheduler, executor)
        assert [second.state, third.state] == [RequestState.FINISHED] * 2

    def test_a_freed_page_is_given_to_the_next_request_with_its_own_tokens(self):
        config = replace(CONFIG, num_pages=2)
        scheduler, executor = Scheduler(config), FakeExecutor(2, CONFIG.page_size)
        first = scheduler.submit(Request([5] * 20, 6))
        second = scheduler.submit(Request([9] * 3, 3))
        while scheduler.has_work:
            run_step(scheduler, executor)
        assert first.output_ids == greedy([5] * 20, 6)
        assert second.output_ids == greedy([9] * 3, 3)

    def test_a_request_that_needs_exactly_the_pool_is_served(self):
        scheduler, executor = Scheduler(replace(CONFIG, num_pages=2)), FakeExecutor(2, CONFIG.page_size)
        item = scheduler.submit(request(30, 2))
        run_step(scheduler, executor)
        run_step(scheduler, executor)
        assert item.state is RequestState.FINISHED


class TestRefusal:
    @pytest.mark.parametrize(
        ("asked", "changes", "message"),
        [
            (Request([], 1), {}, "prompt is empty"),
            (request(3, 0), {}, "max_new_tokens: found 0, expected at least 1"),
            (Request([1, VOCAB_SIZE, 2], 1), {}, f"token id {VOCAB_SIZE} at position 1, .* 0 to {VOCAB_SIZE - 1}"),
            (Request([1, -1], 1), {}, "token id -1 at position 1"),
            (Request([2**40], 1), {}, f"token id {2**40} at position 0"),
            (Request([2**80], 1), {}, "expected one list of whole numbers"),
            (Request([1.5], 1), {}, "expected one list of whole numbers"),
            (Request([[1, 2]], 1), {}, "expected one list of whole numbers"),
            (Request([0] * 101, 1), {}, "has 101 tokens, expected at most max_input_len = 100"),
            (Request([0] * 100, 29), {}, "make 129, expected at most max_seq_len = 128"),
            (Request([0] * 30, 3), {"num_pages": 2}, "33 tokens need 3 pages of 16 tokens, and the pool has 2"),
            (
                Request([0] * 30, 12),
                {"enable_matrix_absorption": False, "max_context_kv_tokens": 40},
                "42 tokens exceed max_context_kv_tokens = 40",
            ),
        ],
    )
    def test_what_can_never_be_served(self, asked, changes, message):
        scheduler = Scheduler(replace(CONFIG, **changes))
        with pytest.raises(UserError, match=message):
            scheduler.submit(asked)
        assert not scheduler.has_work

    @pytest.mark.parametrize(
        ("asked", "changes"),
        [
            (Request([0] * 100, 28), {}),
            (Request([0] * 30, 2), {"num_pages": 2}),
            (Request([0] * 30, 11), {"enable_matrix_absorption": False, "max_context_kv_tokens": 40}),
        ],
    )
    def test_the_limits_themselves_are_allowed(self, asked, changes):
        config = replace(CONFIG, **changes)
        scheduler, executor = Scheduler(config), FakeExecutor(config.num_pages, config.page_size)
        item = scheduler.submit(asked)
        while scheduler.has_work:
            run_step(scheduler, executor)
        assert item.output_ids == greedy(asked.prompt_ids, asked.max_new_tokens)

    def test_a_chunk_limit_of_zero(self):
        with pytest.raises(UserError, match="max_chunk_tokens: found 0"):
            replace(CONFIG, max_chunk_tokens=0)

    def test_scheduling_without_requests(self):
        with pytest.raises(ValueError, match="no request"):
            Scheduler(CONFIG).schedule()


def test_tokens_and_callbacks_come_in_order():
    heard = []
    scheduler, executor = Scheduler(CONFIG), FakeExecutor(CONFIG.num_pages, CONFIG.page_size)
    item = scheduler.submit(request(9, 5, on_token=heard.append))
    while scheduler.has_work:
        run_step(scheduler, executor)
    assert heard == item.output_ids == greedy(range(9), 5)
    assert np.all(np.diff(item.token_times) >= 0)


def test_limits_come_from_the_configs():
    build = BuildConfig(max_batch_size=3, max_num_tokens=70, max_seq_len=500, max_context_kv_tokens=90)
    plugin = MlaPluginConfig(
        page_size=32, prefill_absorption_threshold=11, enable_matrix_absorption=False, max_context_passes=3
    )
    found = SchedulerConfig.from_build_config(build, plugin, vocab_size=7, num_pages=5, max_chunk_tokens=6)
    assert found == SchedulerConfig(
        vocab_size=7,
        num_pages=5,
        page_size=32,
        max_batch_size=3,
        max_num_tokens=70,
        max_input_len=499,
        max_seq_len=500,
        max_context_kv_tokens=90,
        enable_matrix_absorption=False,
        prefill_absorption_threshold=11,
        max_chunk_tokens=6,
        max_context_passes=3,
    )
    assert (found.context_passes.count, found.context_passes.max_keys) == (3, 90)
