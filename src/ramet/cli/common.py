"""What several commands share: groups of options, the engine they start, and what they are run with."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TextIO

from ramet.cli.options import Parser, Settings, add_fields
from ramet.config import EngineConfig
from ramet.errors import InvalidArgument
from ramet.logs import LOGGER
from ramet.sampling_params import SamplingParams

ENGINE_FIELDS = tuple(f.name for f in dataclasses.fields(EngineConfig) if f.name != "model")
_NOT_FLAGS = ("seed", "structured_outputs", "output_kind")
SAMPLING_FIELDS = tuple(f.name for f in dataclasses.fields(SamplingParams) if f.name not in _NOT_FLAGS)


def _make_llm(model: str, **fields: Any) -> Any:
    from ramet.llm import LLM  # torch is loaded here and not before

    return LLM(model, **fields)


def _serve(model: str, engine: dict[str, Any], config: Any) -> None:
    from ramet.async_llm import AsyncLLM  # as above
    from ramet.server.run import run

    run(AsyncLLM(model, max_backlog=config.max_backlog, **engine), config)


@dataclass
class Context:
    """What a command is run with; tests give their own.

    Attributes
    ----------
    make_llm : callable
        From a model's name and engine settings to an ``LLM``.
    serve : callable
        Serves a model, from its name, engine settings and server settings.
    stdin, stdout, stderr : text streams
    """

    make_llm: Callable[..., Any] = _make_llm
    serve: Callable[[str, dict[str, Any], Any], None] = _serve
    stdin: TextIO = field(default_factory=lambda: sys.stdin)
    stdout: TextIO = field(default_factory=lambda: sys.stdout)
    stderr: TextIO = field(default_factory=lambda: sys.stderr)

    def start(self, settings: Settings) -> Any:
        """Start the engine that the settings ask for."""
        return self.make_llm(settings["model"], **settings.given(ENGINE_FIELDS))

    def write(self, text: str, end: str = "\n") -> None:
        """Write to stdout at once, so that text streams and pipes see whole lines; escape what it cannot hold."""
        encoding = self.stdout.encoding or "utf-8"
        self.stdout.write(text.encode(encoding, "backslashreplace").decode(encoding) + end)
        self.stdout.flush()

    def write_json(self, value: Any) -> None:
        """Write a value to stdout as one line of JSON."""
        self.write(json_line(value, self.stdout.encoding or "utf-8"))


def json_line(value: Any, encoding: str = "utf-8") -> str:
    """Return a value as one line of JSON: readable where the encoding allows it, else in ASCII with escapes."""
    line = json.dumps(value, ensure_ascii=False)
    try:
        line.encode(encoding)
    except UnicodeEncodeError:  # a lone surrogate, or an encoding other than UTF-8
        return json.dumps(value)
    return line


def add_engine_options(parser: Parser, seed_help: str | None = None) -> None:
    """Add MODEL and a flag for every engine setting."""
    parser.add_argument("model", nargs="?", metavar="MODEL", help=_MODEL_HELP, default=argparse.SUPPRESS)
    parser.defaults["model"] = None
    group = parser.add_argument_group("Model and engine")
    add_fields(
        parser,
        group,
        EngineConfig,
        skip=("model",),
        aliases={"tensor_parallel_size": "-tp"},
        helps={"seed": seed_help} if seed_help else {},
    )


_MODEL_HELP = "a Hugging Face folder, a .gguf file, a hub name (org/name) or a local name (smollm2-135m)"


def add_sampling_options(parser: Parser, *, skip: Sequence[str] = (), max_tokens: int | None) -> None:
    """Add a flag for every sampling parameter; defaults shown are those without a model's generation_config."""
    group = parser.add_argument_group("Sampling", "A model's generation_config.json comes before these defaults.")
    add_fields(
        parser,
        group,
        SamplingParams,
        skip=(*_NOT_FLAGS, *skip),
        aliases={"n": "-n"},
        defaults={"max_tokens": max_tokens},
        helps={"max_tokens": "Longest sample, in tokens; 'none' goes up to the context."} | _HELPS,
    )


_HELPS = {
    "stop": "String that ends a sample; may be repeated.",
    "bad_words": "String whose token sequences are never completed; may be repeated.",
    "logit_bias": "Added to the logits of tokens, as '{\"id\": bias}'; each in [-100, 100].",
    "skip_special_tokens": "Leave special tokens out of the text.",
    "include_stop_str_in_output": "Keep the stop string in the text.",
}


def add_common_options(parser: Parser, *, config: bool = True) -> None:
    """Add logging flags and ``--config``."""
    group = parser.add_argument_group("Logging and configuration")
    parser.option(group, "--quiet", "-q", default=False, action="store_true", help="Warnings and errors only.")
    parser.option(group, "--verbose", "-v", default=False, action="store_true", help="Debug lines too.")
    parser.option(group, "--log-json", default=False, action="store_true", help="One JSON object a log line.")
    if config:
        parser.option(group, "--config", metavar="FILE", help="JSON or YAML file of settings; flags override it.")


def require_model(settings: Settings) -> None:
    """Refuse a command without a model."""
    if not settings.values.get("model"):
        raise InvalidArgument(f"a model is missing; give {_MODEL_HELP}.")


def effective_sampling(llm: Any, settings: Settings, command_defaults: dict[str, Any]) -> SamplingParams:
    """Return the sampling parameters that hold, and log them once with where each came from.

    Parameters
    ----------
    llm : LLM
        Knows the model's own defaults.
    settings : Settings
        What was given goes before everything.
    command_defaults : dict
        Defaults of the command; they go behind the model's.
    """
    params, sources = llm.default_sampling_params()
    sources = {name: source for name, source in sources.items() if source != "built-in"}
    weaker = {name: value for name, value in command_defaults.items() if name not in sources}
    given = settings.given(SAMPLING_FIELDS)
    effective = dataclasses.replace(params, **{**weaker, **given})
    sources |= dict.fromkeys(weaker, "command default") | {name: settings.sources[name] for name in given}
    LOGGER.info("%s", describe_sampling(effective, sources))
    return effective


_ALWAYS_SHOWN = ("n", "temperature", "top_p", "top_k", "max_tokens")


def describe_sampling(params: SamplingParams, sources: dict[str, str]) -> str:
    """Return one line: what is in force, and from where; settings at rest are left out."""
    neutral = {f.name: f.default for f in dataclasses.fields(SamplingParams)}
    parts = []
    for name in SAMPLING_FIELDS:
        value = getattr(params, name)
        if name in _ALWAYS_SHOWN or name in sources or value != neutral[name]:
            shown = list(value) if isinstance(value, tuple) else value
            parts.append(f"{name}={'none' if shown is None else shown} ({sources.get(name, 'built-in')})")
    return "sampling: " + ", ".join(parts)
