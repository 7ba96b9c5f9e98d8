"""Who runs. Continuous batching over groups: decode first, then prefill chunks, then groups that are ready to fork.

Precedence is by age: whoever came first is never displaced by whoever came later. When pages run short the youngest
gives way (its private tail becomes reclaimable, it comes back by recomputing), so the oldest always finishes.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterator
from time import monotonic

import numpy as np

from ramet.cache import Forest, Identity, LiveNodes, Match, live_nodes
from ramet.engine.group import Admission, Chunk, Group, GroupRequest, Prefill, Sample, Start, Stem
from ramet.engine.plan import StepPlan, build_plan
from ramet.engine.rows import RowTable
from ramet.engine.stats import EngineStats
from ramet.errors import OutOfMemory
from ramet.sampling.state import SamplingState


class Scheduler:
    """Decides every step, on the host, over the forest and the row arrays.

    Parameters
    ----------
    forest, rows, sampling : Forest, RowTable, SamplingState
        All indexed by the same slots.
    stats : EngineStats
    max_num_seqs : int
        Samples that run together.
    max_num_batched_tokens : int
        Tokens of a step.
    """

    def __init__(
        self,
        forest: Forest,
        rows: RowTable,
        sampling: SamplingState,
        stats: EngineStats,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
    ) -> None:
        self.forest, self.rows, self.sampling, self.stats = forest, rows, sampling, stats
        self.max_num_seqs, self.max_num_batched_tokens = max_num_seqs, max_num_batched_tokens
        self.max_prefills = rows.tails.num_slots - max_num_seqs
        self.weight_version = 0
        self.waiting: list[Admission] = []  # by age
        self.prefills: list[Prefill] = []
        self._arrivals = 0
        self._live: LiveNodes | None = None
        self._live_version = -1

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.prefills or self.rows.num_running)

    # ---- the two ends of a group's life ----------------------------------------------------------------------

    def add(self, request: GroupRequest) -> Group:
        """Queue a new group."""
        group = Group(request, self._arrivals, Identity(request.params.cache_salt, self.weight_version))
        self._arrivals += 1
        self._enqueue(Admission(group, list(group.samples), request.prompt_token_ids))
        return group

    def _enqueue(self, admission: Admission) -> None:
        bisect.insort(self.waiting, admission, key=lambda a: a.age)

    def end(self, sample: Sample) -> None:
        """A sample ends, by itself or by an abort, wherever it is: whatever it owns is given back."""
        if sample.finished:
            return
        sample.finished = True
        sample.group.num_open -= 1
        if sample.slot is not None:
            self._stop(sample)
            return
        for admission in self.waiting:
            if sample in admission.samples:
                admission.samples.remove(sample)
                if not admission.samples:
                    self._withdraw(admission)
                return

    def _withdraw(self, admission: Admission) -> None:
        self.waiting.remove(admission)
        self._let_go(admission)

    def _let_go(self, admission: Admission) -> None:
        """Drop an admission's stem. A prefill that nobody waits for any more ends with what it has computed."""
        stem, admission.stem = admission.stem, None
        if stem is None:
            return
        self.forest.drop(stem.run, stem.position)
        self._end_idle_prefills()

    def _end_idle_prefills(self) -> None:
        # An ended prefill no longer holds its parent, which may end a prefill in turn: until nothing changes.
        while idle := [p for p in self.prefills if p.run.held_end <= self.forest.computed(p.run)]:
            for prefill in idle:
                self.prefills.remove(prefill)
                self.forest.retire(prefill.run)

    def _stop(self, sample: Sample) -> None:
        slot = self.rows.stop(sample)
        self.sampling.release(np.array([slot]))
        self.forest.retire(self.forest.runs[int(self.rows.tails.run_id[slot])])

    # ---- plan ------------------------------------------------------------------------------------------------

    def plan(self) -> StepPlan:
        """Decide the next step. Empty only when there is nothing to do, or memory cannot serve anyone.

        Raises
        ------
        OutOfMemory
            The oldest request cannot go on although it has everything for itself.
        """
        decode = self._make_room_to_decode()
        generation = self.rows.generation.copy()
        self._acquire()
        chunks = self._plan_chunks(self.max_num_batched_tokens - int(decode.sum()))
        starts = self._plan_starts(chunks)
        decode &= generation == self.rows.generation  # not those that gave way since, nor who took their slots
        plan = build_plan(self.forest, self.rows, self.live(), decode, chunks, starts)
        if plan.empty and self.has_work:
            raise OutOfMemory(
                f"the KV pool of {self.forest.pool.num_pages} pages cannot hold the oldest request; "
                "raise kv_cache_memory_bytes or lower max_tokens."
            )
        return plan

    def take_back(self, starts: list[Start]) -> None:
        """The planned step was not carried out: its new samples wait again, and what waits finds its prompt anew."""
        for start in starts:
            admission = start.admission
            for sample in start.samples:
                self._stop(sample)
            if admission in self.waiting:
                self.waiting.remove(admission)
            admission.samples[:0] = start.samples
            self._enqueue(admission)
        for admission in self.waiting:
            self._let_go(admission)
        self._end_idle_prefills()

    def live(self) -> LiveNodes:
        """Nodes of the live rows, remade only when rows came or went."""
        if self._live is None or self._live_version != self.forest.version:
            self._live, self._live_version = live_nodes(self.forest), self.forest.version
            self.stats.forest_rebuilds += 1
        return self._live

    def _make_room_to_decode(self) -> np.ndarray:
        """Pages for every running row's next token, youngest rows giving way; returns the rows (bool [slots])."""
        while True:
            decode = self.rows.running.copy()
            slots = np.flatnonzero(decode)
            if self.forest.reserve(slots, self.rows.tails.computed[slots] + 1):
                return decode
            # Whoever is oldest may wait, behind running rows that came later while its prompt was computed.
            ages = [s.age for s in self._running()] + [a.age for a in self.waiting if a.stem]
            if not self._displace_younger_than(min(ages)):
                raise OutOfMemory(
                    f"the KV pool of {self.forest.pool.num_pages} pages cannot hold one running sample; "
                    "raise kv_cache_memory_bytes or lower max_tokens."
                )

    def _running(self) -> Iterator[Sample]:
        return (s for s in self.rows.samples if s is not None)

    def _displace_younger_than(self, age: tuple[int, int]) -> bool:
        """Take pages from the youngest that has any and is younger than ``age``; False if there is none."""
        sample = max((s for s in self._running() if s.age > age), key=lambda s: s.age, default=None)
        admission = max((a for a in self.waiting if a.stem and a.age > age), key=lambda a: a.age, default=None)
        if admission is not None and (sample is None or admission.age > sample.age):
            self._let_go(admission)
            return True
        if sample is not None:
            self._preempt(sample)
            return True
        return False

    def _preempt(self, sample: Sample) -> None:
        self._stop(sample)
        self.stats.preemptions += 1
        tokens = np.concatenate([sample.group.request.prompt_token_ids, sample.log.token_ids])
        self._enqueue(Admission(sample.group, [sample], tokens))

    # ---- prompts ---------------------------------------------------------------------------------------------

    def _acquire(self) -> None:
        """Find, or begin to compute, the prompts of as many waiting groups as have a chance to start soon."""
        spoken_for = self.rows.num_running
        for admission in self.waiting:
            if spoken_for >= self.max_num_seqs:
                return
            if admission.stem is None and not self._acquire_one(admission):
                return  # strictly in order: nobody overtakes a group that waits for room
            spoken_for += len(admission.samples)

    def _acquire_one(self, admission: Admission) -> bool:
        forest, tokens, group = self.forest, admission.tokens, admission.group
        own = group.wants_scores and not admission.resumes
        identity = group.identity
        match = Match(None, 0) if own else self._match(admission, tokens)
        run, position = match
        if run is not None and position == len(tokens):
            if position > forest.computed(run) or position in run.hidden:
                self.stats.full_hits += 1
                self._hold(admission, Stem(run, position), position)
                return True
            # Everything is there except the last hidden state: one token is computed again.
            match = self._match(admission, tokens[:-1])
        missing = -(-(len(tokens) - match.position) // forest.page_size) + 1
        idle = not self.rows.num_running and not self.prefills
        if len(self.prefills) >= self.max_prefills or (missing > forest.num_available - self._promised() and not idle):
            return False
        slot = int(self.rows.tails.take(1)[0])
        if own:
            group.prompt_scores.clear()  # of a prefill that had to give way
        run = forest.begin(match, tokens, identity, slot, indexed=not own)
        self.prefills.append(Prefill(run, slot, group if own else None))
        self._hold(admission, Stem(run, len(tokens)), match.position)
        self.stats.prefills += 1
        return True

    def _match(self, admission: Admission, tokens: np.ndarray) -> Match:
        """The longest known prefix that leaves room for one sample.

        Each run begins in a fresh page, so a path through many short runs takes more pages than its tokens fill; the
        pool has room for one sample of every request only if that stays bounded.
        """
        forest, request = self.forest, admission.group.request
        size = forest.page_size
        total = len(admission.tokens)
        tail = -(-(admission.group.prompt_len + request.max_tokens - total) // size)
        match = forest.match(tokens, admission.group.identity)
        while match.run is not None:
            path, end = -(-(total - match.position) // size) + tail, match.position
            for run in match.run.lineage():
                path, end = path - (-(end - run.start) // size), run.start
            if path <= forest.pool.num_pages:
                break
            match = Match(match.run.parent, match.run.start)
        return match

    def _hold(self, admission: Admission, stem: Stem, cached: int) -> None:
        self.forest.hold(stem.run, stem.position)
        admission.stem = stem
        group = admission.group
        if group.num_cached_tokens is None:
            # the prompt's last token is computed for its logits unless the whole prompt was met
            group.num_cached_tokens = min(cached, group.prompt_len)
            group.times.scheduled = monotonic()
            self.stats.prompt_tokens += group.prompt_len
            self.stats.cached_prompt_tokens += group.num_cached_tokens

    def _promised(self) -> int:
        """Pages that prefills under way still need."""
        slots = np.array([p.slot for p in self.prefills], np.int64)
        ends = np.array([p.run.held_end for p in self.prefills], np.int64)
        return int(self.rows.tails.pages_missing(slots, ends).sum())

    def _plan_chunks(self, budget: int) -> list[Chunk]:
        chunks: list[Chunk] = []
        wanted = {(a.stem.run.id, a.stem.position) for a in self.waiting if a.stem} if self.prefills else set()
        for prefill in list(self.prefills):
            if budget <= 0:
                break
            if prefill not in self.prefills:
                continue  # gave way to an older one just now
            run = prefill.run
            begin = self.forest.computed(run)
            if run.parent is not None and self.forest.computed(run.parent) < run.start:
                continue  # its prefix is still being computed by another prefill
            end = min(run.held_end, begin + budget)
            end = self._reserve_chunk(prefill, begin, end)
            if end > begin:
                marks = tuple(sorted(p for p in run.holds if begin < p <= end and (run.id, p) in wanted))
                chunks.append(Chunk(prefill, begin, end, marks))
                budget -= end - begin
        return [c for c in chunks if c.prefill in self.prefills]

    def _reserve_chunk(self, prefill: Prefill, begin: int, end: int) -> int:
        """Pages for a chunk, shortened to what fits; older prefills displace younger holders."""
        forest, slot = self.forest, np.array([prefill.slot])
        while not forest.reserve(slot, np.array([end])):
            fits = forest.num_available + int(self.rows.tails.num_pages[prefill.slot])
            shorter = min(end, prefill.run.start + fits * forest.page_size)
            if begin < shorter < end:
                end = shorter
                continue
            owner = min((a for a in self.waiting if a.stem and self._rests_on(a.stem, prefill)), key=lambda a: a.age)
            if not self._displace_younger_than(owner.age) or prefill not in self.prefills:
                return begin
        return end

    def _rests_on(self, stem: Stem, prefill: Prefill) -> bool:
        return any(run is prefill.run for run in stem.run.lineage())

    # ---- forks -----------------------------------------------------------------------------------------------

    def _plan_starts(self, chunks: list[Chunk]) -> list[Start]:
        """Start the samples whose prompt is computed, or will be by this step. Groups start whole if they ever can."""
        marks = {(c.prefill.run.id, m): c for c in chunks for m in c.marks}
        starts: list[Start] = []
        free = self.max_num_seqs - self.rows.num_running
        pages = self.forest.num_available - self._promised()
        for admission in list(self.waiting):
            if free <= 0 or admission.stem is None:
                break
            if admission.group.request.max_tokens == 0:
                continue  # ends with its prompt
            stem, wanted = admission.stem, len(admission.samples)
            hidden = stem.run.hidden.get(stem.position)
            chunk = marks.get((stem.run.id, stem.position))
            if hidden is None and chunk is None:
                free -= min(wanted, self.max_num_seqs)  # kept for it: younger groups don't take its place
                continue
            room = max(pages, 0) if self.rows.num_running or starts else max(pages, 1)
            count = min(wanted, free, room)
            fits_whole = wanted <= self.max_num_seqs and wanted + self._pages_of(stem) <= self.forest.pool.num_pages
            if count == 0 or (count < wanted and fits_whole and (self.rows.num_running or starts)):
                break
            starts.append(self._start(admission, count, hidden, chunk))
            free -= count
            pages -= count
        return starts

    def _pages_of(self, stem: Stem) -> int:
        return -(-stem.position // self.forest.page_size)

    def _start(self, admission: Admission, count: int, hidden: object, chunk: Chunk | None) -> Start:
        forest, stem = self.forest, admission.stem
        assert stem is not None
        samples, admission.samples = admission.samples[:count], admission.samples[count:]
        alone = len(admission.group.samples) == 1 or admission.resumes
        if alone and chunk is not None and self._ends_here(chunk, stem):
            slots = np.array([chunk.prefill.slot])  # the prefill's row goes on as the sample's
            self.prefills.remove(chunk.prefill)
        else:
            slots = self.rows.tails.take(count)
            if alone and forest.can_lease(stem.run, stem.position):
                forest.lease(stem.run, int(slots[0]))
            else:
                forest.fork(stem.run, stem.position, slots)
        self.rows.start(slots, samples)
        self._admit_sampling(slots, samples)
        if not admission.samples:
            self.waiting.remove(admission)
            admission.stem = None
            forest.drop(stem.run, stem.position)
        return Start(admission, stem, samples, slots, None if chunk is not None else hidden)

    def _ends_here(self, chunk: Chunk, stem: Stem) -> bool:
        run = chunk.prefill.run
        return (
            chunk.prefill in self.prefills
            and run is stem.run
            and chunk.end == stem.position == run.start + len(run.tokens)
            and run.slot == chunk.prefill.slot
        )

    def _admit_sampling(self, slots: np.ndarray, samples: list[Sample]) -> None:
        request = samples[0].group.request
        written = samples[0].log.token_ids
        self.sampling.admit(
            slots,
            request.params,
            seed=request.seed,
            sample_ids=np.array([request.first_sample_id + s.number for s in samples]),
            prompt_token_ids=request.prompt_token_ids,
            output_token_ids=written if len(written) else None,
            eos_token_ids=request.stop_token_ids,
            bad_words_ids=request.bad_words_ids,
        )

    # ---- after a step ----------------------------------------------------------------------------------------

    def advance(self, plan: StepPlan, hidden: dict[int, object]) -> None:
        """Move the ``computed`` marks to what the step computed and keep the hidden states of prompt ends.

        Parameters
        ----------
        hidden : dict
            Entry i belongs to ``plan.mark_rows[i]``.
        """
        tails = self.rows.tails
        tails.computed[plan.decode_slots] += 1
        for chunk in plan.chunks:
            run = chunk.prefill.run
            if run.slot is not None:
                tails.computed[run.slot] = chunk.end
        for i, (chunk, position, _) in enumerate(plan.mark_rows):
            chunk.prefill.run.hidden[position] = hidden[i]
        if plan.chunks:
            self.forest.version += 1  # rows that waited for these tokens join the live ones
            self._end_idle_prefills()
