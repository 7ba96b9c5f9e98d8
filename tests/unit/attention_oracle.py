"""Forests with known contents, and dense attention over them in float64. Nothing here calls the package's attention.

While a forest is built, the K and V of every position are kept in plain lists beside the paged pool; the oracle reads
these lists only, so it knows nothing of pages, slots or nodes. Every KV slot that holds no position is NaN.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch

from ramet.attention import ForestArrays


@dataclass
class Node:
    parent: int
    start: int
    k: torch.Tensor  # [tokens, num_kv_heads, head_dim], float64
    v: torch.Tensor
    first_slot: int
    pages: list[int]


@dataclass
class Case:
    """A forest that grows node by node.

    Parameters
    ----------
    heads : (num_qo_heads, num_kv_heads)
    spare : int
        Pages beyond those in use; pages are handed out in random order.
    """

    heads: tuple[int, int] = (4, 2)
    head_dim: int = 8
    page_size: int = 4
    dtype: torch.dtype = torch.float32
    seed: int = 0
    num_pages: int = 512
    nodes: list[Node] = field(default_factory=list)
    rows: list[tuple[int, int]] = field(default_factory=list)  # (leaf, q_len)

    def __post_init__(self) -> None:
        self.generator = torch.Generator().manual_seed(self.seed)
        self.numpy = np.random.default_rng(self.seed)
        self.free = self.numpy.permutation(self.num_pages).tolist()

    def normal(self, *shape: int) -> torch.Tensor:
        """Random values that the case's dtype represents exactly."""
        return torch.randn(shape, generator=self.generator, dtype=torch.float64).to(self.dtype).double()

    def end(self, node: int) -> int:
        return 0 if node < 0 else self.nodes[node].start + len(self.nodes[node].k)

    def node(self, parent: int, tokens: int, *, first_slot: int = 0, extra_pages: int = 0, scale: float = 1.0) -> int:
        """Add a node and return its id; ``extra_pages`` are pages that its list has beyond its last position."""
        count = -(-(first_slot + tokens) // self.page_size) + extra_pages
        pages = [self.free.pop() for _ in range(count)]
        shape = (tokens, self.heads[1], self.head_dim)
        k, v = self.normal(*shape) * scale, self.normal(*shape)
        self.nodes.append(Node(parent, self.end(parent), k, v, first_slot, pages))
        return len(self.nodes) - 1

    def row(self, leaf: int, q_len: int = 1) -> int:
        self.rows.append((leaf, q_len))
        return len(self.rows) - 1

    def forest(self) -> ForestArrays:
        def ints(values: list[int]) -> np.ndarray:
            return np.array(values, dtype=np.int32)

        return ForestArrays(
            cu_seqlens_q=ints([0, *np.cumsum([q for _, q in self.rows]).tolist()]),
            row_leaf=ints([leaf for leaf, _ in self.rows]),
            node_parent=ints([node.parent for node in self.nodes]),
            node_start=ints([node.start for node in self.nodes]),
            node_end=ints([self.end(i) for i in range(len(self.nodes))]),
            node_first_slot=ints([node.first_slot for node in self.nodes]),
            node_page_indptr=ints([0, *np.cumsum([len(node.pages) for node in self.nodes]).tolist()]),
            node_pages=ints([page for node in self.nodes for page in node.pages]),
        )

    def pools(self, fill: float = float("nan")) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V pools; every slot without a position holds ``fill``."""
        shape = (self.num_pages, self.page_size, self.heads[1], self.head_dim)
        k_pool, v_pool = torch.full(shape, fill, dtype=self.dtype), torch.full(shape, fill, dtype=self.dtype)
        for node in self.nodes:
            for token in range(len(node.k)):
                page, offset = divmod(node.first_slot + token, self.page_size)
                k_pool[node.pages[page], offset] = node.k[token].to(self.dtype)
                v_pool[node.pages[page], offset] = node.v[token].to(self.dtype)
        return k_pool, v_pool

    def queries(self, scale: float = 1.0) -> torch.Tensor:
        return (self.normal(sum(q for _, q in self.rows), self.heads[0], self.head_dim) * scale).to(self.dtype)

    def path(self, row: int) -> list[int]:
        path = [self.rows[row][0]]
        while self.nodes[path[0]].parent >= 0:
            path.insert(0, self.nodes[path[0]].parent)
        return path

    def dense(
        self, q: torch.Tensor, sm_scale: float, dtype: torch.dtype = torch.float64
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Outputs and log-sum-exps by plain attention, row by row, every step of it in ``dtype``."""
        outs, lses = [], []
        group = self.heads[0] // self.heads[1]
        begin = 0
        for row, (_, q_len) in enumerate(self.rows):
            path = self.path(row)
            k = torch.cat([self.nodes[node].k for node in path]).to(dtype)
            v = torch.cat([self.nodes[node].v for node in path]).to(dtype)
            mine = q[begin : begin + q_len].to(dtype)
            begin += q_len
            for i in range(q_len):
                seen = len(k) - q_len + i + 1
                for head in range(self.heads[0]):
                    scores = (k[:seen, head // group] @ mine[i, head]) * sm_scale
                    lses.append(torch.logsumexp(scores.double(), 0))
                    outs.append(torch.softmax(scores, 0) @ v[:seen, head // group])
        shape = (len(q), self.heads[0])
        if not outs:
            return q.to(dtype), torch.empty(shape, dtype=torch.float64)
        return torch.stack(outs).view(*shape, self.head_dim), torch.stack(lses).view(shape)

    def shape(self) -> dict[str, int]:
        """The planner's arguments."""
        return {
            "num_qo_heads": self.heads[0],
            "num_kv_heads": self.heads[1],
            "head_dim": self.head_dim,
            "page_size": self.page_size,
        }


def check_against_dense(case: Case, q: torch.Tensor, out: torch.Tensor, sm_scale: float) -> float:
    """The error (root mean square) is at most twice that of dense attention in the same precision. Returns the ratio.

    Rounding the truth once is granted in any case: a small case may have no honest error by luck.
    """
    truth, _ = case.dense(q, sm_scale)
    if not truth.numel():
        return 0.0
    assert out.isfinite().all()
    honest = max(rms(case.dense(q, sm_scale, case.dtype)[0] - truth), rms(truth) * torch.finfo(case.dtype).eps / 2)
    error = rms(out - truth)
    assert error <= 2 * honest, f"error {error:.3g}, dense in {case.dtype} {honest:.3g}"
    return error / honest


def rms(values: torch.Tensor) -> float:
    return values.double().square().mean().sqrt().item()


def random_case(
    seed: int,
    *,
    heads: tuple[int, int] = (4, 2),
    head_dim: int = 8,
    page_size: int = 4,
    dtype: torch.dtype = torch.float32,
    max_rows: int = 12,
    max_depth: int = 4,
    max_tokens: int = 23,
    q_lens: tuple[int, ...] = (1,),
) -> Case:
    """A random forest: several roots, nested nodes, any first slot, leaves that several rows share, unused nodes."""
    num_pages = 2 * max_rows * (max_tokens // page_size + 3)
    case = Case(heads, head_dim, page_size, dtype, seed, num_pages)
    rng = case.numpy
    frontier = [-1]
    depth = {-1: 0}
    for _ in range(int(rng.integers(1, 2 * max_rows))):
        parent = int(rng.choice(frontier))
        node = case.node(
            parent,
            int(rng.integers(1, max_tokens + 1)),
            first_slot=int(rng.integers(0, page_size)),
            extra_pages=int(rng.integers(0, 2)),
        )
        depth[node] = depth[parent] + 1
        if depth[node] < max_depth:
            frontier.append(node)
    for _ in range(int(rng.integers(1, max_rows + 1))):
        leaf = int(rng.integers(0, len(case.nodes)))
        case.row(leaf, min(int(rng.choice(q_lens)), case.end(leaf)))
    return case
