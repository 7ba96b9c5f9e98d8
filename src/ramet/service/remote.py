"""The front end's side: speaks for an engine that is elsewhere, in the words of one that is here."""

from __future__ import annotations

from collections.abc import Callable

from ramet.engine.checks import check_request
from ramet.engine.group import EMPTY_LOG, Event, GroupEvent, GroupRequest, GroupTimes, SampleEvent, SampleLog
from ramet.errors import InvalidArgument
from ramet.service import messages as m


class RemoteEngine:
    """What the client takes for its engine.

    Parameters
    ----------
    send : callable
        Takes an encoded command and does not block.
    ready : Ready
        What the engine said of itself.
    """

    def __init__(self, send: Callable[[bytes], None], ready: m.Ready) -> None:
        self.max_model_len, self.vocab_size = ready.max_model_len, ready.vocab_size
        self._send = send
        # Of every open request: what is known of its samples, and their text where stop strings are watched.
        self._logs: dict[str, dict[int, SampleLog]] = {}
        self._texts: dict[str, dict[int, str]] = {}

    def check(self, request: GroupRequest) -> None:
        """Refuse a request that could never be served."""
        if request.request_id in self._logs:
            raise InvalidArgument(f"request_id {request.request_id!r} is in use; choose another.")
        check_request(request, vocab_size=self.vocab_size, max_model_len=self.max_model_len)

    def add(self, request: GroupRequest) -> None:
        """Send a request off."""
        self.check(request)
        self._logs[request.request_id], self._texts[request.request_id] = {}, {}
        self._send(
            m.encode(
                m.Submit(
                    request_id=request.request_id,
                    prompt=m.ids_to_bytes(request.prompt_token_ids),
                    params=m.pack_params(request.params),
                    seed=request.seed,
                    first_sample_id=request.first_sample_id,
                    stream=request.streams,
                    first_k=request.first_k,
                )
            )
        )

    def abort(self, request_id: str, index: int | None = None) -> None:
        """Ask for the end of a request, or of one of its samples; its news come like all others."""
        if request_id in self._logs:
            self._send(m.encode(m.Abort(request_id, index)))

    def step(self) -> list[Event]:
        """Nothing: the engine makes its steps by itself."""
        return []

    def collect(self) -> list[Event]:
        """Nothing: news come by :meth:`events`."""
        return []

    @property
    def num_open(self) -> int:
        """Requests whose end has not come yet."""
        return len(self._logs)

    def events(self, news: m.News) -> list[Event]:
        """Return news as the engine's own events."""
        return [*map(self._sample_event, news.pieces), *map(self._group_event, news.ends)]

    def forget(self, request_id: str) -> list[Event]:
        """Return the end of a request of which the engine will tell nothing."""
        if request_id not in self._logs:
            return []
        return [self._group_event(m.End(request_id, 0, None, None, None))]

    def _sample_event(self, piece: m.Piece) -> SampleEvent:
        logs, texts = self._logs[piece.request_id], self._texts[piece.request_id]
        k = piece.index
        known = logs[k] = append_to(logs.get(k, EMPTY_LOG), piece.new)
        text = None
        if piece.text is not None:
            text = texts[k] = texts.get(k, "") + piece.text
        return SampleEvent(piece.request_id, k, known, piece.finish_reason, piece.stop_reason, text)

    def _group_event(self, end: m.End) -> GroupEvent:
        del self._logs[end.request_id], self._texts[end.request_id]
        scores = None if end.prompt_logprobs is None else m.unpack_log(end.prompt_logprobs)
        times = GroupTimes(0.0, end.scheduled_after, end.first_token_after)
        return GroupEvent(end.request_id, end.num_cached_tokens, scores, times)


def append_to(log: SampleLog, new: m.Columns) -> SampleLog:
    """Return a log with the part that has come."""
    return m.append_log(log, m.unpack_log(new))
