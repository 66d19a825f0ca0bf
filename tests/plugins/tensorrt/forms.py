"""Operations as small as kernels allow, in every form, and random calls of them."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from trtllm_mla.cache_rows import CacheDType
from trtllm_mla.dtypes import DType
from trtllm_mla.engine.operation import Operation, OperationSettings, TargetTile
from trtllm_mla.engine.plan_data import PlannedOperation, trace_operation
from trtllm_mla.ops import OPS
from trtllm_mla.ops.definition import Attribute, OpDefinition, split_dim
from trtllm_mla.targets import get_target

TARGETS = ("sm_89", "sm_120")
CACHE_DTYPES = ("bf16", "fp8", "nvfp4")
TILES = (TargetTile("sm_89", 32, 2), TargetTile("sm_120", 16, 3))

KV_LORA_RANK, ROPE_DIM = 96, 32
SIZES = {
    "heads": 5,
    "kv_lora_rank": KV_LORA_RANK,
    "rope_dim": ROPE_DIM,
    "nope_dim": 48,
    "v_dim": 40,
    "page_size": 64,
    "experts": 6,
    "top_k": 2,
    "hidden_size": 72,
    "intermediate_size": 40,
    "gate_up_size": 80,
    "hidden_blocks": 1,
    "intermediate_blocks": 1,
    "gate_up_blocks": 2,
    "in_features": 1100,
    "out_features": 72,
    "scale_rows": 1,
    "scale_columns": 9,
}
ATTRIBUTES: dict[str, Attribute] = {
    "rope_interleave": 1,
    "softmax_scale": 0.1352,
    "kv_lora_rank": KV_LORA_RANK,
    "rope_dim": ROPE_DIM,
    "causal": 1,
    "first_expert": 4,
}

Shape = tuple[int, ...]


@dataclass(frozen=True)
class OpForm:
    """An operation with what is fixed when an engine is built.

    Attributes:
        operation: The operation.
        sizes: Its fixed sizes.
        planned: The same for each target, traced.
    """

    operation: Operation
    sizes: Mapping[str, int]
    planned: tuple[PlannedOperation, ...]

    @property
    def definition(self) -> OpDefinition:
        return self.operation.definition

    @property
    def has_cache(self) -> bool:
        return any(tensor.element_type == "cache" for tensor in self.definition.inputs)

    @property
    def input_types(self) -> tuple[str, ...]:
        return self.types[: len(self.definition.inputs)]

    @property
    def types(self) -> tuple[str, ...]:
        return self.planned[0].types

    def shapes(self, dynamic: Mapping[str, int]) -> tuple[Shape, ...]:
        sizes = {**self.sizes, **dynamic}

        def size(dim: str | int) -> int:
            name, offset = split_dim(dim)
            return offset if name is None else sizes[name] + offset

        return tuple(tuple(size(dim) for dim in tensor.dims) for tensor in self.definition.inputs)

    def random_shapes(self, rng: random.Random) -> tuple[Shape, ...]:
        """Shapes of a call; none of its sizes is beyond ``max_shapes``."""
        largest = rng.choice([3, 40, 400])
        return self.shapes({name: rng.randint(0, largest) for name in sorted(self.definition.dynamic_dims)})

    @property
    def max_shapes(self) -> tuple[Shape, ...]:
        return self.shapes(dict.fromkeys(self.definition.dynamic_dims, 400))

    @property
    def fields(self) -> dict[str, npt.NDArray[np.int32] | npt.NDArray[np.float32]]:
        """What the ONNX parser gives for a node."""
        kinds = {int: np.int32, float: np.float32}
        return {
            name: np.array([self.operation.attributes[name]], kinds[kind])
            for name, kind in self.definition.attributes.items()
        }


def make_form(name: str, cache_dtype: CacheDType, *, model_dtype: DType = DType.BFLOAT16) -> OpForm:
    definition = OPS[name]
    width = cache_dtype.layout(KV_LORA_RANK, ROPE_DIM).width
    values = {**ATTRIBUTES, "latent_scale": 0.37 if cache_dtype.is_quantized else 1.0}
    # As ONNX and plugin fields have it: in 32 bits.
    attributes = {
        key: kind(np.float32(values[key])) if kind is float else values[key]
        for key, kind in definition.attributes.items()
    }
    settings = OperationSettings(model_dtype, cache_dtype, TILES)
    operation = Operation(definition, attributes, settings)
    names = {split_dim(dim)[0] for tensor in definition.inputs for dim in tensor.dims} - definition.dynamic_dims
    sizes = {key: {**SIZES, "width": width}[key] for key in names if key is not None}
    planned = tuple(trace_operation(definition, attributes, settings, sizes, get_target(target)) for target in TARGETS)
    return OpForm(operation, sizes, planned)


def make_forms() -> dict[str, OpForm]:
    """All operations, by a name; those with a cache for each of its types."""
    forms = {}
    for name, definition in OPS.items():
        has_cache = any(tensor.element_type == "cache" for tensor in definition.inputs)
        for cache_dtype in CACHE_DTYPES if has_cache else CACHE_DTYPES[:1]:
            key = f"{name}-{cache_dtype}" if has_cache else name
            forms[key] = make_form(name, CacheDType(cache_dtype))
    return forms
