"""The table of `cpu_peers.py`, and its last line of JSON."""

from __future__ import annotations

import datetime
import json
import platform
import subprocess
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from ramet.bench.floor import Floor
from ramet.cli import environment


class Measurement(NamedTuple):
    """One engine on one case."""

    engine: str
    case: str
    tokens: int
    seconds: float  #: median
    all_seconds: tuple[float, ...]
    peak_rss_mib: float  #: of the engine's process up to the end of this case

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds


def hardware(threads: int) -> dict[str, Any]:
    """Return the CPU's name, cores, memory and the instruction sets that matter, and the threads each engine had."""
    cpu = environment.cpu()
    return {**{key: cpu[key] for key in ("name", "cores", "flags", "memory")}, "threads": threads}


def software(root: Path) -> dict[str, str]:
    """Return the Python version and the commit, marked when files differ from it."""

    def git(*command: str) -> str:
        return subprocess.run(["git", *command], cwd=root, capture_output=True, text=True, check=False).stdout.strip()

    changed = "+changes" if git("status", "--porcelain", "--untracked-files=no") else ""
    return {"python": platform.python_version(), "commit": (git("rev-parse", "--short", "HEAD") or "none") + changed}


@dataclass(frozen=True)
class Report:
    """Everything one run found."""

    hardware: dict[str, Any]
    software: dict[str, str]
    floors: dict[str, dict[str, Floor]]  #: by precision ("bf16", "fp32") and case
    measurements: list[Measurement]
    greedy: dict[str, str]
    missing: list[str]

    def _cell(self, engine: str, case: str) -> Measurement | None:
        return next((m for m in self.measurements if (m.engine, m.case) == (engine, case)), None)

    def _cases(self) -> list[str]:
        return list(dict.fromkeys(m.case for m in self.measurements))

    def _engine_rows(self) -> list[list[str]]:
        rows = []
        for engine in dict.fromkeys(m.engine for m in self.measurements):
            cells = [self._cell(engine, case) for case in self._cases()]
            floors = self.floors[engine.split()[-1]]
            texts = [
                f"{c.tokens_per_second:.0f} ({floors[c.case].seconds_gemm / c.seconds:.0%})" if c else "-"
                for c in cells
            ]
            peaks = [c.peak_rss_mib for c in cells if c and c.case.startswith("n=32")]
            rows.append([engine, *texts, f"{peaks[0]:.0f}" if peaks else "-", self.greedy.get(engine, "-")])
        return rows

    def _floor_rows(self) -> list[list[str]]:
        tokens = {m.case: m.tokens for m in self.measurements}
        rows = []
        for precision, floors in self.floors.items():
            for name, attribute in (("floor_gemm", "seconds_gemm"), ("floor", "seconds")):
                cells = [f"{tokens[case] / getattr(floors[case], attribute):.0f}" for case in self._cases()]
                rows.append([f"{name} {precision}", *cells, "", ""])
        return rows

    def _ratio_rows(self) -> list[list[str]]:
        rows = []
        for precision in self.floors:
            cells = []
            for case in self._cases():
                mine = self._cell(f"Ramet {precision}", case)
                others = [
                    m
                    for m in self.measurements
                    if m.case == case and m.engine.endswith(precision) and not m.engine.startswith("Ramet")
                ]
                best = max(others, key=lambda m: m.tokens_per_second, default=None)
                cells.append(f"{best.seconds / mine.seconds:.2f} x" if mine and best else "-")
            rows.append([f"Ramet / best other {precision}", *cells, "", ""])
        return rows

    def table(self) -> str:
        """Return the card and the table as Markdown."""
        versions = ", ".join(f"{k} {v}" for k, v in self.software.items())
        rates = "; ".join(
            f"{precision} {f.rates.bytes_per_second / 1e9:.1f} GB/s, {f.rates.flops_per_second / 1e9:.0f} GFLOP/s"
            for precision, f in ((p, next(iter(cases.values()))) for p, cases in self.floors.items())
        )
        header = ["engine", *self._cases(), "peak MiB at n=32", "greedy tokens"]
        body = self._engine_rows() + self._floor_rows() + self._ratio_rows()
        lines = [
            "# SmolLM2-135M on a CPU: tokens per second of the whole call",
            "",
            f"- {self.hardware['name']}, {self.hardware['cores']} cores, {self.hardware['threads']} threads, "
            f"{self.hardware['memory'] / 2**30:.0f} GiB, {' '.join(self.hardware['flags'])}",
            f"- {versions}",
            f"- measured here: {rates}",
            "- 64 new tokens a sample, temperature 1, no EOS; median of the timed calls; in brackets the share of "
            "floor_gemm; greedy tokens: equal to the float32 golden tokens before the first difference",
            *(f"- left out: {m}" for m in self.missing),
            "",
            "| " + " | ".join(header) + " |",
            "|" + "---|" * len(header),
            *("| " + " | ".join(row) + " |" for row in body),
        ]
        return "\n".join(lines)

    def json_line(self) -> str:
        """Return the whole report as one line of JSON."""
        return json.dumps(
            {
                "benchmark": "cpu_peers",
                "hardware": self.hardware,
                "software": self.software,
                "floors": {p: {c: asdict(f) for c, f in cases.items()} for p, cases in self.floors.items()},
                "results": [
                    {**m._asdict(), "tokens_per_second": round(m.tokens_per_second, 1)} for m in self.measurements
                ],
                "greedy_tokens": self.greedy,
                "left_out": self.missing,
            }
        )

    def save(self, folder: Path, name: str) -> Path:
        """Write ``name-date-commit.md`` and ``.json``; return the path of the table."""
        folder.mkdir(parents=True, exist_ok=True)
        date = datetime.datetime.now(datetime.UTC).strftime("%Y%m%d-%H%M")
        path = folder / f"{name}-{date}-{self.software['commit'].removesuffix('+changes')}.md"
        path.write_text(self.table() + "\n")
        path.with_suffix(".json").write_text(self.json_line() + "\n")
        return path
