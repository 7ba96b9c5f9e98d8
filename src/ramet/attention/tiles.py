"""From a work list to tiles: what one thread block of a device kernel does, as flat arrays.

A *span* is what several rows read together (a shared node) or one row alone (its tail). Spans are cut into tiles along
the query vectors (query tokens times the heads of a GQA group, packed, in depth-first order) and into splits along the
keys. Every split of a span is one *part* of the tokens of its rows; parts are numbered from the root down, so that one
number serves all rows of a span::

    token's parts:   | splits of A | splits of C | splits of its tail |      part_indptr[token] + part

Deterministic mode cuts at absolute multiples of ``GRANULE`` tokens only. A granule belongs to the node that holds its
last position: where that node is shared, all rows below it read the granule together, else each by itself. So what a
row computes does not depend on what is shared.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ramet.attention.build import paths_of
from ramet.attention.cost_table import Costs
from ramet.attention.problem import Problem
from ramet.attention.work import WorkList
from ramet.errors import CapacityExceeded

GRANULE = 512
"""Tokens of a split in deterministic mode."""

FAR = np.iinfo(np.int32).max
"""End of a span's last split: it takes whatever its segments have, also what they grow by."""


class Shape(NamedTuple):
    """Tile sizes of a kernel.

    Attributes
    ----------
    large, small : int
        Query vectors of a tile; equal where there is one size only.
    block : int
        Keys of a block: splits begin at multiples of it.
    programs : int
        Tiles that run at once.
    """

    large: int
    small: int
    block: int
    programs: int


class Limits(NamedTuple):
    """How much a kernel's arrays hold: tiles of a KV head, and parts of all tokens."""

    tiles: int
    parts: int


class Tiles(NamedTuple):
    """Arrays of a kernel.

    Attributes
    ----------
    counts : int32 [4]
        Large tiles, all tiles, query tokens, 0.
    tiles : int32 [tiles, 8]
        First and end query vector, first and end segment, first and end position, part, 0; large tiles first.
    segments : int32 [segments, 3]
        First and end position, and what leads from a position to its place (KV slot counted through the page lists).
    tokens : int32 [tokens, 3]
        Of each query token, depth-first: its index in q, its row, and how many tokens of the row follow it.
    parts : int32 [tokens + 1]
        First part of each token.
    row_end : int32 [rows]
        Context length of every row of the forest.
    segment_node : int64 [segments]
        The node of a segment.
    """

    counts: np.ndarray
    tiles: np.ndarray
    segments: np.ndarray
    tokens: np.ndarray
    parts: np.ndarray
    row_end: np.ndarray
    segment_node: np.ndarray


class Spans(NamedTuple):
    """What rows read together. Arrays over spans.

    Attributes
    ----------
    row_begin, row_end : int64
        Rows of the work list.
    segment_begin, segment_end : int64
    low, high : int64
        Positions.
    """

    row_begin: np.ndarray
    row_end: np.ndarray
    segment_begin: np.ndarray
    segment_end: np.ndarray
    low: np.ndarray
    high: np.ndarray


def make_tiles(work: WorkList, problem: Problem, shape: Shape, costs: Costs, limits: Limits | None = None) -> Tiles:
    """Cut a work list into tiles.

    Parameters
    ----------
    work : WorkList
    problem : Problem
    shape : Shape
    costs : Costs
        What decides about splits (not in deterministic mode).
    limits : Limits, optional
        Splits are given up to stay within them.

    Raises
    ------
    CapacityExceeded
        The work does not fit ``limits`` even without splits.
    """
    if problem.deterministic:
        spans, segment_node, part, part_count = _granules(work)
        splits = np.ones(len(part), np.int64)
        step = np.full(len(part), GRANULE, np.int64)
    else:
        spans, segment_node = _spans(work, problem)
        splits, step = _split(work, spans, problem, shape, costs, limits)
        part, part_count = _number(work, splits)
    tiles, large = _cut(work, spans, splits, step, part, problem, shape)
    token_parts = np.repeat(part_count, work.q_len)
    parts = np.zeros(len(token_parts) + 1, np.int32)
    np.cumsum(token_parts, out=parts[1:])
    if limits is not None:
        _require("items", len(tiles), limits.tiles)
        _require("parts", int(parts[-1]), limits.parts)
    counts = np.array([large, len(tiles), len(token_parts), 0], np.int32)
    segments = segments_of(work, segment_node, problem.page_size)
    row_end = work.forest.node_end[work.forest.row_leaf].astype(np.int32)
    return Tiles(counts, tiles, segments, _tokens(work), parts, row_end, segment_node)


