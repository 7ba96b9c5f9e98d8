"""Measures the cost table that the planner's gates and splits come from, on the GPU at hand.

Every cost is a slope or a difference between times of whole calls (:class:`ramet.attention.cost_table.Costs` says of
what), so that what is common to both cancels. Splits are forced by tables of their own: one whose items cost nothing
cuts as finely as ``min_split_tokens`` lets it, one whose items cost a second does not cut at all.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from datetime import date
from pathlib import Path

import torch

from ramet.attention import cost_table
from ramet.attention.cost_table import Costs, CostTable
from ramet.attention.registry import BACKENDS
from ramet.bench.attention_data import Data
from ramet.bench.attention_runner import Candidate, Runner, problem_of
from ramet.bench.attention_shapes import Shape
from ramet.errors import InvalidArgument, Unsupported

BACKEND = "triton"
BLOCK = 64
SPLITS = (64, 128, 256, 512, 1024)
LEAST = 1e-4
"""Slopes that noise makes negative or zero become this."""


def calibrate(device: torch.device, dtype: torch.dtype, head_dim: int, say: Callable[[str], None]) -> CostTable:
    """Measure the costs of the planned kernels on this GPU.

    Parameters
    ----------
    device : torch.device
    dtype : torch.dtype
        Of q, K and V.
    head_dim : int
    say : callable
        Is told every cost as it is found.

    Raises
    ------
    InvalidArgument
        The device is no GPU.
    Unsupported
        The backend does not serve it.
    """
    if device.type != "cuda":
        raise InvalidArgument("--calibrate measures a GPU, and the device is the CPU; run it where torch finds a GPU.")
    name = torch.cuda.get_device_name(device)
    sm_count = torch.cuda.get_device_properties(device).multi_processor_count
    base = Shape(1, 1, 0, num_qo_heads=4 * 7, num_kv_heads=4, head_dim=head_dim, page_size=64)
    support = BACKENDS[BACKEND].supports(problem_of(base, device, dtype))
    if not support.ok:
        raise Unsupported(support.reason)
    before = cost_table.table_for(name).lookup(BACKEND, head_dim, dtype.itemsize)
    start = replace(before, head_dim=head_dim, kv_bytes=dtype.itemsize)
    measure = _Measure(device, dtype, name, sm_count)
    with torch.inference_mode():
        costs = _costs(measure, base, start)
    for field, value in asdict(costs).items():
        say(f"{field:<18}{value}")
    source = f"ramet bench attention --calibrate, {date.today()}, torch {torch.__version__}, {dtype}"
    return CostTable(name, sm_count, source, (costs,))


class _Measure:
    """Times shapes under a given table of costs."""

    def __init__(self, device: torch.device, dtype: torch.dtype, name: str, sm_count: int) -> None:
        self.device, self.dtype, self.name, self.sm_count = device, dtype, name, sm_count

    def us(self, shape: Shape, costs: Costs, gate: str = "auto") -> float:
        """Microseconds of one layer."""
        data = Data(shape, self.dtype, self.device, seed=0)
        data.fill_unused(0.0)
        candidate = Candidate(BACKEND, BACKENDS[BACKEND], gate)
        with _table_in_force(CostTable(self.name, self.sm_count, "a trial", (costs,))):
            return Runner(candidate, data, problem_of(shape, self.device, self.dtype)).time()


@contextmanager
def _table_in_force(table: CostTable) -> Iterator[None]:
    """Make the planner use a table: through a new file each time, since files are read once."""
    former = os.environ.get(cost_table.ENVIRONMENT)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "costs.json"
        table.save(path)
        os.environ[cost_table.ENVIRONMENT] = str(path)
        try:
            yield
        finally:
            if former is None:
                del os.environ[cost_table.ENVIRONMENT]
            else:
                os.environ[cost_table.ENVIRONMENT] = former


def _costs(measure: _Measure, base: Shape, start: Costs) -> Costs:
    """All costs, each with those found before in force."""
    whole = replace(start, item_us=1e6)  # no splits
    heads, sms = base.num_kv_heads, measure.sm_count
    waves = max(1, sms // heads)  # rows of which each KV head has an SM of its own

    def row(rows: int, tail: int) -> float:
        return measure.us(replace(base, n=rows, tail=tail), whole)

    launch = row(1, 1)
    token_bytes = 2 * heads * base.head_dim * start.kv_bytes
    stream = 4 * waves * 2048 * token_bytes / max(row(4 * waves, 4096) - row(4 * waves, 2048), LEAST)
    row_block = (row(waves // 2, 4096) - row(waves // 2, 2048)) / (2048 / BLOCK)
    item = (row(16 * waves, 256) - row(8 * waves, 512)) / 8  # the same tokens in eight more items an SM
    many = replace(base, n=8 * sms, tail=1)  # arithmetic is the limit: every SM has whole tiles
    tiles = -(-many.rows * many.num_qo_heads // heads // BLOCK) * heads
    long, short = (measure.us(replace(many, prompt_len=length), whole, "open") for length in (4096, 2048))
    shared_block = (long - short) / (2048 / BLOCK * tiles / sms)
    deep = replace(base, n=512, tail=64, prompt_len=512)
    levels = measure.us(replace(deep, system_len=256, prompt_len=256), whole, "open") - measure.us(deep, whole, "open")
    found = replace(
        start,
        launch_us=max(launch, LEAST),
        item_us=max(item, LEAST),
        shared_block_us=max(shared_block, LEAST),
        row_block_us=max(row_block, LEAST),
        bytes_per_us=stream,
        partial_ns=max(levels * 1e3 / (deep.rows * deep.num_qo_heads), LEAST),
    )
    fine = {least: replace(found, item_us=LEAST, partial_ns=LEAST, min_split_tokens=least) for least in SPLITS}
    lone = replace(base, n=2, tail=8192)
    return replace(found, min_split_tokens=min(SPLITS, key=lambda least: measure.us(lone, fine[least])))
