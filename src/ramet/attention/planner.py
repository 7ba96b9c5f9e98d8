"""Planning: order the rows depth-first, find what several rows read, leave the rest to tails.

Everything is vectorised over rows and nodes; one decode step of a thousand rows is planned by a few dozen NumPy calls.
"""

from __future__ import annotations

from typing import Literal, overload

import numpy as np
import torch

from ramet.attention.backends.base import Executor
from ramet.attention.checks import check_forest, check_tensors
from ramet.attention.problem import Problem, SharePolicy
from ramet.attention.registry import select
from ramet.attention.types import ForestArrays
from ramet.attention.work import PlanCounters, WorkList
from ramet.errors import InvalidArgument, nearest

GATES = ("auto", "open", "closed")


class AttentionPlan:
    """What one step's attention will do; made by :func:`plan` once per step, run once per layer.

    A plan owns scratch memory, so one plan cannot run in two threads at once; two plans can.

    Attributes
    ----------
    problem : Problem
    work : WorkList
    counters : PlanCounters
    backend : str
    num_tokens : int
        Query tokens, the first dimension of ``q``.
    """

    def __init__(self, problem: Problem, work: WorkList, backend: str, executor: Executor) -> None:
        self.problem, self.work, self.backend = problem, work, backend
        self.counters: PlanCounters = work.counters
        self.num_tokens = int(work.forest.cu_seqlens_q[-1])
        self._num_pages = int(work.forest.node_pages.max(initial=-1)) + 1
        self._executor = executor

    @overload
    def run(
        self,
        q: torch.Tensor,
        k_pool: torch.Tensor,
        v_pool: torch.Tensor,
        *,
        sm_scale: float,
        out: torch.Tensor | None = None,
        return_lse: Literal[False] = False,
    ) -> torch.Tensor: ...

    @overload
    def run(
        self,
        q: torch.Tensor,
        k_pool: torch.Tensor,
        v_pool: torch.Tensor,
        *,
        sm_scale: float,
        out: torch.Tensor | None = None,
        return_lse: bool,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]: ...

    def run(
        self,
        q: torch.Tensor,
        k_pool: torch.Tensor,
        v_pool: torch.Tensor,
        *,
        sm_scale: float,
        out: torch.Tensor | None = None,
        return_lse: bool = False,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Attend from every query token to its path's positions up to its own.

        Parameters
        ----------
        q : Tensor [num_tokens, num_qo_heads, head_dim]
            Any strides.
        k_pool, v_pool : Tensor [num_pages, page_size, num_kv_heads, head_dim]
            One layer's pool, contiguous, of q's dtype. K and V of this step's tokens are in it already. KV slots that
            the plan does not read may hold anything, also NaN.
        sm_scale : float
            Factor of the scores before the softmax, usually ``head_dim ** -0.5``.
        out : Tensor like q, optional
            Contiguous. May be ``q`` itself.
        return_lse : bool, default False

        Returns
        -------
        Tensor [num_tokens, num_qo_heads, head_dim]
            Of q's dtype; with ``return_lse`` also the log-sum-exp of the scaled scores (natural log), float32
            ``[num_tokens, num_qo_heads]``.

        Raises
        ------
        InvalidArgument
            A tensor does not fit the plan.
        Unsupported
            The plan's backend does not serve this dtype or device.
        """
        check_tensors(self.problem, self.num_tokens, self._num_pages, q, k_pool, v_pool, out)
        if torch.is_grad_enabled() and (q.requires_grad or k_pool.requires_grad or v_pool.requires_grad):
            q, k_pool, v_pool = q.detach(), k_pool.detach(), v_pool.detach()
        if out is None:
            out = q.new_empty(q.shape)
        lse = q.new_empty(q.shape[:2], dtype=torch.float32) if return_lse else None
        if self.num_tokens:
            self._executor.run(q, k_pool, v_pool, sm_scale, out, lse)
        return out if lse is None else (out, lse)


def plan(
    forest: ForestArrays,
    *,
    num_qo_heads: int,
    num_kv_heads: int,
    head_dim: int,
    page_size: int,
    backend: str | None = None,
    gate: str = "auto",
    device: str | torch.device = "cpu",
) -> AttentionPlan:
    """Plan one step's attention over a forest. Decode, verification and chunked prefill are the same call.

    Parameters
    ----------
    forest : ForestArrays
        The live paths. Rows may come in any order; depth-first is the cheapest.
    num_qo_heads, num_kv_heads, head_dim, page_size : int
    backend : str, optional
        A backend's name pins it. ``"+a,-b"`` edits the order in which backends are asked. Default: the environment
        variable ``RAMET_ATTENTION`` in the same notation, else the built-in order.
    gate : {"auto", "open", "closed"}
        Which nodes are read once for all rows below them: those where the backend's measured cost says that it pays;
        every node above a leaf, even above one single row (a row's bits then do not depend on how many rows there are);
        none.
    device : str or torch.device, default "cpu"

    Returns
    -------
    AttentionPlan

    Raises
    ------
    InvalidArgument
        The arrays are no forest, or an argument is out of range.
    Unsupported
        No backend (or not the pinned one) serves the problem; the message says why.

    Examples
    --------
    Two samples of a prompt of five tokens; each has one token of its own, in a page of its own:

    >>> import numpy as np, torch
    >>> from ramet.attention import ForestArrays, plan
    >>> ints = lambda *values: np.array(values, dtype=np.int32)
    >>> forest = ForestArrays(
    ...     cu_seqlens_q=ints(0, 1, 2), row_leaf=ints(1, 2), node_parent=ints(-1, 0, 0), node_start=ints(0, 5, 5),
    ...     node_end=ints(5, 6, 6), node_first_slot=ints(0, 0, 0), node_page_indptr=ints(0, 2, 3, 4),
    ...     node_pages=ints(0, 1, 2, 3))
    >>> work = plan(forest, num_qo_heads=4, num_kv_heads=2, head_dim=8, page_size=4, gate="open")
    >>> work.counters.shared_nodes, work.counters.kv_tokens_read, work.counters.kv_tokens_logical
    (1, 7, 12)
    >>> pool = torch.ones(4, 4, 2, 8)
    >>> work.run(torch.ones(2, 4, 8), pool, pool, sm_scale=8**-0.5).shape
    torch.Size([2, 4, 8])
    """
    if gate not in GATES:
        raise InvalidArgument(f"gate is {gate!r}{nearest(str(gate), GATES)} Allowed: {', '.join(GATES)}.")
    problem = Problem(num_qo_heads, num_kv_heads, head_dim, page_size, torch.device(device).type)
    chosen = select(problem, backend)
    check_forest(forest, page_size)
    work = build_work(forest, chosen.share_policy(problem), gate)
    return AttentionPlan(problem, work, chosen.name, chosen.compile(work, problem))


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
