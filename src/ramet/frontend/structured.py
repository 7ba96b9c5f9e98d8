"""Grammars through xgrammar: checks what was asked for, compiles it for a tokenizer, makes matchers."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ramet.errors import InvalidArgument, Unsupported
from ramet.frontend.tokenizer import Tokenizer
from ramet.sampling.structured import TokenMatcher
from ramet.structured_outputs import StructuredOutputsParams

MakeMatcher = Callable[[], TokenMatcher]

ANY_OBJECT = '{"type": "object"}'
CACHE_BYTES = 256 << 20
"""Of compiled grammars; the least recently used go first."""


def check(wanted: StructuredOutputsParams) -> None:
    """Refuse a schema, expression or grammar that cannot be followed, without a tokenizer.

    Raises
    ------
    InvalidArgument
        In the words of the parser.
    Unsupported
        The package xgrammar is not installed.
    """
    xgrammar = _xgrammar()
    kinds: dict[str, Callable[[], Any]] = {
        "json_object": lambda: xgrammar.Grammar.from_json_schema(ANY_OBJECT, strict_mode=False),
        "json": lambda: xgrammar.Grammar.from_json_schema(wanted.json, **_json_options(wanted)),
        "regex": lambda: xgrammar.Grammar.from_regex(wanted.regex),
        "choice": lambda: xgrammar.Grammar.from_ebnf(choice_grammar(wanted.choice or ())),
        "grammar": lambda: xgrammar.Grammar.from_ebnf(wanted.grammar),
    }
    _in_words(wanted, kinds[wanted.kind])


class Grammars:
    """Compiles grammars for one tokenizer. May be called from several threads.

    Parameters
    ----------
    tokenizer : Tokenizer
    vocab_size : int
        Of the model's logits, which may be wider than the tokenizer's vocabulary.
    eos_token_ids : tuple of int
        Allowed where the grammar allows the text to end, besides a request's own stop ids.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_token_ids: tuple[int, ...]) -> None:
        self._tokenizer, self._vocab_size, self._eos = tokenizer, vocab_size, eos_token_ids
        self._compiler: Any = None
        self._lock = threading.Lock()

    def __call__(self, wanted: StructuredOutputsParams, stop_token_ids: Sequence[int]) -> MakeMatcher:
        """Compile, and return what makes a matcher for each sample.

        Parameters
        ----------
        wanted : StructuredOutputsParams
        stop_token_ids : sequence of int
            Every id that ends a sample of the request.

        Raises
        ------
        InvalidArgument, Unsupported
            As :func:`check`.
        """
        xgrammar = _xgrammar()
        if not stop_token_ids:
            raise InvalidArgument(
                "structured_outputs needs a token that ends a text, and the model has no EOS: give stop_token_ids."
            )
        with self._lock:
            if self._compiler is None:
                self._compiler = self._make_compiler(xgrammar)
        compiler = self._compiler
        options = _json_options(wanted)
        kinds: dict[str, Callable[[], Any]] = {
            "json_object": lambda: compiler.compile_json_schema(ANY_OBJECT, strict_mode=False, **options),
            "json": lambda: compiler.compile_json_schema(wanted.json, **options),
            "regex": lambda: compiler.compile_regex(wanted.regex),
            "choice": lambda: compiler.compile_grammar(choice_grammar(wanted.choice or ())),
            "grammar": lambda: compiler.compile_grammar(wanted.grammar),
        }
        compiled = _in_words(wanted, kinds[wanted.kind])
        stops = list(dict.fromkeys(stop_token_ids))
        return lambda: _Matcher(xgrammar.GrammarMatcher(compiled, override_stop_tokens=stops))

    def _make_compiler(self, xgrammar: Any) -> Any:
        tokens, is_raw = _vocabulary(self._tokenizer, self._vocab_size)
        kind = xgrammar.VocabType.RAW if is_raw else xgrammar.VocabType.BYTE_FALLBACK
        info = xgrammar.TokenizerInfo(tokens, kind, vocab_size=self._vocab_size, stop_token_ids=list(self._eos))
        # One thread: compiling runs beside the engine's steps, and the steps have precedence.
        return xgrammar.GrammarCompiler(info, max_threads=1, cache_limit_bytes=CACHE_BYTES)


class _Matcher:
    """A matcher of xgrammar as the sampler knows it."""

    def __init__(self, matcher: Any) -> None:
        self._matcher = matcher

    def fill(self, bits: np.ndarray, row: int) -> None:
        if not self._matcher.fill_next_token_bitmask(bits, row):
            bits[row] = -1  # nothing is forbidden, and the library leaves the row as it was

    def accept(self, token: int) -> bool:
        return bool(self._matcher.accept_token(token))


def choice_grammar(choices: Sequence[str]) -> str:
    r"""Return the EBNF of a text that is one of some strings.

    Examples
    --------
    >>> choice_grammar(["yes", 'say "no"'])
    'root ::= "yes" | "say \\"no\\""'
    """
    return "root ::= " + " | ".join(_quoted(text) for text in choices)


def _quoted(text: str) -> str:
    """A string of EBNF; what is not plain ASCII is written by its number."""
    parts = []
    for char in text:
        code = ord(char)
        if char in '"\\':
            parts.append("\\" + char)
        elif 0x20 <= code < 0x7F:
            parts.append(char)
        else:
            parts.append(f"\\U{code:08x}" if code > 0xFFFF else f"\\u{code:04x}")
    return '"' + "".join(parts) + '"'


def _json_options(wanted: StructuredOutputsParams) -> dict[str, Any]:
    return {"any_whitespace": not wanted.disable_any_whitespace}


def _vocabulary(tokenizer: Tokenizer, vocab_size: int) -> tuple[list[bytes] | list[str], bool]:
    """Every token by its id, and whether as bytes; special tokens are empty, since they are no text."""
    if tokenizer.token_bytes(0) is not None:
        special = tokenizer.special_ids
        return [b"" if i in special else tokenizer.token_bytes(i) or b"" for i in range(vocab_size)], True
    texts = [""] * vocab_size
    for text, i in tokenizer.backend.get_vocab(with_added_tokens=True).items():
        if i < vocab_size and i not in tokenizer.special_ids:
            texts[i] = text
    return texts, False


def _xgrammar() -> Any:
    try:
        import xgrammar
    except ImportError:
        raise Unsupported(
            "structured_outputs needs the package xgrammar: pip install 'ramet[structured]', or leave it None."
        ) from None
    return xgrammar


_ORIGIN = re.compile(r"^\[[\d:]+\] \S+:\d+: ")  # time of day and a source file: neither belongs into an answer


def _in_words(wanted: StructuredOutputsParams, work: Callable[[], Any]) -> Any:
    """Run the library; what it raises becomes one line."""
    try:
        return work()
    except UnicodeEncodeError:
        reason = "it is not valid Unicode (a lone surrogate)"
    except (RuntimeError, ValueError, TypeError) as error:
        reason = " ".join(_ORIGIN.sub("", str(error)).split()).rstrip(".")
    raise InvalidArgument(f"structured_outputs.{wanted.kind} cannot be used: {reason}.")
