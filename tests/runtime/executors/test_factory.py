import sys

import numpy as np
import pytest
import torch

from tests.support.hf import make_checkpoint
from trtllm_mla.cache_rows import CacheDType
from trtllm_mla.checkpoint.files import Checkpoint
from trtllm_mla.config import MlaPluginConfig
from trtllm_mla.dtypes import DType
from trtllm_mla.errors import MissingDependencyError, UserError
from trtllm_mla.network.directory import convert
from trtllm_mla.runtime.executors import factory, interpreter
from trtllm_mla.runtime.executors.factory import EXECUTORS, make_executor, rotary_table
from trtllm_mla.runtime.generation import ForcedChunk, ForcedSequence, run_forced

TOKENS = np.random.default_rng(0).integers(0, 131, 19).tolist()


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("checkpoint"), rope="yarn", dtype="bfloat16", num_layers=1)


@pytest.fixture(scope="module")
def directories(checkpoint, tmp_path_factory):
    plugins = {
        DType.BFLOAT16: MlaPluginConfig(page_size=16, tile_s=16, num_stages=2),
        DType.FLOAT32: MlaPluginConfig(page_size=16),
    }
    return {
        dtype: convert(checkpoint.path, tmp_path_factory.mktemp("network") / dtype, plugin=plugin, dtype=dtype)
        for dtype, plugin in plugins.items()
    }


def forced_logits(executor):
    (result,) = run_forced(executor, [ForcedSequence(TOKENS, [ForcedChunk(12, False), ForcedChunk(7, True)])])
    return result.logits


def expected_logits(checkpoint):
    with torch.inference_mode():
        return checkpoint.model(torch.tensor([TOKENS])).logits[0].numpy()


@pytest.mark.parametrize("dtype", [DType.BFLOAT16, DType.FLOAT32])
def test_onnxruntime_runs_a_bfloat16_network_as_its_float32_twin(checkpoint, directories, dtype):
    executor = make_executor("onnxruntime", directories[dtype], Checkpoint.open(checkpoint.path), num_pages=4)
    assert (executor.num_pages, executor.page_size) == (4, 16)
    assert ("float32 twin of the bfloat16 network" in executor.description) == (dtype is DType.BFLOAT16)
    assert "CPU, float32" in executor.description
    assert (executor.dtype, executor.cache_dtype) == (DType.FLOAT32, CacheDType.FP32)
    assert np.abs(forced_logits(executor) - expected_logits(checkpoint)).max() < 2e-4


def test_the_interpreter_runs_the_plans_of_the_plugin_config(checkpoint, directories, monkeypatch):
    problems = []
    run_op = interpreter.run_op
    monkeypatch.setattr(
        interpreter, "run_op", lambda op, *args, **values: problems.append(values) or run_op(op, *args, **values)
    )
    executor = make_executor("interpreter", directories[DType.BFLOAT16], Checkpoint.open(checkpoint.path), num_pages=4)
    expected = expected_logits(checkpoint)
    error = np.linalg.norm(forced_logits(executor) - expected) / np.linalg.norm(expected)
    assert 1e-4 < error < 4 * 2**-7, "bfloat16 arithmetic, neither more nor less"
    assert (executor.dtype, executor.cache_dtype) == (DType.BFLOAT16, CacheDType.BF16)
    assert all((values["tile_s"], values["num_stages"]) == (16, 2) for values in problems)
    assert {values["target"].name for values in problems} == {"sm_90"}


def test_the_interpreter_chooses_tiles_where_the_plugin_config_gives_none(checkpoint, directories):
    assert directories[DType.FLOAT32].plugin.tile_s is None
    executor = make_executor("interpreter", directories[DType.FLOAT32], Checkpoint.open(checkpoint.path), num_pages=4)
    assert np.abs(forced_logits(executor) - expected_logits(checkpoint)).max() < 2e-4


@pytest.mark.parametrize("package", ["torch", "triton"])
def test_the_interpreter_says_what_is_not_installed_before_it_runs(checkpoint, directories, monkeypatch, package):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(
        MissingDependencyError, match=rf"'{package}' is needed .* pip install 'trtllm-mla\[reference\]'"
    ):
        make_executor("interpreter", directories[DType.FLOAT32], Checkpoint.open(checkpoint.path), num_pages=4)


def test_every_position_of_the_pool_has_a_rotation(directories):
    assert rotary_table(directories[DType.FLOAT32], 5).shape == (5 * 16, 32)


def test_unknown_executor(checkpoint, directories):
    with pytest.raises(UserError, match=f"executor: found 'torch', expected one of {', '.join(EXECUTORS)}"):
        make_executor("torch", directories[DType.FLOAT32], Checkpoint.open(checkpoint.path), num_pages=4)


def test_tensorrt_needs_an_engine(checkpoint, directories):
    with pytest.raises(UserError, match=r"found no rank0\.engine, expected an engine directory"):
        make_executor("tensorrt", directories[DType.BFLOAT16], Checkpoint.open(checkpoint.path), num_pages=4)


@pytest.mark.parametrize(("options", "expected"), [({}, True), ({"use_cuda_graph": False}, False)])
def test_tensorrt_is_told_whether_to_use_cuda_graphs(checkpoint, directories, monkeypatch, options, expected):
    made = []
    monkeypatch.setattr(factory, "TensorRTExecutor", lambda *arguments, **values: made.append(values))
    monkeypatch.setattr(factory.EngineDirectory, "load", lambda path: path)
    directory = directories[DType.BFLOAT16]
    make_executor("tensorrt", directory, Checkpoint.open(checkpoint.path), num_pages=4, **options)
    assert made == [{"num_pages": 4, "use_cuda_graph": expected}]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"num_pages": 0}, "num_pages: found 0, expected 1 to 134217727 pages of 16 tokens"),
        ({"num_pages": 2**27}, "num_pages: found 134217728"),
        ({"num_pages": 1, "num_threads": 0}, "num_threads: found 0, expected 1 to "),
    ],
)
@pytest.mark.parametrize("name", EXECUTORS)
def test_sizes_out_of_range(checkpoint, directories, name, values, message):
    with pytest.raises(UserError, match=message):
        make_executor(name, directories[DType.FLOAT32], Checkpoint.open(checkpoint.path), **values)


def test_a_checkpoint_of_another_model(directories, tmp_path):
    other = make_checkpoint(tmp_path, hidden_size=96, num_layers=1)
    with pytest.raises(UserError, match=r"hidden_size: found 96, the network in .* was made for 80"):
        make_executor("onnxruntime", directories[DType.FLOAT32], Checkpoint.open(other.path), num_pages=4)
