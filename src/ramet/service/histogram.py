"""Counts of values by bucket: cheap enough for every token, and a plain list for the way between processes."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence


class Histogram:
    """Values counted by bucket; a bucket holds what is at most its bound.

    Parameters
    ----------
    bounds : sequence of float
        Ascending; one more bucket takes what is above the last.

    Examples
    --------
    >>> histogram = Histogram([1, 2])
    >>> histogram.add(1), histogram.add(5, times=3)
    (None, None)
    >>> histogram.counts, histogram.total
    ([1, 0, 3], 16)
    """

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(self.bounds) + 1)
        self.total: float = 0

    def add(self, value: float, times: int = 1) -> None:
        """Count a value, once or several times."""
        self.counts[bisect_left(self.bounds, value)] += times
        self.total += value * times
