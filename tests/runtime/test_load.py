"""Correctness under load: whatever else is served beside it, a request gets the tokens it gets alone."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from trtllm_mla.checkpoint.files import Checkpoint
from trtllm_mla.config import BuildConfig, MlaPluginConfig
from trtllm_mla.dtypes import DType
from trtllm_mla.network.directory import NetworkDirectory, convert
from trtllm_mla.runtime.executors.factory import make_executor
from trtllm_mla.runtime.generation import GenerationSession
from trtllm_mla.runtime.request import Request
from trtllm_mla.runtime.sampling import SamplingParams
from trtllm_mla.runtime.scheduler import SchedulerConfig, SchedulingPolicy

CHECKPOINT = Path(__file__).parents[2] / "examples" / "tiny-mla"
NUM_REQUESTS = 200
LIMITS = BuildConfig(max_batch_size=12, max_num_tokens=64, max_seq_len=192, max_context_kv_tokens=256)
PAGE_SIZE = 16


@dataclass(frozen=True)
class Load:
    """A request, the step before which it arrives, and the one before which it is cancelled, if it is."""

    request: Request
    arrival: int
    cancelled_at: int | None


@pytest.fixture(scope="module")
def network(tmp_path_factory):
    path = tmp_path_factory.mktemp("load") / "network"
    plugin = MlaPluginConfig(page_size=PAGE_SIZE, prefill_absorption_threshold=9)
    convert(CHECKPOINT, path, plugin=plugin, dtype=DType.FLOAT32)
    return NetworkDirectory.load(path)


@pytest.fixture(scope="module")
def loads():
    random = np.random.default_rng(20)
    text = np.frombuffer((CHECKPOINT / "held_out.txt").read_bytes(), dtype=np.uint8).astype(int)
    prefixes = [text[start : start + length].tolist() for start, length in ((100, 70), (900, 40), (5000, 33))]
    result = []
    for number in range(NUM_REQUESTS):
        start, length = random.integers(len(text) - 100), int(random.integers(1, 80))
        prompt = text[start : start + length].tolist()
        if number % 3 == 0:
            prefix = prefixes[random.integers(3)]
            prompt = prefix[: random.integers(10, len(prefix) + 1)] + prompt[:50]
        sampling = SamplingParams(float(number % 4 == 1), seed=number)
        request = Request(prompt, int(random.integers(1, 60)), sampling)
        arrival = int(random.integers(0, 300))
        cancelled_at = arrival + int(random.integers(0, 40)) if number % 7 == 0 else None
        result.append(Load(request, arrival, cancelled_at))
    return sorted(result, key=lambda load: load.arrival)


def make_session(network, num_pages, **options):
    executor = make_executor("onnxruntime", network, Checkpoint.open(CHECKPOINT), num_pages=num_pages, num_threads=1)
    config = SchedulerConfig.from_build_config(
        LIMITS, network.plugin, vocab_size=network.spec.vocab_size, num_pages=num_pages, **options
    )
    return GenerationSession(executor, config)


@pytest.fixture(scope="module")
def alone(network, loads):
    """Each request's tokens when nothing else is served, and nothing is reused."""
    session = make_session(network, 12, enable_block_reuse=False)
    return [session.generate([load.request])[0].output_ids for load in loads]


def serve(session, loads):
    """Serves all requests, and looks at the pool after each step."""
    active, number = [], 0
    while len(active) < len(loads) or session.has_work:
        while len(active) < len(loads) and loads[len(active)].arrival <= number:
            active.append(session.submit(loads[len(active)].request))
        for item, load in zip(active, loads, strict=False):
            if load.cancelled_at == number:
                session.cancel(item)
        if session.has_work:
            stats = session.step()
            assert stats.num_running <= LIMITS.max_batch_size
            assert stats.pages_in_use + session.num_free_pages == session._config.num_pages
        number += 1
    return active


@pytest.mark.parametrize(
    ("num_pages", "policy", "chunk", "least_preemptions", "least_reused"),
    [
        (40, SchedulingPolicy.MAX_UTILIZATION, None, 20, 400),
        (16, SchedulingPolicy.MAX_UTILIZATION, 20, 40, 100),
        (40, SchedulingPolicy.GUARANTEED_NO_EVICT, 11, 0, 400),
    ],
)
def test_every_request_gets_the_tokens_it_gets_alone(
    network, loads, alone, num_pages, policy, chunk, least_preemptions, least_reused
):
    session = make_session(network, num_pages, policy=policy, max_chunk_tokens=chunk)
    served = serve(session, loads)
    reasons = [item.finish_reason for item in served]
    assert reasons.count("cancelled") > 5
    for item, tokens in zip(served, alone, strict=True):
        if item.finish_reason == "cancelled":
            assert item.output_ids == tokens[: len(item.output_ids)]
        else:
            assert item.output_ids == tokens
    statistics = session.statistics
    assert session.num_free_pages == num_pages, "the pool is whole"
    assert statistics.num_preemptions >= least_preemptions
    assert policy is SchedulingPolicy.MAX_UTILIZATION or not statistics.num_preemptions
    assert statistics.num_reused_tokens >= least_reused
    assert min(statistics.num_context_chunks, statistics.num_absorbed_chunks, statistics.num_decodes) > 20
