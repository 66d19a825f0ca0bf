"""A client of servers with OpenAI's HTTP API, which times what it receives and says in one line what went wrong.

It asks for completions (``/completions``; prompts as text or token ids) or chat completions (``/chat/completions``).
What a server sends is not trusted: its size is limited, its form is checked, and no redirect is followed. The key
is in no message.
"""

from __future__ import annotations

import asyncio
import json
import socket
import ssl
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import urlsplit

from pydantic import BaseModel, Field, ValidationError

from trtllm_mla.benchmark.openai_endpoint import RETRIED, Api, Endpoint, EndpointError, FailureKind
from trtllm_mla.errors import MissingDependencyError, UserError, one_line

if TYPE_CHECKING:
    import httpx2

_MAX_REFUSAL_BYTES = 1 << 16
_MAX_QUOTE = 240
_MAX_LISTED_MODELS = 10
_LONGEST_PAUSE = 30.0
# What vLLM and SGLang end a request with that they could not finish.
_BROKEN_OFF = frozenset({"abort", "error"})

Prompt = str | list[int]


@dataclass(frozen=True)
class Completion:
    """What a server answered.

    Attributes:
        text: The new text.
        chunk_times: When each piece of a stream that has text came, by ``time.perf_counter``; none without a stream.
        end: When the last piece came.
        finish_reason: Why it ended, in the server's words.
        prompt_tokens: The server's count, where it sent one.
        completion_tokens: Likewise.
    """

    text: str
    chunk_times: tuple[float, ...]
    end: float
    finish_reason: str | None
    prompt_tokens: int | None
    completion_tokens: int | None


_TokenCount = Annotated[int, Field(ge=0, lt=2**31)]


class _Usage(BaseModel):
    prompt_tokens: _TokenCount | None = None
    completion_tokens: _TokenCount | None = None


class _Message(BaseModel):
    """A message, or what a stream adds to one; servers name the text of reasoning models differently."""

    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None

    @property
    def text(self) -> str:
        return (self.reasoning_content or self.reasoning or "") + (self.content or "")


class _Choice(BaseModel):
    text: str | None = None
    message: _Message | None = None
    delta: _Message | None = None
    finish_reason: str | None = None

    @property
    def new_text(self) -> str:
        message = self.delta or self.message
        return message.text if message else self.text or ""


class _Answer(BaseModel):
    choices: list[_Choice] | None = None
    usage: _Usage | None = None
    error: Any = None
    object: str | None = None
    message: Any = None


