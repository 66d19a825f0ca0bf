"""transformers' generation, timed: its tokens are those of the model, and its clock covers every one of them."""

from __future__ import annotations

import itertools
import shutil

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.support.hf import make_checkpoint
from trtllm_mla.benchmark.huggingface import (
    ATTENTIONS,
    describe,
    load_model,
    time_forward,
    time_generate,
    time_prompts,
)
from trtllm_mla.errors import UserError


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("checkpoint") / "tiny", rope="yarn")


def _greedy(model, prompt, count):
    """Greedy decoding that computes the whole text anew for every token."""
    tokens = list(prompt)
    with torch.inference_mode():
        for _ in range(count):
            tokens.append(int(model(torch.tensor([tokens]), use_cache=False).logits[0, -1].argmax()))
    return tokens[len(prompt) :]


@pytest.mark.parametrize("attention", ATTENTIONS)
@pytest.mark.parametrize("timer", [time_generate, time_forward])
def test_tokens_and_moments(checkpoint, attention, timer):
    model = load_model(checkpoint.path, attention, num_threads=1)
    assert model.config._attn_implementation == attention
    prompts = np.random.default_rng(2).integers(model.config.vocab_size, size=(3, 11))
    timed = timer(model, torch.from_numpy(prompts), 6)
    assert timed.output_ids == [_greedy(checkpoint[1], prompt, 6) for prompt in prompts.tolist()]
    assert len(timed.times) == 1 + 6
    assert all(earlier < later for earlier, later in itertools.pairwise(timed.times))
    assert time_prompts(model, prompts.tolist(), 6).output_ids == timed.output_ids
    assert attention in describe(attention)


def test_a_checkpoint_without_weights(checkpoint, tmp_path):
    (tmp_path / "config.json").write_bytes((checkpoint.path / "config.json").read_bytes())
    with pytest.raises(UserError, match="found no weights"):
        load_model(tmp_path, "sdpa")


def test_weights_are_never_made_up(checkpoint, tmp_path):
    path = tmp_path / "partial"
    shutil.copytree(checkpoint.path, path)
    file = next(path.glob("*.safetensors"))
    tensors = load_file(file)
    removed = next(name for name in tensors if name.endswith("o_proj.weight"))
    del tensors[removed]
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(UserError, match=f"found no values for 1 weights, the first of them {removed}"):
        load_model(path, "eager")
