"""Metrics in Prometheus' form: vLLM's names behind ``ramet:``, and what is our own about groups.

Values are counted in plain lists where they arise; Prometheus' objects are made when somebody asks.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from time import monotonic
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from ramet.async_llm import AsyncLLM
from ramet.engine.group import GroupEvent
from ramet.errors import RametError
from ramet.outputs import RequestOutput
from ramet.sampling_params import RequestOutputKind
from ramet.service.histogram import Histogram
from ramet.service.loop import STEP_TOKENS

_SECONDS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640)
_SHORT = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 10)
_SAMPLES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)

STATS_TIMEOUT = 2.0
"""Seconds that the engine is given to say how it is; a long step takes more, and the last answer must do."""

# Name -> (what it is, key of the engine's stats).
_COUNTERS = {
    "num_preemptions": ("Samples that gave their pages up and came back by recomputing", "preemptions"),
    "prompt_tokens": ("Prompt tokens, each prompt counted once however many samples it has", "prompt_tokens"),
    "generation_tokens": ("Tokens sampled", "sampled_tokens"),
    "prefix_cache_queries": ("Prompt tokens that were looked up in the cache", "prompt_tokens"),
    "prefix_cache_hits": ("Prompt tokens that were found in the cache", "cached_prompt_tokens"),
    "spec_decode_num_drafts": ("Drafts; speculation is not in this release", None),
    "spec_decode_num_draft_tokens": ("Tokens drafted; speculation is not in this release", None),
    "spec_decode_num_accepted_tokens": ("Drafted tokens accepted; speculation is not in this release", None),
}
_GAUGES = {
    "num_requests_running": ("Requests whose prompt is being computed or whose samples decode", "requests_running"),
    "num_requests_waiting": ("Requests that wait", "requests_waiting"),
    "kv_pages_shared": ("Pages of the KV pool that two or more running samples read", "pages_shared"),
    "kv_pages_private": ("Other pages of the KV pool that requests hold", "pages_private"),
}
_HISTOGRAMS = {
    "time_to_first_token_seconds": ("From a request to its first token", _SECONDS),
    "inter_token_latency_seconds": ("Between a sample's tokens; its mean where they were not streamed", _SHORT),
    "e2e_request_latency_seconds": ("From a request to its end", _SECONDS),
    "request_queue_time_seconds": ("From a request to the beginning of its prompt's computation", _SECONDS),
    "request_params_n": ("n of requests", _SAMPLES),
    "group_size": ("Samples of groups that ended", _SAMPLES),
    "group_first_sample_seconds": ("From a request to the end of its first sample", _SECONDS),
    "group_last_sample_seconds": ("From a request to the end of its last sample", _SECONDS),
}


@dataclass(slots=True)
class _Open:
    """A request under way: when it began, when its last news came, and when its first sample ended."""

    began: float
    streamed: bool
    last_news: float | None = None
    first_end: float | None = None


class Metrics(Collector):
    """Counts what happens to requests, and shows it with the engine's own counters.

    Parameters
    ----------
    llm : AsyncLLM
        Becomes its observer.
    model_name : str
        Label of everything.
    """

    def __init__(self, llm: AsyncLLM, model_name: str) -> None:
        self._llm, self._model_name = llm, model_name
        llm.observer = self
        self.histograms = {name: Histogram(bounds) for name, (_, bounds) in _HISTOGRAMS.items()}
        # Counted for every token, so looked up once.
        self._between, self._first = (
            self.histograms[name] for name in ("inter_token_latency_seconds", "time_to_first_token_seconds")
        )
        self.prefill_tokens_saved = self.generation_tokens = 0
        self.stats: dict[str, Any] = {}
        self._open: dict[str, _Open] = {}
        self._registry = CollectorRegistry()
        self._registry.register(self)

    # ---- what happens to requests --------------------------------------------------------------------------------

    def began(self, output: RequestOutput) -> None:
        """A request was handed to the engine."""
        streamed = output.sampling_params.output_kind is not RequestOutputKind.FINAL_ONLY
        self._open[output.request_id] = _Open(monotonic(), streamed)
        self.histograms["request_params_n"].add(output.sampling_params.n)

    def news(self, request_id: str, tokens: int, samples: int, ends: int, now: float) -> None:
        """New tokens of some samples came, and some of them ended."""
        self.generation_tokens += tokens
        known = self._open.get(request_id)
        if known is None:
            return
        if known.streamed and tokens:
            if known.last_news is None:
                self._first.add(now - known.began)
            else:
                self._between.add(now - known.last_news, tokens)
            known.last_news = now
        if ends and known.first_end is None:
            known.first_end = now

    def ended(self, output: RequestOutput, event: GroupEvent, now: float) -> None:
        """A request ended, in whatever way."""
        known = self._open.pop(output.request_id, None)
        if known is None:
            return
        n, total, times = output.sampling_params.n, now - known.began, event.times
        add = self.histograms
        add["e2e_request_latency_seconds"].add(total)
        add["group_size"].add(n)
        add["group_last_sample_seconds"].add(total)
        add["group_first_sample_seconds"].add((known.first_end or now) - known.began)
        if times.scheduled is not None:
            add["request_queue_time_seconds"].add(times.scheduled)
            self.prefill_tokens_saved += output.num_cached_tokens + (n - 1) * len(output.prompt_token_ids)
        if not known.streamed and times.first_token is not None:
            self._first.add(times.first_token)
            self._count_unstreamed(output, total - times.first_token)

    def _count_unstreamed(self, output: RequestOutput, seconds: float) -> None:
        """All tokens came at once: each is taken to have come after the mean time between tokens."""
        counts = [len(sample.token_ids) for sample in output.outputs]
        most = max(counts)
        if most > 1:
            self._between.add(max(seconds, 0.0) / (most - 1), sum(count - 1 for count in counts if count))

    # ---- showing -------------------------------------------------------------------------------------------------

    async def refresh(self) -> dict[str, Any]:
        """Ask the engine for its counters; the last ones stay where it has no time, or is dead."""
        with suppress(RametError, TimeoutError):
            self.stats = await asyncio.wait_for(self._llm.stats(), STATS_TIMEOUT)
        return self.stats

    async def exposition(self) -> bytes:
        """Return all metrics in Prometheus' text form."""
        await self.refresh()
        return bytes(generate_latest(self._registry))

    def describe(self) -> Iterable[Metric]:
        """Nothing: what there is does not depend on when one asks, and asking needs no engine."""
        return []

    def collect(self) -> Iterator[Metric]:
        """Yield all metrics; called by Prometheus' registry."""
        stats, label = self.stats, [self._model_name]
        for name, (text, key) in _COUNTERS.items():
            yield self._counter(name, text, [((), stats.get(key, 0) if key else 0)])
        for name, (text, key) in _GAUGES.items():
            gauge = GaugeMetricFamily(f"ramet:{name}", text, labels=["model_name"])
            gauge.add_metric(label, stats.get(key, 0))
            yield gauge
        usage = GaugeMetricFamily("ramet:kv_cache_usage_perc", "Share of the KV pool in use", labels=["model_name"])
        usage.add_metric(label, stats.get("pages_in_use", 0) / max(stats.get("pages_total", 1), 1))
        yield usage
        finished = stats.get("samples_finished", {"stop": 0, "length": 0, "abort": 0})
        ends = [((reason,), count) for reason, count in finished.items()]
        yield self._counter("request_success", "Samples that ended", ends, ["finished_reason"])
        shared, declined = stats.get("steps_shared", 0), stats.get("steps_declined", 0)
        paths = [
            (("shared", "shared_nodes"), shared),
            (("per_row", "would_not_pay"), declined),
            (("per_row", "nothing_shared"), stats.get("steps", 0) - shared - declined),
        ]
        yield self._counter("shared_prefix_steps", "Steps by how attention read prefixes", paths, ["path", "reason"])
        saved = "Prompt tokens not computed, thanks to the cache and to samples that share their prompt"
        yield self._counter("prefill_tokens_saved", saved, [((), self.prefill_tokens_saved)])
        for name, (text, _) in _HISTOGRAMS.items():
            one = self.histograms[name]
            yield self._histogram(name, text, one.bounds, one.counts, one.total)
        steps = stats.get("step_tokens", {"counts": [0] * (len(STEP_TOKENS) + 1), "total": 0})
        yield self._histogram("iteration_tokens_total", "Tokens of steps", STEP_TOKENS, steps["counts"], steps["total"])

    def _counter(
        self, name: str, text: str, values: Iterable[tuple[tuple[str, ...], float]], labels: Iterable[str] = ()
    ) -> Metric:
        counter = CounterMetricFamily(f"ramet:{name}", text, labels=["model_name", *labels])
        for extra, value in values:
            counter.add_metric([self._model_name, *extra], value)
        return counter

    def _histogram(self, name: str, text: str, bounds: Iterable[float], counts: Iterable[int], total: float) -> Metric:
        buckets, seen = [], 0
        for bound, count in zip([*map(str, map(float, bounds)), "+Inf"], counts, strict=True):
            seen += count
            buckets.append((bound, seen))
        family = HistogramMetricFamily(f"ramet:{name}", text, labels=["model_name"])
        family.add_metric([self._model_name], buckets, total)
        return family
