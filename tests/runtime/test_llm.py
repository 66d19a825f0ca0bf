import asyncio
import gc
import json
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import threading
import weakref
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

from trtllm_mla.checkpoint.tokenizer import TextCodec
from trtllm_mla.config import MlaPluginConfig
from trtllm_mla.errors import UserError
from trtllm_mla.network.directory import convert
from trtllm_mla.runtime.llm import LLM
from trtllm_mla.runtime.sampling import SamplingParams
from trtllm_mla.runtime.scheduler import SchedulingPolicy

CHECKPOINT = Path(__file__).parents[2] / "examples" / "tiny-mla"
TEXTS = ("The import statement", "A list of", "Return the number of items in", "café: naïve ")


@pytest.fixture(scope="module")
def network(tmp_path_factory):
    path = tmp_path_factory.mktemp("llm") / "network"
    convert(CHECKPOINT, path, plugin=MlaPluginConfig(page_size=16))
    return path


@pytest.fixture(scope="module")
def llm(network):
    with LLM(network, CHECKPOINT, cache_tokens=2048, num_threads=1) as served:
        yield served


@pytest.fixture(scope="module")
def expected():
    """What transformers generates greedily."""
    model = transformers.AutoModelForCausalLM.from_pretrained(CHECKPOINT, dtype=torch.float32).eval()
    codec = TextCodec.load(CHECKPOINT)

    def generate(text, max_new_tokens):
        ids = torch.tensor([codec.encode(text)])
        config = transformers.GenerationConfig(
            do_sample=False, max_new_tokens=max_new_tokens, eos_token_id=None, pad_token_id=0
        )
        return model.generate(ids, generation_config=config)[0, ids.shape[1] :].tolist()

    return {text: generate(text, 24) for text in TEXTS}


class TestGenerate:
    def test_texts_together_and_alone(self, llm, expected):
        together = llm.generate(TEXTS, max_new_tokens=24, ignore_eos=True)
        assert [output.token_ids for output in together] == [expected[text] for text in TEXTS]
        codec = TextCodec.load(CHECKPOINT)
        for text, output in zip(TEXTS, together, strict=True):
            alone = llm.generate(text, max_new_tokens=24, ignore_eos=True)
            assert (alone.token_ids, alone.text) == (output.token_ids, codec.decode(expected[text]))
            assert alone.prompt_ids == codec.encode(text)
            assert alone.finish_reason == "length"

    def test_token_ids_as_lists_and_arrays(self, llm, expected):
        ids = TextCodec.load(CHECKPOINT).encode(TEXTS[0])
        for prompt in (ids, tuple(ids), np.array(ids)):
            (output,) = llm.generate([prompt], max_new_tokens=5, ignore_eos=True)
            assert output.token_ids == expected[TEXTS[0]][:5]
        assert llm.generate(ids, max_new_tokens=5, ignore_eos=True).token_ids == expected[TEXTS[0]][:5]
        assert llm.generate(np.array(ids), max_new_tokens=5, ignore_eos=True).token_ids == expected[TEXTS[0]][:5]

    def test_no_prompts(self, llm):
        assert llm.generate([]) == []

    def test_stop_tokens(self, llm, expected):
        stop = expected[TEXTS[0]][3]
        output = llm.generate(TEXTS[0], max_new_tokens=24, stop_token_ids=[stop], ignore_eos=True)
        assert output.token_ids == expected[TEXTS[0]][: expected[TEXTS[0]].index(stop) + 1]
        assert output.finish_reason == "stop"

    def test_sampling_is_repeatable(self, llm):
        first, second, third = (
            llm.generate(TEXTS[0], sampling=SamplingParams(1.2, seed=seed), ignore_eos=True).token_ids
            for seed in (3, 3, 4)
        )
        assert first == second != third

    def test_equal_prompts_are_sampled_apart(self, llm):
        sampling = SamplingParams(1.2, seed=3)
        first, second = llm.generate([TEXTS[0]] * 2, sampling=sampling, ignore_eos=True)
        assert first.token_ids != second.token_ids
        assert first.token_ids == llm.generate(TEXTS[0], sampling=sampling, ignore_eos=True).token_ids

    def test_a_common_beginning_is_reused(self, llm):
        text = "Unlike the others, this one is long enough to fill a page. "
        llm.generate(text + "one", max_new_tokens=2)
        assert llm.generate(text + "two", max_new_tokens=2).num_reused_tokens >= 16
        assert llm.statistics.num_reused_tokens > 0


