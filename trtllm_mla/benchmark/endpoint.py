"""Measuring a server with OpenAI's HTTP API on a dataset, from the outside.

Datasets, records and metrics are those of ``bench throughput``. The requests travel to a server, and it counts their
tokens, where it does.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from importlib.metadata import version
from pathlib import Path
from statistics import fmean
from typing import Any

from trtllm_mla._version import __version__
from trtllm_mla.benchmark import metrics
from trtllm_mla.benchmark.dataset import DatasetLine, dataset_sha256, read_dataset
from trtllm_mla.benchmark.driver import Load, Progress, check_request_rate, poisson_arrivals
from trtllm_mla.benchmark.machine import Machine
from trtllm_mla.benchmark.openai_client import Completion, OpenAIClient, Prompt, open_client
from trtllm_mla.benchmark.openai_endpoint import SETUP, Api, Endpoint, EndpointError, FailureKind
from trtllm_mla.benchmark.records import RequestOutcome, RequestRecord
from trtllm_mla.benchmark.subject import RESULT_FORMAT
from trtllm_mla.checkpoint.tokenizer import TextCodec
from trtllm_mla.errors import UserError

TIMER = (
    "wall clock of the client (perf_counter), from a request's arrival to the last piece of its answer: waiting for a "
    "place, retries and the network included; not reading of the dataset, tokenisation, warm-up"
)


class CountedBy(StrEnum):
    """Where the number of new tokens of a request comes from."""

    USAGE = "usage"
    CHUNKS = "chunks"
    TOKENIZER = "tokenizer"


@dataclass(frozen=True)
class EndpointOptions:
    """How a dataset is sent to a server.

    Attributes:
        num_requests: Requests taken from the dataset; None is all.
        concurrency: Requests in flight at most; None is no limit.
        request_rate: Requests per second that arrive, as a Poisson process; infinity lets each come as soon as it may.
        warmup: Requests sent before the clock starts: the dataset's first ones with their prompts backwards, so that
            no prefix that the server caches helps a measured one.
        streaming: Whether text is received in pieces, so that the times of first and further tokens are known.
        ignore_eos: Whether the server is asked to go on after a stop token.
        seed: Decides the arrivals.
    """

    num_requests: int | None = None
    concurrency: int | None = None
    request_rate: float = math.inf
    warmup: int = 2
    streaming: bool = True
    ignore_eos: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        limits = {"num_requests": 1, "concurrency": 1, "warmup": 0, "seed": 0}
        for name, least in limits.items():
            value = getattr(self, name)
            if value is not None and value < least:
                raise UserError(f"{name}: found {value}, expected at least {least}.")
        check_request_rate(self.request_rate)

    def load(self, num_requests: int) -> Load:
        """When requests arrive."""
        if math.isinf(self.request_rate):
            return Load(self.concurrency)
        return Load(self.concurrency, poisson_arrivals(num_requests, self.request_rate, seed=self.seed))


@dataclass(frozen=True)
class Query:
    """One request as it is sent.

    Attributes:
        task_id: Its number in the dataset.
        prompt: Text or token ids.
        output_tokens: New tokens to ask for.
        input_tokens: Token ids that the dataset has for its prompt; None where it has text.
    """

    task_id: int
    prompt: Prompt
    output_tokens: int
    input_tokens: int | None = None

    def backwards(self) -> Query:
        """The same with the words, or token ids, of its prompt in reverse: as long, with another beginning."""
        if isinstance(self.prompt, str):
            return replace(self, prompt=" ".join(reversed(self.prompt.split(" "))))
        return replace(self, prompt=self.prompt[::-1])


@dataclass(frozen=True)
class Reply:
    """What became of one request.

    Attributes:
        record: Its moments and tokens; of a failed one, until it was given up.
        counted_by: Where the number of its new tokens comes from; None where it failed.
        text: The new text.
        failure: Why it failed.
    """

    record: RequestRecord
    counted_by: CountedBy | None = None
    text: str = ""
    failure: EndpointError | None = None

    def to_json(self) -> dict[str, Any]:
        """A line of the request log."""
        return {
            **self.record.to_json(),
            "token_times_s": self.record.token_times,
            "counted_by": self.counted_by,
            "text": self.text,
            "failure": self.failure and {"kind": self.failure.kind, "message": str(self.failure)},
        }


@dataclass(frozen=True)
class EndpointReport:
    """What measuring a server came to.

    Attributes:
        endpoint: The server.
        options: How it was measured.
        dataset: The dataset's file.
        dataset_sha256: Its hash.
        machine: What the client ran on.
        queries: What was sent.
        replies: What became of each.
        retries: Requests that were sent again, by the reason; the warm-up's not included.
    """

    endpoint: Endpoint
    options: EndpointOptions
    dataset: Path
    dataset_sha256: str
    machine: Machine
    queries: list[Query]
    replies: list[Reply]
    retries: Counter[FailureKind]

    @property
    def records(self) -> list[RequestRecord]:
        """The records of all requests."""
        return [reply.record for reply in self.replies]

    @property
    def failures(self) -> Counter[FailureKind]:
        """How many requests failed, by the kind of failure."""
        return Counter(reply.failure.kind for reply in self.replies if reply.failure is not None)

    @property
    def examples(self) -> dict[FailureKind, str]:
        """The first message of each kind of failure."""
        found: dict[FailureKind, str] = {}
        for reply in self.replies:
            if reply.failure is not None:
                found.setdefault(reply.failure.kind, str(reply.failure))
        return found

    def to_json(self) -> dict[str, Any]:
        """The report as plain values. Blocks and keys are trtllm-bench's; ours are in one more.

        What a client cannot know of a server is None. Failed requests are in the block ``trtllm_mla`` only.
        """
        records = self.records
        blocks = {
            **self._head(),
            "request_info": metrics.request_info(records),
            "performance": {**metrics.performance(records), "output_throughput_per_gpu_tok_s": None},
        }
        if self.options.streaming:
            blocks["streaming_metrics"] = metrics.streaming_metrics(records)
        lengths = [
            (reply.record.input_tokens, query.output_tokens)
            for query, reply in zip(self.queries, self.replies, strict=True)
            if reply.failure is None
        ]
        return {**blocks, "dataset": metrics.dataset(lengths), "trtllm_mla": self._own_block()}

    def _head(self) -> dict[str, Any]:
        return {
            "engine": {
                "model": self.endpoint.model,
                "model_path": None,
                "engine_dir": self.endpoint.base_url,
                "version": None,
                "backend": f"openai-{self.endpoint.api}",
                "dtype": None,
                "kv_cache_dtype": None,
                "quantization": None,
                "max_input_length": None,
                "max_sequence_length": None,
            },
            "machine": {"name": None, "memory.total": None, "clocks.mem": None},
            "world_info": {
                "tp_size": None,
                "pp_size": None,
                "ep_size": None,
                "world_size": None,
                "max_batch_size": None,
                "max_num_tokens": None,
                "scheduling_policy": None,
                "kv_cache_percentage": None,
                "issue_rate": metrics.issue_rate(self.records),
            },
        }

    def _own_block(self) -> dict[str, Any]:
        endpoint, options = self.endpoint, self.options
        finished = Counter(reply.record.finish_reason for reply in self.replies)
        return {
            "format": RESULT_FORMAT,
            "kind": "endpoint",
            "executor": f"{endpoint.base_url}{endpoint.api.path}, model {endpoint.model}",
            "timer": TIMER,
            "sha256": None,
            "kernels_sha256": None,
            "versions": {
                "trtllm_mla": __version__,
                "python": self.machine.python,
                "httpx2": version("httpx2"),
            },
            "options": {
                "base_url": endpoint.base_url,
                "model": endpoint.model,
                "api": endpoint.api,
                "api_key_env": endpoint.key and endpoint.key.variable,
                "timeout_s": endpoint.timeout,
                "connect_timeout_s": endpoint.connect_timeout,
                "read_timeout_s": endpoint.read_timeout,
                "max_retries": endpoint.max_retries,
                "dataset": str(self.dataset),
                "dataset_sha256": self.dataset_sha256,
                **asdict(options),
                "request_rate": options.request_rate if math.isfinite(options.request_rate) else None,
            },
            "machine": asdict(self.machine),
            "dataset_input_tokens": self._dataset_input_tokens(),
            "output_tokens_counted_by": dict(Counter(reply.counted_by for reply in self.replies if reply.counted_by)),
            "finish_reasons": dict(finished),
            "failures": dict(self.failures),
            "failure_examples": self.examples,
            "retries": dict(self.retries),
            "requests": [record.to_json() for record in self.records],
        }

    def _dataset_input_tokens(self) -> float | None:
        """Average number of token ids in the dataset's prompts; what the server counts may differ from it."""
        counts = [query.input_tokens for query in self.queries if query.input_tokens is not None]
        return fmean(counts) if len(counts) == len(self.queries) else None


