"""Where each weight input of a network comes from: the contents of ``weights.json``.

A weight map is made from a spec alone. It is checked against a checkpoint before weights are bound: every element of
every tensor is consumed exactly once, or its tensor is skipped for a stated reason.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import numpy as np
from pydantic import Field, StringConstraints, ValidationInfo, field_validator, model_validator

from trtllm_mla.checkpoint.architectures import get_architecture
from trtllm_mla.checkpoint.architectures.base import MAX_EXPERTS
from trtllm_mla.checkpoint.files import Checkpoint
from trtllm_mla.checkpoint.fp8 import (
    SAFETENSORS_DTYPE,
    SCALE_SUFFIX,
    dequantize,
    first_nan,
    first_not_finite,
    scale_shape,
)
from trtllm_mla.checkpoint.spec import ModelSpec, MoeSpec
from trtllm_mla.config import StrictModel, parse_config
from trtllm_mla.dtypes import ByteDType, DType, WeightDType
from trtllm_mla.errors import UserError
from trtllm_mla.files import read_table, write_json

VERSION: Literal[1] = 1
MAX_FILE_BYTES = 1 << 26
MAX_WEIGHTS = 1 << 20
MAX_RANK = 3
MAX_DIMENSION = 1 << 31

EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"

_SOURCE_DTYPES = {dtype.safetensors: dtype for dtype in DType}
_LAYER = re.compile(r"model\.layers\.(\d{1,9})\.")
_EXPERT = re.compile(r"(.+\.mlp\.experts\.)(\d{1,9})\.(?:gate|up|down)_proj\.weight")
# A router chooses experts by small differences: it computes in fp32 whatever the network's type, as in transformers.
FLOAT32_SUFFIXES = (".mlp.gate.weight", ".mlp.gate.e_score_correction_bias")

# Names come from files and end up in messages and in other formats, hence the small alphabet.
Name = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_.]{1,256}$", strict=True)]
Reason = Annotated[str, StringConstraints(min_length=1, max_length=256, strict=True)]
Size = Annotated[int, Field(gt=0, le=MAX_DIMENSION, strict=True)]
Index = Annotated[int, Field(ge=0, le=MAX_DIMENSION, strict=True)]


class WholeTensor(StrictModel):
    """What sources of one whole tensor have in common.

    Attributes:
        tensor: Name in the checkpoint.
        shape: Its shape, and that of the result.
    """

    tensor: Name
    shape: Annotated[tuple[Size, ...], Field(min_length=1, max_length=MAX_RANK)]

    @property
    def block_scaled(self) -> bool:
        """Whether the tensors are E4M3 with scales, and the result is not."""
        return False

    @property
    def tensors(self) -> tuple[str, ...]:
        """The tensors it reads, in the order in which their parts make up the result."""
        return (self.tensor,)

    @property
    def tensor_shape(self) -> tuple[int, ...]:
        """Shape of the tensor in the checkpoint."""
        return self.shape

    @property
    def groups(self) -> int:
        """Equal parts that the tensor's rows fall into, of which the source takes ``rows`` of each."""
        return 1

    @property
    def rows(self) -> tuple[int, int]:
        """First row and the row behind the last, in each of ``groups``."""
        return 0, self.shape[0]

    def take(self, tensor: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """The part of the result that comes from a tensor, as a view of it."""
        return tensor


class TensorSource(WholeTensor):
    """A whole tensor as it is.

    Attributes:
        kind: Tells the sources apart.
        dtype: Type that it is bound in; None is the network's.
    """

    kind: Literal["tensor"] = "tensor"
    dtype: DType | None = None


class Fp8Source(WholeTensor):
    """A tensor of E4M3 numbers, bound as bytes. Its scales are bound apart.

    Attributes:
        kind: Tells the sources apart.
    """

    kind: Literal["fp8"] = "fp8"
    shape: tuple[Size, Size]

    @property
    def dtype(self) -> ByteDType:
        """Type that it is bound in."""
        return ByteDType.INT8


class HeadRowsSource(StrictModel):
    """The same rows of each head of a projection.

    The tensor is [heads * rows_per_head, columns]; the result is [heads, stop - start, columns].

    Attributes:
        kind: Tells the sources apart.
        tensor: Name in the checkpoint.
        shape: Shape of the result.
        rows_per_head: Rows that a head has in the tensor.
        start: First row taken of each head.
        stop: Row behind the last one taken of each head.
        dtype: Type that it is bound in; None is the network's.
        block_scaled: Whether the tensor is E4M3 with scales, and dequantised when it is bound.
    """

    kind: Literal["head_rows"] = "head_rows"
    tensor: Name
    shape: tuple[Size, Size, Size]
    rows_per_head: Size
    start: Index
    stop: Index
    dtype: DType | None = None
    block_scaled: Annotated[bool, Field(strict=True)] = False

    @model_validator(mode="after")
    def _check(self) -> Self:
        if not self.start < self.stop <= self.rows_per_head:
            raise ValueError(
                f"start: found rows {self.start} to {self.stop}, expected a part of a head's {self.rows_per_head} rows"
            )
        if self.shape[1] != self.stop - self.start:
            raise ValueError(f"shape: found {self.shape[1]} rows a head, expected stop - start")
        return self

    @property
    def tensors(self) -> tuple[str, ...]:
        """The tensors it reads, in the order in which their parts make up the result."""
        return (self.tensor,)

    @property
    def tensor_shape(self) -> tuple[int, ...]:
        """Shape of the tensor in the checkpoint."""
        return self.shape[0] * self.rows_per_head, self.shape[2]

    @property
    def groups(self) -> int:
        """Equal parts that the tensor's rows fall into, of which the source takes ``rows`` of each."""
        return self.shape[0]

    @property
    def rows(self) -> tuple[int, int]:
        """First row and the row behind the last, in each of ``groups``."""
        return self.start, self.stop

    def take(self, tensor: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """The part of the result that comes from a tensor, as a view of it."""
        return tensor.reshape(self.shape[0], self.rows_per_head, self.shape[2])[:, self.start : self.stop]


class StackedExperts(StrictModel):
    """What sources of all experts' tensors have in common.

    A tensor, ``{prefix}{expert}.{projection}``, is [rows, columns]; the result is
    [experts, projections * rows, columns]: of each expert all projections, one below the other.

    Attributes:
        prefix: What stands before an expert's number in the names of its tensors.
        projections: What stands behind it and a dot.
        shape: Shape of the result.
    """

    prefix: Name
    projections: Annotated[tuple[Name, ...], Field(min_length=1, max_length=2)]
    shape: tuple[Annotated[int, Field(gt=0, le=MAX_EXPERTS, strict=True)], Size, Size]

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.shape[1] % len(self.projections):
            raise ValueError(f"shape: found {self.shape[1]} rows an expert for {len(self.projections)} projections")
        return self

    @property
    def block_scaled(self) -> bool:
        """Whether the tensors are E4M3 with scales, and the result is not."""
        return False

    @property
    def tensors(self) -> tuple[str, ...]:
        """The tensors it reads, in the order in which their parts make up the result."""
        return tuple(f"{self.prefix}{expert}.{name}" for expert in range(self.shape[0]) for name in self.projections)

    @property
    def tensor_shape(self) -> tuple[int, ...]:
        """Shape of each tensor in the checkpoint."""
        return self.shape[1] // len(self.projections), self.shape[2]

    @property
    def groups(self) -> int:
        """Equal parts that a tensor's rows fall into, of which the source takes ``rows`` of each."""
        return 1

    @property
    def rows(self) -> tuple[int, int]:
        """First row and the row behind the last, in each of ``groups``."""
        return 0, self.tensor_shape[0]

    def take(self, tensor: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """The part of the result that comes from a tensor, as a view of it."""
        return tensor


class ExpertsSource(StackedExperts):
    """Tensors of all experts, stacked.

    Attributes:
        kind: Tells the sources apart.
        dtype: Type that they are bound in; None is the network's.
    """

    kind: Literal["experts"] = "experts"
    dtype: DType | None = None


class Fp8ExpertsSource(StackedExperts):
    """Tensors of E4M3 numbers of all experts, stacked and bound as bytes. Their scales are bound apart.

    Attributes:
        kind: Tells the sources apart.
    """

    kind: Literal["fp8_experts"] = "fp8_experts"

    @property
    def dtype(self) -> ByteDType:
        """Type that they are bound in."""
        return ByteDType.INT8


class SkipSuffix(StrictModel):
    """Tensors whose name ends in ``suffix`` are not read."""

    kind: Literal["suffix"] = "suffix"
    suffix: Name
    reason: Reason

    def applies(self, name: str, names: Mapping[str, object]) -> bool:
        """Whether a checkpoint's tensor, one of ``names``, falls under the rule."""
        return name.endswith(self.suffix)


class SkipPrefix(StrictModel):
    """Tensors whose name starts with ``prefix`` are not read."""

    kind: Literal["prefix"] = "prefix"
    prefix: Name
    reason: Reason

    def applies(self, name: str, names: Mapping[str, object]) -> bool:
        """Whether a checkpoint's tensor, one of ``names``, falls under the rule."""
        return name.startswith(self.prefix)


class SkipExperts(StrictModel):
    """Tensors of the experts from ``first`` on are not read."""

    kind: Literal["experts"] = "experts"
    first: Index
    reason: Reason

    def applies(self, name: str, names: Mapping[str, object]) -> bool:
        """Whether a checkpoint's tensor, one of ``names``, falls under the rule."""
        match = _EXPERT.fullmatch(name)
        return match is not None and int(match[2]) >= self.first


class SkipZeros(StrictModel):
    """Tensors whose name ends in ``suffix`` are not read; ``check_checkpoint`` sees that they are all zeros."""

    kind: Literal["zeros"] = "zeros"
    suffix: Name
    reason: Reason

    def applies(self, name: str, names: Mapping[str, object]) -> bool:
        """Whether a checkpoint's tensor, one of ``names``, falls under the rule."""
        return name.endswith(self.suffix)


class SkipLayers(StrictModel):
    """Tensors of the layers from ``first`` on are not read.

    Attributes:
        kind: Tells the rules apart.
        first: First layer.
        stop: Layer behind the last, or None.
        marker: If given, only layers that hold this tensor (named relative to the layer).
        prefix: What the names of all layers' tensors start with, if anything.
        reason: Why.
    """

    kind: Literal["layers"] = "layers"
    first: Index
    stop: Index | None = None
    marker: Name | None = None
    prefix: Name | None = None
    reason: Reason

    def applies(self, name: str, names: Mapping[str, object]) -> bool:
        """Whether a checkpoint's tensor, one of ``names``, falls under the rule."""
        prefix = self.prefix or ""
        match = _LAYER.match(name, len(prefix)) if name.startswith(prefix) else None
        if match is None or int(match[1]) < self.first or (self.stop is not None and int(match[1]) >= self.stop):
            return False
        return self.marker is None or prefix + match[0] + self.marker in names


class SkipEqual(StrictModel):
    """A tensor that repeats another one is not read; ``check_checkpoint`` compares the two."""

    kind: Literal["equal"] = "equal"
    tensor: Name
    equals: Name
    reason: Reason

    def applies(self, name: str, names: Mapping[str, object]) -> bool:
        """Whether a checkpoint's tensor, one of ``names``, falls under the rule."""
        return name == self.tensor


Source = TensorSource | Fp8Source | HeadRowsSource | ExpertsSource | Fp8ExpertsSource
SkipRule = SkipSuffix | SkipPrefix | SkipExperts | SkipZeros | SkipLayers | SkipEqual


class WeightMap(StrictModel):
    """Sources of all weight inputs, and what is left out.

    Attributes:
        version: Version of the format.
        weights: Source of each input, by the input's name.
        skipped: Rules for tensors that no input needs.
    """

    version: Literal[1] = VERSION
    weights: dict[Name, Annotated[Source, Field(discriminator="kind")]]
    skipped: tuple[Annotated[SkipRule, Field(discriminator="kind")], ...] = ()

    @field_validator("weights")
    @classmethod
    def _check_count(cls, weights: dict[str, Source], info: ValidationInfo) -> dict[str, Source]:
        if not 0 < len(weights) <= MAX_WEIGHTS:
            raise ValueError(f"found {len(weights)} inputs, expected 1 to {MAX_WEIGHTS}")
        return weights

    @classmethod
    def load(cls, path: Path) -> WeightMap:
        """Reads ``weights.json``.

        Raises:
            UserError: The file is missing, too large, or not what ``save`` writes.
        """
        return parse_config(read_table(path, max_bytes=MAX_FILE_BYTES), cls, source=str(path))

    def save(self, path: Path) -> None:
        """Writes ``weights.json``, atomically."""
        write_json(path, self.model_dump(mode="json", exclude_none=True))

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of each weight input, by name, in the order of the network."""
        return {name: source.shape for name, source in self.weights.items()}

    def dtypes(self, network: DType) -> dict[str, WeightDType]:
        """Type of each weight input, by name, in a network of type ``network``."""
        return {name: source.dtype or network for name, source in self.weights.items()}


def build_weight_map(spec: ModelSpec, num_layers: int | None = None) -> WeightMap:
    """Maps the weight inputs of a network to the tensors of a checkpoint.

    Args:
        spec: The whole model, as read from the checkpoint's config.
        num_layers: Layers of the network, if fewer than the model's; the others' tensors are skipped.

    Raises:
        UserError: ``num_layers`` is not between 1 and the model's layers, or some of a layer's experts are FP8.
    """
    layers = spec.num_hidden_layers if num_layers is None else num_layers
    if not 0 < layers <= spec.num_hidden_layers:
        raise UserError(f"--num-layers: found {layers}, expected 1 to the model's {spec.num_hidden_layers}.")
    architecture = get_architecture(spec.model_type, source="model spec")
    sublayers = architecture.sublayers
    if layers % sublayers:
        raise UserError(
            f"--num-layers: found {layers}, expected a multiple of {sublayers}: so many make up a layer of "
            f"{spec.model_type}."
        )
    stop = spec.num_hidden_layers // sublayers
    weights: dict[str, Source] = {}
    stacked: dict[str, bool] = {}
    for name, shape in architecture.parameters(spec).items():
        match = _LAYER.match(name)
        if match and int(match[1]) >= layers:
            continue
        expert = _EXPERT.fullmatch(name)
        tensor = architecture.tensor_name(name)
        is_fp8 = spec.quantization is not None and spec.quantization.applies(tensor)
        if name.endswith(".self_attn.kv_b_proj.weight"):
            weights |= _up_projections(name, tensor, spec, block_scaled=is_fp8)
        elif is_fp8 and (expert is None or spec.moe is None):
            out_features, in_features = shape
            weights[name] = Fp8Source(tensor=tensor, shape=(out_features, in_features))
            weights[name + SCALE_SUFFIX] = TensorSource(
                tensor=tensor + SCALE_SUFFIX, shape=scale_shape(shape), dtype=DType.FLOAT32
            )
        elif expert is None or spec.moe is None:
            dtype = DType.FLOAT32 if name.endswith(FLOAT32_SUFFIXES) else None
            weights[name] = TensorSource(tensor=tensor, shape=shape, dtype=dtype)
        elif expert[1] not in stacked:
            stacked[expert[1]] = is_fp8
            source_prefix = tensor.removesuffix(name.removeprefix(expert[1]))
            weights |= _stacked_experts(expert[1], source_prefix, spec.moe, spec.hidden_size, is_fp8=is_fp8)
        elif stacked[expert[1]] is not is_fp8:
            raise UserError(
                f"modules_to_not_convert: found only some of the projections {expert[1]}*, expected all or none of a "
                "layer's experts."
            )

    skipped: list[SkipRule] = [SkipSuffix(suffix=".rotary_emb.inv_freq", reason="computed from the config")]
    skipped += [SkipPrefix(prefix=part, reason="not part of the language model") for part in architecture.other_parts]
    prefix = architecture.tensor_prefix or None
    if layers < spec.num_hidden_layers:
        reason = f"the network has {layers} layers"
        skipped.append(SkipLayers(first=layers // sublayers, stop=stop, prefix=prefix, reason=reason))
    skipped.append(
        SkipLayers(first=stop, marker=architecture.mtp_marker, prefix=prefix, reason="multi-token prediction layer")
    )
    if architecture.mtp_prefix is not None:
        skipped.append(SkipPrefix(prefix=architecture.mtp_prefix, reason="multi-token prediction layer"))
    if spec.moe is not None and spec.moe.num_identity_experts:
        skipped.append(SkipExperts(first=spec.moe.num_experts, reason="the expert gives back its input"))
    if spec.moe is not None and spec.moe.output_norm:
        skipped.append(SkipSuffix(suffix=".post_mlp_layernorm.weight", reason="dense layers do without it"))
    if spec.moe is not None and not spec.moe.correction_bias:
        skipped.append(
            SkipZeros(suffix=".mlp.gate.e_score_correction_bias", reason="experts are chosen without a bias")
        )
    if spec.tie_word_embeddings:
        head, embedding = architecture.tensor_name(HEAD), architecture.tensor_name(EMBEDDING)
        skipped.append(SkipEqual(tensor=head, equals=embedding, reason="the head is tied to the embedding"))
    return WeightMap(weights=weights, skipped=tuple(skipped))


def _up_projections(name: str, tensor: str, spec: ModelSpec, *, block_scaled: bool) -> dict[str, Source]:
    """``kv_b_proj`` as two inputs: in each head's rows, the keys' part comes first, then the values'.

    Blocks that share a scale may straddle heads: they cannot be divided.
    """
    nope, rows = spec.qk_nope_head_dim, spec.qk_nope_head_dim + spec.v_head_dim
    prefix = name.removesuffix("kv_b_proj.weight")

    def source(start: int, stop: int) -> HeadRowsSource:
        shape = (spec.num_attention_heads, stop - start, spec.kv_lora_rank)
        return HeadRowsSource(
            tensor=tensor, shape=shape, rows_per_head=rows, start=start, stop=stop, block_scaled=block_scaled
        )

    return {f"{prefix}k_up": source(0, nope), f"{prefix}v_up": source(nope, rows)}


def _stacked_experts(
    prefix: str, source_prefix: str, moe: MoeSpec, hidden_size: int, *, is_fp8: bool
) -> dict[str, Source]:
    """The experts of a layer as two inputs: rows of the gate and of the up projection, and the down projection.

    Behind each comes an input of its scales, where it is FP8.
    """
    gate_up = (moe.num_experts, 2 * moe.intermediate_size, hidden_size)
    down = (moe.num_experts, hidden_size, moe.intermediate_size)
    weights: dict[str, Source] = {}
    for name, projections, shape in (
        (f"{prefix}gate_up_proj", ("gate_proj.weight", "up_proj.weight"), gate_up),
        (f"{prefix}down_proj", ("down_proj.weight",), down),
    ):
        if not is_fp8:
            weights[name] = ExpertsSource(prefix=source_prefix, projections=projections, shape=shape)
            continue
        weights[name] = Fp8ExpertsSource(prefix=source_prefix, projections=projections, shape=shape)
        scales = tuple(projection + SCALE_SUFFIX for projection in projections)
        experts, rows, columns = scale_shape(shape, parts=len(projections))
        weights[name + SCALE_SUFFIX] = ExpertsSource(
            prefix=source_prefix, projections=scales, shape=(experts, rows, columns), dtype=DType.FLOAT32
        )
    return weights


def fp8_inputs(spec: ModelSpec, num_layers: int | None = None) -> frozenset[str]:
    """Weight inputs of a network that are bound as E4M3 numbers; beside each there is one of its scales.

    Args:
        spec: The whole model.
        num_layers: Layers of the network, if fewer than the model's.
    """
    if spec.quantization is None:
        return frozenset()
    weights = build_weight_map(spec, num_layers).weights
    return frozenset(name for name, source in weights.items() if source.dtype is ByteDType.INT8)


def check_checkpoint(weight_map: WeightMap, checkpoint: Checkpoint) -> dict[str, str]:
    """Checks that a checkpoint holds what a network needs, and nothing that is left over.

    Reads headers only, except where a tensor is said to equal another or zero.

    Args:
        weight_map: The network's weight map.
        checkpoint: The checkpoint whose weights are to be bound.

    Returns:
        The skipped tensors, with the reason for each.

    Raises:
        UserError: The checkpoint has no weights; a tensor is missing, is left over, has another shape or an element
            type other than float32, float16 and bfloat16 (or E4M3, where it is to be FP8); a part of a tensor is
            consumed twice or not at all; or a tensor differs from the one it should equal.
    """
    if not checkpoint.has_weights:
        raise UserError(f"{checkpoint.path}: found no weights, expected model.safetensors or shards and their index.")
    consumers: dict[str, list[Source]] = {}
    for source in weight_map.weights.values():
        for name in source.tensors:
            consumers.setdefault(name, []).append(source)
    # Scales that are read together with their tensors: their shapes.
    scales = {
        name + SCALE_SUFFIX: scale_shape(source.tensor_shape)
        for source in weight_map.weights.values()
        if source.block_scaled
        for name in source.tensors
    }
    tensors = checkpoint.tensors
    path = checkpoint.path

    _refuse(path, "missing", (name for name in (*consumers, *scales) if name not in tensors))
    skipped: dict[str, str] = {}
    extra = []
    for name in tensors.keys() - consumers.keys() - scales.keys():
        rule = next((rule for rule in weight_map.skipped if rule.applies(name, tensors)), None)
        if rule is None:
            extra.append(name)
        else:
            skipped[name] = rule.reason
    _refuse(path, "not part of the network", sorted(extra))
    fp8 = {name for name, sources in consumers.items() if any(map(_reads_fp8, sources))}
    floats = [*(name for name in consumers if name not in fp8), *scales]
    for expected, names in (((SAFETENSORS_DTYPE,), fp8), (tuple(_SOURCE_DTYPES), floats)):
        _refuse(
            path,
            f"of a type other than {', '.join(expected)}",
            (f"{name} ({tensors[name].dtype})" for name in names if tensors[name].dtype not in expected),
        )
    shapes = [(name, source.tensor_shape) for name, sources in consumers.items() for source in sources]
    shape_problems = (
        f"{name} (found {list(tensors[name].shape)}, expected {list(shape)})"
        for name, shape in (*shapes, *scales.items())
        if tensors[name].shape != shape
    )
    _refuse(path, "of another shape than the network's", dict.fromkeys(shape_problems))
    _refuse(
        path,
        "not consumed exactly once by the weight map",
        (
            f"{name} ({problem})"
            for name, sources in consumers.items()
            if (problem := "used as scales too" if name in scales else _coverage_problem(sources)) is not None
        ),
    )
    for rule in weight_map.skipped:
        wrong = (
            name
            for name in skipped
            if isinstance(rule, SkipZeros) and rule.applies(name, tensors) and np.any(checkpoint.read(name))
        )
        _refuse(path, f"that should hold zeros only ({rule.reason})", wrong)
        if isinstance(rule, SkipEqual) and rule.tensor in skipped and not _equal(checkpoint, rule):
            raise UserError(
                f"{path}: found {rule.tensor} that differs from {rule.equals}, expected them to be equal: "
                f"{rule.reason}. Set tie_word_embeddings to false in config.json, and convert again."
            )
    return dict(sorted(skipped.items()))


def _refuse(path: Path, problem: str, names: Iterable[str]) -> None:
    listed = list(names)
    if listed:
        more = f" and {len(listed) - 3} more" if len(listed) > 3 else ""
        plural = "tensors" if len(listed) > 1 else "tensor"
        shown = ", ".join(name if name.isprintable() else repr(name) for name in listed[:3])
        raise UserError(f"{path}: found {len(listed)} {plural} {problem}: {shown}{more}.")


def _reads_fp8(source: Source) -> bool:
    return source.block_scaled or source.dtype is ByteDType.INT8


def _coverage_problem(sources: list[Source]) -> str | None:
    """What is wrong with the parts that the sources of one tensor take, if anything."""
    groups = {source.groups for source in sources}
    if len(groups) > 1:
        return "divided into heads in two ways"
    total = sources[0].tensor_shape[0] // sources[0].groups
    position = 0
    for start, stop in sorted(source.rows for source in sources):
        if start < position:
            return f"row {start} of each head is consumed twice"
        if start > position:
            return f"row {position} of each head is not consumed"
        position = stop
    return None if position == total else f"row {position} of each head is not consumed"


def _equal(checkpoint: Checkpoint, rule: SkipEqual) -> bool:
    first, second = checkpoint.tensors[rule.tensor], checkpoint.tensors.get(rule.equals)
    if second is None or (first.dtype, first.shape) != (second.dtype, second.shape):
        return False
    left, right = (checkpoint.read(name).reshape(-1).view(np.uint8) for name in (rule.tensor, rule.equals))
    return np.array_equal(left, right)


class BoundWeights(Mapping[str, np.ndarray[Any, Any]]):
    """The weight inputs of a network, made from a checkpoint's tensors when they are asked for.

    A value is a read-only view of the mapped file where it comes from one tensor and type and layout allow, and a
    contiguous copy otherwise. Values are not kept: asking twice converts twice.
    """

    def __init__(self, weight_map: WeightMap, checkpoint: Checkpoint, dtype: DType) -> None:
        self._sources = weight_map.weights
        self._checkpoint = checkpoint
        self._dtypes = weight_map.dtypes(dtype)

    def __getitem__(self, name: str) -> np.ndarray[Any, Any]:
        """One input, [shape of its source] in the type it is bound in.

        Raises:
            KeyError: There is no such input.
            UserError: A value of a tensor is beyond the type's range.
        """
        source = self._sources[name]
        if len(source.tensors) == 1:
            return next(self.parts(name)).reshape(source.shape)
        result = np.empty(source.shape, self._dtypes[name].numpy)
        flat, position = result.reshape(-1), 0
        for part in self.parts(name):
            flat[position : position + part.size] = part.reshape(-1)
            position += part.size
        return result

    def parts(self, name: str) -> Iterator[np.ndarray[Any, Any]]:
        """The elements of one input in order, as contiguous arrays: one for each tensor that they come from.

        Raises:
            KeyError: There is no such input.
            UserError: A value of a tensor is beyond the type's range, or an FP8 tensor or its scales hold NaN.
        """
        source, dtype = self._sources[name], self._dtypes[name]
        for tensor_name in source.tensors:
            part = source.take(self._read(tensor_name, source))
            if part.dtype == dtype.numpy:
                yield np.require(part, requirements=["C", "A"])
            elif isinstance(dtype, ByteDType):
                raise ValueError(f"{tensor_name}: found {part.dtype}, expected {dtype}")
            else:
                yield self._convert(tensor_name, part, dtype)

    def __iter__(self) -> Iterator[str]:
        return iter(self._sources)

    def __len__(self) -> int:
        return len(self._sources)

    def _read(self, name: str, source: Source) -> np.ndarray[Any, Any]:
        """A tensor; where it is FP8, its bytes or what they stand for."""
        tensor = self._checkpoint.read(name)
        if not _reads_fp8(source):
            return tensor
        codes, scales = tensor.view(np.uint8), self._checkpoint.read(name + SCALE_SUFFIX)
        for tensor_name, place in ((name, first_nan(codes)), (name + SCALE_SUFFIX, first_not_finite(scales))):
            if place is not None:
                raise UserError(
                    f"{self._checkpoint.tensors[tensor_name].file}: tensor {tensor_name}: found no finite number at "
                    f"{list(place)}. Download or quantise the checkpoint again."
                )
        return dequantize(codes, scales) if source.block_scaled else codes.view(np.int8)

    def _convert(self, name: str, tensor: np.ndarray[Any, Any], dtype: DType) -> np.ndarray[Any, Any]:
        return convert_values(tensor, dtype, source=f"{self._checkpoint.tensors[name].file}: tensor {name}")


def convert_values(tensor: np.ndarray[Any, Any], dtype: DType, *, source: str) -> np.ndarray[Any, Any]:
    """A contiguous copy of a tensor in another type.

    Args:
        tensor: Values in float32, float16 or bfloat16.
        dtype: The other type.
        source: Where the tensor comes from, for messages.

    Raises:
        UserError: A value is beyond the type's range.
    """
    with np.errstate(over="ignore"):
        result: np.ndarray[Any, Any] = np.ascontiguousarray(tensor, np.float32).astype(dtype.numpy, copy=False)
    if dtype is not DType.FLOAT32:
        overflowing = np.isinf(result) & np.isfinite(tensor)
        if overflowing.any():
            largest = np.abs(tensor[overflowing].astype(np.float32)).max()
            raise UserError(
                f"{source}: found the value {largest:g}, which is beyond the range of {dtype}. Use --dtype bfloat16 "
                "or float32."
            )
    return result


def bind(weight_map: WeightMap, checkpoint: Checkpoint, dtype: DType) -> BoundWeights:
    """Binds a network's weight inputs to a checkpoint.

    Args:
        weight_map: The network's weight map.
        checkpoint: The checkpoint; ``check_checkpoint`` is run on it.
        dtype: The network's type, or that of its twin.

    Returns:
        A lazy mapping from input name to array.

    Raises:
        UserError: The checkpoint does not fit the weight map.
    """
    check_checkpoint(weight_map, checkpoint)
    return BoundWeights(weight_map, checkpoint, dtype)
