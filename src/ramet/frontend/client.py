"""From people's prompts to the engine's requests, and from its events to answers. In-process: no queue in between."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Container, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from numbers import Integral
from typing import Any, Protocol

import numpy as np

from ramet.engine.group import Event, GroupEvent, GroupRequest, SampleEvent, SampleLog
from ramet.errors import InvalidArgument, shown
from ramet.frontend.detokenizer import IncrementalDetokenizer
from ramet.frontend.structured import Grammars, MakeMatcher
from ramet.frontend.tokenizer import Tokenizer
from ramet.outputs import CompletionOutput, RequestOutput, SampleIds, TokenLogprobs
from ramet.sampling.stops import StopStrings
from ramet.sampling_params import RequestOutputKind, SamplingParams
from ramet.structured_outputs import StructuredOutputsParams

_OWN_IDS = "request-"
"""With this begin the ids of requests that their caller gave none."""

_NO_LISTS = str | bytes | bytearray | memoryview | Mapping | Set
"""Can be iterated over, but are no lists of ids."""

Prompt = str | Sequence[int] | Mapping[str, Any]


GrammarSource = Callable[[StructuredOutputsParams, Sequence[int]], "MakeMatcher | None"]


class EngineLike(Protocol):
    """What the client needs of an engine: the engine itself, or one that speaks for it from elsewhere."""

    @property
    def max_model_len(self) -> int: ...

    @property
    def vocab_size(self) -> int: ...

    def check(self, request: GroupRequest) -> None: ...

    def add(self, request: GroupRequest) -> None: ...

    def abort(self, request_id: str, index: int | None = None) -> None: ...

    def step(self) -> list[Event]: ...

    def collect(self) -> list[Event]: ...


@dataclass
class _Open:
    """A request under way: its answer so far, and the text state of its streaming samples."""

    output: RequestOutput
    params: SamplingParams
    tokens: list[int]  # of each sample so far
    texts: list[str]
    detokenizers: dict[int, IncrementalDetokenizer] = field(default_factory=dict)
    # Where answers are deltas, what of each sample the caller has seen: tokens and characters.
    seen_tokens: list[int] = field(default_factory=list)
    seen_chars: list[int] = field(default_factory=list)

    def begin_news(self) -> None:
        """The caller has taken the last news: it is no news any more."""
        if self.output.is_delta:
            self.seen_tokens, self.seen_chars = list(self.tokens), [len(text) for text in self.texts]
            for sample in self.output.outputs:
                sample.text, sample.token_ids, sample.logprobs = "", [], None


class Client:
    """Talks to an engine in words: tokenizes, follows stop strings, detokenizes.

    Parameters
    ----------
    engine : EngineLike
    tokenizer : Tokenizer
    eos_token_ids : tuple of int
        Ids that end a sample unless ``ignore_eos``.
    seed : int
        Requests without a seed draw theirs from (this seed, a counter).
    grammars : callable, optional
        From structured outputs and stop ids to what makes the matchers; compiles them here by default.
    """

    def __init__(
        self,
        engine: EngineLike,
        tokenizer: Tokenizer,
        *,
        eos_token_ids: tuple[int, ...],
        seed: int,
        grammars: GrammarSource | None = None,
    ) -> None:
        self.engine, self.tokenizer, self.eos_token_ids = engine, tokenizer, eos_token_ids
        self._grammars = grammars or Grammars(tokenizer, engine.vocab_size, eos_token_ids)
        self._seed = seed % 2**64
        self._counter = itertools.count()
        self._open: dict[str, _Open] = {}
        self._news: dict[str, RequestOutput] = {}  # answers whose news nobody has taken

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
                keys = sorted(map(str, prompt))
                raise InvalidArgument(
                    f"the prompt has the keys {keys}; allowed: 'prompt' (text) or 'prompt_token_ids' (ids)."
                )
            text, ids = prompt.get("prompt"), prompt.get("prompt_token_ids")
            if ids is None:
                return self.tokenize(text)  # type: ignore[arg-type]
            if text is not None and not isinstance(text, str):
                raise InvalidArgument(
                    f"the prompt is {shown(text)} besides its token ids; allowed: None, or their text."
                )
            return text, _as_ids(ids)
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
        first_k: int | None = None,
    ) -> tuple[GroupRequest, RequestOutput]:
        """Turn a prompt into a checked request and its empty answer, without submitting it.

        Parameters
        ----------
        prompt : Prompt
        params : SamplingParams
        request_id : str, optional
            Not one that is in use, nor one that begins like those that are given here.
        stream : bool, default False
            Whether the answer has news at every step.
        first_sample_id : int, default 0
            Of the samples' keys.
        seed : int, optional
            Goes before that of the parameters.
        first_k : int, optional
            End the request when so many of its samples have ended by themselves; the others are aborted.

        Raises
        ------
        InvalidArgument
            It could never be served.
        """
        if request_id is not None and (not request_id or request_id.startswith(_OWN_IDS)):
            raise InvalidArgument(
                f"request_id is {request_id!r}; allowed: None, or a name that does not begin with {_OWN_IDS!r}, as the "
                "names do that requests get by themselves."
            )
        if first_k is not None and not 1 <= first_k <= params.n:
            raise InvalidArgument(f"first_k is {first_k}; allowed: None, or 1 to n ({params.n}).")
        text, ids = self.tokenize(prompt)
        number = next(self._counter)
        if seed is None:
            seed = params.seed % 2**64 if params.seed is not None else _fresh_seed(self._seed, number)
        room = self.engine.max_model_len - len(ids)
        stops = () if params.ignore_eos else self.eos_token_ids
        stop_ids = tuple(dict.fromkeys((*stops, *params.stop_token_ids)))
        request = GroupRequest(
            request_id=f"{_OWN_IDS}{number}" if request_id is None else request_id,
            prompt_token_ids=_as_array(ids),
            params=params,
            max_tokens=max(room, 1) if params.max_tokens is None else params.max_tokens,
            seed=seed,
            stop_token_ids=stop_ids,
            first_sample_id=first_sample_id,
            bad_words_ids=self.tokenizer.bad_words_ids(params.bad_words) if params.bad_words else [],
            watch=self._watcher_factory(params) if params.stop else None,
            streams=stream and params.output_kind is not RequestOutputKind.FINAL_ONLY,
            grammar=None if params.structured_outputs is None else self._grammars(params.structured_outputs, stop_ids),
            first_k=first_k,
        )
        output = RequestOutput(
            request_id=request.request_id,
            prompt=text,
            prompt_token_ids=ids,
            outputs=[CompletionOutput(k) for k in range(params.n)],
            sampling_params=params,
            seed=seed,
            is_delta=request.streams and params.output_kind is RequestOutputKind.DELTA,
            sample_ids=SampleIds(first_sample_id + params.n),
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
        n = request.params.n
        self._open[request.request_id] = _Open(output, request.params, [0] * n, [""] * n)

    def abort(self, request_id: str, index: int | None = None) -> None:
        """End a request or one of its samples; its answer comes with the next step."""
        self.engine.abort(request_id, index)

    def take_in(self, events: list[Event]) -> None:
        """Take events that came without a step; what they tell waits to be asked for with :meth:`take`."""
        self._take_in(events)

    def take(self, request_ids: Container[str]) -> list[RequestOutput]:
        """Return the answers of some requests that have news already; no step is made."""
        return [self._news.pop(name) for name in list(self._news) if name in request_ids]

    def peek(self, request_id: str) -> RequestOutput | None:
        """Return the answer of a request if it has news; they stay untaken."""
        return self._news.get(request_id)

    def step(self) -> list[RequestOutput]:
        """One step of the engine; returns the answers that have news (all of them, if they stream)."""
        self._take_in(self.engine.step())
        news, self._news = self._news, {}
        return list(news.values())

    def news(self, request_ids: Container[str]) -> list[RequestOutput]:
        """Return the answers of some requests that have news, after a step of the engine if none of them has any.

        What the step brings for others is kept until they are asked for.
        """
        if not any(name in request_ids for name in self._news):
            self._take_in(self.engine.step())
        return self.take(request_ids)

    def expects(self, request_id: str) -> bool:
        """Whether there is or will be news of a request."""
        return request_id in self._open or request_id in self._news

    def discard(self, request_ids: Iterable[str]) -> None:
        """End requests whose answers nobody wants any more. Computes nothing, so it also works after an error."""
        names = list(request_ids)
        for name in names:
            self.engine.abort(name)
        self._take_in(self.engine.collect())
        for name in names:
            self._news.pop(name, None)

    def abort_all(self) -> None:
        """End everything at once; the answers are there without a further step."""
        for name in self._open:
            self.engine.abort(name)
        self._take_in(self.engine.collect())

    def _take_in(self, events: list[Event]) -> None:
        for event in events:
            opened = self._open[event.request_id]
            if event.request_id not in self._news:
                self._news[event.request_id] = opened.output
                opened.begin_news()
            self._apply(opened, event)
            if isinstance(event, GroupEvent):
                del self._open[event.request_id]

    def _apply(self, opened: _Open, event: Event) -> None:
        output, params = opened.output, opened.params
        if isinstance(event, GroupEvent):
            output.finished = True
            output.num_cached_tokens = event.num_cached_tokens
            if event.prompt_logprobs is not None:
                output.prompt_logprobs = self._prompt_logprobs(output.prompt_token_ids, event.prompt_logprobs)
            return
        k, log = event.index, event.log
        sample = output.outputs[k]
        new = log.token_ids[opened.tokens[k] :].tolist()
        sample.token_ids += new
        opened.tokens[k] += len(new)
        if params.detokenize:
            opened.texts[k] = self._text(opened, event, new)
            sample.text = opened.texts[k][opened.seen_chars[k] :] if output.is_delta else opened.texts[k]
        if log.logprobs is not None:
            sample.logprobs = self._logprobs(log, opened.seen_tokens[k] if output.is_delta else 0)
            sample.cumulative_logprob = float(log.logprobs.sum(dtype=np.float64))
        sample.finish_reason, sample.stop_reason = event.finish_reason, event.stop_reason

    def _text(self, opened: _Open, event: SampleEvent, new: list[int]) -> str:
        """The text of a sample with its ``new`` tokens."""
        params, index = opened.params, event.index
        if event.text is not None:
            return event.text
        # A stop token is no part of the text (unless asked for), although it is one of the tokens.
        ended_by_token = event.finish_reason == "stop" and not params.include_stop_str_in_output
        shown = new[:-1] if ended_by_token else new
        if event.finish_reason is not None and index not in opened.detokenizers:
            return opened.texts[index] + self.tokenizer.decode(shown, params.skip_special_tokens)
        if index not in opened.detokenizers:
            opened.detokenizers[index] = self.tokenizer.detokenizer(params.skip_special_tokens)
        text = opened.texts[index] + opened.detokenizers[index].push(shown)
        return text if event.finish_reason is None else text + opened.detokenizers[index].finish()

    def _logprobs(self, log: SampleLog, begin: int) -> TokenLogprobs:
        columns = [None if column is None else column[begin:] for column in log]
        token_ids, values, ranks, top_ids, top_values = columns
        assert token_ids is not None and values is not None
        return TokenLogprobs(token_ids, values, ranks, top_ids, top_values, self.tokenizer.token_text)

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
    if hasattr(value, "tolist") and not isinstance(value, memoryview):  # arrays and tensors
        value = value.tolist()
    if not isinstance(value, Iterable) or isinstance(value, _NO_LISTS):
        raise InvalidArgument(f"the prompt is {shown(value)}; allowed: text, or a list of token ids.")
    ids = list(value)
    for token in ids:
        if not isinstance(token, Integral) or isinstance(token, bool):
            raise InvalidArgument(f"the prompt has the token id {shown(token)}; allowed: integers.")
    return [int(token) for token in ids]  # NumPy's integers among them


def _as_array(ids: list[int]) -> np.ndarray:
    """int32 array of ids. The engine compares them with the vocabulary; what int32 can't hold is outside of any."""
    for token in (min(ids, default=0), max(ids, default=0)):
        if not -(2**31) <= token < 2**31:
            raise InvalidArgument(f"prompt token id {shown(token)} is not in the vocabulary; allowed: 32-bit integers.")
    return np.array(ids, np.int32)


def _fresh_seed(seed: int, number: int) -> int:
    """64-bit seed of an unseeded request: any two requests of an engine, and of differently seeded engines, differ."""
    return int(np.random.SeedSequence([seed, number]).generate_state(1, np.uint64)[0])
