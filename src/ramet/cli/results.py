"""The output file of ``generate``: one JSON line a prompt, appended whole, read again to go on where a run ended."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from ramet.cli.common import json_line
from ramet.cli.prompts import KINDS, Prompt
from ramet.errors import InvalidArgument
from ramet.logs import LOGGER
from ramet.outputs import CompletionOutput, RequestOutput, TokenLogprobs
from ramet.sampling_params import SamplingParams

try:
    import fcntl
except ImportError:  # Windows has no such lock
    fcntl = None  # type: ignore[assignment]

_LEFT_OUT = ("seed", "structured_outputs", "output_kind")


def parameters(params: SamplingParams) -> dict[str, Any]:
    """Return sampling parameters as JSON has them; the seed stands apart in a record."""
    fields = {f.name: getattr(params, f.name) for f in dataclasses.fields(params) if f.name not in _LEFT_OUT}
    return dict(json.loads(json.dumps(fields)))


def record(
    prompt: Prompt, params: SamplingParams, output: RequestOutput, origin: Mapping[str, Any], *, token_ids: bool
) -> dict[str, Any]:
    """Return the JSON object of a finished prompt.

    Parameters
    ----------
    prompt, params, output
        What was asked and what came.
    origin : mapping
        ``model``, ``engine`` and ``versions``, the same in all lines.
    token_ids : bool
        Whether the ids of prompt and samples are kept.
    """
    entry: dict[str, Any] = {"index": prompt.index}
    if prompt.id is not None:
        entry["id"] = prompt.id
    entry[prompt.kind] = prompt.value
    if token_ids:
        entry["prompt_token_ids"] = list(output.prompt_token_ids)
    if output.prompt_logprobs is not None:
        entry["prompt_logprobs"] = _logprobs(output.prompt_logprobs)
    entry["samples"] = [_sample(sample, token_ids) for sample in output.outputs]
    entry |= {"parameters": parameters(params), "seed": params.seed, **origin}
    return entry | ({"extra": prompt.extra} if prompt.extra else {})


def _sample(sample: CompletionOutput, token_ids: bool) -> dict[str, Any]:
    entry: dict[str, Any] = {"index": sample.index, "text": sample.text}
    if token_ids:
        entry["token_ids"] = [int(i) for i in sample.token_ids]
    entry |= {"finish_reason": sample.finish_reason, "stop_reason": sample.stop_reason}
    if sample.logprobs is not None:
        entry |= {"cumulative_logprob": sample.cumulative_logprob, "logprobs": _logprobs(sample.logprobs)}
    return entry


def _logprobs(values: TokenLogprobs) -> list[Any]:
    """A number for each token, or the likeliest tokens with rank and text where those were asked for."""
    if values.top_ids is None:
        return [None if entry is None else next(iter(entry.values())).logprob for entry in values]
    return [
        None if entry is None else [{"token_id": i, **logprob._asdict()} for i, logprob in entry.items()]
        for entry in values
    ]


class ResultsFile:
    """A JSONL file of finished prompts, open for appending and locked.

    A line is written by one call, so a crash leaves whole lines; a line that was cut off nevertheless (a full disk)
    is removed when the file is opened again.

    Parameters
    ----------
    path : str
    overwrite : bool, default False
        Begin anew instead of going on.

    Raises
    ------
    InvalidArgument
        The file cannot be written, is in use by another run, or is no output of ours.
    """

    def __init__(self, path: str, *, overwrite: bool = False) -> None:
        self.path = path
        self._finished: dict[int, dict[str, Any]] = {}
        try:
            self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        except OSError as error:
            raise InvalidArgument(f"--output {path} cannot be written: {error.strerror}.") from None
        try:
            self._lock()
            if overwrite:
                os.truncate(self._file, 0)
            self._read()
        except BaseException:
            os.close(self._file)
            raise

    def __enter__(self) -> ResultsFile:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        os.close(self._file)

    def append(self, entry: Mapping[str, Any]) -> None:
        """Append a finished prompt as one line."""
        data = memoryview(f"{json_line(entry)}\n".encode())
        try:
            while data:  # one call, but for a signal or a nearly full disk
                data = data[os.write(self._file, data) :]
        except OSError as error:
            raise InvalidArgument(f"--output {self.path} cannot be written: {error.strerror}.") from None

    def has(self, prompt: Prompt, params: SamplingParams, origin: Mapping[str, Any]) -> bool:
        """Whether a prompt is finished already.

        Raises
        ------
        InvalidArgument
            The file has another prompt, or other parameters, under its number.
        """
        old = self._finished.get(prompt.index)
        if old is None:
            return False
        now = {prompt.kind: prompt.value, **parameters(params), "seed": params.seed, "model": origin["model"]}
        then = {
            **{k: old[k] for k in KINDS if k in old},
            **old["parameters"],
            "seed": old["seed"],
            "model": old["model"],
        }
        for name, value in now.items():
            if then.get(name) != value:
                raise InvalidArgument(
                    f"{self.path} has prompt {prompt.index} with {name}={_short(then.get(name))}, but now it is "
                    f"{_short(value)}; give another --output, or --overwrite."
                )
        return True

    def _lock(self) -> None:
        if fcntl is None:
            return
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise InvalidArgument(f"--output {self.path} is in use by another run; give another one.") from None

    def _read(self) -> None:
        data = Path(self.path).read_bytes() if os.path.isfile(self.path) else b""
        whole = data.rfind(b"\n") + 1
        for number, line in enumerate(data[:whole].split(b"\n")[:-1], 1):
            try:
                entry = json.loads(line)
                self._finished[int(entry["index"])] = {k: entry[k] for k in _NEEDED} | {
                    k: entry[k] for k in KINDS if k in entry
                }
            except (ValueError, KeyError, TypeError):
                raise InvalidArgument(
                    f"--output {self.path} line {number} is no result of ramet generate; give another file."
                ) from None
        if whole < len(data):
            LOGGER.warning("%s ends in a line that was cut off; it is removed and its prompt done again.", self.path)
            os.truncate(self._file, whole)


_NEEDED = ("parameters", "seed", "model")


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
