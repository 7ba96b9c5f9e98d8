"""Dense attention, one row at a time: slow, and right at a glance. The yardstick for the other backends."""

from __future__ import annotations

import numpy as np
import torch

from ramet.attention.problem import Problem, SharePolicy, Support
from ramet.attention.types import ForestArrays
from ramet.attention.work import WorkList
from ramet.errors import Unsupported


class ReferenceBackend:
    """Reads every row's whole path by itself; computes in float32, or float64 for float64 tensors."""

    name = "reference"

    def supports(self, problem: Problem) -> Support:
        if problem.dtype is not None and not problem.dtype.is_floating_point:
            return Support(False, f"reference serves floating-point dtypes, not {problem.dtype}")
        return Support(True, "dense attention row by row, on any device")

    def share_policy(self, problem: Problem) -> SharePolicy:
        return SharePolicy(min_saved_tokens=0)

    def compile(self, work: WorkList, problem: Problem) -> ReferenceExecutor:
        return ReferenceExecutor(work.forest, problem)


class ReferenceExecutor:
    """Walks each row's path from the leaf up; takes nothing from the work list but the forest."""

    def __init__(self, forest: ForestArrays, problem: Problem) -> None:
        self.problem = problem
        self.forest = forest
        q_lens = np.diff(forest.cu_seqlens_q)
        self.rows = [(row, *self._path(row)) for row in np.flatnonzero(q_lens).tolist()]

    def _path(self, row: int) -> tuple[torch.Tensor, torch.Tensor]:
        """KV slots and absolute positions of the row's whole path."""
        forest, page_size = self.forest, self.problem.page_size
        slots: list[np.ndarray] = []
        positions: list[np.ndarray] = []
        node = int(forest.row_leaf[row])
        while node >= 0:
            token = np.arange(forest.node_end[node] - forest.node_start[node], dtype=np.int64)
            slot = forest.node_first_slot[node] + token
            pages = forest.node_pages[forest.node_page_indptr[node] :].astype(np.int64)
            slots.append(pages[slot // page_size] * page_size + slot % page_size)
            positions.append(forest.node_start[node] + token)
            node = int(forest.node_parent[node])
        return (torch.from_numpy(np.concatenate(slots[::-1])), torch.from_numpy(np.concatenate(positions[::-1])))

    def run(
        self,
        q: torch.Tensor,
        k_pool: torch.Tensor,
        v_pool: torch.Tensor,
        sm_scale: float,
        out: torch.Tensor,
        lse: torch.Tensor | None,
    ) -> None:
        problem = self.problem
        if not q.dtype.is_floating_point:
            raise Unsupported(f"reference serves floating-point dtypes, not {q.dtype}.")
        wide = torch.float64 if q.dtype == torch.float64 else torch.float32
        k_all = k_pool.view(-1, problem.num_kv_heads, problem.head_dim)
        v_all = v_pool.view(-1, problem.num_kv_heads, problem.head_dim)
        cu_seqlens_q = self.forest.cu_seqlens_q
        results = []
        for row, slots, positions in self.rows:
            begin, end = int(cu_seqlens_q[row]), int(cu_seqlens_q[row + 1])
            slots, positions = slots.to(q.device), positions.to(q.device)
            k = k_all[slots].to(wide).repeat_interleave(problem.group_size, dim=1)
            v = v_all[slots].to(wide).repeat_interleave(problem.group_size, dim=1)
            scores = torch.einsum("qhd,khd->hqk", q[begin:end].to(wide), k) * sm_scale
            future = positions[None, :] > positions[positions.numel() - (end - begin) :, None]
            scores = scores.masked_fill(future, -torch.inf)
            values = torch.einsum("hqk,khd->qhd", torch.softmax(scores, dim=-1), v)
            results.append((begin, end, values, torch.logsumexp(scores, dim=-1).T))
        for begin, end, values, row_lse in results:  # written last, so that out may be q
            out[begin:end] = values.to(out.dtype)
            if lse is not None:
                lse[begin:end] = row_lse
