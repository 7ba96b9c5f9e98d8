"""The report of ``ramet bench attention``: a table, JSON and a plot."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ramet.bench.attention_runner import Result
from ramet.bench.attention_shapes import one_level
from ramet.errors import Unsupported

FORMAT = 1
"""Version of the JSON."""

_HEAD = f"{'shape':<26}{'backend':<14}{'us':>9}{'floor':>8}{'x floor':>8}{'error':>9}{'plan us':>9}{'replan':>8}"


def header(deterministic: bool) -> str:
    """The table's first line."""
    return _HEAD + (f"{'determ. us':>12}{'price':>7}" if deterministic else "")


def row(result: Result, deterministic: bool) -> str:
    """One line of the table; a backend without a time has its reason instead."""
    start = f"{result.shape.name:<26}{result.candidate:<14}"
    if result.us is None:
        return f"{start}{result.status}: {result.reason}"
    line = (
        f"{start}{result.us:>9.1f}{result.floor_us:>8.1f}{result.us / result.floor_us:>8.2f}{result.error:>9.1e}"
        f"{result.plan_us:>9.0f}{result.replan_us:>8.0f}"
    )
    if not deterministic:
        return line
    if result.deterministic_us is None:
        return line + f"{'-':>12}{'-':>7}"
    return line + f"{result.deterministic_us:>12.1f}{result.deterministic_us / result.us:>7.2f}"


def sharing(results: Sequence[Result]) -> list[str]:
    """For shapes with a system prompt, lines that compare them with the same rows and one level of sharing."""
    times = {(result.shape, result.candidate): result.us for result in results if result.us is not None}
    lines = []
    for (shape, candidate), us in times.items():
        flat = times.get((one_level(shape), candidate)) if shape.system_len else None
        if flat is not None:
            lines.append(f"{shape.name}, {candidate}: {us:.1f} us nested, {flat:.1f} us with one level of sharing")
    return lines


def as_json(results: Sequence[Result], origin: Mapping[str, Any]) -> dict[str, Any]:
    """Everything that was measured, with where it was measured."""
    rows = [{**asdict(result), "name": result.shape.name, "efficiency": result.efficiency} for result in results]
    return {"format": FORMAT, **origin, "results": rows}


def write_json(path: Path, results: Sequence[Result], origin: Mapping[str, Any]) -> None:
    """Write the results, whole or not at all: a run that is cut short leaves those before."""
    part = path.with_name(path.name + ".part")
    part.write_text(json.dumps(as_json(results, origin), indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    part.replace(path)


def require_matplotlib() -> Any:
    """The plotting module.

    Raises
    ------
    Unsupported
        It is not installed.
    """
    try:
        import matplotlib
    except ImportError:
        raise Unsupported("--plot needs matplotlib, which is not installed: pip install 'ramet[plot]'.") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def plot(path: Path, results: Sequence[Result], title: str) -> None:
    """Draw the time over the floor of every backend, shape by shape."""
    pyplot = require_matplotlib()
    timed = [result for result in results if result.us is not None]
    names = list(dict.fromkeys(result.shape.name for result in timed))
    backends = list(dict.fromkeys(result.candidate for result in timed))
    figure, axes = pyplot.subplots(figsize=(max(6.0, 0.6 * len(names) + 2), 4.5), layout="constrained")
    for i, backend in enumerate(backends):
        mine = [result for result in timed if result.candidate == backend]
        at = [names.index(result.shape.name) + 0.8 * (i + 0.5) / len(backends) - 0.4 for result in mine]
        axes.bar(at, [(result.us or 0.0) / result.floor_us for result in mine], 0.8 / len(backends), label=backend)
    axes.axhline(1.0, color="black", linewidth=1, label="floor")
    axes.set_yscale("log")
    axes.set_ylabel("time / floor")
    axes.set_xticks(range(len(names)), names, rotation=60, ha="right")
    axes.set_title(title)
    axes.legend()
    figure.savefig(path)
    pyplot.close(figure)
