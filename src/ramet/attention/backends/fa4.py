"""FlashAttention-4 as a backend, for Hopper: one call for what rows share, one causal call for their tails, a merge.

Where nothing is shared it is one call over each row's own page table. On SM90 FlashAttention-4 does not split a
sequence over several thread blocks, so long nodes are cut into several sequences here. With pages of as many tokens as
its key tile it loads whole pages by TMA, and what lies behind a row's length must be finite then (zero times NaN is
NaN). Attention never writes to a pool, so such pages are refused, unless whoever makes the backend vouches for them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch

from ramet.attention.backends.base import Tensors
from ramet.attention.backends.fa4_layout import Layout, Sequences, layout
from ramet.attention.buffers import Capacity, PlanBuffers
from ramet.attention.problem import Problem, SharePolicy, Support
from ramet.attention.work import WorkList
from ramet.errors import Unsupported

DTYPES = (torch.bfloat16, torch.float16)
SERVED_OPTIONS = frozenset({"softcap"})

MIN_SAVED_TOKENS = 16_384
"""A node is read once when that saves so many tokens. On an H200, 28/4 heads of 128: 3 x 40 rows of 600 tokens (23,400
saved) take 68 us unshared and 59 us shared; 1 x 4 rows of 4,000 (12,000 saved) take 53 and 58."""


class Fa4Backend:
    """Serves bf16 and fp16 on Hopper.

    Parameters
    ----------
    finite_pages : bool, default False
        Every KV slot of the pools holds a finite number, also those that no plan reads.
    """

    name = "fa4"
    strided = True

    def __init__(self, finite_pages: bool = False) -> None:
        self.finite_pages = finite_pages

    def supports(self, problem: Problem) -> Support:
        refusal = _refusal(problem, self.finite_pages)
        if refusal is not None:
            return Support(False, f"fa4 {refusal}")
        return Support(True, "FlashAttention-4: a call for shared nodes, a causal call for tails, one merge")

    def share_policy(self, problem: Problem) -> SharePolicy:
        return SharePolicy(MIN_SAVED_TOKENS)

    def arrays(self, problem: Problem, capacity: Capacity) -> None:
        return None

    def compile(
        self, work: WorkList, problem: Problem, device: torch.device, buffers: PlanBuffers | None
    ) -> Fa4Executor:
        return Fa4Executor(layout(work, problem, _sm_count(device)), problem, device)


def whole_pages(head_dim: int) -> tuple[int, ...]:
    """Page sizes that FlashAttention-4 loads whole on SM90: its key tiles, with and without causality."""
    if head_dim <= 128:
        return (128, 144) if 64 < head_dim <= 96 else (128,)
    return (112,) if head_dim <= 192 else (80,)


def _refusal(problem: Problem, finite_pages: bool) -> str | None:
    if problem.device != "cuda":
        return f"serves tensors on NVIDIA GPUs, not on {problem.device}"
    declined = [option for option in problem.options() if option not in SERVED_OPTIONS]
    if declined:
        return f"does not serve {', '.join(declined)}"
    if problem.dtype not in DTYPES:
        return f"serves bfloat16 and float16, not {problem.dtype}"
    if problem.head_dim % 16 or problem.head_dim > 256:
        return f"serves a head_dim that is a multiple of 16 up to 256, not {problem.head_dim}"
    if not finite_pages and problem.page_size in whole_pages(problem.head_dim):
        return (
            f"loads whole pages of {problem.page_size} tokens, so that NaN behind a row's length would reach its "
            "output; use another page_size"
        )
    return _installation()


@lru_cache(maxsize=1)
def _installation() -> str | None:
    """Why the package cannot be used here, None where it can."""
    for name in ("flash_attn.cute", "triton"):
        try:
            found = find_spec(name) is not None
        except ImportError:  # the package above it is missing
            found = False
        if not found:
            return f"is not installed ({name} is missing): pip install flash-attn-4"
    if not torch.cuda.is_available():
        return "finds no GPU"
    major, minor = torch.cuda.get_device_capability()
    return None if major == 9 else f"is used on Hopper (9.0) only; this GPU has compute capability {major}.{minor}"


@lru_cache(maxsize=16)
def _sm_count(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 132


class _Call:
    """One call of FlashAttention-4: its arrays on the device."""

    def __init__(self, sequences: Sequences, causal: bool, problem: Problem, device: torch.device) -> None:
        def send(values: np.ndarray) -> torch.Tensor:
            return torch.from_numpy(np.ascontiguousarray(values)).to(device)

        self.entries = len(sequences.queries)
        in_order = np.array_equal(sequences.queries, np.arange(self.entries))
        self.queries = None if in_order else send(sequences.queries)
        self.shape = (self.entries, problem.num_qo_heads, problem.head_dim)
        self.arguments: dict[str, Any] = {
            "cu_seqlens_q": send(sequences.cu_seqlens_q),
            "seqused_k": send(sequences.seqused_k),
            "page_table": send(sequences.page_table),
            "max_seqlen_q": sequences.max_q,
            "max_seqlen_k": max(sequences.max_k, 1),
            "causal": causal and sequences.max_q > 1,  # one query sees everything: no mask is needed
            "softcap": problem.softcap or None,
            "num_splits": 1,
        }

    def run(
        self, forward: Callable[..., Any], tensors: Tensors, out: torch.Tensor | None, with_lse: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Output [entries, heads, dim] and log-sum-exp [heads, entries]."""
        q = tensors.q if self.queries is None else tensors.q.index_select(0, self.queries)
        if out is None:
            out = q.new_empty(self.shape)
        lse = q.new_empty(self.shape[1], self.entries, dtype=torch.float32) if with_lse else None
        forward(
            q[: self.entries],
            tensors.k_pool,
            tensors.v_pool,
            softmax_scale=tensors.sm_scale,
            out=out,
            lse=lse,
            **self.arguments,
        )
        return out, lse


