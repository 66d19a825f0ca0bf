"""The package's structure: the direction of imports, what importing needs, and what installing brings."""

import ast
import importlib
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import trtllm_mla
from trtllm_mla.cli.options import ExecutorName
from trtllm_mla.runtime.executors.factory import EXECUTORS

PACKAGE = Path(trtllm_mla.__file__).parent
# Later stages may import from earlier ones, never the other way round. Equal numbers may not import from each other.
STAGES = {
    **dict.fromkeys(("_version", "errors", "dtypes", "targets", "files"), 0),
    "cache_rows": 1,
    "config": 2,
    "checkpoint": 3,
    "ops": 4,
    "network": 5,
    "engine": 6,
    "runtime": 7,
    **dict.fromkeys(("calibration", "validation", "benchmark", "roofline"), 8),
    "cli": 9,
}
BASE = {name for name, stage in STAGES.items() if stage == 0}
HEAVY = ("torch", "triton", "transformers", "tensorrt", "tensorrt_rtx", "tensorrt_rtx_libs", "cuda", "matplotlib")


def module_names() -> dict[str, Path]:
    paths = {".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts): path for path in PACKAGE.rglob("*.py")}
    return {name.removesuffix(".__init__"): path for name, path in paths.items()}


def imported(path: Path) -> set[str]:
    """Modules of the package that a file imports anywhere in it, as absolute names."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names.add(str(node.module))
    return {name for name in names if name.startswith("trtllm_mla.")}


def against_the_stream(module: str, imports: set[str]) -> list[str]:
    own = module.split(".")[1]
    stages = {name: name.split(".")[1] for name in imports}
    return [
        name
        for name, stage in stages.items()
        if (stage != own and own not in BASE and STAGES[stage] >= STAGES[own]) or (own in BASE and stage not in BASE)
    ]


def test_data_flow_one_way():
    modules = {name: path for name, path in module_names().items() if name != "trtllm_mla"}
    assert {name.split(".")[1] for name in modules} <= STAGES.keys(), "a new part needs its stage"
    wrong = {name: found for name, path in modules.items() if (found := against_the_stream(name, imported(path)))}
    assert wrong == {}


@pytest.mark.parametrize(
    ("module", "imports"),
    [
        ("trtllm_mla.ops.plan", "trtllm_mla.engine.plugin"),
        ("trtllm_mla.benchmark.latency", "trtllm_mla.validation.metrics"),
        ("trtllm_mla.files", "trtllm_mla.config"),
        ("trtllm_mla.runtime.step", "trtllm_mla.cli.options"),
    ],
)
def test_an_import_from_a_later_stage_is_found(module, imports):
    assert against_the_stream(module, {imports, "trtllm_mla.errors"}) == [imports]


def test_importing_needs_no_heavy_package():
    """Kernels are written in Triton's language; every other module imports on a machine without a GPU's software."""
    device_code = (".kernels", ".device_functions", ".quantized_rows", ".fp8_weights")
    names = [name for name in module_names() if not name.endswith(device_code)]
    names.append("trtllm_mla.ops.kernels")
    program = f"""
import importlib, sys
class Block:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {HEAVY}:
            raise ModuleNotFoundError(f"{{name}} is blocked", name=name)
sys.meta_path.insert(0, Block())
for name in {names}:
    importlib.import_module(name)
"""
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr


def test_the_command_is_installed():
    project = tomllib.loads((PACKAGE.parent / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    module, _, function = project["scripts"]["trtllm-mla"].partition(":")
    assert callable(getattr(importlib.import_module(module), function))


def test_type_checkers_may_use_the_annotations():
    assert (PACKAGE / "py.typed").is_file()


def test_the_command_line_offers_every_executor():
    assert {name.value for name in ExecutorName} == EXECUTORS.keys()


def test_the_runtime_is_found_in_the_package_itself():
    from trtllm_mla.runtime.llm import LLM
    from trtllm_mla.runtime.sampling import SamplingParams

    assert (trtllm_mla.LLM, trtllm_mla.SamplingParams) == (LLM, SamplingParams)
    with pytest.raises(AttributeError, match="no attribute 'Absent'"):
        _ = trtllm_mla.Absent
