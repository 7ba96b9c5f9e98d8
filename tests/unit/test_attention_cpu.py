"""The backends against dense attention in float64: forests of every kind, garbage beside valid data, extreme values."""

from __future__ import annotations

import pytest
import torch
from attention_oracle import Case, check_against_dense, random_case
from hypothesis import given, settings
from hypothesis import strategies as st

from ramet.attention import forest_attention, plan
from ramet.errors import InvalidArgument

SCALE = 0.35
BACKENDS = ("cpu", "reference")
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
HEADS = ((28, 4), (9, 3), (32, 8), (20, 20))


def attend(case: Case, q: torch.Tensor, *, backend: str = "cpu", gate: str = "open", fill: float = float("nan")):
    work = plan(case.forest(), **case.shape(), backend=backend, gate=gate)
    return work.run(q, *case.pools(fill), sm_scale=SCALE)


def check(case: Case, backend: str = "cpu", gate: str = "open") -> None:
    q = case.queries()
    check_against_dense(case, q, attend(case, q, backend=backend, gate=gate), SCALE)


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


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_nested_shared_nodes_for_every_head_layout(heads: tuple[int, int], backend: str) -> None:
    check(tree(Case(heads, head_dim=16)), backend)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("q_lens", [(4,), (9,), (1, 4, 9), (0, 1, 0, 9, 4), (0, 0, 3)], ids=str)
def test_ragged_query_lengths_with_zeros(q_lens: tuple[int, ...], backend: str) -> None:
    check(tree(Case(), q_lens), backend)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES[:3], ids=str)
