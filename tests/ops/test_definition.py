import pytest

from trtllm_mla.ops import OPS
from trtllm_mla.ops.append_latent import APPEND_LATENT
from trtllm_mla.ops.context_attention import CONTEXT_ATTENTION
from trtllm_mla.ops.definition import OpDefinition, split_dim
from trtllm_mla.ops.gather_latent import GATHER_LATENT

SHAPES = {"latent_cache": (3, 16, 128), "kv_slots": (9,)}


@pytest.mark.parametrize(
    ("dim", "expected"), [("requests+1", ("requests", 1)), ("tokens", ("tokens", 0)), (4, (None, 4))]
)
def test_split_dim(dim: str | int, expected: tuple[str | None, int]) -> None:
    assert split_dim(dim) == expected


def test_dims_come_from_shapes() -> None:
    assert GATHER_LATENT.resolve_dims(SHAPES) == {"pages": 3, "page_size": 16, "width": 128, "keys": 9}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"kv_slots": (9, 1)},
            r"GatherLatent: input 'kv_slots': found shape \(9, 1\), expected dimensions \('keys',\)",
        ),
        ({"latent_cache": (3, 16)}, "input 'latent_cache': found shape"),
    ],
)
def test_ranks_must_match(change: dict[str, tuple[int, ...]], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        GATHER_LATENT.resolve_dims(SHAPES | change)


def context_shapes(requests_plus_one: int) -> dict[str, tuple[int, ...]]:
    return {
        "q_nope": (7, 2, 48),
        "q_pe": (7, 2, 32),
        "k_nope": (9, 2, 48),
        "k_pe": (9, 32),
        "v": (9, 2, 40),
        "query_offsets": (requests_plus_one,),
        "key_offsets": (requests_plus_one,),
        "query_index": (2, 4),
        "key_index": (2, 5),
    }


def test_a_name_with_a_number_is_that_much_more() -> None:
    assert CONTEXT_ATTENTION.resolve_dims(context_shapes(3))["requests"] == 2


def test_equal_names_must_have_equal_sizes() -> None:
    with pytest.raises(ValueError, match=r"'query_index': found 2 on axis 0, expected requests = 3"):
        CONTEXT_ATTENTION.resolve_dims(context_shapes(4))


def test_offsets_need_at_least_one_entry() -> None:
    with pytest.raises(ValueError, match=r"'query_offsets': found 0 on axis 0, expected requests\+1 = 1"):
        CONTEXT_ATTENTION.resolve_dims(context_shapes(0))


def test_output_shapes_come_from_dims_and_attributes() -> None:
    dims = GATHER_LATENT.resolve_dims(SHAPES)
    attributes = {"kv_lora_rank": 96, "rope_dim": 32}
    assert GATHER_LATENT.output_shape(0, dims, attributes) == (9, 96)
    assert GATHER_LATENT.output_shape(1, dims, attributes) == (9, 32)


def test_an_aliased_output_has_the_contract_of_its_input() -> None:
    for output, source in APPEND_LATENT.aliases.items():
        assert APPEND_LATENT.outputs[output].dims == APPEND_LATENT.inputs[source].dims
        assert APPEND_LATENT.outputs[output].element_type == APPEND_LATENT.inputs[source].element_type


@pytest.mark.parametrize("op", OPS.values(), ids=OPS)
def test_every_output_dim_is_known(op: OpDefinition) -> None:
    inputs = {split_dim(dim)[0] for tensor in op.inputs for dim in tensor.dims}
    outputs = {split_dim(dim)[0] for tensor in op.outputs for dim in tensor.dims}
    assert outputs <= inputs | set(op.attributes)
    assert op.dynamic_dims <= inputs
