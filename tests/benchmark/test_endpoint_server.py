"""Measuring a real server: ``transformers serve`` with the example checkpoint, on loopback and offline.

Slow, since a process with PyTorch and transformers has to start, and the same model runs here to compare with.
"""

import json
import os
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

import httpx2
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from trtllm_mla.benchmark.endpoint import CountedBy, EndpointOptions, bench_endpoint
from trtllm_mla.benchmark.openai_endpoint import Api, Endpoint, EndpointError, FailureKind

EXAMPLE = Path(__file__).parents[2] / "examples" / "tiny-mla"
TEMPLATE = "{% for message in messages %}[{{ message.role }}] {{ message.content }}\n{% endfor %}[assistant] "
OUTPUT_TOKENS = (1, 2, 7, 24, 33, 40)

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def _no_proxy(monkeypatch):
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """The example with a chat template."""
    path = tmp_path_factory.mktemp("serve") / "tiny-mla"
    shutil.copytree(EXAMPLE, path)
    (path / "chat_template.jinja").write_text(TEMPLATE)
    return path


@pytest.fixture(scope="module")
def base_url(checkpoint):
    """A server of it, in float32."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    program = "from transformers.cli.transformers import main; main()"
    options = ["--host", "127.0.0.1", "--port", str(port), "--device", "cpu", "--dtype", "float32"]
    log = checkpoint.parent / "server.log"
    with log.open("wb") as output:
        server = subprocess.Popen(
            [sys.executable, "-c", program, "serve", checkpoint, *options],
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"},
        )
    try:
        deadline = time.monotonic() + 180
        while not healthy(f"http://127.0.0.1:{port}/health"):
            assert server.poll() is None, log.read_text()
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.1)
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        server.terminate()
        try:
            server.wait(10)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()


def healthy(url):
    try:
        return httpx2.get(url, trust_env=False).status_code == 200
    except httpx2.TransportError:
        return False


@pytest.fixture(scope="module")
def oracle(checkpoint):
    """What the model itself continues a prompt's token ids with, greedily."""
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)

    def generate(input_ids, max_new_tokens):
        ids = torch.tensor([input_ids])
        output = model.generate(ids, max_new_tokens=max_new_tokens, do_sample=False)[0, ids.shape[1] :]
        return output.tolist(), tokenizer.decode(output, skip_special_tokens=True)

    generate.tokenizer = tokenizer
    return generate


@pytest.fixture(scope="module")
def prompts():
    """Pieces of text that the model was not trained on, of different lengths."""
    text = (EXAMPLE / "held_out.txt").read_text()
    return [text[1000 * index : 1000 * index + 13 + 29 * index] for index in range(len(OUTPUT_TOKENS))]


def write_dataset(folder, prompts):
    path = folder / "data.jsonl"
    lines = [
        {
            "task_id": index,
            **({"prompt": prompt} if isinstance(prompt, str) else {"input_ids": prompt}),
            "output_tokens": count,
        }
        for index, (prompt, count) in enumerate(zip(prompts, OUTPUT_TOKENS, strict=True))
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def check_reply(reply, input_ids, output_tokens, oracle):
    expected_ids, expected_text = oracle(input_ids, output_tokens)
    record = reply.record
    assert reply.text == expected_text
    assert record.output_tokens == len(expected_ids)
    assert record.input_tokens == len(input_ids)
    assert record.finish_reason == ("length" if len(expected_ids) == output_tokens else "stop")
    assert reply.counted_by is CountedBy.USAGE


@pytest.mark.parametrize("streaming", [True, False])
def test_completions_are_those_of_the_model(base_url, checkpoint, oracle, prompts, tmp_path, streaming):
    options = EndpointOptions(concurrency=3, warmup=1, streaming=streaming)
    report = bench_endpoint(Endpoint(base_url, str(checkpoint)), write_dataset(tmp_path, prompts), options)
    assert not report.failures
    for prompt, count, reply in zip(prompts, OUTPUT_TOKENS, report.replies, strict=True):
        check_reply(reply, oracle.tokenizer(prompt)["input_ids"], count, oracle)
        assert bool(reply.record.token_times) is streaming
    values = report.to_json()
    seconds = values["performance"]["total_latency_ms"] / 1e3
    output_tokens = sum(reply.record.output_tokens for reply in report.replies)
    assert values["performance"]["system_output_throughput_tok_s"] == pytest.approx(output_tokens / seconds)
    assert ("streaming_metrics" in values) is streaming


def test_token_ids_are_sent_as_text(base_url, checkpoint, oracle, prompts, tmp_path):
    ids = [oracle.tokenizer(prompt)["input_ids"] for prompt in prompts]
    dataset = write_dataset(tmp_path, ids)
    endpoint = Endpoint(base_url, str(checkpoint))
    report = bench_endpoint(endpoint, dataset, EndpointOptions(warmup=0), checkpoint=EXAMPLE)
    for prompt_ids, count, reply in zip(ids, OUTPUT_TOKENS, report.replies, strict=True):
        check_reply(reply, prompt_ids, count, oracle)
    with pytest.raises(EndpointError, match=r"prompt must be a string.*pass --checkpoint to send text"):
        bench_endpoint(endpoint, dataset, EndpointOptions(warmup=1))


@pytest.mark.parametrize("streaming", [True, False])
def test_chat_is_that_of_the_model(base_url, checkpoint, oracle, prompts, tmp_path, streaming):
    endpoint = Endpoint(base_url, str(checkpoint), api=Api.CHAT)
    report = bench_endpoint(endpoint, write_dataset(tmp_path, prompts), EndpointOptions(warmup=1, streaming=streaming))
    assert not report.failures
    for prompt, count, reply in zip(prompts, OUTPUT_TOKENS, report.replies, strict=True):
        text = f"[user] {prompt}\n[assistant] "
        check_reply(reply, oracle.tokenizer(text, add_special_tokens=False)["input_ids"], count, oracle)


@pytest.mark.parametrize(
    ("change", "kind", "words"),
    [
        ({"model": "other"}, FailureKind.UNKNOWN_MODEL, "requested 'other'.*The server has '.*tiny-mla': pass one of"),
        (
            {"base_url": ""},
            FailureKind.NOT_FOUND,
            "The base URL has no /v1: try --base-url http://127.0.0.1:[0-9]+/v1",
        ),
    ],
)
def test_mistakes_are_one_line(base_url, checkpoint, prompts, tmp_path, change, kind, words):
    settings = {"base_url": base_url, "model": str(checkpoint), **change}
    settings["base_url"] = settings["base_url"] or base_url.removesuffix("/v1")
    with pytest.raises(EndpointError, match=words) as raised:
        bench_endpoint(Endpoint(**settings), write_dataset(tmp_path, prompts), EndpointOptions())
    assert raised.value.kind is kind


def test_a_key_that_the_server_does_not_know_is_named(base_url, checkpoint, prompts, tmp_path):
    with pytest.raises(EndpointError, match=r"status 422 .*ignore_eos") as raised:
        bench_endpoint(
            Endpoint(base_url, str(checkpoint)), write_dataset(tmp_path, prompts), EndpointOptions(ignore_eos=True)
        )
    assert raised.value.kind is FailureKind.REJECTED
