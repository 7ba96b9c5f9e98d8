"""All settings of an engine in one frozen object; the names are vLLM's where vLLM has them."""

from __future__ import annotations

import os
from dataclasses import dataclass
from numbers import Integral, Real
from pathlib import Path
from typing import Any, Literal, get_args

from ramet.errors import InvalidArgument, known_fields_only, shown

MAX_SEQS = 65_536
"""Largest ``max_num_seqs``; every row takes some kilobytes of host memory whether it runs or not."""

LoadFormat = Literal["auto", "dummy"]
DType = Literal["auto", "float32", "bfloat16", "float16"]
LogprobsMode = Literal["raw_logprobs", "processed_logprobs"]


@known_fields_only
@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Settings of an engine; checked when made.

    Parameters
    ----------
    model : str
        A Hugging Face folder, a ``.gguf`` file, a hub name (``org/name``) or a local name (``smollm2-135m``).
    tokenizer : str, optional
        Folder, file or hub name of the tokenizer; the model's own by default.
    revision : str, optional
        Branch, tag or commit of a hub model.
    dtype : {"auto", "float32", "bfloat16", "float16"}, default "auto"
        Of weights, activations and KV. ``auto`` is bfloat16 where the device computes with it, else float32.
    load_format : {"auto", "dummy"}, default "auto"
        ``dummy`` makes random weights from the configuration alone.
    max_model_len : int, optional
        Longest prompt plus output, in tokens; the model's own limit by default.
    max_num_seqs : int, default 256
        Samples that decode together, at most 65,536.
    max_num_batched_tokens : int, default 2048
        Tokens of one step; longer prompts are prefilled in chunks.
    page_size : int, default 16
        Tokens of a page, a power of two from 1 to 256.
    kv_cache_memory_bytes : int, optional
        Bytes of the KV pool; overrides ``gpu_memory_utilization``.
    gpu_memory_utilization : float, optional
        Share of the device's memory for everything (on a CPU: share of the free memory for the KV pool). On a CPU
        the default is half of the free memory, 4 GiB at most.
    enable_prefix_caching : bool, default True
        Keep computed prefixes after their request has ended. Sharing among live requests is always on.
    logprobs_mode : {"raw_logprobs", "processed_logprobs"}, default "raw_logprobs"
        Log-probabilities before, or after, penalties, temperature, top-k, top-p and min-p.
    seed : int, default 0
        Of the keys of unseeded requests and of dummy weights.
    num_threads : int, optional
        CPU threads, at most as many as there are cores; torch's own choice by default.
    tensor_parallel_size : int, default 1
        Only 1 is supported so far.
    """

    model: str
    tokenizer: str | None = None
    revision: str | None = None
    dtype: DType = "auto"
    load_format: LoadFormat = "auto"
    max_model_len: int | None = None
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048
    page_size: int = 16
    kv_cache_memory_bytes: int | None = None
    gpu_memory_utilization: float | None = None
    enable_prefix_caching: bool = True
    logprobs_mode: LogprobsMode = "raw_logprobs"
    seed: int = 0
    num_threads: int | None = None
    tensor_parallel_size: int = 1

    def __post_init__(self) -> None:
        if isinstance(self.model, Path):
            object.__setattr__(self, "model", str(self.model))
        for name, (low, high) in _integer_ranges().items():
            object.__setattr__(self, name, self._integer(name, low, high))
        for name in ("model", "tokenizer", "revision"):
            value = getattr(self, name)
            if value is None and name != "model":
                continue
            if not isinstance(value, str) or not value or "\0" in value:
                raise self._refuse(name, "a name" if name == "revision" else "a folder, a .gguf file or a name")
        choices = {
            "dtype": get_args(DType),
            "load_format": get_args(LoadFormat),
            "logprobs_mode": get_args(LogprobsMode),
        }
        for name, allowed in {**choices, "page_size": tuple(2**k for k in range(9))}.items():
            if getattr(self, name) not in allowed:
                raise self._refuse(name, ", ".join(map(str, allowed)))
        share = self.gpu_memory_utilization
        if share is not None and (isinstance(share, bool) or not isinstance(share, Real) or not 0.0 < share <= 1.0):
            raise self._refuse("gpu_memory_utilization", "above 0 and up to 1")
        if not isinstance(self.enable_prefix_caching, bool):
            raise self._refuse("enable_prefix_caching", "True or False")
        if self.tensor_parallel_size != 1:
            raise InvalidArgument(
                f"tensor_parallel_size is {self.tensor_parallel_size!r}; only 1 is supported so far: leave it out."
            )

    def _integer(self, name: str, low: int, high: int) -> int | None:
        """A setting as Python's integer; NumPy's are taken too, and None where that is the default."""
        value: Any = getattr(self, name)
        if value is None and type(self).__dataclass_fields__[name].default is None:
            return None
        if not isinstance(value, Integral) or isinstance(value, bool) or not low <= int(value) <= high:
            raise self._refuse(name, "a 64-bit integer" if name == "seed" else f"an integer from {low} to {high:,}")
        return int(value)

    def _refuse(self, name: str, allowed: str) -> InvalidArgument:
        return InvalidArgument(f"{name} is {shown(getattr(self, name))}; allowed: {allowed}.")


def _integer_ranges() -> dict[str, tuple[int, int]]:
    """Smallest and largest value of every integer setting."""
    many = 2**31 - 1
    return {
        "max_model_len": (1, many),
        "max_num_seqs": (1, MAX_SEQS),
        "max_num_batched_tokens": (1, many),
        "page_size": (1, 256),
        "kv_cache_memory_bytes": (1, 2**63 - 1),
        "seed": (-(2**63), 2**64 - 1),
        "num_threads": (1, os.cpu_count() or many),  # torch ends the process where it can't start a thread
        "tensor_parallel_size": (1, many),
    }
