"""Train a tiny dense Multi-head Latent Attention model on the text that ships with Python.

The result is an ordinary Hugging Face checkpoint of the ``deepseek_v3`` family whose layers are all
dense, with uneven sizes and a YaRN rope, and with a byte-level tokenizer. It is small enough to keep in a
repository and good enough to write sentences that read like Python's documentation.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import json
import math
import platform
import sys
import sysconfig
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from copy import deepcopy
from dataclasses import asdict, dataclass
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import tokenizers
import torch
import transformers
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
from torch.nn import functional
from transformers import (
    AttentionInterface,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    GenerationConfig,
    PreTrainedTokenizerFast,
)

from trtllm_mla.errors import UserError
from trtllm_mla.files import atomic_directory, check_replaceable

BOS_MARK = "<|begin_of_text|>"
EOS_MARK = "<|end_of_text|>"
BOS_ID = 256
EOS_ID = 257
VOCAB_SIZE = 258

MAX_POSITIONS = 1024
TRAINING_ATTENTION = "padded_causal_sdpa"
HELD_OUT_SHARE = 0.05
HELD_OUT_MAX_BYTES = 20_000
RECORD_NAME = "training.json"

# Left out because some distributions package these apart from the rest of the library or drop them, and
# because the tests' docstrings are not documentation.
SKIPPED_FOLDERS = frozenset(
    {
        "site-packages",
        "dist-packages",
        "distutils",
        "ensurepip",
        "idlelib",
        "lib2to3",
        "test",
        "tests",
        "tkinter",
        "turtledemo",
    }
)

EXAMPLE = """example:
  python examples/train_tiny_mla.py --output examples/tiny-mla --overwrite

The same seed, number of threads, processor and library versions give the same weights, bit for bit. Other
processors or versions round differently and give a slightly different model of the same quality.
"""


@dataclass(frozen=True)
class TrainSettings:
    """Everything that decides how a model is trained.

    Attributes:
        steps: Optimiser steps in all.
        step_tokens: Tokens in a step.
        stages: Window sizes in the order they are used, each with the share of the steps it is used for.
        peak_learning_rate: Learning rate at the end of the warm-up.
        warmup_steps: Steps over which the learning rate grows from zero.
        final_learning_rate_share: Share of the peak that the cosine ends at.
        weight_decay: AdamW's weight decay for matrices.
        gradient_clip: Largest norm of the gradient.
        topics_share: Share of the windows that come from the reference topics; the rest are docstrings.
        bfloat16: Whether matrix products run in bfloat16; weights and optimiser state stay in float32.
        seed: Seed of the initial weights and of the choice of windows.
        threads: Processor threads.
    """

    steps: int = 1600
    step_tokens: int = 4096
    stages: tuple[tuple[float, int], ...] = ((0.5, 256), (0.2, 512), (0.3, MAX_POSITIONS))
    peak_learning_rate: float = 4e-3
    warmup_steps: int = 100
    final_learning_rate_share: float = 0.02
    weight_decay: float = 0.1
    gradient_clip: float = 1.0
    topics_share: float = 0.4
    bfloat16: bool = True
    seed: int = 20250
    threads: int = 2

    def __post_init__(self) -> None:
        """Refuses settings that cannot be trained with.

        Raises:
            ValueError: If a count is not positive or the share is not one.
        """
        if min(self.steps, self.step_tokens, self.threads, *(window for _, window in self.stages)) < 1:
            raise ValueError("steps, step_tokens, windows and threads must be at least 1")
        if not math.isclose(sum(share for share, _ in self.stages), 1.0):
            raise ValueError(f"the shares of the stages must add up to 1: {self.stages}")
        if not 0.0 <= self.topics_share <= 1.0:
            raise ValueError(f"topics_share must lie between 0 and 1, not {self.topics_share}")

    @property
    def last_window(self) -> int:
        """Window size of the last stage, which is also the one that losses are measured with."""
        return self.stages[-1][1]

    def window_at(self, step: int) -> int:
        """Returns the window size of a step, counted from zero."""
        end = 0.0
        for share, window in self.stages:
            end += share * self.steps
            if step < round(end):
                return window
        return self.last_window


@dataclass(frozen=True)
class Corpus:
    """The text to train on and the text held back.

    Attributes:
        topics: Reference topics, one document each.
        docstrings: Docstrings of the standard library, one document per module.
        held_out: The end of the reference topics; no paragraph of it is in the other two.
    """

    topics: list[str]
    docstrings: list[str]
    held_out: str

    def sha256(self) -> str:
        """Returns the digest of the whole text, training and held-out."""
        digest = hashlib.sha256()
        for part in (*self.topics, *self.docstrings, self.held_out):
            digest.update(part.encode() + b"\0")
        return digest.hexdigest()


@dataclass(frozen=True)
class TrainResult:
    """What a training run measured.

    Attributes:
        train_loss: Mean loss in nats per token over the last twentieth of the steps.
        tokens: Training tokens seen, counting repeats.
        seconds: Time spent in the steps and the interim evaluations.
        curve: Interim values: step, mean training loss since the last entry, and held-out loss.
    """

    train_loss: float
    tokens: int
    seconds: float
    curve: list[dict[str, float]]


def unseen_paragraphs(text: str, seen: set[str]) -> list[str]:
    """Returns the paragraphs of a text that were not met before, and notes them as met.

    Args:
        text: Text whose paragraphs are separated by blank lines.
        seen: Paragraphs met so far, with their white space normalised; extended in place.

    Returns:
        The new paragraphs in their order.
    """
    kept = []
    for paragraph in text.split("\n\n"):
        key = " ".join(paragraph.split())
        if key and key not in seen:
            seen.add(key)
            kept.append(paragraph.strip("\n"))
    return kept


def module_docstrings(source: bytes) -> str:
    """Returns all docstrings of a module's source, separated by blank lines."""
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    nodes = [node for node in ast.walk(ast.parse(source)) if isinstance(node, documented)]
    return "\n\n".join(filter(None, map(ast.get_docstring, nodes)))


