"""A small HTTP server on loopback that answers as a test tells it to, and keeps what it received."""

from __future__ import annotations

import asyncio
import json
import ssl
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

_TLS_HANDSHAKE = b"\x16"


class NotHttpError(Exception):
    """A client began something else than a request."""


@dataclass
class Received:
    """One request, with the moments between which it was served."""

    method: str
    path: str
    headers: dict[str, str]
    body: Any
    begin: float
    end: float | None = None


class Answer:
    """Writes the answer to one request."""

    def __init__(self, writer: asyncio.StreamWriter) -> None:
        self._writer = writer

    async def raw(self, data: bytes) -> None:
        self._writer.write(data)
        await self._writer.drain()

    async def json(self, status: int, value: object, **headers: str) -> None:
        await self.body(status, json.dumps(value).encode(), **{"content_type": "application/json", **headers})

    async def body(self, status: int, data: bytes, **headers: str) -> None:
        lines = [f"HTTP/1.1 {status} Test", f"content-length: {len(data)}"]
        lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
        await self.raw("\r\n".join([*lines, "", ""]).encode() + data)

    async def start_stream(self) -> None:
        await self.raw(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")

    async def event(self, data: object) -> None:
        text = data if isinstance(data, str) else json.dumps(data)
        payload = f"data: {text}\n\n".encode()
        await self.raw(b"%x\r\n%s\r\n" % (len(payload), payload))

    async def end_stream(self) -> None:
        await self.raw(b"0\r\n\r\n")

    def abort(self) -> None:
        self._writer.transport.abort()


Handler = Callable[[Received, Answer], Awaitable[None]]


@dataclass
class Server:
    """A running server."""

    url: str = ""
    requests: list[Received] = field(default_factory=list)
    in_flight: int = 0
    most_in_flight: int = 0

    @property
    def posts(self) -> list[Received]:
        return [request for request in self.requests if request.method == "POST"]


@contextmanager
def serving(handler: Handler, *, tls: ssl.SSLContext | None = None) -> Iterator[Server]:
    """Runs a server in a thread until the block ends."""
    server, ready, stop = Server(), threading.Event(), asyncio.Event()
    loop = asyncio.new_event_loop()

    async def serve_connection(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            while not writer.is_closing():
                try:
                    request = await read_request(reader)
                except NotHttpError:
                    await Answer(writer).body(400, b"", connection="close")
                    break
                server.requests.append(request)
                server.in_flight += 1
                server.most_in_flight = max(server.most_in_flight, server.in_flight)
                try:
                    await handler(request, Answer(writer))
                finally:
                    server.in_flight -= 1
                    request.end = time.perf_counter()
        writer.close()

    async def run() -> None:
        listener = await asyncio.start_server(serve_connection, "127.0.0.1", 0, ssl=tls)
        port = listener.sockets[0].getsockname()[1]
        server.url = f"{'https' if tls else 'http'}://127.0.0.1:{port}/v1"
        ready.set()
        await stop.wait()
        listener.close()
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    thread = threading.Thread(target=lambda: loop.run_until_complete(run()), daemon=True)
    thread.start()
    assert ready.wait(10)
    try:
        yield server
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(10)
        loop.close()


async def read_request(reader: asyncio.StreamReader) -> Received:
    start = await reader.readexactly(1)
    if start == _TLS_HANDSHAKE:
        raise NotHttpError
    head = (start + await reader.readuntil(b"\r\n\r\n")).decode()
    first, *lines = head.split("\r\n")
    method, path, _ = first.split(" ")
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines) if name}
    content = await reader.readexactly(int(headers.get("content-length", 0)))
    return Received(method, path, headers, json.loads(content) if content else None, time.perf_counter())


def completion(text: str, *, prompt_tokens: int | None = 3, completion_tokens: int | None = 2, **extra: Any) -> Any:
    """The body of a whole completion."""
    usage = {"prompt_tokens": prompt_tokens, "completion_tokens": completion_tokens}
    usage = {name: value for name, value in usage.items() if value is not None}
    return {"choices": [{"text": text, "finish_reason": "length"}], **({"usage": usage} if usage else {}), **extra}


def piece(text: str, finish_reason: str | None = None) -> Any:
    """A piece of a streamed completion."""
    return {"choices": [{"index": 0, "text": text, "finish_reason": finish_reason}]}
