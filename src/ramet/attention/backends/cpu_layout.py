"""From a work list to matrix shapes: passes over blocks of rows, and in each pass batches of equal nodes.

A *pass* is a block of rows with equally many query tokens, small enough for its scores to stay in the cache. Its scores
are one matrix, and one softmax over it merges what a row reads from its tail and from every shared node above it::

            0      tail_width            ...                 width
    row 0   | tail      | node A           | node B | -inf ... |     a column holds one key; keys of different nodes
    row 1   | tail -inf | node A           | node C          |     share a column, as no row reads both
    row 2   | tail      | node D     | -inf ................. |

An *item* is a batch of nodes with equally many rows, next to each other: a shared node is an item by itself, siblings
of one size are one item, and so are all tails of the pass, each a node with one row. Everything here is NumPy.
"""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import numpy as np

from ramet.attention.backends.cpu_blocks import (
    GATHER_NS,
    ITEM_NS,
    SCORE_NS,
    Blocks,
    Tails,
    clip,
    columns,
    cut_blocks,
    padded,
    sort_blocks,
)
from ramet.attention.problem import Problem
from ramet.attention.work import WorkList


class Item(NamedTuple):
    """A batch of nodes with equally many rows each.

    Attributes
    ----------
    first_row, num_rows : int
        Rows of the pass below these nodes; node i has the i-th equal share of them.
    num_nodes : int
    column, width : int
        Where the scores go: columns ``[column, column + width)``; ``width`` is the number of keys of a node, padded.
    visible : int64 [num_rows, q_len]
        How many of the keys each query sees: padding and later positions are the rest.
    """

    first_row: int
    num_rows: int
    num_nodes: int
    column: int
    width: int
    visible: np.ndarray


class Pass(NamedTuple):
    """A block of rows with ``q_len`` query tokens each (shorter ones repeat their last token).

    Attributes
    ----------
    num_rows, q_len, width : int
        The score matrix is ``[num_kv_heads, num_rows, q_len * group, width]``.
    has_gaps : bool
        Some scores belong to no item and must be -inf.
    items : tuple of Item
        In order of columns; the tails come first.
    kv_index : int64 [num_kv_heads * keys]
        Rows of a pool seen as ``[slots * num_kv_heads, head_dim]``: for each item ``[num_kv_heads, num_nodes, width]``.
    """

    num_rows: int
    q_len: int
    width: int
    has_gaps: bool
    items: tuple[Item, ...]
    kv_index: np.ndarray


class Layout(NamedTuple):
    """Passes, and how tokens get in and out of them.

    Attributes
    ----------
    passes : tuple of Pass
    query_index : int64
        Rows of q seen as ``[tokens * num_kv_heads, group * head_dim]``: for each pass ``[num_kv_heads, rows, q_len]``.
    output_index : int64 [tokens * num_kv_heads]
        The way back: where each row of the output lies in the passes' outputs.
    in_order : bool
        One pass takes all tokens as they come: ``query_index`` only sorts them by KV head.
    """

    passes: tuple[Pass, ...]
    query_index: np.ndarray
    output_index: np.ndarray
    in_order: bool

    @classmethod
    def empty(cls) -> Layout:
        return cls((), np.empty(0, np.int64), np.empty(0, np.int64), True)


def layout(work: WorkList, problem: Problem) -> Layout:
    """Choose passes and items for a work list."""
    tails = Tails.of(work, problem.page_size)
    column, column_end = columns(work)
    blocks, bounds, begin, end = sort_blocks(work, cut_blocks(work, tails, column_end, problem), problem)
    builder = _PassBuilder(work, problem, tails, column)
    passes = []
    for low, high in pairwise(bounds):
        inside = np.flatnonzero((begin < high) & (end > low))
        nodes = [
            _Node(*numbers)
            for numbers in zip(
                inside.tolist(),
                np.maximum(begin[inside] - low, 0).tolist(),
                np.minimum(end[inside] - low, high - low).tolist(),
                column[inside].tolist(),
                padded(work.item_tokens[inside]).tolist(),
                strict=True,
            )
        ]
        passes.append(builder.build(blocks.take(slice(low, high)), nodes))
    tokens = work.counters.tokens
    query_index, output_index = _token_indices(blocks, bounds, passes, tokens, problem.num_kv_heads)
    in_order = len(passes) == 1 and np.array_equal(query_index[:tokens], np.arange(tokens) * problem.num_kv_heads)
    return Layout(tuple(passes), query_index, output_index, in_order and len(query_index) == len(output_index))


class _Node(NamedTuple):
    """An item of the work list within a pass: its rows ``[begin, end)``, first column and padded number of keys."""

    item: int
    begin: int
    end: int
    column: int
    width: int


