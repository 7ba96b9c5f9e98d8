"""Attention of one layer on a GPU with the Triton backend: the shapes of the published table, beside the floor.

K and V rotate over at least 8 pools (600 MB), graph replays, median; merges included. The last line is JSON.

Usage: ``python benchmarks/attention_triton.py [--out FILE] [--programs 1,2]``
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from ramet.attention import AttentionPlan, ForestArrays, plan
from ramet.attention.cost_table import ENVIRONMENT, shipped

HEADS, KV_HEADS, HEAD_DIM, PAGE, TAIL = 28, 4, 128, 128, 256
BYTES_PER_US, FLOPS_PER_US = 4.3e6, 790e6
#: prompts, samples of each, tokens of a prompt, query tokens
SHAPES = [
    *[(3, 40, length, 1) for length in (600, 1600, 4000, 6500, 16000)],
    *[(1, 64, 8000, 1), (1, 256, 8000, 1), (16, 16, 4000, 1), (32, 8, 1000, 1), (1, 4, 16000, 1), (64, 1, 4000, 1)],
    *[(3, 40, length, 4) for length in (600, 1600, 4000)],
    *[(3, 40, length, 9) for length in (600, 1600, 4000)],
]


def forest_of(prompts: int, samples: int, length: int, q_len: int, seed: int = 0) -> ForestArrays:
    """Prompts of one length with tails of 256 tokens; pages in random order."""
    rows = prompts * samples
    tokens = np.concatenate([np.full(prompts, length), np.full(rows, TAIL)])
    pages = -(-tokens // PAGE)
    indptr = np.concatenate([[0], np.cumsum(pages)])
    start = np.concatenate([np.zeros(prompts), np.full(rows, length)])
    arrays = {
        "cu_seqlens_q": np.arange(rows + 1) * q_len,
        "row_leaf": prompts + np.arange(rows),
        "node_parent": np.concatenate([np.full(prompts, -1), np.repeat(np.arange(prompts), samples)]),
        "node_start": start,
        "node_end": start + tokens,
        "node_first_slot": np.zeros(prompts + rows),
        "node_page_indptr": indptr,
        "node_pages": np.random.default_rng(seed).permutation(int(indptr[-1])),
    }
    return ForestArrays(**{name: array.astype(np.int32) for name, array in arrays.items()})


def floor_us(prompts: int, samples: int, length: int, q_len: int) -> float:
    rows = prompts * samples
    kv_bytes = (prompts * length + rows * TAIL) * KV_HEADS * HEAD_DIM * 4
    flops = rows * q_len * HEADS * 4 * HEAD_DIM * (length + TAIL)
    return max(kv_bytes / BYTES_PER_US, flops / FLOPS_PER_US)


def graph_us(layers: int, run: Callable[[int], object], replays: int = 15) -> float:
    """Median time of one layer in replays of a graph of all layers, twice."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        run(0)
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(2 * layers):
            run(i % layers)
    times = []
    for i in range(replays + 3):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        if i >= 3:
            times.append(begin.elapsed_time(end) * 1e3 / layers / 2)
    return statistics.median(times)


def worst_error(q: torch.Tensor, pool: torch.Tensor, forest: ForestArrays, out: torch.Tensor, q_len: int) -> float:
    """Relative error (root mean square) of some rows against dense attention in float32."""
    worst = 0.0
    for row in {0, forest.num_rows // 2, forest.num_rows - 1}:
        leaf = int(forest.row_leaf[row])
        keys = []
        for node in (int(forest.node_parent[leaf]), leaf):
            begin, end = forest.node_page_indptr[node : node + 2]
            pages = torch.from_numpy(forest.node_pages[begin:end]).long().to(q.device)
            tokens = int(forest.node_end[node] - forest.node_start[node])
            keys.append(pool[:, pages].flatten(1, 2)[:, :tokens].float())
        k, v = torch.cat(keys, dim=1).repeat_interleave(HEADS // KV_HEADS, dim=2)
        mine = slice(row * q_len, (row + 1) * q_len)
        scores = torch.einsum("qhd,nhd->hqn", q[mine].float(), k) * HEAD_DIM**-0.5
        position = torch.arange(k.shape[0], device=q.device)
        scores = scores.masked_fill(position > position[-q_len:, None], -torch.inf)
        truth = torch.einsum("hqn,nhd->qhd", scores.softmax(-1), v)
        worst = max(worst, ((out[mine].float() - truth).norm() / truth.norm()).item())
    return worst


def measure(shape: tuple[int, int, int, int], deterministic: bool = False) -> tuple[float, float, AttentionPlan]:
    """Microseconds of a layer, the worst error of some rows, and the plan."""
    q_len = shape[3]
    forest = forest_of(*shape)
    pages = len(forest.node_pages)
    layers = max(8, min(28, int(600e6 // (pages * PAGE * KV_HEADS * HEAD_DIM * 4)) + 1))
    generator = torch.Generator(device="cuda").manual_seed(1)
    pools = torch.empty(layers, 2, pages, PAGE, KV_HEADS, HEAD_DIM, dtype=torch.bfloat16, device="cuda")
    pools.normal_(generator=generator)
    q = torch.empty(int(forest.cu_seqlens_q[-1]), HEADS, HEAD_DIM, dtype=torch.bfloat16, device="cuda")
    q.normal_(generator=generator)
    work = plan(
        forest,
        num_qo_heads=HEADS,
        num_kv_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        page_size=PAGE,
        dtype=q.dtype,
        device="cuda",
        backend="triton",
        deterministic=deterministic,
    )
    out = torch.full_like(q, float("nan"))
    work.run(q, *pools[0], sm_scale=HEAD_DIM**-0.5, out=out)
    error = worst_error(q, pools[0], forest, out, q_len) if out.isfinite().all() else float("nan")
    us = graph_us(layers, lambda i: work.run(q, *pools[i], sm_scale=HEAD_DIM**-0.5, out=out))
    return us, error, work


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="write the results there as JSON")
    parser.add_argument("--programs", default="1", help="multiples of the SM count that splits are planned for")
    parser.add_argument("--deterministic", action="store_true", help="also the price of deterministic mode")
    arguments = parser.parse_args()
    table = shipped(torch.cuda.get_device_name())
    results = []
    for shape in SHAPES:
        for times in map(float, arguments.programs.split(",")):
            with tempfile.TemporaryDirectory() as folder:
                os.environ[ENVIRONMENT] = f"{folder}/{times}.json"
                dataclasses.replace(table, sm_count=round(table.sm_count * times)).save(os.environ[ENVIRONMENT])
                for exact in (False, True) if arguments.deterministic and times == 1 else (False,):
                    us, error, work = measure(shape, exact)
                    tiles = work._executor.tiles  # type: ignore[attr-defined]
                    results.append(
                        dict(shape=shape, times=times, us=us, floor=floor_us(*shape), error=error, deterministic=exact)
                    )
                    prompts, samples, length, q_len = shape
                    print(
                        f"{prompts}x{samples} L{length} q{q_len} x{times}{' deterministic' * exact}: {us:.1f} us, "
                        f"{us / floor_us(*shape):.2f} x floor, {tiles} tiles, error {error:.1e}",
                        flush=True,
                    )
    text = json.dumps({"device": torch.cuda.get_device_name(), "torch": torch.__version__, "results": results})
    if arguments.out:
        arguments.out.write_text(text)
    print(text)


if __name__ == "__main__":
    main()
