"""Text to token ids and back, from a Hugging Face folder or a GGUF file, through the ``tokenizers`` library."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers

from ramet.errors import InvalidArgument, ModelError, Unsupported
from ramet.frontend.chat_template import ChatTemplate, Message, choose_template
from ramet.frontend.detokenizer import IncrementalDetokenizer, TokenBytes, is_byte_level, window_detokenizer
from ramet.frontend.gguf_tokenizer import adds_bos, build_tokenizer
from ramet.models.files import ModelFiles

_SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


@dataclass
class Tokenizer:
    """A model's tokenizer; make one with :func:`load_tokenizer`.

    Attributes
    ----------
    backend : tokenizers.Tokenizer
        Does the work; its truncation and padding are off.
    prefix_ids, suffix_ids : tuple of int
        What :meth:`encode` puts around a prompt (BOS, rarely EOS).
    special_tokens : dict
        ``bos_token``, ``eos_token``, ... to their text, as chat templates use them.
    eos_token_ids : tuple of int
        Every id that ends a sample.
    chat_template : ChatTemplate or None
    source : str
        Where it came from; named in errors.
    """

    backend: tokenizers.Tokenizer
    prefix_ids: tuple[int, ...] = ()
    suffix_ids: tuple[int, ...] = ()
    special_tokens: dict[str, str] = field(default_factory=dict)
    eos_token_ids: tuple[int, ...] = ()
    chat_template: ChatTemplate | None = None
    source: str = "the model"

    @cached_property
    def vocab_size(self) -> int:
        """One more than the largest id, added tokens included; a model's logits may be wider (padding)."""
        return 1 + max(self.backend.get_vocab(with_added_tokens=True).values(), default=-1)

    @cached_property
    def bos_token_id(self) -> int | None:
        """The id of ``bos_token``, None where there is none."""
        return self._special_id("bos_token")

    @cached_property
    def special_ids(self) -> frozenset[int]:
        """Ids that ``skip_special_tokens`` leaves out."""
        return frozenset(i for i, token in self.backend.get_added_tokens_decoder().items() if token.special)

    @cached_property
    def _bytes(self) -> TokenBytes | None:
        return TokenBytes(self.backend) if is_byte_level(self.backend) else None

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Return the ids of a text.

        Parameters
        ----------
        text : str
            Special tokens written in it (``<|im_end|>``) are recognised.
        add_special_tokens : bool, default True
            Add what the model puts around a prompt (BOS), never twice.
        """
        return self.encode_batch([text], add_special_tokens)[0]

    def encode_batch(self, texts: Sequence[str], add_special_tokens: bool = True) -> list[list[int]]:
        """Return the ids of many texts, in parallel."""
        for text in texts:
            if not isinstance(text, str):
                raise InvalidArgument(f"a prompt is a {type(text).__name__}; allowed here: a string.")
        try:
            found = self.backend.encode_batch_fast(list(texts), add_special_tokens=False)
        except (UnicodeEncodeError, TypeError):  # what the library raises for a lone surrogate
            bad = next((t for t in texts if not _is_valid(t)), "")
            raise InvalidArgument(f"{bad[:40]!r} is no valid Unicode (a lone surrogate); allowed: text.") from None
        ids = [encoding.ids for encoding in found]
        return [self._wrap(one) for one in ids] if add_special_tokens else ids

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = False) -> str:
        """Return the text of ids; bytes that are no character become U+FFFD."""
        if self._bytes is not None:
            return self._bytes.decode(ids, skip_special_tokens)
        return str(self.backend.decode([int(i) for i in ids], skip_special_tokens=skip_special_tokens))

    def decode_batch(self, sequences: Iterable[Iterable[int]], skip_special_tokens: bool = False) -> list[str]:
        """Return the texts of many sequences."""
        if self._bytes is not None:
            return [self._bytes.decode(ids, skip_special_tokens) for ids in sequences]
        lists = [[int(i) for i in ids] for ids in sequences]
        return list(self.backend.decode_batch(lists, skip_special_tokens=skip_special_tokens))

    def token_text(self, token_id: int) -> str:
        """Return the text of one token by itself; half a character shows as U+FFFD."""
        return self.decode([token_id])

    def token_bytes(self, token_id: int) -> bytes | None:
        """Return the bytes a token stands for; None where the tokenizer is not byte-level, so that context decides."""
        return None if self._bytes is None else self._bytes.raw(token_id)

    def detokenizer(self, skip_special_tokens: bool = True) -> IncrementalDetokenizer:
        """Return a detokenizer for one sample."""
        if self._bytes is not None:
            return self._bytes.detokenizer(skip_special_tokens)
        return window_detokenizer(self.backend, skip_special_tokens)

    def render_chat(self, messages: Sequence[Message], add_generation_prompt: bool = True, **variables: Any) -> str:
        """Return a conversation as the text the model was trained on."""
        if self.chat_template is None:
            raise Unsupported(f"{self.source} has no chat template; give a plain prompt instead of messages.")
        return self.chat_template.render(messages, add_generation_prompt, **variables)

    def apply_chat_template(
        self, messages: Sequence[Message], add_generation_prompt: bool = True, **variables: Any
    ) -> list[int]:
        """Return a conversation as ids. The template alone decides about BOS, so there are never two.

        Parameters
        ----------
        messages : sequence of mappings
            ``{"role": "user", "content": "..."}``
        add_generation_prompt : bool, default True
            End with the opening of the assistant's turn.
        **variables
            Further variables of the template.
        """
        return self.encode(self.render_chat(messages, add_generation_prompt, **variables), add_special_tokens=False)

    def bad_words_ids(self, words: Sequence[str]) -> list[list[int]]:
        """Return the token sequences of words that must not appear, at a start and after a space."""
        sequences: list[list[int]] = []
        for word in words:
            bare = self.encode(word.lstrip(), add_special_tokens=False)
            spaced = self.encode(" " + word.lstrip(), add_special_tokens=False)
            sequences += [ids for ids in (bare, spaced) if ids and ids not in sequences]
        return sequences

    def _wrap(self, ids: list[int]) -> list[int]:
        prefix = () if tuple(ids[: len(self.prefix_ids)]) == self.prefix_ids else self.prefix_ids
        return [*prefix, *ids, *self.suffix_ids]

    def _special_id(self, name: str) -> int | None:
        text = self.special_tokens.get(name)
        return None if text is None else self.backend.token_to_id(text)


def _is_valid(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def tokenizer_from_gguf(metadata: dict[str, Any], path: Path) -> Tokenizer:
    """Build the tokenizer of a GGUF file from its metadata.

    Parameters
    ----------
    metadata : dict
        As :func:`ramet.models.gguf_metadata.read_metadata` returns it.
    path : Path
        Named in errors.

    Raises
    ------
    Unsupported
        Its kind or its pre-tokenizer is not one that can be built exactly.
    ModelError
        An entry is missing or does not fit the others.
    """
    backend = build_tokenizer(metadata, path)
    size = len(metadata["tokenizer.ggml.tokens"])
    names = ("bos", "eos", "eot", "eom", "unknown", "padding")
    found = {k: metadata.get(f"tokenizer.ggml.{k}_token_id") for k in names}
    ids = {k: i for k, i in found.items() if i is not None and 0 <= i < size}  # outside the vocabulary means none
    words = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token"}
    special = {word: text for k, word in words.items() if k in ids and (text := backend.id_to_token(ids[k]))}
    add_bos = adds_bos(metadata)
    add_eos = metadata.get("tokenizer.ggml.add_eos_token", False)
    template = metadata.get("tokenizer.chat_template")
    return Tokenizer(
        backend,
        prefix_ids=(ids["bos"],) if add_bos and "bos" in ids else (),
        suffix_ids=(ids["eos"],) if add_eos and "eos" in ids else (),
        special_tokens=special,
        eos_token_ids=tuple(dict.fromkeys(ids[k] for k in ("eos", "eot", "eom") if k in ids)),
        chat_template=None if template is None else ChatTemplate(choose_template(template), special),
        source=str(path),
    )


def tokenizer_from_folder(folder: str | Path) -> Tokenizer:
    """Load the tokenizer of a Hugging Face folder (``tokenizer.json`` and its neighbours).

    Raises
    ------
    ModelError
        A file is missing or damaged.
    """
    folder = Path(folder)
    file = folder / "tokenizer.json"
    if not file.is_file():
        raise ModelError(f"{folder} has no tokenizer.json; give one: tokenizer='folder or hub name'.")
    try:
        backend = tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises a bare Exception for damaged files
        raise ModelError(f"{file} cannot be read: {error}.") from None
    backend.no_truncation()  # some files ship with a limit from training, which would cut prompts silently
    backend.no_padding()
    config = _read_json(folder / "tokenizer_config.json")
    special = _special_texts(config, _read_json(folder / "special_tokens_map.json"))
    prefix, suffix = _surroundings(backend, config, special)
    template = _template_source(folder, config)
    return Tokenizer(
        backend,
        prefix_ids=prefix,
        suffix_ids=suffix,
        special_tokens=special,
        eos_token_ids=_eos_ids(backend, special, _read_json(folder / "generation_config.json")),
        chat_template=None if template is None else ChatTemplate(template, special),
        source=str(folder),
    )


def load_tokenizer(files: ModelFiles | str | Path) -> Tokenizer:
    """Return the tokenizer of a model.

    Parameters
    ----------
    files : ModelFiles, str or Path
        What ``ramet.models.registry.resolve`` found, or a folder or a ``.gguf`` file.
    """
    if not isinstance(files, ModelFiles):
        path = Path(files)
        files = ModelFiles(str(files), **({"gguf": path} if path.suffix == ".gguf" else {"folder": path}))
    if files.gguf is not None:
        return tokenizer_from_gguf(files.gguf_metadata, files.gguf)
    if files.folder is None:
        raise ModelError(f"{files.name} names neither a folder nor a GGUF file.")
    return tokenizer_from_folder(files.folder)


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} cannot be read: {error}.") from None
    if not isinstance(value, dict):
        raise ModelError(f"{path} holds a {type(value).__name__}; expected: an object.")
    return value


def _special_texts(*sources: Mapping[str, Any]) -> dict[str, str]:
    """The special tokens' text, from the first file that has it; an entry is a string or an object."""
    texts: dict[str, str] = {}
    for source in sources:
        for name in _SPECIAL_NAMES:
            entry = source.get(name)
            text = entry.get("content") if isinstance(entry, Mapping) else entry
            if isinstance(text, str):
                texts.setdefault(name, text)
    return texts


