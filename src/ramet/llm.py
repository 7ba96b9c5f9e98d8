"""The offline front door: ``LLM(model).generate(prompts, SamplingParams(n=64))``."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from numbers import Integral
from time import perf_counter
from types import TracebackType
from typing import Any

from tqdm import tqdm

from ramet import logs
from ramet.config import EngineConfig
from ramet.engine.group import GroupRequest
from ramet.engine.snapshot import snapshot
from ramet.errors import Closed, InvalidArgument, shown
from ramet.frontend.build import build, default_sampling
from ramet.frontend.client import Client, Prompt
from ramet.frontend.interrupt import interrupt_after
from ramet.outputs import RequestOutput
from ramet.sampling_params import SamplingParams

log = logging.getLogger(__name__)


class LLM:
    """A model with its engine, for offline use.

    Parameters
    ----------
    model : str
        Folder, ``.gguf`` file, hub name, or ``smollm2-135m``.
    **settings
        Fields of :class:`~ramet.config.EngineConfig`.

    Raises
    ------
    InvalidArgument, ModelError, Unsupported, OutOfMemory
        In one line: what is wrong, the value, what is allowed, how to change it.

    Examples
    --------
    >>> from ramet import LLM, SamplingParams
    >>> with LLM("smollm2-135m") as llm:  # doctest: +SKIP
    ...     out = llm.generate("Once upon a time", SamplingParams(n=4, max_tokens=8, seed=7))[0]
    >>> [sample.text for sample in out.outputs]  # doctest: +SKIP
    """

    def __init__(self, model: str, **settings: Any) -> None:
        logs.configure_unless_done()
        self.config = EngineConfig(model=model, **settings)
        built = build(self.config)
        self.engine, self.tokenizer, self.memory = built.engine, built.tokenizer, built.memory
        self._client: Client | None = built.client
        self._defaults = default_sampling(built.defaults)
        self._greedy_copies_noted = self._defaults_told = False
        for line in built.summary:
            log.info("%s", line)

    @property
    def client(self) -> Client:
        """Its engine's only client: who wants the steps one by one takes them from here.

        Raises
        ------
        Closed
            After :meth:`close`.
        """
        if self._client is None:
            raise Closed("this LLM was closed; make a new one.")
        return self._client

    # ---- generation ------------------------------------------------------------------------------------------

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Sample continuations of prompts.

        Parameters
        ----------
        prompts : str, list of int, mapping, or a list of them
            Text, token ids, ``{"prompt": text}`` or ``{"prompt_token_ids": ids}``.
        sampling_params : SamplingParams or a list of them, optional
            One for all, or one per prompt; by default the model's (:meth:`default_sampling_params`).
        use_tqdm : bool, default True
            Show a progress bar with tokens per second.

        Returns
        -------
        list of RequestOutput
            In the order of the prompts.

        Raises
        ------
        InvalidArgument
            A prompt or parameter cannot be served; nothing was started then.
        """
        outputs: dict[int, RequestOutput] = dict(self.as_completed(prompts, sampling_params, use_tqdm=use_tqdm))
        return [outputs[i] for i in sorted(outputs)]

    def as_completed(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = False,
    ) -> Iterator[tuple[int, RequestOutput]]:
        """Like :meth:`generate`, but yield (number of the prompt, answer) as soon as each is finished.

        Leaving the loop early aborts what is left.
        """
        client = self.client
        prompt_list = _as_prompts(prompts)
        params_list = self._as_params(sampling_params, len(prompt_list))
        # all are checked before one is started: bad input loses nothing
        made = []
        for i, (prompt, params) in enumerate(zip(prompt_list, params_list, strict=True)):
            try:
                made.append(client.request(prompt, params))
            except InvalidArgument as error:
                error.prompt = i if len(prompt_list) > 1 else None
                raise
        return self._run(client, made, use_tqdm)

    def chat(
        self,
        messages: Sequence[Any],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        add_generation_prompt: bool = True,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Sample answers to one conversation (a list of ``{"role", "content"}``) or a list of them."""
        if not isinstance(messages, Sequence) or isinstance(messages, str | bytes) or not len(messages):
            raise InvalidArgument(
                f"messages is {shown(messages)}; allowed: a list of {{'role': ..., 'content': ...}}, or a list of "
                "those."
            )
        conversations = [messages] if isinstance(messages[0], Mapping) else messages
        prompts = [
            {"prompt_token_ids": self.tokenizer.apply_chat_template(m, add_generation_prompt=add_generation_prompt)}
            for m in conversations
        ]
        return self.generate(prompts, sampling_params, use_tqdm=use_tqdm)

    def stream(self, prompt: Prompt, sampling_params: SamplingParams | None = None) -> Iterator[RequestOutput]:
        """Sample one prompt and yield its answer after every step that brought news (the same object, updated).

        Leaving the loop early aborts the request.
        """
        client = self.client
        (params,) = self._as_params(sampling_params, 1)
        request, output = client.request(prompt, params, stream=True)
        client.submit(request, output)
        try:
            # Steps are made by whoever waits for news; others' loops may have brought some, or the end, meanwhile.
            while client.expects(request.request_id):
                with interrupt_after():
                    changed = client.news({request.request_id})
                yield from changed
        finally:
            client.discard([request.request_id])

    def fork(
        self,
        request: RequestOutput,
        position: int,
        sampling_params: SamplingParams | None = None,
        *,
        index: int = 0,
        use_tqdm: bool = False,
    ) -> RequestOutput:
        """Grow new samples from a place in an earlier answer, reusing what is computed up to there.

        Parameters
        ----------
        request : RequestOutput
            An earlier answer; its ``sample_ids`` advance.
        position : int
            Absolute: the new samples continue the first ``position`` tokens of prompt plus sample.
        sampling_params : SamplingParams, optional
            The earlier request's by default. Without a seed of their own the new samples go on under the earlier
            request's seed with new sample ids, so they differ from all samples before.
        index : int, default 0
            Which sample to fork.

        Raises
        ------
        InvalidArgument
            ``position`` or ``index`` is outside the answer, or the answer was streamed with ``output_kind=DELTA``, so
            that it holds only the last of its tokens.
        """
        if not isinstance(request, RequestOutput):
            raise InvalidArgument(f"request is {shown(request)}; allowed: an answer of this LLM (a RequestOutput).")
        if not _is_integer(index) or not 0 <= index < len(request.outputs):
            raise InvalidArgument(f"index is {shown(index)}; allowed: 0 to {len(request.outputs) - 1}.")
        if request.is_delta:
            raise InvalidArgument(
                "the answer was streamed with output_kind=DELTA, so it holds only the last of its tokens; fork from an "
                "answer with output_kind=CUMULATIVE, or generate from the token ids that you have joined."
            )
        tokens = request.prompt_token_ids + request.outputs[index].token_ids
        if not _is_integer(position) or not 1 <= position <= len(tokens):
            raise InvalidArgument(f"position is {shown(position)}; allowed: 1 to {len(tokens)} (prompt plus sample).")
        client = self.client
        (params,) = self._as_params(request.sampling_params if sampling_params is None else sampling_params, 1)
        seed = None if sampling_params is not None and params.seed is not None else request.seed
        made, output = client.request(tokens[:position], params, first_sample_id=request.sample_ids.next, seed=seed)
        request.sample_ids.next += params.n
        output.sample_ids = request.sample_ids  # forks of forks draw from the same count
        return dict(self._run(client, [(made, output)], use_tqdm))[0]

    def _run(
        self, client: Client, made: list[tuple[GroupRequest, RequestOutput]], use_tqdm: bool
    ) -> Iterator[tuple[int, RequestOutput]]:
        number = {output.request_id: i for i, (_, output) in enumerate(made)}
        bar = tqdm(total=len(made), desc="prompts", disable=not use_tqdm, dynamic_ncols=True)
        before, started = self.engine.stats.sampled_tokens, perf_counter()
        try:
            for request, output in made:
                client.submit(request, output)
            while number:
                with interrupt_after():
                    changed = client.news(number)
                for output in changed:
                    if output.finished:
                        tokens = self.engine.stats.sampled_tokens - before
                        bar.set_postfix_str(f"{tokens / (perf_counter() - started):,.0f} tok/s", refresh=False)
                        bar.update(1)
                        yield number.pop(output.request_id), output
        finally:
            bar.close()
            if number:  # Ctrl-C, an error, or a loop that was left: nothing of these requests may stay behind
                client.discard(number)

    # ---- looking ---------------------------------------------------------------------------------------------

    def default_sampling_params(self) -> tuple[SamplingParams, dict[str, str]]:
        """Return the parameters used when none are given, and the source of each that is not built in."""
        try:
            params = SamplingParams(**self._defaults)
        except InvalidArgument as error:
            raise InvalidArgument(f"generation_config.json of {self.config.model}: {error}") from None
        return params, dict.fromkeys(self._defaults, "generation_config")

    def stats(self) -> dict[str, Any]:
        """Counters since the start, and the state of the pool; the keys are in ``docs/reference/stats.md``."""
        return snapshot(self.engine)

    def reset_prefix_cache(self) -> int:
        """Forget every cached prefix that is not in use; returns the pages freed."""
        _ = self.client  # raises after close()
        return self.engine.reset_prefix_cache()

    # ---- end -------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Give all memory back. Every further call but this one raises :class:`~ramet.errors.Closed`."""
        if self._client is not None:
            self._client.abort_all()
            self._client = None
            self.engine.runner.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _as_params(self, given: SamplingParams | Sequence[SamplingParams] | None, count: int) -> list[SamplingParams]:
        if given is None:
            given, sources = self.default_sampling_params()
            if not self._defaults_told:
                self._defaults_told = True
                told = ", ".join(f"{name}={getattr(given, name)!r} ({source})" for name, source in sources.items())
                log.info("sampling defaults: %s", f"{told}; the rest built-in" if told else "built-in")
        if isinstance(given, Mapping) or not isinstance(given, SamplingParams | Iterable):
            raise InvalidArgument(f"sampling_params is {shown(given)}; allowed: SamplingParams, or a list of them.")
        params = [given] * count if isinstance(given, SamplingParams) else list(given)
        if len(params) != count:
            raise InvalidArgument(
                f"{len(params)} sampling_params for {count} prompts; allowed: one, or one per prompt."
            )
        for p in params:
            if not isinstance(p, SamplingParams):
                raise InvalidArgument(f"sampling_params has {shown(p)}; allowed: SamplingParams.")
            if p.greedy and p.n > 1 and not self._greedy_copies_noted:
                self._greedy_copies_noted = True
                log.warning("temperature is 0 and n is %d: computed once, the samples are equal copies", p.n)
        return params


def _is_integer(value: object) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


def _as_prompts(prompts: Any) -> list[Prompt]:
    """One prompt or many: a list of integers is one."""
    if isinstance(prompts, str | bytes | bytearray | memoryview | Mapping):
        return [prompts]  # the client refuses bytes
    if hasattr(prompts, "tolist"):
        prompts = prompts.tolist()
    if not isinstance(prompts, Sequence):
        raise InvalidArgument(f"prompts is {shown(prompts)}; allowed: text, token ids, a mapping, or a list of them.")
    if len(prompts) and all(isinstance(p, Integral) for p in prompts):
        return [list(prompts)]
    if not len(prompts):
        return []
    return list(prompts)
