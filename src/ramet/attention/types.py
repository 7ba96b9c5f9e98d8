"""The arrays of a forest, as the planner takes them. NumPy on the host: testable without a device."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

BAD_PAGE_INDEX = -1
"""A page that was evicted or lies outside the window: never scaled, never read."""


@dataclass(frozen=True)
class ForestArrays:
    """Live sequences as paths from a root to a leaf; each position's K/V is in exactly one node.

    Node i covers the absolute positions ``[node_start[i], node_end[i])``. Its pages are
    ``node_pages[node_page_indptr[i]:node_page_indptr[i + 1]]``; position ``node_start[i]`` is KV slot
    ``node_first_slot[i]`` of the first of them. A child starts where its parent ends.

    Row r computes the last ``cu_seqlens_q[r + 1] - cu_seqlens_q[r]`` positions of its path (K and V of them are written
    before attention runs); ``node_end[row_leaf[r]]`` is its context length. Attention is causal by absolute position.

    Parameters
    ----------
    cu_seqlens_q : int32 [rows + 1]
        Offsets of each row's query tokens in ``q``.
    row_leaf : int32 [rows]
        The node where the row's path ends.
    node_parent : int32 [nodes]
        -1 for a root. Parents come before their children.
    node_start, node_end : int32 [nodes]
        Absolute positions.
    node_first_slot : int32 [nodes]
    node_page_indptr : int32 [nodes + 1]
    node_pages : int32 [sum of pages]
    """

    cu_seqlens_q: np.ndarray
    row_leaf: np.ndarray
    node_parent: np.ndarray
    node_start: np.ndarray
    node_end: np.ndarray
    node_first_slot: np.ndarray
    node_page_indptr: np.ndarray
    node_pages: np.ndarray

    @property
    def num_rows(self) -> int:
        return len(self.row_leaf)

    @property
    def num_nodes(self) -> int:
        return len(self.node_parent)
