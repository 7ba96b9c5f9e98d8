"""The engine, and the way of a step: plan, load, forward, sample, commit."""

from __future__ import annotations

import logging
from dataclasses import replace
from time import perf_counter

import numpy as np
import torch

from ramet.attention import AttentionPlan
from ramet.cache import Forest, PagePool, TailTable
from ramet.config import EngineConfig
from ramet.engine.checks import check_request
from ramet.engine.commit import Committer
from ramet.engine.group import Event, Group, GroupEvent, GroupRequest, Sample, SampleEvent, SampleLog
from ramet.engine.memory import MemoryPlan
from ramet.engine.plan import StepPlan
from ramet.engine.rows import RowTable
from ramet.engine.runner import Model, Runner
from ramet.engine.scheduler import Scheduler
from ramet.engine.stats import EngineStats
from ramet.errors import InvalidArgument
from ramet.models.spec import ModelSpec
from ramet.sampling.sampler import NothingToSample, SampleBatch, SampledTokens, Sampler
from ramet.sampling.state import SamplingState

log = logging.getLogger(__name__)

MAX_PREFILLS = 64
"""Prompts that are computed side by side at most; more wait, since a step has no tokens for them anyway."""


class Engine:
    """Continuous batching over the prefix forest, for one model on one device.

    Parameters
    ----------
    model : Model
        Weights and forward pass.
    spec : ModelSpec
    config : EngineConfig
    memory : MemoryPlan
    dtype : torch.dtype, default torch.float32
        Of the KV pool.
    device : torch.device, optional
        The CPU by default.
    """

    def __init__(
        self,
        model: Model,
        spec: ModelSpec,
        config: EngineConfig,
        memory: MemoryPlan,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | None = None,
    ) -> None:
        if config.max_num_batched_tokens < config.max_num_seqs:
            raise InvalidArgument(
                f"max_num_batched_tokens is {config.max_num_batched_tokens}; allowed: at least max_num_seqs "
                f"({config.max_num_seqs}), since every running sample takes a token of each step."
            )
        num_slots = config.max_num_seqs + min(config.max_num_seqs, MAX_PREFILLS)
        tails = TailTable(num_slots, memory.max_model_len, memory.page_size)
        self.spec, self.memory = spec, memory
        self.max_model_len, self.vocab_size = memory.max_model_len, spec.vocab_size
        self.stats = EngineStats()
        self.forest = Forest(PagePool(memory.num_pages), tails, keep_unused=config.enable_prefix_caching)
        self.rows = RowTable(tails)
        self.sampling = SamplingState(num_slots, spec.vocab_size)
        self.scheduler = Scheduler(
            self.forest,
            self.rows,
            self.sampling,
            self.stats,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
        )
        self.runner = Runner(model, spec, memory, dtype=dtype, device=device or torch.device("cpu"))
        self.sampler = Sampler(self.sampling, logprobs_mode=config.logprobs_mode)
        self.committer = Committer(self.scheduler)
        self.groups: dict[str, Group] = {}
        self._pending: list[Event] = []

    @torch.inference_mode()
    def step(self) -> list[Event]:
        """Compute one step for everyone who runs; returns the news, which may be none."""
        events = self.collect()
        if not self.scheduler.has_work:
            return events
        clock, plan = [perf_counter()], None
        try:
            plan = self.scheduler.plan()
            clock.append(perf_counter())
            batch = self.runner.load(plan)
            self._constrain(batch.sampling)
            clock.append(perf_counter())
            logits = self.runner.forward(batch)
            clock.append(perf_counter())
            tokens = sample_who_can(self.sampler, logits.logits, batch.sampling)
            clock.append(perf_counter())
        except BaseException:  # no memory, Ctrl-C: as if the step had not begun, so that whoever catches this can go on
            self._pending = events + self._pending
            if plan is not None:
                self.scheduler.take_back(plan.starts)
            raise
        events += self.committer.commit(plan, tokens, logits.kept_hidden)
        clock.append(perf_counter())
        self._count(plan, batch.attention, clock)
        self._forget_finished(events)
        return events

    def add(self, request: GroupRequest) -> None:
        """Queue a request.

        Raises
        ------
        InvalidArgument
            It could never be served: its id is taken, an id is outside the vocabulary, or it does not fit the pool.
        """
        self.check(request)
        group = self.scheduler.add(request)
        self.groups[request.request_id] = group
        if request.max_tokens == 0 and request.params.prompt_logprobs is None:
            for sample in list(group.samples):
                self.committer.finish(sample, "length", None, "", self._pending)

    def abort(self, request_id: str, index: int | None = None) -> None:
        """End a request, or one of its samples, now; its news come with the next step. Unknown ids are ignored.

        Aborting may cross with finishing, so an id that is already gone is no error.
        """
        group = self.groups.get(request_id)
        if group is None:
            return
        for sample in group.samples:
            indices = [k for k in sample.indices if index is None or k == index]
            if sample.finished or not indices:
                continue
            if len(indices) < len(sample.indices):  # one answer of a greedy group: the others go on
                sample.indices = [k for k in sample.indices if k not in indices]
                log = self.rows.log(sample)
                text = _text_that_ends(sample, log)
                self.stats.samples_finished["abort"] += len(indices)
                self._pending += [SampleEvent(request_id, k, log, "abort", None, text) for k in indices]
                continue
            self.committer.abort(sample, self._pending)

    @property
    def has_unfinished(self) -> bool:
        """Whether another step would do or tell something."""
        return self.scheduler.has_work or bool(self._pending)

    def collect(self) -> list[Event]:
        """News that wait already, such as those of an abort, without computing a step."""
        events, self._pending = self._pending, []
        self._forget_finished(events)
        return events

    def reset_prefix_cache(self) -> int:
        """Forget every cached prefix that no live request uses; returns the pages freed."""
        return self.forest.clear_unused()

    def check(self, request: GroupRequest) -> None:
        """Refuse a request that could never be served (see :meth:`add`)."""
        if request.request_id in self.groups:
            raise InvalidArgument(f"request_id {request.request_id!r} is in use; choose another.")
        check_request(request, vocab_size=self.spec.vocab_size, max_model_len=self.max_model_len)

    def _constrain(self, batch: SampleBatch) -> None:
        """Let the grammars of structured outputs say which tokens may come."""
        found = self.rows.token_mask(batch.slots, self.spec.vocab_size)
        if found is not None:
            batch.token_mask, batch.masked_rows = found

    def _count(self, plan: StepPlan, work: AttentionPlan | None, clock: list[float]) -> None:
        stats = self.stats
        if work is not None:
            stats.count_attention(work.backend, work.counters)
        stats.steps += 1
        stats.model_tokens += plan.num_tokens
        stats.prefill_tokens += sum(chunk.end - chunk.begin for chunk in plan.chunks)
        names = ("seconds_plan", "seconds_load", "seconds_forward", "seconds_sample", "seconds_commit")
        for name, seconds in zip(names, np.diff(clock).tolist(), strict=True):
            setattr(stats, name, getattr(stats, name) + seconds)

    def _forget_finished(self, events: list[Event]) -> None:
        for event in events:
            if isinstance(event, GroupEvent):
                self.groups.pop(event.request_id, None)


