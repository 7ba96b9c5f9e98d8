"""Settings of an engine take every kind of number, keep Python's own, and refuse the rest in one line."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ramet.config import MAX_SEQS, EngineConfig
from ramet.errors import InvalidArgument, shown

INTEGERS = {
    "max_model_len": (1, 2**31 - 1),
    "max_num_seqs": (1, MAX_SEQS),
    "max_num_batched_tokens": (1, 2**31 - 1),
    "kv_cache_memory_bytes": (1, 2**63 - 1),
    "seed": (-(2**63), 2**64 - 1),
    "num_threads": (1, os.cpu_count()),
}
HAVE_NO_DEFAULT = ("max_model_len", "kv_cache_memory_bytes", "num_threads", "gpu_memory_utilization")


def refused(**settings: Any) -> str:
    """The message of a refusal, which is one short line that begins with the setting."""
    with pytest.raises(InvalidArgument) as caught:
        EngineConfig(**{"model": "m", **settings})
    text = str(caught.value)
    assert text.startswith(next(iter(settings))) and "\n" not in text and len(text) < 200
    return text


@pytest.mark.parametrize("name", INTEGERS)
def test_integers_and_their_ranges(name: str) -> None:
    low, high = INTEGERS[name]
    for good in (low, high, np.int64(1), np.uint8(1)):
        value = getattr(EngineConfig(model="m", **{name: good}), name)
        assert value == good and type(value) is int
    for bad in (low - 1, high + 1, 10**400, True, np.True_, 2.0, "2", [2], float("nan")):
        assert "allowed: a" in refused(**{name: bad})
    if name in HAVE_NO_DEFAULT:
        assert getattr(EngineConfig(model="m", **{name: None}), name) is None
    else:
        refused(**{name: None})


def test_every_integer_of_the_class_is_checked() -> None:
    hints = {f.name: str(f.type) for f in dataclasses.fields(EngineConfig)}
    assert {name for name, hint in hints.items() if hint.split(" ")[0] == "int"} == {
        *INTEGERS,
        "page_size",
        "tensor_parallel_size",
    }


def test_pages_are_powers_of_two() -> None:
    assert [EngineConfig(model="m", page_size=np.int32(2**k)).page_size for k in range(9)] == [2**k for k in range(9)]
    for bad in (0, 3, 24, 512, None, 16.0):
        refused(page_size=bad)
    assert "allowed: 1, 2, 4" in refused(page_size=24)


def test_only_one_way_is_supported() -> None:
    assert "only 1 is supported" in refused(tensor_parallel_size=2)


@pytest.mark.parametrize("bad", [0, -0.1, 1.01, float("nan"), float("inf"), True, "0.5", [0.5]])
def test_the_share_of_memory_is_above_nothing_and_at_most_everything(bad: Any) -> None:
    assert "allowed: above 0 and up to 1" in refused(gpu_memory_utilization=bad)
    assert EngineConfig(model="m", gpu_memory_utilization=np.float32(1)).gpu_memory_utilization == 1


def test_names_are_texts() -> None:
    assert EngineConfig(model=Path("a") / "b").model == str(Path("a") / "b")  # type: ignore[arg-type]
    for bad in ("", None, 5, b"m", ["m"], "a\0b"):
        refused(model=bad)
    for name in ("tokenizer", "revision"):
        assert getattr(EngineConfig(model="m", **{name: "x"}), name) == "x"
        for bad in ("", 5, "a\0b"):
            refused(**{name: bad})


def test_choices_are_listed() -> None:
    for name in ("dtype", "load_format", "logprobs_mode"):
        for bad in ("what", None, 5, torch.bfloat16, ["auto"]):
            assert "allowed: " in refused(**{name: bad})
    assert "float32, bfloat16" in refused(dtype=torch.bfloat16)
    for bad in (1, None, "yes"):
        assert "True or False" in refused(enable_prefix_caching=bad)


def test_an_unknown_setting_gets_the_nearest_name() -> None:
    with pytest.raises(InvalidArgument, match="no field 'max_num_seq'; did you mean 'max_num_seqs'"):
        EngineConfig(model="m", max_num_seq=4)


class Faulty:
    def __repr__(self) -> str:
        raise RuntimeError("no text")


def test_values_are_shown_on_one_short_line() -> None:
    assert shown("two\nlines\0\ud800") == r"'two\nlines\x00\ud800'"
    assert shown(np.arange(6).reshape(3, 2)) == "array([[0, 1], [2, 3], [4, 5]])"
    assert shown(Faulty()) == "a value of type Faulty"
    assert shown(10**5000) == "a value of type int"
    assert len(shown("x" * 1000)) == 60
