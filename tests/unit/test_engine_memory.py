"""The size of the pool: from a setting or from what is free, and refusals in words."""

from __future__ import annotations

from typing import Any
from unittest.mock import Mock

import numpy as np
import psutil
import pytest
import torch

from ramet.config import EngineConfig
from ramet.engine.memory import (
    CPU_POOL_LIMIT,
    MemoryPlan,
    kv_bytes_per_token,
    out_of_memory_in_words,
    plan_memory,
)
from ramet.errors import OutOfMemory
from ramet.models.spec import spec_from_config
from ramet.models.weights import weight_bytes

SPEC = spec_from_config(
    dict(
        architectures=["LlamaForCausalLM"],
        vocab_size=10,
        hidden_size=8,
        intermediate_size=12,
        num_hidden_layers=3,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=1024,
    )
)
TOKEN = 2 * 3 * 1 * 4 * 4  # K and V, layers, heads, numbers of a head, bytes of a number


def plan(length: int = 1024, **settings: Any) -> MemoryPlan:
    return plan_memory(EngineConfig(model="m", **settings), SPEC, max_model_len=length, itemsize=4)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Mock:
    """A machine of 1 GiB, of which 100,000 bytes are free."""
    memory = Mock(available=100_000, total=1 << 30)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: memory)
    return memory


def test_bytes_are_counted_by_hand() -> None:
    assert kv_bytes_per_token(SPEC, 4) == TOKEN
    layer = 8 * 8 + 2 * (8 * 4) + 8 * 8 + 3 * 8 * 12 + 2 * 8
    assert weight_bytes(SPEC, 2) == 2 * (3 * layer + 2 * 10 * 8 + 8)


def test_the_pool_has_the_bytes_that_were_given() -> None:
    made = plan(kv_cache_memory_bytes=TOKEN * 16 * 70 + 5, page_size=16)
    assert (made.num_pages, made.page_bytes, made.max_model_len) == (70, TOKEN * 16, 1024)
    assert made.source == "kv_cache_memory_bytes"


def test_without_a_setting_it_takes_half_of_what_is_free(machine: Mock) -> None:
    assert plan(page_size=1).num_pages == 50_000 // TOKEN
    assert plan(page_size=1, gpu_memory_utilization=0.9).num_pages == 90_000 // TOKEN
    machine.available = machine.total = 64 << 30
    assert plan(page_size=1).num_pages == CPU_POOL_LIMIT // TOKEN


def test_the_context_shrinks_to_the_pool_unless_it_was_asked_for() -> None:
    pool = TOKEN * 16 * 22
    assert plan(kv_cache_memory_bytes=pool).max_model_len == 20 * 16
    with pytest.raises(OutOfMemory, match=r"1,024 tokens \(max_model_len\) takes 101,376.*kv_cache_memory_bytes"):
        plan(kv_cache_memory_bytes=pool, max_model_len=1024)
    assert TOKEN * 16 * (1024 // 16 + 2) == 101_376
    assert plan(kv_cache_memory_bytes=101_376, max_model_len=1024).max_model_len == 1024


@pytest.mark.parametrize("settings", [{"kv_cache_memory_bytes": 1}, {"kv_cache_memory_bytes": TOKEN * 16 * 3 - 1}])
def test_two_pages_are_no_pool(settings: dict[str, int]) -> None:
    with pytest.raises(OutOfMemory, match="set kv_cache_memory_bytes to at least that") as caught:
        plan(**settings)
    assert "\n" not in str(caught.value)


def test_a_pool_larger_than_the_machine_is_refused(machine: Mock) -> None:
    with pytest.raises(OutOfMemory, match="kv_cache_memory_bytes gives 1,073,741,825.*machine has 1,073,741,824"):
        plan(kv_cache_memory_bytes=(1 << 30) + 1)
    plan(kv_cache_memory_bytes=1 << 30)


def test_an_allocation_that_fails_names_the_settings() -> None:
    config = EngineConfig(model="m", max_num_seqs=7)
    too_large: list[Any] = [lambda: np.empty(2**55, np.int8), lambda: torch.empty(2**55, dtype=torch.int8)]
    for allocate in too_large:
        with pytest.raises(OutOfMemory, match=r"kv_cache_memory_bytes, max_model_len or max_num_seqs \(7\)") as caught:
            with out_of_memory_in_words(config):
                allocate()
        assert "\n" not in str(caught.value)
    for error in (RuntimeError("something else"), ValueError("a mistake of ours")):
        with pytest.raises(type(error), match=str(error)), out_of_memory_in_words(config):
            raise error
