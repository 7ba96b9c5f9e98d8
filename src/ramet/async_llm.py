"""The asynchronous front door: ``AsyncLLM(model)``, its engine in a process of its own. The server stands on it."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from time import monotonic
from types import TracebackType
from typing import Any, Literal

import zmq.asyncio

from ramet import errors, logs
from ramet.config import EngineConfig
from ramet.engine.group import Event, GroupEvent
from ramet.errors import Closed, EngineDead, InvalidArgument, RametError
from ramet.frontend.build import default_sampling
from ramet.frontend.client import Client, Prompt
from ramet.frontend.structured import check as check_structured
from ramet.frontend.tokenizer import Tokenizer, load_tokenizer
from ramet.models.registry import resolve
from ramet.outputs import RequestOutput
from ramet.sampling_params import RequestOutputKind, SamplingParams
from ramet.service import messages as m
from ramet.service.host import EngineHost, ProcessHost, ThreadHost, Way
from ramet.service.remote import RemoteEngine
from ramet.service.subscription import Changed, Made, Observer, Subscription

log = logging.getLogger(__name__)

MAX_BACKLOG = 65_536
"""Tokens that may wait for the reader of one stream."""

LONG_TEXT = 8_192
"""Characters from which a text is tokenized beside the event loop."""


class AsyncLLM:
    """A model with its engine, for asyncio programs.

    Parameters
    ----------
    model : str
        Folder, ``.gguf`` file, hub name, or ``smollm2-135m``.
    in_process : bool, default False
        Let the engine run in a thread instead of a process of its own.
    max_backlog : int, default 65,536
        Tokens that may wait for a slow reader of a stream; one that falls further behind is aborted.
    **settings
        Fields of :class:`~ramet.config.EngineConfig`.

    Raises
    ------
    InvalidArgument
        A setting is wrong. What is wrong with the model is raised by :meth:`start`.

    Examples
    --------
    >>> async def tell() -> None:
    ...     async with AsyncLLM("smollm2-135m") as llm:
    ...         async for output in llm.generate("Once upon a time", SamplingParams(n=4, seed=7)):
    ...             print([sample.text for sample in output.outputs])
    """

    def __init__(
        self, model: str, *, in_process: bool = False, max_backlog: int = MAX_BACKLOG, **settings: Any
    ) -> None:
        logs.configure_unless_done()
        self.config = EngineConfig(model=model, **settings)
        self.max_backlog = max_backlog
        self.host: EngineHost = ThreadHost() if in_process else ProcessHost()
        self.observer: Observer | None = None
        self.death: EngineDead | None = None
        self._context: zmq.asyncio.Context | None = None
        self._way: Way | None = None
        self._reader: asyncio.Task[None] | None = None
        self._client: Client | None = None
        self._engine: RemoteEngine | None = None
        self._ready: asyncio.Future[m.Ready] | None = None
        self._tokenizer: Tokenizer | None = None
        self._subscriptions: dict[str, Subscription] = {}
        self._calls: dict[int, asyncio.Future[Any]] = {}
        self._numbers = itertools.count()
        self._defaults: dict[str, Any] = {}
        self._closing = False
        self._notes: set[str] = set()

    # ---- start and end -----------------------------------------------------------------------------------------

    async def start(self) -> AsyncLLM:
        """Load the model and start the engine; returns itself.

        Raises
        ------
        ModelError, Unsupported, OutOfMemory, InvalidArgument
            As the engine says it.
        EngineDead
            It ended without a word.
        """
        if self._way is not None:
            raise InvalidArgument("this AsyncLLM was started already; make a new one.")
        loop = asyncio.get_running_loop()
        self._context = zmq.asyncio.Context()
        self._way = Way(self._context)
        self._ready = loop.create_future()

        def on_exit(how: str) -> None:
            with suppress(RuntimeError):  # the event loop is closed: nobody is left to tell
                loop.call_soon_threadsafe(self._die, how)

        try:
            self.host.start(self.config, self._way.address, on_exit)
            self._reader = asyncio.create_task(self._read())
            self._tokenizer = await asyncio.to_thread(self._load_tokenizer)
            ready = await self._ready
        except BaseException:
            await self.close()
            raise
        for line in ready.summary:
            log.info("%s", line)
        self._defaults = default_sampling(ready.defaults)
        self.max_num_seqs = ready.max_num_seqs
        self._engine = RemoteEngine(self._send, ready)
        self._client = Client(
            self._engine,
            self._tokenizer,
            eos_token_ids=tuple(ready.eos_token_ids),
            seed=self.config.seed,
            grammars=lambda wanted, stops: check_structured(wanted),  # compiled where the engine is
        )
        return self

    def _load_tokenizer(self) -> Tokenizer:
        name = self.config.tokenizer or self.config.model
        revision = None if self.config.tokenizer else self.config.revision
        return load_tokenizer(resolve(name, revision, weights=False))

    async def close(self, timeout: float = 10.0) -> None:
        """End the engine and give everything back; requests under way end with :class:`~ramet.errors.Closed`."""
        if self._closing:
            return
        self._closing = True
        self._fail_all(Closed("this AsyncLLM was closed; make a new one."))
        if self._way is None:
            return
        if self.death is None:
            self._send(m.encode(m.Stop()))
        await asyncio.to_thread(self.host.close, timeout)
        if self._reader is not None:
            self._reader.cancel()
            with suppress(asyncio.CancelledError):
                await self._reader
        self._way.close()
        if self._context is not None:
            self._context.term()

    async def __aenter__(self) -> AsyncLLM:
        return await self.start()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    # ---- looking -----------------------------------------------------------------------------------------------

    @property
    def client(self) -> Client:
        """Checks prompts and parameters, and knows the tokenizer.

        Raises
        ------
        EngineDead, Closed
            No request can be served any more, or not yet.
        """
        if self.death is not None:
            raise self.death
        if self._closing or self._client is None:
            raise Closed("this AsyncLLM was closed, or not started; use 'async with AsyncLLM(...)'.")
        return self._client

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""
        return self.client.tokenizer

    @property
    def max_model_len(self) -> int:
        """Longest prompt plus output, in tokens."""
        return self.client.engine.max_model_len

    @property
    def is_ready(self) -> bool:
        """Whether requests can be served."""
        return self._client is not None and self.death is None and not self._closing

    @property
    def num_open(self) -> int:
        """Requests whose end has not come yet, those that were aborted included."""
        return 0 if self._engine is None else self._engine.num_open

    @property
    def model_defaults(self) -> dict[str, Any]:
        """Sampling parameters that the model's generation_config sets."""
        return dict(self._defaults)

    def default_sampling_params(self) -> tuple[SamplingParams, dict[str, str]]:
        """Return the parameters used when none are given, and the source of each that is not built in."""
        return SamplingParams(**self._defaults), dict.fromkeys(self._defaults, "generation_config")

    # ---- generation --------------------------------------------------------------------------------------------

    async def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        seed: int | None = None,
        first_sample_id: int = 0,
        first_k: int | None = None,
    ) -> AsyncIterator[RequestOutput]:
        """Sample one prompt; yields its answer after every step that brought news.

        Leaving the loop early, or cancelling it, aborts the request.

        Parameters
        ----------
        prompt : str, list of int, or mapping
            As :meth:`ramet.LLM.generate` takes it.
        sampling_params : SamplingParams, optional
            ``output_kind`` says what is yielded: everything so far (CUMULATIVE: the same object, updated), what is
            new (DELTA: a new object each time), or only the whole at the end (FINAL_ONLY).
        request_id : str, optional
            For :meth:`abort`.
        seed, first_sample_id : int, optional
            With the ``seed`` of an earlier answer, and the prompt's ids followed by those of its sample k, sample id k
            goes on exactly as it would have.
        first_k : int, optional
            End the request when so many of its samples have ended by themselves; the others end with "abort".

        Raises
        ------
        InvalidArgument
            It could never be served.
        EngineDead
            The engine ended meanwhile.
        """
        made = await self.prepare(
            prompt,
            sampling_params,
            request_id=request_id,
            seed=seed,
            first_sample_id=first_sample_id,
            first_k=first_k,
        )
        changes = self.follow([made])
        try:
            async for change in changes:
                yield change.output
        finally:
            await changes.aclose()

    async def prepare(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        seed: int | None = None,
        first_sample_id: int = 0,
        first_k: int | None = None,
    ) -> Made:
        """Check a request and tokenize its prompt without starting it; :meth:`follow` starts it."""
        client = self.client
        params = self.default_sampling_params()[0] if sampling_params is None else sampling_params
        if isinstance(prompt, str) and len(prompt) > LONG_TEXT:
            ids = await asyncio.to_thread(client.tokenizer.encode, prompt)
            prompt = {"prompt": prompt, "prompt_token_ids": ids}
        if params.greedy and params.n > 1:
            self._note(f"temperature is 0 and n is {params.n}: computed once, the samples are equal copies")

        def make() -> Made:
            return client.request(
                prompt,
                params,
                request_id=request_id or f"async-{next(self._numbers)}",
                stream=True,
                first_sample_id=first_sample_id,
                seed=seed,
                first_k=first_k,
            )

        # A schema may take long to read; everything else is quick.
        return make() if params.structured_outputs is None else await asyncio.to_thread(make)

    async def follow(self, made: Sequence[Made]) -> AsyncGenerator[Changed, None]:
        """Start prepared requests together, and yield the news of each until all have ended.

        Leaving the loop early aborts what is left.
        """
        client = self.client
        for request, _ in made:
            client.engine.check(request)  # all before one is started: an id may have been taken meanwhile
        subscription = Subscription(made)
        try:
            for request, output in made:
                self._subscriptions[request.request_id] = subscription
                client.submit(request, output)
                if self.observer is not None:
                    self.observer.began(output)
            while subscription.number:
                await subscription.wake.wait()
                subscription.wake.clear()
                if subscription.error is not None:
                    raise subscription.error
                subscription.backlog = 0
                for output in client.take(subscription.number):
                    number = subscription.number[output.request_id]
                    if not output.finished and output.sampling_params.output_kind is RequestOutputKind.FINAL_ONLY:
                        continue
                    if output.finished:
                        del subscription.number[output.request_id]
                        self._subscriptions.pop(output.request_id, None)
                    yield Changed(number, _own(output))
        finally:
            for name in subscription.number:
                self._subscriptions.pop(name, None)
                client.engine.abort(name)
                client.take([name])

    async def abort(self, request_id: str, index: int | None = None) -> None:
        """End a request, or one of its samples. Unknown ids are ignored: aborting may cross with finishing."""
        self.client.engine.abort(request_id, index)

    # ---- control -----------------------------------------------------------------------------------------------

    async def pause(self, mode: Literal["abort", "wait", "keep"] = "abort") -> None:
        """Make no more steps until :meth:`resume`; requests that come meanwhile wait.

        Parameters
        ----------
        mode : {"abort", "wait", "keep"}
            End the requests under way with what they have, let them finish first, or keep them as they are.
        """
        await self._call("pause", mode=mode)

    async def resume(self) -> None:
        """Go on after :meth:`pause`."""
        await self._call("resume")

    async def reset_prefix_cache(self) -> int:
        """Forget every cached prefix that is not in use; returns the pages freed."""
        return int(await self._call("reset_prefix_cache"))

    async def stats(self) -> dict[str, Any]:
        """Counters since the start and the state of the pool, as :meth:`ramet.LLM.stats` has them."""
        return dict(await self._call("stats"))

    async def _call(self, name: str, **arguments: Any) -> Any:
        _ = self.client  # raises when nobody would answer
        number, answer = next(self._numbers), asyncio.get_running_loop().create_future()
        self._calls[number] = answer
        self._send(m.encode(m.Call(number, name, arguments)))
        try:
            return await answer
        finally:
            self._calls.pop(number, None)

    # ---- what comes from the engine ----------------------------------------------------------------------------

    def _send(self, data: bytes) -> None:
        if self._way is not None and not self._way.socket.closed:
            self._way.socket.send(data)

    async def _read(self) -> None:
        assert self._way is not None
        while True:
            self._take(m.decode_report(await self._way.socket.recv()))

    def _take(self, report: m.Report) -> None:
        if isinstance(report, m.News):
            if self._engine is not None and self._client is not None:
                self._count_tokens(report.pieces)  # before the ends of the requests they belong to
                self._take_events(self._client, self._engine.events(report))
        elif isinstance(report, m.Reply):
            answer = self._calls.get(report.number)
            if answer is not None and not answer.done():
                if report.error is None:
                    answer.set_result(report.value)
                else:
                    answer.set_exception(InvalidArgument(report.error))
        elif isinstance(report, m.Refused):
            if report.request_id in self._subscriptions:
                self._subscriptions[report.request_id].fail(InvalidArgument(report.message))
            if self._engine is not None and self._client is not None:
                self._take_events(self._client, self._engine.forget(report.request_id))
        elif self._ready is not None and not self._ready.done():
            if isinstance(report, m.Ready):
                self._ready.set_result(report)
            else:
                self._ready.set_exception(_as_error(report))
        elif isinstance(report, m.Failed):
            log.error("the engine ends: %s: %s", report.kind, report.message)

    def _take_events(self, client: Client, events: list[Event]) -> None:
        client.take_in(events)
        now = monotonic()
        for event in events:
            name = event.request_id
            subscription = self._subscriptions.get(name)
            if isinstance(event, GroupEvent):
                if self.observer is not None:
                    self._tell_end(client, event, now)
                if subscription is None:
                    client.take([name])  # nobody reads it
            if subscription is not None:
                subscription.wake.set()

    def _count_tokens(self, pieces: list[m.Piece]) -> None:
        """Tell the observer of new tokens, and see to it that no reader falls too far behind."""
        now = monotonic()
        tokens: dict[str, int] = {}
        samples: dict[str, int] = {}
        ends: dict[str, int] = {}
        for piece in pieces:
            name = piece.request_id
            tokens[name] = tokens.get(name, 0) + len(piece.new.tokens) // 4
            samples[name] = samples.get(name, 0) + 1
            if piece.finish_reason is not None:
                ends[name] = ends.get(name, 0) + 1
        for name, count in tokens.items():
            if self.observer is not None:
                self.observer.news(name, count, samples[name], ends.get(name, 0), now)
            self._add_to_backlog(name, count)

    def _add_to_backlog(self, name: str, tokens: int) -> None:
        subscription = self._subscriptions.get(name)
        if subscription is None or name in subscription.unread:
            return
        subscription.backlog += tokens
        if subscription.backlog > self.max_backlog and subscription.error is None:
            log.warning("request %s is aborted: its reader is %d tokens behind", name, subscription.backlog)
            subscription.fail(Closed(f"the request was aborted: its reader fell {subscription.backlog} tokens behind."))
            for other in subscription.number:
                self.client.engine.abort(other)

    def _tell_end(self, client: Client, event: GroupEvent, now: float) -> None:
        assert self.observer is not None
        output = client.peek(event.request_id)
        if output is not None:
            self.observer.ended(output, event, now)

    def _die(self, how: str) -> None:
        """The engine has ended; unless we asked for it, nothing works from here on."""
        if self._closing or self.death is not None:
            return
        lines = self.host.last_lines
        said = "; its last log lines:\n  " + "\n  ".join(lines) if lines else ""
        log.error("the engine is dead: %s%s", how, said)
        self.death = EngineDead(f"the engine is dead: {how}{said}")
        if self._ready is not None and not self._ready.done():
            self._ready.set_exception(self.death)
        self._fail_all(self.death)

    def _fail_all(self, error: RametError) -> None:
        for subscription in set(self._subscriptions.values()):
            subscription.fail(error)
        for answer in self._calls.values():
            if not answer.done():
                answer.set_exception(error)

    def _note(self, text: str) -> None:
        kind = text.partition(":")[0][:20]
        if kind not in self._notes:
            self._notes.add(kind)
            log.warning("%s", text)


def _own(output: RequestOutput) -> RequestOutput:
    """An answer that later news don't change; a cumulative one is the same object, which grows."""
    if not output.is_delta:
        return output
    return replace(output, outputs=[replace(sample) for sample in output.outputs])


def _as_error(report: m.Failed) -> RametError:
    """A failed start as the error it was."""
    kind: Callable[[str], RametError] = getattr(errors, report.kind, EngineDead)
    return kind(report.message)
