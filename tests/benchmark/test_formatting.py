import pytest

from trtllm_mla.benchmark.formatting import show_number, show_range


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (0, "0"),
        (0.0, "0"),
        (-3.0, "-3"),
        (12, "12"),
        (1234567, "1,234,567"),
        (0.012345, "0.01235"),
        (1.23456, "1.235"),
        (-0.98765, "-0.9877"),
        (123.456, "123.5"),
        (1234.56, "1,235"),
        (98765.4321, "98,765"),
        (1e-12, "0.000000000"),
        (1e18, "1,000,000,000,000,000,000"),
    ],
)
def test_four_digits_that_count(value, shown):
    assert show_number(value) == shown


def test_range():
    assert show_range(-1.2345, 17.891) == "(-1.23 to 17.9)"