def library_sources() -> Iterator[Path]:
    """Yields the standard library's Python files in a fixed order, without the skipped folders."""
    root = Path(sysconfig.get_path("stdlib"))
    for path in sorted(root.rglob("*.py"), key=lambda path: path.relative_to(root).parts):
        if SKIPPED_FOLDERS.isdisjoint(path.relative_to(root).parts):
            yield path


def split_held_out(documents: list[list[str]], limit: int) -> tuple[list[list[str]], list[str]]:
    """Takes whole paragraphs from the end of the documents until a size is reached.

    Args:
        documents: Paragraphs of each document.
        limit: Most bytes to take, counting the blank lines between paragraphs.

    Returns:
        The documents that are left, and the paragraphs that were taken, both in order.
    """
    left = [list(document) for document in documents]
    taken: deque[str] = deque()
    room = limit
    while left:
        if not left[-1]:
            left.pop()
            continue
        room -= len(left[-1][-1].encode()) + 2
        if room < 0:
            break
        taken.appendleft(left[-1].pop())
    return left, list(taken)


def load_corpus() -> Corpus:
    """Collects the text: Python's reference topics and the standard library's docstrings.

    A paragraph that occurs twice is kept the first time only, the topics coming first, so that the held-out
    end of the topics shares no paragraph with the text that is trained on.

    Returns:
        The corpus.
    """
    seen: set[str] = set()
    reference = [unseen_paragraphs(topics[name], seen) for name in sorted(topics)]
    total = sum(len(paragraph.encode()) + 2 for document in reference for paragraph in document)
    kept, held_out = split_held_out(reference, min(int(total * HELD_OUT_SHARE), HELD_OUT_MAX_BYTES))
    modules = [unseen_paragraphs(module_docstrings(path.read_bytes()), seen) for path in library_sources()]
    return Corpus(
        topics=["\n\n".join(document) for document in kept if document],
        docstrings=["\n\n".join(document) for document in modules if document],
        held_out="\n\n".join(held_out) + "\n",
    )


