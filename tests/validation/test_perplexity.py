"""Perplexity against torch's cross-entropy on the transformers model, and against values known in advance."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from trtllm_mla.errors import UserError
from trtllm_mla.validation import perplexity
from trtllm_mla.validation.perplexity import (
    executor_perplexity,
    negative_log_likelihoods,
    reference_perplexity,
)


@pytest.fixture(scope="module")
def token_ids():
    return np.random.default_rng(4).integers(131, size=163).tolist()


@pytest.fixture
def executor(yarn_case):
    executor = yarn_case.executor()
    yield executor
    executor.close()


@pytest.mark.parametrize("window", [163, 81, 80, 54, 7])
@pytest.mark.parametrize("max_num_tokens", [2048, 23])
def test_equals_cross_entropy(yarn_case, executor, token_ids, window, max_num_tokens):
    """Also where windows are cut into chunks, and where a last token of its own predicts nothing (81, 54)."""
    losses = []
    for start in range(0, len(token_ids), window):
        text = torch.tensor([token_ids[start : start + window]])
        with torch.no_grad():
            logits = yarn_case.checkpoint.model(text).logits[0, :-1].double()
        losses.append(torch.nn.functional.cross_entropy(logits, text[0, 1:], reduction="none"))
    expected = torch.cat(losses)
    config = replace(yarn_case.config, max_num_tokens=max_num_tokens, prefill_absorption_threshold=20)
    result = executor_perplexity(executor, config, token_ids, window=window)
    assert result.tokens == len(expected)
    assert result.windows == sum(len(loss) > 0 for loss in losses)
    assert result.mean_nll == pytest.approx(expected.mean().item(), rel=1e-5)
    assert result.perplexity == pytest.approx(np.exp(result.mean_nll))


def test_windows_longer_than_a_pass(passes_case, token_ids):
    """Three passes of 30 keys: windows of up to 90 tokens, in chunks of up to 30 new ones."""
    executor = passes_case.executor()
    config = replace(passes_case.config, max_context_kv_tokens=30, prefill_absorption_threshold=0)
    reference = reference_perplexity(passes_case.load_reference(), token_ids, window=90)
    result = executor_perplexity(executor, config, token_ids, window=90)
    assert result.mean_nll == pytest.approx(reference.mean_nll, rel=1e-6)
    with pytest.raises(UserError, match="window: found 91, expected 2 to 90"):
        executor_perplexity(executor, config, token_ids, window=91)
    executor.close()


def test_reference_and_executor_agree(yarn_case, executor, token_ids):
    reference = reference_perplexity(yarn_case.load_reference(), token_ids, window=60)
    result = executor_perplexity(executor, yarn_case.config, token_ids, window=60)
    assert (result.tokens, result.windows) == (reference.tokens, reference.windows) == (160, 3)
    assert result.mean_nll == pytest.approx(reference.mean_nll, rel=1e-6)


def test_uniform_logits_have_the_vocabulary_as_perplexity():
    losses = negative_log_likelihoods(np.full((5, 131), 1e4, dtype=np.float32), [0, 1, 2, 3, 130])
    np.testing.assert_allclose(np.exp(losses), 131)


def test_extreme_logits():
    losses = negative_log_likelihoods(np.array([[1e30, 0.0], [-1e30, 0.0]], dtype=np.float32), [0, 1])
    np.testing.assert_array_equal(losses, 0)
    assert np.isnan(negative_log_likelihoods(np.array([[np.nan, 0.0]]), [1])).all()
    assert np.isnan(replace(perplexity.Perplexity(1, 1, 2, 0.0), mean_nll=float("nan")).perplexity)


@pytest.mark.parametrize("window", [1, 321, 10**6])
def test_windows_outside_the_limits(yarn_case, executor, token_ids, window):
    with pytest.raises(UserError, match=f"window: found {window}, expected 2 to 320"):
        executor_perplexity(executor, yarn_case.config, token_ids, window=window)


@pytest.mark.parametrize("token", [-1, 131])
def test_tokens_outside_the_vocabulary(yarn_case, executor, token):
    with pytest.raises(UserError, match=r"expected ids from 0 to 130"):
        executor_perplexity(executor, yarn_case.config, [1, token, 2], window=8)
