"""Logits of a row are the same bits in any batch, on the shapes of the demo model (row-wise stand-in for attention)."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from ramet.config import EngineConfig
from ramet.models.layers import RMSNorm, silu_mul, unit_rows
from ramet.models.registry import LoadedModel, load_model

ROWS = 512
SIZES = (1, 2, 3, 4, 7, 8, 15, 16, 17, 31, 32, 33, 64, 100, 129, 255, 384, 511)


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def loaded(request: pytest.FixtureRequest) -> LoadedModel:
    return load_model(EngineConfig(model="smollm2-135m", dtype=request.param))


def by_row(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Mixes q, k and v of one row with exact elementwise operations only."""
    groups = q.shape[1] // k.shape[1]
    return q * 0.25 + k.repeat_interleave(groups, 1) * 0.25 + v.repeat_interleave(groups, 1)


def logits_of(loaded: LoadedModel, rows: slice, token_ids: Tensor, positions: Tensor) -> Tensor:
    return loaded.model.logits(loaded.model.forward(token_ids[rows], positions[rows], by_row))


@pytest.fixture
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.model
@pytest.mark.usefixtures("two_threads")
def test_logits_are_bit_equal_for_one_to_512_rows(loaded: LoadedModel) -> None:
    generator = torch.Generator().manual_seed(11)
    token_ids = torch.randint(0, loaded.spec.vocab_size, (ROWS,), generator=generator)
    positions = torch.randint(0, 8192, (ROWS,), generator=generator)
    together = logits_of(loaded, slice(0, ROWS), token_ids, positions)
    assert together.std() > 0.5
    different = []
    for size in SIZES:
        for first in (0, ROWS - size) if size < 64 else (ROWS - size,):
            rows = slice(first, first + size)
            if not torch.equal(logits_of(loaded, rows, token_ids, positions), together[rows]):
                different.append((first, size))
    assert not different, f"(first row, rows) whose bits differ from the batch of {ROWS}: {different}"


def test_silu_of_every_bfloat16_value_is_the_same_alone_and_in_a_vector() -> None:
    values = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    values = values[values.isfinite()]
    pairs = torch.stack((values, torch.ones_like(values)), dim=1)
    together = silu_mul(torch.cat((values[None], torch.ones_like(values)[None]), dim=1))[0]
    assert torch.equal(silu_mul(pairs)[:, 0], together)


@pytest.mark.parametrize("threads", [1, 3, 5])
def test_activation_and_norms_are_bit_equal_however_threads_share_the_rows(threads: int) -> None:
    before = torch.get_num_threads()
    x = torch.randn(311, 2 * 1216, generator=torch.Generator().manual_seed(1)) * 3
    norm = RMSNorm(torch.rand(2 * 1216, generator=torch.Generator().manual_seed(2)), 1e-5)
    ones = torch.ones(len(x), 1)
    functions = (silu_mul, norm, lambda rows: unit_rows(rows, ones[: len(rows)]))
    try:
        torch.set_num_threads(threads)
        for function in functions:
            together = function(x)
            assert all(torch.equal(function(x[i : i + 1]), together[i : i + 1]) for i in range(len(x)))
            assert torch.equal(function(x[:100]), together[:100])
    finally:
        torch.set_num_threads(before)


def test_unit_rows_with_the_eps_column_is_rms_norm() -> None:
    from ramet.models.layers import absorb_norm, with_eps_column

    generator = torch.Generator().manual_seed(3)
    for size, scale in ((48, 1e-3), (576, 1.0), (896, 100.0)):  # at 1e-3, eps is most of the norm
        x = torch.randn(7, size, generator=generator) * scale
        weight, norm_weight = torch.randn(5, size, generator=generator), torch.rand(size, generator=generator) + 0.5
        wide = unit_rows(with_eps_column(x, 1e-5), torch.ones(7, 1))
        ours = wide @ absorb_norm(weight, norm_weight).T
        x64 = x.double()
        normed = x64 / (x64.square().mean(-1, keepdim=True) + 1e-5).sqrt() * norm_weight.double()
        torch.testing.assert_close(ours.double(), normed @ weight.double().T, rtol=1e-5, atol=1e-5 * size**0.5)
