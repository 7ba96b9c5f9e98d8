"""Rotary positions and the write of K and V: the PyTorch form against complex numbers, the kernel against that."""

from __future__ import annotations

import os

import pytest
import torch

from ramet.attention.rope import _launch, rope_append_kv
from ramet.errors import InvalidArgument

HEADS, KV_HEADS, DIM = 6, 2, 16


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def angles(rotary: int) -> torch.Tensor:
    return torch.outer(torch.arange(50.0), 100.0 ** -(torch.arange(0, rotary, 2) / rotary))


def arguments(rotary: int = DIM, dtype: torch.dtype = torch.float32) -> dict:
    turn = angles(rotary)
    return {
        "q": normal(4, HEADS, DIM, dtype=dtype),
        "k": normal(4, KV_HEADS, DIM, seed=1, dtype=dtype),
        "v": normal(4, KV_HEADS, DIM, seed=2, dtype=dtype),
        "k_pool": torch.full((5, 4, KV_HEADS, DIM), 7.0, dtype=dtype),
        "v_pool": torch.full((5, 4, KV_HEADS, DIM), 8.0, dtype=dtype),
        "positions": torch.tensor([0, 3, 49, 7]),
        "slot_mapping": torch.tensor([19, 0, -1, 6]),
        "cos_sin": torch.cat([turn.cos(), turn.sin()], dim=1),
    }


def turned(x: torch.Tensor, positions: torch.Tensor, rotary: int, interleaved: bool) -> torch.Tensor:
    """By multiplication of complex numbers, in float64."""
    x = x.double()
    head = x[..., :rotary]
    pairs = head.unflatten(-1, (-1, 2)) if interleaved else head.unflatten(-1, (2, -1)).transpose(-1, -2)
    factor = torch.polar(torch.ones_like(angles(rotary)), angles(rotary)).to(torch.complex128)[positions][:, None]
    result = torch.view_as_real(torch.view_as_complex(pairs.contiguous()) * factor)
    head = result.flatten(-2) if interleaved else result.transpose(-1, -2).flatten(-2)
    return torch.cat([head, x[..., rotary:]], dim=-1)


def kernel(given: dict, interleaved: bool, norms: tuple) -> torch.Tensor:
    names = ("q", "k", "v", "k_pool", "v_pool", "positions", "slot_mapping", "cos_sin")
    return _launch(*(given[name] for name in names), interleaved, *norms, 1e-6)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("rotary", [8, 16])
def test_heads_turn_to_absolute_positions_and_go_to_private_slots(rotary: int, interleaved: bool) -> None:
    given = arguments(rotary)
    out = rope_append_kv(**given, interleaved=interleaved)
    positions, slots = given["positions"], given["slot_mapping"]
    torch.testing.assert_close(out.double(), turned(given["q"], positions, rotary, interleaved), rtol=1e-5, atol=1e-5)
    expected = turned(given["k"], positions, rotary, interleaved)
    written = slots >= 0
    for pool, new, old in (("k_pool", expected, 7.0), ("v_pool", given["v"].double(), 8.0)):
        flat = given[pool].flatten(0, 1)
        torch.testing.assert_close(flat[slots[written]].double(), new[written], rtol=1e-5, atol=1e-5)
        others = [slot for slot in range(20) if slot not in slots.tolist()]
        assert (flat[others] == old).all()


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="needs Triton's interpreter")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("rotary", "interleaved", "norm"), [(8, False, True), (16, True, False), (16, False, True)])
def test_the_kernel_does_the_same(dtype: torch.dtype, rotary: int, interleaved: bool, norm: bool) -> None:
    pytest.importorskip("triton")
    plain, fast = arguments(rotary, dtype), arguments(rotary, dtype)
    norms = (normal(DIM, seed=5, dtype=dtype), normal(DIM, seed=6, dtype=dtype)) if norm else (None, None)
    expected = rope_append_kv(**plain, interleaved=interleaved, q_norm=norms[0], k_norm=norms[1])
    got = kernel(fast, interleaved, norms)
    close = {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 2**-7, "atol": 2**-7}
    torch.testing.assert_close(got, expected, **close)
    torch.testing.assert_close(fast["k_pool"], plain["k_pool"], **close)
    assert torch.equal(fast["v_pool"], plain["v_pool"])


def test_norms_are_applied_before_the_turn() -> None:
    given = arguments()
    weight = normal(DIM, seed=5)
    out = rope_append_kv(**given, q_norm=weight, k_norm=weight, norm_eps=0.1)
    normed = given["q"] * torch.rsqrt(given["q"].square().mean(-1, keepdim=True) + 0.1) * weight
    torch.testing.assert_close(out, rope_append_kv(**{**arguments(), "q": normed}), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("q", lambda x: x.double()),
        ("k", lambda x: x[..., :8]),
        ("v", lambda x: x[:2]),
        ("k_pool", lambda x: x[..., :4]),
        ("v_pool", lambda x: x[:2]),
        ("positions", lambda x: x.int()),
        ("slot_mapping", lambda x: x[:1]),
        ("cos_sin", lambda x: x[:, :7]),
        ("cos_sin", lambda x: x.double()),
        ("q", lambda x: x.transpose(1, 2).contiguous().transpose(1, 2)),
    ],
)
def test_tensors_that_do_not_fit_are_refused_by_name(name: str, change) -> None:
    given = arguments()
    given[name] = change(given[name])
    with pytest.raises(InvalidArgument, match=name):
        rope_append_kv(**given)
