"""Stop strings: exact over token and chunk boundaries, nothing sent that may be a part of one."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ramet.sampling.stops import StopMatch, StopStrings, TextWatcher


class Pieces:
    """A text source whose token i is the i-th piece; ``rest`` comes at the end."""

    def __init__(self, pieces: Sequence[str], rest: str = "") -> None:
        self.pieces, self.rest = pieces, rest

    def push(self, ids: Sequence[int]) -> str:
        return "".join(self.pieces[i] for i in ids)

    def finish(self) -> str:
        return self.rest


def first_completed(text: str, stops: Sequence[str], after: int = 0) -> tuple[int, str] | None:
    """Read character by character: end and name of the first stop completed behind ``after``."""
    for end in range(after + 1, len(text) + 1):
        for stop in stops:
            if text[:end].endswith(stop):
                return end, stop
    return None


texts = st.text("ab\n", max_size=6)


@settings(max_examples=400, deadline=None)
@given(
    pieces=st.lists(texts, max_size=12),
    rest=texts,
    stops=st.lists(st.text("ab\n", min_size=1, max_size=4), min_size=1, max_size=4),
    include=st.booleans(),
    min_tokens=st.integers(0, 4),
    cuts=st.lists(st.integers(0, 12), max_size=5),
)
def test_the_first_completed_stop_ends_the_text_however_it_is_cut(
    pieces: list[str], rest: str, stops: list[str], include: bool, min_tokens: int, cuts: list[int]
) -> None:
    watcher: TextWatcher = StopStrings(Pieces(pieces, rest), stops, include_stop=include, min_tokens=min_tokens)
    everything = "".join(pieces) + (rest if len(pieces) > min_tokens else "")
    want = first_completed(everything, stops, after=len("".join(pieces[:min_tokens])))
    final = "".join(pieces) + rest
    if want is not None:
        final = everything[: want[0] if include else want[0] - len(want[1])]
    sent, match, used = "", None, 0
    edges = sorted({0, len(pieces), *(c for c in cuts if c < len(pieces))})
    for begin, end in pairwise(edges):
        match = watcher.push(list(range(begin, end)))
        sent += watcher.take()
        assert final.startswith(sent)
        if match is not None:
            used = begin + match.num_tokens
            break
    if match is None:
        match = watcher.finish()
        sent += watcher.take()
        used = len(pieces)
    assert (match is None) == (want is None)
    if match is not None and want is not None:
        assert match.stop == want[1]
        assert len("".join(pieces[: used - 1])) < want[0]  # the token before did not complete it
    assert sent == watcher.text == final


@pytest.mark.parametrize(
    "pieces, stops, text, match",
    [
        (["ab", "cd"], ["bc"], "a", StopMatch("bc", 2)),
        (["abcd"], ["bcd", "c"], "ab", StopMatch("c", 1)),  # completed first
        (["abc"], ["c", "bc"], "ab", StopMatch("c", 1)),  # completed together: order given
        (["abc"], ["bc", "c"], "a", StopMatch("bc", 1)),
        (["aa", "aab"], ["aab"], "aa", StopMatch("aab", 2)),
        (["x", "<|", "im", "_e", "nd", "|>y"], ["<|im_end|>"], "x", StopMatch("<|im_end|>", 6)),
        (["nothing"], ["zzz"], "nothing", None),
    ],
)
def test_examples(pieces: list[str], stops: list[str], text: str, match: StopMatch | None) -> None:
    watcher = StopStrings(Pieces(pieces), stops)
    assert watcher.push(range(len(pieces))) == match
    if match is None:
        watcher.finish()
    assert watcher.text == text


def test_a_possible_beginning_is_held_back_and_released_when_it_is_none() -> None:
    watcher = StopStrings(Pieces(["hello\n", "\n", "world\n"]), ["\n\n\n"])
    sent = []
    for token in range(3):
        assert watcher.push([token]) is None
        sent.append(watcher.take())
    assert sent == ["hello", "", "\n\nworld"]
    assert watcher.finish() is None and watcher.take() == "\n" and watcher.text == "hello\n\nworld\n"


def test_tokens_behind_a_stop_are_not_read_and_change_nothing() -> None:
    watcher = StopStrings(Pieces(["a", "STOP", "b", "c"]), ["STOP"], include_stop=True)
    assert watcher.push([0, 1, 2]) == StopMatch("STOP", 2)
    assert watcher.push([3]) is None and watcher.finish() is None
    assert watcher.take() == watcher.text == "aSTOP"


def test_text_that_the_source_held_back_can_still_complete_a_stop() -> None:
    watcher = StopStrings(Pieces(["ab"], rest="c!"), ["bc"])
    assert watcher.push([0]) is None and watcher.take() == "a"
    assert watcher.finish() == StopMatch("bc", 0) and watcher.text == "a"


def test_stops_of_the_first_tokens_do_not_count() -> None:
    watcher = StopStrings(Pieces(["x.", "y.", "z."]), ["."], min_tokens=2)
    assert watcher.push([0, 1]) is None and watcher.take() == "x.y."
    assert watcher.push([2]) == StopMatch(".", 1) and watcher.text == "x.y.z"
    resumed = StopStrings(Pieces(["z."]), ["."], min_tokens=2, num_tokens=2)
    assert resumed.push([0]) == StopMatch(".", 1)


def test_without_stops_it_only_collects() -> None:
    watcher = StopStrings(Pieces(["a", "b"], rest="c"))
    assert watcher.push([0, 1]) is None and watcher.take() == "ab"
    assert watcher.finish() is None and watcher.take() == "c" and watcher.text == "abc"
