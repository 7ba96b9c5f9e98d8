"""From people's prompts to the engine's requests, and from its events to answers. In-process: no queue in between."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ramet.engine.engine import Engine
from ramet.engine.group import Event, GroupEvent, GroupRequest, SampleEvent, SampleLog
from ramet.errors import InvalidArgument
from ramet.frontend.detokenizer import IncrementalDetokenizer
from ramet.frontend.tokenizer import Tokenizer
from ramet.outputs import CompletionOutput, RequestOutput, TokenLogprobs
from ramet.sampling.stops import StopStrings
from ramet.sampling_params import RequestOutputKind, SamplingParams

Prompt = str | Sequence[int] | Mapping[str, Any]


@dataclass
class _Open:
    """A request under way: its answer so far, and the text state of its streaming samples."""

    output: RequestOutput
    params: SamplingParams
    sent: list[int] = field(default_factory=list)  # tokens of each sample that the caller has seen
    detokenizers: dict[int, IncrementalDetokenizer] = field(default_factory=dict)
    texts: dict[int, str] = field(default_factory=dict)


class Client:
    """Talks to an engine in words: tokenizes, follows stop strings, detokenizes.

    Parameters
    ----------
    engine : Engine
    tokenizer : Tokenizer
    eos_token_ids : tuple of int
        Ids that end a sample unless ``ignore_eos``.
    seed : int
        Requests without a seed draw theirs from (this seed, a counter).
    """

    def __init__(self, engine: Engine, tokenizer: Tokenizer, *, eos_token_ids: tuple[int, ...], seed: int) -> None:
        self.engine, self.tokenizer, self.eos_token_ids = engine, tokenizer, eos_token_ids
        self._seed = seed % 2**64
        self._counter = itertools.count()
        self._open: dict[str, _Open] = {}

    def tokenize(self, prompt: Prompt) -> tuple[str | None, list[int]]:
        """Return the text (None if ids were given) and ids of a prompt.

        Raises
        ------
        InvalidArgument
            It is neither text, nor ids, nor ``{"prompt": ...}`` or ``{"prompt_token_ids": ...}``.
        """
        if isinstance(prompt, Mapping):
            unknown = set(prompt) - {"prompt", "prompt_token_ids"}
            if unknown or not prompt:
                raise InvalidArgument(
                    f"the prompt has the keys {sorted(prompt)}; allowed: 'prompt' (text) or 'prompt_token_ids' (ids)."
                )
            text = prompt.get("prompt")
            ids = prompt.get("prompt_token_ids")
            return (text, _as_ids(ids)) if ids is not None else self.tokenize(prompt["prompt"])
        if isinstance(prompt, str):
            return prompt, self.tokenizer.encode(prompt)
        return None, _as_ids(prompt)

    def request(
        self,
        prompt: Prompt,
        params: SamplingParams,
        *,
        request_id: str | None = None,
        stream: bool = False,
        first_sample_id: int = 0,
        seed: int | None = None,
    ) -> tuple[GroupRequest, RequestOutput]:
        """Turn a prompt into a checked request and its empty answer, without submitting it."""
        text, ids = self.tokenize(prompt)
        number = next(self._counter)
        if seed is None:
            seed = params.seed % 2**64 if params.seed is not None else _fresh_seed(self._seed, number)
        room = self.engine.memory.max_model_len - len(ids)
        stops = () if params.ignore_eos else self.eos_token_ids
        request = GroupRequest(
            request_id=request_id or str(number),
            prompt_token_ids=_as_array(ids),
            params=params,
            max_tokens=max(room, 1) if params.max_tokens is None else params.max_tokens,
            seed=seed,
            stop_token_ids=tuple(dict.fromkeys((*stops, *params.stop_token_ids))),
            first_sample_id=first_sample_id,
            bad_words_ids=self.tokenizer.bad_words_ids(params.bad_words) if params.bad_words else [],
            watch=self._watcher_factory(params) if params.stop else None,
            streams=stream and params.output_kind is not RequestOutputKind.FINAL_ONLY,
        )
        output = RequestOutput(
            request_id=request.request_id,
            prompt=text,
            prompt_token_ids=ids,
            outputs=[CompletionOutput(k) for k in range(params.n)],
            sampling_params=params,
            seed=seed,
            next_sample_id=first_sample_id + params.n,
        )
        self.engine.check(request)
        return request, output

    def _watcher_factory(self, params: SamplingParams) -> Any:
        def watch() -> StopStrings:
            return StopStrings(
                self.tokenizer.detokenizer(params.skip_special_tokens),
                tuple(params.stop),
                include_stop=params.include_stop_str_in_output,
                min_tokens=params.min_tokens,
            )

        return watch

    def submit(self, request: GroupRequest, output: RequestOutput) -> None:
        """Hand a request to the engine."""
        self.engine.add(request)
        self._open[request.request_id] = _Open(output, request.params, [0] * request.params.n)

    def abort(self, request_id: str, index: int | None = None) -> None:
        """End a request or one of its samples; its answer comes with the next step."""
        self.engine.abort(request_id, index)

    def step(self) -> list[RequestOutput]:
        """One step of the engine; returns the answers that have news (all of them, if they stream)."""
        changed: dict[str, RequestOutput] = {}
        events = self.engine.step()
        for event in events:
            opened = self._open[event.request_id]
            if event.request_id not in changed:
                changed[event.request_id] = opened.output
                if opened.params.output_kind is RequestOutputKind.DELTA:
                    for sample in opened.output.outputs:  # what an earlier step brought is no news
                        sample.text, sample.token_ids = "", []
            self._apply(opened, event)
            if isinstance(event, GroupEvent):
                del self._open[event.request_id]
        return list(changed.values())

    def _apply(self, opened: _Open, event: Event) -> None:
        output, params = opened.output, opened.params
        if isinstance(event, GroupEvent):
            output.finished = True
            output.num_cached_tokens = event.num_cached_tokens
            if event.prompt_logprobs is not None:
                output.prompt_logprobs = self._prompt_logprobs(output.prompt_token_ids, event.prompt_logprobs)
            return
        sample = output.outputs[event.index]
        new = event.log.token_ids[opened.sent[event.index] :].tolist()
        if params.output_kind is RequestOutputKind.DELTA:
            sample.token_ids = new
        else:
            sample.token_ids += new
        opened.sent[event.index] += len(new)
        if params.detokenize:
            sample.text = self._text(opened, event, new)
        if event.log.logprobs is not None:
            sample.logprobs = self._logprobs(event.log)
            sample.cumulative_logprob = float(event.log.logprobs.sum(dtype=np.float64))
        sample.finish_reason, sample.stop_reason = event.finish_reason, event.stop_reason

    def _text(self, opened: _Open, event: SampleEvent, new: list[int]) -> str:
        params, index = opened.params, event.index
        delta = params.output_kind is RequestOutputKind.DELTA
        before = opened.texts.get(index, "")
        if event.text is not None:
            text = event.text
        else:
            # A stop token is no part of the text (unless asked for), although it is one of the tokens.
            ended_by_token = event.finish_reason == "stop" and not params.include_stop_str_in_output
            shown = new[:-1] if ended_by_token else new
            if event.finish_reason is not None and index not in opened.detokenizers:
                text = before + self.tokenizer.decode(shown, params.skip_special_tokens)
            else:
                if index not in opened.detokenizers:
                    opened.detokenizers[index] = self.tokenizer.detokenizer(params.skip_special_tokens)
                text = before + opened.detokenizers[index].push(shown)
                if event.finish_reason is not None:
                    text += opened.detokenizers[index].finish()
        opened.texts[index] = text
        return text[len(before) :] if delta else text

    def _logprobs(self, log: SampleLog) -> TokenLogprobs:
        assert log.logprobs is not None
        return TokenLogprobs(
            log.token_ids, log.logprobs, log.ranks, log.top_ids, log.top_logprobs, self.tokenizer.token_text
        )

    def _prompt_logprobs(self, prompt_ids: list[int], scores: SampleLog) -> TokenLogprobs:
        def shift(column: np.ndarray | None, fill: float) -> np.ndarray | None:
            """Entry p scores token p + 1; a prompt's first token has no score."""
            if column is None:
                return None
            return np.concatenate([np.full((1, *column.shape[1:]), fill, column.dtype), column])

        values = shift(scores.logprobs, np.nan)
        assert values is not None
        return TokenLogprobs(
            _as_array(prompt_ids),
            values,
            shift(scores.ranks, 0),
            shift(scores.top_ids, 0),
            shift(scores.top_logprobs, np.nan),
            self.tokenizer.token_text,
        )


def _as_ids(value: Any) -> list[int]:
    if isinstance(value, np.ndarray) or hasattr(value, "tolist"):
        value = value.tolist()
    if not isinstance(value, Sequence | Iterable) or isinstance(value, str | bytes):
        raise InvalidArgument(f"the prompt is {value!r}; allowed: text, or a list of token ids.")
    ids = list(value)
    for token in ids:
        if not isinstance(token, int) or isinstance(token, bool):
            raise InvalidArgument(f"the prompt has the token id {token!r}; allowed: integers.")
    return ids


def _as_array(ids: list[int]) -> np.ndarray:
    """int32 array of ids; what int32 can't hold becomes -1, which the engine refuses as outside the vocabulary."""
    return np.array([token if 0 <= token < 2**31 else -1 for token in ids], np.int32)


def _fresh_seed(seed: int, number: int) -> int:
    """64-bit seed of an unseeded request: any two requests of an engine, and of differently seeded engines, differ."""
    return int(np.random.SeedSequence([seed, number]).generate_state(1, np.uint64)[0])
