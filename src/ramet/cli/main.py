"""Entry point of the ``ramet`` command: picks a command, turns our errors into one clear line."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib import import_module

from ramet import logs
from ramet.cli.common import Context
from ramet.cli.config_file import read_config
from ramet.cli.options import Parser, parse
from ramet.errors import CapacityExceeded, Closed, InvalidArgument, OutOfMemory, RametError, nearest

# Command to module and summary. A module is imported when its command runs: `ramet --help` needs none of them.
COMMANDS = {
    "generate": ("ramet.cli.generate", "samples of one or many prompts, as text or JSONL"),
    "chat": ("ramet.cli.chat", "a conversation in the terminal"),
    "serve": ("ramet.cli.serve", "an OpenAI-compatible HTTP server that keeps n"),
    "bench throughput": ("ramet.cli.bench", "tokens a second for many samples of a prompt"),
    "bench attention": ("ramet.cli.bench_attention", "attention backends side by side, beside the floor"),
    "doctor": ("ramet.cli.doctor", "what works on this machine, and why not"),
    "collect-env": ("ramet.cli.collect_env", "hardware and versions, for a bug report"),
}
INTERRUPTED = 130  # what shells use for Ctrl-C
_BROKEN_PIPE = 141


def main(argv: Sequence[str] | None = None, context: Context | None = None) -> int:
    """Run the command line.

    Parameters
    ----------
    argv : sequence of str, optional
        The process's own arguments by default.
    context : Context, optional
        Streams and the engine's factory; the real ones by default.

    Returns
    -------
    int
        Exit code: 0 done, 1 the work failed, 2 bad input, 130 interrupted.
    """
    argv = list(sys.argv[1:] if argv is None else argv)
    context = context or Context()
    logs.configure()
    try:
        return _dispatch(argv, context)
    except SystemExit as stop:  # argparse, after --help
        return int(stop.code or 0)
    except KeyboardInterrupt as interrupt:
        context.stderr.write(f"ramet: interrupted{': ' + str(interrupt) if str(interrupt) else ''}\n")
        return INTERRUPTED
    except BrokenPipeError:  # `ramet generate ... | head`: the reader has gone, which is no error of ours
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _BROKEN_PIPE
    except RametError as error:
        logs.LOGGER.debug("where the error came from:", exc_info=True)
        context.stderr.write(f"ramet: error: {' '.join(str(error).split())}\n")
        return 1 if isinstance(error, OutOfMemory | CapacityExceeded | Closed) else 2


def _dispatch(argv: list[str], context: Context) -> int:
    if not argv or argv[0] in ("-h", "--help", "help"):
        context.write(_overview())
        return 0 if argv else 2
    if argv[0] in ("--version", "-V"):
        from ramet.cli.environment import ramet_version

        context.write(f"ramet {ramet_version()}")
        return 0
    name, rest = _split(argv)
    module = import_module(COMMANDS[name][0])
    parser = Parser(prog=f"ramet {name}", usage=f"ramet {name} {module.USAGE}", description=module.DESCRIPTION)
    module.add_options(parser)
    settings = parse(parser, rest, read_config)
    logs.configure(quiet=settings["quiet"], verbose=settings["verbose"], as_json=settings["log_json"])
    return int(module.run(settings, context))


def _split(argv: list[str]) -> tuple[str, list[str]]:
    """Separate the command, of one word or two, from its arguments."""
    for words in (2, 1):
        if " ".join(argv[:words]) in COMMANDS:
            return " ".join(argv[:words]), argv[words:]
    group = [name for name in COMMANDS if name.startswith(argv[0] + " ")]
    if group:
        wanted = argv[1] if len(argv) > 1 else ""
        names = [name.split(" ")[1] for name in group]
        raise InvalidArgument(f"'ramet {argv[0]}' has no command {wanted!r}; it has: {', '.join(names)}.")
    raise InvalidArgument(f"there is no command {argv[0]!r}{nearest(argv[0], COMMANDS)} (see ramet --help)")


def _overview() -> str:
    lines = [f"  {name:<18}{summary}" for name, (_, summary) in COMMANDS.items()]
    return "\n".join(
        [
            "usage: ramet COMMAND [options]",
            "",
            "LLM inference for many samples of one prompt.",
            "",
            "Commands:",
            *lines,
            "",
            "'ramet COMMAND --help' shows its options and their defaults; 'ramet --version' the version.",
        ]
    )


if __name__ == "__main__":
    sys.exit(main())
