"""Runs the model for a step: loads the plan, computes logits, keeps what the cache wants."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch

from ramet import attention
from ramet.attention import AttentionPlan
from ramet.engine.batch import Batch
from ramet.engine.group import SampleLog
from ramet.engine.memory import MemoryPlan
from ramet.engine.plan import StepPlan
from ramet.models.spec import ModelSpec
from ramet.sampling.logprobs import prompt_logprobs
from ramet.sampling.sampler import SampleBatch

Attend = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]

SCORE_BLOCK = 128
"""Rows of logits made at once for prompt log-probabilities: 128 x 49,152 in fp32 are 25 MB."""


class Model(Protocol):
    """What the runner needs of a model (``models.dense.DenseDecoder``)."""

    def forward(self, token_ids: torch.Tensor, positions: torch.Tensor, attend: Attend) -> torch.Tensor: ...

    def logits(self, hidden: torch.Tensor) -> torch.Tensor: ...


class StepLogits(NamedTuple):
    """Result of a forward pass.

    Attributes
    ----------
    logits : float32 [M, vocab]
    kept_hidden : dict
        Index into ``plan.mark_rows`` -> last hidden state [hidden_size].
    """

    logits: torch.Tensor
    kept_hidden: dict[int, Any]


class Runner:
    """A model, its KV pool, and one step at a time.

    Parameters
    ----------
    model : Model
    spec : ModelSpec
    memory : MemoryPlan
    dtype : torch.dtype
        Of the KV pool.
    device : torch.device
    """

    def __init__(
        self, model: Model, spec: ModelSpec, memory: MemoryPlan, *, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.model, self.spec, self.page_size = model, spec, memory.page_size
        self.sm_scale = spec.head_dim**-0.5
        shape = (spec.num_layers, memory.num_pages, memory.page_size, spec.num_kv_heads, spec.head_dim)
        # Not initialised: the system maps pages of memory when they are first written, so an unused pool costs nothing.
        self.k_pool = torch.empty(shape, dtype=dtype, device=device)
        self.v_pool = torch.empty(shape, dtype=dtype, device=device)
        self.layers = [(self.k_pool[i], self.v_pool[i]) for i in range(spec.num_layers)]

    def close(self) -> None:
        """Give the memory of the pool and the weights back."""
        del self.layers, self.k_pool, self.v_pool, self.model

    def load(self, plan: StepPlan) -> Batch:
        """Turn a plan into tensors."""
        spec = self.spec
        work: AttentionPlan | None = None
        if plan.num_tokens:
            work = attention.plan(
                plan.forest,
                num_qo_heads=spec.num_qo_heads,
                num_kv_heads=spec.num_kv_heads,
                head_dim=spec.head_dim,
                page_size=self.page_size,
            )
        every_token = len(plan.logit_tokens) == plan.num_tokens and not plan.chunks
        return Batch(
            plan=plan,
            token_ids=torch.from_numpy(plan.token_ids),
            positions=torch.from_numpy(plan.positions),
            slot_mapping=torch.from_numpy(plan.slot_mapping),
            attention=work,
            logit_tokens=None if every_token else torch.from_numpy(plan.logit_tokens),
            stored_hidden=torch.stack(plan.stored_hidden) if plan.stored_hidden else None,
            sampling=SampleBatch(
                slots=plan.sample_slots,
                logit_index=plan.logit_index,
                positions=plan.sample_positions,
                num_output_tokens=plan.num_output,
            ),
        )

    def forward(self, batch: Batch) -> StepLogits:
        """Logits of every row that samples; K and V of every token go to the pool on the way."""
        rows = []
        if batch.attention is not None:
            hidden = self.model.forward(batch.token_ids, batch.positions, self._attend(batch, batch.attention))
            rows.append(hidden if batch.logit_tokens is None else hidden[batch.logit_tokens])
            self._score_prompts(batch.plan, hidden)
        if batch.stored_hidden is not None:
            rows.append(batch.stored_hidden)
        selected = rows[0] if len(rows) == 1 else torch.cat(rows)
        kept = {i: selected[row].clone() for i, (_, _, row) in enumerate(batch.plan.mark_rows)}
        return StepLogits(self.model.logits(selected), kept)

    def _attend(self, batch: Batch, work: AttentionPlan) -> Attend:
        layers, slot_mapping, sm_scale = self.layers, batch.slot_mapping, self.sm_scale

        def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            k_pool, v_pool = layers[layer]
            attention.append_kv(k, v, k_pool, v_pool, slot_mapping)
            out = work.run(q, k_pool, v_pool, sm_scale=sm_scale)
            return out if isinstance(out, torch.Tensor) else out[0]

        return attend

    def _score_prompts(self, plan: StepPlan, hidden: torch.Tensor) -> None:
        """Log-probabilities of prompt tokens, for the groups that asked: position p scores token p + 1."""
        for chunk, first in zip(plan.chunks, plan.chunk_tokens, strict=True):
            group, run = chunk.prefill.scores_for, chunk.prefill.run
            if group is None:
                continue
            targets = run.tokens[chunk.begin + 1 - run.start : chunk.end + 1 - run.start].astype(np.int64)
            count = group.request.params.prompt_logprobs or 0
            for begin in range(0, len(targets), SCORE_BLOCK):
                block = targets[begin : begin + SCORE_BLOCK]
                logits = self.model.logits(hidden[first + begin : first + begin + len(block)])
                scored = prompt_logprobs(logits, block, count)
                group.prompt_scores.append(SampleLog(block, *scored))
