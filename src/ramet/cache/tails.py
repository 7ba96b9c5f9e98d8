"""What live rows are writing, in arrays indexed by slot: no Python object is touched per row and step.

::

    run:   start                computed
             |---- written -------|
    pages  [ p0 | p1 | p2 | p3 ]        position p is KV slot (p - start) % page_size
                                        of page pages[(p - start) // page_size]
"""

from __future__ import annotations

import numpy as np

from ramet.errors import CapacityExceeded

NO_RUN = -1


class TailTable:
    """Runs that have a writer, as rows of arrays. A run without a writer keeps its own trimmed copies.

    Parameters
    ----------
    num_slots : int
        Rows that can be live at once: samples and prefills.
    max_model_len : int
        Tokens; the width of the page table follows from it.
    page_size : int

    Attributes
    ----------
    run_id, parent_id, start, computed, num_pages : int64 [slots]
        As in :class:`~ramet.cache.runs.Run`; -1 for no run.
    pages : int32 [slots, pages]
    sampled : int32 [slots, tokens]
        What the row has sampled; entry i is the token at absolute position ``sampled_from + i``.
    sampled_from : int64 [slots]
    """

    def __init__(self, num_slots: int, max_model_len: int, page_size: int) -> None:
        self.page_size = page_size
        self.max_pages = -(-max_model_len // page_size) + 1
        self.run_id = np.full(num_slots, NO_RUN, np.int64)
        self.parent_id = np.full(num_slots, NO_RUN, np.int64)
        self.start = np.zeros(num_slots, np.int64)
        self.computed = np.zeros(num_slots, np.int64)
        self.num_pages = np.zeros(num_slots, np.int64)
        # zeros, not empty: the kernel maps untouched zero pages lazily, so wide tables cost no memory until used
        self.pages = np.zeros((num_slots, self.max_pages), np.int32)
        self.sampled = np.zeros((num_slots, max_model_len + 1), np.int32)
        self.sampled_from = np.zeros(num_slots, np.int64)
        self._free = list(range(num_slots - 1, -1, -1))

    @property
    def num_slots(self) -> int:
        return len(self.run_id)

    @property
    def num_free(self) -> int:
        return len(self._free)

    def take(self, count: int) -> np.ndarray:
        """Take ``count`` free slots (int64 [count]), lowest first.

        Raises
        ------
        CapacityExceeded
            Fewer are free.
        """
        if count > len(self._free):
            raise CapacityExceeded(f"{count} slots were asked for, {len(self._free)} of {self.num_slots} are free")
        taken = self._free[len(self._free) - count :][::-1]
        del self._free[len(self._free) - count :]
        return np.array(taken, np.int64)

    def give_back(self, slot: int) -> None:
        """Free a slot whose run has been frozen or dropped."""
        self.run_id[slot] = self.parent_id[slot] = NO_RUN
        self.num_pages[slot] = 0
        self._free.append(slot)

    def bind(self, slots: np.ndarray, run_ids: np.ndarray, parent_id: int, start: int) -> None:
        """Let fresh runs, all forked from the same place, be written through these slots."""
        self.run_id[slots] = run_ids
        self.parent_id[slots] = parent_id
        self.start[slots] = self.computed[slots] = start
        self.num_pages[slots] = 0

    def pages_missing(self, slots: np.ndarray, ends: np.ndarray) -> np.ndarray:
        """Pages each row lacks to hold positions up to ``ends`` (int64 [rows])."""
        wanted = -(-(ends - self.start[slots]) // self.page_size)
        return np.maximum(wanted - self.num_pages[slots], 0)

    def append(self, slots: np.ndarray, counts: np.ndarray, pages: np.ndarray) -> None:
        """Append ``counts[i]`` of ``pages`` (in order) to row ``slots[i]``."""
        rows = np.repeat(slots, counts)
        first = np.cumsum(counts) - counts
        within = np.arange(len(pages)) - np.repeat(first, counts)
        self.pages[rows, self.num_pages[rows] + within] = pages
        self.num_pages[slots] += counts

    def kv_slots(self, slots: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """KV slot (page * page_size + offset) of one position for each entry of ``slots`` (int64)."""
        offset = positions - self.start[slots]
        page = self.pages[slots, offset // self.page_size].astype(np.int64)
        return page * self.page_size + offset % self.page_size
