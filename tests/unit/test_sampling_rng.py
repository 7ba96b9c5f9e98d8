"""The noise: frozen values, equal in NumPy and torch, uniform, and independent along every coordinate."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy import stats

from ramet.sampling.rng import (
    MAX_NOISE,
    MIN_NOISE,
    RowKeys,
    finish_bits,
    gumbel_noise,
    hash_rows,
    hash_rows_torch,
    row_keys,
    stream_keys,
    token_bits,
    uniforms,
)

M64, M32 = 2**64 - 1, 2**32 - 1
FROZEN = [
    # seed, sample id, position, token, stream, multiplier, offset, bits
    (0, 0, 0, 0, 0xA706DD2F4D197E6F, 0x1EF4A3DF, 0xDEFDA9F6, 0xCF7264EF),
    (7, 0, 12, 0, 0xB8B4C2977EABCE45, 0x94938E77, 0xD61C2E2F, 0x01639AC8),
    (7, 1, 12, 49151, 0xA65305FD338EC8FE, 0x5D7922FD, 0x1EEB29A7, 0xADDD5AAE),
    (-1, 63, 100000, 151935, 0x7BA593589C8303CF, 0xE39E7257, 0xC919FA37, 0x07598AA0),
    (2**63, 16383, 1, 65536, 0xE5AFA6AF53925A84, 0x3CE63597, 0x4D4C7E63, 0x1FA31D12),
    (123456789, 5, 4096, 2, 0xA884A7D265DB5DFE, 0xB60531D3, 0x5CE1732A, 0xC38F92EF),
]


def mix64(z: int) -> int:
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 & M64
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB & M64
    return z ^ (z >> 31)


def documented(seed: int, sample: int, position: int, token: int) -> tuple[int, int, int, int]:
    """The module's documentation in Python integers: stream, multiplier, offset, bits."""
    golden = 0x9E3779B97F4A7C15
    stream = mix64((mix64((seed % 2**64) + golden & M64) + (sample + 1) * golden) & M64)
    key = mix64((stream + (position + 1) * 0xD1B54A32D192ED03) & M64)
    multiplier, offset = (key & M32) | 1, key >> 32
    x = (token * multiplier + offset) & M32
    x ^= x >> 16
    x = x * 0x7FEB352D & M32
    x ^= x >> 15
    x = x * 0x846CA68B & M32
    return stream, multiplier, offset, x ^ (x >> 16)


