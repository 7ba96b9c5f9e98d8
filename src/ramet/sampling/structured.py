"""Grammars in the sampler: a matcher per sample says which tokens may come next.

What a grammar is, and where matchers come from, is the front end's affair (``frontend/structured.py``).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np


class TokenMatcher(Protocol):
    """Follows one sample through a grammar."""

    def fill(self, bits: np.ndarray, row: int) -> None:
        """Write into ``bits[row]`` (int32 [rows, words]) a set bit for every token that may come next, lowest first."""

    def accept(self, token: int) -> bool:
        """Take the sample's next token; False if the grammar does not allow it."""


def words_per_row(vocab_size: int) -> int:
    """Return how many int32 hold a bit for every token."""
    return -(-vocab_size // 32)


def token_mask(matchers: Sequence[TokenMatcher], vocab_size: int) -> np.ndarray:
    """Return which tokens each matcher allows.

    Returns
    -------
    bool array [len(matchers), vocab_size]

    Examples
    --------
    >>> class Even:
    ...     def fill(self, bits, row): bits[row] = 0b0101
    ...     def accept(self, token): return token % 2 == 0
    >>> token_mask([Even()], vocab_size=4).tolist()
    [[True, False, True, False]]
    """
    bits = np.zeros((len(matchers), words_per_row(vocab_size)), "<i4")
    for row, matcher in enumerate(matchers):
        matcher.fill(bits, row)
    return np.unpackbits(bits.view(np.uint8), axis=1, bitorder="little", count=vocab_size).view(np.bool_)
