"""What a step will do, as NumPy arrays on the host: testable without a device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from ramet.attention.types import ForestArrays
from ramet.cache import Forest, LiveNodes
from ramet.engine.group import Chunk, Start
from ramet.engine.rows import RowTable


@dataclass(frozen=True)
class StepPlan:
    """One step: T tokens through the model, M rows of logits, R tokens sampled.

    Attributes
    ----------
    slots : int64 [rows]
        Rows that compute, depth-first over the forest.
    token_ids, positions, slot_mapping : int64 [T]
    forest : ForestArrays
    logit_tokens : int64 [M - stored]
        Which of the T tokens need logits. Decode rows come first.
    stored_hidden : list of tensors
        Hidden states of prompts that were computed before; they follow as logits rows.
    sample_slots, logit_index, sample_positions, num_output : int64 [R]
        The slot of each sampled token, the logits row it is drawn from, its absolute position, and how many its sample
        has written before.
    generation : int64 [R]
        Of the slots when planned: a token for a slot that changed hands is dropped.
    decode_slots : int64
    chunks : list of Chunk
    chunk_tokens : list of int
        Offset of each chunk among the T tokens.
    mark_rows : list of (Chunk, int, int)
        Chunk, position and logits row of every hidden state to keep.
    starts : list of Start
    """

    slots: np.ndarray
    token_ids: np.ndarray
    positions: np.ndarray
    slot_mapping: np.ndarray
    forest: ForestArrays
    logit_tokens: np.ndarray
    stored_hidden: list[Any]
    sample_slots: np.ndarray
    logit_index: np.ndarray
    sample_positions: np.ndarray
    num_output: np.ndarray
    generation: np.ndarray
    decode_slots: np.ndarray
    chunks: list[Chunk]
    chunk_tokens: list[int]
    mark_rows: list[tuple[Chunk, int, int]]
    starts: list[Start]

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def empty(self) -> bool:
        return not len(self.token_ids) and not len(self.sample_slots)


def build_plan(
    forest: Forest, rows: RowTable, live: LiveNodes, decode: np.ndarray, chunks: list[Chunk], starts: list[Start]
) -> StepPlan:
    """Lay out a step: who computes what, in the forest's row order.

    Parameters
    ----------
    decode : bool [slots]
        Rows that compute their last sampled token.
    """
    tails = forest.tails
    length = np.zeros(tails.num_slots, np.int64)  # query tokens by slot
    length[decode] = 1
    for chunk in chunks:
        length[chunk.prefill.slot] = chunk.end - chunk.begin
    scheduled = np.flatnonzero(length[live.slots])
    slots = live.slots[scheduled]
    q_lens, begins = length[slots], tails.computed[slots]
    arrays = live.forest_arrays(tails, scheduled, begins + q_lens, q_lens)
    offsets = arrays.cu_seqlens_q[:-1].astype(np.int64)
    token_slots, positions = slots, begins
    if chunks:
        token_slots = np.repeat(slots, q_lens)
        positions = np.repeat(begins - offsets, q_lens) + np.arange(len(token_slots))

    decode_rows = np.flatnonzero(decode[slots])
    decode_slots = slots[decode_rows]
    token_ids = np.zeros(len(token_slots), np.int64)
    token_ids[offsets[decode_rows]] = tails.sampled[decode_slots, rows.num_output[decode_slots] - 1]
    chunk_tokens = _write_chunks(token_ids, chunks, slots, offsets)
    mark_tokens, mark_rows = _lay_marks(chunks, chunk_tokens, len(decode_slots))
    start_rows, stored = _lay_starts(starts, mark_rows, len(decode_slots) + len(mark_rows))
    sample_slots = np.concatenate([decode_slots, *(start.slots for start in starts)])
    counts = [len(start.slots) for start in starts]
    start_positions = np.repeat(np.array([start.stem.position for start in starts], np.int64), counts)
    return StepPlan(
        slots=slots,
        token_ids=token_ids,
        positions=positions,
        slot_mapping=tails.kv_slots(token_slots, positions),
        forest=arrays,
        logit_tokens=np.concatenate([offsets[decode_rows], mark_tokens]),
        stored_hidden=stored,
        sample_slots=sample_slots,
        logit_index=np.concatenate([np.arange(len(decode_slots)), np.repeat(start_rows, counts)]),
        sample_positions=np.concatenate([begins[decode_rows] + 1, start_positions]),
        num_output=rows.num_output[sample_slots],
        generation=rows.generation[sample_slots],
        decode_slots=decode_slots,
        chunks=chunks,
        chunk_tokens=chunk_tokens,
        mark_rows=mark_rows,
        starts=starts,
    )


def _write_chunks(token_ids: np.ndarray, chunks: list[Chunk], slots: np.ndarray, offsets: np.ndarray) -> list[int]:
    """Put each chunk's tokens in place; returns where each begins."""
    row_of = {slot: row for row, slot in enumerate(slots.tolist())} if chunks else {}
    firsts = []
    for chunk in chunks:
        first, run = int(offsets[row_of[chunk.prefill.slot]]), chunk.prefill.run
        token_ids[first : first + chunk.end - chunk.begin] = run.tokens[chunk.begin - run.start : chunk.end - run.start]
        firsts.append(first)
    return firsts


def _lay_marks(
    chunks: list[Chunk], firsts: list[int], num_logits: int
) -> tuple[np.ndarray, list[tuple[Chunk, int, int]]]:
    """Return the token of every mark, and (chunk, position, logits row) of each, from row ``num_logits`` on."""
    tokens: list[int] = []
    rows: list[tuple[Chunk, int, int]] = []
    for chunk, first in zip(chunks, firsts, strict=True):
        for mark in chunk.marks:
            rows.append((chunk, mark, num_logits + len(tokens)))
            tokens.append(first + mark - 1 - chunk.begin)
    return np.array(tokens, np.int64), rows


def _lay_starts(
    starts: list[Start], mark_rows: list[tuple[Chunk, int, int]], num_logits: int
) -> tuple[np.ndarray, list[Any]]:
    """Return the logits row of each start, and the stored hidden states that are rows from ``num_logits`` on."""
    row_of = {(chunk.prefill.run.id, mark): row for chunk, mark, row in mark_rows}
    stored: list[Any] = []
    for start in starts:
        key = (start.stem.run.id, start.stem.position)
        if start.hidden is not None and key not in row_of:
            row_of[key] = num_logits + len(stored)
            stored.append(start.hidden)
    return np.array([row_of[s.stem.run.id, s.stem.position] for s in starts], np.int64), stored
