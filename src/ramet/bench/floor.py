"""The least time a device can take for a workload: what must be read at its bandwidth, or computed at its GEMM rate.

With N matmul parameters, W weight bytes, k KV bytes a token, and bandwidth BW and rate F *measured* here, for a step::

    T_linear   = max(W / BW, 2 N rows / F)       T_gemm = the model's own matmuls, timed alone
    T_attn     = max(k (node tokens, each node once) / BW, 4 L Hq D (sum over rows of context) / F)
    floor      = T_linear + T_attn               floor_gemm = T_gemm + T_attn

summed over the prefill and all decode steps. Sampling, norms, text and the host are not in it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter
from typing import TYPE_CHECKING

import torch

from ramet.bench.workload import Workload
from ramet.models.dense import DenseDecoder
from ramet.models.layers import MIN_ROWS, Linear
from ramet.models.spec import ModelSpec

if TYPE_CHECKING:
    from ramet.llm import LLM


@dataclass(frozen=True)
class Rates:
    """What a device does: bytes read and floating-point operations, per second."""

    bytes_per_second: float
    flops_per_second: float


@dataclass(frozen=True)
class Floor:
    """Seconds of a workload at the device's rates, and with the matmuls as fast as they are alone."""

    seconds: float
    seconds_gemm: float
    rates: Rates


def best_seconds(call: Callable[[], object], repeats: int) -> float:
    """Return the shortest of several runs, after one to warm up."""
    call()
    best = float("inf")
    for _ in range(repeats):
        begin = perf_counter()
        call()
        best = min(best, perf_counter() - begin)
    return best


def measure_rates(dtype: torch.dtype) -> Rates:
    """Measure how fast this CPU reads 512 MiB, far more than any cache, and multiplies large matrices."""
    block = torch.ones(2**27)
    read = max(block.nbytes / best_seconds(call, 5) for call in (block.sum, block.max))
    size = 1536
    a, b = (torch.randn(size, size).to(dtype) for _ in range(2))
    return Rates(read, 2 * size**3 / best_seconds(lambda: torch.nn.functional.linear(a, b), 5))


class Costs:
    """Times of a step's parts on one device.

    Parameters
    ----------
    spec : ModelSpec
    dtype : torch.dtype
        Of weights and KV.
    rates : Rates
    """

    def __init__(self, spec: ModelSpec, dtype: torch.dtype, rates: Rates) -> None:
        self.rates, self.itemsize = rates, torch.finfo(dtype).bits // 8
        width = (spec.num_qo_heads + 2 * spec.num_kv_heads) * spec.head_dim
        layer = spec.hidden_size * (width + spec.num_qo_heads * spec.head_dim + 3 * spec.intermediate_size)
        self.body, self.head = spec.num_layers * layer, spec.vocab_size * spec.hidden_size
        self.kv_bytes = 2 * spec.num_layers * spec.num_kv_heads * spec.head_dim * self.itemsize
        self.score_flops = 4 * spec.num_layers * spec.num_qo_heads * spec.head_dim

    def linear(self, rows: int, logit_rows: int) -> float:
        """Seconds of all matmuls for ``rows`` tokens, ``logit_rows`` of them through the head."""
        read = (self.body + self.head) * self.itemsize / self.rates.bytes_per_second
        return max(read, 2 * (self.body * rows + self.head * logit_rows) / self.rates.flops_per_second)

    def attention(self, node_tokens: int, contexts: int) -> float:
        """Seconds of all attention: KV of ``node_tokens`` read once, ``contexts`` query-key pairs computed."""
        read = self.kv_bytes * node_tokens / self.rates.bytes_per_second
        return max(read, self.score_flops * contexts / self.rates.flops_per_second)


def linear_seconds(model: DenseDecoder, rows: int, logit_rows: int, repeats: int = 3) -> float:
    """Time the model's own matmuls for ``rows`` tokens, everything between them left out."""
    linears = [part for layer in model.layers for part in vars(layer).values() if isinstance(part, Linear)]
    # Widths come from the weights, which may be wider than the model says (its residual stream is).
    widths = {linear.weight.shape[1] for linear in linears}
    inputs = {width: torch.randn(max(rows, MIN_ROWS), width).to(model.dtype) for width in widths}
    last = torch.randn(max(logit_rows, MIN_ROWS), model.head.weight.shape[1]).to(model.dtype)
    calls = [(linear, inputs[linear.weight.shape[1]]) for linear in linears] + [(model.head, last)]

    def one_pass() -> None:
        for linear, x in calls:
            linear(x)

    with torch.inference_mode():
        return best_seconds(one_pass, repeats)


def workload_floor(
    costs: Costs,
    workload: Workload,
    *,
    max_num_seqs: int,
    chunk: int,
    gemm: Callable[[int, int], float] | None = None,
) -> Floor:
    """Return the floor of a workload.

    Parameters
    ----------
    costs : Costs
    workload : Workload
    max_num_seqs : int
        Samples that decode together; more run in waves.
    chunk : int
        Tokens of a prefill step (``max_num_batched_tokens``).
    gemm : callable, optional
        Measured seconds of the matmuls for (rows, logit rows); the floor's own ``linear`` by default.
    """
    samples = workload.num_prompts * workload.n
    rows = min(samples, max_num_seqs)
    waves = samples / rows
    groups = -(-rows // workload.n)
    own = workload.input_len - workload.prefix_len
    # The first token of a sample comes from the prompt's own pass, so the decode steps are one fewer.
    steps = range(1, workload.output_len)
    decode_attention = waves * sum(
        costs.attention(workload.prefix_len + groups * own + rows * t, rows * (workload.input_len + t)) for t in steps
    )
    pairs = workload.num_prompts * workload.input_len * (workload.input_len + 1) // 2
    prefill_attention = costs.attention(workload.unique_tokens, pairs)
    width = min(workload.unique_tokens, chunk)
    chunks = workload.unique_tokens / width

    def total(linear: Callable[[int, int], float]) -> float:
        prefill = chunks * linear(width, min(workload.num_prompts, width)) + prefill_attention
        return prefill + waves * len(steps) * linear(rows, rows) + decode_attention

    seconds = total(costs.linear)
    return Floor(seconds, total(gemm) if gemm is not None else seconds, costs.rates)


def measure_floor(llm: LLM, workload: Workload) -> Floor:
    """Measure the device and the model's matmuls, and return the floor of a workload on it."""
    model = llm.engine.runner.model
    if not isinstance(model, DenseDecoder):
        raise TypeError(f"the floor is known for DenseDecoder, not for {type(model).__name__}")
    costs = Costs(model.spec, model.dtype, measure_rates(model.dtype))
    return workload_floor(
        costs,
        workload,
        max_num_seqs=llm.config.max_num_seqs,
        chunk=llm.config.max_num_batched_tokens,
        gemm=lambda rows, logit_rows: linear_seconds(model, rows, logit_rows),
    )
