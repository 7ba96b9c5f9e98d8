"""Rows of growing arrays for the few slots that need them, so that nothing is ever sized slots x vocabulary."""

from __future__ import annotations

import numpy as np


class RowPool:
    """Lends row numbers 0, 1, 2, ... to slots, lowest first.

    The arrays themselves belong to the owner, who makes them ``capacity`` rows long whenever that has changed.

    Parameters
    ----------
    num_slots : int

    Attributes
    ----------
    row_of : int32 array [num_slots]
        Row of each slot, -1 for none.
    capacity : int
        Rows the owner's arrays must have: doubles when they run out, 0 when no slot holds a row.
    """

    def __init__(self, num_slots: int) -> None:
        self.row_of = np.full(num_slots, -1, dtype=np.int32)
        self.capacity = 0
        self._free = np.empty(0, dtype=np.int32)

    @property
    def in_use(self) -> int:
        """Number of rows lent."""
        return self.capacity - len(self._free)

    def lend(self, slots: np.ndarray) -> np.ndarray:
        """Give each slot (which must have none) a row and return the rows."""
        missing = len(slots) - len(self._free)
        if missing > 0:
            grown = max(self.capacity + missing, 2 * self.capacity)
            self._free = np.concatenate([self._free, np.arange(self.capacity, grown, dtype=np.int32)])
            self.capacity = grown
        rows, self._free = self._free[: len(slots)], self._free[len(slots) :]
        self.row_of[slots] = rows
        return rows

    def take_back(self, slots: np.ndarray) -> None:
        """Take back the rows of these slots; slots without a row are passed over."""
        rows = self.row_of[slots]
        rows = rows[rows >= 0]
        if not len(rows):
            return
        self.row_of[slots] = -1
        self._free = np.sort(np.concatenate([self._free, rows]))
        if not self.in_use:
            self.capacity, self._free = 0, np.empty(0, dtype=np.int32)


def resized(array: np.ndarray, rows: int, fill: int) -> np.ndarray:
    """Return ``array`` with ``rows`` rows: the old ones kept (0 rows: forgotten), new ones filled."""
    if rows <= len(array):
        return array[:rows].copy() if rows < len(array) else array
    new = np.full((rows, *array.shape[1:]), fill, dtype=array.dtype)
    new[: len(array)] = array
    return new