class OpenAIClient:
    """Sends requests to an endpoint; made by ``open_client``.

    Args:
        endpoint: The server.
        http: The HTTP client, with its headers and timeouts set.
        on_retry: Called with the failure that a request is sent again for.
    """

    def __init__(
        self, endpoint: Endpoint, http: httpx2.AsyncClient, on_retry: Callable[[FailureKind], None] | None = None
    ) -> None:
        self._endpoint = endpoint
        self._http = http
        self._on_retry = on_retry or (lambda _: None)

    async def complete(
        self, prompt: Prompt, max_tokens: int, *, streaming: bool, ignore_eos: bool = False
    ) -> Completion:
        """Has a prompt continued, greedily.

        Args:
            prompt: Text; or token ids, which chat does not take.
            max_tokens: New tokens to ask for.
            streaming: Receive the text in pieces, as it is made.
            ignore_eos: Send ``ignore_eos``, which is no part of OpenAI's interface.

        Raises:
            EndpointError: The request failed.
        """
        body: dict[str, Any] = {"model": self._endpoint.model, "max_tokens": max_tokens, "temperature": 0}
        if self._endpoint.api is Api.CHAT:
            body["messages"] = [{"role": "user", "content": prompt}]
        else:
            body["prompt"] = prompt
        if streaming:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        if ignore_eos:
            body["ignore_eos"] = True
        # ASCII, since a lone surrogate, which JSON can escape, has no UTF-8.
        content = json.dumps(body, ensure_ascii=True).encode()
        try:
            async with asyncio.timeout(self._endpoint.timeout):
                return await self._send_patiently(content, streaming=streaming)
        except TimeoutError:
            raise self._failure(
                FailureKind.TIMEOUT,
                f"no complete answer within {self._endpoint.timeout:g} s, retries included. Raise --timeout, or lower "
                "--concurrency.",
            ) from None

    async def list_models(self) -> list[str]:
        """Names of the server's models; empty where it does not say."""
        import httpx2

        try:
            async with self._http.stream("GET", self._endpoint.base_url + "/models") as response:
                models = json.loads(await self._read_body(response))["data"]
            return [model["id"] for model in models if isinstance(model["id"], str)]
        except (httpx2.HTTPError, EndpointError, ValueError, LookupError, TypeError, RecursionError):
            return []

    async def _send_patiently(self, content: bytes, *, streaming: bool) -> Completion:
        retries = 0
        while True:
            try:
                return await self._send(content, streaming=streaming)
            except EndpointError as error:
                if error.kind not in RETRIED or retries == self._endpoint.max_retries:
                    raise
                pause = self._endpoint.first_pause * 2**retries if error.pause is None else error.pause
                self._on_retry(error.kind)
            retries += 1
            await asyncio.sleep(min(pause, _LONGEST_PAUSE))

    async def _send(self, content: bytes, *, streaming: bool) -> Completion:
        import httpx2

        url = self._endpoint.base_url + self._endpoint.api.path
        try:
            async with self._http.stream("POST", url, content=content) as response:
                if not response.is_success:
                    raise await self._refusal(response)
                try:
                    return await (self._read_stream(response) if streaming else self._read_whole(response))
                except (httpx2.ReadError, httpx2.RemoteProtocolError) as error:
                    raise self._failure(
                        FailureKind.ENDED_EARLY,
                        f"the connection was closed in the middle of the answer ({_words(error)}). Look at the "
                        "server's log.",
                    ) from None
        except httpx2.HTTPError as error:
            raise self._transport_failure(error) from None

    async def _read_whole(self, response: httpx2.Response) -> Completion:
        answer = self._parse(await self._read_body(response))
        end = time.perf_counter()
        if not answer.choices:
            raise self._no_choices("an empty list of choices")
        choice, usage = answer.choices[0], answer.usage or _Usage()
        return Completion(choice.new_text, (), end, choice.finish_reason, usage.prompt_tokens, usage.completion_tokens)

    async def _read_stream(self, response: httpx2.Response) -> Completion:
        """Reads a stream to its very end, since the connection can be used again only then."""
        content_type = response.headers.get("content-type", "").partition(";")[0].strip().lower()
        if content_type != "text/event-stream":
            self._parse(await self._read_body(response))  # may say what is wrong
            raise self._failure(
                FailureKind.NOT_STREAMED,
                f"found an answer of type '{content_type:.80}', expected a stream (text/event-stream). Pass "
                "--no-streaming.",
            )
        texts: list[str] = []
        times: list[float] = []
        end, finish_reason, usage = 0.0, None, _Usage()
        found_choice = done = False
        async for data in self._events(response):
            now = time.perf_counter()
            if done or (done := data.strip() == "[DONE]"):
                continue
            answer = self._parse(data)
            usage = answer.usage or usage
            if not answer.choices:
                continue
            choice = answer.choices[0]
            found_choice, end = True, now
            finish_reason = choice.finish_reason or finish_reason
            if text := choice.new_text:
                texts.append(text)
                times.append(now)
        if not done and finish_reason is None:
            raise self._failure(
                FailureKind.ENDED_EARLY,
                f"the stream ended after {len(texts)} pieces of text, without [DONE] or a finish_reason. Look at the "
                "server's log.",
            )
        if not found_choice:
            raise self._no_choices("a stream without choices")
        return Completion(
            "".join(texts), tuple(times), end, finish_reason, usage.prompt_tokens, usage.completion_tokens
        )

    async def _events(self, response: httpx2.Response) -> AsyncIterator[str]:
        """Data of server-sent events."""
        import httpx2

        limit = self._endpoint.max_response_bytes
        size = 0
        try:
            async for event in httpx2.EventSource(response, max_event_size=limit):
                size += len(event.data)
                if size > limit:
                    raise self._too_large()
                yield event.data
        except httpx2.SSEError:
            raise self._too_large() from None

    async def _read_body(self, response: httpx2.Response) -> bytes:
        body = bytearray()
        async for part in response.aiter_bytes():
            body += part
            if len(body) > self._endpoint.max_response_bytes:
                raise self._too_large()
        return bytes(body)

    def _parse(self, data: str | bytes) -> _Answer:
        """One JSON object of an answer."""
        try:
            answer = _Answer.model_validate_json(data)
        except ValidationError as error:
            first = error.errors(include_url=False, include_context=False, include_input=False)[0]
            if first["type"] == "json_invalid":
                raise self._failure(
                    FailureKind.MALFORMED_JSON,
                    f"found {_quote(data) or 'an empty body'}, which is not valid JSON. Is it an OpenAI-compatible "
                    f"server?{self._version_hint()}",
                ) from None
            place = ".".join(map(str, first["loc"])) or "at the top level"
            raise self._no_choices(f"a body of another form ({place}: {first['msg']})") from None
        if answer.error is not None or answer.object == "error":
            raise self._failure(
                FailureKind.ERROR_IN_ANSWER,
                f"the server broke off with an error: {_quote(_message(answer.error or answer.message))}.",
            )
        if answer.choices is None and answer.usage is None:
            raise self._no_choices(f"a body without 'choices': {_quote(data)}")
        for choice in answer.choices or ():
            if choice.finish_reason in _BROKEN_OFF:
                raise self._failure(
                    FailureKind.ERROR_IN_ANSWER,
                    f"the server broke off with the finish_reason '{choice.finish_reason}'. Look at the server's log.",
                )
        return answer

    async def _refusal(self, response: httpx2.Response) -> EndpointError:
        """The failure that an answer's status stands for."""
        status = response.status_code
        said, code = _refusal_words(await _read_some(response))
        reason = f"status {status}" + (f" ({_quote(said)})" if said else "")
        if response.is_redirect:
            target = response.headers.get("location", "nowhere")
            return self._failure(
                FailureKind.REDIRECT,
                f"found a redirect (status {status}) to '{target:.200}', which is not followed. Pass the base URL of "
                "the server itself.",
            )
        if status in (401, 403):
            return self._failure(FailureKind.UNAUTHORIZED, f"found {reason}. {self._key_advice()}")
        if status == 429:
            return self._failure(
                FailureKind.RATE_LIMITED,
                f"found {reason} after {self._endpoint.max_retries} retries. Lower --concurrency or --request-rate.",
                pause=_retry_after(response),
            )
        if status == 503:
            return self._failure(
                FailureKind.UNAVAILABLE,
                f"found {reason} after {self._endpoint.max_retries} retries. Wait until the server is ready.",
                pause=_retry_after(response),
            )
        if status >= 500:
            return self._failure(FailureKind.SERVER_ERROR, f"found {reason}. Look at the server's log.")
        if status in (400, 404) and (code == "model_not_found" or self._endpoint.model in said):
            models = await self.list_models()
            if self._endpoint.model not in models:
                return self._failure(FailureKind.UNKNOWN_MODEL, f"found {reason}. {_model_advice(models)}")
        if status in (404, 405):
            return self._failure(FailureKind.NOT_FOUND, f"found {reason}. {await self._path_advice()}")
        return self._failure(FailureKind.REJECTED, f"the request was refused with {reason}.{self._refusal_hint(said)}")

    def _key_advice(self) -> str:
        key = self._endpoint.key
        if key is None:
            return (
                "No key was sent: put it in an environment variable and name that with --api-key-env, for example "
                "--api-key-env OPENAI_API_KEY."
            )
        return f"The key in {key.variable} was sent and not accepted: correct the variable."

    async def _path_advice(self) -> str:
        if hint := self._version_hint():
            return hint.strip()
        if await self.list_models():
            other = Api.CHAT if self._endpoint.api is Api.COMPLETIONS else Api.COMPLETIONS
            return f"The server has no {self._endpoint.api.path} there: pass --api {other}."
        return "Correct --base-url: it is the part before /completions."

    def _version_hint(self) -> str:
        path = urlsplit(self._endpoint.base_url).path
        if "/v1" in path:
            return ""
        return f" The base URL has no /v1: try --base-url {self._endpoint.base_url}/v1."

    def _refusal_hint(self, said: str) -> str:
        if "ignore_eos" in said:
            return " Leave --ignore-eos out."
        if "prompt" in said and "string" in said:
            return " If the dataset has token ids, which this server does not take, pass --checkpoint to send text."
        return ""

    def _no_choices(self, found: str) -> EndpointError:
        return self._failure(
            FailureKind.NO_CHOICES,
            f"found {found}, expected an object with a list of choices. Is it an OpenAI-compatible server?"
            f"{self._version_hint()}",
        )

    def _too_large(self) -> EndpointError:
        return self._failure(
            FailureKind.TOO_LARGE,
            f"found an answer of more than {self._endpoint.max_response_bytes} bytes, and gave it up. Ask for fewer "
            "tokens.",
        )

    def _transport_failure(self, error: httpx2.HTTPError) -> EndpointError:
        """The failure that an exception of the HTTP library stands for."""
        import httpx2

        causes = list(_causes(error))
        host = urlsplit(self._endpoint.base_url).hostname
        read_timeout = self._endpoint.read_timeout or self._endpoint.timeout
        connect_timeout = self._endpoint.connect_timeout
        if isinstance(error, httpx2.ConnectTimeout | httpx2.PoolTimeout):
            return self._failure(
                FailureKind.CONNECT_TIMEOUT,
                f"no connection within {connect_timeout:g} s. Correct --base-url, or raise --connect-timeout.",
            )
        if isinstance(error, httpx2.TimeoutException):
            return self._failure(
                FailureKind.READ_TIMEOUT,
                f"no byte moved for {read_timeout:g} s. Raise --read-timeout if the server needs longer.",
            )
        if isinstance(error, httpx2.ProxyError):
            return self._failure(
                FailureKind.CONNECTION_FAILED,
                f"the proxy refused ({_words(error)}). Correct HTTPS_PROXY, or list the host in NO_PROXY.",
            )
        if isinstance(error, httpx2.ConnectError):
            if found := next((cause for cause in causes if isinstance(cause, ssl.SSLError)), None):
                return self._failure(FailureKind.TLS, _tls_message(found))
            if any(isinstance(cause, socket.gaierror) for cause in causes):
                return self._failure(
                    FailureKind.UNKNOWN_HOST, f"found no address for the host '{host}'. Correct --base-url."
                )
            if any(isinstance(cause, ConnectionRefusedError) for cause in causes):
                return self._failure(
                    FailureKind.CONNECTION_REFUSED,
                    "connection refused: nothing listens there. Start the server, or correct --base-url.",
                )
            return self._failure(
                FailureKind.CONNECTION_FAILED,
                f"cannot connect ({_words(causes[-1])}). Correct --base-url, or lower --concurrency.",
            )
        if isinstance(error, httpx2.NetworkError) or "without sending a response" in str(error):
            return self._failure(
                FailureKind.CONNECTION_RESET,
                f"the server closed the connection without an answer, after {self._endpoint.max_retries} retries. See "
                "its log.",
            )
        return self._failure(
            FailureKind.CONNECTION_FAILED,
            f"found no answer that is HTTP ({_words(error)}). Is it an HTTP server, and is it https:// rather than "
            "http://?",
        )

    def _failure(self, kind: FailureKind, message: str, *, pause: float | None = None) -> EndpointError:
        message = f"{self._endpoint.base_url}: {message}"
        if self._endpoint.key is not None:
            message = message.replace(self._endpoint.key.value, "***")
        return EndpointError(kind, one_line(message), pause=pause)


