"""Sampling parameters of every slot, as arrays: written at admission, read by index at every step."""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum

import numpy as np

from ramet.errors import InvalidArgument
from ramet.sampling.edits import EditTable, make_edits
from ramet.sampling.rng import RowKeys, row_keys, stream_keys
from ramet.sampling_params import SamplingParams

FLOAT32_MAX = float(np.finfo(np.float32).max)


class Draw(IntEnum):
    """How a slot's token is drawn from its (edited) logits."""

    GREEDY = 0  #: the likeliest, no noise
    PLAIN = 1  #: temperature only
    FILTERED = 2  #: top-k, top-p or min-p besides


class SamplingState:
    """What the sampler knows of each slot.

    A slot is admitted, sampled and recorded any number of times, and released. Admission writes every field, so nothing
    of a former owner is left. No array has the size of slots times vocabulary: what penalties and bad words need exists
    for the slots that use them, and goes with the last of them.

    Parameters
    ----------
    num_slots : int
    vocab_size : int

    Attributes
    ----------
    occupied : bool array [num_slots]
    draw : uint8 array [num_slots]
        A :class:`Draw`, decided once at admission.
    edited : bool array [num_slots]
        Logits are edited at every step (allowed ids, bad words, bias, penalties).
    min_tokens : int32 array [num_slots]
        Logits are edited until this many tokens.
    stream : uint64 array [num_slots]
        Key of the slot's noise, from (seed, sample id).
    inv_temperature : float32 array [num_slots]
        At most the largest finite float32; 1 when greedy.
    top_k : int32 array [num_slots]
        0 = all tokens.
    top_p, min_p : float64 arrays [num_slots]
        1 and 0 = off.
    logprobs : int32 array [num_slots]
        Alternatives asked for; -1 = no log-probabilities at all.

    Examples
    --------
    >>> state = SamplingState(num_slots=4, vocab_size=100)
    >>> state.admit(np.array([0, 2]), SamplingParams(n=2, temperature=0.8), seed=7, sample_ids=np.array([0, 1]),
    ...             prompt_token_ids=np.array([5, 6, 7]))
    >>> state.occupied.tolist()
    [True, False, True, False]
    """

    def __init__(self, num_slots: int, vocab_size: int) -> None:
        self.num_slots, self.vocab_size = num_slots, vocab_size
        self.occupied = np.zeros(num_slots, dtype=bool)
        self.draw = np.zeros(num_slots, dtype=np.uint8)
        self.edited = np.zeros(num_slots, dtype=bool)
        self.min_tokens = np.zeros(num_slots, dtype=np.int32)
        self.stream = np.zeros(num_slots, dtype=np.uint64)
        self.inv_temperature = np.ones(num_slots, dtype=np.float32)
        self.top_k = np.zeros(num_slots, dtype=np.int32)
        self.top_p = np.ones(num_slots, dtype=np.float64)
        self.min_p = np.zeros(num_slots, dtype=np.float64)
        self.logprobs = np.full(num_slots, -1, dtype=np.int32)
        self.edits = EditTable(num_slots)

    def admit(
        self,
        slots: np.ndarray,
        params: SamplingParams,
        seed: int,
        sample_ids: np.ndarray,
        prompt_token_ids: np.ndarray,
        output_token_ids: np.ndarray | None = None,
        eos_token_ids: Sequence[int] = (),
        bad_words_ids: Sequence[Sequence[int]] = (),
    ) -> None:
        """Give free slots to samples of one request.

        Parameters
        ----------
        slots : int array [S]
        params : SamplingParams
        seed : int
            The request's 64-bit seed: its own, or the one that was drawn for it.
        sample_ids : int array [S]
            Number of each sample within its request; a sample forked in mid-generation needs a new one.
        prompt_token_ids : int array [L]
        output_token_ids : int array [T] or [S, T], optional
            Tokens generated before (preemption, fork, partial rollouts): the same for all, or a row per slot.
        eos_token_ids : sequence of int, default ()
            Forbidden, besides ``stop_token_ids``, until ``min_tokens``.
        bad_words_ids : sequence of sequences of int, default ()
            Token sequences of ``params.bad_words``, and their spellings.

        Raises
        ------
        InvalidArgument
            A slot is not free or does not exist; lengths differ; a token id is not in the vocabulary. Nothing is
            admitted then.
        """
        slots = np.asarray(slots, dtype=np.int64)
        sample_ids = np.asarray(sample_ids, dtype=np.int64)
        self._check_free(slots)
        if sample_ids.shape != slots.shape or (sample_ids < 0).any():
            raise InvalidArgument(f"sample_ids is {sample_ids!r}; allowed: one number of at least 0 per slot.")
        generated = _generated(output_token_ids, len(slots))
        edits = make_edits(params, self.vocab_size, np.asarray(prompt_token_ids), eos_token_ids, bad_words_ids)
        if not len(slots):
            return
        self.occupied[slots] = True
        self.stream[slots] = stream_keys(seed, sample_ids)
        self.min_tokens[slots] = params.min_tokens
        self.inv_temperature[slots] = 1.0 if params.greedy else min(1.0 / params.temperature, FLOAT32_MAX)
        self.top_k[slots] = params.top_k if 0 < params.top_k < self.vocab_size else 0
        self.top_p[slots] = params.top_p
        self.min_p[slots] = params.min_p
        self.logprobs[slots] = -1 if params.logprobs is None else min(params.logprobs, self.vocab_size)
        self.draw[slots] = self._draw_of(params)
        self.edited[slots] = edits is not None and edits.lasting
        if edits is not None:
            self.edits.add(slots, edits, generated)

    def record(self, slots: np.ndarray, tokens: np.ndarray) -> None:
        """Take note of a step's tokens; only rows with penalties or bad words cost anything.

        Parameters
        ----------
        slots : int array [R]
            Each slot at most once; call again for a slot's next token.
        tokens : int array [R]
        """
        self.edits.record(slots, tokens)

    def release(self, slots: np.ndarray) -> None:
        """Free slots; free ones may be among them."""
        self.edits.release(np.asarray(slots, dtype=np.int64))
        self.occupied[slots] = False

    def row_keys(self, slots: np.ndarray, positions: np.ndarray) -> RowKeys:
        """Return the noise keys of slots at absolute positions (int arrays [R])."""
        return row_keys(self.stream[slots], positions)

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays, those of penalties and bad words included."""
        own = sum(array.nbytes for array in vars(self).values() if isinstance(array, np.ndarray))
        return own + self.edits.counts.nbytes + self.edits.recent.nbytes

    def _draw_of(self, params: SamplingParams) -> Draw:
        if params.greedy:
            return Draw.GREEDY
        filtered = 0 < params.top_k < self.vocab_size or params.top_p < 1.0 or params.min_p > 0.0
        return Draw.FILTERED if filtered else Draw.PLAIN

    def _check_free(self, slots: np.ndarray) -> None:
        if slots.ndim != 1 or (slots < 0).any() or (slots >= self.num_slots).any():
            raise InvalidArgument(f"slots is {slots!r}; allowed: an array of numbers from 0 to {self.num_slots - 1}.")
        if self.occupied[slots].any():
            taken = slots[self.occupied[slots]]
            raise InvalidArgument(f"slots {taken.tolist()} are occupied; release them before admitting others.")
        if len(np.unique(slots)) != len(slots):
            raise InvalidArgument(f"slots is {slots!r}; allowed: each slot once.")


def _generated(output_token_ids: np.ndarray | None, num_slots: int) -> np.ndarray:
    if output_token_ids is None:
        return np.empty((1, 0), dtype=np.int64)
    generated = np.atleast_2d(np.asarray(output_token_ids, dtype=np.int64))
    if generated.ndim != 2 or (len(generated) not in (1, num_slots)):
        raise InvalidArgument(
            f"output_token_ids has shape {generated.shape}; allowed: [T], the same tokens for all slots, "
            f"or [{num_slots}, T], a row per slot."
        )
    return generated
