"""The Triton kernels in Triton's interpreter, against dense attention in float64: small forests, every option.

The interpreter takes half a millisecond for a tile operation, so shapes are tiny. It needs TRITON_INTERPRET=1 before
Triton's import; ``tests/conftest.py`` sets that where there is no GPU. On a GPU ``tests/gpu`` runs the same kernels.
"""

from __future__ import annotations

import os

import numpy as np
import pytest
import torch
from attention_oracle import Case, check_against_dense, random_case

from ramet.attention import AttentionPlan, ForestArrays, plan
from ramet.errors import InvalidArgument

pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="needs Triton's interpreter")

SCALE = 0.35
HALVES = (torch.bfloat16, torch.float16)


def ready(case: Case, *, gate: str = "open", **options) -> AttentionPlan:
    return plan(case.forest(), **case.shape(), backend="triton", gate=gate, dtype=case.dtype, **options)


def check(case: Case, **options) -> float:
    """Output as exact as dense attention, lse as exact as float32, nothing unwritten."""
    q = case.queries()
    out = torch.full_like(q, float("nan"))
    _, lse = ready(case, **options).run(q, *case.pools(), sm_scale=SCALE, out=out, return_lse=True)
    assert (lse - case.dense(q, SCALE)[1]).abs().max() < 2e-5
    return check_against_dense(case, q, out, SCALE)


