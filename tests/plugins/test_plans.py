"""The evaluator plans every call as Python does."""

from __future__ import annotations

import ctypes
import dataclasses
import hashlib
import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.plugins.evaluator import INT32, Evaluator, Library, PlanError, evaluated
from tests.plugins.random_plans import CUBIN, MAX_INT64, Form, compare, generator, kernel_files, random_form, run
from trtllm_mla._version import __version__
from trtllm_mla.cache_rows import CacheDType
from trtllm_mla.dtypes import DType
from trtllm_mla.engine.launcher import NUM_NULL_POINTERS, POINTER_ALIGNMENT, WARP_SIZE
from trtllm_mla.engine.operation import Operation, OperationSettings, TargetTile
from trtllm_mla.engine.plan_data import PlannedOperation, library_data, trace_operation
from trtllm_mla.ops import OPS
from trtllm_mla.ops.definition import Attribute, split_dim
from trtllm_mla.targets import TARGETS, get_target

DEFINITIONS = tuple(OPS.values())
TARGET_NAMES = ("sm_89", "sm_120")
SIZES = {
    "LatentAttention": {"heads": 16, "kv_lora_rank": 512, "rope_dim": 64, "width": 656, "page_size": 64},
    "ContextAttention": {"heads": 16, "nope_dim": 128, "rope_dim": 64, "v_dim": 128},
    "GatherLatent": {"width": 656, "page_size": 64},
    "RoutedExperts": {
        "top_k": 8,
        "experts": 64,
        "hidden_size": 7168,
        "intermediate_size": 2048,
        "gate_up_size": 4096,
    },
}
ATTRIBUTES: dict[str, dict[str, Attribute]] = {
    "LatentAttention": {"softmax_scale": 0.125, "latent_scale": 1.0},
    "ContextAttention": {"softmax_scale": 0.125, "causal": 1},
    "GatherLatent": {"kv_lora_rank": 512, "rope_dim": 64, "latent_scale": 1.0},
    "RoutedExperts": {"first_expert": 0},
}
TILES = tuple(TargetTile(name, 32, 2) for name in TARGET_NAMES)
SETTINGS = OperationSettings(DType.BFLOAT16, CacheDType.FP8, TILES)


@contextmanager
def opened(evaluator: Evaluator, planned: Sequence[PlannedOperation], directory: Path) -> Iterator[Library]:
    """A library of some operations, with stand-ins for their kernels."""
    library = Library(evaluator, library_data(DEFINITIONS, planned, kernel_files(planned, directory)))
    try:
        yield library
    finally:
        library.close()


def make_form(name: str, target: str, *, sizes: dict[str, int] | None = None, **attributes: Attribute) -> Form:
    definition, values = OPS[name], {**ATTRIBUTES[name], **attributes}
    fixed = {**SIZES[name], **(sizes or {})}
    planned = trace_operation(definition, values, SETTINGS, fixed, get_target(target))
    return Form(definition, values, planned.settings, fixed, get_target(target), planned)


def make_shapes(form: Form, **dims: int) -> tuple[tuple[int, ...], ...]:
    sizes = {**form.fixed_dims, **dims}

    def size(dim: str | int) -> int:
        name, offset = split_dim(dim)
        return offset if name is None else sizes[name] + offset

    return tuple(tuple(size(dim) for dim in tensor.dims) for tensor in form.definition.inputs)


class TestRandomCalls:
    def test_every_operation_in_every_form(self, evaluator: Evaluator, tmp_path: Path) -> None:
        counts = run(evaluator, generator(), tmp_path, forms=18, calls=90)
        total = sum(counts[name] for name in ("plan", "empty plan", "refusal", "beyond 32 bits", "beyond 64 bits"))
        assert total >= 10_000
        for definition in DEFINITIONS:
            for outcome in ("plan", "empty plan", "refusal"):
                assert counts[f"{definition.name}: {outcome}"] >= 20, (definition.name, outcome)
        assert counts["beyond 32 bits"] >= 10
        assert counts["beyond 64 bits"] >= 10
        assert counts["workspace"] >= 1000

    def test_texts_of_real_numbers(self, evaluator: Evaluator, tmp_path: Path) -> None:
        """Refusals quote them, as Python writes them."""
        rng = generator(20)
        form = make_form("LatentAttention", "sm_89")
        with opened(evaluator, [form.planned], tmp_path) as library:
            shapes = make_shapes(form, tokens=1, pages=1, requests=1, pages_per_request=1, longest_query=1)
            exponents = [10.0**exponent for exponent in range(-20, 25)]
            bits = [struct.unpack("<d", rng.randbytes(8))[0] for _ in range(1000)]
            for value in (0.0, -0.0, 5e-324, 1.7976931348623157e308, *exponents, *bits):
                attributes = {**form.attributes, "softmax_scale": -abs(value)}
                assert compare(library, form, attributes, shapes, 128, MAX_INT64) == "refusal"


