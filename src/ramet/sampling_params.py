"""What one request asks of the sampler. Names, defaults and meanings are vLLM's."""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass, field
from typing import Any

from ramet.errors import InvalidArgument, Unsupported, known_fields_only

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
        Above 0; on prompt and generated tokens.
    logit_bias : dict of int to float, optional
        Added to the logits of these ids, each in [-100, 100].
    allowed_token_ids : list of int, optional
        Only these can be sampled.
    bad_words : list of str, optional
        Strings whose token sequences are never completed.
    skip_special_tokens : bool, default True
    include_stop_str_in_output : bool, default False
    detokenize : bool, default True
        False returns token ids only (``text`` is empty); not together with ``stop`` or ``bad_words``.
    structured_outputs : object, optional
        Refused for now.
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
    bad_words: list[str] | tuple[str, ...] = ()
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    detokenize: bool = True
    structured_outputs: Any = None
    output_kind: RequestOutputKind = field(default=RequestOutputKind.CUMULATIVE)
    cache_salt: str | None = None

    def __post_init__(self) -> None:
        set_ = object.__setattr__  # the dataclass is frozen; normal forms are set once, here
        set_(self, "stop", (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ()))
        set_(self, "stop_token_ids", tuple(self.stop_token_ids or ()))
        set_(self, "bad_words", tuple(self.bad_words or ()))
        if self.allowed_token_ids is not None:
            set_(self, "allowed_token_ids", tuple(self.allowed_token_ids))
        _check_numbers(self)
        _check_lists(self)

    @property
    def greedy(self) -> bool:
        """Whether the likeliest token is taken at every step."""
        return self.temperature == 0.0


def _refuse(name: str, value: object, allowed: str) -> InvalidArgument:
    return InvalidArgument(f"{name} is {value!r}; allowed: {allowed}.")


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _check_numbers(p: SamplingParams) -> None:
    ranges: tuple[tuple[str, float, float, str], ...] = (
        ("temperature", 0.0, 1e4, "a number from 0 (greedy) to 10,000"),
        ("min_p", 0.0, 1.0, "a number from 0 to 1"),
        ("presence_penalty", -2.0, 2.0, "a number from -2 to 2"),
        ("frequency_penalty", -2.0, 2.0, "a number from -2 to 2"),
    )
    for name, low, high, allowed in ranges:
        value = getattr(p, name)
        if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
            raise _refuse(name, value, allowed)
    if not isinstance(p.top_p, int | float) or not 0.0 < p.top_p <= 1.0:
        raise _refuse("top_p", p.top_p, "a number above 0 and up to 1 (1 = off)")
    if not isinstance(p.repetition_penalty, int | float) or not 0.0 < p.repetition_penalty <= 1e4:
        raise _refuse("repetition_penalty", p.repetition_penalty, "a number above 0 (1 = off)")
    integers: tuple[tuple[str, int, int, str], ...] = (
        ("n", 1, MAX_N, f"an integer from 1 to {MAX_N:,}"),
        ("top_k", -1, 2**31 - 1, "-1 or 0 (all tokens), or an integer of at least 1"),
        ("min_tokens", 0, 2**31 - 1, "an integer of at least 0"),
    )
    for name, low, high, allowed in integers:
        value = getattr(p, name)
        if not _is_int(value) or not low <= value <= high:
            raise _refuse(name, value, allowed)
    for name, allowed in (
        ("max_tokens", "None (up to the context) or an integer of at least 0"),
        ("logprobs", "None or an integer of at least 0 (0 = the sampled token only)"),
        ("prompt_logprobs", "None or an integer of at least 0 (0 = the prompt's tokens only)"),
    ):
        value = getattr(p, name)
        if value is not None and (not _is_int(value) or not 0 <= value < 2**31):
            raise _refuse(name, value, allowed)
    if p.max_tokens is not None and p.min_tokens > p.max_tokens:
        raise _refuse("min_tokens", p.min_tokens, f"at most max_tokens ({p.max_tokens})")
    if p.seed is not None and (not _is_int(p.seed) or not -(2**63) <= p.seed < 2**64):
        raise _refuse("seed", p.seed, "None or a 64-bit integer")


def _check_lists(p: SamplingParams) -> None:
    for name in ("stop", "bad_words"):
        for text in getattr(p, name):
            if not isinstance(text, str) or not text:
                raise _refuse(name, text, "non-empty strings")
    for name in ("stop_token_ids", "allowed_token_ids"):
        for token in getattr(p, name) or ():
            if not _is_int(token) or token < 0:
                raise _refuse(name, token, "token ids (integers of at least 0)")
    if p.allowed_token_ids is not None and not p.allowed_token_ids:
        raise _refuse("allowed_token_ids", [], "None or at least one token id")
    for token, bias in (p.logit_bias or {}).items():
        if not _is_int(token) or token < 0:
            raise _refuse("logit_bias", token, "token ids (integers of at least 0) as keys")
        if not isinstance(bias, int | float) or not math.isfinite(bias) or not -100.0 <= bias <= 100.0:
            raise _refuse(f"logit_bias[{token}]", bias, "a number from -100 to 100")
    if not p.detokenize and (p.stop or p.bad_words):
        raise _refuse("detokenize", False, "True when stop or bad_words are given, since they are strings")
    if p.structured_outputs is not None:
        raise Unsupported("structured_outputs is not supported yet; leave it None.")
    if p.cache_salt is not None and (not isinstance(p.cache_salt, str) or not p.cache_salt):
        raise _refuse("cache_salt", p.cache_salt, "None or a non-empty string")
    if not isinstance(p.output_kind, RequestOutputKind):
        raise _refuse("output_kind", p.output_kind, "a RequestOutputKind")
    for name in ("ignore_eos", "skip_special_tokens", "include_stop_str_in_output", "detokenize"):
        if not isinstance(getattr(p, name), bool):
            raise _refuse(name, getattr(p, name), "True or False")
