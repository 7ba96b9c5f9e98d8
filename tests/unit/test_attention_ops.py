"""Merging states, writing K and V, and the one-call form."""

from __future__ import annotations

import pytest
import torch
from attention_oracle import Case, check_against_dense

from ramet.attention import append_kv, forest_attention, merge_states, plan
from ramet.errors import InvalidArgument

State = tuple[torch.Tensor, torch.Tensor]


def states(count: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> list[State]:
    """States of different weight."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    return [(normal(5, 3, 8).to(dtype), normal(5, 3) * 4) for _ in range(count)]


def empty(like: State, garbage: float = 0.0) -> State:
    return torch.full_like(like[0], garbage), torch.full_like(like[1], -torch.inf)


def merge(a: State, b: State) -> State:
    return merge_states(*a, *b)


def assert_close(a: State, b: State, tolerance: float = 1e-6) -> None:
    torch.testing.assert_close(a[0], b[0], rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(a[1], b[1], rtol=tolerance, atol=tolerance)


def test_merging_is_attention_over_the_union_of_keys() -> None:
    generator = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(n, 8, generator=generator, dtype=torch.float64) for n in (4, 30, 30))
    scores = q @ k.T

    def part(keys: slice) -> State:
        return torch.softmax(scores[:, keys], 1) @ v[keys], torch.logsumexp(scores[:, keys], 1).float()

    whole = part(slice(0, 30))
    assert_close(merge(part(slice(0, 7)), part(slice(7, 30))), whole)
    parts = [part(slice(i, i + 5)) for i in range(0, 30, 5)]
    merged = parts[0]
    for other in parts[1:]:
        merged = merge(merged, other)
    assert_close(merged, whole)


def test_merging_is_commutative_to_the_bit_and_associative() -> None:
    a, b, c = states(3)
    ab, ba = merge(a, b), merge(b, a)
    assert torch.equal(ab[0], ba[0])
    assert torch.equal(ab[1], ba[1])
    assert_close(merge(merge(a, b), c), merge(a, merge(b, c)))


@pytest.mark.parametrize("garbage", [0.0, 5.0, float("nan"), float("inf")])
def test_the_empty_state_is_neutral_whatever_its_output_holds(garbage: float) -> None:
    (a,) = states(1)
    nothing = empty(a, garbage)
    for merged in (merge(a, nothing), merge(nothing, a)):
        assert torch.equal(merged[0], a[0])
        assert torch.equal(merged[1], a[1])
    o, lse = merge(nothing, nothing)
    assert torch.equal(o, torch.zeros_like(o))
    assert (lse == -torch.inf).all()


def test_a_state_of_far_greater_weight_wins_without_overflow() -> None:
    a, b = states(2)
    heavy = a[0], a[1] + 30_000.0
    assert torch.equal(merge(heavy, b)[0], a[0])
    assert torch.equal(merge(b, heavy)[1], heavy[1])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_outputs_keep_their_dtype_and_are_merged_in_a_wide_one(dtype: torch.dtype) -> None:
    a, b = states(2, dtype=dtype)
    o, lse = merge(a, b)
    wide, wide_lse = merge((a[0].double(), a[1]), (b[0].double(), b[1]))
    assert (o.dtype, lse.dtype) == (dtype, torch.float32)
    assert torch.equal(lse, wide_lse)
    assert (o.double() - wide).abs().max() <= torch.finfo(dtype).eps * wide.abs().max() + 1e-15


@pytest.mark.parametrize("position", range(4))
def test_every_argument_of_merge_states_matters(position: int) -> None:
    a, b = states(2)
    arguments = [*a, *b]
    expected = merge_states(*arguments)
    arguments[position] = arguments[position] + 0.5
    assert not torch.equal(merge_states(*arguments)[0], expected[0])


@pytest.mark.parametrize(
    ("position", "change", "words"),
    [
        (0, lambda t: t[:2], "o1 is"),
        (2, lambda t: t.bfloat16(), "o2 is torch.bfloat16"),
        (1, lambda t: t.double(), "lse1 is torch.float64"),
        (3, lambda t: t[:, :1], "lse2 is"),
    ],
)
def test_states_that_do_not_fit_are_refused_by_name(position: int, change, words: str) -> None:
    a, b = states(2)
    arguments = [*a, *b]
    arguments[position] = change(arguments[position])
    with pytest.raises(InvalidArgument, match=words):
        merge_states(*arguments)


def pools(dtype: torch.dtype = torch.float32) -> State:
    return torch.full((6, 4, 2, 8), 7.0, dtype=dtype), torch.full((6, 4, 2, 8), 8.0, dtype=dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_append_writes_its_slots_and_nothing_else(dtype: torch.dtype) -> None:
    k, v = (torch.randn(3, 2, 8, generator=torch.Generator().manual_seed(s)).to(dtype) for s in (1, 2))
    k_pool, v_pool = pools(dtype)
    slots = [21, 0, 6]
    append_kv(k, v, k_pool, v_pool, torch.tensor(slots))
    for pool, new, old in ((k_pool, k, 7.0), (v_pool, v, 8.0)):
        flat = pool.view(24, 2, 8)
        assert torch.equal(flat[slots], new)
        others = [slot for slot in range(24) if slot not in slots]
        assert (flat[others] == old).all()


def test_append_reads_strided_tensors_and_takes_no_tokens() -> None:
    fused = torch.randn(3, 4, 8)
    k_pool, v_pool = pools()
    append_kv(fused[:, :2], fused[:, 2:], k_pool, v_pool, torch.tensor([3, 2, 1]))
    assert torch.equal(k_pool.view(24, 2, 8)[[3, 2, 1]], fused[:, :2])
    before = k_pool.clone()
    append_kv(fused[:0, :2], fused[:0, 2:], k_pool, v_pool, torch.empty(0, dtype=torch.int64))
    assert torch.equal(k_pool, before)


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        ("slot_mapping", lambda t: t.int(), "slot_mapping is torch.int32"),
        ("slot_mapping", lambda t: t[:1], "slot_mapping is torch.int64"),
        ("slot_mapping", lambda t: t + 23, "slot_mapping has a slot outside of k_pool; allowed: 0 to 23"),
        ("slot_mapping", lambda t: t - 1, "slot_mapping has a slot outside of k_pool"),
        ("k", lambda t: t[:, :1], "k is"),
        ("k", lambda t: t.bfloat16(), "k is torch.bfloat16"),
        ("v", lambda t: t[..., :4], "v is"),
        ("k_pool", lambda t: t[0], "k_pool"),
        ("v_pool", lambda t: t.transpose(0, 1), "v_pool has strides"),
    ],
)
def test_tensors_that_cannot_be_appended_are_refused_by_name(name: str, change, words: str) -> None:
    k_pool, v_pool = pools()
    arguments = {
        "k": torch.ones(2, 2, 8),
        "v": torch.ones(2, 2, 8),
        "k_pool": k_pool,
        "v_pool": v_pool,
        "slot_mapping": torch.tensor([0, 1]),
    }
    arguments[name] = change(arguments[name])
    with pytest.raises(InvalidArgument, match=words):
        append_kv(**arguments)


def group() -> Case:
    case = Case((6, 2), head_dim=16)
    root = case.node(-1, 21)
    for tokens in (1, 5, 8):
        case.row(case.node(root, tokens))
    return case


@pytest.mark.parametrize("backend", [None, "cpu", "reference"])
def test_one_call_infers_every_size_from_the_tensors(backend: str | None) -> None:
    case = group()
    q = case.queries()
    out = forest_attention(q, *case.pools(), forest=case.forest(), backend=backend, gate="open")
    check_against_dense(case, q, out, 16**-0.5)
    same = plan(case.forest(), **case.shape(), backend=backend, gate="open").run(q, *case.pools(), sm_scale=16**-0.5)
    assert torch.equal(out, same)


def test_one_call_passes_every_option_on() -> None:
    case = group()
    q, pools, forest = case.queries(), case.pools(), case.forest()
    expected = forest_attention(q, *pools, forest=forest)
    room = torch.empty_like(expected)
    out, lse = forest_attention(q, *pools, forest=forest, sm_scale=0.5, out=room, return_lse=True)
    assert out is room
    assert (lse - case.dense(q, 0.5)[1]).abs().max() < 1e-5
    assert not torch.equal(out, expected)
    with pytest.raises(InvalidArgument, match="did you mean 'reference'"):
        forest_attention(q, *pools, forest=forest, backend="referense")
    with pytest.raises(InvalidArgument, match="gate is 'ajar'"):
        forest_attention(q, *pools, forest=forest, gate="ajar")
    with pytest.raises(InvalidArgument, match="q has shape"):
        forest_attention(q[0], *pools, forest=forest)
