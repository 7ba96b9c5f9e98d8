"""Repetition, frequency and presence penalties, from the distinct tokens of each sample rather than from whole rows."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ramet.sampling.pools import RowPool, resized

NO_TOKEN = -1


@dataclass(frozen=True)
class Penalties:
    """The penalties of a request (names and meanings of ``SamplingParams``).

    Attributes
    ----------
    repetition, frequency, presence : np.float32
    prompt_tokens : int64 array
        Distinct tokens of the prompt, ascending; empty when ``repetition`` is 1, which alone looks at them.
    """

    repetition: np.float32
    frequency: np.float32
    presence: np.float32
    prompt_tokens: np.ndarray

    def repeated(self, logits: np.ndarray) -> np.ndarray:
        """Return the logits of tokens that occurred: divided when positive, multiplied when negative."""
        if self.repetition == 1.0:
            return logits
        return np.where(logits > 0, logits / self.repetition, logits * self.repetition)


class TokenCounts:
    """How often each sample has generated each token: distinct ids and counts, for penalised slots only.

    Eight bytes per distinct token and penalised slot, against four bytes per vocabulary entry for a dense table.
    Finding a token again is a scan over the sample's distinct tokens, vectorised over the rows.

    Parameters
    ----------
    num_slots : int
    """

    def __init__(self, num_slots: int) -> None:
        self.pool = RowPool(num_slots)
        self._forget_all()

    def _forget_all(self) -> None:
        self._tokens = np.empty((0, 32), dtype=np.int32)  # [capacity, width], NO_TOKEN where unused
        self._counts = np.empty((0, 32), dtype=np.int32)
        self._used = np.empty(0, dtype=np.int32)

    @property
    def nbytes(self) -> int:
        """Bytes of the tables."""
        return self._tokens.nbytes + self._counts.nbytes + self._used.nbytes

    def add(self, slots: np.ndarray, generated: np.ndarray) -> None:
        """Begin counting for slots.

        Parameters
        ----------
        slots : int array [S]
        generated : int array [1, T] or [S, T]
            Tokens that the samples have generated already; one row stands for all.
        """
        rows = self.pool.lend(slots)
        self._fit(self._tokens.shape[1])
        self._tokens[rows], self._counts[rows], self._used[rows] = NO_TOKEN, 0, 0
        one_for_all = len(generated) == 1
        for i, sequence in enumerate(generated):
            tokens, counts = np.unique(sequence, return_counts=True)
            target = rows if one_for_all else rows[i : i + 1]
            self._fit(len(tokens))
            self._tokens[target, : len(tokens)] = tokens
            self._counts[target, : len(tokens)] = counts
            self._used[target] = len(tokens)

    def record(self, slots: np.ndarray, tokens: np.ndarray) -> None:
        """Count one more token of each slot; slots without penalties are passed over."""
        rows = self.pool.row_of[slots]
        counted = rows >= 0
        rows, new = rows[counted], tokens[counted]
        if not len(rows):
            return
        used = self._used[rows]
        self._fit(int(used.max()) + 1)
        same = self._tokens[rows, : int(used.max()) + 1] == new[:, None]
        known = same.any(axis=1)
        column = np.where(known, same.argmax(axis=1), used)
        self._tokens[rows, column] = new
        self._counts[rows, column] += 1
        self._used[rows] = used + ~known

    def release(self, slots: np.ndarray) -> None:
        """Stop counting; when no slot counts any more, the memory goes too."""
        self.pool.take_back(slots)
        if not self.pool.in_use:
            self._forget_all()

    def of(self, slots: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return (row, token, count), one entry per distinct token of each slot; ``row`` indexes ``slots``."""
        rows = self.pool.row_of[slots]
        width = max(1, int(self._used[rows].max(initial=0)))
        tokens = self._tokens[rows, :width]
        flat = np.flatnonzero(tokens.ravel() != NO_TOKEN)
        return flat // width, tokens.ravel()[flat], self._counts[rows, :width].ravel()[flat]

    def _fit(self, width: int) -> None:
        capacity, have = self.pool.capacity, self._tokens.shape[1]
        if len(self._used) != capacity:
            self._tokens = resized(self._tokens, capacity, NO_TOKEN)
            self._counts = resized(self._counts, capacity, 0)
            self._used = resized(self._used, capacity, 0)
        if width > have:
            pad = ((0, 0), (0, max(width, 2 * have) - have))
            self._tokens = np.pad(self._tokens, pad, constant_values=NO_TOKEN)
            self._counts = np.pad(self._counts, pad)


def penalise(
    logits: np.ndarray, rows: np.ndarray, slots: np.ndarray, penalties: Penalties, counts: TokenCounts
) -> None:
    """Apply the penalties of one request to some rows of ``logits``, in place.

    Repetition first, then ``frequency * count`` and ``presence`` are subtracted, as in vLLM.

    Parameters
    ----------
    logits : float32 array [B, V]
    rows : int array [R]
        Rows of ``logits`` that belong to the request.
    slots : int array [R]
    penalties : Penalties
    counts : TokenCounts
    """
    row, token, count = counts.of(slots)
    at = (rows[row], token)
    generated = penalties.repeated(logits[at]) - penalties.frequency * count.astype(np.float32) - penalties.presence
    if len(penalties.prompt_tokens):
        prompt = np.ix_(rows, penalties.prompt_tokens)
        logits[prompt] = penalties.repeated(logits[prompt])
    logits[at] = generated  # computed before the prompt's were: a token of both is penalised once
