"""The MLA operations. One folder each: contract, ONNX function body, launch plan, Triton kernels."""

from __future__ import annotations

from types import MappingProxyType

from trtllm_mla.ops.append_latent import APPEND_LATENT
from trtllm_mla.ops.block_scaled_mat_mul import BLOCK_SCALED_MAT_MUL
from trtllm_mla.ops.block_scaled_routed_experts import BLOCK_SCALED_ROUTED_EXPERTS
from trtllm_mla.ops.context_attention import CONTEXT_ATTENTION
from trtllm_mla.ops.definition import DOMAIN, VERSION, OpDefinition
from trtllm_mla.ops.gather_latent import GATHER_LATENT
from trtllm_mla.ops.latent_attention import LATENT_ATTENTION
from trtllm_mla.ops.routed_experts import ROUTED_EXPERTS

OPS = MappingProxyType(
    {
        op.name: op
        for op in (
            APPEND_LATENT,
            LATENT_ATTENTION,
            GATHER_LATENT,
            CONTEXT_ATTENTION,
            ROUTED_EXPERTS,
            BLOCK_SCALED_MAT_MUL,
            BLOCK_SCALED_ROUTED_EXPERTS,
        )
    }
)

__all__ = ["DOMAIN", "OPS", "VERSION", "OpDefinition"]
