"""Forest attention for Hopper GPUs (SM90a): CUDA C++ compiled at run time, one persistent CTA per SM, then a merge."""

from __future__ import annotations

import ctypes
from functools import lru_cache
from importlib.resources import files

import numpy as np
import torch

from ramet.attention.backends.base import Tensors
from ramet.attention.backends.hopper_schedule import Schedule, Scheduler, Shape
from ramet.attention.buffers import Arrays, Capacity, PlanBuffers
from ramet.attention.problem import Problem, SharePolicy, Support
from ramet.attention.work import WorkList
from ramet.errors import Unsupported
from ramet.kernels.driver import Kernel, Module, tensor_map
from ramet.kernels.nvrtc import compile_cached

HEAD_DIMS = (64, 128)
MAX_QUERIES = 16
FEW_ROWS = 528
"""Up to so many (token, head) rows, a block of threads merges one row: four for each SM of an H200."""
SOME_ROWS = 4096
SHARED_BYTES = 227 * 1024
_DTYPES = {torch.bfloat16: "bf16", torch.float16: "f16"}


class HopperBackend:
    """The fast path on H100 and H200."""

    name = "hopper"
    strided = True

    def supports(self, problem: Problem) -> Support:
        reason = _refusal(problem)
        return Support(False, f"hopper {reason}") if reason else Support(True, "CUDA C++ for SM90a")

    def share_policy(self, problem: Problem) -> SharePolicy:
        return SharePolicy(min_saved_tokens=128)

    def arrays(self, problem: Problem, capacity: Capacity) -> Arrays:
        shape = _shape(problem, _sms(problem.device))
        jobs = shape.heads * (capacity.items or 3 * capacity.rows + -(-capacity.tokens // shape.block))
        items = jobs + 4 * shape.ctas
        entries = 3 * capacity.tokens * shape.heads + 4 * shape.ctas * shape.block
        rows = entries * shape.group_size
        return _arrays(problem, shape, capacity.tokens, items, items, entries, rows, capacity.pages)

    def compile(
        self, work: WorkList, problem: Problem, device: torch.device, buffers: PlanBuffers | None
    ) -> HopperExecutor:
        index = torch.cuda.current_device() if device.index is None else device.index
        shape = _shape(problem, _sms("cuda", index))
        kept = None if buffers is None else buffers.last
        scheduler = kept.scheduler if isinstance(kept, HopperExecutor) else Scheduler(shape)
        plan = scheduler.schedule(work)
        if buffers is None:
            tokens = len(plan.merge_begin) // shape.heads
            sizes = (tokens, len(plan.segments), len(plan.items), len(plan.merge_entries), plan.partial_rows)
            pages = len(work.forest.node_pages)
            arrays = _arrays(problem, shape, *sizes, pages)
            capacity = Capacity(max(1, tokens), max(1, work.num_rows), max(1, pages))
            buffers = PlanBuffers(self.name, problem, capacity, arrays, torch.device("cuda", index))
        _fill(buffers, plan, work.forest.node_pages, shape)
        if not isinstance(kept, HopperExecutor):
            kept = buffers.last = HopperExecutor(problem, scheduler, buffers, index)
        return kept


def _refusal(problem: Problem) -> str | None:
    if problem.device != "cuda":
        return f"serves CUDA tensors, not {problem.device}"
    if problem.dtype not in _DTYPES:
        return f"serves float16 and bfloat16, not {problem.dtype}"
    if problem.options():
        return f"does not serve {', '.join(problem.options())} yet"
    if problem.head_dim not in HEAD_DIMS:
        return f"serves head_dim 64 and 128, not {problem.head_dim}"
    if problem.group_size > 16:
        return f"serves up to 16 query heads of a KV head, not {problem.group_size}"
    if problem.page_size % 16:
        return f"serves page sizes that are multiples of 16 (the boxes of its copies), not {problem.page_size}"
    if problem.max_q_len > MAX_QUERIES:
        return f"serves up to {MAX_QUERIES} query tokens of a row, not {problem.max_q_len}"
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
        return "needs a GPU of compute capability 9.0"
    return None


@lru_cache(maxsize=16)
def _sms(device: str, index: int | None = None) -> int:
    return torch.cuda.get_device_properties(
        torch.cuda.current_device() if index is None else index
    ).multi_processor_count


def _shape(problem: Problem, sms: int) -> Shape:
    return Shape(problem.num_kv_heads, problem.group_size, problem.page_size, sms)


def _arrays(
    problem: Problem, shape: Shape, tokens: int, segments: int, items: int, entries: int, rows: int, pages: int
) -> Arrays:
    """Sizes of one repetition become those of all; nothing is empty, so that every address is one."""
    times = shape.repeats
    return Arrays(
        plan={
            "lists": 64 * shape.ctas * times,
            "token_end": max(1, tokens),
            "merge_begin": tokens * shape.heads + 1,
            "merge_entries": max(1, entries),
            "items": 8 * max(1, items * times),
            "segments": 8 * max(1, segments * times),
            "pages": max(1, pages),
        },
        scratch={
            "partial_out": ((max(1, rows * times), problem.head_dim), torch.float16),
            "partial_lse": ((max(1, rows * times),), torch.float32),
        },
    )


def _fill(buffers: PlanBuffers, plan: Schedule, pages: np.ndarray, shape: Shape) -> None:
    capacity, host = buffers.capacity, buffers.host
    stride = len(buffers.scratch["partial_lse"]) // shape.repeats
    lists, segments, items = plan.repeat(shape, stride)
    capacity.require("tokens", len(plan.merge_begin) // shape.heads, len(host["merge_begin"]) // shape.heads)
    capacity.require("items", len(items), len(host["items"]) // 8)
    capacity.require("items", len(segments), len(host["segments"]) // 8)
    capacity.require("items", len(plan.merge_entries), len(host["merge_entries"]))
    capacity.require("items", plan.partial_rows, stride)
    capacity.require("pages", len(pages), len(host["pages"]))
    parts = (("lists", lists), ("segments", segments), ("items", items), ("token_end", plan.token_end))
    for name, array in (*parts, ("merge_entries", plan.merge_entries), ("merge_begin", plan.merge_begin)):
        host[name][: array.size] = array.ravel()
    host["merge_begin"][len(plan.merge_begin) :] = plan.merge_begin[-1]  # padding tokens: nothing to merge
    host["pages"][: len(pages)] = pages
    buffers.upload("pages", len(pages))


class _Attention(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("lists", "segments", "items", "pages", "token_end", "out", "lse")),
        *((name, ctypes.c_void_p) for name in ("partial_out", "partial_lse", "scale_at")),
        ("heads", ctypes.c_int),
        ("scale", ctypes.c_float),
    ]


class _Merge(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("begin", "entries", "partial_out", "partial_lse", "out", "lse")),
        *((name, ctypes.c_int) for name in ("heads", "rows", "stride")),
    ]


@lru_cache(maxsize=64)
def _kernels(head_dim: int, group: int, page_size: int, heads: int, dtype: str, device: int) -> dict[str, Kernel]:
    """Compiled and loaded once for each shape; entries live as long as the process."""
    folder = files("ramet.attention") / "kernels" / "hopper"
    headers = {name: (folder / name).read_text() for name in ("ptx.cuh", "wgmma.cuh")}
    shape = Shape(1, group, page_size)
    defines = {"HEAD_DIM": head_dim, "GROUP": group, "DTYPE": f'"{dtype}"'}
    attention = {**defines, "PAGE_SIZE": page_size, "BOX": shape.box}
    merge = {**defines, "HEADS_PLANNED": heads}
    cubins = [
        compile_cached(name, (folder / name).read_text(), headers, macros, "sm_90a")
        for name, macros in (("forest.cu", attention), ("merge.cu", merge))
    ]
    modules = [Module(cubin, device) for cubin in cubins]
    names = ("merge_few", "merge_some", "merge_many")
    return {
        "forest": modules[0].kernel("forest_attention", 384, SHARED_BYTES),
        **{name: modules[1].kernel(name, 256) for name in names},
    }


class HopperExecutor:
    """Two launches a layer: attention, then the merge of partial results."""

    def __init__(self, problem: Problem, scheduler: Scheduler, buffers: PlanBuffers, device: int) -> None:
        assert problem.dtype is not None
        self.scheduler, shape = scheduler, scheduler.shape
        self._problem, self._shape, self._buffers, self._device = problem, shape, buffers, device
        self._kernels = _kernels(
            problem.head_dim, problem.group_size, problem.page_size, shape.heads, _DTYPES[problem.dtype], device
        )
        plan, scratch = buffers.plan, buffers.scratch
        partials = (scratch["partial_out"].data_ptr(), scratch["partial_lse"].data_ptr())
        names = ("lists", "segments", "items", "pages", "token_end")
        self._attention = _Attention(*(plan[name].data_ptr() for name in names), None, None, *partials)
        self._merge = _Merge(plan["merge_begin"].data_ptr(), plan["merge_entries"].data_ptr(), *partials)
        self._merge.stride = len(scratch["partial_lse"]) // shape.repeats
        self._attention.heads = self._merge.heads = problem.num_qo_heads
        self._maps: dict[tuple[object, ...], ctypes.Structure] = {}

    def run(self, tensors: Tensors) -> None:
        q, k, v, out, lse, scale = tensors[:6]
        shape, panel = self._shape, 64
        box = (1, shape.box, 1, panel)
        maps = [self._map(q, (shape.block, shape.group_size, panel)), self._map(k, box), self._map(v, box)]
        rows = min(len(q), (len(self._buffers.plan["merge_begin"]) - 1) // shape.heads) * self._problem.num_qo_heads
        attention, merge = self._attention, self._merge
        attention.out = merge.out = out.data_ptr()
        attention.lse = merge.lse = None if lse is None else lse.data_ptr()
        if isinstance(scale, torch.Tensor):
            attention.scale_at = scale.data_ptr()
        else:
            attention.scale_at, attention.scale = None, scale
        merge.rows = rows
        stream = torch.cuda.current_stream(self._device).cuda_stream
        self._kernels["forest"].launch(shape.ctas * shape.repeats, (*maps, attention), stream, early=True)
        lanes = 256 // (self._problem.head_dim // 8)
        name, ways = (
            ("merge_few", 1) if rows > SOME_ROWS else ("merge_some", 4) if rows > FEW_ROWS else ("merge_many", lanes)
        )
        self._kernels[name].launch(-(-rows // (lanes // ways)), (merge,), stream, early=True)

    def _map(self, tensor: torch.Tensor, box: tuple[int, ...]) -> ctypes.Structure:
        """Tensor maps of the layers' pools and queries are the same step after step."""
        key = (tensor.data_ptr(), tensor.shape, tensor.stride(), box)
        found = self._maps.get(key)
        if found is None:
            if len(self._maps) >= 1024:
                self._maps.clear()
            if any(stride * tensor.itemsize % 16 for stride in tensor.stride()[:-1]) or tensor.data_ptr() % 16:
                raise Unsupported(f"hopper needs rows at multiples of 16 bytes; strides are {tensor.stride()}.")
            found = self._maps[key] = tensor_map(tensor, box)
        return found
