"""From a forest to a work list: order the rows depth-first, find what several rows read, leave the rest to tails.

Everything is vectorised over rows and nodes; one decode step of a thousand rows is planned by a few dozen NumPy calls.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from ramet.attention.problem import SharePolicy
from ramet.attention.types import ForestArrays
from ramet.attention.work import PlanCounters, WorkList


def build_work(forest: ForestArrays, policy: SharePolicy, gate: str = "auto") -> WorkList:
    """Turn a checked forest into a work list: which nodes are read once, for which rows, and what each row reads."""
    q_len = forest.cu_seqlens_q[1:] - forest.cu_seqlens_q[:-1]
    rows = np.flatnonzero(q_len)
    paths = paths_of(forest, forest.row_leaf[rows].astype(np.int64))
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
    fixed = shared | declined
    fixed[forest.node_parent[forest.node_parent >= 0]] = True
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
        fixed_node=np.flatnonzero(fixed),
        made_by=(policy, gate),
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


def grown(last: WorkList, forest: ForestArrays, page_size: int, policy: SharePolicy, gate: str) -> WorkList | None:
    """The work list of a forest that differs from the last one in longer tails and in pages only, else None.

    Everything is compared, nothing is assumed. The order, the shared nodes and the tails are those of ``last``, the
    same arrays. None is also the answer where anything looks wrong: ``check_forest`` then says what.
    """
    old, end = last.forest, forest.node_end
    same = ("cu_seqlens_q", "row_leaf", "node_parent", "node_start", "node_first_slot")
    if last.made_by != (policy, gate) or not all(_equal(getattr(old, name), getattr(forest, name)) for name in same):
        return None
    if end.shape != old.node_end.shape or end.dtype != old.node_end.dtype or not _fits(forest, page_size):
        return None
    more = end - old.node_end
    if more.min(initial=0) < 0 or more[last.fixed_node].any():
        return None
    row_more = more[forest.row_leaf[last.rows]].astype(np.int64)
    counters = replace(
        last.counters,
        kv_tokens_read=last.counters.kv_tokens_read + int(more[last.tail_node].sum()),
        kv_tokens_logical=last.counters.kv_tokens_logical + int(row_more.sum()),
    )
    return replace(
        last, forest=forest, end=last.end + row_more, row_tokens=last.row_tokens + row_more, counters=counters
    )


def _equal(a: np.ndarray, b: np.ndarray) -> bool:
    return a is b or (a.dtype == b.dtype and np.array_equal(a, b))


def _fits(forest: ForestArrays, page_size: int) -> bool:
    """Whether every position has a page, none of them evicted. (What evicted pages may be, ``check_forest`` knows.)"""
    indptr, pages, end = forest.node_page_indptr, forest.node_pages, forest.node_end
    if not (indptr.dtype.kind == pages.dtype.kind == "i" and pages.ndim == 1 and indptr.shape == (len(end) + 1,)):
        return False
    have = indptr[1:] - indptr[:-1]
    need = (forest.node_first_slot + (end - forest.node_start) + (page_size - 1)) // page_size
    return bool((have >= need).all()) and indptr[0] == 0 and indptr[-1] == len(pages) and pages.min(initial=0) >= 0


def paths_of(forest: ForestArrays, leaves: np.ndarray) -> np.ndarray:
    """Nodes of the paths from the roots down to the given nodes, ``[depth, leaves]``, with -1 below their ends."""
    parent = np.full(forest.num_nodes + 1, -1, np.int64)  # parent[-1] is -1: a path that has ended stays ended
    parent[:-1] = forest.node_parent
    level = leaves
    levels = []
    while (level >= 0).any():
        levels.append(level)
        level = parent[level]
    if not levels:
        return np.empty((0, len(leaves)), np.int64)
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
        least = policy.min_saved_tokens + policy.row_tokens * below
        shared = several & ((below - 1) * tokens >= least) & (tokens > 0)
    return shared, several & ~shared & (tokens > 0)