def bench_endpoint(
    endpoint: Endpoint,
    dataset: Path,
    options: EndpointOptions,
    *,
    checkpoint: Path | None = None,
    on_phase: Callable[[str], None] | None = None,
    on_progress: Callable[[Progress], None] | None = None,
) -> EndpointReport:
    """Sends a dataset to a server.

    A request that fails in the warm-up ends the benchmark, and so does one that fails before any has succeeded, if of
    something that all of them must fail of. Other failures are counted.

    Args:
        endpoint: The server.
        dataset: The dataset's file.
        options: How to send it.
        checkpoint: Hugging Face directory whose tokenizer turns token ids into text, for servers that take no ids, and
            counts tokens where the server does not say how many there were.
        on_phase: Called with a line before each part.
        on_progress: Called when a request has ended.

    Raises:
        UserError: The dataset is unusable, or nothing can be measured.
        MissingDependencyError: The HTTP library is not installed.
    """
    say = on_phase or (lambda _: None)
    say("Reading the dataset")
    codec = TextCodec.load(checkpoint) if checkpoint is not None else None
    queries = [
        _query(line, endpoint.api, codec, f"{dataset}, line {number}")
        for number, line in read_dataset(dataset, max_requests=options.num_requests)
    ]
    run = _Run(endpoint, options, codec)
    replies = asyncio.run(run.measure(queries, say, on_progress))
    failures = [reply.failure for reply in replies if reply.failure is not None]
    if len(failures) == len(replies):
        raise UserError(f"All {len(replies)} requests failed; the first of {failures[0]}")
    return EndpointReport(
        endpoint, options, dataset, dataset_sha256(dataset), Machine.here(), queries, replies, run.retries
    )


