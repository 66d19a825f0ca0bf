"""An ``LLM`` object: prompts in, texts or streams of tokens out, from any number of threads and tasks."""

from __future__ import annotations

import asyncio
import operator
import os
import queue
import threading
import weakref
from collections.abc import AsyncIterator, Callable, Generator, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, replace
from numbers import Integral
from pathlib import Path
from types import TracebackType
from typing import Any, Self, overload

from trtllm_mla.checkpoint.files import Checkpoint
from trtllm_mla.checkpoint.tokenizer import TextCodec, TextStream
from trtllm_mla.errors import UserError
from trtllm_mla.network.directory import NetworkDirectory
from trtllm_mla.runtime.executors.base import Executor
from trtllm_mla.runtime.executors.factory import make_executor
from trtllm_mla.runtime.generation import GenerationSession
from trtllm_mla.runtime.limits import find_limits, pool_pages
from trtllm_mla.runtime.request import ActiveRequest, FinishReason, Request, token_array
from trtllm_mla.runtime.sampling import SamplingParams
from trtllm_mla.runtime.scheduler import SchedulerConfig, SchedulerStatistics, SchedulingPolicy

Prompt = str | Sequence[int]
_DEFAULT_MAX_NEW_TOKENS = 64


@dataclass(frozen=True)
class GenerationOutput:
    """What a prompt came to.

    Attributes:
        prompt_ids: The prompt's tokens.
        token_ids: The new tokens, with the stop token where one ended it.
        text: Their text; None where the checkpoint has no tokenizer.
        finish_reason: ``length``, ``stop`` or ``cancelled``.
        num_reused_tokens: Prompt tokens whose rows were in the cache already.
        num_preemptions: How often it lost its pages and was computed again.
    """

    prompt_ids: list[int]
    token_ids: list[int]
    text: str | None
    finish_reason: FinishReason
    num_reused_tokens: int
    num_preemptions: int


@dataclass(frozen=True)
class GenerationDelta:
    """What a token adds.

    Attributes:
        token_id: The token; None at the end, where text is left.
        text: The text that is new with it. A character of several tokens comes with the last of them. Empty where the
            checkpoint has no tokenizer.
    """

    token_id: int | None
    text: str


class _Deltas:
    """Makes deltas of tokens."""

    def __init__(self, codec: TextCodec | None) -> None:
        self._stream = TextStream(codec) if codec else None

    def push(self, token: int) -> GenerationDelta:
        return GenerationDelta(token, self._stream.push(token) if self._stream else "")

    def end(self) -> GenerationDelta | None:
        text = self._stream.end() if self._stream else ""
        return GenerationDelta(None, text) if text else None


