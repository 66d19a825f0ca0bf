"""transformers' own generation, timed token by token in this process: float32, on the CPU."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trtllm_mla.checkpoint.files import Checkpoint
from trtllm_mla.errors import MissingDependencyError, UserError

if TYPE_CHECKING:
    import torch

ATTENTIONS = ("sdpa", "eager")


@dataclass(frozen=True)
class TimedTokens:
    """Greedy generation of a batch.

    Attributes:
        times: ``time.perf_counter()`` at the start and at each new token.
        output_ids: The new tokens of each prompt.
    """

    times: list[float]
    output_ids: list[list[int]]


TokenTimer = Callable[[Any, "torch.Tensor", int], TimedTokens]


def load_model(checkpoint: Path, attention: str, *, num_threads: int | None = None) -> Any:
    """Loads a float32 model from local safetensors, without code of the checkpoint's.

    Args:
        checkpoint: A Hugging Face directory.
        attention: One of ``ATTENTIONS``.
        num_threads: Threads of an operator, for the whole process; None leaves the number to torch.

    Raises:
        UserError: torch or transformers is missing, or transformers cannot load the checkpoint.
    """
    if not Checkpoint.open(checkpoint).has_weights:
        raise UserError(f"{checkpoint}: found no weights, expected a checkpoint with safetensors.")
    try:
        import torch
        import transformers
    except ImportError:
        raise MissingDependencyError("transformers", "run Hugging Face's generate", "reference") from None
    if num_threads is not None:
        torch.set_num_threads(num_threads)
    transformers.utils.logging.disable_progress_bar()
    try:
        loaded: Any = transformers.AutoModelForCausalLM.from_pretrained(
            checkpoint,
            dtype=torch.float32,
            attn_implementation=attention,
            local_files_only=True,
            trust_remote_code=False,
            use_safetensors=True,
            output_loading_info=True,
        )
    except (OSError, ValueError, ImportError) as error:
        raise UserError(
            f"{checkpoint}: transformers {transformers.__version__} cannot load it with {attention} attention: {error}"
        ) from error
    model, loading = loaded
    absent = sorted(map(str, (*loading["missing_keys"], *loading["mismatched_keys"])))
    if absent:
        raise UserError(
            f"{checkpoint}: transformers found no values for {len(absent)} weights, the first of them {absent[0]}, "
            "and would fill them at random. Expected a complete checkpoint."
        )
    return model.eval()


def describe(attention: str) -> str:
    """One line that says what runs."""
    import torch
    import transformers

    return f"transformers {transformers.__version__} generate, {attention}, torch {torch.__version__}, CPU, float32"


def time_generate(model: Any, input_ids: torch.Tensor, output_len: int) -> TimedTokens:
    """Times transformers' greedy ``generate``, with a clock as its stopping criterion.

    Args:
        model: The model.
        input_ids: int64 [batch, tokens].
        output_len: New tokens of each prompt.
    """
    import torch
    import transformers

    times = []

    class Clock(transformers.StoppingCriteria):
        def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **kwargs: Any) -> torch.Tensor:
            times.append(time.perf_counter())
            return torch.zeros(len(input_ids), dtype=torch.bool)

    config = transformers.GenerationConfig(
        do_sample=False, max_new_tokens=output_len, eos_token_id=None, pad_token_id=0
    )
    model.generation_config = config
    times.append(time.perf_counter())
    with torch.inference_mode():
        output = model.generate(
            input_ids,
            attention_mask=torch.ones_like(input_ids),
            generation_config=config,
            stopping_criteria=transformers.StoppingCriteriaList([Clock()]),
        )
    return TimedTokens(times, output[:, input_ids.shape[1] :].tolist())


def time_forward(model: Any, input_ids: torch.Tensor, output_len: int) -> TimedTokens:
    """Times the bare forward passes that ``generate`` makes."""
    import torch
    import transformers

    cache = transformers.DynamicCache(config=model.config)
    columns = []
    times = [time.perf_counter()]
    with torch.inference_mode():
        for _ in range(output_len):
            logits = model(input_ids, cache=cache, use_cache=True, logits_to_keep=1).logits
            input_ids = logits[:, -1].argmax(dim=-1, keepdim=True)
            columns.append(input_ids)
            times.append(time.perf_counter())
    return TimedTokens(times, torch.cat(columns, dim=1).tolist())


def time_prompts(model: Any, prompts: Sequence[Sequence[int]], output_len: int) -> TimedTokens:
    """Times ``generate`` on prompts of one length."""
    import torch

    return time_generate(model, torch.tensor([list(prompt) for prompt in prompts]), output_len)
