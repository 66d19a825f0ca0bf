"""The supported architectures: one module each, found by its ``ARCHITECTURE``.

Shared parts of several architectures live in modules without that attribute.
"""

from __future__ import annotations

import importlib
import pkgutil
from functools import cache

from trtllm_mla.checkpoint.architectures.dense import DenseArchitecture
from trtllm_mla.checkpoint.files import CONFIG_NAME, Checkpoint
from trtllm_mla.checkpoint.spec import ModelSpec
from trtllm_mla.errors import UserError


@cache
def architectures() -> dict[str, DenseArchitecture]:
    """Every supported architecture by its ``model_type``."""
    modules = (importlib.import_module(f"{__name__}.{item.name}") for item in pkgutil.iter_modules(__path__))
    found: list[DenseArchitecture] = [module.ARCHITECTURE for module in modules if hasattr(module, "ARCHITECTURE")]
    return {architecture.model_type: architecture for architecture in found}


def get_architecture(model_type: object, *, source: str) -> DenseArchitecture:
    """Looks an architecture up.

    Args:
        model_type: What a config says.
        source: Where it comes from, for messages.

    Raises:
        UserError: It is not supported; the message lists those that are.
    """
    architecture = architectures().get(model_type) if isinstance(model_type, str) else None
    if architecture is None:
        raise UserError(
            f"{source}: found model_type {model_type!r:.80}, expected one of the supported: "
            f"{', '.join(sorted(architectures()))}."
        )
    return architecture


def read_model_spec(checkpoint: Checkpoint) -> ModelSpec:
    """Reads a checkpoint's config as transformers does.

    Raises:
        UserError: The architecture or one of its options is not supported, or a value is unusable.
    """
    source = str(checkpoint.path / CONFIG_NAME)
    architecture = get_architecture(checkpoint.config.get("model_type"), source=source)
    return architecture.model_spec(checkpoint.config, checkpoint.generation_config, source=source)
