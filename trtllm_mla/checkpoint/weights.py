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
from trtllm_mla.checkpoint.files import Checkpoint
from trtllm_mla.checkpoint.spec import ModelSpec
from trtllm_mla.config import StrictModel, parse_config
from trtllm_mla.dtypes import DType
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

# Names come from files and end up in messages and in other formats, hence the small alphabet.
Name = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_.]{1,256}$", strict=True)]
Reason = Annotated[str, StringConstraints(min_length=1, max_length=256, strict=True)]
Size = Annotated[int, Field(gt=0, le=MAX_DIMENSION, strict=True)]
Index = Annotated[int, Field(ge=0, le=MAX_DIMENSION, strict=True)]


class TensorSource(StrictModel):
    """A whole tensor as it is.

    Attributes:
        kind: Tells the sources apart.
        tensor: Name in the checkpoint.
        shape: Its shape, and that of the result.
    """

    kind: Literal["tensor"] = "tensor"
    tensor: Name
    shape: Annotated[tuple[Size, ...], Field(min_length=1, max_length=MAX_RANK)]

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
        """The result as a view of the tensor."""
        return tensor


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
    """

    kind: Literal["head_rows"] = "head_rows"
    tensor: Name
    shape: tuple[Size, Size, Size]
    rows_per_head: Size
    start: Index
    stop: Index

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
        """The result as a view of the tensor."""
        return tensor.reshape(self.shape[0], self.rows_per_head, self.shape[2])[:, self.start : self.stop]


class SkipSuffix(StrictModel):
    """Tensors whose name ends in ``suffix`` are not read."""

    kind: Literal["suffix"] = "suffix"
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
        reason: Why.
    """

    kind: Literal["layers"] = "layers"
    first: Index
    stop: Index | None = None
    marker: Name | None = None
    reason: Reason

    def applies(self, name: str, names: Mapping[str, object]) -> bool:
        """Whether a checkpoint's tensor, one of ``names``, falls under the rule."""
        match = _LAYER.match(name)
        if match is None or int(match[1]) < self.first or (self.stop is not None and int(match[1]) >= self.stop):
            return False
        return self.marker is None or match[0] + self.marker in names


class SkipEqual(StrictModel):
    """A tensor that repeats another one is not read; ``check_checkpoint`` compares the two."""

    kind: Literal["equal"] = "equal"
    tensor: Name
    equals: Name
    reason: Reason

    def applies(self, name: str, names: Mapping[str, object]) -> bool:
        """Whether a checkpoint's tensor, one of ``names``, falls under the rule."""
        return name == self.tensor


Source = TensorSource | HeadRowsSource
SkipRule = SkipSuffix | SkipLayers | SkipEqual


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


def build_weight_map(spec: ModelSpec, num_layers: int | None = None) -> WeightMap:
    """Maps the weight inputs of a network to the tensors of a checkpoint.

    Args:
        spec: The whole model, as read from the checkpoint's config.
        num_layers: Layers of the network, if fewer than the model's; the others' tensors are skipped.

    Raises:
        UserError: ``num_layers`` is not between 1 and the model's layers.
    """
    layers = spec.num_hidden_layers if num_layers is None else num_layers
    if not 0 < layers <= spec.num_hidden_layers:
        raise UserError(f"--num-layers: found {layers}, expected 1 to the model's {spec.num_hidden_layers}.")
    architecture = get_architecture(spec.model_type, source="model spec")
    weights: dict[str, Source] = {}
    for name, shape in architecture.tensors(spec).items():
        match = _LAYER.match(name)
        if match and int(match[1]) >= layers:
            continue
        if name.endswith(".self_attn.kv_b_proj.weight"):
            weights |= _up_projections(name, spec)
        else:
            weights[name] = TensorSource(tensor=name, shape=shape)

    skipped: list[SkipRule] = [SkipSuffix(suffix=".rotary_emb.inv_freq", reason="computed from the config")]
    if layers < spec.num_hidden_layers:
        skipped.append(
            SkipLayers(first=layers, stop=spec.num_hidden_layers, reason=f"the network has {layers} layers")
        )
    if architecture.mtp_marker is not None:
        skipped.append(
            SkipLayers(
                first=spec.num_hidden_layers, marker=architecture.mtp_marker, reason="multi-token prediction layer"
            )
        )
    if spec.tie_word_embeddings:
        skipped.append(SkipEqual(tensor=HEAD, equals=EMBEDDING, reason="the head is tied to the embedding"))
    return WeightMap(weights=weights, skipped=tuple(skipped))


