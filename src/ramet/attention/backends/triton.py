"""The Triton backend: shared nodes and tails in one kernel, then a merge. The portable one for GPUs.

Programs are cut by :mod:`ramet.attention.tiles`; the kernels are in :mod:`ramet.attention.kernels.forest` and
``merge``. Both launches have fixed grids where a plan has buffers, so that a captured graph serves every later plan.
``TRITON_INTERPRET=1`` runs the same kernels on CPU tensors, slowly, for tests.
"""

from __future__ import annotations

import os
from functools import lru_cache
from importlib.util import find_spec
from typing import Any, NamedTuple

import numpy as np
import torch

from ramet.attention.backends.base import Tensors
from ramet.attention.buffers import Arrays, Capacity, PlanBuffers
from ramet.attention.cost_table import Costs, CostTable, table_for
from ramet.attention.problem import Problem, SharePolicy, Support
from ramet.attention.tiles import Limits, Shape, Tiles, make_tiles, segments_of
from ramet.attention.work import WorkList

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
MAX_HEAD_DIM = 256
RECORD = 8
"""Numbers of a tile."""

MANY_PARTIALS = 16
"""Partials that are merged at a time where few rows have many."""

FEW_PAIRS = 1024
"""Up to so many pairs of token and head, one program merges one pair: a program costs 0.6 ns to launch, and few rows
are cut into many splits."""

MAX_GROWTH = 64
"""Tokens by which tails may grow before their splits are chosen anew."""