class Generation:
    """A request on its way; ``LLM.generate_async`` returns it.

    Iterating over it, with ``for`` or ``async for``, gives a ``GenerationDelta`` a token, from the first one on,
    whenever it is begun. ``result()`` and ``await`` give the whole output. Leaving an iteration does not end the
    request; ``cancel()`` does.
    """

    def __init__(self, prompt_ids: list[int], codec: TextCodec | None, cancel: Callable[[Generation], None]) -> None:
        self._prompt_ids = prompt_ids
        self._codec = codec
        self._cancel = cancel
        self._lock = threading.Lock()
        self._tokens: list[int] = []
        self._listeners: list[Callable[[int | None], object]] = []
        self._outcome: Future[GenerationOutput] = Future()
        self._outcome.set_running_or_notify_cancel()  # whoever waits for it cannot cancel it for others
        self._active: ActiveRequest | None = None

    def cancel(self) -> None:
        """Ends the request as soon as the step that runs is over; what it has so far is its output."""
        self._cancel(self)

    def result(self, timeout: float | None = None) -> GenerationOutput:
        """Waits for the output.

        Args:
            timeout: Seconds to wait at most.

        Raises:
            TimeoutError: It has not ended by then; it goes on.
            UserError: The network computed something that is no number, or the executor could not run a step.
        """
        return self._outcome.result(timeout)

    def __await__(self) -> Generator[Any, None, GenerationOutput]:
        return asyncio.shield(asyncio.wrap_future(self._outcome)).__await__()

    def __iter__(self) -> Iterator[GenerationDelta]:
        tokens: queue.SimpleQueue[int | None] = queue.SimpleQueue()
        deltas = _Deltas(self._codec)
        with self._listen(tokens.put):
            while (token := tokens.get()) is not None:
                yield deltas.push(token)
        self._outcome.result()
        if rest := deltas.end():
            yield rest

    async def __aiter__(self) -> AsyncIterator[GenerationDelta]:
        loop = asyncio.get_running_loop()
        tokens: asyncio.Queue[int | None] = asyncio.Queue()
        deltas = _Deltas(self._codec)
        with self._listen(lambda token: loop.call_soon_threadsafe(tokens.put_nowait, token)):
            while (token := await tokens.get()) is not None:
                yield deltas.push(token)
        await self
        if rest := deltas.end():
            yield rest

    @contextmanager
    def _listen(self, listener: Callable[[int | None], object]) -> Iterator[None]:
        """Calls ``listener`` with each token, those before included, and with None at the end."""
        with self._lock:
            for token in self._tokens:
                listener(token)
            if self._outcome.done():
                listener(None)
            else:
                self._listeners.append(listener)
        try:
            yield
        finally:
            with self._lock:
                if listener in self._listeners:
                    self._listeners.remove(listener)

    def _tell(self, token: int | None) -> None:
        for listener in list(self._listeners):
            try:
                listener(token)
            except RuntimeError:  # its event loop was closed
                self._listeners.remove(listener)

    def _on_token(self, token: int) -> None:
        with self._lock:
            self._tokens.append(token)
            self._tell(token)

    def _end(self, error: BaseException | None = None) -> None:
        with self._lock:
            if self._outcome.done():
                return
            if error is not None:
                self._outcome.set_exception(error)
            else:
                self._outcome.set_result(self._output())
            self._tell(None)

    def _output(self) -> GenerationOutput:
        active = self._active
        return GenerationOutput(
            self._prompt_ids,
            list(self._tokens),
            self._codec.decode(self._tokens) if self._codec else None,
            (active.finish_reason if active else None) or "cancelled",
            active.num_reused_tokens if active else 0,
            active.num_preemptions if active else 0,
        )


class _Server:
    """The thread that runs the steps, and what belongs to it: the session, its executor, the requests on their way.

    The thread keeps it alive, so it holds no ``LLM``: one that nobody refers to any more can be collected, and closes
    its server.

    Args:
        executor: What runs the steps; closed when the thread ends.
        config: Limits of steps and requests.
    """

    def __init__(self, executor: Executor, config: SchedulerConfig) -> None:
        self.session = GenerationSession(executor, config)
        self._executor = executor
        self._commands: list[Callable[[], None]] = []
        self._live: set[Generation] = set()
        self._closing = False
        self._wake = threading.Condition()
        self._process = os.getpid()
        self._thread = threading.Thread(target=self._serve, name="trtllm-mla", daemon=True)
        self._thread.start()

    def submit(self, generation: Generation, request: Request) -> None:
        """Queues a request, whose tokens and end the generation is told.

        Raises:
            UserError: The server is closed, or in another process.
        """

        def on_token(token: int) -> None:
            generation._on_token(token)
            if generation._active is not None and generation._active.finish_reason is not None:
                self._finish(generation)

        def submit() -> None:
            try:
                generation._active = self.session.submit(replace(request, on_token=on_token))
            except Exception as error:  # whatever it is, nobody may wait for ever
                self._finish(generation, error)
            else:
                self._live.add(generation)

        # A lock may be held by a thread that a forked process does not have.
        if self._is_elsewhere:
            raise UserError(
                "The LLM was made in another process, which this one was forked from and where its thread runs. Make "
                "an LLM in each process, or start processes by 'spawn'."
            )
        with self._wake:
            if self._closing:
                raise UserError("The LLM is closed. Make another one.")
            self._commands.append(submit)
            self._wake.notify()

    def cancel(self, generation: Generation) -> None:
        """Ends a request as soon as the step that runs is over."""

        def cancel() -> None:
            if generation._active is not None:
                self.session.cancel(generation._active)
                self._finish(generation)

        if self._is_elsewhere:
            return
        with self._wake:
            if not self._closing:
                self._commands.append(cancel)
                self._wake.notify()

    def close(self) -> None:
        """Cancels what is on its way, and waits for the thread to free the executor. Closing twice does no harm."""
        if self._is_elsewhere:
            return
        with self._wake:
            self._closing = True
            self._wake.notify()
        if threading.current_thread() is not self._thread:  # which may be the one that dropped the last reference
            self._thread.join()

    @property
    def _is_elsewhere(self) -> bool:
        """Whether this process was forked from the one with the thread."""
        return os.getpid() != self._process

    def _serve(self) -> None:
        """Runs steps until closed. Session and live requests belong to this thread."""
        try:
            while self._run_commands():
                if self.session.has_work:
                    try:
                        self.session.step()
                    except Exception as error:  # whatever it is, nobody may wait for ever
                        self._cancel_all(error)
            self._cancel_all(None)
        finally:
            self._executor.close()

    def _run_commands(self) -> bool:
        """Waits for something to do, and runs the commands that have come.

        Returns:
            Whether to go on.
        """
        with self._wake:
            self._wake.wait_for(lambda: self._commands or self._closing or self.session.has_work)
            commands, self._commands = self._commands, []
            closing = self._closing
        for command in commands:
            command()
        return not closing

    def _finish(self, generation: Generation, error: BaseException | None = None) -> None:
        self._live.discard(generation)
        generation._end(error)
        generation._active = None  # which refers to the generation: without it, both go as soon as nobody needs them

    def _cancel_all(self, error: Exception | None) -> None:
        for generation in list(self._live):
            if generation._active is not None:
                self.session.cancel(generation._active)
            self._finish(generation, error)


