"""What a request changes in its logits before they are drawn from: masks, biases, penalties.

One :class:`Edits` object per admission, shared by all its slots: n samples of a prompt keep one copy of its distinct
prompt tokens, and a step touches one object per request, not one per row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ramet.errors import InvalidArgument
from ramet.sampling.bad_words import BadWords, RecentTokens, forbid
from ramet.sampling.penalties import Penalties, TokenCounts, penalise
from ramet.sampling_params import SamplingParams


@dataclass(frozen=True)
class Edits:
    """The edits of a request; what it does not use is None.

    Attributes
    ----------
    allowed : int64 array
        The only tokens that may be sampled.
    bad_words : BadWords
    early_stops : int64 array
        Tokens forbidden until ``min_tokens`` have been generated.
    min_tokens : int
    bias_tokens, bias : int64 and float32 array
    penalties : Penalties
    """

    allowed: np.ndarray | None
    bad_words: BadWords | None
    early_stops: np.ndarray | None
    min_tokens: int
    bias_tokens: np.ndarray | None
    bias: np.ndarray | None
    penalties: Penalties | None

    @property
    def lasting(self) -> bool:
        """Whether they last for the sample's whole life, beyond ``min_tokens``."""
        others = (self.allowed, self.bad_words, self.bias_tokens, self.penalties)
        return any(edit is not None for edit in others)


def make_edits(
    params: SamplingParams,
    vocab_size: int,
    prompt_token_ids: np.ndarray,
    eos_token_ids: Sequence[int],
    bad_words_ids: Sequence[Sequence[int]],
) -> Edits | None:
    """Return what ``params`` asks for, or None when it is nothing.

    Raises
    ------
    InvalidArgument
        A token id is not in the vocabulary, or a bad word has no tokens.
    """
    allowed = None
    if params.allowed_token_ids is not None:
        allowed = np.unique(_ids("allowed_token_ids", params.allowed_token_ids, vocab_size))
    words = None
    if len(bad_words_ids):
        for word in bad_words_ids:
            if not len(word):
                raise InvalidArgument("bad_words holds a word without tokens; allowed: words of at least one token.")
            _ids("bad_words", word, vocab_size)
        words = BadWords.from_ids(bad_words_ids)
    stops = None
    if params.min_tokens:
        stops = np.unique(_ids("stop_token_ids", [*params.stop_token_ids, *eos_token_ids], vocab_size))
    bias_tokens = bias = None
    if params.logit_bias:
        bias_tokens = _ids("logit_bias", list(params.logit_bias), vocab_size)
        bias = np.array(list(params.logit_bias.values()), dtype=np.float32)
    edits = Edits(
        allowed, words, stops, params.min_tokens, bias_tokens, bias, _penalties(params, vocab_size, prompt_token_ids)
    )
    return edits if edits.lasting or stops is not None else None


def _ids(name: str, ids: Sequence[int] | np.ndarray, vocab_size: int) -> np.ndarray:
    array = np.asarray(ids, dtype=np.int64)
    wrong = array[(array < 0) | (array >= vocab_size)]
    if len(wrong):
        raise InvalidArgument(f"{name} holds token id {wrong[0]}; the model's vocabulary is 0 to {vocab_size - 1}.")
    return array


def _penalties(p: SamplingParams, vocab_size: int, prompt: np.ndarray) -> Penalties | None:
    if p.repetition_penalty == 1.0 and p.frequency_penalty == 0.0 and p.presence_penalty == 0.0:
        return None
    distinct = np.empty(0, dtype=np.int64)
    if p.repetition_penalty != 1.0:
        distinct = np.unique(_ids("prompt_token_ids", prompt, vocab_size))
    f32 = np.float32
    return Penalties(f32(p.repetition_penalty), f32(p.frequency_penalty), f32(p.presence_penalty), distinct)


class EditTable:
    """Which slot has which :class:`Edits`.

    Parameters
    ----------
    num_slots : int
    """

    def __init__(self, num_slots: int) -> None:
        self.number_of = np.full(num_slots, -1, dtype=np.int64)  # -1: no edits
        self.counts = TokenCounts(num_slots)
        self.recent = RecentTokens(num_slots)
        self._edits: dict[int, Edits] = {}
        self._owners: dict[int, int] = {}
        self._next = 0

    def __len__(self) -> int:
        return len(self._edits)

    def add(self, slots: np.ndarray, edits: Edits, generated: np.ndarray) -> None:
        """Give ``edits`` to slots that have none; ``generated`` int [1, T] or [S, T] is what they have said."""
        number = self._next
        self._next += 1
        self._edits[number], self._owners[number] = edits, len(slots)
        self.number_of[slots] = number
        if edits.penalties is not None:
            self.counts.add(slots, generated)
        if edits.bad_words is not None and edits.bad_words.history:
            self.recent.add(slots, generated, edits.bad_words.history)

    def record(self, slots: np.ndarray, tokens: np.ndarray) -> None:
        """Take note of one more token of each slot; costs nothing while no slot counts or remembers."""
        if self.counts.pool.in_use:
            self.counts.record(slots, tokens)
        if self.recent.pool.in_use:
            self.recent.record(slots, tokens)

    def release(self, slots: np.ndarray) -> None:
        """Take the edits from these slots, and drop those that no slot has any more."""
        if not self._edits:
            return
        for number, owners in zip(*np.unique(self.number_of[slots], return_counts=True), strict=True):
            if number >= 0:
                self._owners[int(number)] -= int(owners)
                if not self._owners[int(number)]:
                    del self._owners[int(number)], self._edits[int(number)]
        self.number_of[slots] = -1
        self.counts.release(slots)
        self.recent.release(slots)

    def apply(self, logits: np.ndarray, slots: np.ndarray, num_output_tokens: np.ndarray) -> None:
        """Edit rows of logits in place: masks, then biases, then penalties.

        Parameters
        ----------
        logits : float32 array [R, V]
            A row per slot; a grammar's mask is in it already.
        slots : int array [R]
        num_output_tokens : int array [R]
            Tokens that each sample has generated.
        """
        numbers = self.number_of[slots]
        for number in np.unique(numbers):
            if number < 0:
                continue
            rows = np.flatnonzero(numbers == number)
            self._apply(self._edits[int(number)], logits, rows, slots[rows], num_output_tokens[rows])

    def _apply(
        self, edits: Edits, logits: np.ndarray, rows: np.ndarray, slots: np.ndarray, num_output_tokens: np.ndarray
    ) -> None:
        if edits.allowed is not None:
            for i in rows.tolist():  # row by row: indexing a matrix by many allowed ids takes four times as long
                row = logits[i]
                kept = row.take(edits.allowed)
                row.fill(-np.inf)
                row[edits.allowed] = kept
        if edits.bad_words is not None:
            forbid(logits, rows, slots, edits.bad_words, self.recent)
        if edits.early_stops is not None:
            early = rows[num_output_tokens < edits.min_tokens]
            logits[np.ix_(early, edits.early_stops)] = -np.inf
        if edits.bias_tokens is not None:
            logits[np.ix_(rows, edits.bias_tokens)] += edits.bias
        if edits.penalties is not None:
            penalise(logits, rows, slots, edits.penalties, self.counts)
