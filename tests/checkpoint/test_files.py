"""Opening checkpoints: what is read equals what the safetensors library wrote, and hostile files are refused."""

from __future__ import annotations

import json
import resource
import struct
import time
import tracemalloc
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from trtllm_mla.checkpoint.files import (
    INDEX_NAME,
    MAX_CONFIG_BYTES,
    MAX_HEADER_BYTES,
    Checkpoint,
    read_safetensors_header,
)
from trtllm_mla.errors import UserError

ENTRY = {"dtype": "F32", "shape": [3, 5], "data_offsets": [0, 60]}


def safetensors_bytes(header: object, data: int = 0, *, length: int | None = None) -> bytes:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(raw) if length is None else length) + raw + bytes(data)


def write_checkpoint(path: Path, weights: bytes | None = None) -> Path:
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text('{"model_type": "youtu"}')
    if weights is not None:
        (path / "model.safetensors").write_bytes(weights)
    return path


def write_shards(path: Path, shards: dict[str, dict[str, torch.Tensor]]) -> Path:
    write_checkpoint(path)
    weight_map = {}
    for name, tensors in shards.items():
        save_file(tensors, path / name)
        weight_map |= dict.fromkeys(tensors, name)
    (path / INDEX_NAME).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return path


def refusal(path: Path) -> str:
    """The message with which a checkpoint is refused: one line that names a file."""
    with pytest.raises(UserError) as caught:
        Checkpoint.open(path)
    message = str(caught.value)
    assert "\n" not in message
    assert str(path) in message
    assert len(message) < 1000
    return message


class TestReading:
    def test_values_equal_what_was_written(self, tmp_path: Path) -> None:
        generator = torch.Generator().manual_seed(0)
        tensors = {
            f"t.{dtype}": torch.randn(7, 3, generator=generator).to(getattr(torch, dtype))
            for dtype in ("float32", "float16", "bfloat16", "float64", "float8_e4m3fn", "int64", "uint8", "bool")
        }
        tensors["empty"] = torch.zeros(0, 4)
        tensors["scalar"] = torch.tensor(2.5)
        write_checkpoint(tmp_path)
        save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
        checkpoint = Checkpoint.open(tmp_path)
        assert checkpoint.has_weights
        assert checkpoint.tensors.keys() == tensors.keys()
        for name, expected in tensors.items():
            found = checkpoint.read(name)
            assert found.shape == tuple(expected.shape)
            np.testing.assert_array_equal(found.astype(np.float64), expected.double().numpy())
        assert checkpoint.read("t.bfloat16").dtype == ml_dtypes.bfloat16

    def test_views_are_mapped_and_read_only(self, tmp_path: Path) -> None:
        write_checkpoint(tmp_path)
        save_file({"big": torch.ones(2048, 4096)}, tmp_path / "model.safetensors")
        checkpoint = Checkpoint.open(tmp_path)
        tracemalloc.start()
        view = checkpoint.read("big")
        assert tracemalloc.get_traced_memory()[1] < 100_000
        tracemalloc.stop()
        assert not view.flags.writeable
        with pytest.raises(ValueError, match="read-only"):
            view[0, 0] = 1

    def test_views_outlive_the_release_of_memory(self, tmp_path: Path) -> None:
        write_checkpoint(tmp_path)
        tensors = {"a": torch.randn(1 << 22), "b": torch.randn(300, 7)}
        save_file(tensors, tmp_path / "model.safetensors")
        checkpoint = Checkpoint.open(tmp_path)
        views = {name: checkpoint.read(name) for name in tensors}
        assert float(views["a"].sum()) == pytest.approx(float(tensors["a"].sum()), abs=1.0)

        def resident() -> int:
            return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()

        before = resident()
        checkpoint.release()
        assert resident() < before - views["a"].nbytes // 2
        for name, tensor in tensors.items():
            assert np.array_equal(views[name], tensor.numpy())

    def test_data_that_starts_at_an_odd_byte(self, tmp_path: Path) -> None:
        values = np.arange(15, dtype=np.float32)
        raw = json.dumps({"a": ENTRY}).encode()
        raw += b" " * (1 - len(raw) % 2)  # an odd length, and 8 bytes before it
        path = write_checkpoint(tmp_path, safetensors_bytes(raw) + values.tobytes())
        np.testing.assert_array_equal(Checkpoint.open(path).read("a"), values.reshape(3, 5))

    def test_shards(self, tmp_path: Path) -> None:
        a, b = torch.randn(2, 3), torch.randn(4)
        checkpoint = Checkpoint.open(
            write_shards(tmp_path, {"x-1.safetensors": {"a": a}, "x-2.safetensors": {"b": b}})
        )
        np.testing.assert_array_equal(checkpoint.read("a"), a.numpy())
        np.testing.assert_array_equal(checkpoint.read("b"), b.numpy())
        assert checkpoint.tensors["b"].file.name == "x-2.safetensors"

    def test_without_weights(self, tmp_path: Path) -> None:
        checkpoint = Checkpoint.open(write_checkpoint(tmp_path))
        assert not checkpoint.has_weights
        assert not checkpoint.tensors
        assert checkpoint.config == {"model_type": "youtu"}
        assert checkpoint.generation_config is None

    def test_index_without_any_shard_is_a_checkpoint_without_weights(self, tmp_path: Path) -> None:
        write_shards(tmp_path, {"x-1.safetensors": {"a": torch.ones(1)}})
        (tmp_path / "x-1.safetensors").unlink()
        assert not Checkpoint.open(tmp_path).has_weights

    def test_file_of_the_hub_cache_is_a_link(self, tmp_path: Path) -> None:
        blobs = tmp_path / "blobs"
        blobs.mkdir()
        save_file({"a": torch.ones(3)}, blobs / "0123")
        snapshot = write_checkpoint(tmp_path / "snapshot")
        (snapshot / "model.safetensors").symlink_to("../blobs/0123")
        np.testing.assert_array_equal(Checkpoint.open(snapshot).read("a"), np.ones(3))

    def test_file_that_shrinks_after_opening(self, tmp_path: Path) -> None:
        write_checkpoint(tmp_path)
        save_file({"a": torch.ones(100)}, tmp_path / "model.safetensors")
        checkpoint = Checkpoint.open(tmp_path)
        (tmp_path / "model.safetensors").write_bytes(b"x" * 20)
        with pytest.raises(UserError, match="shrank"):
            checkpoint.read("a")

    def test_opening_many_shards_reads_headers_only(self, tmp_path: Path) -> None:
        """200 shards that claim 64 GiB (sparse files) and hold 20,000 tensors."""
        write_checkpoint(tmp_path)
        weight_map = {}
        columns = (64 << 30) // 20_000 // 4
        for shard in range(200):
            names = [f"model.layers.{shard}.experts.{i}.weight" for i in range(100)]
            span = columns * 4
            header = {
                name: {"dtype": "F32", "shape": [columns], "data_offsets": [i * span, (i + 1) * span]}
                for i, name in enumerate(names)
            }
            file = tmp_path / f"model-{shard:05}.safetensors"
            with file.open("wb") as handle:
                handle.write(safetensors_bytes(header))
                handle.truncate(handle.tell() + 100 * span)
            weight_map |= dict.fromkeys(names, file.name)
        (tmp_path / INDEX_NAME).write_text(json.dumps({"weight_map": weight_map}))
        start = time.perf_counter()
        checkpoint = Checkpoint.open(tmp_path)
        assert time.perf_counter() - start < 5  # 0.3 s when the machine is idle
        assert len(checkpoint.tensors) == 20_000
        assert checkpoint.read("model.layers.199.experts.99.weight").shape == (columns,)


