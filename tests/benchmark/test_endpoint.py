import asyncio
import itertools
import json
import statistics
from pathlib import Path

import pytest

from tests.benchmark.openai_server import completion, piece, serving
from trtllm_mla.benchmark.driver import poisson_arrivals
from trtllm_mla.benchmark.endpoint import CountedBy, EndpointOptions, bench_endpoint
from trtllm_mla.benchmark.openai_endpoint import Api, ApiKey, Endpoint, FailureKind
from trtllm_mla.benchmark.result_files import load_result
from trtllm_mla.checkpoint.tokenizer import TextCodec
from trtllm_mla.errors import UserError
from trtllm_mla.files import write_json

EXAMPLE = Path(__file__).parents[2] / "examples" / "tiny-mla"


@pytest.fixture(autouse=True)
def _no_proxy(monkeypatch):
    monkeypatch.setenv("NO_PROXY", "127.0.0.1,localhost")


def write_dataset(folder, lines):
    path = folder / "data.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def numbered(count, output_tokens=3):
    """Requests whose prompts end in their number."""
    return [
        {"task_id": 10 + index, "prompt": f"number {index}", "output_tokens": output_tokens} for index in range(count)
    ]


def measure(server, dataset, *, checkpoint=None, on_progress=None, api=Api.COMPLETIONS, endpoint=None, **options):
    options = {"warmup": 0, **options}
    settings = {"timeout": 20.0, "first_pause": 0.01, "api": api, **(endpoint or {})}
    return bench_endpoint(
        Endpoint(server.url, "model-7", **settings),
        dataset,
        EndpointOptions(**options),
        checkpoint=checkpoint,
        on_progress=on_progress,
    )


def stream_of(*texts, pause=0.0, usage=None, reason="length"):
    async def handler(request, answer):
        await answer.start_stream()
        for text in texts:
            await asyncio.sleep(pause)
            await answer.event(piece(text))
        await answer.event(piece("", reason))
        if usage is not None:
            await answer.event({"choices": [], "usage": usage})
        await answer.event("[DONE]")
        await answer.end_stream()

    return handler


def test_requests_become_records(tmp_path):
    usage = {"prompt_tokens": 7, "completion_tokens": 3}
    with serving(stream_of("a", "b", "c", pause=0.05, usage=usage)) as server:
        report = measure(server, write_dataset(tmp_path, numbered(3)), concurrency=1)
    assert [request.body["prompt"] for request in server.posts] == ["number 0", "number 1", "number 2"]
    assert [request.body["max_tokens"] for request in server.posts] == [3, 3, 3]
    assert [record.task_id for record in report.records] == [10, 11, 12]
    for reply in report.replies:
        record = reply.record
        assert (record.input_tokens, record.output_tokens, record.finish_reason) == (7, 3, "length")
        assert (reply.text, reply.counted_by) == ("abc", CountedBy.USAGE)
        # The server waits 0.05 s before each piece; a busy machine delays any of them.
        assert 0.05 <= record.ttft < 1
        assert 0.02 <= record.tpot < 1
        assert 0.15 <= record.latency < 3
    # One client: each request arrives when the one before has ended.
    for earlier, later in itertools.pairwise(report.records):
        assert 0 <= later.arrival - earlier.end < 1


def when_full(server_of, concurrency):
    """Answers nobody before so many requests are there at once, and goes on for a moment, in which more could come."""

    async def handler(request, answer):
        while server_of().most_in_flight < concurrency:
            await asyncio.sleep(0.005)
        await asyncio.sleep(0.05)
        await stream_of("a")(request, answer)

    return handler


@pytest.mark.parametrize("concurrency", [1, 3, 7])
def test_as_many_requests_are_in_flight_as_allowed_and_no_more(tmp_path, concurrency):
    dataset = write_dataset(tmp_path, [{**line, "input_ids": [1]} for line in numbered(14)])
    with serving(when_full(lambda: server, concurrency)) as server:
        measure(server, dataset, concurrency=concurrency)
    assert server.most_in_flight == concurrency
    assert len(server.posts) == 14


