"""The decoder network: one graph for every runtime."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from trtllm_mla.checkpoint.spec import ModelSpec
from trtllm_mla.checkpoint.weights import fp8_inputs
from trtllm_mla.config import MlaPluginConfig
from trtllm_mla.dtypes import DType
from trtllm_mla.network.attention import latent_attention_block, operations_per_layer
from trtllm_mla.network.builder import NetworkBuilder, Tensor
from trtllm_mla.network.contract import LOGITS
from trtllm_mla.network.mlp import gated_mlp
from trtllm_mla.network.moe import mixture_of_experts
from trtllm_mla.ops import DOMAIN
from trtllm_mla.ops.functions import PLUGIN_ATTRIBUTES

if TYPE_CHECKING:
    import onnx_ir


def build_network(
    spec: ModelSpec,
    plugin: MlaPluginConfig,
    dtype: DType,
    *,
    num_layers: int,
    latent_scales: Sequence[float] | None = None,
) -> onnx_ir.Model:
    """Builds the network of an MLA decoder.

    Inputs and outputs are those of ``network/contract.py``; weights are inputs too, named as in the checkpoint. The
    residual stream has the network's type.

    Args:
        spec: The model.
        plugin: Decides whether there is a generation group, in how many passes the context group attends, and the
            cache's type.
        dtype: Type of activations and weights.
        num_layers: Layers to build, from the first.
        latent_scales: Outer scale of each layer's quantised latents; left out, 1.
    """
    latent_scales = (1.0,) * num_layers if latent_scales is None else tuple(latent_scales)
    net = NetworkBuilder(
        spec,
        dtype,
        plugin.cache_dtype(dtype),
        latent_scales,
        absorption=plugin.enable_matrix_absorption,
        context_passes=plugin.max_context_passes,
    )
    embedding = net.weight("model.embed_tokens.weight", spec.vocab_size, spec.hidden_size)
    hidden_TE = net.multiplied(net.op.Gather(embedding, net.step["input_ids"]), spec.embedding_multiplier)
    shortcut_TE = None
    for layer in range(num_layers):
        hidden_TE, shortcut_TE = net.scoped(f"layers.{layer}", _decoder_layer, layer, hidden_TE, shortcut_TE)
    net.output(net.scoped("head", _head, hidden_TE), LOGITS)
    return net.build()


def hidden_states(layer: int) -> str:
    """Name of the residual stream [tokens, hidden_size] behind a layer, an intermediate value of the graph."""
    return f"layers.{layer}/hidden_states"


def count_operations(spec: ModelSpec, plugin: MlaPluginConfig, *, num_layers: int) -> int:
    """How many operations with plugins the network of the first ``num_layers`` layers has."""
    attention = num_layers * operations_per_layer(
        absorption=plugin.enable_matrix_absorption, context_passes=plugin.max_context_passes
    )
    # A linear layer's weight is called so; a layer's experts have one operation, whatever their type.
    linear = sum(name.endswith(".weight") for name in fp8_inputs(spec, num_layers))
    return attention + spec.num_moe_layers(num_layers) + linear


def strip_plugin_attributes(model: onnx_ir.Model) -> None:
    """Removes, in place, what makes TensorRT look for plugins: it inlines the function bodies then."""
    for function in model.functions.values():
        for name in PLUGIN_ATTRIBUTES:
            function.attributes.pop(name, None)
    for node in model.graph:
        if node.domain == DOMAIN:
            for name in PLUGIN_ATTRIBUTES:
                node.attributes.pop(name, None)


def _decoder_layer(
    net: NetworkBuilder, layer: int, hidden_TE: Tensor, shortcut_TE: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """The residual stream behind a layer, and what its experts add behind the next one, if they do that.

    Args:
        net: The graph.
        layer: Its number.
        hidden_TE: The residual stream before it.
        shortcut_TE: What the experts of the layer before it add behind this one, or None.
    """
    spec, op, moe = net.spec, net.op, net.spec.moe
    prefix = f"model.layers.{layer}"
    attention_input = net.rms_norm(hidden_TE, f"{prefix}.input_layernorm", spec.hidden_size, spec.rms_norm_eps)
    attention_TE = net.multiplied(latent_attention_block(net, layer, attention_input), spec.residual_multiplier)
    hidden_TE = op.Add(hidden_TE, attention_TE)
    mlp_input = net.rms_norm(hidden_TE, f"{prefix}.post_attention_layernorm", spec.hidden_size, spec.rms_norm_eps)
    branches = [] if shortcut_TE is None else [shortcut_TE]
    shortcut_TE = None
    if moe is not None and spec.is_moe_layer(layer):
        experts_TE = mixture_of_experts(net, layer, moe, mlp_input)
        if moe.shortcut:
            shortcut_TE = experts_TE
        else:
            branches.insert(0, experts_TE)
    if spec.has_dense_mlp(layer):
        branches.insert(0, gated_mlp(net, f"{prefix}.mlp", spec.intermediate_size, mlp_input))
    for branch_TE in branches:
        hidden_TE = op.Add(hidden_TE, net.multiplied(branch_TE, spec.residual_multiplier))
    hidden_TE.name = hidden_states(layer)
    return hidden_TE, shortcut_TE


def _head(net: NetworkBuilder, hidden_TE: Tensor) -> Tensor:
    """Logits of the wanted rows only: fp32 [logit_rows, vocab_size]."""
    import onnx_ir

    spec, op = net.spec, net.op
    rows = op.Gather(hidden_TE, net.step["last_token_ids"])
    rows = net.rms_norm(rows, "model.norm", spec.hidden_size, spec.rms_norm_eps)
    rows = net.multiplied(rows, 1 / spec.logits_scaling)
    name = "model.embed_tokens" if spec.tie_word_embeddings else "lm_head"
    return op.Cast(net.linear(rows, name, spec.vocab_size, spec.hidden_size), to=onnx_ir.DataType.FLOAT)