def _text_that_ends(sample: Sample, log: SampleLog) -> str | None:
    """The text of one answer that ends, with what its watcher, which goes on for the others, still holds back."""
    watch = sample.group.request.watch
    if watch is None:
        return None
    watcher = watch()
    watcher.push(log.token_ids.tolist())
    watcher.finish()
    return watcher.text


def sample_who_can(sampler: Sampler, logits: torch.Tensor, batch: SampleBatch) -> SampledTokens:
    """Sample every row that has something to draw; token -1 stands for the others, which the commit ends."""
    try:
        return sampler.sample(logits, batch)
    except NothingToSample as error:
        log.error("%s The samples in these slots are aborted.", error)
        rest = np.setdiff1d(np.arange(len(batch.slots)), error.rows)
        some = sample_who_can(sampler, logits, _part(batch, rest))

    def spread(values: np.ndarray | None, fill: float) -> np.ndarray | None:
        if values is None:
            return None
        wide = np.full(len(batch.slots), fill, values.dtype)
        wide[rest] = values
        return wide

    token_ids = spread(some.token_ids, -1)
    assert token_ids is not None
    top = None if some.top is None else some.top._replace(rows=rest[some.top.rows])
    return SampledTokens(token_ids, spread(some.logprobs, np.nan), spread(some.ranks, -1), top)


def _part(batch: SampleBatch, rows: np.ndarray) -> SampleBatch:
    """Some rows of a batch, with their masks."""
    names = ("slots", "logit_index", "positions", "num_output_tokens")
    part = replace(batch, **{name: getattr(batch, name)[rows] for name in names})
    if batch.masked_rows is not None and batch.token_mask is not None:
        kept = np.isin(batch.masked_rows, rows)
        part.token_mask = batch.token_mask[kept]
        part.masked_rows = np.searchsorted(rows, batch.masked_rows[kept])
    return part
