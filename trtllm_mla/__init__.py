"""Turns Multi-head Latent Attention checkpoints into TensorRT engines."""

from typing import TYPE_CHECKING, Any

from trtllm_mla._version import __version__
from trtllm_mla.errors import UserError

if TYPE_CHECKING:
    from trtllm_mla.runtime.llm import LLM
    from trtllm_mla.runtime.sampling import SamplingParams

__all__ = ["LLM", "SamplingParams", "UserError", "__version__"]


def __getattr__(name: str) -> Any:
    """Loads the runtime where somebody asks for it: commands that need none of it start faster."""
    if name == "LLM":
        from trtllm_mla.runtime.llm import LLM

        return LLM
    if name == "SamplingParams":
        from trtllm_mla.runtime.sampling import SamplingParams

        return SamplingParams
    raise AttributeError(f"module 'trtllm_mla' has no attribute '{name}'")
