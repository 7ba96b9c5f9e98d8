"""The few calls of the CUDA driver that run a compiled kernel: load, launch, describe a tensor for its copy engine."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import lru_cache

import torch

from ramet.errors import RametError, Unsupported

_TYPES = {torch.float16: 6, torch.float32: 7, torch.bfloat16: 9}
_MAX_SHARED = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
_PROGRAMMATIC = 6  # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION


class DriverError(RametError):
    """The CUDA driver refused a call."""


class _Attribute(ctypes.Structure):
    _fields_ = [("id", ctypes.c_int), ("pad", ctypes.c_int), ("value", ctypes.c_int), ("rest", ctypes.c_int * 15)]


class _Config(ctypes.Structure):
    _fields_ = [
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("num_attributes", ctypes.c_uint),
    ]


@lru_cache(maxsize=1)
def _driver() -> ctypes.CDLL:
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise Unsupported(f"the CUDA driver is not installed: {error}.") from None


def _check(status: int, what: str) -> None:
    if status:
        text = ctypes.c_char_p()
        _driver().cuGetErrorString(status, ctypes.byref(text))
        raise DriverError(f"{what} failed: {text.value.decode() if text.value else status}.")


def _make_current(device: int) -> None:
    """Give this thread the device's primary context, the one that torch uses, where it has none yet."""
    context = ctypes.c_void_p()
    _check(_driver().cuCtxGetCurrent(ctypes.byref(context)), "cuCtxGetCurrent")
    if not context.value:
        _check(_driver().cuDevicePrimaryCtxRetain(ctypes.byref(context), device), "cuDevicePrimaryCtxRetain")
        _check(_driver().cuCtxSetCurrent(context), "cuCtxSetCurrent")


class Module:
    """A loaded cubin.

    Parameters
    ----------
    cubin : bytes
    device : int
    """

    def __init__(self, cubin: bytes, device: int) -> None:
        self.device = device
        _make_current(device)
        self._handle = ctypes.c_void_p()
        _check(_driver().cuModuleLoadData(ctypes.byref(self._handle), cubin), "cuModuleLoadData")

    def kernel(self, name: str, threads: int, shared_bytes: int = 0) -> Kernel:
        """A kernel of the module, launched with so many threads and so much dynamic shared memory.

        Raises
        ------
        DriverError
            There is no such kernel, or the device has less shared memory.
        """
        function = ctypes.c_void_p()
        _check(_driver().cuModuleGetFunction(ctypes.byref(function), self._handle, name.encode()), name)
        if shared_bytes > 48 * 1024:
            _check(_driver().cuFuncSetAttribute(function, _MAX_SHARED, shared_bytes), f"shared memory of {name}")
        return Kernel(self, name, function, threads, shared_bytes)


class Kernel:
    """A function on the device. It keeps its module alive."""

    def __init__(self, module: Module, name: str, function: ctypes.c_void_p, threads: int, shared_bytes: int) -> None:
        self._module, self._name, self._function = module, name, function
        self._attribute = _Attribute(_PROGRAMMATIC, 0, 1)
        self._config = _Config()
        self._config.grid[:], self._config.block[:] = (1, 1, 1), (threads, 1, 1)
        self._config.shared = shared_bytes
        self._config.attributes = ctypes.pointer(self._attribute)

    def launch(self, blocks: int, arguments: Sequence[ctypes.Structure], stream: int, early: bool = False) -> None:
        """Put the kernel on a stream.

        Parameters
        ----------
        blocks : int
            At least one.
        arguments : sequence of ctypes.Structure
            The kernel's parameters; copied before the call returns.
        stream : int
            A CUDA stream handle.
        early : bool, default False
            Programmatic dependent launch: the kernel may start before the one in front of it ends, and waits itself
            (``griddepcontrol.wait``).
        """
        _make_current(self._module.device)
        pointers = (ctypes.c_void_p * len(arguments))(*(ctypes.addressof(argument) for argument in arguments))
        self._config.grid[0] = blocks
        self._config.stream = stream
        self._config.num_attributes = int(early)
        status = _driver().cuLaunchKernelEx(ctypes.byref(self._config), self._function, pointers, None)
        _check(status, f"launch of {self._name}")


class _Words(ctypes.Structure):
    _fields_ = [("words", ctypes.c_uint64 * 16)]


class _Aligned(ctypes.Structure):
    _fields_ = [("bytes", ctypes.c_uint8 * 192)]


def tensor_map(tensor: torch.Tensor, box: Sequence[int]) -> ctypes.Structure:
    """Describe a tensor for the copy engine: boxes of it arrive in shared memory in the 128-byte swizzle.

    Parameters
    ----------
    tensor : Tensor
        Any strides that are multiples of 16 bytes, the last of one element; 16-byte aligned; 2 to 5 dimensions.
    box : sequence of int
        Its size in each dimension of the tensor, in the tensor's order; the last of 128 bytes.

    Returns
    -------
    ctypes.Structure
        The 128 bytes of a ``CUtensorMap``, a kernel parameter.

    Raises
    ------
    Unsupported
        The copy engine cannot read such a tensor.
    """
    rank, size = tensor.dim(), tensor.element_size()
    strides = tuple(stride * size for stride in tensor.stride()[:-1])
    if tensor.stride(-1) != 1 or tensor.data_ptr() % 16 or any(stride % 16 for stride in strides):
        raise Unsupported(
            f"a tensor of strides {tuple(tensor.stride())} at address {tensor.data_ptr():#x}: the copy engine needs a "
            "last stride of 1, the others multiples of 16 bytes, and 16-byte alignment."
        )
    dims = (ctypes.c_uint64 * rank)(*reversed(tensor.shape))
    steps = (ctypes.c_uint64 * max(1, rank - 1))(*reversed(strides))
    boxes = (ctypes.c_uint32 * rank)(*reversed(box))
    ones = (ctypes.c_uint32 * rank)(*[1] * rank)
    # The driver wants its result 64-byte aligned, which ctypes cannot promise: write into a larger place, then copy.
    place = _Aligned()
    address = (ctypes.addressof(place) + 63) // 64 * 64
    none, swizzle_128, promote_256 = 0, 3, 3
    status = _driver().cuTensorMapEncodeTiled(
        ctypes.c_void_p(address),
        *(_TYPES[tensor.dtype], rank, ctypes.c_void_p(tensor.data_ptr()), dims, steps, boxes, ones),
        *(none, swizzle_128, promote_256, none),
    )
    if status:
        raise Unsupported(f"the driver cannot describe a tensor of shape {tuple(tensor.shape)} in boxes {tuple(box)}.")
    result = _Words()
    ctypes.memmove(ctypes.addressof(result), address, ctypes.sizeof(result))
    return result
