"""What NVIDIA states of its GPUs, as far as the roofline needs it."""

from __future__ import annotations

from dataclasses import dataclass

from trtllm_mla.dtypes import DType
from trtllm_mla.errors import UserError


@dataclass(frozen=True)
class Gpu:
    """A GPU. Rates are peaks, and ``bf16_flops`` is dense: data sheets often print twice that, with sparsity.

    Attributes:
        name: On the command line.
        title: The part.
        target: Its compute capability, one of ``TARGETS``.
        memory_bytes: Memory. Data sheets say GB and mean GiB, from which a driver still takes a part.
        bandwidth: Bytes of memory read in a second.
        bf16_flops: Tensor-core operations in a second on bf16 or fp16 operands with fp32 sums.
        fp32_flops: Operations in a second of the fp32 units, which run fp32 products in full precision.
        multiprocessors: Multiprocessors.
        clock_hz: Clock at which ``bf16_flops`` is reached.
        source: Where the figures are from.
    """

    name: str
    title: str
    target: str
    memory_bytes: int
    bandwidth: float
    bf16_flops: float
    fp32_flops: float
    multiprocessors: int
    clock_hz: float
    source: str

    def flops(self, dtype: DType) -> float:
        """Operations in a second on operands of a type."""
        return self.fp32_flops if dtype is DType.FLOAT32 else self.bf16_flops

    def ridge(self, dtype: DType) -> float:
        """Arithmetic intensity, in FLOP per byte, from which a kernel is bound by operations on a type."""
        return self.flops(dtype) / self.bandwidth


def _gpu(
    name: str,
    title: str,
    target: str,
    *,
    gib: int,
    gb_per_s: float,
    bf16_tflops: float,
    fp32_tflops: float,
    multiprocessors: int,
    mhz: float,
    source: str,
) -> Gpu:
    """A GPU in the units of data sheets."""
    rates = (gb_per_s * 1e9, bf16_tflops * 1e12, fp32_tflops * 1e12)
    return Gpu(name, title, target, gib << 30, *rates, multiprocessors, mhz * 1e6, source)


# fmt: off
GPUS = {
    gpu.name: gpu
    for gpu in (
        _gpu("a100", "NVIDIA A100 80GB SXM", "sm_80", gib=80, gb_per_s=2039, bf16_tflops=312, fp32_tflops=19.5,
             multiprocessors=108, mhz=1410,
             source="NVIDIA A100 data sheet and A100 Tensor Core GPU Architecture white paper"),
        _gpu("h100", "NVIDIA H100 SXM", "sm_90", gib=80, gb_per_s=3350, bf16_tflops=989.4, fp32_tflops=66.9,
             multiprocessors=132, mhz=1830,
             source="NVIDIA H100 data sheet and H100 Tensor Core GPU Architecture white paper"),
        _gpu("h200", "NVIDIA H200 SXM", "sm_90", gib=141, gb_per_s=4800, bf16_tflops=989.4, fp32_tflops=66.9,
             multiprocessors=132, mhz=1830,
             source="NVIDIA H200 data sheet; the processor is the H100's"),
        _gpu("b200", "NVIDIA B200 SXM", "sm_100", gib=180, gb_per_s=8000, bf16_tflops=2250, fp32_tflops=80,
             multiprocessors=148, mhz=1856,
             source="NVIDIA HGX B200 data sheet, an eighth; clock from 8192 FLOP a cycle and multiprocessor"),
        _gpu("rtx3090", "NVIDIA GeForce RTX 3090", "sm_86", gib=24, gb_per_s=936, bf16_tflops=71, fp32_tflops=35.6,
             multiprocessors=82, mhz=1695,
             source="NVIDIA Ampere GA102 GPU Architecture white paper"),
        _gpu("rtx4090", "NVIDIA GeForce RTX 4090", "sm_89", gib=24, gb_per_s=1008, bf16_tflops=165.2, fp32_tflops=82.6,
             multiprocessors=128, mhz=2520,
             source="NVIDIA Ada GPU Architecture white paper"),
        _gpu("l40s", "NVIDIA L40S", "sm_89", gib=48, gb_per_s=864, bf16_tflops=362.05, fp32_tflops=91.6,
             multiprocessors=142, mhz=2520,
             source="NVIDIA L40S data sheet"),
        _gpu("rtx5090", "NVIDIA GeForce RTX 5090", "sm_120", gib=32, gb_per_s=1792, bf16_tflops=209.5,
             fp32_tflops=104.8, multiprocessors=170, mhz=2407,
             source="NVIDIA RTX Blackwell GPU Architecture white paper"),
    )
}
# fmt: on


def get_gpu(name: str) -> Gpu:
    """Looks a GPU up by name, in any case.

    Raises:
        UserError: The name is not one of ``GPUS``.
    """
    try:
        return GPUS[name.lower()]
    except KeyError:
        raise UserError(f"--gpu: found '{name:.40}', expected one of {', '.join(GPUS)}.") from None
