from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from trtllm_mla.engine.builder import BuildReport
from trtllm_mla.engine.directory import EngineDirectory
from trtllm_mla.errors import UserError
from trtllm_mla.network.directory import NetworkDirectory


@pytest.fixture
def path(built: BuildReport, tmp_path: Path) -> Path:
    """A copy of an engine directory, to change."""
    return Path(shutil.copytree(built.directory.path, tmp_path / "engine"))


def edit(path: Path, **changes: Any) -> None:
    config = json.loads((path / "config.json").read_text())
    config["build_config"]["trtllm_mla"].update(changes)
    (path / "config.json").write_text(json.dumps(config))


def test_reads_what_was_written(path: Path, built: BuildReport) -> None:
    directory = EngineDirectory.load(path)
    assert directory.info == built.directory.info
    assert directory.read_engine() == built.directory.read_engine()
    assert [cubin.key for cubin in directory.kernels().cubins] == [
        cubin.key for cubin in built.directory.kernels().cubins
    ]


def test_tells_engines_from_networks(path: Path, network: NetworkDirectory, tmp_path: Path) -> None:
    assert EngineDirectory.is_engine(path)
    assert not EngineDirectory.is_engine(network.path)
    assert not EngineDirectory.is_engine(tmp_path / "nothing")
    with pytest.raises(UserError, match=r"found no rank0\.engine.*trtllm-mla build"):
        EngineDirectory.load(network.path)


def test_an_engine_of_another_size_is_not_read(path: Path) -> None:
    with (path / "rank0.engine").open("ab") as file:
        file.write(b"x")
    with pytest.raises(UserError, match=r"rank0\.engine: found \d+ bytes, expected \d+ as in config\.json"):
        EngineDirectory.load(path).read_engine()


def test_a_changed_engine_is_not_used(path: Path) -> None:
    engine = bytearray((path / "rank0.engine").read_bytes())
    engine[-1] ^= 1
    (path / "rank0.engine").write_bytes(engine)
    with pytest.raises(UserError, match=r"rank0\.engine: found the SHA-256 digest"):
        EngineDirectory.load(path).read_engine()


def test_a_config_of_a_network_is_refused(path: Path, network: NetworkDirectory) -> None:
    shutil.copyfile(network.path / "config.json", path / "config.json")
    with pytest.raises(UserError, match=r"build_config\.trtllm_mla: missing; expected the config of an engine"):
        EngineDirectory.load(path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"backend": "onnx"}, "backend"),
        ({"engine_sha256": "abc"}, "engine_sha256"),
        ({"engine_bytes": "12"}, "engine_bytes"),
        ({"targets": []}, "targets"),
        ({"colour": "red"}, "colour: unknown key"),
    ],
)
def test_a_malformed_config_is_refused(path: Path, changes: dict[str, Any], message: str) -> None:
    edit(path, **changes)
    with pytest.raises(UserError, match=rf"config\.json: build_config\.trtllm_mla: {message}"):
        EngineDirectory.load(path)
