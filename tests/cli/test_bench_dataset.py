import json

import pytest

COMMON = ("--num-requests", 6, "--seed", 3)
LENGTHS = {
    "fixed": ("--input-len", 9, "--output-len", 4),
    "token-norm-dist": ("--input-mean", 9, "--input-stdev", 3, "--output-mean", 5, "--output-stdev", 2),
    "token-unif-dist": ("--input-min", 4, "--input-max", 9, "--output-min", 1, "--output-max", 5),
}


@pytest.mark.parametrize("kind", LENGTHS)
def test_random_tokens(command, checkpoint, tmp_path, kind):
    model = ("--checkpoint", checkpoint[0])
    vocab_size = checkpoint[1].config.vocab_size
    for name, source in (("a.jsonl", model), ("b.jsonl", ("--vocab-size", vocab_size))):
        outcome = command("bench", "prepare-dataset", kind, "-o", tmp_path / name, *LENGTHS[kind], *COMMON, *source)
        assert outcome.status == 0, outcome.err
        assert outcome.out == ""
        assert f"{name}: 6 requests" in outcome.err
    assert (tmp_path / "a.jsonl").read_bytes() == (tmp_path / "b.jsonl").read_bytes()
    lines = [json.loads(line) for line in (tmp_path / "a.jsonl").read_text().splitlines()]
    assert [line["task_id"] for line in lines] == list(range(6))
    assert all(0 <= token < vocab_size for line in lines for token in line["input_ids"])


def test_text(command, tmp_path):
    example = "examples/tiny-mla"
    arguments = ("--file", f"{example}/held_out.txt", "-c", example, "--input-len", 20, "--output-len", 3)
    for name, shuffle in (("a.jsonl", ()), ("b.jsonl", ("--shuffle",))):
        outcome = command("bench", "prepare-dataset", "text", "-o", tmp_path / name, *arguments, *COMMON, *shuffle)
        assert outcome.status == 0, outcome.err
    assert (tmp_path / "a.jsonl").read_bytes() != (tmp_path / "b.jsonl").read_bytes()


@pytest.mark.parametrize(
    ("source", "found"), [((), "neither"), (("--vocab-size", 9, "-c", "examples/tiny-mla"), "both")]
)
def test_the_vocabulary_is_named_once(command, tmp_path, source, found):
    outcome = command("bench", "prepare-dataset", "fixed", "-o", tmp_path / "x.jsonl", *LENGTHS["fixed"], *source)
    assert outcome.status == 2
    assert f"--vocab-size and --checkpoint: found {found}" in outcome.err
    assert outcome.err.count("\n") == 1
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("kind", [*LENGTHS, "text"])
def test_help_has_an_example(command, kind):
    outcome = command("bench", "prepare-dataset", kind, "--help")
    assert outcome.status == 0
    assert "Example: trtllm-mla bench prepare-dataset" in outcome.out


def test_names_that_look_like_markup(command, tmp_path):
    path = tmp_path / "[bold]\u540d\u524d[" / "x].jsonl"
    outcome = command("bench", "prepare-dataset", "fixed", "-o", path, *LENGTHS["fixed"], "--vocab-size", 9)
    assert outcome.status == 0, outcome.err
    assert outcome.err == f"Wrote {path}: 128 requests, 1152 prompt tokens\n"
    assert path.is_file()


@pytest.mark.parametrize(
    ("kind", "option", "value", "message"),
    [
        ("fixed", "--output-len", 0, "output length: found 0"),
        ("token-norm-dist", "--input-mean", "nan", "input mean: found nan"),
        ("token-unif-dist", "--output-max", 0, "output maximum: found 0"),
    ],
)
def test_a_length_that_cannot_be_is_named(command, tmp_path, kind, option, value, message):
    path = tmp_path / "x.jsonl"
    outcome = command(
        *("bench", "prepare-dataset", kind, "-o", path, *LENGTHS[kind], "--vocab-size", 9, option, value)
    )
    assert outcome.status == 2
    assert outcome.err.startswith(f"Error: {message}, expected ")
    assert outcome.err.count("\n") == 1
    assert not path.exists()
