"""How fast, and in how much memory, a checkpoint is copied into TensorRT-LLM's layout and back, beside ``cp``.

Makes a checkpoint with DeepSeek-V3's layers, but fewer of them and fewer experts, then runs each of these in a process
of its own: ``cp`` of its weights, ``trtllm-mla convert --layout trtllm``, and ``trtllm-mla convert --from-trtllm``.
Times include writing everything to the disk (``sync``). Before each, the input is dropped from the page cache, so that
it is read from the disk. The result is compared with the original, byte by byte.

With --sparse, the weights are holes that read as zeros and take no room: that shows the memory, but not the speed.

    python bench/convert_speed.py --gigabytes 4 --tp 8
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from trtllm_mla.checkpoint.architectures import get_architecture
from trtllm_mla.checkpoint.files import INDEX_NAME, Checkpoint
from trtllm_mla.checkpoint.safetensors_writer import SafetensorsWriter, TensorType
from trtllm_mla.dtypes import DType
from trtllm_mla.errors import UserError
from trtllm_mla.files import write_json

EXPERTS = 32
CONFIG: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "vocab_size": 32768,
    "n_routed_experts": EXPERTS,
    "first_k_dense_replace": 1,
    "num_nextn_predict_layers": 0,
    "dtype": "bfloat16",
}
SHARD_BYTES = 2 * 10**9
RANDOM_BYTES = 1 << 26


@dataclass(frozen=True)
class Measurement:
    """One copy.

    Attributes:
        name: What was run.
        nbytes: Bytes of weights written.
        seconds: Until they were on the disk.
        peak_memory: Largest resident memory of the process, in bytes.
    """

    name: str
    nbytes: int
    seconds: float
    peak_memory: int


def main() -> int:
    """Measures, prints a table and returns 1 if the weights that came back differ."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=4.0, help="least size of the checkpoint's weights")
    parser.add_argument("--tp", type=int, default=8, help="ranks")
    parser.add_argument("--moe-ep", type=int, default=1, help="groups of experts")
    parser.add_argument("--sparse", action="store_true", help="holes in place of random weights")
    parser.add_argument("--config", type=json.loads, default={}, help="keys of config.json to change, as JSON")
    parser.add_argument(
        "--directory", type=Path, default=None, help="where to work; left out, the temporary directory"
    )
    parser.add_argument("--json", type=Path, default=None, help="also write the numbers here")
    arguments = parser.parse_args()
    with TemporaryDirectory(dir=arguments.directory) as scratch:
        work = Path(scratch)
        try:
            make_checkpoint(work / "original", CONFIG | arguments.config, arguments.gigabytes * 1e9, arguments.sparse)
            results, opening = measure(work, arguments.tp, arguments.moe_ep, sparse=arguments.sparse)
        except (UserError, subprocess.CalledProcessError) as error:
            print(f"Error: {error}", file=sys.stderr)
            return 2
        same = equal(Checkpoint.open(work / "original"), Checkpoint.open(work / "back"))
    Console().print(make_table(results, arguments.tp, arguments.moe_ep, sparse=arguments.sparse))
    print(f"Reading the headers: {opening:.3f} s. Came back bit by bit: {'yes' if same else 'NO'}.")
    if arguments.json is not None:
        write_json(arguments.json, {"results": [asdict(item) for item in results], "equal": same})
    return 0 if same else 1


def make_checkpoint(directory: Path, config: Mapping[str, Any], nbytes: float, sparse: bool) -> None:
    """Writes a checkpoint of at least ``nbytes``, of random bits or of holes."""
    directory.mkdir()
    layers = 1
    while True:
        layers += 1
        config = {**config, "num_hidden_layers": layers}
        types = tensor_types(config)
        if sum(tensor.nbytes for tensor in types.values()) >= nbytes:
            break
    write_json(directory / "config.json", config)
    total = sum(tensor.nbytes for tensor in types.values())
    count = math.ceil(total / SHARD_BYTES)
    weight_map: dict[str, str] = {}
    position = 0
    for name, tensor in types.items():
        weight_map[name] = f"model-{position * count // total + 1:05}-of-{count:05}.safetensors"
        position += tensor.nbytes
    write_json(directory / INDEX_NAME, {"weight_map": weight_map})
    noise = np.random.default_rng(0).integers(0, 256, RANDOM_BYTES, np.uint8)
    noise[1::2] &= 0xBF  # keeps every exponent finite: conversions between types may change the bits of a NaN
    for file in dict.fromkeys(weight_map.values()):
        shard = {name: types[name] for name, other in weight_map.items() if other == file}
        write_shard(directory / file, shard, None if sparse else noise)
    os.sync()


