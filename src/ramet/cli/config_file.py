"""Reads ``--config``: a JSON or YAML file of settings named like the flags."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ramet.errors import InvalidArgument, Unsupported


def read_config(path: str) -> Mapping[str, Any]:
    """Return the settings in a file.

    Parameters
    ----------
    path : str
        Ends in ``.json``, ``.yaml`` or ``.yml``; YAML needs the package PyYAML.

    Raises
    ------
    InvalidArgument
        The file cannot be read, or holds no mapping.
    Unsupported
        A YAML file without PyYAML.

    Notes
    -----
    ``{"max-model-len": 4096, "dtype": "float32"}`` stands for ``--max-model-len 4096 --dtype float32``. Flags override
    the file.
    """
    try:
        text = Path(path).read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidArgument(f"--config {path} cannot be read: {_reason(error)}.") from None
    value = _parse_yaml(path, text) if path.endswith((".yaml", ".yml")) else _parse_json(path, text)
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise InvalidArgument(f"--config {path} holds a {type(value).__name__}; allowed: settings by name.")
    return value


def _parse_json(path: str, text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidArgument(f"--config {path} is not valid JSON: {error}.") from None


def _parse_yaml(path: str, text: str) -> Any:
    try:
        import yaml  # type: ignore[import-untyped,unused-ignore]
    except ImportError:
        raise Unsupported(
            f"--config {path} is YAML, which needs the package PyYAML: pip install pyyaml, or use JSON."
        ) from None
    try:
        return yaml.safe_load(text)
    except (yaml.YAMLError, RecursionError) as error:
        raise InvalidArgument(f"--config {path} is not valid YAML: {' '.join(str(error).split())}.") from None


def _reason(error: Exception) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or str(error)
