"""All settings of an engine in one frozen object; the names are vLLM's where vLLM has them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ramet.errors import InvalidArgument, known_fields_only

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
        Samples that decode together.
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
        CPU threads; torch's own choice by default.
    tensor_parallel_size : int, default 1
        Only 1 is supported so far.
    """

    model: str
    tokenizer: str | None = None
    revision: str | None = None
    dtype: DType = "auto"
    load_format: Literal["auto", "dummy"] = "auto"
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
        if not isinstance(self.model, str) or not self.model:
            raise InvalidArgument(f"model is {self.model!r}; allowed: a folder, a .gguf file or a name.")
        choices: dict[str, tuple[object, ...]] = {
            "dtype": ("auto", "float32", "bfloat16", "float16"),
            "load_format": ("auto", "dummy"),
            "logprobs_mode": ("raw_logprobs", "processed_logprobs"),
            "page_size": tuple(2**k for k in range(9)),
        }
        for name, allowed in choices.items():
            if getattr(self, name) not in allowed:
                raise InvalidArgument(f"{name} is {getattr(self, name)!r}; allowed: {', '.join(map(str, allowed))}.")
        for name in ("max_model_len", "max_num_seqs", "max_num_batched_tokens", "kv_cache_memory_bytes", "num_threads"):
            value = getattr(self, name)
            if value is None and name not in ("max_num_seqs", "max_num_batched_tokens"):
                continue
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise InvalidArgument(f"{name} is {value!r}; allowed: an integer of at least 1.")
        if self.gpu_memory_utilization is not None and not 0.0 < self.gpu_memory_utilization <= 1.0:
            raise InvalidArgument(
                f"gpu_memory_utilization is {self.gpu_memory_utilization!r}; allowed: above 0 and up to 1."
            )
        if self.tensor_parallel_size != 1:
            raise InvalidArgument(
                f"tensor_parallel_size is {self.tensor_parallel_size!r}; only 1 is supported so far: leave it out."
            )
        if not isinstance(self.seed, int) or isinstance(self.seed, bool) or not -(2**63) <= self.seed < 2**64:
            raise InvalidArgument(f"seed is {self.seed!r}; allowed: a 64-bit integer.")
