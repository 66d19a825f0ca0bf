import json
from pathlib import Path

import pytest

from trtllm_mla.benchmark.result_files import load_result
from trtllm_mla.config import MlaPluginConfig
from trtllm_mla.network.directory import convert

EXAMPLE = Path(__file__).parents[2] / "examples" / "tiny-mla"


@pytest.fixture(scope="module")
def example(tmp_path_factory):
    """The example's network."""
    return convert(EXAMPLE, tmp_path_factory.mktemp("example") / "network", plugin=MlaPluginConfig()).path


def test_the_example(command, example, tmp_path):
    outcome = command(
        *(
            "bench",
            "threshold",
            example,
            "-c",
            EXAMPLE,
            "--thresholds",
            "1,33,64",
            "--input-len",
            40,
            "--output-len",
            3,
        ),
        *("--batch-size", 2, "--chunk-lengths", "8,48", "--history", "0,100", "--warmup", 1, "--iterations", 2),
        *("--threads", 1, "--json", tmp_path / "threshold.json", "--plot", tmp_path / "threshold.svg"),
    )
    assert outcome.status == 0, outcome.err
    block = load_result(tmp_path / "threshold.json").own.threshold
    assert [(row.threshold, row.context_tokens, row.absorbed_tokens) for row in block.workloads] == [
        (1, 80, 0),
        (33, 80, 0),
        (64, 0, 80),
    ]
    assert [(row.history, row.num_tokens) for row in block.chunks] == [(0, 8), (0, 48), (100, 8), (100, 48)]
    assert block.predicted_limit == pytest.approx(4224 / 104)
    assert "No recommendation for onnxruntime with tiny-mla" in outcome.out
    assert block.recommendation.text.split(". ")[0] in " ".join(outcome.out.split())
    assert (tmp_path / "threshold.svg").read_text().startswith("<?xml")
    assert "recommended" not in (tmp_path / "threshold.svg").read_text()


def test_chunks_of_the_workload(command, example, tmp_path):
    outcome = command(
        *("bench", "threshold", example, "-c", EXAMPLE, "--thresholds", "20", "--input-len", 40, "--output-len", 3),
        *("--max-chunk-tokens", 24, "--chunk-lengths", "8", "--history", "0", "--warmup", 0, "--iterations", 1),
        *("--json", tmp_path / "threshold.json"),
    )
    assert outcome.status == 0, outcome.err
    (row,) = json.loads((tmp_path / "threshold.json").read_text())["trtllm_mla"]["threshold"]["workloads"]
    assert (row["context_tokens"], row["absorbed_tokens"]) == (24, 16)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--thresholds", "1,many"], "--thresholds: found '1,many', expected numbers separated by commas"),
        (["--thresholds", "-1"], "--thresholds: found -1"),
        (["--chunk-lengths", "1000000"], "A chunk of 1000000 tokens after 0 cached ones"),
        (["--history", "x"], "--history: found 'x'"),
        (["--plot", "figure.gif"], "figure.gif: found the ending '.gif', expected one of .svg"),
        (["--output-len", "1"], "output_len: found 1"),
    ],
)
def test_mistakes_are_one_line_and_status_2(command, example, arguments, message):
    outcome = command("bench", "threshold", example, "-c", EXAMPLE, *arguments)
    assert outcome.status == 2
    assert outcome.err.startswith(f"Error: {message}")
    assert outcome.err.count("\n") == 1


def test_help_has_an_example(command):
    assert "Example: trtllm-mla bench threshold network" in " ".join(
        command("bench", "threshold", "--help").out.split()
    )
