"""The pages of a latent cache: who holds them, and which full ones hold tokens that another request may share."""

from __future__ import annotations

import hashlib
from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence

from trtllm_mla.runtime.step import Int32Array

PageKey = bytes
_KEY_BYTES = 32


def pages_for(num_tokens: int, page_size: int) -> int:
    """Pages that hold ``num_tokens`` tokens."""
    return -(-num_tokens // page_size)


def page_key(previous: PageKey | None, token_ids: Int32Array) -> PageKey:
    """Key of a full page: the hash of its tokens and of all tokens before them.

    A row of the cache depends on every token up to its own, so pages are alike only with everything before them. The
    hash is a cryptographic one, since prompts come from strangers, and a collision would show one's tokens to another.

    Args:
        previous: Key of the page before it, or None for a request's first page.
        token_ids: int32 [page_size].
    """
    return hashlib.blake2b((previous or b"") + token_ids.tobytes(), digest_size=_KEY_BYTES).digest()


class PagePool:
    """Hands out the pages of a pool, and finds full pages again by what they hold.

    A page is free, or has one holder or more. Full pages can be published under the key of their tokens; whoever needs
    the same tokens shares them. A page that loses its last holder is free at once, but keeps its rows until it is
    handed out for other tokens: pages without a key go first, and of either kind those that were freed longest ago.

    Args:
        num_pages: Pages in the pool.
    """

    def __init__(self, num_pages: int) -> None:
        self._holders = [0] * num_pages
        self._keys: list[PageKey | None] = [None] * num_pages
        self._published: dict[PageKey, int] = {}
        self._blank = deque(range(num_pages))
        self._reusable: OrderedDict[int, PageKey] = OrderedDict()

    @property
    def num_pages(self) -> int:
        """Pages in the pool."""
        return len(self._holders)

    @property
    def num_free(self) -> int:
        """Pages without a holder."""
        return len(self._blank) + len(self._reusable)

    def holders(self, page: int) -> int:
        """How many hold a page."""
        return self._holders[page]

    def find(self, keys: Iterable[PageKey]) -> list[int]:
        """The pages that hold a text's first tokens, as far as they are known.

        Args:
            keys: Keys of its pages, in order; those after the first unknown one are not asked for.
        """
        pages = []
        for key in keys:
            page = self._published.get(key)
            if page is None:
                break
            pages.append(page)
        return pages

    def num_free_among(self, pages: Iterable[int]) -> int:
        """How many of the pages are free, so that sharing them leaves fewer to hand out."""
        return sum(not self._holders[page] for page in pages)

    def share(self, pages: Iterable[int]) -> None:
        """Adds a holder to each of the pages, which ``find`` returned."""
        for page in pages:
            if not self._holders[page]:
                del self._reusable[page]
            self._holders[page] += 1

    def allocate(self, count: int) -> list[int]:
        """Takes free pages for new tokens; what they held is forgotten.

        Args:
            count: How many.

        Returns:
            The page numbers; each has one holder.

        Raises:
            ValueError: Fewer are free. Callers ask ``num_free`` first.
        """
        if not 0 <= count <= self.num_free:
            raise ValueError(f"asked for {count} pages, expected 0 to {self.num_free}, which are free")
        pages = []
        for _ in range(count):
            page = self._blank.popleft() if self._blank else self._forget_oldest()
            self._holders[page] = 1
            pages.append(page)
        return pages

    def publish(self, page: int, key: PageKey) -> None:
        """Makes a full page known by its key. Where another page already is, that one stays known.

        Raises:
            ValueError: The page is free or has a key.
        """
        if not self._holders[page] or self._keys[page] is not None:
            raise ValueError(f"page {page}: found it free or published, expected a held page without a key")
        if key not in self._published:
            self._published[key] = page
            self._keys[page] = key

    def release(self, pages: Sequence[int]) -> None:
        """Takes one holder from each of a request's pages.

        Args:
            pages: In the request's order. Of those that become free, the last are forgotten first: without the pages
                before it, a page cannot be found.

        Raises:
            ValueError: A page has no holder, is named twice, or does not exist; then none is released.
        """
        if any(not 0 <= page < self.num_pages for page in pages):
            raise ValueError(f"found pages {list(pages)}, expected numbers from 0 to {self.num_pages - 1}")
        if len(set(pages)) != len(pages) or not all(self._holders[page] for page in pages):
            raise ValueError(f"found pages {list(pages)}, expected held pages, each once")
        for page in reversed(pages):
            self._holders[page] -= 1
            if self._holders[page]:
                continue
            key = self._keys[page]
            if key is None:
                self._blank.append(page)
            else:
                self._reusable[page] = key

    def _forget_oldest(self) -> int:
        page, key = self._reusable.popitem(last=False)
        del self._published[key]
        self._keys[page] = None
        return page
