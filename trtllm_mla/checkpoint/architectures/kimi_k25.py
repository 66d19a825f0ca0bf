"""Kimi-K2.5: a model that also sees, whose language model is a DeepSeek-V3."""

from __future__ import annotations

from trtllm_mla.checkpoint.architectures.deepseek_v3 import DeepseekV3Config
from trtllm_mla.checkpoint.architectures.language_model import LanguageModelArchitecture

# The first class is transformers', the second that of the code beside released checkpoints. transformers stores one
# norm of the projector under "model.".
ARCHITECTURE = LanguageModelArchitecture(
    "kimi_k25",
    ("Kimi_K25ForConditionalGeneration", "KimiK25ForConditionalGeneration"),
    DeepseekV3Config,
    tensor_prefix="language_model.",
    other_parts=("vision_tower.", "mm_projector.", "model.mm_projector."),
    text_model_types=("kimi_k2", "deepseek_v3"),
)
