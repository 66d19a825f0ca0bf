"""The pages of a latent cache: which are free, and which were handed out."""

from __future__ import annotations

import numpy as np

from trtllm_mla.runtime.step import Int32Array


def pages_for(num_tokens: int, page_size: int) -> int:
    """Pages that hold ``num_tokens`` tokens."""
    return -(-num_tokens // page_size)


class PageAllocator:
    """Hands out the pages of a pool. A page has one owner at a time.

    The page freed last is handed out first: it is the likeliest to be in a processor's cache.

    Args:
        num_pages: Pages in the pool.
    """

    def __init__(self, num_pages: int) -> None:
        self._free = np.arange(num_pages - 1, -1, -1, dtype=np.int32)  # a stack: its end is handed out first
        self._num_free = num_pages
        self._in_use = np.zeros(num_pages, dtype=np.bool_)

    @property
    def num_pages(self) -> int:
        """Pages in the pool."""
        return len(self._in_use)

    @property
    def num_free(self) -> int:
        """Pages that can be handed out."""
        return self._num_free

    def allocate(self, count: int) -> Int32Array:
        """Takes pages from the pool.

        Args:
            count: How many.

        Returns:
            int32 [count]: the page numbers, for instance as a request's page table.

        Raises:
            ValueError: Fewer are free. Callers ask ``num_free`` first.
        """
        if not 0 <= count <= self._num_free:
            raise ValueError(f"asked for {count} pages, expected 0 to {self._num_free}, which are free")
        pages = self._free[self._num_free - count : self._num_free][::-1].copy()
        self._num_free -= count
        self._in_use[pages] = True
        return pages

    def free(self, pages: Int32Array) -> None:
        """Gives pages back.

        Args:
            pages: int32 [count]: numbers that ``allocate`` returned.

        Raises:
            ValueError: A page is not in use, is named twice, or does not exist; then none is freed.
        """
        outside = (pages < 0) | (pages >= self.num_pages)
        if outside.any():
            raise ValueError(f"found pages {pages[outside]}, expected numbers from 0 to {self.num_pages - 1}")
        if len(np.unique(pages)) != len(pages) or not self._in_use[pages].all():
            raise ValueError(f"found pages {pages}, expected pages in use, each once: freeing twice gives two owners")
        self._in_use[pages] = False
        self._free[self._num_free : self._num_free + len(pages)] = pages[::-1]
        self._num_free += len(pages)
