"""The sampler: a token for every row of a batch, on the CPU.

The order is: grammar mask, allowed ids, bad words, min_tokens; logit bias; penalties; temperature; top-k; top-p; min-p;
Gumbel noise by token id. A row takes the cheapest tier that does what it asks:

========  =====================================================================
greedy    the likeliest token, the lowest id among equals; no noise
plain     temperature only: whole row hashed, few tokens scored (``gumbel.py``)
filtered  top-k, top-p or min-p: only the tokens kept are hashed
full      its logits are copied and edited first, then one of the above
========  =====================================================================

The tiers of a batch are worked on one after the other, and no row sees another: its token and log-probabilities are the
same to the bit alone, in any batch, and in any order.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch

from ramet.errors import InvalidArgument, Unsupported
from ramet.sampling.cutoffs import cutoff
from ramet.sampling.gumbel import Hasher, Rows, draw_from_all, draw_from_kept
from ramet.sampling.logprobs import LogprobTable, TopLogprobs
from ramet.sampling.state import Draw, SamplingState

KEPT_SHARE = 16
"""Rows that keep at most 1/16 of the vocabulary hash the tokens they keep, others the whole row."""


class NothingToSample(InvalidArgument):
    """Rows have no token to draw: all are masked, or their logits hold NaN or +inf.

    Nothing was sampled and no state changed: the engine can end these samples and sample the others.

    Attributes
    ----------
    rows : int64 array
        Rows of the batch.
    """

    def __init__(self, rows: np.ndarray, slots: np.ndarray, masked: bool) -> None:
        self.rows = rows
        reason = (
            "all logits are -inf after the grammar, allowed_token_ids, bad_words and min_tokens: loosen one of them"
            if masked
            else "the logits hold NaN or +inf: the model overflowed, or its weights are damaged; try dtype='float32'"
        )
        super().__init__(f"No token can be sampled in slots {slots.tolist()}: {reason}.")


@dataclass
class SampleBatch:
    """What is to be sampled.

    Attributes
    ----------
    slots : int array [R]
    logit_index : int array [R]
        Row of the logits that each sample draws from; many samples may share one.
    positions : int array [R]
        Absolute position of the token that is sampled.
    num_output_tokens : int array [R]
        Tokens that each sample has generated before.
    token_mask : bool array [G, V], optional
        True where a grammar allows the token.
    masked_rows : int array [G], optional
        Rows of the batch that ``token_mask`` is for, each once; None = all R.
    """

    slots: np.ndarray
    logit_index: np.ndarray
    positions: np.ndarray
    num_output_tokens: np.ndarray
    token_mask: np.ndarray | None = None
    masked_rows: np.ndarray | None = None


@dataclass
class SampledTokens:
    """What was sampled.

    Attributes
    ----------
    token_ids : int64 array [R]
    logprobs : float32 array [R] or None
        NaN in rows that did not ask; None when no row did.
    ranks : int64 array [R] or None
        1 = the likeliest, equals share a rank; -1 in rows that asked for no alternatives; None when no row did.
    top : TopLogprobs or None
        Alternatives, for the rows that asked; None when no row did.
    """

    token_ids: np.ndarray
    logprobs: np.ndarray | None = None
    ranks: np.ndarray | None = None
    top: TopLogprobs | None = None


class Sampler:
    """Samples batches on the CPU.

    Parameters
    ----------
    state : SamplingState
    logprobs_mode : {"raw_logprobs", "processed_logprobs"}, default "raw_logprobs"
        Log-probabilities of the logits as they come, or after everything up to min-p. Processed log-probabilities of a
        greedy row are those of its edited logits, at temperature 1 and without filters.

    Attributes
    ----------
    counters : dict of str to int
        ``steps``, and rows sampled by tier: ``greedy``, ``plain``, ``filtered``, ``full``.

    Examples
    --------
    >>> from ramet.sampling_params import SamplingParams
    >>> state = SamplingState(num_slots=2, vocab_size=4)
    >>> state.admit(np.arange(2), SamplingParams(n=2, temperature=0.0), 0, np.arange(2), np.array([1, 2, 3]))
    >>> batch = SampleBatch(np.arange(2), np.zeros(2, dtype=np.int64), np.array([3, 3]), np.zeros(2, dtype=np.int32))
    >>> Sampler(state).sample(torch.tensor([[0.0, 1.0, 3.0, 2.0]]), batch).token_ids
    array([2, 2])
    """

    def __init__(
        self,
        state: SamplingState,
        *,
        logprobs_mode: Literal["raw_logprobs", "processed_logprobs"] = "raw_logprobs",
    ) -> None:
        if logprobs_mode not in ("raw_logprobs", "processed_logprobs"):
            raise InvalidArgument(f"logprobs_mode is {logprobs_mode!r}; allowed: raw_logprobs, processed_logprobs.")
        self.state = state
        self.processed = logprobs_mode == "processed_logprobs"
        self.counters = {"steps": 0, "greedy": 0, "plain": 0, "filtered": 0, "full": 0}
        self._hasher = Hasher(state.vocab_size)

    def sample(self, logits: torch.Tensor, batch: SampleBatch) -> SampledTokens:
        """Sample one token per row.

        Parameters
        ----------
        logits : float32 tensor [M, V]
            On the CPU, rows contiguous; not changed. -inf is allowed.
        batch : SampleBatch

        Raises
        ------
        InvalidArgument
            A shape, dtype, slot or index that is not allowed.
        NothingToSample
            Some rows have nothing to draw from.
        """
        array = self._array(logits)
        self._check(batch, len(array))
        return _Step(self, array, batch).run()

    def _array(self, logits: torch.Tensor) -> np.ndarray:
        if logits.device.type != "cpu":
            raise Unsupported(f"logits are on {logits.device}; this sampler works on the CPU: pass logits.cpu().")
        vocab_size = self.state.vocab_size
        if logits.dtype != torch.float32 or logits.ndim != 2 or logits.shape[1] != vocab_size:
            raise InvalidArgument(
                f"logits is {logits.dtype} {tuple(logits.shape)}; allowed: torch.float32 (M, {vocab_size})."
            )
        if logits.stride(1) != 1:
            raise InvalidArgument(f"logits has strides {logits.stride()}; allowed: 1 along the vocabulary.")
        return logits.detach().numpy()

    def _check(self, batch: SampleBatch, num_logit_rows: int) -> None:
        rows = len(batch.slots)
        for name in ("slots", "logit_index", "positions", "num_output_tokens"):
            array = getattr(batch, name)
            if array.shape != (rows,):
                raise InvalidArgument(f"{name} has shape {array.shape}; allowed: [{rows}], one entry per row.")
        _check_range("slots", batch.slots, self.state.num_slots)
        _check_range("logit_index", batch.logit_index, num_logit_rows)
        _check_range("positions", batch.positions, 1 << 62)
        if not self.state.occupied[batch.slots].all():
            free = batch.slots[~self.state.occupied[batch.slots]]
            raise InvalidArgument(f"slots {free.tolist()} were never admitted, or were released.")
        if batch.token_mask is not None:
            masked = rows if batch.masked_rows is None else len(batch.masked_rows)
            shape, dtype = batch.token_mask.shape, batch.token_mask.dtype
            if shape != (masked, self.state.vocab_size) or dtype != np.bool_:
                raise InvalidArgument(
                    f"token_mask is {dtype} {shape}; allowed: bool [{masked}, {self.state.vocab_size}]."
                )
            if batch.masked_rows is not None:
                _check_range("masked_rows", batch.masked_rows, rows)


def _check_range(name: str, values: np.ndarray, limit: int) -> None:
    if len(values) and (values.min() < 0 or values.max() >= limit):
        raise InvalidArgument(f"{name} runs from {values.min()} to {values.max()}; allowed: 0 to {limit - 1}.")


class _Step:
    """One call of :meth:`Sampler.sample`."""

    def __init__(self, sampler: Sampler, logits: np.ndarray, batch: SampleBatch) -> None:
        self.sampler, self.state, self.logits, self.batch = sampler, sampler.state, logits, batch
        self.tokens = np.full(len(batch.slots), -1, dtype=np.int64)
        asked = self.state.logprobs[batch.slots]
        self.table = LogprobTable(asked) if (asked >= 0).any() else None

    def run(self) -> SampledTokens:
        batch, state, counters = self.batch, self.state, self.sampler.counters
        edited = state.edited[batch.slots] | (batch.num_output_tokens < state.min_tokens[batch.slots])
        grammar = np.full(len(edited), -1)  # row of the token mask
        if batch.token_mask is not None:
            masked = np.arange(len(edited)) if batch.masked_rows is None else batch.masked_rows
            edited[masked] = True
            grammar[masked] = np.arange(len(masked))
        with np.errstate(all="ignore"):  # overflow to -inf is meant; what comes of +inf is refused by name
            untouched = np.flatnonzero(~edited)
            self._draw(untouched, self.logits, batch.logit_index[untouched])
            changed = np.flatnonzero(edited)
            for start in range(0, len(changed), self.sampler._hasher.max_rows):
                rows = changed[start : start + self.sampler._hasher.max_rows]
                self._draw(rows, self._edit(rows, grammar[rows]), np.arange(len(rows)))
            if self.table is not None and not self.sampler.processed:
                self._raw_logprobs(self.table)
        counters["steps"] += 1
        counters["full"] += len(changed)
        for tier, rows_of_tier in enumerate(np.bincount(state.draw[batch.slots[untouched]], minlength=len(Draw))):
            counters[Draw(tier).name.lower()] += int(rows_of_tier)
        if self.table is None:
            return SampledTokens(self.tokens)
        top = self.table.top
        return SampledTokens(self.tokens, self.table.values, None if top is None else self.table.ranks, top)

    def _edit(self, rows: np.ndarray, grammar: np.ndarray) -> np.ndarray:
        """Return edited copies of these rows' logits."""
        edited = self.logits[self.batch.logit_index[rows]]
        if self.batch.token_mask is not None:
            for i in np.flatnonzero(grammar >= 0).tolist():
                np.putmask(edited[i], ~self.batch.token_mask[grammar[i]], -np.inf)
        self.state.edits.apply(edited, self.batch.slots[rows], self.batch.num_output_tokens[rows])
        return edited

    def _draw(self, rows: np.ndarray, logits: np.ndarray, index: np.ndarray) -> None:
        """Draw tokens for ``rows`` of the batch from ``logits[index]``."""
        if not len(rows):
            return
        slots = self.batch.slots[rows]
        likeliest = _likeliest(logits, index)
        peak = logits[index, likeliest]
        self._refuse_hopeless(rows, peak)
        keys = self.state.row_keys(slots, self.batch.positions[rows])
        everything = np.full(len(rows), -np.inf, dtype=np.float32)
        drawn = Rows(logits, index, likeliest, peak, self.state.inv_temperature[slots], everything, keys)
        how = self.state.draw[slots]
        tokens = likeliest.copy()
        plain = np.flatnonzero(how == Draw.PLAIN)
        filtered = np.flatnonzero(how == Draw.FILTERED)
        if len(filtered):
            few, kept, many = self._filter(drawn, filtered, slots)
            if len(few):
                tokens[few] = draw_from_kept(drawn.take(few), kept)
            plain = np.concatenate([plain, many])
        if len(plain):
            tokens[plain] = draw_from_all(drawn.take(plain), self.sampler._hasher)
        self.tokens[rows] = tokens
        if self.table is not None and self.sampler.processed:
            self.table.fill(rows, tokens, logits, index, drawn.inv_temperature, drawn.lowest)

    def _filter(
        self, drawn: Rows, filtered: np.ndarray, slots: np.ndarray
    ) -> tuple[np.ndarray, list[np.ndarray], np.ndarray]:
        """Set ``drawn.lowest`` of filtered rows; return those that keep few tokens, the tokens, and the others."""
        few, kept, many = [], [], []
        state, limit = self.state, drawn.logits.shape[1] // KEPT_SHARE
        known: dict[tuple[float, ...], tuple[np.float32, np.ndarray | None]] = {}
        for i in filtered.tolist():
            slot = slots[i]
            how = (drawn.inv_temperature[i], int(state.top_k[slot]), float(state.top_p[slot]), float(state.min_p[slot]))
            key = (int(drawn.index[i]), *how)
            if key not in known:  # the samples of a fork share all of this
                row = drawn.logits[drawn.index[i]]
                lowest = cutoff(row, drawn.peak[i], *how)
                tokens = np.flatnonzero(row >= lowest)
                known[key] = lowest, tokens if len(tokens) <= max(limit, 1) else None
            drawn.lowest[i], tokens_kept = known[key]
            if tokens_kept is None:
                many.append(i)
            else:
                few.append(i)
                kept.append(tokens_kept)
        return np.array(few, dtype=np.int64), kept, np.array(many, dtype=np.int64)

    def _refuse_hopeless(self, rows: np.ndarray, peak: np.ndarray) -> None:
        for hopeless, masked in ((peak == -np.inf, True), (~(peak < np.inf), False)):
            if hopeless.any():
                raise NothingToSample(rows[hopeless], self.batch.slots[rows[hopeless]], masked)

    def _raw_logprobs(self, table: LogprobTable) -> None:
        rows = np.arange(len(self.tokens))
        ones = np.ones(len(rows), dtype=np.float32)
        everything = np.full(len(rows), -np.inf, dtype=np.float32)
        table.fill(rows, self.tokens, self.logits, self.batch.logit_index, ones, everything)


def _likeliest(logits: np.ndarray, index: np.ndarray) -> np.ndarray:
    """Return the token with the largest of each row's logits, the lowest id among equals (NaN counts as largest)."""
    if len(index) == len(logits) and (index == np.arange(len(index))).all():
        return logits.argmax(axis=1)  # a row each, as in every decode step: no Python per row
    distinct, inverse = np.unique(index, return_inverse=True)
    found = [int(logits[i].argmax()) for i in distinct.tolist()]
    return np.array(found, dtype=np.int64)[inverse]
