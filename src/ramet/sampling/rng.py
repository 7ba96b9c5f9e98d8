"""The frozen noise of sampling: a counter-based hash, a uniform, and a Gumbel variate for every token.

The noise of a token depends on four numbers and nothing else: the request's 64-bit seed, the sample id, the absolute
position of the token that is drawn, and the token id. All arithmetic below is on unsigned integers and wraps.

::

    mix64(z):  z ^= z >> 30;  z *= 0xBF58476D1CE4E5B9;  z ^= z >> 27;  z *= 0x94D049BB133111EB;  z ^= z >> 31

    stream     = mix64(mix64(seed + G) + (sample_id + 1) * G)          64 bits, once per sample
    key        = mix64(stream + (position + 1) * P)                    64 bits, once per row and step
    multiplier = (key mod 2^32) | 1        offset = key >> 32          two 32-bit row keys

    x = token * multiplier + offset                                    32 bits, once per token: two rounds
    x ^= x >> 16;  x *= 0x7FEB352D;  x ^= x >> 15;  x *= 0x846CA68B;  x ^= x >> 16

    v = min((float32(x) + 0.5) * 2^-32, 1 - 2^-24)                     float32, strictly inside (0, 1)
    E = -log1p(-v)        noise = -log(E)                              float32; an exponential, a Gumbel variate

with G = 0x9E3779B97F4A7C15 and P = 0xD1B54A32D192ED03. The keyed multiplier makes the distance of two token ids another
random number in every row, so that no pair of ids is correlated from row to row, as it would be with a key that is only
added or xor-ed. ``v`` is exact to the bit everywhere; this module computes the two logarithms in double precision and
rounds once, a GPU may compute them in float32.

Changing one bit of this changes every seeded answer: it is frozen, and tests hold its values.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

GOLDEN = np.uint64(0x9E3779B97F4A7C15)
POSITION = np.uint64(0xD1B54A32D192ED03)
ROUND_1 = 0x7FEB352D
ROUND_2 = 0x846CA68B
LARGEST_UNIFORM = np.float32(1.0 - 2.0**-24)
MAX_NOISE = 22.9
"""The noise is never above this (v = 2^-33 gives 22.87) ..."""
MIN_NOISE = -2.82
"""... and never below this (v = 1 - 2^-24 gives -2.812)."""


class RowKeys(NamedTuple):
    """The 32-bit keys of rows: uint32 arrays ``multiplier`` (odd) and ``offset``, both ``[R]``."""

    multiplier: np.ndarray
    offset: np.ndarray

    def take(self, rows: np.ndarray | slice) -> RowKeys:
        """Return the keys of some rows (an index array, a mask or a slice)."""
        return RowKeys(self.multiplier[rows], self.offset[rows])


def _mix64(z: np.ndarray) -> np.ndarray:
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def stream_keys(seed: int, sample_ids: np.ndarray) -> np.ndarray:
    """Return the 64-bit stream of each sample, which is constant over its life.

    Parameters
    ----------
    seed : int
        Taken modulo 2^64, so -1 and 2^64 - 1 are the same seed.
    sample_ids : int array [S]
        At least 0.

    Returns
    -------
    uint64 array [S]
    """
    base = _mix64(np.array([seed & (2**64 - 1)], dtype=np.uint64) + GOLDEN)
    ids = np.asarray(sample_ids).astype(np.uint64)
    return _mix64(base + (ids + np.uint64(1)) * GOLDEN)


def row_keys(streams: np.ndarray, positions: np.ndarray) -> RowKeys:
    """Return the row keys for drawing the tokens at ``positions``.

    Parameters
    ----------
    streams : uint64 array [R]
        From :func:`stream_keys`.
    positions : int array [R]
        Absolute position of the token that is drawn; the first token after a prompt of L tokens has position L.

    Examples
    --------
    >>> keys = row_keys(stream_keys(7, np.array([0, 1])), np.array([12, 12]))
    >>> [hex(k) for k in keys.offset]
    ['0xd61c2e2f', '0x1eeb29a7']
    """
    key = _mix64(streams + (np.asarray(positions).astype(np.uint64) + np.uint64(1)) * POSITION)
    return RowKeys(key.astype(np.uint32) | np.uint32(1), (key >> np.uint64(32)).astype(np.uint32))


def finish_bits(x: np.ndarray) -> np.ndarray:
    """Apply the last step of the hash, which leaves the upper 16 bits as they are (uint32 in, uint32 out)."""
    return x ^ (x >> np.uint32(16))


def token_bits(keys: RowKeys, tokens: np.ndarray) -> np.ndarray:
    """Return the 32 random bits of tokens: the reference, and the way to hash a few tokens.

    Parameters
    ----------
    keys : RowKeys
        One pair of keys per element; ``keys.multiplier[:, None]`` against ``tokens[None, :]`` gives whole rows.
    tokens : int array
        Broadcasts against the keys.

    Returns
    -------
    uint32 array
    """
    x = tokens.astype(np.uint32) * keys.multiplier + keys.offset
    x = (x ^ (x >> np.uint32(16))) * np.uint32(ROUND_1)
    x = (x ^ (x >> np.uint32(15))) * np.uint32(ROUND_2)
    return finish_bits(x)


def hash_rows(keys: RowKeys, token_ids: np.ndarray, x: np.ndarray, scratch: np.ndarray) -> None:
    """Write the hash of every token of every row, without its last step, into ``x``, on one core.

    ``finish_bits`` of what is written equals ``token_bits``.

    Parameters
    ----------
    keys : RowKeys
        Of R rows.
    token_ids : uint32 array [V]
    x : uint32 array [R, V]
        Overwritten.
    scratch : uint32 array [S, V]
        Overwritten. S rows are hashed at a time: few, so that the scratch stays in the core's own cache.
    """
    for start in range(0, len(x), len(scratch)):
        part = x[start : start + len(scratch)]
        rows = slice(start, start + len(part))
        shifted = scratch[: len(part)]
        np.multiply(token_ids, keys.multiplier[rows, None], out=part)
        np.add(part, keys.offset[rows, None], out=part)
        for shift, factor in ((16, ROUND_1), (15, ROUND_2)):
            np.right_shift(part, np.uint32(shift), out=shifted)
            np.bitwise_xor(part, shifted, out=part)
            np.multiply(part, np.uint32(factor), out=part)


def hash_rows_torch(keys: RowKeys, token_ids: torch.Tensor, x: torch.Tensor, scratch: torch.Tensor) -> None:
    """Do what :func:`hash_rows` does, on all of torch's threads.

    Torch has no shifts of unsigned integers, so the bits lie in int32 tensors and the sign that an arithmetic shift
    drags in is masked away.

    Parameters
    ----------
    keys : RowKeys
        Of R rows.
    token_ids : int32 tensor [V]
    x, scratch : int32 tensors [R, V]
        Overwritten.
    """
    torch.mul(token_ids, _as_int32(keys.multiplier), out=x)
    x.add_(_as_int32(keys.offset))
    for shift, factor in ((16, ROUND_1), (15, ROUND_2)):
        torch.bitwise_right_shift(x, shift, out=scratch)
        x.bitwise_xor_(scratch.bitwise_and_((1 << (32 - shift)) - 1))
        x.mul_(factor - (1 << 32) if factor >= 1 << 31 else factor)


def _as_int32(key: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(key).view(np.int32)[:, None])


def uniforms(bits: np.ndarray) -> np.ndarray:
    """Return the uniform variate of 32 random bits: float32, from 2^-33 to 1 - 2^-24."""
    return np.minimum((bits.astype(np.float32) + np.float32(0.5)) * np.float32(2.0**-32), LARGEST_UNIFORM)


def gumbel_noise(bits: np.ndarray) -> np.ndarray:
    """Return the Gumbel variate of 32 random bits: float32, non-increasing in the bits, about -2.81 to 22.87.

    Examples
    --------
    >>> gumbel_noise(np.array([0, 2**31, 2**32 - 1], dtype=np.uint32)).tolist()
    [22.873857498168945, 0.3665129244327545, -2.8115408420562744]
    """
    exponential = -np.log1p(-uniforms(bits).astype(np.float64))
    return (-np.log(exponential)).astype(np.float32)
