"""Pools, queries and the dense truth for one shape of ``ramet bench attention``."""

from __future__ import annotations

import numpy as np
import torch

from ramet.attention import ForestArrays
from ramet.bench.attention_shapes import Shape, forest_of, pages_of

MIN_POOLS, MAX_POOLS = 8, 128
ROTATED_BYTES = 320 << 20
"""K and V of all pools together, at least where :data:`MAX_POOLS` allow: several times a GPU's L2 cache."""

CHECKED_ROWS = 12


class Data:
    """Random tensors of one shape: as many layers' pools as it takes that none is still in a cache.

    Parameters
    ----------
    shape : Shape
    dtype : torch.dtype
    device : torch.device
    seed : int

    Attributes
    ----------
    forest : ForestArrays
        On shuffled pages.
    q : Tensor [rows * q_len, num_qo_heads, head_dim]
    pools : list of (Tensor, Tensor)
        K and V, ``[num_pages, page_size, num_kv_heads, head_dim]`` each.
    """

    def __init__(self, shape: Shape, dtype: torch.dtype, device: torch.device, seed: int) -> None:
        self.shape = shape
        generator = torch.Generator(device).manual_seed(seed)
        pages = pages_of(shape)
        self.forest = forest_of(shape, np.random.default_rng(seed).permutation(pages))
        block = (pages, shape.page_size, shape.num_kv_heads, shape.head_dim)
        nbytes = 2 * int(np.prod(block)) * dtype.itemsize
        count = min(max(MIN_POOLS, -(-ROTATED_BYTES // nbytes)), MAX_POOLS) if device.type == "cuda" else MIN_POOLS
        tokens = (shape.rows * shape.q_len, shape.num_qo_heads, shape.head_dim)
        self.q = torch.randn(tokens, generator=generator, device=device, dtype=dtype)
        self._kv = torch.empty((count, 2, *block), device=device, dtype=dtype)
        self._kv.normal_(generator=generator)
        self.pools = [(layer[0], layer[1]) for layer in self._kv]
        self._unused = torch.from_numpy(_unused_slots(self.forest, shape.page_size)).to(device)

    def fill_unused(self, value: float) -> None:
        """Write a value to every KV slot that no node covers."""
        self._kv.view(*self._kv.shape[:2], -1, *self._kv.shape[4:])[:, :, self._unused] = value

    def truth(self) -> Truth:
        """The dense truth over the first pool, for some of the rows."""
        return Truth(self)


def _unused_slots(forest: ForestArrays, page_size: int) -> np.ndarray:
    used = np.zeros((int(forest.node_pages.max(initial=-1)) + 1) * page_size, bool)
    for node in range(forest.num_nodes):
        used[_slots(forest, node, page_size)] = True
    return np.flatnonzero(~used)


def _slots(forest: ForestArrays, node: int, page_size: int) -> np.ndarray:
    """Page * page size + offset of each of a node's positions."""
    slot = int(forest.node_first_slot[node]) + np.arange(forest.node_end[node] - forest.node_start[node])
    pages = forest.node_pages[forest.node_page_indptr[node] :].astype(np.int64)
    return pages[slot // page_size] * page_size + slot % page_size


class Truth:
    """Dense attention of some rows (the first, the last and ten others), and how far a right answer may be off.

    Attributes
    ----------
    tokens : Tensor [checked]
        Query tokens that are compared.
    out : Tensor [checked, num_qo_heads, head_dim]
        float32 on a GPU, float64 on a CPU.
    allowed : float
        Twice the relative error of dense attention in the dtype itself, and at least one rounding of the truth.
    """

    def __init__(self, data: Data) -> None:
        shape, q_len = data.shape, data.shape.q_len
        wide = torch.float32 if data.q.is_cuda else torch.float64
        rows = {0, shape.rows - 1}
        rows |= set(np.random.default_rng(1).permutation(shape.rows)[: CHECKED_ROWS - 2].tolist())
        chosen = sorted(rows)
        tokens = np.concatenate([np.arange(row * q_len, (row + 1) * q_len) for row in chosen])
        self.tokens = torch.from_numpy(tokens).to(data.q.device)
        self.out = torch.cat([_dense(data, row, wide) for row in chosen])
        same = torch.cat([_dense(data, row, data.q.dtype) for row in chosen])
        self.allowed = max(2 * self._distance(same), torch.finfo(data.q.dtype).eps)

    def error(self, out: torch.Tensor) -> float:
        """Relative error ``|out - truth| / |truth|`` of the compared tokens; infinite if any output is not finite."""
        return self._distance(out[self.tokens]) if bool(out.isfinite().all()) else float("inf")

    def _distance(self, out: torch.Tensor) -> float:
        return float((out.to(self.out.dtype) - self.out).norm() / self.out.norm())


def _dense(data: Data, row: int, dtype: torch.dtype) -> torch.Tensor:
    """One row's output ``[q_len, heads, dim]`` with every step in ``dtype``."""
    shape, forest = data.shape, data.forest
    path = [int(forest.row_leaf[row])]
    while forest.node_parent[path[-1]] >= 0:
        path.append(int(forest.node_parent[path[-1]]))
    slots = torch.from_numpy(np.concatenate([_slots(forest, node, shape.page_size) for node in path[::-1]]))
    k, v = (pool.flatten(0, 1)[slots.to(pool.device)].to(dtype) for pool in data.pools[0])
    group = shape.num_qo_heads // shape.num_kv_heads
    k, v = k.repeat_interleave(group, 1).transpose(0, 1), v.repeat_interleave(group, 1).transpose(0, 1)
    q = data.q[row * shape.q_len : (row + 1) * shape.q_len].to(dtype).transpose(0, 1)
    scores = (q @ k.transpose(1, 2)) * shape.head_dim**-0.5
    hidden = torch.ones(scores.shape[1:], dtype=torch.bool, device=q.device).triu(shape.context - shape.q_len + 1)
    return (torch.softmax(scores.masked_fill(hidden, -torch.inf), -1) @ v).transpose(0, 1)