def test_every_dtype_is_as_exact_as_dense_attention_in_it(dtype: torch.dtype, backend: str) -> None:
    check(tree(Case(dtype=dtype, heads=(6, 2), head_dim=32), (1, 3)), backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_float64_is_computed_in_float64(backend: str) -> None:
    case = tree(Case(dtype=torch.float64, heads=(6, 2), head_dim=32), (1, 3))
    q = case.queries()
    assert (attend(case, q, backend=backend) - case.dense(q, SCALE)[0]).abs().max() < 1e-14


@pytest.mark.parametrize("gate", ["auto", "open", "closed"])
@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
def test_a_large_shared_node_with_open_and_closed_gate(dtype: torch.dtype, gate: str) -> None:
    case = Case((9, 3), head_dim=64, page_size=16, dtype=dtype)
    root = case.node(-1, 520)
    for i in range(7):
        case.row(case.node(root, 1 + 5 * i))
    check(case, gate=gate)
    counters = plan(case.forest(), **case.shape(), gate=gate).counters
    assert (counters.shared_nodes, counters.declined_nodes) == {"auto": (1, 0), "open": (1, 0), "closed": (0, 1)}[gate]


@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
def test_prefill_in_one_chunk_and_in_several_beside_decode_rows(dtype: torch.dtype) -> None:
    case = Case((4, 2), dtype=dtype, page_size=16, num_pages=128)
    root = case.node(-1, 90)
    for _ in range(3):
        case.row(case.node(root, 6))
    case.row(case.node(-1, 300), 300)  # a whole prompt: blocks of 128, 128 and 44 tokens
    case.row(case.node(root, 170), 141)  # a later chunk below the shared node
    case.row(case.node(case.node(-1, 130), 20), 140)  # a chunk whose queries begin above its leaf
    check(case)
    check(case, gate="closed")


def test_queries_inside_a_node_that_several_rows_share_see_no_later_position() -> None:
    case = Case()
    root = case.node(-1, 20)
    leaf = case.node(root, 6)
    for q_len in (1, 3, 6, 9, 26):
        case.row(leaf, q_len)
    case.row(root, 5)
    for backend in BACKENDS:
        for gate in ("open", "closed"):
            check(case, backend, gate)


@pytest.mark.parametrize("page_size", [1, 3, 16, 64])
def test_any_page_size(page_size: int) -> None:
    check(tree(Case(page_size=page_size), (1, 2)))


@pytest.mark.parametrize("tokens", [1, 2, 15, 16, 17, 31, 32, 33])
def test_tails_at_page_and_block_boundaries(tokens: int) -> None:
    case = Case(page_size=16)
    root = case.node(-1, tokens)
    for extra in (0, 1, 16):
        case.row(case.node(root, tokens + extra))
    check(case)


@pytest.mark.parametrize("tokens", [191, 192, 193, 383, 384, 385, 511, 512, 513])
def test_lengths_at_the_blocks_of_the_products(tokens: int) -> None:
    case = Case((2, 1), page_size=64)
    root = case.node(-1, tokens)
    for _ in range(2):
        case.row(case.node(root, 1))
    case.row(case.node(-1, tokens), 2)
    check(case)


def test_pages_beyond_two_to_the_31_elements() -> None:
    """Memory of a pool is mapped when it is touched, so only the pages in use cost any."""
    case = Case(dtype=torch.bfloat16, page_size=256, heads=(4, 4), head_dim=64, num_pages=2**31 // (256 * 4 * 64) + 3)
    case.free = list(range(case.num_pages))
    root = case.node(-1, 40)
    for _ in range(2):
        case.row(case.node(root, 3))
    assert min(page for node in case.nodes for page in node.pages) * 256 * 4 * 64 >= 2**31
    q = case.queries()
    try:
        k_pool, v_pool = (torch.empty(case.num_pages, 256, 4, 64, dtype=torch.bfloat16) for _ in range(2))
    except (RuntimeError, MemoryError):
        pytest.skip("the system does not reserve 8 GiB of untouched memory")
    for node in case.nodes:
        k_pool[node.pages[0]], v_pool[node.pages[0]] = float("nan"), float("nan")
        k_pool[node.pages[0], : len(node.k)], v_pool[node.pages[0], : len(node.v)] = node.k, node.v
    for backend in BACKENDS:
        work = plan(case.forest(), **case.shape(), backend=backend, gate="open")
        check_against_dense(case, q, work.run(q, k_pool, v_pool, sm_scale=SCALE), SCALE)


def test_many_groups_of_different_sizes_and_groups_of_one() -> None:
    case = Case(num_pages=2048)
    for group in range(40):
        root = case.node(-1, 10 + 7 * (group % 5))
        for _ in range(1 + group % 4):
            case.row(case.node(root, 1 + group % 6))
    for gate in ("auto", "open", "closed"):
        check(case, gate=gate)


def test_sibling_nodes_of_different_length_with_nodes_below_them() -> None:
    case = Case()
    root = case.node(-1, 11)
    for tokens in (8, 5, 9, 9, 3):
        inner = case.node(root, tokens)
        for _ in range(2):
            below = case.node(inner, 4)
            for _ in range(2):
                case.row(case.node(below, 2))
    check(case)


def test_row_order_changes_nothing_but_the_order() -> None:
    """Depth-first, reversed, and shuffled rows give every row the same bits."""
    case = tree(Case(), (1, 4), rows=8)
    q, rows = case.queries(), case.rows
    begin = [sum(q_len for _, q_len in rows[:i]) for i in range(len(rows))]
    expected = attend(case, q)
    for order in ([7, 6, 5, 4, 3, 2, 1, 0], [3, 0, 7, 4, 1, 6, 2, 5]):
        tokens = torch.cat([torch.arange(begin[i], begin[i] + rows[i][1]) for i in order])
        case.rows = [rows[i] for i in order]
        assert torch.equal(attend(case, q[tokens]), expected[tokens])


@pytest.mark.parametrize("backend", BACKENDS)
def test_garbage_beside_valid_positions_changes_no_bit(backend: str) -> None:
    """Unused pages, page tails, and pages beyond a node's last position: NaN, infinity and numbers are all the same."""
    case = Case()
    root = case.node(-1, 9, first_slot=2, extra_pages=3)
    for i in range(3):
        case.row(case.node(root, 1 + i, first_slot=i, extra_pages=i))
    q = case.queries()
    expected = attend(case, q, backend=backend)
    for fill in (0.0, 1e30, float("inf"), float("-inf")):
        assert torch.equal(attend(case, q, backend=backend, fill=fill), expected)
    check(case, backend)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
def test_extreme_logits(dtype: torch.dtype, backend: str) -> None:
    case = tree(Case(head_dim=64, dtype=dtype))
    for node in case.nodes:
        node.k.fill_(-64.0)
    q = torch.full((len(case.rows), 4, 64), 64.0, dtype=dtype)
    for chosen in (slice(0, 0), slice(5, None)):
        case.nodes[0].k[chosen].fill_(64.0)  # none, then some: all mass is on them
        work = plan(case.forest(), **case.shape(), backend=backend, gate="open")
        check_against_dense(case, q, work.run(q, *case.pools(), sm_scale=0.125), 0.125)  # scores of -32,768 and 32,768


@pytest.mark.parametrize("backend", BACKENDS)
def test_mass_on_the_last_valid_key_while_the_table_has_more_pages(backend: str) -> None:
    case = Case()
    root = case.node(-1, 8)
    leaf = case.node(root, 5, extra_pages=4)
    case.nodes[leaf].k[:4] = -30.0
    case.nodes[leaf].k[4] = 30.0
    case.row(leaf)
    q = torch.ones(1, 4, 8)
    out = attend(case, q, backend=backend)
    assert torch.allclose(out[0], case.nodes[leaf].v[4].float().repeat_interleave(2, 0), atol=1e-6)


def test_context_of_one_position_is_its_value() -> None:
    case = Case()
    leaf = case.node(-1, 1)
    case.row(leaf)
    assert torch.equal(attend(case, case.queries())[0], case.nodes[leaf].v[0].float().repeat_interleave(2, 0))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
def test_log_sum_exp_is_natural_and_float32(dtype: torch.dtype, backend: str) -> None:
    case = tree(Case(dtype=dtype), (1, 4))
    q = case.queries()
    work = plan(case.forest(), **case.shape(), backend=backend, gate="open")
    out, lse = work.run(q, *case.pools(), sm_scale=SCALE, return_lse=True)
    assert torch.equal(out, work.run(q, *case.pools(), sm_scale=SCALE))
    assert lse.dtype == torch.float32
    assert lse.shape == q.shape[:2]
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2  # scores are rounded to bf16
    assert (lse - case.dense(q, SCALE)[1]).abs().max() < tolerance


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
def test_guard_values_around_outputs_stay(dtype: torch.dtype, backend: str) -> None:
    case = tree(Case(dtype=dtype), (1, 2))
    q = case.queries()
    room = torch.full((len(q) + 2, *q.shape[1:]), float("nan"), dtype=dtype)
    work = plan(case.forest(), **case.shape(), backend=backend, gate="open")
    k_pool, v_pool = case.pools(fill=7.0)
    before = k_pool.clone(), v_pool.clone(), q.clone()
    out = work.run(q, k_pool, v_pool, sm_scale=SCALE, out=room[1:-1])
    assert out.data_ptr() == room[1].data_ptr()
    assert room[0].isnan().all()
    assert room[-1].isnan().all()
    assert all(torch.equal(a, b) for a, b in zip(before, (k_pool, v_pool, q), strict=True))
    assert torch.equal(work.run(q, k_pool, v_pool, sm_scale=SCALE, out=q), out)  # out may be q itself


def test_strided_queries_are_read_where_they_lie() -> None:
    case = tree(Case())
    q = case.queries()
    fused = torch.randn(len(q), 4 * 8 + 50)
    fused[:, 3:35] = q.flatten(1)
    assert torch.equal(attend(case, fused[:, 3:35].view(-1, 4, 8)), attend(case, q))


def test_a_plan_serves_many_layers_and_dtypes() -> None:
    case = tree(Case((9, 3)), (1, 5))
    work = plan(case.forest(), **case.shape(), gate="open")
    for layer in range(4):
        for dtype in (torch.float32, torch.bfloat16):
            case.dtype, case.generator = dtype, torch.Generator().manual_seed(layer)
            for node in case.nodes:
                node.k, node.v = case.normal(*node.k.shape), case.normal(*node.v.shape)
            q = case.queries()
            check_against_dense(case, q, work.run(q, *case.pools(), sm_scale=SCALE), SCALE)


def test_a_plan_made_in_inference_mode_runs_outside_and_the_other_way_round() -> None:
    case = tree(Case())
    q, pools = case.queries(), case.pools()
    expected = attend(case, q)
    with torch.inference_mode():
        work = plan(case.forest(), **case.shape(), gate="open")
        work.run(q, *pools, sm_scale=SCALE)
    assert torch.equal(work.run(q.requires_grad_(), *pools, sm_scale=SCALE), expected)
    with torch.inference_mode():
        assert torch.equal(work.run(q, *pools, sm_scale=SCALE), expected)


def test_bf16_without_cpu_instructions_is_computed_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    case = tree(Case(dtype=torch.bfloat16, head_dim=32), (1, 3))
    q = case.queries()
    monkeypatch.setattr("ramet.attention.backends.cpu_tape.compute_dtype", lambda dtype: torch.float32)
    assert check_against_dense(case, q, attend(case, q), SCALE) < 0.7  # only the result is rounded


def small_passes(patch: pytest.MonkeyPatch, max_scores: int = 600, pass_ns: float = 0.0) -> None:
    """Make the limits so small that little forests take many passes and blocks, and no siblings go together."""
    for name, value in (("MAX_PASS_SCORES", max_scores), ("PASS_NS", pass_ns), ("MIN_SHARED_ROWS", 1)):
        patch.setattr(f"ramet.attention.backends.cpu_blocks.{name}", value)
    patch.setattr("ramet.attention.backends.cpu_layout.ITEM_NS", pass_ns)


def test_rows_of_a_large_plan_are_cut_into_passes_without_a_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small limits force many passes, blocks and items; every row keeps its bits."""
    case = tree(Case(head_dim=64), (1, 1, 1, 20), rows=16)
    q = case.queries()
    expected = attend(case, q)
    small_passes(monkeypatch)
    assert torch.equal(attend(case, q), expected)


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        ("q", lambda t: t[1:], "q has shape"),
        ("q", lambda t: t[:, :2], "q has shape"),
        ("q", lambda t: t.bfloat16(), "k_pool is torch.float32 and q is torch.bfloat16"),
        ("k_pool", lambda t: t[:2], "k_pool has 2 pages, but the plan reads page"),
        ("k_pool", lambda t: t.transpose(1, 2), "k_pool has shape"),
        ("k_pool", lambda t: t.bfloat16(), "k_pool is torch.bfloat16"),
        ("k_pool", lambda t: t.repeat(2, 1, 1, 1)[::2], "k_pool has strides"),
        ("v_pool", lambda t: t[..., :4], "v_pool has shape"),
        ("v_pool", lambda t: t.half(), "v_pool is torch.float16"),
        ("v_pool", lambda t: t[0], "v_pool has shape"),
        ("out", lambda t: t[1:], "out has shape"),
        ("out", lambda t: t.double(), "out is torch.float64"),
        ("out", lambda t: t.repeat(1, 1, 2)[..., ::2], "out has strides"),
        ("k_pool", lambda t: t.to("meta"), "k_pool is on meta"),
    ],
)
def test_tensors_that_do_not_fit_the_plan_are_refused_by_name(name, change, words) -> None:
    case = tree(Case())
    k_pool, v_pool = case.pools(0.0)
    tensors = {"q": case.queries(), "k_pool": k_pool, "v_pool": v_pool, "out": torch.empty(len(case.rows), 4, 8)}
    tensors[name] = change(tensors[name])
    work = plan(case.forest(), **case.shape())
    with pytest.raises(InvalidArgument, match=words):
        work.run(**tensors, sm_scale=SCALE)


POISONS = {
    "q": lambda t: t.index_fill(0, torch.tensor([0]), 1.0),
    "k_pool": lambda t: t + torch.randn(t.shape, generator=torch.Generator().manual_seed(9)),
    "v_pool": lambda t: t + 1.0,
    "sm_scale": lambda s: s * 1.5,
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", list(POISONS))
def test_every_argument_of_run_matters(name: str, backend: str) -> None:
    case = tree(Case(), (1, 3))
    k_pool, v_pool = case.pools(0.0)
    arguments = {"q": case.queries(), "k_pool": k_pool, "v_pool": v_pool, "sm_scale": SCALE}
    work = plan(case.forest(), **case.shape(), backend=backend, gate="open")
    expected = work.run(**arguments)
    assert not torch.equal(work.run(**{**arguments, name: POISONS[name](arguments[name])}), expected)


FOREST_POISONS = {
    "row_leaf": lambda a: a[::-1].copy(),
    "node_first_slot": lambda a: (a + 1) % 2,
    "node_pages": lambda a: a[::-1].copy(),
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", list(FOREST_POISONS))
def test_every_array_of_the_forest_matters(name: str, backend: str) -> None:
    """The others (offsets, parents, positions) bind each other: changed alone they are refused (planner tests)."""
    case = Case()
    root = case.node(-1, 6)
    for tokens in (3, 2):
        case.row(case.node(root, tokens))
    pools, q = case.pools(0.5), case.queries()
    forest = case.forest()
    expected = forest_attention(q, *pools, forest=forest, backend=backend, gate="open")
    changed = forest.__class__(**{**vars(forest), name: FOREST_POISONS[name](getattr(forest, name))})
    assert not torch.equal(forest_attention(q, *pools, forest=changed, backend=backend, gate="open"), expected)


@settings(max_examples=80, deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 2**31),
    heads=st.sampled_from([(4, 2), (3, 1), (2, 2), (6, 3)]),
    page_size=st.sampled_from([1, 2, 4, 7, 16]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    gate=st.sampled_from(["auto", "open", "closed"]),
    q_lens=st.sampled_from([(1,), (0, 1), (1, 4, 9), (0, 1, 2, 40)]),
    limits=st.sampled_from([None, (600, 0.0), (3000, 0.0), (1 << 22, 3000.0)]),
)
def test_random_forests(seed, heads, page_size, dtype, gate, q_lens, limits) -> None:
    case = random_case(seed, heads=heads, page_size=page_size, dtype=dtype, q_lens=q_lens)
    with pytest.MonkeyPatch.context() as patch:
        if limits:
            small_passes(patch, *limits)
        check(case, gate=gate)
