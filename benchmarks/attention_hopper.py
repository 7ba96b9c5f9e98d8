"""The Hopper kernel on the shapes of its targets: one layer, merge included, graph replay, K and V rotated over pools.

Usage: ``python benchmarks/attention_hopper.py [--json FILE]``. Needs an SM90 GPU. Heads 28/4 of 128, bf16, pages of
128, tails of 256 tokens. The floor is the larger of bytes / 4.3 TB/s and operations / 790 TFLOP/s.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from ramet.attention import ForestArrays, plan

HEADS, KV_HEADS, DIM, PAGE, TAIL = 28, 4, 128, 128, 256
BYTES_PER_US, OPERATIONS_PER_US = 4.3e6, 790e6
POOLS, COLD_BYTES = 8, 600_000_000


class Target(NamedTuple):
    """A shape, and the microseconds that it must reach."""

    prompts: int
    samples: int
    prefix: int
    q_len: int
    must: float

    def __str__(self) -> str:
        return f"{self.prompts}x{self.samples} L{self.prefix} q{self.q_len}"

    @property
    def rows(self) -> int:
        return self.prompts * self.samples

    @property
    def floor_us(self) -> float:
        moved = (self.prompts * self.prefix + self.rows * TAIL) * KV_HEADS * DIM * 4
        operations = self.rows * self.q_len * HEADS * 4 * DIM * (self.prefix + TAIL)
        return max(moved / BYTES_PER_US, operations / OPERATIONS_PER_US)


TARGETS = (
    *(Target(3, 40, prefix, 1, must) for prefix, must in ((600, 26), (1600, 28), (4000, 31), (6500, 37), (16000, 62))),
    Target(1, 64, 8000, 1, 22),
    Target(1, 256, 8000, 1, 60),
    Target(16, 16, 4000, 1, 74),
    Target(32, 8, 1000, 1, 58),
    Target(1, 4, 16000, 1, 14),
    *(Target(3, 40, prefix, 4, must) for prefix, must in ((600, 30), (1600, 36), (4000, 58))),
    *(Target(3, 40, prefix, 9, must) for prefix, must in ((600, 38), (1600, 60), (4000, 115))),
)


def forest_of(target: Target) -> ForestArrays:
    """Prompts with samples of their own tails each, pages in random order."""
    prompts, rows = target.prompts, target.rows
    parent = np.append(np.full(prompts, -1), np.repeat(np.arange(prompts), target.samples))
    start = np.append(np.zeros(prompts), np.full(rows, target.prefix))
    end = np.append(np.full(prompts, target.prefix), np.full(rows, target.prefix + TAIL))
    indptr = np.append(0, np.cumsum(-(-(end - start) // PAGE)))
    leaf = prompts + np.arange(rows)
    arrays = (np.arange(rows + 1) * target.q_len, leaf, parent, start, end, start * 0, indptr)
    pages = np.random.default_rng(0).permutation(int(indptr[-1]))
    return ForestArrays(*(x.astype(np.int32) for x in (*arrays, pages)))


def measure(target: Target, repeats: int = 15) -> list[float]:
    """Microseconds of one layer in each replay, sorted."""
    forest = forest_of(target)
    shape = (len(forest.node_pages), PAGE, KV_HEADS, DIM)
    pools = max(POOLS, min(28, COLD_BYTES // (4 * int(np.prod(shape))) + 1))
    dtype = torch.bfloat16
    k, v = (torch.randn(pools, *shape, device="cuda", dtype=dtype) for _ in range(2))
    q = 2 * torch.randn(pools, target.rows * target.q_len, HEADS, DIM, device="cuda", dtype=dtype)
    out = torch.empty_like(q[0])
    work = plan(
        forest,
        num_qo_heads=HEADS,
        num_kv_heads=KV_HEADS,
        head_dim=DIM,
        page_size=PAGE,
        dtype=dtype,
        device="cuda",
        backend="hopper",
    )

    def layers() -> None:
        for pool in range(pools):
            work.run(q[pool], k[pool], v[pool], sm_scale=DIM**-0.5, out=out)

    layers()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        layers()
        layers()
    graph.replay()
    times = []
    for _ in range(repeats):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1000 / (2 * pools))
    return sorted(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="where to write the numbers")
    file = parser.parse_args().json
    results = []
    print(f"{'shape':18} {'us':>7} {'floor':>7} {'of floor':>8} {'must':>6}")
    for target in TARGETS:
        times = measure(target)
        us, floor = times[len(times) // 2], target.floor_us
        print(f"{target!s:18} {us:7.1f} {floor:7.1f} {floor / us:8.2f} {target.must:6.0f}", flush=True)
        results.append({"shape": str(target), "us": us, "low": times[1], "high": times[-2], "floor": floor})
    if file is not None:
        versions = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "cuda": torch.version.cuda}
        file.write_text(json.dumps({**versions, "results": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
