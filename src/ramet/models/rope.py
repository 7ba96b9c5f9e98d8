"""Rotary position embedding: what a model asks for, its frequencies, and the table that turns q and k.

Pairs of dimensions are turned as one complex number each, so that a layer's q and k take a single multiplication in
place. Checkpoints in Hugging Face layout pair dimension i with i + rotary_dim / 2; :func:`interleave` reorders the rows
of their q and k weights so that pairs are neighbours. Scores do not change: q and k are permuted alike.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

ROPE_TYPES = ("default", "linear", "dynamic", "yarn", "llama3")


@dataclass(frozen=True)
class RopeSpec:
    """What the configuration says about rotary embeddings.

    Parameters
    ----------
    theta : float
        Base of the frequencies.
    rotary_dim : int
        Leading dimensions of each head that are turned; the rest is left as it is (partial rotary).
    type : {"default", "linear", "dynamic", "yarn", "llama3"}
    factor : float
        By how much the context is stretched; 1 where the type does not stretch.
    original_max_position : int
        Context length of the training before stretching.
    attention_factor : float
        Multiplies cos and sin (YaRN's temperature).
    beta_fast, beta_slow : float
        YaRN: rotations over the original context above (below) which a frequency is kept (fully stretched).
    truncate : bool
        YaRN: whether these bounds are rounded to whole dimensions.
    low_freq_factor, high_freq_factor : float
        llama3: the same bounds, as wavelengths that fit in the original context.
    frequency_factors : tuple of float
        Divisors of each frequency, as GGUF files carry them instead of llama3's parameters; usually empty.
    """

    theta: float
    rotary_dim: int
    type: str = "default"
    factor: float = 1.0
    original_max_position: int = 0
    attention_factor: float = 1.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    frequency_factors: tuple[float, ...] = ()


def frequencies(rope: RopeSpec, max_model_len: int) -> Tensor:
    """Return the angle per position of each pair: float32 ``[rotary_dim / 2]``.

    ``dynamic`` depends on the text's length, which would turn cached keys again with every token; here the frequencies
    are those of a text of ``max_model_len`` tokens, from the first token on. Up to the original context they are the
    unscaled ones.
    """
    base, dim = rope.theta, rope.rotary_dim
    if rope.type == "dynamic" and max_model_len > rope.original_max_position:
        stretch = rope.factor * max_model_len / rope.original_max_position - (rope.factor - 1)
        base *= stretch ** (dim / (dim - 2))
    inv_freq = 1.0 / (base ** (torch.arange(0, dim, 2, dtype=torch.int64).float() / dim))
    if rope.frequency_factors:
        inv_freq = inv_freq / torch.tensor(rope.frequency_factors)
    if rope.type == "linear":
        inv_freq = inv_freq / rope.factor
    elif rope.type == "yarn":
        inv_freq = _yarn(rope, inv_freq)
    elif rope.type == "llama3":
        inv_freq = _llama3(rope, inv_freq)
    return inv_freq


def _yarn(rope: RopeSpec, inv_freq: Tensor) -> Tensor:
    def dimension_of(rotations: float) -> float:
        angle = rope.original_max_position / (rotations * 2 * math.pi)
        return rope.rotary_dim * math.log(angle) / (2 * math.log(rope.theta))

    low, high = dimension_of(rope.beta_fast), dimension_of(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.rotary_dim - 1)
    if low == high:
        high += 0.001  # the ramp below must not divide by zero
    ramp = ((torch.arange(rope.rotary_dim // 2).float() - low) / (high - low)).clamp(0, 1)
    return inv_freq / rope.factor * ramp + inv_freq * (1 - ramp)


def _llama3(rope: RopeSpec, inv_freq: Tensor) -> Tensor:
    wavelength = 2 * math.pi / inv_freq
    fits = rope.original_max_position / wavelength
    smooth = (fits - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    between = (1 - smooth) * inv_freq / rope.factor + smooth * inv_freq
    stretched = torch.where(fits < rope.low_freq_factor, inv_freq / rope.factor, between)
    return torch.where(fits > rope.high_freq_factor, inv_freq, stretched)


def interleave(rows: Tensor, head_dim: int, rotary_dim: int) -> Tensor:
    """Reorder rows ``[heads * head_dim, ...]`` so that the two dimensions of a rotary pair are neighbours."""
    heads = rows.reshape(-1, head_dim, *rows.shape[1:])
    half = rotary_dim // 2
    pairs = torch.arange(rotary_dim).view(2, half).T.reshape(-1)
    order = torch.cat((pairs, torch.arange(rotary_dim, head_dim)))
    return heads[:, order].reshape(rows.shape)


class Rope:
    """The factors of every position.

    The table holds cos + i sin of every position, computed once in float32: computing it per step would give values
    whose last bit depends on the batch (vectorised and scalar code differ).
    """

    def __init__(self, rope: RopeSpec, max_model_len: int) -> None:
        angles = torch.outer(torch.arange(max_model_len).float(), frequencies(rope, max_model_len))
        scale = torch.full_like(angles, rope.attention_factor)
        self.table = torch.polar(scale, angles)  # complex64 [max_model_len, rotary_dim / 2]

    def at(self, positions: Tensor, heads: int, head_dim: int, dtype: torch.dtype) -> Rotation:
        """Return the rotation of rows at ``positions`` (int64 ``[T]``), for all layers of a step."""
        return Rotation(self.table.index_select(0, positions).unsqueeze(1), heads, head_dim, dtype)


class Rotation:
    """Turns the first ``heads`` heads of each row by its position.

    Parameters
    ----------
    factors : Tensor [T, 1, rotary_dim / 2]
        complex64, cos + i sin.
    heads, head_dim : int
    dtype : torch.dtype
        Of the rows to turn.
    """

    def __init__(self, factors: Tensor, heads: int, head_dim: int, dtype: torch.dtype) -> None:
        tokens, _, half = factors.shape
        self.factors = factors
        self.shape = (tokens, heads, half, 2)
        self.head_dim = head_dim
        # There is no complex bfloat16: such rows are copied out and back, and the rotation itself is in float32. The
        # copy is made once per step, since each kernel that a layer saves is worth 4 us.
        self.copy = None if dtype == torch.float32 else torch.empty(self.shape)
        self.numbers = None if self.copy is None else torch.view_as_complex(self.copy)

    def turn_(self, rows: Tensor) -> None:
        """Turn ``rows [T, at least heads * head_dim]`` (pairs interleaved) in place."""
        pairs = rows.as_strided(self.shape, (rows.stride(0), self.head_dim, 2, 1))
        if self.copy is None or self.numbers is None:
            torch.view_as_complex(pairs).mul_(self.factors)
        else:
            self.copy.copy_(pairs)
            self.numbers.mul_(self.factors)
            pairs.copy_(self.copy)
