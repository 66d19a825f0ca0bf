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


def test_a_quantised_cache_is_measured_in_its_own_bytes(command, quantized, checkpoint, tmp_path):
    outcome = command(
        *("bench", "latency", quantized.path, "-c", checkpoint[0], "--input-len", 20, "--output-len", 4),
        *("--warmup", 0, "--iterations", 1, "--json", tmp_path / "latency.json"),
    )
    assert outcome.status == 0, outcome.err
    layout = quantized.row_layout
    codes = {"fp8": 96, "nvfp4": 48}[layout.dtype]
    # Two layers, each with a section of scales and 32 bfloat16 elements; 24 tokens take 2 pages of 16.
    token = 2 * (codes + 16 + 64)
    report = json.loads((tmp_path / "latency.json").read_text())
    assert report["engine"]["kv_cache_dtype"] == layout.dtype
    assert report["trtllm_mla"]["cache_bytes_per_token"]["latent"] == token
    assert report["trtllm_mla"]["cache_bytes_pool"] == 32 * token
    assert report["trtllm_mla"]["cache_bytes_used"] == 32 * token
    assert f"latent cache {layout.dtype}" in outcome.out


def test_a_batch_over_the_limits_is_one_line_and_status_2(command, network, checkpoint):
    outcome = command("bench", "latency", network, "-c", checkpoint[0], "--batch-size", 1000)
    assert outcome.status == 2
    assert "batch_size: found 1000" in outcome.err
    assert outcome.err.count("\n") == 1
