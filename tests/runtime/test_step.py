import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trtllm_mla.network.contract import step_inputs
from trtllm_mla.runtime.step import Chunk, LogitRows, StepInputs, build_step


def obvious_step(context, generation, page_size):
    """The same arrays, token by token."""
    step = {field.name: [] for field in dataclasses.fields(StepInputs)}
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
    for name, values in expected.items():
        found = getattr(step, name)
        assert found.dtype == np.int32
        assert found.flags.c_contiguous
        assert found.shape == np.shape(values), name
        assert found.tolist() == np.asarray(values).tolist(), name


def test_names_and_ranks_are_those_of_the_contract():
    step = build_step([], [chunk(3)], page_size=4, num_pages=2)
    arrays = step.arrays(absorption=True)
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