class TestRepetitions:
    @pytest.mark.parametrize(("tokens", "bands"), [(1, 1), (512, 1), (2048, 2), (8192, 7), (300_000, 56)])
    def test_bands_of_routed_experts(self, evaluator: Evaluator, tmp_path: Path, tokens: int, bands: int) -> None:
        form = make_form("RoutedExperts", "sm_120")
        with opened(evaluator, [form.planned], tmp_path) as library:
            shapes = make_shapes(form, tokens=tokens)
            assert compare(library, form, form.attributes, shapes, 170, MAX_INT64) == "plan"
            operation = library.find(form.definition, form.attributes, form.input_types, shapes, "sm_120")
            plan = library.plan(operation, form.definition, form.attributes, shapes, 170, MAX_INT64)
        assert len(plan.launches) == 2 + 2 * bands
        kind, first_step = plan.launches[-1].arguments[-2]
        assert kind == INT32
        assert (first_step == 0) == (bands == 1)


class TestWorkspace:
    def test_it_is_enough_for_every_target(self, evaluator: Evaluator, tmp_path: Path) -> None:
        forms = [make_form("LatentAttention", target) for target in TARGET_NAMES]
        shapes = make_shapes(forms[0], tokens=96, pages=500, requests=7, pages_per_request=64, longest_query=40)
        both = Operation(forms[0].definition, forms[0].attributes, SETTINGS)
        with opened(evaluator, [form.planned for form in forms], tmp_path) as library:
            form = forms[0]
            found = library.workspace_bytes(form.definition, form.attributes, form.input_types, shapes)
        single = [Operation(form.definition, form.attributes, form.settings).workspace_bytes(shapes) for form in forms]
        assert single[0] != single[1]
        assert found == max(single) == both.workspace_bytes(shapes)

    def test_a_plan_beyond_it_is_refused(self, evaluator: Evaluator, tmp_path: Path) -> None:
        form = make_form("LatentAttention", "sm_89")
        shapes = make_shapes(form, tokens=3, pages=500, requests=3, pages_per_request=64, longest_query=1)
        needed = Operation(form.definition, form.attributes, form.settings).plan(shapes, form.target, MAX_INT64)
        assert needed.workspace_bytes > 0
        with opened(evaluator, [form.planned], tmp_path) as library:
            operation = library.find(form.definition, form.attributes, form.input_types, shapes, "sm_89")
            arguments: Any = (operation, form.definition, form.attributes, shapes, form.target.multiprocessors)
            assert library.plan(*arguments, needed.workspace_bytes) == evaluated(form.definition, needed)
            with pytest.raises(PlanError, match=rf"LatentAttention: .* workspace of {needed.workspace_bytes} bytes"):
                library.plan(*arguments, needed.workspace_bytes - 1)


