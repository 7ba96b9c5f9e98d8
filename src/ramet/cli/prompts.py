"""Reads prompts from flags, text files, JSONL files and stdin."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

from ramet.cli.common import SAMPLING_FIELDS
from ramet.errors import InvalidArgument, nearest, shown

KINDS = ("prompt", "prompt_token_ids", "messages")
_OVERRIDES = (*SAMPLING_FIELDS, "seed")
_KNOWN = ("id", *KINDS, *_OVERRIDES)


@dataclass(frozen=True)
class Prompt:
    """One prompt of a run.

    Attributes
    ----------
    index : int
        Its place in the input, from 0; with the seed it fixes the samples.
    kind : "prompt", "prompt_token_ids" or "messages"
    value : str, list of int, or list of messages
    where : str
        Where it stands, for errors.
    id : str, int or None
        The caller's name for it.
    overrides : dict
        Sampling parameters of this prompt alone.
    extra : dict
        Further fields of its JSONL line, carried to the output.
    """

    index: int
    kind: str
    value: Any
    where: str
    id: str | int | None = None
    overrides: dict[str, Any] = field(default_factory=dict)
    extra: dict[str, Any] = field(default_factory=dict)


def read_prompts(
    *,
    prompts: Iterable[str],
    prompts_file: str | None,
    jsonl: str | None,
    stdin: TextIO,
    keep_extra_fields: bool = False,
) -> list[Prompt]:
    """Return the prompts of a run, numbered in the order flags, text file, JSONL file.

    Parameters
    ----------
    prompts : iterable of str
        From ``--prompt``; ``-`` stands for all of stdin.
    prompts_file : str, optional
        One prompt a line, empty lines left out; ``-`` is stdin.
    jsonl : str, optional
        One JSON object a line; ``-`` is stdin.
    stdin : text stream
        The only source if nothing else is given and it is no terminal: then all of it is one prompt.
    keep_extra_fields : bool
        Carry unknown fields of a JSONL line to the output instead of refusing them.

    Raises
    ------
    InvalidArgument
        There is no prompt, or a line cannot be read.
    """
    prompts = list(prompts)
    if [*prompts, prompts_file, jsonl].count("-") > 1:
        raise InvalidArgument("stdin ('-') can be read once only.")
    if not prompts and prompts_file is None and jsonl is None:
        if stdin.isatty():
            raise InvalidArgument("there is no prompt; give --prompt, --prompts-file, --jsonl, or text on stdin.")
        prompts = ["-"]
    found = [Prompt(0, "prompt", stdin.read() if text == "-" else text, "--prompt") for text in prompts]
    if prompts_file is not None:
        lines = _lines(prompts_file, stdin)
        found += [Prompt(0, "prompt", line, f"{prompts_file} line {i}") for i, line in lines if line.strip()]
    if jsonl is not None:
        lines = _lines(jsonl, stdin)
        found += [_from_json(line, f"{jsonl} line {i}", keep_extra_fields) for i, line in lines if line.strip()]
    if not found:
        raise InvalidArgument(f"{prompts_file or jsonl} holds no prompt.")
    return [dataclasses.replace(prompt, index=i) for i, prompt in enumerate(found)]


def _lines(path: str, stdin: TextIO) -> Iterator[tuple[int, str]]:
    try:
        # Not str.splitlines(): a prompt may hold U+2028 and other characters that it takes for ends of lines.
        text = stdin.read() if path == "-" else Path(path).read_bytes().decode("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        reason = (error.strerror if isinstance(error, OSError) else None) or str(error)
        raise InvalidArgument(f"{path} cannot be read: {reason}.") from None
    return ((i, line.removesuffix("\r")) for i, line in enumerate(text.split("\n"), 1))


def _from_json(line: str, where: str, keep_extra_fields: bool) -> Prompt:
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise InvalidArgument(f"{where} is not valid JSON: {error}.") from None
    if not isinstance(entry, dict):
        raise InvalidArgument(f"{where} holds a {type(entry).__name__}; allowed: an object with 'prompt'.")
    extra = {name: value for name, value in entry.items() if name not in _KNOWN}
    if extra and not keep_extra_fields:
        name = next(iter(extra))
        raise InvalidArgument(
            f"{where} has an unknown field {name!r}{nearest(name, _KNOWN)} "
            "(--keep-extra-fields carries such fields to the output)"
        )
    kinds = [kind for kind in KINDS if kind in entry]
    if len(kinds) != 1:
        raise InvalidArgument(f"{where} has {' and '.join(kinds) or 'none'} of {', '.join(KINDS)}; allowed: one.")
    _check_value(kinds[0], entry[kinds[0]], where)
    name = entry.get("id")
    if name is not None and (not isinstance(name, str | int) or isinstance(name, bool)):
        raise InvalidArgument(f"{where}: id is {shown(name)}; allowed: a string or an integer.")
    overrides = {name: entry[name] for name in _OVERRIDES if name in entry}
    if isinstance(overrides.get("logit_bias"), dict):  # the keys of JSON objects are strings
        overrides["logit_bias"] = {_integer(k, where): v for k, v in overrides["logit_bias"].items()}
    return Prompt(0, kinds[0], entry[kinds[0]], where, name, overrides, extra)


def _check_value(kind: str, value: object, where: str) -> None:
    if kind == "prompt" and not isinstance(value, str):
        raise InvalidArgument(f"{where}: prompt is {shown(value)}; allowed: a string.")
    if kind == "prompt_token_ids" and (
        not isinstance(value, list) or not all(isinstance(i, int) and not isinstance(i, bool) for i in value)
    ):
        raise InvalidArgument(f"{where}: prompt_token_ids is {shown(value)}; allowed: a list of token ids.")
    if kind == "messages" and not isinstance(value, list):
        raise InvalidArgument(f"{where}: messages is {shown(value)}; allowed: a list of messages.")


def _integer(text: str, where: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise InvalidArgument(f"{where}: logit_bias has the key {shown(text)}; allowed: token ids.") from None
