import asyncio
import itertools
import json
import shutil
import socket
import ssl
import subprocess
import time

import pytest

from tests.benchmark.openai_server import completion, piece, serving
from trtllm_mla.benchmark.openai_client import open_client
from trtllm_mla.benchmark.openai_endpoint import RETRIED, Api, ApiKey, Endpoint, EndpointError, FailureKind
from trtllm_mla.errors import MissingDependencyError

SECRET = "sk_top_secret_value"  # noqa: S105


@pytest.fixture(autouse=True)
def _no_proxy(monkeypatch):
    monkeypatch.setenv("NO_PROXY", "127.0.0.1,localhost")


def ask(url, *, streaming=False, prompt="two words", on_retry=None, ignore_eos=False, **settings):
    """One completion of two tokens from a server."""
    endpoint = Endpoint(url, "model-7", **{"timeout": 20.0, "first_pause": 0.01, **settings})

    async def run():
        async with open_client(endpoint, on_retry=on_retry) as client:
            return await client.complete(prompt, 2, streaming=streaming, ignore_eos=ignore_eos)

    return asyncio.run(run())


def failure(url, **settings):
    with pytest.raises(EndpointError) as raised:
        ask(url, **settings)
    message = str(raised.value)
    assert message.startswith(f"{url}: ")
    assert "\n" not in message
    return raised.value.kind, message.removeprefix(f"{url}: ")


def answering(status, value, **headers):
    async def handler(request, answer):
        if request.path.endswith("/models"):
            await answer.json(404, {"detail": "Not Found"})
        else:
            await answer.json(status, value, **headers)

    return handler


def streaming(*events):
    async def handler(request, answer):
        await answer.start_stream()
        for event in events:
            await answer.event(event)
        await answer.end_stream()

    return handler


def test_a_completion_is_asked_for_greedily():
    with serving(answering(200, completion("ab"))) as server:
        result = ask(server.url)
    assert (result.text, result.finish_reason, result.chunk_times) == ("ab", "length", ())
    assert (result.prompt_tokens, result.completion_tokens) == (3, 2)
    (request,) = server.requests
    assert (request.method, request.path) == ("POST", "/v1/completions")
    assert request.body == {"model": "model-7", "prompt": "two words", "max_tokens": 2, "temperature": 0}
    assert "authorization" not in request.headers
    assert request.headers["accept-encoding"] == "identity"


def test_a_chat_is_asked_for_with_a_message():
    body = {"choices": [{"message": {"role": "assistant", "content": "ab"}, "finish_reason": "stop"}]}
    with serving(answering(200, body)) as server:
        result = ask(server.url, api=Api.CHAT)
    assert (result.text, result.prompt_tokens, result.completion_tokens) == ("ab", None, None)
    assert server.requests[0].path == "/v1/chat/completions"
    assert server.requests[0].body["messages"] == [{"role": "user", "content": "two words"}]
    assert "prompt" not in server.requests[0].body


def test_token_ids_a_key_and_ignore_eos_are_sent():
    with serving(answering(200, completion("ab"))) as server:
        ask(server.url, prompt=[5, 0, 3], key=ApiKey("SERVER_KEY", SECRET), ignore_eos=True)
    (request,) = server.requests
    assert request.body["prompt"] == [5, 0, 3]
    assert request.body["ignore_eos"] is True
    assert request.headers["authorization"] == f"Bearer {SECRET}"


def test_a_lone_surrogate_can_be_sent():
    with serving(answering(200, completion("ab"))) as server:
        ask(server.url, prompt="a\ud800b")
    assert server.requests[0].body["prompt"] == "a\ud800b"


