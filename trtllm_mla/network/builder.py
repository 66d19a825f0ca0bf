"""The building blocks that every part of a network is written with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from trtllm_mla.cache_rows import CacheDType
from trtllm_mla.checkpoint.fp8 import SCALE_SUFFIX, scale_shape
from trtllm_mla.checkpoint.spec import ModelSpec
from trtllm_mla.checkpoint.weights import fp8_inputs
from trtllm_mla.dtypes import ByteDType, DType
from trtllm_mla.network.contract import CACHE_DTYPE_KEY, LATENT_DIMS, past_latent, step_inputs
from trtllm_mla.ops import DOMAIN, OPS, VERSION
from trtllm_mla.ops.definition import Attribute, BodyTypes, split_dim
from trtllm_mla.ops.functions import OPSET

if TYPE_CHECKING:
    import onnx_ir

IR_VERSION = 10

# Values of the graph under construction. onnxscript's builder dispatches operators by name, which has no static type.
Tensor = Any


class NetworkBuilder:
    """A graph under construction, its inputs, and the operations whose use is the same everywhere.

    Attributes:
        spec: The model.
        dtype: Type of activations and weights.
        layout: A row of the latent cache.
        latent_scales: Outer scale of each layer's quantised latents.
        absorption: Whether the network has a generation group.
        context_passes: Passes of the context group's attention.
        op: onnxscript's operator builder.
        step: The step inputs by name.
        position_ids: Position of each new token: int32 [tokens].
        group_sizes: Tokens of the context and of the generation group, int64 [2]; None without a generation group.
        query_factors: What each token's queries are multiplied by, fp32 [tokens, 1, 1]; None where all are 1.
    """

    def __init__(
        self,
        spec: ModelSpec,
        dtype: DType,
        cache_dtype: CacheDType,
        latent_scales: Sequence[float],
        *,
        absorption: bool,
        context_passes: int,
    ) -> None:
        import onnx_ir
        from onnxscript import GraphBuilder

        self.spec = spec
        self.dtype = dtype
        self.layout = cache_dtype.layout(spec.kv_lora_rank, spec.qk_rope_head_dim)
        self.latent_scales = tuple(latent_scales)
        self.absorption = absorption
        self.context_passes = context_passes
        self._graph = onnx_ir.Graph(
            [], [], nodes=[], opset_imports={"": OPSET, DOMAIN: int(VERSION)}, name=spec.model_type
        )
        self._builder = GraphBuilder(self._graph)
        self._functions: dict[str, onnx_ir.Function] = {}
        self._weights: dict[str, onnx_ir.Value] = {}
        self._fp8_inputs = fp8_inputs(spec)
        self._scope: list[str] = []
        self.op: Any = self._builder.op
        types = {"int32": onnx_ir.DataType.INT32, "float32": onnx_ir.DataType.FLOAT}
        sizes = {"qk_rope_head_dim": spec.qk_rope_head_dim}
        self.step: dict[str, Tensor] = {
            item.name: self._builder.input(item.name, types[item.dtype], [sizes.get(dim, dim) for dim in item.dims])
            for item in step_inputs(absorption=absorption, context_passes=context_passes)
        }
        self.position_ids: Tensor = self.step["context_position_ids"]
        self.group_sizes: Tensor | None = None
        if absorption:
            groups = (self.step["context_position_ids"], self.step["generation_position_ids"])
            self.position_ids = self.op.Concat(*groups, axis=0, _name="position_ids")
            self.group_sizes = self.op.Concat(*map(self.op.Shape, groups), axis=0, _name="group_sizes")
        self.query_factors: Tensor | None = self._query_factors() if spec.query_scaling_beta else None

    def latent_pool(self, layer: int) -> Tensor:
        """Adds a layer's cache input: ``LATENT_DIMS``."""
        pages, page_size, _ = LATENT_DIMS
        return self._builder.input(past_latent(layer), self.layout.dtype.onnx, [pages, page_size, self.layout.width])

    def weight(self, name: str, *shape: int, dtype: DType | None = None) -> Tensor:
        """A weight, which is a graph input bound at run time. The same name is the same input.

        Args:
            name: Its name, as in the weight map.
            *shape: Its shape.
            dtype: Its type; None is the network's, or int8 for FP8 weights.
        """
        if name not in self._weights:
            default = ByteDType.INT8 if name in self._fp8_inputs else self.dtype
            self._weights[name] = self._builder.input(name, (dtype or default).onnx, shape)
        return self._weights[name]

    def weight_and_scales(self, name: str, *shape: int, parts: int = 1) -> list[Tensor]:
        """A weight, and after it its scales where it is FP8.

        Args:
            name: Its name, as in the weight map.
            *shape: Its shape.
            parts: Equal parts of its rows that are divided into blocks by themselves.
        """
        weight = self.weight(name, *shape)
        if name not in self._fp8_inputs:
            return [weight]
        return [weight, self.weight(name + SCALE_SUFFIX, *scale_shape(shape, parts=parts), dtype=DType.FLOAT32)]

    def output(self, value: Tensor, name: str) -> None:
        """Makes a value an output of the network."""
        self._builder.add_output(value, name)

    def scoped(self, scope: str, block: Callable[..., Tensor], *args: Any) -> Tensor:
        """Calls ``block(self, *args)``; the nodes that it adds are named under ``scope``."""
        self._builder.push_module(scope)
        self._scope.append(scope)
        try:
            return block(self, *args)
        finally:
            self._scope.pop()
            self._builder.pop_module()

    def linear(self, x: Tensor, name: str, out_features: int, in_features: int, *, bias: bool = False) -> Tensor:
        """Projects [rows, in_features] by ``name.weight`` [out_features, in_features], as torch's Linear does.

        Gemm reads the weight in the checkpoint's layout: no runtime keeps or makes a transposed copy. An FP8 weight is
        multiplied by BlockScaledMatMul, which reads it so too.
        """
        weight, *scales = self.weight_and_scales(f"{name}.weight", out_features, in_features)
        biases = [self.weight(f"{name}.bias", out_features)] if bias else []
        if scales:
            scope = name.rpartition(".")[2]
            (product,) = self.scoped(scope, NetworkBuilder.mla_op, "BlockScaledMatMul", x, weight, *scales)
            return self.op.Add(product, *biases) if biases else product
        return self.op.Gemm(x, weight, *biases, transB=1, _name=self._node_name(name.rpartition(".")[2]))

    def multiplied(self, x: Tensor, factor: float | Tensor) -> Tensor:
        """``x * factor`` in fp32, rounded once; ``x`` itself where the factor is the number 1.

        Args:
            x: Of the network's type.
            factor: A number, or an fp32 value of a shape that broadcasts to that of ``x``.
        """
        import onnx_ir

        if isinstance(factor, float) and factor == 1:
            return x
        if self.dtype is DType.FLOAT32:
            return self.op.Mul(x, factor)
        wide = self.op.Mul(self.op.Cast(x, to=onnx_ir.DataType.FLOAT), factor)
        return self.op.Cast(wide, to=self.dtype.onnx)

    def rms_norm(self, x: Tensor, name: str, width: int, epsilon: float) -> Tensor:
        """Root mean square norm over the last axis; the statistics are fp32."""
        weight = self.weight(f"{name}.weight", width)
        node_name = self._node_name(name.rpartition(".")[2])
        return self.op.RMSNormalization(x, weight, axis=-1, epsilon=epsilon, stash_type=1, _name=node_name)

    def mla_op(self, op_name: str, *inputs: Tensor, **attributes: Attribute) -> list[Tensor]:
        """Adds an MLA operation, which TensorRT runs as a plugin and ONNX Runtime as its function body.

        Args:
            op_name: A key of ``OPS``.
            *inputs: As its contract lists them.
            **attributes: All of its attributes.

        Returns:
            Its outputs, with the types and shapes that the contract gives them.
        """
        import onnx_ir

        definition = OPS[op_name]
        if op_name not in self._functions:
            self._functions[op_name] = definition.build_body(BodyTypes(self.dtype, self.layout), attributes)
        made = self.op.builder.call_op(
            op_name,
            inputs,
            {**attributes, "plugin_namespace": DOMAIN, "plugin_version": VERSION},
            domain=DOMAIN,
            outputs=len(definition.outputs),
            name=self._node_name(op_name),
        )
        outputs: list[Tensor] = [made] if len(definition.outputs) == 1 else list(made)
        types = {
            "model": self.dtype.onnx,
            "cache": self.layout.dtype.onnx,
            "int8": onnx_ir.DataType.INT8,
            "int32": onnx_ir.DataType.INT32,
            "float32": onnx_ir.DataType.FLOAT,
        }
        sizes: dict[str, Any] = dict(attributes)
        for contract, value in zip(definition.inputs, inputs, strict=True):
            for dim, size in zip(contract.dims, value.shape, strict=True):
                if split_dim(dim)[1] == 0:
                    sizes[str(dim)] = size
        for contract, value in zip(definition.outputs, outputs, strict=True):
            value.type = onnx_ir.TensorType(types[contract.element_type])
            value.shape = onnx_ir.Shape([sizes[str(dim)] for dim in contract.dims])
        return outputs

    def build(self) -> onnx_ir.Model:
        """The finished network."""
        import onnx_ir

        return onnx_ir.Model(
            self._graph,
            ir_version=IR_VERSION,
            producer_name="trtllm_mla",
            functions=list(self._functions.values()),
            metadata_props={CACHE_DTYPE_KEY: str(self.layout.dtype)},
        )

    def _query_factors(self) -> Tensor:
        """``1 + beta * log(1 + floor(position / positions))``, as Llama 4 scales queries: fp32 [tokens, 1, 1]."""
        import onnx_ir

        positions = self.op.Constant(value_ints=[self.spec.rope.original_max_position_embeddings])
        periods = self.op.Div(self.position_ids, self.op.Cast(positions, to=onnx_ir.DataType.INT32))
        grown = self.op.Log(self.op.Add(self.op.Cast(periods, to=onnx_ir.DataType.FLOAT), 1.0))
        factors = self.op.Add(self.op.Mul(grown, self.spec.query_scaling_beta), 1.0)
        return self.op.Unsqueeze(factors, [1, 2])

    def _node_name(self, name: str) -> str:
        return "/".join((*self._scope, name))
