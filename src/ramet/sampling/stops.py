"""Stop strings, exact whatever the tokens and chunks are in which the text arrives.

The text is read character by character: the first stop string that is *completed* ends it. Two that are completed by
the same character are decided by the order in which they were given. (An order by where matches begin could not be
told before later text is known, and would depend on how the text was cut into tokens.)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


class TextSource(Protocol):
    """Text that comes of tokens, such as an incremental detokenizer."""

    def push(self, ids: Sequence[int]) -> str:
        """Take tokens and return the text that they make certain, which may be empty."""
        ...

    def finish(self) -> str:
        """Return what is still held back, such as half a character."""
        ...


@dataclass(frozen=True)
class StopMatch:
    """How a text ended.

    Attributes
    ----------
    stop : str
        The stop string.
    num_tokens : int
        Tokens of the push that belong to the sample: the last of them completed the stop string. 0 from ``finish``.
    """

    stop: str
    num_tokens: int


class TextWatcher(Protocol):
    """Turns the tokens of one sample into its text and says when the text must end."""

    def push(self, token_ids: Sequence[int]) -> StopMatch | None:
        """Take the sample's next tokens; a match means that it ends, and with it this watcher."""
        ...

    def finish(self) -> StopMatch | None:
        """Take note that the sample has ended for another reason; even then the last text can hold a stop string."""
        ...

    def take(self) -> str:
        """Return the text that became certain since the last call: never a part of a stop string, nothing behind it."""
        ...

    @property
    def text(self) -> str:
        """Everything that has become certain, taken or not; the final text once the sample has ended."""
        ...


class StopStrings:
    """The :class:`TextWatcher` of stop strings. One per sample that needs it; without stop strings it only collects.

    Parameters
    ----------
    source : TextSource
    stops : sequence of str, default ()
        Non-empty.
    include_stop : bool, default False
        Leave the stop string at the end of the text.
    min_tokens : int, default 0
        Stop strings completed by the first ``min_tokens`` tokens don't count, and stay in the text.
    num_tokens : int, default 0
        Tokens that the sample has generated before, when a partial one goes on.

    Examples
    --------
    >>> class Letters:
    ...     def push(self, ids): return "".join(map(chr, ids))
    ...     def finish(self): return ""
    >>> watcher = StopStrings(Letters(), ["\\n\\n"])
    >>> watcher.push([*b"a\\n"]), watcher.take()
    (None, 'a')
    >>> watcher.push([*b"\\nb"]), watcher.text
    (StopMatch(stop='\\n\\n', num_tokens=1), 'a')
    """

    def __init__(
        self,
        source: TextSource,
        stops: Sequence[str] = (),
        *,
        include_stop: bool = False,
        min_tokens: int = 0,
        num_tokens: int = 0,
    ) -> None:
        self._source, self._stops = source, tuple(stops)
        self._include_stop, self._min_tokens, self._num_tokens = include_stop, min_tokens, num_tokens
        self._beginnings = {stop[:length] for stop in stops for length in range(1, len(stop))}
        self._longest = max((len(beginning) for beginning in self._beginnings), default=0)
        self._held = ""  # the end of the text, while it may be the beginning of a stop string
        self._certain: list[str] = []
        self._taken = 0  # pieces of `_certain`
        self._ended = False

    @property
    def text(self) -> str:
        """Everything that has become certain; the final text once the sample has ended."""
        return "".join(self._certain)

    def take(self) -> str:
        """Return the text that became certain since the last call."""
        new = "".join(self._certain[self._taken :])
        self._taken = len(self._certain)
        return new

    def push(self, token_ids: Sequence[int]) -> StopMatch | None:
        """Take the sample's next tokens; those behind a match are not looked at."""
        if self._ended:
            return None
        if not self._stops:
            self._num_tokens += len(token_ids)
            self._append(self._source.push(token_ids))
            return None
        for count, token in enumerate(token_ids, 1):  # one by one, to know which of them completes a stop string
            self._num_tokens += 1
            stop = self._read(self._source.push([token]))
            if stop is not None:
                return StopMatch(stop, count)
        return None

    def finish(self) -> StopMatch | None:
        """Release what is held back, up to a stop string that the source's last text may complete."""
        if self._ended:
            return None
        stop = self._read(self._source.finish())
        self._ended = True
        self._append(self._held)
        self._held = ""
        return None if stop is None else StopMatch(stop, 0)

    def _read(self, new: str) -> str | None:
        if not new:
            return None
        window = self._held + new
        match = self._first_match(window) if self._num_tokens > self._min_tokens else None
        if match is None:
            keep = self._beginning_at_end(window)
            self._append(window[: len(window) - keep])
            self._held = window[len(window) - keep :]
            return None
        end, stop = match
        self._append(window[: end if self._include_stop else end - len(stop)])
        self._held, self._ended = "", True
        return stop

    def _first_match(self, window: str) -> tuple[int, str] | None:
        """Return the end and the string of the first stop completed in the window's new part."""
        first: tuple[int, str] | None = None
        for stop in self._stops:
            begin = window.find(stop, max(0, len(self._held) - len(stop) + 1))
            if begin >= 0 and (first is None or begin + len(stop) < first[0]):
                first = begin + len(stop), stop
        return first

    def _beginning_at_end(self, window: str) -> int:
        """Return the length of the longest end of the window with which a stop string begins."""
        for length in range(min(self._longest, len(window)), 0, -1):
            if window[-length:] in self._beginnings:
                return length
        return 0

    def _append(self, text: str) -> None:
        if text:
            self._certain.append(text)
