"""``trtllm-mla bench endpoint``: measuring a server from the outside."""

from __future__ import annotations

import math
import os
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from trtllm_mla.cli.console import ERR, OUT, save_json, say_wrote
from trtllm_mla.cli.options import JsonFileOption, check_outputs


class ApiName(StrEnum):
    """Interfaces of a server."""

    COMPLETIONS = "completions"
    CHAT = "chat"


def endpoint(
    base_url: Annotated[
        str, typer.Option(metavar="URL", help="Such as http://localhost:8000/v1.", show_default=False)
    ],
    model: Annotated[str, typer.Option(help="The server's name for the model.", show_default=False)],
    dataset: Annotated[
        Path,
        typer.Option(
            metavar="FILE", help="Dataset in trtllm-bench's format (see prepare-dataset).", show_default=False
        ),
    ],
    num_requests: Annotated[
        int | None, typer.Option(help="Requests taken from the dataset; left out, all.", show_default=False)
    ] = None,
    concurrency: Annotated[
        int | None,
        typer.Option(help="Requests in flight at most; left out, there is no limit.", show_default=False),
    ] = None,
    request_rate: Annotated[
        float,
        typer.Option(help="Requests per second, as a Poisson process; inf lets each come as soon as it may."),
    ] = math.inf,
    warmup: Annotated[
        int, typer.Option(help="Requests sent before the clock starts: the dataset's, with their prompts backwards.")
    ] = 2,
    streaming: Annotated[
        bool,
        typer.Option(
            "--streaming/--no-streaming",
            help="Receive text as it is made, which times to first token and per output token need.",
        ),
    ] = True,
    api: Annotated[
        ApiName, typer.Option(help="completions: /completions, prompts as they are. chat: /chat/completions.")
    ] = ApiName.COMPLETIONS,
    api_key_env: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Environment variable with the key to send; left out, none is sent.",
            show_default=False,
        ),
    ] = None,
    checkpoint: Annotated[
        Path | None,
        typer.Option(
            "--checkpoint",
            "-c",
            help="Checkpoint whose tokenizer makes text of token ids, for servers and interfaces that take no ids "
            "(vLLM, SGLang and TensorRT-LLM take them), and counts tokens that the server does not count.",
            show_default=False,
        ),
    ] = None,
    ignore_eos: Annotated[
        bool,
        typer.Option(
            "--ignore-eos",
            help="Send ignore_eos, which vLLM, SGLang and TensorRT-LLM know, so that each request has all its "
            "output_tokens.",
        ),
    ] = False,
    timeout: Annotated[float, typer.Option(help="Seconds for a request, its retries included.")] = 600.0,
    connect_timeout: Annotated[float, typer.Option(help="Seconds for a connection.")] = 10.0,
    read_timeout: Annotated[
        float | None,
        typer.Option(help="Seconds without a byte of an answer; left out, those of --timeout.", show_default=False),
    ] = None,
    max_retries: Annotated[
        int, typer.Option(help="How often a request is sent again after status 429, 503 or a reset connection.")
    ] = 3,
    seed: Annotated[int, typer.Option(help="Seed of the arrivals.")] = 0,
    json: JsonFileOption = None,
    request_log: Annotated[
        Path | None,
        typer.Option(
            "--request-log",
            metavar="FILE",
            help="Also write a line of JSON for each request: moments of its text, the text, why it failed.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Send a dataset to a server with OpenAI's API (vLLM, SGLang, TensorRT-LLM, ...), and report as trtllm-bench does.

    The exit status is 1 if some requests failed, and 2 if nothing could be measured.

    Example: trtllm-mla bench endpoint --base-url http://localhost:8000/v1 --model tiny-mla --dataset data.jsonl
    """
    from trtllm_mla.benchmark.endpoint import EndpointOptions, bench_endpoint
    from trtllm_mla.benchmark.openai_endpoint import Api, ApiKey, Endpoint, check_base_url
    from trtllm_mla.benchmark.report import ServingProgress, print_endpoint_report
    from trtllm_mla.files import write_json_lines

    server = Endpoint(
        check_base_url(base_url),
        model,
        api=Api(api),
        key=None if api_key_env is None else ApiKey.from_environment(api_key_env, os.environ),
        timeout=timeout,
        connect_timeout=connect_timeout,
        read_timeout=read_timeout,
        max_retries=max_retries,
    )
    options = EndpointOptions(num_requests, concurrency, request_rate, warmup, streaming, ignore_eos, seed)
    check_outputs({"--json": json, "--request-log": request_log})
    with ServingProgress(ERR) as progress:
        report = bench_endpoint(
            server, dataset, options, checkpoint=checkpoint, on_phase=progress.phase, on_progress=progress.update
        )
    values = report.to_json()
    save_json(json, values)
    if request_log is not None:
        write_json_lines(request_log, (reply.to_json() for reply in report.replies))
        say_wrote(request_log)
    print_endpoint_report(values, OUT)
    if report.failures:
        raise typer.Exit(1)
