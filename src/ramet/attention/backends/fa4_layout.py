"""From a work list to what FlashAttention-4 takes: sequences with page tables, and which partials a token merges.

FlashAttention-4 reads a sequence of whole pages from slot 0 of the first one, and masks by a length and by causality
at the end. So a row's tail is one causal sequence, and everything before it (shared nodes, and nodes of a tail whose
pages do not go on in the next node) is read by sequences without a mask, whose queries are gathered beforehand.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ramet.attention.problem import Problem
from ramet.attention.work import WorkList
from ramet.errors import Unsupported

MIN_SPLIT = 512
"""Tokens of a sequence that a long node is cut into, at least."""


class Sequences(NamedTuple):
    """One call of FlashAttention-4.

    Attributes
    ----------
    queries : int64 [entries]
        The query token of each entry, an index in ``q``.
    cu_seqlens_q : int32 [sequences + 1]
        Entries of each sequence.
    seqused_k : int32 [sequences]
    page_table : int32 [sequences, most pages]
        Page 0 where a sequence has fewer.
    max_q, max_k : int
    """

    queries: np.ndarray
    cu_seqlens_q: np.ndarray
    seqused_k: np.ndarray
    page_table: np.ndarray
    max_q: int
    max_k: int


class Layout(NamedTuple):
    """Both calls, and the merge.

    Attributes
    ----------
    tails : Sequences
        Causal; entry t is token ``tails.queries[t]``.
    before : Sequences or None
        Without a mask; None where every row is one sequence, so that there is nothing to merge.
    parts : int32 [tokens + 1]
        Entries of ``before`` that tail entry t merges with: ``part_entry[parts[t]:parts[t + 1]]``.
    part_entry : int32
    """

    tails: Sequences
    before: Sequences | None
    parts: np.ndarray
    part_entry: np.ndarray


class _Piece(NamedTuple):
    """Pages that follow each other, read by the rows ``[row_begin, row_end)``."""

    row_begin: int
    row_end: int
    pages: np.ndarray
    tokens: int


def layout(work: WorkList, problem: Problem, sm_count: int) -> Layout:
    """Lay a work list out for FlashAttention-4.

    Raises
    ------
    Unsupported
        A node begins inside a page, and its pages do not go on where those before it end; or a row has query tokens in
        more than its last node.
    """
    before = [
        _Piece(int(begin), int(end), _pages(work, int(node), problem.page_size), int(tokens))
        for node, begin, end, tokens in zip(
            work.item_node, work.item_row_begin, work.item_row_end, work.item_tokens, strict=True
        )
    ]
    for item, piece in enumerate(before):
        _check_start(work, int(work.item_node[item]))
        rows = slice(piece.row_begin, piece.row_end)
        _check_queries(bool((work.forest.node_end[work.item_node[item]] <= (work.end - work.q_len)[rows]).all()))
    tails = []
    for row in range(work.num_rows):
        *early, last = _tail_pieces(work, row, problem.page_size)
        _check_queries(last.tokens >= work.q_len[row] or not (early or work.row_item[row] >= 0))
        before += early
        tails.append(last)
    before = _split(before, work, problem, sm_count)
    tail_call = _sequences(tails, work)
    if not before:
        return Layout(tail_call, None, np.zeros(len(tail_call.queries) + 1, np.int32), np.zeros(0, np.int32))
    parts, part_entry = _parts(before, work)
    return Layout(tail_call, _sequences(before, work), parts, part_entry)


def _check_start(work: WorkList, node: int) -> None:
    first = int(work.forest.node_first_slot[node])
    if first:
        raise Unsupported(
            f"fa4 reads pages from slot 0, but node {node} begins at slot {first} and does not go on where the pages "
            "before it end."
        )


def _check_queries(ok: bool) -> None:
    if not ok:
        raise Unsupported("fa4 masks causally at the end of one node: a row has query tokens in more than its last.")


def _pages(work: WorkList, node: int, page_size: int) -> np.ndarray:
    forest = work.forest
    begin = int(forest.node_page_indptr[node])
    tokens = int(forest.node_end[node] - forest.node_start[node])
    count = -(-(int(forest.node_first_slot[node]) + tokens) // page_size) if tokens else 0
    return forest.node_pages[begin : begin + count]


def _tail_pieces(work: WorkList, row: int, page_size: int) -> list[_Piece]:
    """A row's own nodes, those whose pages go on in the next one joined; at least one piece, which may be empty."""
    forest = work.forest
    pieces: list[_Piece] = []
    for node in work.tail_node[work.tail_indptr[row] : work.tail_indptr[row + 1]].tolist():
        tokens = int(forest.node_end[node] - forest.node_start[node])
        if not tokens:
            continue
        pages, first = _pages(work, node, page_size), int(forest.node_first_slot[node])
        if pieces:
            last = pieces[-1]
            slot = last.tokens % page_size
            if first == slot and (slot == 0 or last.pages[-1] == pages[0]):
                joined = np.concatenate([last.pages, pages[int(slot > 0) :]])
                pieces[-1] = _Piece(row, row + 1, joined, last.tokens + tokens)
                continue
        _check_start(work, node)
        pieces.append(_Piece(row, row + 1, pages, tokens))
    return pieces or [_Piece(row, row + 1, np.zeros(0, np.int32), 0)]


