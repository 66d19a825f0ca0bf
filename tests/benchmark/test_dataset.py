"""Reading datasets, good and hostile."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import trtllm_mla.benchmark.dataset as dataset_module
from trtllm_mla.benchmark.dataset import check_entries, load_dataset, read_dataset
from trtllm_mla.checkpoint.tokenizer import TextCodec
from trtllm_mla.config import BuildConfig, MlaPluginConfig
from trtllm_mla.errors import UserError
from trtllm_mla.runtime.scheduler import SchedulerConfig

EXAMPLE = Path(__file__).parents[2] / "examples" / "tiny-mla"
VOCAB_SIZE = 258
GOOD = {"task_id": 0, "input_ids": [5, 6, 7], "output_tokens": 4}


def write(path, *lines):
    path.write_text("".join(f"{line if isinstance(line, str) else json.dumps(line)}\n" for line in lines))
    return path


def load(path, **values):
    return load_dataset(path, vocab_size=VOCAB_SIZE, checkpoint=EXAMPLE, **values)


def test_ids_logits_and_prompts(tmp_path):
    text = "The import statement"
    path = write(
        tmp_path / "data.jsonl",
        GOOD,
        {"task_id": -1, "logits": [0, 257], "output_tokens": 1},
        {"task_id": 9, "prompt": text, "output_tokens": 2, "media_paths": [], "lora": None, "lora_request": None},
        {"task_id": 10, "prompt": text, "input_ids": [3], "output_tokens": 2},
        {"task_id": 11, "logits": [1], "input_ids": [2], "output_tokens": 2},
        {"task_id": 12, "prompt": text, "input_ids": None, "output_tokens": 2},
    )
    entries = load(path)
    encoded = TextCodec.load(EXAMPLE).encode(text)
    assert [list(entry.input_ids) for entry in entries] == [[5, 6, 7], [0, 257], encoded, [3], [2], encoded]
    assert [entry.task_id for entry in entries] == [0, -1, 9, 10, 11, 12]
    assert [entry.lengths for entry in entries] == [
        (3, 4),
        (2, 1),
        (len(encoded), 2),
        (1, 2),
        (1, 2),
        (len(encoded), 2),
    ]
    assert [entry.line for entry in entries] == [1, 2, 3, 4, 5, 6]


def test_blank_lines_count_but_are_skipped(tmp_path):
    path = write(tmp_path / "data.jsonl", "", GOOD, "   ", GOOD | {"task_id": 1}, "")
    assert [(entry.task_id, entry.line) for entry in load(path)] == [(0, 2), (1, 4)]


def test_the_first_requests_are_taken_and_the_rest_is_not_read(tmp_path):
    path = write(tmp_path / "data.jsonl", GOOD, GOOD, "not JSON")
    assert len(load(path, max_requests=2)) == 2
    with pytest.raises(UserError, match="line 3"):
        load(path)


def test_a_last_line_without_its_end(tmp_path):
    (tmp_path / "data.jsonl").write_text(json.dumps(GOOD))
    assert len(load(tmp_path / "data.jsonl")) == 1


BAD_LINES = [
    ("{", "not valid JSON"),
    ("[" * 100_000, "not valid JSON"),
    ('{"task_id": 0, "task_id": 1}', "the key 'task_id' appears twice"),
    ("[1, 2]", "found a list, expected an object"),
    ("3", "found a int, expected an object"),
    ({"input_ids": [1], "output_tokens": 1}, "task_id: missing"),
    ({"task_id": 0, "input_ids": [1]}, "output_tokens: missing"),
    ({"task_id": 0, "output_tokens": 1}, "prompt and input_ids: found neither"),
    (GOOD | {"temperature": 1}, "temperature: unknown key; the keys here are task_id, output_tokens, prompt"),
    (GOOD | {"media_paths": ["a.png"]}, "media_paths: found a value, expected none: images"),
    (GOOD | {"lora": {"name": "x"}}, "lora: found a value, expected none: LoRA adapters"),
    (GOOD | {"lora_request": {"name": "x"}}, "lora_request: found a value, expected none: LoRA adapters"),
    (GOOD | {"task_id": "a"}, "task_id: found 'a', expected: a valid integer"),
    (GOOD | {"task_id": 2**63}, "task_id: found"),
    (GOOD | {"output_tokens": 0}, "output_tokens: found 0"),
    (GOOD | {"output_tokens": -3}, "output_tokens: found -3"),
    (GOOD | {"output_tokens": 2**31}, "output_tokens: found 2147483648"),
    (GOOD | {"output_tokens": 4.0}, "output_tokens: found 4.0"),
    (GOOD | {"output_tokens": True}, "output_tokens: found True"),
    ('{"task_id": 0, "input_ids": [1], "output_tokens": NaN}', "output_tokens: found nan"),
    ('{"task_id": 0, "input_ids": [1], "output_tokens": 1e999}', "output_tokens: found inf"),
    (f'{{"task_id": 0, "input_ids": [1], "output_tokens": {"9" * 5000}}}', "not valid JSON: Exceeds the limit"),
    (GOOD | {"input_ids": []}, "input_ids: found \\[\\], expected"),
    (GOOD | {"input_ids": "12"}, "input_ids: found '12', expected"),
    (GOOD | {"input_ids": [1, "2"]}, "input_ids.1: found '2'"),
    (GOOD | {"input_ids": [1, [2]]}, "input_ids.1: found \\[2\\]"),
    (GOOD | {"input_ids": [1, -1]}, "input_ids.1: found -1"),
    (GOOD | {"input_ids": [1, 2**40]}, "input_ids.1: found 1099511627776"),
    (GOOD | {"input_ids": [1, 258]}, "input_ids: found token id 258 at position 1, expected ids from 0 to 257"),
    ({"task_id": 0, "logits": [300], "output_tokens": 1}, "logits: found token id 300 at position 0"),
    ({"task_id": 0, "prompt": "", "output_tokens": 1}, "prompt: found ''"),
    ({"task_id": 0, "prompt": 5, "output_tokens": 1}, "prompt: found 5"),
    ('{"task_id": 0, "prompt": "\\ud800", "output_tokens": 1}', "prompt: found .* unicode"),
]


@pytest.mark.parametrize(("line", "message"), BAD_LINES)
def test_a_bad_line_is_said_with_file_line_and_key(tmp_path, line, message):
    path = write(tmp_path / "data.jsonl", GOOD, "", line, GOOD)
    with pytest.raises(UserError, match=message) as raised:
        load(path)
    text = str(raised.value)
    assert text.startswith(f"{path}, line 3")
    assert "\n" not in text
    assert len(text) < 700


def test_millions_of_bad_ids_are_one_short_message(tmp_path):
    path = write(tmp_path / "data.jsonl", GOOD | {"input_ids": ["x"] * 1_000_000})
    with pytest.raises(UserError, match=r"line 1: input_ids\.0: found 'x'") as raised:
        load(path)
    assert len(str(raised.value)) < 200


def test_not_utf8(tmp_path):
    (tmp_path / "data.jsonl").write_bytes(json.dumps(GOOD).encode() + b"\n\xff\xfe\n")
    with pytest.raises(UserError, match="line 2: not UTF-8"):
        load(tmp_path / "data.jsonl")


@pytest.mark.parametrize("text", ["", "\n \n"])
def test_an_empty_file(tmp_path, text):
    (tmp_path / "data.jsonl").write_text(text)
    with pytest.raises(UserError, match="found no requests"):
        load(tmp_path / "data.jsonl")


def test_what_is_no_file(tmp_path):
    for path, found in (
        (tmp_path / "absent.jsonl", "no such file"),
        (tmp_path, "found a directory"),
        (Path("/dev/zero"), "found a pipe or a device"),
    ):
        with pytest.raises(UserError, match=f"{path}: {found}. Expected a dataset"):
            load(path)


def test_a_large_file_is_refused_unread(tmp_path):
    with (tmp_path / "data.jsonl").open("wb") as file:
        file.truncate(dataset_module.MAX_FILE_BYTES + 1)
    with pytest.raises(UserError, match=f"found {2**29 + 1} bytes, expected at most {2**29}"):
        load(tmp_path / "data.jsonl")


def test_a_long_line_is_not_read_to_its_end(tmp_path, monkeypatch):
    monkeypatch.setattr(dataset_module, "MAX_LINE_BYTES", 100)
    longest = json.dumps(GOOD).ljust(99)
    assert len(list(read_dataset(write(tmp_path / "fits.jsonl", longest)))) == 1
    path = write(tmp_path / "data.jsonl", longest, longest + " ")
    with pytest.raises(UserError, match="line 2: found more than 100 bytes"):
        load(path)


@pytest.mark.parametrize("count", [0, -1])
def test_num_requests(tmp_path, count):
    with pytest.raises(UserError, match=f"num_requests: found {count}"):
        load(write(tmp_path / "data.jsonl", GOOD), max_requests=count)


def test_a_prompt_needs_a_tokenizer_and_ids_do_not(tmp_path):
    (tmp_path / "model").mkdir()
    path = write(tmp_path / "data.jsonl", GOOD, {"task_id": 1, "prompt": "x", "output_tokens": 1})
    assert load_dataset(path, vocab_size=VOCAB_SIZE, checkpoint=tmp_path / "model", max_requests=1)
    with pytest.raises(UserError, match=r"line 2, prompt: found text, and .*model has no tokenizer\.json"):
        load_dataset(path, vocab_size=VOCAB_SIZE, checkpoint=tmp_path / "model")


def test_a_prompt_outside_the_vocabulary_of_another_model(tmp_path):
    path = write(tmp_path / "data.jsonl", {"task_id": 1, "prompt": "zebra", "output_tokens": 1})
    with pytest.raises(UserError, match=r"line 1, prompt: found token id .* expected ids from 0 to 39"):
        load_dataset(path, vocab_size=40, checkpoint=EXAMPLE)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            {"output_tokens": 2**31 - 1},
            "output_tokens = 2147483647 make 2147483650, expected at most max_seq_len = 64",
        ),
        ({"output_tokens": 62}, "max_seq_len = 64"),
        ({"input_ids": [1] * 50}, "The prompt has 50 tokens, expected at most max_input_len = 40"),
        ({"output_tokens": 46}, "needs? 4 pages of 16 tokens, and the pool has 3"),
    ],
)
def test_requests_beyond_the_limits_are_said_with_their_line(tmp_path, values, message):
    build = BuildConfig(max_seq_len=64, max_input_len=40)
    limits = SchedulerConfig.from_build_config(
        build, MlaPluginConfig(page_size=16), vocab_size=VOCAB_SIZE, num_pages=3
    )
    path = write(tmp_path / "data.jsonl", GOOD, GOOD | values)
    with pytest.raises(UserError, match=f"data.jsonl, line 2: .*{message}") as raised:
        check_entries(path, load(path), limits)
    assert "max_new_tokens" not in str(raised.value)
    check_entries(path, load(path, max_requests=1), limits)
