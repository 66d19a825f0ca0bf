import io
import json
import re

import pytest

from tests.benchmark.recount import flatten, read_log, recount
from trtllm_mla.benchmark import latency, throughput
from trtllm_mla.cli.bench import PolicyName, _override
from trtllm_mla.cli.console import OUT
from trtllm_mla.config import BuildConfig
from trtllm_mla.errors import UserError
from trtllm_mla.runtime.executors.decode_graphs import GraphStatistics
from trtllm_mla.runtime.scheduler import SchedulingPolicy


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
    assert performance["system_output_throughput_tok_s"] * seconds == pytest.approx(4 * 4)


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


@pytest.mark.parametrize("module", [latency, throughput])
@pytest.mark.parametrize(("options", "expected"), [([], True), (["--no-cuda-graph"], False)])
def test_cuda_graphs_can_be_left_out(
    command, network, checkpoint, tmp_path, monkeypatch, dataset, module, options, expected
):
    """They are counted in the report; here a stand-in has a count of its own."""
    make_executor = module.make_executor

    def make(*arguments, use_cuda_graph, **values):
        executor = make_executor(*arguments, **values)
        executor.graph_statistics = GraphStatistics(3, 40, 5) if use_cuda_graph else None
        return executor

    monkeypatch.setattr(module, "make_executor", make)
    arguments = {
        latency: ("latency", network, "--input-len", 5, "--output-len", 2, "--iterations", 1),
        throughput: ("throughput", network, "--dataset", dataset),
    }[module]
    outcome = command("bench", *arguments, "-c", checkpoint[0], "--json", tmp_path / "report.json", *options)
    assert outcome.status == 0, outcome.err
    found = json.loads((tmp_path / "report.json").read_text())["trtllm_mla"]["cuda_graphs"]
    assert found == ({"num_captured": 3, "num_replayed": 40, "num_eager": 5} if expected else None)


def test_a_batch_over_the_limits_is_one_line_and_status_2(command, network, checkpoint):
    outcome = command("bench", "latency", network, "-c", checkpoint[0], "--batch-size", 1000)
    assert outcome.status == 2
    assert "batch_size: found 1000" in outcome.err
    assert outcome.err.count("\n") == 1


