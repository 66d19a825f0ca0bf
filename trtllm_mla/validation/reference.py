"""The reference: the checkpoint run by Hugging Face transformers, with eager attention."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from trtllm_mla.checkpoint.architectures import get_architecture
from trtllm_mla.checkpoint.files import Checkpoint
from trtllm_mla.checkpoint.fp8 import SCALE_SUFFIX
from trtllm_mla.checkpoint.spec import ModelSpec
from trtllm_mla.dtypes import FP8_BLOCK_SIZE, DType
from trtllm_mla.errors import MissingDependencyError, UserError

Float32Array = npt.NDArray[np.float32]


@dataclass(frozen=True)
class ReferenceOutput:
    """What the reference computes for a text.

    Attributes:
        logits: float32 [tokens, vocab_size], the logits after each token.
        latents: For each layer float32 [tokens, kv_lora_rank + qk_rope_head_dim]: the cached rows, laid out as this
            package does.
    """

    logits: Float32Array
    latents: tuple[Float32Array, ...]


class ReferenceModel:
    """A transformers model. Make it with ``ReferenceModel.load``."""

    def __init__(self, model: Any, spec: ModelSpec) -> None:
        self._model = model
        self._spec = spec
        self._splits_pairs = get_architecture(spec.model_type, source="model spec").transformers_splits_pairs

    @classmethod
    def load(cls, checkpoint: Path, spec: ModelSpec, dtype: DType = DType.FLOAT32) -> ReferenceModel:
        """Loads a checkpoint: local files only, safetensors only, and no code that comes with it.

        Args:
            checkpoint: A Hugging Face directory.
            spec: The model; with fewer layers than the checkpoint has, the first ones are loaded.
            dtype: Type of weights and arithmetic.

        Raises:
            UserError: transformers cannot load it, or would leave a weight at random values.
        """
        torch, transformers = _libraries()
        architecture = get_architecture(spec.model_type, source=str(checkpoint))
        source: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
        try:
            with _quiet(transformers):
                alias = architecture.transformers_model_type
                config_class = transformers.CONFIG_MAPPING[alias] if alias else transformers.AutoConfig
                config = config_class.from_pretrained(checkpoint, **architecture.transformers_config(spec), **source)
                if alias:
                    config.model_type = alias  # by which the stored tensors are found
                model_class = transformers.MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
                if model_class is None:
                    # The automatic classes know language models of those that also see as a part of the whole only.
                    model_class = getattr(transformers, architecture.hf_architectures[0])
                stored: dict[str, Any] = {"pretrained_model_name_or_path": checkpoint}
                if spec.quantization is not None:
                    # transformers dequantises only where blocks divide every weight, and wants a package for it.
                    for part in (config, config.get_text_config()):
                        vars(part).pop("quantization_config", None)
                    stored = {"pretrained_model_name_or_path": None, "state_dict": _dequantized(checkpoint)}
                loaded: Any = model_class.from_pretrained(
                    **stored,
                    config=config,
                    dtype=getattr(torch, dtype),
                    attn_implementation="eager",
                    use_safetensors=True,
                    output_loading_info=True,
                    **source,
                )
        except (OSError, ValueError, RuntimeError, KeyError) as error:
            raise UserError(
                f"{checkpoint}: transformers {transformers.__version__} cannot load it: "
                f"{str(error).strip().splitlines()[0]} A reference needs a complete checkpoint with weights."
            ) from None
        model, info = loaded
        absent = sorted(info["missing_keys"]) + sorted(str(key) for key in info["mismatched_keys"])
        if absent:
            raise UserError(
                f"{checkpoint}: transformers found no matching values for {len(absent)} weights, the first of them "
                f"{absent[0]}, and would fill them at random. Expected a complete checkpoint."
            )
        return cls(model.eval(), spec)

    @property
    def num_layers(self) -> int:
        """Layers that were loaded."""
        return self._spec.num_hidden_layers

    @property
    def description(self) -> str:
        """One line that says what runs."""
        torch, transformers = _libraries()
        dtype = str(self._model.dtype).removeprefix("torch.")
        return f"transformers {transformers.__version__}, torch {torch.__version__}, {dtype}, eager attention"

    def run(self, token_ids: Sequence[int], *, cached_rows: Sequence[Float32Array] | None = None) -> ReferenceOutput:
        """Computes the logits of every position and the cached rows of a text.

        Args:
            token_ids: The text.
            cached_rows: For each layer float32 [tokens, kv_lora_rank + qk_rope_head_dim], laid out as this package
                does: what attention reads in place of the rows that the reference made. Those are what it returns.
        """
        torch, transformers = _libraries()
        cache = transformers.DynamicCache(config=self._model.config)
        if cached_rows is not None:
            self._teach(cache, cached_rows)
        with torch.no_grad():
            logits = self._model(torch.tensor([list(token_ids)]), cache=cache, use_cache=True).logits[0]
        latents = []
        for layer in cache.layers:
            # transformers caches the latent where others have keys, and the rotated key where they have values.
            latent, k_pe = (_numpy(tensor).reshape(len(token_ids), -1) for tensor in (layer.keys, layer.values))
            if self._spec.rope.interleaved and self._splits_pairs:
                k_pe = interleave(k_pe)
            latents.append(np.concatenate([latent, k_pe], axis=1))
        return ReferenceOutput(_numpy(logits), tuple(latents))

    def _teach(self, cache: Any, cached_rows: Sequence[Float32Array]) -> None:
        """Makes a cache keep what a layer gives it, and hand out the given rows to the layer's attention."""
        keep, taught = cache.update, [self._as_stored(rows) for rows in cached_rows]

        def update(latent: Any, k_pe: Any, layer: int, *arguments: Any, **values: Any) -> tuple[Any, ...]:
            keep(latent, k_pe, layer, *arguments, **values)
            own = (latent, k_pe)
            return tuple(row.to(like.dtype).reshape(like.shape) for row, like in zip(taught[layer], own, strict=True))

        cache.update = update

    def _as_stored(self, rows: Float32Array) -> tuple[Any, Any]:
        """Rows as transformers caches them: latents, then rotated keys."""
        torch, _ = _libraries()
        latent, k_pe = np.split(rows, [self._spec.kv_lora_rank], axis=1)
        if self._spec.rope.interleaved:
            k_pe = deinterleave(k_pe)
        return torch.from_numpy(np.ascontiguousarray(latent)), torch.from_numpy(np.ascontiguousarray(k_pe))

    def generate(self, prompt_ids: Sequence[int], max_new_tokens: int) -> list[int]:
        """Greedy continuation of a prompt by transformers' ``generate``; no token stops it."""
        torch, transformers = _libraries()
        config = transformers.GenerationConfig(
            do_sample=False,
            max_new_tokens=max_new_tokens,
            bos_token_id=self._spec.bos_token_id,
            eos_token_id=None,
            pad_token_id=0,
        )
        input_ids = torch.tensor([list(prompt_ids)])
        # The model's own generation config would fill in what is None here, its stop tokens among them.
        self._model.generation_config = config
        output = self._model.generate(input_ids, attention_mask=torch.ones_like(input_ids), generation_config=config)
        continuation: list[int] = output[0, len(prompt_ids) :].tolist()
        return continuation


