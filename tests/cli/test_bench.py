import json


def test_latency_report(command, network, checkpoint, tmp_path):
    outcome = command(
        *("bench", "latency", network, "-c", checkpoint[0], "--input-len", 20, "--output-len", 4, "--batch-size", 2),
        *("--warmup", 1, "--iterations", 2, "--json", tmp_path / "latency.json"),
    )
    assert outcome.status == 0, outcome.err
    report = json.loads((tmp_path / "latency.json").read_text())
    assert report["request_info"]["num_requests"] == 4
    performance = report["performance"]
    seconds = performance["total_latency_ms"] / 1e3
    assert performance["system_output_throughput_tok_s"] * seconds == 4 * 4


def test_a_batch_over_the_limits_is_one_line_and_status_2(command, network, checkpoint):
    outcome = command("bench", "latency", network, "-c", checkpoint[0], "--batch-size", 1000)
    assert outcome.status == 2
    assert "batch_size: found 1000" in outcome.err
    assert outcome.err.count("\n") == 1
