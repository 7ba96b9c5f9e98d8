"""Engines over one loaded model: weights are shared, everything else is new each time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from ramet.config import EngineConfig
from ramet.engine.engine import Engine
from ramet.engine.memory import kv_bytes_per_token, plan_memory
from ramet.frontend.client import Client, Prompt
from ramet.frontend.tokenizer import load_tokenizer
from ramet.models.registry import load_model
from ramet.outputs import RequestOutput
from ramet.sampling_params import SamplingParams


class RealModel:
    """Loads once; ``client(**settings)`` makes a fresh engine around it."""

    def __init__(self, name: str, **settings: Any) -> None:
        self.config = EngineConfig(model=name, **settings)
        self.loaded = load_model(self.config, device="cpu")
        self.tokenizer = load_tokenizer(self.loaded.files)

    def client(self, *, pages: int | None = None, **settings: Any) -> Client:
        config = replace(self.config, **settings)
        itemsize = self.loaded.model.dtype.itemsize
        if pages is not None:
            page = kv_bytes_per_token(self.loaded.spec, itemsize) * config.page_size
            config = replace(config, kv_cache_memory_bytes=pages * page)
        length = config.max_model_len or self.loaded.max_model_len
        memory = plan_memory(config, self.loaded.spec, max_model_len=length, itemsize=itemsize)
        engine = Engine(self.loaded.model, self.loaded.spec, config, memory, dtype=self.loaded.model.dtype)
        return Client(engine, self.tokenizer, eos_token_ids=self.loaded.spec.eos_token_ids, seed=config.seed)


def generate(
    client: Client, prompts: Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams]
) -> list[RequestOutput]:
    """Submit all prompts at once and run to the end."""
    many = [params] * len(prompts) if isinstance(params, SamplingParams) else params
    outputs = []
    for prompt, p in zip(prompts, many, strict=True):
        request, output = client.request(prompt, p)
        client.submit(request, output)
        outputs.append(output)
    while client.engine.has_unfinished:
        client.step()
    assert all(output.finished for output in outputs)
    return outputs