class _PassBuilder:
    """Makes items and gather indices; holds what all passes of a plan look up."""

    def __init__(self, work: WorkList, problem: Problem, tails: Tails, column: np.ndarray) -> None:
        self.work, self.problem, self.tails = work, problem, tails
        forest, size = work.forest, problem.page_size
        # The pool's rows of KV head 0, by place: the one table that every gather index is read from.
        slots = (forest.node_pages.astype(np.int64) * size)[:, None] + np.arange(size)
        self.kv_rows = slots.ravel() * problem.num_kv_heads
        self.item_place = forest.node_page_indptr[work.item_node].astype(np.int64) * size + work.item_first_slot
        self.item_start = forest.node_start[work.item_node].astype(np.int64)

    def build(self, blocks: Blocks, nodes: list[_Node]) -> Pass:
        """One pass over ``blocks``; ``nodes`` are all items that some of them lie below."""
        q_len, num_rows = int(blocks.q_len.max()), len(blocks.row)
        # Position behind each query: the keys before it are what the query sees.
        behind = (blocks.end - blocks.q_len)[:, None] + np.minimum(np.arange(q_len) + 1, blocks.q_len[:, None])
        items: list[Item] = []
        keys: list[np.ndarray] = []
        tail_width = int(padded(blocks.tail.max()))
        if tail_width:
            visible = self.tails.visible(blocks.row, behind)
            items.append(Item(0, num_rows, num_rows, 0, tail_width, visible))
            keys.append(self._tail_places(blocks, tail_width))
        for group in self._siblings(blocks, nodes, q_len):
            item, places = self._shared(group, behind, tail_width)
            if item.width:
                items.append(item)
                keys.append(places)
        width = max(item.column + item.width for item in items)
        covered = sum(item.num_rows * item.width for item in items)
        return Pass(num_rows, q_len, width, covered < num_rows * width, tuple(items), self._gather_index(keys))

    def _tail_places(self, blocks: Blocks, width: int) -> np.ndarray:
        """Places of the tails' keys, ``[rows, width]``; padding repeats the last key, so that only valid K is read."""
        key = np.minimum(np.arange(width), np.maximum(blocks.tail, 1)[:, None] - 1)
        places = self.tails.places_of(blocks.row, key)
        empty = np.flatnonzero(blocks.tail == 0)
        if len(empty):  # any key that the row may see will do: all of these are hidden
            places[empty] = self.item_place[self.work.row_item[blocks.row[empty]]][:, None]
        return places

    def _siblings(self, blocks: Blocks, nodes: list[_Node], q_len: int) -> list[list[_Node]]:
        """Group nodes that one batched product serves: neighbours in one column, equally many rows, about as long.

        Nodes of different length are put together only when no other item lies below them: their padding is its place.
        """
        problem = self.problem
        score_ns = q_len * problem.num_qo_heads * SCORE_NS
        deepest = self.work.row_item[blocks.row]
        groups: list[list[_Node]] = []
        longest = total = 0
        for node in sorted(nodes, key=lambda node: (node.column, node.begin)):
            count = node.end - node.begin
            if groups:
                last = groups[-1][-1]
                padding = max(longest, node.width) * (len(groups[-1]) + 1) - total - node.width
                key_ns = count * score_ns + problem.num_kv_heads * problem.head_dim * GATHER_NS
                if (
                    (node.column, node.begin, count) == (last.column, last.end, last.end - last.begin)
                    and padding * key_ns <= ITEM_NS * len(groups[-1])
                    and (node.width == last.width or all(_is_deepest(deepest, other) for other in (last, node)))
                ):
                    groups[-1].append(node)
                    longest, total = max(longest, node.width), total + node.width
                    continue
            groups.append([node])
            longest = total = node.width
        return groups

    def _shared(self, group: list[_Node], behind: np.ndarray, tail_width: int) -> tuple[Item, np.ndarray]:
        """The item of a group of nodes, and its keys' places ``[nodes, width]``."""
        ids = np.array([node.item for node in group])
        first, last = group[0].begin, group[-1].end
        per_node = (last - first) // len(group)
        tokens, start = self.work.item_tokens[ids], self.item_start[ids]
        seen = behind[first:last] - np.repeat(start, per_node)[:, None]
        visible = clip(seen, np.repeat(tokens, per_node)[:, None])
        width = int(padded(visible.max()))  # a block of an early part of a prompt may see less than the whole node
        places = self.item_place[ids][:, None] + np.minimum(np.arange(width), tokens[:, None] - 1)
        return Item(first, last - first, len(group), tail_width + group[0].column, width, visible), places

    def _gather_index(self, keys: list[np.ndarray]) -> np.ndarray:
        """Rows of the pool, one KV head after another within each item: each head's keys then are one dense matrix."""
        heads = np.arange(self.problem.num_kv_heads)[:, None]
        index = np.empty(len(heads) * sum(places.size for places in keys), np.int64)
        at = 0
        for places in keys:
            part = index[at : at + len(heads) * places.size].reshape(len(heads), places.size)
            np.add(self.kv_rows[places.ravel()], heads, out=part)
            at += part.size
        return index


def _is_deepest(deepest: np.ndarray, node: _Node) -> bool:
    """Whether no other item lies below a node, given each row's deepest item."""
    return bool((deepest[node.begin : node.end] == node.item).all())


def _token_indices(
    blocks: Blocks, bounds: list[int], passes: list[Pass], num_tokens: int, num_kv_heads: int
) -> tuple[np.ndarray, np.ndarray]:
    """``query_index`` and ``output_index`` of a :class:`Layout`."""
    heads = np.arange(num_kv_heads)
    query: list[np.ndarray] = []
    output = np.empty((num_tokens, num_kv_heads), np.int64)
    base = 0
    for (low, high), step in zip(pairwise(bounds), passes, strict=True):
        q_len = blocks.q_len[low:high, None]
        within = np.arange(step.q_len)
        token = (blocks.q_begin[low:high, None] + np.minimum(within, q_len - 1)).ravel()
        query.append((token * num_kv_heads + heads[:, None]).ravel())
        real = np.flatnonzero(within < q_len)
        output[token[real]] = base + real[:, None] + heads * len(token)
        base += num_kv_heads * len(token)
    return np.concatenate(query), output.ravel()
