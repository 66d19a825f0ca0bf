"""A Hugging Face checkpoint on disk: its config, and its tensors as memory-mapped views.

Opening reads ``config.json`` and the headers of the safetensors files, nothing else. Everything a header claims is
checked before memory is mapped or allocated, since the files may come from a stranger. Pickled weights (``.bin``,
``.pt``) are never opened: loading them would run code.

The safetensors format (https://github.com/huggingface/safetensors#format): 8 bytes with the length N of the header
(unsigned, little-endian), N bytes of JSON, then the tensors' data without a gap. ``data_offsets`` count from the end
of the header.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import ml_dtypes
import numpy as np

from trtllm_mla.errors import UserError
from trtllm_mla.files import parse_json, read_table

CONFIG_NAME = "config.json"
GENERATION_CONFIG_NAME = "generation_config.json"
SINGLE_NAME = "model.safetensors"
INDEX_NAME = "model.safetensors.index.json"

MAX_CONFIG_BYTES = 1 << 22
MAX_INDEX_BYTES = 1 << 26
MAX_HEADER_BYTES = 100_000_000  # the limit of the safetensors library
MAX_NAME_LENGTH = 512
MAX_RANK = 16
MAX_DIMENSION = 1 << 48

_LENGTH_BYTES = 8
_PICKLE_SUFFIXES = frozenset({".bin", ".pt", ".pth", ".ckpt", ".pkl"})
_DTYPES: Mapping[str, np.dtype[Any]] = {
    name: np.dtype(dtype)
    for name, dtype in (
        ("BOOL", np.bool_),
        ("U8", np.uint8),
        ("I8", np.int8),
        ("U16", np.uint16),
        ("I16", np.int16),
        ("U32", np.uint32),
        ("I32", np.int32),
        ("U64", np.uint64),
        ("I64", np.int64),
        ("F8_E4M3", ml_dtypes.float8_e4m3fn),
        ("F8_E5M2", ml_dtypes.float8_e5m2),
        ("F16", np.float16),
        ("BF16", ml_dtypes.bfloat16),
        ("F32", np.float32),
        ("F64", np.float64),
    )
}


@dataclass(frozen=True)
class TensorInfo:
    """Where a tensor lies.

    Attributes:
        file: The safetensors file.
        dtype: Element type as the header names it, for example ``BF16``.
        shape: Its dimensions.
        offsets: First byte and the byte behind the last, counted from the start of the file.
    """

    file: Path
    dtype: str
    shape: tuple[int, ...]
    offsets: tuple[int, int]


@dataclass(frozen=True)
class Checkpoint:
    """An opened Hugging Face directory. Make it with ``Checkpoint.open``.

    Attributes:
        path: The directory.
        config: What ``config.json`` holds.
        generation_config: What ``generation_config.json`` holds, or None without that file.
        has_weights: Whether there are weights; a directory with the JSON files alone describes a model too.
        tensors: The tensors of all files by name.
    """

    path: Path
    config: Mapping[str, Any]
    generation_config: Mapping[str, Any] | None
    has_weights: bool
    tensors: Mapping[str, TensorInfo]
    _maps: dict[Path, mmap.mmap] = field(default_factory=dict, repr=False, compare=False)

    @classmethod
    def open(cls, path: Path, *, progress: Callable[[int, int], None] | None = None) -> Checkpoint:
        """Reads the config and the headers of a checkpoint.

        Weights are ``model.safetensors``, or else the shards that ``model.safetensors.index.json`` names. With
        neither, or with an index none of whose shards is there (as after downloading the JSON files alone), the
        checkpoint has no weights.

        The index may only name files of the directory itself, since its contents come from whoever made the
        checkpoint. Links are followed, wherever they lead: the cache of the Hugging Face hub consists of them.

        Args:
            path: A local directory.
            progress: Told after each weight file how many headers were read, and how many there are.

        Raises:
            UserError: There is no such directory, a file is malformed, weights are missing or ambiguous, or they
                are pickled; the message names the file.
        """
        if not path.is_dir():
            raise UserError(
                f"{path}: no such directory. Expected a local Hugging Face checkpoint with a {CONFIG_NAME}; download "
                "one first, for example with: hf download OWNER/NAME --local-dir DIRECTORY"
            )
        config = read_table(path / CONFIG_NAME, max_bytes=MAX_CONFIG_BYTES)
        generation_path = path / GENERATION_CONFIG_NAME
        generation_config = None
        if generation_path.exists():
            generation_config = read_table(generation_path, max_bytes=MAX_CONFIG_BYTES)
        tensors = _read_tensors(path, progress)
        return cls(path, config, generation_config, tensors is not None, tensors or {})

    def read(self, name: str) -> np.ndarray[Any, Any]:
        """A read-only, memory-mapped view of a tensor.

        Args:
            name: A key of ``tensors``.

        Raises:
            KeyError: There is no such tensor.
            UserError: The file shrank or disappeared since it was opened.
        """
        info = self.tensors[name]
        dtype = _DTYPES[info.dtype]
        start, stop = info.offsets
        if start == stop:
            return np.empty(info.shape, dtype)
        mapped = self._maps.get(info.file)
        if mapped is None:
            mapped = self._maps[info.file] = _map(info.file)
        if len(mapped) < stop:
            raise UserError(f"{info.file}: the file shrank since it was opened. Restore it and start again.")
        flat = np.frombuffer(mapped, np.uint8, count=stop - start, offset=start)
        return flat.view(dtype).reshape(info.shape)

    def release(self) -> None:
        """Gives the memory of all pages read so far back to the system. Views stay valid and read them again."""
        for mapped in self._maps.values():
            mapped.madvise(mmap.MADV_DONTNEED)


def _map(file: Path) -> mmap.mmap:
    try:
        with file.open("rb") as handle:
            return mmap.mmap(handle.fileno(), 0, access=mmap.ACCESS_READ)
    except (OSError, ValueError) as error:
        raise UserError(f"{file}: cannot be mapped into memory: {error}.") from None


def _read_tensors(path: Path, progress: Callable[[int, int], None] | None) -> dict[str, TensorInfo] | None:
    """The tensors of a directory, or None if it has no weights."""
    single, index = path / SINGLE_NAME, path / INDEX_NAME
    if single.exists():
        return read_safetensors_header(single)
    if index.exists():
        return _read_shards(path, index, progress)
    stray = sorted(item.name for item in path.glob("*.safetensors"))
    if stray:
        raise UserError(
            f"{path}: found {_some(stray)} without {INDEX_NAME}. Expected {SINGLE_NAME}, or shards and their index; "
            "download the index too."
        )
    pickled = sorted(item.name for item in path.iterdir() if item.suffix in _PICKLE_SUFFIXES)
    if pickled:
        raise UserError(
            f"{path}: found only pickled weights ({_some(pickled)}), expected safetensors. Pickle files can run any "
            "code when they are loaded and are never opened here; save the model again with safetensors."
        )
    return None


def _read_shards(path: Path, index: Path, progress: Callable[[int, int], None] | None) -> dict[str, TensorInfo] | None:
    weight_map = read_table(index, max_bytes=MAX_INDEX_BYTES).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise UserError(f"{index}: found no table 'weight_map', expected one that gives each tensor's file.")
    for tensor, shard in weight_map.items():
        if not _is_shard_name(shard):
            raise UserError(
                f"{index}: tensor {tensor!r} is said to be in {shard!r}, expected the name of a .safetensors file in "
                "the same directory."
            )
    shards = sorted(set(weight_map.values()))
    missing = [shard for shard in shards if not (path / shard).is_file()]
    if len(missing) == len(shards):
        return None
    if missing:
        raise UserError(
            f"{index}: names {len(shards)} files, and {len(missing)} of them are missing: {_some(missing)}. "
            "Download the checkpoint again."
        )
    tensors: dict[str, TensorInfo] = {}
    for number, shard in enumerate(shards, start=1):
        for name, info in read_safetensors_header(path / shard).items():
            if name in tensors:
                raise UserError(
                    f"{path / shard}: tensor {name!r} is in {tensors[name].file.name} too, expected it once."
                )
            if weight_map.get(name) != shard:
                listed = weight_map.get(name)
                place = f"says it is in {listed}" if listed else "does not list it"
                raise UserError(f"{path / shard}: holds tensor {name!r}, but {index.name} {place}.")
            tensors[name] = info
        if progress is not None:
            progress(number, len(shards))
    absent = sorted(weight_map.keys() - tensors.keys())
    if absent:
        raise UserError(
            f"{index}: lists {len(absent)} tensors that are not in their files: {_some(map(repr, absent))}."
        )
    return tensors


def _is_shard_name(name: object) -> bool:
    return (
        isinstance(name, str)
        and name.endswith(".safetensors")
        and len(name) <= 255
        and not {"/", "\\", "\0"} & set(name)
        and name.isprintable()
    )


def read_safetensors_header(file: Path) -> dict[str, TensorInfo]:
    """Reads and checks the header of a safetensors file.

    Checked before anything is allocated for it: the header's length against the file and the format's limit. Checked
    before a tensor is reported: name, element type, shape, that the shape's bytes equal the span, and that all spans
    together cover the data exactly once.

    Args:
        file: The file.

    Returns:
        The tensors by name.

    Raises:
        UserError: The file cannot be read or breaks one of these rules.
    """
    if not file.is_file():
        raise UserError(f"{file}: not a regular file. Expected a safetensors file.")
    try:
        with file.open("rb") as handle:
            size = file.stat().st_size
            start = handle.read(_LENGTH_BYTES)
            if len(start) < _LENGTH_BYTES:
                raise UserError(f"{file}: found {size} bytes, too few for a safetensors file. Download it again.")
            if start == b"version ":
                raise UserError(f"{file}: found a Git LFS pointer instead of weights. Fetch them with: git lfs pull")
            length = int.from_bytes(start, "little")
            data_start = _LENGTH_BYTES + length
            if data_start > size:
                raise UserError(
                    f"{file}: the header claims {length} bytes and the file has {size}: it is truncated or no "
                    "safetensors file. Download it again."
                )
            if length > MAX_HEADER_BYTES:
                raise UserError(f"{file}: found a header of {length} bytes, expected at most {MAX_HEADER_BYTES}.")
            raw = handle.read(length)
    except OSError as error:
        raise UserError(f"{file}: cannot be read: {error.strerror}.") from None
    entries = _parse_header(file, raw)
    entries.pop("__metadata__", None)
    tensors = {name: _tensor_info(file, name, entry, data_start, size) for name, entry in entries.items()}
    _check_cover(file, tensors, data_start, size)
    return tensors


def _parse_header(file: Path, raw: bytes) -> dict[str, Any]:
    try:
        header = parse_json(raw.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise UserError(f"{file}: the header is not valid JSON: {error}.") from None
    if not isinstance(header, dict):
        raise UserError(f"{file}: the header is a JSON {type(header).__name__}, expected an object.")
    return header


def _tensor_info(file: Path, name: str, entry: object, data_start: int, size: int) -> TensorInfo:
    def refuse(problem: str) -> NoReturn:
        raise UserError(f"{file}: tensor {name[:MAX_NAME_LENGTH]!r}: {problem}.")

    if not 0 < len(name) <= MAX_NAME_LENGTH:
        refuse(f"found a name of {len(name)} characters, expected 1 to {MAX_NAME_LENGTH}")
    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        refuse("expected exactly the keys dtype, shape and data_offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in _DTYPES:
        refuse(f"found dtype {dtype!r:.40}, expected one of {', '.join(_DTYPES)}")
    if not _are_integers(shape, MAX_DIMENSION) or len(shape) > MAX_RANK:
        refuse(f"the shape is not a list of at most {MAX_RANK} sizes from 0 to {MAX_DIMENSION}")
    if not _are_integers(offsets, size) or len(offsets) != 2 or offsets[0] > offsets[1]:
        refuse("data_offsets are not a first and a last byte inside the file")
    begin, end = offsets
    if data_start + end > size:
        refuse(f"ends at byte {data_start + end} of a file of {size} bytes: it is truncated; download it again")
    expected = math.prod(shape) * _DTYPES[dtype].itemsize
    if end - begin != expected:
        refuse(f"shape {shape} of {dtype} takes {expected} bytes, and data_offsets span {end - begin}")
    return TensorInfo(file, dtype, tuple(shape), (data_start + begin, data_start + end))


def _are_integers(values: object, largest: int) -> bool:
    return isinstance(values, list) and all(type(value) is int and 0 <= value <= largest for value in values)


def _check_cover(file: Path, tensors: Mapping[str, TensorInfo], data_start: int, size: int) -> None:
    """Checks that the tensors' spans cover the data without gap or overlap."""
    position = data_start
    for name, info in sorted(tensors.items(), key=lambda item: item[1].offsets):
        begin, end = info.offsets
        if begin != position:
            relation = "overlaps the one before it" if begin < position else "leaves a gap before it"
            raise UserError(f"{file}: tensor {name!r} {relation}: starts at byte {begin}, expected {position}.")
        position = end
    if position != size:
        raise UserError(f"{file}: the tensors end at byte {position}, and the file has {size} bytes.")


def _some(names: Iterator[str] | list[str]) -> str:
    """The first few names and how many more there are."""
    names = list(names)
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more