def test_pieces_of_a_stream_are_timed():
    sent = []

    async def handler(request, answer):
        await answer.start_stream()
        for text, reason in (("a", None), ("", None), ("b", None), ("", "length")):
            sent.append(time.perf_counter())
            await answer.event(piece(text, reason))
            await asyncio.sleep(0.3)
        await answer.event({"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 2}})
        await answer.event("[DONE]")
        await answer.end_stream()

    with serving(handler) as server:
        result = ask(server.url, streaming=True)
    assert server.requests[0].body["stream_options"] == {"include_usage": True}
    assert (result.text, result.finish_reason) == ("ab", "length")
    assert (result.prompt_tokens, result.completion_tokens) == (3, 2)
    first, second = result.chunk_times
    for moment, begin in zip((first, second, result.end), (sent[0], sent[2], sent[3]), strict=True):
        assert begin < moment < begin + 0.29


def test_pieces_of_a_chat_have_the_text_of_reasoning_too():
    def delta(**values):
        return {"choices": [{"delta": values, "finish_reason": None}]}

    events = [
        delta(role="assistant", content=""),
        delta(reasoning_content="th"),
        delta(reasoning="ink"),
        delta(content="ab"),
        {"choices": [{"delta": {}, "finish_reason": "stop"}]},
    ]
    with serving(streaming(*events, "[DONE]")) as server:
        result = ask(server.url, streaming=True, api=Api.CHAT)
    assert result.text == "thinkab"
    assert len(result.chunk_times) == 3


def test_a_stream_may_end_with_a_finish_reason_alone():
    with serving(streaming(piece("a"), piece("b", "stop"))) as server:
        assert ask(server.url, streaming=True).text == "ab"


def test_connections_are_used_again():
    connections = set()

    async def handler(request, answer):
        connections.add(answer._writer.get_extra_info("peername"))
        await answer.start_stream()
        await answer.event(piece("a", "stop"))
        await answer.event("[DONE]")
        await answer.end_stream()

    async def run(url):
        async with open_client(Endpoint(url, "model-7")) as client:
            for _ in range(3):
                await client.complete("two words", 2, streaming=True)

    with serving(handler) as server:
        asyncio.run(run(server.url))
    assert len(server.requests) == 3
    assert len(connections) == 1


def test_connection_refused():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}/v1"
    kind, message = failure(url)
    assert kind is FailureKind.CONNECTION_REFUSED
    assert message == "connection refused: nothing listens there. Start the server, or correct --base-url."


def test_both_addresses_of_a_host_refuse():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://localhost:{free.getsockname()[1]}/v1"
    assert failure(url)[0] is FailureKind.CONNECTION_REFUSED


def test_unknown_host(monkeypatch):
    def resolve(*arguments, **options):
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    monkeypatch.setenv("NO_PROXY", "*")
    kind, message = failure("http://server.invalid:8000/v1")
    assert kind is FailureKind.UNKNOWN_HOST
    assert message == "found no address for the host 'server.invalid'. Correct --base-url."


def test_tls_to_a_server_without_it():
    async def handler(request, answer):
        raise AssertionError

    with serving(handler) as server:
        kind, message = failure(server.url.replace("http://", "https://"))
    assert kind is FailureKind.TLS
    assert message.startswith("TLS failed (")
    assert message.endswith("If the server speaks plain HTTP, write http://.")


@pytest.fixture(scope="module")
def certificate(tmp_path_factory):
    """A self-signed certificate for 127.0.0.1, and its key."""
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not installed")
    folder = tmp_path_factory.mktemp("tls")
    cert, key = folder / "cert.pem", folder / "key.pem"
    request = "req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=127.0.0.1 -addext subjectAltName=IP:127.0.0.1"
    subprocess.run(
        ["openssl", *request.split(), "-keyout", key, "-out", cert],
        check=True,
        capture_output=True,
    )
    return cert, key


@pytest.fixture
def tls(certificate):
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*certificate)
    return context


def test_a_certificate_that_nobody_trusts(tls, monkeypatch):
    monkeypatch.delenv("SSL_CERT_FILE", raising=False)
    with serving(answering(200, completion("ab")), tls=tls) as server:
        kind, message = failure(server.url)
    assert kind is FailureKind.TLS
    assert message.startswith("the server's certificate is not trusted (self")
    assert "Set SSL_CERT_FILE" in message


def test_the_advice_about_certificates_is_right(tls, certificate, monkeypatch):
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate[0]))
    with serving(answering(200, completion("ab")), tls=tls) as server:
        assert ask(server.url).text == "ab"


def test_plain_http_to_a_server_with_tls(tls):
    with serving(answering(200, completion("ab")), tls=tls) as server:
        kind, _ = failure(server.url.replace("https://", "http://"), max_retries=0)
    assert kind in (FailureKind.CONNECTION_RESET, FailureKind.CONNECTION_FAILED)