def _query(line: DatasetLine, api: Api, codec: TextCodec | None, source: str) -> Query:
    """Token ids win over text, as elsewhere, and become text where the server is to be sent some."""
    token_ids = line.token_ids
    prompt: Prompt | None = line.prompt
    if token_ids is not None and codec is not None:
        prompt = _decode(token_ids, codec, source)
    elif token_ids is not None and api is Api.COMPLETIONS:
        prompt = token_ids
    if prompt is None:
        raise UserError(
            f"{source}: found token ids without a prompt, expected text for --api {api}. Pass --checkpoint, whose "
            "tokenizer makes text of them."
        )
    return Query(line.task_id, prompt, line.output_tokens, None if token_ids is None else len(token_ids))


def _decode(token_ids: Sequence[int], codec: TextCodec, source: str) -> str:
    vocab_size = codec.tokenizer.get_vocab_size()
    if max(token_ids) >= vocab_size:
        raise UserError(
            f"{source}: found token id {max(token_ids)}, expected ids below the {vocab_size} of the checkpoint's "
            "tokenizer. Name the checkpoint that the dataset was made for."
        )
    if text := codec.decode(token_ids):
        return text
    raise UserError(f"{source}: found nothing but special tokens, which have no text. Leave the request out.")


@dataclass
class _Run:
    """One measurement of a server.

    Attributes:
        endpoint: The server.
        options: How it is measured.
        codec: Makes token counts where the server sends none.
        retries: What requests were sent again for.
    """

    endpoint: Endpoint
    options: EndpointOptions
    codec: TextCodec | None
    retries: Counter[FailureKind] = field(default_factory=Counter)
    _succeeded: bool = False

    async def measure(
        self, queries: Sequence[Query], say: Callable[[str], None], on_progress: Callable[[Progress], None] | None
    ) -> list[Reply]:
        """Warms the server up, and sends all requests."""

        def on_retry(kind: FailureKind) -> None:
            self.retries[kind] += 1

        async with open_client(self.endpoint, on_retry=on_retry) as client:
            if self.options.warmup:
                say(f"Warming up with {self.options.warmup} requests")
                warmup = [queries[index % len(queries)].backwards() for index in range(self.options.warmup)]
                for reply in await self._serve(client, warmup, Load(self.options.concurrency), None):
                    if reply.failure is not None:
                        raise reply.failure
                self.retries.clear()
            say(f"Sending {len(queries)} requests")
            return await self._serve(client, queries, self.options.load(len(queries)), on_progress)

    async def _serve(
        self,
        client: OpenAIClient,
        queries: Sequence[Query],
        load: Load,
        on_progress: Callable[[Progress], None] | None,
    ) -> list[Reply]:
        """Sends requests in their order, each when it is due and there is a place."""
        replies: dict[int, Reply] = {}
        output_tokens = in_flight = 0
        places = asyncio.Semaphore(load.concurrency or len(queries))
        begin = time.perf_counter()

        async def send(index: int, arrival: float) -> None:
            nonlocal output_tokens, in_flight
            in_flight += 1
            try:
                reply = replies[index] = await self._ask(client, queries[index], begin, arrival)
            finally:
                in_flight -= 1
                places.release()
            output_tokens += reply.record.output_tokens
            if on_progress is not None:
                seconds = time.perf_counter() - begin
                on_progress(Progress(len(replies), len(queries), output_tokens, seconds, None, in_flight))

        try:
            async with asyncio.TaskGroup() as group:
                for index in range(len(queries)):
                    arrival = load.arrivals[index] if load.arrivals is not None else None
                    if arrival is not None:
                        await asyncio.sleep(begin + arrival - time.perf_counter())
                    await places.acquire()
                    if arrival is None:
                        arrival = 0.0 if load.concurrency is None else time.perf_counter() - begin
                    group.create_task(send(index, arrival))
        except ExceptionGroup as errors:
            if found := errors.subgroup(UserError):
                raise found.exceptions[0] from None
            raise
        return [replies[index] for index in range(len(queries))]

    async def _ask(self, client: OpenAIClient, query: Query, begin: float, arrival: float) -> Reply:
        """Sends one request.

        Raises:
            EndpointError: It failed, as all others must.
        """
        options = self.options
        try:
            completion = await client.complete(
                query.prompt, query.output_tokens, streaming=options.streaming, ignore_eos=options.ignore_eos
            )
            reply = self._reply(query, completion, begin, arrival)
        except EndpointError as error:
            if error.kind in SETUP and not self._succeeded:
                raise
            end = time.perf_counter() - begin
            record = RequestRecord(query.task_id, query.input_tokens or 0, 0, arrival, (), end, "error")
            return Reply(record, failure=error)
        self._succeeded = True
        return reply

    def _reply(self, query: Query, completion: Completion, begin: float, arrival: float) -> Reply:
        output_tokens, counted_by = self._count_output(completion)
        times = completion.chunk_times[:output_tokens]  # a server may split a token's text
        if self.options.streaming and output_tokens and not times:
            times = (completion.end,)  # tokens without text, such as a stop token alone
        reason: RequestOutcome = (
            "length" if completion.finish_reason == "length" or output_tokens >= query.output_tokens else "stop"
        )
        record = RequestRecord(
            task_id=query.task_id,
            input_tokens=self._count_input(query, completion),
            output_tokens=output_tokens,
            arrival=arrival,
            token_times=tuple(moment - begin for moment in times),
            end=completion.end - begin,
            finish_reason=reason,
        )
        return Reply(record, counted_by, completion.text)

    def _count_output(self, completion: Completion) -> tuple[int, CountedBy]:
        if completion.completion_tokens is not None:
            return completion.completion_tokens, CountedBy.USAGE
        if self.options.streaming:
            return len(completion.chunk_times), CountedBy.CHUNKS
        if self.codec is not None:
            return len(self.codec.encode(completion.text)), CountedBy.TOKENIZER
        raise self._uncounted("new tokens")

    def _count_input(self, query: Query, completion: Completion) -> int:
        if completion.prompt_tokens is not None:
            return completion.prompt_tokens
        if not isinstance(query.prompt, str):
            return len(query.prompt)
        if self.codec is not None:
            return len(self.codec.encode(query.prompt))
        raise self._uncounted("prompt tokens")

    def _uncounted(self, what: str) -> EndpointError:
        return EndpointError(
            FailureKind.NO_TOKEN_COUNT,
            f"{self.endpoint.base_url}: the answer does not say how many {what} there were (usage). Pass "
            "--checkpoint, whose tokenizer counts them.",
        )
