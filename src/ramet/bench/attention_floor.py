"""The least time one layer's attention can take: KV read once at the card's bandwidth, or scores at its matmul rate.

::

    floor = max(2 Hkv D itemsize (sum of node tokens, each node once) / BW, 4 Hq D q (sum over rows of context) / F)

======================  ==========  ===========  ==========================================================
card                    BW, bytes/s  F, flop/s    source
======================  ==========  ===========  ==========================================================
NVIDIA H200             4.3e12      790e12       measured: device copy, 8192-cubed bf16 product
NVIDIA H100             3.35e12     790e12       vendor's bandwidth; the H200's matmul rate (same processor)
another GPU, a CPU      measured    measured     when the benchmark starts
======================  ==========  ===========  ==========================================================
"""

from __future__ import annotations

from collections.abc import Callable
from types import MappingProxyType
from typing import NamedTuple

import torch

from ramet.bench.attention_shapes import Shape
from ramet.bench.floor import Rates, measure_rates

CARDS = MappingProxyType({"NVIDIA H200": Rates(4.3e12, 790e12), "NVIDIA H100": Rates(3.35e12, 790e12)})
"""Rates by the beginning of the card's name; the first that matches counts."""


class Floor(NamedTuple):
    """Microseconds: the floor is the larger of both."""

    bytes_us: float
    flops_us: float

    @property
    def us(self) -> float:
        return max(self.bytes_us, self.flops_us)


def floor_of(shape: Shape, itemsize: int, rates: Rates) -> Floor:
    """The floor of a shape.

    Examples
    --------
    >>> floor = floor_of(Shape(3, 40, 600), 2, CARDS["NVIDIA H200"])
    >>> round(floor.bytes_us, 1), round(floor.flops_us, 1)
    (15.5, 1.9)
    """
    read = 2 * shape.num_kv_heads * shape.head_dim * itemsize * shape.node_tokens
    flops = 4 * shape.num_qo_heads * shape.head_dim * shape.q_len * shape.rows * shape.context
    return Floor(read / rates.bytes_per_second * 1e6, flops / rates.flops_per_second * 1e6)


def rates_of(device: torch.device, dtype: torch.dtype) -> tuple[Rates, str]:
    """Rates of a device, and where they come from."""
    if device.type == "cpu":
        return measure_rates(dtype), "measured: 512 MiB read, a 1536-cubed product"
    name = torch.cuda.get_device_name(device)
    for card, rates in CARDS.items():
        if name.startswith(card):
            return rates, f"table of cards: {card}"
    return _measure_gpu(dtype), "measured: 2 GiB read, an 8192-cubed product"


def _measure_gpu(dtype: torch.dtype) -> Rates:
    block = torch.ones(2**29, device="cuda")
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.float32).to(dtype) for _ in range(2))
    read, multiply = _event_seconds(block.sum), _event_seconds(lambda: a @ b)
    return Rates(block.nbytes / read, 2 * 8192**3 / multiply)


def _event_seconds(call: Callable[[], object], repeats: int = 5) -> float:
    call()
    best = float("inf")
    for _ in range(repeats):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        call()
        end.record()
        end.synchronize()
        best = min(best, begin.elapsed_time(end) * 1e-3)
    return best
