"""The likeliest tokens at every place of one sample, in arrays that grow."""

from __future__ import annotations

import numpy as np

_FIRST_ROOM = 16


class TopColumns:
    """Ranks and top-k lists of a sample's tokens.

    Appending is amortized constant, and looking copies nothing, so that a stream that looks after every token stays
    linear.

    Parameters
    ----------
    count : int
        Entries of every list, k.

    Examples
    --------
    >>> tops = TopColumns(1)
    >>> tops.append(0, np.array([7]), np.array([-0.5]))
    >>> ranks, ids, logprobs = tops.columns()
    >>> ranks.tolist(), ids.tolist(), logprobs.tolist()
    ([0], [[7]], [[-0.5]])
    """

    def __init__(self, count: int) -> None:
        self._length = 0
        self._ranks = np.empty(_FIRST_ROOM, np.int64)
        self._ids = np.empty((_FIRST_ROOM, count), np.int32)
        self._logprobs = np.empty((_FIRST_ROOM, count), np.float32)

    def append(self, ranks: int | np.ndarray, ids: np.ndarray, logprobs: np.ndarray) -> None:
        """Append one token's rank and lists [k], or those of many ([T] and [T, k])."""
        ids = np.atleast_2d(ids)
        begin, end = self._length, self._length + len(ids)
        if end > len(self._ranks):
            self._grow(end)
        self._ranks[begin:end] = ranks
        self._ids[begin:end] = ids
        self._logprobs[begin:end] = logprobs
        self._length = end

    def columns(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return ranks int64 [T], ids int32 [T, k], log-probabilities float32 [T, k].

        They are views; what they show is never changed by later tokens.
        """
        return self._ranks[: self._length], self._ids[: self._length], self._logprobs[: self._length]

    def _grow(self, needed: int) -> None:
        room = max(needed, 2 * len(self._ranks))
        for name in ("_ranks", "_ids", "_logprobs"):
            old = getattr(self, name)
            new = np.empty((room, *old.shape[1:]), old.dtype)
            new[: self._length] = old[: self._length]
            setattr(self, name, new)
