"""Runs one shape through every backend: first the error against the dense truth, then the time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np
import torch

from ramet.attention import AttentionPlan, Capacity, ForestArrays, PlanBuffers, Problem, plan, plan_buffers
from ramet.attention.backends.base import Backend
from ramet.attention.backends.fa4 import Fa4Backend
from ramet.attention.build import build_work
from ramet.attention.registry import BACKENDS
from ramet.bench.attention_data import Data, Truth
from ramet.bench.attention_floor import floor_of
from ramet.bench.attention_shapes import Shape
from ramet.bench.floor import Rates
from ramet.errors import InvalidArgument, nearest

REPLAYS = 15
PLANS = 7


@dataclass(frozen=True)
class Candidate:
    """A backend as it is measured.

    Attributes
    ----------
    name : str
    backend : Backend
    gate : str
    whole_pages : bool
        Measured on the layout of engines with block tables: shared pages are full, the rest is in every tail.
    registered : bool
        Whether :func:`ramet.attention.plan` makes its plans; a peer that needs finite pools has an instance of its own.
    """

    name: str
    backend: Backend
    gate: str = "auto"
    whole_pages: bool = False
    registered: bool = True


@dataclass(frozen=True)
class Result:
    """One backend on one shape.

    Attributes
    ----------
    shape : Shape
    candidate : str
    status : str
        "ok"; "wrong": the error is too large, no time was taken; "unsupported"; "failed": it raised.
    reason : str
    error, allowed : float or None
        Relative error against the dense truth, and how large it may be.
    us : float or None
        One layer, its merge included.
    floor_us, efficiency : float
    plan_us : float or None
        On the host, for a forest it has not seen.
    replan_us : float or None
        On the host, where only the lengths of the tails have changed.
    deterministic_us : float or None
        One layer with ``deterministic=True``, where that was asked for and is served.
    """

    shape: Shape
    candidate: str
    status: str
    reason: str
    floor_us: float
    error: float | None = None
    allowed: float | None = None
    us: float | None = None
    plan_us: float | None = None
    replan_us: float | None = None
    deterministic_us: float | None = None

    @property
    def efficiency(self) -> float | None:
        return None if self.us is None else self.floor_us / self.us


def candidates(names: Sequence[str] = (), device: str = "cpu") -> list[Candidate]:
    """The backends to measure: those named, or all that are registered; the reference is not timed on a GPU by itself.

    FlashAttention-4 is measured as both of its ways: a call for shared nodes, one for tails and a merge (``fa4``), and
    one call over each row's own page table (``fa4 unshared``).

    Raises
    ------
    InvalidArgument
        An unknown name.
    """
    for name in names:
        if name not in BACKENDS and name != "fa4":
            known = ", ".join(BACKENDS)
            raise InvalidArgument(f"no attention backend is called {name!r}{nearest(name, BACKENDS)} Known: {known}.")
    found: list[Candidate] = []
    for name in names or [name for name in BACKENDS if (name, device) != ("reference", "cuda")]:
        if name != "fa4":
            found.append(Candidate(name, BACKENDS[name]))
            continue
        peer = Fa4Backend(finite_pages=True)
        found.append(Candidate("fa4", peer, "open", registered=False))
        found.append(Candidate("fa4 unshared", peer, "closed", whole_pages=True, registered=False))
    return found


@dataclass(frozen=True)
class Bench:
    """What all measurements share.

    Parameters
    ----------
    device : torch.device
    dtype : torch.dtype
    rates : Rates
    seed : int
    deterministic : bool
        Also time ``deterministic=True``.
    """

    device: torch.device
    dtype: torch.dtype
    rates: Rates
    seed: int = 0
    deterministic: bool = False

    def measure(self, shape: Shape, chosen: Sequence[Candidate]) -> Iterator[Result]:
        """Yield one result per candidate; those of one layout share their data."""
        data: Data | None = None
        truth: Truth | None = None
        for candidate in sorted(chosen, key=lambda candidate: candidate.whole_pages):
            result = Result(shape, candidate.name, "ok", "", floor_of(shape, self.dtype.itemsize, self.rates).us)
            problem = problem_of(shape, self.device, self.dtype)
            support = candidate.backend.supports(problem)
            if not support.ok:
                yield replace(result, status="unsupported", reason=support.reason)
                continue
            laid_out = shape.whole_pages() if candidate.whole_pages else shape
            if data is None or truth is None or data.shape != laid_out:
                data = truth = None  # memory goes back before more is taken
                data = Data(laid_out, self.dtype, self.device, self.seed)
                truth = data.truth()
            try:
                yield self._measure(result, candidate, data, truth)
            except Exception as error:  # whatever a backend raises is its own row of the table
                text = " ".join(f"{type(error).__name__}: {error}".split())
                yield replace(result, status="failed", reason=text[:300])

    def _measure(self, result: Result, candidate: Candidate, data: Data, truth: Truth) -> Result:
        data.fill_unused(float("nan") if candidate.registered else 0.0)
        runner = Runner(candidate, data, problem_of(data.shape, self.device, self.dtype))
        error = truth.error(runner.output())
        result = replace(
            result, error=error, allowed=truth.allowed, reason=candidate.backend.supports(runner.problem).reason
        )
        if not error <= truth.allowed:
            return replace(result, status="wrong", reason=f"relative error {error:.2g}, allowed {truth.allowed:.2g}")
        plan_us, replan_us = runner.plan_times()
        result = replace(result, us=runner.time(), plan_us=plan_us, replan_us=replan_us)
        problem = replace(runner.problem, deterministic=True)
        if self.deterministic and candidate.registered and candidate.backend.supports(problem).ok:
            result = replace(result, deterministic_us=Runner(candidate, data, problem).time())
        return result


def problem_of(shape: Shape, device: torch.device, dtype: torch.dtype) -> Problem:
    """What the shape asks of a backend."""
    return Problem(
        shape.num_qo_heads,
        shape.num_kv_heads,
        shape.head_dim,
        shape.page_size,
        device=device.type,
        dtype=dtype,
        max_q_len=1 << (shape.q_len - 1).bit_length(),
    )


class Runner:
    """Plans and runs one candidate on one shape's data, as an engine would: in buffers where the backend has them."""

    def __init__(self, candidate: Candidate, data: Data, problem: Problem) -> None:
        self.candidate, self.data, self.problem = candidate, data, problem
        self.out = torch.empty_like(data.q)
        self.buffers = self._buffers()
        self.work = self.plan(data.forest)

    def _buffers(self) -> PlanBuffers | None:
        shape = self.data.shape
        capacity = Capacity(shape.rows * shape.q_len, shape.rows, len(self.data.forest.node_pages))
        if self.candidate.backend.arrays(self.problem, capacity) is None:
            return None
        return plan_buffers(self.problem, capacity, device=self.data.q.device, backend=self.candidate.backend.name)

    def plan(self, forest: ForestArrays) -> AttentionPlan:
        """Plan a step over a forest."""
        candidate, problem = self.candidate, self.problem
        if not candidate.registered:
            backend = candidate.backend
            work = build_work(forest, backend.share_policy(problem), candidate.gate)
            executor = backend.compile(work, problem, self.data.q.device, None)
            return AttentionPlan(problem, work, backend.name, executor)
        return plan(
            forest,
            num_qo_heads=problem.num_qo_heads,
            num_kv_heads=problem.num_kv_heads,
            head_dim=problem.head_dim,
            page_size=problem.page_size,
            dtype=problem.dtype,
            deterministic=problem.deterministic,
            backend=candidate.backend.name,
            gate=candidate.gate,
            device=self.data.q.device,
            buffers=self.buffers,
        )

    def run(self, pool: tuple[torch.Tensor, torch.Tensor]) -> None:
        """One layer."""
        self.work.run(self.data.q, *pool, sm_scale=self.problem.head_dim**-0.5, out=self.out)

    def output(self) -> torch.Tensor:
        """The output over the first pool, written over NaN."""
        self.out.fill_(float("nan"))
        self.run(self.data.pools[0])
        return self.out

    def plan_times(self) -> tuple[float, float]:
        """Median microseconds of a plan for a new forest, and for one whose tails have other lengths only."""
        forest = self.data.forest
        copies = ({name: values.copy() for name, values in vars(forest).items()} for _ in range(PLANS))
        fresh = [partial(self.plan, replace(forest, **arrays)) for arrays in copies]
        shorter = forest.node_end.copy()
        shorter[forest.row_leaf] -= self.data.shape.tail > self.data.shape.q_len
        turns = [partial(self.plan, replace(forest, node_end=ends)) for ends in (shorter, forest.node_end) * PLANS]
        return _median_us(fresh), _median_us(turns)

    def time(self) -> float:
        """Median microseconds of one layer, every run over another pool than the one before."""
        pools = self.data.pools
        for pool in pools[:2]:
            self.run(pool)
        calls = [partial(self.run, pool) for pool in pools]
        return _replay_us(calls) if self.data.q.is_cuda else _median_us(calls)


def _median_us(calls: Sequence[Callable[[], Any]]) -> float:
    times = []
    for call in calls:
        begin = perf_counter()
        call()
        times.append(perf_counter() - begin)
    return float(np.median(times)) * 1e6


def _replay_us(calls: Sequence[Callable[[], Any]]) -> float:
    """Microseconds of one call: the median of replays of a CUDA graph of all of them."""
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    for _ in range(2):
        graph.replay()
    times = []
    for _ in range(REPLAYS):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3)
    return median(times) / len(calls)