class TestHostileDirectories:
    def test_no_such_directory(self, tmp_path: Path) -> None:
        assert "no such directory" in refusal(tmp_path / "absent")

    def test_file_instead_of_directory(self, tmp_path: Path) -> None:
        (tmp_path / "file").write_text("")
        assert "no such directory" in refusal(tmp_path / "file")

    def test_no_config(self, tmp_path: Path) -> None:
        assert "config.json: no such file" in refusal(tmp_path)

    @pytest.mark.parametrize(
        "content",
        [
            b"\xff\xfe\x00",
            b"{",
            b"[]",
            b"",
            b"[" * 100_000,
            b'{"a": ' + b"9" * 5000 + b"}",
            b" " * (MAX_CONFIG_BYTES + 1),
        ],
        ids=["not UTF-8", "cut", "list", "empty", "deep", "long number", "large"],
    )
    @pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
    def test_bad_config(self, tmp_path: Path, name: str, content: bytes) -> None:
        write_checkpoint(tmp_path)
        (tmp_path / name).write_bytes(content)
        assert name in refusal(tmp_path)

    @pytest.mark.parametrize("name", ["pytorch_model.bin", "consolidated.00.pth", "model.pt"])
    def test_pickled_weights_only(self, tmp_path: Path, name: str) -> None:
        write_checkpoint(tmp_path)
        (tmp_path / name).write_bytes(b"cos\nsystem\n(S'echo'\ntR.")
        message = refusal(tmp_path)
        assert "pickled" in message
        assert name in message

    def test_shard_without_index(self, tmp_path: Path) -> None:
        write_checkpoint(tmp_path)
        save_file({"a": torch.ones(1)}, tmp_path / "model-00001-of-00002.safetensors")
        assert INDEX_NAME in refusal(tmp_path)

    def test_weights_that_are_a_directory(self, tmp_path: Path) -> None:
        write_checkpoint(tmp_path)
        (tmp_path / "model.safetensors").mkdir()
        assert "not a regular file" in refusal(tmp_path)

    @pytest.mark.parametrize("content", ["{}", '{"weight_map": []}', '{"weight_map": {}}', '{"weight_map": 3}'])
    def test_index_without_a_map(self, tmp_path: Path, content: str) -> None:
        write_checkpoint(tmp_path)
        (tmp_path / INDEX_NAME).write_text(content)
        assert "weight_map" in refusal(tmp_path)

    @pytest.mark.parametrize(
        "shard",
        [
            "../other.safetensors",
            "/etc/x.safetensors",
            "a/b.safetensors",
            "..",
            "x.bin",
            3,
            None,
            ["x"],
            "\n.safetensors",
        ],
    )
    def test_index_that_leads_out_of_the_directory(self, tmp_path: Path, shard: object) -> None:
        save_file({"a": torch.ones(1)}, tmp_path / "other.safetensors")
        path = write_checkpoint(tmp_path / "checkpoint")
        (path / INDEX_NAME).write_text(json.dumps({"weight_map": {"a": shard}}))
        assert "same directory" in refusal(path)

    def test_missing_shard(self, tmp_path: Path) -> None:
        write_shards(tmp_path, {f"x-{i}.safetensors": {f"t{i}": torch.ones(1)} for i in range(3)})
        (tmp_path / "x-1.safetensors").unlink()
        message = refusal(tmp_path)
        assert "x-1.safetensors" in message
        assert "missing" in message

    def test_tensor_in_two_shards(self, tmp_path: Path) -> None:
        one = torch.ones(1)
        write_shards(tmp_path, {"x-1.safetensors": {"a": one}, "x-2.safetensors": {"b": one}})
        save_file({"a": torch.ones(1), "b": one}, tmp_path / "x-2.safetensors")
        assert "'a' is in x-1.safetensors too" in refusal(tmp_path)

    def test_index_names_a_tensor_that_is_not_there(self, tmp_path: Path) -> None:
        write_shards(tmp_path, {"x-1.safetensors": {"a": torch.ones(1), "b": torch.ones(1)}})
        save_file({"a": torch.ones(1)}, tmp_path / "x-1.safetensors")
        assert "'b'" in refusal(tmp_path)

    def test_shard_holds_a_tensor_that_the_index_does_not_name(self, tmp_path: Path) -> None:
        write_shards(tmp_path, {"x-1.safetensors": {"a": torch.ones(1)}})
        save_file({"a": torch.ones(1), "b": torch.ones(1)}, tmp_path / "x-1.safetensors")
        assert "'b'" in refusal(tmp_path)


