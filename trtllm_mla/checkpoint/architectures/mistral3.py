"""Mistral-Small-4 as released: a model that also sees, whose language model is a ``mistral4``."""

from __future__ import annotations

from trtllm_mla.checkpoint.architectures.language_model import LanguageModelArchitecture
from trtllm_mla.checkpoint.architectures.mistral4 import Mistral4Config

ARCHITECTURE = LanguageModelArchitecture(
    "mistral3",
    ("Mistral3ForConditionalGeneration",),
    Mistral4Config,
    stacked_experts=True,
    tensor_prefix="language_model.",
    other_parts=("vision_tower.", "multi_modal_projector."),
    text_model_types=("mistral4",),
)
