"""Checks and times the MLA kernels on one GPU, in at most four minutes.

    python bench/device_check.py --json device.json
    python bench/device_check.py --dry-run          # no GPU: Triton's interpreter, small sizes

Needs PyTorch, Triton, NumPy and ml_dtypes, and runs from a checkout. What else is importable is used, and what cannot
run is named with the reason:

1. Numerics: every operation, kernel and pair of types, through its real launch plan, against float64; quantised rows
   byte for byte against a quantiser of this script. On a GPU plans run twice: launched by Triton, and, with
   ``cuda.core`` and pydantic, through the engine's own launcher. Outputs and workspaces are poisoned
   with NaN, tensors lie between NaN, unused slots of the cache hold NaN (0xFF in a quantised one).
2. Times at DeepSeek-V3's sizes, beside the floor (bytes and FLOP by formula over the device's peaks) and torch's
   ``scaled_dot_product_attention``: LatentAttention with a bf16, an fp8 and an nvfp4 cache, requests of one length and
   of 1 to 131072 keys in one batch; ContextAttention; AppendLatent and GatherLatent; BlockScaledMatMul, beside torch's
   product with the weight in bf16. What is timed is checked too.
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
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import accumulate, chain, product
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Timer
from typing import TYPE_CHECKING, Any, Protocol

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from trtllm_mla._version import __version__
from trtllm_mla.benchmark.machine import Machine
from trtllm_mla.cache_rows import CacheDType, RowLayout
from trtllm_mla.dtypes import FP8_BLOCK_SIZE, DType
from trtllm_mla.engine.kernel_compiler import compile_variant, default_cache_dir, triton_cache
from trtllm_mla.engine.launcher import CudaDriver, Driver, Launcher
from trtllm_mla.errors import UserError
from trtllm_mla.files import write_json
from trtllm_mla.ops import OPS
from trtllm_mla.ops.definition import Attribute, OpDefinition, Problem, split_dim
from trtllm_mla.ops.interpreter import run_plan
from trtllm_mla.ops.latent_attention.plan import default_tile
from trtllm_mla.ops.plan import ITEMSIZES, Argument, KernelVariant, LaunchPlan, ScalarArgument, TensorArgument
from trtllm_mla.roofline.gpus import GPUS, Gpu
from trtllm_mla.targets import TARGETS, Target, get_target

if TYPE_CHECKING:
    from trtllm_mla.config import BackendName, BuildConfig

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
# More than any L2 cache; several times over, work that takes the device longer than the launches take the host.
FLUSH_BYTES, FLUSHES = 512 << 20, 4
MEMORY_SHARE = 0.8  # of the free memory that one problem may take
# Shares of the time limit at which a part has to have ended, and the least time to start something with.
COMPILE_UNTIL, NUMERICS_UNTIL = 0.3, 0.55
TIMES_UNTIL = {"append": 0.58, "gather": 0.61, "decode": 0.78, "context": 0.86, "linear": 0.89}
CASE_SECONDS, ENGINE_SECONDS = 8.0, 30.0
# An outer scale that is no power of two, as calibration finds them.
LATENT_SCALE = 0.37
E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
E4M3_MAX = 448.0
HANG_GRACE_SECONDS = 15.0


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
        part: What is timed, a key of ``TITLES``.
        problem: The problem.
        cache_dtype: The latent cache's type; empty where the operation has none.
        implementation: The implementation.
        ours: Whether it is this package's, so that its error counts.
        tokens: New tokens of the step.
        milliseconds: Median time.
        work: Its least work.
        floor_ms: Time of that work at the device's peaks, or None where they are unknown.
        measures: Comparisons of its result with float64.
    """

    part: str
    problem: str
    cache_dtype: str
    implementation: str
    ours: bool
    tokens: int
    milliseconds: float
    work: Work
    floor_ms: float | None
    measures: tuple[Measure, ...]

    @property
    def passed(self) -> bool:
        """Whether every comparison passed, or none counts."""
        return not self.ours or all(measure.passed for measure in self.measures)

    @property
    def tokens_per_second(self) -> float:
        """New tokens in a second, of this operation of one layer."""
        return self.tokens / (self.milliseconds / 1e3)


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
        doing: What was begun last.
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
    doing: str = ""

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
            value |= {"passed": timing.passed, "tokens_per_second": timing.tokens_per_second}
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


@dataclass(frozen=True)
class ExpertSizes:
    """Sizes of a layer's experts.

    Attributes:
        experts: Experts whose weights are here.
        top_k: Experts that a token chooses.
        hidden_size: Width of a token.
        intermediate_size: Width between an expert's products.
    """

    experts: int
    top_k: int
    hidden_size: int
    intermediate_size: int


DEEPSEEK_EXPERTS = ExpertSizes(16, 8, 7168, 2048)  # one of 16 ranks: all experts would take 22 GB
SMALL_EXPERTS = ExpertSizes(7, 3, 100, 52)
RAGGED_EXPERTS = ExpertSizes(7, 3, 150, 140)  # several blocks of FP8 weights, the last of them cut off
FIRST_EXPERT = 32


@dataclass(frozen=True)
class LinearSizes:
    """Sizes of a linear layer with an FP8 weight.

    Attributes:
        out_features: Rows of the weight.
        in_features: Columns of the weight.
    """

    out_features: int
    in_features: int


# The latent's projection, whose last block of rows is half as high as the others, and that of queries.
DEEPSEEK_LATENT, DEEPSEEK_QUERIES = LinearSizes(576, 7168), LinearSizes(24576, 1536)
SMALL_LINEAR = LinearSizes(200, 1100)  # blocks that are short at both edges
ODD_LINEAR = LinearSizes(67, 1099)  # rows whose addresses are multiples of nothing

