import re

import pytest

from trtllm_mla.benchmark.openai_endpoint import ApiKey, Endpoint, check_base_url
from trtllm_mla.errors import UserError

SECRET = "sk_top_secret_value"  # noqa: S105


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("http://localhost:8000/v1", "http://localhost:8000/v1"),
        ("https://api.example.com/v1/", "https://api.example.com/v1"),
        ("HTTP://[::1]:8000", "HTTP://[::1]:8000"),
        ("https://gateway.example.com/openai/deployments/x", "https://gateway.example.com/openai/deployments/x"),
    ],
)
def test_a_base_url_loses_its_last_slash_only(text, expected):
    assert check_base_url(text) == expected


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "localhost:8000/v1",
            "found 'localhost:8000/v1' without http:// or https:// .*Write http://localhost:8000/v1",
        ),
        ("ftp://host/v1", "found 'ftp://host/v1' without http:// or https:// .*Write http://host/v1"),
        ("", "found '' without http:// .*Write http://HOST:PORT/v1"),
        ("http://", "found 'http://' without a host"),
        ("http://:8000/v1", "without a host"),
        ("http://host:99999/v1", "not a URL: Port out of range"),
        ("http://[::1/v1", "not a URL"),
        ("http://host/v1/v1", "found /v1 twice in 'http://host/v1/v1'. Write http://host/v1."),
        ("http://host/v1/chat/completions", "found /chat/completions at its end.*Write http://host/v1."),
        ("http://host/v1/completions/", "found /completions at its end.*Write http://host/v1."),
        ("http://host/v1/models", "found /models at its end.*Write http://host/v1."),
        ("http://host/v1?api-version=3", "found '\\?' or '#'"),
        ("http://host/v1#x", "found '\\?' or '#'"),
        ("http://ho st/v1", "found a space or a control character"),
        ("http://host/v1\n", "found a space or a control character"),
    ],
)
def test_an_impossible_base_url_is_one_line(text, message):
    with pytest.raises(UserError, match=f"^--base-url: .*{message}") as raised:
        check_base_url(text)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("scheme", ["http://", "ftp://", ""])
def test_a_password_in_a_url_is_refused_and_not_repeated(scheme):
    with pytest.raises(UserError) as raised:
        check_base_url(f"{scheme}user:{SECRET}@host/v1")
    assert SECRET not in str(raised.value)


def test_a_key_comes_from_a_variable_and_is_in_no_representation():
    key = ApiKey.from_environment("SERVER_KEY", {"SERVER_KEY": f"{SECRET}\n"})
    assert (key.variable, key.value) == ("SERVER_KEY", SECRET)
    assert SECRET not in repr(Endpoint("http://host/v1", "model", key=key))


@pytest.mark.parametrize("environment", [{}, {"SERVER_KEY": ""}, {"SERVER_KEY": " \n"}])
def test_a_variable_without_a_key_is_named(environment):
    with pytest.raises(UserError, match="found the variable SERVER_KEY that is not set"):
        ApiKey.from_environment("SERVER_KEY", environment)


def test_a_key_in_place_of_a_variable_is_not_repeated():
    with pytest.raises(UserError, match="found a variable that is not set") as raised:
        ApiKey.from_environment(SECRET, {})
    assert SECRET not in str(raised.value)


@pytest.mark.parametrize("value", [f"{SECRET} x", f"{SECRET}\nx", f"{SECRET}é"])
def test_a_key_that_no_header_can_hold_is_not_repeated(value):
    with pytest.raises(UserError, match="SERVER_KEY holds characters") as raised:
        ApiKey.from_environment("SERVER_KEY", {"SERVER_KEY": value})
    assert SECRET not in str(raised.value)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"timeout": 0}, "timeout: found 0, expected seconds above 0"),
        ({"timeout": float("inf")}, "timeout: found inf"),
        ({"connect_timeout": float("nan")}, "connect_timeout: found nan"),
        ({"read_timeout": -1}, "read_timeout: found -1"),
        ({"max_retries": -1}, "max_retries: found -1"),
        ({"model": ""}, "model: found nothing"),
    ],
)
def test_impossible_settings_are_named(options, message):
    with pytest.raises(UserError, match=re.escape(message)):
        Endpoint(**{"base_url": "http://host/v1", "model": "model", **options})
