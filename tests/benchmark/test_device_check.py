"""The device check, as far as a machine without a GPU can run it."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from tests.engine.fakes import RecordingDriver
from trtllm_mla.dtypes import DType
from trtllm_mla.ops.interpreter import run_plan
from trtllm_mla.targets import get_target

SCRIPT = Path(__file__).parents[2] / "bench" / "device_check.py"


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
    """Every operation and pair of types in Triton's interpreter: some forty cases of half a second each."""
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
        (model, cache) for model in DType for cache in DType
    }
    assert {name for item in values["numerics"] for name in item["kernels"]} == {
        "append_latent",
        "gather_latent",
        "attend",
        "attend_split",
        "combine",
        "context_attention",
    }
    assert {item["part"] for item in values["timings"]} == {"decode", "context"}
    assert all(item["floor_ms"] is None for item in values["timings"])
    assert [engine["valid"] for engine in values["engines"]] == [True]
    skipped = {item["what"] for item in values["skipped"]}
    assert {"Triton JIT, cubins through cuda.core", "engine: tensorrt, MLA plugins"} <= skipped
    assert not any("kernel" in name for name in skipped)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_refuses(tmp_path):
    result = subprocess.run(
        [sys.executable, SCRIPT, "--json", tmp_path / "out.json"], capture_output=True, text=True, check=False
    )
    assert result.returncode == 2
    assert "sees no CUDA GPU" in result.stderr
    assert not (tmp_path / "out.json").exists()


def test_nothing_starts_after_the_time_limit(device_check):
    environment = device_check.dry_environment(0)
    report = device_check.Report(environment.description, False, 0, None)
    budget = device_check.Budget(0.0)
    cases = device_check.numeric_cases(dry_run=True)
    device_check.check_numerics(cases, environment, report, budget)
    device_check.time_cases("decode", device_check.decode_cases(dry_run=True), environment, report, budget)
    assert not report.numerics
    assert not report.timings
    assert not report.passed
    assert {skip.reason for skip in report.skipped} == {"time limit", "no case that launches it ran"}
    assert "times: decode, 2 x 50 keys, 5 heads" in {skip.what for skip in report.skipped}


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
    ],
)
def test_a_wrong_element_is_found(device_check, op, output, value):
    environment = device_check.dry_environment(1)
    case = device_check.Case("spoiled", op, device_check.SMALL, ((2, 20), (1, 3)))
    assert device_check.check_case(case, device_check.InterpreterRunner(), environment).passed
    assert not device_check.check_case(case, Spoiled(output, value), environment).passed


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


def test_the_jit_takes_the_plans_arguments_and_finds_the_kernels_compiled_before(device_check, tmp_path, monkeypatch):
    """Triton's JIT with a stand-in for its driver: it compiles for real, and launches into a list."""
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
    # One row, one request: left to itself, the JIT compiles numbers that are 1 into the kernel.
    case = device_check.Case("jit", "LatentAttention", replace(device_check.SMALL, heads=1), ((1, 400),))
    tensors = tensors_of(device_check, case)
    plan = replace(case, multiprocessors=1000).plan(target)
    assert [launch.variant.kernel for launch in plan.launches] == ["attend_split", "combine"]
    for launch in plan.launches:
        device_check.compile_one((launch.variant, target))
    compiled = sorted(tmp_path.rglob("*.cubin"))
    monkeypatch.setattr(driver, "_active", stand_in)
    device_check.JitRunner().prepare(plan, tensors)()
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
    for name in ("sm_80", "sm_89", "sm_90", "sm_100", "sm_120"):
        target = get_target(name)
        cases = device_check.numeric_cases(dry_run=False)
        plans = [case.plan(target) for case in cases]
        timed = [*device_check.decode_cases(dry_run=False), *device_check.context_timing_cases(dry_run=False)]
        assert all(case.plan(target).launches for case in timed)
        launched = {launch.variant for plan in plans for launch in plan.launches}
        kernels = {(variant.op, variant.kernel) for variant in launched}
        assert kernels == device_check.planned_kernels(target)
        for case in cases:
            split = [launch for launch in case.plan(target).launches if launch.variant.kernel == "attend_split"]
            assert bool(split) or not case.name.endswith("keys split")
        bf16 = [v for v in launched if v.op == "LatentAttention" and ("q_latent", "*bf16") in v.signature]
        found = {dict(v.constants)["BLOCK_M"] for v in bf16 if dict(v.constants)["KV_LORA_RANK"] == 512}
        base = device_check.Case("", "LatentAttention", device_check.DEEPSEEK, ((1, 1),)).problem(target)
        planned = device_check.OPS["LatentAttention"].variants(base)
        assert found == {dict(v.constants).get("BLOCK_M") for v in planned} - {None}


def test_work_by_formula(device_check):
    """DeepSeek-V3: 1152 bytes a cached token, 2176 FLOP a key and head absorbed, 640 decompressed."""
    case = device_check.Case("", "LatentAttention", device_check.DEEPSEEK, ((1, 100),), wild=False)
    query_and_output = 128 * (576 + 512) * 2
    assert device_check.latent_work(case) == device_check.Work(100 * 1152 + query_and_output, 100 * 128 * 2176)
    prefill = device_check.Case("", "ContextAttention", device_check.DEEPSEEK, ((3, 5),), wild=False)
    assert device_check.decompressed_work(prefill, shared_rope=True).flop == (3 + 4 + 5) * 128 * 640
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