@pytest.fixture
def dataset(tmp_path):
    path = tmp_path / "data.jsonl"
    lines = [
        {
            "task_id": number,
            "input_ids": [3, 5, 7, 9, *range(number + 1)],
            "output_tokens": 40 if number == 6 else 2 + number % 3,
        }
        for number in range(7)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_throughput_report_and_log_agree(command, network, checkpoint, dataset, tmp_path):
    outcome = command(
        *("bench", "throughput", network, "-c", checkpoint[0], "--dataset", dataset, "--concurrency", 3),
        *("--streaming", "--max-batch-size", 2, "--max-num-tokens", 16, "--no-block-reuse", "--num-pages", 20),
        *("--policy", "max_utilization", "--request-rate", 300, "--seed", 2, "--warmup", 1, "--threads", 1),
        *("--json", tmp_path / "result.json", "--request-log", tmp_path / "log.jsonl"),
    )
    assert outcome.status == 0, outcome.err
    values = json.loads((tmp_path / "result.json").read_text())
    expected = recount(read_log(tmp_path / "log.jsonl"))
    assert flatten({name: values[name] for name in expected}) == pytest.approx(flatten(expected), rel=1e-9)
    assert values["world_info"]["scheduling_policy"] == "MAX_UTILIZATION"
    assert (values["world_info"]["max_batch_size"], values["world_info"]["max_num_tokens"]) == (2, 16)
    ours = values["trtllm_mla"]
    assert ours["num_pages"] == 20
    assert ours["enable_block_reuse"] is False
    assert ours["options"]["concurrency"] == 3
    assert ours["options"]["request_rate"] == 300
    assert f"{values['performance']['system_output_throughput_tok_s']:.4f}" in outcome.out
    assert "Poisson" in outcome.out
    assert "Serving" not in outcome.err, "no progress where nobody watches"


def test_throughput_is_repeatable_but_for_time(command, network, checkpoint, dataset, tmp_path):
    results = []
    for name in ("a.json", "b.json"):
        outcome = command(
            *("bench", "throughput", network, "-c", checkpoint[0], "--dataset", dataset, "--num-requests", 5),
            *("--json", tmp_path / name),
        )
        assert outcome.status == 0, outcome.err
        results.append(json.loads((tmp_path / name).read_text()))
    first, second = ({**item["trtllm_mla"], **item["dataset"]} for item in results)
    for key in ("chunks", "pages_peak", "prompt_tokens", "reused_tokens", "options", "sha256", "isl_stats"):
        assert first[key] == second[key]


def test_latency_of_a_dataset(command, network, checkpoint, dataset, tmp_path):
    outcome = command(
        *("bench", "latency", network, "-c", checkpoint[0], "--dataset", dataset, "--num-requests", 4),
        *("--json", tmp_path / "latency.json", "--request-log", tmp_path / "log.jsonl"),
    )
    assert outcome.status == 0, outcome.err
    values = json.loads((tmp_path / "latency.json").read_text())
    assert values["trtllm_mla"]["kind"] == "latency"
    assert values["trtllm_mla"]["options"]["concurrency"] == 1
    assert [row["output_tokens"] for row in values["trtllm_mla"]["requests"]] == [2, 3, 4, 2]
    assert values["streaming_metrics"]["avg_ttft_ms"] > 0
    assert len(read_log(tmp_path / "log.jsonl")) == 4


def test_latency_of_batches_writes_a_log_too(command, network, checkpoint, tmp_path):
    outcome = command(
        *("bench", "latency", network, "-c", checkpoint[0], "--input-len", 5, "--output-len", 3, "--batch-size", 2),
        *("--warmup", 1, "--iterations", 3, "--json", tmp_path / "out.json", "--request-log", tmp_path / "log.jsonl"),
    )
    assert outcome.status == 0, outcome.err
    values = json.loads((tmp_path / "out.json").read_text())
    expected = recount(read_log(tmp_path / "log.jsonl"))
    assert flatten({name: values[name] for name in expected}) == pytest.approx(flatten(expected), rel=1e-9)
    assert len(values["trtllm_mla"]["requests"]) == 6


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("latency", "--batch-size", 2), "--batch-size: found beside --dataset"),
        (("latency", "--input-len", 2), "--input-len: found beside --dataset"),
        (("throughput", "--concurrency", 0), "concurrency: found 0"),
        (("throughput", "--request-rate", 0), "request_rate: found 0"),
        (("throughput", "--num-pages", 3, "--cache-tokens", 9), "num_pages and cache_tokens: found both"),
        (("throughput", "--max-batch-size", 0), "command line: max_batch_size: found 0"),
        (("throughput", "--max-batch-size", 9, "--max-num-tokens", 8), "max_batch_size: found 9, expected at most"),
        (("throughput", "--num-pages", 1), "line 7: The request's 51 tokens need 4 pages"),
    ],
)
def test_mistakes_are_one_line_and_status_2(command, network, checkpoint, dataset, arguments, message):
    kind, *options = arguments
    outcome = command("bench", kind, network, "-c", checkpoint[0], "--dataset", dataset, *options)
    assert outcome.status == 2
    assert re.search(message, outcome.err)
    assert outcome.err.count("\n") == 1
    assert outcome.out == ""


@pytest.mark.parametrize("option", ["--json", "--request-log"])
@pytest.mark.parametrize("kind", ["throughput", "latency"])
def test_outputs_are_checked_before_anything_runs(command, network, checkpoint, dataset, kind, option):
    outcome = command(
        "bench", kind, network, "-c", checkpoint[0], "--dataset", dataset, option, dataset / "below a file.json"
    )
    assert outcome.status == 2
    assert "expected a writable directory" in outcome.err
    assert outcome.out == ""