class TestContracts:
    def test_all_operations_have_theirs(self, evaluator: Evaluator, tmp_path: Path) -> None:
        with opened(evaluator, [], tmp_path) as library:
            assert library.c.tmla_library_version(library.handle).decode() == __version__
            assert library.c.tmla_library_num_ops(library.handle) == len(DEFINITIONS)
            assert not library.op("NoSuchOp")
            for number, definition in enumerate(DEFINITIONS):
                op = library.c.tmla_library_op(library.handle, number).contents
                assert op.name.decode() == definition.name
                assert library.op(definition.name).contents.name == op.name
                assert {op.attributes[i].name.decode(): op.attributes[i].type for i in range(op.num_attributes)} == {
                    name: int(kind is float) for name, kind in definition.attributes.items()
                }
                aliases = {i: op.aliases[i] for i in range(op.num_outputs) if op.aliases[i] >= 0}
                assert aliases == definition.aliases

    @pytest.mark.parametrize("definition", DEFINITIONS, ids=lambda item: item.name)
    def test_sizes_of_outputs_follow_from_those_of_inputs(
        self, evaluator: Evaluator, tmp_path: Path, definition: Any
    ) -> None:
        rng = generator(3)
        form = next(form for _ in range(100) if (form := random_form(rng, definition)) is not None)
        shapes = make_shapes(form, **{name: rng.randint(1, 1000) for name in definition.dynamic_dims})
        dims = definition.resolve_dims(dict(zip((item.name for item in definition.inputs), shapes, strict=True)))
        with opened(evaluator, [form.planned], tmp_path) as library:
            op = library.op(definition.name).contents
            values = [form.attributes[name] for name in definition.attributes]

            def size(dim: Any) -> int:
                sources = (
                    0,
                    shapes[dim.input][dim.axis] if dim.source == 1 else 0,
                    values[dim.attribute] if values else 0,
                )
                return int(sources[dim.source]) + dim.offset

            for index, tensor in enumerate(definition.outputs):
                found = op.outputs[index]
                assert found.name.decode() == tensor.name
                sizes = tuple(size(found.dims[axis]) for axis in range(found.num_dims))
                assert sizes == definition.output_shape(index, dims, form.attributes)
            for index, tensor in enumerate(definition.inputs):
                found = op.inputs[index]
                assert [found.dims[axis].name.decode() for axis in range(found.num_dims)] == list(
                    map(str, tensor.dims)
                )
                assert tuple(size(found.dims[axis]) for axis in range(found.num_dims)) == shapes[index]

    def test_kernels(self, evaluator: Evaluator, tmp_path: Path) -> None:
        forms = [make_form(name, target) for name in ("GatherLatent", "LatentAttention") for target in TARGET_NAMES]
        cubins = kernel_files([form.planned for form in forms], tmp_path)
        with opened(evaluator, [form.planned for form in forms], tmp_path) as library:
            assert library.targets() == [89, 120]
            kernels = library.kernels()
            assert len(kernels) == len(cubins)
            for kernel, cubin in zip(kernels, cubins, strict=True):
                types = {"i32": 1, "fp32": 2}
                assert kernel.key.decode() == cubin.key
                assert (kernel.op.decode(), kernel.entry.decode()) == (cubin.variant.op, cubin.entry)
                assert f"sm_{kernel.compute_capability}" == cubin.target
                assert kernel.block_threads == WARP_SIZE * cubin.variant.num_warps
                assert (kernel.shared_bytes, kernel.pointer_alignment) == (cubin.shared_bytes, POINTER_ALIGNMENT)
                parameters = [kernel.parameters[i] for i in range(kernel.num_parameters)]
                assert parameters == [types.get(kind, 0) for _, kind in cubin.variant.signature]
                assert kernel.num_null_pointers == NUM_NULL_POINTERS
                assert ctypes.string_at(kernel.cubin, kernel.cubin_size) == CUBIN
            for operation, form in zip(library.operations(), forms, strict=True):
                assert operation.op.contents.name.decode() == form.definition.name
                assert operation.model_dtype == b"bfloat16"
                assert (operation.cache_dtype, operation.tile_s, operation.num_stages) == (b"fp8", 32, 2)
                keys = [operation.kernels[i].contents.key.decode() for i in range(operation.num_kernels)]
                assert keys == [variant.key for variant in form.planned.variants]
                sizes = {
                    (item.input, item.axis): item.size
                    for item in (operation.fixed_sizes[i] for i in range(operation.num_fixed_sizes))
                }
                assert sizes == form.planned.fixed_sizes