@asynccontextmanager
async def open_client(
    endpoint: Endpoint, *, on_retry: Callable[[FailureKind], None] | None = None
) -> AsyncIterator[OpenAIClient]:
    """Yields a client whose connections stay open between requests.

    Proxies and certificate authorities come from the environment (``HTTPS_PROXY``, ``NO_PROXY``, ``SSL_CERT_FILE``).

    Args:
        endpoint: The server.
        on_retry: Called with the failure that a request is sent again for.

    Raises:
        MissingDependencyError: The HTTP library is not installed.
        UserError: The base URL is none.
    """
    try:
        import httpx2
    except ImportError:
        raise MissingDependencyError("httpx2", "talk to a server", "endpoint") from None

    # Compressed pieces of a stream may be held back.
    headers = {"accept-encoding": "identity", "content-type": "application/json"}
    if endpoint.key is not None:
        headers["authorization"] = f"Bearer {endpoint.key.value}"
    timeout = httpx2.Timeout(endpoint.read_timeout or endpoint.timeout, connect=endpoint.connect_timeout, pool=None)
    try:
        httpx2.URL(endpoint.base_url)
        http = httpx2.AsyncClient(headers=headers, timeout=timeout, limits=httpx2.Limits())
    except (httpx2.InvalidURL, ValueError) as error:
        raise UserError(
            f"{endpoint.base_url:.80}: not a URL, or a proxy in the environment is none: {error}."
        ) from None
    async with http:
        yield OpenAIClient(endpoint, http, on_retry)


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    """An exception and everything that it was raised from, outermost first."""
    seen: set[int] = set()
    pending = [error]
    while pending:
        current = pending.pop(0)
        if current is None or id(current) in seen:
            continue
        seen.add(id(current))
        yield current
        pending += [current.__cause__, current.__context__]
        if isinstance(current, BaseExceptionGroup):
            pending += current.exceptions