def tensor_types(config: Mapping[str, Any]) -> dict[str, TensorType]:
    """The tensors of a checkpoint with this config."""
    architecture = get_architecture(config["model_type"], source="config")
    shapes = architecture.tensors(architecture.model_spec(config, None, source="config"))
    bias = "e_score_correction_bias"
    return {
        name: TensorType(DType.FLOAT32 if name.endswith(bias) else DType.BFLOAT16, shape)
        for name, shape in shapes.items()
    }


def write_shard(file: Path, tensors: Mapping[str, TensorType], noise: np.ndarray[Any, Any] | None) -> None:
    """Writes a shard: parts of ``noise`` in the type of each tensor, or without it, holes."""
    writer = SafetensorsWriter(file, tensors)
    if noise is None:
        os.truncate(file, writer.nbytes)
        return
    with writer:
        for number, (name, tensor) in enumerate(tensors.items()):
            values = noise.view(tensor.dtype.numpy)
            half = values.size // 2
            elements = tensor.nbytes // tensor.dtype.itemsize
            for start in range(0, elements, half):
                shift = (number * 40503 + start) % half
                writer.write(name, start, values[shift : shift + min(elements - start, half)])


def measure(work: Path, tp: int, moe_ep: int, *, sparse: bool) -> tuple[list[Measurement], float]:
    """Copies (not holes), converts and converts back; also the seconds that opening the checkpoint takes."""
    original, ranks, back = (work / name for name in ("original", "ranks", "back"))
    started = time.perf_counter()
    Checkpoint.open(original)
    opening = time.perf_counter() - started
    command = [sys.executable, "-m", "trtllm_mla.cli.main", "convert"]
    results = []
    if not sparse:
        with TemporaryDirectory(dir=work) as copy:
            target = Path(copy) / "weights"
            results.append(timed("cp", ["cp", "-r", str(original), str(target)], original, target))
    split = ["--layout", "trtllm", "--tp", str(tp), "--moe-ep", str(moe_ep)]
    results.append(timed("to ranks", [*command, str(original), str(ranks), *split], original, ranks))
    results.append(timed("back", [*command, str(ranks), str(back), "--from-trtllm"], ranks, back))
    return results, opening


def timed(name: str, command: Sequence[str], source: Path, target: Path) -> Measurement:
    """Runs one copy, with its input out of the page cache."""
    drop_from_cache(source)
    started = time.perf_counter()
    child = subprocess.Popen(command, stdout=subprocess.DEVNULL)  # noqa: S603
    _, status, usage = os.wait4(child.pid, 0)
    child.returncode = os.waitstatus_to_exitcode(status)
    if child.returncode:
        raise subprocess.CalledProcessError(child.returncode, command)
    os.sync()
    seconds = time.perf_counter() - started
    nbytes = sum(file.stat().st_size for file in target.glob("*.safetensors"))
    return Measurement(name, nbytes, seconds, usage.ru_maxrss * 1024)


def drop_from_cache(directory: Path) -> None:
    """Has the next reader of a directory's files get them from the disk."""
    for file in directory.iterdir():
        descriptor = os.open(file, os.O_RDONLY)
        try:
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


def equal(first: Checkpoint, second: Checkpoint) -> bool:
    """Whether two checkpoints have the same config and tensors, bit by bit."""
    if first.config != second.config or first.tensors.keys() != second.tensors.keys():
        return False
    for name, info in first.tensors.items():
        other = second.tensors[name]
        if (info.dtype, info.shape) != (other.dtype, other.shape):
            return False
        left, right = (item.read(name).reshape(-1).view(np.uint8) for item in (first, second))
        if not np.array_equal(left, right):
            return False
        first.release()
        second.release()
    return True


def make_table(results: list[Measurement], tp: int, moe_ep: int, *, sparse: bool) -> Table:
    """The results, one a row."""
    content = "holes" if sparse else "random bits"
    table = Table(title=f"{results[-1].nbytes / 1e9:.2f} GB of {content}, {tp} ranks, {moe_ep} groups of experts")
    table.add_column("copy")
    for column in ("GB written", "seconds", "GB/s", "beside cp", "peak memory, GB"):
        table.add_column(column, justify="right")
    base = results[0].nbytes / results[0].seconds
    for item in results:
        speed = item.nbytes / item.seconds
        table.add_row(
            item.name,
            f"{item.nbytes / 1e9:.2f}",
            f"{item.seconds:.2f}",
            f"{speed / 1e9:.2f}",
            "" if sparse else f"{speed / base:.0%}",
            "" if item.name == "cp" else f"{item.peak_memory / 1e9:.3f}",
        )
    return table


if __name__ == "__main__":
    sys.exit(main())
