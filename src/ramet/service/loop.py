"""The engine's side: takes commands, makes steps, tells the news."""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import zmq

from ramet.engine.group import Event, GroupEvent, GroupRequest, SampleEvent
from ramet.engine.snapshot import snapshot
from ramet.errors import InvalidArgument, RametError, shown
from ramet.frontend.build import Built
from ramet.service import messages as m
from ramet.service.histogram import Histogram

log = logging.getLogger(__name__)

PAUSE_MODES = ("abort", "wait", "keep")
STEP_TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
"""Bounds of the histogram of tokens per step."""

_COMPILE_POLL = 5
"""Milliseconds between looks at grammars that are being compiled, while nothing else is to do."""


@dataclass
class _Told:
    """How much of a request's samples the front end knows: tokens and characters by index."""

    tokens: dict[int, int] = field(default_factory=dict)
    chars: dict[int, int] = field(default_factory=dict)


class EngineLoop:
    """Runs an engine for a front end at the other end of a socket.

    Commands that have arrived are all taken before a step, so that prompts that come together are planned together.

    Parameters
    ----------
    built : Built
    socket : zmq.Socket
        A connected PAIR socket.
    """

    def __init__(self, built: Built, socket: zmq.Socket[bytes]) -> None:
        self.engine, self._client, self._socket = built.engine, built.client, socket
        self._built = built
        self._told: dict[str, _Told] = {}
        self._paused = self._draining = self._stopped = False
        self._held: dict[str, m.Submit] = {}  # what came while paused
        self._drained: list[int] = []  # calls that are answered when nothing runs any more
        self._compiling: dict[str, Future[GroupRequest]] = {}
        self._compiler: ThreadPoolExecutor | None = None
        self._step_tokens = Histogram(STEP_TOKENS)

    def run(self) -> None:
        """Serve until told to stop.

        Raises
        ------
        Exception
            Whatever a step raises; the front end has been told.
        """
        self._tell_ready()
        try:
            while not self._stopped:
                self._take_commands()
                self._take_compiled()
                if self._may_step:
                    self._step()
                self._settle_pause()
        except Exception as error:
            self._send(m.Failed(type(error).__name__, " ".join(str(error).split())))
            raise
        finally:
            if self._compiler is not None:
                self._compiler.shutdown(wait=False, cancel_futures=True)

    # ---- commands ----------------------------------------------------------------------------------------------

    @property
    def _may_step(self) -> bool:
        return self.engine.has_unfinished and not self._paused

    def _take_commands(self) -> None:
        """Take all that have arrived; wait for one when there is nothing else to do."""
        patience = 0 if self._may_step else _COMPILE_POLL if self._compiling else None
        if not self._socket.poll(patience):
            return
        while not self._stopped:
            try:
                data = self._socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._take(m.decode_command(data))

    def _take(self, command: m.Command) -> None:
        if isinstance(command, m.Submit):
            if self._paused or self._draining:
                self._held[command.request_id] = command
            else:
                self._submit(command)
        elif isinstance(command, m.Abort):
            self._abort(command.request_id, command.index)
        elif isinstance(command, m.Call):
            self._answer(command)
        else:
            self._stopped = True

    def _submit(self, command: m.Submit) -> None:
        if "structured_outputs" in command.params:
            # A grammar may take seconds to compile; the steps of others go on meanwhile.
            self._compiler = self._compiler or ThreadPoolExecutor(1, "ramet-grammars")
            self._compiling[command.request_id] = self._compiler.submit(self._request, command)
            return
        self._admit(command.request_id, lambda: self._request(command))

    def _request(self, command: m.Submit) -> GroupRequest:
        request, _ = self._client.request(
            m.ids_from_bytes(command.prompt).tolist(),
            m.unpack_params(command.params, stream=command.stream),
            request_id=command.request_id,
            stream=command.stream,
            first_sample_id=command.first_sample_id,
            seed=command.seed,
            first_k=command.first_k,
        )
        return request

    def _admit(self, request_id: str, make: Callable[[], GroupRequest]) -> None:
        try:
            request = make()
            self._told[request_id] = _Told()
            self.engine.add(request)
        except RametError as error:
            self._told.pop(request_id, None)
            self._send(m.Refused(request_id, str(error)))

    def _take_compiled(self) -> None:
        for name in [name for name, future in self._compiling.items() if future.done()]:
            self._admit(name, self._compiling.pop(name).result)

    def _abort(self, request_id: str, index: int | None) -> None:
        waiting = self._held if request_id in self._held else self._compiling
        if index is None and waiting.pop(request_id, None) is not None:
            self._send(m.News([], [m.End(request_id, 0, None, None, None)]))
            return
        self.engine.abort(request_id, index)
        if self._paused:  # no step will tell
            self._tell(self.engine.collect())

    # ---- steps and news ----------------------------------------------------------------------------------------

    def _step(self) -> None:
        before = self.engine.stats.model_tokens
        events = self.engine.step()
        tokens = self.engine.stats.model_tokens - before
        if tokens:
            self._step_tokens.add(tokens)
        self._tell(events)

    def _tell(self, events: list[Event]) -> None:
        if not events:
            return
        pieces, ends = [], []
        for event in events:
            if isinstance(event, GroupEvent):
                ends.append(self._end(event))
            else:
                pieces.append(self._piece(event))
        self._send(m.News(pieces, ends))

    def _piece(self, event: SampleEvent) -> m.Piece:
        told, k = self._told[event.request_id], event.index
        begin = told.tokens.get(k, 0)
        told.tokens[k] = len(event.log.token_ids)
        text = event.text
        if text is not None:
            seen = told.chars.get(k, 0)
            told.chars[k], text = len(text), text[seen:]
        new = m.pack_log(event.log, begin)
        return m.Piece(event.request_id, k, new, event.finish_reason, event.stop_reason, text)

    def _end(self, event: GroupEvent) -> m.End:
        self._told.pop(event.request_id, None)
        times, scores = event.times, event.prompt_logprobs
        return m.End(
            event.request_id,
            event.num_cached_tokens,
            None if scores is None else m.pack_log(scores),
            None if times.scheduled is None else times.scheduled - times.added,
            None if times.first_token is None else times.first_token - times.added,
        )

    # ---- calls -------------------------------------------------------------------------------------------------

    def _answer(self, call: m.Call) -> None:
        calls: dict[str, Callable[..., Any]] = {
            "stats": self._stats,
            "resume": self._resume,
            "reset_prefix_cache": self.engine.reset_prefix_cache,
        }
        try:
            if call.name == "pause":
                self._pause(call.number, **call.arguments)
                return
            self._send(m.Reply(call.number, calls[call.name](**call.arguments), None))
        except (RametError, KeyError, TypeError) as error:
            self._send(m.Reply(call.number, None, f"{call.name}: {error}"))

    def _pause(self, number: int, mode: str) -> None:
        if mode not in PAUSE_MODES:
            raise InvalidArgument(f"mode is {shown(mode)}; allowed: {', '.join(PAUSE_MODES)}.")
        if mode == "wait" and not self._paused:
            self._draining = True
            self._drained.append(number)
            return
        if mode == "abort":
            for name in [*self._held, *self._compiling, *self.engine.groups]:
                self._abort(name, None)
            self._tell(self.engine.collect())
        self._paused = True
        self._send(m.Reply(number, None, None))

    def _settle_pause(self) -> None:
        """A pause that waits takes hold when nothing runs any more."""
        if self._draining and not (self.engine.has_unfinished or self._compiling):
            self._paused, self._draining = True, False
            for number in self._drained:
                self._send(m.Reply(number, None, None))
            self._drained.clear()

    def _resume(self) -> None:
        for number in self._drained:  # a pause that was waiting is off
            self._send(m.Reply(number, None, None))
        self._drained.clear()
        self._paused = self._draining = False
        held, self._held = self._held, {}
        for command in held.values():
            self._submit(command)

    def _stats(self) -> dict[str, Any]:
        found, held = snapshot(self.engine), len(self._held) + len(self._compiling)
        return {
            **found,
            "requests_waiting": found["requests_waiting"] + held,
            "requests_held": held,
            "paused": self._paused,
            "step_tokens": {"counts": self._step_tokens.counts, "total": int(self._step_tokens.total)},
        }

    def _tell_ready(self) -> None:
        engine, built = self.engine, self._built
        self._send(
            m.Ready(
                vocab_size=engine.vocab_size,
                max_model_len=engine.max_model_len,
                max_num_seqs=engine.scheduler.max_num_seqs,
                eos_token_ids=list(self._client.eos_token_ids),
                defaults=built.defaults,
                summary=built.summary,
            )
        )

    def _send(self, report: m.Report) -> None:
        self._socket.send(m.encode(report))
