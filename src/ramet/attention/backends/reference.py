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
        on_device = [name for name in ("seq_lens", "page_lists") if getattr(problem, f"has_{name}")]
        if on_device and problem.device != "cpu":
            return Support(False, f"reference would wait for the device to read {' and '.join(on_device)}")
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
        self.q_lens = np.diff(forest.cu_seqlens_q)
        #: row, and of each key that it sees: page index * page size + offset, position
        self.rows = [(row, *self._path(row, int(self.q_lens[row]))) for row in np.flatnonzero(self.q_lens).tolist()]

    def _path(self, row: int, q_len: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Place in the page lists, and absolute position, of what the row's queries see of its path."""
        forest, page_size, window = self.forest, self.problem.page_size, self.problem.window_left
        slots: list[np.ndarray] = []
        positions: list[np.ndarray] = []
        node = int(forest.row_leaf[row])
        low = int(forest.node_end[node]) - q_len - window if window >= 0 else 0
        while node >= 0:
            skipped = max(0, low - int(forest.node_start[node]))
            token = np.arange(skipped, forest.node_end[node] - forest.node_start[node], dtype=np.int64)
            slot = forest.node_first_slot[node] + token
            slots.append(int(forest.node_page_indptr[node]) * page_size + slot)
            positions.append(forest.node_start[node] + token)
            node = int(forest.node_parent[node])
        return torch.from_numpy(np.concatenate(slots[::-1])), torch.from_numpy(np.concatenate(positions[::-1]))

    def run(self, tensors: Tensors) -> None:
        q, k_pool, v_pool, out, lse = tensors[:5]
        if not q.dtype.is_floating_point:
            raise Unsupported(f"reference serves floating-point dtypes, not {q.dtype}.")
        cu_seqlens_q, page_size = self.forest.cu_seqlens_q, self.problem.page_size
        lists = torch.from_numpy(self.forest.node_pages) if tensors.page_lists is None else tensors.page_lists
        results = []
        for row, places, positions in self.rows:
            begin, end = int(cu_seqlens_q[row]), int(cu_seqlens_q[row + 1])
            length = int(self.forest.node_end[self.forest.row_leaf[row]])
            if tensors.seq_lens is not None:
                length = max(0, min(length, int(tensors.seq_lens[row])))
                places, positions = places[positions < length], positions[positions < length]
            pages = lists[places // page_size].long().to(q.device)
            k, v = (pool[pages, (places % page_size).to(q.device)] for pool in (k_pool, v_pool))
            mine = torch.arange(length - (end - begin), length, device=q.device)
            results.append((begin, end, *self._attend(q[begin:end], k, v, mine, positions.to(q.device), tensors)))
        for begin, end, values, row_lse in results:  # written last, so that out may be q
            out[begin:end] = values.to(out.dtype)
            if lse is not None:
                lse[begin:end] = row_lse

    def _attend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        mine: torch.Tensor,
        positions: torch.Tensor,
        tensors: Tensors,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Output and log-sum-exp of one row, whose queries are at the positions ``mine``."""
        problem = self.problem
        wide = torch.float64 if q.dtype == torch.float64 else torch.float32
        k = k.to(wide).repeat_interleave(problem.group_size, dim=1)
        v = v.to(wide).repeat_interleave(problem.group_size, dim=1)
        scores = torch.einsum("qhd,khd->hqk", q.to(wide), k) * tensors.sm_scale
        if problem.softcap:
            scores = problem.softcap * torch.tanh(scores / problem.softcap)
        mine = mine[:, None]
        hidden = positions[None, :] > (mine if problem.causal else mine[-1:])
        if problem.window_left >= 0:
            hidden = hidden | (positions[None, :] < mine - problem.window_left)
        scores = scores.masked_fill(hidden, -torch.inf)
        lse = torch.logsumexp(scores, dim=-1)
        if tensors.sinks is None:
            weights = torch.softmax(scores, dim=-1).nan_to_num(0.0)  # a query that sees nothing
        else:  # one more key, whose value is zero
            sinks = tensors.sinks.to(wide)[:, None, None].expand(-1, scores.shape[1], 1)
            weights = torch.softmax(torch.cat([scores, sinks], dim=-1), dim=-1)[..., :-1]
        return torch.einsum("hqk,khd->qhd", weights, v) * tensors.out_scale, lse.T
