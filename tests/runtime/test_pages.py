import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trtllm_mla.runtime.pages import PageAllocator, pages_for


@pytest.mark.parametrize(("tokens", "page_size", "pages"), [(0, 16, 0), (1, 16, 1), (16, 16, 1), (17, 16, 2)])
def test_pages_for(tokens, page_size, pages):
    assert pages_for(tokens, page_size) == pages


@given(
    num_pages=st.integers(1, 20),
    actions=st.lists(st.tuples(st.booleans(), st.integers(0, 8)), max_size=40),
)
def test_no_page_has_two_owners_and_none_is_lost(num_pages, actions):
    allocator = PageAllocator(num_pages)
    owned = []
    for allocate, number in actions:
        if allocate and number <= allocator.num_free:
            owned.append(allocator.allocate(number))
        elif not allocate and owned:
            allocator.free(owned.pop(number % len(owned)))
        pages = [page for table in owned for page in table.tolist()]
        assert len(set(pages)) == len(pages)
        assert set(pages) <= set(range(num_pages))
        assert allocator.num_free == num_pages - len(pages)
    for table in owned:
        allocator.free(table)
    assert sorted(allocator.allocate(num_pages).tolist()) == list(range(num_pages))


def test_allocating_more_than_is_free_is_refused_and_takes_nothing():
    allocator = PageAllocator(3)
    allocator.allocate(1)
    with pytest.raises(ValueError, match="asked for 3 pages, expected 0 to 2"):
        allocator.allocate(3)
    assert allocator.num_free == 2


@pytest.mark.parametrize(
    ("pages", "message"),
    [([0, 0], "each once"), ([0, 3], "each once"), ([0, 5], "expected numbers from 0 to 4"), ([-1], "found pages")],
)
def test_freeing_what_is_not_in_use_is_refused_and_frees_nothing(pages, message):
    allocator = PageAllocator(5)
    table = allocator.allocate(2)
    assert table.tolist() == [0, 1]
    with pytest.raises(ValueError, match=message):
        allocator.free(np.array(pages, np.int32))
    assert allocator.num_free == 3
    allocator.free(table)
    with pytest.raises(ValueError, match="freeing twice"):
        allocator.free(table)


def test_a_page_table_is_not_changed_by_later_calls():
    allocator = PageAllocator(4)
    table = allocator.allocate(2)
    copy = table.copy()
    other = allocator.allocate(2)
    allocator.free(other)
    allocator.allocate(1)
    assert (table == copy).all()
