"""From a forest to a work list: order the rows depth-first, find what several rows read, leave the rest to tails.

Everything is vectorised over rows and nodes; one decode step of a thousand rows is planned by a few dozen NumPy calls.
"""

from __future__ import annotations

import numpy as np

from ramet.attention.problem import SharePolicy
from ramet.attention.types import ForestArrays
from ramet.attention.work import PlanCounters, WorkList


def build_work(forest: ForestArrays, policy: SharePolicy, gate: str = "auto") -> WorkList:
    """Turn a checked forest into a work list: which nodes are read once, for which rows, and what each row reads."""
    q_len = forest.cu_seqlens_q[1:] - forest.cu_seqlens_q[:-1]
    rows = np.flatnonzero(q_len)
    paths = _paths(forest, rows)
    rows, paths, first = _depth_first(rows, paths, forest.num_nodes)
    on_path = paths >= 0
    tokens = np.zeros(forest.num_nodes + 1, np.int64)  # tokens[-1] is 0: below the end of a path
    np.subtract(forest.node_end, forest.node_start, out=tokens[:-1])
    below = np.bincount(paths.ravel() + 1, minlength=forest.num_nodes + 1)[1:]
    shared, declined = _choose(forest, rows, below, tokens[:-1], policy, gate)
    shared_at = on_path & shared[paths]  # [depth, R]
    items_at = np.where(shared_at, (np.cumsum(shared) - 1)[paths], -1)  # ascending down each path: parents come first
    item_node = np.flatnonzero(shared)
    begin = first[item_node]
    itself = np.arange(len(item_node))
    tails = (on_path & ~shared_at).T  # row by row, each from the root to the leaf
    tail_indptr = np.zeros(len(rows) + 1, np.int64)
    np.cumsum(tails.sum(axis=1), out=tail_indptr[1:])
    tail_node = paths.T[tails]
    row_tokens = tokens[paths].sum(axis=0)
    return WorkList(
        forest=forest,
        rows=rows,
        q_begin=forest.cu_seqlens_q[:-1][rows].astype(np.int64),
        q_len=q_len[rows].astype(np.int64),
        end=forest.node_end[forest.row_leaf[rows]].astype(np.int64),
        item_node=item_node,
        item_row_begin=begin,
        item_row_end=begin + below[item_node],
        item_tokens=tokens[item_node],
        item_first_slot=forest.node_first_slot[item_node].astype(np.int64),
        item_above=np.where(items_at[:, begin] < itself, items_at[:, begin], -1).max(axis=0, initial=-1),
        row_tokens=row_tokens,
        row_item=items_at.max(axis=0, initial=-1),
        tail_indptr=tail_indptr,
        tail_node=tail_node,
        counters=PlanCounters(
            rows=len(rows),
            tokens=int(forest.cu_seqlens_q[-1]),
            shared_nodes=int((below[item_node] > 1).sum()),
            declined_nodes=int(declined.sum()),
            rows_sharing=int((shared_at & (below[paths] > 1)).any(axis=0).sum()),
            kv_tokens_read=int(tokens[item_node].sum() + tokens[tail_node].sum()),
            kv_tokens_logical=int(row_tokens.sum()),
        ),
    )


def _paths(forest: ForestArrays, rows: np.ndarray) -> np.ndarray:
    """Nodes of each row's path from its root down, ``[depth, rows]``, with -1 below the leaf."""
    parent = np.full(forest.num_nodes + 1, -1, np.int64)  # parent[-1] is -1: a path that has ended stays ended
    parent[:-1] = forest.node_parent
    level = forest.row_leaf[rows].astype(np.int64)
    levels = []
    while (level >= 0).any():
        levels.append(level)
        level = parent[level]
    if not levels:
        return np.empty((0, len(rows)), np.int64)
    up = np.stack(levels)
    length = (up >= 0).sum(axis=0)
    if (length == len(up)).all():
        return up[::-1]
    source = length - 1 - np.arange(len(up))[:, None]
    return np.where(source >= 0, np.take_along_axis(up, np.maximum(source, 0), axis=0), -1)


def _depth_first(rows: np.ndarray, paths: np.ndarray, num_nodes: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Order the rows so that those below any node are one interval; also return where each node's interval begins.

    Rows that come so ordered stay as they are.
    """
    first, in_order = _interval_begins(paths, num_nodes)
    if not in_order:
        order = np.lexsort(paths[::-1])
        rows, paths = rows[order], paths[:, order]
        first, _ = _interval_begins(paths, num_nodes)
    return rows, paths, first


def _interval_begins(paths: np.ndarray, num_nodes: int) -> tuple[np.ndarray, bool]:
    """First row of each node's first interval, and whether no node has a second one."""
    begins = np.ones(paths.shape, bool)
    np.not_equal(paths[:, 1:], paths[:, :-1], out=begins[:, 1:])
    begins &= paths >= 0
    first = np.full(num_nodes, -1, np.int64)
    _, at = np.nonzero(begins)
    nodes = paths[begins]
    first[nodes] = at
    # A node that begins twice keeps one of its beginnings, so fewer nodes are set than intervals began.
    return first, len(nodes) == int((first >= 0).sum())


def _choose(
    forest: ForestArrays, rows: np.ndarray, below: np.ndarray, tokens: np.ndarray, policy: SharePolicy, gate: str
) -> tuple[np.ndarray, np.ndarray]:
    """Nodes that are read once, and nodes with several rows that are not."""
    several = below > 1
    if gate == "open":
        ends_here = np.zeros(forest.num_nodes, bool)
        ends_here[forest.row_leaf[rows]] = True
        shared = (below > 0) & (several | ~ends_here) & (tokens > 0)
    elif gate == "closed":
        shared = np.zeros(forest.num_nodes, bool)
    else:
        shared = several & ((below - 1) * tokens >= policy.min_saved_tokens) & (tokens > 0)
    return shared, several & ~shared & (tokens > 0)