def _tls_message(error: ssl.SSLError) -> str:
    if isinstance(error, ssl.SSLCertVerificationError):
        return (
            f"the server's certificate is not trusted ({error.verify_message}). Set SSL_CERT_FILE to a file with the "
            "certificate of its authority."
        )
    return f"TLS failed ({error.reason or _words(error)}). If the server speaks plain HTTP, write http://."


def _retry_after(response: httpx2.Response) -> float | None:
    """Seconds of a ``Retry-After`` header; dates are not read."""
    try:
        seconds = float(response.headers.get("retry-after", ""))
    except ValueError:
        return None
    return seconds if seconds >= 0 else None


async def _read_some(response: httpx2.Response) -> bytes:
    """The beginning of a body, which is all a message needs."""
    import httpx2

    body = bytearray()
    try:
        async for part in response.aiter_bytes():
            body += part
            if len(body) > _MAX_REFUSAL_BYTES:
                break
    except httpx2.HTTPError:
        pass  # the status says enough
    return bytes(body[:_MAX_REFUSAL_BYTES])


def _refusal_words(body: bytes) -> tuple[str, str | None]:
    """Message and code of an error's body."""
    text = body.decode("utf-8", errors="replace").strip()
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return text, None
    error = value.get("error") if isinstance(value, dict) else None
    code = error.get("code") if isinstance(error, dict) else None
    return _message(error if error is not None else value), code if isinstance(code, str) else None


def _message(error: object) -> str:
    """The words of an error object; servers put them in different places."""
    if isinstance(error, dict):
        for key in ("message", "detail", "error"):
            if error.get(key):
                return _message(error[key])
    return error if isinstance(error, str) else json.dumps(error)


def _model_advice(models: list[str]) -> str:
    if not models:
        return "Correct --model; the server does not list its models."
    shown = ", ".join(f"'{name:.80}'" for name in models[:_MAX_LISTED_MODELS])
    more = len(models) - _MAX_LISTED_MODELS
    return f"The server has {shown}" + (f" and {more} more" if more > 0 else "") + ": pass one of them with --model."


def _quote(data: str | bytes) -> str:
    text = data.decode("utf-8", errors="replace") if isinstance(data, bytes) else data
    text = " ".join(text.split())
    return text if len(text) <= _MAX_QUOTE else text[:_MAX_QUOTE] + " ..."


def _words(error: BaseException) -> str:
    return _quote(str(error)) or type(error).__name__
