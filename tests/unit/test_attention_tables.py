"""Attention over block tables: the contract of the stateless calls, every argument alone, custom operators."""

from __future__ import annotations

import pytest
import torch

from ramet.attention import context_attention, custom_ops, decode_attention, mla_decode_attention
from ramet.errors import InvalidArgument, Unsupported

HEADS, KV_HEADS, DIM, PAGE, PAGES = 6, 2, 16, 4, 24


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def arguments(dtype: torch.dtype = torch.float32) -> dict:
    """Three rows of 9, 1 and 12 tokens with 2, 1 and 3 queries; garbage behind the lengths."""
    table = torch.randperm(PAGES, generator=torch.Generator().manual_seed(5))[:12].view(3, 4).int()
    cache = normal(PAGES, 2, KV_HEADS, PAGE, DIM, seed=1, dtype=dtype)
    lengths = ints(9, 1, 12)
    used = torch.zeros(PAGES, PAGE, dtype=torch.bool)
    for row, length in enumerate(lengths.tolist()):
        for token in range(length):
            used[table[row, token // PAGE], token % PAGE] = True
    cache = torch.where(used[:, None, None, :, None], cache, float("nan"))
    return {
        "q": normal(6, HEADS, DIM, dtype=dtype),
        "kv_cache": cache,
        "block_table": table,
        "seq_lens": lengths,
        "cu_seqlens_q": ints(0, 2, 3, 6),
    }


def dense(given: dict, scale: float = DIM**-0.5, window: int = -1, causal: bool = True) -> tuple:
    q, cache = given["q"].double(), given["kv_cache"].double()
    offsets = given["cu_seqlens_q"].tolist()
    outs, lses = [], []
    for row, length in enumerate(given["seq_lens"].tolist()):
        pages = given["block_table"][row].long()
        k, v = (cache[pages, i].transpose(1, 2).flatten(0, 1)[:length] for i in (0, 1))
        mine = q[offsets[row] : offsets[row + 1]]
        for i in range(len(mine)):
            position = length - len(mine) + i
            high = position + 1 if causal else length
            low = max(0, position - window) if window >= 0 else 0
            for head in range(HEADS):
                keys = slice(low, max(high, 0))
                scores = k[keys, head // 3] @ mine[i, head] * scale
                lses.append(torch.logsumexp(scores, 0))
                outs.append(torch.softmax(scores, 0) @ v[keys, head // 3])
    return torch.stack(outs).view(len(q), HEADS, DIM), torch.stack(lses).view(len(q), HEADS)


@pytest.mark.parametrize("call", [decode_attention, context_attention])
@pytest.mark.parametrize("backend", [None, "reference"])
@pytest.mark.parametrize(("window", "causal"), [(-1, True), (3, True), (-1, False)])
def test_ragged_queries_against_dense(call, backend: str | None, window: int, causal: bool) -> None:
    given = arguments()
    out, lse = call(**given, window_left=window, causal=causal, backend=backend, return_lse=True)
    truth, truth_lse = dense(given, window=window, causal=causal)
    torch.testing.assert_close(out.double(), truth, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(lse.double(), truth_lse, rtol=1e-5, atol=1e-5)


def test_layouts_and_pairs_are_the_same_cache() -> None:
    given = arguments()
    expected = decode_attention(**given)
    cache = given["kv_cache"]
    nhd = cache.transpose(2, 3).contiguous()
    for other, layout in ((nhd, "NHD"), ((nhd[:, 0], nhd[:, 1]), "NHD"), ((cache[:, 0], cache[:, 1]), "HND")):
        assert torch.equal(decode_attention(**{**given, "kv_cache": other}, kv_layout=layout), expected)


def test_rows_of_no_length_give_the_empty_state() -> None:
    given = arguments()
    given["seq_lens"] = ints(0, 0, 12)
    out, lse = decode_attention(**given, return_lse=True)
    assert (out[:3] == 0).all() and (lse[:3] == -torch.inf).all()
    torch.testing.assert_close(out[3:], decode_attention(**arguments())[3:])


CHANGES = {
    "q": lambda x: x + 1,
    "kv_cache": lambda x: x + 1,
    "block_table": lambda x: x.flip(0),
    "seq_lens": lambda x: x - ints(1, 0, 1),
    "cu_seqlens_q": lambda x: ints(0, 1, 2, 6),
    "kv_layout": lambda x: "NHD",
    "sm_scale": lambda x: 0.9,
    "out_scale": lambda x: 0.5,
    "softcap": lambda x: 0.3,
    "window_left": lambda x: 2,
    "sinks": lambda x: torch.ones(HEADS),
    "causal": lambda x: False,
}


@pytest.mark.parametrize("name", CHANGES)
def test_every_argument_alone_changes_the_output(name: str) -> None:
    given = {**arguments(), "backend": "reference"}
    given["kv_cache"] = given["kv_cache"].nan_to_num(0.5)
    expected = decode_attention(**given)
    given[name] = CHANGES[name](given.get(name))
    if name == "kv_layout":  # another reading of the same bytes: other heads, another page size
        with pytest.raises(InvalidArgument, match="block_table has 4 pages of 2 tokens"):
            decode_attention(**given)
        return
    assert not torch.equal(decode_attention(**given), expected)


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("q", torch.ones(6, DIM), "q has shape"),
        ("kv_cache", torch.ones(3, 3, 2, 4, DIM), "kv_cache has shape"),
        ("kv_cache", (torch.ones(3), torch.ones(3)), "kv_cache: k has shape"),
        ("kv_layout", "HDN", "kv_layout is 'HDN'; did you mean"),
        ("block_table", torch.zeros(3, 4), "block_table is torch.float32"),
        ("block_table", ints(0, 1, 2), "block_table is torch.int32"),
        ("block_table", torch.zeros(3, 2, dtype=torch.int32), "row 0 needs 3 pages"),
        ("block_table", torch.full((3, 4), -1, dtype=torch.int32), "node_pages"),
        ("block_table", torch.full((3, 4), 99, dtype=torch.int32), "the plan reads page 99"),
        ("seq_lens", torch.ones(3), "seq_lens are torch.float32"),
        ("seq_lens", ints(1, 2), "seq_lens are torch.int32"),
        ("seq_lens", ints(9, -1, 12), r"seq_lens\[1\] is -1"),
        ("cu_seqlens_q", ints(0, 2, 6), "cu_seqlens_q is torch.int32"),
        ("cu_seqlens_q", ints(0, 3, 2, 6), "never decrease"),
        ("cu_seqlens_q", ints(0, 2, 3, 7), "end with 6"),
        ("cu_seqlens_q", ints(1, 2, 3, 6), "begin with 0"),
        ("sm_scale", "big", "sm_scale is 'big'"),
        ("sm_scale", torch.ones(2), "sm_scale is torch.float32"),
        ("out_scale", torch.ones(2), "out_scale is torch.float32"),
        ("out_scale", "x", "out_scale is 'x'"),
        ("softcap", -1.0, "softcap is -1.0"),
        ("window_left", -2, "window_left is -2"),
        ("sinks", torch.ones(HEADS - 1), "sinks are torch.float32"),
        ("max_kv_len", -1, "max_kv_len is -1"),
        ("out", torch.ones(6, HEADS, DIM + 1), "out has shape"),
        ("backend", "gpu", "no attention backend is called 'gpu'"),
    ],
)
def test_arguments_that_do_not_fit_are_refused_by_name(name: str, value: object, words: str) -> None:
    with pytest.raises(InvalidArgument, match=words):
        decode_attention(**{**arguments(), name: value})


def test_a_pinned_backend_refuses_what_it_does_not_serve_by_name() -> None:
    with pytest.raises(Unsupported, match="cpu does not serve softcap"):
        decode_attention(**arguments(), softcap=1.0, backend="cpu")
    with pytest.raises(InvalidArgument, match="k_pool has strides"):
        decode_attention(**arguments(), backend="cpu")


def test_quantised_keys_and_values_with_their_scales() -> None:
    given = arguments()
    cache = given["kv_cache"].nan_to_num(0.0)
    scale = 0.25
    quantised = (cache / scale).to(torch.float8_e4m3fn)
    out = decode_attention(
        **{**given, "kv_cache": quantised}, sm_scale=DIM**-0.5 * scale, out_scale=torch.tensor([scale])
    )
    expected = decode_attention(**{**given, "kv_cache": quantised.float() * scale})
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)


def test_latent_attention_against_dense() -> None:
    q, cache = normal(3, 8, 576), normal(6, 4, 576, seed=2)
    table = torch.tensor([[4, 1], [0, 3]], dtype=torch.int32)
    lengths, offsets = ints(7, 5), ints(0, 2, 3)
    out, lse = mla_decode_attention(
        q, cache, block_table=table, seq_lens=lengths, cu_seqlens_q=offsets, return_lse=True
    )
    for token, (row, seen) in enumerate([(0, 6), (0, 7), (1, 5)]):
        latents = cache[table[row].long()].flatten(0, 1)[:seen].double()
        scores = q[token].double() @ latents.T * 192**-0.5
        torch.testing.assert_close(out[token].double(), scores.softmax(-1) @ latents[:, :512], rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(lse[token].double(), scores.logsumexp(-1), rtol=1e-5, atol=1e-5)
    with pytest.raises(Unsupported, match="cpu does not serve .*v_head_dim"):
        mla_decode_attention(q[:2], cache, block_table=table, seq_lens=lengths, backend="cpu")
    with pytest.raises(InvalidArgument, match="v_head_dim is 577"):
        mla_decode_attention(q[:2], cache, block_table=table, seq_lens=lengths, v_head_dim=577)


def test_custom_operators_pass_torchs_own_checks() -> None:
    given = arguments()
    k, v = given["kv_cache"].nan_to_num(0.0).unbind(1)
    call = (given["q"], k, v, given["block_table"], given["seq_lens"], given["cu_seqlens_q"])
    options = ("HND", 0.3, 0.0, -1, True, None)
    tests = ("test_schema", "test_faketensor")
    torch.library.opcheck(custom_ops.paged_attention, (*call, *options), test_utils=tests)
    pool, slots = torch.zeros(2, 4, 1, 2), torch.tensor([6])
    new = torch.ones(1, 1, 2)
    torch.library.opcheck(custom_ops.append_kv, (new, new, pool, pool.clone(), slots), test_utils=tests)
    o, lse = normal(3, 4), normal(3)
    torch.library.opcheck(custom_ops.merge_states, (o, lse, o + 1, lse - 1), test_utils=tests)
    out, _ = torch.ops.ramet.paged_attention(*call, *options)
    assert torch.equal(out, decode_attention(**{**given, "kv_cache": (k, v)}, sm_scale=0.3))