def byte_characters() -> list[str]:
    """Returns the printable character that byte-level tokenizers use for each of the 256 bytes."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    spare = iter(range(0x100, 0x200))
    return [chr(byte if byte in printable else next(spare)) for byte in range(256)]


def build_tokenizer() -> Tokenizer:
    """Builds the byte-level tokenizer: a byte's id is its value, then begin and end of text.

    Returns:
        A tokenizer that puts the begin token before a text and decodes any bytes it encoded.
    """
    vocabulary = {character: byte for byte, character in enumerate(byte_characters())}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in (BOS_MARK, EOS_MARK)])
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS_MARK} $A",
        pair=f"{BOS_MARK} $A {BOS_MARK} $B",
        special_tokens=[(BOS_MARK, BOS_ID)],
    )
    return tokenizer


def build_config(**changes: object) -> DeepseekV3Config:
    """Builds the model's configuration: all layers dense, uneven sizes, and a YaRN rope.

    Args:
        **changes: Values to use instead of the ones here. ``first_k_dense_replace`` follows
            ``num_hidden_layers`` and ``num_key_value_heads`` follows ``num_attention_heads``.

    Returns:
        The configuration.
    """
    values: dict[str, Any] = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 176,
        "intermediate_size": 704,
        "num_hidden_layers": 4,
        "num_attention_heads": 6,
        "qk_nope_head_dim": 24,
        "qk_rope_head_dim": 16,
        "v_head_dim": 20,
        "kv_lora_rank": 48,
        "q_lora_rank": 72,
        "max_position_embeddings": MAX_POSITIONS,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 256,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
        },
        "rope_interleave": True,
        "tie_word_embeddings": False,
        "bos_token_id": BOS_ID,
        "eos_token_id": EOS_ID,
        "initializer_range": 0.04,
        "num_mtp_layers": 0,
        # No layer has experts; the keys are kept small because the configuration class insists on them.
        "n_routed_experts": 2,
        "n_shared_experts": 1,
        "num_experts_per_tok": 1,
        "n_group": 1,
        "topk_group": 1,
        "moe_intermediate_size": 88,
    } | changes
    values["first_k_dense_replace"] = values["num_hidden_layers"]
    values["num_key_value_heads"] = values["num_attention_heads"]
    return DeepseekV3Config(**values)


def padded_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float,
    **unused: object,
) -> tuple[torch.Tensor, None]:
    """Computes causal attention on values padded to the size of the keys.

    PyTorch's fast attention for processors takes equal sizes only; on long windows it is several times
    faster than the general way that MLA's unequal sizes would fall back to.

    Args:
        module: The attention layer.
        query: Queries, ``[batch, heads, tokens, key size]``.
        key: Keys of the same shape.
        value: Values, ``[batch, heads, tokens, value size]``.
        attention_mask: Must be None: the windows have no padding.
        scaling: Factor of the scores.
        **unused: What other attention functions may need.

    Returns:
        The attended values, ``[batch, tokens, heads, value size]``, and no attention weights.

    Raises:
        ValueError: If there is a mask.
    """
    if attention_mask is not None:
        raise ValueError("the training attention takes whole windows without a mask")
    size = value.shape[-1]
    padded = functional.pad(value, (0, query.shape[-1] - size))
    attended = functional.scaled_dot_product_attention(query, key, padded, is_causal=True, scale=scaling)
    return attended[..., :size].transpose(1, 2).contiguous(), None


AttentionInterface.register(TRAINING_ATTENTION, padded_attention)


def encode_documents(documents: Iterable[str]) -> torch.Tensor:
    """Returns the token ids of the documents in one row, each document followed by the end token."""
    ids: list[int] = []
    for document in documents:
        ids.extend(document.encode())
        ids.append(EOS_ID)
    return torch.tensor(ids, dtype=torch.int64)


def sample_windows(
    streams: list[torch.Tensor], shares: list[float], rows: int, window: int, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cuts random windows out of the token streams and puts the begin token before each.

    Args:
        streams: Token ids to choose from.
        shares: Share of the windows that comes from each stream.
        rows: Number of windows.
        window: Tokens in a window, the begin token included.
        generator: Source of the random choices.

    Returns:
        Inputs and the tokens that follow them, both of shape ``[rows, window]``.
    """
    weights = torch.tensor(shares)
    choices = torch.multinomial(weights, rows, replacement=True, generator=generator)
    targets = torch.empty(rows, window, dtype=torch.int64)
    for row, choice in enumerate(choices.tolist()):
        stream = streams[choice]
        start = int(torch.randint(len(stream) - window + 1, (), generator=generator))
        targets[row] = stream[start : start + window]
    inputs = functional.pad(targets[:, :-1], (1, 0), value=BOS_ID)
    return inputs, targets


