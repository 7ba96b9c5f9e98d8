"""Text from token ids, at once or bit by bit, never with half a character."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Iterable
from typing import Protocol

import tokenizers
from tokenizers import decoders


class TextStream(Protocol):
    """A source of text that becomes certain as tokens arrive."""

    def push(self, ids: Iterable[int]) -> str:
        """Take tokens; return the text that is new and can no longer change."""

    def finish(self) -> str:
        """Return the rest, with U+FFFD for bytes that never became a character."""


class TokenBytes:
    """The bytes of every token of a byte-level tokenizer.

    The text of tokens is then the UTF-8 decoding of their joined bytes: decoding needs no context, a stream needs to
    hold back three bytes at most, and a token costs one look-up.

    Parameters
    ----------
    tokenizer : tokenizers.Tokenizer
        One whose decoder is ``ByteLevel``.
    """

    def __init__(self, tokenizer: tokenizers.Tokenizer) -> None:
        special = {i for i, token in tokenizer.get_added_tokens_decoder().items() if token.special}
        byte_of = {char: byte for byte, char in enumerate(_byte_alphabet())}
        self.all = {i: _token_bytes(text, byte_of) for text, i in tokenizer.get_vocab(with_added_tokens=True).items()}
        self.plain = {i: b"" if i in special else raw for i, raw in self.all.items()}

    def decode(self, ids: Iterable[int], skip_special_tokens: bool) -> str:
        """Return the text of a whole sequence; ids outside the vocabulary stand for nothing."""
        table = self.plain if skip_special_tokens else self.all
        return b"".join([table.get(i, b"") for i in ids]).decode("utf-8", "replace")

    def stream(self, skip_special_tokens: bool) -> TextStream:
        """Return a new stream."""
        return _ByteStream(self.plain if skip_special_tokens else self.all)


class _ByteStream:
    """Decodes the bytes of tokens as UTF-8; Python's decoder keeps what may still become a character."""

    def __init__(self, table: dict[int, bytes]) -> None:
        self._table = table
        self._decode = codecs.getincrementaldecoder("utf-8")("replace").decode

    def push(self, ids: Iterable[int]) -> str:
        table = self._table
        return self._decode(b"".join([table.get(i, b"") for i in ids]))

    def finish(self) -> str:
        return self._decode(b"", True)


class WindowStream:
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

    def push(self, ids: Iterable[int]) -> str:
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


class IncrementalDetokenizer:
    """Turns the tokens of one sample into text while they arrive.

    What it returned never changes, holds no half character, and at the end is equal to decoding all tokens at once.

    Parameters
    ----------
    stream : TextStream
        From :meth:`ramet.frontend.tokenizer.Tokenizer.stream`.

    Examples
    --------
    >>> from tokenizers import Tokenizer, decoders, models
    >>> backend = Tokenizer(models.BPE(vocab={"Ã": 0, "©": 1}, merges=[]))
    >>> backend.decoder = decoders.ByteLevel()
    >>> detokenizer = IncrementalDetokenizer(TokenBytes(backend).stream(skip_special_tokens=True))
    >>> detokenizer.push([0]), detokenizer.push([1]), detokenizer.text
    ('', 'é', 'é')
    """

    def __init__(self, stream: TextStream) -> None:
        self._stream = stream
        self._parts: list[str] = []

    @property
    def text(self) -> str:
        """Everything returned so far."""
        if len(self._parts) > 1:
            self._parts = ["".join(self._parts)]
        return self._parts[0] if self._parts else ""

    def push(self, ids: Iterable[int]) -> str:
        """Take new tokens; return the text that has become certain (often empty, never half a character)."""
        return self._keep(self._stream.push(ids))

    def finish(self) -> str:
        """Return what is left; U+FFFD stands for bytes that never became a character."""
        return self._keep(self._stream.finish())

    def _keep(self, text: str) -> str:
        if text:
            self._parts.append(text)
        return text


def is_byte_level(tokenizer: tokenizers.Tokenizer) -> bool:
    """Whether the tokens of a tokenizer are bytes written in the GPT-2 alphabet."""
    return isinstance(tokenizer.decoder, decoders.ByteLevel)


def window_stream(tokenizer: tokenizers.Tokenizer, skip_special_tokens: bool) -> TextStream:
    """Return a stream for a tokenizer that is not byte-level (SentencePiece with byte fallback)."""
    special = {i for i, token in tokenizer.get_added_tokens_decoder().items() if token.special}
    bytes_ = {i for b in range(256) if (i := tokenizer.token_to_id(f"<0x{b:02X}>")) is not None}

    def decode(ids: list[int]) -> str:
        return str(tokenizer.decode(ids, skip_special_tokens=False))

    def is_skipped(i: int) -> bool:
        return tokenizer.id_to_token(i) is None or (skip_special_tokens and i in special)

    return WindowStream(decode, is_skipped, bytes_.__contains__)


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
