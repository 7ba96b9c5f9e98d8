"""Blocks of rows for the passes of the CPU backend: cut long prefills, sort, and choose where a pass ends.

The constants are measured (two Zen 4 cores, 3 KV heads of 64); they choose shapes and never change what is computed.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ramet.attention.problem import Problem
from ramet.attention.work import WorkList

KEY_BLOCK = 16
"""Nodes and tails are padded to multiples of this many keys. A row's sums then run over the same lanes in the same
order whatever its neighbours' lengths are, and padding adds exact zeros: its bits do not depend on its neighbours."""

MAX_BLOCK_TOKENS = 128
"""Query tokens of one row in a pass. Long prefills are cut so that the keys behind a block, which causality hides, are
not computed: for 512 tokens, blocks of 128 do 62% of the whole square."""

MAX_PASS_SCORES, MAX_PASS_KEYS = 1 << 22, 1 << 22
"""Scores of a pass, and elements of K (and of V) that its tails gather: 16 MiB each in float32, about what a shared
cache holds."""

MIN_SHARED_ROWS = 48
"""Query rows (of one KV head) that a pass below a long shared node has at least: fewer read the node too often."""

PASS_NS, ITEM_NS = 100_000.0, 50_000.0
"""What one more pass, or one more item in a pass, costs: a dozen, or half a dozen, small operators."""

SCORE_NS, GATHER_NS, COLUMN_NS = 1.2, 0.1, 0.35
"""Per padded score (two products and a softmax), per padded element of K, per score column that is only filled."""


class Blocks(NamedTuple):
    """Blocks of query tokens: the rows of a work list, long ones cut. Arrays over blocks.

    Attributes
    ----------
    row : int64
        Index into the work list's rows.
    q_begin, q_len : int64
        First token in q, and how many.
    end : int64
        Position behind the last query.
    tail : int64
        Keys of the row's tail that the last query sees.
    above : int64
        Keys of the items above the row, padded.
    """

    row: np.ndarray
    q_begin: np.ndarray
    q_len: np.ndarray
    end: np.ndarray
    tail: np.ndarray
    above: np.ndarray

    def take(self, index: np.ndarray | slice) -> Blocks:
        return Blocks(*(array[index] for array in self))


class Tails(NamedTuple):
    """Where the keys of the tails lie. A *place* is a KV slot counted through ``node_pages``, one page after another.

    Attributes
    ----------
    first : int64 [rows]
        Place of the row's first key, or, where ``places`` is given, the index of its entry there.
    places : int64 [keys] or None
        Places of all tails' keys, row by row. None when every tail is one node: its places are consecutive.
    start, tokens : int64 [segments]
        Of each node of each tail: position of its first key, and its length.
    indptr : int64 [rows + 1]
    """

    first: np.ndarray
    places: np.ndarray | None
    start: np.ndarray
    tokens: np.ndarray
    indptr: np.ndarray

    @classmethod
    def of(cls, work: WorkList, page_size: int) -> Tails:
        forest, node = work.forest, work.tail_node
        start = forest.node_start[node].astype(np.int64)
        tokens = forest.node_end[node] - start
        place = forest.node_page_indptr[node].astype(np.int64) * page_size + forest.node_first_slot[node]
        indptr = work.tail_indptr
        if (indptr[1:] - indptr[:-1] == 1).all():
            return cls(place, None, start, tokens, indptr)
        begin = np.zeros(len(node) + 1, np.int64)
        np.cumsum(tokens, out=begin[1:])
        places = np.arange(begin[-1]) + np.repeat(place - begin[:-1], tokens)
        return cls(begin[indptr[:-1]], places, start, tokens, indptr)

    def places_of(self, row: np.ndarray, key: np.ndarray) -> np.ndarray:
        """Places of the given keys of rows' tails: ``[rows, keys]``. A row without a tail gets nonsense."""
        at = self.first[row][:, None] + key
        return at if self.places is None else self.places[np.minimum(at, len(self.places) - 1)]

    def visible(self, row: np.ndarray, behind: np.ndarray) -> np.ndarray:
        """Keys of each row's tail at positions below ``behind`` ``[rows, queries]``."""
        if self.places is None:
            return clip(behind - self.start[row][:, None], self.tokens[row][:, None])
        seen = np.zeros(behind.shape, np.int64)
        count = (self.indptr[1:] - self.indptr[:-1])[row]
        for k in range(int(count.max(initial=0))):  # the k-th node of every tail that has so many
            has = np.flatnonzero(count > k)
            segment = self.indptr[row[has]] + k
            seen[has] += clip(behind[has] - self.start[segment][:, None], self.tokens[segment][:, None])
        return seen