def test_a_server_that_does_not_speak_http():
    async def handler(request, answer):
        await answer.raw(b"220 mail.example.com ESMTP\r\n\r\n")
        answer.abort()

    with serving(handler) as server:
        kind, message = failure(server.url, max_retries=0)
    assert kind is FailureKind.CONNECTION_FAILED
    assert "found no answer that is HTTP" in message


@pytest.mark.parametrize("status", [401, 403])
def test_no_key_was_sent(status):
    with serving(answering(status, {"error": {"message": "You need a key"}})) as server:
        kind, message = failure(server.url)
    assert kind is FailureKind.UNAUTHORIZED
    assert message == (
        f"found status {status} (You need a key). No key was sent: put it in an environment variable and name that "
        "with --api-key-env, for example --api-key-env OPENAI_API_KEY."
    )


@pytest.mark.parametrize("status", [401, 403])
def test_a_key_was_not_accepted_and_is_not_repeated(status):
    body = {"error": {"message": f"Incorrect API key provided: {SECRET}."}}
    with serving(answering(status, body)) as server:
        kind, message = failure(server.url, key=ApiKey("SERVER_KEY", SECRET))
    assert kind is FailureKind.UNAUTHORIZED
    assert message == (
        f"found status {status} (Incorrect API key provided: ***.). The key in SERVER_KEY was sent and not accepted: "
        "correct the variable."
    )


UNKNOWN_MODEL = [
    (404, {"error": {"message": "The model does not exist", "code": "model_not_found"}}),
    (404, {"object": "error", "message": "The model `model-7` does not exist.", "code": 404}),
    (400, {"detail": "Server is pinned to 'other'; requested 'model-7'."}),
]


@pytest.mark.parametrize(("status", "body"), UNKNOWN_MODEL)
def test_an_unknown_model_with_those_of_the_server(status, body):
    async def handler(request, answer):
        if request.path == "/v1/models":
            await answer.json(200, {"data": [{"id": "other"}, {"id": "third"}]})
        else:
            await answer.json(status, body)

    with serving(handler) as server:
        kind, message = failure(server.url)
    assert kind is FailureKind.UNKNOWN_MODEL
    assert message.startswith(f"found status {status} (")
    assert message.endswith("The server has 'other', 'third': pass one of them with --model.")


@pytest.mark.parametrize(("status", "body"), UNKNOWN_MODEL)
def test_an_unknown_model_of_a_server_that_lists_none(status, body):
    with serving(answering(status, body)) as server:
        kind, message = failure(server.url)
    assert kind is FailureKind.UNKNOWN_MODEL
    assert message.endswith("Correct --model; the server does not list its models.")


def test_a_refusal_that_names_a_model_the_server_has_is_another_one():
    async def handler(request, answer):
        if request.path == "/v1/models":
            await answer.json(200, {"data": [{"id": "model-7"}]})
        else:
            await answer.json(400, {"error": {"message": "model-7 takes at most 2048 tokens"}})

    with serving(handler) as server:
        kind, message = failure(server.url)
    assert kind is FailureKind.REJECTED
    assert message == "the request was refused with status 400 (model-7 takes at most 2048 tokens)."


def test_a_base_url_without_v1():
    with serving(answering(404, {"detail": "Not Found"})) as server:
        url = server.url.removesuffix("/v1")
        kind, message = failure(url)
    assert kind is FailureKind.NOT_FOUND
    assert message == f"found status 404 (Not Found). The base URL has no /v1: try --base-url {url}/v1."


def test_a_path_that_the_server_does_not_have():
    with serving(answering(404, {"detail": "Not Found"})) as server:
        kind, message = failure(server.url)
    assert kind is FailureKind.NOT_FOUND
    assert message.endswith("Correct --base-url: it is the part before /completions.")


def test_an_interface_that_the_server_does_not_have():
    async def handler(request, answer):
        if request.path == "/v1/models":
            await answer.json(200, {"data": [{"id": "model-7"}]})
        else:
            await answer.json(404, {"detail": "Not Found"})

    with serving(handler) as server:
        assert failure(server.url)[1].endswith("The server has no /completions there: pass --api chat.")
        assert failure(server.url, api=Api.CHAT)[1].endswith("no /chat/completions there: pass --api completions.")


