"""A group is one prompt with its n samples: one object from the API down to the plan.

These objects are touched at admission, at events and at the end. What changes at every step lives in arrays
(``rows.RowTable``, ``cache.TailTable``, ``sampling.SamplingState``).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from time import monotonic
from typing import Any, NamedTuple

import numpy as np

from ramet.cache import Identity, Run
from ramet.outputs import FinishReason
from ramet.sampling.stops import TextWatcher
from ramet.sampling.structured import TokenMatcher
from ramet.sampling_params import SamplingParams


@dataclass(frozen=True)
class GroupRequest:
    """What the front door hands to the engine: ids and numbers, checked against the model.

    Parameters
    ----------
    request_id : str
    prompt_token_ids : int32 array, at least one id
    params : SamplingParams
    max_tokens : int
        Resolved: what the context leaves, at most ``params.max_tokens``.
    seed : int
        Of the keys of all samples; 64-bit.
    stop_token_ids : tuple of int
        EOS (unless ignored) and the request's own.
    first_sample_id : int, default 0
        Sample k draws with sample id ``first_sample_id + k``.
    bad_words_ids : list of list of int
    watch : callable, optional
        Makes the object that follows a sample's text for stop strings; None without stop strings.
    streams : bool, default False
        Send an event for every step, not only at the end.
    grammar : callable, optional
        Makes the object that says which tokens may come next in a sample; None without structured outputs.
    first_k : int, optional
        The group ends when so many of its samples have ended by themselves; the others are aborted.
    """

    request_id: str
    prompt_token_ids: np.ndarray
    params: SamplingParams
    max_tokens: int
    seed: int
    stop_token_ids: tuple[int, ...] = ()
    first_sample_id: int = 0
    bad_words_ids: list[list[int]] = field(default_factory=list)
    watch: Callable[[], TextWatcher] | None = None
    streams: bool = False
    grammar: Callable[[], TokenMatcher] | None = None
    first_k: int | None = None


class SampleLog(NamedTuple):
    """Tokens of a sample with what was recorded about them (entries are None if they were not asked for)."""

    token_ids: np.ndarray
    logprobs: np.ndarray | None
    ranks: np.ndarray | None
    top_ids: np.ndarray | None
    top_logprobs: np.ndarray | None


EMPTY_LOG = SampleLog(np.empty(0, np.int32), None, None, None, None)


@dataclass(slots=True)
class GroupTimes:
    """When things happened to a group, by ``time.monotonic()``; None where they did not."""

    added: float = 0.0
    scheduled: float | None = None  #: its prompt was found, or began to be computed
    first_token: float | None = None


@dataclass(frozen=True, slots=True)
class SampleEvent:
    """News of one sample: of a step when it streams, and at its end.

    ``log`` is everything so far. ``text`` is set where a text watcher followed the sample.
    """

    request_id: str
    index: int
    log: SampleLog
    finish_reason: FinishReason | None
    stop_reason: str | int | None
    text: str | None


@dataclass(frozen=True, slots=True)
class GroupEvent:
    """The end of a group; comes after the events of its samples."""

    request_id: str
    num_cached_tokens: int
    prompt_logprobs: SampleLog | None
    times: GroupTimes


Event = SampleEvent | GroupEvent


class Sample:
    """One continuation. While it runs, its tokens live in row ``slot``; else in ``log``.

    Attributes
    ----------
    indices : list of int
        The answers it gives: one, or all n of a greedy group, whose samples are equal.
    """

    __slots__ = ("finished", "group", "indices", "log", "matcher", "number", "slot", "watcher")

    def __init__(self, group: Group, number: int, indices: list[int]) -> None:
        self.group, self.number, self.indices = group, number, indices
        self.slot: int | None = None
        self.log = EMPTY_LOG
        self.finished = False
        watch = group.request.watch
        self.watcher: TextWatcher | None = watch() if watch is not None else None
        self.matcher: TokenMatcher | None = None  # made when it first runs

    @property
    def age(self) -> tuple[int, int]:
        """Order of precedence: earlier groups first, within a group lower numbers first."""
        return (self.group.arrival, self.number)


class Group:
    """A request in the engine.

    Attributes
    ----------
    arrival : int
        Counter; earlier groups take precedence.
    samples : list of Sample
        One per different continuation: n, or 1 if greedy.
    """

    def __init__(self, request: GroupRequest, arrival: int, identity: Identity) -> None:
        self.request, self.arrival, self.identity = request, arrival, identity
        params = request.params
        if params.greedy:
            self.samples = [Sample(self, 0, list(range(params.n)))]
        else:
            self.samples = [Sample(self, k, [k]) for k in range(params.n)]
        self.num_open = len(self.samples)
        self.num_done = 0  # answers that ended by themselves
        self.num_cached_tokens: int | None = None
        self.prompt_scores: list[SampleLog] = []
        self.times = GroupTimes(added=monotonic())

    @property
    def prompt_len(self) -> int:
        return len(self.request.prompt_token_ids)

    @property
    def num_scored(self) -> int:
        """Prompt tokens whose log-probability is known; the first has none."""
        return sum(len(scores.token_ids) for scores in self.prompt_scores)

    @property
    def wants_scores(self) -> bool:
        """Whether its prompt still has to be computed in storage of its own, for log-probabilities."""
        if self.request.params.prompt_logprobs is None:
            return False
        # one that asks for nothing else ends with the last chunk of that computation
        return self.request.max_tokens == 0 or not self.prompt_scores or self.num_scored < self.prompt_len - 1


class Stem(NamedTuple):
    """What an admission holds: the path to ``run`` up to ``position``, where its samples will fork."""

    run: Run
    position: int


@dataclass
class Admission:
    """Samples that wait to start: first until ``tokens`` are computed, then until there are slots and pages.

    A new group is one admission; so is every preempted sample, whose tokens are its prompt and what it wrote.
    """

    group: Group
    samples: list[Sample]
    tokens: np.ndarray
    stem: Stem | None = None

    @property
    def age(self) -> tuple[int, int]:
        return self.samples[0].age if self.samples else (self.group.arrival, -1)

    @property
    def resumes(self) -> bool:
        """Whether this is a preempted sample on its way back."""
        return len(self.tokens) > self.group.prompt_len


@dataclass
class Prefill:
    """A row that computes known tokens. It belongs to its run: it goes on as long as someone holds more than it has."""

    run: Run
    slot: int
    scores_for: Group | None = None  # the group that wants log-probabilities of its prompt


@dataclass(frozen=True)
class Chunk:
    """The part of a prefill that one step computes: positions [begin, end) of its run.

    ``marks`` are the positions in (begin, end] where someone wants the last hidden state.
    """

    prefill: Prefill
    begin: int
    end: int
    marks: tuple[int, ...]


@dataclass(frozen=True)
class Start:
    """Samples that draw their first token in this step, from the logits after ``stem.position`` tokens."""

    admission: Admission
    stem: Stem
    samples: list[Sample]
    slots: np.ndarray
    hidden: Any | None  # the stored hidden state, or None when this step's chunk computes it