def _require(name: str, needed: int, available: int) -> None:
    if needed > available:
        raise CapacityExceeded(
            f"the plan needs {needed} {name}, but its buffers hold {available}; make buffers with a larger "
            "Capacity(items=...), or use a graph that was captured with larger ones."
        )


def segments_of(work: WorkList, node: np.ndarray, page_size: int) -> np.ndarray:
    """First and end position of each segment's node, and its positions' distance to their places."""
    forest = work.forest
    segments = np.empty((len(node), 3), np.int32)
    start = forest.node_start[node]
    segments[:, 0] = start
    segments[:, 1] = forest.node_end[node]
    segments[:, 2] = forest.node_page_indptr[node].astype(np.int64) * page_size + forest.node_first_slot[node] - start
    return segments


def _tokens(work: WorkList) -> np.ndarray:
    row = np.repeat(np.arange(work.num_rows), work.q_len)
    first = np.cumsum(work.q_len) - work.q_len
    index = np.arange(len(row)) - first[row]
    tokens = np.empty((len(row), 3), np.int32)
    tokens[:, 0] = work.q_begin[row] + index
    tokens[:, 1] = work.rows[row]
    tokens[:, 2] = work.q_len[row] - 1 - index
    return tokens


def _spans(work: WorkList, problem: Problem) -> tuple[Spans, np.ndarray]:
    """One span per shared node, then one per row (empty for a row without a tail); left of all windows is left out."""
    forest, items = work.forest, work.num_items
    node = np.concatenate([work.item_node, work.tail_node])
    tails = items + work.tail_indptr
    rows = np.arange(work.num_rows)
    first = np.minimum(tails[:-1], len(node) - 1)
    has_tail = tails[1:] > tails[:-1]
    low = np.concatenate([forest.node_start[work.item_node], forest.node_start[node[first]] * has_tail])
    high = np.concatenate([forest.node_end[work.item_node], work.end * has_tail]).astype(np.int64)
    begin = np.concatenate([work.item_row_begin, rows])
    end = np.concatenate([work.item_row_end, rows + 1])
    low = low.astype(np.int64)
    if problem.window_left >= 0 and len(rows):
        seen = work.end - work.q_len - problem.window_left
        lowest = [int(seen[a:z].min()) for a, z in zip(work.item_row_begin, work.item_row_end, strict=True)]
        low = np.maximum(low, np.concatenate([np.array(lowest, np.int64), seen]))
    segment = np.arange(items)
    return Spans(
        begin, end, np.concatenate([segment, tails[:-1]]), np.concatenate([segment + 1, tails[1:]]), low, high
    ), node


CHUNKS = np.array([1 << 30, 8192, 6144, 4096, 3072, 2048, 1536, 1024, 768, 512, 384, 256, 192, 128, 64])
"""Lengths of splits that are weighed against each other."""


