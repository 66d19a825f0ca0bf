import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from trtllm_mla.runtime.pages import PagePool, page_key, pages_for


@pytest.mark.parametrize(("tokens", "page_size", "pages"), [(0, 16, 0), (1, 16, 1), (16, 16, 1), (17, 16, 2)])
def test_pages_for(tokens, page_size, pages):
    assert pages_for(tokens, page_size) == pages


def key(*numbers):
    return page_key(None, np.array(numbers, dtype=np.int32))


class TestKeys:
    def test_a_key_depends_on_the_pages_tokens_and_on_all_before_them(self):
        tokens = np.array([3, 1, 4], dtype=np.int32)
        keys = {
            page_key(None, tokens),
            page_key(None, tokens[::-1].copy()),
            page_key(page_key(None, tokens), tokens),
            page_key(page_key(page_key(None, tokens), tokens), tokens),
        }
        assert len(keys) == 4
        assert page_key(None, tokens) == page_key(None, tokens.copy())


class Pool(RuleBasedStateMachine):
    """A pool beside a model of it: a list of page tables, and what each page was published for last."""

    def __init__(self):
        super().__init__()
        self.pool = PagePool(7)
        self.tables = []
        self.contents = {}
        self.next_key = 0

    @rule(count=st.integers(0, 4))
    def allocate(self, count):
        if count <= self.pool.num_free:
            pages = self.pool.allocate(count)
            for page in pages:
                assert not any(page in table for table in self.tables), "handed out while somebody held it"
                self.contents = {known: where for known, where in self.contents.items() if where != page}
            self.tables.append(pages)

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def publish(self, data):
        table = data.draw(st.sampled_from(self.tables))
        fresh = [page for page in table if page not in self.contents.values()]
        if fresh:
            self.next_key += 1
            page = data.draw(st.sampled_from(fresh))
            self.pool.publish(page, key(self.next_key))
            self.contents[key(self.next_key)] = page

    @precondition(lambda self: self.contents)
    @rule(data=st.data())
    def share(self, data):
        keys = data.draw(st.lists(st.sampled_from(sorted(self.contents)), min_size=1, max_size=3, unique=True))
        pages = self.pool.find([*keys, b"unknown", keys[0]])
        assert pages == [self.contents[known] for known in keys], "until the first unknown key"
        free = self.pool.num_free
        expected = self.pool.num_free_among(pages)
        self.pool.share(pages)
        assert self.pool.num_free == free - expected
        self.tables.append(pages)

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def release(self, data):
        index = data.draw(st.integers(0, len(self.tables) - 1))
        self.pool.release(self.tables.pop(index))

    @invariant()
    def holders_are_counted(self):
        held = [page for table in self.tables for page in table]
        assert [self.pool.holders(page) for page in range(7)] == [held.count(page) for page in range(7)]
        assert self.pool.num_free == 7 - len(set(held))

    @invariant()
    def every_published_page_is_found_until_it_is_handed_out_again(self):
        for known, page in self.contents.items():
            assert self.pool.find([known]) == [page]


TestAnyUse = Pool.TestCase
TestAnyUse.settings = settings(max_examples=200, stateful_step_count=40, deadline=None)


class TestOrder:
    def test_pages_without_a_key_go_first_then_those_freed_longest_ago(self):
        pool = PagePool(5)
        table = pool.allocate(5)
        for page in table[:3]:
            pool.publish(page, key(page))
        pool.release(table[:2])
        pool.release(table[2:])
        assert pool.allocate(5) == [4, 3, 1, 0, 2]

    def test_of_a_request_the_last_pages_are_forgotten_first(self):
        pool = PagePool(4)
        table = pool.allocate(4)
        keys = [key(page) for page in table]
        for page, known in zip(table, keys, strict=True):
            pool.publish(page, known)
        pool.release(table)
        for left in (3, 2, 1, 0):
            pool.allocate(1)
            assert pool.find(keys) == table[:left]

    def test_the_page_published_first_stays_known(self):
        pool = PagePool(3)
        first, second = pool.allocate(1), pool.allocate(1)
        pool.publish(first[0], key(9))
        pool.publish(second[0], key(9))
        pool.release(second)
        assert pool.find([key(9)]) == first
        assert pool.allocate(1) != first
        pool.publish(pool.allocate(1)[0], key(8))


class TestRefusal:
    def test_allocating_more_than_is_free_takes_nothing(self):
        pool = PagePool(3)
        pool.allocate(1)
        with pytest.raises(ValueError, match="asked for 3 pages, expected 0 to 2"):
            pool.allocate(3)
        assert pool.num_free == 2

    @pytest.mark.parametrize(
        ("pages", "message"),
        [
            ([0, 0], "each once"),
            ([0, 3], "each once"),
            ([0, 5], "expected numbers from 0 to 4"),
            ([-1], "found pages"),
        ],
    )
    def test_releasing_what_nobody_holds_releases_nothing(self, pages, message):
        pool = PagePool(5)
        assert pool.allocate(2) == [0, 1]
        with pytest.raises(ValueError, match=message):
            pool.release(pages)
        assert pool.num_free == 3

    def test_publishing_a_free_page_or_one_twice(self):
        pool = PagePool(2)
        (page,) = pool.allocate(1)
        pool.publish(page, key(1))
        for wrong in (page, 1):
            with pytest.raises(ValueError, match=f"page {wrong}: found it free or published"):
                pool.publish(wrong, key(2))


@given(st.lists(st.integers(0, 60), min_size=1, max_size=40), st.integers(1, 7))
def test_keys_of_pages_are_alike_exactly_as_far_as_texts_are(text, page_size):
    def keys(tokens):
        found, previous = [], None
        for begin in range(0, len(tokens) - page_size + 1, page_size):
            previous = page_key(previous, np.array(tokens[begin : begin + page_size], dtype=np.int32))
            found.append(previous)
        return found

    other = [*text[:-1], text[-1] + 1]
    same = (len(text) - 1) // page_size
    assert keys(text)[:same] == keys(other)[:same]
    assert not set(keys(text)[same:]) & set(keys(other)[same:])
