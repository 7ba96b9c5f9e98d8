"""What goes between a front end and its engine, as msgpack.

Arrays travel as the bytes of their little-endian numbers: token ids int32, log-probabilities float32, ranks int32.
"""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np

from ramet.engine.group import EMPTY_LOG, SampleLog
from ramet.outputs import FinishReason
from ramet.sampling_params import RequestOutputKind, SamplingParams
from ramet.structured_outputs import StructuredOutputsParams

# ---- to the engine --------------------------------------------------------------------------------------------------


class Submit(msgspec.Struct, tag="submit", frozen=True):
    """A request.

    Attributes
    ----------
    params : dict
        The fields of ``SamplingParams`` that differ from their defaults.
    stream : bool
        News at every step, not only at the ends of samples.
    first_k : int or None
        See :class:`~ramet.engine.group.GroupRequest`.
    """

    request_id: str
    prompt: bytes
    params: dict[str, Any]
    seed: int
    first_sample_id: int
    stream: bool
    first_k: int | None


class Abort(msgspec.Struct, tag="abort", frozen=True):
    """End a request, or one of its samples."""

    request_id: str
    index: int | None


class Call(msgspec.Struct, tag="call", frozen=True):
    """Something other than a request; answered by a :class:`Reply` of the same number."""

    number: int
    name: str
    arguments: dict[str, Any]


class Stop(msgspec.Struct, tag="stop", frozen=True):
    """End the engine."""


Command = Submit | Abort | Call | Stop

# ---- from the engine ------------------------------------------------------------------------------------------------


class Columns(msgspec.Struct, array_like=True, frozen=True):
    """Part of a :class:`~ramet.engine.group.SampleLog`."""

    tokens: bytes
    logprobs: bytes | None = None
    ranks: bytes | None = None
    top_ids: bytes | None = None
    top_logprobs: bytes | None = None


class Piece(msgspec.Struct, array_like=True, frozen=True):
    """News of a sample: what is new since the last, ``text`` too (None where no stop strings are watched)."""

    request_id: str
    index: int
    new: Columns
    finish_reason: FinishReason | None
    stop_reason: str | int | None
    text: str | None


class End(msgspec.Struct, array_like=True, frozen=True):
    """The end of a group; times in seconds since the engine took it, None where it never came to that."""

    request_id: str
    num_cached_tokens: int
    prompt_logprobs: Columns | None
    scheduled_after: float | None
    first_token_after: float | None


class Ready(msgspec.Struct, tag="ready", frozen=True):
    """The engine is up.

    Attributes
    ----------
    defaults : dict
        The model's generation_config.
    summary : list of str
        Lines for the log.
    """

    vocab_size: int
    max_model_len: int
    max_num_seqs: int
    eos_token_ids: list[int]
    defaults: dict[str, Any]
    summary: list[str]


class News(msgspec.Struct, tag="news", frozen=True):
    """What a step brought; ends come after all pieces of their group."""

    pieces: list[Piece]
    ends: list[End]


class Refused(msgspec.Struct, tag="refused", frozen=True):
    """A request that the engine can't take after all."""

    request_id: str
    message: str


class Reply(msgspec.Struct, tag="reply", frozen=True):
    """Answer of a call; ``error`` instead of ``value`` when it failed."""

    number: int
    value: Any
    error: str | None


class Failed(msgspec.Struct, tag="failed", frozen=True):
    """The engine ends because of an error, in one line; ``kind`` is its type."""

    kind: str
    message: str


Report = Ready | News | Refused | Reply | Failed

encode = msgspec.msgpack.Encoder().encode
decode_command = msgspec.msgpack.Decoder(Command).decode
decode_report = msgspec.msgpack.Decoder(Report).decode

# ---- arrays and parameters ------------------------------------------------------------------------------------------


def ids_to_bytes(ids: np.ndarray) -> bytes:
    """Return token ids as int32 bytes."""
    return ids.astype("<i4", copy=False).tobytes()


def ids_from_bytes(data: bytes) -> np.ndarray:
    """Return int32 token ids (read-only)."""
    return np.frombuffer(data, "<i4")


def pack_log(log: SampleLog, begin: int = 0) -> Columns:
    """Return a log from token ``begin`` on."""

    def column(values: np.ndarray | None, dtype: str) -> bytes | None:
        return None if values is None else np.ascontiguousarray(values[begin:], dtype).tobytes()

    return Columns(
        ids_to_bytes(log.token_ids[begin:]),
        column(log.logprobs, "<f4"),
        column(log.ranks, "<i4"),
        column(log.top_ids, "<i4"),
        column(log.top_logprobs, "<f4"),
    )


def unpack_log(columns: Columns) -> SampleLog:
    """Return the log that was packed."""
    tokens = ids_from_bytes(columns.tokens)

    def column(data: bytes | None, dtype: str) -> np.ndarray | None:
        return None if data is None else np.frombuffer(data, dtype)

    def table(data: bytes | None, dtype: str) -> np.ndarray | None:
        return None if data is None else np.frombuffer(data, dtype).reshape(len(tokens), -1)

    if not len(tokens):
        logprobs = None if columns.logprobs is None else np.empty(0, np.float32)
        return EMPTY_LOG._replace(logprobs=logprobs)
    return SampleLog(
        tokens,
        column(columns.logprobs, "<f4"),
        column(columns.ranks, "<i4"),
        table(columns.top_ids, "<i4"),
        table(columns.top_logprobs, "<f4"),
    )


def append_log(old: SampleLog, new: SampleLog) -> SampleLog:
    """Return a log with what follows it."""
    if not len(old.token_ids):
        return new
    if not len(new.token_ids):
        return old

    def joined(a: np.ndarray | None, b: np.ndarray | None) -> np.ndarray | None:
        return b if a is None else a if b is None else np.concatenate([a, b])

    tokens, logprobs, ranks, top_ids, top_logprobs = map(joined, old, new)
    assert tokens is not None
    return SampleLog(tokens, logprobs, ranks, top_ids, top_logprobs)


_DEFAULTS = {name: field.default for name, field in SamplingParams.__dataclass_fields__.items()}
_LOCAL = ("output_kind", "seed")  # the front end's own, and the one that travels resolved


def pack_params(params: SamplingParams) -> dict[str, Any]:
    """Return the fields that differ from their defaults, as msgpack has them."""
    found = {name: getattr(params, name) for name in _DEFAULTS if name not in _LOCAL}
    packed = {name: value for name, value in found.items() if value != _DEFAULTS[name]}
    if isinstance(params.structured_outputs, StructuredOutputsParams):
        packed["structured_outputs"] = params.structured_outputs.as_dict()
    return packed


def unpack_params(packed: dict[str, Any], *, stream: bool) -> SamplingParams:
    """Return the parameters that were packed."""
    fields = dict(packed)
    if "structured_outputs" in fields:
        fields["structured_outputs"] = StructuredOutputsParams(**fields["structured_outputs"])
    kind = RequestOutputKind.CUMULATIVE if stream else RequestOutputKind.FINAL_ONLY
    return SamplingParams(output_kind=kind, **fields)