def _split(
    work: WorkList, spans: Spans, problem: Problem, shape: Shape, costs: Costs, limits: Limits | None
) -> tuple[np.ndarray, np.ndarray]:
    """Splits of each span and their length: those that the measured costs say end first.

    The work of all tiles divided by the programs that run at once, plus the longest tile (it may start last), plus the
    partials: within that a schedule of independent tiles surely ends.
    """
    tokens = np.maximum(spans.high - spans.low, 0)
    vectors = _vectors(work, spans, problem)
    large, small = _tile_counts(vectors, shape)
    tiles = large + small
    least = max(costs.min_split_tokens, shape.block)
    chunks = CHUNKS[least <= CHUNKS][:, None]
    splits = -(-tokens // chunks)  # [chunks, spans]
    length = -(-tokens // np.maximum(splits, 1)) / 64
    tile_us = costs.item_us + length * np.where(large > 0, costs.shared_block_us, costs.row_block_us)
    total = (splits * tiles * tile_us).sum(axis=1) * problem.num_kv_heads / shape.programs
    partials = (splits * vectors).sum(axis=1) * problem.num_kv_heads * costs.partial_ns * 1e-3
    cost = total + (tile_us * (tokens > 0)).max(axis=1, initial=0.0) + partials
    if limits is not None:
        parts = (splits * (vectors // problem.group_size)).sum(axis=1)
        fits = ((splits * tiles).sum(axis=1) <= limits.tiles) & (parts <= limits.parts)
        cost = np.where(fits, cost, np.inf)
    best = splits[int(np.argmin(cost))]
    step = -(-tokens // np.maximum(best, 1))
    step = np.maximum(-(-step // shape.block) * shape.block, shape.block)
    return -(-tokens // step), step


def _vectors(work: WorkList, spans: Spans, problem: Problem) -> np.ndarray:
    begin = np.zeros(work.num_rows + 1, np.int64)
    np.cumsum(work.q_len, out=begin[1:])
    return (begin[spans.row_end] - begin[spans.row_begin]) * problem.group_size


def _tile_counts(vectors: np.ndarray, shape: Shape) -> tuple[np.ndarray, np.ndarray]:
    """Large and small tiles that cover so many vectors: what is left behind the large ones may fit a small one."""
    rest = vectors % shape.large
    small = ((rest > 0) & (rest <= shape.small) & (shape.small < shape.large)).astype(np.int64)
    return -(-(vectors - small * rest) // shape.large), small


def _number(work: WorkList, splits: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """First part of each span, and the parts of each row."""
    items = work.num_items
    own = splits[:items]
    before = np.zeros(items + 1, np.int64)  # [-1]: no item
    above = work.item_above
    while (above >= 0).any():  # one step up at a time
        has = above >= 0
        before[:-1][has] += own[above[has]]
        above = np.where(has, work.item_above[above], -1)
    through = np.append(before[:-1] + own, 0)
    tail = through[work.row_item]
    return np.concatenate([before[:-1], tail]), tail + splits[items:]


def _cut(
    work: WorkList,
    spans: Spans,
    splits: np.ndarray,
    step: np.ndarray,
    part: np.ndarray,
    problem: Problem,
    shape: Shape,
) -> tuple[np.ndarray, int]:
    """Records of all tiles, large ones first and longest splits first, and the number of large ones."""
    vectors = _vectors(work, spans, problem)
    first = np.zeros(work.num_rows + 1, np.int64)
    np.cumsum(work.q_len * problem.group_size, out=first[1:])
    large, small = _tile_counts(vectors, shape)
    records = []
    for count, size, offset in ((large, shape.large, 0 * large), (small, shape.small, large * shape.large)):
        if not count.any():
            continue
        copies = count * splits
        span = np.repeat(np.arange(len(copies)), copies)
        index = np.arange(len(span)) - np.repeat(np.cumsum(copies) - copies, copies)
        split, tile = index // np.maximum(count, 1)[span], index % np.maximum(count, 1)[span]
        begin = first[spans.row_begin[span]] + offset[span] + tile * size
        low = spans.low[span] + split * step[span]
        last = split == splits[span] - 1
        record = np.zeros((len(span), 8), np.int32)
        record[:, 0] = begin
        record[:, 1] = np.minimum(begin + size, first[spans.row_end[span]])
        record[:, 2] = spans.segment_begin[span]
        record[:, 3] = spans.segment_end[span]
        record[:, 4] = low
        record[:, 5] = np.where(last & (not problem.deterministic), FAR, low + step[span])
        record[:, 6] = part[span] + split
        records.append(record)
    if not records:
        return np.zeros((0, 8), np.int32), 0
    return np.concatenate(records), int((large * splits).sum())


def _granules(work: WorkList) -> tuple[Spans, np.ndarray, np.ndarray, np.ndarray]:
    """Spans of one granule each; also the segments' nodes, each span's part, and the parts of each row."""
    forest = work.forest
    end = work.end
    count = -(-end // GRANULE)
    row = np.repeat(np.arange(work.num_rows), count)
    granule = np.arange(len(row)) - np.repeat(np.cumsum(count) - count, count)
    alone = np.ones(len(row), bool)
    shared = []  # (item, granules that end in it)
    for item, node in enumerate(work.item_node):
        first, behind = int(forest.node_start[node]) // GRANULE, int(forest.node_end[node]) // GRANULE
        below = (work.item_row_begin[item] <= row) & (row < work.item_row_end[item])
        alone &= ~(below & (first <= granule) & (granule < behind))
        shared += [(item, index) for index in range(first, behind)]
    item_index = np.array([item for item, _ in shared], np.int64)
    item_granule = np.array([index for _, index in shared], np.int64)
    leaves = np.concatenate([work.item_node, forest.row_leaf[work.rows]]).astype(np.int64)
    paths = paths_of(forest, leaves).T
    on_path = paths >= 0
    segment = np.zeros(len(leaves) + 1, np.int64)
    np.cumsum(on_path.sum(axis=1), out=segment[1:])
    row, granule = row[alone], granule[alone]
    leaf = np.concatenate([item_index, work.num_items + row])
    granules = np.concatenate([item_granule, granule])
    spans = Spans(
        np.concatenate([work.item_row_begin[item_index], row]),
        np.concatenate([work.item_row_end[item_index], row + 1]),
        segment[leaf],
        segment[leaf + 1],
        granules * GRANULE,
        (granules + 1) * GRANULE,
    )
    return spans, paths[on_path], granules, count
