import json
from pathlib import Path

import pytest

from tests.benchmark.synthetic_results import make_result
from trtllm_mla.benchmark.result_files import load_result
from trtllm_mla.config import MlaPluginConfig
from trtllm_mla.network.directory import convert

EXAMPLE = Path(__file__).parents[2] / "examples" / "tiny-mla"


@pytest.fixture(scope="module")
def example(tmp_path_factory):
    """The example's network."""
    return convert(EXAMPLE, tmp_path_factory.mktemp("example") / "network", plugin=MlaPluginConfig()).path


def test_the_example_beside_hugging_face(command, example, tmp_path):
    outcome = command(
        *("bench", "compare", example, f"[/again]={example}", "-c", EXAMPLE, "--executors", "onnxruntime,huggingface"),
        *("--input-len", 20, "--output-len", 6, "--batch-size", 2, "--warmup", 1, "--iterations", 3, "--threads", 1),
        *("--json", tmp_path / "compare.json"),
    )
    assert outcome.status == 0, outcome.err
    block = load_result(tmp_path / "compare.json").own.compare
    assert [subject.name for subject in block.subjects] == ["onnxruntime", "huggingface", "[/again]"]
    # In float32 the greedy tokens are those of the model.
    assert [subject.same_tokens for subject in block.subjects] == [1, 1, 1]
    assert "Decode step, ms" in outcome.out
    assert "transformers" in outcome.out


def test_results_of_two_runs(command, tmp_path):
    paths = []
    for index in (1, 2):
        paths.append(tmp_path / f"run{index}.json")
        paths[-1].write_text(json.dumps(make_result(index, concurrency=index)))
    outcome = command("bench", "compare", *paths, "--json", tmp_path / "compare.json")
    assert outcome.status == 0, outcome.err
    first, second = (load_result(path).performance.request_throughput_req_s for path in paths)
    assert f"x {second / first:.3f}" in outcome.out
    assert load_result(tmp_path / "compare.json").own.compare.mode == "files"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["absent.json"], "absent.json: no such file"),
        ([EXAMPLE], f"{EXAMPLE}: found a directory, expected results to read. Pass --checkpoint"),
        (["a.json", "x=b.json"], "x=b.json: found a directory"),
        (["absent", "-c", EXAMPLE], "absent: no such directory"),
        (["=absent", "-c", EXAMPLE], "=absent: found no name, expected NAME=DIRECTORY"),
        (["name=", "-c", EXAMPLE], "name=: found no directory, expected NAME=DIRECTORY"),
        (["absent", "-c", EXAMPLE, "--executors", "vllm"], "--executors: found 'vllm'"),
    ],
)
def test_mistakes_are_one_line_and_status_2(command, arguments, message):
    outcome = command("bench", "compare", *arguments)
    assert outcome.status == 2
    assert outcome.err.startswith(f"Error: {message}")
    assert outcome.err.count("\n") == 1


def test_tensorrt_needs_a_gpu(command, example):
    outcome = command("bench", "compare", example, "-c", EXAMPLE, "--executors", "tensorrt")
    assert outcome.status == 2
    assert outcome.err.count("\n") == 1
