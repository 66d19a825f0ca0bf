"""Checks and times the MLA kernels on one GPU, in at most four minutes.

    python bench/device_check.py --json device.json
    python bench/device_check.py --dry-run          # no GPU: Triton's interpreter, small sizes

Needs this package, PyTorch and Triton. What else is importable is used, and what cannot run is named with the reason:

1. Numerics: every operation, kernel and type, through its real launch plan, against float64. On a GPU plans run twice:
   by Triton's JIT, and, with ``cuda.core``, by the ahead-of-time cubins through the engine's own launcher. Outputs and
   workspaces are poisoned with NaN, tensors lie between NaN, unused slots of the cache hold NaN.
2. Times of LatentAttention and ContextAttention at DeepSeek-V3's sizes, beside the floor (bytes and FLOP by formula
   over the device's peaks) and torch's ``scaled_dot_product_attention``. What is timed is checked against float64 too.
3. Engines, with TensorRT or TensorRT-RTX: the example checkpoint is built with plugins and natively, validated, timed.
4. FlashMLA and FlashInfer on the same decode problems.

The exit status is 1 if a check of this package fails, 2 if the check cannot run here.
"""

from __future__ import annotations

import argparse
import faulthandler
import importlib
import math
import multiprocessing
import os
import secrets
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, wait
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field, replace
from itertools import accumulate, product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Protocol

import torch
from rich.console import Console
from rich.table import Table

from trtllm_mla._version import __version__
from trtllm_mla.benchmark.latency import LatencyOptions, bench_latency
from trtllm_mla.benchmark.machine import Machine
from trtllm_mla.config import BackendName, BuildConfig, MlaPluginConfig
from trtllm_mla.dtypes import DType
from trtllm_mla.engine.backend import load_backend
from trtllm_mla.engine.builder import build
from trtllm_mla.engine.kernel_compiler import compile_kernels, default_cache_dir
from trtllm_mla.engine.launcher import POINTER_ALIGNMENT, WARP_SIZE, CudaDriver, Driver, Launcher
from trtllm_mla.errors import UserError
from trtllm_mla.files import write_json
from trtllm_mla.network.directory import convert
from trtllm_mla.ops import OPS
from trtllm_mla.ops.definition import Attribute, OpDefinition, Problem, split_dim
from trtllm_mla.ops.interpreter import run_plan
from trtllm_mla.ops.kernels import jit_kernel
from trtllm_mla.ops.latent_attention.plan import default_tile
from trtllm_mla.ops.plan import ITEMSIZES, Argument, KernelVariant, LaunchPlan, ScalarArgument, TensorArgument
from trtllm_mla.roofline.gpus import GPUS, Gpu
from trtllm_mla.targets import TARGETS, Target, get_target
from trtllm_mla.validation.validate import ValidationOptions, validate

# Tensors are named after the operations' contracts. In the references: G groups of heads that share keys, R rows
# (queries), S keys, K and V widths of a key and a value.
Tensor = torch.Tensor
Tensors = dict[str, torch.Tensor]
Call = Callable[[], Any]

OURS = "this package"
EXAMPLE = Path(__file__).parents[1] / "examples" / "tiny-mla"
DRY_RUN_TARGET = "sm_90"
# Norm of the difference from float64 over the norm of the float64 result: a few roundings of the type.
TOLERANCE = {DType.FLOAT32: 5e-7, DType.FLOAT16: 6e-4, DType.BFLOAT16: 4e-3}
LOG_SUM_EXP_TOLERANCE = 1e-5
# (nope + rope) ** -0.5 times mscale squared of DeepSeek-V3.
SOFTMAX_SCALE = 192**-0.5 * (0.1 * math.log(40) + 1) ** 2
BEYOND_EVERY_POOL = 2**31 - 1
MARGIN = 4096  # elements of NaN before and behind a tensor; a multiple of 16 bytes, which kernels rely on
FLUSH_BYTES = 512 << 20  # more than any L2 cache, and as much work as hides the launches' time on the host
MEMORY_SHARE = 0.8  # of the free memory that one problem may take
# Shares of the time limit at which a part has to have ended, and the least time to start something with.
NUMERICS_UNTIL, TIMES_UNTIL = 0.6, 0.85
COMPILE_UNTIL = 0.35
CASE_SECONDS, ENGINE_SECONDS = 8.0, 30.0
HANG_GRACE_SECONDS = 30.0


# ------------------------------------------------------------------------------------------------------------ report


@dataclass(frozen=True)
class Measure:
    """One comparison with float64.

    Attributes:
        what: What was compared.
        error: The error; NaN where the result holds one.
        tolerance: The largest that passes.
    """

    what: str
    error: float
    tolerance: float

    @property
    def passed(self) -> bool:
        """Whether the error is small enough; NaN is not."""
        return self.error <= self.tolerance


@dataclass(frozen=True)
class NumericResult:
    """A case of the numerics.

    Attributes:
        case: What was run.
        op: The operation.
        model_dtype: The network's type.
        cache_dtype: The cache's type.
        runner: What executed the plan.
        kernels: Kernels that it launched.
        measures: The comparisons.
        problem: Why it could not run, if it could not.
    """

    case: str
    op: str
    model_dtype: str
    cache_dtype: str
    runner: str
    kernels: tuple[str, ...]
    measures: tuple[Measure, ...]
    problem: str | None = None

    @property
    def passed(self) -> bool:
        """Whether it ran and every comparison passed."""
        return self.problem is None and all(measure.passed for measure in self.measures)


@dataclass(frozen=True)
class Work:
    """What an implementation has to move and compute at the least.

    Attributes:
        num_bytes: Bytes of its inputs and outputs, each once.
        flop: Floating-point operations of its products.
    """

    num_bytes: int
    flop: int


@dataclass(frozen=True)
class Timing:
    """Time of one implementation of one problem.

    Attributes:
        part: ``decode`` or ``context``.
        problem: The problem.
        implementation: The implementation.
        ours: Whether it is this package's, so that its error counts.
        milliseconds: Median time.
        work: Its least work.
        floor_ms: Time of that work at the device's peaks, or None where they are unknown.
        measures: Comparisons of its result with float64.
    """

    part: str
    problem: str
    implementation: str
    ours: bool
    milliseconds: float
    work: Work
    floor_ms: float | None
    measures: tuple[Measure, ...]

    @property
    def passed(self) -> bool:
        """Whether every comparison passed, or none counts."""
        return not self.ours or all(measure.passed for measure in self.measures)


@dataclass(frozen=True)
class EngineResult:
    """An engine, or in a dry run the network, on the example checkpoint.

    Attributes:
        subject: What ran.
        executor: By which executor.
        valid: Whether it passed the validation.
        prefill_ms: Median time of a prefill.
        decode_ms: Median time of a decode step.
    """

    subject: str
    executor: str
    valid: bool
    prefill_ms: float
    decode_ms: float


@dataclass(frozen=True)
class Skip:
    """Something that did not run.

    Attributes:
        what: Its name.
        reason: Why.
    """

    what: str
    reason: str


@dataclass
class Report:
    """Everything found so far.

    Attributes:
        device: What ran the kernels.
        gpu_used: Whether kernels were launched on a GPU.
        seed: Seed of the inputs.
        peaks: What floors are computed from.
        numerics: Part 1.
        timings: Parts 2 and 4.
        engines: Part 3.
        skipped: What did not run.
        failures: Checks that could not be made although they should have been.
        seconds: Time taken.
    """

    device: str
    gpu_used: bool
    seed: int
    peaks: Peaks | None
    numerics: list[NumericResult] = field(default_factory=list)
    timings: list[Timing] = field(default_factory=list)
    engines: list[EngineResult] = field(default_factory=list)
    skipped: list[Skip] = field(default_factory=list)
    failures: list[Skip] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def passed(self) -> bool:
        """Whether something was checked and nothing failed."""
        numerics = all(result.passed for result in self.numerics)
        others = all(timing.passed for timing in self.timings) and all(engine.valid for engine in self.engines)
        return bool(self.numerics) and numerics and others and not self.failures

    def skip(self, what: str, reason: object) -> None:
        """Notes what did not run, once."""
        found = Skip(what, " ".join(str(reason).split())[:300] or type(reason).__name__)
        if found not in self.skipped:
            self.skipped.append(found)

    def to_json(self) -> dict[str, Any]:
        """Plain values for a JSON file; a number that is not finite becomes null."""
        values = asdict(self) | {"version": __version__, "machine": asdict(Machine.here()), "passed": self.passed}
        for value, result in zip(values["numerics"], self.numerics, strict=True):
            value["passed"] = result.passed
        for value, timing in zip(values["timings"], self.timings, strict=True):
            value["passed"] = timing.passed
        plain: dict[str, Any] = _finite(values)
        return plain


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


