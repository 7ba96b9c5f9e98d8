"""Reads the key-value header of a GGUF file, and nothing else.

The ``gguf`` package makes a NumPy view per array element, which takes seconds for a vocabulary and its merges; one
pass over a memory map takes a tenth of one. Tensors are the model loader's business.
"""

from __future__ import annotations

import mmap
import struct
from pathlib import Path
from typing import Any

from ramet.errors import ModelError, Unsupported

_SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
_STRING, _ARRAY = 8, 9


class _Cursor:
    """Reads values from a buffer, one after the other."""

    def __init__(self, data: mmap.mmap) -> None:
        self.data, self.at = data, 0

    def unpack(self, form: str) -> Any:
        value = struct.unpack_from(form, self.data, self.at)[0]
        self.at += struct.calcsize(form)
        return value

    def string(self) -> str:
        size = self.unpack("<Q")
        raw = self.data[self.at : self.at + size]
        if len(raw) != size:
            raise ValueError("a string runs past the end of the file")
        self.at += size
        return raw.decode("utf-8", "replace")

    def array(self) -> list[Any]:
        kind, count = self.unpack("<I"), self.unpack("<Q")
        if count > len(self.data):  # an element takes a byte at least
            raise ValueError(f"an array of {count} elements runs past the end of the file")
        if kind in _SCALARS:
            form = f"<{count}{_SCALARS[kind][1]}"
            values = list(struct.unpack_from(form, self.data, self.at))
            self.at += struct.calcsize(form)
            return values
        return [self.value(kind) for _ in range(count)]

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            return self.array()
        if kind not in _SCALARS:
            raise ValueError(f"value type {kind} is unknown")
        return self.unpack(_SCALARS[kind])


def read_metadata(path: str | Path) -> dict[str, Any]:
    """Return the metadata of a GGUF file (little-endian, version 2 or 3).

    Parameters
    ----------
    path : str or Path
        The ``.gguf`` file.

    Returns
    -------
    dict
        Key to value, in file order: str, bool, int, float, or a list of them.

    Raises
    ------
    ModelError
        The file is missing, is no GGUF file, or is cut off or damaged.
    Unsupported
        Another version, or big-endian.
    """
    path = Path(path)
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            if data[:4] != b"GGUF":
                raise ModelError(f"{path} is not a GGUF file (it does not start with 'GGUF'): fetch it again.")
            return _parse(_Cursor(data), path)
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror or error}.") from None
    except (ValueError, struct.error, RecursionError) as error:
        raise ModelError(f"{path} is damaged ({error}): fetch it again.") from None


def _parse(cursor: _Cursor, path: Path) -> dict[str, Any]:
    cursor.at = 4
    version = cursor.unpack("<I")
    if version not in (2, 3):
        raise Unsupported(f"{path} has GGUF version {version}; versions 2 and 3 (little-endian) are read.")
    cursor.unpack("<Q")  # number of tensors
    count = cursor.unpack("<Q")
    metadata = {}
    for _ in range(count):
        key = cursor.string()
        metadata[key] = cursor.value(cursor.unpack("<I"))
    return metadata