def tree(case: Case, q_lens: tuple[int, ...] = (1,), rows: int = 6) -> Case:
    """Three levels of shared nodes that begin inside pages, and tails of different lengths."""
    root = case.node(-1, 37, first_slot=case.page_size // 2)
    inner = [case.node(root, tokens, first_slot=min(1, case.page_size - 1)) for tokens in (5, 18)]
    deep = case.node(inner[1], 9, first_slot=case.page_size - 1)
    for i in range(rows):
        parent = (root, inner[0], inner[1], deep)[i * 4 // rows]
        q_len = q_lens[i % len(q_lens)]
        case.row(case.node(parent, max(q_len, 1) + 3 * i), q_len)
    return case


def shuffled(case: Case) -> Case:
    """The same rows in another order than depth-first."""
    case.rows = [case.rows[i] for i in case.numpy.permutation(len(case.rows))]
    return case


@pytest.mark.parametrize("heads", [(28, 4), (9, 3), (3, 3), (16, 1)], ids=str)
def test_head_layouts_in_any_order_of_rows(heads: tuple[int, int]) -> None:
    check(shuffled(tree(Case(heads, head_dim=16), rows=4)))


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("q_lens", [(16, 1), (0, 1, 0, 9, 4)], ids=str)
def test_ragged_query_lengths_with_zeros(q_lens: tuple[int, ...], deterministic: bool) -> None:
    check(shuffled(tree(Case((4, 2), head_dim=16), q_lens, rows=5)), deterministic=deterministic)


@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
def test_every_head_size(head_dim: int) -> None:
    check(tree(Case((4, 2), head_dim=head_dim, dtype=torch.bfloat16), rows=4))


@pytest.mark.parametrize("gate", ["auto", "open", "closed"])
@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_every_dtype_and_gate(dtype: torch.dtype, gate: str) -> None:
    check(tree(Case((6, 2), head_dim=32, dtype=dtype), (1, 3)), gate=gate)


@pytest.mark.parametrize("page_size", [1, 3, 16, 32, 64, 128])
@pytest.mark.parametrize("first_slot", [0, 1])
def test_pages_smaller_and_larger_than_a_block(page_size: int, first_slot: int) -> None:
    case = Case((4, 2), head_dim=16, page_size=page_size)
    root = case.node(-1, 67, first_slot=first_slot % page_size)
    for tokens in (1, 33):
        case.row(case.node(root, tokens))
    check(case)


@pytest.mark.parametrize("seed", range(3))
def test_random_forests(seed: int) -> None:
    check(random_case(seed, head_dim=16, max_rows=6, q_lens=(0, 1, 4)))


@pytest.mark.parametrize("tokens", [31, 32, 33, 64])
def test_lengths_at_the_edges_of_blocks_and_splits(tokens: int) -> None:
    case = Case((4, 1), head_dim=16, page_size=32)
    root = case.node(-1, tokens)
    for extra in (1, 2):
        case.row(case.node(root, extra))
    check(case)


def long_node(tokens: int, rows: int = 2, **options) -> Case:
    case = Case((4, 1), head_dim=16, page_size=64, num_pages=64, **options)
    root = case.node(-1, tokens)
    for tail in range(1, rows + 1):
        case.row(case.node(root, tail))
    return case


@pytest.mark.parametrize("tokens", [511, 512, 513])
def test_a_long_node_is_split_and_merged(tokens: int) -> None:
    case = long_node(tokens)
    work = ready(case)
    assert int(work._executor.buffers.host["parts"][1]) > 2  # type: ignore[attr-defined]
    check(case)


def test_chunked_prefill_beside_decode_rows() -> None:
    case = Case((4, 2), head_dim=16, page_size=16, num_pages=128)
    root = case.node(-1, 40)
    for _ in range(2):
        case.row(case.node(root, 6))
    case.row(case.node(-1, 40), 40)  # a whole prompt
    case.row(case.node(root, 20), 11)  # a later chunk below the shared node
    case.row(case.node(case.node(-1, 30), 10), 25)  # a chunk whose queries begin above its leaf
    check(case)


def test_queries_inside_a_node_that_several_rows_share_see_no_later_position() -> None:
    case = Case((4, 2), head_dim=16)
    root = case.node(-1, 20)
    leaf = case.node(root, 6)
    for q_len in (1, 9, 26):
        case.row(leaf, q_len)
    check(case)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("window", [3, 40])
def test_windows_with_lengths_on_both_sides(window: int, deterministic: bool) -> None:
    case = tree(Case((4, 2), head_dim=16), (1, 5))
    q = case.queries()
    arguments = {"window_left": window, "dtype": case.dtype, "gate": "open", "deterministic": deterministic}
    expected = plan(case.forest(), **case.shape(), backend="reference", **arguments).run(
        q, *case.pools(0.0), sm_scale=SCALE, return_lse=True
    )
    got = plan(case.forest(), **case.shape(), backend="triton", **arguments).run(
        q, *case.pools(), sm_scale=SCALE, return_lse=True
    )
    for mine, theirs in zip(got, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=2e-5, atol=2e-5)


def test_pages_left_of_the_window_may_be_evicted() -> None:
    case = Case((4, 2), head_dim=16, page_size=4)
    for tokens in (40, 21):
        case.row(case.node(-1, tokens))
    forest = case.forest()
    pages = forest.node_pages.copy()
    pages[:7] = -1  # 28 of 40 positions
    pages[10:12] = -1  # 8 of 21
    evicted = ForestArrays(**{**vars(forest), "node_pages": pages})
    q = case.queries()
    arguments = {"window_left": 10, "dtype": case.dtype}
    outs = [
        plan(arrays, **case.shape(), backend="triton", **arguments).run(q, *case.pools(), sm_scale=SCALE)
        for arrays in (forest, evicted)
    ]
    assert torch.equal(*outs)


@pytest.mark.parametrize("options", [{"softcap": 2.0}, {"has_sinks": True}, {"causal": False}], ids=str)
@pytest.mark.parametrize("tokens", [20, 300])  # one part, and several to merge
def test_options_against_the_reference(options: dict[str, object], tokens: int) -> None:
    case = long_node(tokens)
    case.row(case.node(-1, 9), 3)
    q = case.queries()
    sinks = torch.linspace(-3, 6, case.heads[0]) if "has_sinks" in options else None
    outs = [
        plan(case.forest(), **case.shape(), backend=backend, dtype=case.dtype, gate="open", **options).run(
            q, *case.pools(), sm_scale=SCALE, sinks=sinks, return_lse=True
        )
        for backend in ("triton", "reference")
    ]
    for mine, theirs in zip(*outs, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=2e-5, atol=2e-5)


def test_the_mass_on_the_last_valid_key_while_the_pages_claim_more() -> None:
    case = Case((2, 1), head_dim=16, page_size=32)
    node = case.node(-1, 41, extra_pages=2)
    case.nodes[node].k[-1] *= 20
    case.row(node)
    check(case)


@pytest.mark.parametrize("signs", [(64.0, -64.0), (64.0, 64.0)])
def test_extreme_scores(signs: tuple[float, float]) -> None:
    case = Case((2, 1), head_dim=128, dtype=torch.bfloat16)
    root = case.node(-1, 9)
    case.nodes[root].k.fill_(signs[1])
    for _ in range(2):
        leaf = case.node(root, 3)
        case.nodes[leaf].k.fill_(signs[1])
        case.row(leaf)
    q = torch.full((2, 2, 128), signs[0], dtype=torch.bfloat16)
    out, lse = ready(case).run(q, *case.pools(), sm_scale=1.0, return_lse=True)
    check_against_dense(case, q, out, 1.0)
    assert lse.isfinite().all()


def test_lengths_on_the_device_are_clamped_to_the_plans() -> None:
    case = Case((4, 2), head_dim=16)
    root = case.node(-1, 20)
    for tail in (9, 12, 5):
        case.row(case.node(root, tail), 2)
    q, pools = case.queries(), case.pools()
    lengths = torch.tensor([25, 999, 0], dtype=torch.int32)
    out, lse = ready(case, has_seq_lens=True).run(
        q, *pools, sm_scale=SCALE, return_lse=True, seq_lens=lengths, out=torch.full_like(q, float("nan"))
    )
    case.nodes[1].k, case.nodes[1].v = case.nodes[1].k[:5], case.nodes[1].v[:5]
    truth, truth_lse = case.dense(q, SCALE)
    torch.testing.assert_close(out[:4].double(), truth[:4], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(lse[:4].double(), truth_lse[:4], rtol=1e-5, atol=1e-5)
    assert (out[4:] == 0).all()
    assert (lse[4:] == -torch.inf).all()


def test_page_lists_on_the_device_take_the_place_of_the_plans() -> None:
    case = Case((4, 2), head_dim=16)
    for tokens in (9, 14):
        case.row(case.node(-1, tokens))
    forest = case.forest()
    q, pools = case.queries(), case.pools()
    expected = ready(case).run(q, *pools, sm_scale=SCALE)
    places = ForestArrays(**{**vars(forest), "node_pages": np.arange(len(forest.node_pages), dtype=np.int32)})
    work = plan(places, **case.shape(), backend="triton", dtype=case.dtype, has_page_lists=True)
    pages = torch.from_numpy(forest.node_pages)
    assert torch.equal(work.run(q, *pools, sm_scale=SCALE, page_lists=pages), expected)
    for bad in (pages[:-1], pages.long(), None):
        with pytest.raises(InvalidArgument, match="page_lists"):
            work.run(q, *pools, sm_scale=SCALE, page_lists=bad)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_deterministic_bits_do_not_depend_on_neighbours_or_sharing(dtype: torch.dtype) -> None:
    def bits(others: int, gate: str, max_q: int) -> tuple[torch.Tensor, torch.Tensor]:
        case = Case((4, 1), head_dim=16, page_size=64, num_pages=128, dtype=dtype, seed=3)
        top = case.node(-1, 300)
        inner = case.node(top, 260, first_slot=5)
        case.row(case.node(inner, 90))
        q = case.queries()
        for _ in range(others):
            case.row(case.node(inner, 3), max_q)
        if others:
            case.row(case.node(top, 30))
        q = torch.cat([q, torch.ones(sum(n for _, n in case.rows) - 1, 4, 16, dtype=dtype)])
        work = ready(case, gate=gate, deterministic=True)
        out, lse = work.run(q, *case.pools(), sm_scale=SCALE, return_lse=True)
        return out[0], lse[0]

    expected = bits(0, "closed", 1)
    for others, gate, max_q in ((3, "open", 1), (3, "closed", 3), (9, "open", 2)):
        got = bits(others, gate, max_q)
        assert torch.equal(got[0], expected[0])
        assert torch.equal(got[1], expected[1])


@pytest.mark.parametrize("strides", ["heads first", "one tensor", "sliced"])
def test_pools_and_queries_of_any_strides(strides: str) -> None:
    case = tree(Case((4, 2), head_dim=16), rows=4)
    q, (k, v) = case.queries(), case.pools()
    expected = ready(case).run(q, k, v, sm_scale=SCALE)
    if strides == "heads first":
        k, v = (pool.transpose(1, 2).contiguous().transpose(1, 2) for pool in (k, v))
    elif strides == "one tensor":
        k, v = torch.stack([k, v], 1).unbind(1)
    else:
        q = torch.cat([q, q], dim=1)[:, : case.heads[0]]
    assert torch.equal(ready(case).run(q, k, v, sm_scale=SCALE), expected)


def test_the_scale_may_be_a_tensor_and_out_may_be_q() -> None:
    case = tree(Case((4, 2), head_dim=16), rows=4)
    q, pools = case.queries(), case.pools()
    expected = ready(case).run(q, *pools, sm_scale=SCALE)
    assert torch.equal(ready(case).run(q, *pools, sm_scale=torch.tensor([SCALE])), expected)
    assert ready(case).run(q, *pools, sm_scale=SCALE, out=q) is q
    assert torch.equal(q, expected)
