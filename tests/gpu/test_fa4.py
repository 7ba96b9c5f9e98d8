"""FlashAttention-4 as a backend against dense attention, on a Hopper GPU with flash-attn-4 installed."""

from __future__ import annotations

import pytest
import torch
from attention_oracle import Case, rms

from ramet.attention import AttentionPlan, Problem, forest_attention, plan, supports
from ramet.attention.backends.fa4 import Fa4Backend
from ramet.attention.build import build_work
from ramet.errors import Unsupported

pytestmark = pytest.mark.gpu

if not torch.cuda.is_available():
    pytest.skip("no GPU", allow_module_level=True)
if not (_probe := supports(Problem(4, 2, 64, 16, device="cuda", dtype=torch.bfloat16), "fa4")).ok:
    pytest.skip(_probe.reason, allow_module_level=True)


def forest_case(heads: tuple[int, int], head_dim: int, page_size: int, q_len: int, dtype: torch.dtype) -> Case:
    """Two nested shared nodes, rows of several lengths, rows alone; pages in random order."""
    case = Case(heads, head_dim, page_size, dtype, seed=1, num_pages=512)
    system = case.node(-1, 3 * page_size + 5)
    for tokens in (2 * page_size + 1, page_size):
        prompt = case.node(system, tokens)
        for tail in (q_len, q_len + 1, page_size, 2 * page_size + 3):
            case.row(case.node(prompt, tail), q_len)
    case.row(case.node(-1, 5 * page_size - 1), q_len)
    return case


def check(case: Case, gate: str, fill: float, finite_pages: bool = False, softcap: float = 0.0) -> None:
    q = case.queries()
    k_pool, v_pool = (pool.cuda() for pool in case.pools(fill))
    problem = Problem(**case.shape(), device="cuda", dtype=case.dtype, softcap=softcap)
    backend = Fa4Backend(finite_pages)
    assert backend.supports(problem).ok
    work = build_work(case.forest(), backend.share_policy(problem), gate)
    assert (work.counters.shared_nodes > 0) == (gate == "open")
    made = AttentionPlan(problem, work, "fa4", backend.compile(work, problem, torch.device("cuda"), None))
    scale = case.head_dim**-0.5
    target = torch.full_like(q, float("nan")).cuda()
    out, lse = made.run(q.cuda(), k_pool, v_pool, sm_scale=scale, out=target, return_lse=True)
    assert out.isfinite().all()
    if softcap:
        truth = forest_attention_with_softcap(case, q, softcap, scale)
        assert rms(out.cpu() - truth) <= 2 * torch.finfo(case.dtype).eps * rms(truth)
        return
    truth, truth_lse = case.dense(q, scale)
    honest = max(rms(case.dense(q, scale, case.dtype)[0] - truth), rms(truth) * torch.finfo(case.dtype).eps / 2)
    assert rms(out.cpu() - truth) <= 2 * honest
    assert (lse.cpu() - truth_lse).abs().max() < 1e-3


def forest_attention_with_softcap(case: Case, q: torch.Tensor, softcap: float, scale: float) -> torch.Tensor:
    k_pool, v_pool = (pool.double() for pool in case.pools())
    made = plan(case.forest(), **case.shape(), softcap=softcap, backend="reference")
    return made.run(q.double(), k_pool, v_pool, sm_scale=scale)


@pytest.mark.parametrize("gate", ["open", "closed"])
@pytest.mark.parametrize("q_len", [1, 4, 9])
@pytest.mark.parametrize("heads, head_dim", [((28, 4), 128), ((9, 3), 64)])
def test_outputs_are_those_of_dense_attention(gate: str, q_len: int, heads: tuple[int, int], head_dim: int) -> None:
    """Pages of 64 are not loaded whole: NaN behind every length must not be seen."""
    check(forest_case(heads, head_dim, 64 if head_dim == 128 else 32, q_len, torch.bfloat16), gate, float("nan"))


@pytest.mark.parametrize("gate", ["open", "closed"])
def test_whole_pages_for_who_vouches_for_them(gate: str) -> None:
    check(forest_case((28, 4), 128, 128, 4, torch.float16), gate, 0.0, finite_pages=True)


def test_softcap() -> None:
    check(forest_case((4, 2), 64, 16, 1, torch.bfloat16), "open", float("nan"), softcap=5.0)


def test_long_nodes_are_cut() -> None:
    case = Case((8, 1), 128, 64, torch.bfloat16, seed=2, num_pages=512)
    prompt = case.node(-1, 5000)
    for _ in range(3):
        case.row(case.node(prompt, 70), 1)
    check(case, "open", float("nan"))


def test_an_empty_tail_and_rows_without_queries() -> None:
    case = Case((8, 2), 128, 64, torch.bfloat16, seed=3, num_pages=64)
    prompt = case.node(-1, 200)
    case.row(case.node(prompt, 3), 2)
    case.row(case.node(prompt, 9), 0)
    case.row(case.node(prompt, 64), 1)
    check(case, "open", float("nan"))


def test_a_graph_replays_it() -> None:
    case = forest_case((28, 4), 128, 64, 1, torch.bfloat16)
    q = case.queries().cuda()
    k_pool, v_pool = (pool.cuda() for pool in case.pools())
    made = plan(case.forest(), **case.shape(), device="cuda", dtype=case.dtype, backend="fa4", gate="open")
    out = torch.empty_like(q)
    expected = made.run(q, k_pool, v_pool, sm_scale=0.1).clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        made.run(q, k_pool, v_pool, sm_scale=0.1, out=out)
    out.fill_(float("nan"))
    graph.replay()
    assert torch.equal(out, expected)


def test_what_it_cannot_read_is_refused_by_name() -> None:
    with pytest.raises(Unsupported, match="loads whole pages of 128"):
        plan(Case().forest(), num_qo_heads=4, num_kv_heads=2, head_dim=128, page_size=128, device="cuda",
             dtype=torch.bfloat16, backend="fa4")  # fmt: skip
    case = Case(head_dim=64, page_size=16, dtype=torch.bfloat16)
    case.row(case.node(-1, 40, first_slot=3))
    q, (k_pool, v_pool) = case.queries().cuda(), (pool.cuda() for pool in case.pools())
    with pytest.raises(Unsupported, match="begins at slot 3"):
        forest_attention(q, k_pool, v_pool, forest=case.forest(), backend="fa4")
