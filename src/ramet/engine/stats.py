"""Counters of what the engine did: every step counts the path it took."""

from __future__ import annotations

from dataclasses import dataclass, field

from ramet.attention import PlanCounters


@dataclass
class EngineStats:
    """Totals since the engine was made. Documented in ``docs/reference/stats.md``."""

    steps: int = 0
    steps_shared: int = 0  #: steps whose attention read at least one node once for several rows
    model_tokens: int = 0
    sampled_tokens: int = 0
    prompt_tokens: int = 0
    cached_prompt_tokens: int = 0
    prefills: int = 0
    prefill_tokens: int = 0
    full_hits: int = 0
    preemptions: int = 0
    forest_rebuilds: int = 0
    shared_nodes: int = 0
    steps_declined: int = 0  #: steps that had such nodes but read all of them per row, since sharing would not pay
    nodes_declined: int = 0  #: nodes with several rows below that were read per row, since sharing would not pay
    kv_tokens_read: int = 0
    kv_tokens_logical: int = 0
    groups_finished: int = 0
    samples_finished: dict[str, int] = field(default_factory=lambda: {"stop": 0, "length": 0, "abort": 0})
    attention_backends: dict[str, int] = field(default_factory=dict)
    seconds_plan: float = 0.0
    seconds_load: float = 0.0
    seconds_forward: float = 0.0
    seconds_sample: float = 0.0
    seconds_commit: float = 0.0

    def count_attention(self, backend: str, counters: PlanCounters) -> None:
        """Add what one step's attention read."""
        self.attention_backends[backend] = self.attention_backends.get(backend, 0) + 1
        self.steps_shared += counters.shared_nodes > 0
        self.steps_declined += counters.shared_nodes == 0 < counters.declined_nodes
        self.shared_nodes += counters.shared_nodes
        self.nodes_declined += counters.declined_nodes
        self.kv_tokens_read += counters.kv_tokens_read
        self.kv_tokens_logical += counters.kv_tokens_logical
