"""CUDA C++ to machine code with NVRTC, which comes with torch's CUDA builds. Needs no GPU; keeps what it compiled."""

from __future__ import annotations

import ctypes
import hashlib
import os
import tempfile
from collections.abc import Mapping
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path

from ramet.errors import Unsupported

CACHE = "RAMET_CACHE"
"""Environment variable: the folder for compiled kernels; default ``~/.cache/ramet``."""


class Compiler:
    """NVRTC, loaded once.

    Attributes
    ----------
    version : tuple of (int, int)
    """

    def __init__(self) -> None:
        self._library = _load()
        major, minor = ctypes.c_int(), ctypes.c_int()
        self._library.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor))
        self.version = (major.value, minor.value)

    def compile(
        self, name: str, source: str, headers: Mapping[str, str], options: tuple[str, ...]
    ) -> tuple[bytes, str]:
        """Compile one source.

        Parameters
        ----------
        name : str
            As errors should call it.
        source : str
        headers : mapping of str to str
            What ``#include`` finds, by name.
        options : tuple of str
            With ``--gpu-architecture=sm_90a`` or another real architecture.

        Returns
        -------
        tuple of (bytes, str)
            The cubin, and what the compiler wrote.

        Raises
        ------
        Unsupported
            It does not compile; the message holds the compiler's words.
        """
        program = ctypes.c_void_p()
        names = (ctypes.c_char_p * len(headers))(*(key.encode() for key in headers))
        texts = (ctypes.c_char_p * len(headers))(*(text.encode() for text in headers.values()))
        self._check(
            self._library.nvrtcCreateProgram(
                ctypes.byref(program), source.encode(), name.encode(), len(headers), texts, names
            )
        )
        try:
            words = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
            status = self._library.nvrtcCompileProgram(program, len(options), words)
            log = self._read(program, "ProgramLog").rstrip(b"\0").decode(errors="replace")
            if status:
                raise Unsupported(f"NVRTC {self.version[0]}.{self.version[1]} cannot compile {name}:\n{log}")
            return self._read(program, "CUBIN"), log
        finally:
            self._library.nvrtcDestroyProgram(ctypes.byref(program))

    def _read(self, program: ctypes.c_void_p, what: str) -> bytes:
        size = ctypes.c_size_t()
        self._check(getattr(self._library, f"nvrtcGet{what}Size")(program, ctypes.byref(size)))
        buffer = ctypes.create_string_buffer(size.value)
        self._check(getattr(self._library, f"nvrtcGet{what}")(program, buffer))
        return buffer.raw

    def _check(self, status: int) -> None:
        if status:
            raise Unsupported(f"NVRTC failed: {self._library.nvrtcGetErrorString(status).decode()}.")


@lru_cache(maxsize=1)
def compiler() -> Compiler:
    """NVRTC of this installation.

    Raises
    ------
    Unsupported
        There is none.
    """
    return Compiler()


def compile_cached(
    name: str, source: str, headers: Mapping[str, str], defines: Mapping[str, object], architecture: str
) -> bytes:
    """The cubin of a source, compiled once per machine and kept on disk.

    Parameters
    ----------
    name, source, headers
        As in :meth:`Compiler.compile`.
    defines : mapping of str to object
        Macros.
    architecture : str
        Such as ``sm_90a``.

    Returns
    -------
    bytes

    Raises
    ------
    Unsupported
        There is no NVRTC, or it cannot compile the source.
    """
    nvrtc = compiler()
    macros = tuple(f"-D{key}={value}" for key, value in sorted(defines.items()))
    options = (f"--gpu-architecture={architecture}", "-std=c++17", *macros)
    key = hashlib.sha256(repr((nvrtc.version, options, source, sorted(headers.items()))).encode()).hexdigest()
    file = cache_folder() / f"{Path(name).stem}-{key[:32]}.cubin"
    try:
        return file.read_bytes()
    except OSError:
        cubin, _ = nvrtc.compile(name, source, headers, options)
        _keep(file, cubin)
        return cubin


def cache_folder() -> Path:
    """Where compiled kernels are kept."""
    return Path(os.environ.get(CACHE) or Path.home() / ".cache" / "ramet") / "kernels"


def _keep(file: Path, data: bytes) -> None:
    """Write a file so that no other process ever reads half of it; without a place to write, go without."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=file.parent, delete=False) as part:
            part.write(data)
        os.replace(part.name, file)
    except OSError:
        return


def _load() -> ctypes.CDLL:
    for folder in _folders():
        for library in sorted(folder.glob("libnvrtc.so.*"), reverse=True):
            for builtins in sorted(folder.glob("libnvrtc-builtins.so.*")):
                if ".alt." not in builtins.name:
                    ctypes.CDLL(str(builtins))  # NVRTC looks for it by name only: found if it is loaded already
            return _typed(ctypes.CDLL(str(library)))
    for name in ("libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so"):
        try:
            return _typed(ctypes.CDLL(name))
        except OSError:
            continue
    raise Unsupported("no NVRTC library is installed; it comes with torch's CUDA builds (package nvidia-cuda-nvrtc).")


def _folders() -> list[Path]:
    """Where NVIDIA's wheels put NVRTC."""
    spec = find_spec("nvidia")
    roots = [Path(root) for root in spec.submodule_search_locations or ()] if spec else []
    return [root / part / "lib" for root in roots for part in ("cu13", "cuda_nvrtc") if (root / part / "lib").is_dir()]


def _typed(library: ctypes.CDLL) -> ctypes.CDLL:
    library.nvrtcGetErrorString.restype = ctypes.c_char_p
    return library
