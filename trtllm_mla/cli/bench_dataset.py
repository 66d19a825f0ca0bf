"""``trtllm-mla bench prepare-dataset``: making datasets."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from trtllm_mla.cli.console import ERR, say_wrote
from trtllm_mla.errors import UserError

if TYPE_CHECKING:
    from trtllm_mla.benchmark.prepare_dataset import DatasetRecipe, LengthDistribution, PromptSource

prepare_dataset = typer.Typer(
    help="Make a dataset in trtllm-bench's format: JSONL, one request a line. The same arguments make the same bytes.",
    no_args_is_help=True,
)

OutputOption = Annotated[
    Path, typer.Option("--output", "-o", metavar="FILE", help="File to write.", show_default=False)
]
NumRequestsOption = Annotated[int, typer.Option(help="Requests to make.")]
SeedOption = Annotated[int, typer.Option(help="Decides all that is random.")]
VocabSizeOption = Annotated[
    int | None, typer.Option(help="Token ids are drawn from 0 to this minus 1.", show_default=False)
]
ModelOption = Annotated[
    Path | None,
    typer.Option(
        "--checkpoint",
        "-c",
        help="Hugging Face checkpoint whose vocabulary token ids are drawn from, instead of --vocab-size.",
        show_default=False,
    ),
]
SharedPrefixOption = Annotated[
    int, typer.Option(help="Tokens at the start of every prompt that are the same in all, as part of its length.")
]


@prepare_dataset.command()
def token_norm_dist(
    output: OutputOption,
    input_mean: Annotated[float, typer.Option(help="Mean length of prompts, in tokens.", show_default=False)],
    output_mean: Annotated[float, typer.Option(help="Mean number of new tokens.", show_default=False)],
    input_stdev: Annotated[float, typer.Option(help="Standard deviation of the lengths.")] = 0.0,
    output_stdev: Annotated[float, typer.Option(help="Standard deviation of the numbers.")] = 0.0,
    num_requests: NumRequestsOption = 128,
    vocab_size: VocabSizeOption = None,
    checkpoint: ModelOption = None,
    shared_prefix: SharedPrefixOption = 0,
    seed: SeedOption = 0,
) -> None:
    """Random tokens; lengths are normally distributed, rounded, and at least 1.

    Example: trtllm-mla bench prepare-dataset token-norm-dist -o data.jsonl -c examples/tiny-mla --input-mean 128
    --input-stdev 32 --output-mean 64 --output-stdev 16 --num-requests 200
    """
    from trtllm_mla.benchmark.prepare_dataset import DatasetRecipe, NormalLength

    lengths = _lengths(NormalLength, (input_mean, input_stdev), (output_mean, output_stdev))
    recipe = DatasetRecipe(num_requests, *lengths, seed=seed, shared_prefix=shared_prefix)
    _write(output, recipe, _random_tokens(vocab_size, checkpoint))


@prepare_dataset.command()
def token_unif_dist(
    output: OutputOption,
    input_min: Annotated[int, typer.Option(help="Shortest prompt, in tokens.", show_default=False)],
    input_max: Annotated[int, typer.Option(help="Longest prompt, in tokens.", show_default=False)],
    output_min: Annotated[int, typer.Option(help="Fewest new tokens.", show_default=False)],
    output_max: Annotated[int, typer.Option(help="Most new tokens.", show_default=False)],
    num_requests: NumRequestsOption = 128,
    vocab_size: VocabSizeOption = None,
    checkpoint: ModelOption = None,
    shared_prefix: SharedPrefixOption = 0,
    seed: SeedOption = 0,
) -> None:
    """Random tokens; all lengths from the shortest to the longest are equally likely.

    Example: trtllm-mla bench prepare-dataset token-unif-dist -o data.jsonl -c examples/tiny-mla --input-min 16
    --input-max 256 --output-min 8 --output-max 64
    """
    from trtllm_mla.benchmark.prepare_dataset import DatasetRecipe, UniformLength

    lengths = _lengths(UniformLength, (input_min, input_max), (output_min, output_max))
    recipe = DatasetRecipe(num_requests, *lengths, seed=seed, shared_prefix=shared_prefix)
    _write(output, recipe, _random_tokens(vocab_size, checkpoint))


@prepare_dataset.command()
def fixed(
    output: OutputOption,
    input_len: Annotated[int, typer.Option(help="Tokens of each prompt.", show_default=False)],
    output_len: Annotated[int, typer.Option(help="New tokens of each prompt.", show_default=False)],
    num_requests: NumRequestsOption = 128,
    vocab_size: VocabSizeOption = None,
    checkpoint: ModelOption = None,
    shared_prefix: SharedPrefixOption = 0,
    seed: SeedOption = 0,
) -> None:
    """Random tokens; all prompts and all outputs have one length.

    Example: trtllm-mla bench prepare-dataset fixed -o data.jsonl -c examples/tiny-mla --input-len 128 --output-len 32
    """
    from trtllm_mla.benchmark.prepare_dataset import DatasetRecipe, FixedLength

    lengths = _lengths(FixedLength, (input_len,), (output_len,))
    recipe = DatasetRecipe(num_requests, *lengths, seed=seed, shared_prefix=shared_prefix)
    _write(output, recipe, _random_tokens(vocab_size, checkpoint))


@prepare_dataset.command()
def text(
    output: OutputOption,
    file: Annotated[Path, typer.Option(metavar="TEXT", help="Text file in UTF-8.", show_default=False)],
    checkpoint: Annotated[
        Path,
        typer.Option("--checkpoint", "-c", help="Hugging Face checkpoint with the tokenizer.", show_default=False),
    ],
    input_len: Annotated[int, typer.Option(help="Tokens of each prompt.", show_default=False)],
    output_len: Annotated[int, typer.Option(help="New tokens of each prompt.", show_default=False)],
    num_requests: NumRequestsOption = 128,
    shuffle: Annotated[
        bool, typer.Option("--shuffle", help="Draw the pieces' places, instead of taking one after the other.")
    ] = False,
    shared_prefix: SharedPrefixOption = 0,
    seed: SeedOption = 0,
) -> None:
    """Pieces of a text.

    Example: trtllm-mla bench prepare-dataset text -o data.jsonl -c examples/tiny-mla --file
    examples/tiny-mla/held_out.txt --input-len 128 --output-len 32
    """
    from trtllm_mla.benchmark.prepare_dataset import DatasetRecipe, FixedLength, TextWindows

    lengths = _lengths(FixedLength, (input_len,), (output_len,))
    recipe = DatasetRecipe(num_requests, *lengths, seed=seed, shared_prefix=shared_prefix)
    _write(output, recipe, TextWindows.read(file, checkpoint, shuffled=shuffle))


def _lengths(
    kind: Callable[..., LengthDistribution], inputs: tuple[float, ...], outputs: tuple[float, ...]
) -> tuple[LengthDistribution, LengthDistribution]:
    """Lengths of prompts and numbers of new tokens; a message says which of the two is wrong."""
    made = []
    for side, values in (("input", inputs), ("output", outputs)):
        try:
            made.append(kind(*values))
        except UserError as error:
            raise UserError(f"{side} {error}") from None
    return made[0], made[1]


def _random_tokens(vocab_size: int | None, checkpoint: Path | None) -> PromptSource:
    from trtllm_mla.benchmark.prepare_dataset import RandomTokens
    from trtllm_mla.checkpoint.architectures import read_model_spec
    from trtllm_mla.checkpoint.files import Checkpoint

    if (vocab_size is None) == (checkpoint is None):
        found = "neither" if vocab_size is None else "both"
        raise UserError(f"--vocab-size and --checkpoint: found {found}, expected one of them.")
    if checkpoint is not None:
        vocab_size = read_model_spec(Checkpoint.open(checkpoint)).vocab_size
    return RandomTokens(vocab_size or 0)


def _write(output: Path, recipe: DatasetRecipe, prompts: PromptSource) -> None:
    from trtllm_mla.benchmark.prepare_dataset import write_dataset

    with ERR.status("Writing"):
        total = write_dataset(output, recipe, prompts)
    say_wrote(output, f": {recipe.num_requests} requests, {total} prompt tokens")