def test_without_a_limit_all_requests_are_sent_at_once(tmp_path):
    dataset = write_dataset(tmp_path, [{**line, "input_ids": [1]} for line in numbered(14)])
    with serving(when_full(lambda: server, 14)) as server:
        report = measure(server, dataset)
    assert server.most_in_flight == 14
    assert {record.arrival for record in report.records} == {0.0}


def test_requests_arrive_at_the_rate(tmp_path):
    with serving(stream_of("a", usage={"prompt_tokens": 1, "completion_tokens": 1})) as server:
        report = measure(server, write_dataset(tmp_path, numbered(30)), request_rate=40.0, seed=5)
    expected = poisson_arrivals(30, 40.0, seed=5)
    assert [record.arrival for record in report.records] == list(expected)
    begins = {int(request.body["prompt"].split()[-1]): request.begin for request in server.posts}
    # The clocks start at different moments; apart from that, requests came when they were due.
    offsets = [begins[index] - expected[index] for index in range(30)]
    middle = statistics.median(offsets)
    assert statistics.median(abs(offset - middle) for offset in offsets) < 0.05
    assert begins[29] - begins[0] > 0.8 * expected[29]


def test_a_request_that_waits_for_a_place_counts_from_its_arrival(tmp_path):
    with serving(stream_of("a", pause=0.1, usage={"prompt_tokens": 1, "completion_tokens": 1})) as server:
        report = measure(server, write_dataset(tmp_path, numbered(5)), request_rate=1000.0, concurrency=1)
    assert server.most_in_flight == 1
    assert max(record.arrival for record in report.records) < 0.05
    assert 0.45 < report.records[-1].latency < 2


def test_the_warmup_is_other_prompts_and_in_no_number(tmp_path):
    progress = []
    with serving(stream_of("a", usage={"prompt_tokens": 1, "completion_tokens": 1})) as server:
        report = measure(
            server, write_dataset(tmp_path, numbered(2)), warmup=3, concurrency=1, on_progress=progress.append
        )
    prompts = [request.body["prompt"] for request in server.posts]
    assert prompts == ["0 number", "1 number", "0 number", "number 0", "number 1"]
    assert len(report.records) == 2
    assert [(item.done, item.total, item.output_tokens) for item in progress] == [(1, 2, 1), (2, 2, 2)]


def test_token_ids_are_sent_and_backwards_in_the_warmup(tmp_path):
    lines = [{"task_id": 0, "input_ids": [5, 6, 7], "output_tokens": 1}]
    with serving(stream_of("a")) as server:
        report = measure(server, write_dataset(tmp_path, lines), warmup=1)
    assert [request.body["prompt"] for request in server.posts] == [[7, 6, 5], [5, 6, 7]]
    assert report.records[0].input_tokens == 3


def test_what_the_dataset_and_what_the_server_counts_are_both_reported(tmp_path):
    lines = [
        {"task_id": 0, "input_ids": [5, 6, 7], "output_tokens": 1},
        {"task_id": 1, "input_ids": [5, 6, 7, 8], "output_tokens": 1},
    ]
    with serving(stream_of("a", usage={"prompt_tokens": 9, "completion_tokens": 1})) as server:
        values = measure(server, write_dataset(tmp_path, lines)).to_json()
        texts = measure(server, write_dataset(tmp_path, numbered(1))).to_json()
    assert values["request_info"]["avg_input_length"] == 9
    assert values["trtllm_mla"]["dataset_input_tokens"] == 3.5
    assert texts["trtllm_mla"]["dataset_input_tokens"] is None


def test_without_usage_pieces_are_counted_and_the_report_says_so(tmp_path):
    lines = [{"task_id": 0, "input_ids": [5, 6, 7], "output_tokens": 9}]
    with serving(stream_of("a", "", "b", reason="stop")) as server:
        report = measure(server, write_dataset(tmp_path, lines))
    assert report.records[0].output_tokens == 2
    assert report.records[0].finish_reason == "stop"
    assert report.to_json()["trtllm_mla"]["output_tokens_counted_by"] == {"chunks": 1}


