"""What one request asks of the sampler. Names, defaults and meanings are vLLM's."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from numbers import Integral, Real
from typing import Any, NamedTuple

from ramet.errors import InvalidArgument, known_fields_only, shown
from ramet.structured_outputs import StructuredOutputsParams

MAX_N = 16_384
"""Largest ``n`` of one request; more is almost surely a mistake (the server's ``max_n``)."""


class RequestOutputKind(enum.Enum):
    """Which intermediate answers a request sends."""

    CUMULATIVE = 0  #: every answer holds everything so far
    DELTA = 1  #: every answer holds what is new
    FINAL_ONLY = 2  #: one answer, at the end


@known_fields_only
@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """Sampling parameters of a request; checked when made.

    Parameters
    ----------
    n : int, default 1
        Samples of the prompt, 1 to 16,384. They share the prompt's computation and storage.
    temperature : float, default 1.0
        0 is greedy: the samples are computed once and copied.
    top_p : float, default 1.0
        In (0, 1].
    top_k : int, default -1
        -1 and 0 mean all tokens.
    min_p : float, default 0.0
        In [0, 1]; relative to the likeliest token.
    max_tokens : int or None, default 16
        None: up to ``max_model_len``. 0 computes the prompt only (for ``prompt_logprobs``).
    min_tokens : int, default 0
        No stop token is sampled before this many.
    stop : str or list of str, optional
        Strings that end a sample; cut from the text unless ``include_stop_str_in_output``.
    stop_token_ids : list of int, optional
        Ids that end a sample, besides the model's EOS.
    ignore_eos : bool, default False
        Go on after the model's EOS.
    seed : int, optional
        64-bit. None draws a fresh one from (engine seed, request counter).
    logprobs : int, optional
        k >= 0: log-probabilities of the sampled token and of the k likeliest; 0 = sampled token only.
    prompt_logprobs : int, optional
        The same for the prompt's tokens. The prompt is then recomputed, never taken from the cache.
    presence_penalty, frequency_penalty : float, default 0.0
        In [-2, 2]; on generated tokens.
    repetition_penalty : float, default 1.0
        1e-4 to 1e4; on prompt and generated tokens.
    logit_bias : dict of int to float, optional
        Added to the logits of these ids, each in [-100, 100].
    allowed_token_ids : list of int, optional
        Only these can be sampled.
    bad_words : str or list of str, optional
        Strings whose token sequences are never completed.
    skip_special_tokens : bool, default True
    include_stop_str_in_output : bool, default False
    detokenize : bool, default True
        False returns token ids only (``text`` is empty); not together with ``stop`` or ``bad_words``.
    structured_outputs : StructuredOutputsParams, optional
        The form that every sample's text must have.
    output_kind : RequestOutputKind, default CUMULATIVE
    cache_salt : str, optional
        Requests share cached prefixes only with requests of the same salt.

    Raises
    ------
    InvalidArgument
        Unknown name or value that is not allowed.

    Examples
    --------
    >>> SamplingParams(n=4, temperature=0.8, seed=7).n
    4
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    max_tokens: int | None = 16
    min_tokens: int = 0
    stop: str | list[str] | tuple[str, ...] = ()
    stop_token_ids: list[int] | tuple[int, ...] = ()
    ignore_eos: bool = False
    seed: int | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: list[int] | tuple[int, ...] | None = None
    bad_words: str | list[str] | tuple[str, ...] = ()
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    detokenize: bool = True
    structured_outputs: StructuredOutputsParams | None = None
    output_kind: RequestOutputKind = field(default=RequestOutputKind.CUMULATIVE)
    cache_salt: str | None = None

    def __post_init__(self) -> None:
        for names, normal in ((_NUMBERS, _plain_number), (_LISTS, _plain_list)):
            for name in names:
                object.__setattr__(self, name, normal(name, getattr(self, name)))  # the dataclass is frozen
        object.__setattr__(self, "logit_bias", _plain_bias(self.logit_bias))
        _check_together(self)

    @property
    def greedy(self) -> bool:
        """Whether the likeliest token is taken at every step."""
        return self.temperature == 0.0


class _Range(NamedTuple):
    """What a number may be."""

    kind: type[int] | type[float]
    low: float
    high: float
    allowed: str
    optional: bool = False
    open_below: bool = False  # ``low`` itself is not allowed


_NUMBERS = {
    "n": _Range(int, 1, MAX_N, f"an integer from 1 to {MAX_N:,}"),
    "temperature": _Range(float, 0.0, 1e4, "a number from 0 (greedy) to 10,000"),
    "top_p": _Range(float, 0.0, 1.0, "a number above 0 and up to 1 (1 = off)", open_below=True),
    "top_k": _Range(int, -1, 2**31 - 1, "-1 or 0 (all tokens), or an integer of at least 1"),
    "min_p": _Range(float, 0.0, 1.0, "a number from 0 to 1"),
    "max_tokens": _Range(int, 0, 2**31 - 1, "None (up to the context) or an integer of at least 0", optional=True),
    "min_tokens": _Range(int, 0, 2**31 - 1, "an integer of at least 0"),
    "seed": _Range(int, -(2**63), 2**64 - 1, "None or a 64-bit integer", optional=True),
    "logprobs": _Range(
        int, 0, 2**31 - 1, "None or an integer of at least 0 (0 = the sampled token only)", optional=True
    ),
    "prompt_logprobs": _Range(
        int, 0, 2**31 - 1, "None or an integer of at least 0 (0 = the prompt's tokens only)", optional=True
    ),
    "presence_penalty": _Range(float, -2.0, 2.0, "a number from -2 to 2"),
    "frequency_penalty": _Range(float, -2.0, 2.0, "a number from -2 to 2"),
    "repetition_penalty": _Range(float, 1e-4, 1e4, "a number from 0.0001 to 10,000 (1 = off)"),
}
_LISTS = ("stop", "stop_token_ids", "allowed_token_ids", "bad_words")


def _refuse(name: str, value: object, allowed: str) -> InvalidArgument:
    return InvalidArgument(f"{name} is {shown(value)}; allowed: {allowed}.")


def _is_int(value: object) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


def _is_real(value: object) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


def _is_text(value: object) -> bool:
    """Whether it is a string with something in it and without lone surrogates, which no text and no file can hold."""
    try:
        return isinstance(value, str) and bool(value.encode())
    except UnicodeEncodeError:
        return False


def _plain_number(name: str, value: Any) -> int | float | None:
    """A number in its range as Python's own kind; NumPy's are taken too."""
    kind, low, high, allowed, optional, open_below = _NUMBERS[name]
    if value is None and optional:
        return None
    is_kind = _is_int if kind is int else _is_real
    if not is_kind(value) or not low <= value <= high or (open_below and value == low):
        raise _refuse(name, value, allowed)
    return kind(value)


def _plain_list(name: str, value: Any) -> tuple[Any, ...] | None:
    """A list of strings or token ids as a tuple; a single string is a list of one."""
    words = name in ("stop", "bad_words")
    allowed = "non-empty strings of valid Unicode" if words else "a list of token ids (integers of at least 0)"
    if value is None:
        return None if name == "allowed_token_ids" else ()
    if isinstance(value, str) and words:
        value = (value,)
    if isinstance(value, str | bytes | Mapping) or not isinstance(value, Iterable):
        raise _refuse(name, value, allowed)
    items = tuple(value)
    for item in items:
        if not (_is_text(item) if words else _is_int(item) and item >= 0):
            raise _refuse(name, item, allowed)
    if name == "allowed_token_ids" and not items:
        raise _refuse(name, [], "None or at least one token id")
    return items if words else tuple(map(int, items))


def _plain_bias(value: Any) -> dict[int, float] | None:
    if value is None:
        return None
    if not isinstance(value, Mapping):
        raise _refuse("logit_bias", value, "a dict of token id to a number from -100 to 100")
    for token, bias in value.items():
        if not _is_int(token) or token < 0:
            raise _refuse("logit_bias", token, "token ids (integers of at least 0) as keys")
        if not _is_real(bias) or not -100.0 <= bias <= 100.0:
            raise _refuse(f"logit_bias[{token}]", bias, "a number from -100 to 100")
    return {int(token): float(bias) for token, bias in value.items()}


def _check_together(p: SamplingParams) -> None:
    """Fields that are no numbers and no lists, and what must fit together."""
    for name in ("ignore_eos", "skip_special_tokens", "include_stop_str_in_output", "detokenize"):
        if not isinstance(getattr(p, name), bool):
            raise _refuse(name, getattr(p, name), "True or False")
    if p.max_tokens is not None and p.min_tokens > p.max_tokens:
        raise _refuse("min_tokens", p.min_tokens, f"at most max_tokens ({p.max_tokens})")
    if not p.detokenize and (p.stop or p.bad_words):
        raise _refuse("detokenize", False, "True when stop or bad_words are given, since they are strings")
    if p.structured_outputs is not None:
        if not isinstance(p.structured_outputs, StructuredOutputsParams):
            raise _refuse("structured_outputs", p.structured_outputs, "None or a StructuredOutputsParams")
        if p.ignore_eos:
            raise _refuse("ignore_eos", True, "False with structured_outputs, whose texts end where their grammar does")
    if p.cache_salt is not None and not _is_text(p.cache_salt):
        raise _refuse("cache_salt", p.cache_salt, "None or a non-empty string of valid Unicode")
    if not isinstance(p.output_kind, RequestOutputKind):
        raise _refuse("output_kind", p.output_kind, "a RequestOutputKind")
