"""Random calls of every operation, planned in Python and by the evaluator.

It can also run alone, for as many cases as one likes, with an evaluator that was built with sanitizers::

    LD_PRELOAD=$(gcc -print-file-name=libasan.so) ASAN_OPTIONS=detect_leaks=0 \
        python -m tests.plugins.random_plans libtrtllm_mla_plan.so --forms 100 --calls 200
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import random
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.plugins.evaluator import EvaluatedPlan, Evaluator, Library, PlanError, Shape, evaluated
from trtllm_mla.cache_rows import CacheDType
from trtllm_mla.dtypes import DType
from trtllm_mla.engine.kernel_store import Cubin
from trtllm_mla.engine.operation import Operation, OperationSettings, TargetTile
from trtllm_mla.engine.plan_data import PlannedOperation, library_data, trace_operation
from trtllm_mla.errors import UserError
from trtllm_mla.ops import OPS
from trtllm_mla.ops.definition import Attribute, OpDefinition, split_dim
from trtllm_mla.ops.latent_attention.plan import default_tile
from trtllm_mla.ops.plan import LaunchPlan, ScalarArgument
from trtllm_mla.targets import TARGETS, Target

Outcome = EvaluatedPlan | str
MAX_INT64 = 2**63 - 1
CUBIN = b"\x7fELF, but no kernel"


class CheckedInt(int):
    """A whole number whose arithmetic fails beyond 64 bits, where Python's goes on."""

    def _checked(self, value: Any) -> Any:
        if not isinstance(value, int):
            return value
        if not -MAX_INT64 - 1 <= value <= MAX_INT64:
            raise OverflowError
        return CheckedInt(value)


def _checked_operator(name: str) -> Callable[..., Any]:
    plain = getattr(int, name)
    return lambda self, *others: self._checked(plain(self, *others))


for _name in ("add", "sub", "mul", "floordiv", "mod"):
    for _operator in (f"__{_name}__", f"__r{_name}__"):
        setattr(CheckedInt, _operator, _checked_operator(_operator))
CheckedInt.__neg__ = _checked_operator("__neg__")  # type: ignore[method-assign]


@dataclass(frozen=True)
class Form:
    """An operation with what is fixed when an engine is built."""

    definition: OpDefinition
    attributes: Mapping[str, Attribute]
    settings: OperationSettings
    fixed_dims: Mapping[str, int]
    target: Target
    planned: PlannedOperation

    @property
    def input_types(self) -> tuple[str, ...]:
        return self.planned.types[: len(self.definition.inputs)]


def generator(seed: int | None = None) -> random.Random:
    """Random choices; without a seed other ones each time. What fails names its call in full."""
    return random.Random(seed)  # noqa: S311


