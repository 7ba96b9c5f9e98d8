"""Ownership of the pool's pages: a stack of free page ids."""

from __future__ import annotations

import numpy as np

from ramet.errors import CapacityExceeded


class PagePool:
    """A fixed number of pages; each is free or belongs to exactly one run.

    Parameters
    ----------
    num_pages : int

    Examples
    --------
    >>> pool = PagePool(4)
    >>> pool.allocate(3).tolist(), pool.num_free
    ([0, 1, 2], 1)
    """

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        # A stack, lowest id on top: a fresh pool touches no more memory than it uses, and the pages freed last (still
        # in the CPU's cache) are used first.
        self._stack = np.arange(num_pages - 1, -1, -1, dtype=np.int32)
        self.num_free = num_pages

    @property
    def num_allocated(self) -> int:
        return self.num_pages - self.num_free

    def allocate(self, count: int) -> np.ndarray:
        """Take ``count`` pages (int32 [count]).

        Raises
        ------
        CapacityExceeded
            Fewer are free. Callers make room first, by eviction or preemption.
        """
        if count > self.num_free:
            raise CapacityExceeded(f"{count} pages were asked for, {self.num_free} of {self.num_pages} are free")
        top = self.num_free
        self.num_free -= count
        return self._stack[self.num_free : top][::-1].copy()

    def release(self, pages: np.ndarray) -> None:
        """Give pages back."""
        top = self.num_free + len(pages)
        if top > self.num_pages:
            raise CapacityExceeded(f"{len(pages)} pages came back, more than the {self.num_allocated} that were taken")
        self._stack[self.num_free : top] = pages[::-1]
        self.num_free = top

    def free_pages(self) -> np.ndarray:
        """The free page ids (a copy, for invariant checks)."""
        return self._stack[: self.num_free].copy()
