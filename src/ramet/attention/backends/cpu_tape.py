"""The CPU backend's passes as tapes: operators with their tensors, recorded once per plan and dtype, played per layer.

All decisions (views or copies, padding, masks) are made while recording, and all tensors are views of scratch memory
made then. A layer costs its operators and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import prod
from typing import NamedTuple

import torch

from ramet.attention.backends.cpu_layout import Item, Layout, Pass
from ramet.attention.problem import Problem

Op = Callable[[], object]

ALIGN = 32
"""Tensors in scratch memory, and parts of rows that operators work on, begin at multiples of so many elements: 64 bytes
or more."""

VALUE_BLOCK = 192
"""Float32 products sum over keys in blocks of 192, but halve a sum of 193 to 383, so padding it would move the middle.
We cut those ourselves."""

MIN_DIRECT_ROWS = 64
"""From so many query rows on, a float32 product writes its part of a wider matrix itself; below, a copy is cheaper."""


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of the products: bf16 only where the CPU has instructions for it, never fp16, which is slow on all."""
    if dtype == torch.bfloat16:
        return dtype if torch.ops.mkldnn._is_mkldnn_bf16_supported() else torch.float32
    return torch.float32 if dtype == torch.float16 else dtype


def min_query_rows(dtype: torch.dtype, batch: int) -> int:
    """Query rows that every product has at least: products of fewer rows take other kernels, which give other bits.

    A product that is not part of a batch is cut into parts for the threads, and each part needs that many.
    """
    if dtype == torch.bfloat16:
        return 2
    return 4 if batch > 1 else 12


class PassTape(NamedTuple):
    """One pass.

    Attributes
    ----------
    kv_index, k, v : Tensor
        Where the pass reads the pool, and where the gathered rows go.
    scores, values : list of operators
        Up to the score matrix, and from its softmax to the outputs.
    lse : operator
        Takes the matrix's log-sum-exp; played in between when it is asked for.
    """

    kv_index: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    scores: list[Op]
    lse: Op
    values: list[Op]


class Tape(NamedTuple):
    """All passes, and what they take from and give to the tokens: queries, outputs and lse of all passes in a row.

    Attributes
    ----------
    q, out : Tensor [tokens * num_kv_heads, group * head_dim]
    q_by_head : Tensor [num_kv_heads, tokens, group * head_dim]
        ``q``, where there is only one pass.
    lse : Tensor [tokens * num_kv_heads, group]
    passes : list of PassTape
    """

    q: torch.Tensor
    q_by_head: torch.Tensor
    out: torch.Tensor
    lse: torch.Tensor
    passes: list[PassTape]