def test_token_ids_that_the_server_does_not_take():
    with serving(answering(400, {"detail": "prompt must be a string."})) as server:
        kind, message = failure(server.url, prompt=[1, 2])
    assert kind is FailureKind.REJECTED
    assert message.endswith("pass --checkpoint to send text.")


def test_a_key_of_the_body_that_the_server_does_not_know():
    with serving(answering(422, {"detail": "Unexpected fields in the request: {'ignore_eos'}"})) as server:
        kind, message = failure(server.url, ignore_eos=True)
    assert kind is FailureKind.REJECTED
    assert message.endswith("Leave --ignore-eos out.")


def test_a_server_error():
    async def handler(request, answer):
        await answer.body(500, b"Internal\nServer Error", content_type="text/plain")

    with serving(handler) as server:
        assert failure(server.url) == (
            FailureKind.SERVER_ERROR,
            "found status 500 (Internal Server Error). Look at the server's log.",
        )
    assert len(server.requests) == 1


@pytest.mark.parametrize("status", [301, 307, 308])
def test_a_redirect_is_not_followed(status):
    async def handler(request, answer):
        await answer.json(status, {}, location=f"{other.url}/completions")

    with serving(answering(200, completion("ab"))) as other, serving(handler) as server:
        kind, message = failure(server.url, key=ApiKey("SERVER_KEY", SECRET))
    assert kind is FailureKind.REDIRECT
    assert f"(status {status}) to '{other.url}/completions', which is not followed" in message
    assert other.requests == []


@pytest.mark.parametrize(
    ("status", "kind", "words"),
    [
        (429, FailureKind.RATE_LIMITED, "found status 429 (busy) after 2 retries. Lower --concurrency"),
        (503, FailureKind.UNAVAILABLE, "found status 503 (busy) after 2 retries. Wait until the server is ready."),
    ],
)
def test_retries_are_bounded_and_counted(status, kind, words):
    retried = []
    with serving(answering(status, {"error": "busy"})) as server:
        found, message = failure(server.url, max_retries=2, on_retry=retried.append)
    assert found is kind
    assert message.startswith(words)
    assert retried == [kind] * 2
    assert len(server.requests) == 3


def test_pauses_between_retries_double():
    with serving(answering(503, {})) as server:
        failure(server.url, max_retries=3, first_pause=0.1)
    begins = [request.begin for request in server.requests]
    pauses = [later - earlier for earlier, later in itertools.pairwise(begins)]
    for pause, least in zip(pauses, (0.1, 0.2, 0.4), strict=True):
        assert least <= pause < least + 2


def test_a_retry_waits_as_long_as_the_server_asks():
    async def handler(request, answer):
        if len(server.requests) == 1:
            await answer.json(429, {}, retry_after="0.4")
        else:
            await answer.json(200, completion("ab"))

    with serving(handler) as server:
        assert ask(server.url).text == "ab"
    first, second = server.requests
    assert 0.4 <= second.begin - first.begin < 2


def test_a_reset_connection_is_tried_again():
    async def handler(request, answer):
        if len(server.requests) < 3:
            answer.abort()
        else:
            await answer.json(200, completion("ab"))

    retried = []
    with serving(handler) as server:
        assert ask(server.url, on_retry=retried.append).text == "ab"
    assert retried == [FailureKind.CONNECTION_RESET] * 2


def test_a_connection_that_is_reset_each_time():
    async def handler(request, answer):
        answer.abort()

    with serving(handler) as server:
        kind, message = failure(server.url, max_retries=1)
    assert kind is FailureKind.CONNECTION_RESET
    assert message.startswith("the server closed the connection without an answer, after 1 retries.")
    assert len(server.requests) == 2


def test_nothing_else_is_tried_again():
    assert {kind.value for kind in RETRIED} == {"rate_limited", "unavailable", "connection_reset"}


@pytest.mark.parametrize("streaming", [True, False])
def test_malformed_json(streaming):
    async def handler(request, answer):
        if streaming:
            await answer.start_stream()
            await answer.event('{"choices": [')
            await answer.end_stream()
        else:
            await answer.body(200, b'{"choices": [', content_type="application/json")

    with serving(handler) as server:
        kind, message = failure(server.url, streaming=streaming)
    assert kind is FailureKind.MALFORMED_JSON
    assert message.startswith('found {"choices": [, which is not valid JSON.')


