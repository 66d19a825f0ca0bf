import json
import socket

import pytest

from tests.benchmark.openai_server import completion, piece, serving

SECRET = "sk_top_secret_value"  # noqa: S105


@pytest.fixture(autouse=True)
def _no_proxy(monkeypatch):
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")


@pytest.fixture
def dataset(tmp_path):
    path = tmp_path / "data.jsonl"
    lines = [{"task_id": index, "input_ids": [1, 2, index], "output_tokens": 2} for index in range(6)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


@pytest.fixture
def measure(command, dataset):
    """Runs ``bench endpoint`` with a model and the dataset."""

    def run(url, *options, dataset=dataset):
        return command("bench", "endpoint", "--base-url", url, "--model", "model-7", "--dataset", dataset, *options)

    return run


async def _stream(request, answer):
    await answer.start_stream()
    for text in ("a", "b"):
        await answer.event(piece(text))
    await answer.event(piece("", "length"))
    await answer.event({"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 2}})
    await answer.event("[DONE]")
    await answer.end_stream()


def refusing(status, *, after=0):
    async def handler(request, answer):
        if len(server_requests) >= after:
            await answer.json(status, {"error": f"no, {SECRET}"})
        else:
            await answer.json(200, completion("ab"))
        server_requests.append(request)

    server_requests = []
    return handler


def test_a_report_with_the_log_it_is_made_from(measure, tmp_path, monkeypatch):
    monkeypatch.setenv("SERVER_KEY", SECRET)
    result, log = tmp_path / "result.json", tmp_path / "log.jsonl"
    with serving(_stream) as server:
        outcome = measure(
            *(server.url, "--concurrency", 2, "--num-requests", 5, "--api-key-env", "SERVER_KEY", "--ignore-eos"),
            *("--json", result, "--request-log", log),
        )
    assert outcome.status == 0, outcome.err
    assert server.posts[0].headers["authorization"] == f"Bearer {SECRET}"
    assert server.posts[0].body["ignore_eos"] is True
    for text in (outcome.out, outcome.err, result.read_text(), log.read_text()):
        assert SECRET not in text
    for words in (
        f"Base URL                                        {server.url}",
        "Request Throughput (req/sec)",
        "Average time-to-first-token [TTFT] (ms)",
        "New tokens counted by                           usage 5",
        "Failed                                          none",
        "TTFT (ms)",
    ):
        assert words in outcome.out
    assert "Per GPU" not in outcome.out
    rows = [json.loads(line) for line in log.read_text().splitlines()]
    assert [(row["task_id"], row["text"], row["counted_by"], row["failure"]) for row in rows] == [
        (index, "ab", "usage", None) for index in range(5)
    ]
    values = json.loads(result.read_text())
    seconds = max(row["end_s"] for row in rows) - min(row["arrival_s"] for row in rows)
    assert values["performance"]["total_latency_ms"] == pytest.approx(seconds * 1e3)
    assert values["performance"]["request_throughput_req_s"] == pytest.approx(5 / seconds)
    assert values["performance"]["system_output_throughput_tok_s"] == pytest.approx(
        sum(row["output_tokens"] for row in rows) / seconds
    )
    ttfts = [(row["token_times_s"][0] - row["arrival_s"]) * 1e3 for row in rows]
    assert values["streaming_metrics"]["avg_ttft_ms"] == pytest.approx(sum(ttfts) / 5)
    assert values["streaming_metrics"]["ttft_percentiles"]["p50"] == pytest.approx(sorted(ttfts)[2])


def test_some_failures_are_counted_and_status_1(measure, tmp_path, monkeypatch):
    monkeypatch.setenv("SERVER_KEY", SECRET)
    log = tmp_path / "log.jsonl"
    with serving(refusing(500, after=4)) as server:
        outcome = measure(
            *(server.url, "--no-streaming", "--concurrency", 1, "--warmup", 2, "--api-key-env", "SERVER_KEY"),
            *("--request-log", log),
        )
    assert outcome.status == 1, outcome.err
    assert "Failed                                          server_error 4" in outcome.out
    assert "server_error, for example: http://127.0.0.1" in outcome.out
    assert "Number of requests                              2" in outcome.out
    assert SECRET not in outcome.out + log.read_text()
    assert [json.loads(line)["failure"] and "server_error" for line in log.read_text().splitlines()] == [
        *[None] * 2,
        *["server_error"] * 4,
    ]


@pytest.mark.parametrize(("status", "words"), [(401, "The key in SERVER_KEY was sent"), (404, "status 404")])
def test_a_refusal_is_one_line_and_status_2(measure, tmp_path, monkeypatch, status, words):
    monkeypatch.setenv("SERVER_KEY", SECRET)
    result = tmp_path / "result.json"
    with serving(refusing(status)) as server:
        outcome = measure(server.url, "--json", result, "--api-key-env", "SERVER_KEY", "--max-retries", 0)
    assert outcome.status == 2
    assert outcome.err.startswith(f"Error: {server.url}: ")
    assert words in outcome.err
    assert SECRET not in outcome.err
    assert outcome.err.count("\n") == 1
    assert not result.exists()


def test_connection_refused_is_one_line_and_status_2(measure):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        outcome = measure(f"http://127.0.0.1:{free.getsockname()[1]}/v1")
    assert outcome.status == 2
    assert "connection refused: nothing listens there." in outcome.err
    assert outcome.err.count("\n") == 1


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--api-key-env", SECRET), "found a variable that is not set"),
        (("--api-key-env", "SERVER_KEY"), "found the variable SERVER_KEY that is not set"),
        (("--timeout", "0"), "timeout: found 0.0"),
        (("--concurrency", "0"), "concurrency: found 0"),
        (("--api", "chat"), "line 1: found token ids without a prompt"),
        (("--checkpoint", "nowhere"), "nowhere/tokenizer.json: no such file"),
        (("--json", "."), "found a directory"),
    ],
)
def test_impossible_arguments_are_one_line_and_status_2(measure, monkeypatch, options, words):
    monkeypatch.delenv("SERVER_KEY", raising=False)
    outcome = measure("http://127.0.0.1:9/v1", *options)
    assert outcome.status == 2
    assert words in outcome.err
    assert SECRET not in outcome.err
    assert outcome.err.count("\n") == 1


def test_a_url_without_a_scheme(measure):
    outcome = measure("localhost:8000/v1")
    assert outcome.status == 2
    assert "Write http://localhost:8000/v1" in outcome.err
    assert outcome.err.count("\n") == 1


@pytest.mark.parametrize(("good", "status"), [(0, 2), (2, 1)])
def test_a_server_cannot_write_to_the_terminal(measure, good, status):
    async def handler(request, answer):
        if len(server.posts) > good:
            await answer.body(500, b"\x1b[2J\x1b]0;title\x07[bold]x[/bold]")
        else:
            await answer.json(200, completion("ab"))

    with serving(handler) as server:
        outcome = measure(server.url, "--warmup", 0, "--no-streaming", "--concurrency", 1)
    assert outcome.status == status
    shown = outcome.out + outcome.err
    assert "\x1b" not in shown
    assert "\\x1b[2J" in shown
    assert "[bold]x[/bold]" in shown
