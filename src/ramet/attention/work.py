"""The work list: what a step's attention reads, for how many rows at once. NumPy, the same for all backends.

::

    rows (depth-first)   0   1   2   3   4   5
    shared nodes         |------ A -----|  |B |      A is read once for rows 0..3, C once for rows 2..3
                                 |- C --|
    tails                a   b   c   d   e   f       whatever is left of a row's path, read for that row alone
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ramet.attention.problem import SharePolicy
from ramet.attention.types import ForestArrays


@dataclass(frozen=True)
class PlanCounters:
    """What a plan does, for statistics and for tests that a path really ran.

    Attributes
    ----------
    rows, tokens : int
        Rows that have query tokens, and their query tokens.
    shared_nodes : int
        Nodes that are read once for several rows.
    declined_nodes : int
        Nodes with several rows below them that every row reads by itself, since reading them once would not pay.
    rows_sharing : int
        Rows that lie below a shared node.
    kv_tokens_read : int
        Positions whose K and V are read, a shared node's counted once.
    kv_tokens_logical : int
        Positions that all rows attend to, each row's counted by itself.
    """

    rows: int
    tokens: int
    shared_nodes: int
    declined_nodes: int
    rows_sharing: int
    kv_tokens_read: int
    kv_tokens_logical: int


@dataclass(frozen=True)
class WorkList:
    """Rows in depth-first order, nodes that are read once (items), and tails.

    Attributes
    ----------
    forest : ForestArrays
        Where it came from.
    rows : int64 [R]
        Rows with query tokens, depth-first: the rows below any node are an interval of this list.
    q_begin, q_len : int64 [R]
        First query token of each of these rows in ``q``, and how many it has.
    end : int64 [R]
        The row's context length: its queries are the positions ``[end - q_len, end)``.
    item_node : int64 [items]
        A node that is read once. Parents come before their children.
    item_row_begin, item_row_end : int64 [items]
        Its rows: the interval ``rows[item_row_begin:item_row_end]``.
    item_tokens, item_first_slot : int64 [items]
        Its token range is ``[0, item_tokens)``, and token 0 is KV slot ``item_first_slot`` of the node's first page.
    item_above : int64 [items]
        The deepest item above an item, -1 for none.
    row_tokens : int64 [R]
        Positions on the row's path.
    row_item : int64 [R]
        The deepest item above a row, -1 for none.
    tail_indptr : int64 [R + 1]
    tail_node : int64 [tails]
        The nodes that row r reads by itself, in the order of their positions, are
        ``tail_node[tail_indptr[r]:tail_indptr[r + 1]]``.
    fixed_node : int64 [nodes]
        Nodes on whose length the rest depends: shared and declined ones, and parents. The others may grow.
    made_by : (SharePolicy, str)
        The policy and the gate that chose the shared nodes.
    counters : PlanCounters
    """

    forest: ForestArrays
    rows: np.ndarray
    q_begin: np.ndarray
    q_len: np.ndarray
    end: np.ndarray
    item_node: np.ndarray
    item_row_begin: np.ndarray
    item_row_end: np.ndarray
    item_tokens: np.ndarray
    item_first_slot: np.ndarray
    item_above: np.ndarray
    row_tokens: np.ndarray
    row_item: np.ndarray
    tail_indptr: np.ndarray
    tail_node: np.ndarray
    fixed_node: np.ndarray
    made_by: tuple[SharePolicy, str]
    counters: PlanCounters

    @property
    def num_rows(self) -> int:
        return len(self.rows)

    @property
    def num_items(self) -> int:
        return len(self.item_node)
