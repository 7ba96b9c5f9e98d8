"""``ramet bench throughput``: tokens a second for many samples of a prompt, beside the floor of this machine."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

from ramet.cli import environment
from ramet.cli.common import ENGINE_FIELDS, Context, add_common_options, add_engine_options, require_model
from ramet.cli.options import Parser, Settings
from ramet.errors import InvalidArgument
from ramet.logs import LOGGER

USAGE = "MODEL [options]"
DESCRIPTION = (
    "Measure throughput: every prompt is submitted at the start and sampled n times, to exactly --output-len tokens. "
    "The last line of the output is JSON."
)


def add_options(parser: Parser) -> None:
    """Add the command's options."""
    group = parser.add_argument_group("Workload")
    for flag, default, text in (
        ("--num-prompts", 8, "Prompts, of random tokens."),
        ("--n", 8, "Samples of each prompt."),
        ("--input-len", 512, "Tokens of a prompt."),
        ("--output-len", 64, "Tokens of a sample."),
        ("--prefix-len", 0, "How many first tokens of --input-len all prompts share."),
        ("--num-warmups", 1, "Short runs of one prompt before the clock starts."),
    ):
        parser.option(group, flag, default=default, type=int, metavar="N", help=text)
    parser.option(group, "--temperature", default=1.0, type=float, metavar="X", help="0 is greedy.")
    group = parser.add_argument_group("Output")
    parser.option(group, "--save-result", metavar="FILE", help="Write the JSON line to a file, too.")
    parser.option(
        group, "--no-floor", default=False, action="store_true", help="Do not measure the floor of this machine."
    )
    add_engine_options(parser, seed_help="Of prompts, samples and dummy weights.")
    add_common_options(parser)


def run(settings: Settings, context: Context) -> int:
    """Run the command."""
    require_model(settings)
    from ramet.bench.floor import measure_floor
    from ramet.bench.report import json_line, results, table
    from ramet.bench.runner import measure, warm_up
    from ramet.bench.workload import Workload

    fields = ("num_prompts", "n", "input_len", "output_len", "prefix_len", "temperature", "seed")
    workload = Workload(**{name: settings[name] for name in fields})
    path = None if settings["save_result"] is None else Path(settings["save_result"])
    if settings["num_warmups"] < 0:
        raise InvalidArgument(f"num_warmups is {settings['num_warmups']}; allowed: an integer of at least 0.")
    if path is not None:
        _check_writable(path)
    with context.start(settings) as llm:
        for _ in range(settings["num_warmups"]):
            warm_up(llm, workload)
        measured = measure(llm, workload)
        LOGGER.info("measured; now the floor of this machine" if not settings["no_floor"] else "measured")
        floor = None if settings["no_floor"] else measure_floor(llm, workload)
        found = results(measured, workload, floor, _origin(settings, llm))
    line = json_line(found)
    context.write(table(found))
    context.write(_origin_lines(found))
    context.write(line)
    if path is not None:
        path.write_text(line + "\n", encoding="utf-8")
    return 0


def _check_writable(path: Path) -> None:
    """Refuse a file that cannot be written before anything is measured."""
    try:
        path.open("a").close()
    except OSError as error:
        raise InvalidArgument(f"--save-result {path} cannot be written: {error.strerror}.") from None


def _origin(settings: Settings, llm: Any) -> dict[str, Any]:
    import torch

    return {
        "model": settings["model"],
        "dtype": str(llm.engine.runner.k_pool.dtype).removeprefix("torch."),
        "engine": settings.given(ENGINE_FIELDS),
        "threads": torch.get_num_threads(),
        "hardware": environment.cpu(),
        "versions": environment.versions(),
        "commit": commit(),
    }


def _origin_lines(found: dict[str, Any]) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in found["versions"].items())
    return (
        f"{found['model']}, {found['dtype']}, {found['threads']} threads on {found['hardware']['name']}\n"
        f"{versions}{', commit ' + found['commit'] if found['commit'] else ''}"
    )


def commit() -> str | None:
    """Return the commit of the source tree Ramet runs from, None for an installed package."""
    root = Path(__file__).parents[3]
    if not (root / ".git").exists():
        return None
    try:
        done = subprocess.run(
            ["git", "-C", str(root), "rev-parse", "--short", "HEAD"], capture_output=True, text=True, timeout=5
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None
