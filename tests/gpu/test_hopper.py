"""The Hopper kernel on the card, against dense attention in float32; K and V outside valid tokens are NaN."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from ramet.attention import ForestArrays, plan
from ramet.attention.buffers import Capacity
from ramet.attention.planner import plan_buffers
from ramet.attention.problem import Problem

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs an SM90 GPU"
    ),
]


def star(prompts: int, samples: int, prefix: int, tail: int, q_len: int, page_size: int = 128) -> ForestArrays:
    """Prompts with samples of their own tails each."""
    rows = prompts * samples
    parent = np.append(np.full(prompts, -1), np.repeat(np.arange(prompts), samples))
    start = np.append(np.zeros(prompts), np.full(rows, prefix))
    end = np.append(np.full(prompts, prefix), np.full(rows, prefix + tail))
    indptr = np.append(0, np.cumsum(-(-(end - start) // page_size)))
    arrays = (np.arange(rows + 1) * q_len, prompts + np.arange(rows), parent, start, end, start * 0, indptr)
    pages = np.random.default_rng(0).permutation(int(indptr[-1]))
    return ForestArrays(*(x.astype(np.int32) for x in (*arrays, pages)))


def random_forest(rng: np.random.Generator, page_size: int, longest: int, max_q: int) -> ForestArrays:
    """A random tree of nested nodes, rows at any of them, in any order."""
    nodes, rows = int(rng.integers(1, 12)), int(rng.integers(1, 30))
    parent = np.array([rng.integers(-1, node) if node else -1 for node in range(nodes)])
    length, start = rng.integers(1, longest + 1, nodes), np.zeros(nodes, np.int64)
    for node in np.flatnonzero(parent >= 0):
        start[node] = start[parent[node]] + length[parent[node]]
    first = rng.integers(0, page_size, nodes)
    indptr = np.append(0, np.cumsum(-(-(first + length) // page_size)))
    leaf = rng.integers(0, nodes, rows)
    q_len = np.minimum(rng.integers(0, max_q + 1, rows), (start + length)[leaf])
    q_len[0] = 1
    arrays = (np.append(0, np.cumsum(q_len)), leaf, parent, start, start + length, first, indptr)
    return ForestArrays(*(x.astype(np.int32) for x in (*arrays, rng.permutation(int(indptr[-1])))))


def slots_of(forest: ForestArrays, node: int, page_size: int) -> np.ndarray:
    slot = forest.node_first_slot[node] + np.arange(forest.node_end[node] - forest.node_start[node])
    pages = forest.node_pages[forest.node_page_indptr[node] + slot // page_size].astype(np.int64)
    return pages * page_size + slot % page_size


def dense(
    forest: ForestArrays, page_size: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Every row by itself, walking up from its leaf."""
    out, lse = torch.empty(q.shape, device=q.device), torch.empty(q.shape[:2], device=q.device)
    group = q.shape[1] // k.shape[2]
    for row, leaf in enumerate(forest.row_leaf):
        begin, end = map(int, forest.cu_seqlens_q[row : row + 2])
        parts, node = [], int(leaf)
        while node >= 0:
            parts.append(slots_of(forest, node, page_size))
            node = int(forest.node_parent[node])
        slots = torch.from_numpy(np.concatenate(parts[::-1])).to(q.device)
        keys, values = (x.flatten(0, 1)[slots].float().repeat_interleave(group, 1) for x in (k, v))
        place = torch.arange(len(slots), device=q.device)
        scores = torch.einsum("qhd,khd->hqk", q[begin:end].float(), keys) * scale
        scores = scores.masked_fill(place[None] > place[len(slots) - (end - begin) :, None], -torch.inf)
        lse[begin:end] = torch.logsumexp(scores, -1).T
        out[begin:end] = torch.einsum("hqk,khd->qhd", torch.softmax(scores, -1), values)
    return out, lse


