"""Text from token ids, at once or bit by bit, never with half a character."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, Protocol

import tokenizers
from tokenizers import decoders


class IncrementalDetokenizer(Protocol):
    """Turns the tokens of one sample into text while they arrive; ``Tokenizer.detokenizer()`` makes one.

    What it returned never changes, holds no half character, and at the end is equal to decoding all tokens at once.
    """

    def push(self, ids: Sequence[int]) -> str:
        """Take new tokens; return the text that has become certain (often empty)."""

    def finish(self) -> str:
        """Return what is left; U+FFFD stands for bytes that never became a character."""


class TokenTable(NamedTuple):
    """What tokens stand for."""

    raw: dict[int, bytes]  #: every token
    text: dict[int, str]  #: those that are whole characters: nearly all that come, and the cheap ones


class TokenBytes:
    """The bytes of every token of a byte-level tokenizer.

    The text of tokens is then the UTF-8 decoding of their joined bytes: decoding needs no context, a detokenizer holds
    back three bytes at most, and a token costs one look-up.

    Parameters
    ----------
    tokenizer : tokenizers.Tokenizer
        One whose decoder is ``ByteLevel``.
    """

    def __init__(self, tokenizer: tokenizers.Tokenizer) -> None:
        special = {i for i, token in tokenizer.get_added_tokens_decoder().items() if token.special}
        byte_of = {char: byte for byte, char in enumerate(_byte_alphabet())}
        everything = {i: _token_bytes(text, byte_of) for text, i in tokenizer.get_vocab(with_added_tokens=True).items()}
        plain = {i: b"" if i in special else raw for i, raw in everything.items()}
        self._tables = {
            skip: TokenTable(raw, _whole_characters(raw)) for skip, raw in ((False, everything), (True, plain))
        }

    def decode(self, ids: Iterable[int], skip_special_tokens: bool) -> str:
        """Return the text of a whole sequence; ids outside the vocabulary stand for nothing."""
        raw = self._tables[skip_special_tokens].raw
        return b"".join([raw.get(i, b"") for i in ids]).decode("utf-8", "replace")

    def raw(self, token_id: int) -> bytes:
        """Return the bytes of one token, a special one's too; empty outside the vocabulary."""
        return self._tables[False].raw.get(token_id, b"")

    def detokenizer(self, skip_special_tokens: bool) -> IncrementalDetokenizer:
        """Return a detokenizer for one sample."""
        return ByteDetokenizer(self._tables[skip_special_tokens])


class ByteDetokenizer:
    """Decodes the bytes of tokens as UTF-8 and keeps those that may still become a character.

    Parameters
    ----------
    table : TokenTable

    Examples
    --------
    >>> detokenizer = ByteDetokenizer(TokenTable({0: b"a", 1: b"\\xc3", 2: b"\\xa9"}, {0: "a"}))
    >>> detokenizer.push([0]), detokenizer.push([1]), detokenizer.push([2])
    ('a', '', 'é')
    """

    def __init__(self, table: TokenTable) -> None:
        self._raw, self._text = table
        self._rest = b""

    def push(self, ids: Sequence[int]) -> str:
        if not self._rest:
            try:
                return "".join([self._text[i] for i in ids])
            except KeyError:
                pass  # a token with half a character, or an id outside the vocabulary
        data = self._rest + b"".join([self._raw.get(i, b"") for i in ids])
        text, used = codecs.utf_8_decode(data, "replace", False)
        self._rest = data[used:]
        return text

    def finish(self) -> str:
        text, self._rest = self._rest.decode("utf-8", "replace"), b""
        return text


class WindowDetokenizer:
    """Text of a tokenizer that is not byte-level: decodes a window of tokens and emits what it adds.

    A run of byte tokens (``<0xF0>``) is held back until another token ends it, for one wrong byte turns the whole run
    into U+FFFD.

    Parameters
    ----------
    decode : callable from a list of ids to str
    is_skipped, is_byte : callable from an id to bool
        Tokens that add no text, and tokens that stand for one byte.
    """

    def __init__(
        self,
        decode: Callable[[list[int]], str],
        is_skipped: Callable[[int], bool],
        is_byte: Callable[[int], bool],
    ) -> None:
        self._decode, self._is_skipped, self._is_byte = decode, is_skipped, is_byte
        self._context: list[int] = []  # what was emitted last: decoders strip a space from what comes first
        self._pending: list[int] = []

    def push(self, ids: Sequence[int]) -> str:
        self._pending += [i for i in ids if not self._is_skipped(i)]
        if not self._pending or self._is_byte(self._pending[-1]):
            return ""
        return self._emit()

    def finish(self) -> str:
        return self._emit() if self._pending else ""

    def _emit(self) -> str:
        before = self._decode(self._context)
        text = self._decode(self._context + self._pending)
        self._context, self._pending = self._pending, []
        return text[len(before) :]


def is_byte_level(tokenizer: tokenizers.Tokenizer) -> bool:
    """Whether the tokens of a tokenizer are bytes written in the GPT-2 alphabet."""
    return isinstance(tokenizer.decoder, decoders.ByteLevel)


def window_detokenizer(tokenizer: tokenizers.Tokenizer, skip_special_tokens: bool) -> WindowDetokenizer:
    """Return a detokenizer for a tokenizer that is not byte-level (SentencePiece with byte fallback)."""
    special = {i for i, token in tokenizer.get_added_tokens_decoder().items() if token.special}
    bytes_ = {i for b in range(256) if (i := tokenizer.token_to_id(f"<0x{b:02X}>")) is not None}

    def decode(ids: list[int]) -> str:
        return str(tokenizer.decode(ids, skip_special_tokens=False))

    def is_skipped(i: int) -> bool:
        return tokenizer.id_to_token(i) is None or (skip_special_tokens and i in special)

    return WindowDetokenizer(decode, is_skipped, bytes_.__contains__)


def _byte_alphabet() -> list[str]:
    """The character that stands for each byte in byte-level vocabularies: itself where printable, else from U+0100."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(b) if b in printable else chr(next(others)) for b in range(256)]


def _token_bytes(text: str, byte_of: dict[str, int]) -> bytes:
    """A token with any character outside the alphabet (an added token) stands for its own UTF-8."""
    try:
        return bytes([byte_of[char] for char in text])
    except KeyError:
        return text.encode()


def _whole_characters(table: dict[int, bytes]) -> dict[int, str]:
    """The tokens whose bytes are valid UTF-8 by themselves."""
    text = {}
    for i, raw in table.items():
        try:
            text[i] = raw.decode()
        except UnicodeDecodeError:
            continue
    return text
