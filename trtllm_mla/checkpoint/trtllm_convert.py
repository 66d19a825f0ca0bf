"""From a Hugging Face checkpoint to TensorRT-LLM's layout and back, bit by bit.

Both ways stream: files are mapped, pieces of about ``CHUNK_BYTES`` are written to where they belong, and the memory of
what was read is given back to the system every ``WINDOW_BYTES``. Each tensor is gone through once, whatever the number
of ranks. A directory appears when all of its files are complete.
"""

from __future__ import annotations

import dataclasses
import math
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from trtllm_mla.checkpoint.architectures import get_architecture
from trtllm_mla.checkpoint.files import (
    CONFIG_NAME,
    GENERATION_CONFIG_NAME,
    INDEX_NAME,
    MAX_CONFIG_BYTES,
    Checkpoint,
    read_safetensors_header,
)
from trtllm_mla.checkpoint.safetensors_writer import SafetensorsWriter, TensorType, file_bytes
from trtllm_mla.checkpoint.spec import ModelSpec
from trtllm_mla.checkpoint.trtllm_config import LayoutModel, from_layout_config, to_layout_config
from trtllm_mla.checkpoint.trtllm_layout import (
    Block,
    LayoutTensor,
    RankGrid,
    check_grid,
    group_tensors,
    layout_dtype,
    layout_groups,
    rank_types,
)
from trtllm_mla.checkpoint.weights import build_weight_map, check_checkpoint, convert_values
from trtllm_mla.dtypes import DType
from trtllm_mla.errors import UserError
from trtllm_mla.files import atomic_directory, check_replaceable, read_table, resolve_output, write_json

CHUNK_BYTES = 1 << 22
WINDOW_BYTES = 1 << 27
SHARD_BYTES = 5 * 10**9  # as transformers' save_pretrained

_DTYPES = {dtype.safetensors: dtype for dtype in DType}

Progress = Callable[[int, int], None]
"""Told the bytes written so far and in all."""


@dataclass(frozen=True)
class ConversionReport:
    """What was written.

    Attributes:
        model: The model in the layout.
        files: Weight files written.
        nbytes: Their size.
        tensors: Hugging Face tensors that were read or written.
        rounded: Those of them whose values were rounded to another type, which reading back cannot undo.
        skipped: Tensors that the layout has no place for, with the reason.
    """

    model: LayoutModel
    files: int
    nbytes: int
    tensors: int
    rounded: tuple[str, ...] = ()
    skipped: Mapping[str, str] = dataclasses.field(default_factory=dict)