class TestHostileHeaders:
    @pytest.mark.parametrize(
        ("content", "expected"),
        [
            (b"", "too few"),
            (b"1234567", "too few"),
            (b"version https://git-lfs.github.com/spec/v1\n", "git lfs pull"),
            (safetensors_bytes({}, length=3), "claims 3 bytes"),
            (safetensors_bytes({}, length=(1 << 64) - 1), "claims"),
            (safetensors_bytes({}, length=MAX_HEADER_BYTES + 1), "claims"),
            (safetensors_bytes(b"{"), "not valid JSON"),
            (safetensors_bytes(b"\xff\xff"), "not valid JSON"),
            (safetensors_bytes(b"[" * 50_000), "not valid JSON"),
            (safetensors_bytes(b"9" * 5000), "not valid JSON"),
            (safetensors_bytes([]), "expected an object"),
            (safetensors_bytes({}, data=1), "end at byte"),
        ],
    )
    def test_file(self, tmp_path: Path, content: bytes, expected: str) -> None:
        assert expected in refusal(write_checkpoint(tmp_path, content))

    def test_header_length_above_the_formats_limit(self, tmp_path: Path) -> None:
        path = write_checkpoint(tmp_path, struct.pack("<Q", MAX_HEADER_BYTES + 1))
        with (path / "model.safetensors").open("r+b") as handle:
            handle.truncate(MAX_HEADER_BYTES + 100)
        tracemalloc.start()
        assert f"at most {MAX_HEADER_BYTES}" in refusal(path)
        assert tracemalloc.get_traced_memory()[1] < 1_000_000
        tracemalloc.stop()

    @pytest.mark.parametrize(
        ("change", "expected"),
        [
            ({"dtype": "F4"}, "dtype"),
            ({"dtype": 3}, "dtype"),
            ({"dtype": ["F32"]}, "dtype"),
            ({"shape": [3, 6]}, "takes 72 bytes"),
            ({"shape": [15.0]}, "shape"),
            ({"shape": [-3, -5]}, "shape"),
            ({"shape": [True, 15]}, "shape"),
            ({"shape": 15}, "shape"),
            ({"shape": [1] * 17}, "shape"),
            ({"shape": [1 << 60, 1 << 60]}, "shape"),
            ({"data_offsets": [0, 60, 60]}, "data_offsets"),
            ({"data_offsets": [60, 0]}, "data_offsets"),
            ({"data_offsets": [-60, 0]}, "data_offsets"),
            ({"data_offsets": [0, 1 << 62]}, "data_offsets"),
            ({"data_offsets": "0,60"}, "data_offsets"),
            ({"data_offsets": [4, 64]}, "truncated"),
            ({"more": 1}, "keys"),
        ],
    )
    def test_entry(self, tmp_path: Path, change: dict[str, Any], expected: str) -> None:
        message = refusal(write_checkpoint(tmp_path, safetensors_bytes({"a": ENTRY | change}, data=60)))
        assert expected in message
        assert "'a'" in message

    @pytest.mark.parametrize("entry", [None, [], {}, {"dtype": "F32", "shape": [1]}])
    def test_incomplete_entry(self, tmp_path: Path, entry: object) -> None:
        assert "keys" in refusal(write_checkpoint(tmp_path, safetensors_bytes({"a": entry})))

    def test_truncated_data(self, tmp_path: Path) -> None:
        write_checkpoint(tmp_path)
        save_file({"a": torch.ones(100), "b": torch.ones(100)}, tmp_path / "model.safetensors")
        whole = (tmp_path / "model.safetensors").read_bytes()
        for size in (len(whole) - 1, len(whole) - 500, 60, 8):
            (tmp_path / "model.safetensors").write_bytes(whole[:size])
            refusal(tmp_path)

    @pytest.mark.parametrize(
        ("second", "data", "expected"),
        [
            ([30, 90], 90, "overlaps"),
            ([0, 60], 60, "overlaps"),
            ([61, 121], 121, "gap"),
            ([60, 120], 124, "end at byte"),
        ],
    )
    def test_spans(self, tmp_path: Path, second: list[int], data: int, expected: str) -> None:
        header = {"a": ENTRY, "b": ENTRY | {"data_offsets": second}}
        assert expected in refusal(write_checkpoint(tmp_path, safetensors_bytes(header, data=data)))

    def test_name_that_appears_twice(self, tmp_path: Path) -> None:
        entry = json.dumps(ENTRY).encode()
        raw = b'{"a": ' + entry + b', "a": ' + entry + b"}"
        assert "twice" in refusal(write_checkpoint(tmp_path, safetensors_bytes(raw, data=60)))

    @pytest.mark.parametrize("name", ["", "x" * 10_000])
    def test_name_length(self, tmp_path: Path, name: str) -> None:
        assert "characters" in refusal(write_checkpoint(tmp_path, safetensors_bytes({name: ENTRY}, data=60)))

    def test_control_characters_in_a_name_are_escaped(self, tmp_path: Path) -> None:
        header = {"\x1b[31m\n": ENTRY | {"dtype": "?"}}
        assert "\x1b" not in refusal(write_checkpoint(tmp_path, safetensors_bytes(header, data=60)))

    @settings(max_examples=150, deadline=None)
    @given(data=st.data())
    def test_mutated_file_is_read_like_the_library_or_refused(
        self, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
    ) -> None:
        """Bytes of a valid file are overwritten, inserted or cut. What is accepted, the library accepts, equally."""
        directory = tmp_path_factory.mktemp("mutated")
        file = directory / "model.safetensors"
        save_file({"a": torch.arange(4.0), "bc": torch.ones(2, 3, dtype=torch.bfloat16)}, file)
        content = bytearray(file.read_bytes())
        for _ in range(data.draw(st.integers(1, 3))):
            position = data.draw(st.integers(0, max(len(content) - 1, 0)))
            action = data.draw(st.sampled_from(["set", "insert", "cut", "delete"]))
            byte = data.draw(st.one_of(st.sampled_from(list(b'0123456789{}[],:"FB')), st.integers(0, 255)))
            if action == "set" and content:
                content[position] = byte
            elif action == "insert":
                content.insert(position, byte)
            elif action == "delete" and content:
                del content[position]
            else:
                del content[position + 1 :]
        file.write_bytes(content)
        try:
            tensors = read_safetensors_header(file)
        except UserError:
            return
        try:
            with safe_open(file, "np") as handle:
                assert set(handle.keys()) == tensors.keys()
                for name, info in tensors.items():
                    assert tuple(handle.get_slice(name).get_shape()) == info.shape
                    assert handle.get_slice(name).get_dtype() == info.dtype
        except SafetensorError as error:
            pytest.fail(f"accepted here, refused by the library: {error}")
