"""Dense attention, one row at a time: slow, and right at a glance. The yardstick for the other backends."""

from __future__ import annotations

import numpy as np
import torch

from ramet.attention.backends.base import Tensors
from ramet.attention.buffers import Capacity, PlanBuffers
from ramet.attention.problem import Problem, SharePolicy, Support
from ramet.attention.types import ForestArrays
from ramet.attention.work import WorkList
from ramet.errors import Unsupported


class ReferenceBackend:
    """Reads every row's whole path by itself; computes in float32, or float64 for float64 tensors."""

    name = "reference"
    strided = True

    def supports(self, problem: Problem) -> Support:
        for dtype in (problem.dtype, problem.kv_dtype):
            if dtype is not None and not dtype.is_floating_point:
                return Support(False, f"reference serves floating-point dtypes, not {dtype}")
        return Support(True, "dense attention row by row, on any device")

    def share_policy(self, problem: Problem) -> SharePolicy:
        return SharePolicy(min_saved_tokens=0)

    def arrays(self, problem: Problem, capacity: Capacity) -> None:
        return None

    def compile(
        self, work: WorkList, problem: Problem, device: torch.device, buffers: PlanBuffers | None
    ) -> ReferenceExecutor:
        return ReferenceExecutor(work.forest, problem)


class ReferenceExecutor:
    """Walks each row's path from the leaf up; takes nothing from the work list but the forest."""

    def __init__(self, forest: ForestArrays, problem: Problem) -> None:
        self.problem = problem
        self.forest = forest
        q_lens = np.diff(forest.cu_seqlens_q)
        self.rows = [(row, *self._path(row, int(q_lens[row]))) for row in np.flatnonzero(q_lens).tolist()]

    def _path(self, row: int, q_len: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Page * page size + offset, and absolute position, of what the row's queries see of its path."""
        forest, page_size, window = self.forest, self.problem.page_size, self.problem.window_left
        slots: list[np.ndarray] = []
        positions: list[np.ndarray] = []
        node = int(forest.row_leaf[row])
        low = int(forest.node_end[node]) - q_len - window if window >= 0 else 0
        while node >= 0:
            skipped = max(0, low - int(forest.node_start[node]))
            token = np.arange(skipped, forest.node_end[node] - forest.node_start[node], dtype=np.int64)
            slot = forest.node_first_slot[node] + token
            pages = forest.node_pages[forest.node_page_indptr[node] :].astype(np.int64)
            slots.append(pages[slot // page_size] * page_size + slot % page_size)
            positions.append(forest.node_start[node] + token)
            node = int(forest.node_parent[node])
        return torch.from_numpy(np.concatenate(slots[::-1])), torch.from_numpy(np.concatenate(positions[::-1]))

    def run(self, tensors: Tensors) -> None:
        q, k_pool, v_pool, out, lse, _, _ = tensors
        if not q.dtype.is_floating_point:
            raise Unsupported(f"reference serves floating-point dtypes, not {q.dtype}.")
        cu_seqlens_q, page_size = self.forest.cu_seqlens_q, self.problem.page_size
        results = []
        for row, slots, positions in self.rows:
            begin, end = int(cu_seqlens_q[row]), int(cu_seqlens_q[row + 1])
            slots, positions = slots.to(q.device), positions.to(q.device)
            k, v = (pool[slots // page_size, slots % page_size] for pool in (k_pool, v_pool))
            results.append((begin, end, *self._attend(q[begin:end], k, v, positions, tensors)))
        for begin, end, values, row_lse in results:  # written last, so that out may be q
            out[begin:end] = values.to(out.dtype)
            if lse is not None:
                lse[begin:end] = row_lse

    def _attend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, positions: torch.Tensor, tensors: Tensors
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Output and log-sum-exp of one row; its queries are the last of ``positions``."""
        problem = self.problem
        wide = torch.float64 if q.dtype == torch.float64 else torch.float32
        k = k.to(wide).repeat_interleave(problem.group_size, dim=1)
        v = v.to(wide).repeat_interleave(problem.group_size, dim=1)
        scores = torch.einsum("qhd,khd->hqk", q.to(wide), k) * tensors.sm_scale
        if problem.softcap:
            scores = problem.softcap * torch.tanh(scores / problem.softcap)
        mine = positions[positions.numel() - q.shape[0] :, None]
        hidden = positions[None, :] > mine
        if problem.window_left >= 0:
            hidden = hidden | (positions[None, :] < mine - problem.window_left)
        scores = scores.masked_fill(hidden, -torch.inf)
        lse = torch.logsumexp(scores, dim=-1)
        if tensors.sinks is None:
            weights = torch.softmax(scores, dim=-1)
        else:  # one more key, whose value is zero
            sinks = tensors.sinks.to(wide)[:, None, None].expand(-1, scores.shape[1], 1)
            weights = torch.softmax(torch.cat([scores, sinks], dim=-1), dim=-1)[..., :-1]
        return torch.einsum("hqk,khd->qhd", weights, v), lse.T
