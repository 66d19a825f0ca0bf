import dataclasses
import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trtllm_mla.network.contract import history_inputs, step_inputs
from trtllm_mla.runtime.step import ONE_PASS, Chunk, ContextPasses, LogitRows, StepInputs, build_step


def obvious_step(context, generation, page_size):
    """The same arrays, token by token."""
    step = {field.name: [] for field in dataclasses.fields(StepInputs) if field.name != "context_history"}
    step |= {name: [0] for name in ("context_query_offsets", "context_key_offsets", "generation_query_offsets")}
    for prefix, chunks in (("context", context), ("generation", generation)):
        for chunk in chunks:
            for number, token in enumerate(chunk.token_ids):
                position = chunk.start + number
                last = number == len(chunk.token_ids) - 1
                if chunk.logits is LogitRows.ALL or (chunk.logits is LogitRows.LAST and last):
                    step["last_token_ids"].append(len(step["input_ids"]))
                step["input_ids"].append(token)
                step["slot_mapping"].append(chunk.pages[position // page_size] * page_size + position % page_size)
                step[f"{prefix}_position_ids"].append(position)
            first = step[f"{prefix}_query_offsets"][-1]
            step[f"{prefix}_query_offsets"].append(first + len(chunk.token_ids))
            step[f"{prefix}_query_index"].append(list(range(first, first + len(chunk.token_ids))))
            length = chunk.start + len(chunk.token_ids)
            if prefix == "context":
                first = step["context_key_offsets"][-1]
                step["context_key_offsets"].append(first + length)
                step["context_key_index"].append(list(range(first, first + length)))
                for position in range(length):
                    slot = chunk.pages[position // page_size] * page_size + position % page_size
                    step["context_kv_slots"].append(slot)
            else:
                step["generation_sequence_length"].append(length)
                step["kv_cache_block_offsets"].append(chunk.pages[: (length + page_size - 1) // page_size].tolist())
    for name in ("context_query_index", "context_key_index", "generation_query_index", "kv_cache_block_offsets"):
        longest = max([1, *map(len, step[name])])
        rows = [row + [0] * (longest - len(row)) for row in step[name]]
        step[name] = np.array(rows).reshape(len(rows), longest)
    return step


@st.composite
def steps(draw):
    page_size = draw(st.sampled_from([1, 3, 16]))
    chunk_sizes = st.tuples(st.integers(0, 40), st.integers(1, 40), st.integers(0, 3), st.sampled_from(LogitRows))
    sizes = [draw(st.lists(chunk_sizes, max_size=4)) for _ in range(2)]
    needed = [[(-(-(start + count) // page_size) + spare) for start, count, spare, _ in group] for group in sizes]
    num_pages = sum(map(sum, needed)) + draw(st.integers(1, 5))
    random = np.random.default_rng(draw(st.integers(0, 2**32)))
    order = random.permutation(num_pages).astype(np.int32).tolist()
    groups = []
    for group, pages in zip(sizes, needed, strict=True):
        chunks = []
        for (start, count, _, logits), num in zip(group, pages, strict=True):
            tokens = random.integers(0, 1000, count).astype(np.int32)
            chunks.append(Chunk(tokens, start, np.array([order.pop() for _ in range(num)], np.int32), logits))
        groups.append(chunks)
    return *groups, page_size, num_pages


@given(steps())
def test_equals_the_obvious_version(example):
    context, generation, page_size, num_pages = example
    step = build_step(context, generation, page_size=page_size, num_pages=num_pages)
    expected = obvious_step(context, generation, page_size)
    assert step.context_history == ()
    for name, values in expected.items():
        found = getattr(step, name)
        assert found.dtype == np.int32
        assert found.flags.c_contiguous
        assert found.shape == np.shape(values), name
        assert found.tolist() == np.asarray(values).tolist(), name


@given(steps(), st.integers(1, 5), st.integers(0, 200))
def test_passes_hold_every_cached_token_once(example, count, spare):
    """Against a token-by-token account: limits, newest tokens first, then the older ones in order and without gaps."""
    context, generation, page_size, num_pages = example
    new_tokens = sum(len(chunk.token_ids) for chunk in context)
    cached = sum(chunk.length for chunk in context)
    passes = ContextPasses(count, max(new_tokens, -(-cached // count)) + spare)
    step = build_step(context, generation, page_size=page_size, num_pages=num_pages, context_passes=passes)
    one = build_step(context, generation, page_size=page_size, num_pages=num_pages)
    for field in dataclasses.fields(StepInputs):
        if field.name not in ("context_kv_slots", "context_key_offsets", "context_key_index", "context_history"):
            assert np.array_equal(getattr(step, field.name), getattr(one, field.name)), field.name

    parts = [(step.context_kv_slots, step.context_key_offsets, step.context_key_index)]
    parts += [(item.kv_slots, item.key_offsets, item.key_index) for item in step.context_history]
    assert len(parts) == count
    for slots, offsets, index in parts:
        assert len(slots) == offsets[-1] <= passes.max_keys
        assert len(offsets) == len(context) + 1
        assert index.shape == (len(context), max([1, *np.diff(offsets)]))
        assert all(array.dtype == np.int32 and array.flags.c_contiguous for array in (slots, offsets, index))
        for row, (first, last) in zip(index, itertools.pairwise(offsets), strict=True):
            assert row.tolist() == [*range(first, last)] + [0] * (index.shape[1] - (last - first))

    # Oldest first, a request's slots over all passes are those of one pass.
    for request, chunk in enumerate(context):
        found = [slots[slice(*offsets[request : request + 2])] for slots, offsets, _ in (*parts[1:], parts[0])]
        expected = one.context_kv_slots[slice(*one.context_key_offsets[request : request + 2])]
        assert np.concatenate(found).tolist() == expected.tolist()
        assert len(found[-1]) >= len(chunk.token_ids)

    # No pass begins before those in front of it are full.
    sizes = [len(slots) for slots, _, _ in parts]
    assert sizes == [min(passes.max_keys, max(cached - passes.max_keys * number, 0)) for number in range(count)]
    assert step.num_context_keys == cached


def test_a_history_that_lies_in_three_passes():
    context = [chunk(2, start=3, pages=[0, 1]), chunk(1, start=9, pages=[2, 3, 4])]
    step = build_step(context, [], page_size=4, num_pages=5, context_passes=ContextPasses(4, 5))
    first, second, third = step.context_history
    assert step.context_kv_slots.tolist() == [1, 2, 3, 4, 17]  # two tokens of history beside the three new ones
    assert step.context_key_offsets.tolist() == [0, 4, 5]
    assert first.kv_slots.tolist() == [0, 8, 9, 10, 11]
    assert first.key_offsets.tolist() == [0, 1, 5]
    assert first.key_index.tolist() == [[0, 0, 0, 0], [1, 2, 3, 4]]
    assert second.kv_slots.tolist() == [12, 13, 14, 15, 16]
    assert second.key_offsets.tolist() == [0, 0, 5]
    assert second.key_index.tolist() == [[0] * 5, [0, 1, 2, 3, 4]]
    assert (third.kv_slots.size, third.key_offsets.tolist(), third.key_index.tolist()) == (0, [0, 0, 0], [[0], [0]])


@pytest.mark.parametrize(
    ("chunks", "passes", "message"),
    [
        ([(6, 0)], ContextPasses(3, 5), "6 new tokens and 6 cached ones.* at most 5 and 15: 3 passes of 5"),
        ([(3, 0), (3, 0)], ContextPasses(3, 5), "6 new tokens and 6 cached ones"),
        ([(1, 10)], ContextPasses(2, 5), "1 new tokens and 11 cached ones.* at most 5 and 10: 2 passes of 5"),
        ([(4, 2)], ContextPasses(1, 5), "4 new tokens and 6 cached ones.* at most 5 and 5: 1 passes of 5"),
    ],
)
def test_refuses_what_the_passes_have_no_room_for(chunks, passes, message):
    context = [chunk(count, start, [3 * i, 3 * i + 1, 3 * i + 2]) for i, (count, start) in enumerate(chunks)]
    with pytest.raises(ValueError, match=message):
        build_step(context, [], page_size=4, num_pages=6, context_passes=passes)


def test_the_names_of_passes_are_those_of_the_contract():
    context = [chunk(1, start=9, pages=[2, 3, 4])]
    step = build_step(context, [], page_size=4, num_pages=5, context_passes=ContextPasses(3, 4))
    for absorption in (True, False):
        arrays = step.arrays(absorption=absorption, context_passes=3)
        declared = {item.name: item for item in step_inputs(absorption=absorption, context_passes=3)}
        assert arrays.keys() == declared.keys() - {"rotary_cos_sin"}
        assert all(values.ndim == len(declared[name].dims) for name, values in arrays.items())
        for number, item in enumerate(step.context_history, 1):
            slots, offsets, index = (arrays[contract.name] for contract in history_inputs(number))
            assert slots is item.kv_slots
            assert offsets is item.key_offsets
            assert index is item.key_index


@pytest.mark.parametrize(("built", "network"), [(1, 2), (3, 2), (2, 1)])
def test_a_step_is_for_one_number_of_passes(built, network):
    step = build_step([chunk(3)], [], page_size=4, num_pages=2, context_passes=ContextPasses(built, 8))
    with pytest.raises(ValueError, match=f"a step of {built} passes of the context group, expected the {network} of"):
        step.arrays(absorption=True, context_passes=network)


def test_names_and_ranks_are_those_of_the_contract():
    step = build_step([], [chunk(3)], page_size=4, num_pages=2)
    arrays = step.arrays(absorption=True)
    assert ONE_PASS.count == 1
    declared = {item.name: item for item in step_inputs(absorption=True) if item.name != "rotary_cos_sin"}
    assert arrays.keys() == declared.keys()
    for name, values in arrays.items():
        assert declared[name].dtype == "int32"
        assert values.ndim == len(declared[name].dims)


def test_without_absorption_there_are_no_generation_inputs():
    context_only = build_step([chunk(3)], [], page_size=4, num_pages=2)
    arrays = context_only.arrays(absorption=False)
    assert "input_ids" in arrays
    assert "context_key_index" in arrays
    assert not any("generation" in name or "block" in name for name in arrays)
    with pytest.raises(ValueError, match="found 3 generation tokens"):
        build_step([], [chunk(3)], page_size=4, num_pages=2).arrays(absorption=False)


def chunk(count, start=0, pages=(1,)):
    return Chunk(np.arange(count, dtype=np.int32), start, np.array(pages, np.int32))


@pytest.mark.parametrize(
    ("context", "generation", "num_pages", "message"),
    [
        ([chunk(0)], [], 2, "at least one token"),
        ([chunk(1, start=-1)], [], 2, "at least one token"),
        ([], [chunk(5)], 2, "that need \\[2\\]"),
        ([], [chunk(1, start=4)], 2, "that need \\[2\\]"),
        ([chunk(1, pages=[2])], [], 2, "numbers from 0 to 1"),
        ([chunk(1, pages=[-1])], [], 2, "numbers from 0 to 1"),
        ([chunk(1)], [chunk(1)], 2, "share a cache slot"),
        ([chunk(6, pages=[1, 1])], [], 2, "share a cache slot"),
        ([chunk(1)], [], 2**29, "fit in int32"),
    ],
)
def test_refuses_chunks_that_do_not_fit_the_pool(context, generation, num_pages, message):
    with pytest.raises(ValueError, match=message):
        build_step(context, generation, page_size=4, num_pages=num_pages)