def test_usage_wins_over_pieces(tmp_path):
    # Several tokens in a piece, or several pieces of a token.
    for completion_tokens, moments in ((5, 2), (1, 1), (0, 0)):
        usage = {"prompt_tokens": 1, "completion_tokens": completion_tokens}
        with serving(stream_of("a", "b", usage=usage)) as server:
            (record,) = measure(server, write_dataset(tmp_path, numbered(1, 9))).records
        assert (record.output_tokens, len(record.token_times)) == (completion_tokens, moments)


def test_a_stop_token_alone_has_a_moment_and_no_text(tmp_path):
    with serving(stream_of(usage={"prompt_tokens": 1, "completion_tokens": 1}, reason="stop")) as server:
        (record,) = measure(server, write_dataset(tmp_path, numbered(1, 9))).records
    assert (record.output_tokens, record.finish_reason) == (1, "stop")
    assert record.token_times == (record.end,)


def whole(body):
    async def handler(request, answer):
        await answer.json(200, body)

    return handler


def test_without_usage_or_a_stream_the_tokenizer_counts(tmp_path):
    dataset = write_dataset(tmp_path, [{"task_id": 0, "prompt": "import os", "output_tokens": 99}])
    with serving(whole(completion("é = 1", prompt_tokens=None, completion_tokens=None))) as server:
        report = measure(server, dataset, streaming=False, checkpoint=EXAMPLE)
        (record,) = report.records
        with pytest.raises(UserError, match=r"does not say how many new tokens there were .*--checkpoint"):
            measure(server, dataset, streaming=False)
    codec = TextCodec.load(EXAMPLE)
    assert (record.input_tokens, record.output_tokens) == (len(codec.encode("import os")), len(codec.encode("é = 1")))
    assert report.replies[0].counted_by is CountedBy.TOKENIZER


def test_a_prompt_that_nobody_counts(tmp_path):
    with (
        serving(whole(completion("a", prompt_tokens=None))) as server,
        pytest.raises(UserError, match="prompt tokens"),
    ):
        measure(server, write_dataset(tmp_path, numbered(1)), streaming=False)


def test_without_a_stream_there_are_no_streaming_metrics(tmp_path):
    with serving(whole(completion("ab"))) as server:
        report = measure(server, write_dataset(tmp_path, numbered(2)), streaming=False)
    values = report.to_json()
    assert "streaming_metrics" not in values
    assert all(record.ttft is None for record in report.records)
    assert values["performance"]["request_latency_percentiles_ms"]["p50"] > 0


def test_token_ids_become_text(tmp_path):
    codec = TextCodec.load(EXAMPLE)
    lines = [{"task_id": 0, "input_ids": codec.encode("import os"), "output_tokens": 1}]
    dataset = write_dataset(tmp_path, lines)
    with serving(whole(completion("ab"))) as server:
        measure(server, dataset, streaming=False, checkpoint=EXAMPLE)
        assert server.posts[0].body["prompt"] == "import os"
    chat = {"choices": [{"message": {"content": "a"}}], "usage": {"prompt_tokens": 9, "completion_tokens": 1}}
    with serving(whole(chat)) as server:
        measure(server, dataset, streaming=False, checkpoint=EXAMPLE, api=Api.CHAT)
        assert server.posts[0].body["messages"][0]["content"] == "import os"
        with pytest.raises(UserError, match=r"data.jsonl, line 1: found token ids without a prompt.*--checkpoint"):
            measure(server, dataset, streaming=False, api=Api.CHAT)


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([5, 9999], "line 1: found token id 9999, expected ids below the 258"),
        ([256, 257], "nothing but special tokens"),
    ],
)
def test_token_ids_that_have_no_text(tmp_path, ids, message):
    dataset = write_dataset(tmp_path, [{"task_id": 0, "input_ids": ids, "output_tokens": 1}])
    with serving(whole(completion("ab"))) as server, pytest.raises(UserError, match=message):
        measure(server, dataset, checkpoint=EXAMPLE)
    assert server.posts == []


def failing(*statuses):
    """Answers the n-th request with the n-th status, and all others well."""
    left = list(statuses)

    async def handler(request, answer):
        status = left.pop(0) if left else 200
        await answer.json(status, completion("ab") if status == 200 else {"error": f"status {status}"})

    return handler


