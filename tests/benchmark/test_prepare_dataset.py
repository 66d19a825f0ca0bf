"""Making datasets: lengths, tokens, shared prefixes, determinism, and reading them back."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import trtllm_mla.benchmark.prepare_dataset as prepare_module
from trtllm_mla.benchmark.dataset import load_dataset
from trtllm_mla.benchmark.prepare_dataset import (
    DatasetRecipe,
    FixedLength,
    NormalLength,
    RandomTokens,
    TextWindows,
    UniformLength,
    write_dataset,
)
from trtllm_mla.checkpoint.tokenizer import TextCodec
from trtllm_mla.errors import UserError

EXAMPLE = Path(__file__).parents[2] / "examples" / "tiny-mla"
VOCAB_SIZE = 258


def make(path, recipe, prompts=None, *, vocab_size=VOCAB_SIZE):
    total = write_dataset(path, recipe, prompts or RandomTokens(vocab_size))
    entries = load_dataset(path, vocab_size=vocab_size, checkpoint=EXAMPLE)
    assert sum(len(entry.input_ids) for entry in entries) == total
    return entries


def test_fixed(tmp_path):
    entries = make(tmp_path / "data.jsonl", DatasetRecipe(37, FixedLength(9), FixedLength(4)))
    assert [entry.lengths for entry in entries] == [(9, 4)] * 37
    assert [entry.task_id for entry in entries] == list(range(37))
    assert len({tuple(entry.input_ids) for entry in entries}) == 37


def test_random_tokens_cover_the_vocabulary_evenly(tmp_path):
    entries = make(tmp_path / "data.jsonl", DatasetRecipe(50, FixedLength(400), FixedLength(1)), vocab_size=20)
    counts = np.bincount(np.concatenate([np.array(entry.input_ids) for entry in entries]), minlength=20)
    # 20,000 draws, 1,000 expected of each: chi-squared of 19 degrees of freedom is below 45 with p = 0.9993.
    assert np.sum((counts - 1000) ** 2 / 1000) < 45


def test_normal_lengths(tmp_path):
    entries = make(tmp_path / "data.jsonl", DatasetRecipe(2000, NormalLength(60, 12), NormalLength(20.5, 3)))
    inputs, outputs = np.array([entry.lengths for entry in entries]).T
    assert abs(inputs.mean() - 60) < 4 * 12 / np.sqrt(2000)
    assert abs(inputs.std() - 12) < 4 * 12 / np.sqrt(2 * 2000)
    assert abs(outputs.mean() - 20.5) < 4 * 3 / np.sqrt(2000)
    assert abs(np.corrcoef(inputs, outputs)[0, 1]) < 0.1


def test_normal_lengths_are_at_least_one(tmp_path):
    entries = make(tmp_path / "data.jsonl", DatasetRecipe(500, NormalLength(2, 5), NormalLength(1, 9)))
    inputs, outputs = np.array([entry.lengths for entry in entries]).T
    assert inputs.min() == outputs.min() == 1
    assert np.mean(inputs == 1) == pytest.approx(0.46, abs=0.1)


def test_without_deviation_all_lengths_are_the_mean(tmp_path):
    entries = make(tmp_path / "data.jsonl", DatasetRecipe(20, NormalLength(7, 0), NormalLength(3, 0)))
    assert {entry.lengths for entry in entries} == {(7, 3)}


def test_uniform_lengths_reach_both_ends(tmp_path):
    entries = make(tmp_path / "data.jsonl", DatasetRecipe(500, UniformLength(5, 9), UniformLength(1, 3)))
    inputs, outputs = np.array([entry.lengths for entry in entries]).T
    assert set(inputs) == {5, 6, 7, 8, 9}
    assert set(outputs) == {1, 2, 3}


def test_text_windows_follow_one_another_and_begin_anew(tmp_path):
    text = "".join(f"{number} bottles of beer on the wall. " for number in range(9))
    (tmp_path / "text.txt").write_text(text)
    ids = TextCodec.load(EXAMPLE).encode(text)
    prompts = TextWindows.read(tmp_path / "text.txt", EXAMPLE, shuffled=False)
    count = len(ids) // 50 + 2
    entries = make(tmp_path / "data.jsonl", DatasetRecipe(count, FixedLength(50), FixedLength(4)), prompts)
    whole = len(ids) // 50
    expected = [ids[50 * number : 50 * number + 50] for number in (*range(whole), 0, 1)]
    assert [list(entry.input_ids) for entry in entries] == expected


def test_shuffled_text_windows(tmp_path):
    ids = list(range(100))
    prompts = TextWindows(ids, shuffled=True, source="text")
    entries = make(tmp_path / "data.jsonl", DatasetRecipe(300, FixedLength(97), FixedLength(1)), prompts)
    starts = [entry.input_ids[0] for entry in entries]
    assert [list(entry.input_ids) for entry in entries] == [ids[start : start + 97] for start in starts]
    assert set(starts) == {0, 1, 2, 3}


def test_a_text_that_is_too_short(tmp_path):
    prompts = TextWindows([1, 2, 3], shuffled=False, source="text.txt")
    with pytest.raises(UserError, match=r"text\.txt: found 3 tokens, expected at least the 4 of a prompt"):
        make(tmp_path / "data.jsonl", DatasetRecipe(1, FixedLength(4), FixedLength(1)), prompts)
    assert list(tmp_path.iterdir()) == []


def test_shared_prefix(tmp_path):
    recipe = DatasetRecipe(60, UniformLength(5, 60), FixedLength(2), shared_prefix=30)
    entries = make(tmp_path / "data.jsonl", recipe)
    longest = max(entries, key=lambda entry: len(entry.input_ids)).input_ids
    for entry in entries:
        shared = min(len(entry.input_ids), 30)
        assert entry.input_ids[:shared] == longest[:shared]
    tails = [tuple(entry.input_ids[30:]) for entry in entries if len(entry.input_ids) > 35]
    assert len(set(tails)) == len(tails) > 10


RECIPES = {
    "fixed": DatasetRecipe(9, FixedLength(7), FixedLength(3), seed=4),
    "normal": DatasetRecipe(9, NormalLength(20, 6), NormalLength(8, 2), seed=4),
    "uniform": DatasetRecipe(9, UniformLength(1, 20), UniformLength(1, 9), seed=4, shared_prefix=6),
}


@pytest.mark.parametrize("name", RECIPES)
def test_the_same_arguments_make_the_same_bytes(tmp_path, name):
    paths = [tmp_path / f"{number}.jsonl" for number in range(3)]
    for path, seed in zip(paths, (4, 4, 5), strict=True):
        make(path, replace(RECIPES[name], seed=seed))
    first, again, other = (path.read_bytes() for path in paths)
    assert first == again != other


@pytest.mark.parametrize(
    ("action", "message"),
    [
        (lambda: FixedLength(0), "length: found 0, expected 1"),
        (lambda: FixedLength(2**31), "length: found 2147483648"),
        (lambda: NormalLength(0.5, 1), "mean: found 0.5, expected 1"),
        (lambda: NormalLength(float("nan"), 1), "mean: found nan"),
        (lambda: NormalLength(5, -1), "stdev: found -1, expected 0"),
        (lambda: UniformLength(0, 5), "minimum: found 0, expected 1"),
        (lambda: UniformLength(6, 5), "maximum: found 5, expected a length from the minimum, 6"),
        (lambda: RandomTokens(0), "vocab_size: found 0, expected 1"),
        (lambda: DatasetRecipe(0, FixedLength(1), FixedLength(1)), "num_requests: found 0"),
        (lambda: DatasetRecipe(2**40, FixedLength(1), FixedLength(1)), "num_requests: found 1099511627776"),
        (lambda: DatasetRecipe(1, FixedLength(1), FixedLength(1), seed=-1), "seed: found -1"),
        (lambda: DatasetRecipe(1, FixedLength(1), FixedLength(1), shared_prefix=-1), "shared_prefix: found -1"),
    ],
)
def test_impossible_recipes(action, message):
    with pytest.raises(UserError, match=message):
        action()


@pytest.mark.parametrize(
    ("recipe", "message"),
    [
        (
            DatasetRecipe(4, FixedLength(2**30), FixedLength(1)),
            "4294967296 tokens together, expected at most 44739242",
        ),
        (
            DatasetRecipe(2, FixedLength(2_000_000), FixedLength(1)),
            "2000000 tokens in one of them, expected at most 1398101",
        ),
    ],
)
def test_datasets_that_nobody_could_read_are_not_begun(tmp_path, recipe, message):
    with pytest.raises(UserError, match=message):
        write_dataset(tmp_path / "data.jsonl", recipe, RandomTokens(9))
    assert list(tmp_path.iterdir()) == []


def test_a_prefix_is_no_longer_than_the_longest_prompt(tmp_path):
    recipe = DatasetRecipe(3, FixedLength(5), FixedLength(1), shared_prefix=2**31 - 1)
    assert len({tuple(entry.input_ids) for entry in make(tmp_path / "data.jsonl", recipe)}) == 1


def test_a_failure_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "data.jsonl"
    make(path, RECIPES["fixed"])
    before = path.read_bytes()

    class Broken(RandomTokens):
        def take(self, generator, length):
            raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        write_dataset(path, RECIPES["normal"], Broken(9))
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_longest_ids_fit_the_estimate():
    assert len(f"{2**31 - 1}, ") == prepare_module._ID_BYTES