def clip(values: np.ndarray, high: np.ndarray) -> np.ndarray:
    """``np.clip(values, 0, high)`` at a quarter of its price for small arrays."""
    return np.minimum(np.maximum(values, 0), high)


def extended(values: np.ndarray, last: int) -> np.ndarray:
    """``np.append(values, last)``, likewise."""
    longer = np.empty(len(values) + 1, values.dtype)
    longer[:-1], longer[-1] = values, last
    return longer


def cut_blocks(work: WorkList, tails: Tails, item_end: np.ndarray, problem: Problem) -> Blocks:
    """Cut rows with many query tokens; a block's scores over the longest path fit a pass.

    ``item_end`` is the number of keys down to each item's end (:func:`columns`).
    """
    fits = MAX_PASS_SCORES // (problem.num_qo_heads * int(work.row_tokens.max(initial=1)))
    size = min(MAX_BLOCK_TOKENS, max(KEY_BLOCK, fits))
    if work.q_len.max(initial=0) <= size:
        row, q_begin, q_len, end = np.arange(work.num_rows), work.q_begin, work.q_len, work.end
    else:
        count = -(-work.q_len // size)
        row = np.repeat(np.arange(work.num_rows), count)
        offset = (np.arange(len(row)) - np.repeat(np.cumsum(count) - count, count)) * size
        q_begin, q_len = work.q_begin[row] + offset, np.minimum(work.q_len[row] - offset, size)
        end = work.end[row] - work.q_len[row] + offset + q_len
    above = extended(item_end, 0)[work.row_item[row]]
    return Blocks(row, q_begin, q_len, end, tails.visible(row, end[:, None])[:, 0], above)


def padded(keys: np.ndarray) -> np.ndarray:
    """Round up to whole key blocks."""
    return -(-keys // KEY_BLOCK) * KEY_BLOCK


def columns(work: WorkList) -> tuple[np.ndarray, np.ndarray]:
    """First and last + 1 score column of each item, behind the tails: items follow each other down every path."""
    width = padded(work.item_tokens)
    end = width.copy()
    for item, above in enumerate(work.item_above.tolist()):
        if above >= 0:
            end[item] += end[above]
    return end - width, end


class Sorted(NamedTuple):
    """Blocks in the order of passes.

    Attributes
    ----------
    blocks : Blocks
    bounds : list of int
        Pass p has the blocks ``[bounds[p], bounds[p + 1])``.
    item_begin, item_end : int64 [items]
        The blocks below each item.
    """

    blocks: Blocks
    bounds: list[int]
    item_begin: np.ndarray
    item_end: np.ndarray


def sort_blocks(work: WorkList, blocks: Blocks, problem: Problem) -> Sorted:
    """Put alike blocks next to each other where the forest allows it, and cut the list into passes.

    The order stays depth-first: blocks move within their deepest item, and whole trees move. Nothing moves when one
    pass is enough anyway.
    """
    begin, end = work.item_row_begin, work.item_row_end
    if len(blocks.row) > work.num_rows:
        of_row = np.searchsorted(blocks.row, np.arange(work.num_rows + 1))
        begin, end = of_row[begin], of_row[end]
    bounds = pass_bounds(blocks, problem)
    if len(bounds) == 2:
        return Sorted(blocks, bounds, begin, end)
    item = work.row_item[blocks.row]
    top = np.flatnonzero(work.item_above < 0)
    rank = np.full(len(blocks.row), -1)  # blocks below no item come first
    if len(top):
        intervals = np.stack([begin[top], end[top]], axis=1).ravel()
        longest = np.maximum.reduceat(extended(blocks.tail, 0), intervals)[::2]
        order = np.lexsort((work.item_tokens[top], end[top] - begin[top], longest))
        number = np.empty(len(top), np.int64)
        number[order] = np.arange(len(top))
        for number_of_top, low, high in zip(number.tolist(), begin[top].tolist(), end[top].tolist(), strict=True):
            rank[low:high] = number_of_top
    item_begin = extended(begin, 0)[item]
    order = np.lexsort((blocks.tail, blocks.q_len, item, item_begin, rank))
    moved_to = np.empty(len(order) + 1, np.int64)
    moved_to[order], moved_to[-1] = np.arange(len(order)), len(order)
    if len(begin):
        moved = np.minimum.reduceat(moved_to, np.stack([begin, end], 1).ravel())[::2]
        begin, end = moved, moved + end - begin
    blocks = blocks.take(order)
    return Sorted(blocks, pass_bounds(blocks, problem), begin, end)


def pass_bounds(blocks: Blocks, problem: Problem) -> list[int]:
    """Where passes begin and end: neighbours join a pass while their padding costs less than another pass would."""
    tails = padded(blocks.tail)
    begins = np.ones(len(tails), bool)  # of runs of alike blocks
    begins[1:] = tails[1:] != tails[:-1]
    for values in (blocks.q_len, blocks.above):
        begins[1:] |= values[1:] != values[:-1]
    first = np.flatnonzero(begins)
    counts = extended(first[1:], len(tails)) - first
    bounds = [0]
    shape, useful = _Shape(0, 0, 0, 0), 0.0
    alike = (counts, blocks.q_len[first], tails[first], blocks.above[first])
    for count, q_len, tail, above in zip(*(values.tolist() for values in alike), strict=True):
        while count:
            own = _Shape(1, q_len, tail, above).cost(problem)
            joined = _Shape(shape.rows, *map(max, shape[1:], (q_len, tail, above)))
            more = min(count, joined.capacity(problem) - shape.rows)
            joined = joined._replace(rows=shape.rows + more)
            if shape.rows and (more < 1 or joined.cost(problem) - useful - more * own > PASS_NS):
                bounds.append(bounds[-1] + shape.rows)
                shape, useful = _Shape(0, 0, 0, 0), 0.0
                continue
            shape, useful, count = joined, useful + more * own, count - more
    bounds.append(bounds[-1] + shape.rows)
    return bounds


class _Shape(NamedTuple):
    """A pass's shape: rows, query tokens of a row, keys of a tail, keys above."""

    rows: int
    q_len: int
    tail: int
    above: int

    def cost(self, problem: Problem) -> float:
        """Nanoseconds, with padding, of what depends on the shape."""
        score = self.q_len * problem.num_qo_heads
        key = score * SCORE_NS + problem.num_kv_heads * problem.head_dim * GATHER_NS
        return self.rows * (self.tail * key + self.above * score * COLUMN_NS)

    def capacity(self, problem: Problem) -> int:
        """Rows that fit a pass, at least 1."""
        query_rows = self.q_len * problem.group_size
        scores = query_rows * problem.num_kv_heads * (self.tail + self.above)
        keys = self.tail * problem.num_kv_heads * problem.head_dim
        fit = MAX_PASS_SCORES // max(scores, 1)
        if self.above > self.tail:
            fit = max(fit, MIN_SHARED_ROWS // query_rows)
        return max(1, min(fit, MAX_PASS_KEYS // max(keys, 1)))