def write_trtllm(
    checkpoint: Checkpoint,
    output: Path,
    grid: RankGrid,
    *,
    dtype: DType | None = None,
    num_layers: int | None = None,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> ConversionReport:
    """Writes ``config.json`` and ``rank{N}.safetensors``.

    Args:
        checkpoint: The Hugging Face checkpoint, with weights.
        output: The directory to make.
        grid: How to split the model.
        dtype: Type of the files; None is the checkpoint's. Routers and their biases are float32.
        num_layers: Layers to keep, from the first; None keeps all.
        overwrite: Replace a layout that is in ``output``.
        progress: Told about every piece written.

    Raises:
        UserError: The checkpoint is unusable, the layout cannot describe its model, the grid does not fit it, or
            there is no place for the output. Nothing is written then.
    """
    _check_apart(checkpoint.path, output)
    check_replaceable(output, marker=rank_name(0), overwrite=overwrite)
    source = str(checkpoint.path / CONFIG_NAME)
    hf_config = dict(checkpoint.config)
    architecture = get_architecture(hf_config.get("model_type"), source=source)
    whole = architecture.model_spec(hf_config, checkpoint.generation_config, source=source)
    weights = build_weight_map(whole, num_layers)
    if num_layers is not None:
        hf_config["num_hidden_layers"] = num_layers
    if dtype is not None:
        older = hf_config.get("torch_dtype") is not None and hf_config.get("dtype") is None
        hf_config["torch_dtype" if older else "dtype"] = str(dtype)
    spec = architecture.model_spec(hf_config, checkpoint.generation_config, source=source)
    model = LayoutModel(spec, grid, hf_config, checkpoint.generation_config, {})
    to_layout_config(model, source=source)
    check_grid(spec, grid, source=source)
    skipped = check_checkpoint(weights, checkpoint)

    stored = {name: _stored_dtype(checkpoint, name) for name in architecture.tensors(spec)}
    types = rank_types(spec, grid)
    changed = {name: kind for name, kind in stored.items() if kind is not layout_dtype(spec, name)}
    widened = {name: kind for name, kind in changed.items() if _is_exact(kind, layout_dtype(spec, name))}
    model = dataclasses.replace(model, hf_dtypes=widened)

    nbytes = grid.tp_size * file_bytes(types)
    _check_space(output, nbytes)
    pace = _Pace(checkpoint.release, progress, grid.tp_size * sum(tensor.nbytes for tensor in types.values()))
    with atomic_directory(output, marker=rank_name(0), overwrite=overwrite) as directory, ExitStack() as stack:
        write_json(directory / CONFIG_NAME, to_layout_config(model, source=source))
        writers = [
            stack.enter_context(SafetensorsWriter(directory / rank_name(rank), types)) for rank in range(grid.tp_size)
        ]
        for group in layout_groups(spec):
            ranks = (group_tensors(spec, grid, rank, group) for rank in range(grid.tp_size))
            for tensors in zip(*ranks, strict=True):
                _write_tensor(checkpoint, tensors, writers, pace)
    return ConversionReport(model, grid.tp_size, nbytes, len(stored), tuple(changed.keys() - widened), skipped)


def read_trtllm(path: Path, output: Path, *, progress: Progress | None = None) -> ConversionReport:
    """Writes the Hugging Face checkpoint that a layout was made from: config, index and shards.

    What the layout does not hold cannot come back: the tokenizer, layers for multi-token prediction, and what rounding
    to the layout's type took. What it holds more than once is compared.

    Args:
        path: A directory that ``write_trtllm`` wrote.
        output: The directory to make.
        progress: Told about every piece written.

    Raises:
        UserError: A file is missing, malformed or not as ``config.json`` says, copies of a tensor differ, or there is
            no place for the output. Nothing is written then.
    """
    if not path.is_dir():
        raise UserError(f"{path}: no such directory. Expected one with {CONFIG_NAME} and {rank_name(0)}.")
    _check_apart(path, output)
    check_replaceable(output, marker=INDEX_NAME, overwrite=False)
    source = str(path / CONFIG_NAME)
    model = from_layout_config(read_table(path / CONFIG_NAME, max_bytes=MAX_CONFIG_BYTES), source=source)
    spec, grid = model.spec, model.grid
    expected = rank_types(spec, grid)
    ranks = [_open_rank(path, rank, expected) for rank in range(grid.tp_size)]
    types = _hf_types(model, source=source)
    shards = _shards(types)
    _check_space(output, nbytes := sum(map(file_bytes, shards.values())))

    def release() -> None:
        for rank in ranks:
            rank.release()

    total = sum(tensor.nbytes for tensor in types.values())
    pace = _Pace(release, progress, total)
    with atomic_directory(output, marker=INDEX_NAME) as directory, ExitStack() as stack:
        write_json(directory / CONFIG_NAME, dict(model.hf_config))
        if model.hf_generation_config is not None:
            write_json(directory / GENERATION_CONFIG_NAME, dict(model.hf_generation_config))
        weight_map = {name: shard for shard, tensors in shards.items() for name in tensors}
        write_json(directory / INDEX_NAME, {"metadata": {"total_size": total}, "weight_map": weight_map})
        writers = {
            shard: stack.enter_context(SafetensorsWriter(directory / shard, tensors))
            for shard, tensors in shards.items()
        }
        for group in layout_groups(spec):
            for name, copies in _copies(spec, grid, group).items():
                _write_restored(name, types[name], copies, ranks, writers[weight_map[name]], pace)
    return ConversionReport(model, len(shards), nbytes, len(types))


def rank_name(rank: int) -> str:
    """Name of a rank's weight file."""
    return f"rank{rank}.safetensors"


class _Pace:
    """Counts bytes: tells the progress, and gives memory back now and then."""

    def __init__(self, release: Callable[[], None], progress: Progress | None, total: int) -> None:
        self._release = release
        self._progress = progress
        self._total = total
        self._written = 0
        self._touched = 0

    def read(self, nbytes: int) -> None:
        """Bytes were read."""
        self._touched += nbytes
        if self._touched >= WINDOW_BYTES:
            self._release()
            self._touched = 0

    def wrote(self, nbytes: int) -> None:
        """Bytes were read and written."""
        self.read(nbytes)
        self._written += nbytes
        if self._progress is not None:
            self._progress(self._written, self._total)


def _write_tensor(
    checkpoint: Checkpoint, tensors: tuple[LayoutTensor, ...], writers: list[SafetensorsWriter], pace: _Pace
) -> None:
    """Writes one tensor to every rank's file. The ranks advance in step, since what they read lies side by side."""
    pending = [
        (tensor.name, writer, _pieces(checkpoint, tensor)) for tensor, writer in zip(tensors, writers, strict=True)
    ]
    while pending:
        unfinished = []
        for item in pending:
            name, writer, pieces = item
            piece = next(pieces, None)
            if piece is not None:
                writer.write(name, *piece)
                pace.wrote(piece[1].nbytes)
                unfinished.append(item)
        pending = unfinished


def _pieces(checkpoint: Checkpoint, tensor: LayoutTensor) -> Iterator[tuple[int, np.ndarray[Any, Any]]]:
    """The values of a layout's tensor in order, each piece with the number of elements before it."""
    dtype = tensor.type.dtype
    start = 0
    for block in tensor.blocks:
        if block.tensor is None:
            values = np.zeros(block.size, dtype.numpy)
            yield start, values
            start += block.size
            continue
        source = checkpoint.read(block.tensor)
        matrix = source.reshape(source.shape[0], -1)[slice(*block.rows), slice(*block.columns)]
        file = checkpoint.tensors[block.tensor].file
        matrix = matrix.T if block.transposed else matrix
        for part in _row_chunks(matrix, matrix.shape[1]):
            values = _as_dtype(part, dtype, source=f"{file}: tensor {block.tensor}")
            yield start, values
            start += values.size


def _row_chunks(matrix: np.ndarray[Any, Any], columns: int) -> Iterator[np.ndarray[Any, Any]]:
    """A matrix in parts of so many rows that ``columns`` of them are about ``CHUNK_BYTES``."""
    rows = max(1, CHUNK_BYTES // (columns * matrix.itemsize))
    for start in range(0, matrix.shape[0], rows):
        yield matrix[start : start + rows]


def _as_dtype(values: np.ndarray[Any, Any], dtype: DType, *, source: str) -> np.ndarray[Any, Any]:
    """Contiguous values of a type: the same array where it is that already."""
    if values.dtype == dtype.numpy:
        return np.ascontiguousarray(values)
    return convert_values(values, dtype, source=source)


@dataclass(frozen=True)
class _Copy:
    """Where a rank's file holds a block of a Hugging Face tensor.

    Attributes:
        rank: The rank.
        tensor: The layout's tensor.
        start: Its elements before the block.
        block: The block.
    """

    rank: int
    tensor: LayoutTensor
    start: int
    block: Block

    def view(self, ranks: list[Checkpoint]) -> np.ndarray[Any, Any]:
        """The block's values, [rows, columns] of the Hugging Face tensor."""
        height, width = (stop - start for start, stop in (self.block.rows, self.block.columns))
        flat = ranks[self.rank].read(self.tensor.name).reshape(-1)[self.start : self.start + self.block.size]
        return flat.reshape(width, height).T if self.block.transposed else flat.reshape(height, width)


def _copies(spec: ModelSpec, grid: RankGrid, group: int | None) -> dict[str, list[_Copy]]:
    """All copies of each Hugging Face tensor of a group, or of parts of it."""
    found: dict[str, list[_Copy]] = {}
    for rank in range(grid.tp_size):
        for tensor in group_tensors(spec, grid, rank, group):
            start = 0
            for block in tensor.blocks:
                if block.tensor is not None:
                    found.setdefault(block.tensor, []).append(_Copy(rank, tensor, start, block))
                start += block.size
    return found


def _write_restored(
    name: str,
    target: TensorType,
    copies: list[_Copy],
    ranks: list[Checkpoint],
    writer: SafetensorsWriter,
    pace: _Pace,
) -> None:
    """Writes a Hugging Face tensor from the ranks' parts, and compares the parts that are there more than once."""
    columns = math.prod(target.shape[1:])
    originals = [copy for copy in copies if not copy.tensor.repeats]
    bands: dict[tuple[int, int], list[_Copy]] = {}
    for copy in sorted(originals, key=lambda copy: copy.block.columns):
        bands.setdefault(copy.block.rows, []).append(copy)
    for (row, _), band in bands.items():
        for parts in zip(*(_row_chunks(copy.view(ranks), columns) for copy in band), strict=True):
            joined = parts[0] if len(parts) == 1 else np.concatenate(parts, axis=1)
            writer.write(name, row * columns, values := _as_dtype(joined, target.dtype, source=name))
            pace.wrote(values.nbytes)
            row += len(values)
    for copy in copies:
        if copy.tensor.repeats:
            _compare(name, copy, originals, ranks, pace)


def _compare(name: str, copy: _Copy, originals: list[_Copy], ranks: list[Checkpoint], pace: _Pace) -> None:
    """Checks that a repeated block has the same bits as the block it repeats."""
    (first, stop), (left, right) = copy.block.rows, copy.block.columns
    whole = next(
        item
        for item in originals
        if item.block.rows[0] <= first
        and stop <= item.block.rows[1]
        and item.block.columns[0] <= left
        and right <= item.block.columns[1]
    )
    top, edge = whole.block.rows[0], whole.block.columns[0]
    original = whole.view(ranks)[first - top : stop - top, left - edge : right - edge]
    bits = np.dtype(f"u{original.itemsize}")
    columns = right - left
    for ours, theirs in zip(_row_chunks(copy.view(ranks), columns), _row_chunks(original, columns), strict=True):
        if not np.array_equal(ours.view(bits), theirs.view(bits)):
            files = [ranks[item.rank].tensors[item.tensor.name].file for item in (copy, whole)]
            raise UserError(
                f"{files[0]}: tensor {copy.tensor.name}: found values that differ from those of "
                f"{whole.tensor.name} in {files[1].name}, expected both to hold {name}. The files are damaged or of "
                "two conversions; convert the model again."
            )
        pace.read(2 * ours.nbytes)


def _is_exact(source: DType, target: DType) -> bool:
    """Whether every number of a type is one of another, so that a tensor can come back."""
    return source is target or target is DType.FLOAT32


def _stored_dtype(checkpoint: Checkpoint, name: str) -> DType:
    info = checkpoint.tensors[name]
    if info.dtype not in _DTYPES:
        raise UserError(
            f"{info.file}: tensor {name}: found type {info.dtype}, expected {' or '.join(_DTYPES)}: the layout is "
            "written without quantisation. Convert the checkpoint to bfloat16 first."
        )
    return _DTYPES[info.dtype]


def _open_rank(path: Path, rank: int, expected: Mapping[str, TensorType]) -> Checkpoint:
    """A rank's file, with exactly the tensors that belong into it."""
    file = path / rank_name(rank)
    tensors = read_safetensors_header(file)
    for name in sorted(expected.keys() ^ tensors.keys()):
        problem = "misses tensor" if name in expected else "holds a tensor that does not belong to the model,"
        raise UserError(f"{file}: {problem} {name!r:.300}; expected the tensors of the model in {CONFIG_NAME}.")
    for name, tensor in expected.items():
        found = tensors[name]
        if (found.dtype, found.shape) != (tensor.dtype.safetensors, tensor.shape):
            raise UserError(
                f"{file}: tensor {name}: found {found.dtype} {list(found.shape)}, expected "
                f"{tensor.dtype.safetensors} {list(tensor.shape)} for the model in {CONFIG_NAME}."
            )
    return Checkpoint(path, {}, None, True, tensors)


def _hf_types(model: LayoutModel, *, source: str) -> dict[str, TensorType]:
    """Type and shape of each Hugging Face tensor."""
    shapes = get_architecture(model.spec.model_type, source=source).tensors(model.spec)
    for name, dtype in model.hf_dtypes.items():
        if name not in shapes or not _is_exact(dtype, layout_dtype(model.spec, name)):
            raise UserError(
                f"{source}: hf_dtypes: found {name!r:.300} as {dtype}, expected tensors of the model, in types that "
                "the layout stores exactly."
            )
    return {
        name: TensorType(model.hf_dtypes.get(name, layout_dtype(model.spec, name)), shape)
        for name, shape in shapes.items()
    }


def _shards(types: Mapping[str, TensorType]) -> dict[str, dict[str, TensorType]]:
    """Tensors in order, in files of at most ``SHARD_BYTES``, unless a tensor alone is larger."""
    shards: list[dict[str, TensorType]] = [{}]
    size = 0
    for name, tensor in types.items():
        if shards[-1] and size + tensor.nbytes > SHARD_BYTES:
            shards.append({})
            size = 0
        shards[-1][name] = tensor
        size += tensor.nbytes
    return {
        f"model-{number:05}-of-{len(shards):05}.safetensors": shard for number, shard in enumerate(shards, start=1)
    }


def _check_apart(source: Path, output: Path) -> None:
    if source.resolve().is_relative_to(resolve_output(output)):
        raise UserError(f"{output}: the output directory would replace the checkpoint in it. Name another one.")


def _check_space(output: Path, nbytes: int) -> None:
    """Refuses a directory whose file system has not enough room."""
    parent = next(item for item in resolve_output(output).parents if item.is_dir())
    free = shutil.disk_usage(parent).free
    if nbytes > free:
        raise UserError(
            f"{output}: found {free / 1e9:.1f} GB free on the disk, expected {nbytes / 1e9:.1f} GB for the weights. "
            "Make room, or name a directory on another disk."
        )
