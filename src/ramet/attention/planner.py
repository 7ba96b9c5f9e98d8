"""Plans: what one step's attention will do, made once per step and run once per layer."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Literal, overload

import torch

from ramet.attention.backends.base import Executor, Tensors
from ramet.attention.buffers import Capacity, PlanBuffers
from ramet.attention.build import build_work, grown
from ramet.attention.checks import check_dynamic, check_forest, check_scalars, check_shapes, check_tensors
from ramet.attention.problem import Problem
from ramet.attention.registry import BACKENDS, select
from ramet.attention.types import ForestArrays
from ramet.attention.work import PlanCounters, WorkList
from ramet.errors import InvalidArgument, Unsupported, nearest

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
        Query tokens, the first dimension of ``q``. With buffers ``q`` may have more, up to their capacity: those
        behind are padding and their outputs are not written.
    max_tokens : int
    """

    def __init__(
        self, problem: Problem, work: WorkList, backend: str, executor: Executor, max_tokens: int | None = None
    ) -> None:
        self.problem, self.work, self.backend = problem, work, backend
        self.counters: PlanCounters = work.counters
        self.num_tokens = int(work.forest.cu_seqlens_q[-1])
        self.max_tokens = self.num_tokens if max_tokens is None else max_tokens
        self._num_pages = 0 if problem.has_page_lists else int(work.forest.node_pages.max(initial=-1)) + 1
        self._dynamic = problem.has_out_scale or problem.has_seq_lens or problem.has_page_lists
        self._strided = BACKENDS[backend].strided
        self._executor = executor

    @overload
    def run(
        self,
        q: torch.Tensor,
        k_pool: torch.Tensor,
        v_pool: torch.Tensor,
        *,
        sm_scale: float | torch.Tensor,
        sinks: torch.Tensor | None = None,
        out_scale: float | torch.Tensor | None = None,
        seq_lens: torch.Tensor | None = None,
        page_lists: torch.Tensor | None = None,
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
        sm_scale: float | torch.Tensor,
        sinks: torch.Tensor | None = None,
        out_scale: float | torch.Tensor | None = None,
        seq_lens: torch.Tensor | None = None,
        page_lists: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
        return_lse: bool,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]: ...

    def run(
        self,
        q: torch.Tensor,
        k_pool: torch.Tensor,
        v_pool: torch.Tensor,
        *,
        sm_scale: float | torch.Tensor,
        sinks: torch.Tensor | None = None,
        out_scale: float | torch.Tensor | None = None,
        seq_lens: torch.Tensor | None = None,
        page_lists: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
        return_lse: bool = False,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Attend from every query token to its path's positions up to its own.

        Parameters
        ----------
        q : Tensor [num_tokens, num_qo_heads, head_dim]
            Any strides; on a GPU the innermost must be 1.
        k_pool, v_pool : Tensor [num_pages, page_size, num_kv_heads, head_dim]
            One layer's pool, of q's dtype (or the plan's ``kv_dtype``). On the CPU contiguous; on a GPU any strides but
            an innermost of 1. K and V of this step's tokens are in it already. KV slots that the plan does not read may
            hold anything, also NaN.
        sm_scale : float or float32 Tensor with one element
            Factor of the scores before the softmax, usually ``head_dim ** -0.5``. A tensor is read on its device.
        sinks : float32 Tensor [num_qo_heads], optional
            Scores that enter each softmax's denominator only; given exactly if the plan was made with ``has_sinks``.
        out_scale : float or float32 Tensor with one element, optional
            Factor of the output, as ``v_scale / o_scale`` of a quantised V; given exactly if the plan was made with
            ``has_out_scale``.
        seq_lens : int32 Tensor [rows], optional
            Context lengths of the forest's rows, on the device; given exactly if the plan was made with
            ``has_seq_lens``. They are clamped to the plan's from above, and to 0 from below.
        page_lists : int32 Tensor, optional
            What ``node_pages`` of the forest stands for, on the device; given exactly if the plan was made with
            ``has_page_lists``. Its entries must lie in the pools: nobody looks.
        out : Tensor like q, optional
            Contiguous. May be ``q`` itself. Its last dimension is ``v_head_dim`` where that was given.
        return_lse : bool, default False

        Returns
        -------
        Tensor [num_tokens, num_qo_heads, head_dim]
            Of q's dtype; with ``return_lse`` also the log-sum-exp of the scaled scores (natural log), float32
            ``[num_tokens, num_qo_heads]``. It does not count the sinks.

        Raises
        ------
        InvalidArgument
            A tensor does not fit the plan.
        Unsupported
            The plan's backend does not serve this dtype or device.
        """
        tokens = (self.num_tokens, self.max_tokens)
        check_tensors(self.problem, tokens, self._num_pages, self._strided, q, k_pool, v_pool, out)
        if sinks is not None or self.problem.has_sinks or not isinstance(sm_scale, float):
            check_scalars(self.problem, q, sm_scale, sinks)
        if self._dynamic or out_scale is not None or seq_lens is not None or page_lists is not None:
            forest = self.work.forest
            check_dynamic(self.problem, forest.num_rows, len(forest.node_pages), q, out_scale, seq_lens, page_lists)
        if torch.is_grad_enabled() and (q.requires_grad or k_pool.requires_grad or v_pool.requires_grad):
            q, k_pool, v_pool = q.detach(), k_pool.detach(), v_pool.detach()
        if out is None:
            out = q.new_empty((*q.shape[:2], self.problem.value_dim))
        lse = q.new_empty(q.shape[:2], dtype=torch.float32) if return_lse else None
        if self.max_tokens:
            factor = 1.0 if out_scale is None else out_scale
            self._executor.run(Tensors(q, k_pool, v_pool, out, lse, sm_scale, sinks, factor, seq_lens, page_lists))
        return out if lse is None else (out, lse)


def plan(
    forest: ForestArrays,
    *,
    num_qo_heads: int,
    num_kv_heads: int,
    head_dim: int,
    page_size: int,
    dtype: torch.dtype | None = None,
    kv_dtype: torch.dtype | None = None,
    softcap: float = 0.0,
    window_left: int = -1,
    has_sinks: bool = False,
    deterministic: bool = False,
    causal: bool = True,
    v_head_dim: int | None = None,
    has_out_scale: bool = False,
    has_seq_lens: bool = False,
    has_page_lists: bool = False,
    backend: str | None = None,
    gate: str = "auto",
    device: str | torch.device = "cpu",
    buffers: PlanBuffers | None = None,
    after: AttentionPlan | None = None,
) -> AttentionPlan:
    """Plan one step's attention over a forest. Decode, verification and chunked prefill are the same call.

    Parameters
    ----------
    forest : ForestArrays
        The live paths. Rows may come in any order; depth-first is the cheapest.
    num_qo_heads, num_kv_heads, head_dim, page_size : int
    dtype : torch.dtype, optional
        Of q and the output. Needed on a GPU, where kernels are compiled for it.
    kv_dtype : torch.dtype, optional
        Of K and V, where it differs.
    softcap : float, default 0.0
        Scores become ``softcap * tanh(score / softcap)``; 0 is off.
    window_left : int, default -1
        How many tokens to the left of itself a query sees, by absolute position; -1 is off. Pages that lie wholly left
        of every window may be ``BAD_PAGE_INDEX``.
    has_sinks : bool, default False
        ``run`` is given sinks.
    deterministic : bool, default False
        A row's bits depend on its own tokens only: not on n, the batch, its neighbours, or what is shared.
    causal : bool, default True
        A query sees the positions up to its own; otherwise all of its row's.
    v_head_dim : int, optional
        Elements of V and of the output per head, where they are fewer than ``head_dim`` (MLA).
    has_out_scale, has_seq_lens, has_page_lists : bool, default False
        ``run`` is given a factor of the output; context lengths on the device, of which the forest has upper bounds;
        page lists on the device, of which the forest has indices.
    backend : str, optional
        A backend's name pins it. ``"+a,-b"`` edits the order in which backends are asked. Default: the environment
        variable ``RAMET_ATTENTION`` in the same notation, else the built-in order; with ``buffers``, theirs.
    gate : {"auto", "open", "closed"}
        Which nodes are read once for all rows below: those where the backend's measured cost says that it pays; every
        node above a leaf, even above one single row (bits then do not depend on how many rows there are); none.
    device : str or torch.device, default "cpu"
    buffers : PlanBuffers, optional
        Made by :func:`plan_buffers` for the same problem. They are rewritten: a graph that captured ``run`` of an
        earlier plan with these buffers does this plan's work from now on.
    after : AttentionPlan, optional
        The plan of the step before. What did not change since is taken over: where only lengths and pages did, planning
        is several times cheaper. It never changes what is computed.

    Returns
    -------
    AttentionPlan

    Raises
    ------
    InvalidArgument
        The arrays are no forest, or an argument is out of range or not that of the buffers.
    Unsupported
        No backend (or not the pinned one) serves the problem; the message says why.
    CapacityExceeded
        The plan does not fit ``buffers``, which stay as they were.

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
    device = torch.device(device)
    problem = Problem(
        num_qo_heads,
        num_kv_heads,
        head_dim,
        page_size,
        device.type,
        dtype,
        kv_dtype,
        softcap,
        window_left,
        has_sinks,
        deterministic,
        causal=causal,
        v_head_dim=v_head_dim,
        has_out_scale=has_out_scale,
        has_seq_lens=has_seq_lens,
        has_page_lists=has_page_lists,
    )
    if device.type == "cuda" and dtype is None:
        raise InvalidArgument("dtype is None; on a GPU, plan(dtype=...) must name the dtype of q.")
    check_shapes(forest)
    if buffers is None:
        problem = replace(problem, max_q_len=_bound(forest))
        chosen = select(problem, backend)
    else:
        problem = _problem_of(buffers, problem, backend)
        chosen = BACKENDS[buffers.backend]
    policy = chosen.share_policy(problem)
    work = None if after is None else grown(after.work, forest, page_size, policy, gate)
    if work is None:
        check_forest(forest, page_size, window_left)
        work = build_work(forest, policy, gate)
    executor = chosen.compile(work, problem, device, buffers)
    return AttentionPlan(problem, work, chosen.name, executor, buffers.capacity.tokens if buffers else None)


def plan_buffers(
    problem: Problem,
    capacity: Capacity,
    *,
    device: str | torch.device | None = None,
    backend: str | None = None,
    workspace: torch.Tensor | None = None,
) -> PlanBuffers:
    """Make the device arrays that the plans of one captured graph share.

    Parameters
    ----------
    problem : Problem
        Its ``max_q_len`` should be that of the plans to come: it chooses the kernels' shapes (never results).
    capacity : Capacity
    device : str or torch.device, optional
        Default: ``problem.device``.
    backend : str, optional
        As for :func:`plan`. All plans with these buffers use the backend that is chosen here.
    workspace : uint8 Tensor, optional
        Device memory of at least :func:`workspace_size` bytes, aligned to 16.

    Raises
    ------
    Unsupported
        No backend serves the problem, or it keeps nothing on a device.
    InvalidArgument
        The workspace does not do.

    Examples
    --------
    >>> problem = Problem(4, 2, 64, 16, device="cuda", dtype=torch.bfloat16)
    >>> buffers = plan_buffers(problem, Capacity(tokens=64, rows=64, pages=4096))  # doctest: +SKIP
    """
    chosen = select(problem, backend)
    arrays = chosen.arrays(problem, capacity)
    if arrays is None:
        raise Unsupported(f"{chosen.name} keeps nothing on a device; call plan() without buffers.")
    where = torch.device(problem.device if device is None else device)
    return PlanBuffers(chosen.name, problem, capacity, arrays, where, workspace)


def workspace_size(problem: Problem, capacity: Capacity, *, backend: str | None = None) -> int:
    """Bytes of device memory that :func:`plan_buffers` needs; 0 for a backend that keeps nothing on a device.

    Examples
    --------
    >>> workspace_size(Problem(4, 2, 64, 16), Capacity(tokens=64, rows=64, pages=4096), backend="cpu")
    0
    """
    arrays = select(problem, backend).arrays(problem, capacity)
    return 0 if arrays is None else arrays.nbytes()


def _bound(forest: ForestArrays) -> int:
    """The longest row's query tokens, rounded up to a power of two: few problems, so that choices are cached."""
    longest = int((forest.cu_seqlens_q[1:] - forest.cu_seqlens_q[:-1]).max(initial=1))
    return 1 << (longest - 1).bit_length()


def _problem_of(buffers: PlanBuffers, problem: Problem, backend: str | None) -> Problem:
    """The problem that the buffers were made for, which must be the caller's."""
    if backend is not None and backend != buffers.backend:
        raise InvalidArgument(f"backend is {backend!r}, but the buffers were made for {buffers.backend!r}.")
    for field in fields(Problem):
        asked, made = getattr(problem, field.name), getattr(buffers.problem, field.name)
        if asked != made and field.name != "max_q_len":
            raise InvalidArgument(f"{field.name} is {asked!r}, but the buffers were made for {made!r}.")
    return buffers.problem
