"""What a backend is."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch

from ramet.attention.buffers import Arrays, Capacity, PlanBuffers
from ramet.attention.problem import Problem, SharePolicy, Support
from ramet.attention.work import WorkList


class Tensors(NamedTuple):
    """The tensors of one layer; shapes, dtypes and devices are checked already.

    Attributes
    ----------
    q : Tensor [num_tokens, num_qo_heads, head_dim]
        Any strides; the innermost is 1 where the backend asked for that (``Backend.strided``).
    k_pool, v_pool : Tensor [num_pages, page_size, num_kv_heads, head_dim]
        Contiguous, or with any strides but an innermost of 1 where ``Backend.strided``.
    out : Tensor like q
        To be written; contiguous. It may be ``q`` itself.
    lse : float32 Tensor [num_tokens, num_qo_heads] or None
        To be written where it is given: natural log.
    sm_scale : float or float32 Tensor with one element
    sinks : float32 Tensor [num_qo_heads] or None
        Given exactly where ``problem.has_sinks``.
    out_scale : float or float32 Tensor with one element
        Not 1.0 only where ``problem.has_out_scale``.
    seq_lens : int32 Tensor [rows] or None
        Given exactly where ``problem.has_seq_lens``: context lengths of the forest's rows, on the device.
    page_lists : int32 Tensor or None
        Given exactly where ``problem.has_page_lists``: to be read in the place of the forest's ``node_pages``.
    """

    q: torch.Tensor
    k_pool: torch.Tensor
    v_pool: torch.Tensor
    out: torch.Tensor
    lse: torch.Tensor | None
    sm_scale: float | torch.Tensor
    sinks: torch.Tensor | None
    out_scale: float | torch.Tensor = 1.0
    seq_lens: torch.Tensor | None = None
    page_lists: torch.Tensor | None = None


class Executor(Protocol):
    """A work list made ready for one backend; run once per layer."""

    def run(self, tensors: Tensors) -> None:
        """Write ``out``, and ``lse`` where it is given. It never waits for the device."""


class Backend(Protocol):
    """A way to do attention.

    Attributes
    ----------
    name : str
    strided : bool
        Whether K and V pools may have any strides (innermost 1); otherwise they must be contiguous.
    """

    name: str
    strided: bool

    def supports(self, problem: Problem) -> Support:
        """Whether this backend serves the problem, and why."""

    def share_policy(self, problem: Problem) -> SharePolicy:
        """When reading a node once pays, as measured."""

    def arrays(self, problem: Problem, capacity: Capacity) -> Arrays | None:
        """The device arrays that plans of this size need; None for a backend that keeps nothing on a device."""

    def compile(self, work: WorkList, problem: Problem, device: torch.device, buffers: PlanBuffers | None) -> Executor:
        """Make a work list ready to run.

        With ``buffers`` (of this backend, for this problem) everything goes there, by one asynchronous copy, and an
        executor that was captured in a graph serves this plan too. Without, the executor owns what it needs.

        Raises
        ------
        CapacityExceeded
            The work does not fit the buffers; they are as before.
        """
