"""Where a model lies on disk, and its JSON files. Tokenizers and weights both start from a :class:`ModelFiles`."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ramet.errors import ModelError

if TYPE_CHECKING:
    from ramet.models.gguf import GgufFile


@dataclass(frozen=True)
class ModelFiles:
    """A resolved model: either a Hugging Face folder or one GGUF file.

    Parameters
    ----------
    name : str
        As the user gave it: path, hub name or local name.
    folder : Path, optional
        Folder with ``config.json`` and ``*.safetensors``.
    gguf : Path, optional
        A ``.gguf`` file. Exactly one of ``folder`` and ``gguf`` is set.

    Examples
    --------
    >>> from ramet.models.registry import resolve
    >>> files = resolve("smollm2-135m")  # doctest: +SKIP
    >>> files.gguf_metadata["tokenizer.ggml.pre"]  # doctest: +SKIP
    'smollm'
    """

    name: str
    folder: Path | None = None
    gguf: Path | None = None

    def find(self, filename: str) -> Path | None:
        """Return the path of a file of the folder, or None (always None for GGUF)."""
        if self.folder is None:
            return None
        path = self.folder / filename
        return path if path.is_file() else None

    def read_json(self, filename: str) -> dict[str, Any] | None:
        """Return the object in a JSON file of the folder, None if there is no such file.

        Raises
        ------
        ModelError
            If the file cannot be read or does not hold a JSON object.
        """
        path = self.find(filename)
        if path is None:
            return None
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ModelError(f"{path} is not readable JSON ({error}): fetch the model again.") from None
        if not isinstance(content, dict):
            raise ModelError(f"{path} holds a JSON {type(content).__name__}, not an object: fetch the model again.")
        return content

    @cached_property
    def gguf_file(self) -> GgufFile:
        """The opened GGUF file."""
        from ramet.models.gguf import GgufFile

        if self.gguf is None:
            raise ModelError(f"{self.name} is not a GGUF file.")
        return GgufFile(self.gguf)

    @cached_property
    def config(self) -> dict[str, Any]:
        """The model's configuration with Hugging Face keys (translated for GGUF)."""
        if self.gguf is not None:
            return self.gguf_file.config
        config = self.read_json("config.json")
        if config is None:
            raise ModelError(f"{self.folder} has no config.json: it is no Hugging Face model folder.")
        return config

    @cached_property
    def generation_config(self) -> dict[str, Any]:
        """``generation_config.json``, or an empty dict."""
        return self.read_json("generation_config.json") or {}

    @cached_property
    def gguf_metadata(self) -> dict[str, Any]:
        """All key-value pairs of the GGUF file (``general.*``, ``tokenizer.*``, ...); empty for a folder."""
        return {} if self.gguf is None else self.gguf_file.metadata
