"""Token sequences that a sample must never complete."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ramet.sampling.pools import RowPool, resized

NO_TOKEN = -1


@dataclass(frozen=True)
class BadWords:
    """The bad words of a request as arrays.

    Attributes
    ----------
    single : int64 array
        Words of one token: never allowed.
    last : int64 array [W]
        Last token of the longer words.
    beginnings : int32 array [W, H]
        The tokens before it, aligned to the right; what is left of a shorter word holds ``NO_TOKEN``.
    """

    single: np.ndarray
    last: np.ndarray
    beginnings: np.ndarray

    @classmethod
    def from_ids(cls, words: Sequence[Sequence[int]]) -> BadWords:
        """Make it from token sequences, each of at least one token."""
        longer = [list(word) for word in words if len(word) > 1]
        history = max((len(word) - 1 for word in longer), default=0)
        beginnings = np.full((len(longer), history), NO_TOKEN, dtype=np.int32)
        for row, word in zip(beginnings, longer, strict=True):
            row[history - len(word) + 1 :] = word[:-1]
        single = np.unique(np.array([word[0] for word in words if len(word) == 1], dtype=np.int64))
        return cls(single, np.array([word[-1] for word in longer], dtype=np.int64), beginnings)

    @property
    def history(self) -> int:
        """Generated tokens that must be remembered, 0 for single tokens only."""
        return self.beginnings.shape[1]


class RecentTokens:
    """The last generated tokens of the slots that have bad words of several tokens.

    Parameters
    ----------
    num_slots : int
    """

    def __init__(self, num_slots: int) -> None:
        self.pool = RowPool(num_slots)
        self._recent = np.empty((0, 1), dtype=np.int32)  # [capacity, history], the newest last

    @property
    def nbytes(self) -> int:
        """Bytes of the table."""
        return self._recent.nbytes

    def add(self, slots: np.ndarray, generated: np.ndarray, history: int) -> None:
        """Remember ``history`` tokens for these slots, beginning with ``generated`` ([1, T] for all, or [S, T])."""
        rows = self.pool.lend(slots)
        have = self._recent.shape[1]
        if history > have:
            self._recent = np.pad(self._recent, ((0, 0), (history - have, 0)), constant_values=NO_TOKEN)
        self._recent = resized(self._recent, self.pool.capacity, NO_TOKEN)
        self._recent[rows] = NO_TOKEN
        length = min(generated.shape[1], self._recent.shape[1])
        if length:
            self._recent[rows, -length:] = generated[:, -length:]

    def record(self, slots: np.ndarray, tokens: np.ndarray) -> None:
        """Remember one more token of each slot; slots that need no memory are passed over."""
        rows = self.pool.row_of[slots]
        kept = rows >= 0
        rows = rows[kept]
        if len(rows):
            self._recent[rows] = np.concatenate([self._recent[rows, 1:], tokens[kept, None]], axis=1)

    def release(self, slots: np.ndarray) -> None:
        """Forget these slots; when none is left, the memory goes too."""
        self.pool.take_back(slots)
        if not self.pool.in_use:
            self._recent = np.empty((0, 1), dtype=np.int32)

    def of(self, slots: np.ndarray, history: int) -> np.ndarray:
        """Return the last ``history`` tokens of each slot: int32 [S, history], ``NO_TOKEN`` where there are fewer."""
        return self._recent[self.pool.row_of[slots], -history:]


def forbid(logits: np.ndarray, rows: np.ndarray, slots: np.ndarray, words: BadWords, recent: RecentTokens) -> None:
    """Set to -inf whatever would complete a bad word, in place.

    Only generated tokens count as the beginning of a word, as in vLLM: a word begun in the prompt may be completed.

    Parameters
    ----------
    logits : float32 array [B, V]
    rows : int array [R]
        Rows of ``logits`` that belong to the request.
    slots : int array [R]
    words : BadWords
    recent : RecentTokens
    """
    logits[np.ix_(rows, words.single)] = -np.inf
    if words.history:
        said = recent.of(slots, words.history)
        begun = ((said[:, None, :] == words.beginnings) | (words.beginnings == NO_TOKEN)).all(axis=2)
        row, word = np.nonzero(begun)
        logits[rows[row], words.last[word]] = -np.inf