def bits_of(seed: int, samples: np.ndarray, positions: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    """Bits for broadcasting arrays of samples, positions and tokens."""
    samples, positions, tokens = np.broadcast_arrays(samples, positions, tokens)
    keys = row_keys(stream_keys(seed, samples.ravel()), positions.ravel())
    return token_bits(keys, tokens.ravel()).reshape(samples.shape)


@pytest.mark.parametrize("seed, sample, position, token, stream, multiplier, offset, bits", FROZEN)
def test_values_are_frozen(
    seed: int, sample: int, position: int, token: int, stream: int, multiplier: int, offset: int, bits: int
) -> None:
    streams = stream_keys(seed, np.array([sample]))
    keys = row_keys(streams, np.array([position]))
    assert (int(streams[0]), int(keys.multiplier[0]), int(keys.offset[0])) == (stream, multiplier, offset)
    assert int(token_bits(keys, np.array([token]))[0]) == bits


def test_values_are_the_documented_ones() -> None:
    rng = np.random.default_rng(0)
    for _ in range(200):
        seed = int(rng.integers(-(2**63), 2**63))
        sample, position, token = (int(rng.integers(0, limit)) for limit in (20_000, 200_000, 300_000))
        streams = stream_keys(seed, np.array([sample]))
        keys = row_keys(streams, np.array([position]))
        bits = token_bits(keys, np.array([token]))
        got = tuple(int(a[0]) for a in (streams, keys.multiplier, keys.offset, bits))
        assert got == documented(seed, sample, position, token)


def test_seeds_are_taken_modulo_2_to_the_64() -> None:
    ids = np.arange(3)
    assert np.array_equal(stream_keys(-1, ids), stream_keys(2**64 - 1, ids))
    assert not np.array_equal(stream_keys(-1, ids), stream_keys(1, ids))


@pytest.mark.parametrize("rows, vocab_size", [(1, 1), (3, 7), (2, 17), (5, 1000), (3, 49_157), (1, 151_936)])
def test_whole_rows_equal_the_reference_bit_for_bit_in_numpy_and_torch(rows: int, vocab_size: int) -> None:
    keys = row_keys(stream_keys(-5, np.arange(rows)), np.arange(rows) * 1001)
    x, scratch = torch.full((2, rows, vocab_size), -7, dtype=torch.int32)
    hash_rows_torch(keys, torch.arange(vocab_size, dtype=torch.int32), x, scratch)
    y, few = np.full((rows, vocab_size), 7, dtype=np.uint32), np.empty((2, vocab_size), dtype=np.uint32)
    hash_rows(keys, np.arange(vocab_size, dtype=np.uint32), y, few)
    reference = token_bits(RowKeys(keys.multiplier[:, None], keys.offset[:, None]), np.arange(vocab_size)[None])
    assert np.array_equal(finish_bits(x.numpy().view(np.uint32)), reference)
    assert np.array_equal(finish_bits(y), reference)
    assert np.array_equal(x.numpy().view(np.uint32) >> 16, reference >> 16)  # the last step keeps the upper half


def test_uniforms_lie_strictly_inside_and_noise_is_finite_and_monotone() -> None:
    edges = np.array([0, 1, 2**23, 2**24, 2**31, 2**32 - 129, 2**32 - 128, 2**32 - 1], dtype=np.uint32)
    assert uniforms(edges).tolist() == pytest.approx(np.minimum((edges + 0.5) / 2.0**32, 1 - 2.0**-24).tolist())
    assert uniforms(edges).min() > 0 and uniforms(edges).max() == np.float32(1 - 2.0**-24) < 1
    bits = np.sort(np.random.default_rng(1).integers(0, 2**32, 500_000, dtype=np.uint64).astype(np.uint32))
    noise = gumbel_noise(np.concatenate([edges[:2], bits[bits > 1], edges[-1:]]))
    assert (np.diff(noise) <= 0).all()
    assert noise.min() > MIN_NOISE and noise.max() < MAX_NOISE


LARGE = 100_000


@pytest.mark.parametrize("along", ["tokens", "positions", "samples"])
def test_bits_are_uniform_along_every_coordinate(along: str) -> None:
    steps = np.arange(LARGE)
    zero = np.zeros(1, dtype=np.int64)
    where = {"samples": zero + 3, "positions": zero + 1000, "tokens": zero + 17, along: steps}
    bits = bits_of(11, where["samples"], where["positions"], where["tokens"])
    for shift in (24, 16, 8, 0):  # every byte
        counts = np.bincount((bits >> np.uint32(shift)) & 255, minlength=256)
        assert stats.chisquare(counts).pvalue > 1e-3
    assert stats.kstest(np.exp(-gumbel_noise(bits).astype(np.float64)), "expon").pvalue > 1e-3
    rare = np.count_nonzero(bits < 2**22)  # the tail that decides unlikely tokens
    assert stats.binomtest(rare, LARGE, 2.0**-10).pvalue > 1e-3


def test_bits_are_uniform_over_seeds() -> None:
    streams = np.concatenate([stream_keys(seed, np.zeros(1)) for seed in range(-10_000, 10_000)])
    assert len(np.unique(streams)) == 20_000
    bits = token_bits(row_keys(streams, np.full(20_000, 5)), np.full(20_000, 3))
    assert stats.chisquare(np.bincount(bits >> np.uint32(24), minlength=256)).pvalue > 1e-3


@pytest.mark.parametrize("d_sample, d_position, d_token", [(0, 0, 1), (0, 1, 0), (1, 0, 0), (0, 1, -1), (-1, 1, 0)])
def test_neighbours_are_independent(d_sample: int, d_position: int, d_token: int) -> None:
    rng = np.random.default_rng(2)
    sample, position, token = rng.integers(1, 1000, LARGE), rng.integers(1, 5000, LARGE), rng.integers(1, 50_000, LARGE)
    one = bits_of(1, sample, position, token)
    other = bits_of(1, sample + d_sample, position + d_position, token + d_token)
    table = np.zeros((16, 16))
    np.add.at(table, (one >> np.uint32(28), other >> np.uint32(28)), 1)
    assert stats.chisquare(table.ravel()).pvalue > 1e-3
    assert abs(np.corrcoef(gumbel_noise(one), gumbel_noise(other))[0, 1]) < 4 / np.sqrt(LARGE)


@pytest.mark.parametrize("distance", [1, 2, 3, 255, 256, 4096, 2**15, 2**16, 2**17, 3 * 2**15])
def test_no_pair_of_tokens_is_correlated_from_row_to_row(distance: int) -> None:
    keys = row_keys(stream_keys(4, np.arange(4 * LARGE)), np.full(4 * LARGE, 100))
    one = gumbel_noise(token_bits(keys, np.full(4 * LARGE, 7)))
    other = gumbel_noise(token_bits(keys, np.full(4 * LARGE, 7 + distance)))
    for p in (0.5, 0.1, 0.01):  # two tokens of probability p and 1 - p: the first must win with p
        wins = np.count_nonzero(one + np.log(p) > other + np.log(1 - p))
        assert abs(wins - 4 * LARGE * p) < 4 * np.sqrt(4 * LARGE * p * (1 - p))


@pytest.mark.parametrize("which", ["token", "position", "sample", "seed"])
def test_one_changed_bit_changes_every_output_bit_half_of_the_time(which: str) -> None:
    rng = np.random.default_rng(3)
    cases = 4000
    sample, position, token = (rng.integers(0, 2**16, cases) for _ in range(3))
    before = bits_of(9, sample, position, token)
    for bit in range(0, 16, 3):
        flip = 1 << bit
        after = bits_of(
            9 ^ (flip if which == "seed" else 0),
            sample ^ (flip if which == "sample" else 0),
            position ^ (flip if which == "position" else 0),
            token ^ (flip if which == "token" else 0),
        )
        changed = np.unpackbits((before ^ after).view(np.uint8)).reshape(cases, 32).mean(axis=0)
        assert np.abs(changed - 0.5).max() < 5 * 0.5 / np.sqrt(cases)
