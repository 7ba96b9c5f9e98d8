"""Runs a workload through an engine and times what happens to its groups."""

from __future__ import annotations

from dataclasses import dataclass, field
from statistics import median
from time import perf_counter
from typing import TYPE_CHECKING, Any

from ramet.bench.workload import Workload

if TYPE_CHECKING:
    from ramet.llm import LLM


_GAUGES = (
    "groups_waiting",
    "samples_running",
    "pages_total",
    "pages_free",
    "pages_cached",
    "pages_in_use",
    "page_bytes",
    "runs",
)
"""Entries of ``LLM.stats()`` that are a state and no count."""


@dataclass
class GroupTimes:
    """Seconds from the submission of a prompt to the end of each of its samples, in the order they ended."""

    samples: list[float] = field(default_factory=list)


@dataclass
class Measurement:
    """What a run took and counted.

    Attributes
    ----------
    seconds : float
        From the first submission to the last answer, text included.
    generated_tokens : int
    groups : list of GroupTimes
    counters : dict
        ``LLM.stats()`` after the run less before it.
    peak_pages, peak_private_pages : int
        Pages in use when they were most, and how many of them belonged to one sample alone.
    """

    seconds: float
    generated_tokens: int
    groups: list[GroupTimes]
    counters: dict[str, Any]
    peak_pages: int
    peak_private_pages: int

    def group_seconds(self) -> tuple[float, float, float]:
        """Median over the groups of the time to the first, the median and the last sample."""
        first = median(times.samples[0] for times in self.groups)
        middle = median(median(times.samples) for times in self.groups)
        last = median(times.samples[-1] for times in self.groups)
        return first, middle, last


def measure(llm: LLM, workload: Workload) -> Measurement:
    """Run a workload once, every prompt submitted at the start.

    Parameters
    ----------
    llm : LLM
        Its prefix cache is emptied first.
    workload : Workload
    """
    client = llm.client  # the same path as LLM.generate, with a look at the clock after every step
    made = [
        client.request({"prompt_token_ids": ids}, workload.params(i))
        for i, ids in enumerate(workload.prompts(llm.tokenizer.vocab_size))
    ]
    llm.reset_prefix_cache()
    before = llm.stats()
    running = {output.request_id: (GroupTimes(), set(range(workload.n))) for _, output in made}
    groups = [times for times, _ in running.values()]
    pages = _PeakPages(llm)
    started = perf_counter()
    try:
        for request, output in made:
            client.submit(request, output)
        while running:
            changed = client.news(running)
            pages.look()
            now = perf_counter() - started
            for output in changed:
                times, waiting = running[output.request_id]
                ended = [i for i in waiting if output.outputs[i].finished()]
                times.samples += [now] * len(ended)
                waiting.difference_update(ended)
                if output.finished:
                    del running[output.request_id]
    finally:
        client.discard(running)  # none, unless an error or Ctrl-C came
    seconds = perf_counter() - started
    tokens = sum(len(sample.token_ids) for _, output in made for sample in output.outputs)
    return Measurement(seconds, tokens, groups, difference(before, llm.stats()), pages.total, pages.private)


def warm_up(llm: LLM, workload: Workload) -> None:
    """Run one prompt of the workload's shape for a few tokens, so that no first call is timed."""
    from dataclasses import replace

    small = replace(workload, num_prompts=1, output_len=min(workload.output_len, 4))
    prompts = small.prompts(llm.tokenizer.vocab_size, warm_up=True)
    llm.generate([{"prompt_token_ids": ids} for ids in prompts], small.params(0), use_tqdm=False)


def difference(before: dict[str, Any], after: dict[str, Any]) -> dict[str, Any]:
    """Return the counters of ``after`` less those of ``before``, nested ones too; what counts nothing is left out."""
    result: dict[str, Any] = {}
    for name, value in after.items():
        if name in _GAUGES:
            continue
        old = before.get(name, {} if isinstance(value, dict) else 0)
        if isinstance(value, dict):
            result[name] = difference(old, value)
        elif isinstance(value, int | float) and not isinstance(value, bool):
            result[name] = value - old
        else:
            result[name] = value
    return result


class _PeakPages:
    """Remembers the step that used most pages."""

    def __init__(self, llm: LLM) -> None:
        self._engine = llm.engine
        self.total = self.private = 0

    def look(self) -> None:
        forest, rows = self._engine.forest, self._engine.rows
        used = forest.pool.num_allocated - forest.num_evictable
        if used >= self.total and rows.num_running:
            self.total = used
            self.private = int(forest.tails.num_pages[rows.running].sum())
