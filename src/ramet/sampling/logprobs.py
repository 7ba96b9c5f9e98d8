"""Log-probabilities of sampled tokens and of prompts, for the rows that ask, one row at a time."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import torch

from ramet.errors import InvalidArgument
from ramet.sampling.cutoffs import lower_bound, weights

NOT_ASKED = -1


class TopLogprobs(NamedTuple):
    """The likeliest tokens of the rows that asked for them.

    Attributes
    ----------
    rows : int64 array [Q]
        Rows of the batch, ascending.
    token_ids : int64 array [Q, K]
        Likeliest first, equal ones by ascending id. K is the largest number asked for in the batch; behind its own
        number a row holds -1.
    logprobs : float32 array [Q, K]
        -inf for tokens that cannot be sampled.
    """

    rows: np.ndarray
    token_ids: np.ndarray
    logprobs: np.ndarray


class LogprobTable:
    """Collects the log-probabilities of a batch while its rows are worked on in pieces.

    Parameters
    ----------
    asked : int array [R]
        Alternatives that each row asks for: 0 = the sampled token only, -1 = nothing.

    Attributes
    ----------
    values : float32 array [R]
        NaN where nothing was asked for.
    ranks : int64 array [R]
        1 + number of likelier tokens, where at least one alternative was asked for; -1 elsewhere.
    """

    def __init__(self, asked: np.ndarray) -> None:
        self.asked = asked
        self.values = np.full(len(asked), np.nan, dtype=np.float32)
        self.ranks = np.full(len(asked), NOT_ASKED, dtype=np.int64)
        self._rows = np.flatnonzero(asked > 0)
        most = int(asked.max(initial=0))
        self._token_ids = np.full((len(self._rows), most), -1, dtype=np.int64)
        self._logprobs = np.full((len(self._rows), most), -np.inf, dtype=np.float32)

    @property
    def top(self) -> TopLogprobs | None:
        """The alternatives, or None when no row asked for any."""
        return TopLogprobs(self._rows, self._token_ids, self._logprobs) if len(self._rows) else None

    def fill(
        self,
        rows: np.ndarray,
        tokens: np.ndarray,
        logits: np.ndarray,
        index: np.ndarray,
        inv_temperature: np.ndarray,
        lowest: np.ndarray,
    ) -> None:
        """Fill in those of ``rows`` that asked.

        Parameters
        ----------
        rows : int array [P]
            Rows of the batch.
        tokens : int array [P]
            Their tokens.
        logits : float32 array [M, V]
        index : int array [P]
            Row of ``logits`` of each.
        inv_temperature, lowest : float32 arrays [P]
            Logits are scaled by the first; those below the second have no probability.
        """
        normalisers: dict[tuple[int, float, float], tuple[np.float32, float]] = {}
        for i in np.flatnonzero(self.asked[rows] >= 0).tolist():
            row, k = logits[index[i]], int(self.asked[rows[i]])
            key = (int(index[i]), float(inv_temperature[i]), float(lowest[i]))
            if key not in normalisers:  # the samples of a fork share their logits, and mostly the rest
                normalisers[key] = _normaliser(row, inv_temperature[i], lowest[i])
            space = (*normalisers[key], float(inv_temperature[i]), lowest[i])
            chosen = row[tokens[i]]
            self.values[rows[i]] = _logprobs(chosen, *space)
            if k:
                top = largest_ids(row, k)
                at = np.searchsorted(self._rows, rows[i])
                self.ranks[rows[i]] = 1 + np.count_nonzero(row > chosen)
                self._token_ids[at, :k], self._logprobs[at, :k] = top, _logprobs(row[top], *space)


def _normaliser(row: np.ndarray, inv_temperature: np.float32, lowest: np.float32) -> tuple[np.float32, float]:
    """Return the largest logit and the logarithm of the sum of weights relative to it."""
    peak = row.max()
    mass = weights(row, peak, inv_temperature)
    if lowest > -np.inf:
        mass = mass[row >= lowest]
    return peak, math.log(mass.sum())


def _logprobs(
    logits: np.ndarray, peak: np.float32, log_sum: float, inv_temperature: float, lowest: np.float32
) -> np.ndarray:
    values = (logits.astype(np.float64) - float(peak)) * inv_temperature - log_sum
    return np.where(logits >= lowest, values, -np.inf).astype(np.float32)


def largest_ids(row: np.ndarray, k: int) -> np.ndarray:
    """Return the ids of the k largest values, largest first, equal ones by ascending id (1 <= k <= V)."""
    ids = np.flatnonzero(row >= lower_bound(row, k))
    return ids[np.lexsort((ids, -row[ids]))[:k]]


class PromptLogprobs(NamedTuple):
    """Log-probabilities of given tokens; fields as for ``TokenLogprobs``.

    Attributes
    ----------
    values : float32 array [T]
    ranks : int64 array [T] or None
    top_ids : int64 array [T, k] or None
    top_values : float32 array [T, k] or None
    """

    values: np.ndarray
    ranks: np.ndarray | None
    top_ids: np.ndarray | None
    top_values: np.ndarray | None


def prompt_logprobs(logits: torch.Tensor | np.ndarray, targets: np.ndarray, k: int) -> PromptLogprobs:
    """Return the raw log-probabilities of a prompt's tokens.

    Parameters
    ----------
    logits : float32 [T, V]
        Row i predicts ``targets[i]``: the logits at the position before it.
    targets : int array [T]
    k : int
        Alternatives; with 0 the ranks and alternatives are None.

    Raises
    ------
    InvalidArgument
        Shapes differ, k is negative, or a target is not in the vocabulary.

    Examples
    --------
    >>> prompt_logprobs(np.zeros((1, 4), dtype=np.float32), np.array([2]), k=1)
    PromptLogprobs(values=array([-1.3862944], dtype=float32), ranks=array([1]), top_ids=array([[0]]), \
top_values=array([[-1.3862944]], dtype=float32))
    """
    array = logits.detach().numpy() if isinstance(logits, torch.Tensor) else logits
    targets = np.asarray(targets, dtype=np.int64)
    if array.ndim != 2 or array.dtype != np.float32 or targets.shape != array.shape[:1]:
        raise InvalidArgument(
            f"logits is {array.dtype} {array.shape} with targets {targets.shape}; allowed: float32 [T, V] with [T]."
        )
    length, vocab_size = array.shape
    if k < 0 or (targets < 0).any() or (targets >= vocab_size).any():
        raise InvalidArgument(f"k is {k}; allowed: at least 0, and targets from 0 to {vocab_size - 1}.")
    table = LogprobTable(np.full(length, min(k, vocab_size)))
    rows = np.arange(length)
    ones, all_ = np.ones(length, dtype=np.float32), np.full(length, -np.inf, dtype=np.float32)
    table.fill(rows, targets, array, rows, ones, all_)
    if table.top is None:
        return PromptLogprobs(table.values, None, None, None)
    return PromptLogprobs(table.values, table.ranks, table.top.token_ids, table.top.logprobs)
