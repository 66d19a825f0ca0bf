import io
import json
import shutil
from pathlib import Path

import onnx
import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.support.quantized_cache import greedy_ids
from trtllm_mla.checkpoint.tokenizer import TextStream
from trtllm_mla.config import MlaPluginConfig
from trtllm_mla.network.directory import convert
from trtllm_mla.runtime.executors import factory

EXAMPLE = Path("examples/tiny-mla")
TOKENS = 7
PROMPTS = ([3, 1, 4, 1, 5, 9, 2, 6, 5, 3], [2, 7, 1], [8] * 40)


def expected_ids(model, prompt, count=TOKENS):
    with torch.inference_mode():
        output = model.generate(torch.tensor([prompt]), max_new_tokens=count, do_sample=False, pad_token_id=0)
    return output[0, len(prompt) :].tolist()


def ids(prompt):
    return ",".join(map(str, prompt))


@pytest.mark.parametrize("extra", [[], ["--max-chunk-tokens", "3"], ["--max-chunk-tokens", "9"]])
def test_json_holds_the_tokens_of_transformers_and_nothing_else_is_printed(command, network, checkpoint, extra):
    prompt = PROMPTS[0]
    outcome = command(
        *("generate", network, "--checkpoint", checkpoint[0], "--input-ids", ids(prompt)),
        *("--max-new-tokens", TOKENS, "--json", *extra),
    )
    assert outcome.status == 0
    assert outcome.json["output_ids"] == expected_ids(checkpoint[1], prompt)
    assert outcome.err == ""


def test_prompts_of_one_call_are_served_together(command, network, checkpoint):
    options = [option for prompt in PROMPTS for option in ("--input-ids", ids(prompt))]
    outcome = command("generate", network, "-c", checkpoint[0], *options, "--max-new-tokens", TOKENS, "--json")
    results = outcome.json["results"]
    assert [entry["output_ids"] for entry in results] == [expected_ids(checkpoint[1], prompt) for prompt in PROMPTS]


def test_the_interpreter_gives_the_same_tokens(command, network, checkpoint):
    outcome = command(
        *("generate", network, "-c", checkpoint[0], "--input-ids", ids(PROMPTS[0]), "--max-new-tokens", 3),
        *("--executor", "interpreter", "--json"),
    )
    assert outcome.json["output_ids"] == expected_ids(checkpoint[1], PROMPTS[0], 3)


@pytest.fixture(scope="module")
def quantized_ids(quantized, checkpoint):
    """What transformers continues the prompts with, reading a cache that is quantised like the network's."""
    layout, scales = quantized.row_layout, quantized.latent_scales
    return [greedy_ids(checkpoint[1], prompt, TOKENS, layout, scales) for prompt in PROMPTS]


@pytest.mark.parametrize("extra", [[], ["--max-chunk-tokens", "3"], ["--max-chunk-tokens", "9"]])
def test_a_quantised_cache_gives_the_tokens_of_transformers_with_such_a_cache(
    command, quantized, checkpoint, quantized_ids, extra
):
    """Whether prompts run whole or in chunks, absorbed or not, and beside others that decode already."""
    options = [option for prompt in PROMPTS for option in ("--input-ids", ids(prompt))]
    outcome = command(
        *("generate", quantized.path, "-c", checkpoint[0], *options, "--max-new-tokens", TOKENS, "--json", *extra)
    )
    assert [entry["output_ids"] for entry in outcome.json["results"]] == quantized_ids


def test_quantisation_shows_in_those_tokens(checkpoint, quantized_ids):
    assert quantized_ids != [expected_ids(checkpoint[1], prompt) for prompt in PROMPTS]


def test_the_interpreter_gives_the_same_tokens_with_a_quantised_cache(command, quantized, checkpoint, quantized_ids):
    outcome = command(
        *("generate", quantized.path, "-c", checkpoint[0], "--input-ids", ids(PROMPTS[0]), "--max-new-tokens", 3),
        *("--executor", "interpreter", "--json", "--max-chunk-tokens", 9),
    )
    assert outcome.json["output_ids"] == quantized_ids[0][:3]


def test_token_ids_are_printed_where_there_is_no_tokenizer(command, network, checkpoint):
    outcome = command("generate", network, "-c", checkpoint[0], "--input-ids", "1,2", "--max-new-tokens", 2)
    assert outcome.out.strip() == ids(expected_ids(checkpoint[1], [1, 2], 2))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "Found no prompt"),
        (["--input-ids", "1,b"], "found '1,b', expected whole numbers"),
        (["--input-ids", "1,131"], "token id 131"),
        (["--input-ids", "-1"], "token id -1"),
        (["--input-ids", "1", "--max-new-tokens", "0"], "max_new_tokens: found 0"),
        (["--input-ids", "1", "--max-new-tokens", "100000"], "max_seq_len"),
        (["--input-ids", ids([1] * 600)], "expected at most max_input_len"),
        (["--input-ids", "1", "--temperature", "-1"], "temperature: found -1"),
        (["--input-ids", "1", "--threads", "0"], "num_threads: found 0, expected 1 to"),
        (["--input-ids", "1", "--threads", str(2**70)], "expected 1 to"),
        (["--prompt", "text"], "tokenizer.json: no such file"),
        (["--input-ids", "1", "--config", "none.json"], "none.json: no such file"),
    ],
)
def test_mistakes_are_one_line_and_status_2(command, network, checkpoint, options, message):
    outcome = command("generate", network, "-c", checkpoint[0], *options)
    assert outcome.status == 2
    assert outcome.out == ""
    assert outcome.err.startswith("Error: ")
    assert outcome.err.count("\n") == 1
    assert message in outcome.err


