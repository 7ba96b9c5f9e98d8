"""Attention over a forest: a node that several rows share is read once for all of them.

The library stands alone: it needs PyTorch and NumPy, and nothing else of Ramet but its exceptions. Two calls do the
work: :func:`plan` once per step, on the host, and :meth:`AttentionPlan.run` once per layer. Decode, verification of
drafts and chunked prefill are the same call, and so is a batch in which nothing is shared.

Log-sum-exps are natural logarithms in float32 everywhere; the empty state is ``(0, -inf)``.
"""

from ramet.attention.buffers import Capacity, PlanBuffers
from ramet.attention.ops import append_kv, forest_attention, merge_states
from ramet.attention.planner import AttentionPlan, plan, plan_buffers, workspace_size
from ramet.attention.problem import Problem, Support
from ramet.attention.registry import Explanation, backend_order, explain, select, supports
from ramet.attention.rope import rope_append_kv
from ramet.attention.tables import context_attention, decode_attention, mla_decode_attention
from ramet.attention.types import BAD_PAGE_INDEX, ForestArrays
from ramet.attention.work import PlanCounters, WorkList

__all__ = [
    # the forest and what becomes of it
    "ForestArrays",
    "plan",
    "AttentionPlan",
    "WorkList",
    "PlanCounters",
    # memory of plans in captured graphs
    "Capacity",
    "PlanBuffers",
    "plan_buffers",
    "workspace_size",
    # stateless operations
    "forest_attention",
    "decode_attention",
    "context_attention",
    "mla_decode_attention",
    "merge_states",
    "append_kv",
    "rope_append_kv",
    # choosing a backend
    "Problem",
    "Support",
    "supports",
    "select",
    "explain",
    "Explanation",
    "backend_order",
    "BAD_PAGE_INDEX",
]
