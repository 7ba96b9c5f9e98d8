"""The Triton backend on a GPU: against dense attention in float64, in captured graphs, without any wait for the device.

Run by ``make test-gpu``. The same kernels run in Triton's interpreter in ``tests/kernels``.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from attention_oracle import Case, check_against_dense, random_case, rms

from ramet.attention import (
    Capacity,
    ForestArrays,
    Problem,
    decode_attention,
    plan,
    plan_buffers,
    rope_append_kv,
    workspace_size,
)
from ramet.errors import CapacityExceeded, InvalidArgument

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

SCALE = 0.35
BF16 = torch.bfloat16


@pytest.fixture
def no_sync() -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("error")
    yield
    torch.cuda.set_sync_debug_mode("default")


def attend(case: Case, q: torch.Tensor, gate: str = "open", **options) -> tuple[torch.Tensor, torch.Tensor]:
    work = plan(case.forest(), **case.shape(), backend="triton", gate=gate, dtype=case.dtype, device="cuda", **options)
    k, v = (pool.cuda() for pool in case.pools())
    q = q.cuda()
    out, lse = work.run(q, k, v, sm_scale=SCALE, out=torch.full_like(q, float("nan")), return_lse=True)
    return out.cpu(), lse.cpu()


def check(case: Case, **options) -> None:
    q = case.queries()
    out, lse = attend(case, q, **options)
    truth, truth_lse = case.dense(q, SCALE)
    assert (lse - truth_lse).abs().max() < 1e-4
    honest = max(rms(case.dense(q, SCALE, case.dtype)[0] - truth), rms(truth) * torch.finfo(case.dtype).eps / 2)
    assert rms(out - truth) <= 2 * honest


def tree(case: Case, q_lens: tuple[int, ...] = (1,), rows: int = 8) -> Case:
    root = case.node(-1, 137, first_slot=case.page_size // 2)
    inner = [case.node(root, tokens, first_slot=1) for tokens in (25, 88)]
    deep = case.node(inner[1], 70, first_slot=case.page_size - 1)
    for i in range(rows):
        parent = (root, inner[0], inner[1], deep)[i * 4 // rows]
        q_len = q_lens[i % len(q_lens)]
        case.row(case.node(parent, max(q_len, 1) + 13 * i), q_len)
    case.rows = [case.rows[i] for i in case.numpy.permutation(rows)]
    return case


@pytest.mark.parametrize("q_lens", [(1,), (4, 9, 0, 1)], ids=str)
@pytest.mark.parametrize("heads", [(28, 4), (9, 3), (32, 8), (20, 20)], ids=str)
def test_head_layouts(heads: tuple[int, int], q_lens: tuple[int, ...]) -> None:
    check(tree(Case(heads, 64, page_size=16, dtype=BF16), q_lens))


@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
@pytest.mark.parametrize("dtype", [BF16, torch.float16], ids=str)
def test_head_sizes(head_dim: int, dtype: torch.dtype) -> None:
    check(tree(Case((8, 2), head_dim, page_size=64, dtype=dtype), (1, 2)))


def test_float32() -> None:
    check(tree(Case((8, 2), 128, page_size=32, dtype=torch.float32)))


@pytest.mark.parametrize("page_size", [16, 32, 64, 128])
@pytest.mark.parametrize("gate", ["open", "closed"])
def test_page_sizes(page_size: int, gate: str) -> None:
    check(tree(Case((8, 2), 64, page_size=page_size, dtype=BF16)), gate=gate)


@pytest.mark.parametrize("seed", range(4))
def test_random_forests_deterministic_and_not(seed: int) -> None:
    for deterministic in (False, True):
        check(random_case(seed, head_dim=64, dtype=BF16, q_lens=(0, 1, 4)), deterministic=deterministic)


@pytest.mark.parametrize(
    "options", [{"softcap": 2.0}, {"window_left": 63}, {"window_left": 3, "softcap": 5.0}, {"causal": False}], ids=str
)
def test_options_against_the_reference(options: dict[str, object]) -> None:
    case = tree(Case((8, 2), 64, page_size=16, dtype=BF16), (1, 5))
    q = case.queries()
    out, lse = attend(case, q, **options)
    work = plan(case.forest(), **case.shape(), backend="reference", dtype=torch.float32, **options)
    pools = [pool.nan_to_num().float() for pool in case.pools()]
    expected, expected_lse = work.run(q.float(), *pools, sm_scale=SCALE, return_lse=True)
    assert (lse - expected_lse).abs().max() < 1e-4
    assert rms(out - expected.double()) < 0.006 * rms(expected)


def test_deterministic_bits_do_not_depend_on_neighbours_or_sharing() -> None:
    def bits(others: int, gate: str) -> torch.Tensor:
        case = Case((28, 4), 128, page_size=64, num_pages=2048, dtype=BF16, seed=3)
        top = case.node(-1, 1300)
        inner = case.node(top, 960, first_slot=5)
        case.row(case.node(inner, 90))
        q = case.queries()
        for i in range(others):
            case.row(case.node(inner if i % 3 else top, 3 + i), 1 + i % 4)
        q = torch.cat([q, torch.ones(sum(n for _, n in case.rows) - 1, 28, 128, dtype=BF16)])
        out, lse = attend(case, q, gate=gate, deterministic=True)
        return torch.cat([out[0].float().flatten(), lse[0]])

    expected = bits(0, "closed")
    for others, gate in ((63, "open"), (63, "closed"), (5, "open")):
        assert torch.equal(bits(others, gate), expected)


PROBLEM = Problem(8, 2, 64, 16, device="cuda", dtype=BF16, max_q_len=4)


def forests() -> list[Case]:
    """Forests that share one pool: other lengths, groups, pages, row orders, and no sharing at all."""
    cases = [tree(Case((8, 2), 64, page_size=16, dtype=BF16, seed=i), (1 + i % 2, 4)) for i in range(4)]
    alone = Case((8, 2), 64, page_size=16, dtype=BF16, seed=9)
    for i in range(6):
        alone.row(alone.node(-1, 40 + 31 * i))
    return [*cases, alone, random_case(7, heads=(8, 2), head_dim=64, page_size=16, dtype=BF16, q_lens=(0, 1, 4))]


def test_one_graph_serves_every_forest_and_addresses_stay() -> None:
    capacity = Capacity(tokens=64, rows=16, pages=1024)
    buffers = plan_buffers(PROBLEM, capacity, device="cuda")
    places = [tensor.data_ptr() for tensor in [*buffers.plan.values(), *buffers.scratch.values()]]
    k, v = (torch.zeros(512, 16, 2, 64, dtype=BF16, device="cuda") for _ in range(2))
    q, out = torch.zeros(64, 8, 64, dtype=BF16, device="cuda"), torch.zeros(64, 8, 64, dtype=BF16, device="cuda")
    shape = {"num_qo_heads": 8, "num_kv_heads": 2, "head_dim": 64, "page_size": 16}

    def make(case: Case):
        return plan(case.forest(), **shape, dtype=BF16, device="cuda", buffers=buffers, gate="open")

    first = make(forests()[0])
    first.run(q, k, v, sm_scale=SCALE, out=out)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        first.run(q, k, v, sm_scale=SCALE, out=out)
    for case in forests():
        make(case)
        for pool, values in zip((k, v), case.pools(), strict=True):
            pool.fill_(float("nan"))
            pool[: len(values)] = values.cuda()
        mine = case.queries()
        q.fill_(float("nan"))
        q[: len(mine)] = mine.cuda()
        out.fill_(7.0)
        graph.replay()
        check_against_dense(case, mine, out[: len(mine)].cpu(), SCALE)
        assert (out[len(mine) :] == 7.0).all()
    assert places == [tensor.data_ptr() for tensor in [*buffers.plan.values(), *buffers.scratch.values()]]


def test_a_plan_beyond_the_capacity_is_refused_and_leaves_the_buffers() -> None:
    buffers = plan_buffers(PROBLEM, Capacity(tokens=64, rows=4, pages=1024), device="cuda")
    case = forests()[0]
    before = {name: array.copy() for name, array in buffers.host.items()}
    with pytest.raises(CapacityExceeded, match="rows"):
        plan(case.forest(), **case.shape(), dtype=BF16, device="cuda", buffers=buffers)
    assert all((buffers.host[name] == array).all() for name, array in before.items())


def test_the_workspace_is_exact_and_its_neighbours_stay_intact() -> None:
    capacity = Capacity(tokens=64, rows=16, pages=1024)
    size = workspace_size(PROBLEM, capacity)
    memory = torch.full((size + 8192,), 0xA5, dtype=torch.uint8, device="cuda")
    with pytest.raises(InvalidArgument, match=f"need {size}"):
        plan_buffers(PROBLEM, capacity, device="cuda", workspace=memory[4096 : 4096 + size - 1])
    buffers = plan_buffers(PROBLEM, capacity, device="cuda", workspace=memory[4096 : 4096 + size])
    case = forests()[0]
    q = case.queries()
    work = plan(case.forest(), **case.shape(), dtype=BF16, device="cuda", buffers=buffers, gate="open")
    out = work.run(q.cuda(), *(pool.cuda() for pool in case.pools()), sm_scale=SCALE)
    check_against_dense(case, q, out.cpu(), SCALE)
    assert (memory[:4096] == 0xA5).all() and (memory[4096 + size :] == 0xA5).all()


def test_a_thousand_steps_never_wait_for_the_device(no_sync: None) -> None:
    case = Case((8, 2), 64, page_size=16, dtype=BF16)
    root = case.node(-1, 100)
    for _ in range(6):
        case.row(case.node(root, 20, extra_pages=64))
    buffers = plan_buffers(PROBLEM, Capacity(tokens=64, rows=16, pages=1024), device="cuda")
    k, v = (torch.zeros(512, 16, 2, 64, dtype=BF16, device="cuda") for _ in range(2))
    q = torch.zeros(6, 8, 64, dtype=BF16, device="cuda")
    forest, last = case.forest(), None
    for step in range(1000):
        end = forest.node_end + (forest.node_parent >= 0)
        forest = ForestArrays(**{**vars(forest), "node_end": end.astype(forest.node_end.dtype)})
        last = plan(forest, **case.shape(), dtype=BF16, device="cuda", buffers=buffers, after=last)
        last.run(q, k, v, sm_scale=SCALE)
        if step == 0:
            torch.cuda.set_sync_debug_mode("error")


def test_lengths_on_the_device_in_a_captured_graph() -> None:
    case = Case((8, 2), 64, page_size=16, dtype=BF16)
    root = case.node(-1, 100)
    for _ in range(4):
        case.row(case.node(root, 60))
    q = case.queries().cuda()
    k, v = (pool.cuda() for pool in case.pools())
    lengths = torch.tensor([160, 130, 101, 0], dtype=torch.int32, device="cuda")
    work = plan(case.forest(), **case.shape(), dtype=BF16, device="cuda", has_seq_lens=True, gate="open")
    work.run(q, k, v, sm_scale=SCALE, seq_lens=lengths)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = work.run(q, k, v, sm_scale=SCALE, seq_lens=lengths, return_lse=True)
    for values in ([160, 130, 101, 0], [101, 999, 5, 120], [-3, 1, 160, 100]):
        lengths.copy_(torch.tensor(values, dtype=torch.int32))
        graph.replay()
        for row, length in enumerate(min(max(value, 0), 160) for value in values):
            if not length:
                assert (out[row] == 0).all() and (lse[row] == -torch.inf).all()
                continue
            keys, vals = (torch.cat([getattr(case.nodes[n], x) for n in (0, row + 1)])[:length] for x in "kv")
            keys, vals = (x.repeat_interleave(4, 1) for x in (keys, vals))
            scores = torch.einsum("hd,nhd->hn", q[row].double().cpu(), keys) * SCALE
            truth = torch.einsum("hn,nhd->hd", scores.softmax(1), vals)
            assert (lse[row].cpu() - scores.logsumexp(1)).abs().max() < 1e-4
            assert rms(out[row].cpu() - truth) < 0.004 * rms(truth)


def test_a_pool_of_more_than_two_to_the_31_elements() -> None:
    pages = 2**31 // (128 * 4 * 128) + 64
    pool = torch.empty(2, pages, 128, 4, 128, dtype=BF16, device="cuda")
    case = Case((28, 4), 128, page_size=128, dtype=BF16)
    root = case.node(-1, 300)
    for tokens in (9, 140):
        case.row(case.node(root, tokens))
    q = case.queries()
    forest = case.forest()
    far = ForestArrays(**{**vars(forest), "node_pages": forest.node_pages % 32 + (pages - 32)})
    assert len(set(far.node_pages.tolist())) == len(far.node_pages)
    for target, values in zip(pool, case.pools(), strict=True):
        for page, old in zip(far.node_pages.tolist(), forest.node_pages.tolist(), strict=True):
            target[page] = values[old].cuda()
    out = plan(far, **case.shape(), dtype=BF16, device="cuda", gate="open").run(q.cuda(), *pool, sm_scale=SCALE)
    check_against_dense(case, q, out.cpu(), SCALE)


@pytest.mark.parametrize("interleaved", [False, True])
def test_rope_and_the_write_of_k_and_v_in_one_launch(interleaved: bool) -> None:
    generator = torch.Generator(device="cuda").manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device="cuda").to(BF16)

    q, k, v = normal(9, 28, 128), normal(9, 4, 128), normal(9, 4, 128)
    norm, turn = normal(128), torch.outer(torch.arange(100.0), 1e4 ** -(torch.arange(0, 64, 2) / 64))
    cos_sin = torch.cat([turn.cos(), turn.sin()], 1).cuda()
    pools = [torch.full((6, 16, 4, 128), 7.0, dtype=BF16, device="cuda") for _ in range(4)]
    positions, slots = torch.arange(9) * 7, torch.tensor([3, 90, -1, 5, 17, 40, 41, 0, 95])
    options = {"interleaved": interleaved, "q_norm": norm, "k_norm": norm}
    arguments = {"positions": positions.cuda(), "slot_mapping": slots.cuda(), "cos_sin": cos_sin}
    out = rope_append_kv(q, k, v, *pools[:2], **arguments, **options)
    host = [tensor.cpu() for tensor in (q, k, v, *pools[2:])]
    expected = rope_append_kv(
        *host,
        **{n: t.cpu() for n, t in arguments.items()},
        interleaved=interleaved,
        q_norm=norm.cpu(),
        k_norm=norm.cpu(),
    )
    torch.testing.assert_close(out.cpu(), expected, rtol=2**-7, atol=2**-7)
    torch.testing.assert_close(pools[0].cpu(), host[3], rtol=2**-7, atol=2**-7)
    assert torch.equal(pools[1].cpu(), host[4])


def test_block_tables_on_the_device_never_wait(no_sync: None) -> None:
    torch.cuda.set_sync_debug_mode("default")
    cache = torch.randn(64, 2, 2, 16, 64, generator=torch.Generator(device="cuda").manual_seed(1), device="cuda").to(
        BF16
    )
    q = torch.randn(3, 8, 64, device="cuda", generator=torch.Generator(device="cuda").manual_seed(2)).to(BF16)
    table = torch.randperm(64, generator=torch.Generator().manual_seed(3))[:30].view(3, 10).int()
    lengths = torch.tensor([150, 0, 33], dtype=torch.int32)
    on_device = {"block_table": table.cuda(), "seq_lens": lengths.cuda()}
    expected, expected_lse = decode_attention(
        q.float().cpu(), cache.float().cpu(), block_table=table, seq_lens=lengths, backend="reference", return_lse=True
    )
    decode_attention(q, cache, **on_device)
    torch.cuda.set_sync_debug_mode("error")
    for bound in (None, 150):
        out, lse = decode_attention(q, cache, **on_device, max_kv_len=bound, return_lse=True)
        torch.cuda.set_sync_debug_mode("default")
        torch.testing.assert_close(out.float().cpu(), expected, rtol=2e-2, atol=1e-2)
        torch.testing.assert_close(lse.cpu(), expected_lse, rtol=1e-4, atol=1e-4)
