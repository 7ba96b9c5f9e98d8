"""``ramet collect-env``: hardware and versions, for a bug report."""

from __future__ import annotations

import json
import platform
from typing import Any

from ramet.cli import environment
from ramet.cli.common import Context, add_common_options
from ramet.cli.options import Parser, Settings

USAGE = "[options]"
DESCRIPTION = "Print hardware, versions and environment variables, for a bug report. Nothing is sent anywhere."


def add_options(parser: Parser) -> None:
    """Add the command's options."""
    group = parser.add_argument_group("Output")
    parser.option(group, "--json", default=False, action="store_true", help="One JSON object instead of lines.")
    add_common_options(parser)


def run(settings: Settings, context: Context) -> int:
    """Run the command."""
    facts = collect()
    if settings["json"]:
        context.write(json.dumps(facts, ensure_ascii=False))
        return 0
    for title, values in facts.items():
        context.write(f"{title}:")
        for name, value in values.items():
            missing = "not installed" if title == "packages" else "none"
            context.write(f"  {name:<20}{missing if value is None else value}")
    return 0


def collect() -> dict[str, dict[str, Any]]:
    """Return the facts by section; a device that cannot be asked shows its error instead."""
    try:
        devices = {f"gpu {i}": json.dumps(gpu) for i, gpu in enumerate(environment.gpus())} or {"gpu": "none"}
        threads = _torch_facts()
    except Exception as error:  # whatever a broken driver or torch raises belongs into the report
        devices, threads = {"gpu": f"{type(error).__name__}: {error}"}, {}
    return {
        "system": {"platform": platform.platform(), "python": platform.python_version()},
        "cpu": environment.cpu(),
        "devices": devices,
        "torch": threads,
        "packages": dict(environment.packages()),
        "variables": dict(environment.variables()),
    }


def _torch_facts() -> dict[str, Any]:
    import torch

    return {
        "threads": torch.get_num_threads(),
        "cuda": torch.version.cuda,
        "cpu capability": torch.backends.cpu.get_cpu_capability(),
        "mkldnn": torch.backends.mkldnn.is_available(),
    }