def learning_rate(step: int, settings: TrainSettings) -> float:
    """Returns the learning rate of a step: a linear warm-up, then a cosine.

    Args:
        step: Step, counted from zero.
        settings: The run's settings.

    Returns:
        The learning rate.
    """
    if step < settings.warmup_steps:
        return settings.peak_learning_rate * (step + 1) / settings.warmup_steps
    progress = (step - settings.warmup_steps) / max(1, settings.steps - settings.warmup_steps)
    floor = settings.final_learning_rate_share
    return settings.peak_learning_rate * (floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * progress)))


def build_optimizer(model: torch.nn.Module, settings: TrainSettings) -> torch.optim.AdamW:
    """Builds AdamW with weight decay on the linear layers' matrices only."""
    decayed: list[torch.nn.Parameter] = []
    plain: list[torch.nn.Parameter] = []
    for name, parameter in model.named_parameters():
        is_matrix = parameter.ndim == 2 and "embed_tokens" not in name
        (decayed if is_matrix else plain).append(parameter)
    groups = [
        {"params": decayed, "weight_decay": settings.weight_decay},
        {"params": plain, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=settings.peak_learning_rate, betas=(0.9, 0.95), fused=True)


@torch.inference_mode()
def byte_loss(model: DeepseekV3ForCausalLM, text: str, window: int) -> float:
    """Measures a model's mean loss per byte on a text.

    The text's bytes are cut into pieces that follow each other; each piece is predicted after the begin
    token alone, so every byte counts exactly once.

    Args:
        model: Model to measure, used in the precision it is in.
        text: Text to predict.
        window: Positions in a piece, the begin token included.

    Returns:
        The loss in nats per byte.
    """
    training = model.training
    model.eval()
    ids = torch.tensor(list(text.encode()), dtype=torch.int64)
    total = 0.0
    for piece in ids.split(window):
        inputs = functional.pad(piece[:-1], (1, 0), value=BOS_ID)[None]
        logits = model(input_ids=inputs, use_cache=False).logits[0].float()
        total += float(functional.cross_entropy(logits, piece, reduction="sum"))
    model.train(training)
    return total / len(ids)


def train_step(
    model: DeepseekV3ForCausalLM,
    optimizer: torch.optim.Optimizer,
    inputs: torch.Tensor,
    targets: torch.Tensor,
    settings: TrainSettings,
) -> float:
    """Takes one optimiser step.

    Args:
        model: Model to train.
        optimizer: Its optimiser, with the learning rate set.
        inputs: Token ids.
        targets: The token ids to predict.
        settings: The run's settings.

    Returns:
        The loss before the step.

    Raises:
        FloatingPointError: If the loss is not finite.
    """
    with torch.autocast("cpu", torch.bfloat16, enabled=settings.bfloat16):
        logits = model(input_ids=inputs, use_cache=False).logits
    loss = functional.cross_entropy(logits.float().flatten(0, 1), targets.flatten())
    if not torch.isfinite(loss):
        raise FloatingPointError(f"the training loss became {loss.item()}")
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), settings.gradient_clip)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return float(loss.detach())


