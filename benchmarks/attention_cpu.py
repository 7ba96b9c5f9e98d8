"""What attention costs on this CPU: one step of all layers over a forest, beside PyTorch's SDPA and the floor.

Usage: ``python benchmarks/attention_cpu.py [--dtype bfloat16] [--layers 30] [--case NAME] [--threads 2]``

Every layer has a pool of its own, so K and V come from memory as in a model. A time is the sum over layers of each
layer's fastest run. The peer is SDPA with every row's K and V gathered beforehand (gathering is not counted), as
engines without a shared prefix do it. The floor is the larger of two times: to read K and V, each node once, at the
measured speed of memory, and to multiply, at the measured speed of a large product. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import numpy as np
import torch

from ramet.attention import AttentionPlan, ForestArrays, plan

HEADS, KV_HEADS, HEAD_DIM, PAGE_SIZE = 9, 3, 64, 16


class Case(NamedTuple):
    """One prompt of ``prefix`` tokens, ``rows`` samples of ``tail`` tokens each, ``q_len`` queries of each sample."""

    name: str
    rows: int
    prefix: int
    tail: int
    q_len: int = 1


CASES = (
    Case("decode n=1, 544 keys", 1, 0, 544),
    Case("decode n=32, 512 + 32", 32, 512, 32),
    Case("decode n=64, 2048 + 32", 64, 2048, 32),
    Case("decode 16 prompts, 544 keys", 16, 0, 544),
    Case("verify n=32, 512 + 32, 5 queries", 32, 512, 32, 5),
    Case("prefill 512", 1, 0, 512, 512),
)


class Result(NamedTuple):
    """Milliseconds for all layers, but ``plan_ms`` and ``record_ms``, which are once per step."""

    case: str
    dtype: str
    ms: float
    per_row_ms: float
    sdpa_ms: float
    floor_ms: float
    efficiency: float
    plan_ms: float
    record_ms: float


def forest(case: Case, pages: np.ndarray) -> ForestArrays:
    """The case's forest, on the given (shuffled) pages."""
    shared = int(case.prefix > 0)
    tokens = np.array([case.prefix] * shared + [case.tail] * case.rows)
    start = np.array([0] * shared + [case.prefix] * case.rows)
    counts = -(-tokens // PAGE_SIZE)

    def ints(values: np.ndarray | list[int]) -> np.ndarray:
        return np.asarray(values, np.int32)

    return ForestArrays(
        cu_seqlens_q=ints(np.arange(case.rows + 1) * case.q_len),
        row_leaf=ints(np.arange(case.rows) + shared),
        node_parent=ints([-1] * shared + [shared - 1] * case.rows),
        node_start=ints(start),
        node_end=ints(start + tokens),
        node_first_slot=ints(np.zeros(len(tokens))),
        node_page_indptr=ints(np.append(0, np.cumsum(counts))),
        node_pages=ints(pages[: counts.sum()]),
    )


def num_pages(case: Case) -> int:
    return -(-case.prefix // PAGE_SIZE) + case.rows * -(-case.tail // PAGE_SIZE)


def fastest(call: Callable[[], object], repeats: int) -> float:
    """Milliseconds of the fastest call."""
    times = []
    for _ in range(repeats):
        begin = time.perf_counter()
        call()
        times.append(time.perf_counter() - begin)
    return min(times) * 1e3


def all_layers(calls: list[Callable[[], object]], repeats: int) -> float:
    """Milliseconds of all layers: each layer's fastest run, with the other layers in between."""
    best = [float("inf")] * len(calls)
    for _ in range(repeats):
        for i, call in enumerate(calls):
            best[i] = min(best[i], fastest(call, 1))
    return sum(best)


def bandwidth(megabytes: int = 256) -> float:
    """Bytes per millisecond that a reduction reads from memory."""
    data = torch.ones(megabytes << 18, dtype=torch.float32)
    return data.nbytes / fastest(data.sum, 5)


def throughput(dtype: torch.dtype) -> float:
    """Operations per millisecond of a large product."""
    n = 1024
    a, b = torch.randn(n, n).to(dtype), torch.randn(n, n).to(dtype)
    return 2 * n**3 / fastest(lambda: torch.mm(a, b), 10)


def floor_ms(case: Case, dtype: torch.dtype, layers: int, bytes_per_ms: float, flops_per_ms: float) -> float:
    positions = case.prefix + case.rows * case.tail
    read = positions * 2 * KV_HEADS * HEAD_DIM * dtype.itemsize / bytes_per_ms
    keys = case.prefix + case.tail - (case.q_len - 1) / 2  # seen by a query, on average
    multiply = 4 * case.rows * case.q_len * keys * HEADS * HEAD_DIM / flops_per_ms
    return layers * max(read, multiply)


def sdpa_call(case: Case, q: torch.Tensor) -> Callable[[], object]:
    """SDPA over contiguous K and V of every row, KV heads repeated beforehand."""
    keys = case.prefix + case.tail
    k, v = (torch.randn(case.rows, HEADS, keys, HEAD_DIM, dtype=torch.float32).to(q.dtype) for _ in range(2))
    queries = q.view(case.rows, case.q_len, HEADS, HEAD_DIM).transpose(1, 2)
    if case.q_len == keys:
        return lambda: torch.nn.functional.scaled_dot_product_attention(queries, k, v, is_causal=True)
    mask = torch.ones(case.q_len, keys, dtype=torch.bool).tril(keys - case.q_len)
    return lambda: torch.nn.functional.scaled_dot_product_attention(queries, k, v, attn_mask=mask)


def measure(case: Case, dtype: torch.dtype, layers: int, speed: tuple[float, float], repeats: int) -> Result:
    """Time one case; ``speed`` is the measured bandwidth and throughput."""
    rng = np.random.default_rng(0)
    torch.manual_seed(0)
    pages = num_pages(case)
    arrays = forest(case, rng.permutation(pages))
    make = partial(plan, arrays, num_qo_heads=HEADS, num_kv_heads=KV_HEADS, head_dim=HEAD_DIM, page_size=PAGE_SIZE)
    pools = [torch.randn(2, pages, PAGE_SIZE, KV_HEADS, HEAD_DIM).to(dtype) for _ in range(layers)]
    q = torch.randn(case.rows * case.q_len, HEADS, HEAD_DIM).to(dtype)

    def layer_calls(work: AttentionPlan) -> list[Callable[[], object]]:
        return [partial(work.run, q, k, v, sm_scale=HEAD_DIM**-0.5) for k, v in pools]

    calls = layer_calls(make())
    ms = all_layers(calls, repeats)
    plan_ms = fastest(make, 30)
    record_ms = max(0.0, fastest(lambda: layer_calls(make())[0](), 30) - plan_ms - fastest(calls[0], 30))
    sdpa = sdpa_call(case, q)
    floor = floor_ms(case, dtype, layers, *speed)
    return Result(
        case=case.name,
        dtype=str(dtype).removeprefix("torch."),
        ms=ms,
        per_row_ms=all_layers(layer_calls(make(gate="closed")), max(1, repeats // 4)),
        sdpa_ms=layers * fastest(sdpa, max(2, repeats // 4)),
        floor_ms=floor,
        efficiency=floor / ms,
        plan_ms=plan_ms,
        record_ms=record_ms,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", default="bfloat16,float32", help="comma-separated (default: %(default)s)")
    parser.add_argument("--layers", type=int, default=30, help="default: %(default)s")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="default: %(default)s")
    parser.add_argument("--repeats", type=int, default=20, help="default: %(default)s")
    parser.add_argument("--case", default="", help="only cases whose name contains this")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    print(f"{HEADS} heads, {KV_HEADS} KV heads of {HEAD_DIM}, pages of {PAGE_SIZE}, {arguments.layers} layers")
    print(f"{platform.processor() or platform.machine()}, {arguments.threads} threads, torch {torch.__version__}")
    columns = Result._fields[2:]
    print(f"{'case':34}{'dtype':10}" + "".join(f"{name:>12}" for name in columns))
    results = []
    memory = bandwidth()
    for name in arguments.dtype.split(","):
        dtype = getattr(torch, name)
        speed = memory, throughput(dtype)
        for case in CASES:
            if arguments.case in case.name:
                result = measure(case, dtype, arguments.layers, speed, arguments.repeats)
                results.append(result)
                numbers = "".join(f"{value:12.2f}" for value in result[2:])
                print(f"{result.case:34}{result.dtype:10}{numbers}", flush=True)
    print(json.dumps({"torch": torch.__version__, "results": [result._asdict() for result in results]}))


if __name__ == "__main__":
    main()