class TestStreaming:
    def test_tokens_come_one_by_one_and_make_the_whole_text(self, llm, expected):
        generation = llm.generate_async(TEXTS[1], max_new_tokens=24, ignore_eos=True)
        deltas = list(generation)
        assert [delta.token_id for delta in deltas if delta.token_id is not None] == expected[TEXTS[1]]
        assert "".join(delta.text for delta in deltas) == generation.result().text
        assert [delta.token_id for delta in generation if delta.token_id is not None] == expected[TEXTS[1]], "again"

    def test_async_iteration_and_await(self, llm, expected):
        async def one(text):
            generation = llm.generate_async(text, max_new_tokens=24, ignore_eos=True)
            ids = [delta.token_id async for delta in generation if delta.token_id is not None]
            return ids, (await generation).token_ids

        async def everything():
            return await asyncio.gather(*(one(text) for text in TEXTS * 3))

        assert asyncio.run(everything()) == [(expected[text], expected[text]) for text in TEXTS * 3]

    def test_leaving_an_iteration_does_not_end_the_request(self, llm, expected):
        async def leave():
            generation = llm.generate_async(TEXTS[0], max_new_tokens=24, ignore_eos=True)
            async for _ in generation:
                break
            return generation

        assert asyncio.run(leave()).result(60).token_ids == expected[TEXTS[0]], "though its event loop is closed"

    def test_cancelling_an_awaiting_task_does_not_cancel_the_request(self, llm, expected):
        async def give_up():
            generation = llm.generate_async(TEXTS[0], max_new_tokens=24, ignore_eos=True)
            with pytest.raises(asyncio.TimeoutError):
                await asyncio.wait_for(asyncio.ensure_future(_whole(generation)), 0.0001)
            return generation

        async def _whole(generation):
            return await generation

        assert asyncio.run(give_up()).result(60).token_ids == expected[TEXTS[0]]

    def test_cancel(self, llm):
        generation = llm.generate_async(TEXTS[0], max_new_tokens=400, ignore_eos=True)
        for number, _ in enumerate(generation):
            if number == 2:
                generation.cancel()
        output = generation.result(60)
        assert output.finish_reason == "cancelled"
        assert 3 <= len(output.token_ids) < 400
        generation.cancel()

    def test_from_many_threads(self, llm, expected):
        found = {}

        def ask(number):
            found[number] = llm.generate(TEXTS[number % 4], max_new_tokens=24, ignore_eos=True).token_ids

        threads = [threading.Thread(target=ask, args=(number,)) for number in range(12)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert found == {number: expected[TEXTS[number % 4]] for number in range(12)}


class TestFailures:
    @pytest.mark.parametrize(
        ("prompt", "options", "message"),
        [
            ([], {}, "prompt is empty"),
            ([1, 999], {}, "token id 999 at position 1"),
            ("text", {"max_new_tokens": 0}, "max_new_tokens: found 0"),
            ("text", {"max_new_tokens": 10**6}, "expected at most max_seq_len"),
        ],
    )
    def test_what_can_never_be_served_is_told_at_once(self, llm, prompt, options, message):
        with pytest.raises(UserError, match=message):
            llm.generate_async(prompt, **options)

    def test_a_step_that_fails_ends_its_requests_and_no_others(self, network):
        with LLM(network, CHECKPOINT, cache_tokens=512, num_threads=1) as served:
            run = served._executor.run
            served._executor.run = lambda step: run(step) * np.float32(np.nan)
            with pytest.raises(UserError, match="logit of token"):
                served.generate(TEXTS, max_new_tokens=4)
            generation = served.generate_async(TEXTS[0], max_new_tokens=4)
            with pytest.raises(UserError, match="logit of token"):
                list(generation)
            served._executor.run = run
            assert len(served.generate(TEXTS[0], max_new_tokens=4, ignore_eos=True).token_ids) == 4
            assert served.num_free_pages == served.num_pages

    @pytest.mark.parametrize("count", ["5", 2.5, None])
    def test_numbers_of_tokens_that_are_none(self, llm, count):
        with pytest.raises(UserError, match=r"max_new_tokens: found .*, expected a whole number"):
            llm.generate_async("text", max_new_tokens=count)

    def test_a_list_that_changes_after_the_call_changes_nothing(self, network, expected):
        ids = TextCodec.load(CHECKPOINT).encode(TEXTS[0])
        with LLM(network, CHECKPOINT, cache_tokens=512, num_threads=1) as served:
            with stopped(served):
                generation = served.generate_async(ids, max_new_tokens=5, ignore_eos=True)
                ids[:] = [999] * len(ids)
            assert generation.result(60).token_ids == expected[TEXTS[0]][:5]
            assert generation.result().prompt_ids == TextCodec.load(CHECKPOINT).encode(TEXTS[0])

    def test_a_request_that_cannot_be_queued_fails_alone(self, llm, expected):
        submit = llm._server.session.submit

        def fail(request):
            llm._server.session.submit = submit
            raise MemoryError("no room")

        llm._server.session.submit = fail
        with pytest.raises(MemoryError, match="no room"):
            llm.generate_async(TEXTS[0], max_new_tokens=5).result(60)
        assert llm.generate(TEXTS[0], max_new_tokens=24, ignore_eos=True).token_ids == expected[TEXTS[0]]

    def test_an_interrupted_call_cancels_its_requests(self, network, monkeypatch):
        with LLM(network, CHECKPOINT, cache_tokens=2048, num_threads=1) as served:
            submit, generations = served._submit, []

            def interrupt(request):
                if generations:
                    raise KeyboardInterrupt
                generations.append(submit(request))
                return generations[0]

            monkeypatch.setattr(served, "_submit", interrupt)
            with pytest.raises(KeyboardInterrupt):
                served.generate(TEXTS, max_new_tokens=400, ignore_eos=True)
            assert generations[0].result(60).finish_reason == "cancelled"

    def test_a_policy_that_there_is_not(self, network):
        with pytest.raises(UserError, match="policy: found 'fair', expected guaranteed_no_evict or max_utilization"):
            LLM(network, CHECKPOINT, cache_tokens=256, policy="fair")

    def test_closing_cancels_what_is_on_its_way(self, network):
        served = LLM(network, CHECKPOINT, cache_tokens=2048, num_threads=1)
        generations = [served.generate_async(text, max_new_tokens=400, ignore_eos=True) for text in TEXTS]
        served.close()
        assert {generation.result(60).finish_reason for generation in generations} <= {"cancelled", "length"}
        assert "cancelled" in {generation.result().finish_reason for generation in generations}
        served.close()
        generations[0].cancel()
        with pytest.raises(UserError, match="closed"):
            served.generate("text")

    def test_a_text_with_half_a_character(self, llm):
        with pytest.raises(UserError, match="position 1, which is no character"):
            llm.generate("a\ud800")

    def test_a_text_without_a_tokenizer(self, network, tmp_path):
        shutil.copytree(CHECKPOINT, tmp_path / "checkpoint", ignore=shutil.ignore_patterns("tokenizer*"))
        with LLM(network, tmp_path / "checkpoint", cache_tokens=256, num_threads=1) as served:
            with pytest.raises(UserError, match=r"no tokenizer\.json"):
                served.generate("text")
            output = served.generate([5, 6, 7], max_new_tokens=3, ignore_eos=True)
            assert (len(output.token_ids), output.text) == (3, None)

    def test_cache_tokens(self, network):
        with pytest.raises(UserError, match="cache_tokens: found 0, expected at least 1"):
            LLM(network, CHECKPOINT, cache_tokens=0)


class TestLifetime:
    def test_one_that_nobody_refers_to_is_closed(self, network, monkeypatch):
        served = LLM(network, CHECKPOINT, cache_tokens=256, num_threads=1)
        served.generate(TEXTS[0], max_new_tokens=2)
        closed = threading.Event()
        close = served._executor.close
        monkeypatch.setattr(served._executor, "close", lambda: (close(), closed.set()))
        thread, reference = served._server._thread, weakref.ref(served)
        del served
        gc.collect()
        assert reference() is None
        thread.join(60)
        assert not thread.is_alive()
        assert closed.is_set()

    def test_a_request_on_its_way_keeps_it(self, network):
        generation = LLM(network, CHECKPOINT, cache_tokens=2048, num_threads=1).generate_async(
            TEXTS[0], max_new_tokens=60, ignore_eos=True
        )
        gc.collect()
        assert generation.result(60).finish_reason == "length"

    def test_the_last_reference_may_go_on_its_own_thread(self, network):
        served = LLM(network, CHECKPOINT, cache_tokens=2048, num_threads=1)
        thread = served._server._thread
        with stopped(served):
            served.generate_async(TEXTS[0], max_new_tokens=60, ignore_eos=True)
            del served  # from here on the queued request alone refers to it
        thread.join(60)
        assert not thread.is_alive()

    @pytest.mark.parametrize("ending", ["sys.exit(3)", "raise KeyError", "os.kill(os.getpid(), signal.SIGINT)"])
    def test_the_interpreter_ends_while_requests_run(self, network, ending):
        program = f"""
import os, signal, sys
from trtllm_mla import LLM
llm = LLM({str(network)!r}, {str(CHECKPOINT)!r}, cache_tokens=2048, num_threads=1)
generations = [llm.generate_async("a", max_new_tokens=900, ignore_eos=True) for _ in range(8)]
next(iter(generations[0]))
{ending}
"""
        ended = subprocess.run(
            [sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False
        )
        status, last = {"sys.exit(3)": (3, ""), "raise KeyError": (1, "KeyError")}.get(
            ending, (-signal.SIGINT, "KeyboardInterrupt")
        )
        assert ended.returncode == status
        assert ended.stderr.strip().split("\n")[-1] == last

    @pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
    def test_a_forked_process_is_told(self, llm, expected):
        context = multiprocessing.get_context("fork")
        answers = context.Queue()

        def ask():
            try:
                llm.generate(TEXTS[0], max_new_tokens=2)
            except UserError as error:
                answers.put(str(error))
            llm.close()

        process = context.Process(target=ask)
        process.start()
        assert "made in another process" in answers.get(timeout=60)
        process.join(60)
        assert process.exitcode == 0
        assert llm.generate(TEXTS[0], max_new_tokens=24, ignore_eos=True).token_ids == expected[TEXTS[0]]


@contextmanager
def stopped(served):
    """Keeps the thread of an ``LLM`` from taking what it is told."""
    with served._server._wake:
        yield


def test_limits_of_a_config_file_and_a_small_pool(network, expected, tmp_path):
    config = tmp_path / "limits.json"
    config.write_text(json.dumps({"max_batch_size": 3, "max_num_tokens": 20, "max_seq_len": 96}))
    with LLM(
        network,
        CHECKPOINT,
        config=config,
        cache_tokens=96,
        policy=SchedulingPolicy.MAX_UTILIZATION,
        enable_block_reuse=False,
        num_threads=1,
    ) as served:
        outputs = served.generate(TEXTS, max_new_tokens=24, ignore_eos=True)
        assert [output.token_ids for output in outputs] == [expected[text] for text in TEXTS]
        assert served.statistics.num_preemptions == sum(output.num_preemptions for output in outputs) > 0
        assert served.statistics.num_reused_tokens == 0