class Fa4Executor:
    """One call, or two and a merge."""

    def __init__(self, plan: Layout, problem: Problem, device: torch.device) -> None:
        self.problem = problem
        self.tails = _Call(plan.tails, True, problem, device)
        self.before = None if plan.before is None else _Call(plan.before, False, problem, device)
        if self.before is not None:
            self.parts, self.part_entry, self.target = (
                torch.from_numpy(values.astype(np.int32)).to(device)
                for values in (plan.parts, plan.part_entry, plan.tails.queries)
            )

    def run(self, tensors: Tensors) -> None:
        from flash_attn.cute.interface import _flash_attn_fwd as forward  # the public function has no out=

        if isinstance(tensors.sm_scale, torch.Tensor):
            raise Unsupported("fa4 takes sm_scale as a float, not as a tensor.")
        if self.before is None:
            in_place = self.tails.queries is None
            out, lse = self.tails.run(forward, tensors, tensors.out if in_place else None, tensors.lse is not None)
            if not in_place:
                tensors.out[self.tails.queries] = out
            if lse is not None and tensors.lse is not None:
                tensors.lse[slice(None) if in_place else self.tails.queries] = lse.T
            return
        self._merge(self.before, forward, tensors)

    def _merge(self, before: _Call, forward: Callable[..., Any], tensors: Tensors) -> None:
        from ramet.attention.kernels.fa4_merge import merge_kernel

        shared, shared_lse = before.run(forward, tensors, None, True)
        tail, tail_lse = self.tails.run(forward, tensors, None, True)
        heads, head_dim, block = self.problem.num_qo_heads, self.problem.head_dim, 8
        merge_kernel[(self.tails.entries, -(-heads // block))](
            tensors.out,
            tensors.out if tensors.lse is None else tensors.lse,
            tail,
            tail_lse,
            shared,
            shared_lse,
            self.parts,
            self.part_entry,
            self.target,
            self.tails.entries,
            before.entries,
            HEADS=heads,
            D=head_dim,
            BLOCK_H=block,
            BLOCK_D=1 << (head_dim - 1).bit_length(),
            HAS_LSE=tensors.lse is not None,
            num_warps=4,
        )
