"""Validation: does a network or an engine compute what the checkpoint's PyTorch model computes?"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from trtllm_mla._version import __version__
from trtllm_mla.cache_rows import CacheDType
from trtllm_mla.checkpoint.files import Checkpoint
from trtllm_mla.checkpoint.spec import ModelSpec
from trtllm_mla.checkpoint.tokenizer import TextCodec, read_text
from trtllm_mla.config import BuildConfig
from trtllm_mla.dtypes import DType
from trtllm_mla.errors import UserError
from trtllm_mla.network.directory import NetworkDirectory
from trtllm_mla.runtime.executors.base import Executor
from trtllm_mla.runtime.executors.factory import make_executor
from trtllm_mla.runtime.generation import DEFAULT_WINDOW, GenerationResult, GenerationSession, read_cached_rows
from trtllm_mla.runtime.pages import pages_for
from trtllm_mla.runtime.request import Request
from trtllm_mla.runtime.scheduler import SchedulerConfig
from trtllm_mla.validation.absorption import AbsorptionResult, AbsorptionSizes, check_absorption
from trtllm_mla.validation.comparison import OutputComparison, compare_runners
from trtllm_mla.validation.gates import Gates, coarsest, gates_for
from trtllm_mla.validation.perplexity import (
    Perplexity,
    executor_perplexity,
    reference_perplexity,
)
from trtllm_mla.validation.quantization import QuantizedCache
from trtllm_mla.validation.reference import ReferenceModel
from trtllm_mla.validation.runners import ExecutorRunner, HuggingFaceRunner
from trtllm_mla.validation.scenarios import TokenSource, default_lengths, make_scenarios

SAMPLE_TEXT = (
    "The keeper of the lighthouse wrote down the weather every evening. On clear days he drew a small sun in the "
    "margin, on foggy days he drew nothing at all, and when a ship had passed he noted its name, its flag and the "
    "hour. After forty years the shelves held more than ten thousand pages, and nobody but the wind had read them."
)


@dataclass(frozen=True)
class ValidationOptions:
    """What is validated and how much of it.

    Attributes:
        seed: Seed of the prompts.
        lengths: Tokens of each text of a scenario; left out, chosen from the page size.
        greedy_tokens: New tokens of the greedy decode.
        reference_dtype: Type the reference runs in.
        max_abs_error: Largest absolute error of logits and cache rows that passes, besides the other gates; None gates
            errors relative to the reference only. Rows of a quantised cache have gates of their own.
        absorption_check: Whether the absorption check runs, at the model's own sizes.
        perplexity_ids: Token ids of a text whose perplexities are compared, or None.
        perplexity_window: Tokens of a window of that text, cut down where the limits ask for it.
    """

    seed: int = 0
    lengths: tuple[int, ...] | None = None
    greedy_tokens: int = 12
    reference_dtype: DType = DType.FLOAT32
    max_abs_error: float | None = None
    absorption_check: bool = True
    perplexity_ids: tuple[int, ...] | None = None
    perplexity_window: int = DEFAULT_WINDOW


@dataclass(frozen=True)
class ScenarioResult:
    """A scenario's comparison.

    Attributes:
        name: The scenario.
        meaning: What it exercises.
        tokens: Tokens of its texts.
        steps: Steps it took.
        outputs: Logits, and the cache of each layer. Where it is quantised, the reference read the same cache, and
            ``unquantized_logits`` tell how far a reference with rows of its own is.
    """

    name: str
    meaning: str
    tokens: int
    steps: int
    outputs: tuple[OutputComparison, ...]

    @property
    def passed(self) -> bool:
        """Whether every output is close enough."""
        return all(output.passed for output in self.outputs)


@dataclass(frozen=True)
class GreedyResult:
    """Free-running greedy decode beside the reference's.

    Attributes:
        name: How prompts were prefilled.
        prompt_lengths: Tokens of each prompt; the prompts are served together.
        output_ids: New tokens of each prompt.
        reference_ids: Those of transformers' ``generate``. With a quantised cache, the tokens that the reference finds
            likeliest behind the prompt and each new token, reading the rows that were cached of them.
        required: Whether they have to be identical.
        unquantized_ids: Those of transformers' ``generate``, where the cache is quantised; they may differ.
    """

    name: str
    prompt_lengths: tuple[int, ...]
    output_ids: tuple[tuple[int, ...], ...]
    reference_ids: tuple[tuple[int, ...], ...]
    required: bool
    unquantized_ids: tuple[tuple[int, ...], ...] | None = None

    @property
    def matching(self) -> int:
        """Tokens before the first that differs, over all prompts."""
        return _matching(self.output_ids, self.reference_ids)

    @property
    def matching_unquantized(self) -> int | None:
        """Likewise with ``unquantized_ids``, if there are any."""
        return None if self.unquantized_ids is None else _matching(self.output_ids, self.unquantized_ids)

    @property
    def total(self) -> int:
        """New tokens, over all prompts."""
        return sum(len(tokens) for tokens in self.reference_ids)

    @property
    def passed(self) -> bool:
        """Whether the tokens are identical, or need not be."""
        return self.output_ids == self.reference_ids or not self.required


@dataclass(frozen=True)
class PerplexityResult:
    """Perplexities of one text.

    Attributes:
        executor: The executor's.
        reference: The reference's.
        max_deviation: Largest relative difference that passes.
        required: Whether a larger one fails.
    """

    executor: Perplexity
    reference: Perplexity
    max_deviation: float
    required: bool = True

    @property
    def deviation(self) -> float:
        """Relative difference."""
        return abs(self.executor.perplexity / self.reference.perplexity - 1)

    @property
    def passed(self) -> bool:
        """Whether they are close enough, or need not be."""
        return self.deviation <= self.max_deviation or (not self.required and math.isfinite(self.deviation))


@dataclass(frozen=True)
class ValidationReport:
    """All that validation found.

    Attributes:
        version: Version of this package.
        executor: Name of the executor.
        executor_description: What ran.
        reference_description: What it was compared with.
        arithmetic: Type whose gates apply: the coarsest among the executor's network, its cache and the reference. A
            quantised cache does not count, since the reference reads it too.
        cache_dtype: Type of the cache.
        gates: Those gates.
        seed: Seed of the prompts.
        scenarios: Teacher-forced comparisons.
        greedy: Free-running comparisons; none where logits are not finite, since no token is the likeliest then.
        absorption: The absorption check in float32 and in the type of the arithmetic; empty if it was not asked for.
        perplexity: Perplexities, if a text was given.
    """

    version: str
    executor: str
    executor_description: str
    reference_description: str
    arithmetic: DType
    cache_dtype: CacheDType
    gates: Gates
    seed: int
    scenarios: tuple[ScenarioResult, ...]
    greedy: tuple[GreedyResult, ...]
    absorption: tuple[AbsorptionResult, ...]
    perplexity: PerplexityResult | None

    @property
    def passed(self) -> bool:
        """Whether everything is close enough."""
        parts = (*self.scenarios, *self.greedy, *self.absorption, *((self.perplexity,) if self.perplexity else ()))
        return all(part.passed for part in parts)

    def to_json(self) -> dict[str, Any]:
        """The report as plain values for a JSON file; a number that is not finite becomes null."""
        result: dict[str, Any] = _plain(self)
        return result


def validate(
    directory: Path,
    checkpoint: Path,
    executor_name: str,
    *,
    build: BuildConfig | None = None,
    options: ValidationOptions | None = None,
    perplexity_text: Path | None = None,
    num_threads: int | None = None,
    on_progress: Callable[[str], None] | None = None,
) -> ValidationReport:
    """Validates a network or an engine against the checkpoint it was made for.

    Where the checkpoint has a tokenizer, the first prompt of each scenario is cut from real text.

    Args:
        directory: A network or an engine directory.
        checkpoint: A Hugging Face directory: the weights, and the reference.
        executor_name: What runs the network; a key of ``EXECUTORS``.
        build: Limits of steps and requests; left out, the defaults of a build config.
        options: What to validate.
        perplexity_text: A text file whose perplexities are compared too.
        num_threads: Threads of an operator, where the executor computes on the CPU.
        on_progress: Called with a line when a part begins.

    Raises:
        UserError: A directory is unusable, or the executor or the reference cannot run here.
    """
    options = options or ValidationOptions()
    build = build or BuildConfig()
    network = NetworkDirectory.load(directory).configured(build.mla_plugin)
    opened = Checkpoint.open(checkpoint)
    if not opened.has_weights:
        raise UserError(f"{checkpoint}: found no weights, expected a checkpoint with safetensors to compare with.")
    if perplexity_text is not None:
        options = replace(options, perplexity_ids=tuple(read_text(perplexity_text, checkpoint)))
    text_ids = TextCodec.load(checkpoint).encode(SAMPLE_TEXT) if TextCodec.exists(checkpoint) else None

    def config_for(num_pages: int) -> SchedulerConfig:
        return SchedulerConfig.from_build_config(
            build, network.plugin, vocab_size=network.spec.vocab_size, num_pages=num_pages
        )

    config = config_for(pages_for_validation(config_for(1), options))
    spec = replace(network.spec, num_hidden_layers=network.num_layers)
    if on_progress is not None:
        on_progress(f"executor {executor_name}: loading")
    executor = make_executor(executor_name, network, opened, num_pages=config.num_pages, num_threads=num_threads)
    try:
        return validate_executor(
            executor,
            lambda: ReferenceModel.load(checkpoint, spec, options.reference_dtype),
            spec,
            config,
            options=options,
            latent_scales=network.latent_scales,
            text_ids=text_ids,
            on_progress=on_progress,
        )
    finally:
        executor.close()


def validate_executor(
    executor: Executor,
    load_reference: Callable[[], ReferenceModel],
    spec: ModelSpec,
    config: SchedulerConfig,
    *,
    options: ValidationOptions | None = None,
    latent_scales: Sequence[float] | None = None,
    text_ids: Sequence[int] | None = None,
    on_progress: Callable[[str], None] | None = None,
) -> ValidationReport:
    """Compares an executor with the reference.

    Where the cache is quantised, the reference reads the executor's rows, and those are compared with what the
    reference would have cached; ``trtllm_mla.validation.gates`` says why.

    Args:
        executor: What is checked; its whole pool is used.
        load_reference: Loads the reference. It is loaded once.
        spec: The model, with the layers that the network has.
        config: Limits of steps and requests; its pool is the executor's.
        options: What to validate.
        latent_scales: Outer scale of each layer's quantised latents; left out, 1.
        text_ids: A text to cut prompts from; without it all prompts are random.
        on_progress: Called with a line when a part begins.

    Raises:
        UserError: The reference cannot be loaded, or a prompt does not fit the limits.
    """
    options = options or ValidationOptions()
    say = on_progress or (lambda _: None)
    cache_dtype = executor.cache_dtype
    arithmetic = coarsest(executor.dtype, cache_dtype.element or executor.dtype, options.reference_dtype)
    gates = replace(gates_for(arithmetic, spec.num_hidden_layers, cache_dtype), max_abs_error=options.max_abs_error)
    quantized = None
    if cache_dtype.is_quantized:
        layout = cache_dtype.layout(spec.kv_lora_rank, spec.qk_rope_head_dim)
        quantized = QuantizedCache(layout, tuple(latent_scales or (1.0,) * spec.num_hidden_layers))
    source = TokenSource(spec.vocab_size, options.seed, text_ids)
    lengths = options.lengths or default_lengths(config)
    _check_lengths(lengths, config)
    scenarios = make_scenarios(source, config, lengths)

    say("reference: loading")
    reference = load_reference()
    runner = ExecutorRunner(executor, spec.num_hidden_layers, quantized=quantized)
    comparisons = compare_runners(
        runner,
        HuggingFaceRunner(lambda: reference, teacher=runner if quantized else None),
        scenarios,
        gates,
        quantized=quantized,
        on_scenario=lambda scenario: say(f"scenario {scenario.name}: {scenario.meaning}"),
    )
    greedy: tuple[GreedyResult, ...] = ()
    if _are_finite(comparisons):
        say("greedy decode")
        greedy = _compare_greedy(executor, reference, config, source, lengths, options.greedy_tokens, gates)
    perplexity = None
    if options.perplexity_ids is not None:
        say("perplexity")
        window = _perplexity_window(config, options)
        of_reference = reference_perplexity(reference, options.perplexity_ids, window=window)
        perplexity = PerplexityResult(
            executor_perplexity(executor, config, options.perplexity_ids, window=window),
            of_reference,
            gates.max_perplexity_deviation,
            quantized is None or of_reference.perplexity <= spec.vocab_size / 2,
        )
    absorption: list[AbsorptionResult] = []
    if options.absorption_check:
        for dtype in sorted({DType.FLOAT32, arithmetic}):
            say(f"absorption check in {dtype}")
            absorption.append(
                check_absorption(dtype, AbsorptionSizes.of(spec), softmax_scale=spec.softmax_scale, seed=options.seed)
            )
    return ValidationReport(
        __version__,
        executor.name,
        executor.description,
        reference.description,
        arithmetic,
        cache_dtype,
        gates,
        options.seed,
        tuple(
            ScenarioResult(scenario.name, scenario.meaning, scenario.num_tokens, scenario.num_steps, tuple(outputs))
            for scenario, outputs in zip(scenarios, comparisons, strict=True)
        ),
        greedy,
        tuple(absorption),
        perplexity,
    )


def pages_for_validation(config: SchedulerConfig, options: ValidationOptions) -> int:
    """Pages that a pool needs for ``validate_executor``."""
    lengths = options.lengths or default_lengths(config)
    window = _perplexity_window(config, options) if options.perplexity_ids else 0
    longest = (min(length + options.greedy_tokens, config.max_seq_len) for length in lengths)
    return max(sum(pages_for(length, config.page_size) for length in longest), pages_for(window, config.page_size))


def _perplexity_window(config: SchedulerConfig, options: ValidationOptions) -> int:
    return min(options.perplexity_window, config.max_seq_len, config.context_passes.total_keys)


def _are_finite(comparisons: Sequence[Sequence[OutputComparison]]) -> bool:
    return all(output.value("nonfinite") == 0 for outputs in comparisons for output in outputs)


def _check_lengths(lengths: Sequence[int], config: SchedulerConfig) -> None:
    limit = min(config.max_num_tokens, config.max_context_kv_tokens)
    if not lengths or min(lengths) < 1 or sum(lengths) > limit or len(lengths) > config.max_batch_size:
        raise UserError(
            f"lengths: found {tuple(lengths)}, expected at most {config.max_batch_size} texts of together at most "
            f"{limit} tokens, the limits of one step. Pass shorter ones, or raise the limits in the build config."
        )


def _compare_greedy(
    executor: Executor,
    reference: ReferenceModel,
    config: SchedulerConfig,
    source: TokenSource,
    lengths: Sequence[int],
    new_tokens: int,
    gates: Gates,
) -> tuple[GreedyResult, ...]:
    """Serves prompts together, once as the config says and once in chunks that cross the threshold both ways.

    With a quantised cache, a token is right if the reference, reading what the executor cached of all tokens before,
    would choose it too.
    """
    new_tokens = min(new_tokens, config.max_seq_len - 1)
    fitting = tuple(min(length, config.max_seq_len - new_tokens, config.max_input_len) for length in lengths)
    prompts = [source.draw(length, text=index == 0) for index, length in enumerate(fitting)]
    unquantized = tuple(tuple(reference.generate(prompt, new_tokens)) for prompt in prompts)
    chunk = max(max(fitting) // 3, 2)
    chunked = replace(config, max_chunk_tokens=chunk, prefill_absorption_threshold=chunk)
    results = []
    for name, limits in (("as configured", config), (f"chunks of {chunk}", chunked)):
        requests = [Request(prompt, new_tokens) for prompt in prompts]
        outputs = GenerationSession(executor, limits).generate(requests)
        output_ids = tuple(tuple(output.output_ids) for output in outputs)
        required = gates.min_greedy_agreement is not None
        if executor.cache_dtype.is_quantized:
            likeliest = tuple(
                _likeliest_ids(executor, reference, prompt, output)
                for prompt, output in zip(prompts, outputs, strict=True)
            )
            results.append(GreedyResult(name, fitting, output_ids, likeliest, required, unquantized))
        else:
            results.append(GreedyResult(name, fitting, output_ids, unquantized, required))
    return tuple(results)


def _likeliest_ids(
    executor: Executor, reference: ReferenceModel, prompt: Sequence[int], output: GenerationResult
) -> tuple[int, ...]:
    """The reference's greedy choice at each new token, reading the rows that the executor cached of those before it.

    The pool must not have been used since.
    """
    text = (*prompt, *output.output_ids[:-1])
    rows = [read_cached_rows(executor, layer, output.pages, len(text)) for layer in range(reference.num_layers)]
    logits = reference.run(text, cached_rows=rows).logits[len(prompt) - 1 :]
    return tuple(np.argmax(logits, axis=1).tolist())


def _matching(found: Sequence[Sequence[int]], expected: Sequence[Sequence[int]]) -> int:
    return sum(_common_prefix(*pair) for pair in zip(found, expected, strict=True))


def _common_prefix(first: Sequence[int], second: Sequence[int]) -> int:
    pairs = enumerate(zip(first, second, strict=True))
    return next((index for index, (left, right) in pairs if left != right), len(first))


def _plain(value: Any) -> Any:
    """Dataclasses as tables, with the properties that tell results; tuples as lists."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        table = {field.name: _plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
        for name in ("perplexity", "deviation", "matching", "matching_unquantized", "total", "passed"):
            if isinstance(getattr(type(value), name, None), property):
                table[name] = _plain(getattr(value, name))
        return table
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
