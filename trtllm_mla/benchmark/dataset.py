"""Datasets of trtllm-bench: JSONL, one request a line.

An object has ``task_id``, ``output_tokens``, and ``prompt`` (text) or ``input_ids`` (token ids, also called
``logits``; they win over a prompt). The file may come from anywhere: what is wrong with it is said with its line and
key, and sizes are checked before anything of that size is read.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import Field, model_validator

from trtllm_mla.checkpoint.tokenizer import TextCodec
from trtllm_mla.config import StrictModel, parse_config
from trtllm_mla.errors import UserError
from trtllm_mla.files import check_file, parse_json
from trtllm_mla.runtime.scheduler import SchedulerConfig

MAX_FILE_BYTES = 1 << 29
MAX_LINE_BYTES = 1 << 24
MAX_OUTPUT_TOKENS = 2**31 - 1
_REFUSED = {
    "media_paths": "images and other media",
    "lora": "LoRA adapters",
    "lora_request": "LoRA adapters",
}

TaskId = Annotated[int, Field(ge=-(2**63), lt=2**63, strict=True)]
_TokenIds = Annotated[list[Annotated[int, Field(ge=0, lt=2**31, strict=True)]], Field(min_length=1, fail_fast=True)]


class DatasetLine(StrictModel):
    """One line as it is written.

    Attributes:
        task_id: Number of the request.
        output_tokens: New tokens to ask for.
        prompt: The prompt as text.
        input_ids: The prompt as token ids; they win over ``prompt``.
        logits: The same; ``input_ids`` wins over it.
        media_paths: Only empty.
        lora: Only empty.
        lora_request: Only empty.
    """

    task_id: TaskId
    output_tokens: Annotated[int, Field(ge=1, le=MAX_OUTPUT_TOKENS, strict=True)]
    prompt: Annotated[str, Field(min_length=1)] | None = None
    input_ids: _TokenIds | None = None
    logits: _TokenIds | None = None
    media_paths: Any = None
    lora: Any = None
    lora_request: Any = None

    @model_validator(mode="after")
    def _check(self) -> Self:
        for key, what in _REFUSED.items():
            if getattr(self, key):
                raise ValueError(f"{key}: found a value, expected none: {what} are not supported; leave the key out")
        if self.prompt is None and self.token_ids is None:
            raise ValueError("prompt and input_ids: found neither, expected one of them")
        return self

    @property
    def token_ids(self) -> list[int] | None:
        """The prompt's token ids, where the line has them."""
        return self.logits if self.input_ids is None else self.input_ids


@dataclass(frozen=True)
class DatasetEntry:
    """One request of a dataset.

    Attributes:
        task_id: Its number.
        input_ids: Token ids of its prompt, as 32-bit numbers.
        output_tokens: New tokens to ask for.
        line: Its line in the file, from 1.
    """

    task_id: int
    input_ids: Sequence[int]
    output_tokens: int
    line: int

    @property
    def lengths(self) -> tuple[int, int]:
        """Prompt tokens and new tokens."""
        return len(self.input_ids), self.output_tokens


def read_dataset(path: Path, *, max_requests: int | None = None) -> Iterator[tuple[int, DatasetLine]]:
    """Reads a dataset line by line; blank lines are skipped.

    Args:
        path: The file.
        max_requests: Requests to read; left out, all.

    Yields:
        The number of a line, from 1, and what it says.

    Raises:
        UserError: The file is missing or too large, or a line is not what it should be; the message names file, line
            and key.
    """
    if max_requests is not None and max_requests < 1:
        raise UserError(f"num_requests: found {max_requests}, expected at least 1.")
    check_file(path, "Expected a dataset; trtllm-mla bench prepare-dataset makes one.")
    size = path.stat().st_size
    if size > MAX_FILE_BYTES:
        raise UserError(f"{path}: found {size} bytes, expected at most {MAX_FILE_BYTES}. Cut the dataset.")
    count = 0
    for number, text in _text_lines(path):
        if count == max_requests:
            break
        yield number, _parse_line(text, f"{path}, line {number}")
        count += 1
    if not count:
        raise UserError(f"{path}: found no requests, expected one JSON object a line.")


