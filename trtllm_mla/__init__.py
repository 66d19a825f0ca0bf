"""Turns Multi-head Latent Attention checkpoints into TensorRT engines."""

from trtllm_mla._version import __version__
from trtllm_mla.errors import UserError

__all__ = ["UserError", "__version__"]