def _dequantized(checkpoint: Path) -> dict[str, Any]:
    """A checkpoint's tensors by name, with fp32 numbers in place of E4M3 numbers and scales."""
    load_file = import_module("safetensors.torch").load_file
    tensors: dict[str, Any] = {}
    for file in sorted({info.file for info in Checkpoint.open(checkpoint).tensors.values()}):
        tensors |= load_file(file)
    for name in [name for name in tensors if name + SCALE_SUFFIX in tensors]:
        rows, columns = tensors[name].shape
        scales = tensors.pop(name + SCALE_SUFFIX).float()
        scales = scales.repeat_interleave(FP8_BLOCK_SIZE, 0)[:rows]
        tensors[name] = tensors[name].float() * scales.repeat_interleave(FP8_BLOCK_SIZE, 1)[:, :columns]
    return tensors


def _libraries() -> tuple[Any, Any]:
    """PyTorch and transformers, imported when they are needed."""
    try:
        return import_module("torch"), import_module("transformers")
    except ModuleNotFoundError as error:
        raise MissingDependencyError(error.name or "transformers", "run the PyTorch reference", "reference") from None


@contextmanager
def _quiet(transformers: Any) -> Iterator[None]:
    """Keeps transformers from printing while it loads; what matters of it is checked and raised as an error."""
    logging = transformers.utils.logging
    verbosity, progress = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if progress:
            logging.enable_progress_bar()


def interleave(k_pe: Float32Array) -> Float32Array:
    """Puts rotary pairs side by side again.

    transformers stores the first elements of all pairs, then the second ones; this package leaves each pair where the
    checkpoint has it.

    Args:
        k_pe: [tokens, qk_rope_head_dim].
    """
    first, second = np.split(k_pe, 2, axis=-1)
    return np.stack([first, second], axis=-1).reshape(k_pe.shape)


def deinterleave(k_pe: Float32Array) -> Float32Array:
    """Undoes ``interleave``: first elements of all pairs, then second ones."""
    return np.concatenate([k_pe[..., 0::2], k_pe[..., 1::2]], axis=-1)


def _numpy(tensor: Any) -> Float32Array:
    array: Float32Array = tensor.float().numpy()
    return array
