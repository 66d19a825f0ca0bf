"""The MLA operations. One folder each: contract, ONNX function body, launch plan, Triton kernels."""

from __future__ import annotations

from types import MappingProxyType

from trtllm_mla.ops.append_latent import APPEND_LATENT
from trtllm_mla.ops.context_attention import CONTEXT_ATTENTION
from trtllm_mla.ops.definition import DOMAIN, VERSION, OpDefinition
from trtllm_mla.ops.gather_latent import GATHER_LATENT
from trtllm_mla.ops.latent_attention import LATENT_ATTENTION

OPS = MappingProxyType({op.name: op for op in (APPEND_LATENT, LATENT_ATTENTION, GATHER_LATENT, CONTEXT_ATTENTION)})

__all__ = ["DOMAIN", "OPS", "VERSION", "OpDefinition"]