def train(
    model: DeepseekV3ForCausalLM,
    corpus: Corpus,
    settings: TrainSettings,
    report: Callable[[int, float], None] = lambda step, loss: None,
) -> TrainResult:
    """Trains a model in place.

    Args:
        model: Freshly initialised model.
        corpus: Text to train on.
        settings: How to train.
        report: Called after every step with the number of steps done and the step's loss.

    Returns:
        What was measured.
    """
    streams = [encode_documents(corpus.topics), encode_documents(corpus.docstrings)]
    shares = [settings.topics_share, 1.0 - settings.topics_share]
    generator = torch.Generator().manual_seed(settings.seed)
    optimizer = build_optimizer(model, settings)
    interval = max(1, settings.steps // 10)
    losses: list[float] = []
    curve: list[dict[str, float]] = []
    tokens = 0
    started = time.perf_counter()
    model.train()
    for step in range(settings.steps):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, settings)
        window = settings.window_at(step)
        rows = max(1, settings.step_tokens // window)
        inputs, targets = sample_windows(streams, shares, rows, window, generator)
        losses.append(train_step(model, optimizer, inputs, targets, settings))
        tokens += targets.numel()
        done = step + 1
        if done % interval == 0 or done == settings.steps:
            recent = losses[int(curve[-1]["step"]) if curve else 0 :]
            curve.append(
                {
                    "step": done,
                    "train_loss": round(sum(recent) / len(recent), 4),
                    "held_out_loss": round(byte_loss(model, corpus.held_out, settings.last_window), 4),
                }
            )
        report(done, losses[-1])
    last = losses[-max(1, settings.steps // 20) :]
    return TrainResult(sum(last) / len(last), tokens, time.perf_counter() - started, curve)


def save_checkpoint(model: DeepseekV3ForCausalLM, folder: Path) -> None:
    """Writes the weights in bfloat16, the configuration, the generation settings and the tokenizer.

    Args:
        model: Trained model; it is converted in place.
        folder: Existing directory to write to.
    """
    model.generation_config = GenerationConfig(
        bos_token_id=BOS_ID,
        eos_token_id=EOS_ID,
        pad_token_id=EOS_ID,
        do_sample=True,
        temperature=0.7,
        top_p=0.9,
        max_new_tokens=256,
    )
    model.bfloat16().save_pretrained(folder)
    PreTrainedTokenizerFast(
        tokenizer_object=build_tokenizer(),
        bos_token=BOS_MARK,
        eos_token=EOS_MARK,
        pad_token=EOS_MARK,
        model_max_length=MAX_POSITIONS,
        clean_up_tokenization_spaces=False,
    ).save_pretrained(folder)


def describe_run(
    corpus: Corpus,
    settings: TrainSettings,
    result: TrainResult,
    parameters: int,
    untrained_loss: float,
    held_out_loss: float,
) -> dict[str, object]:
    """Collects the contents of ``training.json``.

    Args:
        corpus: Text that was used.
        settings: How the model was trained.
        result: What the training measured.
        parameters: Number of weights.
        untrained_loss: Held-out loss before training, in nats per byte.
        held_out_loss: Held-out loss of the saved weights, in nats per byte.

    Returns:
        A JSON object.
    """
    return {
        "steps": settings.steps,
        "seconds": round(result.seconds, 1),
        "parameters": parameters,
        "tokens_seen": result.tokens,
        "train_loss": round(result.train_loss, 4),
        "held_out_loss": round(held_out_loss, 4),
        "held_out_perplexity_per_byte": round(math.exp(held_out_loss), 4),
        "held_out_bits_per_byte": round(held_out_loss / math.log(2), 4),
        "untrained_perplexity_per_byte": round(math.exp(untrained_loss), 4),
        "held_out_window": settings.last_window,
        "text": {
            "source": "pydoc_data.topics and docstrings of the standard library",
            "sha256": corpus.sha256(),
            "topics_bytes": sum(len(document.encode()) for document in corpus.topics),
            "docstrings_bytes": sum(len(document.encode()) for document in corpus.docstrings),
            "held_out_bytes": len(corpus.held_out.encode()),
            "held_out_sha256": hashlib.sha256(corpus.held_out.encode()).hexdigest(),
        },
        "settings": asdict(settings),
        "versions": {
            "python": platform.python_version(),
            "torch": str(torch.__version__),
            "transformers": transformers.__version__,
            "tokenizers": tokenizers.__version__,
        },
        "curve": result.curve,
    }


def create_checkpoint(
    output: Path,
    config: DeepseekV3Config,
    corpus: Corpus,
    settings: TrainSettings,
    overwrite: bool = False,
    report: Callable[[int, float], None] = lambda step, loss: None,
) -> dict[str, object]:
    """Trains a model and writes its checkpoint, all of it or nothing.

    Args:
        output: Directory of the checkpoint.
        config: Shape of the model.
        corpus: Text to train on and to measure on.
        settings: How to train.
        overwrite: Whether to replace an earlier checkpoint.
        report: Called after every step with the number of steps done and the step's loss.

    Returns:
        The contents of the checkpoint's ``training.json``.
    """
    torch.set_num_threads(settings.threads)
    torch.use_deterministic_algorithms(True)
    with atomic_directory(output, marker=RECORD_NAME, overwrite=overwrite) as folder:
        torch.manual_seed(settings.seed)
        # Saving writes the stored type into the model's config: the caller's stays as it is.
        model = DeepseekV3ForCausalLM._from_config(deepcopy(config), attn_implementation=TRAINING_ATTENTION)
        parameters = sum(parameter.numel() for parameter in model.parameters())
        untrained_loss = byte_loss(model, corpus.held_out, settings.last_window)
        result = train(model, corpus, settings, report)
        save_checkpoint(model, folder)
        saved = DeepseekV3ForCausalLM.from_pretrained(folder, dtype=torch.float32)
        held_out_loss = byte_loss(saved, corpus.held_out, settings.last_window)
        summary = describe_run(corpus, settings, result, parameters, untrained_loss, held_out_loss)
        (folder / "held_out.txt").write_bytes(corpus.held_out.encode())
        (folder / RECORD_NAME).write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
    return summary


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """Reads the command line.

    Args:
        arguments: Arguments to read instead of the process's own.

    Returns:
        The options.
    """
    defaults = TrainSettings()
    parser = argparse.ArgumentParser(
        description="Train a tiny dense MLA language model on the text that ships with Python.",
        epilog=EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--output", type=Path, required=True, help="directory of the checkpoint")
    parser.add_argument("--overwrite", action="store_true", help="replace an earlier checkpoint there")
    parser.add_argument(
        "--steps", type=int, default=defaults.steps, help="optimiser steps in all (default: %(default)s)"
    )
    parser.add_argument(
        "--learning-rate",
        type=float,
        default=defaults.peak_learning_rate,
        help="peak learning rate (default: %(default)s)",
    )
    parser.add_argument("--seed", type=int, default=defaults.seed, help="default: %(default)s")
    parser.add_argument(
        "--threads", type=int, default=defaults.threads, help="processor threads (default: %(default)s)"
    )
    parser.add_argument(
        "--float32",
        action="store_true",
        help="compute in float32; slower where the processor has bfloat16 products, faster where not",
    )
    return parser.parse_args(arguments)


def settings_from(options: argparse.Namespace) -> TrainSettings:
    """Turns the command line's options into settings."""
    return TrainSettings(
        steps=options.steps,
        peak_learning_rate=options.learning_rate,
        seed=options.seed,
        threads=options.threads,
        bfloat16=not options.float32,
    )


def main(arguments: list[str] | None = None) -> int:
    """Runs the command.

    Args:
        arguments: Arguments to read instead of the process's own.

    Returns:
        The exit status.
    """
    options = parse_arguments(arguments)
    console = Console(stderr=True)
    columns = (
        TextColumn("training"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("loss {task.fields[loss]:.3f}"),
    )
    try:
        settings = settings_from(options)
        check_replaceable(options.output, marker=RECORD_NAME, overwrite=options.overwrite)
        with Progress(*columns, console=console) as progress:
            task = progress.add_task("training", total=settings.steps, loss=math.nan)
            summary = create_checkpoint(
                options.output,
                build_config(),
                load_corpus(),
                settings,
                options.overwrite,
                lambda step, loss: progress.update(task, completed=step, loss=loss),
            )
    except (UserError, ValueError, OSError, FloatingPointError) as error:
        console.print(f"Error: {error}", style="red", markup=False)
        return 2
    sys.stdout.write(json.dumps(summary, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
