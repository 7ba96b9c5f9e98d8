"""The Hopper kernel's schedule: executed record by record in NumPy and compared with dense attention."""

from __future__ import annotations

import dataclasses

import hopper_emulator
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ramet.attention.backends.hopper_schedule import SHARED_TILE, Scheduler, Shape
from ramet.attention.build import build_work
from ramet.attention.problem import SharePolicy
from ramet.attention.types import ForestArrays


def random_forest(
    rng: np.random.Generator, rows: int, nodes: int, page_size: int, longest: int, max_q: int
) -> ForestArrays:
    """A random tree of nodes with random first slots and pages, rows at any of them, in any order."""
    parent = np.array([rng.integers(-1, i) if i else -1 for i in range(nodes)], np.int32)
    length = rng.integers(1, longest + 1, nodes).astype(np.int32)
    start = np.zeros(nodes, np.int32)
    for node in range(nodes):
        start[node] = start[parent[node]] + length[parent[node]] if parent[node] >= 0 else 0
    first_slot = rng.integers(0, page_size, nodes).astype(np.int32)
    count = -(-(first_slot + length) // page_size)
    pages = rng.permutation(int(count.sum())).astype(np.int32)
    leaf = rng.integers(0, nodes, rows).astype(np.int32)
    q_len = np.minimum(rng.integers(0, max_q + 1, rows), (start + length)[leaf])
    return ForestArrays(
        cu_seqlens_q=np.append(0, np.cumsum(q_len)).astype(np.int32),
        row_leaf=leaf,
        node_parent=parent,
        node_start=start,
        node_end=(start + length).astype(np.int32),
        node_first_slot=first_slot,
        node_page_indptr=np.append(0, np.cumsum(count)).astype(np.int32),
        node_pages=pages,
    )


def star(prompts: int, samples: int, prefix: int, tail: int, q_len: int, page_size: int = 128) -> ForestArrays:
    """Prompts with samples of their own tails each: the shapes of the benchmark."""
    rows = prompts * samples
    parent = np.append(np.full(prompts, -1), np.repeat(np.arange(prompts), samples))
    start = np.append(np.zeros(prompts), np.full(rows, prefix))
    end = np.append(np.full(prompts, prefix), np.full(rows, prefix + tail))
    indptr = np.append(0, np.cumsum(-(-(end - start) // page_size)))
    arrays = (np.arange(rows + 1) * q_len, prompts + np.arange(rows), parent, start, end, start * 0, indptr)
    return ForestArrays(*(x.astype(np.int32) for x in arrays), np.arange(int(indptr[-1]), dtype=np.int32))


def dense(forest: ForestArrays, page_size: int, q: np.ndarray, k: np.ndarray, v: np.ndarray, scale: float):  # type: ignore[no-untyped-def]
    """Every row by itself, walking up from its leaf: shares nothing with the schedule."""
    out, lse = np.full(q.shape, np.nan), np.full(q.shape[:2], np.nan)
    group = q.shape[1] // k.shape[1]
    for row, leaf in enumerate(forest.row_leaf):
        begin, end = forest.cu_seqlens_q[row : row + 2]
        slots: list[int] = []
        node = leaf
        while node >= 0:
            own = [
                int(forest.node_pages[forest.node_page_indptr[node] + slot // page_size]) * page_size + slot % page_size
                for slot in range(
                    forest.node_first_slot[node],
                    forest.node_first_slot[node] + forest.node_end[node] - forest.node_start[node],
                )
            ]
            slots = own + slots
            node = forest.node_parent[node]
        for token in range(begin, end):
            seen = slots[: len(slots) - (end - 1 - token)]
            scores = np.einsum("hd,khd->hk", q[token], k[seen].repeat(group, axis=1)) * scale
            lse[token] = np.logaddexp.reduce(scores, axis=1)
            out[token] = np.einsum("hk,khd->hd", np.exp(scores - lse[token][:, None]), v[seen].repeat(group, axis=1))
    return out, lse


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    rows=st.integers(1, 14),
    nodes=st.integers(1, 9),
    page_size=st.sampled_from([16, 48, 64, 128]),
    longest=st.sampled_from([3, 200, 900]),
    max_q=st.sampled_from([1, 3, 16]),
    heads=st.sampled_from([(1, 1), (2, 7), (3, 3), (2, 16)]),
    sms=st.sampled_from([4, 7, 12]),
    least=st.sampled_from([0, 300, 10**9]),
)
def test_equals_dense_attention(seed, rows, nodes, page_size, longest, max_q, heads, sms, least):  # type: ignore[no-untyped-def]
    rng = np.random.default_rng(seed)
    forest = random_forest(rng, rows, nodes, page_size, longest, max_q)
    num_kv_heads, group = heads
    shape = Shape(num_kv_heads, group, page_size, sms)
    plan = Scheduler(shape).schedule(build_work(forest, SharePolicy(least)))
    q = rng.standard_normal((int(forest.cu_seqlens_q[-1]), num_kv_heads * group, 4))
    k, v = rng.standard_normal((2, len(forest.node_pages) * page_size, num_kv_heads, 4))
    expected = dense(forest, page_size, q, k, v, 0.5)
    got = hopper_emulator.run(plan, shape, forest.node_pages, q, k, v, 0.5)
    for name, mine, theirs in zip(("out", "lse"), got, expected, strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-9, atol=1e-9, err_msg=name)


@pytest.mark.parametrize(
    "prompts, samples, prefix, q_len",
    [(3, 40, 4000, 1), (3, 40, 16000, 1), (1, 256, 8000, 1), (16, 16, 4000, 1), (3, 40, 4000, 9)],
)
def test_work_is_spread_evenly(prompts: int, samples: int, prefix: int, q_len: int) -> None:
    shape = Shape(4, 7, 128)
    plan = Scheduler(shape).schedule(build_work(star(prompts, samples, prefix, 256, q_len), SharePolicy(0)))
    tiles = np.append(0, np.cumsum(plan.segments[:, 5]))
    own, both = (tiles[plan.lists[:, end]] - tiles[plan.lists[:, begin]] for begin, end in ((0, 3), (4, 5)))
    cost = own + SHARED_TILE * both
    assert cost.max() <= 1.25 * cost.mean()


def test_first_tokens_of_this_step_are_waited_for() -> None:
    shape = Shape(1, 4, 128, 2)
    plan = Scheduler(shape).schedule(build_work(star(1, 2, 256, 300, 1), SharePolicy(0)))
    assert sorted((int(s[5]), int(s[6])) for s in plan.segments) == [(2, 2), (3, 2), (3, 2)]


@pytest.mark.parametrize("heads", [1, 2, 3, 4, 5, 8, 16, 28, 32])
def test_nearly_all_sms_take_part(heads: int) -> None:
    shape = Shape(heads, 1, 128)
    assert 125 <= shape.ctas * shape.repeats <= 132 and shape.heads * shape.repeats == heads


def test_grows_within_its_tiles_as_if_planned_anew() -> None:
    shape, policy = Shape(2, 7, 16, 8), SharePolicy(0)
    scheduler = Scheduler(shape)
    for tail in (*range(120, 136), 60):
        work = build_work(star(2, 5, 300, tail, 3, 16), policy)
        kept, anew = scheduler.schedule(work), Scheduler(shape).schedule(work)
        for field in dataclasses.fields(anew):
            np.testing.assert_array_equal(getattr(kept, field.name), getattr(anew, field.name), err_msg=field.name)
