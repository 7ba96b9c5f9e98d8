"""The CPU backend: every shared node is one matrix product for all rows below it.

A layer is about a dozen operators, however many rows there are. K and V are gathered head by head into dense matrices,
even where pages are consecutive: the copy costs a twentieth of the product, and bf16 products of strided matrices cost
far more than that (512 keys, 3 query rows: 73 us strided, 34 us dense). Only valid KV slots are gathered, so garbage in
the rest of a page is never seen. PyTorch's own SDPA is not used: its CPU kernel does bf16 no faster than float32, and
for causal attention it computes most of the keys that causality hides.
"""

from __future__ import annotations

import torch

from ramet.attention.backends.cpu_layout import Layout, layout
from ramet.attention.backends.cpu_scratch import Binder, Bound, BoundPass, compute_dtype
from ramet.attention.problem import Problem, SharePolicy, Support
from ramet.attention.work import WorkList
from ramet.errors import Unsupported

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)

MIN_SAVED_ELEMENTS = 300_000
"""A node is read once when that saves the tails this many elements of K (1,600 tokens of 3 heads of 64): about what the
six operators of one more item cost."""


class CpuBackend:
    """Serves tensors on the CPU."""

    name = "cpu"

    def supports(self, problem: Problem) -> Support:
        if problem.device != "cpu":
            return Support(False, f"cpu serves tensors on the CPU, not on {problem.device}")
        how = "one product per shared node and one per batch of tails"
        if problem.dtype is None:
            return Support(True, how)
        if problem.dtype not in DTYPES:
            return Support(False, f"cpu serves float32, bfloat16, float16 and float64, not {problem.dtype}")
        return Support(True, f"{how}, in {compute_dtype(problem.dtype)}")

    def share_policy(self, problem: Problem) -> SharePolicy:
        return SharePolicy(-(-MIN_SAVED_ELEMENTS // (problem.num_kv_heads * problem.head_dim)))

    def compile(self, work: WorkList, problem: Problem) -> CpuExecutor:
        return CpuExecutor(layout(work, problem) if work.num_rows else Layout.empty(), problem)


class CpuExecutor:
    """A layout with its scratch memory, one for each dtype it meets."""

    def __init__(self, plan: Layout, problem: Problem) -> None:
        self.layout, self.problem = plan, problem
        self.query_index = torch.from_numpy(plan.query_index)
        self.output_index = torch.from_numpy(plan.output_index)
        self._bound: dict[torch.dtype, Bound] = {}

    def run(
        self,
        q: torch.Tensor,
        k_pool: torch.Tensor,
        v_pool: torch.Tensor,
        sm_scale: float,
        out: torch.Tensor,
        lse: torch.Tensor | None,
    ) -> None:
        group, head_dim = self.problem.group_size, self.problem.head_dim
        bound = self._bound.get(q.dtype) or self._bind(q)
        same = bound.q.dtype == q.dtype
        queries = q.reshape(-1, group * head_dim)
        torch.index_select(queries if same else queries.to(bound.q.dtype), 0, self.query_index, out=bound.q)
        k_rows, v_rows = k_pool.view(-1, head_dim), v_pool.view(-1, head_dim)
        for step in bound.passes:
            _run_pass(step, k_rows, v_rows, sm_scale, lse is not None)
        rows = out.view(-1, group * head_dim)
        if same:
            torch.index_select(bound.out, 0, self.output_index, out=rows)
        else:
            rows.copy_(torch.index_select(bound.out, 0, self.output_index))
        if lse is not None:
            torch.index_select(bound.lse, 0, self.output_index, out=lse.view(-1, group))

    def _bind(self, q: torch.Tensor) -> Bound:
        if q.device.type != "cpu" or q.dtype not in DTYPES:
            raise Unsupported(
                f"cpu serves float32, bfloat16, float16 and float64 on the CPU, not {q.dtype} on {q.device}."
            )
        with torch.inference_mode(False):  # the scratch then serves inside and outside of inference mode
            self._bound[q.dtype] = Binder(self.problem, self.layout, q.dtype).bind()
        return self._bound[q.dtype]


def _run_pass(step: BoundPass, k_rows: torch.Tensor, v_rows: torch.Tensor, sm_scale: float, return_lse: bool) -> None:
    torch.index_select(k_rows, 0, step.kv_index, out=step.k_pool)
    torch.index_select(v_rows, 0, step.kv_index, out=step.v_pool)
    if step.k is not step.k_pool:
        step.k.copy_(step.k_pool)
        step.v.copy_(step.v_pool)
    if step.has_gaps:
        step.scores.fill_(-torch.inf)
    for item in step.items:
        if item.q_from is not None:
            item.q_to.copy_(item.q_from)
        torch.baddbmm(item.scores, item.q, item.k_t, beta=0, alpha=sm_scale, out=item.scores)
        if item.wide is not None:
            item.wide.copy_(item.rows)  # cheaper than a product whose result is a part of a matrix
        if item.bias is not None:
            item.hidden.add_(item.bias)  # every gathered key is a valid one, so adding -inf is replacing
    if return_lse:
        torch.logsumexp(step.score_rows.float(), dim=-1, out=step.lse)
    torch.softmax(step.scores, dim=-1, out=step.scores)
    if step.clear_out:
        step.out.zero_()
    for item in step.items:
        if item.wide is not None:
            item.rows.copy_(item.wide)
        torch.bmm(item.weights, item.v, out=item.out)
        if item.rest is not None:
            torch.baddbmm(item.out, *item.rest, out=item.out)
        if item.out_sum is not None:
            item.out_sum.add_(item.out_rows)