def test_failures_are_counted_and_in_no_metric(tmp_path):
    with serving(failing(200, 500, 400, 500, 200)) as server:
        report = measure(server, write_dataset(tmp_path, numbered(6)), streaming=False, concurrency=1)
    assert report.failures == {FailureKind.SERVER_ERROR: 2, FailureKind.REJECTED: 1}
    values = report.to_json()
    ours = values["trtllm_mla"]
    assert ours["failures"] == {"server_error": 2, "rejected": 1}
    assert "(status 400)" in ours["failure_examples"]["rejected"]
    assert ours["finish_reasons"] == {"length": 3, "error": 3}
    assert [request["finish_reason"] for request in ours["requests"]].count("error") == 3
    assert values["request_info"]["num_requests"] == values["dataset"]["num_requests"] == 3
    done = [record for record in report.records if record.is_completed]
    seconds = max(record.end for record in done) - min(record.arrival for record in done)
    assert values["performance"]["system_output_throughput_tok_s"] == pytest.approx(3 * 2 / seconds)


def test_retries_are_counted(tmp_path):
    with serving(failing(200, 429, 503, 429)) as server:
        report = measure(server, write_dataset(tmp_path, numbered(3)), streaming=False, concurrency=1)
    assert not report.failures
    assert report.to_json()["trtllm_mla"]["retries"] == {"rate_limited": 2, "unavailable": 1}


def test_those_of_the_warmup_are_not(tmp_path):
    with serving(failing(429)) as server:
        report = measure(server, write_dataset(tmp_path, numbered(1)), streaming=False, warmup=1)
    assert report.to_json()["trtllm_mla"]["retries"] == {}


def test_a_failure_in_the_warmup_ends_the_benchmark(tmp_path):
    with serving(failing(500)) as server, pytest.raises(UserError, match="found status 500"):
        measure(server, write_dataset(tmp_path, numbered(50)), streaming=False, warmup=2)
    assert len(server.posts) == 2


def test_what_all_requests_must_fail_of_ends_the_benchmark(tmp_path):
    with serving(failing(*[401] * 50)) as server, pytest.raises(UserError, match="found status 401"):
        measure(server, write_dataset(tmp_path, numbered(50)), streaming=False, concurrency=2)
    assert len(server.posts) <= 3


def test_a_server_that_goes_away_is_counted(tmp_path):
    with serving(failing(200, 401, 401)) as server:
        report = measure(server, write_dataset(tmp_path, numbered(4)), streaming=False, concurrency=1)
    assert report.failures == {FailureKind.UNAUTHORIZED: 2}


def test_if_all_fail_nothing_was_measured(tmp_path):
    with (
        serving(failing(*[500] * 4)) as server,
        pytest.raises(UserError, match=r"^All 4 requests failed; the first of"),
    ):
        measure(server, write_dataset(tmp_path, numbered(4)), streaming=False)


def test_the_result_is_one_that_reports_read(tmp_path):
    secret = "sk_top_secret_value"  # noqa: S105
    with serving(stream_of("a", "b", pause=0.01, usage={"prompt_tokens": 3, "completion_tokens": 2})) as server:
        report = measure(
            server,
            write_dataset(tmp_path, numbered(5)),
            concurrency=2,
            num_requests=4,
            endpoint={"key": ApiKey("SERVER_KEY", secret)},
        )
    write_json(tmp_path / "result.json", report.to_json())
    assert secret not in (tmp_path / "result.json").read_text()
    result = load_result(tmp_path / "result.json")
    assert result.own.kind == "endpoint"
    assert len(result.own.requests) == 4
    assert result.concurrency == 2
    values = json.loads((tmp_path / "result.json").read_text())
    assert values["trtllm_mla"]["options"]["api_key_env"] == "SERVER_KEY"
    assert values["world_info"]["world_size"] is None
    assert values["performance"]["output_throughput_per_gpu_tok_s"] is None


@pytest.mark.parametrize(
    "options", [{"num_requests": 0}, {"concurrency": 0}, {"warmup": -1}, {"seed": -1}, {"request_rate": 0.0}]
)
def test_impossible_options_are_named(options):
    with pytest.raises(UserError, match=f"^{next(iter(options))}: found"):
        EndpointOptions(**options)
