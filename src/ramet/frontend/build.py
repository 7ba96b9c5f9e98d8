"""From a configuration to an engine with its client: what every front door begins with."""

from __future__ import annotations

from dataclasses import dataclass
from time import perf_counter
from typing import Any

import torch

from ramet.config import EngineConfig
from ramet.engine.engine import Engine
from ramet.engine.memory import MemoryPlan, out_of_memory_in_words, plan_memory
from ramet.frontend.client import Client
from ramet.frontend.tokenizer import Tokenizer, load_tokenizer
from ramet.models.registry import load_model, resolve


@dataclass(frozen=True)
class Built:
    """An engine, and what belongs to it.

    Attributes
    ----------
    defaults : dict
        The model's generation_config.
    summary : list of str
        How long it took and where the memory goes; lines for the log.
    """

    engine: Engine
    client: Client
    tokenizer: Tokenizer
    memory: MemoryPlan
    defaults: dict[str, Any]
    summary: list[str]


def build(config: EngineConfig) -> Built:
    """Load a model and make its engine.

    Parameters
    ----------
    config : EngineConfig

    Raises
    ------
    ModelError, Unsupported, OutOfMemory
        In one line: what is wrong, the value, what is allowed, how to change it.
    """
    if config.num_threads is not None:
        torch.set_num_threads(config.num_threads)
    device = torch.device("cpu")
    started = perf_counter()
    loaded = load_model(config, device=device)
    weights_loaded = perf_counter()
    tokenizer = load_tokenizer(loaded.files if config.tokenizer is None else resolve(config.tokenizer, weights=False))
    dtype = loaded.model.dtype
    memory = plan_memory(config, loaded.spec, max_model_len=loaded.max_model_len, itemsize=dtype.itemsize)
    with out_of_memory_in_words(config):
        engine = Engine(loaded.model, loaded.spec, config, memory, dtype=dtype, device=device)
    client = Client(engine, tokenizer, eos_token_ids=loaded.spec.eos_token_ids, seed=config.seed)
    rest = perf_counter() - weights_loaded
    start = (
        f"start: weights {weights_loaded - started:.1f} s, tokenizer and pool {rest:.1f} s; "
        f"{loaded.spec.architecture} in {str(dtype).removeprefix('torch.')}"
    )
    return Built(engine, client, tokenizer, memory, dict(loaded.files.generation_config), [start, memory.ledger()])


def default_sampling(defaults: dict[str, Any]) -> dict[str, Any]:
    """Return the sampling parameters that a model's generation_config sets."""
    names = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
    found = {name: defaults[name] for name in names if defaults.get(name) is not None}
    if defaults.get("max_new_tokens") is not None:
        found["max_tokens"] = defaults["max_new_tokens"]
    return found