class _Scratch:
    """Hands out pieces of one allocation; ``reset`` takes all of them back."""

    def __init__(self, size: int, dtype: torch.dtype) -> None:
        self.memory = torch.empty(size, dtype=dtype)
        self.used = 0

    def reset(self) -> None:
        self.used = 0

    def take(self, *shape: int) -> torch.Tensor:
        begin, size = self.used, prod(shape)
        self.used += -(-size // ALIGN) * ALIGN
        return self.memory[begin : begin + size].view(shape)


class Recorder:
    """Records a :class:`Tape`. Passes run one after another, so they share one scratch memory."""

    def __init__(self, problem: Problem, plan: Layout, dtype: torch.dtype) -> None:
        self.layout, self.dtype, self.compute = plan, dtype, compute_dtype(dtype)
        self.heads, self.group, self.head_dim = problem.num_kv_heads, problem.group_size, problem.head_dim
        self.scratch = _Scratch(max(map(self._size, plan.passes)), self.compute)
        self.pool_scratch = self.scratch
        if self.compute != dtype:
            self.pool_scratch = _Scratch(2 * max(len(p.kv_index) * self.head_dim + ALIGN for p in plan.passes), dtype)

    def record(self) -> Tape:
        tokens = len(self.layout.query_index)
        # Matrices with too few rows read on into the next one's; behind the last there is room for that.
        room = 16
        q = torch.empty(tokens + room, self.group * self.head_dim, dtype=self.compute)
        q[tokens:].zero_()
        q = q[:tokens]
        out, lse = torch.empty_like(q), torch.empty(tokens, self.group)
        passes = []
        begin = 0
        for step in self.layout.passes:
            end = begin + self.heads * step.num_rows * step.q_len
            shape = (self.heads, step.num_rows, step.q_len * self.group)
            vectors = (*shape, self.head_dim)
            self.scratch.reset()
            self.pool_scratch.reset()
            passes.append(
                self._pass(step, q[begin:end].view(vectors), out[begin:end].view(vectors), lse[begin:end].view(shape))
            )
            begin = end
        return Tape(q, q.view(self.heads, -1, self.group * self.head_dim), out, lse, passes)

    def _matrices(self, step: Pass, item: Item) -> tuple[int, int, int]:
        """Matrices of an item's products, their query rows, and these with padding."""
        batch = self.heads * item.num_nodes
        rows = item.num_rows // item.num_nodes * step.q_len * self.group
        return batch, rows, max(rows, min_query_rows(self.compute, batch))

    def _size(self, step: Pass) -> int:
        """Elements of scratch memory that a pass needs at most."""
        size = 2 * len(step.kv_index) * self.head_dim
        size += self.heads * step.num_rows * step.q_len * self.group * step.width
        for item in step.items:
            batch, _, padded = self._matrices(step, item)
            size += batch * padded * (item.width + 2 * self.head_dim)
        return size + ALIGN * (3 + 3 * len(step.items))

    def _pass(self, step: Pass, q: torch.Tensor, out: torch.Tensor, lse: torch.Tensor) -> PassTape:
        """``q``, ``out`` and ``lse`` are the pass's: ``[num_kv_heads, rows, q_len * group, ...]``."""
        scores: list[Op] = []
        values: list[Op] = []
        keys = (len(step.kv_index), self.head_dim)
        k_pool, v_pool = self.pool_scratch.take(*keys), self.pool_scratch.take(*keys)
        k, v = k_pool, v_pool
        if self.compute != self.dtype:
            k, v = self.scratch.take(*keys), self.scratch.take(*keys)
            scores += [partial(k.copy_, k_pool), partial(v.copy_, v_pool)]
        first = step.items[0]
        matrix = None  # the score matrix; a single item's scores are that matrix
        if len(step.items) > 1 or first.num_rows < step.num_rows:
            matrix = self.scratch.take(*q.shape[:3], step.width)
            if step.has_gaps:
                scores.append(partial(matrix.fill_, -torch.inf))
        if first.num_rows < step.num_rows:
            values.append(out.zero_)
        at = 0
        for item in step.items:
            rows = slice(item.first_row, item.first_row + item.num_rows)
            columns = slice(item.column, item.column + item.width)
            count = self.heads * item.num_nodes * item.width
            record = _ItemRecorder(self, step, item, k[at : at + count], v[at : at + count])
            place = None if matrix is None else matrix[:, rows, :, columns]
            scores += record.scores(q[:, rows], place)
            values += record.values(out[:, rows], adds=item is not first or item.num_rows < step.num_rows)
            at += count
        whole = record.matrices if matrix is None else matrix
        real = record.rows.flatten(1, 2) if matrix is None else matrix
        values.insert(0, partial(torch.softmax, whole, dim=-1, out=whole))

        def take_lse() -> None:
            torch.logsumexp(real.float(), dim=-1, out=lse)

        return PassTape(torch.from_numpy(step.kv_index), k_pool, v_pool, scores, take_lse, values)


class _ItemRecorder:
    """Records the products of one item. B is its number of matrices, M their query rows with padding."""

    def __init__(self, owner: Recorder, step: Pass, item: Item, k: torch.Tensor, v: torch.Tensor) -> None:
        self.item, self.q_len, self.compute, self.scratch = item, step.q_len, owner.compute, owner.scratch
        self.batch, self.m, self.padded = owner._matrices(step, item)
        self.head_dim = owner.head_dim
        #: num_kv_heads, nodes, rows of a node, query rows of a row
        self.by_node = (owner.heads, item.num_nodes, item.num_rows // item.num_nodes, step.q_len * owner.group)
        self.k_t = k.view(self.batch, item.width, self.head_dim).transpose(1, 2)
        self.v = v.view(self.batch, item.width, self.head_dim)
        #: one batch of equally spaced matrices, as they lie: one node, or nodes that make up the whole pass
        self.as_it_lies = item.num_nodes == 1 or item.num_rows == step.num_rows
        self.copies: list[Op] = []  # from the score matrix back, where the products cannot work in it

    def scores(self, q: torch.Tensor, place: torch.Tensor | None) -> list[Op]:
        """Products of queries and keys; ``place`` is the item's part of the pass's score matrix."""
        ops: list[Op] = []
        shape = (self.batch, self.padded, self.head_dim)
        if self.as_it_lies:
            stride = q.stride(0) if self.item.num_nodes == 1 else self.m * self.head_dim
            q = q.as_strided(shape, (stride, self.head_dim, 1))  # padding: the rows that happen to follow
        else:
            copied = self.scratch.take(*shape)
            ops.append(partial(self._real(copied).copy_, q.unflatten(1, self.by_node[1:3])))
            q = copied
        large = self.compute == torch.bfloat16 or self.m >= MIN_DIRECT_ROWS
        if place is not None and self.as_it_lies and self.m == self.padded and large:
            stride = place.stride(0) if self.item.num_nodes == 1 else self.m * place.stride(2)
            self.matrices = place.as_strided((self.batch, self.m, self.item.width), (stride, place.stride(2), 1))
            self.rows = place.unflatten(1, self.by_node[1:3])
            ops.append(partial(torch.bmm, q, self.k_t, out=self.matrices))
        else:
            self.matrices = self.scratch.take(self.batch, self.padded, self.item.width)
            own = self.rows = self._real(self.matrices)
            ops.append(partial(torch.bmm, q, self.k_t, out=self.matrices))
            if place is not None:
                self.rows = place.unflatten(1, self.by_node[1:3])
                ops.append(partial(self.rows.copy_, own))
                self.copies.append(partial(own.copy_, self.rows))
        return ops + self._mask()

    def values(self, out: torch.Tensor, *, adds: bool) -> list[Op]:
        """Products of softmax weights and values, written or added to ``out``."""
        ops = list(self.copies)
        direct = not adds and self.as_it_lies and self.m == self.padded
        own = (
            out.view(self.batch, self.m, self.head_dim)
            if direct
            else self.scratch.take(*self.v.shape[:1], self.padded, self.head_dim)
        )
        width = self.item.width
        cut = VALUE_BLOCK if self.compute == torch.float32 and VALUE_BLOCK < width < 2 * VALUE_BLOCK else width
        ops.append(partial(torch.bmm, self.matrices[..., :cut], self.v[:, :cut], out=own))
        if cut < width:
            ops.append(partial(torch.baddbmm, own, self.matrices[..., cut:], self.v[:, cut:], out=own))
        if not direct:
            out = out.unflatten(1, self.by_node[1:3])
            ops.append(partial(out.add_ if adds else out.copy_, self._real(own)))
        return ops

    def _real(self, matrices: torch.Tensor) -> torch.Tensor:
        """Matrices without padding rows, ``[num_kv_heads, nodes, rows of a node, query rows of a row, ...]``."""
        return matrices[:, : self.m].view(*self.by_node, matrices.shape[-1])

    def _mask(self) -> list[Op]:
        """Hide what queries must not see: padding and later positions.

        Every gathered key is a valid one, so adding -inf is replacing.
        """
        lowest = int(self.item.visible.min())
        if lowest == self.item.width:
            return []
        begin = lowest // ALIGN * ALIGN  # aligned rows take half the time
        _, nodes, rows, query_rows = self.by_node
        group = query_rows // self.q_len
        visible = torch.from_numpy(self.item.visible).repeat_interleave(group, dim=1)
        hidden = torch.arange(begin, self.item.width) >= visible.view(1, nodes, rows, query_rows, 1)
        bias = torch.zeros(hidden.shape, dtype=self.compute).masked_fill_(hidden, -torch.inf)
        return [partial(self.rows[..., begin:].add_, bias)]