class LLM:
    """Serves a network or an engine: prompts join and leave the running batch at any time.

    A thread of its own runs the steps. ``generate`` and ``generate_async`` may be called from any thread, but not from
    a process forked later, which has no such thread. Close it, or use it in a ``with`` statement: ::

        with LLM("network", "examples/tiny-mla") as llm:
            print(llm.generate("The import statement", max_new_tokens=40).text)

    Args:
        directory: A network or an engine directory.
        checkpoint: Hugging Face checkpoint whose weights are bound.
        executor: What runs it; a key of ``runtime.executors.factory.EXECUTORS``.
        config: A build config file with limits for a network; an engine has its own.
        cache_tokens: Tokens that the latent cache holds; see ``runtime.limits.pool_pages``.
        policy: When a waiting request is admitted.
        enable_block_reuse: Whether requests share the full pages of a common beginning. How fast an answer begins then
            tells whether others asked something that begins alike.
        num_threads: CPU threads of an operator.
        use_cuda_graph: Whether decode steps are CUDA graphs, where the executor runs on a GPU.

    Raises:
        UserError: A directory is unusable, the weights do not fit, or the executor cannot run here.
    """

    def __init__(
        self,
        directory: Path | str,
        checkpoint: Path | str,
        *,
        executor: str = "onnxruntime",
        config: Path | str | None = None,
        cache_tokens: int | None = None,
        policy: SchedulingPolicy = SchedulingPolicy.GUARANTEED_NO_EVICT,
        enable_block_reuse: bool = True,
        num_threads: int | None = None,
        use_cuda_graph: bool = True,
    ) -> None:
        limits = find_limits(Path(directory), None if config is None else Path(config))
        network = NetworkDirectory.load(Path(directory)).configured(limits.mla_plugin)
        num_pages = pool_pages(network, limits, cache_tokens)
        self._config = SchedulerConfig.from_build_config(
            limits,
            network.plugin,
            vocab_size=network.spec.vocab_size,
            num_pages=num_pages,
            policy=policy,
            enable_block_reuse=enable_block_reuse,
        )
        self._eos_token_ids = frozenset(network.spec.eos_token_ids)
        self._codec = TextCodec.load(Path(checkpoint)) if TextCodec.exists(Path(checkpoint)) else None
        self._executor = make_executor(
            executor,
            network,
            Checkpoint.open(Path(checkpoint)),
            num_pages=num_pages,
            num_threads=num_threads,
            use_cuda_graph=use_cuda_graph,
        )
        self._server = _Server(self._executor, self._config)
        weakref.finalize(self, self._server.close)  # at the interpreter's exit too

    @property
    def description(self) -> str:
        """One line that says what runs."""
        return self._executor.description

    @property
    def num_pages(self) -> int:
        """Pages of each layer's pool."""
        return self._config.num_pages

    @property
    def num_free_pages(self) -> int:
        """Pages that no request holds."""
        return self._server.session.num_free_pages

    @property
    def statistics(self) -> SchedulerStatistics:
        """Counts since the object was made."""
        return self._server.session.statistics

    @overload  # a text is a sequence of texts too, and comes first
    def generate(  # type: ignore[overload-overlap]
        self,
        prompts: Prompt,
        *,
        max_new_tokens: int = ...,
        sampling: SamplingParams | None = ...,
        stop_token_ids: Sequence[int] = ...,
        ignore_eos: bool = ...,
    ) -> GenerationOutput: ...

    @overload
    def generate(
        self,
        prompts: Sequence[str] | Sequence[Sequence[int]],
        *,
        max_new_tokens: int = ...,
        sampling: SamplingParams | None = ...,
        stop_token_ids: Sequence[int] = ...,
        ignore_eos: bool = ...,
    ) -> list[GenerationOutput]: ...

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        max_new_tokens: int = _DEFAULT_MAX_NEW_TOKENS,
        sampling: SamplingParams | None = None,
        stop_token_ids: Sequence[int] = (),
        ignore_eos: bool = False,
    ) -> GenerationOutput | list[GenerationOutput]:
        """Continues prompts, and waits for all of them.

        Args:
            prompts: A text, a list of token ids, or a list of either.
            max_new_tokens: New tokens of each prompt.
            sampling: How tokens are chosen; greedily where left out. The seed is the first prompt's, and one more for
                each that follows, so that equal prompts are sampled apart.
            stop_token_ids: Tokens that end a text, beside the model's own.
            ignore_eos: Go on after the model's own stop tokens.

        Returns:
            The output, or for a list of prompts their outputs in the same order.

        Raises:
            UserError: A prompt can never be served; then none is. Or a step could not be run.
        """
        single = isinstance(prompts, str) or (len(prompts) > 0 and isinstance(prompts[0], Integral))
        listed: Sequence[Any] = [prompts] if single else prompts
        sampling = sampling or SamplingParams()
        requests = [
            self._request(
                item, max_new_tokens, replace(sampling, seed=sampling.seed + index), stop_token_ids, ignore_eos
            )
            for index, item in enumerate(listed)
        ]
        generations: list[Generation] = []
        try:
            for request in requests:
                generations.append(self._submit(request))
            outputs = [generation.result() for generation in generations]
        except BaseException:
            for generation in generations:
                generation.cancel()
            raise
        return outputs[0] if single else outputs

    def generate_async(
        self,
        prompt: Prompt,
        *,
        max_new_tokens: int = _DEFAULT_MAX_NEW_TOKENS,
        sampling: SamplingParams | None = None,
        stop_token_ids: Sequence[int] = (),
        ignore_eos: bool = False,
    ) -> Generation:
        """Begins to continue a prompt, and returns at once; see ``generate`` for the arguments.

        Raises:
            UserError: The prompt can never be served.
        """
        return self._submit(self._request(prompt, max_new_tokens, sampling, stop_token_ids, ignore_eos))

    def close(self) -> None:
        """Cancels what is on its way, and frees the executor. Closing twice does nothing."""
        self._server.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _request(
        self,
        prompt: Prompt,
        max_new_tokens: int,
        sampling: SamplingParams | None,
        stop_token_ids: Sequence[int],
        ignore_eos: bool,
    ) -> Request:
        if isinstance(prompt, str):
            if self._codec is None:
                raise UserError("Found a text, and the checkpoint has no tokenizer.json. Pass token ids.")
            prompt = self._codec.encode(prompt)
        try:
            max_new_tokens = operator.index(max_new_tokens)
        except TypeError:
            raise UserError(f"max_new_tokens: found {max_new_tokens!r:.80}, expected a whole number.") from None
        stop = frozenset(stop_token_ids) | (frozenset() if ignore_eos else self._eos_token_ids)
        # The caller's list may change before its turn comes.
        ids: list[int] = token_array(prompt).tolist()
        request = Request(ids, max_new_tokens, sampling or SamplingParams(), stop)
        self._config.check(request)
        return request

    def _submit(self, request: Request) -> Generation:
        generation = Generation(list(request.prompt_ids), self._codec, self._cancel)
        self._server.submit(generation, request)
        return generation

    def _cancel(self, generation: Generation) -> None:
        # A request on its way so keeps the object from being collected.
        self._server.cancel(generation)
