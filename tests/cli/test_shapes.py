from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests.engine.models import make_network
from trtllm_mla.cli.main import app
from trtllm_mla.config import BuildConfig, MlaPluginConfig
from trtllm_mla.engine.profile import ShapeRange, input_shape_ranges
from trtllm_mla.errors import UserError
from trtllm_mla.network.directory import NetworkDirectory

CONFIG = BuildConfig(max_batch_size=3, max_num_tokens=96, max_seq_len=448, max_context_kv_tokens=320)


@pytest.fixture(scope="module")
def network(tmp_path_factory: pytest.TempPathFactory) -> NetworkDirectory:
    return make_network(tmp_path_factory.mktemp("network"), plugin=MlaPluginConfig(kv_cache_dtype="nvfp4"))


@pytest.fixture
def arguments(network: NetworkDirectory, tmp_path: Path) -> list[str]:
    path = tmp_path / "config.json"
    path.write_text(CONFIG.model_dump_json(exclude_none=True))
    return ["shapes", str(network.path), "--config", str(path)]


@pytest.fixture
def ranges(network: NetworkDirectory) -> dict[str, ShapeRange]:
    """Those of a build."""
    return input_shape_ranges(network, CONFIG)


def read(option: str, value: str, separators: str) -> dict[str, list[int]]:
    """Shapes of one option, by name."""
    between, opening, within, closing = separators
    found = {}
    for item in value.split(between):
        name, _, shape = item.partition(":")
        assert shape.startswith(opening.strip())
        assert shape.endswith(closing.strip())
        found[name] = [int(size) for size in shape.strip(opening + closing).split(within)]
    return found


class TestShapes:
    def test_of_polygraphy(self, arguments: list[str], ranges: dict[str, ShapeRange]) -> None:
        lines = CliRunner().invoke(app, arguments).stdout.splitlines()
        assert len(lines) == 3
        for index, name in enumerate(("min", "opt", "max")):
            option, _, value = lines[index].partition(" ")
            assert option == f"--trt-{name}-shapes"
            assert read(option, value, " [,]") == {key: list(shape[index]) for key, shape in ranges.items()}

    def test_of_trtexec(self, arguments: list[str], ranges: dict[str, ShapeRange]) -> None:
        lines = CliRunner().invoke(app, [*arguments, "--tool", "trtexec"]).stdout.splitlines()
        assert len(lines) == 3
        for index, name in enumerate(("min", "opt", "max")):
            option, _, value = lines[index].partition("=")
            assert option == f"--{name}Shapes"
            assert read(option, value, ", x ") == {key: list(shape[index]) for key, shape in ranges.items()}

    def test_as_json(self, arguments: list[str], ranges: dict[str, ShapeRange]) -> None:
        found = json.loads(CliRunner().invoke(app, [*arguments, "--json"]).stdout)
        assert found == {
            name: dict(zip(("min", "opt", "max"), map(list, shape), strict=True)) for name, shape in ranges.items()
        }

    def test_cover_the_cache_and_both_groups(self, ranges: dict[str, ShapeRange], network: NetworkDirectory) -> None:
        least, _, greatest = ranges["past_latent_1"]
        assert least == (1, 64, network.row_layout.width)
        assert greatest == (21, 64, network.row_layout.width)
        for index in range(3):
            groups = [ranges[f"{group}_position_ids"][index][0] for group in ("context", "generation")]
            assert ranges["input_ids"][index] == (sum(groups),)

    def test_of_no_network(self, tmp_path: Path) -> None:
        result = CliRunner().invoke(app, ["shapes", str(tmp_path)])
        assert isinstance(result.exception, UserError)