def test_every_policy_is_offered():
    assert [item.value for item in PolicyName] == [item.value for item in SchedulingPolicy]


def test_limits_of_an_engine_can_only_be_lowered(tmp_path):
    limits = BuildConfig(max_batch_size=4, max_num_tokens=64, opt_batch_size=3, max_seq_len=99)
    changed = _override(tmp_path, limits, {"max_batch_size": 8, "max_num_tokens": None})
    assert (changed.max_batch_size, changed.max_num_tokens, changed.max_seq_len) == (8, 64, 99)
    (tmp_path / "rank0.engine").touch()
    assert _override(tmp_path, limits, {"max_batch_size": 2, "max_num_tokens": 64}).max_batch_size == 2
    assert _override(tmp_path, limits, {"max_batch_size": None}) is limits
    with pytest.raises(UserError, match=f"--max-batch-size: found 8, expected at most 4, which {tmp_path} was built"):
        _override(tmp_path, limits, {"max_batch_size": 8})


@pytest.mark.parametrize("option", [("--num-requests", 3), ("--stop-at-eos",)])
def test_options_of_a_dataset_need_one(command, network, checkpoint, option):
    outcome = command("bench", "latency", network, "-c", checkpoint[0], *option)
    assert outcome.status == 2
    assert f"{option[0]}: found without --dataset" in outcome.err


@pytest.mark.parametrize("kind", ["throughput", "latency"])
def test_help_has_an_example_and_says_what_stop_tokens_do(command, kind):
    outcome = command("bench", kind, "--help")
    assert outcome.status == 0
    assert f"Example: trtllm-mla bench {kind}" in outcome.out
    assert "Stop tokens are ignored" in outcome.out


@pytest.mark.parametrize("kind", ["latency", "throughput"])
def test_a_reader_that_leaves_costs_no_result(command, network, checkpoint, dataset, tmp_path, monkeypatch, kind):
    def leave(*arguments, **options):
        raise BrokenPipeError

    monkeypatch.setattr(OUT, "print", leave)
    monkeypatch.setattr(OUT, "rule", leave)
    work = {
        "latency": ("--input-len", 5, "--output-len", 2, "--iterations", 1, "--warmup", 0),
        "throughput": ("--dataset", dataset),
    }[kind]
    outcome = command(
        *("bench", kind, network, "-c", checkpoint[0], *work),
        *("--json", tmp_path / "result.json", "--request-log", tmp_path / "log.jsonl"),
    )
    assert outcome.status != 0
    assert json.loads((tmp_path / "result.json").read_text())["trtllm_mla"]["kind"] == kind
    assert len((tmp_path / "log.jsonl").read_text().splitlines()) == (1 if kind == "latency" else 7)


@pytest.mark.parametrize("other", ["same.json", "link.json"])
def test_two_outputs_in_one_file_are_refused(command, network, checkpoint, tmp_path, other):
    (tmp_path / "link.json").symlink_to(tmp_path / "same.json")
    outcome = command(
        *("bench", "latency", network, "-c", checkpoint[0]),
        *("--json", tmp_path / "same.json", "--request-log", tmp_path / other),
    )
    assert outcome.status == 2
    assert outcome.err == (
        f"Error: --json and --request-log: found {tmp_path / other} for both, expected a file for each.\n"
    )
    assert not (tmp_path / "same.json").exists()


def test_names_that_standard_output_cannot_show(command, network, checkpoint, dataset, monkeypatch):
    named = dataset.rename(dataset.with_name("\u540d.jsonl"))
    out = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr("sys.stdout", out)
    outcome = command("bench", "throughput", network, "-c", checkpoint[0], "--dataset", named, "--num-requests", 1)
    assert outcome.status == 0, outcome.err
    out.flush()
    assert rb"\u540d.jsonl" in out.buffer.getvalue()
