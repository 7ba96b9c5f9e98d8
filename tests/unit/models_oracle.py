"""Oracles of the model tests: plain dense attention, and tiny checkpoints written by transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ramet.models.spec import ModelSpec


class PlainAttention:
    """Causal attention over everything seen so far, per layer; no pages, no sharing, nothing clever."""

    def __init__(self, spec: ModelSpec) -> None:
        self.groups = spec.num_qo_heads // spec.num_kv_heads
        self.scale = spec.head_dim**-0.5
        self.k: dict[int, Tensor] = {}
        self.v: dict[int, Tensor] = {}

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if layer in self.k:
            k, v = torch.cat((self.k[layer], k)), torch.cat((self.v[layer], v))
        self.k[layer], self.v[layer] = k.clone(), v.clone()
        keys = k.repeat_interleave(self.groups, dim=1).transpose(0, 1)
        values = v.repeat_interleave(self.groups, dim=1).transpose(0, 1)
        first = len(k) - len(q)
        visible = torch.arange(len(k))[None, :] <= torch.arange(first, len(k))[:, None]
        scores = (q.transpose(0, 1) @ keys.transpose(1, 2) * self.scale).masked_fill(~visible, -torch.inf)
        return (torch.softmax(scores, -1, dtype=torch.float32).to(q.dtype) @ values).transpose(0, 1)


def save_checkpoint(folder: Path, config: Any, *, seed: int, max_shard_size: str = "5GB") -> Any:
    """Write a random checkpoint of a transformers configuration; return the model in float64."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.5, 1.5)  # ones would hide a norm that is not applied
            elif parameter.dim() == 1:
                parameter.normal_(std=0.2)  # zeros would hide a bias that is not added
            else:
                parameter.normal_(std=1.5 * parameter.shape[-1] ** -0.5)
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    return model.double().eval()
