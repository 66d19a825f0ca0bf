"""The check of CUDA graphs, on stand-ins for executors, and dry in the interpreter."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from tests.support.hf import make_checkpoint
from trtllm_mla.config import MlaPluginConfig
from trtllm_mla.dtypes import DType
from trtllm_mla.network.directory import NetworkDirectory, convert
from trtllm_mla.runtime.executors.decode_graphs import GraphStatistics
from trtllm_mla.runtime.step import StepInputs

BENCH = Path(__file__).parents[2] / "bench"


@pytest.fixture(scope="module")
def program() -> ModuleType:
    spec = importlib.util.spec_from_file_location("cuda_graph_check", BENCH / "cuda_graph_check.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("checkpoint"), "youtu", num_layers=1).path


@pytest.fixture(scope="module")
def network(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> NetworkDirectory:
    path = tmp_path_factory.mktemp("network") / "network"
    return convert(checkpoint, path, plugin=MlaPluginConfig(page_size=16), dtype=DType.FLOAT32)


class FakeExecutor:
    """Logits that follow from tokens and lengths, and a cache of the slots that were written."""

    page_size, dtype, description = 16, DType.FLOAT32, "a stand-in"

    def __init__(self, num_pages: int, factor: float = 1.0, offset: int = 0) -> None:
        self.num_pages, self.factor, self.offset = num_pages, factor, offset
        self.cache = np.full((num_pages, 16, 4), np.nan, np.float32)
        self.is_closed = False
        self.graph_statistics: GraphStatistics | None = None

    def run(self, step: StepInputs) -> Any:
        slots = (step.slot_mapping + self.offset) % (16 * self.num_pages)
        self.cache.reshape(-1, 4)[slots] = step.input_ids[:, None]
        rows = step.last_token_ids
        lengths = np.concatenate([step.context_position_ids, step.generation_position_ids])
        return (np.outer(step.input_ids[rows], np.arange(7)) + lengths[rows, None] * self.factor).astype(np.float32)

    def read_cache(self, layer: int) -> Any:
        return self.cache.copy()

    def close(self) -> None:
        self.is_closed = True


@pytest.fixture
def run(
    program: ModuleType, network: NetworkDirectory, checkpoint: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Any:
    def run(*options: str, statistics: GraphStatistics | None, **graph: Any) -> tuple[int, list[FakeExecutor], Any]:
        made: list[FakeExecutor] = []

        def make_executor(name: str, *_: Any, num_pages: int, use_cuda_graph: bool) -> FakeExecutor:
            assert name == "tensorrt"
            executor = FakeExecutor(num_pages, **graph) if use_cuda_graph else FakeExecutor(num_pages)
            if use_cuda_graph:
                executor.graph_statistics = statistics
            made.append(executor)
            return executor

        monkeypatch.setattr(program, "make_executor", make_executor)
        monkeypatch.setattr(
            sys,
            "argv",
            ["check", str(network.path), "-c", str(checkpoint), "--json", str(tmp_path / "out.json"), *options],
        )
        status = program.main()
        path = tmp_path / "out.json"
        return status, made, json.loads(path.read_text()) if path.exists() else None

    return run


GOOD = GraphStatistics(num_captured=5, num_replayed=300, num_eager=5)


def test_equal_executors_pass(run: Any, capsys: pytest.CaptureFixture[str]) -> None:
    status, made, values = run(statistics=GOOD)
    assert status == 0
    assert [executor.is_closed for executor in made] == [True, True]
    assert [item["requests"] for item in values["batches"]] == [1, 2, 3, 5, 8, 11, 16]
    assert all(item["error"] == item["cache_error"] == 0 for item in values["batches"])
    assert all(item["eager_ms"] > 0 and item["graph_ms"] > 0 for item in values["batches"])
    assert values["statistics"] == {"num_captured": 5, "num_replayed": 300, "num_eager": 5}
    output = capsys.readouterr().out
    assert "5 graphs captured; 300 decode steps launched as graphs, 5 enqueued." in output
    assert "FAILED" not in output


@pytest.mark.parametrize(
    ("graph", "failing"),
    # Logits of other lengths; rows in other slots.
    [({"factor": 1.001}, "error"), ({"offset": 1}, "cache_error")],
)
def test_what_differs_fails(run: Any, graph: dict[str, Any], failing: str, capsys: pytest.CaptureFixture[str]) -> None:
    status, _, values = run("--batch-sizes", "3", statistics=GOOD, **graph)
    assert status == 1
    (batch,) = values["batches"]
    assert not batch[failing] <= 1e-5
    assert "FAILED" in capsys.readouterr().out


@pytest.mark.parametrize("statistics", [None, GraphStatistics(num_eager=300), GraphStatistics(5, 300, 6)])
def test_steps_without_a_graph_fail(run: Any, statistics: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--batch-sizes", "2", statistics=statistics)[0] == 1
    assert "not every decode step was launched as a graph" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--batch-sizes", "a"], "--batch-sizes: found 'a', expected numbers"),
        (["--batch-sizes", "0,17"], "found none of 1 to 16, the engine's max_batch_size"),
        (["--steps", "0"], "--steps: found 0, expected at least 1"),
        (["--input-len", "4096"], "found 4116 tokens, expected at most"),
    ],
)
def test_what_does_not_fit_is_refused(
    run: Any, options: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    status, made, values = run(*options, statistics=GOOD)
    assert (status, made, values) == (2, [], None)
    assert message in capsys.readouterr().err


def test_dry_run(
    program: ModuleType,
    network: NetworkDirectory,
    checkpoint: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    sizes = ["--batch-sizes", "1,3", "--input-len", "20", "--steps", "2"]
    monkeypatch.setattr(sys, "argv", ["check", str(network.path), "-c", str(checkpoint), "--dry-run", *sizes])
    assert program.main() == 0
    output = capsys.readouterr().out
    assert "Dry run: padded steps in the interpreter. No GPU, no graph, no times." in output
    assert "graphs captured" not in output
