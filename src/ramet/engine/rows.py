"""State of running rows that is neither cache nor sampling (limits, stops, records), in arrays indexed by slot."""

from __future__ import annotations

import numpy as np

from ramet.cache import TailTable
from ramet.engine.group import EMPTY_LOG, GroupRequest, Sample, SampleLog
from ramet.engine.tops import TopColumns
from ramet.sampling.structured import token_mask

NO_TOKEN = -1


class RowTable:
    """Samples that run, by slot. Tokens themselves are in ``tails.sampled``.

    Parameters
    ----------
    tails : TailTable
        Shares the slots.
    """

    def __init__(self, tails: TailTable) -> None:
        self.tails = tails
        n = tails.num_slots
        self.running = np.zeros(n, bool)
        self.num_output = np.zeros(n, np.int64)
        self.min_output = np.zeros(n, np.int64)
        self.max_output = np.zeros(n, np.int64)
        self.generation = np.zeros(n, np.int64)
        self.eventful = np.zeros(n, bool)
        self.wants_logprobs = np.zeros(n, bool)
        self.constrained = np.zeros(n, bool)  # by a grammar
        self.stop_ids = np.full((n, 1), NO_TOKEN, np.int32)
        self.logprobs = np.zeros((0, 0), np.float32)
        self.samples: list[Sample | None] = [None] * n
        self._tops: dict[int, TopColumns] = {}  # asked for by few rows; costs the others nothing
        self.num_running = 0

    def start(self, slots: np.ndarray, samples: list[Sample]) -> None:
        """Let samples of one group run in these slots, each going on from its log."""
        request = samples[0].group.request
        params = request.params
        resumed = len(samples[0].log.token_ids)
        self.running[slots] = True
        self.num_running += len(slots)
        self.num_output[slots] = resumed
        self.min_output[slots] = params.min_tokens
        self.max_output[slots] = request.max_tokens
        self.generation[slots] += 1
        self.eventful[slots] = request.watch is not None or request.streams
        self.wants_logprobs[slots] = params.logprobs is not None
        self.constrained[slots] = request.grammar is not None
        self._set_stops(slots, request)
        self.tails.sampled_from[slots] = samples[0].group.prompt_len
        if params.logprobs is not None and not len(self.logprobs):
            self.logprobs = np.zeros(self.tails.sampled.shape, np.float32)
        for slot, sample in zip(slots.tolist(), samples, strict=True):
            sample.slot = slot
            self.samples[slot] = sample
            if request.grammar is not None and sample.matcher is None:
                sample.matcher = request.grammar()
            if resumed:
                self._restore(slot, sample)

    def _set_stops(self, slots: np.ndarray, request: GroupRequest) -> None:
        ids = request.stop_token_ids
        if len(ids) > self.stop_ids.shape[1]:
            wider = np.full((len(self.running), len(ids)), NO_TOKEN, np.int32)
            wider[:, : self.stop_ids.shape[1]] = self.stop_ids
            self.stop_ids = wider
        self.stop_ids[slots] = NO_TOKEN
        if ids:
            self.stop_ids[slots, : len(ids)] = ids

    def _restore(self, slot: int, sample: Sample) -> None:
        log = sample.log
        self.tails.sampled[slot, : len(log.token_ids)] = log.token_ids
        if log.logprobs is not None:
            self.logprobs[slot, : len(log.logprobs)] = log.logprobs
        if log.ranks is not None and log.top_ids is not None and log.top_logprobs is not None:
            tops = self._tops[slot] = TopColumns(log.top_ids.shape[1])
            tops.append(log.ranks, log.top_ids, log.top_logprobs)

    def record(self, slots: np.ndarray, tokens: np.ndarray, logprobs: np.ndarray | None) -> None:
        """Append one sampled token to each row, with its log-probability where asked for."""
        at = self.num_output[slots]
        self.tails.sampled[slots, at] = tokens
        if logprobs is not None:
            asked = np.flatnonzero(self.wants_logprobs[slots])
            self.logprobs[slots[asked], at[asked]] = logprobs[asked]
        self.num_output[slots] = at + 1

    def record_top(self, slot: int, rank: int, token_ids: np.ndarray, logprobs: np.ndarray) -> None:
        """Append the rank of a row's last token and the likeliest tokens at its place."""
        if slot not in self._tops:
            self._tops[slot] = TopColumns(len(token_ids))
        self._tops[slot].append(rank, token_ids, logprobs)

    def hit_stop(self, slots: np.ndarray, tokens: np.ndarray) -> np.ndarray:
        """Which rows just sampled one of their stop ids, min_tokens respected (bool [rows])."""
        hit = (self.stop_ids[slots] == tokens[:, None]).any(axis=1)
        return hit & (self.num_output[slots] > self.min_output[slots])

    def hit_limit(self, slots: np.ndarray) -> np.ndarray:
        """Which rows have written ``max_tokens`` (bool [rows])."""
        return self.num_output[slots] >= self.max_output[slots]

    def token_mask(self, slots: np.ndarray, vocab_size: int) -> tuple[np.ndarray, np.ndarray] | None:
        """Which tokens the grammars of these rows allow (bool [G, vocab]), and which rows have one (int64 [G])."""
        rows = np.flatnonzero(self.constrained[slots])
        matchers = [sample.matcher for slot in slots[rows].tolist() if (sample := self.samples[slot]) is not None]
        present = [matcher for matcher in matchers if matcher is not None]
        return (token_mask(present, vocab_size), rows) if len(rows) else None

    def log(self, sample: Sample) -> SampleLog:
        """Everything recorded of a sample so far."""
        slot = sample.slot
        if slot is None:
            return sample.log
        count = int(self.num_output[slot])
        logprobs = self.logprobs[slot, :count].copy() if self.wants_logprobs[slot] else None
        log = EMPTY_LOG._replace(token_ids=self.tails.sampled[slot, :count].copy(), logprobs=logprobs)
        tops = self._tops.get(slot)
        if tops is not None:
            ranks, top_ids, top_logprobs = tops.columns()
            log = log._replace(ranks=ranks, top_ids=top_ids, top_logprobs=top_logprobs)
        return log

    def stop(self, sample: Sample) -> int:
        """End the running of a sample: its log is kept, its row is free. Returns the slot."""
        slot = sample.slot
        if slot is None:
            raise RuntimeError("the sample does not run")
        sample.log = self.log(sample)
        sample.slot = None
        self.samples[slot] = None
        self.running[slot] = False
        self.generation[slot] += 1
        self.num_running -= 1
        self._tops.pop(slot, None)
        return slot