def random_form(rng: random.Random, definition: OpDefinition) -> Form | None:
    """An operation in one of its forms, or None where no kernel fits the target."""
    target = rng.choice(list(TARGETS.values()))
    model_dtype = rng.choice(list(DType))
    cache_dtype = rng.choice([CacheDType.of(model_dtype), CacheDType.FP8, CacheDType.NVFP4])
    kv_lora_rank = rng.choice([512, 512, 256, 96, 448, 64])
    rope_dim = rng.choice([64, 64, 32, 48])
    dims = {
        "kv_lora_rank": kv_lora_rank,
        "rope_dim": rope_dim,
        "width": cache_dtype.layout(kv_lora_rank, rope_dim).width,
        "page_size": rng.choice([1, 16, 64, 128]),
        "heads": rng.choice([1, 5, 16, 64, 128]),
        "nope_dim": rng.choice([128, 48, 192]),
        "v_dim": rng.choice([128, 40]),
        "top_k": rng.randint(1, 12),
        "experts": rng.choice([1, 7, 64, 256]),
        "hidden_size": rng.choice([7168, 2048, 80, rng.randint(1, 8000)]),
        "intermediate_size": rng.choice([2048, 1408, rng.randint(1, 3000)]),
        "in_features": rng.choice([7168, 1536, 640, rng.randint(1, 20000)]),
        "out_features": rng.choice([576, 24576, rng.randint(1, 20000)]),
    }
    dims |= {
        "gate_up_size": 2 * dims["intermediate_size"],
        "hidden_blocks": -(-dims["hidden_size"] // 128),
        "intermediate_blocks": -(-dims["intermediate_size"] // 128),
        "scale_rows": -(-dims["out_features"] // 128),
        "scale_columns": -(-dims["in_features"] // 128),
    }
    dims["gate_up_blocks"] = 2 * dims["intermediate_blocks"]
    if rng.random() < 0.05:  # what the plan refuses whatever the other sizes are
        dims[rng.choice(["gate_up_size", "hidden_blocks", "scale_rows"])] += 1
    values: dict[str, Attribute] = {
        "rope_interleave": rng.randint(0, 1),
        "latent_scale": rng.choice([1.0, 0.37]) if cache_dtype.is_quantized else 1.0,
        "softmax_scale": 0.1147,
        "causal": rng.randint(0, 1),
        "first_expert": rng.choice([0, 64, 2**31 - 200]),
        "kv_lora_rank": kv_lora_rank,
        "rope_dim": rope_dim,
    }
    try:
        sizes = {"kv_lora_rank": kv_lora_rank, "rope_dim": rope_dim}
        tile_s, num_stages = default_tile(model_dtype=model_dtype, cache_dtype=cache_dtype, target=target, **sizes)
        if rng.random() < 0.3:
            tile_s, num_stages = rng.choice([(16, 1), (16, 2), (32, 2)])
        settings = OperationSettings(model_dtype, cache_dtype, (TargetTile(target.name, tile_s, num_stages),))
        attributes = {name: values[name] for name in definition.attributes}
        names = {split_dim(dim)[0] for tensor in definition.inputs for dim in tensor.dims} - definition.dynamic_dims
        fixed_dims = {name: dims[name] for name in names if name is not None}
        planned = trace_operation(definition, attributes, settings, fixed_dims, target)
    except UserError:
        return None
    return Form(definition, attributes, settings, fixed_dims, target, planned)


def random_size(rng: random.Random) -> int:
    return rng.choice(
        (
            lambda: 0,
            lambda: 1,
            lambda: rng.randint(1, 300),
            lambda: rng.randint(1, 300),
            lambda: rng.randint(1, 10_000),
            lambda: int(2 ** rng.uniform(0, 33)),
            lambda: rng.choice([-1, 2**31 - 1, 2**31, 2**62, MAX_INT64, -MAX_INT64 - 1]),
        )
    )()


def random_shapes(rng: random.Random, form: Form) -> tuple[Shape, ...]:
    """Shapes of a call, mostly such that fit the contract.

    Of several faults, the evaluator reports a wrong number of dimensions first: there is one fault then.
    """
    small, wrong_rank = rng.random() < 0.5, rng.random() < 0.02
    dims = dict(form.fixed_dims)
    for name in sorted(form.definition.dynamic_dims):
        dims[name] = rng.randint(0, 40) if small or wrong_rank else random_size(rng)
    fixed = form.planned.fixed_sizes
    shapes = []
    for index, tensor in enumerate(form.definition.inputs):
        shape = []
        for axis, dim in enumerate(tensor.dims):
            name, offset = split_dim(dim)
            size = min(offset if name is None else dims[name] + offset, MAX_INT64)
            if (index, axis) not in fixed and rng.random() < 0.01 and not wrong_rank:
                size = random_size(rng)
            shape.append(size)
        shapes.append(tuple(shape))
    if wrong_rank:
        index = rng.randrange(len(shapes))
        shapes[index] = rng.choice([shapes[index][1:], (*shapes[index], 1), ()])
    return tuple(shapes)


def random_attributes(rng: random.Random, form: Form) -> dict[str, Attribute]:
    """The form's attributes with other real ones, which are no part of a form."""
    attributes = dict(form.attributes)
    for name, kind in form.definition.attributes.items():
        if kind is float and rng.random() < 0.3:
            attributes[name] = rng.choice(
                [rng.uniform(1e-3, 4), 0.0, -0.0, -1.5, float("inf"), float("nan"), 1e-7, 1.5e17, 123456.0, 1e22]
            )
    return attributes


def kernel_files(planned: Sequence[PlannedOperation], directory: Path) -> list[Cubin]:
    """Stand-ins for the kernels of operations, each once."""
    path = directory / "kernel.cubin"
    path.write_bytes(CUBIN)
    digest = hashlib.sha256(CUBIN).hexdigest()
    jobs = dict.fromkeys((variant, operation.target) for operation in planned for variant in operation.variants)
    return [Cubin(variant, target, variant.kernel, 1024, digest, path) for variant, target in jobs]


def compare(
    library: Library,
    form: Form,
    attributes: Mapping[str, Attribute],
    shapes: tuple[Shape, ...],
    multiprocessors: int,
    workspace_bytes: int,
) -> str:
    """Asserts that a call is planned in Python as by the evaluator; tells what came of it."""
    definition = form.definition
    limits = f"{multiprocessors} multiprocessors, {workspace_bytes} bytes"
    where = f"{definition.name} {form.settings} {form.target.name} {attributes} {shapes} {limits}"
    operation = Operation(definition, attributes, form.settings)

    def in_python(number: Callable[[int], int]) -> LaunchPlan:
        checked = tuple(tuple(number(size) for size in shape) for shape in shapes)
        target = dataclasses.replace(form.target, multiprocessors=number(multiprocessors))
        return operation.compute_plan(checked, target, number(workspace_bytes))

    try:
        found = library.find(definition, attributes, form.input_types, shapes, form.target.name)
        evaluator: Outcome = library.plan(found, definition, attributes, shapes, multiprocessors, workspace_bytes)
    except PlanError as error:
        evaluator = str(error)
    plan: LaunchPlan | None = None
    try:
        plan = in_python(int)
        python: Outcome = evaluated(definition, plan)
    except (ValueError, UserError, ZeroDivisionError) as error:
        python = str(error)
    if evaluator == python:
        return "refusal" if isinstance(python, str) else "plan" if python.launches else "empty plan"
    # What the evaluator does not compute, because its numbers have 64 bits, and parameters 32.
    assert isinstance(evaluator, str), f"{where}: {evaluator} instead of {python}"
    if "more than 64 bits" in evaluator:
        try:
            in_python(CheckedInt)
        except OverflowError:
            return "beyond 64 bits"
    elif "expected a number of 32 bits" in evaluator and plan is not None:
        numbers = (
            argument.value
            for launch in plan.launches
            for (_, kind), argument in zip(launch.variant.signature, launch.arguments, strict=True)
            if kind == "i32" and isinstance(argument, ScalarArgument)
        )
        if any(not -(2**31) <= number < 2**31 for number in numbers):
            return "beyond 32 bits"
    elif "division by 0" in evaluator and isinstance(python, str) and "division" in python:
        return "division by 0"
    raise AssertionError(f"{where}: {evaluator} instead of {python}")


def run(evaluator: Evaluator, rng: random.Random, directory: Path, *, forms: int, calls: int) -> Counter[str]:
    """Compares ``calls`` random calls of ``forms`` random forms of every operation; counts what came of them."""
    counts: Counter[str] = Counter()
    for definition in OPS.values():
        for _ in range(forms):
            form = None
            while form is None:
                form = random_form(rng, definition)
            data = library_data(tuple(OPS.values()), [form.planned], kernel_files([form.planned], directory))
            library = Library(evaluator, data)
            try:
                for _ in range(calls):
                    shapes, attributes = random_shapes(rng, form), random_attributes(rng, form)
                    multiprocessors = rng.choice([1, 40, form.target.multiprocessors, 300, rng.randint(0, 400)])
                    workspace_bytes = rng.choice([MAX_INT64, MAX_INT64, MAX_INT64, 0, 2 ** rng.randint(8, 30)])
                    outcome = compare(library, form, attributes, shapes, multiprocessors, workspace_bytes)
                    counts[outcome] += 1
                    counts[f"{definition.name}: {outcome}"] += 1
                    counts["workspace"] += compare_workspace(library, form, attributes, shapes)
            finally:
                library.close()
    return counts


def compare_workspace(
    library: Library, form: Form, attributes: Mapping[str, Attribute], shapes: tuple[Shape, ...]
) -> bool:
    """Asserts that the workspace of a build is the same; tells whether there is one."""
    operation = Operation(form.definition, attributes, form.settings)
    try:
        found: int | str = library.workspace_bytes(form.definition, attributes, form.input_types, shapes)
    except PlanError as error:
        found = str(error)
    try:
        expected: int | str = operation.compute_workspace_bytes(shapes)
    except (ValueError, UserError, ZeroDivisionError) as error:
        expected = str(error)
    if isinstance(found, str) and "more than 64 bits" in found:
        try:
            operation.compute_workspace_bytes(tuple(tuple(map(CheckedInt, shape)) for shape in shapes))
        except OverflowError:
            return False
    assert found == expected, f"{form.definition.name} {form.settings} {form.target.name} {attributes} {shapes}"
    return isinstance(found, int) and found > 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("library", type=Path, help="libtrtllm_mla_plan.so")
    parser.add_argument("--forms", type=int, default=20)
    parser.add_argument("--calls", type=int, default=100)
    parser.add_argument("--seed", type=int, default=None)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        counts = run(
            Evaluator(options.library),
            generator(options.seed),
            Path(directory),
            forms=options.forms,
            calls=options.calls,
        )
    for name, count in sorted(counts.items()):
        print(f"{count:8} {name}")  # noqa: T201


if __name__ == "__main__":
    main()
