"""Where the memory goes: the size of the KV pool, and one ledger."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass

import psutil

from ramet.config import EngineConfig
from ramet.errors import OutOfMemory, allocating
from ramet.models.spec import ModelSpec
from ramet.models.weights import weight_bytes

CPU_POOL_LIMIT = 4 << 30
"""Default ceiling of the KV pool on a CPU, where memory is shared with everything else."""


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes and pages of an engine.

    Attributes
    ----------
    page_bytes : int
        K and V of all layers for ``page_size`` tokens.
    num_pages : int
    max_model_len : int
        What was asked for, or the model's own limit, or less if the pool is smaller than that.
    weight_bytes : int
    source : str
        Which setting gave the pool its size.
    """

    page_bytes: int
    num_pages: int
    max_model_len: int
    weight_bytes: int
    page_size: int
    source: str

    def ledger(self) -> str:
        """One line per consumer, with the setting that changes it."""
        mib = 1 << 20
        pool = self.num_pages * self.page_bytes
        return (
            f"memory: weights {self.weight_bytes / mib:,.0f} MiB (dtype); "
            f"KV pool {pool / mib:,.0f} MiB = {self.num_pages:,} pages of {self.page_size} tokens, "
            f"{self.num_pages * self.page_size:,} tokens ({self.source}), touched as it is used; "
            f"longest sequence {self.max_model_len:,} tokens (max_model_len)"
        )


def kv_bytes_per_token(spec: ModelSpec, itemsize: int) -> int:
    """Bytes of K and V of one token in all layers."""
    return 2 * spec.num_layers * spec.num_kv_heads * spec.head_dim * itemsize


def plan_memory(config: EngineConfig, spec: ModelSpec, *, max_model_len: int, itemsize: int) -> MemoryPlan:
    """Size the KV pool from a setting, or from the free memory.

    Parameters
    ----------
    max_model_len : int
        What the model and the configuration allow.
    itemsize : int
        Bytes of a number of the KV pool and of the weights.

    Raises
    ------
    OutOfMemory
        The pool would be smaller than one sequence of ``max_model_len``, if that was given, or than two pages; or
        larger than the machine's memory.
    """
    page_bytes = kv_bytes_per_token(spec, itemsize) * config.page_size
    free = psutil.virtual_memory().available
    if config.kv_cache_memory_bytes is not None:
        budget, source = config.kv_cache_memory_bytes, "kv_cache_memory_bytes"
    elif config.gpu_memory_utilization is not None:
        budget, source = int(free * config.gpu_memory_utilization), "gpu_memory_utilization of the free memory"
    else:
        budget, source = min(free // 2, CPU_POOL_LIMIT), "default: half of the free memory, 4 GiB at most"
    if budget > psutil.virtual_memory().total:
        raise OutOfMemory(
            f"{source} gives {budget:,} bytes of KV pool; this machine has {psutil.virtual_memory().total:,}: lower it."
        )
    num_pages = budget // page_bytes
    wanted = max_model_len
    # One page more than the tokens fill: a sample's tail starts in a page of its own.
    fitting = (num_pages - 2) * config.page_size
    needed = (-(-wanted // config.page_size) + 2) * page_bytes
    if num_pages < 3 or (config.max_model_len is not None and fitting < wanted):
        raise OutOfMemory(
            f"{source} gives {budget:,} bytes of KV pool; one sequence of {wanted:,} tokens (max_model_len) takes "
            f"{needed:,}: set kv_cache_memory_bytes to at least that, or max_model_len lower."
        )
    return MemoryPlan(
        page_bytes=page_bytes,
        num_pages=num_pages,
        max_model_len=min(wanted, fitting),
        weight_bytes=weight_bytes(spec, itemsize),
        page_size=config.page_size,
        source=source,
    )


def out_of_memory_in_words(config: EngineConfig) -> AbstractContextManager[None]:
    """Turn a failed allocation into an :class:`OutOfMemory` that names the settings an engine's size comes from."""
    return allocating(
        "the engine's arrays do not fit into memory: lower kv_cache_memory_bytes, max_model_len or max_num_seqs "
        f"({config.max_num_seqs:,})."
    )
