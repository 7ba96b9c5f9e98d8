"""Top-k, top-p and min-p as one number per row: the lowest logit that is kept.

A cut-off is a value, not a set of ranks, so tokens that tie with the last kept one are kept too. That makes the result
independent of sorting algorithms and of the batch: equal logits have equal fates.

Everything works on one row at a time. That costs some microseconds of Python per row, against tens for reading the row,
and makes it plain that a row can't depend on its neighbours.
"""

from __future__ import annotations

import math

import numpy as np

COLUMN = 64
"""Tokens per column whose maxima bound the k-th largest value: one read of the row instead of a selection."""

TOP_P_DEPTHS = (4.0, 8.0, 12.0, 16.0)
"""How far below the likeliest token (as log-probability) a top-p cut-off is looked for before everything is sorted."""


def cutoff(
    logits: np.ndarray, peak: np.float32, inv_temperature: np.float32, top_k: int, top_p: float, min_p: float
) -> np.float32:
    """Return the lowest logit of a row that survives top-k, then top-p, then min-p.

    Parameters
    ----------
    logits : float32 array [V]
        May hold -inf.
    peak : np.float32
        Largest logit, finite.
    inv_temperature : np.float32
    top_k : int
        0 = all. The k-th largest logit and all that tie with it stay.
    top_p : float
        1 = all. Of the tokens that top-k kept, sorted and renormalised, the fewest whose probabilities reach ``top_p``
        stay, and all that tie with the last of them.
    min_p : float
        0 = all. Tokens less likely than ``min_p`` times the likeliest go.

    Returns
    -------
    np.float32
        At most ``peak``; -inf when everything stays.

    Examples
    --------
    >>> row = np.log(np.array([0.5, 0.25, 0.15, 0.1], dtype=np.float32))
    >>> row >= cutoff(row, row.max(), np.float32(1), top_k=0, top_p=0.6, min_p=0.0)
    array([ True,  True, False, False])
    """
    lowest = np.float32(-np.inf)
    kept = None
    if top_k:
        kept = largest_first(logits, top_k)
        lowest = kept[-1]
    if top_p < 1.0:
        if kept is None:
            lowest = _top_p(logits, peak, inv_temperature, top_p)
        else:
            lowest = _nucleus(kept, peak, inv_temperature, top_p, None)
    if min_p > 0.0:
        lowest = max(lowest, np.float32(float(peak) + math.log(min_p) / float(inv_temperature)))
    return lowest


def lower_bound(logits: np.ndarray, k: int) -> np.float32:
    """Return a value that at least ``k`` of the logits reach: near the k-th largest, and cheap (1 <= k <= V)."""
    columns = len(logits) // COLUMN
    if k <= columns // 2:  # k columns have a maximum of at least the k-th largest maximum
        maxima = logits[: columns * COLUMN].reshape(COLUMN, columns).max(axis=0)
        return np.partition(maxima, columns - k)[columns - k]
    return np.partition(logits, len(logits) - k)[len(logits) - k]


def largest_first(logits: np.ndarray, k: int) -> np.ndarray:
    """Return the k largest logits and all that tie with the last of them, in descending order."""
    candidates = _descending(logits[logits >= lower_bound(logits, k)])
    return candidates[: np.searchsorted(-candidates, -candidates[k - 1], side="right")]


def weights(logits: np.ndarray, peak: np.float32, inv_temperature: np.float32) -> np.ndarray:
    """Return ``exp((logits - peak) * inv_temperature)``: unnormalised probabilities, 1 for the likeliest, float32."""
    scaled = np.subtract(logits, peak)
    if inv_temperature != 1.0:
        np.multiply(scaled, inv_temperature, out=scaled)
    return np.exp(scaled, out=scaled)


def _descending(values: np.ndarray) -> np.ndarray:
    return np.sort(values)[::-1]


def _top_p(logits: np.ndarray, peak: np.float32, inv_temperature: np.float32, top_p: float) -> np.float32:
    total = float(weights(logits, peak, inv_temperature).sum(dtype=np.float64))
    for depth in TOP_P_DEPTHS:
        kept = logits[logits >= np.float32(float(peak) - depth / float(inv_temperature))]
        if len(kept) == len(logits):
            break
        # A little more than top_p, since this sum and the one that decides add up in different orders.
        if weights(kept, peak, inv_temperature).sum(dtype=np.float64) > top_p * total * (1.0 + 1e-9):
            return _nucleus(_descending(kept), peak, inv_temperature, top_p, total)
    return _nucleus(_descending(logits), peak, inv_temperature, top_p, total)


def _nucleus(
    kept: np.ndarray, peak: np.float32, inv_temperature: np.float32, top_p: float, total: float | None
) -> np.float32:
    """Return the lowest of the descending logits ``kept`` that top-p keeps; ``total`` weight, None = theirs."""
    mass = np.cumsum(weights(kept, peak, inv_temperature), dtype=np.float64)
    last = np.searchsorted(mass, top_p * (mass[-1] if total is None else total))
    return kept[min(int(last), len(kept) - 1)]
