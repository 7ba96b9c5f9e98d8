"""Ramet: many samples of one prompt. ``from ramet import LLM, SamplingParams``.

Names are imported when they are first used: ``import ramet`` costs nothing, and ``ramet.attention`` can be used alone.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ramet.async_llm import AsyncLLM
    from ramet.config import EngineConfig
    from ramet.errors import RametError
    from ramet.llm import LLM
    from ramet.outputs import CompletionOutput, Logprob, RequestOutput, TokenLogprobs
    from ramet.sampling_params import RequestOutputKind, SamplingParams
    from ramet.structured_outputs import StructuredOutputsParams

__version__ = "0.1.0"

_PLACES = {
    "AsyncLLM": "async_llm",
    "LLM": "llm",
    "EngineConfig": "config",
    "RametError": "errors",
    "CompletionOutput": "outputs",
    "Logprob": "outputs",
    "RequestOutput": "outputs",
    "TokenLogprobs": "outputs",
    "RequestOutputKind": "sampling_params",
    "SamplingParams": "sampling_params",
    "StructuredOutputsParams": "structured_outputs",
}

__all__ = [
    "AsyncLLM",
    "LLM",
    "CompletionOutput",
    "EngineConfig",
    "Logprob",
    "RametError",
    "RequestOutput",
    "RequestOutputKind",
    "SamplingParams",
    "StructuredOutputsParams",
    "TokenLogprobs",
    "__version__",
]


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module 'ramet' has no attribute {name!r}")
    return getattr(import_module(f"ramet.{_PLACES[name]}"), name)