def _surroundings(
    backend: tokenizers.Tokenizer, config: Mapping[str, Any], special: Mapping[str, str]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """What goes before and behind a prompt: an explicit flag of the configuration, else the post-processor."""
    bare = backend.encode("a", add_special_tokens=False).ids
    full = backend.encode("a", add_special_tokens=True).ids
    start = next((k for k in range(len(full)) if full[k : k + len(bare)] == bare), 0)
    prefix, suffix = tuple(full[:start]), tuple(full[start + len(bare) :])
    for flag, token in (("add_bos_token", "bos_token"), ("add_eos_token", "eos_token")):
        wanted = config.get(flag)
        if wanted is None:
            continue
        i = backend.token_to_id(special[token]) if token in special else None
        ids = (i,) if wanted and i is not None else ()
        prefix, suffix = (ids, suffix) if flag == "add_bos_token" else (prefix, ids)
    return prefix, suffix


def _eos_ids(
    backend: tokenizers.Tokenizer, special: Mapping[str, str], generation: Mapping[str, Any]
) -> tuple[int, ...]:
    named = generation.get("eos_token_id")
    ids = [*named] if isinstance(named, list) else [named]
    ids.append(backend.token_to_id(special["eos_token"]) if "eos_token" in special else None)
    return tuple(dict.fromkeys(i for i in ids if isinstance(i, int)))


def _template_source(folder: Path, config: Mapping[str, Any]) -> str | None:
    file = folder / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    entry = config.get("chat_template")
    return None if entry is None else choose_template(entry)
