"""Feed-forward blocks."""

from __future__ import annotations

from trtllm_mla.network.builder import NetworkBuilder, Tensor


def gated_mlp(net: NetworkBuilder, prefix: str, intermediate_size: int, hidden_TE: Tensor) -> Tensor:
    """``down(silu(gate(x)) * up(x))`` of the MLP whose weights are named under ``prefix``: [T, E]."""
    spec, op = net.spec, net.op
    if spec.hidden_act != "silu":
        raise ValueError(f"hidden_act: found '{spec.hidden_act}', expected 'silu'")
    gate = net.linear(hidden_TE, f"{prefix}.gate_proj", intermediate_size, spec.hidden_size)
    up = net.linear(hidden_TE, f"{prefix}.up_proj", intermediate_size, spec.hidden_size)
    gated = op.Mul(op.Mul(gate, op.Sigmoid(gate)), up)
    return net.linear(gated, f"{prefix}.down_proj", spec.hidden_size, intermediate_size)
