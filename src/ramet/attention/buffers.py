"""Device arrays of fixed capacity that one plan after another is written to.

A CUDA graph records addresses and grid sizes, so what a plan sends to the device must stay where it is and be bounded
by a capacity. Buffers are made once per captured graph; :func:`ramet.attention.plan` rewrites them, and a replay then
does the new plan's work. One copy per plan, asynchronous, from pinned memory that is not rewritten before its copy is
done.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import NamedTuple

import numpy as np
import torch

from ramet.attention.problem import Problem
from ramet.errors import CapacityExceeded, InvalidArgument

ALIGNMENT = 256
"""Bytes at whose multiples every array begins."""

STAGES = 2
"""Pinned copies of the host arrays: while one is being copied, the next plan fills the other."""


@dataclass(frozen=True)
class Capacity:
    """The largest plan that buffers can take.

    Parameters
    ----------
    tokens : int
        Query tokens: the first dimension of ``q`` in a captured graph.
    rows : int
    pages : int
        Pages in all page lists of a forest, a shared node's counted once.
    items : int, default 0
        Work items of a KV head; 0 takes the backend's default for so many rows.

    Raises
    ------
    InvalidArgument
        A number below 1 (``items``: below 0).
    """

    tokens: int
    rows: int
    pages: int
    items: int = 0

    def __post_init__(self) -> None:
        for field in fields(self):
            value, low = getattr(self, field.name), 0 if field.name == "items" else 1
            if not isinstance(value, int) or isinstance(value, bool) or value < low:
                raise InvalidArgument(f"capacity {field.name} is {value!r}; it must be an integer of at least {low}.")

    def require(self, name: str, needed: int, available: int | None = None) -> None:
        """Refuse a plan that needs more than there is.

        Raises
        ------
        CapacityExceeded
            Naming the capacity, what is needed and what there is.
        """
        limit = getattr(self, name) if available is None else available
        if needed > limit:
            raise CapacityExceeded(
                f"the plan needs {needed} {name}, but its buffers hold {limit}; make buffers with a larger "
                f"Capacity({name}=...), or use a graph that was captured with larger ones."
            )


class Arrays(NamedTuple):
    """What a backend keeps on the device.

    Attributes
    ----------
    plan : mapping of str to int
        int32 arrays that a plan fills on the host, with their lengths, in the order in which they lie in memory. An
        upload copies them up to the last element in use, so the longest should come last.
    scratch : mapping of str to (shape, dtype)
        Tensors that kernels write and read.
    """

    plan: Mapping[str, int]
    scratch: Mapping[str, tuple[tuple[int, ...], torch.dtype]]

    def nbytes(self) -> int:
        """Bytes of all arrays together, each aligned."""
        return sum(_aligned(size) for size in self._sizes())

    def _sizes(self) -> list[int]:
        scratch = [int(np.prod(shape)) * dtype.itemsize for shape, dtype in self.scratch.values()]
        return [4 * length for length in self.plan.values()] + scratch


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


class PlanBuffers:
    """Where the plans of one captured graph live; made by :func:`ramet.attention.plan_buffers`.

    Parameters
    ----------
    backend : str
    problem : Problem
    capacity : Capacity
    arrays : Arrays
    device : torch.device
    workspace : uint8 Tensor, optional
        Device memory to use, at least ``arrays.nbytes()`` long and aligned to 16 bytes; default: its own.

    Attributes
    ----------
    host : dict of str to int32 ndarray
        What the next :meth:`upload` sends; afterwards a mirror of what the device holds.
    plan, scratch : dict of str to Tensor
        The device side. Addresses never change.
    last : object
        For the backend: what it remembers of the plan before.

    Raises
    ------
    InvalidArgument
        A workspace that is too small, misaligned or elsewhere.
    """

    def __init__(
        self,
        backend: str,
        problem: Problem,
        capacity: Capacity,
        arrays: Arrays,
        device: torch.device,
        workspace: torch.Tensor | None = None,
    ) -> None:
        self.backend, self.problem, self.capacity, self.device = backend, problem, capacity, device
        self.last: object | None = None
        nbytes = arrays.nbytes()
        if workspace is None:
            workspace = torch.empty(nbytes + 16, dtype=torch.uint8, device=device)
            workspace = workspace[-workspace.data_ptr() % 16 :][:nbytes]
        _check_workspace(workspace, nbytes, device)
        self.workspace = workspace
        self.host: dict[str, np.ndarray] = {}
        self.plan: dict[str, torch.Tensor] = {}
        self.scratch: dict[str, torch.Tensor] = {}
        planned = sum(_aligned(4 * length) for length in arrays.plan.values())
        self._host_bytes = np.zeros(planned, np.uint8)
        self._places: dict[str, int] = {}
        at = 0
        for name, length in arrays.plan.items():
            self._places[name] = at
            self.host[name] = self._host_bytes[at : at + 4 * length].view(np.int32)
            self.plan[name] = workspace[at : at + 4 * length].view(torch.int32)
            at += _aligned(4 * length)
        for name, (shape, dtype) in arrays.scratch.items():
            size = int(np.prod(shape)) * dtype.itemsize
            self.scratch[name] = workspace[at : at + size].view(dtype).view(shape)
            at += _aligned(size)
        self._stage = _Stages(planned, device)

    def upload(self, last: str | None = None, used: int = 0) -> None:
        """Send the host arrays to the device, on the current stream; never waits for the device to be idle.

        Parameters
        ----------
        last : str, optional
            The array that is in use up to element ``used``; those behind it are not sent. Default: all.
        """
        end = len(self._host_bytes) if last is None else self._places[last] + 4 * used
        self._stage.send(self._host_bytes[:end], self.workspace[:end])


class _Stages:
    """Pinned buffers in turn; each is filled again only when its last copy is done."""

    def __init__(self, nbytes: int, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        count = STAGES if self._cuda else 0
        self._pinned = [torch.empty(nbytes, dtype=torch.uint8, pin_memory=True) for _ in range(count)]
        self._views = [pinned.numpy() for pinned in self._pinned]
        self._copied: list[torch.cuda.Event] = [torch.cuda.Event() for _ in range(count)]
        self._turn = 0

    def send(self, source: np.ndarray, target: torch.Tensor) -> None:
        if not self._cuda:
            target.copy_(torch.from_numpy(source))
            return
        turn = self._turn
        self._copied[turn].synchronize()  # that copy was two plans ago
        self._views[turn][: len(source)] = source
        target.copy_(self._pinned[turn][: len(source)], non_blocking=True)
        self._copied[turn].record()
        self._turn = (turn + 1) % STAGES


def _check_workspace(workspace: torch.Tensor, nbytes: int, device: torch.device) -> None:
    if workspace.dtype != torch.uint8 or workspace.ndim != 1 or not workspace.is_contiguous():
        raise InvalidArgument(
            f"workspace is {workspace.dtype} {tuple(workspace.shape)}; it must be a contiguous, one-dimensional uint8."
        )
    if workspace.device.type != device.type:
        raise InvalidArgument(f"workspace is on {workspace.device}; the plan's device is {device}.")
    if len(workspace) < nbytes:
        raise InvalidArgument(f"workspace has {len(workspace)} bytes; this problem and capacity need {nbytes}.")
    if workspace.data_ptr() % 16:
        raise InvalidArgument("workspace begins at an address that is no multiple of 16.")
