"""``trtllm-mla generate``: from prompts to text."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.text import Text

from trtllm_mla.cli.console import ERR, print_json
from trtllm_mla.cli.options import (
    CheckpointOption,
    ConfigOption,
    CudaGraphOption,
    DirectoryArgument,
    ExecutorName,
    ExecutorOption,
    JsonFlag,
    ThreadsOption,
)
from trtllm_mla.errors import UserError

if TYPE_CHECKING:
    from trtllm_mla.checkpoint.tokenizer import TextCodec
    from trtllm_mla.runtime.generation import GenerationResult


def generate(
    directory: DirectoryArgument,
    checkpoint: CheckpointOption,
    prompt: Annotated[
        list[str] | None,
        typer.Option(help="Text to continue; give it again for more prompts, served together.", show_default=False),
    ] = None,
    input_ids: Annotated[
        list[str] | None,
        typer.Option(metavar="1,2,3", help="Token ids instead of text; may be given again.", show_default=False),
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(help="New tokens of each prompt.")] = 64,
    executor: ExecutorOption = ExecutorName.ONNXRUNTIME,
    temperature: Annotated[float, typer.Option(help="0 is greedy decoding.")] = 0.0,
    top_k: Annotated[int, typer.Option(help="Draw from the likeliest tokens only; 0 is no limit.")] = 0,
    top_p: Annotated[float, typer.Option(help="Draw from this much probability only.")] = 1.0,
    seed: Annotated[int, typer.Option(help="Seed of the random numbers.")] = 0,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Go on after a stop token.")] = False,
    max_chunk_tokens: Annotated[
        int | None, typer.Option(help="Prompt tokens of one request in a step.", show_default=False)
    ] = None,
    config: ConfigOption = None,
    threads: ThreadsOption = None,
    cuda_graph: CudaGraphOption = True,
    json: JsonFlag = False,
) -> None:
    """Continue prompts with a network or an engine.

    Example: trtllm-mla generate network --checkpoint examples/tiny-mla --prompt "The import statement"
    """
    from trtllm_mla.checkpoint.files import Checkpoint
    from trtllm_mla.checkpoint.tokenizer import TextCodec
    from trtllm_mla.network.directory import NetworkDirectory
    from trtllm_mla.runtime.executors.factory import make_executor
    from trtllm_mla.runtime.generation import GenerationSession
    from trtllm_mla.runtime.limits import find_limits
    from trtllm_mla.runtime.pages import pages_for
    from trtllm_mla.runtime.request import Request
    from trtllm_mla.runtime.sampling import SamplingParams
    from trtllm_mla.runtime.scheduler import SchedulerConfig

    limits = find_limits(directory, config)
    network = NetworkDirectory.load(directory).configured(limits.mla_plugin)
    if not prompt and not input_ids:
        raise UserError("Found no prompt. Pass --prompt TEXT or --input-ids 1,2,3.")
    codec = TextCodec.load(checkpoint) if prompt or TextCodec.exists(checkpoint) else None
    prompts = [codec.encode(text) for text in prompt or () if codec] + [_parse_ids(text) for text in input_ids or ()]
    stop = frozenset() if ignore_eos else frozenset(network.spec.eos_token_ids)
    stream = _Stream(codec) if codec and not json and len(prompts) == 1 else None
    requests = [
        Request(
            ids,
            max_new_tokens,
            SamplingParams(temperature, top_k, top_p, seed + index),
            stop,
            on_token=stream,
        )
        for index, ids in enumerate(prompts)
    ]
    # Requests are checked against the limits before a pool of their size is made. An engine accepts none larger than
    # its limits fill: further requests wait for pages.
    page_size = network.plugin.page_size
    wanted = sum(pages_for(max(len(ids) + max_new_tokens, 1), page_size) for ids in prompts)
    num_pages = min(wanted, limits.max_batch_size * pages_for(limits.max_seq_len, page_size))
    scheduling = SchedulerConfig.from_build_config(
        limits,
        network.plugin,
        vocab_size=network.spec.vocab_size,
        num_pages=num_pages,
        max_chunk_tokens=max_chunk_tokens,
    )
    for request in requests:
        scheduling.check(request)

    runner = make_executor(
        executor,
        network,
        Checkpoint.open(checkpoint),
        num_pages=num_pages,
        num_threads=threads,
        use_cuda_graph=cuda_graph,
    )
    if not json:
        ERR.print(Text(runner.description, style="dim"), soft_wrap=True)
    try:
        results = GenerationSession(runner, scheduling).generate(requests)
    finally:
        runner.close()
    if json:
        print_json(_report(results, codec, runner.description))
    elif stream is not None:
        stream.end()
    else:
        for result in results:
            typer.echo(codec.decode(result.output_ids) if codec else ",".join(map(str, result.output_ids)))


class _Stream:
    """Prints text as soon as its tokens are known."""

    def __init__(self, codec: TextCodec) -> None:
        from trtllm_mla.checkpoint.tokenizer import TextStream

        self._text = TextStream(codec)

    def __call__(self, token: int) -> None:
        self._print(self._text.push(token))

    def end(self) -> None:
        self._print(self._text.end() + "\n")

    @staticmethod
    def _print(text: str) -> None:
        sys.stdout.write(text)
        sys.stdout.flush()


def _parse_ids(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise UserError(
            f"--input-ids: found '{text:.80}', expected whole numbers separated by commas, such as 1,2,3."
        ) from None


def _report(results: list[GenerationResult], codec: TextCodec | None, description: str) -> dict[str, Any]:
    """One prompt's result, with those of all prompts under ``results`` where there are more."""
    entries: list[dict[str, Any]] = [
        {
            "output_ids": result.output_ids,
            "text": codec.decode(result.output_ids) if codec else None,
            "finish_reason": result.finish_reason,
            "time_to_first_token_s": result.time_to_first_token,
        }
        for result in results
    ]
    report: dict[str, Any] = {"executor": description, **entries[0]}
    if len(entries) > 1:
        report["results"] = entries
    return report
