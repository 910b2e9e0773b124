"""The arguments of compiled C++ code that is called from Python.

An entry point takes one array of int64: numbers, and addresses of tensors. As bytes, made by struct, it takes a
fraction of the time of a ctypes array, which counts for small graphs.
"""

from __future__ import annotations

import struct

from torch import Tensor


def pack(*numbers: int) -> bytes:
    """Returns the arguments of an entry point."""
    return struct.pack(f"{len(numbers)}q", *numbers)


def address(tensor: Tensor | None) -> int:
    """Returns the address of a tensor's first element, or 0 for None. The caller keeps the tensor alive."""
    return 0 if tensor is None else tensor.data_ptr()