class TritonBackend:
    """Serves bf16, fp16 and fp32 on NVIDIA GPUs."""

    name = "triton"
    strided = True

    def supports(self, problem: Problem) -> Support:
        refusal = _refusal(problem)
        if refusal is not None:
            return Support(False, f"triton {refusal}")
        how = "Triton kernels" if problem.device == "cuda" else "Triton's interpreter (TRITON_INTERPRET=1)"
        return Support(True, f"{how}: tiles of shared nodes and tails, one merge")

    def share_policy(self, problem: Problem) -> SharePolicy:
        costs, table = _costs(problem)
        token_us = 2 * problem.num_kv_heads * problem.head_dim * costs.kv_bytes / costs.bytes_per_us
        item_us = costs.item_us * problem.num_kv_heads / table.sm_count
        partial_us = costs.partial_ns * 1e-3 * problem.num_qo_heads * problem.max_q_len
        return SharePolicy(round(item_us / token_us), partial_us / token_us)

    def arrays(self, problem: Problem, capacity: Capacity) -> Arrays:
        shape = tile_shape(problem)
        tiles = capacity.items or _default_items(problem, capacity, shape)
        return _arrays(problem, capacity, tiles, tiles + 8 * capacity.rows, _parts(problem, shape, tiles))

    def compile(
        self, work: WorkList, problem: Problem, device: torch.device, buffers: PlanBuffers | None
    ) -> TritonExecutor:
        if buffers is None:
            return _own(work, problem, device)
        forest, capacity = work.forest, buffers.capacity
        capacity.require("rows", forest.num_rows)
        capacity.require("tokens", int(forest.cu_seqlens_q[-1]))
        capacity.require("pages", len(forest.node_pages))
        last = buffers.last
        if isinstance(last, _Last) and _only_grew(work, last.work):
            tiles = last.tiles
            segments = segments_of(work, tiles.segment_node, problem.page_size)
            row_end = forest.node_end[forest.row_leaf].astype(np.int32)
            tiles = tiles._replace(segments=segments, row_end=row_end)
            changed: tuple[str, ...] = ("segments", "row_end")
            buffers.last = _Last(last.work, tiles)
        else:
            shape = tile_shape(problem)
            tiles = make_tiles(work, problem, shape, _costs(problem)[0], _limits(problem, buffers))
            capacity.require("segments", len(tiles.segments), len(buffers.host["segments"]) // 3)
            changed = ("counts", "tiles", "segments", "tokens", "parts", "row_end")
            buffers.last = _Last(work, tiles)
        _fill(buffers, tiles, changed, forest.node_pages)
        return TritonExecutor(problem, buffers, len(buffers.host["tiles"]) // RECORD, capacity.tokens)


class _Last(NamedTuple):
    """The plan whose tiles lie in buffers."""

    work: WorkList
    tiles: Tiles


def _only_grew(work: WorkList, last: WorkList) -> bool:
    """Whether a work list is an earlier one whose tails have grown a little: their splits stay as they are."""
    return (
        work.rows is last.rows
        and work.tail_node is last.tail_node
        and work.item_node is last.item_node
        and bool((np.abs(work.end - last.end) <= MAX_GROWTH).all())
    )


@lru_cache(maxsize=1)
def _installed() -> bool:
    return find_spec("triton") is not None


def _interprets() -> bool:
    return os.environ.get("TRITON_INTERPRET", "0") == "1"


def _refusal(problem: Problem) -> str | None:
    """Why the backend does not serve a problem."""
    if problem.device != "cuda" and not (problem.device == "cpu" and _interprets()):
        return f"serves tensors on NVIDIA GPUs, not on {problem.device} (TRITON_INTERPRET=1 tests its kernels there)"
    if not _installed():
        return "is not installed: pip install 'ramet[cuda]'"
    if problem.dtype is None:
        return "compiles kernels for a dtype, and none is given: plan(dtype=...)"
    if problem.dtype not in DTYPES:
        return f"serves bfloat16, float16 and float32, not {problem.dtype}"
    if problem.kv_dtype not in (None, problem.dtype):
        return f"reads K and V in q's dtype, not {problem.kv_dtype} beside {problem.dtype}"
    if problem.head_dim % 16 or problem.head_dim > MAX_HEAD_DIM:
        return f"serves a head_dim that is a multiple of 16 up to {MAX_HEAD_DIM}, not {problem.head_dim}"
    if problem.value_dim != problem.head_dim:
        return f"serves V as wide as K, not v_head_dim={problem.v_head_dim}"
    return None


def tile_shape(problem: Problem) -> Shape:
    """Tile sizes for a problem. In deterministic mode there is one, whatever ``max_q_len`` is."""
    if problem.device == "cpu" or problem.dtype == torch.float32:  # on the CPU: the interpreter
        large, block = 32, 32
    else:
        large, block = 64, 64
    row = 1 << (problem.max_q_len * problem.group_size - 1).bit_length()
    small = large if problem.deterministic else min(max(row, 16), large)
    return Shape(large, small, block, _costs(problem)[1].sm_count)


@lru_cache(maxsize=8)
def _device_name(device: str) -> str:
    return torch.cuda.get_device_name() if device == "cuda" and torch.cuda.is_available() else "NVIDIA H200"


def _costs(problem: Problem) -> tuple[Costs, CostTable]:
    table = table_for(_device_name(problem.device))
    itemsize = 2 if problem.dtype is None else problem.dtype.itemsize
    return table.lookup("triton", problem.head_dim, itemsize), table


def _default_items(problem: Problem, capacity: Capacity, shape: Shape) -> int:
    """Room for one tile per row, for two levels of shared nodes, and for splits that fill the device a few times."""
    per_row = -(-problem.max_q_len * problem.group_size // shape.large)
    rows = capacity.rows * per_row + 2 * -(-capacity.tokens * problem.group_size // shape.large)
    splits = 8 * capacity.rows if problem.deterministic else 4 * shape.programs // problem.num_kv_heads
    return rows + splits + 16


def _parts(problem: Problem, shape: Shape, tiles: int) -> int:
    """Parts that so many tiles can write."""
    return tiles * (shape.large // problem.group_size + 1)


def _limits(problem: Problem, buffers: PlanBuffers) -> Limits:
    return Limits(len(buffers.host["tiles"]) // RECORD, len(buffers.scratch["states"]))


def _arrays(problem: Problem, capacity: Capacity, tiles: int, segments: int, parts: int) -> Arrays:
    tokens, heads = capacity.tokens, problem.num_qo_heads
    return Arrays(
        plan={
            "counts": 4,
            "tiles": RECORD * tiles,
            "tokens": 3 * tokens,
            "parts": tokens + 1,
            "row_end": capacity.rows,
            "segments": 3 * segments,
            "pages": capacity.pages,
        },
        scratch={
            "partial": ((parts, heads, problem.head_dim), torch.float32),
            "states": ((parts, heads, 2), torch.float32),
        },
    )


def _own(work: WorkList, problem: Problem, device: torch.device) -> TritonExecutor:
    """An executor with arrays of its own, of the size of this plan."""
    tiles = make_tiles(work, problem, tile_shape(problem), _costs(problem)[0])
    forest = work.forest
    tokens = int(tiles.counts[2])
    capacity = Capacity(max(tokens, 1), max(forest.num_rows, 1), max(len(forest.node_pages), 1))
    alone = (tiles.parts[1:] - tiles.parts[:-1] == 1).all()
    parts = 1 if alone else max(int(tiles.parts[-1]), 1)
    arrays = _arrays(problem, capacity, max(len(tiles.tiles), 1), max(len(tiles.segments), 1), parts)
    buffers = PlanBuffers("triton", problem, capacity, arrays, device)
    _fill(buffers, tiles, ("counts", "tiles", "segments", "tokens", "parts", "row_end"), forest.node_pages)
    return TritonExecutor(problem, buffers, len(tiles.tiles), 0 if alone else tokens)


def _fill(buffers: PlanBuffers, tiles: Tiles, names: tuple[str, ...], pages: np.ndarray) -> None:
    for name in names:
        values = getattr(tiles, name).ravel()
        buffers.host[name][: len(values)] = values
    buffers.host["pages"][: len(pages)] = pages
    buffers.upload("pages", len(pages))


class TritonExecutor:
    """Two launches over the arrays of a plan.

    Parameters
    ----------
    tiles : int
        Tiles of a KV head that the grid covers.
    merges : int
        Query tokens that the merge's grid covers; 0 where every token has one partial.
    """

    def __init__(self, problem: Problem, buffers: PlanBuffers, tiles: int, merges: int) -> None:
        self.problem, self.buffers, self.tiles, self.merges = problem, buffers, tiles, merges
        self.shape = tile_shape(problem)

    def run(self, tensors: Tensors) -> None:
        from ramet.attention.kernels import forest, merge

        options = self._options(tensors)
        if self.tiles:
            self._attend(forest.forest_kernel, tensors, options)
        if not self.merges:
            return
        plan, scratch, heads = self.buffers.plan, self.buffers.scratch, self.problem.num_qo_heads
        arguments = (
            tensors.out,
            tensors.out if tensors.lse is None else tensors.lse,
            scratch["partial"],
            scratch["states"],
            tensors.out if tensors.sinks is None else tensors.sinks,
            plan["counts"],
            plan["tokens"],
            plan["parts"],
            tensors.out_scale,
        )
        pairs = self.merges * heads
        if pairs <= FEW_PAIRS and not self.problem.deterministic:
            merge.merge_many_kernel[(pairs,)](*arguments, MANY=MANY_PARTIALS, num_warps=2, **options)
        else:
            rows = 8 if pairs <= 16384 else 32
            merge.merge_kernel[(-(-pairs // rows),)](*arguments, ROWS=rows, num_warps=4, **options)

    def _options(self, tensors: Tensors) -> dict[str, Any]:
        """Constants of both kernels."""
        return {
            "HEADS": self.problem.num_qo_heads,
            "D": self.problem.head_dim,
            "BLOCK_D": 1 << (self.problem.head_dim - 1).bit_length(),
            "HAS_SINKS": tensors.sinks is not None,
            "HAS_LSE": tensors.lse is not None,
            "OUT_SCALE_TENSOR": isinstance(tensors.out_scale, torch.Tensor),
            "INTERPRET": _interprets(),
        }

    def _attend(self, kernel: Any, tensors: Tensors, options: dict[str, Any]) -> None:
        problem, plan, scratch, shape = self.problem, self.buffers.plan, self.buffers.scratch, self.shape
        q, k, v, out = tensors.q, tensors.k_pool, tensors.v_pool, tensors.out
        pages = plan["pages"] if tensors.page_lists is None else tensors.page_lists
        kernel[(self.tiles * problem.num_kv_heads,)](
            *(q, k, v, out, out if tensors.lse is None else tensors.lse, scratch["partial"], scratch["states"]),
            out if tensors.sinks is None else tensors.sinks,
            *(plan["counts"], plan["tiles"], plan["segments"], pages, plan["tokens"], plan["parts"], plan["row_end"]),
            plan["row_end"] if tensors.seq_lens is None else tensors.seq_lens,
            *(tensors.sm_scale, tensors.out_scale, problem.softcap),
            *(*q.stride()[:2], *k.stride()[:3], *v.stride()[:3]),
            LARGE_M=shape.large,
            SMALL_M=shape.small,
            BLOCK_N=shape.block,
            STAGES=2 if problem.head_dim > 128 else 3,
            GROUP=problem.group_size,
            PAGE=problem.page_size,
            WINDOW=problem.window_left,
            SOFTCAP=problem.softcap > 0,
            CAUSAL=problem.causal,
            HAS_SEQ_LENS=tensors.seq_lens is not None,
            SCALE_TENSOR=isinstance(tensors.sm_scale, torch.Tensor),
            DETERMINISTIC=problem.deterministic,
            num_warps=4,
            **options,
        )