def load_dataset(
    path: Path, *, vocab_size: int, checkpoint: Path, max_requests: int | None = None
) -> list[DatasetEntry]:
    """Reads a dataset for a model, whose tokenizer turns prompts into token ids.

    Args:
        path: The file.
        vocab_size: The model's; token ids are below it.
        checkpoint: Hugging Face directory whose tokenizer is used, if a line has a prompt and no token ids.
        max_requests: Requests to read; left out, all.

    Raises:
        UserError: As ``read_dataset``; or a token id is outside the vocabulary, or the checkpoint has no tokenizer.
    """
    codec: TextCodec | None = None
    entries = []
    for number, line in read_dataset(path, max_requests=max_requests):
        source = f"{path}, line {number}"
        token_ids = line.token_ids
        if token_ids is None:
            codec = codec or _tokenizer(checkpoint, source)
            token_ids = codec.encode(line.prompt or "")
            key = "prompt"
        else:
            key = "input_ids" if line.input_ids is not None else "logits"
        _check_ids(token_ids, vocab_size, f"{source}, {key}")
        entries.append(DatasetEntry(line.task_id, array("i", token_ids), line.output_tokens, number))
    return entries


def check_entries(path: Path, entries: Sequence[DatasetEntry], limits: SchedulerConfig) -> None:
    """Checks that every request can be served.

    Args:
        path: The dataset's file, for messages.
        entries: The requests.
        limits: What is served.

    Raises:
        UserError: One cannot; the message names file, line and limit.
    """
    for entry in entries:
        try:
            limits.check_lengths(*entry.lengths)
        except UserError as error:
            message = str(error).replace("max_new_tokens", "output_tokens")
            raise UserError(f"{path}, line {entry.line}: {message}") from None


def dataset_sha256(path: Path) -> str:
    """SHA-256 of a dataset's file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _text_lines(path: Path) -> Iterator[tuple[int, str]]:
    """Lines that are not blank, and their numbers."""
    with path.open("rb") as file:
        number = 0
        while raw := file.readline(MAX_LINE_BYTES + 1):
            number += 1
            if len(raw) > MAX_LINE_BYTES:
                raise UserError(
                    f"{path}, line {number}: found more than {MAX_LINE_BYTES} bytes, expected one JSON object a line, "
                    "no longer than that."
                )
            try:
                text = raw.decode("utf-8")
            except UnicodeDecodeError as error:
                raise UserError(f"{path}, line {number}: not UTF-8: {error}. Expected JSON text.") from None
            if text.strip():
                yield number, text


def _parse_line(text: str, source: str) -> DatasetLine:
    try:
        values = parse_json(text)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{source}: not valid JSON: {error}. Expected one object a line.") from None
    if not isinstance(values, dict):
        raise UserError(
            f"{source}: found a {type(values).__name__}, expected an object with task_id, output_tokens, ..."
        )
    return parse_config(values, DatasetLine, source=source)


def _tokenizer(checkpoint: Path, source: str) -> TextCodec:
    if not TextCodec.exists(checkpoint):
        raise UserError(
            f"{source}, prompt: found text, and {checkpoint} has no tokenizer.json to turn it into token ids. Copy "
            "one there, or write input_ids."
        )
    return TextCodec.load(checkpoint)


def _check_ids(token_ids: Sequence[int], vocab_size: int, source: str) -> None:
    if not token_ids:
        raise UserError(f"{source}: found no tokens, expected at least one.")
    for position, token in enumerate(token_ids):
        if not 0 <= token < vocab_size:
            raise UserError(
                f"{source}: found token id {token} at position {position}, expected ids from 0 to {vocab_size - 1}. "
                "Make the dataset for this model's vocabulary."
            )
