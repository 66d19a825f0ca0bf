import pytest

from trtllm_mla.dtypes import DType
from trtllm_mla.errors import UserError
from trtllm_mla.roofline.gpus import GPUS, get_gpu
from trtllm_mla.targets import get_target

# Dense bf16 operations of a multiprocessor in a cycle, fp32 sums, and its fp32 units: from the architectures' papers.
BF16_PER_CYCLE = {
    "a100": 2048,
    "h100": 4096,
    "h200": 4096,
    "b200": 8192,
    "rtx3090": 512,
    "rtx4090": 512,
    "l40s": 1024,
    "rtx5090": 512,
}
FP32_UNITS = {"a100": 64}


@pytest.mark.parametrize("gpu", GPUS.values(), ids=lambda gpu: gpu.name)
def test_peaks_are_multiprocessors_times_clock(gpu):
    """The data sheets' rates follow from their other rows, so a slip in any of the figures shows."""
    assert gpu.multiprocessors * gpu.clock_hz * BF16_PER_CYCLE[gpu.name] == pytest.approx(gpu.bf16_flops, rel=0.02)
    # The fp32 peak is stated at a clock up to 15 % higher where tensor cores lower it.
    fp32 = gpu.multiprocessors * gpu.clock_hz * 2 * FP32_UNITS.get(gpu.name, 128)
    assert fp32 * 0.99 < gpu.fp32_flops < fp32 * 1.15


@pytest.mark.parametrize("gpu", GPUS.values(), ids=lambda gpu: gpu.name)
def test_targets_are_those_of_the_parts(gpu):
    target = get_target(gpu.target)
    assert target.example in {"A100", "H100", "B200", "RTX 3090", "RTX 4090", "RTX 5090"}
    # Full chips of a generation have up to 1.2 times as many multiprocessors as its common part.
    assert target.multiprocessors <= gpu.multiprocessors <= 1.2 * target.multiprocessors


@pytest.mark.parametrize(("name", "ridge"), [("h100", 295.3), ("h200", 206.1), ("b200", 281.2)])
def test_ridges(name, ridge):
    assert get_gpu(name).ridge(DType.BFLOAT16) == pytest.approx(ridge, abs=0.06)
    assert get_gpu(name).ridge(DType.FLOAT16) == get_gpu(name).ridge(DType.BFLOAT16)
    assert get_gpu(name).ridge(DType.FLOAT32) < ridge / 10


def test_names_in_any_case():
    assert get_gpu("RTX5090") is GPUS["rtx5090"]


def test_an_unknown_gpu_is_refused_with_the_known_ones():
    with pytest.raises(UserError, match=r"--gpu: found 'h1000', expected one of a100, h100, h200, b200, rtx3090"):
        get_gpu("h1000")