def tensors(
    forest: ForestArrays, heads: tuple[int, int], head_dim: int, page_size: int, dtype: torch.dtype, seed: int = 0
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q, and pools that hold NaN wherever the forest has no token."""
    make = torch.Generator("cuda").manual_seed(seed)
    pages = int(forest.node_pages.max()) + 3
    shape = (pages, page_size, heads[0], head_dim)
    k, v = (torch.randn(shape, device="cuda", generator=make).to(dtype) for _ in range(2))
    unused = np.ones(pages * page_size, bool)
    for node in range(forest.num_nodes):
        unused[slots_of(forest, node, page_size)] = False
    for pool in (k, v):
        pool.flatten(0, 1)[torch.from_numpy(unused).cuda()] = torch.nan
    q = 2 * torch.randn(int(forest.cu_seqlens_q[-1]), heads[0] * heads[1], head_dim, device="cuda", generator=make)
    return q.to(dtype), k, v


def check(
    forest: ForestArrays,
    heads: tuple[int, int] = (4, 7),
    head_dim: int = 128,
    page_size: int = 128,
    dtype: torch.dtype = torch.bfloat16,
    gate: str = "auto",
) -> None:
    q, k, v = tensors(forest, heads, head_dim, page_size, dtype)
    work = plan(
        forest,
        num_qo_heads=q.shape[1],
        num_kv_heads=heads[0],
        head_dim=head_dim,
        page_size=page_size,
        dtype=dtype,
        device="cuda",
        backend="hopper",
        gate=gate,
    )
    scale = head_dim**-0.5
    expected, expected_lse = dense(forest, page_size, q, k, v, scale)
    before = None
    for _ in range(3):
        out, lse = work.run(q, k, v, sm_scale=scale, out=torch.full_like(q, torch.nan), return_lse=True)
        assert float((out.float() - expected).norm() / expected.norm()) < 6e-3
        assert float((lse - expected_lse).abs().max()) < 2e-3
        assert before is None or torch.equal(before, out)  # a result that moves is a race
        before = out


@pytest.mark.parametrize(
    "prompts, samples, prefix, tail, q_len",
    [
        (1, 1, 60, 40, 1),
        (1, 1, 0, 1000, 1),
        (3, 40, 1600, 256, 1),
        (1, 256, 2000, 100, 1),
        (16, 16, 1000, 256, 1),
        (1, 4, 16000, 256, 1),
        (3, 40, 600, 256, 4),
        (3, 40, 600, 256, 9),
        (3, 10, 600, 256, 16),
        (64, 1, 0, 2000, 1),
        (2, 3, 500, 33, 13),
    ],
)
def test_prompts_with_samples(prompts: int, samples: int, prefix: int, tail: int, q_len: int) -> None:
    check(star(prompts, samples, prefix, tail, q_len))


@pytest.mark.parametrize("seed", range(42))
def test_random_nested_forests(seed: int) -> None:
    rng = np.random.default_rng(seed)
    page_size = int(rng.choice([16, 32, 48, 64, 128, 256]))
    forest = random_forest(rng, page_size, int(rng.choice([5, 300, 2000])), int(rng.choice([1, 4, 16])))
    heads = [(4, 7), (3, 3), (8, 4), (2, 16), (5, 1), (28, 1), (1, 8)][seed % 7]
    dtype = [torch.bfloat16, torch.float16][seed // 2 % 2]
    check(forest, heads, [128, 64][seed % 2], page_size, dtype, ["auto", "open", "closed"][seed % 3])


def test_one_graph_serves_every_forest() -> None:
    problem = Problem(28, 4, 128, 128, device="cuda", dtype=torch.bfloat16)
    buffers = plan_buffers(problem, Capacity(tokens=128, rows=128, pages=4096), backend="hopper")
    forests = [star(3, 40, 600, 256, 1), star(120, 1, 0, 300, 1), star(2, 10, 700, 30, 4), star(1, 2, 5000, 3, 1)]
    q, k, v = (torch.zeros(128, 28, 128), torch.zeros(700, 128, 4, 128), torch.zeros(700, 128, 4, 128))
    q, k, v = (x.to("cuda", torch.bfloat16) for x in (q, k, v))
    out, scale = torch.empty_like(q), torch.tensor([128**-0.5], device="cuda")

    def planned(forest: ForestArrays):  # type: ignore[no-untyped-def]
        return plan(
            forest,
            num_qo_heads=28,
            num_kv_heads=4,
            head_dim=128,
            page_size=128,
            dtype=torch.bfloat16,
            device="cuda",
            buffers=buffers,
        )

    work = planned(forests[0])
    work.run(q, k, v, sm_scale=scale, out=out)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work.run(q, k, v, sm_scale=scale, out=out)
    for seed, forest in enumerate(forests + forests[::-1]):
        mine = tensors(forest, (4, 7), 128, 128, torch.bfloat16, seed)
        for target, source in zip((q, k, v), mine, strict=True):
            target[: len(source)] = source
        planned(forest)
        out.fill_(7.0)
        graph.replay()
        expected, _ = dense(forest, 128, *mine, 128**-0.5)
        assert float((out[: len(expected)].float() - expected).norm() / expected.norm()) < 6e-3
        assert bool((out[len(expected) :] == 7.0).all())


def test_output_in_place_of_q() -> None:
    forest = star(2, 10, 700, 30, 4)
    q, k, v = tensors(forest, (4, 7), 128, 128, torch.bfloat16)
    expected, _ = dense(forest, 128, q, k, v, 0.1)
    options = dict(num_qo_heads=28, num_kv_heads=4, head_dim=128, page_size=128, dtype=q.dtype, device="cuda")
    plan(forest, backend="hopper", **options).run(q, k, v, sm_scale=0.1, out=q)  # type: ignore[arg-type]
    assert float((q.float() - expected).norm() / expected.norm()) < 6e-3


def test_pool_above_two_to_the_31_elements() -> None:
    forest = star(1, 12, 300, 50, 1)
    pool = torch.empty(2**31 // (128 * 512) + 40, 128, 4, 128, device="cuda", dtype=torch.bfloat16)
    pool[-40:].normal_()
    forest = replace(forest, node_pages=forest.node_pages + np.int32(len(pool) - 20))
    q = torch.randn(12, 28, 128, device="cuda", dtype=torch.bfloat16)
    options = dict(num_qo_heads=28, num_kv_heads=4, head_dim=128, page_size=128, dtype=q.dtype, device="cuda")
    out = plan(forest, backend="hopper", **options).run(q, pool, pool, sm_scale=0.1)  # type: ignore[arg-type]
    expected, _ = dense(forest, 128, q, pool, pool, 0.1)
    assert float((out.float() - expected).norm() / expected.norm()) < 6e-3
