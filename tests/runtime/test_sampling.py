import numpy as np
import pytest

from trtllm_mla.errors import UserError
from trtllm_mla.runtime.sampling import Sampler, SamplingParams


def logits_of(probabilities):
    return np.log(np.array(probabilities)).astype(np.float32)


def frequencies(params, logits, draws=4000):
    sampler = Sampler(params)
    return np.bincount([sampler(logits) for _ in range(draws)], minlength=len(logits)) / draws


def test_greedy_takes_the_lowest_of_equal_logits():
    assert Sampler(SamplingParams())(np.array([1, 3, 2, 3], np.float32)) == 1


@pytest.mark.parametrize("temperature", [1.0, 0.5, 2.0])
def test_frequencies_follow_the_softmax(temperature):
    probabilities = np.array([0.1, 0.45, 0.05, 0.4])
    expected = probabilities ** (1 / temperature)
    found = frequencies(SamplingParams(temperature=temperature, seed=3), logits_of(probabilities) + 7)
    # Four standard deviations of a frequency over 4000 draws are at most 0.032.
    assert found == pytest.approx(expected / expected.sum(), abs=0.032)


@pytest.mark.parametrize(
    ("top_k", "top_p", "expected"),
    [
        (2, 1.0, [0, 0.5 / 0.8, 0, 0.3 / 0.8]),
        (1, 1.0, [0, 1, 0, 0]),
        (9, 1.0, [0.15, 0.5, 0.05, 0.3]),
        (0, 0.79, [0, 0.5 / 0.8, 0, 0.3 / 0.8]),
        (0, 0.81, [0.15 / 0.95, 0.5 / 0.95, 0, 0.3 / 0.95]),
        (0, 0.001, [0, 1, 0, 0]),
        # 0.5 / 0.8 = 0.625 of what top_k leaves: top_p counts after top_k.
        (2, 0.62, [0, 1, 0, 0]),
        (3, 0.62, [0, 0.5 / 0.8, 0, 0.3 / 0.8]),
    ],
)
def test_top_k_and_top_p(top_k, top_p, expected):
    params = SamplingParams(temperature=1.0, top_k=top_k, top_p=top_p, seed=5)
    found = frequencies(params, logits_of([0.15, 0.5, 0.05, 0.3]))
    assert (found > 0).tolist() == (np.array(expected) > 0).tolist()
    assert found == pytest.approx(expected, abs=0.032)


def test_top_k_prefers_the_lowest_of_equal_logits():
    logits = np.tile(np.array([1, 2], np.float32), 200)
    found = frequencies(SamplingParams(temperature=1.0, top_k=3), logits, draws=200)
    assert np.flatnonzero(found).tolist() == [1, 3, 5]


def test_minus_infinity_is_never_drawn():
    logits = np.array([-np.inf, 0, -np.inf, 1], np.float32)
    found = frequencies(SamplingParams(temperature=3.0), logits, draws=500)
    assert found[[0, 2]].tolist() == [0, 0]
    assert (found[[1, 3]] > 0).all()


def test_a_tiny_temperature_is_nearly_greedy():
    logits = np.array([1, 1000, 999.9, -1000], np.float32)
    assert frequencies(SamplingParams(temperature=1e-4), logits, draws=100).tolist() == [0, 1, 0, 0]


def test_the_seed_decides():
    logits = np.random.default_rng(0).standard_normal((50, 300)).astype(np.float32)

    def draw(seed):
        sampler = Sampler(SamplingParams(temperature=1.0, seed=seed))
        return [sampler(row) for row in logits]

    assert draw(1) == draw(1)
    assert draw(1) != draw(2)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("bad", [[0, np.nan], [np.nan, 0], [np.inf, 0], [-np.inf, -np.inf]])
def test_refuses_logits_that_are_not_finite(temperature, bad):
    with pytest.raises(UserError, match="finite largest logit"):
        Sampler(SamplingParams(temperature=temperature))(np.array(bad, np.float32))


@pytest.mark.parametrize(
    "values",
    [
        {"temperature": -1.0},
        {"temperature": float("nan")},
        {"temperature": float("inf")},
        {"top_k": -1},
        {"top_p": 0.0},
        {"top_p": 1.5},
        {"top_p": float("nan")},
        {"seed": -1},
    ],
)
def test_refuses_parameters_out_of_range(values):
    (name,) = values
    with pytest.raises(UserError, match=f"{name}: found"):
        SamplingParams(**values)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"temperature": "hot"}, "temperature: found 'hot', expected a number"),
        ({"temperature": None}, "temperature: found None, expected a number"),
        ({"top_k": 1.5}, "top_k: found 1.5, expected a whole number"),
        ({"top_p": "all"}, "top_p: found 'all', expected a number"),
        ({"seed": 1.5}, "seed: found 1.5, expected a whole number"),
    ],
)
def test_values_of_another_type(values, message):
    with pytest.raises(UserError, match=message):
        SamplingParams(**values)


def test_numpy_numbers():
    params = SamplingParams(np.float32(0.5), np.int64(2), np.float64(0.9), np.int32(3))
    assert Sampler(params)(logits_of([0.1, 0.9])) == 1


@pytest.mark.filterwarnings("error")
def test_a_temperature_next_to_nothing_is_greedy():
    assert Sampler(SamplingParams(temperature=1e-320))(np.array([1, 3, 2], np.float32)) == 1
