from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.runtime.fake_executor import VOCAB_SIZE, FakeExecutor, greedy
from trtllm_mla.config import BuildConfig, MlaPluginConfig
from trtllm_mla.errors import UserError
from trtllm_mla.runtime.scheduler import Request, RequestState, Scheduler, SchedulerConfig
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
)


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
    scheduler.complete(plan, executor.run(step))
    return plan


def sizes(items):
    return [(item.chunk.start, len(item.chunk.token_ids)) for item in items]


class TestAnyLoad:
    @staticmethod
    @st.composite
    def loads(draw):
        max_batch_size = draw(st.integers(1, 5))
        config = SchedulerConfig(
            vocab_size=VOCAB_SIZE,
            num_pages=draw(st.integers(8, 20)),
            page_size=draw(st.sampled_from([4, 7, 16])),
            max_batch_size=max_batch_size,
            max_num_tokens=draw(st.integers(max_batch_size, 40)),
            max_input_len=24,
            max_seq_len=32,
            max_context_kv_tokens=60,
            enable_matrix_absorption=draw(st.booleans()),
            prefill_absorption_threshold=draw(st.integers(0, 20)),
            max_chunk_tokens=draw(st.none() | st.integers(1, 12)),
            max_context_passes=draw(st.integers(1, 4)),
        )
        # Without a generation group, the passes must have room for any request of 32 tokens but its last one.
        least = 1 if config.enable_matrix_absorption else -(-31 // config.max_context_passes)
        config = replace(config, max_context_kv_tokens=draw(st.integers(least, 60)))
        requests = [
            Request(
                draw(st.lists(st.integers(0, VOCAB_SIZE - 1), min_size=1, max_size=24)),
                draw(st.integers(1, 8)),
                stop_token_ids=frozenset(draw(st.lists(st.integers(0, VOCAB_SIZE - 1), max_size=6))),
            )
            for _ in range(draw(st.integers(1, 7)))
        ]
        arrivals = sorted(draw(st.lists(st.integers(0, 12), min_size=len(requests), max_size=len(requests))))
        return config, list(zip(arrivals, requests, strict=True))

    @given(loads())
    @settings(max_examples=150, deadline=None)
    def test_limits_hold_everyone_finishes_rightly_and_the_pool_is_whole_at_the_end(self, load):
        config, arrivals = load
        scheduler, executor = Scheduler(config), FakeExecutor(config.num_pages, config.page_size)
        served = []
        started = []
        for number in range(1000):
            while arrivals and (arrivals[0][0] <= number or not scheduler.has_work):
                served.append(scheduler.submit(arrivals.pop(0)[1]))
            if not scheduler.has_work:
                break
            plan = run_step(scheduler, executor)
            self.check_plan(plan, config)
            self.check_pages(served, scheduler, config)
            started += [item for item in served if item.num_cached and item not in started]
        assert not scheduler.has_work
        assert not arrivals
        assert started == served, "first come, first served"
        assert scheduler.num_free_pages == config.num_pages
        for item in served:
            asked = item.request
            assert item.state is RequestState.FINISHED
            assert item.output_ids == greedy(asked.prompt_ids, asked.max_new_tokens, asked.stop_token_ids)
            assert (item.finish_reason == "stop") == (item.output_ids[-1] in asked.stop_token_ids)

    @staticmethod
    def check_plan(plan, config):
        chunks = [*plan.context, *plan.generation]
        assert 1 <= len(chunks) <= config.max_batch_size
        assert len({id(item.owner) for item in chunks}) == len(chunks)
        assert sum(len(item.chunk.token_ids) for item in chunks) <= config.max_num_tokens
        passes = config.max_context_passes
        assert sum(item.chunk.length for item in plan.context) <= config.max_context_kv_tokens * passes
        assert sum(len(item.chunk.token_ids) for item in plan.context) <= config.max_context_kv_tokens
        for item in chunks:
            count = len(item.chunk.token_ids)
            decode = item.chunk.start >= item.owner.prompt_len
            assert count == 1 if decode else count <= (config.max_chunk_tokens or count)
            absorbed = config.enable_matrix_absorption and (
                decode
                or count < config.prefill_absorption_threshold
                or item.chunk.length > config.max_context_kv_tokens * passes
            )
            assert (item in plan.generation) == absorbed
            last_known = item.chunk.length >= item.owner.prompt_len
            assert item.chunk.logits == (LogitRows.LAST if last_known else LogitRows.NONE)

    @staticmethod
    def check_pages(served, scheduler, config):
        pages = [page for item in served for page in item.pages.tolist()]
        assert len(set(pages)) == len(pages)
        assert len(pages) + scheduler.num_free_pages == config.num_pages
        for item in served:
            active = item.state in (RequestState.CONTEXT, RequestState.GENERATION)
            length = len(item.request.prompt_ids) + item.request.max_new_tokens
            assert len(item.pages) == (-(-length // config.page_size) if active else 0)


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
    def test_a_request_waits_until_pages_for_all_its_tokens_are_free(self):
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
