"""What requests return. Names are vLLM's; log-probabilities stay in arrays until they are looked at."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, overload

import numpy as np

from ramet.sampling_params import SamplingParams

FinishReason = Literal["stop", "length", "abort"]


class Logprob(NamedTuple):
    """Log-probability of one token at one position."""

    logprob: float
    rank: int | None = None  #: 1 = the likeliest; None when it was not asked for (``logprobs=0``)
    decoded_token: str | None = None


class TokenLogprobs(Sequence["dict[int, Logprob] | None"]):
    """Log-probabilities along a token sequence: a list of ``{token id: Logprob}`` made on access.

    Parameters
    ----------
    token_ids : int array [T]
        The tokens of the sequence.
    values : float32 array [T]
        Natural log-probability of each token; NaN where there is none (a prompt's first token), which reads as None.
    ranks : int array [T], optional
    top_ids, top_values : int array [T, k] and float32 array [T, k], optional
        The k likeliest tokens of each position.
    decode : callable from a token id to str, optional
    """

    def __init__(
        self,
        token_ids: np.ndarray,
        values: np.ndarray,
        ranks: np.ndarray | None = None,
        top_ids: np.ndarray | None = None,
        top_values: np.ndarray | None = None,
        decode: Any = None,
    ) -> None:
        self.token_ids, self.values, self.ranks = token_ids, values, ranks
        self.top_ids, self.top_values, self.decode = top_ids, top_values, decode

    def __len__(self) -> int:
        return len(self.token_ids)

    @overload
    def __getitem__(self, i: int) -> dict[int, Logprob] | None: ...
    @overload
    def __getitem__(self, i: slice) -> list[dict[int, Logprob] | None]: ...
    def __getitem__(self, i: int | slice) -> Any:
        if isinstance(i, slice):
            return [self[k] for k in range(*i.indices(len(self)))]
        if np.isnan(self.values[i]):
            return None
        token = int(self.token_ids[i])
        rank = None if self.ranks is None else int(self.ranks[i])
        entries = {token: Logprob(float(self.values[i]), rank, self._text(token))}
        if self.top_ids is not None and self.top_values is not None:
            for r, (t, v) in enumerate(zip(self.top_ids[i].tolist(), self.top_values[i].tolist(), strict=True), 1):
                entries.setdefault(t, Logprob(v, r, self._text(t)))
        return entries

    def __iter__(self) -> Iterator[dict[int, Logprob] | None]:
        return (self[i] for i in range(len(self)))

    def _text(self, token: int) -> str | None:
        return None if self.decode is None else self.decode(token)


@dataclass
class CompletionOutput:
    """One sample of a prompt.

    Attributes
    ----------
    index : int
        The sample's number, 0 to n - 1.
    text : str
        Detokenized text without the stop string (empty with ``detokenize=False``).
    token_ids : list of int
        All sampled tokens, those of the stop string and a stop token included.
    cumulative_logprob : float or None
        Sum of the sampled tokens' log-probabilities when ``logprobs`` was asked for.
    logprobs : TokenLogprobs or None
        As long as ``token_ids``; with ``DELTA`` both hold what is new.
    finish_reason : "stop", "length", "abort" or None while it runs
    stop_reason : str, int or None
        The stop string or stop token id that ended it; None for EOS.
    """

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    cumulative_logprob: float | None = None
    logprobs: TokenLogprobs | None = None
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None

    def finished(self) -> bool:
        """Whether the sample has ended."""
        return self.finish_reason is not None


@dataclass
class SampleIds:
    """Sample ids of a request and all that was forked from it: below ``next`` they are taken."""

    next: int = 0


@dataclass
class RequestOutput:
    """A prompt and its samples.

    Attributes
    ----------
    request_id : str
    prompt : str or None
        None when the prompt came as token ids.
    prompt_token_ids : list of int
    outputs : list of CompletionOutput
        In the order of their index.
    finished : bool
    num_cached_tokens : int
        Prompt tokens taken from the cache, counted once for all samples.
    prompt_logprobs : TokenLogprobs or None
        Its first entry is None.
    sampling_params : SamplingParams
        The effective ones.
    seed : int
        Of the samples' keys, also when none was given: the same request with it gives the same samples.
    is_delta : bool
        Streamed with ``output_kind=DELTA``: its samples hold only what is new since the last news.
    sample_ids : SampleIds
        Which sample ids are taken; shared with the request's forks (``LLM.fork`` gives new ones).
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool = False
    num_cached_tokens: int = 0
    prompt_logprobs: TokenLogprobs | None = None
    sampling_params: SamplingParams = field(default_factory=SamplingParams)
    seed: int = 0
    is_delta: bool = False
    sample_ids: SampleIds = field(default_factory=SampleIds)
