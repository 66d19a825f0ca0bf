"""A server with OpenAI's HTTP API as the user describes it, and the ways in which a request to it can fail."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from urllib.parse import urlsplit

from trtllm_mla.errors import UserError

MAX_RESPONSE_BYTES = 1 << 26
_VARIABLE = re.compile(r"[A-Z_][A-Z0-9_]*")
_API_PATH = re.compile(r"/(chat/completions|completions|models)$")


class Api(StrEnum):
    """Which of the server's interfaces is measured."""

    COMPLETIONS = "completions"
    CHAT = "chat"

    @property
    def path(self) -> str:
        """Where it lies below the base URL."""
        return "/completions" if self is Api.COMPLETIONS else "/chat/completions"


class FailureKind(StrEnum):
    """What failed, as reports count it."""

    CONNECTION_REFUSED = "connection_refused"
    UNKNOWN_HOST = "unknown_host"
    TLS = "tls"
    CONNECTION_FAILED = "connection_failed"
    CONNECTION_RESET = "connection_reset"
    CONNECT_TIMEOUT = "connect_timeout"
    READ_TIMEOUT = "read_timeout"
    TIMEOUT = "timeout"
    REDIRECT = "redirect"
    UNAUTHORIZED = "unauthorized"
    UNKNOWN_MODEL = "unknown_model"
    NOT_FOUND = "not_found"
    REJECTED = "rejected"
    RATE_LIMITED = "rate_limited"
    UNAVAILABLE = "unavailable"
    SERVER_ERROR = "server_error"
    MALFORMED_JSON = "malformed_json"
    NO_CHOICES = "no_choices"
    NO_TOKEN_COUNT = "no_token_count"  # noqa: S105
    NOT_STREAMED = "not_streamed"
    ENDED_EARLY = "ended_early"
    ERROR_IN_ANSWER = "error_in_answer"
    TOO_LARGE = "too_large"


# A request is sent again after these only: the server did nothing for it yet.
RETRIED = frozenset({FailureKind.RATE_LIMITED, FailureKind.UNAVAILABLE, FailureKind.CONNECTION_RESET})
# Every request fails of these, as long as none has succeeded.
SETUP = frozenset(
    {
        FailureKind.CONNECTION_REFUSED,
        FailureKind.UNKNOWN_HOST,
        FailureKind.TLS,
        FailureKind.CONNECTION_FAILED,
        FailureKind.REDIRECT,
        FailureKind.UNAUTHORIZED,
        FailureKind.UNKNOWN_MODEL,
        FailureKind.NOT_FOUND,
    }
)


class EndpointError(UserError):
    """One request failed.

    Args:
        kind: What failed.
        message: One line that says what was found and what to do.
        pause: Seconds that the server asked to wait before the next try.
    """

    def __init__(self, kind: FailureKind, message: str, *, pause: float | None = None) -> None:
        super().__init__(message)
        self.kind = kind
        self.pause = pause


@dataclass(frozen=True)
class ApiKey:
    """A key, and the environment variable that it came from.

    Attributes:
        variable: Name of the variable.
        value: The key; in no representation.
    """

    variable: str
    value: str = field(repr=False)

    @classmethod
    def from_environment(cls, variable: str, environment: Mapping[str, str]) -> ApiKey:
        """Reads a key.

        Raises:
            UserError: The variable is not set, or holds what cannot be sent. The message names no value, and the
                variable only if it looks like one: a key may have been given in its place.
        """
        name = f"the variable {variable}" if _VARIABLE.fullmatch(variable) else "a variable"
        value = environment.get(variable, "").strip()
        if not value:
            raise UserError(
                f"--api-key-env: found {name} that is not set, expected an environment variable that holds the key."
                " Export it first; the key itself never goes on the command line."
            )
        if not (value.isascii() and value.isprintable() and " " not in value):
            raise UserError(
                f"--api-key-env: {name} holds characters that no HTTP header can have (a space, a line break, or one "
                "outside ASCII). Export the key alone."
            )
        return cls(variable, value)


def check_base_url(text: str) -> str:
    """Checks a base URL, such as ``http://localhost:8000/v1``.

    Returns:
        The URL without a slash at its end.

    Raises:
        UserError: It has no scheme, no host, an impossible port, credentials, a query, ``/v1`` twice, or the
            path of an interface at its end.
    """
    if any(char.isspace() or not char.isprintable() for char in text):
        raise UserError("--base-url: found a space or a control character in it, expected http://HOST:PORT/v1.")
    if not text.lower().startswith(("http://", "https://")):
        bare = text.partition("://")[2] or text
        # What stands before an @ may be a password.
        shown, example = ("a URL", "http://HOST:PORT/v1") if "@" in text else (f"'{text:.80}'", f"http://{bare:.80}")
        raise UserError(
            f"--base-url: found {shown} without http:// or https:// at its start. Write "
            f"{example if bare else 'http://HOST:PORT/v1'}, for example."
        )
    try:
        parts = urlsplit(text)
        host, _ = parts.hostname, parts.port
    except ValueError as error:
        raise UserError(f"--base-url: not a URL: {error}. Expected http://HOST:PORT/v1.") from None
    if parts.username is not None or parts.password is not None:
        raise UserError(
            "--base-url: found a user name or password in it, which would end up in reports. Leave them out; "
            "--api-key-env names an environment variable that holds the key."
        )
    if not host:
        raise UserError(f"--base-url: found '{text:.80}' without a host, expected http://HOST:PORT/v1.")
    if parts.query or parts.fragment:
        raise UserError(f"--base-url: found '?' or '#' in '{text:.80}', expected http://HOST:PORT/v1.")
    url = text.rstrip("/")
    if "/v1/v1" in parts.path:
        raise UserError(f"--base-url: found /v1 twice in '{text:.80}'. Write {url.replace('/v1/v1', '/v1'):.80}.")
    if found := _API_PATH.search(url):
        raise UserError(
            f"--base-url: found {found[0]} at its end, which is added by itself. Write {url[: found.start()]:.80}."
        )
    return url


@dataclass(frozen=True)
class Endpoint:
    """A server, and how to talk to it.

    Attributes:
        base_url: As ``check_base_url`` returns it.
        model: The server's name for the model.
        api: Interface to use.
        key: Sent as a bearer token, where there is one.
        timeout: Seconds for a request, its retries included.
        connect_timeout: Seconds for a connection.
        read_timeout: Seconds without a byte of the answer; left out, ``timeout``.
        max_retries: How often a request is sent again.
        first_pause: Seconds before the first retry; each further one doubles them, unless the server asks for others.
        max_response_bytes: Size of an answer above which it is given up.
    """

    base_url: str
    model: str
    api: Api = Api.COMPLETIONS
    key: ApiKey | None = None
    timeout: float = 600.0
    connect_timeout: float = 10.0
    read_timeout: float | None = None
    max_retries: int = 3
    first_pause: float = 0.5
    max_response_bytes: int = MAX_RESPONSE_BYTES

    def __post_init__(self) -> None:
        for name in ("timeout", "connect_timeout", "read_timeout"):
            value = getattr(self, name)
            if value is not None and not 0 < value < float("inf"):
                raise UserError(f"{name}: found {value}, expected seconds above 0.")
        if self.max_retries < 0:
            raise UserError(f"max_retries: found {self.max_retries}, expected 0 or more.")
        if not self.model:
            raise UserError("model: found nothing, expected the server's name for the model.")