def test_an_empty_body():
    async def handler(request, answer):
        await answer.body(200, b"", content_type="application/json")

    with serving(handler) as server:
        assert failure(server.url)[1].startswith("found an empty body, which is not valid JSON.")


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"content": "ab"}, 'found a body without \'choices\': {"content": "ab"}'),
        ({"choices": []}, "found an empty list of choices"),
        ({"choices": "ab"}, "found a body of another form (choices: Input should be a valid array"),
        ({"choices": [{"text": 5}]}, "found a body of another form (choices.0.text: "),
        ({"choices": [{"text": "a"}], "usage": {"completion_tokens": -1}}, "(usage.completion_tokens: "),
        ([1], "found a body of another form (at the top level: "),
    ],
)
def test_a_body_without_choices(body, words):
    with serving(answering(200, body)) as server:
        kind, message = failure(server.url)
        assert kind is FailureKind.NO_CHOICES
        assert words in message
        assert "expected an object with a list of choices" in message
        assert "/v1" not in message
        assert message.count("Is it an OpenAI-compatible server?") == 1
        url = server.url.removesuffix("/v1")
        assert failure(url)[1].endswith(f"The base URL has no /v1: try --base-url {url}/v1.")


@pytest.mark.parametrize("events", [("[DONE]",), ({"choices": []}, "[DONE]"), ({"content": "ab"},)])
def test_a_stream_without_choices(events):
    with serving(streaming(*events)) as server:
        assert failure(server.url, streaming=True)[0] is FailureKind.NO_CHOICES


def test_a_body_in_place_of_a_stream():
    with serving(answering(200, completion("ab"))) as server:
        kind, message = failure(server.url, streaming=True)
    assert kind is FailureKind.NOT_STREAMED
    assert message == (
        "found an answer of type 'application/json', expected a stream (text/event-stream). Pass --no-streaming."
    )


def test_a_stream_that_ends_in_order_but_early():
    with serving(streaming(piece("a"), piece("b"))) as server:
        kind, message = failure(server.url, streaming=True)
    assert kind is FailureKind.ENDED_EARLY
    assert message.startswith("the stream ended after 2 pieces of text, without [DONE] or a finish_reason.")


@pytest.mark.parametrize("streaming", [True, False])
def test_a_connection_that_ends_in_the_middle(streaming):
    async def handler(request, answer):
        if streaming:
            await answer.start_stream()
            await answer.event(piece("a"))
        else:
            await answer.raw(b'HTTP/1.1 200 OK\r\ncontent-length: 99\r\n\r\n{"choices"')
        await asyncio.sleep(0.1)
        answer.abort()

    with serving(handler) as server:
        kind, message = failure(server.url, streaming=streaming)
    assert kind is FailureKind.ENDED_EARLY
    assert message.startswith("the connection was closed in the middle of the answer (")
    assert len(server.requests) == 1


@pytest.mark.parametrize(
    "error",
    [
        {"error": {"message": "out of memory", "type": "server_error"}},
        {"error": "out of memory"},
        {"object": "error", "message": "out of memory"},
    ],
)
@pytest.mark.parametrize("pieces", [True, False])
def test_an_error_in_an_answer(error, pieces):
    with serving(streaming(piece("a"), error) if pieces else answering(200, error)) as server:
        kind, message = failure(server.url, streaming=pieces)
    assert kind is FailureKind.ERROR_IN_ANSWER
    assert message == "the server broke off with an error: out of memory."


@pytest.mark.parametrize("reason", ["abort", "error"])
@pytest.mark.parametrize("pieces", [True, False])
def test_a_request_that_the_server_gave_up(reason, pieces):
    last = piece("", reason)
    with serving(streaming(piece("a"), last, "[DONE]") if pieces else answering(200, last)) as server:
        kind, message = failure(server.url, streaming=pieces)
    assert kind is FailureKind.ERROR_IN_ANSWER
    assert message.startswith(f"the server broke off with the finish_reason '{reason}'.")


