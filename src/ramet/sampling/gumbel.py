"""Drawing by Gumbel-max: the token with the largest score, a score being scaled logit plus the token's own noise.

    score(token) = (logit(token) - largest logit of the row) * inv_temperature + noise(token)        all float32

The largest logit is subtracted first, so that a tiny temperature scales the others to -inf instead of everything to
infinity. Equal scores go to the lowest token id.

Whole rows are hashed, which takes a few cheap integer operations per token, but logarithms are taken only of tokens
that can win: a score beats a known one only if the noise is large or the logit is. So the tokens with the largest noise
(one in 256) are scored first, the best of them is the bound, and then those whose logit alone comes near the bound.
Both are a few hundred of 50,000, whatever the distribution is: were many logits near the bound, some of them would have
had large noise, and the bound would be higher. The winner is that of the full computation, bit for bit.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from ramet.sampling.rng import RowKeys, finish_bits, gumbel_noise, hash_rows, hash_rows_torch, token_bits

LUCKY_BITS = np.uint32(1 << 24)
"""Bits below this are large noise. A multiple of 2^16, so the last step of the hash does not change who is below."""

UNLUCKY_NOISE = float(gumbel_noise(np.array([LUCKY_BITS]))[0]) + 1e-3
"""No other token has more noise than this; the thousandth is a margin for the rounding of scores."""

BLOCK_ELEMENTS = 1 << 20
"""Tokens that are hashed at a time: 4 MB of bits, which should stay in a cache."""

ONE_CORE_ELEMENTS = 1 << 17
"""Tokens that one core hashes at a time, in its own cache."""

ONE_CORE_THREADS = 2
"""Up to this many threads one core hashes: a second one gains a quarter when it is free, and when it is not, each of
the twenty waits for it costs a turn of the scheduler."""


@dataclass
class Rows:
    """Rows of a batch and what they are drawn from.

    Attributes
    ----------
    logits : float32 array [M, V]
    index : int64 array [R]
        Row of ``logits`` of each row of the batch; several may share one.
    likeliest : int64 array [R]
        Token with the largest logit.
    peak : float32 array [R]
        That logit, finite.
    inv_temperature : float32 array [R]
    lowest : float32 array [R]
        Tokens with smaller logits are not drawn (-inf: all may be).
    keys : RowKeys
    """

    logits: np.ndarray
    index: np.ndarray
    likeliest: np.ndarray
    peak: np.ndarray
    inv_temperature: np.ndarray
    lowest: np.ndarray
    keys: RowKeys

    def __len__(self) -> int:
        return len(self.index)

    def take(self, rows: np.ndarray | slice) -> Rows:
        """Return some of the rows (an index array, a mask or a slice)."""
        return Rows(
            self.logits,
            self.index[rows],
            self.likeliest[rows],
            self.peak[rows],
            self.inv_temperature[rows],
            self.lowest[rows],
            self.keys.take(rows),
        )

    def scores(self, row: np.ndarray, token: np.ndarray, bits: np.ndarray) -> np.ndarray:
        """Return the scores (float32 [E]) of (row, token) pairs, -inf where the token may not be drawn."""
        logit = self.logits[self.index[row], token]
        score = (logit - self.peak[row]) * self.inv_temperature[row] + gumbel_noise(bits)
        return np.where(logit >= self.lowest[row], score, np.float32(-np.inf))

    def winners(self, row: np.ndarray, token: np.ndarray, bits: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the best score and its token (lowest id among equals) of each row.

        ``row`` ascends, every row occurs in it, and ``token`` ascends within a row.
        """
        score = self.scores(row, token, bits)
        rows = np.arange(len(self))
        best = np.maximum.reduceat(score, np.searchsorted(row, rows))
        hits = np.flatnonzero(score == best[row])
        return best, token[hits[np.searchsorted(row[hits], rows)]]


