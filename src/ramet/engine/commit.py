"""The end of a step: advance, record, finish, free, answer. Rows that have no news cost array work only."""

from __future__ import annotations

from time import monotonic

import numpy as np

from ramet.engine.group import EMPTY_LOG, Event, Group, GroupEvent, Sample, SampleEvent, SampleLog
from ramet.engine.plan import StepPlan
from ramet.engine.scheduler import Scheduler
from ramet.outputs import FinishReason
from ramet.sampling.logprobs import TopLogprobs
from ramet.sampling.sampler import SampledTokens


class Committer:
    """Applies a step's tokens to the rows and tells what happened.

    Parameters
    ----------
    scheduler : Scheduler
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler, self.rows, self.stats = scheduler, scheduler.rows, scheduler.stats
        self._enough: list[Group] = []  # of which all that was wanted is there

    def commit(self, plan: StepPlan, sampled: SampledTokens, kept_hidden: dict[int, object]) -> list[Event]:
        """Advance the marks, append the tokens, end what has ended."""
        rows, stats = self.rows, self.stats
        self.scheduler.advance(plan, kept_hidden)
        # What was planned for a slot counts only while the slot is still the same sample's.
        valid = (rows.generation[plan.sample_slots] == plan.generation) & (sampled.token_ids >= 0)
        slots, tokens = plan.sample_slots[valid], sampled.token_ids[valid]
        rows.record(slots, tokens, None if sampled.logprobs is None else sampled.logprobs[valid])
        if sampled.top is not None and sampled.ranks is not None:
            self._record_tops(plan, valid, sampled.top, sampled.ranks)
        self.scheduler.sampling.record(slots, tokens)
        for start in plan.starts:
            times = start.admission.group.times
            times.first_token = times.first_token or monotonic()
        stats.sampled_tokens += len(slots)
        stopped, limited = rows.hit_stop(slots, tokens), rows.hit_limit(slots)
        events: list[Event] = []
        # Nothing to draw, or a matcher that takes back what its mask allowed: those end, the others go on.
        for slot in [*plan.sample_slots[sampled.token_ids < 0].tolist(), *self._refused(slots, tokens)]:
            sample = rows.samples[slot]
            if sample is not None and not sample.finished:
                self.abort(sample, events)
        for i in np.flatnonzero(stopped | limited | rows.eventful[slots]).tolist():
            sample = rows.samples[slots[i]]
            if sample is not None:
                self._attend_to(sample, int(tokens[i]), bool(stopped[i]), bool(limited[i]), events)
        for chunk in plan.chunks:
            group = chunk.prefill.scores_for
            if group is not None and group.request.max_tokens == 0 and chunk.end == group.prompt_len:
                for sample in group.samples:  # only the prompt was asked for
                    if not sample.finished:  # by an abort
                        self.finish(sample, "length", None, "", events)
        self._end_groups_with_enough(events)
        return events

    def _end_groups_with_enough(self, events: list[Event]) -> None:
        """Abort what is left of groups of which only the first k samples were wanted."""
        groups, self._enough = self._enough, []
        for sample in [s for group in groups for s in group.samples if not s.finished]:
            self.abort(sample, events)

    def _refused(self, slots: np.ndarray, tokens: np.ndarray) -> list[int]:
        """Let the matchers of structured outputs follow; returns the slots whose token is against their grammar."""
        refused = []
        for i in np.flatnonzero(self.rows.constrained[slots]).tolist():
            sample = self.rows.samples[slots[i]]
            if sample is not None and sample.matcher is not None and not sample.matcher.accept(int(tokens[i])):
                refused.append(int(slots[i]))
        return refused

    def _attend_to(self, sample: Sample, token: int, stopped: bool, limited: bool, events: list[Event]) -> None:
        request = sample.group.request
        reason: FinishReason | None = "stop" if stopped else "length" if limited else None
        stop_reason: str | int | None = None
        if stopped and token in request.params.stop_token_ids:
            stop_reason = token
        text: str | None = None
        watcher = sample.watcher
        if watcher is not None:
            # A stop token is no part of the text.
            hidden = stopped and not request.params.include_stop_str_in_output
            match = None if hidden else watcher.push([token])
            if match is None and reason is not None:
                match = watcher.finish()
            if match is not None:
                reason, stop_reason = "stop", match.stop
            text = watcher.text
        if reason is not None:
            self.finish(sample, reason, stop_reason, text, events)
        elif request.streams:
            log = self.rows.log(sample)
            events += [SampleEvent(request.request_id, k, log, None, None, text) for k in sample.indices]

    def finish(
        self,
        sample: Sample,
        reason: FinishReason,
        stop_reason: str | int | None,
        text: str | None,
        events: list[Event],
    ) -> None:
        """End a sample and say so; the group's end follows its last sample's."""
        group = sample.group
        log = self.rows.log(sample)
        self.scheduler.end(sample)
        self.stats.samples_finished[reason] += len(sample.indices)
        if reason != "abort":
            group.num_done += len(sample.indices)
            if group.request.first_k is not None and group.num_done >= group.request.first_k:
                self._enough.append(group)
        events += [SampleEvent(group.request.request_id, k, log, reason, stop_reason, text) for k in sample.indices]
        if group.num_open == 0:
            events.append(self.end_group(group))

    def abort(self, sample: Sample, events: list[Event]) -> None:
        """End a sample as it is, with the text that was held back."""
        watcher, text = sample.watcher, None
        if watcher is not None:
            watcher.finish()
            text = watcher.text
        self.finish(sample, "abort", None, text, events)

    def _record_tops(self, plan: StepPlan, valid: np.ndarray, top: TopLogprobs, ranks: np.ndarray) -> None:
        for i, row in enumerate(top.rows.tolist()):
            sample = self.rows.samples[plan.sample_slots[row]]
            if valid[row] and sample is not None:
                count = sample.group.request.params.logprobs or 0
                self.rows.record_top(
                    int(plan.sample_slots[row]), int(ranks[row]), top.token_ids[i, :count], top.logprobs[i, :count]
                )

    def end_group(self, group: Group) -> GroupEvent:
        """The last event of a group."""
        self.stats.groups_finished += 1
        wanted = group.request.params.prompt_logprobs is not None
        # an abort may come before all of the prompt is scored: there is no half an answer
        scores = _join(group.prompt_scores) if wanted and group.num_scored == group.prompt_len - 1 else None
        return GroupEvent(group.request.request_id, group.num_cached_tokens or 0, scores, group.times)


def _join(scores: list[SampleLog]) -> SampleLog:
    if not scores:  # a prompt of one token
        return EMPTY_LOG._replace(logprobs=np.empty(0, np.float32))

    def joined(columns: list[np.ndarray | None]) -> np.ndarray | None:
        present = [column for column in columns if column is not None]
        return np.concatenate(present) if present else None

    return SampleLog(
        token_ids=np.concatenate([s.token_ids for s in scores]),
        logprobs=joined([s.logprobs for s in scores]),
        ranks=joined([s.ranks for s in scores]),
        top_ids=joined([s.top_ids for s in scores]),
        top_logprobs=joined([s.top_logprobs for s in scores]),
    )