class Budget:
    """The time limit.

    Args:
        seconds: Time from now on.
    """

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._begin = time.monotonic()

    def used(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self._begin

    def left(self, share: float = 1.0) -> float:
        """Seconds until a share of the limit is used up."""
        return self.seconds * share - self.used()

    def allows(self, seconds: float, share: float = 1.0) -> bool:
        """Whether something that may take ``seconds`` can begin before that share is used up, and end in time."""
        return self.left(share) > 0 and self.left() > min(seconds, self.seconds / 4)


# ------------------------------------------------------------------------------------------------------------- cases


@dataclass(frozen=True)
class Sizes:
    """Sizes of an attention layer.

    Attributes:
        heads: Local heads.
        kv_lora_rank: Width of the latent.
        rope_dim: Width of the rotary key.
        nope_dim: Width of a head's key without rotary embedding.
        v_dim: Width of a head's value.
        page_size: Slots of a page.
    """

    heads: int
    kv_lora_rank: int
    rope_dim: int
    nope_dim: int
    v_dim: int
    page_size: int


DEEPSEEK = Sizes(128, 512, 64, 128, 128, 64)
SMALL = Sizes(5, 96, 32, 48, 40, 16)  # no heads, latent, nope or value that is a power of two
WIDE_HEADS = Sizes(6, 448, 64, 192, 256, 128)

# New tokens and cached tokens (the new ones included) of each request.
Requests = tuple[tuple[int, int], ...]
# One token, no token, no key, page edges, several tokens, fewer keys than tokens.
EDGES: Requests = ((1, 1), (0, 0), (1, 0), (1, 15), (1, 16), (1, 17), (3, 64), (7, 100), (4, 2), (0, 40), (2, 333))
RAGGED_DECODE: Requests = ((1, 1), (1, 70), (1, 1000), (1, 0), (1, 333), (1, 4097))
CONTEXT_EDGES: Requests = ((17, 17), (0, 9), (0, 0), (1, 70), (1, 1), (33, 101), (16, 16), (20, 3))
LONG_CONTEXT: Requests = ((261, 300), (3, 3), (130, 130), (1, 1025))


@dataclass(frozen=True)
class Case:
    """One use of an operation.

    Attributes:
        name: What is special about it.
        op: Name of the operation.
        sizes: Sizes of the layer.
        requests: The step's requests.
        model_dtype: The network's type.
        cache_dtype: The cache's type.
        interleave: How rotary pairs are laid out.
        multiprocessors: Multiprocessors that the plan counts on, which sets how keys are split; None: the device's.
        wild: Whether slots and entries of the page table that may be anything are.
    """

    name: str
    op: str
    sizes: Sizes
    requests: Requests
    model_dtype: DType = DType.BFLOAT16
    cache_dtype: DType = DType.BFLOAT16
    interleave: bool = True
    multiprocessors: int | None = None
    wild: bool = True

    @property
    def definition(self) -> OpDefinition:
        """The operation."""
        return OPS[self.op]

    def dims(self) -> dict[str, int]:
        """Size of every dimension that the operations' contracts name."""
        sizes = self.sizes
        used = [-(-length // sizes.page_size) for _, length in self.requests]
        return {
            **asdict(sizes),
            "width": sizes.kv_lora_rank + sizes.rope_dim,
            "tokens": sum(count for count, _ in self.requests),
            "keys": sum(length for _, length in self.requests),
            "requests": len(self.requests),
            "longest_query": max(count for count, _ in self.requests),
            "longest_key": max(length for _, length in self.requests),
            "pages": sum(used) + 2,
            "pages_per_request": max(used) + (1 if self.wild else 0),
            "positions": max(max(pair) for pair in self.requests) + 1,
        }

    def attributes(self) -> dict[str, Attribute]:
        """The node's attributes."""
        values: dict[str, Attribute] = {
            "rope_interleave": int(self.interleave),
            "softmax_scale": SOFTMAX_SCALE,
            "kv_lora_rank": self.sizes.kv_lora_rank,
            "rope_dim": self.sizes.rope_dim,
        }
        return {name: values[name] for name in self.definition.attributes}

    def problem(self, device: Target) -> Problem:
        """What the plan on a device is computed from."""
        dims = self.dims()
        if self.multiprocessors is not None:
            device = replace(device, multiprocessors=self.multiprocessors)
        tile_s, num_stages = default_tile(
            kv_lora_rank=dims["kv_lora_rank"],
            rope_dim=dims["rope_dim"],
            model_dtype=self.model_dtype,
            cache_dtype=self.cache_dtype,
            target=device,
        )
        return Problem(dims, self.attributes(), self.model_dtype, self.cache_dtype, device, tile_s, num_stages)

    def plan(self, device: Target) -> LaunchPlan:
        """The launch plan on a device."""
        return self.definition.plan(self.problem(device))

    def torch_dtype(self, element_type: str) -> torch.dtype:
        """Type of a tensor of the contract."""
        names = {"model": self.model_dtype.value, "cache": self.cache_dtype.value}
        dtype: torch.dtype = getattr(torch, names.get(element_type, element_type))
        return dtype


def numeric_cases(*, dry_run: bool) -> list[Case]:
    """Every operation and type; the most important first."""
    pairs = sorted(product(DType, DType), key=lambda pair: (pair[0] != pair[1], pair[0] is not DType.BFLOAT16))
    cases = []
    for index, (model, cache) in enumerate(pairs):
        for sizes, name in ((DEEPSEEK, "DeepSeek-V3 sizes"), (SMALL, "no powers of two"), (WIDE_HEADS, "wide heads")):
            if sizes is not SMALL and model != cache:
                continue
            if dry_run and (sizes is WIDE_HEADS or (sizes is DEEPSEEK and model is not DType.BFLOAT16)):
                continue
            interleave = index % 2 == 0
            append = Case(name, "AppendLatent", sizes, EDGES, model, cache, interleave=interleave)
            cases += [append, replace(append, op="GatherLatent")]
            if model == cache and not dry_run:
                cases.append(replace(append, interleave=not interleave))
            cases += small_attention_cases(append) if dry_run else attention_cases(append)
    return cases


def small_attention_cases(base: Case) -> list[Case]:
    """What the interpreter can do in seconds: each kernel, at the sizes and types of ``base``."""
    latent, context = replace(base, op="LatentAttention"), replace(base, op="ContextAttention")
    if base.sizes is DEEPSEEK:
        return [
            replace(latent, sizes=replace(DEEPSEEK, heads=8), requests=((1, 70), (1, 0), (2, 129))),
            replace(context, sizes=replace(DEEPSEEK, heads=2), requests=((20, 83), (1, 40))),
        ]
    if base.model_dtype != base.cache_dtype:
        return [replace(latent, requests=((1, 40), (2, 17)))]
    return [*keys_split_and_whole(latent), replace(context, requests=CONTEXT_EDGES)]


def attention_cases(base: Case) -> list[Case]:
    """LatentAttention with every row block, keys whole and split; ContextAttention with short and long requests."""
    latent, context = replace(base, op="LatentAttention"), replace(base, op="ContextAttention")
    if base.model_dtype != base.cache_dtype:
        return keys_split_and_whole(latent)[:1]
    cases = [
        *keys_split_and_whole(latent),
        replace(context, requests=CONTEXT_EDGES),
        replace(context, name=f"{base.name}, row blocks", requests=LONG_CONTEXT),
    ]
    if base.sizes is DEEPSEEK:
        # 16, 20 and 128 rows a request take row blocks of 16, 32 and 64 of a 16-bit type, 2 and 5 of 4 and 8 of fp32.
        for heads in (128, 16, 20, 5, 2):
            name, sizes = f"{base.name}, {heads} heads, ragged", replace(DEEPSEEK, heads=heads)
            ragged = replace(latent, name=name, sizes=sizes, requests=RAGGED_DECODE)
            cases += [ragged, replace(ragged, name=f"{name}, keys whole", multiprocessors=1)]
    return cases


def keys_split_and_whole(latent: Case) -> list[Case]:
    """LatentAttention with the plans of a large and of a tiny device."""
    return [
        replace(latent, name=f"{latent.name}, keys split", multiprocessors=1000),
        replace(latent, name=f"{latent.name}, keys whole", multiprocessors=1),
    ]


# ------------------------------------------------------------------------------------------------------------ inputs


def make_inputs(case: Case, device: torch.device, generator: torch.Generator) -> Tensors:
    """Random inputs of a case, as its operation's contract lists them.

    Pages are dealt in random order. Slots without a token hold NaN. Entries of the page table behind a request's last
    page, and some slots, lie outside the pool where the case is wild.
    """
    dims = case.dims()
    integers = make_integers(case, dims, generator)
    inputs: Tensors = {}
    for contract in case.definition.inputs:
        shape = resolve_shape(contract.dims, dims)
        dtype = case.torch_dtype(contract.element_type)
        if contract.element_type == "int32":
            inputs[contract.name] = integers[contract.name].to(device)
            continue
        tensor = torch.empty(shape, dtype=dtype, device=device).normal_()
        if contract.name == "past_latent":
            tensor.fill_(math.nan)
        elif contract.name == "latent_cache":
            unused = torch.ones(shape[0] * shape[1], dtype=torch.bool, device=device)
            unused[integers["cached_slots"].long().to(device)] = False
            tensor.view(-1, shape[2])[unused] = math.nan
        elif contract.name == "rotary_cos_sin":
            angles = torch.rand(shape[0], shape[1] // 2, generator=generator) * 2 * math.pi
            tensor.copy_(torch.cat([angles.cos(), angles.sin()], dim=-1))
        inputs[contract.name] = tensor
    return inputs


def make_integers(case: Case, dims: dict[str, int], generator: torch.Generator) -> Tensors:
    """Every int32 input of the contracts, and ``cached_slots``, the slots of all cached tokens; on the CPU."""
    page_size = case.sizes.page_size
    deck = torch.randperm(dims["pages"], generator=generator)
    table = torch.full((dims["requests"], dims["pages_per_request"]), BEYOND_EVERY_POOL if case.wild else 0)
    slots, new_slots, positions, dealt = [], [], [], 0
    for request, (count, length) in enumerate(case.requests):
        used = -(-length // page_size)
        table[request, :used] = deck[dealt : dealt + used]
        token = torch.arange(length)
        slots.append(table[request, token // page_size] * page_size + token % page_size)
        blind = max(0, count - length)
        new_slots += [torch.full((blind,), -1), slots[-1][max(0, length - count) :]]
        positions.append((torch.arange(count) + length - count).clamp(min=0))
        dealt += used
    cached, appended = torch.cat(slots), torch.cat(new_slots)
    gathered = cached.clone()
    if case.wild:
        gathered[3::7], gathered[5::11], appended[2::5] = -1, BEYOND_EVERY_POOL, BEYOND_EVERY_POOL
    values = {
        "cached_slots": cached,
        "kv_slots": gathered,
        "slot_mapping": appended,
        "position_ids": torch.cat(positions),
        "block_offsets": table,
        "sequence_length": torch.tensor([length for _, length in case.requests]),
        "query_offsets": torch.tensor([0, *accumulate(count for count, _ in case.requests)]),
        "key_offsets": torch.tensor([0, *accumulate(length for _, length in case.requests)]),
        # The kernels take only the shapes of these.
        "query_index": torch.full((dims["requests"], dims["longest_query"]), -1),
        "key_index": torch.full((dims["requests"], dims["longest_key"]), -1),
    }
    return {name: value.to(torch.int32) for name, value in values.items()}


def resolve_shape(dims: Sequence[str | int], sizes: dict[str, int]) -> tuple[int, ...]:
    """Shape of a contract's dimensions."""
    parts = [split_dim(dim) for dim in dims]
    return tuple(offset if name is None else sizes[name] + offset for name, offset in parts)


class Guarded:
    """A copy of a floating-point tensor inside a larger allocation whose margins hold NaN."""

    def __init__(self, tensor: Tensor) -> None:
        size = tensor.numel()
        self._memory = torch.full((size + 2 * MARGIN,), math.nan, dtype=tensor.dtype, device=tensor.device)
        self.tensor = self._memory[MARGIN : MARGIN + size].view(tensor.shape)
        self.tensor.copy_(tensor)

    def overwritten(self) -> int:
        """Elements of the margins that are NaN no longer."""
        end = MARGIN + self.tensor.numel()
        return int((~self._memory[:MARGIN].isnan()).sum() + (~self._memory[end:].isnan()).sum())


# -------------------------------------------------------------------------------------------------------- references


def relative_error(found: Tensor, expected: Tensor) -> float:
    """Norm of the difference over the norm of ``expected``; NaN where ``found`` holds one."""
    return float((found.double() - expected).norm() / expected.norm().clamp(min=1e-300))


def differing(found: Tensor, expected: Tensor) -> float:
    """How many elements are not the same; NaN is the same as NaN."""
    return float(((found != expected) & ~(found.isnan() & expected.isnan())).sum())


def rotate(x: Tensor, position_ids: Tensor, rotary_cos_sin: Tensor, *, interleave: bool) -> Tensor:
    """Rotates pairs of ``x`` [tokens, ..., rope] in float64: pair i is (2i, 2i + 1) or (i, i + rope / 2)."""
    half = x.shape[-1] // 2
    angles = rotary_cos_sin.double()[position_ids.long()].view(len(x), *([1] * (x.dim() - 2)), 2 * half)
    cos, sin = angles[..., :half], angles[..., half:]
    pairs = x.double().unflatten(-1, (half, 2) if interleave else (2, half))
    axis = -1 if interleave else -2
    a, b = pairs.unbind(axis)
    return torch.stack([a * cos - b * sin, b * cos + a * sin], dim=axis).flatten(-2)


def measure_append(case: Case, inputs: Tensors, outputs: Tensors) -> list[Measure]:
    """Latents are the input's nearest values, rotary parts within the tolerance, all other rows untouched."""
    rank, rows = case.sizes.kv_lora_rank, outputs["present_latent"].flatten(0, 1)
    slots = inputs["slot_mapping"].long()
    kept = (slots >= 0) & (slots < len(rows))
    written = torch.zeros(len(rows), dtype=torch.bool, device=rows.device)
    written[slots[kept]] = True
    angles = {"position_ids": inputs["position_ids"], "rotary_cos_sin": inputs["rotary_cos_sin"]}
    k_pe = rotate(inputs["k_pe"], **angles, interleave=case.interleave)
    q_pe = rotate(inputs["q_pe"], **angles, interleave=case.interleave)
    latent = inputs["latent"][kept].float().to(rows.dtype)
    found = rows[slots[kept]]
    return [
        Measure("latent rows that differ", differing(found[:, :rank], latent), 0),
        Measure("k_pe", relative_error(found[:, rank:], k_pe[kept]), TOLERANCE[case.cache_dtype]),
        Measure("q_pe", relative_error(outputs["rotated_q_pe"], q_pe), TOLERANCE[case.model_dtype]),
        Measure("unused slots written", float((~rows[~written].isnan()).sum()), 0),
    ]


def measure_gather(case: Case, inputs: Tensors, outputs: Tensors) -> list[Measure]:
    """Rows are the cache's nearest values; slots outside the pool give zeros."""
    rank, slots = case.sizes.kv_lora_rank, inputs["kv_slots"].long()
    rows = inputs["latent_cache"].flatten(0, 1)
    inside = (slots >= 0) & (slots < len(rows))
    dtype = outputs["latent"].dtype
    expected = torch.zeros(len(slots), rows.shape[1], dtype=dtype, device=rows.device)
    expected[inside] = rows[slots[inside]].float().to(dtype)
    return [
        Measure("latents that differ", differing(outputs["latent"], expected[:, :rank]), 0),
        Measure("k_pe that differ", differing(outputs["k_pe"], expected[:, rank:]), 0),
    ]


def attend(q_GRK: Tensor, k_GSK: Tensor, v_GSV: Tensor, visible_R: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Attention in float64: row r sees the first ``visible_R[r]`` keys.

    Returns:
        The output [G, R, V] and the natural log-sum-exp [G, R]; 0 and -inf where no key is visible.
    """
    scores_GRS = q_GRK.double() @ k_GSK.double().transpose(1, 2) * scale
    hidden_RS = torch.arange(k_GSK.shape[1], device=q_GRK.device) >= visible_R[:, None]
    scores_GRS = scores_GRS.masked_fill(hidden_RS, -math.inf)
    if not k_GSK.shape[1]:
        blind = torch.full(q_GRK.shape[:2], -math.inf, dtype=torch.float64, device=q_GRK.device)
        return blind.new_zeros(*q_GRK.shape[:2], v_GSV.shape[2]), blind
    log_sum_exp_GR = scores_GRS.logsumexp(-1)
    shift_GR = log_sum_exp_GR.masked_fill(log_sum_exp_GR.isneginf(), 0.0)
    return (scores_GRS - shift_GR[..., None]).exp() @ v_GSV.double(), log_sum_exp_GR


@dataclass(frozen=True)
class Expected:
    """Float64 results of some of a step's tokens.

    Attributes:
        tokens: Which.
        output: [tokens, heads, width].
        log_sum_exp: [tokens, heads].
    """

    tokens: slice
    output: Tensor
    log_sum_exp: Tensor


def expect_latent(case: Case, inputs: Tensors, which: Sequence[int], last: int) -> Iterator[Expected]:
    """LatentAttention's results for the ``last`` tokens of the requests ``which``."""
    heads, rank, page_size = case.sizes.heads, case.sizes.kv_lora_rank, case.sizes.page_size
    offsets = [0, *accumulate(count for count, _ in case.requests)]
    for request in which:
        count, length = case.requests[request]
        rows = min(count, last)
        end = offsets[request + 1]
        pages = inputs["block_offsets"][request, : -(-length // page_size)].long()
        k_SK = inputs["latent_cache"][pages].flatten(0, 1)[:length].to(inputs["q_latent"].dtype)
        tokens = slice(end - rows, end)
        q_RK = torch.cat([inputs["q_latent"][tokens], inputs["q_pe"][tokens]], dim=-1).flatten(0, 1)
        visible = (torch.arange(length - rows + 1, length + 1, device=q_RK.device)).repeat_interleave(heads)
        output, log_sum_exp = attend(q_RK[None], k_SK[None], k_SK[None, :, :rank], visible, SOFTMAX_SCALE)
        yield Expected(tokens, output.view(rows, heads, rank), log_sum_exp.view(rows, heads))


def expect_context(case: Case, inputs: Tensors, which: Sequence[int], last: int) -> Iterator[Expected]:
    """ContextAttention's results for the ``last`` tokens of the requests ``which``."""
    ends = list(accumulate(count for count, _ in case.requests))
    key_ends = list(accumulate(length for _, length in case.requests))
    for request in which:
        count, length = case.requests[request]
        rows, end = min(count, last), ends[request]
        tokens, keys = slice(end - rows, end), slice(key_ends[request] - length, key_ends[request])
        q = torch.cat([inputs["q_nope"][tokens], inputs["q_pe"][tokens]], dim=-1).transpose(0, 1)
        k_pe = inputs["k_pe"][keys, None].expand(-1, case.sizes.heads, -1)
        k = torch.cat([inputs["k_nope"][keys], k_pe], dim=-1).transpose(0, 1)
        visible = torch.arange(length - rows + 1, length + 1, device=q.device)
        output, log_sum_exp = attend(q, k, inputs["v"][keys].transpose(0, 1), visible, SOFTMAX_SCALE)
        yield Expected(tokens, output.transpose(0, 1), log_sum_exp.transpose(0, 1))


EXPECT = {"LatentAttention": expect_latent, "ContextAttention": expect_context}


def measure_attention(
    case: Case,
    inputs: Tensors,
    output: Tensor,
    log_sum_exp: Tensor | None,
    *,
    which: Sequence[int] | None = None,
    last: int = BEYOND_EVERY_POOL,
) -> list[Measure]:
    """Output and log-sum-exp within the tolerance, and exactly the rows without a visible key empty.

    Args:
        case: The case.
        inputs: Its inputs.
        output: [tokens, heads, width].
        log_sum_exp: [tokens, heads], or None where there is none to compare.
        which: Requests to compare; None: all.
        last: Compare as many of a request's tokens, from its end.
    """
    parts = list(EXPECT[case.op](case, inputs, range(len(case.requests)) if which is None else which, last))
    expected = torch.cat([part.output for part in parts])
    expected_log_sum_exp = torch.cat([part.log_sum_exp for part in parts])
    found = torch.cat([output[part.tokens] for part in parts])
    measures = [Measure("output", relative_error(found, expected), TOLERANCE[case.model_dtype])]
    if log_sum_exp is not None:
        found_log_sum_exp = torch.cat([log_sum_exp[part.tokens] for part in parts])
        blind = expected_log_sum_exp.isneginf()
        wrong = (found_log_sum_exp.isneginf() != blind).sum() + (found[blind] != 0).sum()
        difference = (found_log_sum_exp.double() - expected_log_sum_exp)[~blind].abs()
        measures += [
            Measure("log-sum-exp", float(difference.max()) if difference.numel() else 0.0, LOG_SUM_EXP_TOLERANCE),
            Measure("rows wrongly empty or not", float(wrong), 0),
        ]
    return measures


def measure(case: Case, inputs: Tensors, outputs: Tensors) -> list[Measure]:
    """Compares an operation's outputs with float64."""
    if case.op == "AppendLatent":
        return measure_append(case, inputs, outputs)
    if case.op == "GatherLatent":
        return measure_gather(case, inputs, outputs)
    return measure_attention(case, inputs, outputs["output"], outputs["log_sum_exp"])


# ----------------------------------------------------------------------------------------------------------- runners


class Runner(Protocol):
    """Executes launch plans."""

    name: str

    def prepare(self, plan: LaunchPlan, tensors: Tensors) -> Call:
        """Makes what ``plan`` needs, a poisoned workspace included, and returns what enqueues its launches."""


class InterpreterRunner:
    """Triton's interpreter, on CPU tensors."""

    name = "Triton's interpreter on the CPU"

    def prepare(self, plan: LaunchPlan, tensors: Tensors) -> Call:
        """See ``Runner.prepare``."""
        return lambda: run_plan(plan, tensors)


class JitRunner:
    """Triton's JIT, on GPU tensors."""

    name = "Triton JIT"

    def prepare(self, plan: LaunchPlan, tensors: Tensors) -> Call:
        """See ``Runner.prepare``."""
        workspace = poisoned_workspace(plan, next(iter(tensors.values())).device)
        launches = []
        for launch in plan.launches:
            variant = launch.variant
            names = [name for name, _ in variant.signature]
            values = [jit_argument(argument, tensors, workspace) for argument in launch.arguments]
            keywords = {**dict(zip(names, values, strict=True)), **dict(variant.constants), "INTERPRET": False}
            keywords |= {"num_warps": variant.num_warps, "num_stages": variant.num_stages, "enable_fp_fusion": True}
            launches.append((unspecialized(variant)[launch.grid], keywords))

        def call() -> None:
            for kernel, keywords in launches:
                kernel(**keywords)

        return call


def unspecialized(variant: KernelVariant) -> Any:
    """The variant's kernel, compiled for all values of its numbers as the ahead-of-time compiler does."""
    import triton

    numbers = [name for name, kind in variant.signature if not kind.startswith("*")]
    return triton.jit(jit_kernel(variant.op, variant.kernel).fn, do_not_specialize=numbers)


def jit_argument(argument: Argument, tensors: Tensors, workspace: Tensor) -> Tensor | int | float:
    """What a launch passes, as Triton's JIT takes it."""
    if isinstance(argument, ScalarArgument):
        return argument.value
    if isinstance(argument, TensorArgument):
        return tensors[argument.name]
    dtype = {"fp32": torch.float32, "i32": torch.int32, "bf16": torch.bfloat16, "fp16": torch.float16}[argument.dtype]
    return workspace[argument.offset : argument.offset + argument.elements * ITEMSIZES[argument.dtype]].view(dtype)


class CubinRunner:
    """Ahead-of-time cubins, loaded and launched as an engine's plugins do.

    Args:
        driver: The GPU.
        directory: Where kernels are written.
    """

    name = "cubins through cuda.core"

    def __init__(self, driver: Driver, directory: Path) -> None:
        self._driver, self._directory, self._count = driver, directory, 0

    def prepare(self, plan: LaunchPlan, tensors: Tensors) -> Call:
        """See ``Runner.prepare``."""
        if not plan.launches:
            return lambda: None
        self._count += 1
        folder = self._directory / str(self._count)
        folder.mkdir()
        jobs = [(launch.variant, self._driver.target) for launch in plan.launches]
        launcher = Launcher(self._driver, compile_kernels(jobs, folder))
        workspace = poisoned_workspace(plan, next(iter(tensors.values())).device)

        def call() -> None:
            addresses = {name: tensor.data_ptr() for name, tensor in tensors.items()}
            launcher.run(plan, addresses, workspace.data_ptr(), torch.cuda.current_stream().cuda_stream)

        return call


def poisoned_workspace(plan: LaunchPlan, device: torch.device) -> Tensor:
    """A plan's workspace; every byte 0xFF is NaN in each floating-point type."""
    return torch.full((plan.workspace_bytes,), 0xFF, dtype=torch.uint8, device=device)


def compile_one(job: tuple[KernelVariant, Target]) -> None:
    """Compiles a kernel into the cache, for the engine's launcher and for Triton's JIT.

    It is the same source to both, but the JIT's key also lists the compile-time parameters among the attributes.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    variant, target = job
    with TemporaryDirectory() as directory:
        compile_kernels([job], Path(directory))
    constants: dict[str, Any] = {**dict(variant.constants), "INTERPRET": False}
    signature = {**dict(variant.signature), **dict.fromkeys(constants, "constexpr")}
    attributes: dict[tuple[int], list[list[str | int]]] = {
        (index,): [["tt.divisibility", POINTER_ALIGNMENT]] if kind.startswith("*") else []
        for index, kind in enumerate(signature.values())
        if kind.startswith("*") or kind == "constexpr"
    }
    triton.compile(
        ASTSource(unspecialized(variant), signature, constants, attributes),
        target=GPUTarget("cuda", target.compute_capability, WARP_SIZE),
        options={"num_warps": variant.num_warps, "num_stages": variant.num_stages, "enable_fp_fusion": True},
    )


def compile_in_parallel(cases: Sequence[Case], target: Target, budget: Budget) -> str:
    """Fills the cache of compiled kernels on all cores; both runners read it. Returns what was done, in words."""
    variants = {launch.variant: None for case in cases for launch in case.plan(target).launches}
    workers = max(1, min(len(variants), len(os.sched_getaffinity(0))))
    pool = ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn"))
    futures = [pool.submit(compile_one, (variant, target)) for variant in variants]
    done, _ = wait(futures, timeout=max(budget.left(COMPILE_UNTIL), 0))
    # What could not be compiled is tried again, and reported, where it is needed.
    pool.shutdown(wait=False, cancel_futures=True)
    return f"{len(done)} of {len(variants)} kernels compiled on {workers} cores by second {budget.used():.0f}"


# ------------------------------------------------------------------------------------------------------ environment


@dataclass(frozen=True)
class Peaks:
    """What a device can do at most.

    Attributes:
        bytes_per_second: Memory bandwidth.
        flop_per_second: Dense 16-bit products with fp32 accumulation.
        source: Where the numbers are from.
    """

    bytes_per_second: float
    flop_per_second: float
    source: str


@dataclass(frozen=True)
class Environment:
    """Where kernels run.

    Attributes:
        device: Device of the tensors.
        target: GPU generation whose plans run, with the device's multiprocessors.
        description: The device, in words.
        generator: Source of random numbers on the CPU.
        runners: What executes plans; the first is timed.
        dry_run: No GPU is used.
    """

    device: torch.device
    target: Target
    description: str
    generator: torch.Generator
    runners: tuple[Runner, ...]
    dry_run: bool

    def synchronize(self) -> None:
        """Waits for all launches."""
        if not self.dry_run:
            torch.cuda.synchronize()

    def free_bytes(self) -> int:
        """Memory that a problem may take."""
        if self.dry_run:
            return 1 << 30
        torch.cuda.empty_cache()
        return int(torch.cuda.mem_get_info()[0] * MEMORY_SHARE)

    def median_ms(self, call: Call) -> float:
        """Median time of a call: with CUDA events, the L2 cache flushed before each; in a dry run the host's clock."""
        if self.dry_run:
            begin = time.perf_counter()
            call()
            return (time.perf_counter() - begin) * 1e3
        flush = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device=self.device)
        for _ in range(3):
            call()
        self.synchronize()
        samples: list[float] = []
        begin = time.monotonic()
        while len(samples) < 20 and (len(samples) < 3 or time.monotonic() - begin < 0.5):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            flush.zero_()
            start.record()
            call()
            end.record()
            end.synchronize()
            samples.append(start.elapsed_time(end))
        return statistics.median(samples)


def dry_environment(seed: int) -> Environment:
    """The CPU, with Triton's interpreter."""
    return Environment(
        device=torch.device("cpu"),
        target=get_target(DRY_RUN_TARGET),
        description=f"DRY RUN, no GPU used: Triton's interpreter on the CPU ({Machine.here().name}), plans of "
        f"{DRY_RUN_TARGET}; its times say nothing about a GPU",
        generator=torch.Generator().manual_seed(seed),
        runners=(InterpreterRunner(),),
        dry_run=True,
    )


def gpu_environment(seed: int, directory: Path, report_skip: Callable[[str, object], None]) -> Environment:
    """The first GPU.

    Raises:
        UserError: PyTorch sees none, its generation is unknown, or neither runner works.
    """
    if not torch.cuda.is_available():
        raise UserError(
            f"PyTorch {torch.__version__} sees no CUDA GPU. Use --dry-run to run this script without one, in Triton's "
            "interpreter."
        )
    properties = torch.cuda.get_device_properties(0)
    name = f"sm_{properties.major}{properties.minor}"
    if name not in TARGETS:
        raise UserError(f"{properties.name} is of generation {name}; expected one of {', '.join(TARGETS)}.")
    target = replace(TARGETS[name], multiprocessors=properties.multi_processor_count)
    torch.cuda.manual_seed(seed)
    # Kernels that the ahead-of-time compiler has made are the JIT's too.
    os.environ.setdefault("TRITON_CACHE_DIR", str(default_cache_dir()))
    environment = Environment(
        device=torch.device("cuda", 0),
        target=target,
        description=f"{properties.name}, {name}, {properties.multi_processor_count} multiprocessors, "
        f"{properties.total_memory / 2**30:.0f} GiB, CUDA {torch.version.cuda}",
        generator=torch.Generator().manual_seed(seed),
        runners=(),
        dry_run=False,
    )
    makers: tuple[tuple[str, Callable[[], Runner]], ...] = (
        (JitRunner.name, JitRunner),
        (CubinRunner.name, lambda: CubinRunner(CudaDriver(), directory)),
    )
    runners = []
    for label, make in makers:
        try:
            runner = make()
            check_case(Case("probe", "GatherLatent", SMALL, ((1, 20),)), runner, environment)
        except Exception as error:  # Whatever keeps a runner from working, the other may work.
            report_skip(label, error)
        else:
            runners.append(runner)
    if not runners:
        raise UserError("Kernels can be launched neither by Triton's JIT nor through cuda.core.")
    # The engine's own way of launching is the one to time.
    return replace(environment, runners=tuple(reversed(runners)))


def find_gpu(properties: Any) -> Gpu | None:
    """The GPU of the roofline's that a device is, by name, multiprocessors and memory: variants share names."""
    name = properties.name.lower().replace(" ", "")
    for gpu in GPUS.values():
        memory = properties.total_memory / gpu.memory_bytes
        if gpu.name in name and gpu.multiprocessors == properties.multi_processor_count and 0.9 < memory < 1.05:
            return gpu
    return None


def find_peaks(environment: Environment) -> Peaks | None:
    """The data sheet's where the device is known, else what a copy and a product reach; None in a dry run."""
    if environment.dry_run:
        return None
    known = find_gpu(torch.cuda.get_device_properties(environment.device))
    if known is not None:
        return Peaks(known.bandwidth, known.bf16_flops, known.source)
    size = 8192
    matrix = torch.randn(size, size, device=environment.device, dtype=torch.bfloat16)
    source = torch.empty(1 << 30, dtype=torch.uint8, device=environment.device)
    destination = torch.empty_like(source)
    copy = environment.median_ms(lambda: destination.copy_(source)) / 1e3
    multiply = environment.median_ms(lambda: matrix @ matrix) / 1e3
    return Peaks(2 * (1 << 30) / copy, 2 * size**3 / multiply, "measured: a copy of 1 GiB, a product of 8192 x 8192")


# ------------------------------------------------------------------------------------------------ part 1: numerics


def run_case(case: Case, runner: Runner, environment: Environment) -> tuple[Tensors, Tensors, Measure]:
    """Runs a case between guards.

    Returns:
        Its inputs as they were, its outputs, and whether anything was written outside of them.
    """
    definition, dims = case.definition, case.dims()
    inputs = make_inputs(case, environment.device, environment.generator)
    guards = {name: Guarded(value) for name, value in inputs.items() if value.is_floating_point()}
    tensors = inputs | {name: guard.tensor for name, guard in guards.items()}
    for index, output in enumerate(definition.outputs):
        if index in definition.aliases:
            tensors[output.name] = tensors[definition.inputs[definition.aliases[index]].name]
            continue
        shape, dtype = resolve_shape(output.dims, dims), case.torch_dtype(output.element_type)
        guards[output.name] = Guarded(torch.full(shape, math.nan, dtype=dtype, device=environment.device))
        tensors[output.name] = guards[output.name].tensor
    runner.prepare(case.plan(environment.target), tensors)()
    environment.synchronize()
    overwritten = float(sum(guard.overwritten() for guard in guards.values()))
    outputs = {output.name: tensors[output.name] for output in definition.outputs}
    return inputs, outputs, Measure("elements written outside", overwritten, 0)


def check_case(case: Case, runner: Runner, environment: Environment) -> NumericResult:
    """Runs a case and compares it with float64."""
    inputs, outputs, guard = run_case(case, runner, environment)
    kernels = tuple(dict.fromkeys(launch.variant.kernel for launch in case.plan(environment.target).launches))
    measures = (*measure(case, inputs, outputs), guard)
    return NumericResult(case.name, case.op, case.model_dtype, case.cache_dtype, runner.name, kernels, tuple(measures))


def check_numerics(cases: Sequence[Case], environment: Environment, report: Report, budget: Budget) -> None:
    """Part 1."""
    for case, runner in product(cases, environment.runners):
        label = f"{case.op}, {case.name}, {case.model_dtype}/{case.cache_dtype}, {runner.name}"
        if not budget.allows(CASE_SECONDS, NUMERICS_UNTIL):
            report.skip(f"numerics: {label}", "time limit")
            continue
        try:
            result = check_case(case, runner, environment)
        except Exception as error:  # A kernel that does not compile or crashes is a finding, and others may work.
            problem = " ".join(f"{type(error).__name__}: {error}".split())[:300]
            names = (case.name, case.op, case.model_dtype.value, case.cache_dtype.value, runner.name)
            result = NumericResult(*names, (), (), problem)
        report.numerics.append(result)
    for runner in environment.runners:
        seen = {
            (result.op, name) for result in report.numerics if result.runner == runner.name for name in result.kernels
        }
        for op, kernel in sorted(planned_kernels(environment.target) - seen):
            report.skip(f"numerics: {op}'s kernel {kernel}, {runner.name}", "no case that launches it ran")


def planned_kernels(target: Target) -> set[tuple[str, str]]:
    """Every operation's kernels, by what its plans can launch."""
    probes = [Case("", op, SMALL, EDGES) for op in OPS]
    return {(case.op, variant.kernel) for case in probes for variant in case.definition.variants(case.problem(target))}


# ---------------------------------------------------------------------------------------- parts 2 and 4: times


class UnavailableError(Exception):
    """An implementation cannot run here; the message says why."""


@dataclass(frozen=True)
class Timed:
    """An implementation, ready to run on a problem.

    Attributes:
        call: Runs it.
        work: Its least work.
        output: Its output [tokens, heads, width], valid after a call; None where it is not the problem's.
        log_sum_exp: Its log-sum-exp [tokens, heads] if it is this package's.
    """

    call: Call
    work: Work
    output: Callable[[], Tensor] | None = None
    log_sum_exp: Callable[[], Tensor] | None = None


Implementation = Callable[[Case, Tensors, Environment], Timed]


def time_cases(part: str, cases: Sequence[Case], environment: Environment, report: Report, budget: Budget) -> None:
    """Times every implementation of the part on every case."""
    implementations = DECODE if part == "decode" else CONTEXT
    missing: set[str] = set()
    for case in cases:
        if not budget.allows(CASE_SECONDS, TIMES_UNTIL):
            report.skip(f"times: {part}, {case.name}", "time limit")
            continue
        needed = sum(math.prod(resolve_shape(t.dims, case.dims())) for t in case.definition.inputs) * 2
        if needed > environment.free_bytes():
            report.skip(f"times: {part}, {case.name}", f"inputs take {needed / 2**30:.1f} GiB, more than is free")
            continue
        inputs = make_inputs(case, environment.device, environment.generator)
        for name, make in implementations.items():
            if name not in missing and not time_one(part, name, make, case, inputs, environment, report):
                missing.add(name)


def time_one(
    part: str,
    name: str,
    make: Implementation,
    case: Case,
    inputs: Tensors,
    environment: Environment,
    report: Report,
) -> bool:
    """Times and checks one implementation on one case; False where it is not installed."""
    ours = name == OURS
    label = f"{case.definition.name}, {environment.runners[0].name}" if ours else name
    try:
        timed = make(case, inputs, environment)
        milliseconds = environment.median_ms(timed.call)
        environment.synchronize()
        measures = measure_timed(case, inputs, timed)
    except UnavailableError as error:
        report.skip(f"{part}: {name}", error)
        return False
    except Exception as error:  # Another's limits are named; this package's own trouble is a failure.
        if ours:
            report.failures.append(Skip(f"{part}, {case.name}: {label}", " ".join(str(error).split())[:300]))
        else:
            report.skip(f"{part}, {case.name}: {label}", error)
        return True
    floor = floor_ms(timed.work, report.peaks)
    report.timings.append(Timing(part, case.name, label, ours, milliseconds, timed.work, floor, tuple(measures)))
    return True


def measure_timed(case: Case, inputs: Tensors, timed: Timed) -> list[Measure]:
    """Compares the last tokens of the first and the last request, enough for large problems, with float64."""
    if timed.output is None:
        return []
    log_sum_exp = timed.log_sum_exp() if timed.log_sum_exp else None
    which = sorted({0, len(case.requests) - 1})
    return measure_attention(case, inputs, timed.output(), log_sum_exp, which=which, last=16)


def floor_ms(work: Work, peaks: Peaks | None) -> float | None:
    """Least time of some work: that of its bytes or of its FLOP, whichever is longer."""
    if peaks is None:
        return None
    return max(work.num_bytes / peaks.bytes_per_second, work.flop / peaks.flop_per_second) * 1e3


def visible_pairs(case: Case) -> int:
    """Pairs of a new token and a key that it sees."""
    return sum(max(0, length - count + index + 1) for count, length in case.requests for index in range(count))


def latent_work(case: Case) -> Work:
    """Absorbed attention: each cached row once, queries, outputs; 2 (width + kv_lora_rank) FLOP a pair and head."""
    sizes, dims = case.sizes, case.dims()
    width = dims["width"]
    elements = dims["keys"] * width + dims["tokens"] * sizes.heads * (width + sizes.kv_lora_rank)
    flop = visible_pairs(case) * sizes.heads * 2 * (width + sizes.kv_lora_rank)
    return Work(elements * case.model_dtype.itemsize, flop)


def decompressed_work(case: Case, *, shared_rope: bool) -> Work:
    """Decompressed attention: keys and values of every head; ``shared_rope``: the rotary key is stored once."""
    sizes, dims = case.sizes, case.dims()
    head = sizes.nope_dim + sizes.rope_dim
    rope = sizes.rope_dim * (1 if shared_rope else sizes.heads)
    elements = dims["keys"] * (sizes.heads * (sizes.nope_dim + sizes.v_dim) + rope)
    elements += dims["tokens"] * sizes.heads * (head + sizes.v_dim)
    flop = visible_pairs(case) * sizes.heads * 2 * (head + sizes.v_dim)
    return Work(elements * case.model_dtype.itemsize, flop)


def prepare_ours(case: Case, inputs: Tensors, environment: Environment) -> Timed:
    """This package's operation, by the first runner."""
    outputs = {
        output.name: torch.full(
            resolve_shape(output.dims, case.dims()),
            math.nan,
            dtype=case.torch_dtype(output.element_type),
            device=environment.device,
        )
        for output in case.definition.outputs
    }
    call = environment.runners[0].prepare(case.plan(environment.target), inputs | outputs)
    work = latent_work(case) if case.op == "LatentAttention" else decompressed_work(case, shared_rope=True)
    return Timed(call, work, lambda: outputs["output"], lambda: outputs["log_sum_exp"])


def contiguous_rows(case: Case, inputs: Tensors) -> Tensor:
    """Cached rows [requests, length, width] of requests of one length, out of their pages."""
    length = case.requests[0][1]
    pages = inputs["block_offsets"][:, : -(-length // case.sizes.page_size)].long()
    return inputs["latent_cache"][pages].flatten(1, 2)[:, :length].contiguous()


def prepare_sdpa_latent(case: Case, inputs: Tensors, environment: Environment) -> Timed:
    """Torch's attention with the latent as one 576-wide key head; its keys are not paged, and one token is new."""
    # All heads of the one new token are query rows of the one key head.
    q = torch.cat([inputs["q_latent"], inputs["q_pe"]], dim=-1)[:, None]
    k = contiguous_rows(case, inputs)[:, None]
    v = k[..., : case.sizes.kv_lora_rank]
    results: Tensors = {}

    def call() -> None:
        results["output"] = torch.nn.functional.scaled_dot_product_attention(q, k, v, scale=SOFTMAX_SCALE)

    return Timed(call, latent_work(case), lambda: results["output"][:, 0])


def prepare_sdpa_decompressed(case: Case, inputs: Tensors, environment: Environment) -> Timed:
    """Torch's attention over decompressed keys: what a cache of whole heads costs, without the decompression.

    Keys and values are random; the result is that of another problem, and compared with nothing.
    """
    sizes, count = case.sizes, len(case.requests)
    length, head = case.requests[0][1], sizes.nope_dim + sizes.rope_dim
    work = decompressed_work(case, shared_rope=False)
    if work.num_bytes > environment.free_bytes():
        raise ValueError(f"decompressed keys take {work.num_bytes / 2**30:.0f} GiB, more than is free")

    def random(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=case.torch_dtype("model"), device=environment.device).normal_()

    q, k, v = (
        random(count, sizes.heads, rows, width) for rows, width in ((1, head), (length, head), (length, sizes.v_dim))
    )
    return Timed(lambda: torch.nn.functional.scaled_dot_product_attention(q, k, v, scale=SOFTMAX_SCALE), work)


def prepare_sdpa_context(case: Case, inputs: Tensors, environment: Environment) -> Timed:
    """Torch's causal attention over keys with the rotary part copied to every head; requests of one length."""
    from torch.nn.attention.bias import causal_lower_right

    sizes, requests = case.sizes, len(case.requests)
    count, length = case.requests[0]

    def by_request(tensor: Tensor) -> Any:
        return tensor.unflatten(0, (requests, -1)).transpose(1, 2).contiguous()

    q = by_request(torch.cat([inputs["q_nope"], inputs["q_pe"]], dim=-1))
    k = by_request(torch.cat([inputs["k_nope"], inputs["k_pe"][:, None].expand(-1, sizes.heads, -1)], dim=-1))
    v = by_request(inputs["v"])
    mask: dict[str, Any] = {"is_causal": True} if count == length else {"attn_mask": causal_lower_right(count, length)}
    results: Tensors = {}

    def call() -> None:
        results["output"] = torch.nn.functional.scaled_dot_product_attention(q, k, v, scale=SOFTMAX_SCALE, **mask)

    work = decompressed_work(case, shared_rope=False)
    return Timed(call, work, lambda: results["output"].transpose(1, 2).flatten(0, 1))


def prepare_flash_mla(case: Case, inputs: Tensors, environment: Environment) -> Timed:
    """FlashMLA's dense decode kernel, on the same pool and page table."""
    package = import_peer("flash_mla", ("get_mla_metadata", "flash_mla_with_kvcache"))
    if case.sizes.page_size != 64 or environment.dry_run:
        raise ValueError("needs a GPU and pages of 64 tokens")
    heads, rank = case.sizes.heads, case.sizes.kv_lora_rank
    q = torch.cat([inputs["q_latent"], inputs["q_pe"]], dim=-1)[:, None]
    cache = inputs["latent_cache"][:, :, None]
    # Versions from 2026 on ignore the arguments and return (metadata, None).
    metadata, num_splits = package.get_mla_metadata(inputs["sequence_length"], heads, 1)
    results: Tensors = {}

    def call() -> None:
        results["output"], _ = package.flash_mla_with_kvcache(
            q,
            cache,
            inputs["block_offsets"],
            inputs["sequence_length"],
            rank,
            metadata,
            num_splits,
            softmax_scale=SOFTMAX_SCALE,
            causal=True,
        )

    return Timed(call, latent_work(case), lambda: results["output"][:, 0])


def prepare_flashinfer(case: Case, inputs: Tensors, environment: Environment) -> Timed:
    """FlashInfer's paged MLA; latents and rotary keys are copied to pools of their own, as it wants them."""
    package = import_peer("flashinfer.mla", ("BatchMLAPagedAttentionWrapper",))
    if environment.dry_run:
        raise ValueError("needs a GPU")
    sizes, device = case.sizes, environment.device
    used = [-(-length // sizes.page_size) for _, length in case.requests]
    pages = torch.cat([inputs["block_offsets"][request, :count] for request, count in enumerate(used)])
    latent = inputs["latent_cache"][..., : sizes.kv_lora_rank].contiguous()
    k_pe = inputs["latent_cache"][..., sizes.kv_lora_rank :].contiguous()
    wrapper = package.BatchMLAPagedAttentionWrapper(torch.empty(128 << 20, dtype=torch.int8, device=device))
    wrapper.plan(
        inputs["query_offsets"],
        torch.tensor([0, *accumulate(used)], dtype=torch.int32, device=device),
        pages,
        inputs["sequence_length"],
        sizes.heads,
        sizes.kv_lora_rank,
        sizes.rope_dim,
        sizes.page_size,
        True,
        SOFTMAX_SCALE,
        latent.dtype,
        latent.dtype,
    )
    results: Tensors = {}

    def call() -> None:
        results["output"] = wrapper.run(inputs["q_latent"], inputs["q_pe"], latent, k_pe, return_lse=False)

    return Timed(call, latent_work(case), lambda: results["output"])


def import_peer(module: str, names: Sequence[str]) -> Any:
    """A peer's module.

    Raises:
        UnavailableError: It does not import, or lacks a function.
    """
    try:
        package = importlib.import_module(module)
    except Exception as error:  # Extensions fail to load in many ways.
        raise UnavailableError(f"'{module}' does not import: {error}") from error
    absent = [name for name in names if not hasattr(package, name)]
    if absent:
        raise UnavailableError(f"'{module}' has no {', '.join(absent)}")
    return package


DECODE: dict[str, Implementation] = {
    OURS: prepare_ours,
    "torch SDPA, latent as one head": prepare_sdpa_latent,
    "torch SDPA, decompressed": prepare_sdpa_decompressed,
    "FlashMLA": prepare_flash_mla,
    "FlashInfer": prepare_flashinfer,
}
CONTEXT: dict[str, Implementation] = {OURS: prepare_ours, "torch SDPA": prepare_sdpa_context}


def decode_cases(*, dry_run: bool) -> list[Case]:
    """Decode steps: batch sizes, context lengths, local heads."""
    if dry_run:
        sizes = replace(SMALL, page_size=16)
        return [Case("2 x 50 keys, 5 heads", "LatentAttention", sizes, ((1, 50),) * 2, wild=False)]
    return [
        Case(
            f"{batch} x {length} keys, {heads} heads",
            "LatentAttention",
            replace(DEEPSEEK, heads=heads),
            ((1, length),) * batch,
            wild=False,
        )
        # A problem of each kind first, in case that time runs out.
        for length, batch, heads in product((8192, 1024, 65536), (16, 128, 1), (128, 16, 64))
    ]


def context_timing_cases(*, dry_run: bool) -> list[Case]:
    """Prefills: whole prompts, a batch of them, and the last chunk of a long one."""
    if dry_run:
        return [Case("1 x 20 of 40 tokens, 5 heads", "ContextAttention", SMALL, ((20, 40),), wild=False)]
    return [
        Case(
            f"{batch} x {count} of {length} tokens, {heads} heads",
            "ContextAttention",
            replace(DEEPSEEK, heads=heads),
            ((count, length),) * batch,
            wild=False,
        )
        for (batch, count, length), heads in product(
            ((1, 4096, 4096), (8, 1024, 1024), (1, 1024, 16384)), (16, 64, 128)
        )
    ]


# -------------------------------------------------------------------------------------------------- part 3: engines


def check_engines(environment: Environment, report: Report, budget: Budget) -> None:
    """Part 3; in a dry run the network through ONNX Runtime, which exercises the same code."""
    with TemporaryDirectory() as folder:
        directory = Path(folder)
        config = BuildConfig(
            max_batch_size=4, max_num_tokens=64, max_seq_len=256, max_context_kv_tokens=512, opt_batch_size=4
        )
        try:
            network = convert(EXAMPLE, directory / "network", plugin=MlaPluginConfig(page_size=16)).path
            if environment.dry_run:
                measure_engine("network, without an engine", network, "onnxruntime", config, report)
        except (UserError, ImportError) as error:
            report.skip("engines", error)
            return
        names: tuple[BackendName, ...] = ("tensorrt", "tensorrt-rtx")
        for name, native in product(names, (False, True)):
            subject = f"{name}, {'native layers' if native else 'MLA plugins'}"
            if environment.dry_run:
                report.skip(f"engine: {subject}", "dry run: engines are executed on a GPU only")
            elif not budget.allows(ENGINE_SECONDS):
                report.skip(f"engine: {subject}", "time limit")
            else:
                check_engine(subject, name, native, network, directory, config, environment, report)


def check_engine(
    subject: str,
    backend: BackendName,
    native: bool,
    network: Path,
    directory: Path,
    config: BuildConfig,
    environment: Environment,
    report: Report,
) -> None:
    """Builds, validates and times one engine for this GPU."""
    engine = directory / subject.replace(" ", "_")
    try:
        load_backend(backend)
        CudaDriver()
        build(network, engine, config=config, backend=backend, targets=[environment.target.name], native=native)
        measure_engine(subject, engine, "tensorrt", config, report)
    except (UserError, ImportError) as error:
        report.skip(f"engine: {subject}", error)
    except Exception as error:  # An engine that breaks is a finding, and the other may work.
        report.failures.append(Skip(f"engine: {subject}", " ".join(f"{type(error).__name__}: {error}".split())[:300]))


def measure_engine(subject: str, path: Path, executor: str, config: BuildConfig, report: Report) -> None:
    """Validates against the PyTorch reference, then times prefill and decode."""
    found = validate(
        path,
        EXAMPLE,
        executor,
        build=config,
        options=ValidationOptions(lengths=(33, 17), greedy_tokens=4, absorption_check=False),
    )
    latency = bench_latency(path, EXAMPLE, executor, LatencyOptions(16, 8, batch_size=4, iterations=5), build=config)
    report.engines.append(
        EngineResult(
            subject,
            latency.executor_description,
            found.passed,
            latency.prefill.latency_ms.median,
            latency.decode.latency_ms.median,
        )
    )


# ------------------------------------------------------------------------------------------------------------ tables


def print_report(report: Report, console: Console) -> None:
    """Prints all tables."""
    console.print(report.device, highlight=False, soft_wrap=True)
    console.print(f"Inputs of seed {report.seed}; {report.seconds:.0f} s", highlight=False)
    console.print(numerics_table(report))
    for part, title in (("decode", "LatentAttention: decode"), ("context", "ContextAttention: prefill")):
        if any(timing.part == part for timing in report.timings):
            console.print(timings_table(report, part, title))
    if report.engines:
        console.print(engines_table(report))
    for title, items in (("Failed", report.failures), ("Did not run", report.skipped)):
        if items:
            console.print(skips_table(title, items))
    console.print("passed" if report.passed else "FAILED", style="green" if report.passed else "bold red")


def numerics_table(report: Report) -> Table:
    """For each operation, types and runner its kernels and worst comparison; a row for every case that failed."""
    table = Table(title="Numerics against float64", title_justify="left")
    for heading in ("operation", "network / cache", "run by", "cases", "kernels", "worst comparison", "bound", ""):
        table.add_column(heading, overflow="fold")
    groups: dict[tuple[str, str, str], list[NumericResult]] = {}
    for result in report.numerics:
        types = f"{result.model_dtype} / {result.cache_dtype}"
        groups.setdefault((result.op, types, result.runner), []).append(result)
    for (op, types, runner), results in groups.items():
        passed = [result for result in results if result.passed]
        kernels = ", ".join(dict.fromkeys(name for result in passed for name in result.kernels))
        if passed:
            measures = [measure for result in passed for measure in result.measures]
            table.add_row(op, types, runner, str(len(passed)), kernels, *_describe(measures), "ok")
        for result in results:
            if not result.passed:
                found = (result.problem, "") if result.problem is not None else _describe(result.measures)
                table.add_row(op, types, runner, result.case, ", ".join(result.kernels), *found, "[bold red]FAILED[/]")
    return table


def _describe(measures: Sequence[Measure]) -> tuple[str, str]:
    """The worst comparison and its bound."""
    worst = max(measures, key=_severity)
    return f"{worst.what}: {worst.error:.2g}", f"{worst.tolerance:g}"


def _severity(measure: Measure) -> float:
    """Error over tolerance; a NaN is the worst."""
    if math.isnan(measure.error):
        return math.inf
    if measure.tolerance == 0:
        return math.inf if measure.error else 0.0
    return measure.error / measure.tolerance


def timings_table(report: Report, part: str, title: str) -> Table:
    """Times beside the floor."""
    peaks = report.peaks
    where = (
        f"floors from {peaks.bytes_per_second / 1e12:.2f} TB/s, {peaks.flop_per_second / 1e12:.0f} TFLOP/s "
        f"({peaks.source})"
        if peaks
        else "no floors: no GPU"
    )
    table = Table(title=f"{title}, bf16; {where}", title_justify="left")
    table.add_column("problem")
    table.add_column("implementation")
    for heading in ("ms", "GB/s", "TFLOP/s", "floor / time", "error"):
        table.add_column(heading, justify="right")
    for timing in report.timings:
        if timing.part != part:
            continue
        seconds = timing.milliseconds / 1e3
        share = f"{100 * timing.floor_ms / timing.milliseconds:.0f} %" if timing.floor_ms is not None else ""
        error = f"{timing.measures[0].error:.1e}" if timing.measures else ""
        if not timing.passed:
            error = f"[bold red]{error} FAILED[/]"
        rates = (f"{timing.work.num_bytes / seconds / 1e9:.0f}", f"{timing.work.flop / seconds / 1e12:.1f}")
        table.add_row(timing.problem, timing.implementation, f"{timing.milliseconds:.4f}", *rates, share, error)
    return table


def engines_table(report: Report) -> Table:
    """Engines of the example checkpoint."""
    table = Table(title="examples/tiny-mla, batches of 4 requests", title_justify="left")
    for heading in ("what", "executor", "validation", "prefill, ms", "decode step, ms"):
        table.add_column(heading, overflow="fold")
    for engine in report.engines:
        verdict = "passed" if engine.valid else "[bold red]FAILED[/]"
        times = (f"{engine.prefill_ms:.3f}", f"{engine.decode_ms:.3f}")
        table.add_row(engine.subject, engine.executor, verdict, *times)
    return table


def skips_table(title: str, items: Sequence[Skip]) -> Table:
    """Names and reasons."""
    table = Table(title=title, title_justify="left")
    table.add_column("what", overflow="fold")
    table.add_column("reason", overflow="fold")
    for item in items:
        table.add_row(item.what, item.reason)
    return table


# -------------------------------------------------------------------------------------------------------------- main


def run(arguments: argparse.Namespace, console: Console, directory: Path) -> Report:
    """Runs all parts, writing the JSON file after each.

    Raises:
        UserError: There is no usable GPU, and no dry run was asked for.
    """
    budget = Budget(arguments.seconds)
    early_skips: list[tuple[str, object]] = []
    if arguments.dry_run:
        environment = dry_environment(arguments.seed)
    else:
        environment = gpu_environment(
            arguments.seed, directory, lambda what, reason: early_skips.append((what, reason))
        )
    report = Report(environment.description, not environment.dry_run, arguments.seed, find_peaks(environment))
    for what, reason in early_skips:
        report.skip(what, reason)
    dry_run = environment.dry_run
    numerics = numeric_cases(dry_run=dry_run)
    decode, context = decode_cases(dry_run=dry_run), context_timing_cases(dry_run=dry_run)
    if dry_run:
        report.skip("Triton JIT, cubins through cuda.core", "dry run: no GPU is used")
    else:
        console.print(compile_in_parallel([*numerics, *decode, *context], environment.target, budget))
    parts: tuple[tuple[str, Call], ...] = (
        ("numerics", lambda: check_numerics(numerics, environment, report, budget)),
        ("times of decode", lambda: time_cases("decode", decode, environment, report, budget)),
        ("times of prefill", lambda: time_cases("context", context, environment, report, budget)),
        ("engines", lambda: check_engines(environment, report, budget)),
    )
    for name, part in parts:
        with console.status(name) if console.is_terminal else nullcontext():
            part()
        report.seconds = round(budget.used(), 1)
        if arguments.json is not None:
            write_json(arguments.json, report.to_json())
    return report


def parse_arguments() -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="also write everything to this file, part by part")
    parser.add_argument("--seconds", type=float, default=240.0, help="time limit; what is left is skipped by name")
    parser.add_argument("--seed", type=int, default=secrets.randbits(31), help="seed of the inputs; else a fresh one")
    parser.add_argument("--dry-run", action="store_true", help="no GPU: Triton's interpreter, at small sizes")
    return parser.parse_args()


def main() -> int:
    """Checks, prints tables, and returns the exit status."""
    arguments = parse_arguments()
    # A kernel that hangs cannot be interrupted from Python; what was found before is in the JSON file.
    faulthandler.dump_traceback_later(arguments.seconds + HANG_GRACE_SECONDS, exit=True)
    torch.manual_seed(arguments.seed)
    torch.set_grad_enabled(False)
    if arguments.dry_run:
        torch.set_num_threads(1)  # tensors are too small for more
    console = Console()
    try:
        # The launcher takes a stream's address: one that is not the default stream's null.
        stream = None if arguments.dry_run or not torch.cuda.is_available() else torch.cuda.Stream()
        with TemporaryDirectory() as directory, torch.cuda.stream(stream):
            report = run(arguments, console, Path(directory))
    except UserError as error:
        print(f"Error: {error}", file=sys.stderr)
        return 2
    faulthandler.cancel_dump_traceback_later()
    print_report(report, console)
    return 0 if report.passed else 1


if __name__ == "__main__":
    sys.exit(main())
