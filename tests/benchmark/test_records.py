import json
from dataclasses import replace

import pytest

from trtllm_mla.benchmark.records import RequestRecord, write_request_log

RECORD = RequestRecord(7, 5, 3, 1.0, (1.5, 2.0, 4.0), 4.0, "length", num_preemptions=2, reused_tokens=4)


def test_latency_ttft_and_tpot():
    assert (RECORD.latency, RECORD.ttft, RECORD.tpot) == (3.0, 0.5, 1.25)


def test_a_request_of_one_token_has_no_tpot():
    one = replace(RECORD, output_tokens=1, token_times=(1.5,), end=1.5)
    assert (one.ttft, one.tpot) == (0.5, None)


def test_a_client_that_does_not_stream_has_neither():
    whole = replace(RECORD, token_times=())
    assert (whole.ttft, whole.tpot, whole.latency) == (None, None, 3.0)
    assert whole.to_json()["first_token_s"] is None


def test_several_tokens_at_one_moment():
    """A server may send three tokens in two pieces: the tokens count, not the pieces."""
    assert replace(RECORD, token_times=(2.0, 4.0)).tpot == 1.0


@pytest.mark.parametrize(
    ("reason", "completed"), [("length", True), ("stop", True), ("cancelled", False), ("error", False)]
)
def test_completed(reason, completed):
    assert replace(RECORD, finish_reason=reason).is_completed is completed


@pytest.mark.parametrize(
    "values",
    [
        {"arrival": 1.6},
        {"token_times": (2.0, 1.9, 4.0)},
        {"end": 3.9},
        {"token_times": (1.5, 2.0, 3.0, 4.0)},
        {"token_times": (), "end": 0.5},
    ],
)
def test_impossible_records_are_refused(values):
    with pytest.raises(ValueError, match="task 7: found"):
        replace(RECORD, **values)


def test_log(tmp_path):
    write_request_log(tmp_path / "log.jsonl", [RECORD, replace(RECORD, task_id=8)])
    first, second = (json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines())
    assert first == {
        "task_id": 7,
        "input_tokens": 5,
        "output_tokens": 3,
        "arrival_s": 1.0,
        "first_token_s": 1.5,
        "end_s": 4.0,
        "finish_reason": "length",
        "num_preemptions": 2,
        "reused_tokens": 4,
        "token_times_s": [1.5, 2.0, 4.0],
    }
    assert second["task_id"] == 8
