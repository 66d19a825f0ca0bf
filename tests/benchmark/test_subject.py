"""What a report says was measured."""

from __future__ import annotations

import hashlib
import shutil
from pathlib import Path

import pytest

from trtllm_mla.benchmark.subject import Subject, open_model
from trtllm_mla.config import BuildConfig, MlaPluginConfig
from trtllm_mla.errors import UserError
from trtllm_mla.network.directory import NetworkDirectory, convert

EXAMPLE = Path(__file__).parents[2] / "examples" / "tiny-mla"


@pytest.fixture(scope="module")
def network(tmp_path_factory):
    return convert(EXAMPLE, tmp_path_factory.mktemp("subject") / "network", plugin=MlaPluginConfig(), num_layers=2)


def sha256(data):
    return hashlib.sha256(data).hexdigest()


def test_of_a_network(network):
    subject = Subject.of(network, EXAMPLE)
    assert (subject.model, subject.model_path, subject.engine_dir) == ("tiny-mla", str(EXAMPLE), str(network.path))
    assert subject.sha256 == sha256((network.path / "network.onnx").read_bytes())
    assert subject.kernels_sha256 is None
    assert subject.spec.num_hidden_layers == 2


def test_of_an_engine(network, tmp_path):
    path = tmp_path / "engine"
    shutil.copytree(network.path, path)
    (path / "rank0.engine").write_bytes(b"an engine")
    (path / "kernels").mkdir()
    (path / "kernels" / "manifest.json").write_bytes(b"its kernels")
    subject = Subject.of(NetworkDirectory.load(path), EXAMPLE)
    assert (subject.sha256, subject.kernels_sha256) == (sha256(b"an engine"), sha256(b"its kernels"))


def test_weights_are_needed(network, tmp_path):
    (tmp_path / "config.json").write_bytes((EXAMPLE / "config.json").read_bytes())
    with pytest.raises(UserError, match="found no weights"):
        open_model(network.path, tmp_path, BuildConfig())