def test_a_config_sets_the_limits(command, network, checkpoint, tmp_path):
    path = tmp_path / "build.json"
    path.write_text(json.dumps({"max_seq_len": 8, "max_batch_size": 1, "max_num_tokens": 4}))
    outcome = command(
        *("generate", network, "-c", checkpoint[0], "--input-ids", ids(PROMPTS[0]), "--config", path),
    )
    assert outcome.status == 2
    assert "expected at most max_input_len = 7" in outcome.err


def test_more_prompts_than_run_at_once_share_the_pool_of_an_engine(
    command, network, checkpoint, tmp_path, monkeypatch
):
    """An engine accepts no pool larger than its limits fill, so requests wait for pages."""
    pools = []
    make_executor = factory.make_executor
    monkeypatch.setattr(
        factory,
        "make_executor",
        lambda *arguments, **values: pools.append(values["num_pages"]) or make_executor(*arguments, **values),
    )
    path = tmp_path / "build.json"
    path.write_text(json.dumps({"max_seq_len": 20, "max_batch_size": 2}))
    prompts = [[3, 1, 4], [1, 5], [9, 2, 6, 5], [3, 5], [8] * 13]
    options = [option for prompt in prompts for option in ("--input-ids", ids(prompt))]
    outcome = command(
        *("generate", network, "-c", checkpoint[0], *options, "--config", path, "--max-new-tokens", TOKENS, "--json")
    )
    assert pools == [2 * 2]
    results = outcome.json["results"]
    assert [entry["output_ids"] for entry in results] == [expected_ids(checkpoint[1], prompt) for prompt in prompts]


@pytest.mark.parametrize(("options", "expected"), [([], True), (["--no-cuda-graph"], False)])
def test_cuda_graphs_can_be_left_out(command, network, checkpoint, monkeypatch, options, expected):
    asked = []
    make_executor = factory.make_executor
    monkeypatch.setattr(
        factory,
        "make_executor",
        lambda *arguments, **values: asked.append(values["use_cuda_graph"]) or make_executor(*arguments, **values),
    )
    arguments = ("--input-ids", "1,2", "--max-new-tokens", 1, "--json")
    assert command("generate", network, "-c", checkpoint[0], *arguments, *options).status == 0
    assert asked == [expected]


def test_weights_that_are_not_numbers_are_one_line(command, network, checkpoint, tmp_path):
    shutil.copytree(checkpoint[0], tmp_path / "checkpoint")
    file = tmp_path / "checkpoint" / "model.safetensors"
    tensors = load_file(file)
    tensors["model.norm.weight"].fill_(float("nan"))
    save_file(tensors, file)
    outcome = command("generate", network, "-c", tmp_path / "checkpoint", "--input-ids", "1", "--json")
    assert outcome.status == 2
    assert outcome.out == ""
    assert "is nan, expected a finite largest logit" in outcome.err
    assert outcome.err.count("\n") == 1


def test_a_graph_that_onnx_runtime_refuses_is_one_line(command, network, checkpoint, tmp_path):
    shutil.copytree(network, tmp_path / "network")
    model = onnx.load(tmp_path / "network" / "network.onnx")
    # Its inputs, outputs and operations are a network's; one of its operators is not there.
    next(node for node in model.graph.node if node.op_type == "Gather").op_type = "Gathered"
    onnx.save(model, tmp_path / "network" / "network.onnx")
    outcome = command("generate", tmp_path / "network", "-c", checkpoint[0], "--input-ids", "1", "--json")
    assert outcome.status == 2
    assert outcome.out == ""
    assert "cannot load the network" in outcome.err
    assert outcome.err.count("\n") == 1


def edited(checkpoint, path, **values):
    shutil.copytree(checkpoint[0], path)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | values))
    return path


def test_a_checkpoint_of_the_same_shapes_but_another_config_is_refused(command, network, checkpoint, tmp_path):
    other = edited(checkpoint, tmp_path / "other", rms_norm_eps=0.5)
    outcome = command("generate", network, "-c", other, "--input-ids", "1,2,3")
    assert outcome.status == 2
    assert "rms_norm_eps: found 0.5, the network in" in outcome.err


def test_a_fine_tune_may_have_other_stop_tokens(command, network, checkpoint, tmp_path):
    other = edited(checkpoint, tmp_path / "other", eos_token_id=3, max_position_embeddings=77)
    assert command("generate", network, "-c", other, "--input-ids", "1,2,3", "--json").status == 0


def test_text_that_is_not_utf8_is_one_line(command, network):
    outcome = command("generate", network, "-c", EXAMPLE, "--prompt", "a\udcff")
    assert outcome.status == 2
    assert "position 1, which is no character. Pass text in UTF-8" in outcome.err
    assert outcome.err.count("\n") == 1


def test_characters_that_standard_output_does_not_have(command, tmp_path, monkeypatch):
    monkeypatch.setattr(TextStream, "push", lambda stream, token: "\u00ef\u540d")
    convert(EXAMPLE, tmp_path / "network", plugin=MlaPluginConfig())
    out = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr("sys.stdout", out)
    outcome = command(
        *("generate", tmp_path / "network", "-c", EXAMPLE, "--input-ids", "1", "--max-new-tokens", 1, "--ignore-eos")
    )
    assert outcome.status == 0, outcome.err
    assert out.buffer.getvalue().startswith(rb"\xef\u540d")