class TestFinding:
    def test_operations_are_told_apart(self, evaluator: Evaluator, tmp_path: Path) -> None:
        """By integer attributes, element types, fixed sizes and target; real attributes do not matter."""
        forms = [
            *(make_form("ContextAttention", "sm_89", causal=causal) for causal in (0, 1)),
            *(make_form("ContextAttention", "sm_89", sizes={"heads": heads}) for heads in (5, 128)),
            *(make_form("ContextAttention", target, sizes={"v_dim": 40}) for target in TARGET_NAMES),
        ]
        with opened(evaluator, [form.planned for form in forms], tmp_path) as library:
            for form in forms:
                shapes = make_shapes(form, tokens=70, keys=90, requests=2, longest_query=60, longest_key=80)
                for scale in (0.1, 0.7):
                    attributes = {**form.attributes, "softmax_scale": scale}
                    assert compare(library, form, attributes, shapes, 128, 0) == "plan"

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"name": "GatherLatent"}, "GatherLatent: found no kernels for it in this library, expected .* made for"),
            (
                {"causal": 2},
                r"ContextAttention: found attributes \(causal 2,\), expected \(causal 0,\) or \(causal 1,\)",
            ),
            (
                {"type": "float16"},
                r"ContextAttention: found element types \(float16, .*, expected \(bfloat16, bfloat16",
            ),
            (
                {"heads": 6},
                r"ContextAttention: found sizes \(heads 6, nope_dim 128, .*, expected \(heads 16, nope_dim",
            ),
            ({"target": "sm_90"}, "ContextAttention: found a GPU of generation sm_90, expected .*: sm_89"),
            (
                {"rank": 2},
                r"input 'q_nope': found shape \(70, 16\), expected dimensions \('tokens', 'heads', 'nope_dim'\)",
            ),
        ],
    )
    def test_what_is_not_in_the_library_is_named(
        self, evaluator: Evaluator, tmp_path: Path, changes: dict[str, Any], message: str
    ) -> None:
        forms = [make_form("ContextAttention", "sm_89", causal=causal) for causal in (0, 1)]
        with opened(evaluator, [form.planned for form in forms], tmp_path) as library:
            form = forms[1]
            if changes.get("name"):
                form = make_form("GatherLatent", "sm_89")
                shapes = make_shapes(form, pages=3, keys=5)
            else:
                sizes = {"tokens": 70, "keys": 90, "requests": 2, "longest_query": 60, "longest_key": 80}
                shapes = make_shapes(form, **{**sizes, "heads": changes.get("heads", 16)})
            if "rank" in changes:
                shapes = (shapes[0][: changes["rank"]], *shapes[1:])
            attributes = {**form.attributes, **{name: changes[name] for name in ("causal",) if name in changes}}
            types = (changes.get("type", form.input_types[0]), *form.input_types[1:])
            with pytest.raises(PlanError, match=message):
                library.find(form.definition, attributes, types, shapes, changes.get("target", "sm_89"))

    def test_types_as_they_become_known(self, evaluator: Evaluator, tmp_path: Path) -> None:
        form = make_form("GatherLatent", "sm_89")
        definition = form.definition
        with opened(evaluator, [form.planned], tmp_path) as library:
            assert library.output_types(definition, form.attributes, ("int8", "int32")) == ("bfloat16", "bfloat16")
            for count in range(5):
                library.check_types(definition, form.attributes, ("int8", "int32", "bfloat16", "bfloat16")[:count])
            with pytest.raises(PlanError, match=r"GatherLatent: found element types \(int8, int32, float16\)"):
                library.check_types(definition, form.attributes, ("int8", "int32", "float16"))
            with pytest.raises(PlanError, match="GatherLatent: found 5 tensors, expected at most 4"):
                library.check_types(definition, form.attributes, ("int8",) * 5)

    def test_outputs_of_several_types_are_refused(self, evaluator: Evaluator, tmp_path: Path) -> None:
        """An int8 cache says nothing of the network's type."""
        form = make_form("GatherLatent", "sm_89")
        settings = dataclasses.replace(SETTINGS, model_dtype=DType.FLOAT16)
        other = trace_operation(
            form.definition, form.attributes, settings, {**form.fixed_dims, "page_size": 16}, form.target
        )
        with (
            opened(evaluator, [form.planned, other], tmp_path) as library,
            pytest.raises(PlanError, match="GatherLatent: found outputs of several types"),
        ):
            library.output_types(form.definition, form.attributes, ("int8", "int32"))


def test_equal_operations_make_equal_bytes(tmp_path: Path) -> None:
    rng = generator(5)
    forms = [random_form(rng, definition) for definition in DEFINITIONS for _ in range(5)]

    def data() -> bytes:
        again = [
            trace_operation(form.definition, form.attributes, form.settings, form.fixed_dims, form.target)
            for form in forms
            if form is not None
        ]
        return library_data(DEFINITIONS, again, kernel_files(again, tmp_path))

    assert hashlib.sha256(data()).digest() == hashlib.sha256(data()).digest()
    assert set(TARGETS) == {form.target.name for form in forms if form is not None}
