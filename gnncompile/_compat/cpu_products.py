"""Torch's products of matrices, as C functions that generated C++ code may call in its own threads.

The functions are the C interface that AOTInductor's models use: ``torch/csrc/inductor/aoti_torch/c/shim.h``. The
library that torch was built with computes the products, on one thread where the caller is one of several.
"""

from __future__ import annotations

import ctypes
from functools import lru_cache
from pathlib import Path

import torch

_FUNCTIONS = (
    "aoti_torch_create_tensor_from_blob",
    "aoti_torch_delete_tensor_object",
    "aoti_torch_cpu_mm_out",
    "aoti_torch_cpu_addmm_out",
)


@lru_cache(maxsize=2)
def products_table(dtype: torch.dtype) -> ctypes.Array[ctypes.c_int64]:
    """Returns the addresses of the functions, and torch's code of a dtype: the C++ struct ``Products``.

    Raises:
        AttributeError: This torch lacks a function.
        OSError: Torch's library is not where it is expected.
    """
    library = ctypes.CDLL(str(_library()))
    code = getattr(library, f"aoti_torch_dtype_{str(dtype).removeprefix('torch.')}")
    code.restype = ctypes.c_int32
    addresses = [ctypes.cast(getattr(library, name), ctypes.c_void_p).value or 0 for name in _FUNCTIONS]
    return (ctypes.c_int64 * 5)(*addresses, code())


@lru_cache(maxsize=1)
def has_products() -> bool:
    """Whether this torch has the functions."""
    try:
        return all(products_table(torch.float32))
    except (AttributeError, OSError):
        return False


def _library() -> Path:
    folder = Path(torch.__file__).parent / "lib"
    found = [path for path in (folder / "libtorch_cpu.so", folder / "libtorch_cpu.dylib") if path.exists()]
    return found[0] if found else folder / "libtorch_cpu.so"
