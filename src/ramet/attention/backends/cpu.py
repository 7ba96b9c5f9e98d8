"""The CPU backend: every shared node is one matrix product for all rows below it.

A layer is about a dozen operators, however many rows there are. K and V are gathered head by head into dense matrices,
even where pages are consecutive: the copy costs a twentieth of the product, and bf16 products of strided matrices cost
far more than that (512 keys, 3 query rows: 73 us strided, 34 us dense). Only valid KV slots are gathered, so garbage in
the rest of a page is never seen. PyTorch's own SDPA is not used: its CPU kernel does bf16 no faster than float32, and
for causal attention it computes most of the keys that causality hides.
"""

from __future__ import annotations

import torch

from ramet.attention.backends.base import Tensors
from ramet.attention.backends.cpu_layout import Layout, layout
from ramet.attention.backends.cpu_tape import Recorder, Tape, compute_dtype
from ramet.attention.buffers import Capacity, PlanBuffers
from ramet.attention.problem import Problem, SharePolicy, Support
from ramet.attention.work import WorkList
from ramet.errors import Unsupported

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)

MIN_SAVED_ELEMENTS = 200_000
"""A node is read once when that saves the tails this many elements of K. The operators of one more item cost as much as
500 (float32) to 1,900 (bf16) tokens of 3 heads of 64; this is 1,040."""


class CpuBackend:
    """Serves tensors on the CPU."""

    name = "cpu"
    strided = False

    def supports(self, problem: Problem) -> Support:
        if problem.device != "cpu":
            return Support(False, f"cpu serves tensors on the CPU, not on {problem.device}")
        if problem.options():
            return Support(False, f"cpu does not serve {', '.join(problem.options())}")
        how = "one product per shared node and one per batch of tails"
        if problem.dtype is None:
            return Support(True, how)
        if problem.dtype not in DTYPES:
            return Support(False, f"cpu serves float32, bfloat16, float16 and float64, not {problem.dtype}")
        return Support(True, f"{how}, in {compute_dtype(problem.dtype)}")

    def share_policy(self, problem: Problem) -> SharePolicy:
        return SharePolicy(-(-MIN_SAVED_ELEMENTS // (problem.num_kv_heads * problem.head_dim)))

    def arrays(self, problem: Problem, capacity: Capacity) -> None:
        return None

    def compile(
        self, work: WorkList, problem: Problem, device: torch.device, buffers: PlanBuffers | None
    ) -> CpuExecutor:
        return CpuExecutor(layout(work, problem) if work.num_rows else Layout.empty(), problem)


class CpuExecutor:
    """A layout with its tapes, one for each dtype it meets."""

    def __init__(self, plan: Layout, problem: Problem) -> None:
        self.layout, self.problem = plan, problem
        self.query_index = torch.from_numpy(plan.query_index)
        self.output_index = torch.from_numpy(plan.output_index)
        self._tapes: dict[torch.dtype, Tape] = {}

    def run(self, tensors: Tensors) -> None:
        q, k_pool, v_pool, out, lse, sm_scale = tensors[:6]
        tape = self._tapes.get(q.dtype) or self._record(q)
        q = q.to(tape.q.dtype)
        heads, group, head_dim = self.problem.num_kv_heads, self.problem.group_size, self.problem.head_dim
        if self.layout.in_order:  # queries are only to be sorted by KV head: one operator scales them on the way
            torch.mul(q.reshape(-1, heads, group * head_dim).transpose(0, 1), sm_scale, out=tape.q_by_head)
        else:
            queries = q.reshape(-1, group * head_dim)
            torch.mul(queries.index_select(0, self.query_index), sm_scale, out=tape.q)
        k_rows, v_rows = k_pool.view(-1, head_dim), v_pool.view(-1, head_dim)
        for step in tape.passes:
            torch.index_select(k_rows, 0, step.kv_index, out=step.k)
            torch.index_select(v_rows, 0, step.kv_index, out=step.v)
            for op in step.scores:
                op()
            if lse is not None:
                step.lse()
            for op in step.values:
                op()
        rows = out.view(-1, group * head_dim)
        if tape.out.dtype == rows.dtype:
            torch.index_select(tape.out, 0, self.output_index, out=rows)
        else:
            rows.copy_(tape.out.index_select(0, self.output_index))
        if lse is not None:
            torch.index_select(tape.lse, 0, self.output_index, out=lse.view(-1, group))

    def _record(self, q: torch.Tensor) -> Tape:
        if q.device.type != "cpu" or q.dtype not in DTYPES:
            raise Unsupported(
                f"cpu serves float32, bfloat16, float16 and float64 on the CPU, not {q.dtype} on {q.device}."
            )
        with torch.inference_mode(False):  # the scratch then serves inside and outside of inference mode
            self._tapes[q.dtype] = Recorder(self.problem, self.layout, q.dtype).record()
        return self._tapes[q.dtype]