@pytest.mark.parametrize("limit", [100, 300])
def test_a_stream_that_is_too_large(limit):
    with serving(streaming(piece("a" * 40), *[piece("b" * 40)] * 50, piece("", "stop"))) as server:
        kind, message = failure(server.url, streaming=True, max_response_bytes=limit)
    assert kind is FailureKind.TOO_LARGE
    assert message.startswith(f"found an answer of more than {limit} bytes")


def test_a_piece_that_never_ends():
    async def handler(request, answer):
        await answer.start_stream()
        while True:
            await answer.raw(b"400\r\n" + b"x" * 1024 + b"\r\n")

    with serving(handler) as server:
        assert failure(server.url, streaming=True, max_response_bytes=5000)[0] is FailureKind.TOO_LARGE


def test_a_body_that_is_too_large():
    with serving(answering(200, completion("a" * 5000))) as server:
        assert failure(server.url, max_response_bytes=4000)[0] is FailureKind.TOO_LARGE


def test_a_refusal_without_end_is_read_in_part():
    async def handler(request, answer):
        await answer.raw(b"HTTP/1.1 500 Test\r\ncontent-length: 100000000000\r\n\r\n")
        while True:
            await answer.raw(b"x" * 65536)

    with serving(handler) as server:
        kind, message = failure(server.url)
    assert kind is FailureKind.SERVER_ERROR
    assert len(message) < 400


async def _silence(request, answer):
    await asyncio.sleep(60)


def test_the_whole_request_takes_too_long():
    with serving(_silence) as server:
        begin = time.perf_counter()
        kind, message = failure(server.url, timeout=0.3, read_timeout=10.0)
    assert time.perf_counter() - begin < 5
    assert kind is FailureKind.TIMEOUT
    assert message.startswith("no complete answer within 0.3 s, retries included. Raise --timeout")


def test_a_stream_may_not_trickle_beyond_the_timeout():
    async def handler(request, answer):
        await answer.start_stream()
        while True:
            await answer.raw(b"6\r\n: hi\n\n\r\n")
            await asyncio.sleep(0.05)

    with serving(handler) as server:
        assert failure(server.url, streaming=True, timeout=0.5, read_timeout=0.3)[0] is FailureKind.TIMEOUT


def test_no_byte_comes():
    with serving(_silence) as server:
        kind, message = failure(server.url, read_timeout=0.3)
    assert kind is FailureKind.READ_TIMEOUT
    assert message.startswith("no byte moved for 0.3 s. Raise --read-timeout")
    assert len(server.requests) == 1


def test_no_connection_comes():
    # A listener whose queue is full answers no further handshake.
    with socket.socket() as listener, socket.socket() as one, socket.socket() as two:
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        for client in (one, two):
            client.setblocking(False)
            client.connect_ex(listener.getsockname())
        kind, message = failure(f"http://127.0.0.1:{listener.getsockname()[1]}/v1", connect_timeout=0.3)
    assert kind is FailureKind.CONNECT_TIMEOUT
    assert message.startswith("no connection within 0.3 s.")


def test_a_proxy_that_refuses(monkeypatch):
    async def handler(request, answer):
        await answer.body(407, b"")

    with serving(handler) as proxy:
        monkeypatch.setenv("NO_PROXY", "")
        monkeypatch.setenv("HTTPS_PROXY", proxy.url.removesuffix("/v1"))
        kind, message = failure("https://server.invalid/v1")
    assert kind is FailureKind.CONNECTION_FAILED
    assert message.startswith("the proxy refused (407")


@pytest.mark.parametrize(
    "value", [{"data": 5}, {"data": [{"id": 5}, {"id": "a"}]}, {"data": [{}]}, [], "x" * 10, {"data": {"a": 1}}]
)
def test_a_list_of_models_may_be_anything(value):
    async def run(url):
        async with open_client(Endpoint(url, "model-7")) as client:
            return await client.list_models()

    async def handler(request, answer):
        await answer.body(200, json.dumps(value).encode())

    with serving(handler) as server:
        assert asyncio.run(run(server.url)) in ([], ["a"])


def test_without_the_library_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "httpx2", None)
    with pytest.raises(MissingDependencyError, match=r"trtllm-mla\[endpoint\]"):
        ask("http://127.0.0.1:1/v1")