class Hasher:
    """Hashes whole rows into scratch memory that it keeps.

    Parameters
    ----------
    vocab_size : int
    """

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self.max_rows = max(1, BLOCK_ELEMENTS // vocab_size)
        self._token_ids = np.arange(vocab_size, dtype=np.uint32)
        self._bits = np.empty((0, vocab_size), dtype=np.uint32)
        self._scratch = np.empty((max(1, ONE_CORE_ELEMENTS // vocab_size), vocab_size), dtype=np.uint32)
        self._mask = np.empty((0, vocab_size), dtype=bool)

    def unfinished_bits(self, keys: RowKeys) -> np.ndarray:
        """Return uint32 [R, V] (R <= ``max_rows``), valid until the next call: the hash without its last step."""
        rows = len(keys.offset)
        self._fit(rows)
        bits = self._bits[:rows]
        if torch.get_num_threads() <= ONE_CORE_THREADS:
            hash_rows(keys, self._token_ids, bits, self._scratch)
        else:
            if rows > len(self._scratch):
                self._scratch = np.empty((rows, self.vocab_size), dtype=np.uint32)
            hash_rows_torch(keys, *(_as_int32(a) for a in (self._token_ids, bits, self._scratch[:rows])))
        return bits

    def mask(self, rows: int) -> np.ndarray:
        """Return uninitialised bool [rows, V], valid until the next call."""
        self._fit(rows)
        return self._mask[:rows]

    def _fit(self, rows: int) -> None:
        if rows > len(self._mask):
            self._bits = np.empty((rows, self.vocab_size), dtype=np.uint32)
            self._mask = np.empty((rows, self.vocab_size), dtype=bool)


def _as_int32(array: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(array.view(np.int32))


def draw_from_all(rows: Rows, hasher: Hasher) -> np.ndarray:
    """Draw a token for each row, whatever ``rows.lowest`` leaves of it; int64 [R]."""
    tokens = np.empty(len(rows), dtype=np.int64)
    for start in range(0, len(rows), hasher.max_rows):
        block = slice(start, start + hasher.max_rows)
        tokens[block] = _draw_block(rows.take(block), hasher)
    return tokens


def _draw_block(rows: Rows, hasher: Hasher) -> np.ndarray:
    bits = hasher.unfinished_bits(rows.keys)
    mask = hasher.mask(len(rows))
    np.less(bits, LUCKY_BITS, out=mask)
    lucky_score, lucky = _winners(rows, bits, mask)
    # A logit below `bound` scores less than `lucky_score`, unless its noise is large, and then it has been scored.
    short = (lucky_score.astype(np.float64) - UNLUCKY_NOISE) / rows.inv_temperature
    bound = np.nextafter((rows.peak + short).astype(np.float32), np.float32(-np.inf))
    bound = np.maximum(bound, rows.lowest)
    for i, index in enumerate(rows.index.tolist()):  # row by row: several rows may share logits
        np.greater_equal(rows.logits[index], bound[i], out=mask[i])
    likely_score, likely = _winners(rows, bits, mask)
    tied = np.where(likely_score == lucky_score, np.minimum(lucky, likely), lucky)
    return np.where(likely_score > lucky_score, likely, tied)


def _winners(rows: Rows, bits: np.ndarray, mask: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    mask[np.arange(len(rows)), rows.likeliest] = True  # so that every row has a candidate, and one that may be drawn
    flat = np.flatnonzero(mask)
    row = flat // mask.shape[1]
    return rows.winners(row, flat - row * mask.shape[1], finish_bits(bits.ravel()[flat]))


def draw_from_kept(rows: Rows, kept: list[np.ndarray]) -> np.ndarray:
    """Draw a token for each row from the ascending token ids in ``kept``, hashing only those; int64 [R]."""
    row = np.repeat(np.arange(len(rows)), [len(tokens) for tokens in kept])
    token = np.concatenate(kept)
    return rows.winners(row, token, token_bits(rows.keys.take(row), token))[1]
