"""The supported architectures: one module each, found by its ``ARCHITECTURE``.

Shared parts of several architectures live in modules without that attribute.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Mapping
from functools import cache
from types import MappingProxyType
from typing import Any

from trtllm_mla.checkpoint.architectures.base import Architecture
from trtllm_mla.checkpoint.architectures.refused import refusal
from trtllm_mla.checkpoint.files import CONFIG_NAME, Checkpoint
from trtllm_mla.checkpoint.spec import ModelSpec
from trtllm_mla.errors import UserError


@cache
def architectures() -> dict[str, Architecture]:
    """Every supported architecture by its ``model_type``."""
    modules = (importlib.import_module(f"{__name__}.{item.name}") for item in pkgutil.iter_modules(__path__))
    found: list[Architecture] = [module.ARCHITECTURE for module in modules if hasattr(module, "ARCHITECTURE")]
    return {architecture.model_type: architecture for architecture in found}


def get_architecture(
    model_type: object, *, source: str, config: Mapping[str, Any] = MappingProxyType({})
) -> Architecture:
    """Looks an architecture up.

    Args:
        model_type: What a config says.
        source: Where it comes from, for messages.
        config: All of what the config says, for the reason of a refusal.

    Raises:
        UserError: It is not supported; the message says why, if that is known, and lists those that are.
    """
    architecture = architectures().get(model_type) if isinstance(model_type, str) else None
    if architecture is None:
        supported = ", ".join(sorted(architectures()))
        reason = refusal(model_type, config)
        if reason is not None:
            raise UserError(
                f"{source}: found model_type {model_type!r:.80}, which is not supported: {reason} Supported: "
                f"{supported}."
            )
        raise UserError(f"{source}: found model_type {model_type!r:.80}, expected one of the supported: {supported}.")
    return architecture


def read_model_spec(checkpoint: Checkpoint) -> ModelSpec:
    """Reads a checkpoint's config as transformers does.

    Raises:
        UserError: The architecture or one of its options is not supported, or a value is unusable.
    """
    source = str(checkpoint.path / CONFIG_NAME)
    architecture = get_architecture(checkpoint.config.get("model_type"), source=source, config=checkpoint.config)
    return architecture.model_spec(checkpoint.config, checkpoint.generation_config, source=source)
