"""What FlashAttention-4 is fed, checked without it: its calls and the merge are done densely, by the arrays."""

from __future__ import annotations

import sys
from types import ModuleType

import numpy as np
import pytest
import torch
from attention_oracle import Case, rms

from ramet.attention import Problem, merge_states
from ramet.attention.backends import fa4
from ramet.attention.backends.base import Tensors
from ramet.attention.backends.fa4 import Fa4Backend, Fa4Executor
from ramet.attention.backends.fa4_layout import Layout, Sequences, layout
from ramet.attention.build import build_work
from ramet.attention.problem import SharePolicy
from ramet.errors import Unsupported


def attend(
    call: Sequences, q: torch.Tensor, pools: tuple[torch.Tensor, torch.Tensor], causal: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """What the documented call computes: paged sequences, a mask at the bottom right, natural log-sum-exp."""
    outs, lses = [], []
    for i, used in enumerate(call.seqused_k.tolist()):
        mine = q[torch.from_numpy(call.queries[call.cu_seqlens_q[i] : call.cu_seqlens_q[i + 1]])].double()
        pages = torch.from_numpy(call.page_table[i].astype(np.int64))
        group = q.shape[1] // pools[0].shape[2]
        k, v = (pool[pages].flatten(0, 1)[:used].double().repeat_interleave(group, 1) for pool in pools)
        scores = torch.einsum("qhd,khd->hqk", mine, k) * q.shape[2] ** -0.5
        if causal:
            hidden = torch.ones(scores.shape[1:], dtype=torch.bool).triu(used - len(mine) + 1)
            scores = scores.masked_fill(hidden, -torch.inf)
        lse = torch.logsumexp(scores, -1) if used else torch.full(scores.shape[:2], -torch.inf)
        out = torch.einsum("hqk,khd->qhd", torch.softmax(scores, -1), v)
        outs.append(out if used else torch.zeros(mine.shape, dtype=torch.float64))
        lses.append(lse.T.float())
    return torch.cat(outs), torch.cat(lses)


def emulate(plan: Layout, q: torch.Tensor, pools: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    out, lse = attend(plan.tails, q, pools, causal=True)
    if plan.before is not None:
        before, before_lse = attend(plan.before, q, pools, causal=False)
        for token in range(len(out)):
            for entry in plan.part_entry[plan.parts[token] : plan.parts[token + 1]]:
                merged = merge_states(out[token], lse[token], before[entry], before_lse[entry])
                out[token], lse[token] = merged
    result = torch.full_like(out, float("nan"))
    result[torch.from_numpy(plan.tails.queries)] = out
    return result


def nested(q_len: int = 1) -> Case:
    case = Case(seed=3)
    system = case.node(-1, 13)
    for tokens in (9, 8, 0):
        prompt = case.node(system, tokens) if tokens else system
        for tail in (q_len, 6, 11):
            case.row(case.node(prompt, max(tail, q_len)), q_len)
    case.row(case.node(-1, 21), q_len)
    case.numpy.shuffle(case.rows)
    return case


@pytest.mark.parametrize("gate", ["open", "closed", "auto"])
@pytest.mark.parametrize("q_len", [1, 3])
def test_the_calls_and_their_merge_are_attention(gate: str, q_len: int) -> None:
    case = nested(q_len)
    work = build_work(case.forest(), SharePolicy(20), gate)
    plan = layout(work, Problem(**case.shape()), sm_count=1)
    q = case.queries()
    truth, _ = case.dense(q, case.head_dim**-0.5)
    assert rms(emulate(plan, q, case.pools()) - truth) < 1e-6


def test_a_long_node_becomes_several_sequences_that_fill_the_device() -> None:
    case = Case(heads=(2, 1), page_size=64, num_pages=64)
    prompt = case.node(-1, 2100)
    for _ in range(2):
        case.row(case.node(prompt, 3))
    work = build_work(case.forest(), SharePolicy(0), "open")
    problem = Problem(**case.shape())
    plan = layout(work, problem, sm_count=132)
    assert plan.before is not None
    assert plan.before.seqused_k.sum() == 2100
    assert len(plan.before.seqused_k) == 4  # 512 tokens or more each
    assert (plan.before.seqused_k[:-1] % 64 == 0).all()
    assert plan.parts.tolist() == [0, 4, 8]
    q = case.queries()
    assert rms(emulate(plan, q, case.pools()) - case.dense(q, case.head_dim**-0.5)[0]) < 1e-6
    few = layout(work, problem, sm_count=1).before
    assert few is not None and len(few.seqused_k) == 1


def test_pages_that_go_on_are_one_sequence() -> None:
    """A node that ends at a page, and a node cut inside a page, are read on in the same sequence: one call in all."""
    case = Case(page_size=4)
    first = case.node(-1, 8)
    case.row(case.node(first, 5))
    cut = case.node(-1, 6)
    rest = case.node(cut, 5, first_slot=2)
    case.nodes[rest].pages[0] = case.nodes[cut].pages[-1]
    case.row(rest)
    work = build_work(case.forest(), SharePolicy(0), "closed")
    plan = layout(work, Problem(**case.shape()), sm_count=1)
    assert plan.before is None
    assert plan.tails.seqused_k.tolist() == [13, 11]
    q = case.queries()
    assert rms(emulate(plan, q, case.pools()) - case.dense(q, case.head_dim**-0.5)[0]) < 1e-6


def test_what_it_cannot_read_is_refused() -> None:
    case = Case(page_size=4)
    case.row(case.node(-1, 8, first_slot=2))
    with pytest.raises(Unsupported, match="begins at slot 2"):
        layout(build_work(case.forest(), SharePolicy(0)), Problem(**case.shape()), 1)
    case = Case(page_size=4)
    case.row(case.node(case.node(-1, 7), 1), q_len=3)
    with pytest.raises(Unsupported, match="more than its last"):
        layout(build_work(case.forest(), SharePolicy(0), "open"), Problem(**case.shape()), 1)


def test_no_rows() -> None:
    plan = layout(build_work(Case().forest(), SharePolicy(0)), Problem(**Case().shape()), 1)
    assert plan.before is None and len(plan.tails.queries) == 0


PROBLEM = Problem(28, 4, 128, 64, device="cuda", dtype=torch.bfloat16)


@pytest.mark.parametrize(
    "change, reason",
    [
        ({"device": "cpu"}, "GPUs"),
        ({"dtype": torch.float32}, "bfloat16 and float16"),
        ({"head_dim": 72}, "multiple of 16"),
        ({"page_size": 128}, "loads whole pages"),
        ({"window_left": 3}, "window_left"),
        ({"deterministic": True}, "deterministic"),
        ({"has_sinks": True}, "sinks"),
    ],
)
def test_every_refusal_has_its_reason(change: dict[str, object], reason: str) -> None:
    from dataclasses import replace

    answer = Fa4Backend().supports(replace(PROBLEM, **change))  # type: ignore[arg-type]
    assert not answer.ok and reason in answer.reason


def test_without_the_package_or_a_gpu_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not Fa4Backend().supports(PROBLEM).ok
    fa4._installation.cache_clear()
    monkeypatch.setattr(fa4, "find_spec", lambda name: None)
    assert "pip install flash-attn-4" in Fa4Backend().supports(PROBLEM).reason
    fa4._installation.cache_clear()


def test_nothing_is_kept_on_the_device() -> None:
    from ramet.attention import Capacity

    assert Fa4Backend().arrays(PROBLEM, Capacity(1, 1, 1)) is None


def test_an_executor_makes_two_calls_and_one_merge(monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole way on a CPU: a stand-in for the package's function, the merge kernel in Triton's interpreter."""
    calls = []

    def forward(q, k, v, *, out, lse, cu_seqlens_q, seqused_k, page_table, causal, softmax_scale, **rest):  # type: ignore[no-untyped-def]
        entries = np.arange(len(q))
        call = Sequences(entries, cu_seqlens_q.numpy(), seqused_k.numpy(), page_table.numpy(), 0, 0)
        values, found = attend(call, q, (k, v), causal)
        out.copy_(values)
        if lse is not None:
            lse.copy_(found.T)
        assert rest == {"max_seqlen_q": rest["max_seqlen_q"], "max_seqlen_k": rest["max_seqlen_k"], "softcap": None,
                        "num_splits": 1}  # fmt: skip
        assert softmax_scale == q.shape[2] ** -0.5
        calls.append(causal)

    module = ModuleType("flash_attn.cute.interface")
    module._flash_attn_fwd = forward  # type: ignore[attr-defined]
    for name in ("flash_attn", "flash_attn.cute"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, "flash_attn.cute.interface", module)
    case = nested(2)
    problem = Problem(**case.shape(), dtype=torch.float32)
    q, (k_pool, v_pool) = case.queries(), case.pools()
    truth, truth_lse = case.dense(q, case.head_dim**-0.5)
    for gate, made in (("open", [False, True]), ("closed", [False, True])):
        work = build_work(case.forest(), SharePolicy(0), gate)
        executor = Fa4Executor(layout(work, problem, 1), problem, torch.device("cpu"))
        out, lse = torch.full_like(q, float("nan")), torch.full(q.shape[:2], float("nan"))
        executor.run(Tensors(q, k_pool, v_pool, out, lse, case.head_dim**-0.5, None))
        assert rms(out - truth) < 1e-5
        assert (lse - truth_lse).abs().max() < 1e-5
        assert calls == made
        calls.clear()
    with pytest.raises(Unsupported, match="sm_scale as a float"):
        executor.run(Tensors(q, k_pool, v_pool, q, None, torch.ones(1), None))