def _up_projections(name: str, spec: ModelSpec) -> dict[str, Source]:
    """``kv_b_proj`` as two inputs: in each head's rows, the keys' part comes first, then the values'."""
    nope, rows = spec.qk_nope_head_dim, spec.qk_nope_head_dim + spec.v_head_dim
    prefix = name.removesuffix("kv_b_proj.weight")

    def source(start: int, stop: int) -> HeadRowsSource:
        shape = (spec.num_attention_heads, stop - start, spec.kv_lora_rank)
        return HeadRowsSource(tensor=name, shape=shape, rows_per_head=rows, start=start, stop=stop)

    return {f"{prefix}k_up": source(0, nope), f"{prefix}v_up": source(nope, rows)}


def check_checkpoint(weight_map: WeightMap, checkpoint: Checkpoint) -> dict[str, str]:
    """Checks that a checkpoint holds what a network needs, and nothing that is left over.

    Reads headers only, except where a tensor is said to equal another.

    Args:
        weight_map: The network's weight map.
        checkpoint: The checkpoint whose weights are to be bound.

    Returns:
        The skipped tensors, with the reason for each.

    Raises:
        UserError: The checkpoint has no weights; a tensor is missing, is left over, has another shape or an element
            type other than float32, float16 and bfloat16; a part of a tensor is consumed twice or not at all; or a
            tensor differs from the one it should equal.
    """
    if not checkpoint.has_weights:
        raise UserError(f"{checkpoint.path}: found no weights, expected model.safetensors or shards and their index.")
    consumers: dict[str, list[Source]] = {}
    for source in weight_map.weights.values():
        consumers.setdefault(source.tensor, []).append(source)
    tensors = checkpoint.tensors
    path = checkpoint.path

    _refuse(path, "missing", (name for name in consumers if name not in tensors))
    skipped: dict[str, str] = {}
    extra = []
    for name in tensors.keys() - consumers.keys():
        rule = next((rule for rule in weight_map.skipped if rule.applies(name, tensors)), None)
        if rule is None:
            extra.append(name)
        else:
            skipped[name] = rule.reason
    _refuse(path, "not part of the network", sorted(extra))
    _refuse(
        path,
        f"of a type other than {', '.join(_SOURCE_DTYPES)}",
        (f"{name} ({tensors[name].dtype})" for name in consumers if tensors[name].dtype not in _SOURCE_DTYPES),
    )
    shape_problems = (
        f"{name} (found {list(tensors[name].shape)}, expected {list(source.tensor_shape)})"
        for name, sources in consumers.items()
        for source in sources
        if tensors[name].shape != source.tensor_shape
    )
    _refuse(path, "of another shape than the network's", dict.fromkeys(shape_problems))
    _refuse(
        path,
        "not consumed exactly once by the weight map",
        (
            f"{name} ({problem})"
            for name, sources in consumers.items()
            if (problem := _coverage_problem(sources)) is not None
        ),
    )
    for rule in weight_map.skipped:
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

    A value is a read-only view of the mapped file where type and layout allow, and a contiguous copy otherwise. Values
    are not kept: asking twice converts twice.
    """

    def __init__(self, weight_map: WeightMap, checkpoint: Checkpoint, dtype: DType) -> None:
        self._sources = weight_map.weights
        self._checkpoint = checkpoint
        self._dtype = dtype

    def __getitem__(self, name: str) -> np.ndarray[Any, Any]:
        """One input, [shape of its source] in the type bound to.

        Raises:
            KeyError: There is no such input.
            UserError: A value of the tensor is beyond the type's range.
        """
        source = self._sources[name]
        tensor = source.take(self._checkpoint.read(source.tensor))
        if tensor.dtype != self._dtype.numpy:
            return self._convert(source.tensor, tensor)
        return np.require(tensor, requirements=["C", "A"])

    def __iter__(self) -> Iterator[str]:
        return iter(self._sources)

    def __len__(self) -> int:
        return len(self._sources)

    def _convert(self, name: str, tensor: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        with np.errstate(over="ignore"):
            result: np.ndarray[Any, Any] = np.ascontiguousarray(tensor, np.float32).astype(
                self._dtype.numpy, copy=False
            )
        if self._dtype is not DType.FLOAT32:
            overflowing = np.isinf(result) & np.isfinite(tensor)
            if overflowing.any():
                largest = np.abs(tensor[overflowing].astype(np.float32)).max()
                raise UserError(
                    f"{self._checkpoint.tensors[name].file}: tensor {name}: found the value {largest:g}, which is "
                    f"beyond the range of {self._dtype}. Use --dtype bfloat16 or float32."
                )
        return result


def bind(weight_map: WeightMap, checkpoint: Checkpoint, dtype: DType) -> BoundWeights:
    """Binds a network's weight inputs to a checkpoint.

    Args:
        weight_map: The network's weight map.
        checkpoint: The checkpoint; ``check_checkpoint`` is run on it.
        dtype: Type of all weight inputs: the network's, or that of its twin.

    Returns:
        A lazy mapping from input name to array.

    Raises:
        UserError: The checkpoint does not fit the weight map.
    """
    check_checkpoint(weight_map, checkpoint)
    return BoundWeights(weight_map, checkpoint, dtype)
