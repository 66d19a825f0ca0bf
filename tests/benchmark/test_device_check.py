"""The device check, as far as a machine without a GPU can run it."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tests.engine.fakes import RecordingDriver
from tests.ops import reference
from trtllm_mla.cache_rows import CacheDType
from trtllm_mla.dtypes import DType
from trtllm_mla.ops.interpreter import run_plan
from trtllm_mla.targets import KIB, get_target

SCRIPT = Path(__file__).parents[2] / "bench" / "device_check.py"
QUANTIZED = [CacheDType.FP8, CacheDType.NVFP4]
TIMED = ("append", "gather", "decode", "context", "linear")


@pytest.fixture(scope="module")
def device_check():
    spec = importlib.util.spec_from_file_location("device_check", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


@pytest.mark.slow
def test_dry_run(tmp_path):
    """Every operation and pair of types in Triton's interpreter: some eighty cases of half a second each."""
    result = subprocess.run(
        [sys.executable, SCRIPT, "--dry-run", "--json", tmp_path / "out.json"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert "DRY RUN, no GPU used" in result.stdout
    values = json.loads((tmp_path / "out.json").read_text())
    assert values["passed"] is True
    assert values["gpu_used"] is False
    assert values["peaks"] is None
    assert {item["runner"] for item in values["numerics"]} == {"Triton's interpreter on the CPU"}
    assert {(item["model_dtype"], item["cache_dtype"]) for item in values["numerics"]} == {
        (model, cache) for model in DType for cache in CacheDType
    }
    cached = defaultdict(set)
    for item in values["numerics"]:
        cached[item["op"]].add(item["cache_dtype"])
    assert all(cached[op] == set(CacheDType) for op in ("AppendLatent", "GatherLatent", "LatentAttention"))
    assert {name for item in values["numerics"] for name in item["kernels"]} == {
        "append_latent",
        "append_quantized_latent",
        "gather_latent",
        "gather_quantized_latent",
        "attend",
        "combine",
        "context_attention",
        "sort_slots",
        "gate_up",
        "down",
        "weighted_sum",
        "multiply",
        "sum_splits",
    }
    assert {item["part"] for item in values["timings"]} == set(TIMED)
    for part in ("append", "gather", "decode"):
        ours = [item for item in values["timings"] if item["part"] == part and item["ours"]]
        assert {item["cache_dtype"] for item in ours} == {"bf16", "fp8", "nvfp4"}
        assert all(item["measures"] and item["passed"] and item["tokens_per_second"] > 0 for item in ours)
    assert all(item["floor_ms"] is None for item in values["timings"])
    assert [engine["valid"] for engine in values["engines"]] == [True]
    skipped = {item["what"] for item in values["skipped"]}
    assert {"Triton, cubins through cuda.core", "engine: tensorrt, MLA plugins"} <= skipped
    assert not any("kernel" in name for name in skipped)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_refuses(tmp_path):
    result = subprocess.run(
        [sys.executable, SCRIPT, "--json", tmp_path / "out.json"], capture_output=True, text=True, check=False
    )
    assert result.returncode == 2
    assert "sees no CUDA GPU" in result.stderr
    assert not (tmp_path / "out.json").exists()


def test_few_packages_are_enough(tmp_path):
    """PyTorch, Triton, NumPy and ml_dtypes; others, this package's own requirements too, are made to be absent."""
    absent = "cuda onnx onnx_ir onnxruntime onnxscript polygraphy pydantic rich safetensors tokenizers"
    program = f"""
import importlib.abc, runpy, sys

class Absent(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {absent.split()}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Absent())
sys.argv = [{str(SCRIPT)!r}, "--dry-run", "--seconds", "4", "--json", {str(tmp_path / "out.json")!r}]
runpy.run_path(sys.argv[0], run_name="__main__")
"""
    result = subprocess.run(
        [sys.executable, "-P", "-c", program], capture_output=True, text=True, check=False, cwd=tmp_path
    )
    assert result.returncode == 0, result.stdout + result.stderr
    values = json.loads((tmp_path / "out.json").read_text())
    assert values["passed"] is True
    assert {"what": "engines", "reason": "No module named 'pydantic'"} in values["skipped"]


def test_nothing_starts_after_the_time_limit(device_check):
    environment = device_check.dry_environment(0)
    report = device_check.Report(environment.description, False, 0, None)
    budget = device_check.Budget(0.0)
    cases = device_check.numeric_cases(dry_run=True)
    device_check.check_numerics(cases, environment, report, budget)
    for part in TIMED:
        cases = device_check.timing_cases(part, dry_run=True)
        device_check.time_cases(part, cases, environment, report, budget)
    assert not report.numerics
    assert not report.timings
    assert not report.passed
    assert {skip.reason for skip in report.skipped} == {"time limit", "no case that launches it ran"}
    assert "times: decode, 2 x 50 keys, 5 heads, nvfp4" in {skip.what for skip in report.skipped}


class Spoiled:
    """Runs a plan right, then spoils one element of what it wrote."""

    name = "spoiled"

    def __init__(self, output: str, value: float) -> None:
        self._output, self._value = output, value

    def prepare(self, plan: Any, tensors: dict[str, torch.Tensor]) -> Any:
        def call() -> None:
            run_plan(plan, tensors)
            flat = tensors[self._output].view(-1)
            flat[int(flat.isfinite().nonzero()[0])] = self._value

        return call


@pytest.mark.parametrize("value", [float("nan"), 7.0])
@pytest.mark.parametrize(
    ("op", "output"),
    [
        ("AppendLatent", "present_latent"),
        ("AppendLatent", "rotated_q_pe"),
        ("GatherLatent", "latent"),
        ("GatherLatent", "k_pe"),
        ("LatentAttention", "output"),
        ("LatentAttention", "log_sum_exp"),
        ("ContextAttention", "output"),
        ("ContextAttention", "log_sum_exp"),
        ("RoutedExperts", "output"),
        ("BlockScaledMatMul", "output"),
        ("BlockScaledRoutedExperts", "output"),
    ],
)
def test_a_wrong_element_is_found(device_check, op, output, value):
    environment = device_check.dry_environment(1)
    case = device_check.Case("spoiled", op, device_check.SMALL, ((2, 20), (1, 3)))
    assert device_check.check_case(case, device_check.InterpreterRunner(), environment).passed
    assert not device_check.check_case(case, Spoiled(output, value), environment).passed


@pytest.mark.parametrize("cache_dtype", QUANTIZED)
@pytest.mark.parametrize("section", ["code", "scale", "padding", "rotary key"])
def test_a_wrong_byte_is_found(device_check, cache_dtype, section):
    class OneByte(device_check.InterpreterRunner):
        def prepare(self, plan, tensors):
            def call():
                run_plan(plan, tensors)
                rows = tensors["present_latent"].flatten(0, 1)
                row = rows[int((rows != -1).any(1).nonzero()[0])]
                row[offsets[section]] ^= 1

            return call

    environment = device_check.dry_environment(1)
    case = device_check.Case("", "AppendLatent", device_check.SMALL, ((2, 20), (1, 3)), cache_dtype=cache_dtype)
    layout = case.layout
    padding = layout.scale_offset + layout.num_scales * (4 if cache_dtype is CacheDType.FP8 else 1)
    assert padding < layout.rope_offset
    offsets = {"code": 5, "scale": layout.scale_offset, "padding": padding, "rotary key": layout.rope_offset + 3}
    assert device_check.check_case(case, device_check.InterpreterRunner(), environment).passed
    result = device_check.check_case(case, OneByte(), environment)
    assert [(found.what, found.error) for found in result.measures if not found.passed] == [("bytes that differ", 1)]


@pytest.mark.parametrize("cache_dtype", QUANTIZED)
@pytest.mark.parametrize(("op", "output"), [("GatherLatent", "latent"), ("LatentAttention", "output")])
def test_a_forgotten_outer_scale_is_found(device_check, cache_dtype, op, output):
    class Unscaled(device_check.InterpreterRunner):
        def prepare(self, plan, tensors):
            def call():
                run_plan(plan, tensors)
                tensors[output].mul_(1 / 0.99)

            return call

    environment = device_check.dry_environment(1)
    case = device_check.Case("", op, device_check.SMALL, ((2, 20),), cache_dtype=cache_dtype, latent_scale=0.99)
    assert device_check.check_case(case, device_check.InterpreterRunner(), environment).passed
    assert not device_check.check_case(case, Unscaled(), environment).passed


@pytest.mark.parametrize("axis", [0, 1])
def test_scales_of_the_wrong_block_are_found(device_check, axis):
    """As a kernel would use them that took the short last block for a whole one."""

    class Shifted(device_check.InterpreterRunner):
        def prepare(self, plan, tensors):
            scale = tensors["scale"].clone()
            blocks = scale.unbind(axis)
            wrong = torch.stack([*blocks[:-1], blocks[-2]], axis)
            return lambda: run_plan(plan, tensors | {"scale": wrong})

    environment = device_check.dry_environment(1)
    case = device_check.Case("", "BlockScaledMatMul", device_check.SMALL, ((3, 3),))
    assert device_check.check_case(case, device_check.InterpreterRunner(), environment).passed
    assert not device_check.check_case(case, Shifted(), environment).passed


def test_a_row_that_leaks_is_found(device_check):
    """Of NaN in other rows nothing may be left but in those."""

    class Forgetful(device_check.InterpreterRunner):
        def prepare(self, plan, tensors):
            return lambda: run_plan(plan, tensors | {"x": tensors["x"].nan_to_num()})

    environment = device_check.dry_environment(1)
    case = device_check.Case("", "BlockScaledMatMul", device_check.SMALL, ((6, 6),))
    result = device_check.check_case(case, Forgetful(), environment)
    assert [measure.what for measure in result.measures if not measure.passed] == ["elements that lost a NaN"]


@pytest.mark.parametrize("two_passes", [True, False])
def test_a_wrong_pass_is_found(device_check, two_passes):
    """The log-sum-exp is a pass's weight in the merge: halved, the merged output is wrong too."""

    class Lighter(device_check.InterpreterRunner):
        def prepare(self, plan, tensors):
            def call():
                run_plan(plan, tensors)
                (causal,) = (
                    argument.value
                    for (name, _), argument in zip(
                        plan.launches[0].variant.signature, plan.launches[0].arguments, strict=True
                    )
                    if name == "causal"
                )
                if not causal:
                    tensors["log_sum_exp"] -= np.log(2)

            return call

    environment = device_check.dry_environment(1)
    case = device_check.Case(
        "", "ContextAttention", device_check.SMALL, device_check.TWO_PASSES[:3], causal=False, two_passes=False
    )
    if two_passes:
        case = replace(case, causal=True, two_passes=True)
    assert device_check.check_case(case, device_check.InterpreterRunner(), environment).passed
    result = device_check.check_case(case, Lighter(), environment)
    failed = {found.what for found in result.measures if not found.passed}
    assert failed == {"log-sum-exp", "output"} if two_passes else {"log-sum-exp"}


def test_passes_without_keys_are_merged(device_check):
    older = device_check.older_keys(device_check.TWO_PASSES)
    pairs = list(zip(older, device_check.TWO_PASSES, strict=True))
    assert all(0 <= count <= max(0, length - tokens) or not tokens for count, (tokens, length) in pairs)
    assert any(count == 0 and tokens < length for count, (tokens, length) in pairs)
    assert any(0 < count < length - tokens for count, (tokens, length) in pairs)
    assert any(count == length - tokens > 0 for count, (tokens, length) in pairs)


@pytest.mark.parametrize("cache_dtype", QUANTIZED)
@pytest.mark.parametrize("width", [512, 96, 448])
def test_the_quantiser_is_that_of_another_reference(device_check, cache_dtype, width):
    torch.manual_seed(width)
    layout = cache_dtype.layout(width, 32)
    latent, k_pe = torch.randn(64, width), torch.randn(64, 32)
    device_check.make_hard_to_quantize(latent)
    rows = device_check.quantize(latent, k_pe, layout)
    expected = reference.quantize_rows(torch.cat([latent, k_pe], 1).numpy(), layout)
    assert np.array_equal(rows.numpy().view(np.uint8), expected)
    assert np.array_equal(
        device_check.cached_values(rows, layout).numpy(), reference.dequantize_rows(expected, layout), equal_nan=True
    )


@pytest.mark.parametrize("cache_dtype", QUANTIZED)
def test_random_rows_are_finite_and_have_all_codes(device_check, cache_dtype):
    layout = cache_dtype.layout(512, 64)
    rows = torch.empty(64, layout.row_bytes, dtype=torch.int8)
    device_check.fill_with_codes(rows, layout)
    values = reference.dequantize_rows(rows.numpy(), layout)
    assert np.isfinite(values).all()
    assert 0.1 < values[:, :512].std() < 2
    codes = rows[:, : layout.code_bytes].numpy().view(np.uint8)
    assert len(np.unique(codes)) == (254 if cache_dtype is CacheDType.FP8 else 255)


def test_after_a_crash_of_the_gpu_nothing_is_tried(device_check):
    class Crashing(device_check.InterpreterRunner):
        def prepare(self, plan, tensors):
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

    class Lost(device_check.Environment):
        def synchronize(self):
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

    healthy = device_check.dry_environment(3)
    environment = Lost(**vars(healthy) | {"runners": (Crashing(),)})
    report = device_check.Report(environment.description, False, 0, None)
    case = device_check.Case("crash", "GatherLatent", device_check.SMALL, ((2, 20),))
    device_check.check_numerics([case, case], environment, report, device_check.Budget(60))
    assert len(report.numerics) == 1
    assert "numerics: what follows" in {skip.what for skip in report.skipped}
    assert not report.passed


def test_what_hangs_is_named_and_the_rest_kept(device_check, tmp_path, monkeypatch, capsys):
    class Hanging(device_check.InterpreterRunner):
        def prepare(self, plan, tensors):
            return lambda: device_check.give_up(report, tmp_path / "out.json")

    def leave(status):
        raise SystemExit(status)

    monkeypatch.setattr(device_check.os, "_exit", leave)
    environment = device_check.dry_environment(3)
    report = device_check.Report(environment.description, False, 0, None)
    case = device_check.Case("first", "GatherLatent", device_check.SMALL, ((2, 20),))
    budget = device_check.Budget(60)
    device_check.check_numerics([case], environment, report, budget)
    environment = replace(environment, runners=(Hanging(),))
    with pytest.raises(SystemExit):
        device_check.check_numerics([replace(case, name="second")], environment, report, budget)
    values = json.loads((tmp_path / "out.json").read_text())
    assert [item["passed"] for item in values["numerics"]] == [True]
    assert [item["what"].startswith("GatherLatent, second") for item in values["failures"]] == [True]
    assert values["passed"] is False
    assert "hangs" in capsys.readouterr().out


def test_a_write_outside_is_found(device_check):
    class Outside(device_check.InterpreterRunner):
        def prepare(self, plan, tensors):
            def call():
                run_plan(plan, tensors)
                beyond = tensors["k_pe"].as_strided((1,), (1,), tensors["k_pe"].storage_offset() - 1)
                beyond.fill_(1.0)

            return call

    environment = device_check.dry_environment(2)
    case = device_check.Case("outside", "GatherLatent", device_check.SMALL, ((2, 20),))
    result = device_check.check_case(case, Outside(), environment)
    assert [measure.what for measure in result.measures if not measure.passed] == ["elements written outside"]


def test_a_kernel_that_breaks_fails_the_check(device_check):
    class Broken(device_check.InterpreterRunner):
        def prepare(self, plan, tensors):
            raise RuntimeError("no such kernel image")

    environment = replace(device_check.dry_environment(3), runners=(Broken(),))
    report = device_check.Report(environment.description, False, 0, None)
    case = device_check.Case("broken", "GatherLatent", device_check.SMALL, ((2, 20),))
    device_check.check_numerics([case], environment, report, device_check.Budget(60))
    assert report.numerics[0].problem == "RuntimeError: no such kernel image"
    assert not report.passed


def tensors_of(device_check: ModuleType, case: Any) -> dict[str, torch.Tensor]:
    environment = device_check.dry_environment(4)
    tensors = device_check.make_inputs(case, environment.device, environment.generator)
    for output in case.definition.outputs:
        shape = device_check.resolve_shape(output.dims, case.dims())
        tensors[output.name] = torch.empty(shape, dtype=case.torch_dtype(output.element_type))
    return tensors


def test_cubins_are_launched_through_the_engines_launcher(device_check, tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(cuda_stream=77))
    driver = RecordingDriver()
    case = device_check.Case("cubin", "GatherLatent", device_check.SMALL, ((2, 20),))
    tensors = tensors_of(device_check, case)
    device_check.CubinRunner(driver, tmp_path).prepare(case.plan(driver.target), tensors)()
    (call,) = driver.calls
    assert (call.entry, call.grid, call.stream) == ("gather_latent", (3, 1, 1), 77)
    addresses = [tensors[name].data_ptr() for name in ("latent_cache", "kv_slots", "latent", "k_pe")]
    assert [int(value) for value in call.parameters] == [*addresses, 20, 4 * 16, 0, 0]


def test_triton_takes_the_plans_arguments_and_finds_the_kernels_compiled_before(device_check, tmp_path, monkeypatch):
    """Triton with a stand-in for its driver: it compiles for real, and launches into a list."""
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    launched: list[tuple[Any, ...]] = []

    class Launcher:
        def __init__(self, source: Any, metadata: Any) -> None:
            pass

        def __call__(self, *arguments: Any) -> None:
            launched.append(arguments)

    stand_in = SimpleNamespace(
        utils=SimpleNamespace(
            get_device_properties=lambda device: {"max_shared_mem": 232448},
            load_binary=lambda *arguments: (1, 2, 32, 0, 1024),
            unload_module=lambda module: None,
        ),
        launcher_cls=Launcher,
        get_current_device=lambda: 0,
        get_current_stream=lambda device=0: 0,
        get_current_target=lambda: GPUTarget("cuda", 90, 32),
    )
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("TRTLLM_MLA_CACHE_DIR", str(tmp_path))
    target = get_target("sm_90")
    case = device_check.Case("triton", "LatentAttention", replace(device_check.SMALL, heads=1), ((1, 400),))
    tensors = tensors_of(device_check, case)
    plan = replace(case, multiprocessors=1000).plan(target)
    assert [launch.variant.kernel for launch in plan.launches] == ["attend", "combine"]
    for launch in plan.launches:
        device_check.compile_one((launch.variant, target))
    compiled = sorted(tmp_path.rglob("*.cubin"))
    monkeypatch.setattr(driver, "_active", stand_in)
    device_check.TritonRunner(target).prepare(plan, tensors)()
    assert sorted(tmp_path.rglob("*.cubin")) == compiled
    assert [call[:3] for call in launched] == [launch.grid for launch in plan.launches]
    for call, launch in zip(launched, plan.launches, strict=True):
        constants = [*(value for _, value in launch.variant.constants), False]
        passed = call[-len(constants) - len(launch.arguments) :]
        assert list(passed[len(launch.arguments) :]) == constants
        for argument, value in zip(launch.arguments, passed, strict=False):
            if hasattr(argument, "value"):
                assert value == argument.value
            elif hasattr(argument, "name"):
                assert value is tensors[argument.name]
            else:
                assert value.numel() == argument.elements


def test_flash_mla_gets_the_pool_in_its_layout(device_check, monkeypatch):
    """A stand-in with FlashMLA's documented arguments, by torch's attention: the result passes the check."""
    sizes = replace(device_check.SMALL, page_size=64)
    case = device_check.Case("peer", "LatentAttention", sizes, ((1, 130),) * 2, wild=False)

    def flash_mla_with_kvcache(
        q, k_cache, block_table, cache_seqlens, head_dim_v, metadata, num_splits, softmax_scale, causal
    ):
        assert metadata == "metadata"
        assert causal
        outputs = []
        for request, length in enumerate(cache_seqlens.tolist()):
            rows = k_cache[block_table[request].long()].flatten(0, 2)[:length].float()
            scores = q[request, 0].float() @ rows.T * softmax_scale
            outputs.append((scores.softmax(-1) @ rows[:, :head_dim_v]).to(q.dtype))
        return torch.stack(outputs)[:, None], None

    peer = SimpleNamespace(
        get_mla_metadata=lambda lengths, heads, key_heads: ("metadata", None),
        flash_mla_with_kvcache=flash_mla_with_kvcache,
    )
    monkeypatch.setitem(sys.modules, "flash_mla", peer)
    environment = replace(device_check.dry_environment(5), dry_run=False)
    inputs = device_check.make_inputs(case, environment.device, environment.generator)
    timed = device_check.prepare_flash_mla(case, inputs, environment)
    timed.call()
    (measure,) = device_check.measure_timed(case, inputs, timed)
    assert measure.passed


def test_flashinfer_gets_pages_and_lengths(device_check, monkeypatch):
    """A stand-in with the arguments of FlashInfer's documentation, by torch's attention."""
    case = device_check.Case("peer", "LatentAttention", device_check.SMALL, ((1, 50), (1, 70)), wild=False)

    class Wrapper:
        def __init__(self, workspace):
            assert workspace.dtype == torch.int8

        def plan(
            self,
            qo_indptr,
            kv_indptr,
            kv_indices,
            kv_len_arr,
            num_heads,
            head_dim_ckv,
            head_dim_kpe,
            page_size,
            causal,
            sm_scale,
            q_data_type,
            kv_data_type,
        ):
            assert qo_indptr.tolist() == [0, 1, 2]
            assert (num_heads, head_dim_ckv, head_dim_kpe, page_size, causal) == (5, 96, 32, 16, True)
            assert q_data_type == kv_data_type == torch.bfloat16
            self.pages, self.scale = kv_indices.long().tensor_split(kv_indptr[1:-1].long()), sm_scale
            self.lengths = kv_len_arr.tolist()

        def run(self, q_nope, q_pe, ckv_cache, kpe_cache, return_lse):
            assert ckv_cache.is_contiguous()
            assert kpe_cache.is_contiguous()
            outputs = []
            for request, (pages, length) in enumerate(zip(self.pages, self.lengths, strict=True)):
                latent, k_pe = (cache[pages].flatten(0, 1)[:length].float() for cache in (ckv_cache, kpe_cache))
                scores = q_nope[request].float() @ latent.T + q_pe[request].float() @ k_pe.T
                outputs.append(((scores * self.scale).softmax(-1) @ latent).to(q_nope.dtype))
            return torch.stack(outputs)

    monkeypatch.setitem(sys.modules, "flashinfer", ModuleType("flashinfer"))
    monkeypatch.setitem(sys.modules, "flashinfer.mla", SimpleNamespace(BatchMLAPagedAttentionWrapper=Wrapper))
    environment = replace(device_check.dry_environment(6), dry_run=False)
    inputs = device_check.make_inputs(case, environment.device, environment.generator)
    timed = device_check.prepare_flashinfer(case, inputs, environment)
    timed.call()
    (measure,) = device_check.measure_timed(case, inputs, timed)
    assert measure.passed


def test_every_plan_for_a_device_exists(device_check):
    """Each target has plans for all cases and problems; the cases need every kernel and row block there is."""
    full = device_check.DEEPSEEK_EXPERTS
    for name in ("sm_80", "sm_89", "sm_90", "sm_100", "sm_120"):
        target = get_target(name)
        skipped = {}
        every = device_check.numeric_cases(dry_run=False)
        cases = device_check.planned(every, target, skipped.__setitem__)
        assert len(cases) + len(skipped) == len(every)
        assert all("too wide" in str(reason) and target.shared_memory_bytes < 100 * KIB for reason in skipped.values())
        refused = {(case.model_dtype, case.cache_dtype) for case in every if case not in cases}
        assert refused <= {(DType.FLOAT32, CacheDType.NVFP4)}
        plans = [case.plan(target) for case in cases]
        timed = [case for part in TIMED for case in device_check.timing_cases(part, dry_run=False)]
        assert all(case.plan(target).launches for case in timed)
        launched = {launch.variant for plan in plans for launch in plan.launches}
        kernels = {
            (case.op, launch.variant.kernel)
            for case, plan in zip(cases, plans, strict=True)
            for launch in plan.launches
        }
        assert kernels == device_check.planned_kernels(target)
        for case in cases:
            merges = [launch for launch in case.plan(target).launches if launch.variant.kernel == "combine"]
            assert bool(merges) or not case.name.endswith("keys split")
            assert not merges or not case.name.endswith("keys whole")
        for cache in (CacheDType.BF16, *QUANTIZED):
            latent = [case for case in cases if (case.op, case.cache_dtype) == ("LatentAttention", cache)]
            deepseek = [case for case in latent if case.model_dtype is DType.BFLOAT16 and case.sizes.v_dim == 128]
            found = forms(launch.variant for case in deepseek for launch in case.plan(target).launches)
            base = device_check.Case("", "LatentAttention", device_check.DEEPSEEK, ((1, 1),), cache_dtype=cache)
            assert found == forms(device_check.OPS["LatentAttention"].variants(base.problem(target)))
            assert {8, 12, 20, 24, 40, 48, 64, 96, 128} <= {case.sizes.heads for case in deepseek}
        experts = replace(device_check.Case("", "RoutedExperts", device_check.DEEPSEEK, ((1, 1),)), experts=full)
        for op in ("RoutedExperts", "BlockScaledRoutedExperts"):
            of_op = replace(experts, op=op)
            assert set(of_op.definition.variants(of_op.problem(target))) <= launched
        linear = replace(experts, op="BlockScaledMatMul", linear=device_check.DEEPSEEK_LATENT)
        assert set(linear.definition.variants(linear.problem(target))) <= launched


def forms(variants):
    """Row blocks of LatentAttention's kernels, and whether keys are the rows of their products."""
    constants = [dict(variant.constants) for variant in variants if variant.kernel.startswith("attend")]
    return {(values["BLOCK_M"], values["KEYS_AS_M"]) for values in constants}


def test_work_by_formula(device_check):
    """DeepSeek-V3: 1152, 656 or 416 bytes a cached token, 2176 FLOP a key and head absorbed, 640 decompressed."""
    case = device_check.Case("", "LatentAttention", device_check.DEEPSEEK, ((1, 100),), wild=False)
    query_and_output = 128 * (576 + 512) * 2
    assert device_check.latent_work(case) == device_check.Work(100 * 1152 + query_and_output, 100 * 128 * 2176)
    for cache_dtype, row_bytes in zip(QUANTIZED, (656, 416), strict=True):
        work = device_check.latent_work(replace(case, cache_dtype=cache_dtype))
        assert work.num_bytes == 100 * row_bytes + query_and_output
        gather = device_check.gather_work(replace(case, op="GatherLatent", cache_dtype=cache_dtype))
        assert gather.num_bytes == 100 * (row_bytes + 1152)
        append = device_check.append_work(replace(case, op="AppendLatent", cache_dtype=cache_dtype))
        assert append.num_bytes == row_bytes + 1152 + 2 * 128 * 64 * 2
    prefill = device_check.Case("", "ContextAttention", device_check.DEEPSEEK, ((3, 5),), wild=False)
    assert device_check.decompressed_work(prefill, shared_rope=True).flop == (3 + 4 + 5) * 128 * 640
    unmasked = replace(prefill, causal=False)
    assert device_check.decompressed_work(unmasked, shared_rope=True).flop == 3 * 5 * 128 * 640
    linear = device_check.Case("", "BlockScaledMatMul", device_check.DEEPSEEK, ((3, 3),), wild=False)
    linear = replace(linear, linear=device_check.LinearSizes(576, 7168))
    rows = 3 * (576 + 7168) * 2
    assert device_check.linear_work(linear) == device_check.Work(576 * 7168 + 5 * 56 * 4 + rows, 2 * 3 * 576 * 7168)
    assert device_check.linear_work(linear, weight_bytes=2).num_bytes == 2 * 576 * 7168 + rows
    peaks = device_check.Peaks(1e12, 1e15, "a test")
    assert device_check.floor_ms(device_check.Work(10**9, 10**9), peaks) == pytest.approx(1.0)
    assert device_check.floor_ms(device_check.Work(1, 10**12), peaks) == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("name", "multiprocessors", "gib", "expected"),
    [
        ("NVIDIA H200", 132, 139.8, "h200"),
        ("NVIDIA H100 80GB HBM3", 132, 79.2, "h100"),
        ("NVIDIA H100 PCIe", 114, 79.2, None),
        ("NVIDIA GeForce RTX 4090", 128, 23.5, "rtx4090"),
        ("NVIDIA A100-SXM4-40GB", 108, 39.4, None),
    ],
)
def test_peaks_are_those_of_the_same_part(device_check, name, multiprocessors, gib, expected):
    properties = SimpleNamespace(name=name, multi_processor_count=multiprocessors, total_memory=int(gib * 2**30))
    found = device_check.find_gpu(properties)
    assert (found.name if found else None) == expected
