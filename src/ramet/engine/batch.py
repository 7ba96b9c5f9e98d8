"""A step's plan as tensors."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ramet.attention import AttentionPlan
from ramet.engine.plan import StepPlan
from ramet.sampling.sampler import SampleBatch


@dataclass(frozen=True)
class Batch:
    """Inputs of a step, filled by ``Runner.load``.

    Attributes
    ----------
    plan : StepPlan
        The same on the host.
    token_ids, positions, slot_mapping : int64 [T]
    attention : AttentionPlan or None
        None when no token goes through the model.
    logit_tokens : int64 tensor or None
        Tokens whose hidden states become logits; None for all, in order.
    stored_hidden : tensor [stored, hidden_size] or None
    sampling : SampleBatch
    """

    plan: StepPlan
    token_ids: torch.Tensor
    positions: torch.Tensor
    slot_mapping: torch.Tensor
    attention: AttentionPlan | None
    logit_tokens: torch.Tensor | None
    stored_hidden: torch.Tensor | None
    sampling: SampleBatch