def _split(pieces: list[_Piece], work: WorkList, problem: Problem, sm_count: int) -> list[_Piece]:
    """Cut long pieces at pages, so that the call fills the device: on SM90 one sequence is never split by itself."""
    tiles = sum(-(-int(work.q_len[p.row_begin : p.row_end].sum()) * problem.group_size // 128) for p in pieces)
    wanted = max(sm_count // max(tiles * problem.num_kv_heads, 1), 1)
    cut = []
    for piece in pieces:
        parts = max(min(wanted, piece.tokens // MIN_SPLIT), 1)
        pages = -(-len(piece.pages) // parts)
        for begin in range(0, len(piece.pages), pages):
            tokens = min(pages * problem.page_size, piece.tokens - begin * problem.page_size)
            cut.append(piece._replace(pages=piece.pages[begin : begin + pages], tokens=tokens))
    return cut


def _entries(piece: _Piece, work: WorkList) -> np.ndarray:
    """Query tokens of a piece's rows, in depth-first order."""
    rows = slice(piece.row_begin, piece.row_end)
    q_len = work.q_len[rows]
    first = np.repeat(work.q_begin[rows] - (np.cumsum(q_len) - q_len), q_len)
    return first + np.arange(int(q_len.sum()))


def _sequences(pieces: list[_Piece], work: WorkList) -> Sequences:
    queries = [_entries(piece, work) for piece in pieces]
    counts = [len(query) for query in queries]
    table = np.zeros((len(pieces), max((len(piece.pages) for piece in pieces), default=0) or 1), np.int32)
    for i, piece in enumerate(pieces):
        table[i, : len(piece.pages)] = piece.pages
    return Sequences(
        queries=np.concatenate(queries) if queries else np.zeros(0, np.int64),
        cu_seqlens_q=np.array([0, *np.cumsum(counts)], np.int32),
        seqused_k=np.array([piece.tokens for piece in pieces], np.int32),
        page_table=table,
        max_q=max(counts, default=0),
        max_k=max((piece.tokens for piece in pieces), default=0),
    )


def _parts(pieces: list[_Piece], work: WorkList) -> tuple[np.ndarray, np.ndarray]:
    """For each token, depth-first, the entries of its pieces."""
    begin = np.append(0, np.cumsum(work.q_len))
    token = np.concatenate([np.arange(begin[piece.row_begin], begin[piece.row_end]) for piece in pieces])
    order = np.argsort(token, kind="stable")
    parts = np.zeros(int(begin[-1]) + 1, np.int32)
    np.cumsum(np.bincount(token, minlength=int(begin[-1])), out=parts[1:])
    return parts, order.astype(np.int32)