# New tokens and cached tokens (the new ones included) of each request.
Requests = tuple[tuple[int, int], ...]
# One token, no token, no key, page edges, several tokens, fewer keys than tokens.
EDGES: Requests = ((1, 1), (0, 0), (1, 0), (1, 15), (1, 16), (1, 17), (3, 64), (7, 100), (4, 2), (0, 40), (2, 333))
FEW_KEYS: Requests = ((1, 16), (3, 9), (1, 0), (2, 1))
RAGGED_DECODE: Requests = ((1, 1), (1, 70), (1, 1000), (1, 0), (1, 333), (1, 4097))
# From one key to 131072 in one batch.
ALL_LENGTHS: Requests = tuple((1, 1 << exponent) for exponent in range(18))
CONTEXT_EDGES: Requests = ((17, 17), (0, 9), (0, 0), (1, 70), (1, 1), (33, 101), (16, 16), (20, 3))
LONG_CONTEXT: Requests = ((261, 300), (3, 3), (130, 130), (1, 1025))
# Whose older keys a first pass takes all, half, or none of; see ``older_keys``.
TWO_PASSES: Requests = ((5, 60), (33, 101), (4, 20), (0, 9), (3, 70), (17, 17), (1, 40), (20, 3))


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
        wild: Whether slots, expert ids and entries of the page table that may be anything are.
        latent_scale: The layer's outer scale of a quantised cache.
        causal: Whether ContextAttention masks.
        two_passes: Whether ContextAttention runs twice, over a request's older keys without a mask and over the rest,
            and the results are merged by their log-sum-exp.
        experts: Sizes of the layer's experts.
        linear: Sizes of the layer's product with an FP8 weight.
    """

    name: str
    op: str
    sizes: Sizes
    requests: Requests
    model_dtype: DType = DType.BFLOAT16
    cache_dtype: CacheDType = CacheDType.BF16
    interleave: bool = True
    multiprocessors: int | None = None
    wild: bool = True
    latent_scale: float = 1.0
    causal: bool = True
    two_passes: bool = False
    experts: ExpertSizes = SMALL_EXPERTS
    linear: LinearSizes = SMALL_LINEAR

    @property
    def definition(self) -> OpDefinition:
        """The operation."""
        return OPS[self.op]

    @property
    def layout(self) -> RowLayout:
        """A row of the latent cache."""
        return self.cache_dtype.layout(self.sizes.kv_lora_rank, self.sizes.rope_dim)

    def dims(self) -> dict[str, int]:
        """Size of every dimension that the operations' contracts name."""
        sizes = self.sizes
        used = [-(-length // sizes.page_size) for _, length in self.requests]
        return {
            **asdict(sizes),
            **asdict(self.experts),
            "gate_up_size": 2 * self.experts.intermediate_size,
            "hidden_blocks": -(-self.experts.hidden_size // FP8_BLOCK_SIZE),
            "intermediate_blocks": -(-self.experts.intermediate_size // FP8_BLOCK_SIZE),
            "gate_up_blocks": 2 * -(-self.experts.intermediate_size // FP8_BLOCK_SIZE),
            **asdict(self.linear),
            "scale_rows": -(-self.linear.out_features // FP8_BLOCK_SIZE),
            "scale_columns": -(-self.linear.in_features // FP8_BLOCK_SIZE),
            "rows": sum(count for count, _ in self.requests),
            "width": self.layout.width,
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
            "latent_scale": self.latent_scale,
            "causal": int(self.causal),
            "kv_lora_rank": self.sizes.kv_lora_rank,
            "rope_dim": self.sizes.rope_dim,
            "first_expert": FIRST_EXPERT,
        }
        return {name: values[name] for name in self.definition.attributes}

    def problem(self, device: Target) -> Problem:
        """What the plan on a device is computed from."""
        dims = self.dims()
        if self.multiprocessors is not None:
            device = replace(device, multiprocessors=self.multiprocessors)
        tile = (64, 2)
        if self.op == "LatentAttention":  # the others have tiles of their own
            tile = default_tile(
                kv_lora_rank=dims["kv_lora_rank"],
                rope_dim=dims["rope_dim"],
                model_dtype=self.model_dtype,
                cache_dtype=self.cache_dtype,
                target=device,
            )
        return Problem(dims, self.attributes(), self.model_dtype, self.cache_dtype, device, *tile)

    def plan(self, device: Target) -> LaunchPlan:
        """The launch plan on a device.

        Raises:
            UserError: The device cannot run it.
        """
        return self.definition.plan(self.problem(device))

    def torch_dtype(self, element_type: str) -> torch.dtype:
        """Type of a tensor of the contract."""
        names = {"model": self.model_dtype.value, "cache": self.cache_dtype.storage}
        dtype: torch.dtype = getattr(torch, names.get(element_type, element_type))
        return dtype


def numeric_cases(*, dry_run: bool) -> list[Case]:
    """Every operation and pair of types; the most important first."""
    pairs = sorted(product(DType, CacheDType), key=_importance)
    cases = []
    for index, (model, cached) in enumerate(pairs):
        for sizes, name in ((DEEPSEEK, "DeepSeek-V3 sizes"), (SMALL, "no powers of two"), (WIDE_HEADS, "wide heads")):
            if sizes is not SMALL and _is_mixed(model, cached):
                continue
            if sizes is WIDE_HEADS and cached.is_quantized and model is not DType.BFLOAT16:
                continue
            if dry_run and (sizes is WIDE_HEADS or (sizes is DEEPSEEK and model is not DType.BFLOAT16)):
                continue
            scale = LATENT_SCALE if cached.is_quantized and sizes is SMALL else 1.0
            append = Case(
                name, "AppendLatent", sizes, EDGES, model, cached, interleave=index % 2 == 0, latent_scale=scale
            )
            cases += [append, replace(append, op="GatherLatent")]
            if not (dry_run or _is_mixed(model, cached)):
                cases.append(replace(append, interleave=not append.interleave))
            cases += small_attention_cases(append) if dry_run else attention_cases(append)
            if cached.element is model and (sizes is SMALL or (sizes is DEEPSEEK and not dry_run)):
                cases += expert_cases(append, dry_run=dry_run)
                cases += linear_cases(append, dry_run=dry_run)
    return cases


def _is_mixed(model: DType, cached: CacheDType) -> bool:
    """Whether rows hold values of another type than the network's."""
    return cached.element not in (None, model)


def _importance(pair: tuple[DType, CacheDType]) -> tuple[bool, bool, bool]:
    model, cached = pair
    return _is_mixed(model, cached), model is not DType.BFLOAT16, cached.is_quantized


def expert_cases(base: Case, *, dry_run: bool) -> list[Case]:
    """Routed experts with every tile, and with so few tokens that most experts have none."""
    return [
        replace(
            base,
            name=f"{base.name}, {count} tokens",
            op=op,
            requests=((count, count),),
            experts=DEEPSEEK_EXPERTS if base.sizes is DEEPSEEK else small,
        )
        for op, small in (("RoutedExperts", SMALL_EXPERTS), ("BlockScaledRoutedExperts", RAGGED_EXPERTS))
        for count in ((2, 60) if dry_run else (1, 2, 30, 120, 700))
    ]


def linear_cases(base: Case, *, dry_run: bool) -> list[Case]:
    """BlockScaledMatMul with every tile, whole and split among programs, and with blocks that are cut off."""
    linear = replace(base, op="BlockScaledMatMul")
    if base.sizes is DEEPSEEK:
        counts = [
            replace(
                linear, name=f"{base.name}, {count} rows, latent", linear=DEEPSEEK_LATENT, requests=((count, count),)
            )
            for count in (1, 30, 120, 700)
        ]
        queries = replace(linear, name=f"{base.name}, 20 rows, queries", linear=DEEPSEEK_QUERIES, requests=((20, 20),))
        return [*counts, *(on_a_small_device(case) for case in counts), queries]
    few, odd = (
        replace(linear, name=f"{base.name}, {count} rows", linear=sizes, requests=((count, count),))
        for count, sizes in ((3, SMALL_LINEAR), (5, ODD_LINEAR))
    )
    many = replace(few, name=f"{base.name}, 70 rows", requests=((70, 70),))
    most = replace(few, name=f"{base.name}, 150 rows", requests=((150, 150),))
    if dry_run:
        return [few, odd, on_a_small_device(many), most]
    return [case for whole in (few, odd, many, most) for case in (whole, on_a_small_device(whole))]


def on_a_small_device(case: Case) -> Case:
    """The same as planned for one multiprocessor, which leaves no work to divide."""
    return replace(case, name=f"{case.name}, small device", multiprocessors=1)


def small_attention_cases(base: Case) -> list[Case]:
    """What the interpreter can do in seconds: each kernel, at the sizes and types of ``base``."""
    latent, context = replace(base, op="LatentAttention"), replace(base, op="ContextAttention")
    own_type = base.cache_dtype.element is base.model_dtype
    if base.sizes is DEEPSEEK:
        attention = [replace(latent, sizes=replace(DEEPSEEK, heads=8), requests=((1, 70), (1, 0), (2, 129)))]
        if own_type:
            attention.append(replace(context, sizes=replace(DEEPSEEK, heads=2), requests=((20, 83), (1, 40))))
        return attention
    if not own_type:
        pieces = replace(latent, requests=((1, 40), (2, 200)), multiprocessors=1)
        return [pieces] if _is_mixed(base.model_dtype, base.cache_dtype) else [pieces, keys_whole(latent)]
    # The interpreter takes as long for a program without work as for one with.
    split, small, whole = keys_split_and_whole(latent)
    causal, _, merged = context_cases(replace(context, requests=CONTEXT_EDGES))
    return [replace(split, multiprocessors=24), small, whole, causal, merged]


def attention_cases(base: Case) -> list[Case]:
    """LatentAttention with every row block, keys whole and split; ContextAttention with short and long requests."""
    latent, context = replace(base, op="LatentAttention"), replace(base, op="ContextAttention")
    model, cached = base.model_dtype, base.cache_dtype
    if _is_mixed(model, cached):
        return keys_split_and_whole(latent)[:1]
    cases = keys_split_and_whole(latent)
    if cached.element is model:
        cases += context_cases(replace(context, requests=CONTEXT_EDGES))
        cases.append(replace(context, name=f"{base.name}, row blocks", requests=LONG_CONTEXT))
    if base.sizes is not DEEPSEEK:
        return cases
    # Row blocks of 16 rows of a 16-bit type up to 16 heads, of 32 up to 32, and of 64; of fp32 4, 8 and 16.
    heads_of_bf16, heads_of_others = (128, 16, 8, 24, 48, 64, 12, 20, 40, 96), (128, 16, 20, 5, 2)
    for heads in heads_of_bf16 if model is DType.BFLOAT16 else heads_of_others[: 2 if cached.is_quantized else None]:
        name, sizes = f"{base.name}, {heads} heads", replace(DEEPSEEK, heads=heads)
        ragged = replace(latent, name=f"{name}, ragged", sizes=sizes, requests=RAGGED_DECODE)
        cases.append(ragged)
        if heads in (128, 16, 5):
            cases.append(replace(ragged, name=f"{name}, ragged, small device", multiprocessors=1))
        if model is DType.BFLOAT16 and heads in (128, 16):
            cases.append(replace(ragged, name=f"{name}, 1 to 131072 keys", requests=ALL_LENGTHS))
    return cases


def planned(cases: Sequence[Case], device: Target, skip: Callable[[str, object], None]) -> list[Case]:
    """The cases that a device can run; the others are skipped with what their plan says."""
    possible = []
    for case in cases:
        try:
            case.plan(device)
        except UserError as error:
            skip(f"{case.op}, {case.name}, {case.model_dtype}/{case.cache_dtype}", error)
        else:
            possible.append(case)
    return possible


def context_cases(context: Case) -> list[Case]:
    """ContextAttention with and without a mask, and both of them over a request's keys in turn."""
    return [
        context,
        replace(context, name=f"{context.name}, no mask", causal=False),
        replace(context, name=f"{context.name}, two passes merged", requests=TWO_PASSES, two_passes=True),
    ]


def keys_split_and_whole(latent: Case) -> list[Case]:
    """LatentAttention with the plans of a large and of a tiny device, and with a page table too short to split."""
    return [
        replace(latent, name=f"{latent.name}, keys split", multiprocessors=1000),
        replace(latent, name=f"{latent.name}, small device", multiprocessors=1),
        keys_whole(latent),
    ]


def keys_whole(latent: Case) -> Case:
    """LatentAttention with a page table too short to split."""
    sizes = replace(latent.sizes, page_size=16)
    return replace(latent, name=f"{latent.name}, keys whole", sizes=sizes, requests=FEW_KEYS, wild=False)


# ------------------------------------------------------------------------------------------------------------ inputs


# Weights and scales of products, and the dimension that these sum over.
SUMMED_DIMS = {
    "gate_up_proj": "hidden_size",
    "gate_up_scale": "hidden_size",
    "down_proj": "intermediate_size",
    "down_scale": "intermediate_size",
    "scale": "in_features",
}


def make_inputs(case: Case, device: torch.device, generator: torch.Generator) -> Tensors:
    """Random inputs of a case, as its operation's contract lists them.

    Pages are dealt in random order. Slots without a token are poisoned, and so are experts that no token chose.
    Entries of the page table behind a request's last page, some slots, and some experts lie outside where the case is
    wild.
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
        tensor = torch.empty(shape, dtype=dtype, device=device)
        if contract.name in ("weight", "gate_up_proj", "down_proj") and dtype is torch.int8:
            fill_with_weights(tensor)
        elif dtype is torch.int8:
            fill_with_codes(tensor.view(-1, shape[2]), case.layout)
        else:
            tensor.normal_()
        if contract.name == "past_latent":
            tensor.fill_(poison_of(dtype))
        elif contract.name == "latent_cache":
            unused = torch.ones(shape[0] * shape[1], dtype=torch.bool, device=device)
            unused[integers["cached_slots"].long().to(device)] = False
            tensor.view(-1, shape[2])[unused] = poison_of(dtype)
        elif contract.name == "latent" and case.cache_dtype.is_quantized:
            make_hard_to_quantize(tensor)
        elif contract.name == "rotary_cos_sin":
            angles = torch.rand(shape[0], shape[1] // 2, generator=generator) * 2 * math.pi
            tensor.copy_(torch.cat([angles.cos(), angles.sin()], dim=-1))
        elif contract.name in SUMMED_DIMS:
            width = dims[SUMMED_DIMS[contract.name]]
            if contract.name.endswith("scale"):
                # Random codes are about 130 large. Neighbouring blocks differ by up to 64 times.
                tensor.uniform_(-3, 3).exp2_().mul_(width**-0.5 / 130)
            elif dtype is not torch.int8:
                tensor.mul_(width**-0.5)
            if contract.dims[0] == "experts":
                chosen = set((integers["expert_ids"] - FIRST_EXPERT).flatten().tolist())
                unchosen = [expert for expert in range(shape[0]) if expert not in chosen]
                tensor[unchosen] = 0x7F if dtype is torch.int8 else math.nan
        elif contract.name == "x" and case.wild:
            tensor[1::4] = math.nan
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
    preference = torch.rand(dims["tokens"], dims["experts"], generator=generator)
    chosen = preference.topk(min(dims["top_k"], dims["experts"])).indices + FIRST_EXPERT
    if case.wild:
        chosen.view(-1)[5::7], chosen.view(-1)[9::11] = FIRST_EXPERT - 1, BEYOND_EVERY_POOL
    values = {
        "cached_slots": cached,
        "kv_slots": gathered,
        "slot_mapping": appended,
        "position_ids": torch.cat(positions),
        "expert_ids": chosen,
        "block_offsets": table,
        "sequence_length": torch.tensor([length for _, length in case.requests]),
        "query_offsets": torch.tensor([0, *accumulate(count for count, _ in case.requests)]),
        "key_offsets": torch.tensor([0, *accumulate(length for _, length in case.requests)]),
        # The kernels take only the shapes of these.
        "query_index": torch.full((dims["requests"], dims["longest_query"]), -1),
        "key_index": torch.full((dims["requests"], dims["longest_key"]), -1),
    }
    return {name: value.to(torch.int32) for name, value in values.items()}


def fill_with_codes(rows: Tensor, layout: RowLayout) -> None:
    """Fills quantised rows [n, row_bytes] with every code, scales around those of values near 1, and rotary keys."""
    count, device = len(rows), rows.device
    rows.zero_()
    codes = rows[:, : layout.code_bytes]
    codes.random_(-128, 127)
    scales = rows[:, layout.scale_offset :]
    if layout.dtype is CacheDType.FP8:
        codes.masked_fill_(codes == -1, 0)  # 0xFF is E4M3's negative NaN; 0x7F was not drawn
        exponents = torch.randint(-9, -6, (count, layout.num_scales), device=device)
        scales[:, : 4 * layout.num_scales] = exponents.float().exp2().view(torch.int8)
    else:
        scales[:, : layout.num_scales].random_(1, 0x30)  # up to 0.47, numbers below E4M3's normal ones included
    k_pe = torch.empty(count, layout.rope_dim, dtype=torch.bfloat16, device=device).normal_()
    rows[:, layout.rope_offset :][:, : 2 * layout.rope_dim] = k_pe.view(torch.int8)


def fill_with_weights(weight: Tensor) -> None:
    """Fills a weight with every E4M3 number."""
    weight.random_(-128, 127)
    weight.masked_fill_(weight == -1, 0)  # 0xFF is the negative NaN; 0x7F was not drawn


def make_hard_to_quantize(latent: Tensor) -> None:
    """Gives rows all magnitudes, zeros, values halfway between two codes, infinities and NaN."""
    latent *= torch.randint(-9, 5, (len(latent), 1), device=latent.device).float().exp2().to(latent.dtype)
    latent[1::5] = 0.0
    # With a largest value of 6, NVFP4's scale is 1.
    latent[5::6] = ((latent[5::6] * 64).clamp(-20, 20) / 4).round().clamp(-23, 23) / 4
    latent[5::6, ::16] = 6.0
    latent[2::7, 3] = -math.inf
    latent[4::9, -1] = math.nan


def poison_of(dtype: torch.dtype) -> float:
    """NaN, or the byte 0xFF, which is NaN as a scale and as a rotary key of a quantised row."""
    return math.nan if dtype.is_floating_point else -1


def is_poison(tensor: Tensor) -> Tensor:
    """Which elements are ``poison_of`` their type."""
    return tensor.isnan() if tensor.is_floating_point() else tensor == -1


def resolve_shape(dims: Sequence[str | int], sizes: dict[str, int]) -> tuple[int, ...]:
    """Shape of a contract's dimensions."""
    parts = [split_dim(dim) for dim in dims]
    return tuple(offset if name is None else sizes[name] + offset for name, offset in parts)


class Guarded:
    """A copy of a tensor of floating-point numbers or bytes inside a larger allocation whose margins are poisoned."""

    def __init__(self, tensor: Tensor) -> None:
        size, poison = tensor.numel(), poison_of(tensor.dtype)
        self._memory = torch.full((size + 2 * MARGIN,), poison, dtype=tensor.dtype, device=tensor.device)
        self.tensor = self._memory[MARGIN : MARGIN + size].view(tensor.shape)
        self.tensor.copy_(tensor)

    def overwritten(self) -> int:
        """Elements of the margins that are poisoned no longer."""
        end = MARGIN + self.tensor.numel()
        return int((~is_poison(self._memory[:MARGIN])).sum() + (~is_poison(self._memory[end:])).sum())


# -------------------------------------------------------------------------------------------------------- references


def relative_error(found: Tensor, expected: Tensor) -> float:
    """Norm of the difference over the norm of ``expected``; NaN where ``found`` holds one."""
    return float((found.double() - expected).norm() / expected.norm().clamp(min=1e-300))


def differing(found: Tensor, expected: Tensor) -> float:
    """How many elements are not the same; NaN is the same as NaN."""
    return float(((found != expected) & ~(found.isnan() & expected.isnan())).sum())


def rotate(
    x: Tensor, position_ids: Tensor, rotary_cos_sin: Tensor, *, interleave: bool, dtype: torch.dtype = torch.float64
) -> Tensor:
    """Rotates pairs of ``x`` [tokens, ..., rope] in ``dtype``: pair i is (2i, 2i + 1) or (i, i + rope / 2).

    Products and sums are rounded one by one.
    """
    half = x.shape[-1] // 2
    angles = rotary_cos_sin.to(dtype)[position_ids.long()].view(len(x), *([1] * (x.dim() - 2)), 2 * half)
    cos, sin = angles[..., :half], angles[..., half:]
    pairs = x.to(dtype).unflatten(-1, (half, 2) if interleave else (2, half))
    axis = -1 if interleave else -2
    a, b = pairs.unbind(axis)
    return torch.stack([a * cos - b * sin, b * cos + a * sin], dim=axis).flatten(-2)


def measure_append(case: Case, inputs: Tensors, outputs: Tensors) -> list[Measure]:
    """Rows are the input's nearest values, quantised ones byte for byte; rotated parts within the tolerance.

    A quantised row's rotary key is rotated in fp32 and rounded once, so that its bytes are known too.
    """
    rank, rows = case.sizes.kv_lora_rank, outputs["present_latent"].flatten(0, 1)
    slots = inputs["slot_mapping"].long()
    kept = (slots >= 0) & (slots < len(rows))
    written = torch.zeros(len(rows), dtype=torch.bool, device=rows.device)
    written[slots[kept]] = True

    def rotated(name: str, dtype: torch.dtype = torch.float64) -> Tensor:
        angles = (inputs["position_ids"], inputs["rotary_cos_sin"])
        return rotate(inputs[name], *angles, interleave=case.interleave, dtype=dtype)

    found, latent = rows[slots[kept]], inputs["latent"][kept].float()
    measures = [
        Measure("q_pe", relative_error(outputs["rotated_q_pe"], rotated("q_pe")), TOLERANCE[case.model_dtype]),
        Measure("unused slots written", float((~is_poison(rows[~written])).sum()), 0),
    ]
    element = case.cache_dtype.element
    if element is None:
        k_pe = rotated("k_pe", torch.float32)[kept]
        expected = quantize(divide(latent, case.latent_scale), k_pe, case.layout)
        return [Measure("bytes that differ", differing(found, expected), 0), *measures]
    return [
        Measure("latents that differ", differing(found[:, :rank], latent.to(rows.dtype)), 0),
        Measure("k_pe", relative_error(found[:, rank:], rotated("k_pe")[kept]), TOLERANCE[element]),
        *measures,
    ]


def measure_gather(case: Case, inputs: Tensors, outputs: Tensors) -> list[Measure]:
    """Rows are the cache's nearest values; slots outside the pool give zeros."""
    rank, slots = case.sizes.kv_lora_rank, inputs["kv_slots"].long()
    rows = inputs["latent_cache"].flatten(0, 1)
    inside = (slots >= 0) & (slots < len(rows))
    dtype = outputs["latent"].dtype
    values = cached_values(rows[slots[inside]], case.layout).float()
    values[:, :rank] *= case.latent_scale
    expected = torch.zeros(len(slots), values.shape[1], dtype=dtype, device=rows.device)
    expected[inside] = values.to(dtype)
    return [
        Measure("latents that differ", differing(outputs["latent"], expected[:, :rank]), 0),
        Measure("k_pe that differ", differing(outputs["k_pe"], expected[:, rank:]), 0),
    ]


def divide(tensor: Tensor, divisor: float) -> Tensor:
    """The quotient, rounded once; torch would multiply a tensor on a GPU by the reciprocal of a number."""
    return tensor / torch.full_like(tensor, divisor)


def quantize(latent: Tensor, k_pe: Tensor, layout: RowLayout) -> Tensor:
    """Bytes of quantised rows, as ``trtllm_mla.ops.row_codec`` states them.

    Args:
        latent: fp32 [n, kv_lora_rank], divided by the outer scale.
        k_pe: fp32 [n, rope_dim], rotated.
        layout: The cache's row.

    Returns:
        int8 [n, row_bytes].
    """
    blocks = latent.new_zeros(len(latent), layout.num_scales * layout.block_size)
    blocks[:, : layout.kv_lora_rank] = latent
    blocks = blocks.unflatten(1, (layout.num_scales, layout.block_size))
    finite = blocks.isfinite().all(-1)
    # Nor has a negative zero a sign.
    blocks = blocks.where(finite[..., None] & (blocks != 0), 0.0)
    codes, scales = (quantize_fp8 if layout.dtype is CacheDType.FP8 else quantize_nvfp4)(blocks, finite)
    rows = torch.zeros(len(latent), layout.row_bytes, dtype=torch.int8, device=latent.device)
    rows[:, : layout.code_bytes] = codes.flatten(1)[:, : layout.code_bytes].view(torch.int8)
    scale_bytes = scales.view(torch.int8)
    rows[:, layout.scale_offset :][:, : scale_bytes.shape[1]] = scale_bytes
    rows[:, layout.rope_offset :][:, : 2 * layout.rope_dim] = k_pe.to(torch.bfloat16).view(torch.int8)
    return rows


def quantize_fp8(blocks_NSB: Tensor, finite_NS: Tensor) -> tuple[Tensor, Tensor]:
    """E4M3 codes uint8 [N, S, B] and fp32 scales [N, S], the least powers of two from 2^-64 to 2^7 that suffice."""
    exponents = torch.arange(-64, 8, device=blocks_NSB.device)
    amax_NS = blocks_NSB.abs().amax(-1).double()
    index_NS = torch.searchsorted(E4M3_MAX * exponents.double().exp2(), amax_NS).clamp(max=len(exponents) - 1)
    scale_NS = exponents[index_NS].double().exp2()
    values_NSB = (blocks_NSB.double() / scale_NS[..., None]).clamp(-E4M3_MAX, E4M3_MAX)
    codes_NSB = values_NSB.float().to(torch.float8_e4m3fn).view(torch.uint8)
    return codes_NSB, scale_NS.float().where(finite_NS, math.nan)


def quantize_nvfp4(blocks_NSB: Tensor, finite_NS: Tensor) -> tuple[Tensor, Tensor]:
    """Pairs of E2M1 codes uint8 [N, S, B / 2] and E4M3 scales uint8 [N, S]: the better of amax / 6 and amax / 4."""
    magnitudes_NSB = blocks_NSB.abs()
    amax_NS = magnitudes_NSB.amax(-1)
    candidates = []
    for divisor in (6.0, 4.0):
        scale_NS = divide(amax_NS, divisor).clamp(max=E4M3_MAX).to(torch.float8_e4m3fn)
        factor_NS1 = scale_NS.float()[..., None]
        quotients = (magnitudes_NSB.double() / factor_NS1.double()).where(factor_NS1 > 0, 0.0).clamp(max=6.0)
        # Steps between E2M1 numbers; an even multiple of a step has an even code.
        steps = 0.5 * (1 + (quotients >= 2).double() + 2 * (quotients >= 4).double())
        values_NSB = ((quotients / steps).round() * steps).float()
        errors = (values_NSB * factor_NS1 - magnitudes_NSB).square()
        while errors.shape[-1] > 1:
            lower, upper = errors.tensor_split(2, dim=-1)
            errors = lower + upper
        candidates.append((values_NSB, scale_NS.view(torch.uint8), errors[..., 0]))
    (values_6, scale_6, error_6), (values_4, scale_4, error_4) = candidates
    finer_NS = error_4 < error_6
    table = torch.tensor(E2M1_VALUES, device=blocks_NSB.device)
    codes_NSB = torch.searchsorted(table, values_4.where(finer_NS[..., None], values_6)) + 8 * (blocks_NSB < 0)
    pairs = codes_NSB[..., 0::2] + 16 * codes_NSB[..., 1::2]
    return pairs.to(torch.uint8), scale_4.where(finer_NS, scale_6).masked_fill(~finite_NS, 0x7F)


def cached_values(rows: Tensor, layout: RowLayout) -> Tensor:
    """Values [n, kv_lora_rank + rope_dim] of pool rows, before the outer scale; of quantised ones float64."""
    if not layout.dtype.is_quantized:
        return rows
    rows = rows.contiguous()
    codes = rows[:, : layout.code_bytes].contiguous().view(torch.uint8)
    scale_bytes = rows[:, layout.scale_offset : layout.rope_offset].contiguous()
    if layout.dtype is CacheDType.FP8:
        values = codes.view(torch.float8_e4m3fn).float().double()
        scales = scale_bytes.view(torch.float32)[:, : layout.num_scales]
    else:
        table = torch.tensor([*E2M1_VALUES, *(-value for value in E2M1_VALUES)], device=rows.device)
        values = table[torch.stack([codes & 15, codes >> 4], dim=-1).flatten(1).long()].double()
        scales = scale_bytes.view(torch.float8_e4m3fn)[:, : layout.num_scales]
    factors = scales.float().double().repeat_interleave(layout.block_size, dim=1)[:, : layout.kv_lora_rank]
    k_pe = rows[:, layout.rope_offset :][:, : 2 * layout.rope_dim].contiguous().view(torch.bfloat16)
    return torch.cat([values[:, : layout.kv_lora_rank] * factors, k_pe.double()], dim=1)


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
        k_SK = cached_values(inputs["latent_cache"][pages].flatten(0, 1)[:length], case.layout)
        tokens = slice(end - rows, end)
        # A quantised cache's outer scale is on the query, rounded to the network's type, and on the output.
        q_latent = (inputs["q_latent"][tokens].float() * case.latent_scale).to(inputs["q_latent"].dtype)
        q_RK = torch.cat([q_latent, inputs["q_pe"][tokens]], dim=-1).flatten(0, 1)
        k_SK = k_SK.to(q_RK.dtype)
        visible = (torch.arange(length - rows + 1, length + 1, device=q_RK.device)).repeat_interleave(heads)
        output, log_sum_exp = attend(q_RK[None], k_SK[None], k_SK[None, :, :rank], visible, SOFTMAX_SCALE)
        output = output.view(rows, heads, rank) * case.latent_scale
        yield Expected(tokens, output, log_sum_exp.view(rows, heads))


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
        if not case.causal:
            visible = torch.full_like(visible, length)
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


def measure_experts(case: Case, inputs: Tensors, outputs: Tensors) -> list[Measure]:
    """The output within the tolerance; tokens without an expert give zeros."""
    hidden, ids = inputs["hidden"], inputs["expert_ids"].long() - FIRST_EXPERT
    expected = torch.zeros(hidden.shape, dtype=torch.float64, device=hidden.device)
    for expert in range(case.experts.experts):
        tokens, choices = (ids == expert).nonzero(as_tuple=True)
        if len(tokens):
            gate_proj, up_proj, down_proj = expert_projections(inputs, expert)
            gate, up = (hidden[tokens].double() @ projection.T for projection in (gate_proj, up_proj))
            result = (gate * gate.sigmoid() * up) @ down_proj.T
            expected.index_add_(0, tokens, result * inputs["expert_weights"][tokens, choices, None].double())
    idle = ((ids < 0) | (ids >= case.experts.experts)).all(dim=1)
    return [
        Measure("output", relative_error(outputs["output"], expected), TOLERANCE[case.model_dtype]),
        Measure("rows wrongly not zero", float((outputs["output"][idle] != 0).sum()), 0),
    ]


def expert_projections(inputs: Tensors, expert: int) -> tuple[Tensor, Tensor, Tensor]:
    """Gate, up and down projection of an expert, in float64."""
    parts = (*inputs["gate_up_proj"][expert].chunk(2), inputs["down_proj"][expert])
    if "down_scale" in inputs:
        scales = (*inputs["gate_up_scale"][expert].chunk(2), inputs["down_scale"][expert])
        parts = tuple(map(dequantized, parts, scales))
    gate, up, down = (part.double() for part in parts)
    return gate, up, down


def dequantized_weight(inputs: Tensors) -> Tensor:
    """What BlockScaledMatMul's weight and scales stand for, in float64."""
    return dequantized(inputs["weight"], inputs["scale"])


def dequantized(weight: Tensor, scale: Tensor) -> Tensor:
    """What FP8 weights [rows, columns] and their blocks' scales stand for, in float64."""
    scale = scale.double()
    for axis, size in enumerate(weight.shape):
        scale = scale.repeat_interleave(FP8_BLOCK_SIZE, axis).narrow(axis, 0, size)
    return weight.view(torch.float8_e4m3fn).double() * scale


def measure_linear(case: Case, inputs: Tensors, outputs: Tensors) -> list[Measure]:
    """The output within the tolerance; rows of NaN give NaN, and change no other."""
    x, output = inputs["x"].double(), outputs["output"]
    expected = x @ dequantized_weight(inputs).T
    poisoned = x.isnan().any(dim=1)
    return [
        Measure("output", relative_error(output[~poisoned], expected[~poisoned]), TOLERANCE[case.model_dtype]),
        Measure("elements that lost a NaN", float((~output[poisoned].isnan()).sum()), 0),
    ]


def measure(case: Case, inputs: Tensors, outputs: Tensors) -> list[Measure]:
    """Compares an operation's outputs with float64."""
    if case.op == "AppendLatent":
        return measure_append(case, inputs, outputs)
    if case.op == "GatherLatent":
        return measure_gather(case, inputs, outputs)
    if case.op in ("RoutedExperts", "BlockScaledRoutedExperts"):
        return measure_experts(case, inputs, outputs)
    if case.op == "BlockScaledMatMul":
        return measure_linear(case, inputs, outputs)
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


class TritonRunner:
    """The same machine code, loaded and launched by Triton, on GPU tensors.

    Args:
        target: The GPU.
    """

    name = "Triton"

    def __init__(self, target: Target) -> None:
        self._target = target
        self._kernels: dict[KernelVariant, Any] = {}

    def prepare(self, plan: LaunchPlan, tensors: Tensors) -> Call:
        """See ``Runner.prepare``."""
        workspace = poisoned_workspace(plan, next(iter(tensors.values())).device)
        launches = []
        for launch in plan.launches:
            variant = launch.variant
            if variant not in self._kernels:
                with triton_cache(default_cache_dir()):
                    self._kernels[variant] = compile_variant(variant, self._target)
            constants = [*(value for _, value in variant.constants), False]
            arguments = [triton_argument(argument, tensors, workspace) for argument in launch.arguments]
            launches.append((self._kernels[variant][launch.grid], [*arguments, *constants]))

        def call() -> None:
            for kernel, arguments in launches:
                kernel(*arguments)

        return call


def triton_argument(argument: Argument, tensors: Tensors, workspace: Tensor) -> Tensor | int | float:
    """What a launch passes, as Triton takes it."""
    if isinstance(argument, ScalarArgument):
        return argument.value
    if isinstance(argument, TensorArgument):
        return tensors[argument.name]
    dtype = {"fp32": torch.float32, "i32": torch.int32, "bf16": torch.bfloat16, "fp16": torch.float16}[argument.dtype]
    return workspace[argument.offset : argument.offset + argument.elements * ITEMSIZES[argument.dtype]].view(dtype)


class CubinRunner:
    """Ahead-of-time cubins, loaded and launched as an engine's plugins do; needs pydantic.

    Args:
        driver: The GPU.
        directory: Where kernels are written.
    """

    name = "cubins through cuda.core"

    def __init__(self, driver: Driver, directory: Path) -> None:
        self._driver, self._directory, self._count = driver, directory, 0

    def prepare(self, plan: LaunchPlan, tensors: Tensors) -> Call:
        """See ``Runner.prepare``."""
        from trtllm_mla.engine.kernel_compiler import compile_kernels

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
    """Compiles a kernel into the cache, where all runners find it."""
    with triton_cache(default_cache_dir()):
        compile_variant(*job)


def compile_in_parallel(cases: Sequence[Case], target: Target, budget: Budget) -> str:
    """Fills the cache of compiled kernels on all cores; the runners read it. Returns what was done, in words."""
    variants = {launch.variant: None for case in cases for launch in case.plan(target).launches}
    workers = max(1, min(len(variants), len(os.sched_getaffinity(0))))
    pool = ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn"))
    futures = [pool.submit(compile_one, (variant, target)) for variant in variants]
    done, _ = wait(futures, timeout=max(budget.left(COMPILE_UNTIL), 0))
    # What could not be compiled is tried again, and reported, where it is needed.
    pool.shutdown(wait=False, cancel_futures=True)
    failed = sum(future.exception() is not None for future in done)
    return (
        f"{len(done) - failed} of {len(variants)} kernels compiled on {workers} cores by second {budget.used():.0f}, "
        f"{failed} failed"
    )


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

    def works(self) -> bool:
        """Whether the device still takes work: after an invalid access of memory, for one, no call succeeds."""
        try:
            self.synchronize()
        except RuntimeError:
            return False
        return True

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
            for _ in range(FLUSHES):
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
        (TritonRunner.name, lambda: TritonRunner(target)),
        (CubinRunner.name, lambda: CubinRunner(CudaDriver(), directory)),
    )
    runners, reasons = [], []
    for label, make in makers:
        try:
            runner = make()
            check_case(Case("probe", "GatherLatent", SMALL, ((1, 20),)), runner, environment)
        except Exception as error:  # Whatever keeps a runner from working, the other may work.
            report_skip(label, error)
            reasons.append(f"{label}: {type(error).__name__}: {error}")
        else:
            runners.append(runner)
    if not runners:
        raise UserError(f"Kernels cannot be launched. {'; '.join(reasons)}")
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


def run_case(case: Case, inputs: Tensors, runner: Runner, environment: Environment) -> tuple[Tensors, int]:
    """Runs a case between guards; ``inputs`` stay as they are.

    Returns:
        Its outputs, and how many elements outside of them were written.
    """
    definition, dims = case.definition, case.dims()
    guards = {name: Guarded(value) for name, value in inputs.items() if value.dtype is not torch.int32}
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
    outputs = {output.name: tensors[output.name] for output in definition.outputs}
    return outputs, sum(guard.overwritten() for guard in guards.values())


def run_two_passes(case: Case, inputs: Tensors, runner: Runner, environment: Environment) -> tuple[Tensors, int]:
    """ContextAttention as a long history takes it: the older keys without a mask, the rest causally, then a merge.

    The first pass has no key of some requests, so that an empty pass is merged too. Returns what ``run_case`` does.
    """
    older = older_keys(case.requests)
    lengths = [length for _, length in case.requests]
    key_ends = list(accumulate(lengths))
    passes: list[Tensors] = []
    overwritten = 0
    for causal, begins, counts in (
        (False, [0] * len(older), older),
        (True, older, [length - count for length, count in zip(lengths, older, strict=True)]),
    ):
        part = replace(
            case,
            two_passes=False,
            causal=causal,
            requests=tuple((queries, count) for (queries, _), count in zip(case.requests, counts, strict=True)),
        )
        rows = [
            torch.arange(end - length + begin, end - length + begin + count, device=environment.device)
            for end, length, begin, count in zip(key_ends, lengths, begins, counts, strict=True)
        ]
        keys = torch.cat(rows)
        integers = make_integers(part, part.dims(), environment.generator)
        part_inputs = {**inputs, **{name: inputs[name][keys] for name in ("k_nope", "k_pe", "v")}}
        part_inputs |= {name: integers[name].to(environment.device) for name in ("key_offsets", "key_index")}
        outputs, outside = run_case(part, part_inputs, runner, environment)
        passes.append(outputs)
        overwritten += outside
    log_sum_exp = torch.logaddexp(passes[0]["log_sum_exp"].double(), passes[1]["log_sum_exp"].double())
    shift = log_sum_exp.masked_fill(log_sum_exp.isneginf(), 0.0)
    weighted = [one["output"].double() * (one["log_sum_exp"].double() - shift).exp()[..., None] for one in passes]
    return {"output": weighted[0] + weighted[1], "log_sum_exp": log_sum_exp}, overwritten


def older_keys(requests: Requests) -> list[int]:
    """How many keys the first of two passes takes: in turn all, half or none of those older than the new tokens."""
    return [
        max(0, length - count) * (2 - index % 3) // 2 if count else length
        for index, (count, length) in enumerate(requests)
    ]


def check_case(case: Case, runner: Runner, environment: Environment) -> NumericResult:
    """Runs a case and compares it with float64."""
    inputs = make_inputs(case, environment.device, environment.generator)
    outputs, overwritten = (run_two_passes if case.two_passes else run_case)(case, inputs, runner, environment)
    guard = Measure("elements written outside", float(overwritten), 0)
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
        report.doing = label
        try:
            result = check_case(case, runner, environment)
        except Exception as error:  # A kernel that does not compile or crashes is a finding, and others may work.
            problem = " ".join(f"{type(error).__name__}: {error}".split())[:300]
            names = (case.name, case.op, case.model_dtype.value, case.cache_dtype.value, runner.name)
            result = NumericResult(*names, (), (), problem)
        report.numerics.append(result)
        if result.problem is not None and not environment.works():
            report.skip("numerics: what follows", f"the GPU takes no work since: {label}")
            break
    for runner in environment.runners:
        seen = {
            (result.op, name) for result in report.numerics if result.runner == runner.name for name in result.kernels
        }
        for op, kernel in sorted(planned_kernels(environment.target) - seen):
            report.skip(f"numerics: {op}'s kernel {kernel}, {runner.name}", "no case that launches it ran")


def planned_kernels(target: Target) -> set[tuple[str, str]]:
    """Every operation's kernels, by what its plans can launch."""
    probes = [Case("", op, SMALL, EDGES, cache_dtype=cached) for op, cached in product(OPS, CacheDType)]
    return {(case.op, item.kernel) for case in probes for item in case.definition.variants(case.problem(target))}


# ---------------------------------------------------------------------------------------- parts 2 and 4: times


class UnavailableError(Exception):
    """An implementation cannot run here; the message says why."""


@dataclass(frozen=True)
class Timed:
    """An implementation, ready to run on a problem.

    Attributes:
        call: Runs it.
        work: Its least work.
        outputs: Those of its outputs that can be compared, by the names of the operation's contract, valid after a
            call; none where they are not the problem's.
    """

    call: Call
    work: Work
    outputs: Callable[[], Tensors] = dict


Implementation = Callable[[Case, Tensors, Environment], Timed]


def time_cases(part: str, cases: Sequence[Case], environment: Environment, report: Report, budget: Budget) -> None:
    """Times every implementation of the part on every case; other packages' on caches of the network's type."""
    missing: set[str] = set()
    for case in cases:
        label = f"times: {part}, {case.name}, {case.cache_dtype}"
        if not budget.allows(CASE_SECONDS, TIMES_UNTIL[part]):
            report.skip(label, "time limit")
            continue
        needed = input_bytes(case)
        if needed > environment.free_bytes():
            report.skip(label, f"inputs take {needed / 2**30:.1f} GiB, more than is free")
            continue
        inputs = make_inputs(case, environment.device, environment.generator)
        for name, make in IMPLEMENTATIONS[part].items():
            if name in missing or (name != OURS and case.cache_dtype.is_quantized):
                continue
            if not time_one(part, name, make, case, inputs, environment, report):
                missing.add(name)


def input_bytes(case: Case) -> int:
    """Memory that a case's inputs take."""
    dims = case.dims()
    return sum(
        math.prod(resolve_shape(tensor.dims, dims)) * case.torch_dtype(tensor.element_type).itemsize
        for tensor in case.definition.inputs
    )


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
    report.doing = f"{part}, {case.name}, {case.cache_dtype}: {label}"
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
    report.timings.append(
        Timing(
            part,
            case.name,
            "" if case.op in ("ContextAttention", "BlockScaledMatMul") else case.cache_dtype,
            label,
            ours,
            case.dims()["keys" if case.op == "GatherLatent" else "tokens"],
            milliseconds,
            timed.work,
            floor_ms(timed.work, report.peaks),
            tuple(measures),
        )
    )
    return True


def measure_timed(case: Case, inputs: Tensors, timed: Timed) -> list[Measure]:
    """Compares with float64; of attention the last tokens of the first and last request, enough for large problems."""
    outputs = timed.outputs()
    if not outputs:
        return []
    if case.op not in EXPECT:
        return measure(case, inputs, outputs)
    which = sorted({0, len(case.requests) - 1})
    return measure_attention(case, inputs, outputs["output"], outputs.get("log_sum_exp"), which=which, last=16)


def floor_ms(work: Work, peaks: Peaks | None) -> float | None:
    """Least time of some work: that of its bytes or of its FLOP, whichever is longer."""
    if peaks is None:
        return None
    return max(work.num_bytes / peaks.bytes_per_second, work.flop / peaks.flop_per_second) * 1e3


def visible_pairs(case: Case) -> int:
    """Pairs of a new token and a key that it sees."""
    if not case.causal:
        return sum(count * length for count, length in case.requests)
    return sum(max(0, length - count + index + 1) for count, length in case.requests for index in range(count))


def latent_work(case: Case) -> Work:
    """Absorbed attention: each cached row once, queries, outputs; 2 (width + kv_lora_rank) FLOP a pair and head."""
    sizes, dims = case.sizes, case.dims()
    width = sizes.kv_lora_rank + sizes.rope_dim
    elements = dims["tokens"] * sizes.heads * (width + sizes.kv_lora_rank)
    flop = visible_pairs(case) * sizes.heads * 2 * (width + sizes.kv_lora_rank)
    return Work(dims["keys"] * case.layout.row_bytes + elements * case.model_dtype.itemsize, flop)


def append_work(case: Case) -> Work:
    """AppendLatent: latents and rotary parts once, each written row once; 6 FLOP a rotated pair, codes not counted."""
    sizes, tokens = case.sizes, case.dims()["tokens"]
    elements = sizes.kv_lora_rank + sizes.rope_dim * (1 + 2 * sizes.heads)
    num_bytes = tokens * (elements * case.model_dtype.itemsize + case.layout.row_bytes)
    return Work(num_bytes, tokens * 3 * sizes.rope_dim * (1 + sizes.heads))


def gather_work(case: Case) -> Work:
    """GatherLatent: each row once, and its values; one product an element of a quantised latent."""
    sizes, keys = case.sizes, case.dims()["keys"]
    values = (sizes.kv_lora_rank + sizes.rope_dim) * case.model_dtype.itemsize
    return Work(
        keys * (case.layout.row_bytes + values), keys * sizes.kv_lora_rank if case.cache_dtype.is_quantized else 0
    )


def decompressed_work(case: Case, *, shared_rope: bool) -> Work:
    """Decompressed attention: keys and values of every head; ``shared_rope``: the rotary key is stored once."""
    sizes, dims = case.sizes, case.dims()
    head = sizes.nope_dim + sizes.rope_dim
    rope = sizes.rope_dim * (1 if shared_rope else sizes.heads)
    elements = dims["keys"] * (sizes.heads * (sizes.nope_dim + sizes.v_dim) + rope)
    elements += dims["tokens"] * sizes.heads * (head + sizes.v_dim)
    flop = visible_pairs(case) * sizes.heads * 2 * (head + sizes.v_dim)
    return Work(elements * case.model_dtype.itemsize, flop)


def linear_work(case: Case, *, weight_bytes: int = 1) -> Work:
    """BlockScaledMatMul: weight and scales once, rows and output once; 2 FLOP a row and element of the weight."""
    sizes, dims = case.linear, case.dims()
    elements = sizes.out_features * sizes.in_features
    scale_bytes = 4 * dims["scale_rows"] * dims["scale_columns"] if weight_bytes == 1 else 0
    values = dims["rows"] * (sizes.out_features + sizes.in_features)
    num_bytes = weight_bytes * elements + scale_bytes + values * case.model_dtype.itemsize
    return Work(num_bytes, 2 * dims["rows"] * elements)


def prepare_ours(case: Case, inputs: Tensors, environment: Environment) -> Timed:
    """This package's operation, by the first runner."""
    definition = case.definition
    outputs: Tensors = {}
    for index, output in enumerate(definition.outputs):
        if index in definition.aliases:
            outputs[output.name] = inputs[definition.inputs[definition.aliases[index]].name]
            continue
        shape, dtype = resolve_shape(output.dims, case.dims()), case.torch_dtype(output.element_type)
        outputs[output.name] = torch.full(shape, math.nan, dtype=dtype, device=environment.device)
    call = environment.runners[0].prepare(case.plan(environment.target), inputs | outputs)
    return Timed(call, WORK[case.op](case), lambda: outputs)


WORK: dict[str, Callable[[Case], Work]] = {
    "AppendLatent": append_work,
    "GatherLatent": gather_work,
    "LatentAttention": latent_work,
    "ContextAttention": lambda case: decompressed_work(case, shared_rope=True),
    "BlockScaledMatMul": linear_work,
}


def one_length(case: Case) -> int:
    """The length of all requests.

    Raises:
        ValueError: They differ.
    """
    lengths = {length for _, length in case.requests}
    if len(lengths) > 1:
        raise ValueError("takes requests of one length")
    return lengths.pop()


def contiguous_rows(case: Case, inputs: Tensors) -> Tensor:
    """Cached rows [requests, length, width] of requests of one length, out of their pages."""
    length = one_length(case)
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

    return Timed(call, latent_work(case), lambda: {"output": results["output"][:, 0]})


def prepare_sdpa_decompressed(case: Case, inputs: Tensors, environment: Environment) -> Timed:
    """Torch's attention over decompressed keys: what a cache of whole heads costs, without the decompression.

    Keys and values are random; the result is that of another problem, and compared with nothing.
    """
    sizes, count = case.sizes, len(case.requests)
    length, head = one_length(case), sizes.nope_dim + sizes.rope_dim
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
    mask: dict[str, Any] = {"is_causal": case.causal}
    if case.causal and count != length:
        mask = {"attn_mask": causal_lower_right(count, length)}
    results: Tensors = {}

    def call() -> None:
        results["output"] = torch.nn.functional.scaled_dot_product_attention(q, k, v, scale=SOFTMAX_SCALE, **mask)

    work = decompressed_work(case, shared_rope=False)
    return Timed(call, work, lambda: {"output": results["output"].transpose(1, 2).flatten(0, 1)})


def prepare_dense_linear(case: Case, inputs: Tensors, environment: Environment) -> Timed:
    """PyTorch's product with the dequantised weight in the network's type."""
    x = inputs["x"]
    weight = dequantized_weight(inputs).to(x.dtype)
    output = torch.empty(len(x), len(weight), dtype=x.dtype, device=x.device)
    return Timed(
        lambda: torch.matmul(x, weight.T, out=output),
        linear_work(case, weight_bytes=x.element_size()),
        lambda: {"output": output},
    )


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

    return Timed(call, latent_work(case), lambda: {"output": results["output"][:, 0]})


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

    return Timed(call, latent_work(case), lambda: results)


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


IMPLEMENTATIONS: dict[str, dict[str, Implementation]] = {
    "append": {OURS: prepare_ours},
    "gather": {OURS: prepare_ours},
    "decode": {
        OURS: prepare_ours,
        "torch SDPA, latent as one head": prepare_sdpa_latent,
        "torch SDPA, decompressed": prepare_sdpa_decompressed,
        "FlashMLA": prepare_flash_mla,
        "FlashInfer": prepare_flashinfer,
    },
    "context": {OURS: prepare_ours, "torch SDPA": prepare_sdpa_context},
    "linear": {OURS: prepare_ours, "torch, bf16 weight": prepare_dense_linear},
}


def timing_cases(part: str, *, dry_run: bool) -> list[Case]:
    """Problems of a part; a problem of each kind first, in case that time runs out."""
    if part == "context":
        return context_timing_cases(dry_run=dry_run)
    if part == "linear":
        return linear_timing_cases(dry_run=dry_run)
    op = {"append": "AppendLatent", "gather": "GatherLatent", "decode": "LatentAttention"}[part]
    sizes = SMALL if dry_run else DEEPSEEK
    problems: list[tuple[str, Sizes, Requests]] = []
    if dry_run and part == "decode":
        problems = [("2 x 50 keys, 5 heads", sizes, ((1, 50),) * 2), ("1 to 64 keys, 5 heads", sizes, ALL_LENGTHS[:7])]
    elif dry_run:
        problems = [("2 x 10 tokens", sizes, ((10, 10),) * 2)]
    elif part == "append":
        problems = [
            ("128 x 1 token, 128 heads", sizes, ((1, 1),) * 128),
            ("1 x 8192 tokens, 16 heads", replace(sizes, heads=16), ((8192, 8192),)),
        ]
    elif part == "gather":
        problems = [("4 x 16384 keys", sizes, ((1, 16384),) * 4)]
    else:
        uniform = [
            (f"{batch} x {length} keys, {heads} heads", replace(sizes, heads=heads), ((1, length),) * batch)
            for length, batch, heads in product((8192, 1024, 65536), (16, 128, 1), (128, 16, 64))
        ]
        mixed = [
            (f"{len(ALL_LENGTHS)} x 1 to 131072 keys, {heads} heads", replace(sizes, heads=heads), ALL_LENGTHS)
            for heads in (128, 16)
        ]
        problems = [*uniform[:2], *mixed, *uniform[2:]]
    return [
        Case(name, op, sizes, requests, cache_dtype=cached, wild=False)
        for (name, sizes, requests), cached in product(problems, (CacheDType.BF16, CacheDType.FP8, CacheDType.NVFP4))
    ]


def linear_timing_cases(*, dry_run: bool) -> list[Case]:
    """Decode steps of few and many requests, and a prefill, through the largest and the most ragged projection."""
    layers = [SMALL_LINEAR] if dry_run else [DEEPSEEK_QUERIES, DEEPSEEK_LATENT]
    counts = (4,) if dry_run else (16, 128, 4096)
    return [
        Case(
            f"{count} x {sizes.in_features} to {sizes.out_features}",
            "BlockScaledMatMul",
            SMALL if dry_run else DEEPSEEK,
            ((count, count),),
            wild=False,
            linear=sizes,
        )
        for count, sizes in product(counts, layers)
    ]


def context_timing_cases(*, dry_run: bool) -> list[Case]:
    """Prefills: whole prompts, a batch of them, the last chunk of a long one, and a chunk over older keys alone."""
    if dry_run:
        chunk = Case("1 x 20 of 40 tokens, 5 heads", "ContextAttention", SMALL, ((20, 40),), wild=False)
        return [chunk, replace(chunk, name=f"{chunk.name}, no mask", causal=False)]
    return [
        Case(
            f"{batch} x {count} of {length} tokens, {heads} heads{'' if causal else ', no mask'}",
            "ContextAttention",
            replace(DEEPSEEK, heads=heads),
            ((count, length),) * batch,
            wild=False,
            causal=causal,
        )
        for (batch, count, length, causal), heads in product(
            ((1, 4096, 4096, True), (8, 1024, 1024, True), (1, 1024, 16384, True), (1, 1024, 16384, False)),
            (16, 64, 128),
        )
    ]


# -------------------------------------------------------------------------------------------------- part 3: engines


def check_engines(environment: Environment, report: Report, budget: Budget) -> None:
    """Part 3; in a dry run the network through ONNX Runtime, which exercises the same code."""
    try:
        from trtllm_mla.config import BuildConfig, MlaPluginConfig
        from trtllm_mla.network.directory import convert
    except ImportError as error:
        report.skip("engines", error)
        return
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
    report.doing = f"engine: {subject}"
    try:
        from trtllm_mla.engine.backend import load_backend
        from trtllm_mla.engine.builder import build

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
    from trtllm_mla.benchmark.latency import LatencyOptions, bench_latency
    from trtllm_mla.validation.validate import ValidationOptions, validate

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
            latency.executor.description,
            found.passed,
            latency.prefill.latency_ms.median,
            latency.decode.latency_ms.median,
        )
    )


# ------------------------------------------------------------------------------------------------------------ tables


TITLES = {
    "append": "AppendLatent",
    "gather": "GatherLatent",
    "decode": "LatentAttention: decode",
    "linear": "BlockScaledMatMul",
    "context": "ContextAttention: prefill",
}


def print_report(report: Report) -> None:
    """Prints all tables."""
    print(f"{report.device}\nInputs of seed {report.seed}; {report.seconds:.0f} s")
    print_numerics(report)
    for part in TITLES:
        if any(timing.part == part for timing in report.timings):
            print_timings(report, part)
    if report.engines:
        print_engines(report)
    for title, items in (("Failed", report.failures), ("Did not run", report.skipped)):
        if items:
            print_table(title, ("what", "reason"), [(item.what, item.reason) for item in items])
    print("\npassed" if report.passed else "\nFAILED")


def print_table(title: str, headings: Sequence[str], rows: Sequence[Sequence[str]], numbers: int = 0) -> None:
    """Prints a table in Markdown; the last ``numbers`` columns are aligned to the right."""
    first_number = len(headings) - numbers
    widths = [max(3, *(len(row[column]) for row in (headings, *rows))) for column in range(len(headings))]
    print(f"\n{title}\n")
    for row in (headings, *rows):
        cells = [
            cell.rjust(width) if column >= first_number else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        print(f"| {' | '.join(cells)} |")
        if row is headings:
            rules = ["-" * (width - 1) + (":" if i >= first_number else "-") for i, width in enumerate(widths)]
            print(f"| {' | '.join(rules)} |")


def print_numerics(report: Report) -> None:
    """For each operation, types and runner its kernels and worst comparison; a row for every case that failed."""
    groups: dict[tuple[str, str, str], list[NumericResult]] = {}
    for result in report.numerics:
        types = f"{result.model_dtype} / {result.cache_dtype}"
        groups.setdefault((result.op, types, result.runner), []).append(result)
    rows = []
    for (op, types, runner), results in groups.items():
        passed = [result for result in results if result.passed]
        kernels = ", ".join(dict.fromkeys(name for result in passed for name in result.kernels))
        if passed:
            measures = [measure for result in passed for measure in result.measures]
            rows.append((op, types, runner, str(len(passed)), kernels, *_describe(measures), "ok"))
        for result in results:
            if not result.passed:
                found = (result.problem, "") if result.problem is not None else _describe(result.measures)
                rows.append((op, types, runner, result.case, ", ".join(result.kernels), *found, "FAILED"))
    headings = ("operation", "network / cache", "run by", "cases", "kernels", "worst comparison", "bound", "")
    print_table("Numerics against float64", headings, rows)


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


def print_timings(report: Report, part: str) -> None:
    """Times beside the floor."""
    peaks = report.peaks
    where = (
        f"floors from {peaks.bytes_per_second / 1e12:.2f} TB/s, {peaks.flop_per_second / 1e12:.0f} TFLOP/s "
        f"({peaks.source})"
        if peaks
        else "no floors: no GPU"
    )
    rows = []
    for timing in report.timings:
        if timing.part != part:
            continue
        seconds = timing.milliseconds / 1e3
        error = f"{timing.measures[0].error:.1e}" if timing.measures else ""
        rows.append(
            (
                timing.problem,
                timing.cache_dtype,
                timing.implementation,
                f"{timing.milliseconds:.4f}",
                f"{timing.tokens_per_second:.0f}",
                f"{timing.work.num_bytes / seconds / 1e9:.0f}",
                f"{timing.work.flop / seconds / 1e12:.1f}",
                f"{100 * timing.floor_ms / timing.milliseconds:.0f} %" if timing.floor_ms is not None else "",
                error if timing.passed else f"{error} FAILED",
            )
        )
    headings = ("problem", "cache", "implementation", "ms", "tokens/s", "GB/s", "TFLOP/s", "floor / time", "error")
    print_table(f"{TITLES[part]}, one layer of a bf16 network; {where}", headings, rows, numbers=6)


def print_engines(report: Report) -> None:
    """Engines of the example checkpoint."""
    rows = [
        (
            engine.subject,
            engine.executor,
            "passed" if engine.valid else "FAILED",
            f"{engine.prefill_ms:.3f}",
            f"{engine.decode_ms:.3f}",
        )
        for engine in report.engines
    ]
    headings = ("what", "executor", "validation", "prefill, ms", "decode step, ms")
    print_table("examples/tiny-mla, batches of 4 requests", headings, rows, numbers=2)


# -------------------------------------------------------------------------------------------------------------- main


def run(arguments: argparse.Namespace, directory: Path) -> Report:
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
    numerics = planned(numeric_cases(dry_run=environment.dry_run), environment.target, report.skip)
    timed = {
        part: planned(timing_cases(part, dry_run=environment.dry_run), environment.target, report.skip)
        for part in IMPLEMENTATIONS
    }
    if environment.dry_run:
        report.skip("Triton, cubins through cuda.core", "dry run: no GPU is used")
    else:
        try:
            tell(compile_in_parallel([*numerics, *chain.from_iterable(timed.values())], environment.target, budget))
        except OSError as error:  # Kernels are then compiled one by one where they are needed.
            report.skip("compilation on all cores", error)
    state = (environment, report, budget)
    parts: list[tuple[str, Call]] = [("numerics", partial(check_numerics, numerics, *state))]
    parts += [(f"times: {part}", partial(time_cases, part, cases, *state)) for part, cases in timed.items()]
    parts.append(("engines", partial(check_engines, *state)))
    # A kernel that hangs cannot be interrupted from Python.
    watchdog = Timer(budget.left() + HANG_GRACE_SECONDS, give_up, (report, arguments.json))
    watchdog.daemon = True
    watchdog.start()
    for name, part in parts:
        tell(f"second {budget.used():.0f}: {name}")
        try:
            if not environment.works():
                raise RuntimeError("the GPU takes no work any more")
            part()
        except Exception as error:  # What was found has to be reported, and the other parts may work.
            problem = f"{type(error).__name__}: {error}; begun last: {report.doing}"
            report.failures.append(Skip(name, " ".join(problem.split())[:500]))
        report.seconds = round(budget.used(), 1)
        if arguments.json is not None:
            write_json(arguments.json, report.to_json())
    watchdog.cancel()
    return report


def give_up(report: Report, path: Path | None) -> None:
    """Ends the process with what was found so far: the last that was begun does not end."""
    report.failures.append(Skip(report.doing, "hangs: it did not end in time"))
    if path is not None:
        write_json(path, report.to_json())
    print_report(report)
    sys.stdout.flush()
    os._exit(1)


def tell(progress: str) -> None:
    """Says how far the check is, apart from its results."""
    print(progress, file=sys.stderr, flush=True)


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
    # In case that what hangs keeps the watchdog's thread from running.
    faulthandler.dump_traceback_later(arguments.seconds + 2 * HANG_GRACE_SECONDS, exit=True)
    torch.manual_seed(arguments.seed)
    torch.set_grad_enabled(False)
    if arguments.dry_run:
        torch.set_num_threads(1)  # tensors are too small for more
    try:
        # The launcher takes a stream's address: one that is not the default stream's null.
        stream = None if arguments.dry_run or not torch.cuda.is_available() else torch.cuda.Stream()
        with TemporaryDirectory() as directory, torch.cuda.stream(stream):
            report = run(arguments, Path(directory))
    except UserError as error:
        print(f"Error: {error}", file=sys.stderr)
        return 2
    faulthandler.cancel_dump_traceback_later()
    print_report(report)
    return 0 if report.passed else 1


if __name__ == "__main__":
    sys.exit(main())
